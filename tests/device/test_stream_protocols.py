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
        own &= metafunc.function is not test_h04_a_factory_that_raises
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


class Deaf(Bare, asyncio.BufferedProtocol):
    """Gives what it calls a buffer."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer

    def get_buffer(self, sizehint: int) -> Any:
        if isinstance(self.buffer, BaseException):
            raise self.buffer
        return self.buffer

    def buffer_updated(self, nbytes: int) -> None:
        raise AssertionError


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


@pytest.mark.parametrize(
    ("buffer", "error"),
    [
        (LookupError("none today"), LookupError),
        (None, TypeError),
        (bytearray(), RuntimeError),
        (b"read only", (BufferError, TypeError)),
        (memoryview(bytearray(8))[::2], (BufferError, TypeError)),
    ],
    ids=["raises", "none", "empty", "read only", "with gaps"],
)
async def test_h04_buffers_that_are_of_no_use(
    way: Way, reports: list[str], buffer: Any, error: Any
) -> None:
    protocol = Deaf(buffer)
    await ends_both(way, protocol)
    if way.rdma or not isinstance(buffer, memoryview):
        assert isinstance(protocol.lost, error), protocol.lost
    assert len(reports) == 1
    assert "Fatal" in reports[0]


async def test_h04_a_factory_that_raises(way: Way, reports: list[str]) -> None:
    """asyncio's server leaves the client's end to the garbage collector; here it comes at once."""

    def factory() -> Any:
        raise LookupError

    async with way.client_of(factory) as client:
        await client.ended()
    assert client.calls == ["made", "eof", "lost"]
    assert reports == ["LookupError: Error on transport creation for incoming connection"]


async def test_h04_a_connection_made_that_raises(way: Way, reports: list[str]) -> None:
    """The connection goes on, as with any other callback of the loop."""

    class Raises(Note):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            raise LookupError

    made: list[Raises] = []

    def factory() -> Raises:
        made.append(Raises())
        return made[-1]

    async with way.client_of(factory) as client:
        client.transport.write(b"hello")
        await until(lambda: bool(made), LIMIT_S)
        await made[0].received(5)
        client.transport.close()
    assert await made[0].ended() is None
    assert [report.split(":")[0] for report in reports] == ["LookupError"]


async def test_h05_data_received_that_is_replaced(way: Way, reports: list[str]) -> None:
    """Each call is to what the protocol has at that moment."""

    class Changing(Note):
        seen = ""

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self.seen += "1"
            self.data_received = self.second  # type: ignore[method-assign]

        def second(self, data: bytes) -> None:
            Note.data_received(self, data)
            self.seen += "2"
            type(self).data_received = type(self).third  # type: ignore[method-assign]
            del self.data_received

        def third(self, data: bytes) -> None:
            Note.data_received(self, data)
            self.seen += "3"

    made: list[Changing] = []

    def factory() -> Changing:
        made.append(Changing())
        return made[-1]

    async with way.client_of(factory) as client:
        for count in range(1, 5):
            client.transport.write(b"x")
            await until(lambda: bool(made), LIMIT_S)
            await made[0].received(count)
        client.transport.close()
    assert made[0].seen == "1233"
    assert await made[0].ended() is None
    assert not reports
