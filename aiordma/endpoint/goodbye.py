"""Goodbye: the last messages of a connection, and the wait until they have arrived.

If the connection is closed in good order, the peer reads the large messages that it was told of,
and END follows the last message.  After an abort what was sent may arrive, ABORT included, if the
peer is there to hear it.  Each wait has a bound.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from aiordma.endpoint.config import ConnectionConfig
from aiordma.endpoint.large import Exposer
from aiordma.endpoint.link import Link
from aiordma.endpoint.sending import Sender
from aiordma.endpoint.wire import FrameKind
from aiordma.link.ending import Ending
from aiordma.loop import background
from aiordma.loop.limit import Limit
from aiordma.loop.timers import now

__all__ = ["Goodbye"]

_log = logging.getLogger("aiordma")


class Leaving(Protocol):
    """A connection, as its end sees it."""

    @property
    def _alive(self) -> bool:
        """Whether it is neither broken nor aborted."""

    def _end(self) -> None:
        """Nothing more will be sent: fail what still waits."""


class Goodbye:
    """That of one connection.

    Args:
        link: The adapter's side.
        config: Times.
        sender: Says END.
        exposer: Large messages that the peer should still read.
        ending: The end that this is a part of.
    """

    __slots__ = ("_aborted", "_config", "_ending", "_exposer", "_link", "_sender", "_task")

    def __init__(
        self,
        link: Link,
        config: ConnectionConfig,
        sender: Sender,
        exposer: Exposer,
        ending: Ending,
    ) -> None:
        self._link = link
        self._config = config
        self._sender = sender
        self._exposer = exposer
        self._ending = ending
        self._aborted = False
        self._task: asyncio.Task[None] | None = None

    def abort(self) -> bool:
        """Give up END, but let sent messages arrive; return whether END was about to be sent."""
        self._aborted = True
        self._ending.wake()
        return self._task is not None and not self._task.done()

    async def leave(self, connection: Leaving) -> bool:
        """As in `LastSteps`; a disconnection follows in any case."""
        if connection._alive and not self._ending.left:
            await self._say()
        connection._end()
        if self._aborted:
            await self.linger()
        self._link.end()
        return True

    async def _say(self) -> None:
        ending = self._ending
        goodbye = self._task = background.start(self._link.loop, self._say_end)
        if goodbye is None:
            return
        goodbye.add_done_callback(ending.wake)
        try:
            while not (goodbye.done() or ending.left or self._aborted):
                await ending.event()
                self._aborted |= ending.canceled
        finally:
            goodbye.cancel()
            self._task = None  # the exception of a canceled task has frames that have this object

    async def _say_end(self) -> None:
        try:
            with Limit(self._config.close_timeout_s, "the goodbye"):
                await self._exposer.drained()
                await self._sender.flush_all()
                if not self._config.raw:
                    self._sender.control(FrameKind.END)
                    await self._sender.flush_all()
        except Exception as exc:
            _log.debug("closing without the peer's confirmation: %r", exc)

    async def deliver(self) -> None:
        """Let arrive what was sent: the loop has canceled all of its tasks, and will be closed."""
        if self._ending.begun:
            await self._ending.wait()
        else:
            await self.linger()

    async def linger(self) -> None:
        """Let arrive what the adapter has been given."""
        end = now() + self._config.close_timeout_s
        while not self._ending.left and self._link.can_send:
            arriving = self._sender.arriving()
            if arriving is None:
                return
            arriving.add_done_callback(self._ending.wake)
            if not await self._ending.event(end - now()):
                _log.info("%s: what was sent has not arrived", self._link.peer_name())
                return
