"""Upgrades: streams that begin in the clear, and go over to TLS when both sides have agreed."""

from __future__ import annotations

import asyncio
import ssl
from unittest import mock

import aiordma
from aiordma.streams import server as streams_server
from tests.simulation.common import ADDRESS, BROKEN, count_of, is_broken, pattern, unless_broken
from tests.simulation.world import World

__all__ = ["upgrades"]

#: Bytes of a client that does not wait for its turn: more than the rings of both sides hold.
_FLOOD = 2_000_000


def _context(purpose: int) -> ssl.SSLContext:
    """TLS without certificates, whose signatures are not always of one length."""
    context = ssl.SSLContext(purpose)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers("AECDH-AES128-SHA:@SECLEVEL=0")
    return context


async def upgrades(world: World) -> None:
    """A server with few places for handshakes, and clients that ask for TLS at the same time."""
    # Who has waited for some seconds for its handshake is sent away.
    world.may_break |= world.may_lose_events
    server_side, client_side = _context(ssl.PROTOCOL_TLS_SERVER), _context(ssl.PROTOCOL_TLS_CLIENT)

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if await reader.readline() == b"STARTTLS\n":
                writer.write(b"ready\n")
                await writer.start_tls(server_side)
                while data := await reader.read(1 + world.draw("read", 20_000)):
                    writer.write(data)
                    await writer.drain()
        except (*BROKEN, ssl.SSLError) as error:
            told = isinstance(error, ssl.SSLError) or is_broken(world, error)
            may_break = world.may_break or floods
            world.check(may_break and told, f"the server's side has raised {error!r}")
        finally:
            writer.close()

    async def client(number: int, port: int) -> None:
        opening = aiordma.open_connection(ADDRESS, port)
        reader, writer = await world.within(12 + world.patience, "open_connection()", opening)
        try:
            await world.within(world.patience, "a conversation", talk(number, reader, writer))
        finally:
            writer.close()

    async def talk(number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"STARTTLS\n")
        assert await reader.readline() in {b"ready\n", b""}, "a line is not what was sent"
        await writer.start_tls(client_side)
        data = pattern(1 + number, 1 + world.draw("bytes", 50_000))
        writer.write(data)
        assert await reader.readexactly(len(data)) == data, "a stream has other bytes"

    async def ask(port: int, writers: list[asyncio.StreamWriter]) -> None:
        reader, writer = await aiordma.open_connection(ADDRESS, port)
        writers.append(writer)
        writer.write(b"STARTTLS\n")
        await reader.readline()

    async def flood(port: int) -> None:
        """One holds the only place, and another sends on: the server takes what its rings hold."""
        writers: list[asyncio.StreamWriter] = []
        try:
            for _ in range(2):
                await ask(port, writers)
            writers[1].write(bytes(_FLOOD))
            await asyncio.sleep(0.25)
            waits = writers[1].transport.get_write_buffer_size() or world.may_break
            world.check(waits, f"a server holds {_FLOOD} bytes of a client that has to wait")
        finally:
            for writer in writers:
                writer.transport.abort()
                writer.close()

    floods = world.once_in("flood", 6)
    places = 1 if floods else count_of(world, "handshakes", 3)
    with unless_broken(world):
        # A source has half of them.
        with mock.patch.object(streams_server, "MOST_TLS_HANDSHAKES", 2 * places):
            server = await aiordma.start_server(handler, ADDRESS, 0)
        async with server, asyncio.TaskGroup() as tasks:
            if floods:
                tasks.create_task(flood(server.port))
                return
            for number in range(count_of(world, "clients", 4)):
                tasks.create_task(client(number, server.port))
