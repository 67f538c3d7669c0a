"""Limit: a time limit for a block of a task, whose error says what took long.

As with `asyncio.timeout`, the task is canceled at the deadline, and the block's CancelledError
becomes a TimeoutError, unless the task was canceled by another call, too.  Two things differ:

- What has arrived counts.  A loop that was busy past the deadline has the event that the block
  waits for, and the timer, in the same turn; and the result may have a few turns to go, through
  other tasks, before it reaches the block.  `asyncio.timeout` would throw it away.
- A wait for a peer may count only the time in which this process could have read a message of the
  peer (`patient`).

It is a context manager that is not asynchronous, as nothing is awaited at its ends.
"""

from __future__ import annotations

import asyncio
import errno
from types import TracebackType
from typing import Self

from aiordma.errors import errno_error

__all__ = ["Limit"]

_STEPS = 20
#: Turns of the loop between the deadline and the cancellation.
_TURNS = 4


class Limit:
    """Ends a block of the running task after so many seconds.

    Args:
        seconds: The time; None for no limit.
        what: What the block does, for the text of the error: "joining the group".  Without it the
            error has no text, for a caller that raises an error of its own.
        hint: Advice, for the text of the error.
        patient: Whether the clock stands still while this process itself holds up the block.  The
            time is counted in twenty equal steps, each with a timer of its own: a loop that is
            late, because a callback takes long or the machine is busy, is late for one step, and
            so takes at most one step from the block.  Between `pause` and `resume` no time counts.

    Attributes:
        seconds: The time.
        expired: Whether the time was up first.

    Raises:
        TimeoutError: At the end of the block, when the time is up; with `what` an RdmaError, too.
    """

    __slots__ = (
        "_cancelling", "_due", "_hint", "_loop", "_patient", "_pauses", "_rest", "_steps", "_task",
        "_timer", "_what", "expired", "seconds",
    )  # fmt: skip

    def __init__(
        self, seconds: float | None, what: str = "", hint: str = "", *, patient: bool = False
    ) -> None:
        self.seconds: float | None = seconds
        self.expired: bool = False
        self._what = what
        self._hint = hint
        self._patient = patient
        self._pauses = 0
        self._steps = 0  # that are left
        self._timer: asyncio.Handle | None = None  # within the block

    def __enter__(self) -> Self:
        if self.seconds is not None:
            self._loop = asyncio.get_running_loop()
            task = asyncio.current_task(self._loop)
            if task is None:
                msg = "a time limit is for a task"
                raise RuntimeError(msg)
            self._task = task
            self._cancelling = task.cancelling()
            if self.seconds > 0:
                self._steps = _STEPS if self._patient else 1
                self._arm(self.seconds / self._steps)
            else:
                self._timer = self._loop.call_soon(self._expire, 0)  # nothing can have arrived
        return self

    def _arm(self, seconds: float) -> None:
        self._due = self._loop.time() + seconds
        self._timer = self._loop.call_later(seconds, self._tick)

    def _tick(self) -> None:
        self._steps -= 1
        if self._steps:
            assert self.seconds is not None
            self._arm(self.seconds / _STEPS)
        else:
            self._expire(_TURNS)

    def _expire(self, turns: int) -> None:
        if turns:
            self._timer = self._loop.call_soon(self._expire, turns - 1)
        else:
            self.expired = True
            self._task.cancel()

    def pause(self) -> None:
        """For a patient limit: no time counts until `resume` was called as often."""
        if self._patient:
            self._pauses += 1
            if self._pauses == 1 and self._steps and self._timer is not None:
                self._timer.cancel()
                self._rest = max(0.0, self._due - self._loop.time())

    def resume(self) -> None:
        """Undo a `pause`."""
        if self._patient:
            self._pauses -= 1
            if not self._pauses and self._steps and self._timer is not None:
                self._arm(self._rest)

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
        late = (
            self.expired
            and self._task.uncancel() <= self._cancelling
            and kind is asyncio.CancelledError
        )
        # A task keeps the error that it ends with, and the error's traceback may keep this limit.
        del self._task
        if late:
            if not self._what:
                raise TimeoutError from error
            text = f"{self._what} took longer than {self.seconds:g} s"
            raise errno_error(errno.ETIMEDOUT, text, self._hint) from error
