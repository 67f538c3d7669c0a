"""A stream server that a hostile peer talks to, and a connection to it that does no wrong."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random

import aiordma
from aiordma import StreamConfig
from aiordma.cm import EventChannel
from aiordma.errors import ConnectionLostError
from tests.device.oracle import until
from tests.device.rsocket_peer import Peer
from tests.inside.streams import with_depths
from tests.native_ends import resolved
from tests.rsocket_hostile import KEEPALIVE

SEED = os.environ.get("AIORDMA_TEST_SEED", "20241121")
LIMIT_S = 20
HALF = 4096
DEPTH = 16
CONFIG = with_depths(
    StreamConfig(receive_buffer_size=2 * HALF, send_buffer_size=2 * HALF, close_timeout_s=2),
    recv=DEPTH,
)


class Victim(asyncio.Protocol):
    """The server's end: sends back what it gets, and notes how it ended."""

    transport: aiordma.RdmaTransport

    def __init__(self) -> None:
        self.received = bytearray()
        self.made = asyncio.Event()
        self.half_open = False  # whether its direction stays open when the peer's is closed
        self.ends: list[Exception | None] = []
        self.lost = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, aiordma.RdmaTransport)
        self.transport = transport
        self.made.set()

    def data_received(self, data: bytes) -> None:
        self.received += data
        self.transport.write(data)

    def eof_received(self) -> bool:
        return self.half_open

    def pause_writing(self) -> None:
        self.transport.pause_reading()

    def resume_writing(self) -> None:
        self.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.ends.append(exc)
        self.lost.set()

    async def end(self) -> Exception | None:
        """How it ended; once, and with an error that has a type."""
        async with asyncio.timeout(LIMIT_S):
            await self.lost.wait()
        (exc,) = self.ends
        assert exc is None or isinstance(exc, ConnectionLostError), exc
        return exc


@dataclass
class Scene:
    """A server, and a connection to it that does no wrong."""

    address: str
    server: aiordma.RdmaServer
    events: EventChannel
    victims: list[Victim] = field(default_factory=list)
    echoes: int = 0

    async def stranger(self, **options: int) -> Peer:
        """A peer that knows the way."""
        return Peer(await resolved(self.events, self.address, self.server.port), **options)

    async def introduce(
        self, peer: Peer, private_data: bytes | None = None, *, reads: bool = False
    ) -> Victim:
        """Connect it; the server's end of its connection.

        Raises:
            ConnectionFailedError: The server refused.
        """
        before = len(self.victims)
        await peer.connect(private_data, reads=reads)
        if peer.iwarp:
            peer.say(KEEPALIVE)  # there the side that connects has to speak first
        # The event that the server waits for may come later.
        await until(lambda: len(self.victims) > before)
        victim = self.victims[-1]
        async with asyncio.timeout(LIMIT_S):
            await victim.made.wait()
        return victim

    async def peer(self) -> tuple[Peer, Victim]:
        """A connected peer, and the server's end of its connection."""
        peer = await self.stranger()
        try:
            return peer, await self.introduce(peer)
        except BaseException:
            peer.close()
            raise

    async def good_citizen(self) -> None:
        """Sends and compares until it is canceled."""
        rng = Random(SEED)
        reader, writer = await aiordma.open_connection(
            self.address, self.server.port, config=CONFIG
        )
        try:
            while True:
                data = rng.randbytes(rng.choice((1, 100, HALF, 3 * HALF)))
                writer.write(data)
                async with asyncio.timeout(LIMIT_S):
                    assert await reader.readexactly(len(data)) == data
                self.echoes += 1
                await asyncio.sleep(0.01)  # leaves the others some of the processor
        finally:
            writer.close()
            await writer.wait_closed()
            await writer.transport.wait_closed()  # type: ignore[attr-defined]


@asynccontextmanager
async def playing(address: str, config: StreamConfig = CONFIG) -> AsyncIterator[Scene]:
    """A scene, whose server has this configuration."""
    victims: list[Victim] = []

    def factory() -> Victim:
        victims.append(Victim())
        return victims[-1]

    async with EventChannel() as events:
        server = await aiordma.create_server(factory, address, 0, config=config)
        scene = Scene(address, server, events, victims)
        citizen = asyncio.create_task(scene.good_citizen())
        try:
            await until(lambda: scene.echoes > 0 or citizen.done())
            yield scene
            before = scene.echoes
            await until(lambda: scene.echoes > before + 2 or citizen.done())
            assert not citizen.done(), citizen
        finally:
            citizen.cancel()
            await asyncio.wait([citizen])
            server.close()
            server.abort_clients()
            await server.wait_closed()
            for victim in victims:
                if victim.made.is_set():
                    await victim.transport.wait_closed()
