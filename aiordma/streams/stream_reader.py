"""asyncio's reader and writer, with what RDMA adds: `readinto`, and TLS on any loop."""

from __future__ import annotations

import asyncio
import ssl as ssl_module
from collections.abc import Callable, Coroutine
from typing import Any

from aiordma.streams.tls import start_tls
from aiordma.streams.transport import RdmaTransport

__all__ = ["RdmaStreamReader", "RdmaStreamWriter"]


class RdmaStreamReader(asyncio.StreamReader):
    """An `asyncio.StreamReader` that can also read into the caller's own memory."""

    # What the base class has and its type stub does not tell.
    _buffer: bytearray
    _eof: bool
    _exception: BaseException | None
    _maybe_resume_transport: Callable[[], None]
    _transport: asyncio.Transport
    _wait_for_data: Callable[[str], Coroutine[Any, Any, None]]
    _waiter: asyncio.Future[None] | None

    async def readinto(self, buffer: Any) -> int:
        """Read into `buffer`, without a copy in between where the stream has none yet.

        Args:
            buffer: Writable, contiguous; a bytearray, memoryview, array, numpy array and so on.

        Returns:
            Bytes that were read, at least 1, or 0 at the end of the stream.

        Raises:
            BufferError, TypeError: Not a writable contiguous buffer.
            RuntimeError: Another coroutine is reading.
            ConnectionLostError: The connection broke.

        Cancellation: ends the wait; no bytes are lost.
        """
        view = memoryview(buffer).cast("B")
        if view.readonly:
            msg = "readinto() needs a writable buffer"
            raise TypeError(msg)
        if self._waiter is not None:
            msg = "readinto() called while another coroutine is already waiting for incoming data"
            raise RuntimeError(msg)
        # What came before the call lies in the reader; over TLS everything does.
        while not self._buffer:
            if self._exception is not None:
                raise self._exception
            if self._eof or not len(view):
                return 0
            transport = self._transport
            if not isinstance(transport, RdmaTransport):
                await self._wait_for_data("readinto")
            elif count := transport._take(view):
                return count
            else:
                await transport._wait_readable()
        count = min(len(view), len(self._buffer))
        view[:count] = self._buffer[:count]
        del self._buffer[:count]
        self._maybe_resume_transport()
        return count


class RdmaStreamWriter(asyncio.StreamWriter):
    """An `asyncio.StreamWriter` whose `start_tls` works on uvloop, too."""

    _protocol: Any
    _transport: asyncio.Transport

    async def start_tls(  # type: ignore[override, unused-ignore]
        self,
        sslcontext: ssl_module.SSLContext,
        *,
        server_hostname: str | None = None,
        ssl_handshake_timeout: float | None = None,
        ssl_shutdown_timeout: float | None = None,
    ) -> None:
        """Go over to TLS; `asyncio.StreamWriter.start_tls`.

        Args:
            sslcontext: Of `ssl.SSLContext`.
            server_hostname: The name that the server's certificate has to have.
            ssl_handshake_timeout: Seconds, 60 by default.
            ssl_shutdown_timeout: Seconds, 30 by default.

        Raises:
            ssl.SSLError, OSError: The handshake failed; the connection is closed.

        Cancellation: the connection is closed.
        """
        protocol = self._protocol
        await self.drain()
        transport = await start_tls(
            self._transport,
            protocol,
            sslcontext,
            server_side=protocol._client_connected_cb is not None,
            server_hostname=server_hostname,
            ssl_handshake_timeout=ssl_handshake_timeout,
            ssl_shutdown_timeout=ssl_shutdown_timeout,
        )
        self._transport = transport
        if protocol._stream_reader is not None:
            protocol._stream_reader._transport = transport  # for readinto
        if hasattr(protocol, "_replace_transport"):
            protocol._replace_transport(transport)
        else:
            protocol._replace_writer(self)
