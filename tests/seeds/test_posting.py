"""Rows 110 to 117: what posting means for the buffers, and how deep the queues are."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import pytest

import aiordma
from aiordma._ffi import ffi, lib
from aiordma.verbs import (
    SGE,
    Access,
    CompletionQueue,
    MemoryRegion,
    QPAttrMask,
    QPInitAttr,
    QueuePair,
    RecvWR,
    SendWR,
)
from tests.device.oracle import adapter_objects, until
from tests.inside.verbs import handle_of
from tests.seeds.ends import (
    DEPTH,
    LIMIT_S,
    MOMENT_S,
    End,
    Pair,
    begun,
    connected,
    half_way,
    parameters,
    requested,
)

pytestmark = pytest.mark.device


async def test_j110_posting_returns_before_the_work_is_done(pair: Pair, is_siw: bool) -> None:
    client, server = pair.client, pair.server
    server.post_recv(1)
    assert server.qp.outstanding == 1
    await asyncio.sleep(MOMENT_S)
    assert server.cq.poll() == []  # nothing has been sent
    client.post_send(2)
    assert client.qp.outstanding == 1
    assert [wc.wr_id for wc in await client.completions(1)] == [2]
    assert [wc.wr_id for wc in await server.completions(1)] == [1]
    assert client.qp.outstanding == server.qp.outstanding == 0
    if is_siw:
        return  # a message without a receive ends the connection
    # The adapter goes on by itself: it repeats the message until there is a receive.
    server.qp.set_min_rnr_timer(655.36)
    client.post_send(3)
    await asyncio.sleep(MOMENT_S)
    assert client.cq.poll() == []
    server.post_recv(4)
    assert [wc.wr_id for wc in await client.completions(1)] == [3]
    assert [wc.wr_id for wc in await server.completions(1)] == [4]


async def test_j111_a_buffer_is_free_after_its_completion(pair: Pair) -> None:
    client, server = pair.client, pair.server
    messages = [bytes([n]) * 64 for n in range(1, 9)]
    server.qp.post_recv(
        [RecvWR(wr_id=n, sg_list=[SGE(server.mr, 64 * n, 64)]) for n in range(len(messages))]
    )
    for message in messages:
        client.mr.view[:64] = message
        await client.qp.send(SGE(client.mr, 0, 64))
    await server.completions(len(messages))
    assert bytes(server.mr.view[: 64 * len(messages)]) == b"".join(messages)


async def test_j112_a_buffer_stays_until_the_work_is_complete(pair: Pair) -> None:
    client, server = pair.client, pair.server
    buffer = bytearray(64)
    region = MemoryRegion(server.pd, buffer, Access.LOCAL_WRITE)
    before = adapter_objects()["mr"]
    receiving = await begun(server.qp.recv(region))
    receiving.cancel()  # ends the wait, not the receive
    region.close()
    del region
    await asyncio.sleep(MOMENT_S)
    assert adapter_objects()["mr"] == before
    with pytest.raises(BufferError):
        buffer.append(0)
    client.mr.view[:8] = b"late but"
    await client.qp.send(SGE(client.mr, 0, 8))
    await until(lambda: adapter_objects()["mr"] == before - 1)
    assert buffer.startswith(b"late but")
    buffer.append(0)


async def test_j113_no_early_message_is_lost(address: str) -> None:
    def fill(end: End) -> None:
        end.post_recv(*range(4))

    async with half_way(address) as (_, client, server_events):
        fill(client)
        connecting = await begun(client.cm_id.connect(parameters()))
        server, _ = await requested(server_events)
        server.allocate()
        fill(server)
        assert server.cm_id.context is not None
        is_iwarp = server.cm_id.context.is_iwarp

        async def at_once(end: End, established: object) -> None:
            await established  # type: ignore[misc]
            if end is server and is_iwarp:
                await connecting  # a message that comes with the answer would spoil it there
            for number in range(4):
                end.post_send(100 + number)

        await asyncio.gather(
            at_once(client, connecting), at_once(server, server.cm_id.accept(parameters()))
        )
        for end in (client, server):
            found = await end.completions(8)
            assert all(wc.ok for wc in found)
            assert [wc.wr_id for wc in found if wc.wr_id < 100] == list(range(4))
        server.close()


async def test_j114_bytes_lie_at_the_start(pair: Pair) -> None:
    client, server = pair.client, pair.server
    client.mr.view[:64] = bytes(range(64))
    for length in (64, 1, 33):
        server.mr.view[:256] = b"." * 256
        server.post_recv(1, length=256)
        await client.qp.send(SGE(client.mr, 0, length))
        (received,) = await server.completions(1)
        assert received.byte_len == length
        assert bytes(server.mr.view[: received.byte_len]) == bytes(range(length))
        assert bytes(server.mr.view[length:256]) == b"." * (256 - length)


async def test_j115_the_depth_is_what_may_be_under_way(address: str) -> None:
    async with connected(address) as pair:
        client, server = pair.client, pair.server
        one = SendWR(sg_list=[SGE(client.mr, 0, 16)])
        with pytest.raises(aiordma.RdmaOSError) as refused:
            client.qp.post_send([one] * (DEPTH + 1))
        assert refused.value.errno == errno.EAGAIN
        assert client.qp.outstanding == 0  # all of them or none
        server.post_recv(*range(DEPTH))
        with pytest.raises(aiordma.RdmaOSError):
            server.post_recv(DEPTH)
        client.qp.post_send([one] * DEPTH)
        await client.completions(DEPTH)
        await server.completions(DEPTH)
        # Who awaits gets a place when one is free.
        server.post_recv(*range(DEPTH))
        receives = [await begun(server.qp.recv(SGE(server.mr, 0, 64))) for _ in range(DEPTH)]
        async with asyncio.timeout(LIMIT_S):
            sends = [client.qp.send(SGE(client.mr, 0, 16)) for _ in range(DEPTH)]
            assert all(wc.ok for wc in await asyncio.gather(*sends))
            assert len(await server.completions(DEPTH)) == DEPTH
            # A message that came before its receive would end a connection of iWARP.
            await until(lambda: server.qp.outstanding == DEPTH)
            sends = [client.qp.send(SGE(client.mr, 0, 16)) for _ in range(DEPTH)]
            assert all(wc.ok for wc in await asyncio.gather(*sends, *receives))
            writes = [
                client.qp.write(SGE(client.mr, 0, 16), server.mr.addr, server.mr.rkey)
                for _ in range(2 * DEPTH)
            ]
            assert all(wc.ok for wc in await asyncio.gather(*writes))


@pytest.mark.parametrize("size", ["max_send_wr", "max_recv_wr", "max_send_sge", "max_recv_sge"])
async def test_j116_a_depth_beyond_the_devices_limit(pair: Pair, size: str) -> None:
    server = pair.server
    device = server.pd.context.attributes
    limit = device.max_sge if size.endswith("sge") else device.max_qp_wr
    sizes: dict[str, Any] = {size: limit + 1}
    with pytest.raises(OSError, match=f"EINVAL.*{size} {limit + 1}.*{limit}") as refused:
        QueuePair(server.pd, QPInitAttr(send_cq=server.cq, **sizes))
    assert refused.value.errno == errno.EINVAL


async def test_j117_the_device_tells_what_it_gave(pair: Pair, is_siw: bool) -> None:
    server = pair.server
    asked: dict[str, Any] = {
        "max_send_wr": 3, "max_recv_wr": 5, "max_send_sge": 2, "max_recv_sge": 3,
        "max_inline_data": 10,
    }  # fmt: skip
    with (
        CompletionQueue(server.pd.context, 8) as cq,
        QueuePair(server.pd, QPInitAttr(send_cq=cq, **asked)) as qp,
    ):
        for name, value in asked.items():
            assert getattr(qp.limits, name) >= value, name
        # The device's own numbers, and not those that were asked for.
        attr, init = ffi.new("struct ibv_qp_attr *"), ffi.new("struct ibv_qp_init_attr *")
        code = lib.ibv_query_qp(handle_of(qp), attr, int(QPAttrMask.CAP), init)
        assert code == 0
        given = {name: getattr(init.cap, name) for name in asked}
        limits = {name: getattr(qp.limits, name) for name in asked}
        if is_siw:  # its library returns the request, and its kernel has more
            assert all(given[name] >= limits[name] for name in asked)
        else:
            assert limits == given
            assert given != asked
