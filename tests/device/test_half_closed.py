"""The end of the messages of one side, while the other goes on; and messages of several buffers."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

import aiordma
from aiordma import ConnectionConfig, ConnectionEndedError, PeerGoneError, ResourceClosedError
from tests.device.meeting import Pair, paired
from tests.device.oracle import until
from tests.inside.endpoint import exposer_of

pytestmark = pytest.mark.device

SIZES = (1, 5000, 60_000, 300_000, 2 << 20)


@pytest.mark.smoke
async def test_answers_come_behind_the_end_of_the_questions(pair: Pair) -> None:
    """A service that answers when it has heard everything, as with a half-closed TCP stream."""
    client, server = pair

    async def serve() -> None:
        heard = [bytes(message) async for message in server]
        for each in heard:
            await server.send(each[::-1])
        await server.send_eof()

    async with asyncio.TaskGroup() as group:
        group.create_task(serve())
        sent = [bytes([n % 251]) * size for n, size in enumerate(SIZES)]
        for each in sent:
            await client.send(each)
        await client.send_eof()
        await client.send_eof()
        assert not client.is_closing()
        with pytest.raises(ResourceClosedError, match="send_eof"):
            await client.send(b"too late")
        with pytest.raises(ResourceClosedError, match="send_eof"):
            await client.send(b"x" * 300_000)
        answers = [bytes(message) async for message in client]
    assert answers == [each[::-1] for each in sent]
    for end in pair:
        with pytest.raises(ConnectionEndedError):
            await end.recv()


async def test_many_messages_come_behind_the_end(pair: Pair) -> None:
    """The side that sends no more still returns credits, and is asked whether it is there."""
    client, server = pair
    await client.send_eof()

    async def answer() -> None:
        for number in range(2000):
            await server.send(number.to_bytes(4, "big"))
        await server.close()

    async with asyncio.TaskGroup() as group:
        group.create_task(answer())
        numbers = [int.from_bytes(bytes(message), "big") async for message in client]
    assert numbers == list(range(2000))


LIMIT_S = 120
#: The end has overtaken an acknowledgement in one of a few hundred rounds, on a busy machine.
ROUNDS = 40


async def ask_and_close(host: str, sizes: tuple[int, ...], **options: Any) -> None:
    """The half-close of the tutorial under `serve`: the server leaves as soon as it has answered.

    The client's calls find a connection whose end has arrived, mostly, and everything else before.
    """

    async def answer(conn: aiordma.Connection) -> None:
        heard = [len(question) async for question in conn]
        await conn.send(repr(heard).encode())
        await conn.flush()

    async with aiordma.serve(answer, host, 0) as server, asyncio.timeout(LIMIT_S):
        for _ in range(ROUNDS):
            async with aiordma.connect(host, server.sockname[1], **options) as conn:
                for size in sizes:
                    await conn.send(bytes(size))
                await conn.send_eof()
                answers = [bytes(each) async for each in conn]
                await conn.flush()
                await conn.send_eof()
            assert answers == [repr(list(sizes)).encode()]


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 1), (60_000, 600_000)], ids=["small", "large"])
async def test_the_end_comes_behind_what_has_arrived(address: str, sizes: tuple[int, ...]) -> None:
    await ask_and_close(address, sizes)


@pytest.mark.two_hosts
async def test_the_end_comes_behind_what_has_arrived_from_another_host(address: str) -> None:
    other = os.environ["AIORDMA_SOFTROCE_ADDR2"]
    await ask_and_close(address, (1, 1, 1, 1, 1), local_addr=(other, 0))


async def test_the_end_waits_for_large_messages(pair: Pair) -> None:
    client, server = pair
    sending = asyncio.create_task(client.send(b"x" * 900_000))
    await until(lambda: len(exposer_of(client)) == 1)
    ending = asyncio.create_task(client.send_eof())
    (await server.recv()).release()
    await sending
    await ending
    with pytest.raises(ConnectionEndedError):
        await server.recv()


async def test_the_peer_is_lost_after_the_end(pair: Pair) -> None:
    client, server = pair
    await client.send_eof()
    server.abort()
    with pytest.raises(PeerGoneError, match="aborted"):
        await client.recv()
    await client.send_eof()  # which it has, before the abort
    with pytest.raises(ConnectionError):
        await client.send(b"more")


async def test_a_raw_connection_has_no_end_of_messages(address: str) -> None:
    async with paired(address, ConnectionConfig(raw=True)) as (client, _):
        with pytest.raises(aiordma.NotSupportedError, match="raw"):
            await client.send_eof()


# -- several buffers


# -- handles


async def test_a_listener_closes_its_connections(address: str) -> None:
    async with aiordma.listen(address, 0) as listener:
        clients = [await aiordma.connect(address, listener.port) for _ in range(3)]
        servers = [await listener.accept() for _ in clients]
        assert listener.connections == set(servers)
        await clients[0].close()
        await servers[0].close()
        assert listener.connections == set(servers[1:])
        listener.close_clients()
        for client, server in zip(clients[1:], servers[1:], strict=True):
            with pytest.raises(ConnectionEndedError):
                await client.recv()
            await server.wait_closed()
            await client.close()
        assert not listener.connections
        async with aiordma.connect(address, listener.port) as client:
            server = await listener.accept()
            listener.abort_clients()
            with pytest.raises(PeerGoneError, match="aborted"):
                await client.recv()
            await server.close()


async def test_a_lease_shows_its_memory_while_it_is_open(pair: Pair) -> None:
    client, server = pair
    lease = server.expose(4096, read=True, write=True)
    with pytest.raises(ResourceClosedError, match="not open"):
        _ = lease.view
    async with lease as remote:
        lease.view[:4] = b"seen"
        assert lease.region == remote
        page = await client.register(4096)
        assert await client.read(remote[:4], page[100:104]) == 4
        assert bytes(page.view[100:104]) == b"seen"
        await client.write(remote, page[96:104], offset=8)
        assert bytes(lease.view[12:16]) == b"seen"
        with pytest.raises(TypeError, match="slices"):
            _ = page[3]  # type: ignore[index]
        with pytest.raises(ValueError, match="step"):
            _ = page[::2]
        page.close()
    assert lease.region is None
    with pytest.raises(ResourceClosedError, match="not open"):
        _ = lease.view


async def test_a_lease_names_nothing_when_the_connection_is_over(pair: Pair) -> None:
    client, server = pair
    async with server.expose(4096, read=True) as remote:
        assert remote
    lease = server.expose(4096, read=True)
    async with lease:
        client.abort()
        await server.wait_closed()
        assert lease.region is None
