"""Frames over asyncio's streams, and the bytes of a file as frames.

Disks block, so that reading, writing and hashing happen in a thread, one call at a time.  Each
step on the wire has `limit_s` seconds; a disk has as long as it takes.

A disk that fails is a TransferError, too: an OSError is always the connection's.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

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

__all__ = ["READ_LIMIT", "Exchange", "PeerFailedError", "Progress", "TransferError", "in_thread"]

T = TypeVar("T")
M = TypeVar("M", Ready, Done)
Progress = Callable[[int], object]
#: `limit` for the stream: room for a piece, so that one call reads it.
READ_LIMIT = 2 * MOST_DATA
_MOST_TEXT = 4000


class TransferError(Exception):
    """A file was not copied.

    Attributes:
        reason: The reason, a `Reason`, for programs.
        text: The reason, for people.
    """

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(reason, text)
        self.reason = reason
        self.text = text

    def __str__(self) -> str:
        return self.text


class PeerFailedError(TransferError):
    """The peer has broken off the transfer, and has sent a reason."""


async def in_thread(function: Callable[..., T], *arguments: object) -> T:
    """Call `function` in a thread.

    Cancellation: ends the wait when the call has ended and not before: the call uses a file that
    the caller is about to close.
    """
    call = asyncio.get_running_loop().run_in_executor(None, function, *arguments)
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        while not call.done():
            try:
                await asyncio.wait([call])
            except asyncio.CancelledError:
                continue
        if not call.cancelled():
            call.exception()  # retrieved, so that asyncio does not report it as never retrieved
        raise


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
        with contextlib.suppress(OSError):
            async with asyncio.timeout(limit_s):
                await writer.wait_closed()
        writer.transport.abort()


class Exchange:
    """One side of a conversation.

    Attributes:
        limit_s: Seconds for each step on the wire.
        asked: Whether a client has made its request.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit_s: float
    ) -> None:
        self._reader = reader
        self.writer = writer
        self.limit_s = limit_s
        self.asked: bool = False

    async def say(self, message: Message) -> None:
        """Send a message.

        Raises:
            TransferError, OSError: The peer takes nothing, or is gone.
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
            TransferError: The peer failed, breaks the protocol, ended, or says nothing.
            OSError: The connection broke.
        """
        frame, body = await self._frame(None if whenever else self.limit_s)
        if frame is not FrameKind.MESSAGE:
            raise TransferError(Reason.PROTOCOL, "the peer sent data out of turn")
        return _expected(body, kind)

    async def hear_request(self) -> Put | Get:
        """The first message of a client.

        Raises:
            TransferError, OSError: As `hear`.
        """
        frame, body = await self._frame(self.limit_s)
        if frame is FrameKind.MESSAGE:
            message = _parsed(body)
            if isinstance(message, Put | Get):
                self.asked = True
                return message
        raise TransferError(Reason.PROTOCOL, "the first message has to be put or get")

    async def send_file(self, source: Source, size: int, progress: Progress) -> str:
        """Send `size` bytes of a file, and say that it is done.

        Returns:
            The SHA-256 of the sent bytes.

        Raises:
            TransferError: As `say`; or the file cannot be read, or is shorter.
            OSError: The connection broke.
        """
        digest = hashlib.sha256()
        left = size
        while left:
            data = await in_thread(_read, source, min(left, MOST_DATA), digest.update)
            if not data:
                text = f"the file became shorter while it was read: {left} bytes are missing"
                raise TransferError(Reason.SYSTEM, text)
            self.writer.write(data_header(len(data)))
            self.writer.write(data)
            await self._drain()
            left -= len(data)
            progress(len(data))
        await self.say(Done(digest.hexdigest()))
        return digest.hexdigest()

    async def receive_file(self, incoming: Incoming, size: int, progress: Progress) -> str:
        """Receive `size` bytes and the checksum, and write the bytes under a temporary name.

        Returns:
            The SHA-256 of the bytes, equal to the peer's.

        Raises:
            TransferError: As `hear`; the checksum or the size is wrong; the file cannot be written.
            OSError: The connection broke.
        """
        digest = hashlib.sha256()
        left = size
        while True:
            kind, body = await self._frame(self.limit_s)
            if kind is FrameKind.MESSAGE:
                break
            if len(body) > left:
                raise TransferError(Reason.PROTOCOL, "the peer sent more than it announced")
            await in_thread(_write, incoming, body, digest.update)
            left -= len(body)
            progress(len(body))
        done = _expected(body, Done)
        if left:
            text = f"the peer sent {left} bytes less than it announced"
            raise TransferError(Reason.PROTOCOL, text)
        if done.sha256 != digest.hexdigest():
            text = f"what arrived has SHA-256 {digest.hexdigest()}, what was sent {done.sha256}"
            raise TransferError(Reason.CHECKSUM, text)
        return done.sha256

    async def hear_out(self) -> None:
        """Read and drop the bytes that still arrive, until the peer ends or the time is over.

        A close at once could destroy the last message before the peer has read it.
        """
        try:
            async with asyncio.timeout(self.limit_s):
                while await self._reader.read(READ_LIMIT):
                    pass
        except (OSError, TimeoutError):
            pass

    async def _drain(self) -> None:
        async with _step(self.limit_s, "the peer takes nothing"):
            await self.writer.drain()

    async def _frame(self, limit_s: float | None) -> tuple[FrameKind, bytes]:
        try:
            async with _step(limit_s, "the peer sends nothing"):
                kind, length = parse_header(await self._reader.readexactly(HEADER_SIZE))
                return kind, await self._reader.readexactly(length)
        except asyncio.IncompleteReadError:
            text = "the peer ended the connection before the end of the file"
            raise TransferError(Reason.SYSTEM, text) from None
        except FrameError as exc:
            raise TransferError(Reason.PROTOCOL, str(exc)) from None


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


def _read(source: Source, size: int, update: Callable[[bytes], None]) -> bytes:
    try:
        data = source.read(size)
    except OSError as exc:
        raise TransferError(Reason.SYSTEM, str(exc)) from exc
    update(data)
    return data


def _write(incoming: Incoming, data: bytes, update: Callable[[bytes], None]) -> None:
    update(data)
    try:
        incoming.write(data)
    except OSError as exc:
        raise TransferError(Reason.SYSTEM, str(exc)) from exc
