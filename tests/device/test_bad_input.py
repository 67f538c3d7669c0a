"""Bad input gets a clear error at the call that was wrong, and harms nothing."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import aiordma
from aiordma import Connection, ConnectionConfig
from tests.device.meeting import Pair, are_alive

pytestmark = pytest.mark.device


async def test_what_is_no_buffer(pair: Pair) -> None:
    client, _ = pair
    wrong: Any
    for wrong in ("text", 5, None, object(), [1, 2], [b"x", "text"]):
        with pytest.raises(TypeError):
            await client.send(wrong)
    with pytest.raises(ValueError, match="contiguous"):
        await client.send(memoryview(b"abcdef")[::2])
    for imm in (-1, 1 << 32):
        with pytest.raises(ValueError, match="32 bits"):
            await client.send(b"x", imm=imm)
    await are_alive(pair)


async def test_a_message_larger_than_the_peer_takes(address: str) -> None:
    small = ConnectionConfig(max_message_size=100_000)
    async with (
        aiordma.listen(address, 0, config=small) as listener,
        aiordma.connect(address, listener.port) as client,
        await listener.accept() as server,
    ):
        with pytest.raises(aiordma.MessageTooLargeError, match="up to"):
            await client.send(bytes(200_000))
        with pytest.raises(ValueError, match="up to"):
            await client.send(bytes(200_000))
        sending = asyncio.create_task(client.send(bytes(90_000)))
        assert len(await server.recv()) == 90_000
        await sending
        await are_alive((client, server))


async def test_after_close(pair: Pair) -> None:
    client, server = pair
    await client.close()
    for operation in (client.send(b"x"), client.recv(), client.send(bytes(1 << 20))):
        with pytest.raises(aiordma.ResourceClosedError):
            await operation
    await client.close()
    client.abort()
    assert client.is_closing()
    assert [message async for message in client] == []
    await server.close()


async def test_addresses_and_ports(address: str) -> None:
    for port in (-1, 65_536):
        with pytest.raises(ValueError, match="port"):
            aiordma.connect(address, port)
        with pytest.raises(ValueError, match="port"):
            aiordma.listen(address, port)
    with pytest.raises(ValueError, match="port"):
        aiordma.connect(address, 0)
    for wrong in ("7471", 1.5, None, True):
        with pytest.raises(TypeError):
            aiordma.connect(address, wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            aiordma.listen(address, wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        aiordma.connect(None, 7471)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timeout"):
        aiordma.connect(address, 7471, timeout=math.nan)


async def test_private_data_that_is_too_long(address: str) -> None:
    with pytest.raises(ValueError, match="36 are left"):
        aiordma.connect(address, 7471, private_data=bytes(37))
    async with aiordma.listen(address, 0) as listener:
        requests = listener.requests()
        knocking = asyncio.create_task(_connect(address, listener.port))
        request = await anext(requests)
        with pytest.raises(ValueError, match="176 are left"):
            await request.accept(bytes(177))
        with pytest.raises(ValueError, match="at most 148"):
            request.reject(bytes(149))
        server = await request.accept(b"now it fits")
        with pytest.raises(aiordma.ResourceBusyError):
            await request.accept()
        with pytest.raises(aiordma.ResourceBusyError):
            request.reject()
        client = await knocking
        await are_alive((client, server))
        await client.close()
        await server.close()


async def _connect(address: str, port: int) -> Connection:
    return await aiordma.connect(address, port)


def test_settings_out_of_range() -> None:
    for wrong in (
        {"slot_size": 10},
        {"recv_depth": 0},
        {"recv_depth": -1},
        {"send_depth": 0},
        {"retry_count": 7},
        {"rnr_retry_count": 8},
        {"connect_timeout_s": 0},
        {"keepalive_s": -1.0},
        {"max_message_size": 0},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ConnectionConfig(**wrong)
    with pytest.raises(TypeError):
        ConnectionConfig(recv_depth=1.5)  # type: ignore[arg-type]


USES: dict[str, Callable[[Connection], Awaitable[object]]] = {
    "send": lambda conn: conn.send(b"x"),
    "recv": lambda conn: conn.recv(),
    "recv_into": lambda conn: conn.recv_into(bytearray(8)),
    "request": lambda conn: conn.request(b"x"),
    "flush": lambda conn: conn.flush(),
    "send_eof": lambda conn: conn.send_eof(),
    "register": lambda conn: conn.register(64),
    "close": lambda conn: conn.close(),
}


@pytest.mark.parametrize("where", ["another thread", "the same thread"])
@pytest.mark.parametrize("use", USES)
async def test_another_loop(
    pair: Pair, use: str, where: str, request: pytest.FixtureRequest
) -> None:
    """Each use is refused, and has no effect: the connection goes on in its own loop."""
    if (use, where) == ("send", "the same thread"):
        reason = "a send that needs no wait looks at the thread alone: the loop costs too much"
        request.applymarker(pytest.mark.xfail(strict=True, reason=reason))
    client, _ = pair

    async def refused() -> None:
        with pytest.raises(RuntimeError, match="loop"):
            await USES[use](client)

    if where == "another thread":
        await asyncio.to_thread(asyncio.run, refused())
    else:
        coroutine, running = refused(), asyncio.get_running_loop()
        task: Any = asyncio.current_task()
        other = asyncio.new_event_loop()
        # As a program does that runs its loops by turns; from Python 3.14 on a thread that is in a
        # task enters no other, whatever its loop.
        asyncio.tasks._leave_task(running, task)
        asyncio._set_running_loop(None)
        try:
            other.run_until_complete(coroutine)
        finally:
            asyncio._set_running_loop(running)
            asyncio.tasks._enter_task(running, task)
            other.close()
    await are_alive(pair)
