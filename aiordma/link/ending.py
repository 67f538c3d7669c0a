"""Ending: the end of a connection or a stream, one path for every cause.

Order: sent data arrive, and behind them the protocol's own message of the end, if the peer is there
to read it; disconnection; queue pair to the error state; all posts are flushed, or half a second
passes; a worker thread destroys the adapter's objects.  Each wait has a bound.  The objects are
given back even if the task is canceled.

Sent data arrive before the disconnection, which is a packet of its own: on Soft-RoCE three of a
hundred disconnections overtook the messages posted before them, and the error state that follows
ends messages that are under way.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from aiordma.link.adapter_side import AdapterSide
from aiordma.loop import background
from aiordma.loop.limit import Limit

__all__ = ["Ending", "LastSteps"]

_DISCONNECT_S = 1.0


class LastSteps(NamedTuple):
    """The steps of the end that only a connection or only a stream can do.

    Attributes:
        leave: Waits until sent data have arrived, and sends the peer the end; returns whether a
            disconnection is to follow.
        stop: Ends tasks and timers, once the queue pair is in the error state.
        over: Fails the calls that still wait, before the adapter's objects are given back.
    """

    leave: Callable[[], Awaitable[bool]]
    stop: Callable[[], Awaitable[None]] | None = None
    over: Callable[[], None] | None = None


class Ending:
    """The end of one connection.

    Args:
        side: The AdapterSide that is given back.

    Attributes:
        left: The peer has disconnected: no message reaches it any more.
        met: Whether a message of the peer has arrived; if not, its answers are not awaited.
        canceled: The task was canceled: the waits go on, and those for the peer are shortened.
    """

    __slots__ = ("_begun", "_happened", "_side", "_task", "canceled", "left", "met")

    def __init__(self, side: AdapterSide) -> None:
        self._side = side
        self.left: bool = False
        self.met: bool = True
        self.canceled: bool = False
        # Futures made at need, not events: mostly no task waits while the connection is open.
        self._begun: asyncio.Future[None] | None = None
        self._happened: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def begun(self) -> bool:
        """Whether the end has begun."""
        return self._task is not None or self._side.closed

    @property
    def done(self) -> bool:
        """Whether everything was given back, or the reaper is about to."""
        return self._side.closed and (self._task is None or self._task.done())

    def begin(self, steps: LastSteps) -> None:
        """Start, once."""
        if self.begun:
            return
        self._start(steps)
        if self._begun is not None and not self._begun.done():
            self._begun.set_result(None)

    def _start(self, steps: LastSteps) -> None:
        run = functools.partial(self._run, steps)
        self._task = background.start(self._side.loop, run, cancel=False)
        if self._task is None:
            # The loop is ending, or has ended: nothing can be said to the peer, or waited for.
            self._give_back(steps)
        else:
            self._task.add_done_callback(functools.partial(self._ended, steps))

    def _ended(self, steps: LastSteps, _: object) -> None:
        """Start the task again if it was canceled before its first step."""
        if not self._side.closed:
            self._start(steps)

    async def _run(self, steps: LastSteps) -> None:
        side = self._side
        try:
            if await steps.leave() and not self.left:
                await self._disconnect()
            side.to_error()
            if steps.stop is not None:
                await steps.stop()
            await side.quiesce()
        finally:
            self._give_back(steps)
        await side.wait_closed()

    def _give_back(self, steps: LastSteps) -> None:
        try:
            if steps.over is not None:
                steps.over()
        finally:
            self._side.close()

    async def _disconnect(self) -> None:
        try:
            self._side.cm_id.start_disconnect()
        except OSError as exc:
            self._side.note("cannot disconnect: %s", exc)
            return
        if self.met and not self.left and not await self.event(_DISCONNECT_S):
            self._side.note("the peer has not answered the disconnection")

    def peer_left(self) -> None:
        """The connection manager has reported that the connection is down."""
        self.left = True
        self.wake()

    def wake(self, _: object = None) -> None:
        """Something has happened that the task may wait for."""
        if self._happened is not None and not self._happened.done():
            self._happened.set_result(None)

    async def event(self, seconds: float | None = None) -> bool:
        """For the task: wait until something has happened; False if nothing has, for so long.

        A cancellation is an event, too: to stop here would lose data that were sent, and the caller
        goes on waiting.
        """
        self._happened = self._side.loop.create_future()
        try:
            with Limit(seconds):
                await self._happened
        except TimeoutError:
            return False
        except asyncio.CancelledError:
            background.stay()
            self.canceled = True
        finally:
            self._happened = None
        return True

    async def wait(self) -> None:
        """Wait until everything was given back.  Cancellation: ends the wait."""
        if not self.begun:
            if self._begun is None:
                self._begun = self._side.loop.create_future()
            await asyncio.shield(self._begun)
        while self._task is not None and not self.done:
            await asyncio.wait([self._task])
        if self._task is not None and not self._task.cancelled():
            self._task.result()
