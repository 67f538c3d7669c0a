"""Waits for what goes on when the waiting task is canceled, and waits that outlast that, too.

A task that is canceled may have to wait for something before it may end: for memory that an adapter
still writes to, or for tasks of its own that it has canceled.  To catch the CancelledError and wait
once is not enough, because a task can be canceled again: by a second call of `Task.cancel()`, by
the end of the loop, and under a cancel scope of anyio in every turn of the loop until the scope is
left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, TypeVar

from aiordma.loop.timers import now

__all__ = ["result_of", "until_done"]

T = TypeVar("T")


async def result_of(future: asyncio.Future[T]) -> T:
    """Wait for a future or task, and return its result.

    Cancellation: ends the wait.  The future goes on, as with `asyncio.shield`; but nobody is told
    of its failure then, which asyncio would log, from Python 3.14 on in any case.
    """
    try:
        await asyncio.wait((future,))
        return future.result()
    except BaseException:
        if future.done():
            _look_at(future)
        else:
            future.add_done_callback(_look_at)
        raise
    finally:
        del future  # its exception has this frame: a cycle


def _look_at(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()


async def until_done(futures: Iterable[asyncio.Future[Any]], timeout: float | None = None) -> None:
    """Wait until all futures are done, however often the task is canceled meanwhile.

    Args:
        futures: Futures or tasks; nothing is done to them, and their exceptions are not looked at.
        timeout: Seconds, after which it returns all the same; None for no limit.

    Cancellation: the first one is raised at the end of the wait.
    """
    end = None if timeout is None else now() + timeout
    left = {future for future in futures if not future.done()}
    canceled: asyncio.CancelledError | None = None
    while left and (end is None or now() < end):
        try:
            await asyncio.wait(left, timeout=None if end is None else max(0.0, end - now()))
        except asyncio.CancelledError as exc:
            canceled = canceled or exc
        left = {future for future in left if not future.done()}
    if canceled is not None:
        try:
            raise canceled
        finally:
            del canceled  # its traceback refers to this frame: a cycle
