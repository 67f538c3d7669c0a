"""Two native ends whose queue pairs are connected, for tests of memory and windows."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiordma.cm import ConnectionId, EventChannel
from aiordma.verbs import MemoryRegion, ProtectionDomain
from tests.native_ends import ALL, End, close_all, joined, listening, resolved

__all__ = ["ALL", "End", "Ends", "connected"]


@dataclass
class Ends:
    """The client reaches into the server's memory."""

    client: End
    server: End

    async def read(self, addr: int, rkey: int, length: int) -> bytes:
        """The peer's bytes, by RDMA READ."""
        # iWARP brings in the data of a read as a write.
        with MemoryRegion(self.client.pd, length, ALL) as into:
            await self.client.qp.read(into, addr, rkey)
            return bytes(into.view)

    async def write(self, addr: int, rkey: int, data: bytes) -> None:
        """Change the peer's bytes by RDMA WRITE; returns when they are changed."""
        with MemoryRegion(self.client.pd, bytearray(data)) as source:
            await self.client.qp.write(source, addr, rkey)
        # iWARP completes a write before the peer has it; a read behind it waits for it.
        await self.read(addr, rkey, 0 if not data else 1)


@asynccontextmanager
async def connected(
    address: str, *, server_pd: ProtectionDomain | None = None, **options: Any
) -> AsyncIterator[Ends]:
    """Two connected ends on one event channel; everything is closed at the end.

    Args:
        address: Address of the device.
        server_pd: The server's domain, if it is to share one; otherwise a fresh one.
        options: Fields of `QPInitAttr`, for both.
    """
    events = EventChannel()
    listener = listening(events, address)

    def serve(cm_id: ConnectionId) -> End:
        return End(cm_id).build(pd=server_pd, **options)

    client = End(await resolved(events, address, listener.source_port)).build(**options)
    server = await joined(client.cm_id, listener, serve)
    try:
        yield Ends(client, server)
    finally:
        for part in (client, server, listener, events):
            part.close()
        await close_all(client, server)
        await events.wait_closed()
