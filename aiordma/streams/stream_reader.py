"""asyncio's reader and writer, with two additions: `readinto`, and TLS on any loop."""

from __future__ import annotations

import asyncio
import io
import ssl as ssl_module
from collections.abc import Callable
from typing import Any

from aiordma._core import StreamState
from aiordma.arguments import refuse_objects
from aiordma.loop import fork
from aiordma.loop.uncopied import Uncopied
from aiordma.streams.incoming import Incoming
from aiordma.streams.tls import start_tls
from aiordma.streams.transport import RdmaTransport
from aiordma.tensors import buffer_of

__all__ = ["READER_LIMIT", "RdmaStreamReader", "RdmaStreamWriter"]

#: Bytes that a reader keeps by default before the peer has to wait, as asyncio's.
READER_LIMIT = 64 * 1024
_EVERYTHING = 1 << 32
#: Lengths of `readexactly` for which the bytes object that it returns is made before the bytes
#: have come: below, a copy costs less; above, the length may be an empty claim of the peer, and
#: memory is taken only for bytes that have come.
_AHEAD = range(64 * 1024, (64 << 20) + 1)


class RdmaStreamReader(Uncopied, asyncio.StreamReader):
    """An `asyncio.StreamReader` that can also read into the caller's own memory.

    While a task waits here, arrived bytes stay where the adapter put them; the task takes them from
    there in the same turn of the loop.  Otherwise, and over TLS, all bytes pass through the
    protocol, as in asyncio.
    """

    # Attributes of the base class that its type stub does not have.
    _buffer: bytearray
    _eof: bool
    _exception: Exception | None
    _limit: int
    _maybe_resume_transport: Callable[[], None]
    _paused: bool
    _transport: asyncio.Transport
    _waiter: asyncio.Future[None] | None

    def __init__(self, *, limit: int, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(limit=limit, loop=loop)
        self._after_end: Exception | None = None
        fork.guard_public(self)

    def set_exception(self, exc: Exception) -> None:
        """As `asyncio.StreamReader.set_exception`.

        Args:
            exc: The exception that reading raises from now on.  If the peer's end has arrived
                already, so that the bytes are complete, only `exception()` and `drain()` use it.
        """
        if self._eof:
            self._after_end = exc
        else:
            super().set_exception(exc)
            self._wake()

    def exception(self) -> Exception | None:
        """The exception that has ended the connection, or None."""
        return self._exception or self._after_end

    def feed_data(self, data: Any) -> None:
        """As `asyncio.StreamReader.feed_data`.

        Args:
            data: Bytes, behind all that have arrived.
        """
        self._collect()
        super().feed_data(data)
        self._wake()

    def feed_eof(self) -> None:
        """As `asyncio.StreamReader.feed_eof`."""
        self._collect()
        super().feed_eof()
        self._wake()

    def _collect(self) -> None:
        """Take the bytes that lie in the ring: they came before."""
        source = self._source()
        if source is not None and source.state.readable:
            self._buffer += source.some(_EVERYTHING)

    def _wake(self) -> None:
        source = self._source()
        if source is not None and source.waiting:
            source.wake()

    def _source(self) -> Incoming | None:
        """The receiving half, to read without the protocol; None for another kind of transport."""
        transport = self._transport
        return transport._in if isinstance(transport, RdmaTransport) else None

    def _state(self) -> StreamState | None:
        """The state to await bytes from, in the frequent case: none wait here."""
        transport = self._transport
        if (
            isinstance(transport, RdmaTransport)
            and not self._buffer
            and self._exception is None
            and not self._eof
            and self._waiter is None
            and not (state := transport._in.state).waiting
        ):
            return state
        return None

    async def _wait(self, source: Incoming, name: str, length: int) -> None:
        if self._waiter is not None or source.waiting:
            self._refuse(name)
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        await source.wait(length)
        if self._exception is not None:
            raise self._exception

    def _refuse(self, name: str) -> None:
        msg = f"{name}() called while another coroutine is already waiting for incoming data"
        raise RuntimeError(msg)

    async def _wait_for_data(self, func_name: str) -> None:
        """The wait of the methods of the base class."""
        source = self._source()
        if source is None:
            await super()._wait_for_data(func_name)  # type: ignore[misc]
            return
        before = len(self._buffer)
        self._collect()
        while len(self._buffer) == before and not self._eof:
            await self._wait(source, func_name, 1)
            self._collect()

    async def read(self, n: int = -1) -> bytes:
        """As `asyncio.StreamReader.read`.

        Args:
            n: Bytes at most; -1 for all until the end of the stream.

        Raises:
            RuntimeError: Another coroutine is reading.
            ConnectionLostError: The connection broke.

        Cancellation: ends the wait; no bytes are lost.
        """
        if n > 0 and (state := self._state()) is not None:
            there = await state.take(1, n)
            if there is not None:
                return there
        return await super().read(n)

    async def readline(self) -> bytes:
        """As `asyncio.StreamReader.readline`.

        Raises:
            ValueError: The line is longer than the limit.
            RuntimeError: Another coroutine is reading.
            ConnectionLostError: The connection broke.

        Cancellation: ends the wait; no bytes are lost.
        """
        if (state := self._state()) is not None:
            line = await state.take(b"\n", self._limit)
            if line is not None:
                return line
        return await super().readline()

    async def readuntil(self, separator: Any = b"\n") -> bytes:
        """As `asyncio.StreamReader.readuntil`.

        Args:
            separator: Bytes; since Python 3.13 a tuple of them, too.

        Raises:
            asyncio.IncompleteReadError: The stream ended before; `partial` has the bytes that came.
            asyncio.LimitOverrunError: The bytes before the separator exceed the limit.
            RuntimeError: Another coroutine is reading.
            ConnectionLostError: The connection broke.

        Cancellation: ends the wait; no bytes are lost.
        """
        if type(separator) is bytes and (state := self._state()) is not None:
            there = await state.take(separator, self._limit)
            if there is not None:
                return there
        return await super().readuntil(separator)

    async def readexactly(self, n: int) -> bytes:
        """As `asyncio.StreamReader.readexactly`.

        Args:
            n: Bytes.

        Raises:
            asyncio.IncompleteReadError: The stream ended before; `partial` has the bytes that came.
            RuntimeError: Another coroutine is reading.
            ConnectionLostError: The connection broke.

        Cancellation: ends the wait; no bytes are lost.
        """
        if n > 0 and (state := self._state()) is not None:
            there = await state.take(n, n)
            if there is not None:
                return there
        # A task that waits for many bytes is not resumed for each message of them.
        source, buffer = self._source(), self._buffer
        if n in _AHEAD and source is not None and self._exception is None and not self._eof:
            return await self._read_ahead(source, n)
        while source is not None and self._exception is None and len(buffer) < n:
            buffer += source.some(n - len(buffer))
            if self._eof or len(buffer) == n:
                break
            await self._wait(source, "readexactly", n - len(buffer))
        return await super().readexactly(n)

    async def _read_ahead(self, source: Incoming, n: int) -> bytes:
        """Copy each byte once, into the very object that is returned."""
        # getvalue() is the object that was given, as long as nothing else refers to that.
        made, filled = io.BytesIO(bytes(n)), 0
        with made.getbuffer() as view:
            try:
                while filled < n and self._exception is None:
                    if self._buffer:
                        filled += self._from_buffer(view, filled)
                        continue
                    with view[filled:] as rest:
                        count = source.take(rest)
                    filled += count
                    if count:
                        continue
                    if self._eof:
                        raise asyncio.IncompleteReadError(bytes(view[:filled]), n)
                    await self._wait(source, "readexactly", n - filled)
                if filled < n:
                    assert self._exception is not None
                    raise self._exception
            except asyncio.IncompleteReadError:
                raise
            except BaseException:
                self._buffer[:0] = view[:filled]
                raise
        self._maybe_resume_transport()
        return made.getvalue()

    def _from_buffer(self, view: memoryview, start: int) -> int:
        """Move bytes of the reader into `view`, from `start` on; return how many."""
        count = min(len(view) - start, len(self._buffer))
        view[start : start + count] = self._buffer[:count]
        del self._buffer[:count]
        return count

    async def readinto(self, buffer: Any) -> int:
        """Read into `buffer`, without an intermediate copy unless the reader holds bytes already.

        Args:
            buffer: Writable, contiguous; a bytearray, memoryview, array, numpy array and so on.

        Returns:
            Bytes that were read, at least 1, or 0 at the end of the stream.

        Raises:
            BufferError, TypeError: Not a writable contiguous buffer, or an array of Python objects.
            RuntimeError: Another coroutine is reading.
            ConnectionLostError: The connection broke.

        Cancellation: ends the wait; no bytes are lost.
        """
        with memoryview(buffer_of("the buffer", buffer)) as given:
            refuse_objects("the buffer", given)
            view = given.cast("B")
        try:
            if view.readonly:
                msg = "readinto() needs a writable buffer"
                raise TypeError(msg)
            source = self._source()
            if self._waiter is not None or (source is not None and source.waiting):
                self._refuse("readinto")
            # Bytes from before the call lie in the reader; over TLS all bytes do.
            while not self._buffer:
                if self._exception is not None:
                    raise self._exception
                if not len(view):
                    return 0
                if source is not None and (count := source.take(view)):
                    return count
                if self._eof:
                    return 0
                if source is None:
                    await self._wait_for_data("readinto")
                else:
                    await self._wait(source, "readinto", 1)
            count = self._from_buffer(view, 0)
            self._maybe_resume_transport()
            return count
        except BaseException:
            view.release()  # the exception keeps this frame, and is not to keep the buffer exported
            raise


# asyncio.StreamWriter comes first: start_server makes one into this, which CPython before 3.15
# refuses if the first base is another.
class RdmaStreamWriter(asyncio.StreamWriter, Uncopied):
    """An `asyncio.StreamWriter` whose `start_tls` works on uvloop, too."""

    _protocol: Any
    _reader: RdmaStreamReader | None
    _transport: asyncio.Transport

    async def drain(self) -> None:
        """As `asyncio.StreamWriter.drain`: wait until more may be written.

        Raises:
            ConnectionLostError: The connection broke.

        Cancellation: ends the wait; nothing that was written is lost.
        """
        transport, reader = self._transport, self._reader
        if (
            not isinstance(transport, RdmaTransport)
            or transport._closing
            or transport._protocol_paused
            or (reader is not None and reader.exception() is not None)
        ):
            await super().drain()

    async def start_tls(  # type: ignore[override, unused-ignore]
        self,
        sslcontext: ssl_module.SSLContext,
        *,
        server_hostname: str | None = None,
        ssl_handshake_timeout: float | None = None,
        ssl_shutdown_timeout: float | None = None,
    ) -> None:
        """Switch to TLS, as `asyncio.StreamWriter.start_tls` does.

        Args:
            sslcontext: An `ssl.SSLContext`.
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
