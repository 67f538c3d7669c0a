"""What was posted is flushed, and why is not known yet: nothing may look as if it had gone well."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

import aiordma
from aiordma import Connection, RemoteRegion
from tests.device.meeting import paired
from tests.inside.endpoint import awaits_reason, cause_of, ending_of, link_of, peer_left, state_of

pytestmark = pytest.mark.device


@dataclass
class Pair:
    """A connection, the peer's end of it, and memory of the peer's."""

    client: Connection
    server: Connection
    remote: RemoteRegion


@pytest.fixture
async def pair(address: str) -> AsyncIterator[Pair]:
    async with (
        paired(address) as (client, server),
        server.expose(bytearray(64), read=True) as remote,
    ):
        assert await client.read(remote, bytearray(8)) == 8
        yield Pair(client, server, remote)


def _break(connection: Connection) -> None:
    """As when the adapter gives up without a word: all is flushed, and no reason is there."""
    link_of(connection).to_error()


async def test_a_read_that_is_flushed_knows_why_the_connection_ended(pair: Pair) -> None:
    async with asyncio.timeout(20):
        _break(pair.client)
        with pytest.raises(aiordma.ConnectionLostError) as lost:
            await pair.client.read(pair.remote, bytearray(8))
        reason = str(lost.value)
        assert reason != "the connection is lost"
        with pytest.raises(aiordma.ConnectionLostError, match=re.escape(reason)):
            await pair.client.send(b"x")


async def _flushed(connection: Connection) -> None:
    """Wait until the flush of a message is seen; mostly the reason is not known by then."""
    state, link = state_of(connection), link_of(connection)
    _break(connection)
    await connection.send(b"into the void")
    while cause_of(connection) is None:
        if awaits_reason(connection) and state.completed == state.sent:
            return
        link.completions.sweep()
        await asyncio.sleep(0)


async def test_a_flush_does_not_take_what_was_flushed_for_sent(pair: Pair) -> None:
    async with asyncio.timeout(20):
        await _flushed(pair.client)
        with pytest.raises(aiordma.ConnectionLostError):
            await pair.client.flush()


async def test_who_sends_waits_for_the_reason(pair: Pair) -> None:
    async with asyncio.timeout(20):
        await _flushed(pair.client)
        with pytest.raises(aiordma.ConnectionLostError):
            await pair.client.send(b"x")
        with pytest.raises(aiordma.ConnectionLostError):
            await pair.client.send(bytes(300_000))


async def test_a_canceled_wait_for_the_reason_leaves_nothing(pair: Pair) -> None:
    async with asyncio.timeout(20):
        await _flushed(pair.client)
        reading = asyncio.ensure_future(pair.client.read(pair.remote, bytearray(8)))
        sending = asyncio.ensure_future(pair.client.send(b"x"))
        await asyncio.sleep(0)
        reading.cancel()
        sending.cancel()
        ended = await asyncio.gather(reading, sending, return_exceptions=True)
        assert all(
            isinstance(error, (asyncio.CancelledError, aiordma.ConnectionLostError))
            for error in ended
        )
        with pytest.raises(aiordma.ConnectionLostError):
            await pair.client.recv()


async def test_a_close_that_is_canceled_ends_who_waits(pair: Pair) -> None:
    """Whoever cancels all tasks of a loop cancels the one that closes, too."""
    async with asyncio.timeout(20):
        await _flushed(pair.client)
        flushing = asyncio.ensure_future(pair.client.flush())
        closing = asyncio.ensure_future(pair.client.close())
        await asyncio.sleep(0)
        task = ending_of(pair.client)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises((aiordma.ConnectionLostError, aiordma.ResourceClosedError)):
            await flushing
        await asyncio.gather(closing, return_exceptions=True)


async def test_nothing_is_said_to_a_peer_that_has_left(pair: Pair) -> None:
    """Its disconnection is read when the end has begun, and before its first step."""
    async with asyncio.timeout(20):
        closing = asyncio.ensure_future(pair.client.close())
        await asyncio.sleep(0)
        sent = state_of(pair.client).sent
        peer_left(pair.client)
        await closing
        assert state_of(pair.client).sent == sent
