"""What programs look at beside a stream's bytes: turns of the loop, threads, garbage."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ssl
import threading
import time
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import aiordma
from aiordma.streams.policy import RdmaEventLoop
from tests.device.oracle import collect, until
from tests.device.streaming import LIMIT_S, Note, noted
from tests.inside.streams import connect_of_switch

pytestmark = pytest.mark.device


@pytest.mark.parametrize("end", ["close", "abort"])
async def test_h07_connection_lost_comes_as_soon_as_with_tcp(address: str, end: str) -> None:
    """Two turns of the loop after the call at the latest, with nothing that waits to be sent."""
    async with noted(address) as both:
        both.client.transport.write(b"x" * 1000)
        getattr(both.client.transport, end)()
        for _ in range(2):
            await asyncio.sleep(0)
        assert both.client.calls[-1] == "lost"
        assert both.client.lost is None
        assert await both.server.ended() is None
        assert both.server.data == b"x" * 1000


@pytest.mark.parametrize("backlog", [1.1, "5", None])
async def test_h07_a_backlog_that_is_no_number(address: str, backlog: Any) -> None:
    with pytest.raises(TypeError):
        await aiordma.create_server(Note, address, 0, backlog=backlog)
    with pytest.raises(TypeError):
        aiordma.listen(address, 0, backlog=backlog)


async def test_h07_start_tls_of_nothing() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

    with contextlib.closing(RdmaEventLoop()) as loop:
        for call in (aiordma.start_tls, loop.start_tls):
            with pytest.raises(TypeError, match="not supported by start_tls"):
                await call(None, Note(), context)  # type: ignore[arg-type]


async def test_h07_a_refusal_is_no_garbage(address: str) -> None:
    """An error goes with its last reference: nothing of the call keeps it in a cycle."""
    server = await aiordma.create_server(Note, address, 0)
    port = server.port
    server.close()
    await server.wait_closed()
    calls: list[Callable[[], Awaitable[Any]]] = [
        lambda: connect_of_switch(Note, [address], port, {}),
        lambda: connect_of_switch(Note, [address, address], port, {"all_errors": True}),
        lambda: aiordma.open_connection(address, port),
        lambda: aiordma.create_connection(Note, address, port, happy_eyeballs_delay=0.1),
        lambda: aiordma.connect(address, port),
    ]
    collect()
    gc.disable()
    try:
        for number, call in enumerate(calls):
            kept = None
            try:
                await call()
            except (OSError, ExceptionGroup) as exc:
                kept = weakref.ref(exc)
            assert kept is not None, number
            for _ in range(5):
                await asyncio.sleep(0)
            assert kept() is None, number
    finally:
        gc.enable()


def threads() -> set[str]:
    return {each.name for each in threading.enumerate() if each.name.startswith("aiordma")}


async def test_h07_no_thread_is_left(address: str) -> None:
    """A second after the last use; iWARP's connects may hold theirs, if one was given up."""
    async with noted(address) as both:
        both.client.transport.write(b"x")
        await both.server.received(1)
    await both.client.transport.wait_closed()
    await both.server.transport.wait_closed()
    start = time.monotonic()
    await until(lambda: not threads() - {"aiordma-connect"}, LIMIT_S)
    assert time.monotonic() - start < LIMIT_S
