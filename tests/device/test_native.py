"""The native layer: ids, events, queue pairs and completions by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

import aiordma
from aiordma.cm import (
    ConnectionId,
    EventChannel,
    EventType,
)
from aiordma.verbs import (
    SGE,
    Access,
    DeviceEvents,
    MemoryRegion,
    ProtectionDomain,
    QPInitAttr,
    QPState,
    QueuePair,
    RecvWR,
    SendWR,
    WCStatus,
)
from tests.device.shared import has_atomics
from tests.native_ends import End, joined, listening, next_event, resolved

pytestmark = pytest.mark.device


@dataclass
class Native:
    """Two connected ends on one event channel."""

    events: EventChannel
    listener: ConnectionId
    client: End
    server: End


@pytest.fixture
async def native(address: str) -> AsyncIterator[Native]:
    def build(cm_id: ConnectionId) -> End:
        end = End(cm_id).build(room=16, max_send_wr=8, max_recv_wr=8, max_send_sge=2)
        end.mr = end.region(4096, Access.LOCAL_WRITE | Access.REMOTE_READ)
        return end

    events = EventChannel()
    listener = listening(events, address)
    client = build(await resolved(events, address, listener.source_port))
    server = await joined(client.cm_id, listener, build)
    yield Native(events, listener, client, server)
    for part in (client, server, listener, events):
        part.close()
    await events.wait_closed()


@pytest.mark.smoke
async def test_awaited_send_and_recv(native: Native) -> None:
    client, server = native.client, native.server
    client.mr.view[:5] = b"hello"
    receiving = asyncio.create_task(server.qp.recv(server.mr))
    await asyncio.sleep(0)
    sent = await client.qp.send(SGE(client.mr, 0, 5))
    received = await receiving
    assert sent.ok
    assert received.byte_len == 5
    assert bytes(server.mr.view[:5]) == b"hello"
    assert client.qp.state == QPState.RTS


async def test_gathered_pieces_become_one_message(native: Native) -> None:
    client, server = native.client, native.server
    client.mr.view[:10] = b"0123456789"
    receiving = asyncio.create_task(server.qp.recv(server.mr))
    await asyncio.sleep(0)
    await client.qp.send([SGE(client.mr, 6, 4), SGE(client.mr, 0, 2)])
    assert (await receiving).byte_len == 6
    assert bytes(server.mr.view[:6]) == b"678901"


async def test_raw_posts_return_the_callers_ids(native: Native) -> None:
    client, server = native.client, native.server
    ids = [0, 1, (1 << 64) - 1, 0xA1 << 56, (0xA1 << 56) | 5]
    server.qp.post_recv([RecvWR(wr_id=n, sg_list=[SGE(server.mr, 0, 64)]) for n in ids])
    client.qp.post_send([SendWR(wr_id=n, sg_list=[SGE(client.mr, 0, 64)]) for n in ids])
    async with asyncio.timeout(10):
        sent = [await anext(client.cq) for _ in ids]
        received = [await anext(server.cq) for _ in ids]
    assert [wc.wr_id for wc in sent] == ids
    assert [wc.wr_id for wc in received] == ids
    assert {wc.qp_num for wc in received} == {server.qp.num}
    assert all(wc.byte_len == 64 for wc in received)


async def test_notification_by_hand(native: Native) -> None:
    client, server = native.client, native.server
    server.cq.req_notify()
    assert await server.channel.get_cq_event(0.05) is None
    server.qp.post_recv(RecvWR(wr_id=9, sg_list=[SGE(server.mr)]))
    await client.qp.send(SGE(client.mr, 0, 10))
    cq = await server.channel.get_cq_event(10)
    assert cq is server.cq
    (completion,) = cq.poll()
    assert completion.wr_id == 9
    assert cq.poll() == []
    with pytest.raises(aiordma.ResourceBusyError):
        server.channel.close()
    cq.ack_events(1)
    with pytest.raises(ValueError, match="unacknowledged"):
        cq.ack_events(1)


async def test_read_and_write(native: Native, is_siw: bool) -> None:
    client, server = native.client, native.server
    server.mr.view[:6] = b"remote"
    await client.qp.read(SGE(client.mr, 0, 6), server.mr.addr, server.mr.rkey)
    assert bytes(client.mr.view[:6]) == b"remote"
    # The region was not registered for writing.
    writing = client.qp.write(SGE(client.mr, 0, 6), server.mr.addr, server.mr.rkey)
    if is_siw:
        # iWARP does not acknowledge a write; the refusal ends the connection afterwards.
        await writing
        with pytest.raises(aiordma.CompletionError):
            await client.qp.read(SGE(client.mr, 0, 6), server.mr.addr, server.mr.rkey)
    else:
        with pytest.raises(aiordma.RemoteAccessError):
            await writing
    assert bytes(server.mr.view[:6]) == b"remote"


async def test_more_than_the_queue_holds(native: Native) -> None:
    client = native.client
    requests = [SendWR(sg_list=[SGE(client.mr, 0, 1)]) for _ in range(9)]
    with pytest.raises(aiordma.ResourceBusyError, match="free places"):
        client.qp.post_send(requests)
    server = native.server
    server.qp.post_recv([RecvWR(sg_list=[SGE(server.mr, 0, 64)]) for _ in range(8)])
    sends = [client.qp.send(SGE(client.mr, 0, 1)) for _ in range(8)]
    assert all(wc.ok for wc in await asyncio.gather(*sends))


async def test_disconnect_flushes_and_reaches_both_sides(native: Native) -> None:
    client, server = native.client, native.server
    waiting = [asyncio.create_task(server.qp.recv(server.mr)) for _ in range(3)]
    await asyncio.sleep(0)
    iterator = aiter(native.events)
    await client.cm_id.disconnect()
    kinds = {(await anext(iterator)).type, (await anext(iterator)).type}
    assert kinds == {EventType.DISCONNECTED}
    assert client.qp.state == QPState.ERR
    assert server.qp.state == QPState.ERR
    async with asyncio.timeout(10):
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(outcome, aiordma.FlushedError) for outcome in outcomes)


async def test_what_is_posted_after_the_error_is_flushed_too(native: Native) -> None:
    server = native.server
    server.qp.to_error()
    with pytest.raises(aiordma.FlushedError):
        await server.qp.recv(server.mr)
    server.qp.post_recv(RecvWR(wr_id=3, sg_list=[SGE(server.mr)]))
    (completion,) = server.cq.poll()
    assert completion.wr_id == 3
    assert completion.status == WCStatus.WR_FLUSH_ERR


async def test_closing_a_queue_pair_ends_what_was_posted(native: Native) -> None:
    server = native.server
    waiting = asyncio.create_task(server.qp.recv(server.mr))
    await asyncio.sleep(0)
    server.mr.close()  # in use: stays registered until the queue pair is gone
    server.qp.close()
    async with asyncio.timeout(10):
        with pytest.raises((aiordma.FlushedError, aiordma.ResourceClosedError)):
            await waiting
        await server.mr.wait_closed()
    with pytest.raises(aiordma.ResourceClosedError):
        await server.qp.recv(server.mr)


async def test_events_have_to_be_acknowledged_once(address: str) -> None:
    events = EventChannel()
    cm_id = ConnectionId(events)
    resolving = asyncio.create_task(cm_id.resolve_addr((address, 7471), timeout=5))
    event = await next_event(events, EventType.ADDR_RESOLVED)
    await resolving
    assert events.unacked == 1
    for resource in (events, cm_id):
        with pytest.raises(aiordma.ResourceBusyError):
            resource.close()
    events.ack_event(event)
    with pytest.raises(ValueError, match="acknowledged already"):
        event.ack()
    with pytest.raises(TypeError):
        events.ack_event(None)  # type: ignore[arg-type]
    assert await events.get_event(0.05) is None
    cm_id.close()
    events.close()
    with pytest.raises(aiordma.ResourceClosedError):
        await events.get_event(1)


async def test_steps_in_the_wrong_order(address: str) -> None:
    with EventChannel() as events, ConnectionId(events) as cm_id:
        with pytest.raises(OSError, match="rdma_resolve_route: EINVAL"):
            await cm_id.resolve_route()
        with pytest.raises(OSError, match="rdma_connect: EINVAL"):
            await cm_id.connect()
        with pytest.raises(OSError, match="rdma_accept: EINVAL"):
            await cm_id.accept()
        with pytest.raises(OSError, match="rdma_disconnect: EINVAL"):
            await cm_id.disconnect()
        assert cm_id.context is None
        assert cm_id.destination is None
        await cm_id.resolve_addr((address, 7471), timeout=5)
        with pytest.raises(OSError, match="rdma_connect: EINVAL"):
            await cm_id.connect()


async def test_a_queue_pair_beyond_the_limits(native: Native) -> None:
    end = native.client
    huge = QPInitAttr(send_cq=end.cq, max_send_wr=1 << 30)
    with pytest.raises((OSError, ValueError)):
        QueuePair(end.pd, huge)
    with pytest.raises(OSError, match="has a queue pair"):
        end.cm_id.create_qp(end.pd, QPInitAttr(send_cq=end.cq))
    limits = end.qp.limits
    assert limits.max_send_wr >= 8
    assert limits.max_send_sge >= 2


async def test_memory_regions() -> None:
    with aiordma.devices()[0].open() as context, ProtectionDomain(context) as pd:
        data = bytearray(5000)
        region = MemoryRegion(pd, data)
        assert len(region) == 5000
        with pytest.raises(BufferError):
            data.append(1)
        region.close()
        await region.wait_closed()
        data.append(1)
        with pytest.raises(BufferError):
            MemoryRegion(pd, b"read only")
        MemoryRegion(pd, b"read only", Access.REMOTE_READ).close()
        for wrong in (0, -1, b""):
            with pytest.raises(ValueError, match=r"at least one byte|number of bytes is"):
                MemoryRegion(pd, wrong)
        with MemoryRegion(pd, 10) as small, pytest.raises(ValueError, match="not inside"):
            SGE(small, 5, 6)


async def test_device_port_and_gid(address: str, is_siw: bool) -> None:
    (device,) = aiordma.devices()
    with device.open() as context:
        assert context.name == device.name
        assert context.attributes.phys_port_cnt == 1
        assert context.attributes.max_qp_wr > 0
        port = context.query_port(1)
        assert port.state.name == "ACTIVE"
        with pytest.raises(OSError, match="ibv_query_port"):
            context.query_port(9)
        # The library is older than the call, or the driver does not tell.
        remedy = "ibv_query_port_speed: .*`active_speed` of `query_port`"
        with pytest.raises(aiordma.NotSupportedError, match=remedy):
            context.query_port_speed(1)
        if not is_siw:
            gids = [str(entry) for entry in context.gid_table()]
            assert f"::ffff:{address}" in gids
        with DeviceEvents(context) as events:
            waiting = asyncio.ensure_future(anext(events))
            await asyncio.sleep(0)
            waiting.cancel()


async def test_an_unknown_status_is_no_crash() -> None:
    assert WCStatus(77).name == "UNKNOWN_77"
    assert EventType(99).name == "UNKNOWN_99"


async def test_atomics(native: Native) -> None:
    client, server = native.client, native.server
    result = SGE(client.mr, 0, 8)
    access = Access.LOCAL_WRITE | Access.REMOTE_ATOMIC
    with MemoryRegion(server.pd, 64, access) as region:
        region.view[:8] = (40).to_bytes(8, "little")
        adding = client.qp.fetch_add(result, region.addr, region.rkey, 2)
        if not has_atomics():
            with pytest.raises(aiordma.NotSupportedError, match="ATOMIC_FETCH_AND_ADD"):
                await adding
            return
        await adding
        assert int.from_bytes(client.mr.view[:8], "little") == 40
        await client.qp.compare_swap(result, region.addr, region.rkey, 42, 7)
        assert int.from_bytes(client.mr.view[:8], "little") == 42
        assert int.from_bytes(region.view[:8], "little") == 7
        with pytest.raises(ValueError, match="not a multiple of 8"):
            await client.qp.fetch_add(result, region.addr + 4, region.rkey, 1)


async def test_a_receive_after_a_failure_ends(native: Native, is_siw: bool) -> None:
    client, server = native.client, native.server
    if is_siw:
        client.qp.to_error()
    else:
        with pytest.raises(aiordma.RemoteAccessError):
            await client.qp.read(SGE(client.mr, 0, 8), server.mr.addr, server.mr.rkey ^ 0xFFFF)
    async with asyncio.timeout(5):
        with pytest.raises(aiordma.FlushedError):
            await client.qp.recv(client.mr)
