"""The side that offers a folder: one request of one client."""

from __future__ import annotations

import asyncio
import errno
from dataclasses import dataclass

from aiordma.cli.transfer.disk import in_thread
from aiordma.cli.transfer.exchange import Exchange
from aiordma.cli.transfer.failure import TransferError
from aiordma.cli.transfer.folder import Folder, Source
from aiordma.cli.transfer.frames import Done, Get, Put, Ready, Reason

__all__ = ["Quota", "Served", "serve_one"]


class Quota:
    """The limits for the files that all clients together put while the server runs.

    A file counts from the moment it is announced, and no longer if it is not completed.

    Args:
        most_bytes: Bytes of all files.
        most_files: Number of files.
        most_file_bytes: Bytes of each file.
    """

    __slots__ = ("_bytes", "_files", "_most_bytes", "_most_file_bytes", "_most_files")

    def __init__(self, most_bytes: int, most_files: int, most_file_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._most_files = most_files
        self._most_file_bytes = most_file_bytes
        self._bytes = self._files = 0

    def take(self, size: int) -> None:
        """Count a file of so many bytes.

        Raises:
            TransferError: There is no room for it.
        """
        if size > self._most_file_bytes:
            text = f"a file may have at most {self._most_file_bytes} bytes here, not {size}"
        elif self._files >= self._most_files:
            text = f"the server has taken {self._files} files, and takes no more"
        elif size > self._most_bytes - self._bytes:
            text = f"the server takes {self._most_bytes - self._bytes} bytes more, not {size}"
        else:
            self._bytes += size
            self._files += 1
            return
        raise TransferError(Reason.FULL, text)

    def give_back(self, size: int) -> None:
        """Stop counting a file that was not completed."""
        self._bytes -= size
        self._files -= 1


@dataclass(frozen=True, slots=True)
class Served:
    """The file that a client got or put.

    Attributes:
        action: `put` or `get`.
        name: The file's name.
        size: In bytes.
        sha256: In hexadecimal digits.
    """

    action: str
    name: str
    size: int
    sha256: str


async def serve_one(
    exchange: Exchange, folder: Folder, *, writable: bool, quota: Quota | None = None
) -> Served:
    """Answer a client's request.

    Args:
        exchange: The connection.
        folder: The folder that is offered.
        writable: Whether clients may put files there.
        quota: How much; None for no bound.

    Raises:
        TransferError: The request could not be fulfilled, which was reported to the client, or the
            client failed, ended or broke the protocol.
        OSError: The connection broke.
    """
    try:
        request = await exchange.hear_request()
        if isinstance(request, Get):
            return await _give(exchange, folder, request)
        if not writable:
            raise TransferError(Reason.READ_ONLY, "the server takes no files (--writable)")
        if quota is None:
            return await _take(exchange, folder, request)
        quota.take(request.size)
        try:
            return await _take(exchange, folder, request)
        except BaseException:
            quota.give_back(request.size)
            raise
    except TransferError as exc:
        await exchange.apologize(exc)
        raise


async def _give(exchange: Exchange, folder: Folder, request: Get) -> Served:
    try:
        source = folder.source(request.name)
    except ValueError as exc:
        raise TransferError(Reason.NAME, str(exc)) from None
    try:
        try:
            size = await in_thread(source.open)
        except OSError as exc:
            raise _refusal(exc, request.name) from exc
        await exchange.say(Ready(size))
        digest = await _send(exchange, source, size)
        return Served("get", request.name, size, digest)
    finally:
        await in_thread(source.close)


async def _send(exchange: Exchange, source: Source, size: int) -> str:
    """Send the file, and listen meanwhile: a client whose disk is full says so in the middle."""
    sending = asyncio.create_task(exchange.send_file(source, size, lambda _: None))
    hearing = asyncio.create_task(exchange.hear(Done, whenever=True))
    try:
        await asyncio.wait([sending, hearing], return_when=asyncio.FIRST_COMPLETED)
        if hearing.done() and (not sending.done() or sending.exception() is not None):
            await hearing  # which raises the failure
            raise TransferError(Reason.PROTOCOL, "the client said Done out of turn")
        return await sending
    finally:
        sending.cancel()
        hearing.cancel()
        await asyncio.gather(sending, hearing, return_exceptions=True)


async def _take(exchange: Exchange, folder: Folder, request: Put) -> Served:
    try:
        incoming = folder.incoming(request.name)
    except ValueError as exc:
        raise TransferError(Reason.NAME, str(exc)) from None
    try:
        try:
            await in_thread(incoming.open)
        except OSError as exc:
            raise _refusal(exc, request.name) from exc
        await exchange.say(Ready(request.size))
        digest = await exchange.receive_file(incoming, request.size, lambda _: None)
        try:
            await in_thread(incoming.commit)
        except OSError as exc:
            raise _refusal(exc, request.name) from exc
        await exchange.say(Done(digest))
        return Served("put", request.name, request.size, digest)
    finally:
        await in_thread(incoming.discard)


def _refusal(exc: OSError, name: str) -> TransferError:
    """The error for a client: names nothing in the server's folders but the requested `name`."""
    missing = exc.errno in (errno.ENOENT, errno.ENOTDIR)
    reason = Reason.NOT_FOUND if missing else Reason.SYSTEM
    words = "is a symbolic link" if exc.errno == errno.ELOOP else exc.strerror
    return TransferError(reason, f"{name}: {words}")
