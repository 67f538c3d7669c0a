"""Credits: first come first served; no place is lost or given twice, whoever is cancelled when."""

from __future__ import annotations

import asyncio
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma.loop.credits import Credits

from ..conftest import run_on, settle

# What happens, one after another; the number chooses a task.  "run" lets tasks run; without it
# between two steps they meet in the same round of the loop.
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("acquire"), st.integers(1, 3)),
        st.tuples(st.just("try"), st.integers(1, 3)),
        st.tuples(st.just("release"), st.integers(1, 3)),
        st.tuples(st.just("cancel"), st.integers(0, 20)),
        st.tuples(st.just("run"), st.integers(1, 3)),
    ),
    max_size=60,
)


async def _simulate(places: int, steps: list[tuple[str, int]]) -> None:
    credits = Credits(places)
    total = places
    order: list[int] = []  # in which tasks got their place
    tasks: list[asyncio.Task[None]] = []
    waited: list[int] = []  # tasks that had to wait, in order of arrival
    taken = 0

    counts: list[int] = []

    async def acquire(number: int) -> None:
        if credits.free < counts[number] or credits.waiting:
            waited.append(number)
        await credits.acquire(counts[number])
        order.append(number)

    for name, number in steps:
        if name == "acquire":
            counts.append(number)
            tasks.append(asyncio.create_task(acquire(len(tasks))))
        elif name == "try":
            before = credits.waiting
            if credits.try_acquire(number):
                assert not before, "overtook somebody who waits"
                taken += number
        elif name == "release":
            credits.release(number)
            total += number
        elif name == "cancel" and tasks:
            tasks[number % len(tasks)].cancel()
        elif name == "run":
            await settle(number)
        assert credits.free >= 0
    await settle()
    got = sum(counts[number] for number in order) + taken
    # Nobody waits while there is room for him, and every place is either free or taken.
    waiting = [n for n in waited if n not in order and not tasks[n].done()]
    assert credits.waiting == len(waiting)
    assert not waiting or credits.free < counts[waiting[0]]
    assert credits.free == total - got
    # First come first served among those who waited and were not cancelled.
    queue = deque(number for number in waited if number in order)
    assert [number for number in order if number in queue] == list(queue)
    # All who are left get theirs when there is enough.
    credits.release(sum(counts))
    await settle()
    assert credits.waiting == 0
    assert all(task.done() for task in tasks)
    assert len(order) == sum(not task.cancelled() for task in tasks)
    got = sum(counts[number] for number in order) + taken
    assert credits.free == total + sum(counts) - got


@given(st.sampled_from(["asyncio", "uvloop"]), st.integers(0, 3), STEPS)
def test_no_place_is_lost_or_given_twice(
    loop: str, places: int, steps: list[tuple[str, int]]
) -> None:
    run_on(loop, _simulate(places, steps))


async def test_places_that_a_cancelled_task_was_granted_are_free_again() -> None:
    credits = Credits(0)
    task = asyncio.create_task(credits.acquire(2))
    await settle()
    credits.release(2)  # grants them; the task has not resumed
    task.cancel()
    await settle()
    assert task.cancelled()
    assert credits.free == 2, "they are lost"


async def test_failing_ends_every_wait_and_every_later_call() -> None:
    credits = Credits(0)
    waiters = [asyncio.create_task(credits.acquire()) for _ in range(3)]
    await settle()
    credits.fail(lambda: ConnectionResetError("first"))
    credits.fail(lambda: ConnectionResetError("second"))
    results = await asyncio.gather(*waiters, return_exceptions=True)
    assert [str(result) for result in results] == ["first"] * 3
    assert all(isinstance(result, ConnectionResetError) for result in results)
    # One object for all would collect everybody's traceback.
    assert len(set(map(id, results))) == 3
    credits.release(5)
    with pytest.raises(ConnectionResetError, match="first"):
        await credits.acquire()
    with pytest.raises(ConnectionResetError, match="first"):
        credits.try_acquire()
    assert credits.waiting == 0


async def test_failing_and_cancelling_in_one_round() -> None:
    credits = Credits(0)
    waiter = asyncio.create_task(credits.acquire())
    await settle()
    credits.fail(lambda: ConnectionResetError("gone"))
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert credits.waiting == 0


async def test_a_small_wish_does_not_overtake_a_large_one() -> None:
    credits = Credits(1)
    large = asyncio.create_task(credits.acquire(3))
    await settle()
    assert not credits.try_acquire()
    small = asyncio.create_task(credits.acquire())
    await settle()
    assert not small.done()
    large.cancel()  # what was free all the time goes to the next
    await settle()
    assert small.done()
    assert credits.free == 0
