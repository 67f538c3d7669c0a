"""Posting: lists, pieces, inline, flags, signaled groups, and what is refused at the call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

import aiordma
from aiordma.verbs import (
    SGE,
    Access,
    MemoryWindow,
    MWType,
    Opcode,
    QPState,
    RecvWR,
    SendFlags,
    SendWR,
    WCOpcode,
    WCStatus,
    WorkCompletion,
    qp_posting,
)
from aiordma.verbs.resource import Resource
from tests.device.ends import ALL, End, Ends, connected

pytestmark = pytest.mark.device

DEPTH = 8
NO_FLAGS = SendFlags(0)


@pytest.fixture
async def ends(address: str) -> AsyncIterator[Ends]:
    options: dict[str, Any] = {"max_send_wr": DEPTH, "max_recv_wr": DEPTH, "max_inline_data": 64}
    async with connected(address, **options, max_send_sge=3, max_recv_sge=3) as both:
        both.client.mr = both.client.region(4096, ALL)
        both.server.mr = both.server.region(4096, ALL)
        yield both


async def completions(end: End, count: int) -> list[WorkCompletion]:
    async with asyncio.timeout(10):
        return [await anext(end.cq) for _ in range(count)]


async def received(end: End, length: int) -> bytes:
    """The bytes of the one message that arrives next."""
    (completion,) = await completions(end, 1)
    assert completion.status == WCStatus.SUCCESS
    assert completion.byte_len == length
    return bytes(end.mr.view[:length])


async def still_works(ends: Ends) -> None:
    """Bytes still go through, in both directions."""
    for source, sink in ((ends.client, ends.server), (ends.server, ends.client)):
        source.mr.view[:5] = b"still"
        receiving = asyncio.create_task(sink.qp.recv(SGE(sink.mr, 0, 64)))
        await asyncio.sleep(0)
        async with asyncio.timeout(10):
            await source.qp.send(SGE(source.mr, 0, 5))
            assert (await receiving).byte_len == 5
        assert bytes(sink.mr.view[:5]) == b"still"


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
    bells = Doorbells(qp_posting.lib)  # type: ignore[attr-defined]
    monkeypatch.setattr(qp_posting, "lib", bells)
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
    shapes = [
        ([nothing], 0), ([], 0), ([something, nothing], 4), ([nothing, something], 4),
        ([something, nothing, something], 8), ([nothing, nothing, nothing], 0),
    ]  # fmt: skip
    for pieces, length in shapes:
        request = SendWR(1, pieces)
        if is_siw and 0 in [len(piece) for piece in pieces[:-1]]:  # its kernel would crash
            for post in (client.qp.post_send, client.qp.prepare_send):
                with pytest.raises(aiordma.NotSupportedError, match="empty piece"):
                    post(request)
            continue
        server.qp.post_recv(RecvWR(1, [SGE(server.mr, 0, 64)]))
        await client.qp.submit([request])
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


async def test_limits_are_what_the_device_gave(ends: Ends) -> None:
    limits = ends.client.qp.limits
    assert limits.max_send_wr >= DEPTH
    assert limits.max_recv_wr >= DEPTH
    assert limits.max_send_sge >= 3
    assert limits.max_recv_sge >= 3
    assert limits.max_inline_data >= 64
    # As many bytes as the limit says do fit, and one more does not.
    client, server = ends.client, ends.server
    most = limits.max_inline_data
    client.mr.view[: most + 1] = bytes(range(1, most + 2))
    server.qp.post_recv(RecvWR(sg_list=[SGE(server.mr)]))
    await client.qp.send(SGE(client.mr, 0, most), inline=True)
    assert await received(server, most) == bytes(client.mr.view[:most])
    with pytest.raises(ValueError, match=rf"limits\.max_inline_data is {most}"):
        await client.qp.send(SGE(client.mr, 0, most + 1), inline=True)
    await still_works(ends)


# Inline


@pytest.mark.parametrize("raw", [True, False])
async def test_inline_bytes_may_be_changed_at_once(ends: Ends, is_siw: bool, raw: bool) -> None:
    client, server = ends.client, ends.server
    receive = RecvWR(sg_list=[SGE(server.mr, 0, 64)])
    if is_siw:  # a message that finds no receive ends an iWARP connection
        server.qp.post_recv(receive)
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
    if not is_siw:  # without a receive it is sent again, from the adapter's copy
        await asyncio.sleep(0.05)
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


# Signaled and unsignaled


def sends(end: End, count: int, *, tail: bool = True) -> list[SendWR]:
    """Unsignaled one-byte messages, the last one signaled if `tail`."""
    chain = [SendWR(n, [SGE(end.mr, n, 1)], send_flags=NO_FLAGS) for n in range(count)]
    if tail:
        chain[-1].send_flags = SendFlags.SIGNALED
    return chain


async def test_only_the_tail_of_a_raw_list_completes(ends: Ends) -> None:
    client, server = ends.client, ends.server
    for _ in range(3):
        server.qp.post_recv([RecvWR(n, [SGE(server.mr, n, 1)]) for n in range(DEPTH)])
        client.mr.view[:DEPTH] = bytes(range(1, DEPTH + 1))
        client.qp.post_send(sends(client, DEPTH))
        assert [wc.wr_id for wc in await completions(client, 1)] == [DEPTH - 1]
        assert len(await completions(server, DEPTH)) == DEPTH
        assert bytes(server.mr.view[:DEPTH]) == bytes(client.mr.view[:DEPTH])
        server.mr.view[:DEPTH] = bytes(DEPTH)
        assert client.qp.outstanding == 0
        assert client.cq.poll() == []


async def test_a_queue_that_could_never_drain_is_refused(ends: Ends) -> None:
    client, server = ends.client, ends.server
    server.qp.post_recv([RecvWR(n, [SGE(server.mr, n, 1)]) for n in range(DEPTH)])
    with pytest.raises(ValueError, match=r"all 8 places .* unsignaled .* SIGNALED"):
        client.qp.post_send(sends(client, DEPTH, tail=False))
    assert client.qp.outstanding == 0
    client.qp.post_send(sends(client, 5, tail=False))
    client.qp.post_send(sends(client, 2, tail=False))
    with pytest.raises(ValueError, match="could never complete"):
        client.qp.post_send(sends(client, 1, tail=False))
    assert client.qp.outstanding == 7
    # A signaled one still has its place, and frees the others.
    await client.qp.send(SGE(client.mr, 0, 1))
    assert client.qp.outstanding == 0
    assert len(await completions(server, DEPTH)) == DEPTH


async def test_a_signaled_one_in_the_middle_is_enough(ends: Ends) -> None:
    client, server = ends.client, ends.server
    server.qp.post_recv([RecvWR(n, [SGE(server.mr, n, 1)]) for n in range(DEPTH)])
    chain = sends(client, DEPTH, tail=False)
    chain[2].send_flags = SendFlags.SIGNALED
    client.qp.post_send(chain)
    assert [wc.wr_id for wc in await completions(client, 1)] == [2]
    assert client.qp.outstanding == 5
    assert len(await completions(server, DEPTH)) == DEPTH
    server.qp.post_recv([RecvWR(n, [SGE(server.mr, n, 1)]) for n in range(2)])
    client.qp.post_send(sends(client, 2, tail=False))
    with pytest.raises(ValueError, match="could never complete"):
        client.qp.post_send(sends(client, 1, tail=False))
    await client.qp.read(SGE(client.mr, 0, 1), server.mr.addr, server.mr.rkey)
    assert client.qp.outstanding == 0


async def test_every_send_completes_with_sq_sig_all(address: str) -> None:
    async with connected(address, max_send_wr=DEPTH, sq_sig_all=True) as ends:
        client, server = ends.client, ends.server
        client.mr, server.mr = client.region(64), server.region(64)
        server.qp.post_recv([RecvWR(n, [SGE(server.mr, n, 1)]) for n in range(2 * DEPTH)])
        client.qp.post_send(sends(client, DEPTH, tail=False))
        assert [wc.wr_id for wc in await completions(client, DEPTH)] == list(range(DEPTH))
        done = await client.qp.submit(sends(client, DEPTH))
        assert done.wr_id == DEPTH - 1
        assert client.qp.outstanding == 0
        assert client.cq.poll() == []
        assert len(await completions(server, 2 * DEPTH)) == 2 * DEPTH


# Lists that are awaited


async def test_the_first_failure_of_a_list_is_told(ends: Ends, is_siw: bool) -> None:
    client, server = ends.client, ends.server
    client.mr.view[:4] = b"good"
    addr, rkey = server.mr.addr, server.mr.rkey
    chain = [
        SendWR(n, [SGE(client.mr, n * 64, 4)], Opcode.RDMA_READ, remote_addr=addr, rkey=rkey)
        for n in range(5)
    ]
    server.mr.view[:4] = b"read"
    chain[2].rkey ^= 0x5A00
    with pytest.raises(aiordma.CompletionError, match="request 2 of its list") as caught:
        await client.qp.submit(chain)
    assert caught.value.index == 2
    # iWARP tells no reason: the peer ends the connection.
    kind = aiordma.FlushedError if is_siw else aiordma.RemoteAccessError
    assert isinstance(caught.value, kind)
    assert bytes(client.mr.view[:4]) == bytes(client.mr.view[64:68]) == b"read"
    assert client.qp.state == QPState.ERR
    with pytest.raises(aiordma.FlushedError) as flushed:
        await client.qp.submit(chain)
    assert flushed.value.index == 0
    if not is_siw:
        assert isinstance(flushed.value.__cause__, aiordma.RemoteAccessError)


async def test_a_list_that_is_flushed(ends: Ends, is_siw: bool) -> None:
    client = ends.client
    # Nothing is received: the list stays under way until the queue pair fails.
    if is_siw:  # a message without a receive ends the connection at once
        client.qp.to_error()
    submitting = asyncio.create_task(client.qp.submit(sends(client, 4)))
    await asyncio.sleep(0)
    client.qp.to_error()
    async with asyncio.timeout(5):
        with pytest.raises(aiordma.FlushedError) as caught:
            await submitting
    assert caught.value.index == 0


async def test_lists_share_the_queue(ends: Ends) -> None:
    client, server = ends.client, ends.server
    # Each takes more than half of the queue: they cannot wait for each other in pieces.
    addr, rkey = server.mr.addr, server.mr.rkey
    order: list[int] = []

    async def write(number: int) -> None:
        piece = SGE(client.mr, number, 1)
        chain = [
            SendWR(number, [piece], Opcode.RDMA_WRITE, remote_addr=addr + number * 8 + i, rkey=rkey)
            for i in range(5)
        ]
        assert (await client.qp.submit(chain)).wr_id == number
        order.append(number)

    client.mr.view[:12] = bytes(range(1, 13))
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        for number in range(12):
            group.create_task(write(number))
    await client.qp.read(SGE(client.mr, 64, 96), addr, rkey)
    expected = b"".join(bytes([n + 1] * 5 + [0] * 3) for n in range(12))
    assert bytes(client.mr.view[64:160]) == expected
    assert order == sorted(order)


async def test_a_canceled_list(ends: Ends) -> None:
    client, server = ends.client, ends.server
    addr, rkey = server.mr.addr, server.mr.rkey

    def chain(count: int) -> list[SendWR]:
        piece = SGE(client.mr, 0, 4096)
        return [
            SendWR(n, [piece], Opcode.RDMA_WRITE, remote_addr=addr, rkey=rkey) for n in range(count)
        ]

    first = asyncio.create_task(client.qp.submit(chain(6)))
    waiting = asyncio.create_task(client.qp.submit(chain(6)))
    behind = asyncio.create_task(client.qp.submit(chain(2)))
    await asyncio.sleep(0)
    assert client.qp.outstanding <= 8
    waiting.cancel()  # had no places: nothing was posted
    async with asyncio.timeout(10):
        await asyncio.gather(first, behind)
        with pytest.raises(asyncio.CancelledError):
            await waiting
    last = asyncio.create_task(client.qp.submit(chain(8)))
    await asyncio.sleep(0)
    last.cancel()
    region = client.mr
    region.close()  # pinned by the list, if it is under way still
    with pytest.raises(asyncio.CancelledError):
        await last
    async with asyncio.timeout(10):
        await region.wait_closed()
    with pytest.raises(aiordma.ResourceClosedError):
        await client.qp.submit(chain(1))


async def test_a_read_that_is_overtaken_completes_by_itself(ends: Ends) -> None:
    """On iWARP the message behind a read completes before the bytes of the read are there."""
    client, server = ends.client, ends.server
    size = 200_000
    source, into = server.region(size), client.region(size)
    addr, rkey = source.addr, source.rkey
    for number in range(1, 9):
        content = bytes([number]) * size
        source.view[:] = content
        server.qp.post_recv([RecvWR(n, [SGE(server.mr, 0, 64)]) for n in range(3)])
        sending: list[asyncio.Task[WorkCompletion]] = []
        reading = asyncio.create_task(client.qp.read(into, addr, rkey))
        await asyncio.sleep(0)
        sending.append(asyncio.create_task(client.qp.send(SGE(client.mr, 0, 1))))
        await reading
        assert bytes(into.view) == content
        # The same by numbers, with a read that is not signaled.
        read = SendWR(1, [SGE(into)], Opcode.RDMA_READ, remote_addr=addr, rkey=rkey)
        client.qp.post_send([read, SendWR(2, [SGE(client.mr, 0, 1)])])
        assert sorted(wc.wr_id for wc in await completions(client, 2)) == [1, 2]
        read.send_flags = NO_FLAGS
        client.qp.post_send([read, SendWR(3, [SGE(client.mr, 0, 1)])])
        assert [wc.wr_id for wc in await completions(client, 1)] == [3]
        await asyncio.gather(*sending)
        await completions(server, 3)
    # Whatever was overtaken has come in the end.
    await client.qp.read(into, addr, rkey)
    assert client.qp.outstanding == 0
    assert client.cq.poll() == []


async def test_raw_and_awaited_requests_side_by_side(ends: Ends) -> None:
    client, server = ends.client, ends.server
    server.qp.post_recv([RecvWR(n, [SGE(server.mr, n, 1)]) for n in range(DEPTH)])
    client.mr.view[:DEPTH] = bytes(range(11, 11 + DEPTH))
    client.qp.post_send(sends(client, 3, tail=False))
    sending = asyncio.create_task(client.qp.send(SGE(client.mr, 3, 1)))
    await asyncio.sleep(0)
    client.qp.post_send(SendWR(77, [SGE(client.mr, 4, 1)]))
    await client.qp.submit([SendWR(sg_list=[SGE(client.mr, n, 1)]) for n in (5, 6, 7)])
    await sending
    assert [wc.wr_id for wc in await completions(client, 1)] == [77]
    assert [wc.wr_id for wc in await completions(server, DEPTH)] == list(range(DEPTH))
    assert bytes(server.mr.view[:DEPTH]) == bytes(range(11, 11 + DEPTH))


# What is refused at the call


async def test_a_list_that_is_partly_invalid_posts_nothing(ends: Ends) -> None:
    client, server = ends.client, ends.server
    server.qp.post_recv(RecvWR(1, [SGE(server.mr, 0, 64)]))
    good = SendWR(1, [SGE(client.mr, 0, 1)])
    closed = client.region(16)
    piece = SGE(closed, 0, 1)
    closed.close()
    wrong: list[tuple[type[Exception], SendWR]] = [
        (ValueError, SendWR(1 << 64, [SGE(client.mr, 0, 1)])),
        (ValueError, SendWR(2, [SGE(client.mr, 0, 1)] * 99)),
        (ValueError, SendWR(2, [SGE(client.mr, 0, 999)], send_flags=SendFlags.INLINE)),
        (ValueError, SendWR(2, [], Opcode.RDMA_WRITE, remote_addr=-1)),
        (ValueError, SendWR(2, [], Opcode.RDMA_WRITE, rkey=1 << 32)),
        (TypeError, SendWR(2, [], Opcode.RDMA_WRITE, remote_addr=1.5)),  # type: ignore[arg-type]
        (aiordma.NotSupportedError, SendWR(2, [], Opcode.TSO)),
        (aiordma.ResourceClosedError, SendWR(2, [piece])),
    ]
    for error, request in wrong:
        for chain in ([good, request], [request, good]):
            with pytest.raises(error):
                client.qp.post_send(chain)
            with pytest.raises(error):
                await client.qp.submit(chain)
    assert client.qp.outstanding == 0
    assert server.cq.poll() == []
    with pytest.raises(aiordma.ResourceClosedError):
        client.qp.post_recv([RecvWR(1, [SGE(client.mr)]), RecvWR(2, [piece])])
    assert client.qp.outstanding == 0
    client.mr.view[:1] = b"!"
    await client.qp.send(SGE(client.mr, 0, 1))
    assert await received(server, 1) == b"!"


async def test_atomic_requests(ends: Ends, is_siw: bool) -> None:
    client, server = ends.client, ends.server
    access = Access.LOCAL_WRITE | Access.REMOTE_ATOMIC
    if is_siw:
        for opcode in (Opcode.ATOMIC_CMP_AND_SWP, Opcode.ATOMIC_FETCH_AND_ADD):
            request = SendWR(sg_list=[SGE(client.mr, 0, 8)], opcode=opcode)
            with pytest.raises(aiordma.NotSupportedError, match="no atomic operations"):
                client.qp.post_send(request)
        await still_works(ends)
        return
    target = server.region(64, access)
    most = (1 << 64) - 1
    piece, addr, rkey = SGE(client.mr, 0, 8), target.addr, target.rkey
    await client.qp.compare_swap(piece, addr, rkey, 0, most)
    await client.qp.fetch_add(piece, addr, rkey, most)  # minus one: it wraps around
    assert int.from_bytes(client.mr.view[:8], "little") == most
    assert int.from_bytes(target.view[:8], "little") == most - 1
    await client.qp.submit([
        SendWR(n, [piece], Opcode.ATOMIC_FETCH_AND_ADD, remote_addr=addr, rkey=rkey, compare_add=n)
        for n in (1, 2, 3)
    ])  # fmt: skip
    assert int.from_bytes(target.view[:8], "little") == 4
    for wrong in (-1, 1 << 64):
        with pytest.raises(ValueError, match=r"compare_add .* 64 bits"):
            await client.qp.fetch_add(piece, addr, rkey, wrong)
        with pytest.raises(ValueError, match=r"swap .* 64 bits"):
            await client.qp.compare_swap(piece, addr, rkey, 0, wrong)
        with pytest.raises(ValueError, match=r"remote_addr .* 64 bits"):
            await client.qp.fetch_add(piece, wrong * 8, rkey, 1)
    with pytest.raises(ValueError, match="not a multiple of 8"):
        await client.qp.fetch_add(piece, addr + 4, rkey, 1)
    with pytest.raises(ValueError, match="one piece of 8 bytes"):
        await client.qp.fetch_add(SGE(client.mr, 0, 16), addr, rkey, 1)
    await still_works(ends)


# Invalidation


async def opened(end: End, is_siw: bool) -> tuple[int, int, list[Resource]]:
    """Address and key of 64 bytes that an invalidation can close, and what to close after it."""
    if is_siw:  # has no windows, and lets a region's own key be invalidated
        region = end.region(64)
        return region.addr, region.rkey, []
    region = end.region(64, ALL | Access.MW_BIND)
    window = MemoryWindow(end.pd, MWType.TYPE_2)
    await window.bind(end.qp, region, access=Access.REMOTE_READ)
    return window.addr, window.rkey, [window]


async def key_is_dead(ends: Ends, addr: int, rkey: int) -> None:
    async with asyncio.timeout(10):
        with pytest.raises(aiordma.CompletionError) as caught:
            await ends.client.qp.read(SGE(ends.client.mr, 0, 8), addr, rkey)
    assert isinstance(caught.value, aiordma.RemoteAccessError | aiordma.FlushedError)


async def test_send_with_invalidate(ends: Ends, is_siw: bool) -> None:
    client, server = ends.client, ends.server
    addr, rkey, parts = await opened(server, is_siw)
    await client.qp.read(SGE(client.mr, 0, 8), addr, rkey)
    server.qp.post_recv([RecvWR(n, [SGE(server.mr, n * 64, 64)]) for n in range(3)])
    client.mr.view[:4] = b"done"
    plain = SendWR(1, [SGE(client.mr, 0, 4)])
    await client.qp.submit([plain])
    await client.qp.send(SGE(client.mr, 0, 4), invalidate=rkey)
    first, second = await completions(server, 2)
    assert first.invalidated_rkey is None
    # Software iWARP's library does not tell it.
    assert second.invalidated_rkey == (None if is_siw else rkey)
    assert second.imm_data is None
    assert bytes(server.mr.view[64:68]) == b"done"
    await key_is_dead(ends, addr, rkey)
    for part in parts:
        part.close()


async def test_local_invalidate(ends: Ends, is_siw: bool) -> None:
    server = ends.server
    if is_siw:  # without windows there is nothing that a program could invalidate
        with pytest.raises(aiordma.NotSupportedError, match="LOCAL_INV"):
            await server.qp.local_invalidate(server.mr.rkey)
        await still_works(ends)
        return
    addr, rkey, parts = await opened(server, is_siw)
    await ends.client.qp.read(SGE(ends.client.mr, 0, 8), addr, rkey)
    await server.qp.local_invalidate(rkey)
    await key_is_dead(ends, addr, rkey)
    for part in parts:
        part.close()
    for wrong in (-1, 1 << 32):
        with pytest.raises(ValueError, match=r"invalidate_rkey .* 32 bits"):
            await server.qp.local_invalidate(wrong)
    with pytest.raises(ValueError, match="what LOCAL_INV can carry is 0"):
        server.qp.post_send(SendWR(1, [SGE(server.mr, 0, 1)], Opcode.LOCAL_INV))
