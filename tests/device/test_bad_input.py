"""Bad input gets a clear error at the call that was wrong, and harms nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import aiordma
from aiordma import Connection
from tests.device.meeting import Pair, are_alive

pytestmark = pytest.mark.device


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
