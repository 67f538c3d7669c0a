"""Two connected ends of the message layer, for tests that choose how they meet."""

from __future__ import annotations

import asyncio
from typing import Any

import aiordma
from aiordma import Connection
from aiordma.verbs import QueuePair
from tests.inside.endpoint import link_of


def qp_of(connection: Connection) -> QueuePair:
    return link_of(connection).qp


async def meet(listener: aiordma.Listener, host: str, **options: Any) -> tuple[Any, Any]:
    """(client, server)."""
    client = await aiordma.connect(host, listener.port, **options)
    return client, await listener.accept()


async def are_alive(ends: tuple[Connection, Connection]) -> None:
    """A message and its answer still arrive."""
    client, server = ends
    await client.send(b"?")
    assert bytes(await server.recv()) == b"?"
    await server.send(b"!")
    assert bytes(await client.recv()) == b"!"


async def part(*ends: Connection | None) -> None:
    """Close those that there are."""
    await asyncio.gather(*(end.close() for end in ends if end is not None))
