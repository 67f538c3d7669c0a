"""Row 5: what each call raises for a wrong argument, and what when the call itself fails.

Wrong arguments raise ValueError or TypeError before any C call is made.  Calls fail for real here:
the channel's descriptor is replaced by one that cannot be written, so that each command of
librdmacm fails with EBADF.
"""

from __future__ import annotations

import errno
import inspect
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from aiordma.cm import ConnectionEvent, ConnectionId, EventChannel, EventType
from aiordma.verbs import QPInitAttr
from tests.seeds.ends import End, begun, broken, half_way, parameters, record_calls, requested

pytestmark = pytest.mark.device

Call = Callable[["Stand"], Any]


class Stand:
    """An id at every step of its life."""

    def __init__(self, address: str, listener: ConnectionId, client: End) -> None:
        self.address = address
        self.listener = listener
        self.client = client  # its route is resolved, and it has a queue pair
        self.events = client.events
        self.fresh = ConnectionId(client.events)
        self.bound = ConnectionId(client.events)
        self.resolved = ConnectionId(client.events)

    async def prepare(self, server_events: EventChannel) -> None:
        self.bound.bind_addr((self.address, 0))
        await self.resolved.resolve_addr((self.address, 7471), timeout=5)
        connecting = End(self.events, ConnectionId(self.events))
        await connecting.cm_id.resolve_addr((self.address, self.listener.source_port), timeout=5)
        await connecting.cm_id.resolve_route(timeout=5)
        connecting.allocate()
        self.connecting = connecting
        self.task = await begun(connecting.cm_id.connect(parameters()))
        self.server, _ = await requested(server_events)
        self.server.allocate()

    async def accept(self) -> None:
        await self.server.cm_id.accept(parameters())
        await self.task

    def close(self) -> None:
        for cm_id in (self.fresh, self.bound, self.resolved):
            cm_id.close()
        self.task.cancel()
        self.server.close()
        self.connecting.close()


@pytest.fixture
async def stand(address: str) -> AsyncIterator[Stand]:
    async with half_way(address) as (listener, client, server_events):
        made = Stand(address, listener, client)
        await made.prepare(server_events)
        yield made
        made.close()


async def run(call: Call, stand: Stand) -> None:
    result = call(stand)
    if inspect.isawaitable(result):
        await result


WRONG: dict[str, tuple[Call, ...]] = {
    "create": (
        lambda s: ConnectionId(None),  # type: ignore[arg-type]
        lambda s: ConnectionId(s.client.channel),  # type: ignore[arg-type]
        lambda s: ConnectionId(s.events, "TCP"),  # type: ignore[arg-type]
    ),
    "bind_addr": (
        lambda s: s.fresh.bind_addr(None),  # type: ignore[arg-type]
        lambda s: s.fresh.bind_addr(("no-number.example", 0)),
        lambda s: s.fresh.bind_addr((s.address, 65536)),
        lambda s: s.fresh.bind_addr((s.address, "7471")),  # type: ignore[arg-type]
    ),
    "resolve_addr": (
        lambda s: s.fresh.resolve_addr(None),  # type: ignore[arg-type]
        lambda s: s.fresh.resolve_addr(("no-number.example", 7471)),
        lambda s: s.fresh.resolve_addr((s.address, -1)),
        lambda s: s.fresh.resolve_addr((s.address, 7471), ("no-number.example", 0)),
        lambda s: s.fresh.resolve_addr((s.address, 7471), timeout=-1),
        lambda s: s.fresh.resolve_addr((s.address, 7471), timeout=float("nan")),
        lambda s: s.fresh.resolve_addr((s.address, 7471), timeout="2"),  # type: ignore[arg-type]
    ),
    "resolve_route": (
        lambda s: s.resolved.resolve_route(timeout=-1),
        lambda s: s.resolved.resolve_route(timeout=None),  # type: ignore[arg-type]
    ),
    "connect": (
        lambda s: s.client.cm_id.connect({"retry_count": 1}),  # type: ignore[arg-type]
        lambda s: s.client.cm_id.connect(private_data="text"),  # type: ignore[arg-type]
        lambda s: s.client.cm_id.connect(private_data=bytes(256)),
    ),
    "accept": (
        lambda s: s.server.cm_id.accept(7),  # type: ignore[arg-type]
        lambda s: s.server.cm_id.accept(private_data="text"),  # type: ignore[arg-type]
        lambda s: s.server.cm_id.accept(private_data=bytes(256)),
    ),
    "create_qp": (
        lambda s: s.resolved.create_qp(None, QPInitAttr(send_cq=s.client.cq)),  # type: ignore[arg-type]
        lambda s: s.resolved.create_qp(s.client.pd, None),  # type: ignore[arg-type]
        lambda s: s.resolved.create_qp(s.client.pd, QPInitAttr(send_cq=None)),  # type: ignore[arg-type]
        lambda s: s.resolved.create_qp(
            s.client.pd, QPInitAttr(send_cq=s.client.cq, max_send_wr=-1)
        ),
    ),
    "ack_event": (
        lambda s: s.events.ack_event(None),  # type: ignore[arg-type]
        lambda s: s.events.ack_event(s.fresh),  # type: ignore[arg-type]
        lambda s: s.events.ack_event(ConnectionEvent(s.events, EventType.ESTABLISHED, 0, s.fresh)),
    ),
}
# The C calls that a wrong argument must not reach.
C_CALLS = (
    "rdma_create_id", "rdma_bind_addr", "rdma_resolve_addr", "rdma_resolve_route", "rdma_connect",
    "rdma_accept", "ibv_create_qp",
)  # fmt: skip

# Acknowledging is done here, and getters read memory: neither has a call that could fail.
FAILING: dict[str, tuple[Call, int]] = {
    "create": (lambda s: ConnectionId(s.events), errno.EBADF),
    "bind_addr": (lambda s: s.fresh.bind_addr((s.address, 0)), errno.EBADF),
    "listen": (lambda s: s.bound.listen(), errno.EBADF),
    "resolve_addr": (lambda s: s.fresh.resolve_addr((s.address, 7471)), errno.EBADF),
    "resolve_route": (lambda s: s.resolved.resolve_route(), errno.EBADF),
    "connect": (lambda s: s.client.cm_id.connect(parameters()), errno.EBADF),
}

CLOSED: dict[str, Call] = {
    "context": lambda s: s.fresh.context,
    "source_address": lambda s: s.bound.source_address,
    "source_port": lambda s: s.bound.source_port,
    "listen": lambda s: s.bound.listen(),
    "disconnect": lambda s: s.fresh.disconnect(),
    "destroy_qp": lambda s: s.fresh.destroy_qp(),
}


@pytest.mark.parametrize("method", WRONG)
async def test_j005_a_wrong_argument(
    stand: Stand, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = record_calls(monkeypatch, *C_CALLS)
    for call in WRONG[method]:
        with pytest.raises((ValueError, TypeError)):
            await run(call, stand)
    assert not calls
    await stand.accept()  # nothing was spoiled


@pytest.mark.parametrize("method", FAILING)
async def test_j005_a_call_that_fails(stand: Stand, method: str) -> None:
    call, code = FAILING[method]
    with broken(stand.events.fileno()), pytest.raises(OSError, match=r"^\[Errno") as failed:
        await run(call, stand)
    assert failed.value.errno == code


async def test_j005_accept_and_disconnect_that_fail(stand: Stand) -> None:
    server = stand.server.cm_id
    with (
        broken(stand.server.events.fileno()),
        pytest.raises(OSError, match="rdma_") as failed,
    ):
        await server.accept(parameters())
    assert failed.value.errno == errno.EBADF
    with pytest.raises(OSError, match="rdma_disconnect: EINVAL"):
        await server.disconnect()


async def test_j005_disconnect_of_a_connection_that_fails(stand: Stand) -> None:
    await stand.accept()
    with broken(stand.events.fileno()), pytest.raises(OSError, match="rdma_disconnect") as failed:
        await stand.connecting.cm_id.disconnect()
    assert failed.value.errno == errno.EBADF


async def test_j005_a_queue_pair_that_fails(stand: Stand) -> None:
    attr = QPInitAttr(send_cq=stand.client.cq, max_recv_wr=1 << 30)
    with pytest.raises(OSError, match="ibv_create_qp: EINVAL") as failed:
        stand.resolved.create_qp(stand.client.pd, attr)
    assert failed.value.errno == errno.EINVAL


async def test_j005_destroy_that_fails(stand: Stand) -> None:
    with pytest.raises(OSError, match="QueuePair") as failed:
        stand.client.cm_id.destroy()
    assert failed.value.errno == errno.EBUSY


@pytest.mark.parametrize("method", CLOSED)
async def test_j005_a_closed_id(stand: Stand, method: str) -> None:
    stand.fresh.close()
    stand.bound.close()
    with pytest.raises(OSError, match="closed") as failed:
        await run(CLOSED[method], stand)
    assert failed.value.errno == errno.ECONNABORTED


async def test_j005_what_never_raises(stand: Stand) -> None:
    assert stand.events.fileno() > 2
    stand.fresh.close()
    assert stand.fresh.event_channel is stand.events
    assert stand.fresh.port_space.name == "TCP"
    assert stand.fresh.qp is None
