"""Leases of large messages: in a fair order, and never more than there are."""

from __future__ import annotations

import asyncio
import queue
import random
import sys
import threading
from typing import Any, cast

import pytest

from aiordma.errors import ResourceClosedError
from aiordma.loop.workers import call_blocking
from aiordma.memory import pool as pool_module
from aiordma.memory.governor import (
    AHEAD,
    AWAITED,
    GROWTH,
    HELD,
    KEPT,
    LARGE,
    SENDS,
    SMALL,
    Account,
    Budget,
    Growth,
    Kind,
    Member,
    set_large_message_budget,
)
from aiordma.memory.large_memory import LargeMemory
from aiordma.memory.pool import BufferPool, room_of
from aiordma.verbs.enums import Access
from aiordma.verbs.mr import MemoryRegion
from tests.inside.core import let_go, retain
from tests.inside.memory import give_back, line_of

from ..conftest import Run, settle
from .fake_memory import FakeRegion, registered_with

MIB = 1 << 20


def crowded(total: int = 800 * MIB, parent: Budget | None = None) -> Budget:
    """A budget with nothing free ahead: SMALL has an eighth, LARGE three."""
    budget = Budget(total, parent)
    assert budget.lease(AHEAD, total // 2, "ahead")
    return budget


def test_g01_the_first_half_is_for_what_nothing_waits_for() -> None:
    budget = Budget(100)
    assert budget.lease(AHEAD, 40, "a")
    assert not budget.lease(AHEAD, 11, "b")
    assert budget.lease(AHEAD, 10, "b")
    give_back(budget, AHEAD, 40, "a")
    give_back(budget, AHEAD, 10, "b")
    assert budget.lease(KEPT, 25, "a")
    assert not budget.lease(KEPT, 1, "b")
    assert budget.lease(AHEAD, 25, "b"), "what stays registered leaves room for what is fetched"


def test_g01_a_source_leaves_room_ahead_for_others() -> None:
    budget = Budget(1280)
    for source, share in (("a", 480), ("b", 120), ("c", 30)):
        count = 0
        while budget.lease(AHEAD, 1, source):
            count += 1
        assert count == share


def test_g01_a_share_is_one_of_every_budget() -> None:
    process = Budget(100)
    listeners = Budget(80, process), Budget(80, process)
    assert listeners[0].lease(AHEAD, 40, "a")
    assert not listeners[0].lease(AHEAD, 1, "b")
    assert listeners[1].lease(AHEAD, 10, "b")
    assert not listeners[1].lease(AHEAD, 1, "c"), "the process has no more"
    assert (process.held(AHEAD), [each.held(AHEAD) for each in listeners]) == (50, [40, 10])


async def test_g01_those_of_a_source_are_served_in_order() -> None:
    budget = crowded()
    served: list[int] = []

    async def one(number: int, size: int) -> None:
        assert (await budget.wait(AWAITED, size * MIB, "a")).kind is LARGE
        served.append(number)

    tasks = [asyncio.create_task(one(*each)) for each in enumerate((200, 200, 50, 100))]
    await settle()
    # The third would fit, and is not served before the second.
    assert served == [0]
    give_back(budget, LARGE, 200 * MIB, "a")
    await settle()
    assert served == [0, 1, 2]
    give_back(budget, LARGE, 250 * MIB, "a")
    await asyncio.gather(*tasks)
    assert served == [0, 1, 2, 3]
    assert budget.held(SMALL, LARGE) == 100 * MIB


async def test_g01_sources_take_turns() -> None:
    budget = crowded()
    served: list[str] = []

    async def one(source: str) -> None:
        await budget.wait(AWAITED, 300 * MIB, source)
        served.append(source)

    tasks = [asyncio.create_task(one(source)) for source in "aaaabbc"]
    for _ in tasks:
        await settle()
        give_back(budget, LARGE, 300 * MIB, served[-1])
    await asyncio.gather(*tasks)
    assert served == list("aabcaba")


async def test_g01_a_small_message_of_another_source_gets_on_at_once() -> None:
    """One source has asked for all that it gets, ahead, in large and in small messages."""
    budget = Budget(128 * MIB)
    while budget.lease(AHEAD, 8 * MIB, "a"):
        pass
    sizes = [MIB] * 80 + [64 * MIB] * 4
    waiting = [asyncio.create_task(budget.wait(AWAITED, size, "a")) for size in sizes]
    await settle()
    assert not all(task.done() for task in waiting)
    held = budget.held(AHEAD) + budget.held(SMALL, LARGE)
    for size in (64 << 10, MIB, MIB):
        await asyncio.wait_for(budget.wait(AWAITED, size, "b"), 5)
    assert budget.held(AHEAD) + budget.held(SMALL, LARGE) == held + 2 * MIB + (64 << 10)
    for task in waiting:
        task.cancel()


async def test_g01_a_source_gets_no_more_than_its_share_while_others_wait() -> None:
    budget = crowded()
    parts = [(await budget.wait(AWAITED, 60 * MIB, "a")).kind for _ in range(5)]
    assert parts == [LARGE] * 5, "nothing else waits"
    ours = [asyncio.create_task(budget.wait(AWAITED, 60 * MIB, "a")) for _ in range(5)]
    other = asyncio.create_task(budget.wait(AWAITED, 120 * MIB, "b"))
    await settle()
    assert not other.done()
    assert budget.presses("a")
    give_back(budget, LARGE, 60 * MIB, "a")
    await settle()
    assert not any(task.done() for task in ours), "240 of 300 are more than three quarters"
    give_back(budget, LARGE, 60 * MIB, "a")
    await asyncio.wait_for(other, 5)
    assert not budget.presses("a")
    assert budget.presses("b")
    for task in ours:
        task.cancel()


async def test_g01_what_waits_gets_what_is_free_ahead() -> None:
    budget = crowded()
    await budget.wait(AWAITED, 300 * MIB, "a")
    waiting = asyncio.create_task(budget.wait(AWAITED, 50 * MIB, "b"))
    await settle()
    assert not waiting.done()
    give_back(budget, AHEAD, 100 * MIB, "ahead")
    assert (await asyncio.wait_for(waiting, 5)).kind is AHEAD


async def test_g01_a_listener_that_is_full_does_not_keep_another_waiting() -> None:
    process = Budget(8000 * MIB)
    full, other = crowded(parent=process), crowded(parent=process)
    await full.wait(AWAITED, 300 * MIB, "a")
    waiting = [asyncio.create_task(full.wait(AWAITED, size * MIB, "a")) for size in (300, 2)]
    await settle()
    await asyncio.wait_for(other.wait(AWAITED, 300 * MIB, "a"), 5)
    assert not any(task.done() for task in waiting)
    assert not other.presses("b"), "what waits does not wait for this listener"
    assert full.presses("b")
    give_back(full, LARGE, 300 * MIB, "a")
    await settle()
    assert [task.done() for task in waiting] == [True, False]
    give_back(full, LARGE, 300 * MIB, "a")
    await asyncio.gather(*waiting)


async def test_g01_one_that_is_larger_than_all_is_served_alone() -> None:
    budget = crowded()
    await budget.wait(AWAITED, 10 * MIB, "a")
    large = asyncio.create_task(budget.wait(AWAITED, 5000 * MIB, "b"))
    other = asyncio.create_task(budget.wait(AWAITED, 10 * MIB, "c"))
    await settle()
    assert not large.done()
    assert not other.done(), "or the large one would never have its turn"
    give_back(budget, LARGE, 10 * MIB, "a")
    await large
    assert not other.done()
    give_back(budget, LARGE, 5000 * MIB, "b")
    await other


async def test_g01_a_canceled_wait_takes_nothing() -> None:
    budget = crowded()
    size = 300 * MIB
    await budget.wait(AWAITED, size, "a")
    first, second = (asyncio.create_task(budget.wait(AWAITED, size, "a")) for _ in range(2))
    await settle()
    give_back(budget, LARGE, size, "a")  # granted, and canceled before it has run
    first.cancel()
    await asyncio.wait_for(second, 5)
    assert first.cancelled()
    third, fourth = (asyncio.create_task(budget.wait(AWAITED, size, "a")) for _ in range(2))
    await settle()
    third.cancel()
    give_back(budget, LARGE, size, "a")
    await fourth
    assert budget.held(SMALL, LARGE) == size
    assert not line_of(budget)


@pytest.mark.parametrize("granted", [False, True])
async def test_g01_the_turn_of_a_connection_that_is_dropped_is_the_next_sources(
    granted: bool,
) -> None:
    """Before it had its share, or when it had that and not run yet."""
    budget = crowded()
    size = 300 * MIB
    served: list[str] = []

    async def one(source: str) -> None:
        await budget.wait(AWAITED, size, source)
        served.append(source)

    def release() -> None:
        give_back(budget, LARGE, size, served[-1])

    tasks = [asyncio.create_task(one(source)) for source in "aabbc"]
    await settle()
    assert served == ["a"]
    dropped = tasks[1]
    if granted:
        release()
        assert budget.held(SMALL, LARGE) == size, "it has its share"
    dropped.cancel()
    await settle()
    if not granted:
        assert served == ["a"]
        release()
        await settle()
    assert served == ["a", "b"]
    for _ in range(2):
        release()
        await settle()
    assert served == list("abcb")
    release()
    assert dropped.cancelled()
    assert (budget.held(SMALL, LARGE), len(line_of(budget))) == (0, 0)


async def test_g01_what_was_behind_a_connection_that_is_dropped_gets_on() -> None:
    """Nothing is given back: the large message in the way was all that kept others waiting."""
    budget = crowded()
    await budget.wait(AWAITED, 200 * MIB, "holder")
    dropped = asyncio.create_task(budget.wait(AWAITED, 150 * MIB, "a"))
    await settle()
    behind = [asyncio.create_task(budget.wait(AWAITED, 50 * MIB, source)) for source in "abc"]
    await settle()
    assert not any(task.done() for task in behind)
    dropped.cancel()
    await settle()
    assert [task.done() for task in behind] == [True, True, False], "300 MiB are taken"
    give_back(budget, LARGE, 200 * MIB, "holder")
    await asyncio.gather(*behind)


def test_g01_what_waits_in_a_loop_that_is_closed_keeps_nothing_waiting(run: Run) -> None:
    """A program that does not cancel its tasks, and runs another loop afterwards."""
    budget = crowded()
    before = asyncio.new_event_loop()
    left = before.create_task(budget.wait(AWAITED, 290 * MIB, "a"))
    before.run_until_complete(asyncio.wait_for(left, 5))
    left = before.create_task(budget.wait(AWAITED, 290 * MIB, "a"))
    left._log_destroy_pending = False  # type: ignore[attr-defined]
    before.run_until_complete(settle())
    before.close()
    assert not left.done()
    run(asyncio.wait_for(budget.wait(AWAITED, 10 * MIB, "b"), 5))
    assert not line_of(budget)


async def test_g01_an_account_gives_everything_back_once() -> None:
    budget = Budget(800 * MIB)
    account, other = Account(budget, "a"), Account(budget, "b")
    ahead = account.lease(AHEAD, 400 * MIB)
    awaited = await account.wait(300 * MIB)
    assert ahead is not None
    assert awaited.kind is LARGE
    waiting = asyncio.create_task(other.wait(300 * MIB))
    await settle()
    assert account.is_pressed()
    assert not other.is_pressed()
    regions = [registered_with(lease) for lease in (ahead, awaited)]
    account.close()
    await settle()
    assert budget.held() == account.size == 700 * MIB, "the memory is pinned still"
    assert not waiting.done()
    for region in reversed(regions):
        region.close()
    await waiting
    assert account.size == 0
    for lease in (ahead, awaited, awaited):
        lease.release()
    account.close()
    assert not account.lease(AHEAD, 1)
    assert not account.lease(KEPT, 1)
    assert (budget.held(AHEAD), budget.held(SMALL, LARGE)) == (0, 300 * MIB)


@pytest.mark.parametrize("kind", [AHEAD, SENDS])
def test_g01_a_lease_lasts_until_its_memory_is_deregistered(kind: Kind) -> None:
    budget = Budget(100)
    lease = budget.lease(kind, 40, "a")
    assert lease is not None
    first, second = cast("Any", registered_with(lease)), registered_with(lease)
    retain(first)  # as a queue pair does
    lease.release()
    first.close()
    assert budget.held() == 40
    second.close()
    assert budget.held() == 40
    let_go(first)
    assert (budget.held(), lease.size) == (0, 0)
    lease.release()
    assert budget.held() == 0


def test_g01_memory_that_is_used_for_something_else_changes_its_lease() -> None:
    budget = Budget(100)
    first, second = budget.lease(AHEAD, 20, "a"), budget.lease(HELD, 20, "a")
    assert first is not None
    assert second is not None
    region = registered_with(first)
    first.release()
    assert budget.held(AHEAD) == 20
    second.cover(cast("Any", region))
    assert (budget.held(AHEAD), budget.held(HELD)) == (0, 20)
    second.release()
    assert budget.held(HELD) == 20
    retain(cast("Any", region))
    region.close()
    third = budget.lease(AHEAD, 20, "a")
    assert third is not None
    third.cover(cast("Any", region))
    third.release()
    assert (budget.held(AHEAD), budget.held(HELD)) == (0, 20), "it is being deregistered"
    let_go(cast("Any", region))
    assert budget.held() == 0


def test_g01_memory_is_not_registered_with_a_lease_that_was_released() -> None:
    budget = Budget(100)
    account = Account(budget, "a")
    late, failed = account.lease(AHEAD, 10), account.lease(AHEAD, 10)
    assert late is not None
    assert failed is not None

    def fail() -> MemoryRegion:
        raise MemoryError

    with pytest.raises(MemoryError):
        failed.register(fail)
    account.close()
    assert budget.held() == 0
    with pytest.raises(ResourceClosedError):
        late.register(fail)


async def test_g01_memory_that_a_thread_registers_counts_from_the_beginning() -> None:
    """The connection is closed meanwhile, and the thread deregisters the memory."""
    budget = Budget(100)
    account = Account(budget, "a")
    lease = account.lease(AHEAD, 20)
    assert lease is not None
    begun, goes_on, gone = (threading.Event() for _ in range(3))

    def make() -> MemoryRegion:
        begun.set()
        assert goes_on.wait(20)
        region = FakeRegion(None, 1)
        region.when_gone(gone.set)
        return cast("MemoryRegion", region)

    registering = asyncio.create_task(
        call_blocking(lambda: lease.register(make), undo=lambda region: region.close())
    )
    assert await asyncio.to_thread(begun.wait, 20)
    registering.cancel()
    await asyncio.wait([registering], timeout=20)
    assert registering.cancelled()
    account.close()
    lease.release()
    assert budget.held() == 20
    goes_on.set()
    assert await asyncio.to_thread(gone.wait, 20)
    assert budget.held() == 0


@pytest.mark.parametrize("full", [False, True])
async def test_g01_a_buffer_that_is_not_kept_counts_until_it_is_deregistered(
    full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "MemoryRegion", FakeRegion)
    room = room_of(1)
    budget = Budget(16 * room)
    account = Account(budget, "a")
    pool = BufferPool(
        cast("Any", None), 0 if full else 1 << 30, Access.LOCAL_WRITE, account, LargeMemory(room)
    )
    lease = account.lease(HELD, room)
    assert lease is not None
    region: Any = await pool.take(room, lease)
    retain(region)
    pool.give(region)
    lease.release()
    if full:
        assert (region.closed, budget.held(HELD), budget.held(AHEAD)) == (True, room, 0)
    else:
        assert (region.closed, budget.held(HELD), budget.held(AHEAD)) == (False, 0, room)
        pool.drop_kept()
        assert (region.closed, budget.held(AHEAD)) == (True, room)
    let_go(region)
    assert budget.held() == 0


def test_g01_what_is_kept_to_send_counts_once_and_while_it_is_in_use(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        room = room_of(1)
        budget = Budget(16 * room)  # of which 4 are for what is kept, and 3 for a source
        account = Account(budget, "a")
        memory = LargeMemory(room)
        pool = BufferPool(
            cast("Any", None), 1 << 30, Access.REMOTE_READ, account, memory, reserve=True
        )
        first, second, third = [await pool.take(n * room) for n in (1, 2, 1)]
        for region in (first, second, third):
            pool.give(region)
        assert (first.closed, second.closed, third.closed) == (False, False, True)
        assert budget.held(AHEAD) == 3 * room
        assert await pool.take(2 * room) is second
        assert budget.held(AHEAD) == 3 * room
        larger = await pool.take(4 * room)
        pool.give(larger)
        assert larger.closed, "only 2 are there"
        pool.give(second)
        assert not second.closed
        assert budget.held(AHEAD) == 3 * room
        last = await pool.take(4 * room)
        account.close()
        assert budget.held(AHEAD) == 3 * room
        pool.close()
        assert budget.held(AHEAD) == 0
        pool.give(last)
        assert last.closed

    monkeypatch.setattr(pool_module, "MemoryRegion", FakeRegion)
    run(main())


async def test_g01_more_bytes_are_granted_at_once() -> None:
    budget = crowded()
    await budget.wait(AWAITED, 300 * MIB, "a")
    waiting = asyncio.create_task(budget.wait(AWAITED, 300 * MIB, "b"))
    await settle()
    budget.resize(1600 * MIB)
    await waiting


@pytest.mark.parametrize("seed", range(20))
async def test_g01_whatever_is_asked_for_is_served_within_the_bounds(seed: int) -> None:
    """Sources of two listeners take and give by chance; all is served, and all comes back."""
    rng = random.Random(seed)
    process = Budget(128 * MIB)
    budgets = [process, Budget(64 * MIB, process), Budget(96 * MIB, process)]
    largest = 40 * MIB

    def check() -> None:
        for budget in budgets:
            for kind in AWAITED:
                count = budget.count(kind)
                assert count.held == sum(count.sources.values()), f"seed {seed}"
                most = kind.eighths * budget.total // 8
                assert count.held <= max(most, largest if kind.single else 0), f"seed {seed}"

    async def one(budget: Budget, source: str) -> None:
        account = Account(budget, source)
        for _ in range(10):
            size = int(2 ** rng.uniform(16, 25.3))
            lease = account.lease(AHEAD, size) if rng.random() < 0.3 else None
            if lease is None:
                taking = asyncio.create_task(account.wait(size))
                if rng.random() < 0.2:
                    await asyncio.sleep(0)
                    taking.cancel()
                try:
                    lease = await taking
                except asyncio.CancelledError:
                    continue
            check()
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
            lease.release()
        account.close()

    async with asyncio.timeout(60):
        await asyncio.gather(
            *(one(budgets[1 + n % 2], "abcd"[n % 4 // 2 + n % 3]) for n in range(12))
        )
    check()
    assert (process.held(AHEAD), process.held(SMALL, LARGE)) == (0, 0), f"seed {seed}"
    assert not line_of(process), f"seed {seed}"


@pytest.mark.parametrize("seed", range(5))
def test_g01_loops_in_threads_share_a_budget(seed: int) -> None:
    """Every taker is served, and the halves are never exceeded."""
    process = Budget(100)
    listeners = [Budget(60, process) for _ in range(3)]
    over: list[str] = []
    done = []

    async def taker(rng: random.Random, account: Account) -> None:
        for _ in range(20):
            size = rng.randint(1, 22)
            taken = asyncio.create_task(account.wait(size))
            if rng.random() < 0.2:
                await asyncio.sleep(0)
                taken.cancel()
            try:
                lease = await taken
            except asyncio.CancelledError:
                continue
            held = [each.held(SMALL, LARGE) for each in (process, *listeners)]
            if held[0] > 50 or max(held[1:]) > 30:
                over.append(f"{held}")
            await asyncio.sleep(0)
            lease.release()

    async def many(number: int) -> None:
        rng = random.Random(100 * seed + number)
        accounts = [Account(listeners[number], f"source {rng.randrange(3)}") for _ in range(4)]
        async with asyncio.timeout(30):
            await asyncio.gather(*(taker(rng, account) for account in accounts))
        for account in accounts:
            account.close()
        done.append(number)

    threads = [threading.Thread(target=lambda n=n: asyncio.run(many(n))) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    assert sorted(done) == [0, 1, 2], f"seed {seed}"
    assert over == [], f"seed {seed}"
    assert process.held(SMALL, LARGE) == 0


async def test_members_leave_in_any_thread() -> None:
    """The thread that destroys a queue pair ends the leases, while the loop asks for others."""
    growth = Growth(100)
    gone: queue.SimpleQueue[Member | None] = queue.SimpleQueue()
    others = [Member(growth, 0) for _ in range(300)]
    for other in others:
        other.want(lambda: None)

    def leave() -> None:
        while (member := gone.get()) is not None:
            member.close()

    thread = threading.Thread(target=leave)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for n in range(2000):
            member = Member(growth, 0)
            if member.lease(GROWTH, 30) is None:
                member.want(lambda: None)
            member.could_spare(1)
            gone.put(member)
            if n % 20 == 0:
                await asyncio.sleep(0)
                for other in others:
                    other.want(lambda: None)
    finally:
        for other in others:
            gone.put(other)
        gone.put(None)
        thread.join(20)
        sys.setswitchinterval(interval)
    assert (growth.members, growth.used, growth.free) == (0, 0, 100)


@pytest.mark.parametrize(
    ("size", "error"),
    [(0, ValueError), (MIB - 1, ValueError), (1.5 * MIB, TypeError), (True, TypeError)],
)
def test_a_budget_is_a_number_of_bytes(size: int, error: type[Exception]) -> None:
    with pytest.raises(error, match="budget"):
        set_large_message_budget(size)
