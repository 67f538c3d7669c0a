"""The end of a connection or a stream: one sequence of steps, whatever the cause.

The steps, each with a time limit:

1. If the peer is still there, wait until everything that was sent has arrived, and behind it the
   protocol's own message that nothing follows.
2. Disconnect.
3. Move the queue pair to the error state, and wait until all posted requests are flushed.
4. Close the adapter's objects, which a worker thread destroys.  This happens even if the task is
   canceled.

The first step comes before the disconnection because that is a packet of its own, which can
overtake data: on Soft-RoCE three of a hundred disconnections overtook messages that were posted
before.  At the peer, the error state that follows a disconnection discards what is under way.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from aiordma.cm.step import Stage
from aiordma.link.adapter_side import AdapterSide
from aiordma.loop import background
from aiordma.loop.limit import Limit

__all__ = ["Ending", "LastSteps"]

_DISCONNECT_S = 1.0


class LastSteps(NamedTuple):
    """The steps of the end that differ between a connection and a stream.

    Attributes:
        say_goodbye: Tells the peer that nothing follows, and waits until everything that was sent
            has arrived; returns whether to disconnect then.
        stop_tasks: Ends tasks and timers, once the queue pair is in the error state.
        fail_calls: Fails the calls that still wait, before the adapter's objects are closed.
    """

    say_goodbye: Callable[[], Awaitable[bool]]
    stop_tasks: Callable[[], Awaitable[None]] | None = None
    fail_calls: Callable[[], None] | None = None


class Ending:
    """The end of one connection or stream.

    Args:
        side: The `AdapterSide` that is closed at the end.

    Attributes:
        left: Whether the peer has disconnected, so that no message reaches it any more.
        met: Whether a message of the peer has ever arrived.  If not, nobody may be there, and the
            peer's answer to the disconnection is not awaited.
        canceled: Whether the task of the end was canceled.  The waits go on, because to stop would
            lose data, but those for the peer become shorter.
    """

    __slots__ = ("_begun", "_happened", "_side", "_task", "canceled", "left", "met")

    def __init__(self, side: AdapterSide) -> None:
        self._side = side
        self.left: bool = False
        self.met: bool = True
        self.canceled: bool = False
        # Futures that are made when a task waits, because on an open connection mostly none does.
        self._begun: asyncio.Future[None] | None = None
        self._happened: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def begun(self) -> bool:
        """Whether the end has begun."""
        return self._task is not None or self._side.closed

    @property
    def done(self) -> bool:
        """Whether everything is closed, or is left to the worker thread that destroys it."""
        return self._side.closed and (self._task is None or self._task.done())

    def begin(self, steps: LastSteps) -> None:
        """Start the task of the end; only the first call has an effect."""
        if self.begun:
            return
        self._start(steps)
        if self._begun is not None and not self._begun.done():
            self._begun.set_result(None)

    def _start(self, steps: LastSteps) -> None:
        run = functools.partial(self._run, steps)
        self._task = background.start(self._side.loop, run, cancel=False)
        if self._task is None:
            # The loop is ending, or has ended: the peer cannot be told, and no wait is possible.
            self._close(steps)
        else:
            self._task.add_done_callback(functools.partial(self._ended, steps))

    def _ended(self, steps: LastSteps, _: object) -> None:
        """Start the task again if it was canceled before its first step."""
        if not self._side.closed:
            self._start(steps)

    async def _run(self, steps: LastSteps) -> None:
        side = self._side
        try:
            if await steps.say_goodbye() and not self.left:
                await self._disconnect()
            side.to_error()
            if steps.stop_tasks is not None:
                await steps.stop_tasks()
            await side.quiesce()
        finally:
            self._close(steps)
        await side.wait_closed()

    def _close(self, steps: LastSteps) -> None:
        try:
            if steps.fail_calls is not None:
                steps.fail_calls()
        finally:
            self._side.close()

    async def _disconnect(self) -> None:
        cm_id = self._side.cm_id
        # A client that has not confirmed may not be there, and keeps others from its place: a
        # handshake's place is free when all of this is over.
        answers = self.met and cm_id.stage is not Stage.ACCEPTED
        try:
            cm_id.start_disconnect()
        except OSError as exc:
            self._side.note("cannot disconnect: %s", exc)
            return
        if answers and not self.left and not await self.event(_DISCONNECT_S):
            self._side.note("the peer has not answered the disconnection")

    def peer_left(self) -> None:
        """Note that the connection manager has reported the disconnection."""
        self.left = True
        self.wake()

    def wake(self, _: object = None) -> None:
        """End the present wait in `event`; also a done callback of futures."""
        if self._happened is not None and not self._happened.done():
            self._happened.set_result(None)

    async def event(self, seconds: float | None = None) -> bool:
        """Wait for the next call of `wake`, in the task of the end; False after `seconds` seconds.

        A cancellation of the task ends the wait as well.  It is noted in `canceled` and not raised,
        because to stop here would lose data that were sent.
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

    async def wait_begun(self) -> None:
        """Wait until the end has begun.  Cancellation: ends the wait."""
        if not self.begun:
            if self._begun is None:
                self._begun = self._side.loop.create_future()
            await asyncio.shield(self._begun)

    async def wait(self) -> None:
        """Wait until everything is closed.  Cancellation: ends the wait."""
        await self.wait_begun()
        while self._task is not None and not self.done:
            await asyncio.wait([self._task])
        if self._task is not None and not self._task.cancelled():
            self._task.result()
