"""The side that copies one file to a server, or from it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from aiordma.cli.transfer.disk import in_thread
from aiordma.cli.transfer.exchange import Exchange, Progress
from aiordma.cli.transfer.failure import TransferError
from aiordma.cli.transfer.folder import Incoming, Source
from aiordma.cli.transfer.frames import Done, Get, Put, Ready, Reason

__all__ = ["get", "put"]

Begin = Callable[[int], object]


async def put(exchange: Exchange, source: Source, size: int, name: str, progress: Progress) -> str:
    """Send a file, which the server stores as `name`.

    Args:
        exchange: The connection.
        source: The file; it is open, and the caller closes it.
        size: In bytes.
        name: The name on the server.
        progress: Called with the number of further bytes that were sent.

    Returns:
        The SHA-256, which the server has confirmed: the file has its name.

    Raises:
        TransferError: This side or the server failed, or the connection ended.
        OSError: The connection broke.
    """
    try:
        await exchange.say(Put(name, size))
        await exchange.hear(Ready)
        return await _send(exchange, source, size, progress)
    except TransferError as exc:
        await exchange.apologize(exc)
        raise


async def _send(exchange: Exchange, source: Source, size: int, progress: Progress) -> str:
    """Send the file, and listen meanwhile: a server that fails says so in the middle."""
    sending = asyncio.create_task(exchange.send_file(source, size, progress))
    hearing = asyncio.create_task(exchange.hear(Done, whenever=True))
    try:
        await asyncio.wait([sending, hearing], return_when=asyncio.FIRST_COMPLETED)
        if sending.done() and isinstance(sending.exception(), TransferError):
            await sending
        # If the connection broke, the server's last message may still be on its way.
        await asyncio.wait([hearing], timeout=exchange.limit_s)
        if not hearing.done():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(sending, exchange.limit_s)
            text = f"the server does not confirm within {exchange.limit_s:g} s"
            raise TransferError(Reason.SYSTEM, text)
        done = await hearing
        digest = await sending
    finally:
        sending.cancel()
        hearing.cancel()
        await asyncio.gather(sending, hearing, return_exceptions=True)
    if done.sha256 != digest:
        raise TransferError(Reason.CHECKSUM, f"the server has SHA-256 {done.sha256}, not {digest}")
    return digest


async def get(
    exchange: Exchange, name: str, incoming: Incoming, begin: Begin, progress: Progress
) -> tuple[int, str]:
    """Fetch the server's file `name`.

    Args:
        exchange: The connection.
        name: The name on the server.
        incoming: The file; it is open, and the caller discards it.  At the end it has its name.
        begin: Called with the size, when the server has agreed.
        progress: Called with the number of further bytes that arrived.

    Returns:
        Bytes and SHA-256, which is right.

    Raises:
        TransferError: This side or the server failed, the checksum is wrong, or the connection
            ended.
        OSError: The connection broke, or the file cannot be renamed.
    """
    try:
        await exchange.say(Get(name))
        ready = await exchange.hear(Ready)
        begin(ready.size)
        digest = await exchange.receive_file(incoming, ready.size, progress)
    except TransferError as exc:
        await exchange.apologize(exc)
        # A server stops when it hears of the failure, but its close waits until all that it has
        # sent is read.
        await exchange.hear_out()
        raise
    await in_thread(incoming.commit)
    return ready.size, digest
