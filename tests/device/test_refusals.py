"""A client of the wrong kind is told so, and the server goes on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import aiordma

pytestmark = pytest.mark.device

LIMIT_S = 20


async def test_b05_a_client_of_messages_at_a_server_of_streams(address: str) -> None:
    async def echo(reader: Any, writer: Any) -> None:
        writer.write(await reader.readexactly(2))
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async with asyncio.timeout(LIMIT_S):
        server = await aiordma.start_server(echo, address, 0)
        with pytest.raises(aiordma.ConnectionRejectedError) as caught:
            await aiordma.connect(address, server.port)
        for text in (str(caught.value), caught.value.hint):
            assert "server of streams" in text
            assert "aiordma.open_connection" in text
        reader, writer = await aiordma.open_connection(address, server.port)
        writer.write(b"ok")
        assert await reader.readexactly(2) == b"ok"
        writer.close()
        await writer.wait_closed()
        server.close()
        await server.wait_closed()


async def test_b05_a_client_of_streams_at_a_listener_for_messages(address: str) -> None:
    async with asyncio.timeout(LIMIT_S), aiordma.listen(address, 0) as listener:
        with pytest.raises(aiordma.ConnectionRejectedError) as caught:
            await aiordma.open_connection(address, listener.port)
        for text in (str(caught.value), caught.value.hint):
            assert "listener for messages" in text
            assert "aiordma.connect" in text
        async with aiordma.connect(address, listener.port) as client, await listener.accept():
            await client.send(b"ok")


async def test_b05_a_raw_client_is_told_that_the_library_refused(address: str) -> None:
    """And not the peer's program, which has not been asked."""
    raw = aiordma.ConnectionConfig(raw=True)

    async def refused(port: int) -> aiordma.ConnectionRejectedError:
        with pytest.raises(aiordma.ConnectionRejectedError) as caught:
            await aiordma.connect(address, port, config=raw)
        assert "program" not in str(caught.value)
        assert caught.value.hint in str(caught.value)
        return caught.value

    async with asyncio.timeout(LIMIT_S):
        async with aiordma.listen(address, 0) as listener:
            assert "speaks aiordma's message protocol" in str(await refused(listener.port))
        server = await aiordma.start_server(lambda *_: None, address, 0)
        assert "it is a server of streams" in str(await refused(server.port))
        server.close()
        await server.wait_closed()
