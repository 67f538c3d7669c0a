"""A file's bytes between a disk and the connection, and their SHA-256.

Disks block, so reading, writing and hashing happen in a thread.  A call there costs two thread
switches, and new memory costs a page fault for each 4 KiB.  So a call handles a part of several
pieces, and a file goes through two buffers in turns: the thread works on one while the connection
fills or empties the other.

A disk that fails is a TransferError, too: an OSError is always the connection's.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from typing import Generic, TypeVar

from aiordma.cli.transfer.failure import TransferError
from aiordma.cli.transfer.folder import Incoming, Source
from aiordma.cli.transfer.frames import MOST_DATA, Reason
from aiordma.loop.lasting import result_of, until_done

__all__ = ["PART", "ReadAhead", "WriteBehind", "in_thread"]

T = TypeVar("T")
#: Bytes that a call reads from the disk or writes to it: several of the largest pieces.
PART = 2 * MOST_DATA


class _Call(Generic[T]):
    """A call of `function` in a thread, under way from now on."""

    __slots__ = ("_future",)

    def __init__(self, function: Callable[..., T], *arguments: object) -> None:
        loop = asyncio.get_running_loop()
        self._future = loop.run_in_executor(None, function, *arguments)

    async def result(self) -> T:
        """Wait for the end of the call, and return its result; cancellation as `in_thread`."""
        try:
            return await result_of(self._future)
        except asyncio.CancelledError:
            await self.end()
            raise

    async def end(self) -> None:
        """Wait for the end of the call, whatever its result; cancellation waits as long."""
        try:
            await until_done((self._future,))
        finally:
            if self._future.done() and not self._future.cancelled():
                self._future.exception()  # retrieved, so that asyncio does not report it


async def in_thread(function: Callable[..., T], *arguments: object) -> T:
    """Call `function` in a thread.

    Cancellation: ends the wait when the call has ended and not before: the call uses a file that
    the caller is about to close.
    """
    return await _Call(function, *arguments).result()


class ReadAhead:
    """Reads `size` bytes of a file, the next part while the connection sends the last.

    Args:
        source: The file; it is open, and may be closed after `close()`.
        size: Bytes to read.
    """

    def __init__(self, source: Source, size: int) -> None:
        self._source = source
        self._left = size
        self._buffers = _buffers(size)
        self._digest = hashlib.sha256()
        self._call: _Call[memoryview] | None = None
        self._begin()

    @property
    def sha256(self) -> str:
        """SHA-256 in hexadecimal digits; of the whole when all parts were returned."""
        return self._digest.hexdigest()

    async def part(self) -> memoryview:
        """The next part, which is good until the next call; empty when there is no more.

        Raises:
            TransferError: The file cannot be read, or is shorter than `size`.

        Cancellation: as `in_thread`; nothing can be read afterwards.
        """
        if self._call is None:
            return memoryview(b"")
        call, self._call = self._call, None
        try:
            part = await call.result()
        except OSError as exc:
            raise TransferError(Reason.SYSTEM, str(exc)) from exc
        if not part:
            text = f"the file became shorter while it was read: {self._left} bytes are missing"
            raise TransferError(Reason.SYSTEM, text)
        self._left -= len(part)
        self._begin()
        return part

    async def close(self) -> None:
        """Wait for the thread; afterwards nothing uses the file."""
        if self._call is not None:
            await self._call.end()

    def _begin(self) -> None:
        if self._left:
            self._buffers.reverse()
            self._call = _Call(self._read, self._buffers[0][: self._left])

    def _read(self, buffer: memoryview) -> memoryview:
        part = buffer[: self._source.readinto(buffer)]
        self._digest.update(part)
        return part


class WriteBehind:
    """Writes a file of `size` bytes, each part while the connection receives the next.

    Args:
        incoming: The file; it is open, and may be closed after `close()`.
        size: Its bytes.
    """

    def __init__(self, incoming: Incoming, size: int) -> None:
        self._incoming = incoming
        self._buffers = _buffers(size)
        self._filled = 0
        self._digest = hashlib.sha256()
        self._call: _Call[None] | None = None

    def room(self, length: int) -> memoryview | None:
        """Memory for the next bytes, which belong to the file once the caller has filled it.

        Args:
            length: Bytes, at most `MOST_DATA`.

        Returns:
            None if `flush()` has to make room before.
        """
        begin, end = self._filled, self._filled + length
        if end > len(self._buffers[0]):
            return None
        self._filled = end
        return self._buffers[0][begin:end]

    async def flush(self) -> None:
        """Wait until the part before is written, and begin to write this one.

        Raises:
            TransferError: The part before cannot be written.

        Cancellation: as `in_thread`; nothing can be written afterwards.
        """
        call, self._call = self._call, None
        if call is not None:
            try:
                await call.result()
            except OSError as exc:
                raise TransferError(Reason.SYSTEM, str(exc)) from exc
        if self._filled:
            self._call = _Call(self._write, self._buffers[0][: self._filled])
            self._buffers.reverse()
            self._filled = 0

    async def finish(self) -> str:
        """Write the rest of the bytes; return SHA-256 of all bytes in hexadecimal digits.

        Raises:
            TransferError: The bytes cannot be written.

        Cancellation: as `flush`.
        """
        await self.flush()
        await self.flush()
        return self._digest.hexdigest()

    async def close(self) -> None:
        """Wait for the thread; afterwards nothing uses the file."""
        if self._call is not None:
            await self._call.end()

    def _write(self, part: memoryview) -> None:
        self._digest.update(part)
        self._incoming.write(part)


def _buffers(size: int) -> list[memoryview]:
    """The two buffers; no larger than the file."""
    return [memoryview(bytearray(min(size, PART))) for _ in range(2)]
