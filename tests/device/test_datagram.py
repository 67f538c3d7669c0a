"""Datagrams at the native level: services, address handles, UD queue pairs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest

import aiordma
from aiordma.cm import ConnectionId, EventChannel, PortSpace, Stage
from aiordma.verbs import (
    GRH,
    SGE,
    AddressHandle,
    AHAttributes,
    Opcode,
    QPInitAttr,
    QPState,
    QPType,
    RecvWR,
    SendWR,
    WCFlags,
)
from tests.device.datagrams import UDEnd, bound, next_request, routed
from tests.device.shared import OVER_FABRIC
from tests.device.stepping import every_step, run_canceled
from tests.inside.verbs import change_rules
from tests.native_ends import beside

pytestmark = pytest.mark.device

QKEY = 0x01234567


@pytest.fixture
async def listener(events: EventChannel, address: str) -> AsyncIterator[ConnectionId]:
    cm_id = bound(events, address)
    cm_id.listen()
    yield cm_id
    cm_id.close()


@pytest.fixture
async def end(events: EventChannel, address: str) -> AsyncIterator[UDEnd]:
    """One queue pair; a device that talks to itself reaches it, too."""
    made = UDEnd(bound(events, address))
    yield made
    made.close()


@pytest.mark.smoke
async def test_question_and_answer(
    events: EventChannel, listener: ConnectionId, end: UDEnd, address: str
) -> None:
    asking = await routed(events, address, listener.source_port)
    question = asyncio.create_task(asking.connect(private_data=b"who?"))
    serving, request = await next_request(events)
    assert request.private_data.rstrip(b"\0") == b"who?"
    assert len(request.private_data) == 180
    assert serving.is_datagram
    made_here = await serving.accept(private_data=b"me", qp=end.qp)
    assert made_here.type.name == "ESTABLISHED"
    answer = await question
    assert answer.private_data.rstrip(b"\0") == b"me"
    assert len(answer.private_data) == 136
    assert (answer.qp_num, answer.qkey) == (end.qp.num, QKEY)
    assert answer.ah_attr is not None
    assert answer.ah_attr.port_num == 1
    assert (asking.stage, serving.stage) == (Stage.SERVICE_RESOLVED, Stage.ANSWERED)
    assert asking.destination == (address, listener.source_port)
    assert serving.destination == (address, asking.source_port)
    for cm_id in (asking, serving):
        with pytest.raises(OSError, match="EINVAL"):
            await cm_id.disconnect()
        cm_id.close()

    # What the answer told outlives the ids.
    handle = await AddressHandle.create(end.pd, answer.ah_attr)
    receiving = await end.receiving()
    sent = await end.qp.send(
        end.put(b"hello"), ah=handle, remote_qpn=answer.qp_num, remote_qkey=answer.qkey, imm=7
    )
    data, header, wc = await receiving
    assert sent.ok
    assert (data, wc.src_qp, wc.byte_len, wc.imm_data) == (b"hello", end.qp.num, 45, 7)
    assert WCFlags.GRH in wc.flags
    assert str(header) == f"{address} -> {address}"
    handle.close()


async def test_the_server_answers_a_datagram(
    events: EventChannel, listener: ConnectionId, address: str
) -> None:
    client = UDEnd(await routed(events, address, listener.source_port))
    question = asyncio.create_task(client.cm_id.connect())
    serving, _ = await next_request(events)
    server = UDEnd(serving)
    arriving = await server.receiving()
    await serving.accept()
    answer = await question
    assert answer.ah_attr is not None
    there = await AddressHandle.create(client.pd, answer.ah_attr)
    coming_back = await client.receiving()
    to_server = {"ah": there, "remote_qpn": answer.qp_num, "remote_qkey": answer.qkey}
    await client.qp.send(client.put(b"ping"), **to_server)  # type: ignore[arg-type]
    data, header, wc = await arriving
    assert (data, wc.src_qp) == (b"ping", client.qp.num)
    context = serving.context
    assert context is not None
    way = AHAttributes.from_wc(context, wc, header, serving.port_num)
    assert way.dgid == answer.ah_attr.dgid  # one device that talks to itself
    back = await AddressHandle.create(server.pd, way)
    with AddressHandle.from_wc(server.pd, wc, header) as same:
        assert same.attr == way
    pieces = [server.put(b"pong"), SGE(server.outgoing, 1, 2)]
    await server.qp.send(pieces, ah=back, remote_qpn=wc.src_qp, remote_qkey=QKEY)
    assert (await coming_back)[0] == b"pongon"
    for part in (there, back, server, client):
        part.close()


async def test_a_refusal_carries_words(
    events: EventChannel, listener: ConnectionId, address: str
) -> None:
    asking = await routed(events, address, listener.source_port)
    question = asyncio.create_task(asking.connect())
    serving, _ = await next_request(events)
    with pytest.raises(ValueError, match="at most 136 bytes"):
        serving.reject(b"x" * 137)
    serving.reject(b"not today".ljust(136, b"."))
    with pytest.raises(aiordma.ConnectionRejectedError) as caught:
        await question
    assert caught.value.private_data == b"not today".ljust(136, b".")
    assert (caught.value.status, caught.value.event) == (2, "UNREACHABLE")
    assert "refused" in caught.value.hint
    assert asking.stage is Stage.FAILED
    for cm_id in (asking, serving):
        cm_id.close()


async def test_nobody_listens(events: EventChannel, address: str) -> None:
    asking = await routed(events, address, 1)
    with pytest.raises(aiordma.ConnectionRejectedError, match="no such service") as caught:
        await asking.connect()
    assert caught.value.status == 1
    asking.close()


async def test_private_data_has_limits(
    events: EventChannel, listener: ConnectionId, end: UDEnd, address: str
) -> None:
    rng = random.Random(4)
    asked, answered = rng.randbytes(180), rng.randbytes(136)
    asking = await routed(events, address, listener.source_port)
    with pytest.raises(ValueError, match="at most 180 bytes"):
        await asking.connect(private_data=asked + b"x")
    question = asyncio.create_task(asking.connect(private_data=asked))
    serving, request = await next_request(events)
    assert request.private_data == asked
    with pytest.raises(ValueError, match="at most 136 bytes"):
        await serving.accept(private_data=answered + b"x", qp=end.qp)
    with pytest.raises(OSError, match="no queue pair"):
        await serving.accept()
    await serving.accept(private_data=answered, qp=end.qp)
    assert (await question).private_data == answered
    for cm_id in (asking, serving):
        cm_id.close()


async def test_a_server_that_does_not_answer(
    events: EventChannel, listener: ConnectionId, end: UDEnd, address: str
) -> None:
    asking = await routed(events, address, listener.source_port)
    question = asyncio.create_task(asking.connect(timeout=0.2))
    serving, _ = await next_request(events)
    with pytest.raises(aiordma.ConnectTimeoutError, match=r"within 0\.2 s"):
        await question
    asking.close()
    await serving.accept(qp=end.qp)  # nobody hears it, and nobody tells
    serving.close()


async def test_canceled_at_every_await(
    events: EventChannel, listener: ConnectionId, end: UDEnd, address: str, late: bool
) -> None:
    async def serve() -> None:
        async for event in events:
            if event.listen_id is listener and event.connection_id is not None:
                await event.connection_id.accept(qp=end.qp)
                event.connection_id.close()

    async def ask() -> None:
        asking = ConnectionId(events, PortSpace.UDP)
        try:
            await asking.resolve_addr((address, listener.source_port), timeout=5)
            await asking.resolve_route(timeout=5)
            answer = await asking.connect()
            assert answer.ah_attr is not None
            handle = await AddressHandle.create(end.pd, answer.ah_attr)
            try:
                await end.qp.send(end.put(b"x"), ah=handle, remote_qpn=1 << 20, remote_qkey=QKEY)
            finally:
                handle.close()
        finally:
            asking.close()

    async with beside(serve()):
        for steps in every_step(late=late):
            await run_canceled(ask(), steps)
    assert steps.at > 4


async def test_a_datagram_fills_the_mtu_and_no_more(end: UDEnd, address: str) -> None:
    assert end.cm_id.context is not None
    mtu = end.cm_id.context.query_port(1).active_mtu.in_bytes
    handle = await AddressHandle.create(end.pd, AHAttributes.to(end.cm_id.context, address))
    to = {"ah": handle, "remote_qpn": end.qp.num, "remote_qkey": QKEY}
    end.outgoing.view[:mtu] = payload = random.Random(5).randbytes(mtu)
    for length in (mtu, 1, 0):
        receiving = await end.receiving()
        with pytest.raises(aiordma.MessageTooLargeError, match=f"MTU of {mtu}"):
            await end.qp.send(SGE(end.outgoing, 0, mtu + 1), **to)  # type: ignore[arg-type]
        with pytest.raises(aiordma.MessageTooLargeError):
            end.qp.post_send(SendWR(sg_list=[SGE(end.outgoing, 0, mtu + 1)], **to))  # type: ignore[arg-type]
        await end.qp.send(SGE(end.outgoing, 0, length), **to)  # type: ignore[arg-type]
        data, _, wc = await receiving
        assert data == payload[:length]
        assert wc.byte_len == GRH.SIZE + length
    handle.close()


async def test_an_adapter_drops_what_is_longer_than_the_mtu(end: UDEnd, address: str) -> None:
    """It completes with success, and nothing is sent: the reason for the check."""
    assert end.cm_id.context is not None
    mtu = end.cm_id.context.query_port(1).active_mtu.in_bytes
    handle = await AddressHandle.create(end.pd, AHAttributes.to(end.cm_id.context, address))
    change_rules(end.qp, max_datagram=1 << 20)
    receiving = await end.receiving()
    to = {"ah": handle, "remote_qpn": end.qp.num, "remote_qkey": QKEY}
    sent = await end.qp.send(SGE(end.outgoing, 0, mtu + 1), **to)  # type: ignore[arg-type]
    assert sent.ok
    await end.qp.send(end.put(b"marker"), **to)  # type: ignore[arg-type]
    assert (await receiving)[0] == b"marker"
    handle.close()


async def test_what_does_not_fit_the_receive_is_dropped(end: UDEnd, address: str) -> None:
    """As it is the way of datagrams; the receive stays posted for the next one."""
    assert end.cm_id.context is not None
    handle = await AddressHandle.create(end.pd, AHAttributes.to(end.cm_id.context, address))
    to = {"ah": handle, "remote_qpn": end.qp.num, "remote_qkey": QKEY}
    receiving = await end.receiving(GRH.SIZE + 10)
    for data, key in ((b"x" * 11, QKEY), (b"wrong key", 1), (b"0123456789", QKEY)):
        sent = await end.qp.send(end.put(data), **{**to, "remote_qkey": key})  # type: ignore[arg-type]
        assert sent.ok  # an adapter knows nothing of what becomes of a datagram
    assert (await receiving)[0] == b"0123456789"
    assert end.qp.state == QPState.RTS
    handle.close()


async def test_the_header_of_a_device_that_talks_to_itself(end: UDEnd, address: str) -> None:
    """Soft-RoCE leaves out the checksum of its IPv4 header; an adapter does not."""
    assert end.cm_id.context is not None
    handle = await AddressHandle.create(end.pd, AHAttributes.to(end.cm_id.context, address))
    receiving = await end.receiving()
    await end.qp.send(end.put(b"x"), ah=handle, remote_qpn=end.qp.num, remote_qkey=QKEY)
    _, header, _ = await receiving
    ip = header.raw[20:]
    assert ip[0] == 0x45
    total = sum(int.from_bytes(ip[i : i + 2], "big") for i in range(0, 20, 2))
    assert ((total & 0xFFFF) + (total >> 16) == 0xFFFF) is OVER_FABRIC
    assert not header.is_multicast
    handle.close()


async def test_ipv6(events: EventChannel, end: UDEnd) -> None:
    context = end.cm_id.context
    assert context is not None
    hosts = [str(entry) for entry in context.gid_table() if entry.gid[0] == 0xFD]
    assert hosts, "the device has an address of its own in fd80::/64"
    handle = await AddressHandle.create(end.pd, AHAttributes.to(context, hosts[0]))
    receiving = await end.receiving()
    await end.qp.send(end.put(b"six"), ah=handle, remote_qpn=end.qp.num, remote_qkey=QKEY)
    data, header, wc = await receiving
    assert data == b"six"
    assert str(header) == f"{hosts[0]} -> {hosts[0]}"
    assert AHAttributes.from_wc(context, wc, header).dgid == handle.attr.dgid
    handle.close()


async def test_bad_requests_are_refused_at_the_call(
    events: EventChannel, end: UDEnd, address: str
) -> None:
    context = end.cm_id.context
    assert context is not None
    handle = await AddressHandle.create(end.pd, AHAttributes.to(context, address))
    piece = end.put(b"x")
    to = {"ah": handle, "remote_qpn": end.qp.num, "remote_qkey": QKEY}
    with pytest.raises(ValueError, match="name its receiver"):
        await end.qp.send(piece)
    with pytest.raises(ValueError, match="remote_qpn"):
        await end.qp.send(piece, **{**to, "remote_qpn": 1 << 24})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="remote_qkey"):
        await end.qp.send(piece, **{**to, "remote_qkey": -1})  # type: ignore[arg-type]
    with pytest.raises(aiordma.NotSupportedError, match="RDMA_WRITE"):
        end.qp.post_send(SendWR(sg_list=[piece], opcode=Opcode.RDMA_WRITE, **to))  # type: ignore[arg-type]
    with pytest.raises(OSError, match=r"ibv_create_ah: (ENODATA|EINVAL)"):
        AddressHandle(end.pd, AHAttributes(dgid=handle.attr.dgid, sgid_index=200))
    with pytest.raises(OSError, match="EADDRNOTAVAIL"):
        AHAttributes.to(context, address, port_num=2)
    with pytest.raises(ValueError, match="16 bytes"):
        AHAttributes(dgid=b"short")
    with pytest.raises(TypeError, match="not address handle attributes"):
        AddressHandle(end.pd, address)  # type: ignore[arg-type]
    for space, kind in ((PortSpace.UDP, QPType.RC), (PortSpace.TCP, QPType.UD)):
        cm_id = ConnectionId(events, space)
        cm_id.bind_addr((address, 0))
        with pytest.raises(ValueError, match="needs a queue pair of type"):
            cm_id.create_qp(end.pd, QPInitAttr(send_cq=end.cq, qp_type=kind))
        assert cm_id.qp is None
        cm_id.close()
    handle.close()
    with pytest.raises(aiordma.ResourceClosedError):
        await end.qp.send(piece, **to)  # type: ignore[arg-type]
    assert end.qp.outstanding == 0


async def test_a_handle_outlives_the_sends_that_name_it(end: UDEnd, address: str) -> None:
    assert end.cm_id.context is not None
    handle = await AddressHandle.create(end.pd, AHAttributes.to(end.cm_id.context, address))
    end.qp.post_recv(RecvWR(wr_id=1, sg_list=[SGE(end.incoming)]))
    request = SendWR(
        wr_id=2, sg_list=[end.put(b"x")], ah=handle, remote_qpn=end.qp.num, remote_qkey=QKEY
    )
    end.qp.post_send([request] * 3)
    handle.close()
    with pytest.raises(TimeoutError):
        await handle.wait_closed(0.05)  # nobody has polled: the sends are under way
    done: list[int] = []
    async with asyncio.timeout(10):
        while len(done) < 4:
            done += [wc.wr_id for wc in end.cq.poll()]
            await asyncio.sleep(0)
    assert sorted(done) == [1, 2, 2, 2]
    await handle.wait_closed(10)


@pytest.mark.parametrize("seed", range(6))
async def test_any_order_of_closing(
    events: EventChannel, listener: ConnectionId, address: str, seed: int
) -> None:
    client = UDEnd(await routed(events, address, listener.source_port))
    question = asyncio.create_task(client.cm_id.connect())
    serving, _ = await next_request(events)
    server = UDEnd(serving)
    await serving.accept()
    answer = await question
    assert answer.ah_attr is not None
    handle = await AddressHandle.create(client.pd, answer.ah_attr)
    waiting = await server.receiving()
    client.qp.post_send(
        SendWR(sg_list=[client.put(b"x")], ah=handle, remote_qpn=99, remote_qkey=QKEY)
    )
    parts = [handle, *client.parts, *server.parts]
    random.Random(seed).shuffle(parts)
    for part in parts:
        part.close()
    with pytest.raises(aiordma.FlushedError):
        await waiting
    for part in parts:
        await part.wait_closed(10)
