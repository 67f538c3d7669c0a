"""Native connections for tests: ids that listen or know their way, and ends with all they need."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Container, Coroutine
from typing import Any, Self, TypeVar

from aiordma.cm import (
    ConnectionEvent,
    ConnectionId,
    ConnectionParameter,
    EventChannel,
    EventType,
    PortSpace,
    Stage,
)
from aiordma.verbs import (
    Access,
    CompletionChannel,
    CompletionQueue,
    Context,
    MemoryRegion,
    ProtectionDomain,
    QPInitAttr,
    QPState,
    QPType,
    QueuePair,
)
from aiordma.verbs.resource import Resource

__all__ = [
    "ALL",
    "DEPTH",
    "LIMIT_S",
    "End",
    "Foreign",
    "acked",
    "begun",
    "beside",
    "close_all",
    "joined",
    "listening",
    "next_event",
    "parameters",
    "resolved",
]

T = TypeVar("T")
R = TypeVar("R", bound=Resource)

LIMIT_S = 30.0
DEPTH = 16
ALL = Access.LOCAL_WRITE | Access.REMOTE_READ | Access.REMOTE_WRITE


def parameters() -> ConnectionParameter:
    """Depths and finite retries: a peer that fails is noticed."""
    return ConnectionParameter(4, 4, 6, 6)


# Ids and their events


def listening(
    events: EventChannel, host: str, port: int = 0, space: PortSpace = PortSpace.TCP
) -> ConnectionId:
    """An id that listens; the kernel chooses the port, if none is given."""
    with contextlib.ExitStack() as undo:
        listener = undo.enter_context(ConnectionId(events, space))
        listener.bind_addr((host, port))
        listener.listen()
        undo.pop_all()
    return listener


async def resolved(
    events: EventChannel, host: str, port: int, space: PortSpace = PortSpace.TCP
) -> ConnectionId:
    """An id whose address and route are known: it is ready for a queue pair, and to connect."""
    with contextlib.ExitStack() as undo:
        cm_id = undo.enter_context(ConnectionId(events, space))
        await cm_id.resolve_addr((host, port), timeout=LIMIT_S)
        await cm_id.resolve_route(timeout=LIMIT_S)
        undo.pop_all()
    return cm_id


async def next_event(
    channel: EventChannel, kind: EventType, *, skip: Container[EventType] = ()
) -> ConnectionEvent:
    """The next event of the channel, which has to be of this kind; not acknowledged.

    Those of the kinds in `skip` may come before it.
    """
    while True:
        event = await channel.get_event(LIMIT_S)
        assert event is not None, f"no {kind.name}"
        if event.type == kind or event.type not in skip:
            break
        event.ack()
    assert event.type == kind, event
    return event


async def acked(
    channel: EventChannel, kind: EventType, *, skip: Container[EventType] = ()
) -> ConnectionEvent:
    """The same, acknowledged."""
    event = await next_event(channel, kind, skip=skip)
    event.ack()
    return event


async def begun(coro: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task that has come to its first wait: what it posts is posted."""
    task = asyncio.create_task(coro)
    await asyncio.sleep(0)
    return task


@contextlib.asynccontextmanager
async def beside(coro: Coroutine[Any, Any, Any]) -> AsyncIterator[asyncio.Task[Any]]:
    """Run a coroutine beside the block, at whose end it is canceled."""
    task = await begun(coro)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


async def joined(
    client: ConnectionId,
    listener: ConnectionId,
    serve: Callable[[ConnectionId], T],
    parameter: ConnectionParameter | None = None,
) -> T:
    """Connect `client` to the listener that it was resolved for.

    Args:
        client: Resolved, with its queue pair.
        listener: Its channel is where the request arrives.
        serve: Makes the other end of the id that the request brings; its result is returned.
        parameter: For both.
    """
    parameter = parameter or parameters()
    connecting = await begun(client.connect(parameter))
    request = await acked(listener.event_channel, EventType.CONNECT_REQUEST)
    assert request.listen_id is listener
    assert request.connection_id is not None
    made = serve(request.connection_id)
    await request.connection_id.accept(parameter)
    await connecting
    return made


# Ends


class End:
    """One end of a native connection: an id with its queue pair, and all that this needs.

    Args:
        cm_id: It belongs to the end from now on.

    Attributes:
        parts: What belongs to the end, each before what it was made from.
        mr: For tests that need one region; made by them.
    """

    context: Context
    pd: ProtectionDomain
    channel: CompletionChannel
    cq: CompletionQueue
    qp: QueuePair
    mr: MemoryRegion

    def __init__(self, cm_id: ConnectionId) -> None:
        self.cm_id = cm_id
        self.parts: list[Resource] = [cm_id]

    def build(
        self,
        *,
        pd: ProtectionDomain | None = None,
        cq: CompletionQueue | None = None,
        room: int = 2 * DEPTH,
        notify: bool = False,
        **sizes: Any,
    ) -> Self:
        """What the queue pair needs, and the queue pair, on the device that the id is bound to.

        Args:
            pd: A domain that is shared; otherwise the end has its own.
            cq: Likewise a completion queue.
            room: Of its own completion queue.
            notify: Whether to ask for the first event of its own completion queue.
            sizes: Fields of `QPInitAttr`; by default room for `DEPTH` requests in each queue.
        """
        context = self.cm_id.context
        assert context is not None
        self.context = context
        sizes = {"max_send_wr": DEPTH, "max_recv_wr": DEPTH, **sizes}
        if self.cm_id.is_datagram:
            sizes["qp_type"] = QPType.UD
        try:
            self.pd = self._own(ProtectionDomain(context)) if pd is None else pd
            if cq is None:
                self.channel = self._own(CompletionChannel(context))
                cq = self._own(CompletionQueue(context, room, self.channel))
                if notify:
                    cq.req_notify()
            self.cq = cq
            self.qp = self._own(self._make_qp(QPInitAttr(send_cq=cq, **sizes)))
        except BaseException:
            self.close()
            raise
        return self

    def _make_qp(self, attr: QPInitAttr) -> QueuePair:
        return self.cm_id.create_qp(self.pd, attr)

    def _own(self, part: R) -> R:
        self.parts.insert(0, part)
        return part

    def region(self, buffer: Any, access: Access = ALL, **options: Any) -> MemoryRegion:
        """A region in the end's domain, which belongs to the end."""
        return self._own(MemoryRegion(self.pd, buffer, access, **options))

    def close(self) -> None:
        """Give everything back."""
        for part in self.parts:
            part.close()


class Foreign(End):
    """An end whose id knows the queue pair by its number alone: it is moved here."""

    def _make_qp(self, attr: QPInitAttr) -> QueuePair:
        return QueuePair(self.pd, attr)

    def move(self, *states: QPState) -> None:
        """Move the queue pair as the connection manager proposes."""
        for state in states:
            self.qp.modify(**self.cm_id.init_qp_attr(state))

    async def connect(
        self, parameter: ConnectionParameter | None = None, private_data: bytes = b""
    ) -> ConnectionEvent:
        """Connect, and confirm; the event with the answer of the peer."""
        self.move(QPState.INIT)
        answer = await self.cm_id.connect(
            parameter or parameters(), private_data=private_data, qp_num=self.qp.num
        )
        if self.context.is_iwarp:  # the kernel does it all
            assert answer.type == EventType.ESTABLISHED
            return answer
        assert answer.type == EventType.CONNECT_RESPONSE
        assert self.cm_id.stage == Stage.RESPONDED
        # Once more to INIT: only now the accesses that the peer has asked for are proposed.
        self.move(QPState.INIT, QPState.RTR, QPState.RTS)
        self.cm_id.establish()
        return answer

    async def accept(
        self, parameter: ConnectionParameter | None = None, private_data: bytes = b""
    ) -> ConnectionEvent:
        """Accept the request that has made the id."""
        self.move(QPState.INIT)
        if not self.context.is_iwarp:
            self.move(QPState.RTR, QPState.RTS)
        return await self.cm_id.accept(
            parameter or parameters(), private_data=private_data, qp_num=self.qp.num
        )


async def close_all(*ends: End) -> None:
    """Close ends, and wait until the adapter has nothing of them."""
    for end in ends:
        end.close()
    for end in ends:
        for part in end.parts:
            await part.wait_closed(LIMIT_S)
