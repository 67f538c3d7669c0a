"""Rows 86 to 92: the client, step by step."""

from __future__ import annotations

import pytest

from aiordma.cm import ConnectionId, EventChannel, EventType
from aiordma.verbs import WCOpcode
from tests.seeds.ends import (
    ALLOCATING,
    LIMIT_S,
    End,
    Pair,
    acked,
    begun,
    half_way,
    next_event,
    parameters,
    record_calls,
    requested,
)
from tests.seeds.programs import PORT, main_of, running

pytestmark = pytest.mark.device


async def test_j086_address_resolved(address: str) -> None:
    with EventChannel() as events, ConnectionId(events) as cm_id:
        resolving = await begun(cm_id.resolve_addr((address, 7471), timeout=5))
        event = await next_event(events, EventType.ADDR_RESOLVED)
        assert (event.connection_id, event.status) == (cm_id, 0)
        event.ack()
        await resolving
        assert events.unacked == 0


async def test_j087_route_resolved(address: str) -> None:
    with EventChannel() as events, ConnectionId(events) as cm_id:
        await cm_id.resolve_addr((address, 7471), timeout=5)
        resolving = await begun(cm_id.resolve_route(timeout=5))
        event = await next_event(events, EventType.ROUTE_RESOLVED)
        assert (event.connection_id, event.status) == (cm_id, 0)
        event.ack()
        await resolving
        assert events.unacked == 0


async def test_j088_structures_between_route_and_connect(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running("native_server.py", address, PORT) as server:
        await server.first_line()
        expected = ["rdma_resolve_route", *ALLOCATING, "ibv_post_recv", "rdma_connect"]
        expected.remove("ibv_req_notify_cq")  # the program awaits: the loop arms the queue
        calls = record_calls(monkeypatch, *expected)
        await main_of("native_client.py")(address, PORT)
        await server.finish()
    assert [name for name, _ in calls][: len(expected)] == expected


async def test_j088_structures_may_come_before_the_route(address: str) -> None:
    async with half_way(address) as (listener, client, server_events):
        early = End(client.events, ConnectionId(client.events))
        await early.cm_id.resolve_addr((address, listener.source_port), timeout=5)
        early.allocate()
        await early.cm_id.resolve_route(timeout=5)
        connecting = await begun(early.cm_id.connect(parameters()))
        server, _ = await requested(server_events)
        server.allocate()
        await server.cm_id.accept(parameters())
        await connecting
        server.close()
        early.close()


async def test_j089_a_receive_before_connecting(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = record_calls(monkeypatch, "ibv_post_recv", "rdma_connect")
    async with half_way(address) as (_, client, server_events):
        client.post_recv(7)
        connecting = await begun(client.cm_id.connect(parameters()))
        server, _ = await requested(server_events)
        assert [name for name, _ in calls] == ["ibv_post_recv", "rdma_connect"]
        server.allocate()
        await server.cm_id.accept(parameters())
        await connecting  # on iWARP a message that comes with the answer would spoil it
        server.post_send()
        (received,) = await client.completions(1)
        assert (received.wr_id, received.opcode) == (7, WCOpcode.RECV)
        server.close()


async def test_j090_connecting_reaches_the_server(address: str) -> None:
    async with half_way(address) as (listener, client, server_events):
        assert await server_events.get_event(0) is None
        connecting = await begun(client.cm_id.connect(parameters(), private_data=b"from client"))
        request = await acked(server_events, EventType.CONNECT_REQUEST)
        assert request.listen_id is listener
        assert request.private_data.startswith(b"from client")
        assert request.connection_id is not None
        request.connection_id.reject()
        request.connection_id.close()
        with pytest.raises(ConnectionRefusedError):
            await connecting


async def test_j091_established(address: str) -> None:
    async with half_way(address) as (_, client, server_events):
        connecting = await begun(client.cm_id.connect(parameters()))
        server, _ = await requested(server_events)
        server.allocate()
        watching = await begun(client.events.get_event(LIMIT_S))
        assert client.cm_id.destination is None
        await server.cm_id.accept(parameters())
        event = await watching
        assert event is not None
        assert event.type == EventType.ESTABLISHED
        assert await connecting is event
        assert client.cm_id.destination_address == address
        event.ack()
        server.close()


async def test_j092_from_the_first_post_to_the_last_object(pair: Pair) -> None:
    client = pair.client
    pair.server.post_recv(1)
    client.post_send(2)
    (completion,) = await client.completions(1)
    assert (completion.wr_id, completion.ok) == (2, True)
    disconnecting = await begun(client.cm_id.disconnect())
    await acked(client.events, EventType.DISCONNECTED)
    await disconnecting
    for part in (
        client.qp, client.mr, client.cq, client.channel, client.pd, client.cm_id, client.events,
    ):  # fmt: skip
        part.destroy()
    await client.events.wait_closed()
