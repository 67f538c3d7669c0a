"""Posting: lists with one doorbell, pieces, inline bytes, flags."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import aiordma
from aiordma.verbs import (
    SGE,
    Opcode,
    QPAttrMask,
    RecvWR,
    SendFlags,
    SendWR,
    WCOpcode,
    WorkCompletion,
    wr,
)
from tests.device.ends import Ends
from tests.device.posting import (
    completions,
    posting_ends,
    received,
    still_works,
)

pytestmark = [pytest.mark.device, pytest.mark.one_loop]
__all__ = ["posting_ends"]  # the fixture `ends`


# Lists


class Doorbells:
    """Counts the calls that post, and lets them through."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._real, name)
        if not name.startswith("ibv_post"):
            return function

        def counted(*args: Any) -> Any:
            self.calls.append(name)
            return function(*args)

        return counted


async def test_a_list_is_one_call(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    bells = Doorbells(wr.lib)  # type: ignore[attr-defined]
    monkeypatch.setattr(wr, "lib", bells)
    client, server = ends.client, ends.server
    server.qp.post_recv([RecvWR(n, [SGE(server.mr, n * 64, 64)]) for n in range(6)])
    for n in range(6):
        client.mr.view[n * 64 : n * 64 + 64] = bytes([n + 1]) * 64
    client.qp.post_send([SendWR(n, [SGE(client.mr, n * 64, 64)]) for n in range(5)])
    assert [wc.wr_id for wc in await completions(client, 5)] == [0, 1, 2, 3, 4]
    await client.qp.submit([SendWR(sg_list=[SGE(client.mr, 320, 64)])])
    assert [wc.wr_id for wc in await completions(server, 6)] == [0, 1, 2, 3, 4, 5]
    assert bytes(server.mr.view[:384]) == bytes(client.mr.view[:384])
    assert bells.calls == ["ibv_post_recv", "ibv_post_send", "ibv_post_send"]


@pytest.mark.smoke
async def test_a_list_of_different_kinds(ends: Ends) -> None:
    client, server = ends.client, ends.server
    client.mr.view[:12] = b"writtensent!"
    server.mr.view[512:520] = b"readback"
    server.qp.post_recv(RecvWR(1, [SGE(server.mr, 0, 64)]))
    addr, rkey = server.mr.addr, server.mr.rkey
    done = await client.qp.submit([
        SendWR(1, [SGE(client.mr, 0, 7)], Opcode.RDMA_WRITE, remote_addr=addr + 256, rkey=rkey),
        SendWR(2, [SGE(client.mr, 64, 8)], Opcode.RDMA_READ, remote_addr=addr + 512, rkey=rkey),
        SendWR(3, [SGE(client.mr, 7, 5)]),
    ])  # fmt: skip
    assert done.wr_id == 3
    assert done.opcode == WCOpcode.SEND
    assert await received(server, 5) == b"sent!"
    assert bytes(server.mr.view[256:263]) == b"written"
    assert bytes(client.mr.view[64:72]) == b"readback"


async def test_an_empty_list(ends: Ends) -> None:
    ends.client.qp.post_send([])
    ends.client.qp.post_recv([])
    assert ends.client.qp.outstanding == 0
    with pytest.raises(ValueError, match="1 to 8"):
        await ends.client.qp.submit([])
    with pytest.raises(ValueError, match="1 to 8"):
        await ends.client.qp.submit([SendWR(sg_list=[SGE(ends.client.mr, 0, 1)])] * 9)


# Pieces


async def test_scatter_and_gather(ends: Ends) -> None:
    client, server = ends.client, ends.server
    client.mr.view[:26] = b"abcdefghijklmnopqrstuvwxyz"
    pieces = [SGE(server.mr, 100, 2), SGE(server.mr, 0, 3), SGE(server.mr, 200, 64)]
    receiving = asyncio.create_task(server.qp.recv(pieces))
    await asyncio.sleep(0)
    await client.qp.send([SGE(client.mr, 24, 2), SGE(client.mr, 0, 1), SGE(client.mr, 10, 6)])
    assert (await receiving).byte_len == 9
    assert bytes(server.mr.view[100:102]) == b"yz"
    assert bytes(server.mr.view[:3]) == b"akl"
    assert bytes(server.mr.view[200:205]) == b"mnop\0"


async def test_too_many_pieces(ends: Ends) -> None:
    qp, mr = ends.client.qp, ends.client.mr
    assert qp.limits.max_send_sge >= 3
    many = [SGE(mr, 0, 1)] * (qp.limits.max_send_sge + 1)
    with pytest.raises(ValueError, match=r"limits\.max_send_sge is \d"):
        await qp.send(many)
    with pytest.raises(ValueError, match=r"limits\.max_send_sge is \d"):
        qp.post_send(SendWR(sg_list=many))
    many = [SGE(mr, 0, 1)] * (qp.limits.max_recv_sge + 1)
    with pytest.raises(ValueError, match=r"limits\.max_recv_sge is \d"):
        await qp.recv(many)
    with pytest.raises(ValueError, match=r"limits\.max_recv_sge is \d"):
        qp.post_recv(RecvWR(sg_list=many))
    assert qp.outstanding == 0
    await still_works(ends)


async def test_a_read_into_several_pieces(ends: Ends, is_siw: bool) -> None:
    client, server = ends.client, ends.server
    server.mr.view[:6] = b"abcdef"
    pieces = [SGE(client.mr, 100, 2), SGE(client.mr, 0, 4)]
    if is_siw:  # it reads into one piece
        with pytest.raises(ValueError, match="max_sge_rd"):
            await client.qp.read(pieces, server.mr.addr, server.mr.rkey)
    else:
        await client.qp.read(pieces, server.mr.addr, server.mr.rkey)
        assert bytes(client.mr.view[100:102]) == b"ab"
        assert bytes(client.mr.view[:4]) == b"cdef"
    await still_works(ends)


async def test_empty_pieces(ends: Ends, is_siw: bool) -> None:
    client, server = ends.client, ends.server
    nothing, something = SGE(client.mr, 0, 0), SGE(client.mr, 0, 4)
    client.mr.view[:4] = b"four"
    shapes = [([nothing], 0), ([], 0), ([something, nothing], 4)]
    if not is_siw:  # the others are refused there: tests/unit/verbs/test_wr.py
        shapes += [
            ([nothing, something], 4), ([something, nothing, something], 8),
            ([nothing, nothing, nothing], 0),
        ]  # fmt: skip
    for pieces, length in shapes:
        server.qp.post_recv(RecvWR(1, [SGE(server.mr, 0, 64)]))
        await client.qp.submit([SendWR(1, pieces)])
        assert await received(server, length) == b"fourfour"[:length]
    # A receive without a piece takes a message without bytes.
    if is_siw:
        with pytest.raises(aiordma.NotSupportedError, match="without a piece"):
            server.qp.post_recv(RecvWR(1))
    else:
        server.qp.post_recv(RecvWR(1))
        await client.qp.send([])
        await received(server, 0)
    await still_works(ends)


# Inline


@pytest.mark.parametrize("raw", [True, False])
async def test_inline_bytes_may_be_changed_at_once(ends: Ends, is_siw: bool, raw: bool) -> None:
    client, server = ends.client, ends.server
    receive = RecvWR(sg_list=[SGE(server.mr, 0, 64)])
    if is_siw:  # a message that finds no receive ends an iWARP connection
        server.qp.post_recv(receive)
    else:
        server.qp.modify(QPAttrMask.MIN_RNR_TIMER, min_rnr_timer=31)  # 492 ms, six times
    client.mr.view[:8] = b"original"
    pieces = [SGE(client.mr, 0, 4), SGE(client.mr, 4, 4)]
    flags = SendFlags.SIGNALED | SendFlags.INLINE
    sending: asyncio.Task[WorkCompletion] | None = None
    if raw:
        client.qp.post_send(SendWR(sg_list=pieces, send_flags=flags))
    else:
        sending = asyncio.create_task(client.qp.send(pieces, inline=True))
        await asyncio.sleep(0)
    client.mr.view[:8] = b"CHANGED!"
    if not is_siw:  # it found no receive, and is sent again from the adapter's copy
        await asyncio.sleep(0.02)
        server.qp.post_recv(receive)
    assert await received(server, 8) == b"original"
    if sending is None:
        await completions(client, 1)
    else:
        await sending


async def test_an_inline_write(ends: Ends) -> None:
    client, server = ends.client, ends.server
    client.mr.view[:6] = b"inline"
    await client.qp.write(SGE(client.mr, 0, 6), server.mr.addr, server.mr.rkey, inline=True)
    await client.qp.read(SGE(client.mr, 64, 6), server.mr.addr, server.mr.rkey)
    assert bytes(server.mr.view[:6]) == b"inline"
    assert bytes(client.mr.view[64:70]) == b"inline"
    request = SendWR(
        sg_list=[SGE(client.mr, 0, 6)], opcode=Opcode.RDMA_READ, remote_addr=server.mr.addr,
        rkey=server.mr.rkey, send_flags=SendFlags.INLINE,
    )  # fmt: skip
    with pytest.raises(ValueError, match="RDMA_READ cannot be inline"):
        client.qp.post_send(request)


# Flags


async def test_a_fence_waits_for_the_read_before_it(ends: Ends) -> None:
    client, server = ends.client, ends.server
    content = bytes(range(256)) * 16
    server.mr.view[:] = content
    into = server.region(4096)
    server.qp.post_recv(RecvWR(sg_list=[SGE(into)]))
    addr, rkey = server.mr.addr, server.mr.rkey
    # The message is what the read brings.
    await client.qp.submit([
        SendWR(1, [SGE(client.mr)], Opcode.RDMA_READ, remote_addr=addr, rkey=rkey),
        SendWR(2, [SGE(client.mr)], send_flags=SendFlags.FENCE),
    ])  # fmt: skip
    await completions(server, 1)
    assert bytes(into.view) == content
    server.mr.view[:] = bytes(4096)
    reading = asyncio.create_task(client.qp.read(SGE(client.mr), addr, rkey))
    writing = asyncio.create_task(client.qp.write(SGE(client.mr), into.addr, into.rkey, fence=True))
    async with asyncio.timeout(10):
        await asyncio.gather(reading, writing)
        await client.qp.read(SGE(client.mr, 0, 1), into.addr, into.rkey)
    assert bytes(into.view) == bytes(4096)


async def test_solicited_wakes_who_waits_for_it(ends: Ends, is_siw: bool) -> None:
    client, server = ends.client, ends.server
    server.cq.req_notify(solicited_only=True)
    server.qp.post_recv([RecvWR(n, [SGE(server.mr, n * 64, 64)]) for n in range(3)])
    await client.qp.send(SGE(client.mr, 0, 1))
    assert await server.channel.get_cq_event(0.1) is None
    await client.qp.submit([
        SendWR(sg_list=[SGE(client.mr, 0, 2)], send_flags=SendFlags.SOLICITED),
        SendWR(sg_list=[SGE(client.mr, 0, 3)]),
    ])  # fmt: skip
    if is_siw:  # it carries the flag and does not look at it
        assert await server.channel.get_cq_event(0.2) is None
    else:
        assert await server.channel.get_cq_event(10) is server.cq
        server.cq.ack_events()
    async with asyncio.timeout(10):
        got = server.cq.poll()
        while len(got) < 3:
            await asyncio.sleep(0.01)
            got += server.cq.poll()
    assert [wc.byte_len for wc in got] == [1, 2, 3]


async def test_immediate_data(ends: Ends, is_siw: bool) -> None:
    client, server = ends.client, ends.server
    qp, addr, rkey = client.qp, server.mr.addr, server.mr.rkey
    piece = SGE(client.mr, 0, 4)
    if is_siw:
        for refused in (qp.send(piece, imm=1), qp.write(piece, addr, rkey, imm=1)):
            with pytest.raises(aiordma.NotSupportedError, match="no immediate data"):
                await refused
        await still_works(ends)
        return
    client.mr.view[:4] = b"data"
    server.qp.post_recv([RecvWR(n, [SGE(server.mr, 1024, 64)]) for n in range(4)])
    for imm in (0, 0x12345678, 0xFFFFFFFF):
        await qp.send(piece, imm=imm)
        (completion,) = await completions(server, 1)
        assert completion.imm_data == imm
        assert completion.opcode == WCOpcode.RECV
    await qp.write(piece, addr, rkey, imm=7, solicited=True)
    (completion,) = await completions(server, 1)
    assert completion.imm_data == 7
    assert completion.opcode == WCOpcode.RECV_RDMA_WITH_IMM
    assert bytes(server.mr.view[:4]) == b"data"
    for wrong in (-1, 1 << 32):
        with pytest.raises(ValueError, match=r"imm_data .* 32 bits"):
            await qp.send(piece, imm=wrong)
    with pytest.raises(ValueError, match="not both"):
        await qp.send(piece, imm=1, invalidate=1)
