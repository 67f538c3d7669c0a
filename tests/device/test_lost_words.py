"""How a connection ended is told apart by what its calls raise."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import warnings
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import aiordma
from aiordma.endpoint.link import Link
from aiordma.endpoint.wire import FrameKind
from aiordma.loop.workers import call_blocking
from aiordma.verbs import mr
from aiordma.verbs.mr import INLINE_BYTES
from tests.device.meeting import meet
from tests.device.oracle import Connecting, collect, until
from tests.device.test_two_processes import peer
from tests.inside.endpoint import limit_fetches, link_of, sender_of

pytestmark = pytest.mark.device

LIMIT_S = 20


@pytest.fixture
def logs(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What the library logs as a warning."""
    caplog.set_level(logging.WARNING, "aiordma")
    return caplog


async def test_b04_close_abort_and_violation_read_differently(
    address: str, logs: pytest.LogCaptureFixture
) -> None:
    async with asyncio.timeout(3 * LIMIT_S), aiordma.listen(address, 0) as listener:
        client, server = await meet(listener, address)
        await client.send(b"last")
        await client.close()
        assert bytes(await server.recv()) == b"last"
        with pytest.raises(aiordma.ConnectionEndedError):
            await server.recv()
        await server.close()

        client, server = await meet(listener, address)
        await client.send(b"last")
        client.abort()
        assert bytes(await server.recv()) == b"last"
        for call in (server.recv, lambda: server.send(b"x")):
            with pytest.raises(aiordma.ConnectionLostError, match="peer aborted") as caught:
                await call()
            assert "abort()" in caught.value.hint
        await asyncio.gather(client.wait_closed(), server.close())

        client, server = await meet(listener, address)
        sender_of(client).control(FrameKind.DONE, 77)  # of an exchange that is not open
        with pytest.raises(aiordma.ProtocolError, match="exchange 77"):
            await server.recv()
        with pytest.raises(aiordma.ProtocolError, match="this side broke the protocol") as caught:
            await client.recv()
        assert "the peer's log" in caught.value.hint
        await asyncio.gather(client.close(), server.close())
        text = logs.text.replace(f"port {client.get_extra_info('sockname')[1]}", "port N")
        assert f"this side ends the connection with {address} port N: the peer" in text
        assert f"connection with {address} port {listener.port}: the peer ended" in text


async def test_b04_what_was_sent_before_an_abort_arrives(address: str, *, is_siw: bool) -> None:
    """Three in a hundred were lost while the disconnection did not wait for them."""
    # Software iWARP takes half a second for each.
    rounds = 50 if is_siw else 150
    async with asyncio.timeout(110), aiordma.listen(address, 0) as listener:
        for number in range(rounds):
            client, server = await meet(listener, address)
            await client.send(b"%d" % number)
            client.abort()
            assert bytes(await server.recv()) == b"%d" % number
            with pytest.raises(aiordma.ConnectionLostError, match="peer aborted"):
                await server.recv()
            await asyncio.gather(client.wait_closed(), server.close())


@pytest.mark.parametrize("way", ["closes", "aborts", "leaves it open"])
async def test_h02_a_program_that_ends_has_sent_what_it_sent(address: str, way: str) -> None:
    """asyncio.run returns when the messages have arrived, whether it was closed or not."""
    factory, connects = type(asyncio.get_running_loop()), Connecting()

    async def program(port: int, number: int) -> None:
        connection = await aiordma.connect(address, port)
        for part in range(5):
            await connection.send(b"%d %d" % (number, part))
        if way == "closes":
            closing = asyncio.create_task(connection.close())
            await asyncio.sleep(0)
            assert not closing.done()
        elif way == "aborts":
            connection.abort()

    def run(port: int, number: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # that one was not closed
            with asyncio.Runner(loop_factory=factory) as runner:
                runner.run(program(port, number))
            connects.let_go()
            collect()

    async with asyncio.timeout(3 * LIMIT_S), aiordma.listen(address, 0) as listener:
        for number in range(10):
            ending = asyncio.create_task(asyncio.to_thread(run, listener.port, number))
            server = await listener.accept()
            for part in range(5):
                assert bytes(await server.recv()) == b"%d %d" % (number, part)
            with pytest.raises((aiordma.ConnectionLostError, aiordma.ConnectionEndedError)):
                await server.recv()
            await server.close()
            await ending


@pytest.mark.parametrize("first", ["send", "recv"])
async def test_b04_every_call_tells_that_the_peer_has_closed(address: str, first: str) -> None:
    """Whichever comes first, and not that its process ended."""
    async with asyncio.timeout(LIMIT_S), aiordma.listen(address, 0) as listener:
        client, server = await meet(listener, address)
        async with server.expose(bytearray(8), read=True, write=True) as region:
            await server.send(b"last")
            await server.close()
        await until(lambda: client.is_closing())  # the disconnection has been heard
        calls: dict[str, Callable[[], Awaitable[Any]]] = {
            "send": lambda: client.send(b"x"),
            "large": lambda: client.send(bytes(300_000)),
            "read": lambda: client.read(region, bytearray(8)),
            "write": lambda: client.write(region, b"x"),
            "register": lambda: client.register(bytearray(8)),
        }
        await client.flush()  # of nothing
        if first == "recv":
            assert bytes(await client.recv()) == b"last"
        for _ in range(2):
            for name, call in calls.items():
                with pytest.raises(aiordma.ConnectionLostError, match="peer closed") as caught:
                    await call()
                assert "recv() still returns" in caught.value.hint, name
        if first == "send":
            assert bytes(await client.recv()) == b"last"
        with pytest.raises(aiordma.ConnectionEndedError, match="peer closed"):
            await client.recv()
        await client.close()


async def test_b04_a_request_that_finds_the_peer_closed(address: str) -> None:
    """Sent while the peer closes: the call is told of the close, or the bytes were lost on it."""
    async with asyncio.timeout(LIMIT_S), aiordma.listen(address, 0) as listener:
        client, server = await meet(listener, address)
        closing = asyncio.create_task(server.close())

        async def go_on() -> None:
            while True:
                await client.send(b"x")
                await client.flush()

        with pytest.raises(aiordma.ConnectionLostError, match="peer closed"):
            await go_on()
        await closing
        await client.close()


async def test_b04_a_peer_is_told_why_this_side_gives_it_up(
    address: str, logs: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that stands still is asked; the reads of large messages stay without an answer."""
    limit_fetches(monkeypatch, 0.2)
    async with asyncio.timeout(LIMIT_S), aiordma.listen(address, 0) as listener:
        client, server = await meet(listener, address)
        monkeypatch.setattr(Link, "post_read", lambda *_: None)
        sending = asyncio.create_task(client.send(bytes(300_000)))
        with pytest.raises(aiordma.ConnectionLostError, match="nothing of a large message"):
            await server.recv()
        for call in (lambda: sending, client.recv):
            with pytest.raises(aiordma.ConnectionLostError, match="waited too long") as caught:
                await call()
            assert "event loop blocked" in caught.value.hint
        await asyncio.gather(client.close(), server.close())


async def test_b04_a_crash_reads_as_a_crash(address: str, request: pytest.FixtureRequest) -> None:
    async with asyncio.timeout(3 * LIMIT_S):
        loop = str(request.config.getoption("--loop"))
        async with peer("echo", address, loop) as (port, pid):
            client = await aiordma.connect(address, port)
            await client.send(b"x")
            assert bytes(await client.recv()) == b"x"
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(aiordma.ConnectionLostError) as caught:
                await client.recv()
            # Its kernel says goodbye; or a request finds nobody, which is then the cause.
            error = caught.value
            assert "without a word" in str(error) or error.__cause__ is not None
            assert "aborted" not in str(error)
            assert error.hint
            await client.close()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("call", ["send", "register", "expose", "read", "write"])
async def test_b01_a_call_that_the_end_overtakes_tells_of_the_end(
    address: str, call: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a thread registers its memory, the connection is lost; this side has closed nothing."""
    async with asyncio.timeout(LIMIT_S), aiordma.listen(address, 0) as listener:
        client, server = await meet(listener, address)
        size = 2 * INLINE_BYTES
        async with server.expose(bytearray(size), read=True, write=True) as region:
            registering = asyncio.Event()

            async def overtaken(function: Callable[[], Any], **options: Any) -> Any:
                made = await call_blocking(function, **options) if when == "after" else None
                registering.set()
                await until(lambda: link_of(client).closed)
                return made if when == "after" else await call_blocking(function, **options)

            async def expose() -> None:
                async with client.expose(bytearray(size), read=True):
                    pass

            calls: dict[str, Callable[[], Awaitable[Any]]] = {
                "send": lambda: client.send(bytes(size)),
                "register": lambda: client.register(bytearray(size)),
                "expose": expose,
                "read": lambda: client.read(region, bytearray(size)),
                "write": lambda: client.write(region, bytes(size)),
            }
            monkeypatch.setattr(mr, "call_blocking", overtaken)
            task = asyncio.ensure_future(calls[call]())
            await registering.wait()
            server.abort()
            with pytest.raises(aiordma.ConnectionLostError, match="peer aborted"):
                await task
        await asyncio.gather(client.close(), server.close())
