"""Two connected ends of the message layer, for tests that choose how they meet."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiordma
from aiordma import Connection, ConnectionConfig
from aiordma.verbs import QueuePair
from tests.inside.endpoint import link_of

#: (client, server).
Pair = tuple[Connection, Connection]


@asynccontextmanager
async def paired(address: str, config: ConnectionConfig | None = None) -> AsyncIterator[Pair]:
    """A listener and its only connection, both of whose ends have this configuration."""
    async with (
        aiordma.listen(address, 0, config=config) as listener,
        aiordma.connect(address, listener.port, config=config) as client,
        await listener.accept() as server,
    ):
        yield client, server


def qp_of(connection: Connection) -> QueuePair:
    return link_of(connection).qp


async def meet(listener: aiordma.Listener, host: str, **options: Any) -> tuple[Any, Any]:
    """(client, server)."""
    client = await aiordma.connect(host, listener.port, **options)
    return client, await listener.accept()


async def are_alive(ends: Pair) -> None:
    """A message and its answer still arrive."""
    client, server = ends
    await client.send(b"?")
    assert bytes(await server.recv()) == b"?"
    await server.send(b"!")
    assert bytes(await client.recv()) == b"!"


async def still_accepts(listener: aiordma.Listener, host: str) -> None:
    """The next client is accepted and heard."""
    ends = await meet(listener, host)
    await are_alive(ends)
    await part(*ends)


async def talk_both_ways(ends: Pair, count: int, size_of: Callable[[random.Random], int]) -> None:
    """So many messages each way at once, of random sizes and bytes; every byte is compared."""

    async def one_way(sender: Connection, receiver: Connection, seed: int) -> None:
        rng = random.Random(seed)
        blocks = [rng.randbytes(size_of(rng)) for _ in range(count)]

        async def send_all() -> None:
            for block in blocks:
                await sender.send(block)

        async with asyncio.TaskGroup() as group:
            group.create_task(send_all())
            for block in blocks:
                assert bytes(await receiver.recv()) == block

    client, server = ends
    async with asyncio.TaskGroup() as group:
        group.create_task(one_way(client, server, 1))
        group.create_task(one_way(server, client, 2))


async def part(*ends: Connection | None) -> None:
    """Close those that there are."""
    await asyncio.gather(*(end.close() for end in ends if end is not None))
