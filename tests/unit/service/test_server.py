"""serve(): whom a server that stops waits for, and what it says of them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from aiordma import Server
from tests.inside.service import tell_of_handlers_after

from ..conftest import cancel_at_every_turn, settle

LINE = r"the server stops, and waits up to \S+ s for the handlers of (\d+) connections?"


class FakeConnection:
    """A connection whose peer answers the close when the test says so."""

    def __init__(self) -> None:
        self.over = asyncio.Event()
        self.answered = asyncio.Event()

    def _stop_receiving(self) -> None:
        self.over.set()

    async def __aenter__(self) -> FakeConnection:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.answered.wait()


class FakeListener:
    """A listener that has these connections, and gets no others."""

    def __init__(self, connections: list[FakeConnection]) -> None:
        self._connections = connections
        self._closed = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[FakeConnection]:
        for connection in self._connections:
            yield connection
        await self._closed.wait()

    def close(self) -> None:
        self._closed.set()

    async def wait_closed(self) -> None:
        await self._closed.wait()


@pytest.mark.parametrize("working", [0, 1, 2])
async def test_only_handlers_that_run_are_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, working: int
) -> None:
    """A connection that is closing takes as long as its peer, and has no handler any more."""
    tell_of_handlers_after(monkeypatch, 0)
    connections = [FakeConnection() for _ in range(3)]
    finish, returned = asyncio.Event(), asyncio.Semaphore(0)

    async def handler(connection: Any) -> None:
        await connection.over.wait()
        if connections.index(connection) < working:
            await finish.wait()
        returned.release()

    listener: Any = FakeListener(connections)
    server = Server(listener, handler, grace_s=60)
    while len(server.connections) < len(connections):  # noqa: ASYNC110
        await asyncio.sleep(0)
    for connection in connections:
        connection.over.set()
    for _ in connections[working:]:
        await returned.acquire()
    stopping = asyncio.create_task(server.stop())
    if working:
        while not caplog.messages:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        finish.set()
    for _ in range(100):  # turns in which it could tell of the others
        await asyncio.sleep(0)
    for connection in connections:
        connection.answered.set()
    await stopping
    told = [re.match(LINE, message) for message in caplog.messages]
    assert [found and int(found[1]) for found in told] == ([working] if working else [])


@pytest.mark.parametrize("again", [False, True])
async def test_a_canceled_stop_waits_for_the_end_of_handlers(again: bool) -> None:
    """However often it is canceled, as by a cancel scope of anyio."""
    connections = [FakeConnection() for _ in range(3)]
    ended = 0

    async def handler(connection: Any) -> None:
        nonlocal ended
        try:
            await asyncio.Event().wait()
        finally:
            await settle()  # as one that has something to put in order
            ended += 1

    listener: Any = FakeListener(connections)
    server = Server(listener, handler, grace_s=60)
    for connection in connections:
        connection.answered.set()
    while len(server.connections) < len(connections):  # noqa: ASYNC110
        await asyncio.sleep(0)
    stopping = asyncio.create_task(server.stop())
    await settle()
    stopping.cancel()
    if again:
        await cancel_at_every_turn(stopping)
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert ended == len(connections)
    assert not server.connections


async def test_a_handler_may_stop_its_server() -> None:
    """It is canceled as any other, and the end does not wait for a call that waits for it."""
    connection = FakeConnection()
    connection.answered.set()
    stopped = asyncio.Event()

    async def handler(_: Any) -> None:
        try:
            await asyncio.create_task(server.stop())  # a task of the handler's is the same
        finally:
            stopped.set()

    listener: Any = FakeListener([connection])
    server = Server(listener, handler, grace_s=0.01)
    await stopped.wait()
    await server.stop()
    assert not server.connections
