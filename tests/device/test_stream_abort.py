"""Ends of a stream as TCP's users know them: what the adapter was given arrives."""

from __future__ import annotations

import asyncio

import pytest

import aiordma
from tests.device.streaming import LIMIT_S, Note, noted

pytestmark = pytest.mark.device


async def test_h02_abort_keeps_what_drain_lets_pass(address: str) -> None:
    for size in (0, 1, 50_000):
        async with noted(address) as both:
            both.client.transport.write(b"x" * size)
            assert not both.client.paused
            both.client.transport.abort()
            assert await both.client.ended() is None
            assert await both.server.ended() is None
            assert both.server.data == b"x" * size
            assert both.server.calls[-2:] == ["eof", "lost"]


async def test_h02_a_client_that_aborts_at_once_has_been_there(address: str) -> None:
    made: list[Note] = []
    came = asyncio.Event()

    def factory() -> Note:
        made.append(Note())
        came.set()
        return made[-1]

    async with await aiordma.create_server(factory, address, 0) as server:
        for count in range(1, 51):
            transport, protocol = await aiordma.create_connection(Note, address, server.port)
            transport.abort()
            assert await protocol.ended() is None
            while len(made) < count:
                await asyncio.wait_for(came.wait(), LIMIT_S)
                came.clear()
        for note in made:
            await note.ended()
            assert note.calls[0] == "made"
