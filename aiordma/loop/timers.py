"""Timers that do not make each turn of the loop dearer.

Theory of operation
    A loop that has any timer asks for the time twice in each turn, and sleeps with a limit, for
    which the kernel sets a timer of its own and takes it back.  With asyncio's own loop this is a
    tenth of what a small message takes, and it is paid for every message because of timers that
    are due in seconds.  So the timers that live as long as a connection are kept here, and the
    loop has one descriptor instead, which becomes readable when the first of them is due
    (`timerfd_create(2)`).

    `loop.call_later` stays right for what is short, or rare: arming one here is a system call
    where it is due before all others.

    The descriptor is there while a timer is.
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

__all__ = ["Timer", "call_later", "now", "timeout"]

#: The clock of these timers.  A loop may have another: uvloop's stands still for a turn, and counts
#: milliseconds, so that a timer seems to be early.
now = time.monotonic

#: So many that were cancelled may lie in the heap, and as many again as are in it.
_FEW = 64


class Timer:
    """What `call_later` returns.

    Args:
        function: What is called.
        release: Says that the loop's timers are not needed for this one any more.
    """

    __slots__ = ("_release", "function")

    def __init__(self, function: Callable[[], None], release: Callable[[], None]) -> None:
        self.function: Callable[[], None] | None = function
        self._release = release

    def cancel(self) -> None:
        """Nothing will be called.  Idempotent, and harmless once it has been.  In any thread."""
        if self.function is not None:
            self.function = None
            self._release()

    def run(self) -> None:
        """Call it, unless it was cancelled."""
        function, self.function = self.function, None
        if function is None:
            return
        try:
            function()
        finally:
            # Not before: it mostly sets the next one.
            self._release()


class _Timers:
    """All of one loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._heap: list[tuple[float, int, Timer]] = []
        self._number = itertools.count()
        self._sweep_at = _FEW
        self._fd = -1
        self._fd = alarm_open()
        self._pump = FdPump(self._loop, self._fd, self._drain, self._on_failure)
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
            alarm_set(self._fd, entry[0])

    def _drain(self) -> bool:
        # Blocking, if it was set to another time after the loop had seen it readable.
        with contextlib.suppress(BlockingIOError):
            os.read(self._fd, 8)
        heap, until = self._heap, now()
        try:
            while heap and (heap[0][0] <= until or heap[0][2].function is None):
                try:
                    heapq.heappop(heap)[2].run()
                except BaseException as exc:
                    self._report(exc)
                    if isinstance(exc, ENDS_THE_LOOP):
                        break  # the others are due when the loop runs again
        finally:
            if heap and self._fd >= 0:
                alarm_set(self._fd, heap[0][0])
        return False

    def _report(self, exc: BaseException) -> None:
        report(self._loop, exc, "aiordma: a timer's function failed")

    def _on_failure(self, exc: BaseException) -> None:
        self._report(exc)

    def close(self) -> None:
        """Give the descriptor back.  In any thread: a forgotten connection ends in one's own."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        running = running_loop()
        with contextlib.suppress(RuntimeError):  # the loop is closed in this moment
            self._pump.close()
            if running is not self._loop and self._loop.is_running():
                # Behind the removal of the reader, which the pump has handed to the loop.
                self._loop.call_soon_threadsafe(os.close, fd)
                return
        os.close(fd)

    def __del__(self) -> None:
        # The loop was closed before the owners of timers, which have complained.  They may still
        # cancel it: all of them are collected together.
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def poison_after_fork(self) -> None:
        """In a forked child: nothing is due any more."""
        self._heap.clear()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def call_later(
    loop: asyncio.AbstractEventLoop, delay: float, function: Callable[[], None]
) -> Timer:
    """Call `function` in `loop`, in whose thread this is, in `delay` seconds.

    An exception goes to the loop's exception handler.  The function is kept alive until then, or
    until it is cancelled; it is called in the context in which the loop's first timer was made.

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
    """As `asyncio.timeout`, for what lasts: without a timer of the loop's while it does.

    Raises:
        TimeoutError: It took longer than `delay` seconds.
        OSError: The limit of open files is reached.
    """
    async with asyncio.timeout(None) as scope:
        loop = asyncio.get_running_loop()
        timer = call_later(loop, delay, lambda: scope.reschedule(0))
        try:
            yield
        finally:
            timer.cancel()
