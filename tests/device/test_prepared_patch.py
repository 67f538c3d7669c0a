"""Prepared posts that are patched in place between two executions."""

from __future__ import annotations

from typing import Any

import pytest

import aiordma
from aiordma.verbs import (
    SGE,
    Access,
    MemoryRegion,
    Opcode,
    RecvWR,
    SendFlags,
    SendWR,
)
from tests.device.ends import Ends
from tests.device.posting import DEPTH, completions, numbers, posting_ends
from tests.inside.verbs import holds_on

pytestmark = [pytest.mark.device, pytest.mark.one_loop]
__all__ = ["posting_ends"]  # the fixture `ends`

# Patching


async def test_offset_length_and_number(ends: Ends, is_siw: bool) -> None:
    client, server = ends.client, ends.server
    client.mr.view[:26] = b"abcdefghijklmnopqrstuvwxyz"
    receive = server.qp.prepare_recv(RecvWR(0, [SGE(server.mr, 0, 64)]))
    send = client.qp.prepare_send(SendWR(0, [SGE(client.mr, 0, 26), SGE(client.mr, 0, 1)]))
    sizes = [(0, 26), (25, 1), (3, 5), (10, 0), (0, 4096)]
    if is_siw:
        sizes.remove((10, 0))
        with pytest.raises(aiordma.NotSupportedError, match="empty piece"):
            send.patch(offset=10, length=0)
    for number, (offset, length) in enumerate(sizes, 1 << 63):
        if offset + length > 64:
            receive.patch(length=4096 - 64)
            length = 100
        receive.patch(wr_id=number, offset=number & 7).execute()
        send.patch(wr_id=number, offset=offset, length=length)
        send.patch(piece=1, offset=20, length=3).execute()
        (got,) = await completions(server, 1)
        (sent,) = await completions(client, 1)
        assert got.wr_id == sent.wr_id == number
        assert got.byte_len == length + 3
        start = number & 7
        expected = bytes(client.mr.view[offset : offset + length]) + b"uvw"
        assert bytes(server.mr.view[start : start + length + 3]) == expected


async def test_numbers_of_executions_under_way_stay(ends: Ends) -> None:
    client, server = ends.client, ends.server
    receives = [RecvWR(0, [SGE(server.mr, 0, 8)]), RecvWR(0, [SGE(server.mr, 8, 8)])]
    receive = server.qp.prepare_recv(receives)
    send = client.qp.prepare_send(SendWR(0, [SGE(client.mr, 0, 1)]))
    for number in range(4):
        receive.patch(0, wr_id=number * 10).patch(1, wr_id=number * 10 + 1).execute()
    receive.patch(0, wr_id=777).patch(1, wr_id=778)
    for number in range(DEPTH):
        send.patch(wr_id=number + 100).execute()
    assert await numbers(server, DEPTH) == [0, 1, 10, 11, 20, 21, 30, 31]
    assert await numbers(client, DEPTH) == list(range(100, 100 + DEPTH))


async def test_remote_address_and_key(ends: Ends, is_siw: bool) -> None:
    client, server = ends.client, ends.server
    other = server.region(64)
    write = SendWR(
        1, [SGE(client.mr, 0, 4)], Opcode.RDMA_WRITE, SendFlags.SIGNALED | SendFlags.INLINE,
        remote_addr=server.mr.addr, rkey=server.mr.rkey,
    )  # fmt: skip
    read = SendWR(
        2, [SGE(client.mr, 64, 4)], Opcode.RDMA_READ,
        remote_addr=server.mr.addr, rkey=server.mr.rkey,
    )  # fmt: skip
    with client.qp.prepare_send(write) as writing, client.qp.prepare_send(read) as reading:
        targets = [(server.mr, 0), (server.mr, 400), (other, 12)]
        for number, (region, offset) in enumerate(targets):
            client.mr.view[:4] = number.to_bytes(4, "big")
            writing.patch(remote_addr=region.addr + offset, rkey=region.rkey).execute()
            client.mr.view[:4] = b"----"  # an inline request has its own copy
            reading.patch(remote_addr=region.addr + offset, rkey=region.rkey).execute()
            assert await numbers(client, 2) == [1, 2]
            assert bytes(client.mr.view[64:68]) == number.to_bytes(4, "big")
            assert bytes(region.view[offset : offset + 4]) == number.to_bytes(4, "big")
    if is_siw:
        return
    target = server.region(64, Access.LOCAL_WRITE | Access.REMOTE_ATOMIC)
    atomics = [
        SendWR(n, [SGE(client.mr, 0, 8)], opcode, remote_addr=target.addr, rkey=target.rkey)
        for n, opcode in enumerate((Opcode.ATOMIC_FETCH_AND_ADD, Opcode.ATOMIC_CMP_AND_SWP))
    ]
    with client.qp.prepare_send(atomics) as post:
        post.patch(compare_add=5).patch(1, compare_add=5, swap=(1 << 64) - 1).execute()
        assert await numbers(client, 2) == [0, 1]
        assert target.view[:8].tobytes() == b"\xff" * 8
        changes: list[dict[str, Any]] = [
            {"length": 7}, {"length": 16}, {"remote_addr": target.addr + 4}
        ]  # fmt: skip
        for change in changes:
            with pytest.raises(ValueError, match=r"8 bytes|multiple of 8"):
                post.patch(**change)
    server.qp.post_recv([RecvWR(n, [SGE(server.mr, 0, 8)]) for n in range(2)])
    message = SendWR(1, [SGE(client.mr, 0, 1)], Opcode.SEND_WITH_IMM, imm_data=1)
    with client.qp.prepare_send(message) as post:
        post.execute().patch(imm_data=0xFFFFFFFF).execute()
        assert [wc.imm_data for wc in await completions(server, 2)] == [1, 0xFFFFFFFF]
        await numbers(client, 2)


async def test_a_wrong_patch_changes_nothing(ends: Ends) -> None:
    client, server = ends.client, ends.server
    client.mr.view[:4] = b"same"
    server.qp.post_recv([RecvWR(n, [SGE(server.mr, 0, 64)]) for n in range(3)])
    send = client.qp.prepare_send(SendWR(4, [SGE(client.mr, 0, 4)]))
    receive = server.qp.prepare_recv(RecvWR(4, [SGE(server.mr, 0, 4)]))
    inline = client.qp.prepare_send(SendWR(4, [SGE(client.mr, 0, 4)], send_flags=SendFlags.INLINE))
    changes: list[dict[str, Any]] = [
        {"wr_id": 1 << 64}, {"wr_id": -1}, {"offset": -1}, {"length": -1}, {"offset": 4093},
        {"length": 4097}, {"offset": 1 << 64}, {"wr_id": 5, "length": 4097},
        {"wr_id": 5, "rkey": 1}, {"remote_addr": 8}, {"imm_data": 1}, {"swap": 1},
        {"compare_add": 1},
    ]  # fmt: skip
    for change in changes:
        for post in (send, receive):
            with pytest.raises(ValueError, match=r"64 bits|not inside|has no"):
                post.patch(**change)
    most = client.qp.limits.max_inline_data
    with pytest.raises(ValueError, match=r"limits\.max_inline_data"):
        inline.patch(length=most + 1)
    places: list[dict[str, Any]] = [{"request": 1}, {"request": -1}, {"piece": 1}, {"piece": -1}]
    for where in places:
        with pytest.raises(IndexError, match="there is no"):
            send.patch(**where, offset=0)
    with pytest.raises(TypeError, match="whole number"):
        send.patch(wr_id=1.5)  # type: ignore[arg-type]
    send.execute()
    assert await numbers(client, 1) == [4]
    (got,) = await completions(server, 1)
    assert got.byte_len == 4
    assert bytes(server.mr.view[:4]) == b"same"


async def test_later_changes_of_the_request_have_no_effect(ends: Ends) -> None:
    client, server = ends.client, ends.server
    server.qp.post_recv(RecvWR(1, [SGE(server.mr, 0, 64)]))
    pieces = [SGE(client.mr, 0, 4)]
    request = SendWR(9, pieces)
    with client.qp.prepare_send(request) as send:
        request.wr_id = 10
        request.opcode = Opcode.RDMA_WRITE
        pieces[0] = SGE(client.mr, 100, 50)
        send.execute()
        assert await numbers(client, 1) == [9]
        assert (await completions(server, 1))[0].byte_len == 4
        with pytest.raises(ValueError, match="SEND has no rkey"):
            send.patch(rkey=1)


# Regions and flags


async def test_a_region_takes_the_place_of_another(ends: Ends) -> None:
    client, server = ends.client, ends.server
    server.qp.post_recv([RecvWR(n, [SGE(server.mr, 64 * n, 64)]) for n in range(3)])
    first, second = (MemoryRegion(client.pd, bytearray(text)) for text in (b"first", b"second"))
    send = client.qp.prepare_send(SendWR(7, [SGE(first)]))
    send.execute()
    send.patch(region=second, length=6)
    first.close()  # registered until the execution that uses it has completed
    send.execute().patch(offset=1, length=5).execute()
    got = await completions(server, 3)
    await completions(client, 3)
    await first.wait_closed()
    texts = [
        bytes(server.mr.view[64 * n : 64 * n + (wc.byte_len or 0)]) for n, wc in enumerate(got)
    ]
    assert texts == [b"first", b"second", b"econd"]
    assert holds_on(second) == 1  # the post; neither the executions nor the patches
    send.free()
    assert holds_on(second) == 0
    second.close()


async def test_a_replaced_region_stays_while_an_execution_uses_it(ends: Ends) -> None:
    """And the receive that has replaced it completes into the other."""
    client, server = ends.client, ends.server
    before, after = MemoryRegion(server.pd, 64), MemoryRegion(server.pd, 64)
    receive = server.qp.prepare_recv(RecvWR(1, [SGE(before)])).execute()
    receive.patch(region=after, wr_id=2).execute()
    assert (holds_on(before), holds_on(after)) == (1, 1)
    for text in (b"one", b"two"):
        with MemoryRegion(client.pd, bytearray(text)) as region:
            await client.qp.send(region)
    assert await numbers(server, 2) == [1, 2]
    assert (bytes(before.view[:3]), bytes(after.view[:3])) == (b"one", b"two")
    assert (holds_on(before), holds_on(after)) == (0, 1)
    receive.free()
    for region in (before, after):
        region.close()


async def test_wrong_regions(ends: Ends) -> None:
    client, server = ends.client, ends.server
    post = client.qp.prepare_send(SendWR(1, [SGE(client.mr, 0, 8)]))
    small, closed = client.region(4), MemoryRegion(client.pd, 64)
    closed.close()
    wrong: list[tuple[Any, type[Exception], str]] = [
        (server.mr, ValueError, "another protection domain"),
        (small, ValueError, "8"),
        (closed, aiordma.ResourceClosedError, "closed"),
        (bytearray(8), TypeError, "region has to be a MemoryRegion"),
    ]
    for region, error, words in wrong:
        with pytest.raises(error, match=words):
            post.patch(wr_id=9, region=region)
    server.qp.post_recv(RecvWR(5, [SGE(server.mr, 0, 64)]))
    client.mr.view[:8] = b"the same"
    post.execute()
    assert await numbers(client, 1) == [1]
    assert await numbers(server, 1) == [5]
    assert bytes(server.mr.view[:8]) == b"the same"


async def test_flags(ends: Ends) -> None:
    client, server = ends.client, ends.server
    server.qp.post_recv([RecvWR(n, [SGE(server.mr, 0, 64)]) for n in range(4)])
    post = client.qp.prepare_send(SendWR(1, [SGE(client.mr, 0, 8)]))
    # Inline: the bytes may be changed as soon as it is posted.
    client.mr.view[:8] = b"in place"
    post.patch(send_flags=SendFlags.SIGNALED | SendFlags.INLINE).execute()
    client.mr.view[:8] = b"too late"
    await completions(client, 1)
    await completions(server, 1)
    assert bytes(server.mr.view[:8]) == b"in place"
    # Without SIGNALED there is no completion, and the next one ends it.
    post.patch(wr_id=2, send_flags=SendFlags(0)).execute()
    await completions(server, 1)
    assert client.cq.poll() == []
    assert client.qp.outstanding == 1
    with pytest.raises(aiordma.RdmaOSError, match="SIGNALED cannot change"):
        post.patch(send_flags=SendFlags.SIGNALED)
    client.qp.post_send(SendWR(3, [SGE(client.mr, 0, 8)]))
    assert await numbers(client, 1) == [3]
    await completions(server, 1)
    post.patch(wr_id=4, send_flags=SendFlags.SIGNALED).execute()
    assert await numbers(client, 1) == [4]
    assert client.qp.outstanding == 0


async def test_wrong_flags(ends: Ends) -> None:
    client, server = ends.client, ends.server
    large = client.qp.prepare_send(SendWR(1, [SGE(client.mr, 0, 4096)]))
    with pytest.raises(ValueError, match="4096 bytes cannot be inline"):
        large.patch(send_flags=SendFlags.SIGNALED | SendFlags.INLINE)
    large.patch(length=8, send_flags=SendFlags.SIGNALED | SendFlags.INLINE)
    with pytest.raises(ValueError, match="4096 bytes cannot be inline"):
        large.patch(length=4096)
    read = client.qp.prepare_send(
        SendWR(1, [SGE(client.mr, 0, 8)], Opcode.RDMA_READ, remote_addr=server.mr.addr)
    )
    with pytest.raises(ValueError, match="cannot be inline"):
        read.patch(send_flags=SendFlags.INLINE)
    receive = server.qp.prepare_recv(RecvWR(1, [SGE(server.mr)]))
    with pytest.raises(ValueError, match="no send_flags"):
        receive.patch(send_flags=SendFlags.SIGNALED)
    with pytest.raises(TypeError, match="send_flags"):
        large.patch(send_flags="signaled")  # type: ignore[arg-type]
