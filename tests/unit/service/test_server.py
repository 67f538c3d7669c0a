"""serve(): whom a server that stops waits for, and what it says of them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from aiordma import Server
from tests.inside.service import tell_of_handlers_after

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
