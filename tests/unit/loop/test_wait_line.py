"""WaitLine: in order, and no grant is lost to a cancellation."""

from __future__ import annotations

import asyncio

import pytest

from aiordma.loop.wait_line import WaitLine

from ..conftest import settle


async def _line(count: int) -> tuple[WaitLine[None], list[int], list[asyncio.Task[None]]]:
    waiters = WaitLine[None]()
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
        waiters.grant(None)
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2, 3]
    waiters.grant(None)  # nobody waits: nothing happens, nothing is remembered
    assert len(waiters) == 0


async def test_a_canceled_waiter_leaves_the_line() -> None:
    waiters, order, tasks = await _line(3)
    tasks[1].cancel()
    await asyncio.wait([tasks[1]])
    assert len(waiters) == 2
    waiters.grant(None)
    waiters.grant(None)
    await asyncio.gather(tasks[0], tasks[2])
    assert order == [0, 2]


async def test_a_wake_up_that_meets_a_cancellation_goes_to_the_next() -> None:
    waiters, order, tasks = await _line(2)
    waiters.grant(None)
    tasks[0].cancel()
    await asyncio.wait([tasks[0]])
    await settle()
    assert tasks[1].done(), "the next was not told, and there is something for it"
    assert order == [1]
    assert tasks[0].cancelled()


async def test_all_at_once() -> None:
    waiters, order, tasks = await _line(3)
    waiters.grant_all(None)
    await asyncio.gather(*tasks)
    assert sorted(order) == [0, 1, 2]


async def test_failure_reaches_everybody() -> None:
    waiters, order, tasks = await _line(2)
    waiters.fail(lambda: ConnectionResetError("gone"))
    for task in tasks:
        with pytest.raises(ConnectionResetError, match="gone"):
            await task
    assert order == []


async def test_a_grant_of_a_canceled_task_goes_where_the_caller_wants_it() -> None:
    line = WaitLine[int]()
    back: list[int] = []
    tasks = [asyncio.create_task(line.wait(back.append)) for _ in range(2)]
    await settle()
    assert line.grant(7)
    tasks[0].cancel()
    await settle()
    assert back == [7]
    assert not tasks[1].done()
    assert line.grant(8)
    assert await tasks[1] == 8
    assert not line.grant(9), "no task waits"


async def test_the_size_is_that_of_the_first_that_still_waits() -> None:
    line = WaitLine[None]()
    assert line.next_size is None
    tasks = [asyncio.create_task(line.wait(size=size)) for size in (3, 2)]
    await settle()
    assert line.next_size == 3
    tasks[0].cancel()
    assert line.next_size == 2
    await settle()
    assert len(line) == 1
    line.grant(None)
    await tasks[1]
    assert line.next_size is None
