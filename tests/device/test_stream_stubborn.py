"""Peers that keep the letter of the rsockets protocol, or not, and help nobody: all waits end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from time import monotonic

import pytest

import aiordma
from aiordma.cm import EventChannel, EventType
from aiordma.errors import ConnectionLostError, ProtocolError
from aiordma.rsocket import Hello
from tests.device.oracle import until
from tests.device.rsocket_peer import Peer
from tests.device.stream_scene import CONFIG, DEPTH, HALF, LIMIT_S, Scene, playing
from tests.native_ends import acked, begun, listening
from tests.rsocket_hostile import KEEPALIVE

pytestmark = pytest.mark.device


@pytest.fixture
async def scene(address: str) -> AsyncIterator[Scene]:
    async with playing(address) as scene:
        yield scene


# -- what coroutines see


async def test_a_reader_is_told_of_the_sin(address: str) -> None:
    """After it read, drain and wait_closed raise what ended the connection."""
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    greeted = asyncio.Event()

    async def serve(reader: aiordma.RdmaStreamReader, writer: aiordma.RdmaStreamWriter) -> None:
        try:
            assert await reader.readexactly(5) == b"hello"
            greeted.set()
            with pytest.raises(ProtocolError, match="reserved kind 3"):
                await reader.read(1)
            writer.write(b"x")
            with pytest.raises(ConnectionError):
                await writer.drain()
            with pytest.raises(ProtocolError):
                await reader.readexactly(1)
        except BaseException as exc:
            ended.set_exception(exc)
        else:
            ended.set_result(None)
        finally:
            writer.close()
            with pytest.raises(ProtocolError):
                await writer.wait_closed()

    async with EventChannel() as events:
        server = await aiordma.start_server(serve, address, 0, config=CONFIG)
        scene = Scene(address, server, events)
        peer = await scene.stranger()
        try:
            await peer.connect()
            peer.data(b"hello")
            # Who sins before the server has begun with the connection gets no handler at all.
            await asyncio.wait_for(greeted.wait(), LIMIT_S)
            peer.say(0x60000001)
            await asyncio.wait_for(ended, LIMIT_S)
        finally:
            peer.close()
            server.close()
            await server.wait_closed()


# -- a server that answers wrongly


@contextlib.asynccontextmanager
async def answering(address: str) -> AsyncIterator[tuple[EventChannel, int]]:
    """A native listener; its channel and its port."""
    async with EventChannel() as events:
        with listening(events, address) as listener:
            yield events, listener.source_port


async def answer(events: EventChannel, change: dict[str, int] | bytes | None) -> Peer:
    """Accept the next request, with private data of which something is changed."""
    request = await acked(events, EventType.CONNECT_REQUEST)
    assert request.connection_id is not None
    peer = Peer(request.connection_id)
    if change is None:
        data = None
    elif isinstance(change, bytes):
        data = change + peer.hello.pack()[len(change) :]
    else:
        data = replace(peer.hello, **change).pack()  # type: ignore[arg-type]
    with contextlib.suppress(OSError):  # the client may have had enough before it confirmed
        await peer.accept(request, data)
    return peer


async def test_a_server_that_sins(address: str) -> None:
    async with answering(address) as (events, port):
        connecting = await begun(aiordma.open_connection(address, port, config=CONFIG))
        peer = await answer(events, None)
        try:
            reader, writer = await asyncio.wait_for(connecting, LIMIT_S)
            peer.data(b"good")
            # asyncio's reader forgets what it has when it is told of an error.
            assert await asyncio.wait_for(reader.readexactly(4), LIMIT_S) == b"good"
            peer.say(HALF)  # four bytes too many
            with pytest.raises(ProtocolError, match=f"{HALF} bytes of data for {HALF - 4}"):
                await asyncio.wait_for(reader.read(), LIMIT_S)
            writer.close()
            with pytest.raises(ProtocolError):
                await writer.wait_closed()
        finally:
            peer.close()


# -- peers that help nobody


async def test_a_flood_of_words_leaves_time_for_others(address: str, is_siw: bool) -> None:
    """Words that mean nothing cost time; the connection beside it gets its share.

    They come faster than receives are posted, and the peer's adapter tries again for ever.
    """
    async with playing(address, CONFIG) as scene:
        peer, victim = await scene.peer()

        def over() -> bool:
            peer.under_way()
            return peer.failure is not None or victim.lost.is_set()

        try:
            before = scene.echoes
            async with asyncio.timeout(LIMIT_S):
                while scene.echoes < before + 5 and not over():
                    for number in range(100):
                        peer.say(KEEPALIVE if number % 2 else 0x80000000 | peer.hello.credits)
                    await until(lambda: over() or not peer.posted, LIMIT_S)
                    await asyncio.sleep(0)
            if not over():
                peer.data(b"still there")
                await until(lambda: over() or bytes(victim.received) == b"still there", LIMIT_S)
            # iWARP has no retries: a message that comes while no receive is posted ends the
            # connection.  A peer that keeps to its credits does not get there.
            assert is_siw or not over(), peer.failure
        finally:
            peer.close()
        exc = await victim.end()
        assert bytes(victim.received) == b"still there" or isinstance(exc, ConnectionLostError)


async def test_a_peer_that_takes_nothing(scene: Scene) -> None:
    """It gives neither space nor credits again: writing stops, and closing ends in its time."""
    peer, victim = await scene.peer()
    try:
        transport = victim.transport
        transport.write(bytes(1 << 20))
        await until(lambda: (1 << 20) - transport.get_write_buffer_size() >= 1024)
        assert transport.get_write_buffer_size() > 1 << 19
        start = monotonic()
        transport.close()
        exc = await victim.end()
        assert monotonic() - start < 3 * CONFIG.close_timeout_s
        assert isinstance(exc, ConnectionLostError), exc
    finally:
        peer.close()


async def test_a_peer_that_listens_to_nothing(scene: Scene) -> None:
    """It has no receives, so that not even the first word about buffers arrives."""
    peer = await scene.stranger(receives=0)
    try:
        victim = await scene.introduce(peer)
        victim.transport.write(b"can you hear me?")
        # The first word may have ended the connection before this is written: at once on iWARP,
        # which has no retries, and after the retries, some milliseconds, on a busy machine.
        broken = victim.transport.is_closing()
        start = monotonic()
        victim.transport.close()
        exc = await victim.end()
        if broken:
            assert isinstance(exc, ConnectionLostError)
        else:
            # As with TCP: what becomes of bytes that have been handed over, close() does not tell.
            assert exc is None
        await victim.transport.wait_closed()
        assert monotonic() - start < 3 * CONFIG.close_timeout_s
    finally:
        peer.close()


async def test_a_peer_with_a_table_elsewhere(scene: Scene) -> None:
    """What it calls its table is nowhere: the first word about buffers fails, and names why."""
    peer = await scene.stranger()
    try:
        hello: Hello = replace(peer.hello, table_key=peer.hello.table_key ^ 0xFF00)
        victim = await scene.introduce(peer, hello.pack())
        exc = await victim.end()
    finally:
        peer.close()
    assert isinstance(exc, ConnectionLostError)


async def test_many_messages_of_a_byte_while_nobody_reads(scene: Scene) -> None:
    """As many as were announced wait; they are repaid when the program reads on."""
    peer, victim = await scene.peer()
    try:
        victim.transport.pause_reading()
        for number in range(DEPTH):
            peer.data(b"%c" % number, number)
        await peer.finished()
        victim.transport.resume_reading()
        await until(lambda: len(victim.received) == DEPTH)
        for number in range(DEPTH, 2 * DEPTH):
            peer.data(b"%c" % number, number)
        await until(lambda: len(victim.received) == 2 * DEPTH)
    finally:
        peer.close()
    assert victim.received == bytes(range(2 * DEPTH))
    await victim.end()
