"""How a stream begins on the server's side: who speaks first, and who is gone before it begins."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

import aiordma
from aiordma.cm import EventChannel
from tests.device.oracle import until
from tests.device.rsocket_peer import CREDITS, Peer
from tests.device.streaming import Note
from tests.native_ends import close_all, resolved

pytestmark = pytest.mark.device

CREDIT = 0x80000000 | CREDITS
DISCONNECT = 0xE0000000
RING = 4096  # where the peer's is in its region


@asynccontextmanager
async def calling(address: str) -> AsyncIterator[tuple[Peer, asyncio.Future[Note]]]:
    """A peer that is about to connect, and the protocol that the server will make for it."""
    made: asyncio.Future[Note] = asyncio.get_running_loop().create_future()

    class Noted(Note):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            made.set_result(self)

    events = EventChannel()
    try:
        async with await aiordma.create_server(Noted, address, 0) as server:
            peer = Peer(await resolved(events, address, server.port))
            try:
                yield peer, made
            finally:
                await close_all(peer)
    finally:
        events.close()
        await events.wait_closed()


async def test_a_server_on_iwarp_listens_first(address: str, is_siw: bool) -> None:
    """The client's kernel would take an early message for a bad answer to its request."""
    async with calling(address) as (peer, made):
        await peer.connect()
        async with asyncio.timeout(20):
            transport = (await made).transport
        transport.write(b"x")
        assert transport.get_write_buffer_size() == int(is_siw)
        peer.say(CREDIT)
        await until(lambda: peer.mr.view[RING] == ord("x"))
        assert transport.get_write_buffer_size() == 0
        transport.abort()


async def test_a_client_that_says_everything_at_once(address: str) -> None:
    """Its end may be here before the server's side has begun; what it sent is received."""
    async with calling(address) as (peer, made):
        await peer.connect()
        peer.data(b"hello")
        peer.say(DISCONNECT)
        await peer.finished()
        peer.close()
        async with asyncio.timeout(20):
            protocol = await made
        assert await protocol.ended() is None
        assert protocol.calls == ["made", "data", "eof", "lost"]
        assert protocol.data == b"hello"
