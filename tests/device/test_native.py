"""The native layer: ids, events, queue pairs and completions by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

import aiordma
from aiordma.cm import (
    ConnectionId,
    EventChannel,
    EventType,
)
from aiordma.verbs import (
    SGE,
    Access,
    MemoryRegion,
    QPState,
    RecvWR,
    WCStatus,
)
from tests.device.shared import has_atomics
from tests.native_ends import End, joined, listening, resolved

pytestmark = pytest.mark.device


@dataclass
class Native:
    """Two connected ends on one event channel."""

    events: EventChannel
    listener: ConnectionId
    client: End
    server: End


@pytest.fixture
async def native(address: str) -> AsyncIterator[Native]:
    def build(cm_id: ConnectionId) -> End:
        end = End(cm_id).build(room=16, max_send_wr=8, max_recv_wr=8, max_send_sge=2)
        end.mr = end.region(4096, Access.LOCAL_WRITE | Access.REMOTE_READ)
        return end

    events = EventChannel()
    listener = listening(events, address)
    client = build(await resolved(events, address, listener.source_port))
    server = await joined(client.cm_id, listener, build)
    yield Native(events, listener, client, server)
    for part in (client, server, listener, events):
        part.close()
    await events.wait_closed()


@pytest.mark.smoke
async def test_read_and_write(native: Native, is_siw: bool) -> None:
    client, server = native.client, native.server
    server.mr.view[:6] = b"remote"
    await client.qp.read(SGE(client.mr, 0, 6), server.mr.addr, server.mr.rkey)
    assert bytes(client.mr.view[:6]) == b"remote"
    # The region was not registered for writing.
    writing = client.qp.write(SGE(client.mr, 0, 6), server.mr.addr, server.mr.rkey)
    if is_siw:
        # iWARP does not acknowledge a write; the refusal ends the connection afterwards.
        await writing
        with pytest.raises(aiordma.CompletionError):
            await client.qp.read(SGE(client.mr, 0, 6), server.mr.addr, server.mr.rkey)
    else:
        with pytest.raises(aiordma.RemoteAccessError):
            await writing
    assert bytes(server.mr.view[:6]) == b"remote"


async def test_disconnect_flushes_and_reaches_both_sides(native: Native) -> None:
    client, server = native.client, native.server
    waiting = [asyncio.create_task(server.qp.recv(server.mr)) for _ in range(3)]
    await asyncio.sleep(0)
    iterator = aiter(native.events)
    await client.cm_id.disconnect()
    kinds = {(await anext(iterator)).type, (await anext(iterator)).type}
    assert kinds == {EventType.DISCONNECTED}
    assert client.qp.state == QPState.ERR
    assert server.qp.state == QPState.ERR
    async with asyncio.timeout(10):
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(outcome, aiordma.FlushedError) for outcome in outcomes)


async def test_what_is_posted_after_the_error_is_flushed_too(native: Native) -> None:
    server = native.server
    server.qp.to_error()
    with pytest.raises(aiordma.FlushedError):
        await server.qp.recv(server.mr)
    server.qp.post_recv(RecvWR(wr_id=3, sg_list=[SGE(server.mr)]))
    (completion,) = server.cq.poll()
    assert completion.wr_id == 3
    assert completion.status == WCStatus.WR_FLUSH_ERR


async def test_closing_a_queue_pair_ends_what_was_posted(native: Native) -> None:
    server = native.server
    waiting = asyncio.create_task(server.qp.recv(server.mr))
    await asyncio.sleep(0)
    server.mr.close()  # in use: stays registered until the queue pair is gone
    server.qp.close()
    async with asyncio.timeout(10):
        with pytest.raises((aiordma.FlushedError, aiordma.ResourceClosedError)):
            await waiting
        await server.mr.wait_closed()
    with pytest.raises(aiordma.ResourceClosedError):
        await server.qp.recv(server.mr)


async def test_an_unknown_status_is_no_crash() -> None:
    assert WCStatus(77).name == "UNKNOWN_77"
    assert EventType(99).name == "UNKNOWN_99"


async def test_atomics(native: Native) -> None:
    client, server = native.client, native.server
    result = SGE(client.mr, 0, 8)
    access = Access.LOCAL_WRITE | Access.REMOTE_ATOMIC
    with MemoryRegion(server.pd, 64, access) as region:
        region.view[:8] = (40).to_bytes(8, "little")
        adding = client.qp.fetch_add(result, region.addr, region.rkey, 2)
        if not has_atomics():
            with pytest.raises(aiordma.NotSupportedError, match="ATOMIC_FETCH_AND_ADD"):
                await adding
            return
        await adding
        assert int.from_bytes(client.mr.view[:8], "little") == 40
        await client.qp.compare_swap(result, region.addr, region.rkey, 42, 7)
        assert int.from_bytes(client.mr.view[:8], "little") == 42
        assert int.from_bytes(region.view[:8], "little") == 7
        with pytest.raises(ValueError, match="not a multiple of 8"):
            await client.qp.fetch_add(result, region.addr + 4, region.rkey, 1)


async def test_a_receive_after_a_failure_ends(native: Native, is_siw: bool) -> None:
    client, server = native.client, native.server
    if is_siw:
        client.qp.to_error()
    else:
        with pytest.raises(aiordma.RemoteAccessError):
            await client.qp.read(SGE(client.mr, 0, 8), server.mr.addr, server.mr.rkey ^ 0xFFFF)
    async with asyncio.timeout(5):
        with pytest.raises(aiordma.FlushedError):
            await client.qp.recv(client.mr)
