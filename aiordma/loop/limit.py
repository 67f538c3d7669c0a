"""Limit: the work of `asyncio.timeout` in a context manager that is not asynchronous.

Every connection passes through several limits, and `asyncio.timeout`, with two coroutines and a
state machine, takes three times as long.  The effect is the same: the task is canceled at the
deadline, and the block's CancelledError becomes a TimeoutError, unless the task was canceled by
another call, too.

But what has arrived counts.  A loop that was busy past the deadline has the event that the block
waits for, and the timer, in the same turn; and the result may have a few turns to go, through other
tasks, before it reaches the block.  `asyncio.timeout` would throw it away.

`PatientLimit` is for a wait for a peer: it counts only the time in which this process could have
read a message of the peer.
"""

from __future__ import annotations

import asyncio
import errno
from types import TracebackType
from typing import Self

from aiordma.errors import errno_error

__all__ = ["Limit", "PatientLimit"]

_STEPS = 20
#: Turns of the loop between the deadline and the cancellation.
_TURNS = 4


class Limit:
    """Ends a block of the running task after so many seconds.

    Args:
        seconds: The time, for a `PatientLimit` more than 0; None for no limit.
        what: Action of the block, for the text of the error: "joining the group".  Without it the
            error has no text, for a caller that raises an error of its own.
        hint: Advice, for the text of the error.

    Attributes:
        seconds: The time.
        expired: Whether the time was up first.

    Raises:
        TimeoutError: At the end of the block, when the time is up; with `what` an RdmaTimeoutError.
    """

    __slots__ = (
        "_canceling", "_held", "_hint", "_task", "_timer", "_turns", "_what", "expired", "seconds",
    )  # fmt: skip

    def __init__(self, seconds: float | None, what: str = "", hint: str = "") -> None:
        self.seconds: float | None = seconds
        self._what = what
        self._hint = hint
        self._timer: asyncio.Handle | None = None
        self._held = 0
        self._turns = _TURNS
        self.expired: bool = False

    def __enter__(self) -> Self:
        if self.seconds is not None:
            loop = asyncio.get_running_loop()
            task = asyncio.current_task(loop)
            if task is None:
                msg = "a time limit is for a task"
                raise RuntimeError(msg)
            self._task = task
            self._canceling = task.cancelling()
            self._begin(loop, self.seconds)
        return self

    def _begin(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        if seconds > 0:
            self._timer = loop.call_later(seconds, self._expire)
        else:
            self._turns = 0  # nothing can have arrived since
            self._timer = loop.call_soon(self._expire)

    def hold(self) -> None:
        """Do nothing: all time counts.  See `PatientLimit`."""

    def go_on(self) -> None:
        """Do nothing."""

    def _expire(self) -> None:
        if self._turns:
            self._turns -= 1
            self._timer = self._task.get_loop().call_soon(self._expire)
        else:
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
        late = (
            self.expired
            and self._task.uncancel() <= self._canceling
            and kind is asyncio.CancelledError
        )
        # A task keeps the error that it ends with, and the error's traceback may keep this limit.
        del self._task
        if late:
            if not self._what:
                raise TimeoutError from error
            text = f"{self._what} took longer than {self.seconds:g} s"
            raise errno_error(errno.ETIMEDOUT, text, self._hint) from error


class PatientLimit(Limit):
    """A limit whose clock stands still while this process itself holds up the block.

    It expires in twenty equal steps, each with a timer of its own.  A loop that is late, because a
    callback takes long or the machine is busy, is late for one step, and so takes at most one step
    from the block.  Between `hold` and `go_on` no time counts at all.
    """

    __slots__ = ("_due", "_left", "_loop", "_rest", "_step")

    def _begin(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self._loop = loop
        self._left = _STEPS
        self._step = step = seconds / _STEPS
        self._due = loop.time() + step
        self._timer = loop.call_later(step, self._tick)

    def _arm(self, seconds: float) -> None:
        self._due = self._loop.time() + seconds
        self._timer = self._loop.call_later(seconds, self._tick)

    def _tick(self) -> None:
        self._left -= 1
        if self._left > 0:
            self._arm(self._step)
        else:
            self._expire()

    def hold(self) -> None:
        """No time counts until `go_on` was called as often."""
        self._held += 1
        if self._held == 1 and self._timer is not None:
            self._timer.cancel()
            self._rest = max(0.0, self._due - self._loop.time())

    def go_on(self) -> None:
        """Undo a `hold`."""
        self._held -= 1
        if not self._held and self._timer is not None and not self.expired:
            self._arm(self._rest)
