"""Queue pairs that are brought up by hand, without the connection manager."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, TypeVar

import aiordma
from aiordma.verbs import (
    Access,
    BringUp,
    BringUpConfig,
    CompletionChannel,
    CompletionQueue,
    Context,
    ExtendedCompletionQueue,
    MemoryRegion,
    ProtectionDomain,
    QPInitAttr,
    QueuePair,
    WCFields,
)
from aiordma.verbs.resource import Resource

R = TypeVar("R", bound=Resource)

ALL = Access.LOCAL_WRITE | Access.REMOTE_READ | Access.REMOTE_WRITE | Access.REMOTE_ATOMIC
DEPTH = 16


class HandMade:
    """A queue pair on a device that the program has opened, and all that it needs.

    Attributes:
        parts: The resources of the end, each before those that it was made from.
    """

    def __init__(
        self, context: Context | None = None, *, fields: WCFields | None = None, **attributes: Any
    ) -> None:
        self.parts: list[Resource] = []
        self.context = self._own(aiordma.devices()[0].open()) if context is None else context
        self.pd = self._own(ProtectionDomain(self.context))
        self.channel = self._own(CompletionChannel(self.context))
        room: tuple[Any, ...] = (self.context, 2 * DEPTH, self.channel)
        self.cq: CompletionQueue = self._own(
            CompletionQueue(*room)
            if fields is None
            else ExtendedCompletionQueue(*room, fields=fields)
        )
        sizes = {"max_send_wr": DEPTH, "max_recv_wr": DEPTH, **attributes}
        self.qp = self._own(QueuePair(self.pd, QPInitAttr(send_cq=self.cq, **sizes)))

    def _own(self, part: R) -> R:
        self.parts.insert(0, part)
        return part

    def region(self, buffer: Any, access: Access = ALL) -> MemoryRegion:
        """A region that belongs to the end."""
        return self._own(MemoryRegion(self.pd, buffer, access))

    def bring_up(self, **settings: Any) -> BringUp:
        """The queue pair in INIT."""
        return BringUp(self.qp, BringUpConfig(**settings))

    async def close(self) -> None:
        """Give all of it back."""
        for part in self.parts:
            part.close()
        for part in self.parts:
            await part.wait_closed()


@contextlib.asynccontextmanager
async def hand_made(count: int = 2, **attributes: Any) -> AsyncIterator[list[HandMade]]:
    """Ends that are not connected."""
    async with contextlib.AsyncExitStack() as stack:
        ends = []
        for _ in range(count):
            ends.append(HandMade(**attributes))
            stack.push_async_callback(ends[-1].close)
        yield ends


@contextlib.asynccontextmanager
async def connected(
    first: dict[str, Any] | None = None, second: dict[str, Any] | None = None, **attributes: Any
) -> AsyncIterator[tuple[HandMade, HandMade]]:
    """Two ends that are connected, each with settings of its own."""
    async with hand_made(**attributes) as (one, other):
        ups = one.bring_up(**first or {}), other.bring_up(**second or {})
        await ups[0].connect(ups[1].address)
        await ups[1].connect(ups[0].address)
        yield one, other


Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def tcp_pair() -> AsyncIterator[tuple[Stream, Stream]]:
    """Both ends of a TCP connection."""
    accepted: asyncio.Future[Stream] = asyncio.get_running_loop().create_future()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.set_result((reader, writer))

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        here = await asyncio.open_connection(*server.sockets[0].getsockname())
        there = await accepted
        try:
            yield here, there
        finally:
            for _, writer in (here, there):
                writer.close()
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()
