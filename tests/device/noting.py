"""Memory with notes, and writers whose notes are held against what they have written."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiordma import RemoteRegion
from aiordma.endpoint.lease import Lease
from aiordma.endpoint.notes import Note
from tests.device.meeting import Pair, are_alive


@asynccontextmanager
async def noted(pair: Pair, buf: Any, **rights: Any) -> AsyncIterator[tuple[Lease, RemoteRegion]]:
    """A lease of the server with notes, and its memory as the client knows it from a message."""
    client, server = pair
    lease = server.expose(buf, write=True, notes=True, **rights)
    async with lease as region:
        await server.send(region.to_bytes())
        with await client.recv() as message:
            yield lease, RemoteRegion.from_bytes(bytes(message))


async def first(lease: Lease) -> Note:
    return await asyncio.wait_for(anext(lease.notes()), 20)


async def write_and_tell(pair: Pair, cells: int = 600) -> None:
    """Several tasks write and tell; when a note is read, the bytes that it tells of are there."""
    client, server = pair
    size, writers = 512, 4
    rng = random.Random(7)
    blocks = [rng.randbytes(rng.randint(1, size)) for _ in range(cells)]
    orders: list[list[int]] = [[] for _ in range(writers)]
    async with noted(pair, bytearray(cells * size)) as (lease, remote):

        async def write(writer: int) -> None:
            for cell in range(writer, cells, writers):
                await client.write(remote, blocks[cell], offset=cell * size, imm=cell)

        async def read() -> None:
            for _ in range(cells):
                note = await first(lease)
                assert note.offset == note.imm * size
                assert note.data == blocks[note.imm], "a note has overtaken its data"
                orders[note.imm % writers].append(note.imm)

        async def talk() -> None:
            for number in range(200):
                await client.send(b"%d" % number)
                assert bytes(await server.recv()) == b"%d" % number

        async with asyncio.TaskGroup() as group:
            group.create_task(read())
            group.create_task(talk())
            for writer in range(writers):
                group.create_task(write(writer))
    assert orders == [list(range(writer, cells, writers)) for writer in range(writers)]
    await are_alive(pair)
