"""Cancel at every await of connect, accept, send, recv, close: nothing hangs, leaks or gets lost.

Each scenario runs once for every suspension k that it has, and is canceled at the k-th, in two
ways: at once, and in the very moment in which what it waits for is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import pytest

import aiordma
from aiordma import Connection, ConnectionConfig
from aiordma.link import dialing
from aiordma_softroce.network import ADDRESS_V6
from tests.device.meeting import Pair, are_alive, paired, part
from tests.device.oracle import settle, until
from tests.device.stepping import Steps, for_every_step, run_canceled
from tests.inside.core import exports_of, is_released
from tests.inside.endpoint import exposer_of

pytestmark = [pytest.mark.device, pytest.mark.virtual_time]

CONFIG = ConnectionConfig(recv_depth=4, send_depth=4, slot_size=4096, rendezvous_threshold=0)


async def served(listener: aiordma.Listener, *clients: Connection) -> None:
    """The listener has accepted these clients, too, in any order, and canceled ones; close all."""
    waiting = {client.get_extra_info("sockname"): client for client in clients}
    async for server in listener:
        client = waiting.pop(server.get_extra_info("peername"), None)
        if client is None:
            await server.close()
            continue
        await are_alive((client, server))
        await part(client, server)
        if not waiting:
            return
    pytest.fail("they were not accepted")


async def test_connect(address: str, late: bool) -> None:
    async def scenario(steps: Steps) -> None:
        async with aiordma.listen(address, 0, config=CONFIG) as listener:

            async def connect() -> Connection:
                return await aiordma.connect(address, listener.port, config=CONFIG)

            client = await run_canceled(connect(), steps)
            if client is not None:
                server = await listener.accept()
                await are_alive((client, server))
                await part(client, server)
            # The listener is unharmed.
            client = await aiordma.connect(address, listener.port, config=CONFIG)
            await served(listener, client)

    # The way, and the answer.
    assert await for_every_step(scenario, late=late) >= 2


@pytest.mark.parametrize("delay", [0.25, 0])
async def test_connect_to_a_name_with_two_addresses(
    address: str, late: bool, delay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is dead, so that both are under way at a time; or both are the listener's."""
    hosts = ["10.80.0.77" if delay else ADDRESS_V6, address]

    async def look_up(host: str, port: int) -> list[tuple[str, int]]:
        return [(found, port) for found in (hosts if host == "two" else [host])]

    monkeypatch.setattr(dialing, "look_up", look_up)

    async def scenario(steps: Steps) -> None:
        async with aiordma.listen(None, 0, config=CONFIG) as listener:

            async def connect(host: str = "two") -> Connection:
                return await aiordma.connect(
                    host, listener.port, config=CONFIG, happy_eyeballs_delay=delay
                )

            client = await run_canceled(connect(), steps)
            clients = [client] if client is not None else []
            clients.append(await connect(address))  # the listener is unharmed
            await served(listener, *clients)

    # Both attempts may have ended when the first of them is seen.
    assert await for_every_step(scenario, late=late) >= 2


async def test_accept(address: str, late: bool) -> None:
    async def scenario(steps: Steps) -> None:
        async with aiordma.listen(address, 0, config=CONFIG) as listener:
            connecting = asyncio.create_task(connect_to(listener))
            server = await run_canceled(listener.accept(), steps)
            if server is None:
                server = await listener.accept()  # no connection is lost
            client = await connecting
            assert client is not None
            await are_alive((client, server))
            await part(client, server)

    async def connect_to(listener: aiordma.Listener) -> Connection:
        return await aiordma.connect(address, listener.port, config=CONFIG)

    assert await for_every_step(scenario, late=late) >= 1


async def test_accept_of_a_request(address: str, late: bool) -> None:
    async def scenario(steps: Steps) -> None:
        async with aiordma.listen(address, 0, config=CONFIG) as listener:
            requests = listener.requests()

            async def connect() -> Connection | None:
                try:
                    return await aiordma.connect(address, listener.port, config=CONFIG)
                except OSError:
                    return None

            connecting = asyncio.create_task(connect())
            request = await anext(requests)
            server = await run_canceled(request.accept(), steps)
            client = await connecting
            if server is None:
                if client is not None:
                    with pytest.raises(ConnectionError):
                        await client.recv()
            else:
                assert client is not None
                await are_alive((client, server))
            await part(client, server)

    assert await for_every_step(scenario, late=late) >= 1


@pytest.fixture
async def small_pair(address: str) -> AsyncIterator[Pair]:
    async with paired(address, CONFIG) as ends:
        yield ends


async def test_recv_loses_nothing(small_pair: Pair, late: bool) -> None:
    client, server = small_pair
    got = 0
    # Each message is sent when the one before has been received, so that each recv() waits.
    turns = asyncio.Semaphore(1)

    def check(message: aiordma.Message) -> None:
        nonlocal got
        got += 1
        turns.release()
        assert int.from_bytes(bytes(message)[:4], "big") == got

    async def scenario(steps: Steps) -> None:
        first = got + 1

        async def send_three() -> None:
            for number in range(first, first + 3):
                await turns.acquire()
                await client.send(number.to_bytes(4, "big") * (2000 if number % 2 else 1))

        async def recv_three() -> None:
            for _ in range(3):
                check(await server.recv())

        sending = asyncio.create_task(send_three())
        await run_canceled(recv_three(), steps)
        while got < first + 2:
            check(await server.recv())
        await sending

    assert await for_every_step(scenario, late=late, complete=False) >= 3


async def test_send(small_pair: Pair, late: bool) -> None:
    client, server = small_pair
    number = 0

    async def scenario(steps: Steps) -> None:
        nonlocal number
        first = number + 1

        async def send_many() -> None:
            nonlocal number
            for _ in range(7):
                number += 1
                await client.send(number.to_bytes(4, "big") * (2500 if number % 3 == 0 else 1))

        async def recv_all() -> list[int]:
            # Late, so that the sender has to wait for credits.
            await asyncio.sleep(0.2)
            numbers = []
            while (message := bytes(await server.recv())) != b"end":
                numbers.append(int.from_bytes(message[:4], "big"))
            return numbers

        receiving = asyncio.create_task(recv_all())
        await run_canceled(send_many(), steps)
        await client.send(b"end")
        received = await receiving
        # In order and without a gap; only the canceled message may be missing.
        assert received == list(range(first, first + len(received)))
        assert number - (first + len(received) - 1) in (0, 1)
        if not steps.canceled:
            assert len(received) == 7

    assert await for_every_step(scenario, late=late, complete=False) >= 3


async def test_close(address: str, late: bool) -> None:
    async def scenario(steps: Steps) -> None:
        async with aiordma.listen(address, 0, config=CONFIG) as listener:
            client = await aiordma.connect(address, listener.port, config=CONFIG)
            server = await listener.accept()
            await client.send(b"last words")
            large = asyncio.create_task(_quietly(client.send(bytes(300_000))))
            await asyncio.sleep(0)
            await run_canceled(client.close(), steps)
            assert client.is_closing()
            await large
            await client.wait_closed()
            await client.close()
            if not steps.canceled:
                assert bytes(await server.recv()) == b"last words"
            await server.close()

    assert await for_every_step(scenario, late=late) >= 1


async def _quietly(operation: Awaitable[None]) -> None:
    with contextlib.suppress(OSError):
        await operation


async def test_memory_stays_pinned_until_the_peer_has_read_it(address: str) -> None:
    config = ConnectionConfig(slot_size=4096, rendezvous_threshold=0, receive_buffer_size=64 * 1024)
    async with paired(address, config) as (client, server):
        # The peer fetches one large message ahead, and the next only when that was taken.
        await client.send(bytes(10_000))
        data = bytearray(os.urandom(500_000))  # not copied
        expected = bytes(data)
        sending = asyncio.create_task(client.send(data))
        done, _ = await asyncio.wait([sending], timeout=2)
        assert not done
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        with pytest.raises(BufferError):
            data.append(0)  # the adapter may still read it
        assert len(await server.recv()) == 10_000
        assert bytes(await server.recv()) == expected
        async with asyncio.timeout(10):
            while True:
                try:
                    data.append(0)
                except BufferError:
                    await asyncio.sleep(0.05)
                else:
                    break


async def test_memory_of_a_canceled_send_is_free_after_close(address: str) -> None:
    config = ConnectionConfig(
        slot_size=4096, rendezvous_threshold=0, receive_buffer_size=64 * 1024, close_timeout_s=1
    )
    async with aiordma.listen(address, 0, config=config) as listener:
        client = await aiordma.connect(address, listener.port, config=config)
        server = await listener.accept()
        await client.send(bytes(10_000))
        data = bytearray(500_000)  # not copied
        sending = asyncio.create_task(client.send(data))
        await asyncio.wait([sending], timeout=1)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        await client.close()
        await server.close()
        await settle()
        data.append(0)


@pytest.mark.parametrize("how", ["release", "block", "view"])
async def test_a00_a_message_of_a_canceled_send_can_be_released(address: str, how: str) -> None:
    """The library reads it on behind the program: what arrives is whole, whatever comes next."""
    config = ConnectionConfig(slot_size=4096, rendezvous_threshold=0, receive_buffer_size=64 * 1024)
    first, second = os.urandom(500_000), os.urandom(500_000)
    async with (
        asyncio.timeout(60),
        aiordma.listen(address, 0, config=config) as listener,
        aiordma.connect(address, listener.port, config=config) as source,
        await listener.accept() as relay,
        aiordma.connect(address, listener.port, config=config) as onward,
        await listener.accept() as sink,
    ):
        # The peer fetches one large message ahead, and the next only when that was taken.
        await onward.send(bytes(10_000))
        sends = [asyncio.create_task(source.send(data)) for data in (first, second)]
        message = await relay.recv()
        data: Any = memoryview(message) if how == "view" else message
        sending = asyncio.create_task(onward.send(data))
        await until(lambda: len(exposer_of(onward)) == 1)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        if how == "view":
            with pytest.raises(BufferError):
                message.release()
            data.release()
        if how == "block":
            with message:
                pass
        else:
            message.release()
        assert is_released(message)
        assert exports_of(message)
        assert bytes(await relay.recv()) == second
        assert len(await sink.recv()) == 10_000
        assert bytes(await sink.recv()) == first
        await until(lambda: not exports_of(message))
        await asyncio.gather(*sends)


async def test_a00_a_message_that_was_written_can_be_released(address: str) -> None:
    """At once, although its memory is deregistered by a thread; with a cache, too."""
    for cache in (0, 1 << 20):
        config = ConnectionConfig(registration_cache_size=cache)
        async with (
            asyncio.timeout(60),
            paired(address, config) as (client, server),
        ):
            target = bytearray(200_000)
            for _ in range(5):
                data = os.urandom(200_000)
                sending = asyncio.create_task(client.send(data))
                async with client.expose(target, write=True) as remote:
                    with await server.recv() as message:
                        await server.write(remote, message)
                assert target == data
                await sending
