"""Two native ends whose queue pairs are connected, for tests of memory and windows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiordma.cm import ConnectionId, ConnectionParameter, EventChannel, EventType
from aiordma.verbs import (
    Access,
    CompletionChannel,
    CompletionQueue,
    Context,
    MemoryRegion,
    ProtectionDomain,
    QPInitAttr,
    QueuePair,
)
from aiordma.verbs.resource import Resource

__all__ = ["ALL", "End", "Ends", "connected"]

ALL = Access.LOCAL_WRITE | Access.REMOTE_READ | Access.REMOTE_WRITE
_DEPTH = 16


@dataclass
class End:
    """One end: a queue pair and its protection domain; what it registers is closed with it."""

    cm_id: ConnectionId
    parts: list[Resource] = field(default_factory=list)
    mr: MemoryRegion = field(init=False, repr=False)  # for tests that need one

    def build(self, pd: ProtectionDomain | None = None, **options: Any) -> None:
        context = self.cm_id.context
        assert context is not None
        self.context: Context = context
        self.pd = ProtectionDomain(context) if pd is None else pd
        self.channel = CompletionChannel(context)
        self.cq = CompletionQueue(context, 2 * _DEPTH, self.channel)
        sizes = {"max_send_wr": _DEPTH, "max_recv_wr": _DEPTH, **options}
        attr = QPInitAttr(send_cq=self.cq, **sizes)
        self.qp: QueuePair = self.cm_id.create_qp(self.pd, attr)
        self.parts += [self.qp, self.cq, self.channel, self.cm_id]
        if pd is None:
            self.parts.append(self.pd)

    def region(self, buffer: Any, access: Access = ALL, **options: Any) -> MemoryRegion:
        """A region in the end's domain."""
        region = MemoryRegion(self.pd, buffer, access, **options)
        self.parts.append(region)
        return region


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
    listener = ConnectionId(events)
    listener.bind_addr((address, 0))
    listener.listen(0)
    client = End(ConnectionId(events))
    await client.cm_id.resolve_addr((address, listener.source_port), timeout=10)
    await client.cm_id.resolve_route(timeout=10)
    client.build(**options)
    connecting = asyncio.create_task(client.cm_id.connect(ConnectionParameter(4, 4, 6, 6)))
    event = await events.get_event(10)
    assert event is not None
    assert event.type == EventType.CONNECT_REQUEST
    assert event.connection_id is not None
    event.ack()
    server = End(event.connection_id)
    server.build(server_pd, **options)
    await server.cm_id.accept(ConnectionParameter(4, 4, 6, 6))
    await connecting
    try:
        yield Ends(client, server)
    finally:
        for end in (client, server):
            for part in end.parts:
                part.close()
        listener.close()
        events.close()
        for end in (client, server):
            for part in end.parts:
                await part.wait_closed(20)
        await events.wait_closed()
