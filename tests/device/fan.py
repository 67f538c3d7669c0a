"""Many native connections to one server, for what queue pairs share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiordma.cm import ConnectionId, ConnectionParameter, EventChannel, EventType, PortSpace
from aiordma.verbs import (
    Access,
    CompletionChannel,
    CompletionQueue,
    Context,
    MemoryRegion,
    ProtectionDomain,
    QPInitAttr,
    QueuePair,
    SharedReceiveQueue,
)
from aiordma.verbs.resource import Resource

PARAMETER = ConnectionParameter(4, 4, 6, 6)


@dataclass
class Fan:
    """A server whose queue pairs share one CQ and one SRQ, and its clients, who share a CQ."""

    address: str
    events: EventChannel
    listener: ConnectionId
    context: Context
    pd: ProtectionDomain
    channel: CompletionChannel
    cq: CompletionQueue
    client_cq: CompletionQueue
    srq: SharedReceiveQueue
    mr: MemoryRegion
    clients: list[QueuePair] = field(default_factory=list)
    servers: list[QueuePair] = field(default_factory=list)
    ids: list[ConnectionId] = field(default_factory=list)

    async def dial(self, first: ConnectionId | None = None) -> None:
        """One more connection."""
        client = first or await resolved(self.events, self.address, self.listener.source_port)
        self.ids.append(client)
        attr = QPInitAttr(
            send_cq=self.client_cq, max_send_wr=4, max_recv_wr=4, max_send_sge=2, max_recv_sge=1
        )
        self.clients.append(client.create_qp(self.pd, attr))
        connecting = asyncio.create_task(client.connect(PARAMETER))
        event = await self.events.get_event(10)
        while event is not None and event.type != EventType.CONNECT_REQUEST:
            event.ack()
            event = await self.events.get_event(10)
        assert event is not None
        server = event.connection_id
        assert server is not None
        self.ids.append(server)
        event.ack()
        shared = QPInitAttr(send_cq=self.cq, srq=self.srq, max_send_wr=4)
        self.servers.append(server.create_qp(self.pd, shared))
        await server.accept(PARAMETER)
        await connecting

    def server_of(self, qp_num: int) -> int:
        """Place of the server's queue pair with this number."""
        return [qp.num for qp in self.servers].index(qp_num)

    async def close(self) -> None:
        """All of it; the adapter has nothing of it afterwards."""
        parts: list[Resource] = [*self.clients, *self.servers, self.srq, self.cq, self.client_cq]
        parts += [self.channel, self.mr, self.pd, *self.ids, self.listener, self.events]
        for part in parts:
            part.close()
        for part in parts:
            await part.wait_closed()


async def resolved(events: EventChannel, address: str, port: int) -> ConnectionId:
    """An id that is ready to connect."""
    client = ConnectionId(events)
    await client.resolve_addr((address, port), timeout=5)
    await client.resolve_route(timeout=5)
    return client


@asynccontextmanager
async def fan(
    address: str, connections: int, *, max_wr: int = 16, cqe: int = 256, memory: int = 1 << 16
) -> AsyncIterator[Fan]:
    """A server with a shared receive queue, connected this many times."""
    events = EventChannel()
    listener = ConnectionId(events, PortSpace.TCP)
    listener.bind_addr((address, 0))
    listener.listen(0)
    client = await resolved(events, address, listener.source_port)
    context = client.context
    assert context is not None
    pd = ProtectionDomain(context)
    channel = CompletionChannel(context)
    made = Fan(
        address, events, listener, context, pd, channel,
        cq=CompletionQueue(context, cqe, channel),
        client_cq=CompletionQueue(context, cqe, channel),
        srq=SharedReceiveQueue(pd, max_wr),
        mr=MemoryRegion(pd, memory, Access.LOCAL_WRITE | Access.REMOTE_READ),
    )  # fmt: skip
    try:
        await made.dial(client)
        for _ in range(connections - 1):
            await made.dial()
        yield made
    finally:
        await made.close()
