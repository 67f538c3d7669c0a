"""Flow control, proved on a model: receives are never overrun, and nobody waits for ever.

Two real connections over the fake adapter of fabric.py, which checks at every single frame that the
peer has a receive posted for it.  Hypothesis chooses the sizes, what both programs do, and in which
order the adapters deliver, acknowledge and process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiordma._core import Message
from aiordma.endpoint.config import CONTROL_SLOTS, MIN_SENDS, ConnectionConfig
from aiordma.endpoint.connection import Connection
from aiordma.errors import ConnectionEndedError, ResourceClosedError
from aiordma.memory.governor import Growth, Member
from tests.inside.endpoint import copy_up_to, exposer_of, notice_silence, receiver_of
from tests.inside.link import listeners_of

from ..conftest import run_on, settle
from ..memory.fake_memory import FakeElastic, FakeRegion
from .fabric import Wire, use_fake_regions

pytestmark = pytest.mark.slow

SLOT = 64
EAGER = SLOT - 16

CONFIGS = st.builds(
    ConnectionConfig,
    slot_size=st.just(SLOT),
    # From 16 on receives are posted several at a time.
    recv_depth=st.one_of(st.integers(1, 9), st.sampled_from([16, 21, 33])),
    send_depth=st.integers(1, 6),
    rendezvous_threshold=st.sampled_from([0, 3 * SLOT, 1 << 20]),
    rendezvous_window=st.sampled_from([1, 2, 8]),
    receive_buffer_size=st.sampled_from([100, 300, 1 << 20]),
    one_sided_depth=st.sampled_from([2, 4, 6]),  # one to three reads
    check_large=st.sampled_from([None, True]),
)
# (what, side, number).  "adapter" picks one of the possible events; the number picks which one.
PROGRAM = st.tuples(
    st.sampled_from([
        "adapter", "adapter", "adapter", "adapter", "adapter", "run", "small", "small", "large",
        "recv", "recv", "release", "release all", "cancel send", "cancel sends", "cancel recv",
        "cancel recvs", "ping", "burst",
    ]),
    st.integers(0, 1),
    st.integers(0, 50),
)  # fmt: skip


@pytest.fixture(autouse=True)
def fake_regions() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        copy_up_to(patch, 2 * SLOT)  # some large messages are, and some not
        yield


class Program:
    """What the program on one side does, and what it saw."""

    def __init__(self, connection: Connection, name: int) -> None:
        self.connection = connection
        self.name = name
        self.sends: list[tuple[int, int, asyncio.Task[None]]] = []  # number, size, task
        self.recvs: list[asyncio.Task[None]] = []
        self.held: list[Message] = []
        self.got: list[tuple[int, int]] = []  # number, size
        self.pings = 0

    def send(self, size: int) -> None:
        number = len(self.sends)
        payload = number.to_bytes(2, "big") + bytes([self.name]) * (size - 2)
        task = asyncio.create_task(self.connection.send(payload))
        self.sends.append((number, size, task))

    def recv(self) -> None:
        async def take() -> None:
            message = await self.connection.recv()
            data = bytes(message)
            assert set(data[2:]) <= {1 - self.name}, "bytes of another message"
            self.got.append((int.from_bytes(data[:2], "big"), len(data)))
            self.held.append(message)

        self.recvs.append(asyncio.create_task(take()))

    def release(self, number: int | None = None) -> None:
        if number is None:
            while self.held:
                self.held.pop(0).release()
        elif self.held:
            self.held.pop(number % len(self.held)).release()

    def ping(self) -> None:
        """As the keepalive does: one at a time."""
        notice_silence(self.connection)

    def failure(self) -> BaseException | None:
        for task in [task for _, _, task in self.sends] + self.recvs:
            if task.done() and not task.cancelled() and task.exception():
                return task.exception()
        return None


def do(programs: list[Program], wire: Wire, what: str, side: int, number: int) -> None:
    program = programs[side]
    if what == "adapter":
        if steps := wire.steps():
            wire.step(steps[number % len(steps)])
    elif what == "small":
        program.send(2 + number % (EAGER - 2))
    elif what == "large":
        program.send(EAGER + 1 + number * 3)
    elif what == "burst":
        for n in range(number % 12):
            program.send(2 + n)
    elif what == "recv":
        program.recv()
    elif what == "release":
        program.release(number)
    elif what == "release all":
        program.release()
    elif what == "cancel send" and program.sends:
        program.sends[number % len(program.sends)][2].cancel()
    elif what == "cancel recv" and program.recvs:
        program.recvs[number % len(program.recvs)].cancel()
    elif what == "cancel sends":  # all that wait, in the same round in which some may be granted
        for _, _, task in program.sends:
            task.cancel()
    elif what == "cancel recvs":
        for task in program.recvs:
            task.cancel()
    elif what == "ping":
        program.ping()


async def simulate(
    first: ConnectionConfig,
    second: ConnectionConfig,
    program: list[tuple[str, int, int]],
    keeps: bool,
    steps: tuple[int, int] | None = None,
) -> None:
    budget = Growth(SLOT * steps[1]) if steps is not None else None

    def arenas_of(config: ConnectionConfig) -> tuple[FakeElastic, FakeElastic] | None:
        if steps is None or budget is None:
            return None
        member = Member(budget, 0)
        receives = config.guaranteed - MIN_SENDS
        return (
            FakeElastic(config.send_depth, MIN_SENDS, steps[0], SLOT, member, SLOT),
            FakeElastic(config.receives, receives, steps[0], SLOT, member, SLOT),
        )

    wire = Wire(first, second, arenas_of)
    await wire.open()
    programs = [Program(end, name) for name, end in enumerate(wire.ends)]
    for what, side, number in program:
        if what == "run":
            await settle(number % 4)
        else:
            do(programs, wire, what, side, number)
        check(wire, programs)
    await finish(wire, programs, keeps=keeps)


def check(wire: Wire, programs: list[Program]) -> None:
    for link, one in zip(wire.links, programs, strict=True):
        assert link.failure is None, link.failure
        assert one.failure() is None


async def finish(wire: Wire, programs: list[Program], *, keeps: bool = False) -> None:
    """Both take everything: then no send may be waiting and no message missing.

    With `keeps` they release nothing before the end, as programs may.
    """
    before, stuck = -1, 0
    while True:
        await wire.run()
        check(wire, programs)
        waiting = [task for one in programs for _, _, task in one.sends if not task.done()]
        queued = sum(link.state.arrived for link in wire.links)
        if not waiting and not queued:
            break
        progress = sum(len(one.got) for one in programs) - len(waiting)
        stuck = stuck + 1 if progress == before else 0
        before = progress
        assert stuck < 5, f"deadlock: {len(waiting)} sends wait, {queued} messages are queued"
        for one in programs:
            if not keeps:
                one.release()
            if all(task.done() for task in one.recvs):
                one.recv()
    for one, other in ((programs[0], programs[1]), (programs[1], programs[0])):
        verify(one, other)
    for one in programs:
        one.release()
        for task in one.recvs:
            task.cancel()
    await settle()
    await wire.run()
    await verify_end(wire, programs)


def verify(one: Program, other: Program) -> None:
    got = other.got
    assert len(set(got)) == len(got), "a message came twice"
    sent = {(number, size): task for number, size, task in one.sends}
    assert set(got) <= set(sent), "a message came that nobody sent"
    lost = [key for key, task in sent.items() if not task.cancelled() and key not in got]
    assert not lost, f"lost: {lost}"
    small = [number for number, size in got if size <= EAGER]
    large = [number for number, size in got if size > EAGER]
    assert small == sorted(small), "small messages out of order"
    assert large == sorted(large), "large messages out of order"


async def verify_end(wire: Wire, programs: list[Program]) -> None:
    """At rest every slot and every credit is where it belongs; then both sides end well."""
    for side, (link, end) in enumerate(zip(wire.links, wire.ends, strict=True)):
        state, credits = link.state, wire.links[1 - side].state.credits
        facts = state.facts()
        assert len(link.ready) == facts["posted"] == state.under_way, (
            "the adapter has other receives"
        )
        later = facts["n_back"]  # to be posted together with others
        assert facts["posted"] + later == link.slots.recv.present, "a receive slot was lost"
        assert facts["n_free"] == link.slots.send.present, "a send slot was lost"
        assert facts["n_control_free"] == CONTROL_SLOTS, "a control slot was lost"
        assert state.unused <= facts["posted"] - state.control, "a credit without a receive"
        assert credits == state.unused, "a credit was lost"
        window = receiver_of(end).window
        assert credits > window.size // 2 - 1 - later, "the peer is kept short of credits"
        assert (state.has_pending, facts["n_freed"], state.large, state.arrived) == (
            0,
            0,
            0,
            0,
        )
        assert (facts["life"], listeners_of(link)) == ("OPEN", 0), "it waits for nothing"
        assert exposer_of(end).window.free == exposer_of(end).places <= window.answers
        assert link.reads_allowed <= 1
        assert link.pool.out == link.outgoing.out == 0
        slots = {region for arena in (link.slots.recv, link.slots.send) for region in arena.steps}
        assert link.pinned <= slots
    assert set(FakeRegion.regions.values()) <= {
        region
        for link in wire.links
        for arena in (link.slots.recv, link.slots.send)
        for region in arena.steps
    }
    await wire.close()
    for end in wire.ends:
        with pytest.raises((ConnectionEndedError, ResourceClosedError)):
            await end.recv()


@pytest.mark.timeout(600)  # HYPOTHESIS_PROFILE=random tries five times as many
@settings(max_examples=3 * settings().max_examples)
@given(
    CONFIGS,
    CONFIGS,
    st.lists(PROGRAM, max_size=120),
    st.booleans(),
    st.sampled_from(["asyncio", "uvloop"]),
)
def test_receives_are_never_overrun_and_nobody_waits_for_ever(
    first: ConnectionConfig,
    second: ConnectionConfig,
    program: list[tuple[str, int, int]],
    keeps: bool,
    loop: str,
) -> None:
    run_on(loop, simulate(first, second, program, keeps))


@pytest.mark.timeout(600)
@settings(max_examples=3 * settings().max_examples)
@given(
    CONFIGS,
    CONFIGS,
    st.lists(PROGRAM, max_size=120),
    st.booleans(),
    st.sampled_from(["asyncio", "uvloop"]),
    st.tuples(st.integers(1, 5), st.integers(0, 60)),
)
def test_neither_are_those_of_a_connection_that_grows(
    first: ConnectionConfig,
    second: ConnectionConfig,
    program: list[tuple[str, int, int]],
    keeps: bool,
    loop: str,
    steps: tuple[int, int],
) -> None:
    """In steps of so many slots, out of a budget that may not be enough for all."""
    with pytest.MonkeyPatch.context() as patch:
        use_fake_regions(patch)
        run_on(loop, simulate(first, second, program, keeps, steps))
