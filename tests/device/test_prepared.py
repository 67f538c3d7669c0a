"""Prepared posts: executed many times, patched in place, freed; the accounting stays exact."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import aiordma
from aiordma.verbs import (
    SGE,
    Opcode,
    PreparedPost,
    QPState,
    RecvWR,
    SendFlags,
    SendWR,
    WCStatus,
    prepared,
)
from tests.device.ends import Ends
from tests.device.oracle import collect, until
from tests.device.posting import DEPTH, NO_FLAGS, completions, numbers, posting_ends
from tests.inside.verbs import set_executions

pytestmark = [pytest.mark.device, pytest.mark.one_loop]
__all__ = ["posting_ends"]  # the fixture `ends`

# Executing


@pytest.mark.smoke
async def test_a_list_with_one_signaled_tail(ends: Ends) -> None:
    client, server = ends.client, ends.server
    addr, rkey = server.mr.addr, server.mr.rkey
    chain = [
        SendWR(n, [SGE(client.mr, n * 8, 8)], Opcode.RDMA_WRITE, NO_FLAGS, 0, addr + n * 8, rkey)
        for n in range(3)
    ]
    chain.append(SendWR(99, [SGE(client.mr, 0, 1)]))
    with client.qp.prepare_send(chain) as send:
        for turn in range(5):
            server.qp.post_recv([RecvWR(n, [SGE(server.mr, 1000, 8)]) for n in range(2)])
            for half in range(2):
                client.mr.view[:24] = bytes([turn * 2 + half + 1]) * 24
                send.execute()
                if half:  # two executions are under way at once: as many as the queue holds
                    assert await numbers(client, 2) == [99, 99]
                    await numbers(server, 2)
                    assert bytes(server.mr.view[:24]) == bytes(client.mr.view[:24])
        assert client.qp.outstanding == 0
    assert client.cq.poll() == []


async def test_a_full_queue(ends: Ends) -> None:
    client, server = ends.client, ends.server
    server.qp.post_recv([RecvWR(n, [SGE(server.mr, 0, 8)]) for n in range(DEPTH)])
    with client.qp.prepare_send(SendWR(1, [SGE(client.mr, 0, 1)])) as send:
        for _ in range(DEPTH):
            send.execute()
        # Nobody has looked at the completions: the places are still taken.
        with pytest.raises(aiordma.RdmaOSError, match="0 free places"):
            send.execute()
        assert not send.is_success
        assert client.qp.outstanding == DEPTH
        assert await numbers(client, DEPTH) == [1] * DEPTH
        assert await numbers(server, DEPTH) == list(range(DEPTH))
        server.qp.post_recv(RecvWR(7, [SGE(server.mr, 0, 8)]))
        assert send.execute().is_success
        assert await numbers(client, 1) == [1]
        assert await numbers(server, 1) == [7]


async def test_prepared_beside_all_other_posts(ends: Ends) -> None:
    client, server = ends.client, ends.server
    with (
        server.qp.prepare_recv([RecvWR(n, [SGE(server.mr, n * 8, 8)]) for n in range(5)]) as recv,
        client.qp.prepare_send(SendWR(4, [SGE(client.mr, 24, 1)])) as send,
    ):
        for _ in range(20):
            client.mr.view[:40:8] = b"abcde"
            recv.execute()
            sending = asyncio.create_task(client.qp.send(SGE(client.mr, 0, 1)))
            await asyncio.sleep(0)
            client.qp.post_send(SendWR(3, [SGE(client.mr, 8, 1)]))
            group = client.qp.submit([SendWR(0, [SGE(client.mr, 16, 1)])])
            submitting = asyncio.create_task(group)
            await asyncio.sleep(0)
            send.execute()
            await client.qp.send(SGE(client.mr, 32, 1))
            await asyncio.gather(sending, submitting)
            assert await numbers(client, 2) == [3, 4]
            assert await numbers(server, 5) == [0, 1, 2, 3, 4]
            assert bytes(server.mr.view[:40:8]) == b"abcde"
            assert client.qp.outstanding == server.qp.outstanding == 0


async def test_more_executions_than_their_number_has_bits(ends: Ends) -> None:
    client = ends.client
    flags = SendFlags.SIGNALED
    addr, rkey = ends.server.mr.addr, ends.server.mr.rkey
    write = SendWR(1, [SGE(client.mr, 0, 1)], Opcode.RDMA_WRITE, flags, 0, addr, rkey)
    with client.qp.prepare_send(write) as send:
        set_executions(send, (1 << 16) - 4)
        for number in range(10):
            assert send.patch(wr_id=number).execute().is_success
            if number % 2:
                assert await numbers(client, 2) == [number - 1, number]
        set_executions(send, (1 << 32) - 4)
        for number in range(10):
            send.patch(wr_id=number).execute()
            assert await numbers(client, 1) == [number]
        assert "executions=6" in repr(send)
    assert client.qp.outstanding == 0


# Refused


async def test_what_cannot_be_prepared(ends: Ends) -> None:
    client = ends.client
    piece = SGE(client.mr, 0, 1)
    with pytest.raises(ValueError, match="1 to 8"):
        client.qp.prepare_send([])
    with pytest.raises(ValueError, match="1 to 8"):
        client.qp.prepare_recv([])
    with pytest.raises(ValueError, match="1 to 8"):
        client.qp.prepare_send([SendWR(1, [piece])] * 9)
    with pytest.raises(ValueError, match=r"limits\.max_send_sge"):
        client.qp.prepare_send(SendWR(1, [piece] * 99))
    with pytest.raises(aiordma.NotSupportedError):
        client.qp.prepare_send(SendWR(1, [piece], Opcode.TSO))
    assert len(client.channel.table) == 0


async def test_unsignaled_executions_cannot_fill_the_queue(ends: Ends) -> None:
    client = ends.client
    addr, rkey = ends.server.mr.addr, ends.server.mr.rkey
    write = SendWR(1, [SGE(client.mr, 0, 1)], Opcode.RDMA_WRITE, NO_FLAGS, 0, addr, rkey)
    with client.qp.prepare_send(write) as quiet:
        for _ in range(3):
            for _ in range(DEPTH - 1):
                quiet.execute()
            with pytest.raises(ValueError, match="could never complete"):
                quiet.execute()
            assert not quiet.is_success
            await client.qp.write(SGE(client.mr, 0, 1), addr, rkey)
            assert client.qp.outstanding == 0
        never = client.qp.prepare_send([write] * DEPTH)
        with pytest.raises(ValueError, match="could never complete"):
            never.execute()
    assert client.cq.poll() == []


# Failures


async def test_an_unsignaled_execution_that_fails(ends: Ends, is_siw: bool) -> None:
    client, server = ends.client, ends.server
    read = SendWR(
        0, [SGE(client.mr, 0, 1)], Opcode.RDMA_READ, NO_FLAGS, 0, server.mr.addr, server.mr.rkey
    )
    with client.qp.prepare_send(read) as quiet:
        # The fourth of seven equal requests fails; each failure tells the number of its own.
        for number in range(7):
            key = server.mr.rkey ^ (0x5A00 if number == 3 else 0)
            quiet.patch(wr_id=number, rkey=key).execute()
        got = await completions(client, 4)
        assert [wc.wr_id for wc in got] == [3, 4, 5, 6]
        statuses = [wc.status for wc in got]
        assert statuses[1:] == [WCStatus.WR_FLUSH_ERR] * 3
        if not is_siw:  # which gives no reason, and does not flush everything
            assert statuses[0] == WCStatus.REM_ACCESS_ERR
            assert client.qp.outstanding == 0
        assert client.qp.state == QPState.ERR
        # Later ones are flushed without the adapter, as those of ordinary posts.
        assert quiet.patch(wr_id=50).execute().is_success
        (late,) = await completions(client, 1)
        assert late.wr_id == 50
        assert late.status == WCStatus.WR_FLUSH_ERR


async def test_a_post_that_fails(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    client = ends.client
    send = client.qp.prepare_send(SendWR(1, [SGE(client.mr, 0, 1)]))

    class Failing:
        def aio_execute(self, post: Any) -> int:
            post.executions += 1
            return 22

    monkeypatch.setattr(prepared, "lib", Failing())
    with pytest.raises(OSError, match="ibv_post_send: EINVAL"):
        send.execute()
    assert not send.is_success
    # It may have been queued all the same: the memory stays until the queue pair is gone.
    assert client.qp.state == QPState.ERR
    assert client.qp.outstanding == 1
    assert send.execute().is_success  # flushed without the adapter
    assert (await completions(client, 1))[0].status == WCStatus.WR_FLUSH_ERR
    send.free()
    client.mr.close()
    await asyncio.sleep(0.05)
    with pytest.raises(TimeoutError):
        await client.mr.wait_closed(0.05)
    client.qp.close()
    await client.mr.wait_closed(10)


# Life


async def test_free_lets_executions_under_way_go_on(ends: Ends) -> None:
    client, server = ends.client, ends.server
    region = server.region(64)
    receive = server.qp.prepare_recv(RecvWR(3, [SGE(region, 0, 8)]))
    receive.execute()
    receive.execute()
    receive.free()
    receive.free()
    for use in (receive.execute, receive.patch):
        with pytest.raises(aiordma.ResourceClosedError, match="was freed"):
            use()
    assert not receive.is_success
    region.close()  # under the adapter's hands: it stays registered
    with pytest.raises(TimeoutError):
        await region.wait_closed(0.05)
    client.mr.view[:3] = b"abc"
    for _ in range(2):
        await client.qp.send(SGE(client.mr, 0, 3))
        assert await numbers(server, 1) == [3]
    await region.wait_closed(10)
    await until(lambda: len(server.channel.table) == 0)


async def test_memory_is_pinned_until_it_is_freed(ends: Ends) -> None:
    client = ends.client
    region = client.region(64)
    with client.qp.prepare_send(SendWR(1, [SGE(region, 0, 8)])) as send:
        region.close()
        with pytest.raises(TimeoutError):
            await region.wait_closed(0.05)
        with pytest.raises(aiordma.ResourceClosedError, match="MemoryRegion is closed"):
            send.execute()
        assert not send.is_success
        assert client.qp.outstanding == 0
    await region.wait_closed(10)


@pytest.mark.parametrize("under_way", [0, 2])
async def test_closing_the_queue_pair_frees(ends: Ends, under_way: int) -> None:
    server = ends.server
    region = server.region(64)
    receive = server.qp.prepare_recv(RecvWR(3, [SGE(region, 0, 8)]))
    for _ in range(under_way):
        receive.execute()
    server.qp.close()
    with pytest.raises(aiordma.ResourceClosedError):
        receive.execute()
    region.close()
    await region.wait_closed(10)
    receive.free()
    await server.qp.wait_closed(10)
    await until(lambda: len(server.channel.table) == 0)


async def test_freed_by_the_garbage_of_nobody(ends: Ends) -> None:
    """A prepared post that nobody holds lives as long as its queue pair."""
    client, server = ends.client, ends.server
    receive: PreparedPost | None = server.qp.prepare_recv(RecvWR(8, [SGE(server.mr, 0, 8)]))
    assert receive is not None
    receive.execute()
    receive = None
    collect()
    await client.qp.send(SGE(client.mr, 0, 3))
    assert await numbers(server, 1) == [8]
