"""Streams for tests: protocols that note what happens to them, and connected pairs."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiordma
from aiordma import RdmaServer, RdmaStreamReader, RdmaStreamWriter, StreamConfig
from tests.device.oracle import until

LIMIT_S = 60.0


class Note(asyncio.Protocol):
    """Keeps what its transport tells it, in order."""

    def __init__(self) -> None:
        self.transport: Any = None
        self.calls: list[str] = []
        self.data = bytearray()
        self.paused = False
        self.lost: BaseException | None = None
        self.gone = asyncio.get_running_loop().create_future()
        self.keep_open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.calls.append("made")

    def data_received(self, data: bytes) -> None:
        self.calls.append("data")
        self.data += data

    def eof_received(self) -> bool:
        self.calls.append("eof")
        return self.keep_open

    def pause_writing(self) -> None:
        assert not self.paused
        self.paused = True
        self.calls.append("pause")

    def resume_writing(self) -> None:
        assert self.paused
        self.paused = False
        self.calls.append("resume")

    def connection_lost(self, exc: BaseException | None) -> None:
        self.calls.append("lost")
        self.lost = exc
        self.gone.set_result(exc)

    async def ended(self) -> BaseException | None:
        """What `connection_lost` was given."""
        async with asyncio.timeout(LIMIT_S):
            exc: BaseException | None = await asyncio.shield(self.gone)
        return exc

    async def received(self, count: int) -> bytes:
        """The bytes, once there are `count`."""
        await until(lambda: len(self.data) >= count, LIMIT_S)
        return bytes(self.data)


@dataclass
class Both:
    """Two connected protocols, and the server between them."""

    client: Any
    server: Any
    listening: RdmaServer


@asynccontextmanager
async def noted(
    address: str,
    config: StreamConfig | None = None,
    *,
    client: Any = Note,
    server: Any = Note,
    **kwds: Any,
) -> AsyncIterator[Both]:
    """Two protocols that are connected; afterwards both have ended."""
    made: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def factory() -> Any:
        protocol = server()
        asyncio.get_running_loop().call_soon(made.set_result, protocol)
        return protocol

    async with await aiordma.create_server(factory, address, 0, config=config) as listening:
        transport, protocol = await aiordma.create_connection(
            client, address, listening.port, config=config, **kwds
        )
        async with asyncio.timeout(LIMIT_S):
            other = await made
            await until(lambda: other.transport is not None)
        try:
            yield Both(protocol, other, listening)
        finally:
            transport.close()
            listening.close_clients()


Streams = tuple[RdmaStreamReader, RdmaStreamWriter]


@asynccontextmanager
async def stream_pair(
    address: str, config: StreamConfig | None = None, *, other: str | None = None, **kwds: Any
) -> AsyncIterator[tuple[Streams, Streams]]:
    """Two connected pairs of reader and writer, (client, server); afterwards both are closed."""
    accepted: asyncio.Queue[Streams] = asyncio.Queue()

    def connected(reader: RdmaStreamReader, writer: RdmaStreamWriter) -> None:
        accepted.put_nowait((reader, writer))

    local = (other, 0) if other else None
    server = await aiordma.start_server(connected, address, 0, config=config, **kwds)
    try:
        client = await aiordma.open_connection(
            address, server.port, config=config, local_addr=local, **kwds
        )
        try:
            async with asyncio.timeout(LIMIT_S):
                theirs = await accepted.get()
            yield client, theirs
        finally:
            client[1].close()
    finally:
        server.close()
        server.close_clients()
        await server.wait_closed()


async def read_hash(reader: asyncio.StreamReader, total: int, pause: Any = None) -> str:
    """SHA-256 of so many bytes; `pause` is awaited after each piece."""
    digest = hashlib.sha256()
    left = total
    while left:
        data = await reader.read(min(left, 1 << 18))
        assert data, f"the stream ended {left} bytes early"
        digest.update(data)
        left -= len(data)
        if pause is not None:
            await pause()
    return digest.hexdigest()
