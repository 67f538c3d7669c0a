"""Rows 1 to 4 and 6 to 15: how an id is made, bound and resolved."""

from __future__ import annotations

import asyncio

import pytest

import aiordma
from aiordma.cm import ConnectionId, EventChannel, EventType, PortSpace
from aiordma.verbs import CompletionChannel, CompletionQueue, ProtectionDomain
from tests.seeds.ends import (
    Pair,
    acked,
    begun,
    half_way,
    listening,
    parameters,
    record_calls,
)
from tests.seeds.network import NOBODY, ipv6, neighbors_are_asked

pytestmark = pytest.mark.device


async def test_j001_made_here_or_by_a_request(pair: Pair) -> None:
    made, requested = pair.client.cm_id, pair.server.cm_id
    assert type(made) is type(requested) is ConnectionId
    assert requested is not pair.listener


async def test_j002_objects_of_a_device_are_made_from_the_context(address: str) -> None:
    with EventChannel() as events, listening(events, address) as cm_id:
        context = cm_id.context
        assert context is not None
        with (
            ProtectionDomain(context) as pd,
            CompletionChannel(context) as channel,
            CompletionQueue(context, 4, channel) as cq,
        ):
            assert pd.context is channel.context is cq.context is context
            assert cq.cqe >= 4


async def test_j003_a_forgotten_id_is_reported() -> None:
    with EventChannel() as events:
        cm_id = ConnectionId(events)
        with pytest.warns(ResourceWarning, match="unclosed <ConnectionId"):
            del cm_id


async def test_j004_port_spaces() -> None:
    with EventChannel() as events:
        with ConnectionId(events, PortSpace.TCP) as cm_id:
            assert cm_id.port_space is PortSpace.TCP
        for wrong in (None, "TCP", int(PortSpace.TCP)):
            with pytest.raises(TypeError, match="not a port space"):
                ConnectionId(events, wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="not a port space"):
            ConnectionId(events, PortSpace(0x7777))
        # The seeds stop at TCP; datagrams are more than they ask for.
        ConnectionId(events, PortSpace.UDP).close()


async def test_j006_event_channel(pair: Pair) -> None:
    assert pair.client.cm_id.event_channel is pair.client.events
    assert pair.server.cm_id.event_channel is pair.listener.event_channel


async def test_j007_port_space(pair: Pair) -> None:
    for cm_id in (pair.client.cm_id, pair.server.cm_id, pair.listener):
        assert cm_id.port_space is PortSpace.TCP


async def test_j008_bind_to_a_wildcard() -> None:
    with EventChannel() as events:
        for wildcard in ("0.0.0.0", "::", ""):
            with ConnectionId(events) as cm_id:
                cm_id.bind_addr((wildcard, 0))
                assert cm_id.context is None
                assert cm_id.source_address == (wildcard or "0.0.0.0")


async def test_j009_bind_to_one_address(address: str) -> None:
    with EventChannel() as events, ConnectionId(events) as cm_id:
        assert cm_id.context is None
        cm_id.bind_addr((address, 0))
        assert cm_id.context is not None
        assert cm_id.context.name == aiordma.devices()[0].name
        assert cm_id.port_num == 1


@pytest.mark.parametrize(("asked", "passed"), [(0, 50), (-1, 50), (7, 7), (50, 50)])
async def test_j010_backlog(
    address: str, asked: int, passed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = record_calls(monkeypatch, "rdma_listen")
    with EventChannel() as events, ConnectionId(events) as cm_id:
        cm_id.bind_addr((address, 0))
        cm_id.listen(asked)
    ((name, arguments),) = calls
    assert (name, arguments[1]) == ("rdma_listen", passed)


async def test_j011_reached_by_the_bound_address_only(address: str) -> None:
    # Two addresses of one family on one device.
    bound, other = ipv6(address, "global"), ipv6(address, "link")
    for listens, reached in ((bound, False), ("::", True)):
        async with half_way(other, listen_on=listens) as (_, client, server_events):
            connecting = await begun(client.cm_id.connect(parameters()))
            if reached:
                request = await acked(server_events, EventType.CONNECT_REQUEST)
                assert request.connection_id is not None
                request.connection_id.reject()
                request.connection_id.close()
            with pytest.raises(aiordma.ConnectionRejectedError) as refused:
                await connecting
            assert await server_events.get_event(0) is None
            assert refused.value.status


async def test_j012_a_source_address_is_not_needed(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = record_calls(monkeypatch, "rdma_resolve_addr")
    with EventChannel() as events:
        for source in (None, (address, 0)):
            with ConnectionId(events) as cm_id:
                await cm_id.resolve_addr((address, 7471), source, timeout=5)
                assert cm_id.source_address == address
    without, given = (arguments[1] for _, arguments in calls)
    assert not without
    # jVerbs ignores the argument; here a source that is given is used.
    assert given


async def test_j013_a_resolved_address_has_a_device(address: str) -> None:
    with EventChannel() as events, ConnectionId(events) as cm_id:
        assert cm_id.context is None
        await cm_id.resolve_addr((address, 7471), timeout=5)
        assert cm_id.context is not None
        assert cm_id.context.name == aiordma.devices()[0].name


@pytest.mark.parametrize("limit_s", [0.3, 0.9])
async def test_j014_resolving_ends_in_time(address: str, limit_s: float) -> None:
    loop = asyncio.get_running_loop()
    with neighbors_are_asked(address), EventChannel() as events, ConnectionId(events) as cm_id:
        begin = loop.time()
        with pytest.raises(aiordma.ConnectTimeoutError):
            await cm_id.resolve_addr((NOBODY, 7471), timeout=limit_s)
        assert limit_s * 0.9 <= loop.time() - begin < limit_s + 2.0


async def test_j015_the_route_comes_after_the_address(address: str) -> None:
    with EventChannel() as events, ConnectionId(events) as cm_id:
        async with asyncio.timeout(5):
            with pytest.raises(OSError, match="rdma_resolve_route: EINVAL"):
                await cm_id.resolve_route(timeout=60)
        await cm_id.resolve_addr((address, 7471), timeout=5)
        await cm_id.resolve_route(timeout=5)


async def test_j016_connecting_needs_a_route(address: str) -> None:
    with EventChannel() as events, ConnectionId(events) as cm_id:
        for step in (None, cm_id.resolve_addr((address, 7471), timeout=5)):
            if step is not None:
                await step
            async with asyncio.timeout(5):
                with pytest.raises(OSError, match="rdma_connect: EINVAL"):
                    await cm_id.connect(timeout=60)
