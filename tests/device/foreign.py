"""A peer made of the native layer alone: it does what a test says, and nothing besides."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiordma.cm import ConnectionId, ConnectionParameter, EventChannel, EventType
from aiordma.verbs import Access
from tests import native_ends
from tests.native_ends import ALL, acked, listening, resolved

DEPTHS = ConnectionParameter.exact(
    responder_resources=4, initiator_depth=4, retry_count=6, rnr_retry_count=1
)
# What peers that came before have to say.
_OTHERS = (EventType.ESTABLISHED, EventType.DISCONNECTED, EventType.TIMEWAIT_EXIT)


class Foreign(native_ends.End):
    """The peer's end: a queue pair, 4 KiB of memory, and no receive posted."""

    def __init__(self, cm_id: ConnectionId) -> None:
        super().__init__(cm_id)
        self.build(room=64, max_send_wr=32, max_recv_wr=32)
        access = ALL if self.context.is_iwarp else ALL | Access.REMOTE_ATOMIC
        self.mr = self.region(4096, access)


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
        request = await acked(self.events, EventType.CONNECT_REQUEST, skip=_OTHERS)
        assert request.connection_id is not None
        end = Foreign(request.connection_id)
        await end.cm_id.accept(DEPTHS)
        return end


@asynccontextmanager
async def foreign_listener(address: str) -> AsyncIterator[ForeignListener]:
    """A listener of the native layer."""
    with EventChannel() as events, listening(events, address) as listener:
        yield ForeignListener(events, listener)


async def foreign_client(events: EventChannel, address: str, port: int) -> Foreign:
    """Connect to a listener."""
    end = Foreign(await resolved(events, address, port))
    await end.cm_id.connect(DEPTHS, timeout=20)
    return end
