"""`result_of`, a wait that ends with a cancellation, and `until_done`, which outlasts them."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from aiordma.loop.lasting import result_of, until_done

from ..conftest import LIMIT_S, cancel_at_every_turn, settle


def futures(count: int) -> list[asyncio.Future[Any]]:
    loop = asyncio.get_running_loop()
    return [loop.create_future() for _ in range(count)]


async def test_a_result_and_an_error_of_a_future() -> None:
    first, second, third = futures(3)
    waits = [asyncio.create_task(result_of(each)) for each in (first, second, third)]
    await settle()
    first.set_result(1)
    second.set_exception(OSError(5, "of the future"))
    third.cancel()
    assert await waits[0] == await result_of(first) == 1
    with pytest.raises(OSError, match="of the future"):
        await waits[1]
    with pytest.raises(asyncio.CancelledError):
        await waits[2]


@pytest.mark.parametrize("late", [False, True])
async def test_a_wait_that_is_canceled_leaves_the_future_and_reports_no_error(late: bool) -> None:
    reports: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reports.append(context))
    (future,) = futures(1)
    waiting = asyncio.create_task(result_of(future))
    await settle()
    waiting.cancel()
    if late:
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not future.done()
    future.set_exception(OSError(5, "of the future"))
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await settle()
    del future, waiting
    gc.collect()
    assert not reports


async def test_it_waits_for_all_and_leaves_them_alone() -> None:
    first, second, third, done = futures(4)
    done.set_result(1)
    waiting = asyncio.create_task(until_done(iter((first, second, third, done)), LIMIT_S))
    await settle()
    first.set_exception(OSError())
    second.cancel()
    await settle()
    assert not waiting.done()
    third.set_result(2)
    await waiting
    assert isinstance(first.exception(), OSError)


async def test_of_nothing_it_returns_at_once() -> None:
    (done,) = futures(1)
    done.set_result(None)
    for nothing in ([], [done]):
        waiting = until_done(nothing)
        with pytest.raises(StopIteration):
            waiting.send(None)


async def test_the_first_cancellation_is_raised_at_the_end() -> None:
    (future,) = futures(1)
    waiting = asyncio.create_task(until_done([future]))
    await settle()
    for message in ("first", "second"):
        waiting.cancel(message)
        await settle()
    assert not waiting.done()
    future.set_result(None)
    with pytest.raises(asyncio.CancelledError, match="first"):
        await waiting
    assert waiting.cancelling() == 2


async def test_a_time_limit_returns_without_an_error() -> None:
    (future,) = futures(1)
    await until_done([future], 0.01)
    assert not future.done()


async def test_a_time_limit_holds_under_cancellations_at_every_turn() -> None:
    (future,) = futures(1)
    waiting = asyncio.create_task(until_done([future], 0.05))
    await settle()
    await cancel_at_every_turn(waiting)
    assert waiting.cancelled()
    assert not future.done()


async def test_what_is_done_in_the_turn_of_a_cancellation_is_seen() -> None:
    (future,) = futures(1)
    waiting = asyncio.create_task(until_done([future]))
    await settle()
    waiting.cancel()
    future.set_result(None)
    with pytest.raises(asyncio.CancelledError):
        await waiting
