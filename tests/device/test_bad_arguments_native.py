"""Arguments of verbs and of the connection manager: a table of calls and what they refuse."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aiordma.cm import ConnectionId, ConnectionParameter, EventChannel, Option
from aiordma.verbs import (
    SGE,
    CompletionQueue,
    MemoryRegion,
    Opcode,
    ProtectionDomain,
    QPInitAttr,
    QueuePair,
    RecvWR,
    SendWR,
    SharedReceiveQueue,
)
from tests.device.bad_arguments import (
    LIMIT_S,
    NO_32_BITS,
    NO_64_BITS,
    NO_BUFFER,
    NO_BYTES,
    NO_INT,
    NO_INT_OR_NONE,
    NO_SECONDS,
    STRIDED,
    Bad,
    no_mistakes,
)  # fmt: skip
from tests.device.ends import Ends
from tests.native_ends import DEPTH, resolved

pytestmark = pytest.mark.device

NO_PAIR: list[Any] = [5, "x", b"xy", ("a",), ("a", "b"), (1, 2), (None, 1), ("127.0.0.1", 1.5)]


async def works(ends: Ends) -> None:
    """More messages than a queue has places."""
    client, server = ends.client, ends.server
    with MemoryRegion(client.pd, 64) as source, MemoryRegion(server.pd, 64) as into:
        async with asyncio.timeout(LIMIT_S):
            for _ in range(DEPTH + 2):
                receiving = asyncio.create_task(server.qp.recv(into))
                await asyncio.sleep(0)
                await client.qp.send(source)
                await receiving


async def test_g05_requests_of_a_queue_pair(ends: Ends, is_siw: bool) -> None:
    qp, region = ends.client.qp, ends.client.region(64)
    there = ends.server.region(64)

    def send(**fields: Any) -> None:
        qp.post_send(SendWR(**{"sg_list": [SGE(region)], **fields}))

    def write(**fields: Any) -> None:
        known = {"opcode": Opcode.RDMA_WRITE, "remote_addr": there.addr, "rkey": there.rkey}
        send(**{**known, **fields})

    table: list[Bad] = [
        ("post_send", qp.post_send, [5, None, "x", [5], object(), RecvWR(1), [RecvWR(1)]]),
        ("post_recv", qp.post_recv, [5, None, "x", [5], object(), SendWR()]),
        ("SendWR.wr_id", lambda x: send(wr_id=x), NO_64_BITS),
        ("SendWR.opcode", lambda x: send(opcode=x), ["x", None, 1.5, object()]),
        ("SendWR.send_flags", lambda x: send(send_flags=x), ["x", None, 1.5, object()]),
        ("SendWR.sg_list", lambda x: send(sg_list=x), [5, None, "x", [5], [region], [None]]),
        ("SendWR.remote_addr", lambda x: write(remote_addr=x), NO_64_BITS),
        ("SendWR.rkey", lambda x: write(rkey=x), NO_32_BITS),
        ("RecvWR.wr_id", lambda x: qp.post_recv(RecvWR(x, [SGE(region)])), NO_64_BITS),
        ("SGE.mr", SGE, [5, None, "x", b"x"]),
        ("SGE.offset", lambda x: SGE(region, x), [*NO_INT_OR_NONE, -1, 65, 1 << 64]),
        ("SGE.length", lambda x: SGE(region, 0, x), [*NO_INT, -1, 65, 1 << 64]),
        ("send", qp.send, [5, None, "x", b"x", object()]),
        ("recv", qp.recv, [5, None, "x", b"x", object()]),
        ("read(into)", lambda x: qp.read(x, there.addr, there.rkey), [5, None, "x", b"x"]),
        ("read(addr)", lambda x: qp.read(region, x, there.rkey), NO_64_BITS),
        ("read(rkey)", lambda x: qp.read(region, there.addr, x), NO_32_BITS),
        ("write(addr)", lambda x: qp.write(region, x, there.rkey), NO_64_BITS),
        ("set_min_rnr_timer", qp.set_min_rnr_timer, ["x", None, -1, float("nan"), object()]),
    ]
    if not is_siw:  # which has no immediates
        kind = Opcode.SEND_WITH_IMM
        table.append(("SendWR.imm_data", lambda x: send(opcode=kind, imm_data=x), NO_32_BITS))
    before = qp.outstanding

    async def nothing_left(name: str) -> None:
        if qp.outstanding != before:
            mistakes.append(f"{name} left requests behind")

    with no_mistakes() as mistakes:
        await mistakes.of_waits(table, nothing_left)
        await works(ends)


async def test_g05_objects_of_a_device(ends: Ends) -> None:
    pd, cq, context = ends.client.pd, ends.client.cq, ends.client.context

    def qp(**fields: Any) -> Any:
        return QueuePair(pd, QPInitAttr(send_cq=cq, **fields))

    kinds: list[Any] = [5, None, "x", object()]
    table: list[Bad] = [
        ("ProtectionDomain", ProtectionDomain, kinds),
        ("CompletionQueue(context)", lambda x: CompletionQueue(x, 4), kinds),
        ("CompletionQueue(cqe)", lambda x: CompletionQueue(context, x), [*NO_INT_OR_NONE, 0, -1]),
        ("CompletionQueue(vector)", lambda x: CompletionQueue(context, 4, None, x),
         [*NO_INT_OR_NONE, -1, 1 << 31]),
        ("CompletionQueue(channel)", lambda x: CompletionQueue(context, 4, x), [5, "x", object()]),
        ("poll", cq.poll, ["x", None, object(), -1]),
        ("ack_events", cq.ack_events, ["x", None, object(), -1, 1]),
        ("MemoryRegion(pd)", lambda x: MemoryRegion(x, 64), kinds),
        ("MemoryRegion(buffer)", lambda x: MemoryRegion(pd, x), [*NO_BUFFER, STRIDED, True, -1, 0]),
        ("MemoryRegion(access)", lambda x: MemoryRegion(pd, 64, x), [*NO_INT_OR_NONE, -1, 1 << 40]),
        ("MemoryRegion(iova)", lambda x: MemoryRegion(pd, 64, iova=x), [*NO_INT, -1, 1 << 64]),
        ("SharedReceiveQueue", lambda x: SharedReceiveQueue(pd, x), [*NO_INT_OR_NONE, 0, -1]),
        ("create_qp(max_send_wr)", lambda x: qp(max_send_wr=x), [*NO_INT_OR_NONE, -1, 1 << 40]),
        ("create_qp(max_recv_sge)", lambda x: qp(max_recv_sge=x), [*NO_INT_OR_NONE, -1, 1 << 40]),
        ("create_qp(inline)", lambda x: qp(max_inline_data=x), [*NO_INT_OR_NONE, -1, 1 << 40]),
        ("query_port", context.query_port, [*NO_INT_OR_NONE, -1, 256]),
        ("query_gid", lambda x: context.query_gid(1, x), [*NO_INT_OR_NONE, -1, 1 << 40]),
    ]  # fmt: skip
    with no_mistakes() as mistakes:
        await mistakes.of_waits(table)
        await works(ends)


async def test_g05_connection_ids(events: EventChannel, address: str, ends: Ends) -> None:
    port = ends.client.cm_id.destination_port
    cm_id = await resolved(events, address, port)
    fresh = ConnectionId(events)
    counts = [*NO_INT_OR_NONE, -1, 8]
    table: list[Bad] = [
        ("ConnectionId(channel)", ConnectionId, [5, None, "x", object()]),
        ("ConnectionId(space)", lambda x: ConnectionId(events, x), [5, None, "x", 1.5]),
        ("bind_addr", fresh.bind_addr, [*NO_PAIR, (address, -1), (address, 65536), ("name", 1)]),
        ("listen", fresh.listen, NO_INT_OR_NONE),
        ("resolve_addr", fresh.resolve_addr, [*NO_PAIR, None, ("name", 1)]),
        ("resolve_addr(src)", lambda x: fresh.resolve_addr((address, port), x), NO_PAIR),
        ("resolve_addr(timeout)", lambda x: fresh.resolve_addr((address, port), timeout=x),
         NO_SECONDS),
        ("set_option", lambda x: fresh.set_option(x, 1), [5, None, "x"]),
        ("set_option(value)", lambda x: fresh.set_option(Option.ID_TOS, x),
         [*NO_INT_OR_NONE, -1, 256]),
        ("connect", cm_id.connect, [5, "x", object()]),
        ("connect(private_data)", lambda x: cm_id.connect(private_data=x), [*NO_BYTES, bytes(300)]),
        ("connect(timeout)", lambda x: cm_id.connect(timeout=x), NO_SECONDS),
        ("reject", cm_id.reject, [*NO_BYTES, bytes(300)]),
        ("retry_count", lambda x: ConnectionParameter.exact(retry_count=x), counts),
        ("rnr_retry_count", lambda x: ConnectionParameter.exact(rnr_retry_count=x), counts),
        ("depth", lambda x: ConnectionParameter.exact(initiator_depth=x), [*NO_INT, -1, 256]),
        ("get_event", events.get_event, ["x", object(), [1]]),
        ("ack_event", events.ack_event, [5, None, "x"]),
    ]  # fmt: skip
    with no_mistakes() as mistakes:
        await mistakes.of_waits(table)
        fresh.bind_addr((address, 0))  # as good as new
        fresh.listen()
    for each in (cm_id, fresh):
        each.close()
        await each.wait_closed()
