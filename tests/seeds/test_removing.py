"""Rows 124 to 132: the end of a connection, and the order in which objects go."""

from __future__ import annotations

import asyncio
import errno
import time

import pytest

import aiordma
from aiordma.cm import EventType
from aiordma.verbs import SGE, QPState, WCStatus
from aiordma.verbs.resource import Resource
from tests.seeds.ends import DEPTH, LIMIT_S, End, Pair, acked, begun

pytestmark = pytest.mark.device


def ordered(end: End) -> tuple[Resource, ...]:
    """What an end has, each before what it was made from."""
    return end.qp, end.mr, end.cq, end.channel, end.pd, end.cm_id


@pytest.mark.parametrize("starts", ["client", "server"])
async def test_j124_either_end_starts(pair: Pair, starts: str) -> None:
    first: End = getattr(pair, starts)
    other = pair.server if first is pair.client else pair.client
    disconnecting = await begun(first.cm_id.disconnect())
    event = await acked(other.events, EventType.DISCONNECTED)
    assert event.connection_id is other.cm_id
    async with asyncio.timeout(LIMIT_S):
        await disconnecting
    assert first.qp.state == other.qp.state == QPState.ERR


async def test_j125_flushed_before_anything_is_removed(pair: Pair) -> None:
    client = pair.client
    client.post_recv(*range(DEPTH))
    await client.cm_id.disconnect()
    flushed = await client.completions(DEPTH)
    assert {wc.status for wc in flushed} == {WCStatus.WR_FLUSH_ERR}
    await acked_if_any(client)
    for part in ordered(client):
        part.destroy()  # which would tell of anything that is left
    await client.cm_id.wait_closed()


async def acked_if_any(end: End) -> None:
    """Acknowledge the events that are there; nothing is lost with the channel."""
    while (event := await end.events.get_event(0)) is not None:
        event.ack()


async def test_j126_the_other_end_removes_its_own(pair: Pair) -> None:
    server = pair.server
    server.post_recv(1)
    await pair.client.cm_id.disconnect()
    pair.client.close()
    await acked(server.events, EventType.DISCONNECTED)
    (flushed,) = await server.completions(1)
    assert flushed.status == WCStatus.WR_FLUSH_ERR
    for part in ordered(server):
        part.destroy()
    await server.cm_id.wait_closed()


async def test_j127_the_other_end_need_not_disconnect(pair: Pair) -> None:
    server = pair.server
    server.post_recv(*range(4))
    waiting = [await begun(server.qp.recv(SGE(server.mr, 512, 64))) for _ in range(4)]
    await pair.client.cm_id.disconnect()
    async with asyncio.timeout(LIMIT_S):
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(outcome, aiordma.FlushedError) for outcome in outcomes)
    assert {wc.status for wc in await server.completions(4)} == {WCStatus.WR_FLUSH_ERR}
    await server.cm_id.disconnect()  # nothing to do, and no error


async def test_j128_the_queue_pair_before_its_id(pair: Pair) -> None:
    client = pair.client
    await client.cm_id.disconnect()
    with pytest.raises(aiordma.RdmaOSError, match="QueuePair") as refused:
        client.cm_id.destroy()
    assert refused.value.errno == errno.EBUSY
    client.cm_id.destroy_qp()
    client.cm_id.destroy()
    await client.cm_id.wait_closed()
    assert client.qp.closed


async def test_j129_the_completion_queue_before_its_channel(pair: Pair) -> None:
    server = pair.server
    with pytest.raises(aiordma.RdmaOSError, match="CompletionQueue") as refused:
        server.channel.destroy()
    assert refused.value.errno == errno.EBUSY
    # It works as before.
    server.post_recv(1)
    await pair.client.qp.send(SGE(pair.client.mr, 0, 16))
    assert await server.channel.get_cq_event(LIMIT_S) is server.cq
    server.cq.ack_events(1)
    server.qp.destroy()
    server.cq.destroy()
    server.channel.destroy()
    await server.channel.wait_closed()


def assert_busy(*parts: Resource) -> None:
    """Neither way to end them is taken while events are not acknowledged."""
    for part in parts:
        for end in (part.close, part.destroy):
            with pytest.raises(aiordma.RdmaOSError, match="not acknowledged") as refused:
                end()
            assert refused.value.errno == errno.EBUSY
            assert not part.closed


async def test_j130_a_completion_channel_with_unacknowledged_events(pair: Pair) -> None:
    server = pair.server
    server.post_recv(1)
    await pair.client.qp.send(SGE(pair.client.mr, 0, 16))
    assert await server.channel.get_cq_event(LIMIT_S) is server.cq
    assert_busy(server.channel, server.cq)
    server.cq.ack_events(1)
    server.channel.close()
    server.cq.close()


async def test_j131_an_event_channel_with_unacknowledged_events(pair: Pair) -> None:
    server = pair.server
    await pair.client.cm_id.disconnect()
    event = await server.events.get_event(LIMIT_S)
    assert event is not None
    assert_busy(server.events, server.cm_id)
    server.events.ack_event(event)
    server.qp.destroy()
    server.cm_id.destroy()
    pair.listener.destroy()
    server.events.destroy()
    await server.events.wait_closed()


@pytest.mark.parametrize("state", ["connected", "disconnected"])
@pytest.mark.parametrize("side", ["client", "server"])
async def test_j132_the_order_of_the_seeds(pair: Pair, side: str, state: str) -> None:
    end: End = getattr(pair, side)
    end.post_recv(*range(DEPTH))
    if state == "disconnected":
        await end.cm_id.disconnect()
    if side == "server":
        pair.listener.close()
    for part in (end.mr, end.cq, end.channel, end.qp, end.pd, end.cm_id, end.events):
        begin = time.monotonic()
        part.close()
        assert time.monotonic() - begin < 3.0, f"closing the {part!r} blocked the loop"
        assert part.closed
    for part in (end.mr, end.cq, end.channel, end.qp, end.pd, end.cm_id, end.events):
        await part.wait_closed(LIMIT_S)
