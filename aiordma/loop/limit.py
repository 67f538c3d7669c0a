"""Limit: `asyncio.timeout`, as a plain context manager.

For what every connection goes through: the one of asyncio has two coroutines and a state machine,
and takes three times as long.  What it does is the same: the task is canceled at the deadline, and
the block's CancelledError becomes a TimeoutError, unless somebody else has canceled the task, too.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

__all__ = ["Limit"]


class Limit:
    """Ends a block of the running task after so many seconds.

    Args:
        seconds: The time; None for no limit.

    Attributes:
        expired: Whether the time was up first.

    Raises:
        TimeoutError: At the end of the block, when the time is up.
    """

    __slots__ = ("_canceling", "_seconds", "_task", "_timer", "expired")

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._timer: asyncio.Handle | None = None
        self.expired = False

    def __enter__(self) -> Self:
        if self._seconds is not None:
            loop = asyncio.get_running_loop()
            task = asyncio.current_task(loop)
            if task is None:
                msg = "a time limit is for a task"
                raise RuntimeError(msg)
            self._task = task
            self._canceling = task.cancelling()
            if self._seconds > 0:
                self._timer = loop.call_later(self._seconds, self._expire)
            else:
                self._timer = loop.call_soon(self._expire)  # before anything else gets on
        return self

    def _expire(self) -> None:
        self.expired = True
        self._task.cancel()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._timer is None:
            return
        self._timer.cancel()
        self._timer = None
        if (
            self.expired
            and self._task.uncancel() <= self._canceling
            and kind is asyncio.CancelledError
        ):
            raise TimeoutError from error
