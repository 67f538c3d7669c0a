"""Rows 67 to 85: the server, step by step."""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import mmap
from pathlib import Path

import pytest

import aiordma
from aiordma.cm import ConnectionId, EventChannel, EventType
from aiordma.verbs import (
    SGE,
    Access,
    CompletionQueue,
    DeviceAttributes,
    MemoryRegion,
    QPInitAttr,
    QPState,
    RecvWR,
    WCOpcode,
    WorkCompletion,
)
from tests.device.oracle import adapter_objects, until
from tests.seeds.ends import (
    ALLOCATING,
    LIMIT_S,
    MOMENT_S,
    End,
    Pair,
    acked,
    begun,
    connected,
    half_way,
    listening,
    next_event,
    parameters,
    record_calls,
    requested,
    resolved,
)
from tests.seeds.programs import PORT, main_of, running

pytestmark = pytest.mark.device


async def test_j067_kinds_of_resources(address: str) -> None:
    async with half_way(address) as (listener, client, _):
        before = adapter_objects()
        end = End(client.events, ConnectionId(client.events))
        await end.cm_id.resolve_addr((address, listener.source_port), timeout=5)
        end.allocate()
        # One of each, and the memory that they work on.
        assert adapter_objects() - before == {"pd": 1, "cm_id": 1, "qp": 1, "cq": 1, "mr": 1}
        end.close()


async def test_j068_queue_pairs_share_a_completion_queue(address: str) -> None:
    with EventChannel() as at_client, EventChannel() as at_server:
        listener = listening(at_server, address)
        ends: list[End] = []
        queues: list[CompletionQueue | None] = [None, None]
        for number in range(3):
            client = End(at_client, await resolved(at_client, address, listener.source_port))
            client.allocate(queues[0], room=64)
            connecting = await begun(client.cm_id.connect(parameters()))
            server, _ = await requested(at_server)
            server.allocate(queues[1], room=64)
            queues = [client.cq, server.cq]
            server.post_recv(number)
            await server.cm_id.accept(parameters())
            await connecting
            client.post_send(number)
            ends += [client, server]
        for end in ends[:2]:
            assert {wc.wr_id for wc in await end.completions(3)} == {0, 1, 2}
        for end in ends:
            end.close()
        listener.close()


@pytest.mark.parametrize("mode", ["polled", "notified"])
async def test_j069_polled_or_notified(pair: Pair, mode: str) -> None:
    server = pair.server
    server.post_recv(5)
    pair.client.post_send()
    if mode == "notified":
        assert await server.channel.get_cq_event(LIMIT_S) is server.cq
        server.cq.ack_events(1)
        (completion,) = server.cq.poll()
    else:
        (completion,) = await server.completions(1)
    assert completion.wr_id == 5


async def test_j070_a_wrong_order_raises_and_never_hangs(address: str) -> None:
    async with asyncio.timeout(LIMIT_S), half_way(address) as (listener, client, server_events):
        with EventChannel() as events, ConnectionId(events) as cm_id:
            for early in (
                lambda: cm_id.resolve_route(timeout=60),
                lambda: cm_id.connect(timeout=60),
                lambda: cm_id.accept(timeout=60),
                lambda: cm_id.disconnect(timeout=60),
            ):
                with pytest.raises(OSError, match="EINVAL"):
                    await early()
            for too_early in (cm_id.destroy_qp, cm_id.reject):
                with pytest.raises(OSError, match="EINVAL"):
                    too_early()
            # A queue pair needs the device that the address brings.
            with pytest.raises(OSError, match="EINVAL"):
                cm_id.create_qp(client.pd, QPInitAttr(send_cq=client.cq))
        connecting = await begun(client.cm_id.connect(parameters()))
        request = await acked(server_events, EventType.CONNECT_REQUEST)
        server = request.connection_id
        assert server is not None
        with pytest.raises(OSError, match="EINVAL"):
            await server.connect()
        with pytest.raises(OSError, match="EINVAL"):
            await server.accept()  # without a queue pair
        with pytest.raises(OSError, match="EINVAL"):
            await listener.accept()
        server.reject()
        server.close()
        with pytest.raises(ConnectionRefusedError):
            await connecting


async def test_j071_channel_id_and_listen(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = record_calls(
        monkeypatch,
        *("rdma_create_event_channel", "rdma_create_id", "rdma_bind_addr", "rdma_listen"),
    )
    with EventChannel() as events, listening(events, address) as listener:
        assert listener.stage.value == "listening"
    assert [name for name, _ in calls] == [
        "rdma_create_event_channel", "rdma_create_id", "rdma_bind_addr", "rdma_listen",
    ]  # fmt: skip


async def test_j072_a_client_arrives_as_an_event(address: str) -> None:
    """Not before it asks; with its address, its words and the listener that it asked."""
    async with half_way(address) as (listener, client, server_events):
        assert await server_events.get_event(MOMENT_S) is None
        asking = await begun(client.cm_id.connect(parameters(), private_data=b"it is me"))
        request = await acked(server_events, EventType.CONNECT_REQUEST)
        assert request.status == 0
        assert request.listen_id is listener
        assert request.private_data.rstrip(b"\0") == b"it is me"
        assert request.connection_id is not None
        assert request.connection_id.destination == client.cm_id.source
        request.connection_id.reject()
        request.connection_id.close()
        with pytest.raises(ConnectionRefusedError):
            await asking


async def test_j073_the_request_brings_the_id(address: str) -> None:
    async with half_way(address) as (listener, client, server_events):
        connecting = await begun(client.cm_id.connect(parameters()))
        event = await acked(server_events, EventType.CONNECT_REQUEST)
        new = event.connection_id
        assert new is not None
        assert new is not listener
        assert new.context is not None
        assert new.destination_port == client.cm_id.source_port
        new.reject()
        new.close()
        with pytest.raises(ConnectionRefusedError):
            await connecting


async def test_j074_structures_before_the_connection(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = record_calls(monkeypatch, *ALLOCATING, "ibv_post_recv", "rdma_accept")
    serving = await begun(main_of("native_server.py")(address, PORT))
    async with running("native_client.py", address, PORT) as client:
        await client.finish()
        await serving
    names = [name for name, _ in calls]
    assert names[: len(ALLOCATING) + 2] == [*ALLOCATING, "ibv_post_recv", "rdma_accept"]


async def test_j075_device_port_and_gid(pair: Pair) -> None:
    context = pair.server.cm_id.context
    assert context is not None
    attributes = context.query_device()
    assert isinstance(attributes, DeviceAttributes)
    assert attributes.max_qp > 0
    assert attributes.node_guid == aiordma.devices()[0].guid
    port = pair.server.cm_id.port_num
    assert context.query_port(port).state.name == "ACTIVE"
    # The kernel tells the same in other words.
    folder = Path("/sys/class/infiniband") / context.name
    told = (folder / "ports" / str(port) / "gids" / "0").read_text().strip()
    assert context.query_gid(port, 0).gid == ipaddress.IPv6Address(told).packed
    assert (folder / "ports" / str(port) / "state").read_text().strip() == "4: ACTIVE"
    guid = int((folder / "node_guid").read_text().replace(":", ""), 16)
    assert attributes.node_guid == guid


async def test_j076_completion_events_arrive_on_the_channel(pair: Pair) -> None:
    server = pair.server
    assert server.cq.channel is server.channel
    server.post_recv(1)
    assert await server.channel.get_cq_event(MOMENT_S) is None
    pair.client.post_send()
    assert await server.channel.get_cq_event(LIMIT_S) is server.cq
    server.cq.ack_events(1)


async def test_j077_notification_before_the_queue_pair(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = record_calls(monkeypatch, "ibv_req_notify_cq", "ibv_create_qp")
    async with connected(address) as pair:
        assert [name for name, _ in calls] == ["ibv_req_notify_cq", "ibv_create_qp"] * 2
        pair.server.post_recv(1)
        pair.client.post_send()
        assert await pair.server.channel.get_cq_event(LIMIT_S) is pair.server.cq
        pair.server.cq.ack_events(1)


async def test_j078_memory_off_the_heap(pair: Pair) -> None:
    with MemoryRegion(pair.server.pd, 3 * mmap.PAGESIZE, Access.LOCAL_WRITE) as region:
        assert region.addr % mmap.PAGESIZE == 0
        assert len(region) == len(region.view) == 3 * mmap.PAGESIZE
        assert bytes(region.view) == bytes(3 * mmap.PAGESIZE)
        pair.client.mr.view[:7] = b"payload"
        receiving = await begun(pair.server.qp.recv(SGE(region, mmap.PAGESIZE, 7)))
        await pair.client.qp.send(SGE(pair.client.mr, 0, 7))
        await receiving
        assert bytes(region.view[mmap.PAGESIZE :][:7]) == b"payload"


async def test_j079_a_task_handles_completions(pair: Pair) -> None:
    server = pair.server
    found: list[WorkCompletion] = []

    async def handle() -> None:
        async for completion in server.cq:
            found.append(completion)
            server.post_recv(completion.wr_id + 2)
            if len(found) == 20:
                return

    server.post_recv(0, 1)
    handling = await begun(handle())
    for number in range(20):
        await pair.client.qp.send(SGE(pair.client.mr, 0, 8))
        # Two receives are posted at a time: a third message may come too early.
        await until(functools.partial(lambda n: len(found) > n, number))
    async with asyncio.timeout(LIMIT_S):
        await handling
    assert [wc.wr_id for wc in found] == list(range(20))


async def test_j080_receives_then_accept(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = record_calls(monkeypatch, "ibv_post_recv", "rdma_accept")
    async with connected(address, prepare=lambda end: end.post_recv(*range(4))) as pair:
        assert [name for name, _ in calls] == ["ibv_post_recv", "ibv_post_recv", "rdma_accept"]
        assert pair.server.qp.outstanding == 4


async def test_j081_accepting_opens_the_connection(address: str) -> None:
    async with half_way(address) as (_, client, server_events):
        connecting = await begun(client.cm_id.connect(parameters()))
        server, _ = await requested(server_events)
        server.allocate()
        server.post_recv(1)
        await asyncio.sleep(MOMENT_S)
        assert not connecting.done()
        await server.cm_id.accept(parameters())
        assert (await connecting).type == EventType.ESTABLISHED
        assert (await client.qp.send(SGE(client.mr, 0, 16))).ok
        assert (await server.completions(1))[0].ok
        server.close()


async def test_j082_the_server_sends_and_receives(pair: Pair) -> None:
    client, server = pair.client, pair.server
    server.qp.post_recv(RecvWR(wr_id=1, sg_list=[SGE(server.mr, 0, 64)]))
    client.qp.post_recv(RecvWR(wr_id=2, sg_list=[SGE(client.mr, 512, 64)]))
    client.mr.view[:4] = b"ping"
    await client.qp.send(SGE(client.mr, 0, 4))
    (received,) = await server.completions(1)
    assert received.opcode == WCOpcode.RECV
    assert bytes(server.mr.view[:4]) == b"ping"
    server.mr.view[:4] = b"pong"
    server.post_send(3, 4)
    (sent,) = await server.completions(1)
    assert sent.opcode == WCOpcode.SEND
    await client.completions(1)
    assert bytes(client.mr.view[512:516]) == b"pong"


async def test_j083_the_connection_ends_after_the_work(pair: Pair) -> None:
    pair.server.post_recv(1)
    pair.client.post_send(2)
    for end in (pair.client, pair.server):
        assert (await end.completions(1))[0].ok
    ends = [pair.client, pair.server]
    watching = [await begun(next_event(end.events, EventType.DISCONNECTED)) for end in ends]
    await pair.server.cm_id.disconnect()
    for end, event in zip(ends, await asyncio.gather(*watching), strict=True):
        assert (event.connection_id, event.status) == (end.cm_id, 0)
        event.ack()
        assert end.qp.state == QPState.ERR


async def test_j084_structures_then_id_then_channel(pair: Pair) -> None:
    server = pair.server
    await pair.client.cm_id.disconnect()
    await acked(server.events, EventType.DISCONNECTED)
    pair.listener.destroy()
    # The strict form is refused for whatever is asked to go too early.
    for early in (server.events, server.cm_id, server.pd, server.cq, server.channel):
        with pytest.raises(aiordma.RdmaOSError):
            early.destroy()
    for part in (
        server.qp, server.mr, server.cq, server.channel, server.pd, server.cm_id, server.events,
    ):  # fmt: skip
        part.destroy()
    await server.events.wait_closed()


async def test_j085_the_channel_waits_for_acknowledgements(address: str) -> None:
    async with half_way(address) as (listener, client, server_events):
        connecting = await begun(client.cm_id.connect(parameters()))
        request = await next_event(server_events, EventType.CONNECT_REQUEST)
        assert request.connection_id is not None
        request.connection_id.reject()
        request.connection_id.destroy()
        # The request counts for the listener.
        for early in (listener, server_events):
            with pytest.raises(aiordma.RdmaOSError, match="acknowledged"):
                early.destroy()
        with pytest.raises(ConnectionRefusedError):
            await connecting
        request.ack()
        listener.destroy()
        server_events.destroy()
