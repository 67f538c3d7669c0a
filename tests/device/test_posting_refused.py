"""What is refused before it is posted, and the requests that end access by a key."""

from __future__ import annotations

import asyncio

import pytest

import aiordma
from aiordma.verbs import (
    SGE,
    Access,
    MemoryWindow,
    MWType,
    Opcode,
    RecvWR,
    SendFlags,
    SendWR,
)
from aiordma.verbs.resource import Resource
from tests.device.ends import ALL, End, Ends
from tests.device.posting import (
    completions,
    posting_ends,
    received,
    still_works,
)

pytestmark = [pytest.mark.device, pytest.mark.one_loop]
__all__ = ["posting_ends"]  # the fixture `ends`


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
