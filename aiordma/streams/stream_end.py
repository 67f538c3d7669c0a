"""StreamEnd: gives back what a stream has of the adapter; one path for every cause.

After an end in the band nothing is left to be said, so that the queue pair goes to the error state
at once; otherwise the peer is told by the connection manager first.  iWARP is always told: ending
a connection hard would lose bytes that its adapter has taken and not yet delivered.  Each wait has
a bound, and whatever ends the task, the giving back is done.
"""

from __future__ import annotations

import asyncio
import errno
import logging

from aiordma.errors import ConnectionLostError, ConnectTimeoutError
from aiordma.streams.stream_port import StreamPort

__all__ = ["StreamEnd", "lost"]

_log = logging.getLogger("aiordma")
_DISCONNECT_S = 1.0


def lost(cause: BaseException) -> BaseException:
    """The exception for a program whose connection ended for this cause."""
    if isinstance(cause, (ConnectionLostError, ConnectTimeoutError)):
        return cause
    error = ConnectionLostError(errno.ECONNRESET, f"the connection is lost: {cause}")
    error.__cause__ = cause
    return error


class StreamEnd:
    """The end of one stream.

    Args:
        port: What is to be given back.
    """

    __slots__ = ("_begun", "_left", "_port", "_task")

    def __init__(self, port: StreamPort) -> None:
        self._port = port
        self._begun = asyncio.Event()
        self._left = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def peer_left(self) -> None:
        """The connection manager has said that the connection is down."""
        self._left.set()

    def begin(self, *, graceful: bool) -> None:
        """Start, once.

        Args:
            graceful: Both sides know already.
        """
        if self._task is not None:
            return
        loop = self._port.loop
        if loop.is_closed():
            self._port.close()
            return
        self._task = loop.create_task(self._run(graceful))
        # A loop that is closed meanwhile is no fault of the program's: the connection is lost, and
        # finalizers give back the rest. The attribute is what asyncio itself uses for this.
        self._task._log_destroy_pending = False  # type: ignore[attr-defined]
        self._begun.set()

    async def wait(self) -> None:
        """Wait until everything was given back.  Cancellation: ends the wait."""
        await self._begun.wait()
        assert self._task is not None
        await asyncio.shield(self._task)

    async def _run(self, graceful: bool) -> None:
        port = self._port
        try:
            if not self._left.is_set() and (not graceful or port.context.is_iwarp):
                await self._disconnect()
            port.to_error()
            await port.quiesce()
        finally:
            port.close()
        await port.wait_closed()

    async def _disconnect(self) -> None:
        try:
            self._port.cm_id.start_disconnect()
        except OSError as exc:
            _log.debug("disconnect: %s", exc)
            return
        try:
            async with asyncio.timeout(_DISCONNECT_S):
                await self._left.wait()
        except TimeoutError:
            _log.debug("the peer did not answer the disconnection")
