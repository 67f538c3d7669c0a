"""Two connected ends of the message layer, for tests that choose how they meet."""

from __future__ import annotations

import asyncio
from typing import Any

import aiordma
from aiordma import Connection
from aiordma.verbs import QueuePair


def qp_of(connection: Connection) -> QueuePair:
    return connection._link.qp


async def meet(listener: aiordma.Listener, host: str, **options: Any) -> tuple[Any, Any]:
    """(client, server)."""
    client = await aiordma.connect(host, listener.port, **options)
    return client, await listener.accept()


async def part(*ends: Connection) -> None:
    await asyncio.gather(*(end.close() for end in ends))
