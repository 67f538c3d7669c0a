"""Timers that do not make each turn of the loop slower.

Theory of operation
    A loop that has any timer reads the clock twice in each turn, and sleeps with a limit, for which
    the kernel sets a timer of its own and cancels it.  With asyncio's own loop this is a tenth of
    the time of a small message, and every message pays it for timers that are due in seconds.  So
    timers that last as long as a connection are kept here, and the loop has one descriptor instead,
    which becomes readable when the first of them is due (`timerfd_create(2)`).

    `loop.call_later` is better for timers that are short or rare: a timer here that is due before
    all others costs a system call.

    The descriptor is open while there is a timer.

    An `Alarm` is such a descriptor by itself, for work that comes again and again and is done in C.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import heapq
import itertools
import os
import time
from collections.abc import AsyncIterator, Callable

from aiordma._core import alarm_open, alarm_set
from aiordma.loop import fork, registry
from aiordma.loop.pump import FdPump
from aiordma.loop.raised import ENDS_THE_LOOP, report
from aiordma.loop.running import running_loop

__all__ = ["Alarm", "Timer", "call_later", "now", "timeout"]

#: The clock of these timers, in seconds.  A loop may have another: uvloop's clock stands still for
#: a turn and counts milliseconds, so that a timer seems to be early.
now: Callable[[], float] = time.monotonic

#: The heap is swept when it has twice the entries that the last sweep has left, and so many more.
_FEW = 64


class Timer:
    """A timer; made by `call_later`.

    Args:
        function: The function to call; None after that, or after `cancel`.
        release: Releases the loop's timers, which are closed with their last user.
    """

    __slots__ = ("_release", "function")

    def __init__(self, function: Callable[[], None], release: Callable[[], None]) -> None:
        self.function: Callable[[], None] | None = function
        self._release = release

    def cancel(self) -> None:
        """Do not call the function.  Idempotent; harmless after the call.  In any thread."""
        if self.function is not None:
            self.function = None
            self._release()

    def run(self) -> None:
        """Call the function, unless the timer was canceled."""
        function, self.function = self.function, None
        if function is None:
            return
        try:
            function()
        finally:
            # Released last: the function usually sets the next timer, in the same `_Timers`.
            self._release()


class Alarm:
    """A descriptor of a loop that becomes readable at a time.

    Args:
        loop: The loop, in whose thread the alarm is made and set.
        drain: Called when the time has come.  A method's object is not kept alive.
        failed: As of `FdPump`.
        quick: Given the descriptor and the pump's reader, makes the reader that the loop calls.

    Raises:
        OSError: The limit of open files is reached.
    """

    __slots__ = ("__weakref__", "_fd", "_loop", "_pump")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        drain: Callable[[], bool],
        failed: Callable[[Exception], None],
        quick: Callable[[int, Callable[[], None]], Callable[[], None]] | None = None,
    ) -> None:
        self._loop = loop
        self._fd = -1
        self._fd = fd = alarm_open()
        reader = None if quick is None else functools.partial(quick, fd)
        self._pump = FdPump(loop, fd, drain, failed, reader)
        fork.guard(self)

    def set(self, when: float, every: float = 0.0) -> None:
        """Be due when `now` is `when`, not before, and then `every` so many seconds; 0: once."""
        if self._fd >= 0:
            alarm_set(self._fd, when, every)

    def read(self) -> None:
        """Make the descriptor unreadable again."""
        # BlockingIOError: the alarm was set to a later time after the loop had seen it readable.
        with contextlib.suppress(BlockingIOError):
            os.read(self._fd, 8)

    def close(self) -> None:
        """Close the descriptor.  In any thread: the collector ends a forgotten connection there."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        running = running_loop()
        with contextlib.suppress(RuntimeError):  # the loop is closed in this moment
            self._pump.close()
            if running is not self._loop and self._loop.is_running():
                # After the removal of the reader, which the pump has scheduled in the loop.
                self._loop.call_soon_threadsafe(os.close, fd)
                return
        os.close(fd)

    def __del__(self) -> None:
        # The loop was closed before the owners of timers, which have warned.  They may still cancel
        # their timers: all of them are collected together.
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def poison_after_fork(self) -> None:
        """In a forked child: the parent's loop is not touched."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class _Timers:
    """All timers of one loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._heap: list[tuple[float, int, Timer]] = []
        self._number = itertools.count()
        self._sweep_at = _FEW
        self._alarm = Alarm(loop, self._drain, self._report)
        fork.guard(self)

    def add(self, delay: float, timer: Timer) -> None:
        """Run `timer` in `delay` seconds."""
        heap = self._heap
        if len(heap) >= self._sweep_at:
            heap[:] = [entry for entry in heap if entry[2].function is not None]
            heapq.heapify(heap)
            self._sweep_at = 2 * len(heap) + _FEW
        entry = (now() + delay, next(self._number), timer)
        heapq.heappush(heap, entry)
        if heap[0] is entry:
            self._alarm.set(entry[0])

    def _drain(self) -> bool:
        self._alarm.read()
        heap, until = self._heap, now()
        try:
            while heap and (heap[0][0] <= until or heap[0][2].function is None):
                try:
                    heapq.heappop(heap)[2].run()
                except BaseException as exc:
                    self._report(exc)
                    if isinstance(exc, ENDS_THE_LOOP):
                        break  # the other timers are run when the loop runs again
        finally:
            if heap:
                self._alarm.set(heap[0][0])
        return False

    def _report(self, exc: BaseException) -> None:
        report(self._loop, exc, "aiordma: a timer's function failed")

    def close(self) -> None:
        """Close the descriptor.  In any thread."""
        self._alarm.close()

    def poison_after_fork(self) -> None:
        """In a forked child: drop all timers."""
        self._heap.clear()


def call_later(
    loop: asyncio.AbstractEventLoop, delay: float, function: Callable[[], None]
) -> Timer:
    """Have `function` called by `loop` in `delay` seconds; to be used in the loop's thread.

    An exception goes to the loop's exception handler.  The function is kept alive until it is
    called or the timer is canceled; it is called in the context that made the loop's first timer.

    Raises:
        OSError: The limit of open files is reached.
    """
    timers, release = registry.acquire("timers", functools.partial(_Timers, loop), loop)
    timer = Timer(function, release)
    try:
        timers.add(delay, timer)
    except BaseException:
        timer.cancel()
        raise
    return timer


@contextlib.asynccontextmanager
async def timeout(delay: float) -> AsyncIterator[None]:
    """As `asyncio.timeout`, for long blocks: it uses no timer of the loop.

    Raises:
        TimeoutError: The block took longer than `delay` seconds.
        OSError: The limit of open files is reached.
    """
    async with asyncio.timeout(None) as scope:
        loop = asyncio.get_running_loop()
        timer = call_later(loop, delay, lambda: scope.reschedule(0))
        try:
            yield
        finally:
            timer.cancel()
