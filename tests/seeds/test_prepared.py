"""Rows 118 to 123: prepared posts, the stateful verb methods of jVerbs."""

from __future__ import annotations

import tracemalloc

import pytest

import aiordma
from aiordma._ffi import ffi
from aiordma.verbs import SGE, PreparedPost, RecvWR, SendWR, WCStatus
from tests.seeds.ends import DEPTH, Pair

pytestmark = pytest.mark.device


def prepared(pair: Pair) -> tuple[PreparedPost, PreparedPost]:
    """A receive of the server and a send of the client, of 64 bytes."""
    client, server = pair.client, pair.server
    recv = server.qp.prepare_recv(RecvWR(wr_id=1, sg_list=[SGE(server.mr, 0, 64)]))
    send = client.qp.prepare_send(SendWR(wr_id=2, sg_list=[SGE(client.mr, 0, 64)]))
    return recv, send


async def once(pair: Pair, recv: PreparedPost, send: PreparedPost) -> None:
    recv.execute()
    send.execute()
    (received,) = await pair.server.completions(1)
    (sent,) = await pair.client.completions(1)
    assert (received.wr_id, received.byte_len, sent.wr_id) == (1, 64, 2)


async def test_j118_executed_many_times(pair: Pair) -> None:
    recv, send = prepared(pair)
    with recv, send:
        for number in range(1000 // DEPTH):
            pair.client.mr.view[:8] = number.to_bytes(8, "big")
            for _ in range(DEPTH):
                recv.execute()
                send.execute()
            received = await pair.server.completions(DEPTH)
            sent = await pair.client.completions(DEPTH)
            assert {(wc.wr_id, wc.byte_len) for wc in received} == {(1, 64)}
            assert {(wc.wr_id, wc.ok) for wc in sent} == {(2, True)}
            assert bytes(pair.server.mr.view[:8]) == number.to_bytes(8, "big")


async def test_j119_executing_allocates_nothing(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    recv, send = prepared(pair)
    with recv, send:
        for _ in range(DEPTH):
            await once(pair, recv, send)
        made: list[object] = []
        new = ffi.new
        monkeypatch.setattr(ffi, "new", lambda *a: made.append(a) or new(*a))  # type: ignore[func-returns-value]
        grown = 0
        for _ in range(50):
            tracemalloc.start()
            try:
                for _ in range(DEPTH):
                    recv.execute()
                    send.execute()
                grown += tracemalloc.get_traced_memory()[0]
            finally:
                tracemalloc.stop()
            assert not made, "a C structure was made"
            await pair.server.completions(DEPTH)
            await pair.client.completions(DEPTH)
            made.clear()
        pair.server.post_recv(1)  # an ordinary post does
        assert made
        # Less than a byte an execution: now and then a container makes room for its entries.
        assert grown < 50 * 2 * DEPTH


async def test_j120_the_same_data_and_the_same_buffer_again(pair: Pair) -> None:
    recv, send = prepared(pair)
    with recv, send:
        pair.client.mr.view[:64] = bytes(range(64))
        for _ in range(3):
            pair.server.mr.view[:64] = bytes(64)
            await once(pair, recv, send)
            assert bytes(pair.server.mr.view[:64]) == bytes(range(64))


async def test_j121_freed(pair: Pair) -> None:
    recv, send = prepared(pair)
    await once(pair, recv, send)
    for post in (recv, send):
        post.free()
        post.free()
        with pytest.raises(aiordma.ResourceClosedError, match="freed"):
            post.execute()
    assert pair.client.qp.outstanding == pair.server.qp.outstanding == 0


async def test_j122_success_of_the_last_execution(pair: Pair) -> None:
    recv, send = prepared(pair)
    with recv, send:
        for _ in range(DEPTH):
            recv.execute()
            assert recv.is_success
        with pytest.raises(aiordma.RdmaOSError):
            recv.execute()
        assert not recv.is_success
        send.execute()
        await pair.server.completions(1)
        recv.execute()
        assert recv.is_success
        send.free()
        with pytest.raises(aiordma.ResourceClosedError):
            send.execute()
        assert not send.is_success


async def test_j123_sends_and_receives_and_lists_of_them(pair: Pair) -> None:
    client, server = pair.client, pair.server
    recv = server.qp.prepare_recv(
        [RecvWR(wr_id=n, sg_list=[SGE(server.mr, 64 * n, 64)]) for n in range(3)]
    )
    send = client.qp.prepare_send(
        [SendWR(wr_id=n, sg_list=[SGE(client.mr, 64 * n, 64)]) for n in range(3)]
    )
    with recv, send:
        client.mr.view[:192] = bytes(range(192))
        for _ in range(2):
            recv.execute()
            send.execute()
            found = await server.completions(3)
            assert [(wc.wr_id, wc.status) for wc in found] == [
                (n, WCStatus.SUCCESS) for n in range(3)
            ]
            await client.completions(3)
            assert bytes(server.mr.view[:192]) == bytes(range(192))
