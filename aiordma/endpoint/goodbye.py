"""The last frames of a connection, and the wait until they have reached the peer.

After `close()`, the peer first reads the large messages that were announced, and then gets an END
frame behind the last message.  After `abort()`, or a failure that this side has found, no END is
sent, but messages and an ABORT frame that were posted before may still arrive.  If the connection
is lost, completions of sends may still be on their way.  Every wait has a time limit.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable

from aiordma.endpoint.config import ConnectionConfig
from aiordma.endpoint.link import Link
from aiordma.endpoint.outcome import Outcome
from aiordma.endpoint.sending import Sender
from aiordma.endpoint.wire import (
    FrameKind,
)
from aiordma.errors import ConnectionLostError
from aiordma.link.ending import Ending
from aiordma.logs import log_of
from aiordma.loop import background
from aiordma.loop.limit import Limit
from aiordma.loop.timers import now

__all__ = ["Goodbye"]


_log = log_of("connection")
#: How long to wait, in seconds, for completions that the peer's disconnection has overtaken.
_OVERTAKEN_S = 1.0


class Goodbye:
    """The last frames of one connection.

    Args:
        link: The adapter's side of the connection.
        config: The settings, which have the time limits.
        outcome: Whether the connection is over, and why.
        sender: What sends the frames.
        ending: The end that this is a part of, with whose events the waits here end.

    Attributes:
        sends_before_end: How many sends were posted before END; None until END was posted.
        answered: Whether each request of the peer that was served has its answer, so that the
            others may be sent to another server.
    """

    __slots__ = (
        "_aborted", "_config", "_ending", "_link", "_outcome", "_sender", "_task", "answered",
        "sends_before_end",
    )  # fmt: skip

    def __init__(
        self,
        link: Link,
        config: ConnectionConfig,
        outcome: Outcome,
        sender: Sender,
        ending: Ending,
    ) -> None:
        self._link = link
        self._config = config
        self._outcome = outcome
        self._sender = sender
        self._ending = ending
        self._aborted = False
        self.sends_before_end: int | None = None
        self.answered: bool = False
        self._task: asyncio.Task[None] | None = None

    def abort(self) -> bool:
        """Send no END any more; messages that were posted still arrive.

        Returns:
            Whether the connection was being closed in good order, and END was still to be sent or
            to arrive.
        """
        self._aborted = True
        self._ending.wake()
        return self._task is not None and not self._task.done()

    async def say(
        self, drained: Callable[[], Awaitable[None]], fail_calls: Callable[[], None]
    ) -> bool:
        """Wait until everything has arrived that still can, END included, within the time limits.

        This is `LastSteps.say_goodbye`, and always returns True: a disconnection follows.

        Args:
            drained: Waits until the peer has read all large messages.
            fail_calls: Fails the calls of the program that still wait.
        """
        if self._outcome.cause is None and not self._ending.left:
            await self._say_end_unless_aborted(drained)
        elif not self._aborted:
            await self._wait_for_arrival(_OVERTAKEN_S)
        fail_calls()
        if self._aborted:
            await self.linger()
        self._link.end()
        return True

    async def _say_end_unless_aborted(self, drained: Callable[[], Awaitable[None]]) -> None:
        ending = self._ending
        say_end = functools.partial(self._say_end_in_time, drained)
        goodbye = self._task = background.start(self._link.loop, say_end)
        if goodbye is None:
            return
        goodbye.add_done_callback(ending.wake)
        try:
            while not (goodbye.done() or ending.left or self._aborted):
                await ending.event()
                self._aborted |= ending.canceled
        finally:
            goodbye.cancel()
            # The exception of a canceled task keeps its frames, and they refer to this object.
            self._task = None

    async def _say_end_in_time(self, drained: Callable[[], Awaitable[None]]) -> None:
        try:
            with Limit(self._config.close_timeout_s, "the goodbye"):
                await self.say_end(drained)
        except Exception as exc:
            self._link.note("closes without the peer's confirmation: %r", exc)

    async def say_end(self, drained: Callable[[], Awaitable[None]]) -> None:
        """Send END behind all messages, once, and wait until everything has arrived.

        It does not matter whether END reaches a peer that has itself closed in good order.

        Raises:
            ConnectionLostError: The connection is lost, and this side's adapter has not confirmed
                that everything has arrived.

        Cancellation: ends the wait; END may not have been sent yet.
        """
        await drained()
        if self.sends_before_end is None:
            await self._sender.flush_all()
        if self.sends_before_end is None and not self._config.raw:
            self.sends_before_end = self._link.state.sent
            self._sender.control(FrameKind.END, int(self.answered))
        try:
            await self._sender.flush_all()
        except ConnectionLostError:
            if not self._outcome.left:
                raise
            await self._sender.flush(self.sends_before_end)

    async def deliver(self) -> None:
        """Wait until posted messages have arrived, because the event loop is about to end."""
        if self._ending.begun:
            await self._ending.wait()
        else:
            await self.linger()

    async def linger(self) -> None:
        """Wait until posted messages have arrived, at most `close_timeout_s` seconds."""
        arrived = await self._wait_for_arrival(
            self._config.close_timeout_s, unless=lambda: self._ending.left
        )
        if not arrived:
            _log.info("%s: what was sent has not arrived", self._link.peer_name())

    async def _wait_for_arrival(
        self, timeout: float, unless: Callable[[], bool] = lambda: False
    ) -> bool:
        """Wait until every posted message has arrived, or is known to be lost.

        Args:
            timeout: Seconds.
            unless: Ends the wait, too, once it returns true.

        Returns:
            False if the time was over before.
        """
        end = now() + timeout
        while self._link.can_send and not unless():
            arriving = self._sender.arriving()
            if arriving is None:
                break
            arriving.add_done_callback(self._ending.wake)
            if not await self._ending.event(end - now()):
                return False
        return True
