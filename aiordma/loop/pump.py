"""FdPump: a file descriptor that stays registered with the loop and is drained when readable.

The descriptor is registered once, when its owner starts to use the loop, and removed before it is
closed.  The rejected way, adding and removing a reader around each wait, costs two system calls per
wait and leaves events unread in between.

The loop holds the pump, and the pump does not hold the descriptor's owner: an owner that is
forgotten is collected, warns and cleans up while its loop runs, not only when the loop ends.
"""

from __future__ import annotations

import asyncio
import os
import types
import weakref
from collections.abc import Callable
from typing import Any

from aiordma.loop import fork
from aiordma.loop.running import running_loop

__all__ = ["FdPump"]


def _weakly(function: Callable[..., Any]) -> Callable[[], Callable[..., Any] | None]:
    """Return a reference to `function`; if it is a method, its object is not kept alive."""
    if isinstance(function, types.MethodType):
        return weakref.WeakMethod(function)
    return lambda: function


class FdPump:
    """Calls `drain` whenever `fd` is readable, and again from the loop while it asks for more.

    Args:
        loop: The loop that owns the descriptor from now on.
        fd: A descriptor; it is switched to non-blocking, without which a drain could hang.
        drain: Reads until the descriptor is empty or a budget is used up.  Returns True when it
            stopped for its budget; it is then called again in the loop's next round, so that
            other tasks run in between.  An Exception ends the pump: an event that cannot be
            consumed would otherwise make the loop spin.  SystemExit, KeyboardInterrupt and the
            like go to the loop, and the pump goes on when the loop does.
        failed: Called once with the Exception when a drain raised; after that the reader is gone.
        quick: Makes the reader that the loop calls instead of the pump's; it is given the pump's
            reader, and calls it for the events that it does not handle itself.

    If `drain` or `failed` is a method, its object is not kept alive; `quick` is not kept.

    Must be used from the loop's thread, except `close`.
    """

    __slots__ = (
        "__weakref__", "_again", "_drain", "_failed", "_fd", "_loop", "_owner", "_paused",
        "_quick",
    )  # fmt: skip

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        fd: int,
        drain: Callable[[], bool],
        failed: Callable[[Exception], None],
        quick: Callable[[Callable[[], None]], Callable[[], None]] | None = None,
    ) -> None:
        os.set_blocking(fd, False)
        self._loop: asyncio.AbstractEventLoop | None = loop
        self._fd = fd
        # A method is split here: weakref.WeakMethod would rebuild it in Python at every call.
        if isinstance(drain, types.MethodType):
            self._owner: Callable[[], Any] = weakref.ref(drain.__self__)
            self._drain: Callable[[Any], bool] = drain.__func__
        else:
            self._owner = lambda: drain
            self._drain = lambda _: drain()
        self._failed = _weakly(failed)
        self._again: asyncio.Handle | None = None
        self._paused = False
        self._quick = None if quick is None else quick(self._readable)
        loop.add_reader(fd, self._quick or self._readable)
        fork.guard(self)

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The loop that owns the descriptor; None once closed."""
        return self._loop

    def _readable(self) -> None:
        if self._loop is None:
            return  # in a forked child that goes on with its parent's loop
        owner = self._owner()
        if owner is None:
            # The owner is being collected, perhaps in another thread, and its finalizer comes next.
            self._loop.remove_reader(self._fd)
            return
        try:
            more = self._drain(owner)
        except Exception as exc:
            self.close()
            if (failed := self._failed()) is not None:
                failed(exc)
            return
        except BaseException:
            # The exception is not the descriptor's: it ends the loop, which programs run again.
            self._go_on()
            raise
        if more:
            self._go_on()

    def _go_on(self) -> None:
        if self._loop is not None and self._again is None and not self._paused:
            self._again = self._loop.call_soon(self._continue)

    def _continue(self) -> None:
        self._again = None
        if self._loop is not None and not self._paused:
            self._readable()

    def kick(self) -> bool:
        """Drain now, without waiting for the descriptor; return whether there may be more."""
        if self._loop is not None and not self._paused:
            self._readable()
        return self._again is not None

    def pause(self) -> None:
        """Stop reading: the kernel keeps further events, and they take no memory of the process."""
        if self._loop is not None and not self._paused:
            self._paused = True
            self._loop.remove_reader(self._fd)

    def resume(self) -> None:
        """Read again after `pause`."""
        if self._loop is not None and self._paused:
            self._paused = False
            self._loop.add_reader(self._fd, self._quick or self._readable)
            # A drain that stopped for its budget may leave completions for which no event comes.
            if self._again is None:
                self._again = self._loop.call_soon(self._continue)

    def close(self) -> None:
        """Take the reader off the loop.  Idempotent; must come before the fd is closed.

        From a foreign thread (a finalizer) the loop removes it later; on a closed loop there is
        nothing left to remove.
        """
        loop, self._loop = self._loop, None
        if loop is None:
            return
        self._quick = None  # the function refers to this object: a cycle
        if self._again is not None:
            self._again.cancel()
            self._again = None
        if loop.is_closed():
            return
        running = running_loop()
        if running is loop or not loop.is_running():
            loop.remove_reader(self._fd)
        else:
            loop.call_soon_threadsafe(loop.remove_reader, self._fd)

    def poison_after_fork(self) -> None:
        """In a forked child: forget the loop, whose epoll set is shared with the parent."""
        self._loop = None
        self._again = self._quick = None
