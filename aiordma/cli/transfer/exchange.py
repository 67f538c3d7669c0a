"""Frames over asyncio's streams, and the bytes of a file as frames.

Each step on the wire has `limit_s` seconds; a disk has as long as it takes (disk.py).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TypeVar, cast

from aiordma.cli.transfer.disk import ReadAhead, WriteBehind
from aiordma.cli.transfer.failure import PeerFailedError, TransferError
from aiordma.cli.transfer.folder import Incoming, Source
from aiordma.cli.transfer.frames import (
    HEADER_SIZE,
    MOST_DATA,
    Done,
    Failed,
    FrameError,
    FrameKind,
    Get,
    Message,
    Put,
    Ready,
    Reason,
    data_header,
    pack,
    parse,
    parse_header,
)
from aiordma.streams.stream_config import StreamConfig
from aiordma.streams.stream_reader import RdmaStreamReader

__all__ = ["STREAM_CONFIG", "Exchange", "Progress", "closing"]

M = TypeVar("M", Ready, Done)
Progress = Callable[[int], object]
#: The rings are as large as a piece: four times the default take half as many turns of the loop.
STREAM_CONFIG = StreamConfig(send_buffer_size=MOST_DATA, receive_buffer_size=MOST_DATA)
_MOST_TEXT = 4000


@contextlib.asynccontextmanager
async def closing(writer: asyncio.StreamWriter, limit_s: float) -> AsyncIterator[None]:
    """Close the connection at the end, behind all written bytes; if canceled, at once."""
    try:
        yield
    except asyncio.CancelledError:
        writer.transport.abort()
        raise
    finally:
        writer.close()
        # The file is where it should be, or is known not to be: how the connection ends does not
        # change that.
        try:
            async with asyncio.timeout(limit_s):
                await writer.wait_closed()
        except TimeoutError:
            writer.transport.abort()
        except OSError:
            pass  # it is over; asyncio's own transports cannot be aborted then


class Exchange:
    """One side of a conversation.

    Attributes:
        limit_s: Seconds for each step on the wire.
        asked: Whether a client has made its request.
    """

    def __init__(
        self, reader: RdmaStreamReader, writer: asyncio.StreamWriter, limit_s: float
    ) -> None:
        self._reader = reader
        self.writer = writer
        self.limit_s = limit_s
        self.asked: bool = False

    async def say(self, message: Message) -> None:
        """Send a message.

        Raises:
            TransferError, OSError: The peer reads nothing, or is gone.
        """
        self.writer.write(pack(message))
        await self._drain()

    async def apologize(self, failure: TransferError) -> None:
        """Send the peer a failure of this side, if the connection still works."""
        if not isinstance(failure, PeerFailedError):
            with contextlib.suppress(OSError, TransferError):
                await self.say(Failed(failure.reason, failure.text[:_MOST_TEXT]))

    async def hear(self, kind: type[M], *, whenever: bool = False) -> M:
        """The next message, which has to be of this kind.

        Args:
            kind: Its class.
            whenever: Wait without a limit: the caller has one.

        Raises:
            TransferError: The peer failed, broke the protocol, ended, or sent nothing.
            OSError: The connection broke.
        """
        frame, body = await self._message(None if whenever else self.limit_s)
        if frame is not FrameKind.MESSAGE:
            raise TransferError(Reason.PROTOCOL, "the peer sent data out of turn")
        return _expected(body, kind)

    async def hear_request(self) -> Put | Get:
        """The first message of a client.

        Raises:
            TransferError, OSError: As `hear`.
        """
        frame, body = await self._message(self.limit_s)
        if frame is FrameKind.MESSAGE:
            message = _parsed(body)
            if isinstance(message, Put | Get):
                self.asked = True
                return message
        raise TransferError(Reason.PROTOCOL, "the first message has to be put or get")

    async def send_file(self, source: Source, size: int, progress: Progress) -> str:
        """Send `size` bytes of a file, and then Done.

        Returns:
            The SHA-256 of the sent bytes.

        Raises:
            TransferError: As `say`; or the file cannot be read, or is shorter.
            OSError: The connection broke.
        """
        ahead = ReadAhead(source, size)
        try:
            while part := await ahead.part():
                for begin in range(0, len(part), MOST_DATA):
                    # A copy: the writer may keep what it is given, and the buffer is used again.
                    piece = bytes(part[begin : begin + MOST_DATA])
                    self.writer.write(data_header(len(piece)))
                    self.writer.write(piece)
                    await self._drain()
                    progress(len(piece))
        finally:
            await ahead.close()
        await self.say(Done(ahead.sha256))
        return ahead.sha256

    async def receive_file(self, incoming: Incoming, size: int, progress: Progress) -> str:
        """Receive `size` bytes and the checksum, and write the bytes under a temporary name.

        Returns:
            The SHA-256 of the bytes, equal to the peer's.

        Raises:
            TransferError: As `hear`; the checksum or the size is wrong; the file cannot be written.
            OSError: The connection broke.
        """
        behind = WriteBehind(incoming, size)
        left = size
        try:
            while True:
                kind, length = await self._header(self.limit_s)
                if kind is FrameKind.MESSAGE:
                    break
                if length > left:
                    raise TransferError(Reason.PROTOCOL, "the peer sent more than it announced")
                while (room := behind.room(length)) is None:
                    with self._paused():
                        await behind.flush()
                await self._fill(room)
                left -= length
                progress(length)
            done = _expected(await self._body(length, self.limit_s), Done)
            if left:
                text = f"the peer sent {left} bytes less than it announced"
                raise TransferError(Reason.PROTOCOL, text)
            digest = await behind.finish()
        finally:
            await behind.close()
        if done.sha256 != digest:
            text = f"what arrived has SHA-256 {digest}, what was sent {done.sha256}"
            raise TransferError(Reason.CHECKSUM, text)
        return digest

    async def hear_out(self) -> None:
        """End this side's direction, and drop what arrives until the peer ends or the time is up.

        A close at once could destroy the last message before the peer has read it.
        """
        try:
            self.writer.write_eof()
            async with asyncio.timeout(self.limit_s):
                while await self._reader.read(MOST_DATA):
                    pass
        except (OSError, TimeoutError):
            pass

    async def _drain(self) -> None:
        async with _step(self.limit_s, "the peer takes nothing"):
            await self.writer.drain()

    async def _message(self, limit_s: float | None) -> tuple[FrameKind, bytes]:
        """The next frame, without its rest unless it is a message."""
        kind, length = await self._header(limit_s)
        return kind, await self._body(length, limit_s) if kind is FrameKind.MESSAGE else b""

    async def _header(self, limit_s: float | None) -> tuple[FrameKind, int]:
        try:
            return parse_header(await self._body(HEADER_SIZE, limit_s))
        except FrameError as exc:
            raise TransferError(Reason.PROTOCOL, str(exc)) from None

    async def _body(self, length: int, limit_s: float | None) -> bytes:
        async with _step(limit_s, "the peer sends nothing"):
            try:
                return await self._reader.readexactly(length)
            except asyncio.IncompleteReadError:
                raise _ended() from None

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        """Leave arriving bytes with the transport, while no task waits for them.

        The reader would keep them in memory of its own, which it gets and gives back each time: a
        page fault for each 4 KiB, which can cost more than the copy of the file.
        """
        transport = cast("asyncio.Transport", self.writer.transport)
        transport.pause_reading()
        try:
            yield
        finally:
            transport.resume_reading()

    async def _fill(self, buffer: memoryview) -> None:
        """Receive as many bytes as `buffer` has."""
        async with _step(self.limit_s, "the peer sends nothing"):
            while buffer:
                count = await self._reader.readinto(buffer)
                if not count:
                    raise _ended()
                buffer = buffer[count:]


@contextlib.asynccontextmanager
async def _step(limit_s: float | None, complaint: str) -> AsyncIterator[None]:
    """A time limit whose end is a TransferError."""
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise TransferError(Reason.SYSTEM, f"{complaint} for {limit_s:g} s") from None


def _parsed(body: bytes) -> Message:
    try:
        message = parse(body)
    except FrameError as exc:
        raise TransferError(Reason.PROTOCOL, str(exc)) from None
    if isinstance(message, Failed):
        raise PeerFailedError(message.reason, message.text)
    return message


def _expected(body: bytes, kind: type[M]) -> M:
    message = _parsed(body)
    if not isinstance(message, kind):
        text = f"the peer said {type(message).__name__} out of turn"
        raise TransferError(Reason.PROTOCOL, text)
    return message


def _ended() -> TransferError:
    return TransferError(Reason.SYSTEM, "the peer ended the connection before the end of the file")
