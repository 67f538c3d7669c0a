"""Waiters: in order, and no wake-up is lost to a cancellation."""

from __future__ import annotations

import asyncio

import pytest

from aiordma.loop.waiters import Waiters

from .conftest import settle


async def _line(count: int) -> tuple[Waiters, list[int], list[asyncio.Task[None]]]:
    waiters = Waiters()
    order: list[int] = []

    async def one(number: int) -> None:
        await waiters.wait()
        order.append(number)

    tasks = [asyncio.create_task(one(number)) for number in range(count)]
    await asyncio.sleep(0)
    assert len(waiters) == count
    return waiters, order, tasks


async def test_first_come_first_served() -> None:
    waiters, order, tasks = await _line(4)
    for _ in tasks:
        waiters.wake()
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2, 3]
    waiters.wake()  # nobody waits: nothing happens, nothing is remembered
    assert len(waiters) == 0


async def test_a_canceled_waiter_leaves_the_line() -> None:
    waiters, order, tasks = await _line(3)
    tasks[1].cancel()
    await asyncio.wait([tasks[1]])
    assert len(waiters) == 2
    waiters.wake()
    waiters.wake()
    await asyncio.gather(tasks[0], tasks[2])
    assert order == [0, 2]


async def test_a_wake_up_that_meets_a_cancellation_goes_to_the_next() -> None:
    waiters, order, tasks = await _line(2)
    waiters.wake()
    tasks[0].cancel()
    await asyncio.wait([tasks[0]])
    await settle()
    assert tasks[1].done(), "the next was not told, and there is something for it"
    assert order == [1]
    assert tasks[0].cancelled()


async def test_all_at_once() -> None:
    waiters, order, tasks = await _line(3)
    waiters.wake_all()
    await asyncio.gather(*tasks)
    assert sorted(order) == [0, 1, 2]


async def test_failure_reaches_everybody() -> None:
    waiters, order, tasks = await _line(2)
    waiters.fail(ConnectionResetError("gone"))
    for task in tasks:
        with pytest.raises(ConnectionResetError, match="gone"):
            await task
    assert order == []
