"""Streams: bytes there and back, in pieces of any size, with an end of each direction."""

from __future__ import annotations

import asyncio
import contextlib

import aiordma
from tests.inside.streams import with_depths
from tests.simulation.common import ADDRESS, BROKEN, OTHER, count_of, pattern, unless_broken
from tests.simulation.world import World

__all__ = ["streams"]


def _settings(world: World) -> aiordma.StreamConfig:
    kind = world.draw("settings", 3)
    if kind < 1:
        return aiordma.StreamConfig()
    config = aiordma.StreamConfig(
        receive_buffer_size=1 << 18 - world.draw("receive buffer", 7),
        send_buffer_size=1 << 18 - world.draw("send buffer", 7),
    )
    recv, send = 100 - world.draw("recv depth", 85), 60 - world.draw("send depth", 45)
    return with_depths(config, recv=recv, send=send)


async def streams(world: World) -> None:
    """A server that sends back what it gets, and clients that end in different ways."""
    aborted: set[int] = set()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(*BROKEN):
            while data := await reader.read(1 + world.draw("read", 100_000)):
                writer.write(data)
                if not world.once_in("no drain", 4):
                    await writer.drain()
                if world.once_in("slow", 8):
                    await asyncio.sleep(world.draw("slow for", 50) / 1000)
            if writer.can_write_eof() and world.draw("eof", 2):
                writer.write_eof()
        writer.close()
        with contextlib.suppress(*BROKEN):
            await world.within(15 + world.patience, "wait_closed()", writer.wait_closed())

    async def client(number: int, port: int) -> None:
        with unless_broken(world):
            await exchange(number, port)

    async def exchange(number: int, port: int) -> None:
        total = world.one_of("bytes", (1, 1000, 100_000, 700_000))
        data = pattern(1 + number, total)
        source = world.one_of("other adapter", (None, (OTHER, 0)))
        opening = aiordma.open_connection(
            ADDRESS,
            port,
            local_addr=source,
            config=_settings(world),
            limit=world.one_of("limit", (1 << 16, 1 << 16, 1000)),
        )
        bound = 12 if world.may_delay else world.patience
        reader, writer = await world.within(bound, "open_connection()", opening)
        if world.once_in("aborts", 6):
            aborted.add(number)
            writer.write(data)
            await asyncio.sleep(world.draw("aborts in", 100) / 10_000)
            writer.transport.abort()
            with contextlib.suppress(*BROKEN):
                await world.within(15 + world.patience, "wait_closed()", writer.wait_closed())
            return

        async def write() -> None:
            begin = 0
            while begin < total:
                end = begin + 1 + world.draw("write", 80_000)
                writer.write(data[begin:end])
                if world.draw("drain", 2):
                    # The handler may sleep while it has what it read.
                    await world.within(world.patience + 5, "drain()", writer.drain())
                begin = end
            writer.write_eof()

        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(write())
                reading = tasks.create_task(read(reader))
        finally:
            writer.close()
        assert reading.result() == data, "a stream has other bytes than were written"
        await world.within(15 + world.patience, "wait_closed()", writer.wait_closed())

    async def read(reader: asyncio.StreamReader) -> bytes:
        got = bytearray()
        while True:
            limit = 0.0001 if world.once_in("canceled read", 8) else None
            try:
                async with asyncio.timeout(limit):
                    call = reader.read(1 + world.draw("read back", 200_000))
                    data = await world.within(world.patience + 5, "read()", call)
            except TimeoutError as error:
                if limit is None or isinstance(error, aiordma.RdmaError):
                    raise
                continue
            if not data:
                return bytes(got)
            got += data

    limit = world.one_of("limit", (1 << 16, 1 << 16, 1000))
    server = await aiordma.start_server(handler, ADDRESS, 0, config=_settings(world), limit=limit)
    async with server, asyncio.TaskGroup() as tasks:
        for number in range(count_of(world, "clients", 3)):
            tasks.create_task(client(number, server.port))
