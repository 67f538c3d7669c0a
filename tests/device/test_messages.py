"""Messages between two ends on a real device."""

from __future__ import annotations

import array
import asyncio
import contextlib
import hashlib
import os
import random
from collections.abc import Callable
from typing import Any

import pytest

import aiordma
from aiordma import ConnectionConfig
from tests.device.meeting import Pair, are_alive, meet, paired, talk_both_ways
from tests.device.oracle import until
from tests.device.shared import name_of_device
from tests.inside.endpoint import ask_for_inline, link_of, state_of

pytestmark = pytest.mark.device


@pytest.mark.smoke
async def test_a_message_and_its_answer(pair: Pair) -> None:
    client, server = pair
    await client.send(b"ping", imm=7)
    message = await server.recv()
    assert bytes(message) == b"ping"
    assert message.imm == 7
    await server.send(b"pong")
    answer = await client.recv()
    assert answer == b"pong"
    assert answer.imm is None


@pytest.mark.smoke
async def test_sizes_on_both_sides_of_every_limit(pair: Pair) -> None:
    client, server = pair
    eager = client.config.eager_size
    sizes = [0, 1, 2, 63, eager - 1, eager, eager + 1, eager + 15, eager + 16, eager + 17]
    sizes += [65_536, (1 << 20) - 1, (1 << 20) + 1]
    for size in sizes:
        data = os.urandom(size)
        sending = asyncio.create_task(client.send(data))
        message = await server.recv()
        assert len(message) == size
        assert hashlib.sha256(message).digest() == hashlib.sha256(data).digest()
        await sending


async def test_a_message_of_a_slot_is_a_single_send(address: str, *, is_siw: bool) -> None:
    """Without a header; software iWARP has no immediate to put kind and credits into."""
    size = 1024
    config = ConnectionConfig(slot_size=size, recv_depth=8, send_depth=8)  # all slots at once
    async with paired(address, config) as (client, server):
        for imm, sends in ((None, 1 + is_siw), (5, 2)):
            before = state_of(client).sent
            await client.send(bytes(size), imm=imm)
            assert state_of(client).sent - before == sends
            with await server.recv() as message:
                assert (bytes(message), message.imm) == (bytes(size), imm)


async def test_many_buffer_types(pair: Pair) -> None:
    client, server = pair
    for buffer in (
        b"abcd",
        bytearray(b"abcd"),
        memoryview(b"xxabcdxx")[2:6],
        array.array("I", [0x64636261]),
    ):
        await client.send(buffer)
        assert bytes(await server.recv()) == b"abcd"


async def test_order_is_kept_between_small_and_large(pair: Pair) -> None:
    client, server = pair
    rng = random.Random(20)
    sizes = [rng.choice((1, 100, 20_000, 300_000)) for _ in range(60)]

    async def send_all() -> None:
        for number, size in enumerate(sizes):
            await client.send(number.to_bytes(4, "big") * (size // 4 + 1), imm=number)

    sending = asyncio.create_task(send_all())
    for number, size in enumerate(sizes):
        message = await server.recv()
        assert message.imm == number
        assert len(message) == 4 * (size // 4 + 1)
        assert bytes(message)[-4:] == number.to_bytes(4, "big")
    await sending


async def test_both_directions_at_once(pair: Pair) -> None:
    await talk_both_ways(pair, 150, lambda rng: rng.randrange(0, 60_000))


async def test_a_slow_receiver_slows_the_sender_down(pair: Pair) -> None:
    client, server = pair
    depth = client.config.recv_depth
    sent = 0

    async def send_all() -> None:
        nonlocal sent
        for _ in range(3 * depth):
            await client.send(b"x")
            sent += 1

    sending = asyncio.create_task(send_all())
    await until(lambda: sent == depth)
    await client.flush()
    done, _ = await asyncio.wait([sending], timeout=0.5)
    assert not done
    assert sent == depth
    for _ in range(3 * depth):
        (await server.recv()).release()
    await sending


async def test_a_message_is_valid_until_it_is_released(pair: Pair) -> None:
    client, server = pair
    await client.send(b"first")
    message = await server.recv()
    view = memoryview(message)
    with pytest.raises(BufferError):
        message.release()
    assert view.tobytes() == b"first"
    view.release()
    message.release()
    message.release()
    assert len(message) == 5
    with pytest.raises(ValueError, match="released"):
        bytes(message)


async def test_flush_means_that_the_peer_has_it(pair: Pair) -> None:
    client, server = pair
    for _ in range(10):
        await client.send(b"y" * 1000)
    await client.flush()
    for _ in range(10):
        async with asyncio.timeout(5):
            await server.recv()


async def test_the_bytes_are_safe_to_change_after_send(pair: Pair) -> None:
    client, server = pair
    for size in (100, 200_000):
        buffer = bytearray(b"a" * size)
        receiving = asyncio.create_task(server.recv())
        await client.send(buffer)
        buffer[:] = b"b" * size
        buffer.append(0)  # and to resize: nothing is exported any more
        assert bytes(await receiving) == b"a" * size


async def test_the_end_of_the_stream(pair: Pair) -> None:
    client, server = pair
    for number in range(5):
        await client.send(bytes([number]))
    await client.close()
    got = [bytes(message) async for message in server]
    assert got == [bytes([number]) for number in range(5)]
    with pytest.raises(aiordma.ConnectionEndedError):
        await server.recv()


async def test_close_waits_for_a_large_message_to_be_read(pair: Pair) -> None:
    client, server = pair
    data = os.urandom(2_000_000)
    sending = asyncio.create_task(client.send(data))
    message = await server.recv()
    await sending
    await client.close()
    assert bytes(message) == data


async def test_raw_messages(address: str) -> None:
    config = ConnectionConfig(raw=True, slot_size=4096)
    async with paired(address, config) as (client, server):
        await client.send(b"plain")
        assert bytes(await server.recv()) == b"plain"
        with pytest.raises(aiordma.MessageTooLargeError):
            await client.send(bytes(4097))
        await server.send(bytes(4096))
        assert len(await client.recv()) == 4096


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("way", ["abort", "exception"])
async def test_messages_that_were_sent_arrive_before_an_abort(
    address: str, raw: bool, way: str
) -> None:
    """Those that wait for the end of the turn, too: `send` has taken them."""
    config = ConnectionConfig(raw=raw, slot_size=4096)
    async with aiordma.listen(address, 0, config=config) as listener:
        client, server = await meet(listener, address, config=config)
        await client.send(b"first")
        assert bytes(await server.recv()) == b"first"
        with contextlib.suppress(ValueError):
            async with client:
                for number in range(20):
                    await client.send(bytes([number]))
                if way == "exception":
                    raise ValueError
                client.abort()
        received = [bytes(await server.recv()) for _ in range(20)]
        assert received == [bytes([number]) for number in range(20)]
        with pytest.raises(aiordma.ConnectionLostError):
            await server.recv()
        await server.close()


async def test_extra_info_names_what_is_used(pair: Pair, address: str, is_siw: bool) -> None:
    client, server = pair
    assert client.get_extra_info("peername") == (address, server.get_extra_info("sockname")[1])
    assert client.get_extra_info("device") == name_of_device(is_siw)
    assert client.get_extra_info("port") == 1
    assert client.get_extra_info("backend") == "rdma"
    assert client.get_extra_info("nothing", 5) == 5
    assert client.get_extra_info("mtu") >= 256


async def test_an_adapter_with_no_room_for_inline_data(
    address: str, is_siw: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It refuses the queue pair, and says no more than that."""
    ask_for_inline(monkeypatch, 1 << 20)
    async with paired(address) as (client, server):
        assert is_siw or link_of(client).state.facts()["inline_size"] < 1 << 20
        await are_alive((client, server))


async def test_a_loop_has_no_timer_because_of_connections_and_streams(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With one it would ask for the time twice a turn, and sleep with a limit: for every message.
    loop = asyncio.get_running_loop()
    set_here: list[asyncio.TimerHandle] = []

    def noted(method: Callable[..., asyncio.TimerHandle]) -> Callable[..., asyncio.TimerHandle]:
        def call(*args: Any, **kwargs: Any) -> asyncio.TimerHandle:
            set_here.append(method(*args, **kwargs))
            return set_here[-1]

        return call

    is_open = asyncio.Event()  # before, the handshake at the server has its limit

    async def until_the_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_open.set()
        await reader.read()
        writer.close()

    monkeypatch.setattr(loop, "call_later", noted(loop.call_later))
    monkeypatch.setattr(loop, "call_at", noted(loop.call_at))
    async with (
        paired(address) as (client, server),
        await aiordma.start_server(until_the_end, address, 0) as streams,
    ):
        port = streams.sockets[0].getsockname()[1]
        _, writer = await aiordma.open_connection(address, port)
        await is_open.wait()
        async with server.expose(bytearray(64), read=True) as lent:
            await client.read(lent, bytearray(64))
        await client.send(b"ping")
        assert bytes(await server.recv()) == b"ping"
        assert set_here, "connecting itself is bounded"
        # What has run is no longer the loop's: on a machine with other load, steps of the limit.
        waiting = [handle for handle in set_here if handle.when() > loop.time()]
        assert not [handle for handle in waiting if not handle.cancelled()]
        writer.close()
        await writer.wait_closed()
