"""The side that offers a folder: one request of one client."""

from __future__ import annotations

import errno
from dataclasses import dataclass

from aiordma.cli.transfer.exchange import Exchange, TransferError, in_thread
from aiordma.cli.transfer.folder import Folder
from aiordma.cli.transfer.frames import Done, Get, Put, Ready, Reason

__all__ = ["Served", "serve_one"]


@dataclass(frozen=True, slots=True)
class Served:
    """What a client got or left.

    Attributes:
        action: `put` or `get`.
        name: The file's.
        size: In bytes.
        sha256: In hexadecimal digits.
    """

    action: str
    name: str
    size: int
    sha256: str


async def serve_one(exchange: Exchange, folder: Folder, *, writable: bool) -> Served:
    """Answer a client's request.

    Args:
        exchange: The connection.
        folder: What is offered.
        writable: Whether clients may put files there.

    Raises:
        TransferError: The request could not be fulfilled, of which the client has been told, or the
            client failed, ended, or breaks the protocol.
        OSError: The connection broke.
    """
    try:
        request = await exchange.hear_request()
        if isinstance(request, Get):
            return await _give(exchange, folder, request)
        if not writable:
            raise TransferError(Reason.READ_ONLY, "the server takes no files (--writable)")
        return await _take(exchange, folder, request)
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
        digest = await exchange.send_file(source, size, lambda _: None)
        return Served("get", request.name, size, digest)
    finally:
        await in_thread(source.close)


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
    """What a client is told: nothing of the server's folders but the name that it gave."""
    missing = exc.errno in (errno.ENOENT, errno.ENOTDIR)
    reason = Reason.NOT_FOUND if missing else Reason.SYSTEM
    words = "is a symbolic link" if exc.errno == errno.ELOOP else exc.strerror
    return TransferError(reason, f"{name}: {words}")
