"""A closed listener's port is free for the next one, as with asyncio's servers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import aiordma

pytestmark = pytest.mark.device

ROUNDS = 20


def refuse(reader: Any, writer: Any) -> None:
    writer.close()


async def test_a_listener(address: str) -> None:
    listener = await aiordma.listen(address, 0)
    port = listener.sockname[1]
    for _ in range(ROUNDS):
        listener.close()
        listener = await aiordma.listen(address, port)
    async with listener, aiordma.connect(address, port), await listener.accept():
        pass


async def test_a_server_of_streams(address: str) -> None:
    server = await aiordma.start_server(refuse, address, 0)
    port = server.port
    for _ in range(ROUNDS):
        server.close()
        server = await aiordma.start_server(refuse, address, port)
    async with server:
        reader, writer = await aiordma.open_connection(address, port)
        assert await reader.read() == b""
        writer.close()


async def test_while_its_connections_go_on(address: str) -> None:
    first = await aiordma.listen(address, 0)
    port = first.sockname[1]
    async with aiordma.connect(address, port) as client, await first.accept() as server:
        first.close()
        async with await aiordma.listen(address, port):
            await client.send(b"still here")
            assert await server.recv() == b"still here"


async def test_a_port_that_is_taken_is_told_at_once(address: str) -> None:
    async with await aiordma.listen(address, 0) as first, asyncio.timeout(20):
        with pytest.raises(aiordma.RdmaError, match="EADDRINUSE"):
            await aiordma.listen(address, first.sockname[1])
