"""Client and server at the native level, with everything that the seeds have them allocate."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from aiordma._core import CMEvents
from aiordma._ffi import lib
from aiordma.cm import (
    ConnectionEvent,
    ConnectionId,
    ConnectionParameter,
    EventChannel,
    EventType,
)
from aiordma.verbs import SGE, CompletionQueue, RecvWR, SendWR, WorkCompletion
from tests import native_ends
from tests.device.oracle import polled
from tests.native_ends import (
    LIMIT_S,
    acked,
    begun,
    listening,
    next_event,
    parameters,
    resolved,
)

if TYPE_CHECKING:
    import pytest

__all__ = [
    "ALLOCATING",
    "DEPTH",
    "LIMIT_S",
    "MOMENT_S",
    "End",
    "Pair",
    "acked",
    "begun",
    "broken",
    "connected",
    "half_way",
    "listening",
    "next_event",
    "parameters",
    "record_calls",
    "requested",
    "resolved",
]

DEPTH = 8
# For a test that shows that nothing happens.
MOMENT_S = 0.2


class End(native_ends.End):
    """One end of a connection, and the channel of its events."""

    def __init__(self, events: EventChannel, cm_id: ConnectionId) -> None:
        super().__init__(cm_id)
        self.events = events

    def allocate(
        self, cq: CompletionQueue | None = None, *, room: int = 2 * DEPTH, **sizes: Any
    ) -> None:
        """The RDMA structures, in the order of the seeds; `room` is that of the queue."""
        sizes = {"max_send_wr": DEPTH, "max_recv_wr": DEPTH, **sizes}
        self.build(cq=cq, room=room, notify=True, **sizes)
        self.mr = self.region(4096)

    def post_recv(self, *wr_ids: int, length: int = 256) -> None:
        self.qp.post_recv([RecvWR(wr_id=n, sg_list=[SGE(self.mr, 0, length)]) for n in wr_ids])

    def post_send(self, wr_id: int = 0, length: int = 16, **more: Any) -> None:
        self.qp.post_send(SendWR(wr_id=wr_id, sg_list=[SGE(self.mr, 0, length)], **more))

    async def completions(self, count: int) -> list[WorkCompletion]:
        """The next `count` completions of raw posts, by polling."""
        return await polled(self.cq, count)


async def requested(events: EventChannel) -> tuple[End, ConnectionEvent]:
    """The server's end of the next client, without a queue pair, and the client's request."""
    request = await acked(events, EventType.CONNECT_REQUEST)
    assert request.connection_id is not None
    return End(events, request.connection_id), request


@dataclass
class Pair:
    """Two connected ends, and the events that both saw while they connected."""

    listener: ConnectionId
    client: End
    server: End
    request: ConnectionEvent
    established: ConnectionEvent


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
        server, request = await requested(server_events)
        try:
            server.allocate()
            prepare(server)
            await server.cm_id.accept(server_param or parameters())
            yield Pair(listener, client, server, request, await connecting)
        finally:
            server.close()


# What allocates the structures of a connection, in the order of the seeds.
ALLOCATING = (
    "ibv_alloc_pd", "ibv_create_comp_channel", "ibv_create_cq", "ibv_req_notify_cq",
    "ibv_create_qp", "ibv_reg_mr_iova",
)  # fmt: skip

# What stands between Python and some of C's functions: one call in place of a struct's many fields.
WITHIN: dict[str, tuple[Any, str]] = {
    "rdma_resolve_addr": (CMEvents, "resolve"), "rdma_connect": (lib, "aio_connect"),
    "rdma_accept": (lib, "aio_accept"), "ibv_create_cq": (lib, "aio_create_cq"),
    "ibv_create_qp": (lib, "aio_create_qp"),
}  # fmt: skip


def with_offer(handle: Any, data: Any, length: int, *numbers: int) -> tuple[Any, ...]:
    """The arguments of `aio_connect` and `aio_accept`, as rdma_connect(3) has them."""
    names = "responder_resources initiator_depth flow_control retry_count rnr_retry_count qp_num"
    return handle, SimpleNamespace(**dict(zip(names.split(), numbers, strict=True)))


def record_calls(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[tuple[str, tuple[Any, ...]]]:
    """Note the calls of these C functions, which are still made: (name, arguments)."""
    calls: list[tuple[str, tuple[Any, ...]]] = []

    def spy(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        offers = name in {"rdma_connect", "rdma_accept"}

        def call(*arguments: Any) -> Any:
            calls.append((name, with_offer(*arguments) if offers else arguments))
            return real(*arguments)

        return call

    for name in names:
        owner, inner = WITHIN.get(name, (lib, name))
        call = spy(name, getattr(owner, inner))
        monkeypatch.setattr(owner, inner, call if owner is lib else staticmethod(call))
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
