"""Rows 17 to 22 and 31 to 35: the queue pair of an id, accepting, and the addresses."""

from __future__ import annotations

import pytest

from aiordma.cm import ConnectionId, EventChannel, EventType
from aiordma.verbs import QPInitAttr, QPState, QueuePair
from tests.seeds.ends import Pair, acked, begun, connected, half_way, parameters, requested
from tests.seeds.network import ipv6

pytestmark = pytest.mark.device


async def test_j017_a_queue_pair_is_made_for_an_id(address: str) -> None:
    async with half_way(address) as (_, client, _):
        qp = client.qp
        assert isinstance(qp, QueuePair)
        assert qp.pd is client.pd
        assert qp.send_cq is qp.recv_cq is client.cq
        assert qp.num > 0
        assert qp.state == QPState.INIT


async def test_j018_one_queue_pair_an_id(pair: Pair) -> None:
    client, server = pair.client, pair.server
    with pytest.raises(OSError, match=r"EINVAL.*has a queue pair"):
        client.cm_id.create_qp(client.pd, QPInitAttr(send_cq=client.cq))
    assert client.cm_id.qp is client.qp
    client.mr.view[:5] = b"still"
    receiving = await begun(server.qp.recv(server.mr))
    await client.qp.send(client.mr)
    await receiving
    assert bytes(server.mr.view[:5]) == b"still"


async def test_j019_nothing_without_a_queue_pair(address: str) -> None:
    async with half_way(address) as (listener, client, server_events):
        with EventChannel() as events, ConnectionId(events) as bare:
            await bare.resolve_addr((address, listener.source_port), timeout=5)
            await bare.resolve_route(timeout=5)
            assert bare.qp is None  # the only thing that one could post to
            with pytest.raises(OSError, match=r"rdma_connect: EINVAL.*no queue pair"):
                await bare.connect()
        connecting = await begun(client.cm_id.connect(parameters()))
        request = await acked(server_events, EventType.CONNECT_REQUEST)
        assert request.connection_id is not None
        with request.connection_id as server_id:
            assert server_id.qp is None
            with pytest.raises(OSError, match=r"rdma_accept: EINVAL.*no queue pair"):
                await server_id.accept()
            server_id.reject()
        with pytest.raises(ConnectionRefusedError):
            await connecting


async def test_j020_a_queue_pair_beyond_the_limits(address: str) -> None:
    async with half_way(address) as (_, client, _):
        with pytest.raises(OSError, match=r"EINVAL.*max_send_wr"):
            QueuePair(client.pd, QPInitAttr(send_cq=client.cq, max_send_wr=1 << 30))
        assert client.cq.cqe < 1 << 20, "the queue grew for a queue pair that does not exist"
        assert client.qp.state == QPState.INIT


async def test_j021_the_queue_pair_of_an_id(address: str) -> None:
    async with half_way(address) as (listener, client, _):
        assert listener.qp is None
        assert client.cm_id.qp is client.qp


async def test_j022_accepting_reaches_both_ends(address: str) -> None:
    async with half_way(address) as (_, client, server_events):
        at_client = aiter(client.events)
        connecting = await begun(client.cm_id.connect(parameters()))
        server, _ = await requested(server_events)
        server.allocate()
        at_server = aiter(server_events)
        await server.cm_id.accept(parameters())
        await connecting
        for events, cm_id in ((at_client, client.cm_id), (at_server, server.cm_id)):
            event = await anext(events)
            assert event.type == EventType.ESTABLISHED
            assert event.connection_id is cm_id
        assert client.qp.state == server.qp.state == QPState.RTS
        server.close()


@pytest.mark.parametrize("family", ["IPv4", "IPv6"])
async def test_j031_local_address(address: str, family: str) -> None:
    host = address if family == "IPv4" else ipv6(address, "global")
    async with connected(host) as pair:
        for cm_id in (pair.listener, pair.client.cm_id, pair.server.cm_id):
            assert cm_id.source_address == host


async def test_j032_local_port(address: str) -> None:
    async with connected(address) as pair:
        assert 0 < pair.listener.source_port < 65536
        assert pair.server.cm_id.source_port == pair.listener.source_port
        # The client's was chosen by the kernel; the server sees the same number.
        assert pair.client.cm_id.source_port == pair.server.cm_id.destination_port > 0


async def test_j033_the_peers_address(address: str) -> None:
    async with half_way(address) as (_, client, _):
        assert client.cm_id.destination_address is None  # although it is resolved
    async with connected(address) as pair:
        assert pair.listener.destination_address is None
        assert pair.client.cm_id.destination_address == address
        assert pair.server.cm_id.destination_address == address


async def test_j034_the_peers_port(address: str) -> None:
    async with half_way(address) as (_, client, _):
        assert client.cm_id.destination_port == 0
    async with connected(address) as pair:
        assert pair.listener.destination_port == 0
        assert pair.client.cm_id.destination_port == pair.listener.source_port


async def test_j035_no_device_before_binding(address: str) -> None:
    with EventChannel() as events, ConnectionId(events) as cm_id:
        assert cm_id.context is None
        cm_id.bind_addr(("0.0.0.0", 0))
        assert cm_id.context is None
        await cm_id.resolve_addr((address, 7471), timeout=5)
        assert cm_id.context is not None
        assert cm_id.context is cm_id.context
