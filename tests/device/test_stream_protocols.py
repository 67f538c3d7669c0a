"""Protocols that are incomplete, change, or fail: what becomes of them is what TCP makes of them.

On asyncio's own loop each test runs over its TCP transport as well, with the same expectations.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import aiordma
from tests.device.oracle import until
from tests.device.streaming import LIMIT_S, Note

pytestmark = pytest.mark.device


class Way:
    """How the two ends are connected.

    Attributes:
        reports: Messages of the loop's exception handler.
    """

    def __init__(self, name: str, address: str) -> None:
        self.rdma = name == "rdma"
        self.address = address if self.rdma else "127.0.0.1"
        self.reports: list[str] = []

    async def serve(self, factory: Any) -> Any:
        loop = asyncio.get_running_loop()
        create = aiordma.create_server if self.rdma else loop.create_server
        return await create(factory, self.address, 0)

    async def connect(self, factory: Any, server: Any) -> tuple[Any, Any]:
        loop = asyncio.get_running_loop()
        create = aiordma.create_connection if self.rdma else loop.create_connection
        return await create(factory, self.address, server.sockets[0].getsockname()[1])

    @asynccontextmanager
    async def client_of(self, factory: Any) -> AsyncIterator[Note]:
        """A client of a server with such protocols; it has ended afterwards."""
        server = await self.serve(factory)
        try:
            transport, client = await self.connect(Note, server)
            yield client
            # Where the server has not read everything, TCP answers with a reset.
            ended = await client.ended()
            assert ended is None or (not self.rdma and isinstance(ended, ConnectionResetError))
            assert transport.is_closing()
        finally:
            server.close()
            await server.wait_closed()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Over asyncio's TCP as well; uvloop's has words and ways of its own."""
    if "way" in metafunc.fixturenames:
        own = metafunc.config.getoption("--loop") == "asyncio"
        metafunc.parametrize("way", ["rdma", "tcp"] if own else ["rdma"], indirect=True)


@pytest.fixture
def way(request: pytest.FixtureRequest, address: str) -> Way:
    return Way(request.param, address)


@pytest.fixture
async def reports(way: Way) -> AsyncIterator[list[str]]:
    """Messages of what the loop's exception handler was told, with the types of exceptions."""
    loop = asyncio.get_running_loop()
    before = loop.get_exception_handler()
    loop.set_exception_handler(
        lambda _, context: way.reports.append(
            f"{type(context.get('exception')).__name__}: {context['message']}"
        )
    )
    yield way.reports
    loop.set_exception_handler(before)


class Bare(asyncio.BaseProtocol):
    """Has nothing but a beginning and an end."""

    lost: BaseException | type[Any] | None = Any

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def connection_lost(self, exc: BaseException | None) -> None:
        self.lost = exc


async def ends_both(way: Way, protocol: Bare) -> None:
    """The client's byte is the end of the server's protocol, and the client sees the end."""
    async with way.client_of(lambda: protocol) as client:
        client.transport.write(b"x")
        await until(lambda: protocol.lost is not Any, LIMIT_S)


async def test_h04_a_protocol_without_data_received(way: Way, reports: list[str]) -> None:
    protocol = Bare()
    await ends_both(way, protocol)
    assert isinstance(protocol.lost, AttributeError)
    assert reports == ["AttributeError: Fatal error: protocol.data_received() call failed."]


async def test_h04_a_client_without_data_received(way: Way, reports: list[str]) -> None:
    """It may write, and fails when it is answered."""
    server = await way.serve(Note)
    try:
        transport, protocol = await way.connect(Bare, server)
        transport.write(b"x")
        transport.close()
        await until(lambda: protocol.lost is None, LIMIT_S)
    finally:
        server.close()
        await server.wait_closed()
    assert not reports


async def test_h04_a_protocol_without_eof_received(way: Way, reports: list[str]) -> None:
    protocol = Bare()
    protocol.data_received = len  # type: ignore[attr-defined]
    async with way.client_of(lambda: protocol) as client:
        client.transport.write(b"x")
        client.transport.write_eof()
    await until(lambda: protocol.lost is not Any, LIMIT_S)
    assert isinstance(protocol.lost, AttributeError)
    assert reports == ["AttributeError: Fatal error: protocol.eof_received() call failed."]
