"""Many native connections to one server, for what queue pairs share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiordma.cm import ConnectionId, EventChannel
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
from tests.native_ends import joined, listening, resolved


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
        await joined(client, self.listener, self._serve)

    def _serve(self, cm_id: ConnectionId) -> None:
        self.ids.append(cm_id)
        shared = QPInitAttr(send_cq=self.cq, srq=self.srq, max_send_wr=4)
        self.servers.append(cm_id.create_qp(self.pd, shared))

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


@asynccontextmanager
async def fan(
    address: str, connections: int, *, max_wr: int = 16, cqe: int = 256, memory: int = 1 << 16
) -> AsyncIterator[Fan]:
    """A server with a shared receive queue, connected this many times."""
    events = EventChannel()
    listener = listening(events, address)
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
