"""StreamEnd: gives back what a stream has of the adapter; one path for every cause.

What was posted is left to arrive first, within a bound.  After an end in the band nothing is left
to be said, so that the queue pair goes to the error state at once; otherwise the peer is told by
the connection manager.  iWARP is always told: ending a connection hard would lose bytes that its
adapter has taken and not yet delivered.  Each wait has a bound, and whatever ends the task, the
giving back is done.
"""

from __future__ import annotations

import asyncio
import errno
import logging

from aiordma.errors import ConnectionLostError, ConnectTimeoutError, lost_error
from aiordma.loop import background
from aiordma.loop.limit import Limit
from aiordma.rsocket.machine import Machine
from aiordma.streams.stream_config import StreamConfig
from aiordma.streams.stream_port import StreamPort

__all__ = ["StreamEnd", "lost", "vanished"]

_log = logging.getLogger("aiordma")
_DISCONNECT_S = 1.0


def lost(cause: BaseException) -> BaseException:
    """The exception for a program whose connection ended for this cause."""
    if isinstance(cause, (ConnectionLostError, ConnectTimeoutError)):
        return cause
    return lost_error(cause)


def vanished() -> ConnectionLostError:
    """The exception for a peer that disconnected, where its end did not come in the band."""
    text = "the peer disconnected without an end of the stream: its process ended, or it aborted"
    error = ConnectionLostError(errno.ECONNRESET, text)
    error.hint = (
        "did the peer's process end, by a signal perhaps? see its exit status, and its log: its "
        "library may have found that this side broke the protocol"
    )
    return error


class StreamEnd:
    """The end of one stream.

    Args:
        port: What is to be given back.
        machine: Knows whether the end was said in the band.
        config: Times.
    """

    __slots__ = (
        "_arrived", "_begun", "_config", "_left", "_linger_s", "_machine", "_port", "_task",
        "_told",
    )  # fmt: skip

    def __init__(self, port: StreamPort, machine: Machine, config: StreamConfig) -> None:
        self._port = port
        self._machine = machine
        self._config = config
        self._linger_s: float | None = None
        self._arrived = False
        self._left = False
        self._begun: asyncio.Future[None] | None = None
        self._told: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None

    # What happens

    def peer_left(self) -> None:
        """The connection manager has said that the connection is down."""
        self._left = True
        self._wake()

    def arrived(self) -> None:
        """The peer's adapter has what it will ever have."""
        self._arrived = True
        self._wake()

    def hurry(self, linger_s: float | None = None) -> float:
        """Wait for that no longer than so many seconds, `StreamConfig.linger_s` by default.

        Returns:
            The seconds, which the first call decides.
        """
        if self._linger_s is None:
            self._linger_s = self._config.linger_s if linger_s is None else linger_s
        return self._linger_s

    def _wake(self) -> None:
        if self._told is not None and not self._told.done():
            self._told.set_result(None)

    # The task

    def begin(self) -> None:
        """Start, once."""
        if self._task is not None:
            return
        self._start()
        if self._begun is not None and not self._begun.done():
            self._begun.set_result(None)

    def _start(self) -> None:
        self._task = background.start(self._port.loop, self._run, cancel=False)
        if self._task is None:
            # The loop is ending, or has ended: nothing can be said to the peer, or waited for.
            self._port.close()
        else:
            self._task.add_done_callback(self._ended)

    def _ended(self, _: object) -> None:
        if not self._port.closed:
            self._start()  # it was canceled before its first step

    async def wait(self) -> None:
        """Wait until everything was given back.  Cancellation: ends the wait."""
        if self._task is None:
            if self._begun is None:
                self._begun = self._port.loop.create_future()
            await asyncio.shield(self._begun)
        if self._task is not None:
            await asyncio.shield(self._task)

    async def deliver(self) -> None:
        """As `wait`, by a loop that has canceled all of its tasks and is about to be closed."""
        self.hurry()
        if self._task is None:
            self._start()
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        port = self._port
        try:
            await self._linger()
            if not self._left and (not self._machine.disconnected or port.context.is_iwarp):
                await self._disconnect()
            port.to_error()
            await port.quiesce()
        finally:
            port.close()
        await port.wait_closed()

    @property
    def _is_there(self) -> bool:
        """Whether nothing is left that could arrive."""
        gone = self._left or self._port.failure is not None
        return self._arrived or gone or self._machine.disconnected

    async def _linger(self) -> None:
        """Let arrive what was posted."""
        progress = self._port.state.progress
        while not self._is_there:
            short = self._linger_s
            if short == 0:
                return
            if await self._event(self._config.close_timeout_s if short is None else short):
                continue
            moved, progress = progress != self._port.state.progress, self._port.state.progress
            if short is not None or not moved:
                _log.info("queue pair %d: what was sent has not arrived", self._port.qp.num)
                return

    async def _disconnect(self) -> None:
        try:
            self._port.cm_id.start_disconnect()
        except OSError as exc:
            _log.debug("disconnect: %s", exc)
            return
        if not self._left and not await self._event(_DISCONNECT_S):
            _log.debug("the peer did not answer the disconnection")

    async def _event(self, seconds: float) -> bool:
        """Wait until something has happened; False if nothing has, for so long.

        A cancellation is an event, too: to leave off would lose bytes, and the caller waits on,
        with less patience.
        """
        self._told = self._port.loop.create_future()
        try:
            with Limit(seconds):
                await self._told
        except TimeoutError:
            return False
        except asyncio.CancelledError:
            background.stay()
            self.hurry()
        finally:
            self._told = None
        return True
