"""Client and server at the native level, with everything that the seeds have them allocate."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from aiordma._ffi import lib
from aiordma.cm import (
    ConnectionEvent,
    ConnectionId,
    ConnectionParameter,
    EventChannel,
    EventType,
)
from aiordma.verbs import (
    SGE,
    Access,
    CompletionChannel,
    CompletionQueue,
    MemoryRegion,
    ProtectionDomain,
    QPInitAttr,
    RecvWR,
    SendWR,
    WorkCompletion,
)

if TYPE_CHECKING:
    import pytest

T = TypeVar("T")

LIMIT_S = 20.0
DEPTH = 8
# For a test that shows that nothing happens.
MOMENT_S = 0.2
EVERYTHING = Access.LOCAL_WRITE | Access.REMOTE_READ | Access.REMOTE_WRITE


def parameters() -> ConnectionParameter:
    """Depths and finite retries: a peer that fails is noticed."""
    return ConnectionParameter(4, 4, 6, 6)


@dataclass
class End:
    """One end of a connection."""

    events: EventChannel
    cm_id: ConnectionId

    def allocate(
        self, cq: CompletionQueue | None = None, *, room: int = 2 * DEPTH, **sizes: Any
    ) -> None:
        """The RDMA structures, in the order of the seeds; `room` is that of the queue."""
        context = self.cm_id.context
        assert context is not None
        sizes = {"max_send_wr": DEPTH, "max_recv_wr": DEPTH, **sizes}
        self.pd = ProtectionDomain(context)
        self.shared = cq is not None
        if cq is None:
            self.channel = CompletionChannel(context)
            cq = CompletionQueue(context, room, self.channel)
            cq.req_notify()
        self.cq = cq
        self.qp = self.cm_id.create_qp(self.pd, QPInitAttr(send_cq=cq, **sizes))
        self.mr = MemoryRegion(self.pd, 4096, EVERYTHING)

    def post_recv(self, *wr_ids: int, length: int = 256) -> None:
        self.qp.post_recv([RecvWR(wr_id=n, sg_list=[SGE(self.mr, 0, length)]) for n in wr_ids])

    def post_send(self, wr_id: int = 0, length: int = 16, **more: Any) -> None:
        self.qp.post_send(SendWR(wr_id=wr_id, sg_list=[SGE(self.mr, 0, length)], **more))

    async def completions(self, count: int) -> list[WorkCompletion]:
        """The next `count` completions of raw posts, by polling."""
        found: list[WorkCompletion] = []
        async with asyncio.timeout(LIMIT_S):
            while len(found) < count:
                found += self.cq.poll()
                await asyncio.sleep(0.001)
        return found

    def close(self) -> None:
        """Everything that was allocated, and the id."""
        if hasattr(self, "mr"):
            self.qp.close()
            self.mr.close()
            if not self.shared:
                self.cq.close()
                self.channel.close()
            self.pd.close()
        self.cm_id.close()


@dataclass
class Pair:
    """Two connected ends, and the events that both saw while they connected."""

    listener: ConnectionId
    client: End
    server: End
    request: ConnectionEvent
    established: ConnectionEvent


async def next_event(channel: EventChannel, kind: EventType) -> ConnectionEvent:
    """The next event of the channel, which has to be of this kind; not acknowledged."""
    event = await channel.get_event(LIMIT_S)
    assert event is not None, f"no {kind.name}"
    assert event.type == kind
    return event


async def acked(channel: EventChannel, kind: EventType) -> ConnectionEvent:
    """The same, acknowledged."""
    event = await next_event(channel, kind)
    event.ack()
    return event


async def begun(coro: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task that has come to its first wait: what it posts is posted."""
    task = asyncio.create_task(coro)
    await asyncio.sleep(0)
    return task


def listening(events: EventChannel, host: str, port: int = 0) -> ConnectionId:
    listener = ConnectionId(events)
    listener.bind_addr((host, port))
    listener.listen(0)
    return listener


async def resolved(events: EventChannel, host: str, port: int) -> ConnectionId:
    """An id whose address and route are known."""
    cm_id = ConnectionId(events)
    try:
        await cm_id.resolve_addr((host, port), timeout=5)
        await cm_id.resolve_route(timeout=5)
    except BaseException:
        cm_id.close()
        raise
    return cm_id


@contextlib.asynccontextmanager
async def half_way(
    host: str, *, listen_on: str = ""
) -> AsyncIterator[tuple[ConnectionId, End, EventChannel]]:
    """A listener, a client that is ready to connect, and the server's channel."""
    with EventChannel() as server_events, EventChannel() as client_events:
        listener = listening(server_events, listen_on or host)
        client = End(client_events, await resolved(client_events, host, listener.source_port))
        client.allocate()
        try:
            yield listener, client, server_events
        finally:
            client.close()
            listener.close()


@contextlib.asynccontextmanager
async def connected(
    host: str,
    client_param: ConnectionParameter | None = None,
    server_param: ConnectionParameter | None = None,
    *,
    prepare: Callable[[End], None] = lambda _: None,
) -> AsyncIterator[Pair]:
    """A client and a server, connected; `prepare` is called for both before they connect."""
    async with half_way(host) as (listener, client, server_events):
        prepare(client)
        connecting = await begun(client.cm_id.connect(client_param or parameters()))
        request = await acked(server_events, EventType.CONNECT_REQUEST)
        assert request.connection_id is not None
        server = End(server_events, request.connection_id)
        try:
            server.allocate()
            prepare(server)
            await server.cm_id.accept(server_param or parameters())
            yield Pair(listener, client, server, request, await connecting)
        finally:
            server.close()


def record_calls(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[tuple[str, tuple[Any, ...]]]:
    """Note the calls of these C functions, which are still made: (name, arguments)."""
    calls: list[tuple[str, tuple[Any, ...]]] = []

    def spy(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            calls.append((name, arguments))
            return real(*arguments)

        return call

    for name in names:
        monkeypatch.setattr(lib, name, spy(name, getattr(lib, name)))
    return calls


@contextlib.contextmanager
def broken(fd: int) -> Iterator[None]:
    """Let every command on a descriptor fail with EBADF: it cannot be written meanwhile."""
    saved, useless = os.dup(fd), os.open(os.devnull, os.O_RDONLY)
    os.dup2(useless, fd, inheritable=False)
    os.close(useless)
    try:
        yield
    finally:
        os.dup2(saved, fd, inheritable=False)
        os.close(saved)
