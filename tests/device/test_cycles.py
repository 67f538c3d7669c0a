"""Kept exceptions and views in cycles, with the collector at nearly every allocation: no crash, and
the error that a program gets is the real one."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from typing import Any

import pytest

import aiordma
from aiordma import Connection, ConnectionConfig, Message
from aiordma.verbs import Access, MemoryRegion, ProtectionDomain
from tests.device.meeting import Pair
from tests.device.oracle import collect

pytestmark = pytest.mark.device

SIZES = (1, 5_000, 100_000, 1_000_000)
LIMIT_S = 20.0


@pytest.fixture
def eager_collector() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(1, 3, 3)
    yield
    gc.set_threshold(*before)


class Server:
    """The README's echo server, but that it keeps the exceptions of its clients in cycles."""

    def __init__(self, *, releases: bool) -> None:
        self.errors: list[type[BaseException]] = []
        self.received = 0
        self.more = asyncio.Condition()
        self._releases = releases

    async def echo(self, conn: Connection) -> None:
        try:
            async with conn:
                async for message in conn:
                    async with self.more:
                        self.received += 1
                        self.more.notify_all()
                    if self._releases:
                        with message:
                            await conn.send(message)
                    else:
                        await conn.send(message)
        except BaseException as exc:
            error = exc  # which has this frame
            self.errors.append(type(error))
            if not isinstance(error, ConnectionError):
                raise

    async def serve(self, listener: aiordma.Listener, clients: asyncio.TaskGroup) -> None:
        async for conn in listener:
            clients.create_task(self.echo(conn))

    async def has(self, count: int) -> None:
        async with asyncio.timeout(LIMIT_S), self.more:
            await self.more.wait_for(lambda: self.received >= count)


async def ask_and_go(address: str, port: int, server: Server, size: int, after: int) -> None:
    """Have echoes wait for a client that never reads them, and goes."""
    before = server.received

    async def ask(client: Connection) -> None:
        while True:
            await client.send(bytes(size))

    # With room for the buffer of one echo, which is larger than its bytes, or for four of those
    # that fit into a slot: the next one waits.
    config = ConnectionConfig(recv_depth=4, receive_buffer_size=max(2 * size, 4096))
    client = await aiordma.connect(address, port, config=config)
    asking = asyncio.create_task(ask(client))
    await server.has(before + after)
    client.abort()
    with pytest.raises(ConnectionError):
        await asking
    await client.close()


@pytest.mark.parametrize("releases", [False, True])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.usefixtures("eager_collector")
async def test_a00_an_echo_server_that_keeps_the_errors_of_its_clients(
    address: str, size: int, releases: bool
) -> None:
    server = Server(releases=releases)
    async with aiordma.listen(address, 0) as listener:
        async with asyncio.TaskGroup() as clients:
            serving = clients.create_task(server.serve(listener, clients))
            for after in (1, 4) if size <= 5_000 else (1, 2):
                await ask_and_go(address, listener.port, server, size, after)
            listener.close()
            await serving
        assert len(server.errors) >= 2
        collect()


async def received(pair: Pair, size: int) -> Message:
    asking = asyncio.create_task(pair[0].send(b"x" * size))
    message = await pair[1].recv()
    await asking
    return message


async def test_a00_a_view_outlives_its_connection(pair: Pair) -> None:
    found: list[Any] = [memoryview(await received(pair, size)) for size in SIZES]
    found.append(found)
    await pair[1].close()
    assert [bytes(view) for view in found[:-1]] == [b"x" * size for size in SIZES]
    del found
    collect()


@pytest.mark.parametrize("size", [100, 100_000])
@pytest.mark.parametrize("writes", [False, True])
async def test_a00b_a_buffer_is_free_after_a_failed_transfer(
    pair: Pair, size: int, writes: bool
) -> None:
    client, server = pair
    data = bytearray(size)
    async with server.expose(size, read=True, write=True) as remote:
        pass  # over already: the peer's adapter refuses
    error: BaseException | None = None
    try:
        if writes:
            await client.write(remote, data)
            await client.read(remote, bytearray(1))  # iWARP has said yes to the write
        else:
            await client.read(remote, data)
    except OSError as exc:
        error = exc
    await client.close()
    await client.wait_closed()
    data.clear()
    assert error is not None


async def test_a00_regions_over_views_in_cycles(pd: ProtectionDomain) -> None:
    for view in (memoryview(bytearray(5000))[100:], memoryview(bytearray(64)).cast("I")):
        region = MemoryRegion(pd, view, Access.LOCAL_WRITE)
        found: list[Any] = [view, region.view, memoryview(region.view), region]
        found.append(found)
        region.close()
        await region.wait_closed()
        del region, found, view
        collect()
