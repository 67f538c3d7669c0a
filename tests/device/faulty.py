"""Two connected ends that talk over a wire with a fault."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator

import aiordma
from aiordma import Connection
from tests.device.netem import faults

__all__ = ["talking_over"]


@contextlib.asynccontextmanager
async def talking_over(fault: str) -> AsyncIterator[tuple[Connection, Connection]]:
    """Client and server, each on a host of its own, which both send while the block runs.

    Args:
        fault: Words for netem; the wire has it from the block's begin on, and none at its end.
    """
    here, there = os.environ["AIORDMA_SOFTROCE_ADDR"], os.environ["AIORDMA_SOFTROCE_ADDR2"]
    faults()  # connecting is not what is looked at
    async with aiordma.listen(here, 0) as listener:
        client = await aiordma.connect(here, listener.port, local_addr=(there, 0))
        server = await listener.accept()
        faults(*fault.split())
        talking = [
            asyncio.create_task(_talk(*ends)) for ends in ((client, server), (server, client))
        ]
        try:
            yield client, server
        finally:
            faults()
            for task in talking:
                task.cancel()
            await asyncio.wait(talking)
            client.abort()
            server.abort()
        await asyncio.gather(client.wait_closed(), server.wait_closed())


async def _talk(sender: Connection, receiver: Connection) -> None:
    """Messages of one way, one after the other, until the connection ends."""
    with contextlib.suppress(aiordma.RdmaError):
        while True:
            await sender.send(bytes(100))
            (await receiver.recv()).release()
