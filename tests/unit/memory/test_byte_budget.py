"""ByteBudget: shares of large messages, in a fair order, and never more than there are."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any, cast

import pytest

from aiordma.memory.byte_budget import (
    AHEAD,
    LARGE,
    SMALL,
    Account,
    ByteBudget,
    set_large_message_budget,
)
from aiordma.memory.large_memory import LargeMemory
from aiordma.memory.pool import BufferPool, room_of
from aiordma.verbs.enums import Access
from aiordma.verbs.mr import MemoryRegion
from tests.inside.memory import held_of, line_of, own_of

from ..conftest import Run, settle
from .fake_memory import FakeRegion

MIB = 1 << 20


def crowded(total: int = 800 * MIB, parent: ByteBudget | None = None) -> ByteBudget:
    """A budget with nothing free ahead: SMALL has an eighth, LARGE three."""
    budget = ByteBudget(total, parent)
    assert budget.try_take(AHEAD, total // 2, "ahead")
    return budget


def test_g01_the_first_half_is_for_what_nothing_waits_for() -> None:
    budget = ByteBudget(100)
    assert budget.try_take(AHEAD, 40, "a")
    assert not budget.try_take(AHEAD, 11, "b")
    assert budget.try_take(AHEAD, 10, "b")
    budget.give((40,), "a")
    budget.give((10,), "b")
    assert budget.try_take(AHEAD, 25, "a", keep=True)
    assert not budget.try_take(AHEAD, 1, "b", keep=True)
    assert budget.try_take(AHEAD, 25, "b"), "what stays registered leaves room for what is fetched"


def test_g01_a_source_leaves_room_ahead_for_others() -> None:
    budget = ByteBudget(1280)
    for source, share in (("a", 480), ("b", 120), ("c", 30)):
        count = 0
        while budget.try_take(AHEAD, 1, source):
            count += 1
        assert count == share


def test_g01_a_share_is_one_of_every_budget() -> None:
    process = ByteBudget(100)
    listeners = ByteBudget(80, process), ByteBudget(80, process)
    assert listeners[0].try_take(AHEAD, 40, "a")
    assert not listeners[0].try_take(AHEAD, 1, "b")
    assert listeners[1].try_take(AHEAD, 10, "b")
    assert not listeners[1].try_take(AHEAD, 1, "c"), "the process has no more"
    assert (process.ahead, [each.ahead for each in listeners]) == (50, [40, 10])


def test_g01_those_of_a_source_are_served_in_order(run: Run) -> None:
    async def main() -> None:
        budget = crowded()
        served: list[int] = []

        async def one(number: int, size: int) -> None:
            assert await budget.take(size * MIB, "a") == LARGE
            served.append(number)

        tasks = [asyncio.create_task(one(*each)) for each in enumerate((200, 200, 50, 100))]
        await settle()
        # The third would fit, and is not served before the second.
        assert served == [0]
        budget.give((0, 0, 200 * MIB), "a")
        await settle()
        assert served == [0, 1, 2]
        budget.give((0, 0, 250 * MIB), "a")
        await asyncio.gather(*tasks)
        assert served == [0, 1, 2, 3]
        assert budget.wanted == 100 * MIB

    run(main())


def test_g01_sources_take_turns(run: Run) -> None:
    async def main() -> None:
        budget = crowded()
        served: list[str] = []

        async def one(source: str) -> None:
            await budget.take(300 * MIB, source)
            served.append(source)

        tasks = [asyncio.create_task(one(source)) for source in "aaaabbc"]
        for _ in tasks:
            await settle()
            budget.give((0, 0, 300 * MIB), served[-1])
        await asyncio.gather(*tasks)
        assert served == list("aabcaba")

    run(main())


def test_g01_a_small_message_of_another_source_gets_on_at_once(run: Run) -> None:
    """One source has asked for all that it gets, ahead, in large and in small messages."""

    async def main() -> None:
        budget = ByteBudget(128 * MIB)
        while budget.try_take(AHEAD, 8 * MIB, "a"):
            pass
        sizes = [MIB] * 80 + [64 * MIB] * 4
        waiting = [asyncio.create_task(budget.take(size, "a")) for size in sizes]
        await settle()
        assert not all(task.done() for task in waiting)
        held = budget.ahead + budget.wanted
        for size in (64 << 10, MIB, MIB):
            await asyncio.wait_for(budget.take(size, "b"), 5)
        assert budget.ahead + budget.wanted == held + 2 * MIB + (64 << 10)
        for task in waiting:
            task.cancel()

    run(main())


def test_g01_a_source_gets_no_more_than_its_share_while_others_wait(run: Run) -> None:
    async def main() -> None:
        budget = crowded()
        parts = [await budget.take(60 * MIB, "a") for _ in range(5)]
        assert parts == [LARGE] * 5, "nothing else waits"
        ours = [asyncio.create_task(budget.take(60 * MIB, "a")) for _ in range(5)]
        other = asyncio.create_task(budget.take(120 * MIB, "b"))
        await settle()
        assert not other.done()
        assert budget.presses("a")
        budget.give((0, 0, 60 * MIB), "a")
        await settle()
        assert not any(task.done() for task in ours), "240 of 300 are more than three quarters"
        budget.give((0, 0, 60 * MIB), "a")
        await asyncio.wait_for(other, 5)
        assert not budget.presses("a")
        assert budget.presses("b")
        for task in ours:
            task.cancel()

    run(main())


def test_g01_what_waits_gets_what_is_free_ahead(run: Run) -> None:
    async def main() -> None:
        budget = crowded()
        await budget.take(300 * MIB, "a")
        waiting = asyncio.create_task(budget.take(50 * MIB, "b"))
        await settle()
        assert not waiting.done()
        budget.give((100 * MIB,), "ahead")
        assert await asyncio.wait_for(waiting, 5) == AHEAD

    run(main())


def test_g01_a_listener_that_is_full_does_not_keep_another_waiting(run: Run) -> None:
    async def main() -> None:
        process = ByteBudget(8000 * MIB)
        full, other = crowded(parent=process), crowded(parent=process)
        await full.take(300 * MIB, "a")
        waiting = [asyncio.create_task(full.take(size * MIB, "a")) for size in (300, 2)]
        await settle()
        await asyncio.wait_for(other.take(300 * MIB, "a"), 5)
        assert not any(task.done() for task in waiting)
        assert not other.presses("b"), "what waits does not wait for this listener"
        assert full.presses("b")
        full.give((0, 0, 300 * MIB), "a")
        await settle()
        assert [task.done() for task in waiting] == [True, False]
        full.give((0, 0, 300 * MIB), "a")
        await asyncio.gather(*waiting)

    run(main())


def test_g01_one_that_is_larger_than_all_is_served_alone(run: Run) -> None:
    async def main() -> None:
        budget = crowded()
        await budget.take(10 * MIB, "a")
        large = asyncio.create_task(budget.take(5000 * MIB, "b"))
        other = asyncio.create_task(budget.take(10 * MIB, "c"))
        await settle()
        assert not large.done()
        assert not other.done(), "or the large one would never have its turn"
        budget.give((0, 0, 10 * MIB), "a")
        await large
        assert not other.done()
        budget.give((0, 0, 5000 * MIB), "b")
        await other

    run(main())


def test_g01_a_canceled_wait_takes_nothing(run: Run) -> None:
    async def main() -> None:
        budget = crowded()
        size = 300 * MIB
        await budget.take(size, "a")
        first, second = (asyncio.create_task(budget.take(size, "a")) for _ in range(2))
        await settle()
        budget.give((0, 0, size), "a")  # granted, and canceled before it has run
        first.cancel()
        await second
        assert first.cancelled()
        third, fourth = (asyncio.create_task(budget.take(size, "a")) for _ in range(2))
        await settle()
        third.cancel()
        budget.give((0, 0, size), "a")
        await fourth
        assert budget.wanted == size
        assert not line_of(budget)

    run(main())


@pytest.mark.parametrize("granted", [False, True])
def test_g01_the_turn_of_a_connection_that_is_dropped_is_the_next_sources(
    run: Run, granted: bool
) -> None:
    """Before it had its share, or when it had that and not run yet."""

    async def main() -> None:
        budget = crowded()
        size = 300 * MIB
        served: list[str] = []

        async def one(source: str) -> None:
            await budget.take(size, source)
            served.append(source)

        def release() -> None:
            budget.give((0, 0, size), served[-1])

        tasks = [asyncio.create_task(one(source)) for source in "aabbc"]
        await settle()
        assert served == ["a"]
        dropped = tasks[1]
        if granted:
            release()
            assert budget.wanted == size, "it has its share"
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
        assert (budget.wanted, len(line_of(budget))) == (0, 0)

    run(main())


def test_g01_what_was_behind_a_connection_that_is_dropped_gets_on(run: Run) -> None:
    """Nothing is given back: the large message in the way was all that kept others waiting."""

    async def main() -> None:
        budget = crowded()
        await budget.take(200 * MIB, "holder")
        dropped = asyncio.create_task(budget.take(150 * MIB, "a"))
        await settle()
        behind = [asyncio.create_task(budget.take(50 * MIB, source)) for source in "abc"]
        await settle()
        assert not any(task.done() for task in behind)
        dropped.cancel()
        await settle()
        assert [task.done() for task in behind] == [True, True, False], "300 MiB are taken"
        budget.give((0, 0, 200 * MIB), "holder")
        await asyncio.gather(*behind)

    run(main())


def test_g01_what_waits_in_a_loop_that_is_closed_keeps_nothing_waiting(run: Run) -> None:
    """A program that does not cancel its tasks, and runs another loop afterwards."""
    budget = crowded()
    before = asyncio.new_event_loop()
    left = before.create_task(budget.take(290 * MIB, "a"))
    before.run_until_complete(asyncio.wait_for(left, 5))
    left = before.create_task(budget.take(290 * MIB, "a"))
    left._log_destroy_pending = False  # type: ignore[attr-defined]
    before.run_until_complete(settle())
    before.close()
    assert not left.done()
    run(asyncio.wait_for(budget.take(10 * MIB, "b"), 5))
    assert not line_of(budget)


def test_g01_an_account_gives_everything_back_once(run: Run) -> None:
    async def main() -> None:
        budget = ByteBudget(800 * MIB)
        account, other = Account(budget, "a"), Account(budget, "b")
        assert account.try_take(AHEAD, 400 * MIB)
        assert await account.take(300 * MIB) == LARGE
        waiting = asyncio.create_task(other.take(300 * MIB))
        await settle()
        assert account.is_pressed()
        assert not other.is_pressed()
        account.close()
        await waiting
        account.give(400 * MIB)
        account.give(300 * MIB, LARGE)
        account.close()
        assert not account.try_take(AHEAD, 1)
        assert not account.try_take(AHEAD, 1, keep=True)
        assert (budget.ahead, budget.wanted) == (300 * MIB, 0)

    run(main())


def test_g01_what_is_kept_to_send_counts_once_and_while_it_is_in_use(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def register(_: object, size: int, access: object) -> FakeRegion:
        return FakeRegion(None, size, access)

    async def main() -> None:
        room = room_of(1)
        budget = ByteBudget(16 * room)  # of which 4 are for what is kept, and 3 for a source
        account = Account(budget, "a")
        memory = LargeMemory(room)
        pool = BufferPool(
            cast("Any", None), 1 << 30, Access.REMOTE_READ, account, memory, reserve=True
        )
        first, second, third = [await pool.take(n * room) for n in (1, 2, 1)]
        for region in (first, second, third):
            pool.give(region)
        assert (first.closed, second.closed, third.closed) == (False, False, True)
        assert budget.ahead == 3 * room
        assert await pool.take(2 * room) is second
        assert budget.ahead == 3 * room
        larger = await pool.take(4 * room)
        pool.give(larger)
        assert larger.closed, "only 2 are there"
        pool.give(second)
        assert not second.closed
        assert budget.ahead == 3 * room
        last = await pool.take(4 * room)
        account.close()
        assert budget.ahead == 0
        pool.give(last)
        assert last.closed

    monkeypatch.setattr(MemoryRegion, "register", register)
    run(main())


def test_g01_more_bytes_are_granted_at_once(run: Run) -> None:
    async def main() -> None:
        budget = crowded()
        await budget.take(300 * MIB, "a")
        waiting = asyncio.create_task(budget.take(300 * MIB, "b"))
        await settle()
        budget.resize(1600 * MIB)
        await waiting

    run(main())


@pytest.mark.parametrize("seed", range(20))
def test_g01_whatever_is_asked_for_is_served_within_the_bounds(run: Run, seed: int) -> None:
    """Sources of two listeners take and give by chance; all is served, and all comes back."""

    async def main() -> None:
        rng = random.Random(seed)
        process = ByteBudget(128 * MIB)
        budgets = [process, ByteBudget(64 * MIB, process), ByteBudget(96 * MIB, process)]
        largest = 40 * MIB

        def check() -> None:
            for budget in budgets:
                own = own_of(budget)
                held = [held_of(budget)[part] for part in range(len(own))]
                assert held == [sum(each.values()) for each in own], f"seed {seed}"
                half = budget.total // 2
                assert held[AHEAD] <= half, f"seed {seed}"
                assert held[SMALL] <= half // 4, f"seed {seed}"
                assert held[LARGE] <= max(half - half // 4, largest), f"seed {seed}"

        async def one(budget: ByteBudget, source: str) -> None:
            account = Account(budget, source)
            for _ in range(10):
                size = int(2 ** rng.uniform(16, 25.3))
                part = AHEAD
                if not (rng.random() < 0.3 and account.try_take(AHEAD, size)):
                    taking = asyncio.create_task(account.take(size))
                    if rng.random() < 0.2:
                        await asyncio.sleep(0)
                        taking.cancel()
                    try:
                        part = await taking
                    except asyncio.CancelledError:
                        continue
                check()
                for _ in range(rng.randrange(4)):
                    await asyncio.sleep(0)
                account.give(size, part)
            account.close()

        async with asyncio.timeout(60):
            await asyncio.gather(
                *(one(budgets[1 + n % 2], "abcd"[n % 4 // 2 + n % 3]) for n in range(12))
            )
        check()
        assert (process.ahead, process.wanted) == (0, 0), f"seed {seed}"
        assert not line_of(process), f"seed {seed}"

    run(main())


@pytest.mark.parametrize("seed", range(5))
def test_g01_loops_in_threads_share_a_budget(seed: int) -> None:
    """Every taker is served, and the halves are never exceeded."""
    process = ByteBudget(100)
    listeners = [ByteBudget(60, process) for _ in range(3)]
    over: list[str] = []
    done = []

    async def taker(rng: random.Random, account: Account) -> None:
        for _ in range(20):
            size = rng.randint(1, 22)
            taken = asyncio.create_task(account.take(size))
            if rng.random() < 0.2:
                await asyncio.sleep(0)
                taken.cancel()
            try:
                part = await taken
            except asyncio.CancelledError:
                continue
            if process.wanted > 50 or any(each.wanted > 30 for each in listeners):
                over.append(f"{process.wanted} {[each.wanted for each in listeners]}")
            await asyncio.sleep(0)
            account.give(size, part)

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
    assert process.wanted == 0


@pytest.mark.parametrize(
    ("size", "error"),
    [(0, ValueError), (MIB - 1, ValueError), (1.5 * MIB, TypeError), (True, TypeError)],
)
def test_a_budget_is_a_number_of_bytes(size: int, error: type[Exception]) -> None:
    with pytest.raises(error, match="budget"):
        set_large_message_budget(size)
