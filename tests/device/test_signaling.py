"""Signaled and unsignaled requests, raw and in lists that are awaited."""

from __future__ import annotations

import asyncio

import pytest

import aiordma
from aiordma.verbs import (
    SGE,
    Opcode,
    QPState,
    RecvWR,
    SendFlags,
    SendWR,
    WorkCompletion,
)
from tests.device.ends import Ends, connected
from tests.device.posting import (
    DEPTH,
    NO_FLAGS,
    completions,
    posting_ends,
    sends,
)

pytestmark = [pytest.mark.device, pytest.mark.one_loop]
__all__ = ["posting_ends"]  # the fixture `ends`


# Signaled and unsignaled


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
