"""A peer made of the native layer alone: it does what a test says, and nothing besides."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiordma.cm import ConnectionId, ConnectionParameter, EventChannel, EventType
from aiordma.verbs import (
    Access,
    CompletionChannel,
    CompletionQueue,
    MemoryRegion,
    ProtectionDomain,
    QPInitAttr,
    QueuePair,
)

ALL = Access.LOCAL_WRITE | Access.REMOTE_READ | Access.REMOTE_WRITE | Access.REMOTE_ATOMIC
DEPTHS = ConnectionParameter.exact(
    responder_resources=4, initiator_depth=4, retry_count=6, rnr_retry_count=1
)


@dataclass
class Foreign:
    """The peer's end: a queue pair, 4 KiB of memory, and no receive posted."""

    cm_id: ConnectionId
    qp: QueuePair
    cq: CompletionQueue
    mr: MemoryRegion
    pd: ProtectionDomain
    channel: CompletionChannel

    @classmethod
    def on(cls, cm_id: ConnectionId, access: Access = ALL) -> Foreign:
        """Everything that an end needs, on the device of `cm_id`."""
        context = cm_id.context
        assert context is not None
        if context.is_iwarp:
            access &= ~Access.REMOTE_ATOMIC
        pd = ProtectionDomain(context)
        channel = CompletionChannel(context)
        cq = CompletionQueue(context, 64, channel)
        qp = cm_id.create_qp(pd, QPInitAttr(send_cq=cq, max_send_wr=32, max_recv_wr=32))
        return cls(cm_id, qp, cq, MemoryRegion(pd, 4096, access), pd, channel)

    def close(self) -> None:
        """Give everything back."""
        for part in (self.qp, self.cq, self.channel, self.mr, self.pd, self.cm_id):
            part.close()


@dataclass
class ForeignListener:
    """Answers requests by hand."""

    events: EventChannel
    cm_id: ConnectionId

    @property
    def port(self) -> int:
        """Where it listens."""
        return self.cm_id.source_port

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens, whole."""
        return self.cm_id.source_address or "", self.port

    async def accept(self) -> Foreign:
        """Take the next request."""
        while True:
            event = await self.events.get_event(20)
            assert event is not None, "no request"
            event.ack()
            if event.type == EventType.CONNECT_REQUEST:
                break
        assert event.connection_id is not None
        end = Foreign.on(event.connection_id)
        await end.cm_id.accept(DEPTHS)
        return end


@asynccontextmanager
async def foreign_listener(address: str) -> AsyncIterator[ForeignListener]:
    """A listener of the native layer."""
    events = EventChannel()
    listener = ConnectionId(events)
    listener.bind_addr((address, 0))
    listener.listen()
    try:
        yield ForeignListener(events, listener)
    finally:
        listener.close()
        events.close()


async def foreign_client(events: EventChannel, address: str, port: int) -> Foreign:
    """Connect to a listener."""
    cm_id = ConnectionId(events)
    await cm_id.resolve_addr((address, port), timeout=10)
    await cm_id.resolve_route(timeout=10)
    end = Foreign.on(cm_id)
    await cm_id.connect(DEPTHS, timeout=20)
    return end
