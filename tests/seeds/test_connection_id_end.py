"""Rows 23 to 30: disconnecting, and the end of queue pair and id."""

from __future__ import annotations

import asyncio
import errno

import pytest

import aiordma
from aiordma.cm import ConnectionId, EventChannel, EventType
from aiordma.verbs import QPInitAttr, QPState, WCStatus
from tests.seeds.ends import (
    DEPTH,
    LIMIT_S,
    End,
    Pair,
    acked,
    begun,
    half_way,
    next_event,
    parameters,
)

pytestmark = pytest.mark.device


async def test_j023_disconnecting_moves_to_the_error_state(pair: Pair) -> None:
    before = pair.client.qp.state
    await pair.client.cm_id.disconnect()
    assert (before, pair.client.qp.state) == (QPState.RTS, QPState.ERR)


@pytest.mark.parametrize("side", ["client", "server"])
async def test_j024_disconnecting_flushes_what_is_posted(pair: Pair, side: str) -> None:
    end: End = getattr(pair, side)
    end.post_recv(*range(DEPTH))
    await end.cm_id.disconnect()
    flushed = await end.completions(DEPTH)
    assert [wc.wr_id for wc in flushed] == list(range(DEPTH))
    assert {wc.status for wc in flushed} == {WCStatus.WR_FLUSH_ERR}
    assert end.qp.outstanding == 0


@pytest.mark.parametrize("side", ["client", "server"])
async def test_j025_either_end_may_disconnect(pair: Pair, side: str) -> None:
    """The peer's id gets DISCONNECTED, and its queue pair flushes the posted receives."""
    other: End = pair.server if side == "client" else pair.client
    end: End = getattr(pair, side)
    other.post_recv(5, 6)
    hearing = await begun(next_event(other.events, EventType.DISCONNECTED))
    await end.cm_id.disconnect()
    (await hearing).ack()
    assert (end.qp.state, other.qp.state) == (QPState.ERR, QPState.ERR)
    flushed = await other.completions(2)
    assert [(wc.wr_id, wc.status_name) for wc in flushed] == [
        (5, "WR_FLUSH_ERR"), (6, "WR_FLUSH_ERR")
    ]  # fmt: skip


@pytest.mark.parametrize("side", ["client", "server"])
async def test_j026_disconnected_arrives_at_both_ends(pair: Pair, side: str) -> None:
    watched = [(end, aiter(end.events)) for end in (pair.client, pair.server)]
    end: End = getattr(pair, side)
    await end.cm_id.disconnect()
    async with asyncio.timeout(LIMIT_S):
        for watching, events in watched:
            event = await anext(events)
            assert event.type == EventType.DISCONNECTED
            assert event.connection_id is watching.cm_id


async def test_j027_the_queue_pair_is_destroyed_through_its_id(address: str) -> None:
    async with half_way(address) as (_, client, _):
        client.cm_id.destroy_qp()
        assert client.qp.closed
        await client.qp.wait_closed()
        with pytest.raises(aiordma.ResourceClosedError):
            client.qp.query()


async def test_j028_an_id_without_its_queue_pair_is_of_no_use(address: str) -> None:
    async with half_way(address) as (listener, client, _):
        cm_id = client.cm_id
        cm_id.destroy_qp()
        for step in (
            lambda: cm_id.resolve_addr((address, listener.source_port)),
            lambda: cm_id.resolve_route(),
            lambda: cm_id.connect(parameters()),
            lambda: cm_id.accept(parameters()),
            lambda: cm_id.disconnect(),
        ):
            with pytest.raises(OSError, match="EINVAL"):
                await step()
        with pytest.raises(OSError, match="EINVAL"):
            cm_id.create_qp(client.pd, QPInitAttr(send_cq=client.cq))
        with pytest.raises(OSError, match="EINVAL"):
            cm_id.listen()
        cm_id.destroy()
        await cm_id.wait_closed()


async def test_j029_destroying_ends_what_is_under_way(address: str) -> None:
    with EventChannel() as events:
        cm_id = ConnectionId(events)
        resolving = await begun(cm_id.resolve_addr((address, 7471), timeout=60))
        cm_id.destroy()
        with pytest.raises(aiordma.ResourceClosedError):
            await resolving
        await cm_id.wait_closed()


async def test_j029_destroying_ends_a_pending_connect(address: str) -> None:
    # The server takes the request and never answers.
    async with half_way(address) as (_, client, server_events):
        connecting = await begun(client.cm_id.connect(parameters(), timeout=None))
        request = await acked(server_events, EventType.CONNECT_REQUEST)
        client.cm_id.destroy_qp()
        client.cm_id.close()
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(aiordma.ResourceClosedError):
                await connecting
        assert request.connection_id is not None
        request.connection_id.close()


async def test_j030_queue_pair_and_connection_end_before_the_id(pair: Pair) -> None:
    client = pair.client
    with pytest.raises(aiordma.RdmaOSError) as refused:
        client.cm_id.destroy()
    assert refused.value.errno == errno.EBUSY
    # It is as usable as before.
    receiving = await begun(pair.server.qp.recv(pair.server.mr))
    await client.qp.send(client.mr)
    assert (await receiving).ok
    await client.cm_id.disconnect()
    with pytest.raises(aiordma.RdmaOSError, match="QueuePair"):
        client.cm_id.destroy()
    client.cm_id.destroy_qp()
    client.cm_id.destroy()
    await client.cm_id.wait_closed()
