"""Connections made of `aiordma.cm` and `aiordma.verbs` alone, as the foreign programs make theirs.

The high-level Connection has its own queues and memory.  A peer that reads and writes memory, or
wants a depth or a private word of its own, is met with these few lines of the native layer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiordma import FlushedError
from aiordma.cm import (
    ConnectionEvent,
    ConnectionId,
    ConnectionParameter,
    EventChannel,
    EventType,
    PortSpace,
)
from aiordma.verbs import SGE, Access, MemoryRegion, RecvWR, WorkCompletion
from tests import native_ends
from tests.interop.program import Program, until_listening
from tests.native_ends import acked, close_all, listening, resolved

#: What is in a buffer before the peer's bytes arrive, so that zeros are seen to arrive, too.
POISON = b"\xa5"
#: Retries that end; the depths are those that rping and most others ask for.
PARAMETER = ConnectionParameter.exact(
    responder_resources=1, initiator_depth=1, retry_count=6, rnr_retry_count=6
)


class End(native_ends.End):
    """One end of a connection, or one that datagrams reach: queue pair, completion queue, memory.

    Args:
        cm_id: Bound to a device and without a queue pair; its port space tells the kind of that.
            It belongs to the end from now on.
        depth: Of each of the two queues.
    """

    def __init__(self, cm_id: ConnectionId, *, depth: int = 16) -> None:
        super().__init__(cm_id)
        self.build(room=2 * depth, max_send_wr=depth, max_recv_wr=depth)

    def region(
        self, buffer: int, access: Access = Access.LOCAL_WRITE, **options: Any
    ) -> MemoryRegion:
        """Registered memory of so many bytes, filled with POISON."""
        return super().region(bytearray(POISON * buffer), access, **options)

    def post_recv(self, *pieces: SGE) -> None:
        """Post a receive for each piece."""
        self.qp.post_recv([RecvWR(wr_id=n, sg_list=[piece]) for n, piece in enumerate(pieces)])

    async def received(self) -> WorkCompletion:
        """The completion of the next receive that was posted."""
        completion = await anext(self.cq)
        assert completion.ok, completion
        return completion

    async def send_last(self, piece: SGE, *, imm: int | None = None) -> None:
        """Send a message after which the peer hangs up.

        Maybe before its adapter has acknowledged the message: then the request is flushed.
        """
        with contextlib.suppress(FlushedError):
            await self.qp.send(piece, imm=imm)


class ForeignEnd(End, native_ends.Foreign):
    """An end whose id knows the queue pair by its number alone."""


class Server:
    """A listening id with a channel of its own.

    Attributes:
        port: Where it listens.
    """

    def __init__(self, address: str, port: int, space: PortSpace) -> None:
        self.events = EventChannel()
        with contextlib.ExitStack() as undo:
            undo.callback(self.events.close)
            self._id = listening(self.events, address, port, space)
            undo.pop_all()
        self.port = self._id.source_port

    async def event(self, kind: EventType) -> ConnectionEvent:
        """The next event, which has to be of this kind."""
        return await acked(self.events, kind)

    async def request(self) -> ConnectionEvent:
        """The next request to connect."""
        return await self.event(EventType.CONNECT_REQUEST)

    async def close(self) -> None:
        self._id.close()
        self.events.close()
        await self.events.wait_closed()


@asynccontextmanager
async def serving(
    address: str, port: int = 0, space: PortSpace = PortSpace.TCP
) -> AsyncIterator[Server]:
    """A server for the time of the block."""
    server = Server(address, port, space)
    try:
        yield server
    finally:
        await server.close()


async def dial(
    events: EventChannel,
    to: tuple[str, int],
    prepare: Callable[[End], object],
    private_data: bytes,
    space: PortSpace,
    kind: type[End] = End,
) -> tuple[End, ConnectionEvent]:
    """Connect; returns this side's end and the event that established the connection."""
    end = kind(await resolved(events, *to, space))
    try:
        prepare(end)
        if isinstance(end, ForeignEnd):
            return end, await end.connect(PARAMETER, private_data)
        parameter = None if end.cm_id.is_datagram else PARAMETER
        return end, await end.cm_id.connect(parameter, private_data=private_data)
    except BaseException:
        await close_all(end)
        raise


@asynccontextmanager
async def dialed(
    server: Program,
    address: str,
    port: int,
    prepare: Callable[[End], object] = lambda _: None,
    *,
    private_data: bytes = b"",
    space: PortSpace = PortSpace.TCP,
    kind: type[End] = End,
) -> AsyncIterator[Dialed]:
    """Connect to a program as soon as it listens.

    `prepare` is called with the end before it connects, the last moment to post receives for what
    the server may send at once.
    """
    events = EventChannel()
    try:
        end, answer = await until_listening(
            server, port, lambda: dial(events, (address, port), prepare, private_data, space, kind)
        )
        try:
            yield Dialed(end, answer, events)
        finally:
            await close_all(end)
    finally:
        events.close()
        await events.wait_closed()


@dataclass
class Dialed:
    """A connection to a program: this side's end, the event that established it, its channel."""

    end: End
    answer: ConnectionEvent
    events: EventChannel

    async def disconnected(self) -> None:
        """Wait until the peer has ended the connection."""
        async with asyncio.timeout(20):
            while (event := await self.events.get_event()) is not None:
                event.ack()
                if event.type == EventType.DISCONNECTED:
                    return
