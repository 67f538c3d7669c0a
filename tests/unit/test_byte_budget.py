"""ByteBudget: shares of large messages, in a fair order, and never more than there are."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest

from aiordma.memory.byte_budget import Account, ByteBudget, set_large_message_budget

from .conftest import Run, settle

MIB = 1 << 20


def test_g01_the_first_half_is_for_what_nothing_waits_for() -> None:
    budget = ByteBudget(100)
    assert budget.try_ahead(40)
    assert not budget.try_ahead(11)
    assert budget.try_ahead(10)
    budget.give(50, 0)
    assert budget.try_keep(25)
    assert not budget.try_keep(1)
    assert budget.try_ahead(25), "what stays registered leaves room for what is fetched"


def test_g01_a_share_is_one_of_every_budget() -> None:
    process = ByteBudget(100)
    listeners = ByteBudget(80, process), ByteBudget(80, process)
    assert listeners[0].try_ahead(40)
    assert not listeners[0].try_ahead(1)
    assert listeners[1].try_ahead(10)
    assert not listeners[1].try_ahead(1), "the process has no more"
    assert (process.ahead, [each.ahead for each in listeners]) == (50, [40, 10])


def test_g01_those_that_wait_are_served_in_order(run: Run) -> None:
    async def main() -> None:
        budget = ByteBudget(100)
        served: list[int] = []

        async def one(number: int, size: int) -> None:
            await budget.take(size)
            served.append(number)

        tasks = [asyncio.create_task(one(*each)) for each in enumerate((30, 30, 10, 20))]
        await settle()
        # The third would fit, and is not served before the second.
        assert served == [0]
        assert budget.wanted == 30
        budget.give(0, 30)
        await settle()
        assert served == [0, 1, 2]
        budget.give(0, 40)
        await asyncio.gather(*tasks)
        assert served == [0, 1, 2, 3]
        assert budget.wanted == 20

    run(main())


def test_g01_a_listener_that_is_full_does_not_keep_another_waiting(run: Run) -> None:
    async def main() -> None:
        process = ByteBudget(1000)
        full, other = ByteBudget(100, process), ByteBudget(100, process)
        await full.take(50)
        waiting = [asyncio.create_task(full.take(size)) for size in (50, 1)]
        await settle()
        await asyncio.wait_for(other.take(50), 5)
        assert not any(task.done() for task in waiting)
        full.give(0, 50)
        await settle()
        assert [task.done() for task in waiting] == [True, False]
        full.give(0, 50)
        await asyncio.gather(*waiting)

    run(main())


def test_g01_one_that_is_larger_than_all_is_served_alone(run: Run) -> None:
    async def main() -> None:
        budget = ByteBudget(100)
        await budget.take(10)
        large = asyncio.create_task(budget.take(5000))
        small = asyncio.create_task(budget.take(10))
        await settle()
        assert not large.done()
        assert not small.done(), "or the large one would never have its turn"
        budget.give(0, 10)
        await large
        assert not small.done()
        budget.give(0, 5000)
        await small

    run(main())


def test_g01_a_canceled_wait_takes_nothing(run: Run) -> None:
    async def main() -> None:
        budget = ByteBudget(100)
        await budget.take(50)
        first, second = (asyncio.create_task(budget.take(50)) for _ in range(2))
        await settle()
        budget.give(0, 50)  # granted, and canceled before it has run
        first.cancel()
        await second
        assert first.cancelled()
        third, fourth = (asyncio.create_task(budget.take(50)) for _ in range(2))
        await settle()
        third.cancel()
        budget.give(0, 50)
        await fourth
        assert budget.wanted == 50

    run(main())


def test_g01_an_account_gives_everything_back_once(run: Run) -> None:
    async def main() -> None:
        budget = ByteBudget(100)
        account, other = Account(budget), Account(budget)
        assert account.try_ahead(20)
        await account.take(30)
        waiting = asyncio.create_task(other.take(50))
        await settle()
        account.close()
        await waiting
        account.give(20)
        account.give(30, wanted=True)
        account.close()
        assert not account.try_ahead(1)
        assert not account.try_keep(1)
        assert (budget.ahead, budget.wanted) == (0, 50)

    run(main())


def test_g01_more_bytes_are_granted_at_once(run: Run) -> None:
    async def main() -> None:
        budget = ByteBudget(10)
        await budget.take(5)
        waiting = asyncio.create_task(budget.take(5))
        await settle()
        budget.resize(20)
        await waiting

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
            size = rng.randint(1, 25)
            taken = asyncio.create_task(account.take(size))
            if rng.random() < 0.2:
                await asyncio.sleep(0)
                taken.cancel()
            try:
                await taken
            except asyncio.CancelledError:
                continue
            if process.wanted > 50 or any(each.wanted > 30 for each in listeners):
                over.append(f"{process.wanted} {[each.wanted for each in listeners]}")
            await asyncio.sleep(0)
            account.give(size, wanted=True)

    async def many(number: int) -> None:
        rng = random.Random(100 * seed + number)
        accounts = [Account(listeners[number]) for _ in range(4)]
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
