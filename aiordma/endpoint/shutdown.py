"""Shutdown: the end of a connection, one path for every cause.

Order: END in the band, if the connection is closed in good order; the completions of what was
sent, END or ABORT included, if the peer is there to hear it; disconnection; queue pair to the error
state; everything posted comes back, or half a second passes; the adapter's objects are given back,
in the reaper.  Each wait has a bound.  Whatever ends the task, the giving back is done.

The completions come before the disconnection, which is a packet of its own: on Soft-RoCE three of a
hundred disconnections overtook what had been posted before them, and the error state that follows
ends what is on its way.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from aiordma.endpoint.config import ConnectionConfig
from aiordma.endpoint.link import Link
from aiordma.endpoint.rendezvous import Exposer
from aiordma.endpoint.sender import Sender
from aiordma.endpoint.wire import FrameKind
from aiordma.loop import background
from aiordma.loop.limit import Limit
from aiordma.loop.timers import now

__all__ = ["Shutdown"]

_log = logging.getLogger("aiordma")
_DISCONNECT_S = 1.0


class Ending(Protocol):
    """A connection, as its end sees it."""

    @property
    def _alive(self) -> bool:
        """Whether it is neither broken nor aborted."""

    def _end(self) -> None:
        """Nothing more will be sent: fail what still waits."""

    async def _stop_parts(self) -> None:
        """End its tasks and timers."""


class Shutdown:
    """Ends one connection.

    Args:
        link: The adapter's side.
        config: Times.
        sender: Says END.
        exposer: Large messages that the peer should still read.
    """

    __slots__ = (
        "_aborted", "_begun", "_config", "_disconnected", "_done", "_exposer", "_goodbye", "_link",
        "_met", "_sender", "_task", "_told",
    )  # fmt: skip

    def __init__(
        self, link: Link, config: ConnectionConfig, sender: Sender, exposer: Exposer
    ) -> None:
        self._link = link
        self._config = config
        self._sender = sender
        self._exposer = exposer
        # Futures at need, and not events: of a connection that lives no task waits for these.
        self._begun: asyncio.Future[None] | None = None
        self._told: asyncio.Future[None] | None = None
        self._disconnected = False
        self._aborted = False
        self._met = True
        self._done = False  # without a task
        self._goodbye: asyncio.Task[None] | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def done(self) -> bool:
        """Whether everything was given back."""
        return self._done or (self._task is not None and self._task.done())

    def begin(self, connection: Ending) -> None:
        """Start, once; `connection` is whose end it is."""
        if self._done or self._task is not None:
            return
        self._task = background.start(self._link.loop, lambda: self._run(connection), cancel=False)
        if self._task is None:
            # The loop is ending, or has ended: nothing can be said to the peer, or waited for.
            self._done = True
            self._give_back(connection)
        else:
            # One that is canceled before its first step gives nothing back.
            self._task.add_done_callback(lambda _: self._give_back(connection))
        if self._begun is not None and not self._begun.done():
            self._begun.set_result(None)

    def peer_left(self) -> None:
        """The peer has disconnected: it will not hear a goodbye."""
        self._disconnected = True
        self._wake()
        self._hurry()

    def broken(self) -> None:
        """The adapter has failed: nothing that was sent arrives any more."""
        self._wake()

    def abort(self) -> bool:
        """No goodbye any more, but what was sent may arrive; whether there was a goodbye."""
        self._aborted = True
        return self._hurry()

    def _wake(self, _: object = None) -> None:
        if self._told is not None and not self._told.done():
            self._told.set_result(None)

    def _hurry(self) -> bool:
        if self._goodbye is None or self._goodbye.done():
            return False
        self._goodbye.cancel()
        return True

    def unmet(self) -> None:
        """The client has not greeted: what it holds is given back without waiting for it."""
        self._met = False

    async def wait(self) -> None:
        """Wait until everything was given back.  Cancellation: ends the wait."""
        if self._done:
            return
        if self._task is None:
            if self._begun is None:
                self._begun = self._link.loop.create_future()
            await asyncio.shield(self._begun)
        if self._task is None:
            return
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.result()

    async def _run(self, connection: Ending) -> None:
        link = self._link
        try:
            if connection._alive and not self._disconnected:
                await self._wait_for_goodbye()
            connection._end()
            if self._aborted:
                await self._linger()
            link.end()
            if not self._disconnected:
                await self._disconnect()
            link.to_error()
            await connection._stop_parts()
            await link.quiesce()
        finally:
            # If this is canceled, others still wait, and the goodbye goes on.
            self._hurry()
            self._give_back(connection)
        await link.wait_closed()

    def _give_back(self, connection: Ending) -> None:
        connection._end()
        self._link.close()

    async def _wait_for_goodbye(self) -> None:
        goodbye = self._goodbye = background.start(self._link.loop, self._say_goodbye)
        if goodbye is None:
            return
        try:
            await asyncio.wait([goodbye])
        except asyncio.CancelledError:  # as in `_event`
            background.stay()
            self.abort()
        self._goodbye = None

    async def _say_goodbye(self) -> None:
        try:
            with Limit(self._config.close_timeout_s, "the goodbye"):
                await self._exposer.drained()
                await self._sender.flush_all()
                if not self._config.raw:
                    self._sender.control(FrameKind.END)
                    await self._sender.flush_all()
        except Exception as exc:
            # Not for `_wait_for_goodbye`, which may have been canceled meanwhile.
            _log.debug("closing without the peer's confirmation: %r", exc)

    async def deliver(self) -> None:
        """Let arrive what was sent: the loop has canceled all of its tasks, and will be closed."""
        if self._task is not None:
            await asyncio.wait([self._task])
        elif not self._done:
            await self._linger()

    async def _linger(self) -> None:
        """Let arrive what the adapter has been given."""
        end = now() + self._config.close_timeout_s
        while not self._disconnected and self._link.can_send:
            arriving = self._sender.arriving()
            if arriving is None:
                return
            arriving.add_done_callback(self._wake)
            if not await self._event(end - now()):
                _log.info("%s: what was sent has not arrived", self._link.peer_name())
                return

    async def _disconnect(self) -> None:
        try:
            self._link.cm_id.start_disconnect()
        except OSError as exc:
            _log.debug("disconnect: %s", exc)
            return
        if self._met and not self._disconnected and not await self._event(_DISCONNECT_S):
            _log.debug("the peer did not answer the disconnection")

    async def _event(self, seconds: float) -> bool:
        """Wait until something has happened; False if nothing has, for so long.

        A cancellation is an event, too: to leave off would lose messages, and the caller waits on.
        """
        self._told = self._link.loop.create_future()
        try:
            with Limit(seconds):
                await self._told
        except TimeoutError:
            return False
        except asyncio.CancelledError:
            background.stay()
        finally:
            self._told = None
        return True
