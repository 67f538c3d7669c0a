"""Slots out of a pool, on the model of test_flow_model: the same promises, and the pool's own.

Two connections and a rival share a budget that is too small for all that they want.  Windows grow
and shrink while messages are under way; at every frame the model checks that the peer has a receive
for it, and that no slot is used whose memory is not registered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiordma.endpoint.config import MIN_SENDS, MIN_WINDOW, ConnectionConfig
from aiordma.memory.governor import GROWTH, Growth, Member
from tests.inside.endpoint import receiver_of
from tests.inside.memory import chunks_of, squeezing

from ..conftest import run_on, settle
from ..memory.fake_memory import FakeElastic, FakeRegion
from .fabric import Wire, use_fake_regions
from .test_flow_model import EAGER, PROGRAM, SLOT, Program, check, do, finish

pytestmark = pytest.mark.slow

# Whole exchanges, which make windows grow, and a rival who makes them shrink.
MORE = st.tuples(
    st.sampled_from(["exchange", "exchange", "send only", "rival", "squeeze", "relax"]),
    st.integers(0, 1),
    st.integers(0, 50),
)


def config_of(recv_depth: int, send_depth: int, window: int, total: int) -> ConnectionConfig:
    config = ConnectionConfig(
        slot_size=SLOT, recv_depth=recv_depth, send_depth=send_depth, rendezvous_window=window,
        receive_buffer_size=300, one_sided_depth=4, shared_slots=1000,
    )  # fmt: skip
    # Two of them, the rival's one slot, and the rest of the pool.
    object.__setattr__(config, "shared_slots", 2 * config.guaranteed + 1 + total)
    return config


CONFIGS = st.builds(
    config_of, st.integers(2, 24), st.integers(1, 12), st.sampled_from([1, 2, 4]),
    st.integers(0, 40),
)  # fmt: skip


@pytest.fixture(autouse=True)
def fake_regions() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        use_fake_regions(patch)
        yield


class Rival(Member):
    """A member with one lease."""

    def __init__(self, budget: Growth, reserve: int) -> None:
        super().__init__(budget, reserve)
        lease = self.lease(GROWTH, 0)
        assert lease is not None
        self.rest = lease

    @property
    def used(self) -> int:
        """What it has."""
        return self.size

    def take(self, slots: int) -> bool:
        """Make the lease larger."""
        return self.rest.resize(self.rest.size + slots)

    def give(self, slots: int) -> None:
        """Make it smaller."""
        assert self.rest.resize(self.rest.size - slots)


class Pool:
    """A budget, the arenas of its connections, and a rival who takes what it can get."""

    def __init__(self, config: ConnectionConfig, chunk: int) -> None:
        assert config.shared_slots is not None
        self.budget = Growth(config.shared_slots)
        self.chunk = chunk
        self.arenas: list[FakeElastic] = []
        self.rival = Rival(self.budget, 1)
        self.told = 0
        self.waits = True

    def arenas_of(self, config: ConnectionConfig) -> tuple[FakeElastic, FakeElastic]:
        """What endpoint.slots does."""
        receives, sends = config.guaranteed - MIN_SENDS, MIN_SENDS
        member = Member(self.budget, receives + sends)
        assert member.lease(GROWTH, receives + sends)
        send = FakeElastic(config.send_depth, sends, self.chunk, SLOT, member)
        recv = FakeElastic(config.receives, receives, self.chunk, SLOT, member)
        self.arenas += [send, recv]
        return send, recv

    def compete(self, number: int) -> None:
        """The rival takes, waits or gives back."""
        if number % 3 == 0 and self.rival.used:
            self.rival.give(1 + number % self.rival.used)
        elif not self.rival.take(1 + number % 4):
            self.rival.want(self.again)

    def squeeze(self) -> None:
        """The rival takes all that there is, and waits for more."""
        while self.rival.take(1):
            pass
        self.rival.want(self.again)

    def relax(self) -> None:
        """The rival gives everything back."""
        self.rival.give(self.rival.used)
        self.waits = False

    def again(self) -> None:
        self.told += 1
        if self.waits:
            self.squeeze()

    def check(self) -> None:
        """What is registered is what is counted, and never more than there is."""
        budget = self.budget
        assert budget.free >= 0
        assert budget.used <= budget.total
        # A chunk counts until its last slot was handed in.
        slots = sum(arena.first for arena in self.arenas)
        slots += sum(len(chunk.slots) for arena in self.arenas for chunk in chunks_of(arena))
        assert budget.used - self.rival.used == slots
        count = budget.count(GROWTH)
        had = [max(count.sources.get(member, 0), least) for member, least in count.reserved.items()]
        assert budget.free == budget.total - sum(had)


async def exchange(
    wire: Wire, programs: list[Program], side: int, number: int, *, take: bool
) -> None:
    """Several small messages one way, at once; they arrive, and are taken and released or not."""
    one, other = programs[side], programs[1 - side]
    for _ in range(1 + number % 9):
        one.send(2 + number % 20)
        if take:
            other.recv()
    for _ in range(3):
        await settle()
        wire.settle()
    if take:
        other.release(None if number % 4 else number)


async def simulate(
    config: ConnectionConfig,
    chunk: int,
    program: list[tuple[str, int, int]],
    keeps: bool,
) -> None:
    pool = Pool(config, chunk)
    wire = Wire(config, config, pool.arenas_of)
    await wire.open()
    programs = [Program(end, name) for name, end in enumerate(wire.ends)]
    for what, side, number in program:
        if what == "run":
            await settle(number % 4)
        elif what == "rival":
            pool.compete(number)
        elif what == "squeeze":
            pool.waits = bool(side)
            pool.squeeze()
        elif what == "relax":
            pool.relax()
        elif what in ("exchange", "send only"):
            await exchange(wire, programs, side, number, take=what == "exchange")
        else:
            do(programs, wire, what, side, number)
        check(wire, programs)
        pool.check()
    pool.waits = False
    if program and program[-1][1]:  # half of the time the rival keeps what it has
        pool.rival.close()
    await settle()
    await finish(wire, programs, keeps=keeps)
    held: list[Any] = [region for arena in pool.arenas for region in arena.steps]
    for region in list(FakeRegion.regions.values()):
        assert region in held


@pytest.mark.timeout(600)  # HYPOTHESIS_PROFILE=random tries five times as many
@settings(max_examples=3 * settings().max_examples)
@given(
    CONFIGS,
    st.integers(1, 5),
    st.lists(st.one_of(PROGRAM, MORE), max_size=120),
    st.booleans(),
    st.sampled_from(["asyncio", "uvloop"]),
)
def test_a_pool_overruns_nobody_and_keeps_nobody_waiting(
    config: ConnectionConfig,
    chunk: int,
    program: list[tuple[str, int, int]],
    keeps: bool,
    loop: str,
) -> None:
    run_on(loop, simulate(config, chunk, program, keeps))


async def test_a_window_grows_under_load_and_shrinks_for_others() -> None:
    config = config_of(recv_depth=20, send_depth=20, window=1, total=60)
    pool = Pool(config, chunk=4)
    wire = Wire(config, config, pool.arenas_of)
    await wire.open()
    one, other = (Program(end, name) for name, end in enumerate(wire.ends))
    window = receiver_of(wire.ends[1]).window
    assert window.size == MIN_WINDOW

    async def both_ways(messages: int) -> None:
        for _ in range(messages):
            one.send(10)
            other.recv()
        for _ in range(messages):
            await wire.run()
            other.release()

    await both_ways(60)
    assert window.size == 20
    assert wire.links[0].slots.send.count > MIN_SENDS
    used = pool.budget.used
    # The rival takes all that is left, and still wants more.
    pool.squeeze()
    await both_ways(60)
    assert MIN_WINDOW <= window.size < 20
    assert pool.told
    assert pool.budget.used - pool.rival.used < used
    pool.check()
    await finish(wire, [one, other])


@pytest.mark.parametrize("later", [0, 1])
async def test_what_c_posts_later_leaves_as_well(later: int) -> None:
    config = config_of(recv_depth=20, send_depth=4, window=1, total=60)
    pool = Pool(config, chunk=4)
    wire = Wire(config, config, pool.arenas_of)
    await wire.open()
    one, other = (Program(end, name) for name, end in enumerate(wire.ends))
    window, link = receiver_of(wire.ends[1]).window, wire.links[1]
    recv: FakeElastic = link.slots.recv
    state = link.state

    async def message() -> None:
        one.send(10)
        other.recv()
        await wire.run()
        other.release()

    while not recv.full:
        for _ in range(window.size):
            one.send(10)
        await wire.run()
        for _ in range(len(one.sends) - len(other.recvs)):
            other.recv()
        await wire.run()
        other.release()
    assert state.facts()["chain"] == 2
    last = recv.count - 4  # slots from this one on leave first

    def posted_later() -> set[int]:
        return set(range(recv.count)) - set(link.ready)

    while state.facts()["n_back"] != later or (later and min(posted_later()) < last):
        await message()
    pool.squeeze()
    for _ in range(60):
        await message()
    assert window.size < 20
    assert not recv.some_leave, "some never left"
    pool.check()
    await finish(wire, [one, other])


async def test_slots_that_come_late_are_left_to_who_needs_them() -> None:
    config = config_of(recv_depth=20, send_depth=20, window=1, total=60)
    pool = Pool(config, chunk=4)
    wire = Wire(config, config, pool.arenas_of)
    await wire.open()
    one, other = (Program(end, name) for name, end in enumerate(wire.ends))
    window, state = receiver_of(wire.ends[1]).window, wire.links[1].state
    pool.squeeze()
    for _ in range(3):  # the peer uses up its credits, and the pool has no slots for more
        for _ in range(MIN_WINDOW):
            one.send(10)
            other.recv()
        await wire.run()
        other.release()
        await wire.run()
    assert state.unused, "the peer has credits again"
    pool.relax()
    await wire.run()
    assert window.size == MIN_WINDOW
    await finish(wire, [one, other])


async def test_a_program_that_keeps_messages_keeps_the_window_open() -> None:
    """Half of the window may be kept; it does not shrink below twice that."""
    config = config_of(recv_depth=16, send_depth=4, window=1, total=30)
    pool = Pool(config, chunk=4)
    wire = Wire(config, config, pool.arenas_of)
    await wire.open()
    one, other = (Program(end, name) for name, end in enumerate(wire.ends))
    receiver = receiver_of(wire.ends[1])
    for _ in range(5):  # the window grows when the peer has used up its credits
        for _ in range(receiver.window.size):
            one.send(10)
            other.recv()
        await wire.run()
        while other.held:
            other.release(0)
    for _ in range(80):
        one.send(10)
        other.recv()
        await wire.run()
        if len(other.held) > 7:
            other.release(0)
    assert wire.links[1].state.kept == 7
    assert receiver.window.size == 16
    pool.squeeze()
    for _ in range(40):
        one.send(10)
        other.recv()
        await wire.run()
        other.release(7)
        assert receiver.window.size // 2 >= wire.links[1].state.kept
    assert pool.rival in squeezing(pool.budget), "it has enough"
    await finish(wire, [one, other], keeps=True)


async def test_each_has_what_it_is_guaranteed_whatever_the_others_take() -> None:
    budget = Growth(30)
    greedy, modest = Rival(budget, 5), Rival(budget, 5)
    while greedy.take(1):
        pass
    assert (greedy.used, modest.used, budget.free) == (25, 0, 0)
    assert modest.take(5)
    assert not modest.take(1)
    told: list[str] = []
    modest.want(lambda: told.append("modest"))
    assert greedy.could_spare(10)
    assert not greedy.could_spare(11), "15 is its share"
    assert not modest.could_spare(1)
    greedy.give(2)
    await settle()
    assert told == ["modest"]
    assert not greedy.could_spare(1), "nobody waits any more"
    assert modest.take(2)
    with pytest.raises(OSError, match="raise shared_slots"):
        Rival(budget, 1)
    greedy.close()
    greedy.close()
    assert (budget.free, budget.members) == (23, 1)
    assert Rival(budget, 23).take(23)


async def test_who_has_more_than_its_share_gets_no_more_while_others_wait() -> None:
    budget = Growth(30)
    one, two, three = (Rival(budget, 2) for _ in range(3))
    assert one.take(14)
    assert two.take(9)
    assert budget.free == 5
    assert not three.take(8)
    three.want(lambda: None)
    assert not one.take(1), "10 is its share"
    assert two.take(1)
    assert not two.take(1)
    assert three.take(6)


async def test_the_large_and_the_small_share_a_pool() -> None:
    config = config_of(recv_depth=4, send_depth=2, window=2, total=4)
    pool = Pool(config, chunk=2)
    wire = Wire(config, config, pool.arenas_of)
    await wire.open()
    programs = [Program(end, name) for name, end in enumerate(wire.ends)]
    for n in range(12):
        for one in programs:
            one.send(EAGER + 100 if n % 3 == 0 else 10)
            one.recv()
    await asyncio.sleep(0)
    await finish(wire, programs)
