"""trio_asyncio: a loop of asyncio that trio drives, and aiordma on it.

`test_trio_asyncio.py` runs this file in a process of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest
import trio
import trio_asyncio
from trio_asyncio import aio_as_trio, trio_as_aio

import aiordma

# It has a loop of its own.
pytestmark = [pytest.mark.device, pytest.mark.one_loop]

MIB = 1 << 20
LIMIT_S = 60.0


async def run(main: Callable[[], Awaitable[None]]) -> None:
    """Run a function of trio, in a thread: here a loop of asyncio's own runs."""

    async def limited() -> None:
        with trio.fail_after(LIMIT_S):
            async with trio_asyncio.open_loop():
                await main()

    await asyncio.to_thread(trio.run, limited)


async def echo(conn: aiordma.Connection) -> None:
    async for message in conn:
        await conn.send(message)


async def test_messages(address: str) -> None:
    async def main() -> None:
        async with (
            aio_as_trio(aiordma.serve(echo, address, 0)) as server,
            aio_as_trio(aiordma.connect(address, server.port)) as conn,
        ):
            for size in (1, 5000, 5 * MIB):
                await aio_as_trio(conn.send)(bytes(size))
                assert len(await aio_as_trio(conn.recv)()) == size
            into = bytearray(5 * MIB)
            await aio_as_trio(conn.send)(b"\1" * len(into))
            assert await aio_as_trio(conn.recv_into)(into) == len(into)
            assert into == b"\1" * len(into)
            await aio_as_trio(conn.send)(b"one of many")
            async with aclosing(aiter(aio_as_trio(conn))) as messages:
                async for message in messages:
                    assert bytes(message) == b"one of many"
                    break

    await run(main)


async def test_requests_of_a_nursery(address: str) -> None:
    async def handler(request: aiordma.Request) -> bytes:
        return bytes(request.body).upper()

    async def main() -> None:
        async with (
            aio_as_trio(aiordma.serve_requests(handler, address, 0)) as server,
            aio_as_trio(aiordma.connect(address, server.port)) as conn,
            trio.open_nursery() as nursery,
        ):

            async def ask(number: int) -> None:
                answer = await aio_as_trio(conn.request)(b"ask %d" % number)
                assert bytes(answer) == b"ASK %d" % number

            for number in range(50):
                nursery.start_soon(ask, number)

    await run(main)


async def test_a_handler_of_trio(address: str) -> None:
    async def handler(conn: aiordma.Connection) -> None:
        message = await aio_as_trio(conn.recv)()
        await trio.sleep(0.01)
        await aio_as_trio(conn.send)(message)

    async def main() -> None:
        async with (
            aio_as_trio(aiordma.serve(trio_as_aio(handler), address, 0)) as server,
            aio_as_trio(aiordma.connect(address, server.port)) as conn,
        ):
            await aio_as_trio(conn.send)(b"by trio")
            assert bytes(await aio_as_trio(conn.recv)()) == b"by trio"

    await run(main)


async def test_streams(address: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(5))
        writer.close()

    async def main() -> None:
        server = await aio_as_trio(aiordma.start_server)(answer, address, 0)
        reader, writer = await aio_as_trio(aiordma.open_connection)(address, server.port)
        writer.write(b"hello")
        assert await aio_as_trio(reader.read)() == b"hello"
        writer.close()
        await aio_as_trio(writer.wait_closed)()
        server.close()
        await aio_as_trio(server.wait_closed)()

    await run(main)


@pytest.mark.parametrize("call", ["recv", "recv_into", "request"])
async def test_a_scope_of_trio_cancels_once(address: str, call: str) -> None:
    async def wait(_: aiordma.Request) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            canceled.set()

    began, canceled = asyncio.Event(), asyncio.Event()

    async def leave(scope: trio.CancelScope) -> None:
        if call == "request":  # a handler that has not begun would not be canceled
            await aio_as_trio(began.wait)()
        else:
            await trio.sleep(0.05)
        scope.cancel()

    async def main() -> None:
        async with (
            aio_as_trio(aiordma.serve_requests(wait, address, 0)) as requests,
            aio_as_trio(aiordma.serve(echo, address, 0)) as messages,
        ):
            port = requests.port if call == "request" else messages.port
            async with aio_as_trio(aiordma.connect(address, port)) as conn:
                waits: dict[str, Callable[[], Any]] = {
                    "recv": conn.recv,
                    "recv_into": lambda: conn.recv_into(bytearray(9)),
                    "request": lambda: conn.request(b"?", into=bytearray(9)),
                }
                async with trio.open_nursery() as nursery:
                    with trio.CancelScope() as scope:
                        nursery.start_soon(leave, scope)
                        await aio_as_trio(waits[call])()
                assert scope.cancelled_caught
                if call == "request":
                    await aio_as_trio(canceled.wait)()
                else:
                    await aio_as_trio(conn.send)(b"goes on")
                    assert bytes(await aio_as_trio(conn.recv)()) == b"goes on"

    await run(main)


async def test_a_function_of_asyncio_closes_what_a_scope_of_trio_cancels(address: str) -> None:
    """A block of trio does not: see findings/trio-asyncio-aexit.sh."""
    seen: list[aiordma.Connection] = []
    connected = asyncio.Event()

    async def main() -> None:
        async with aio_as_trio(aiordma.serve(echo, address, 0)) as server:

            async def talk() -> None:
                async with aiordma.connect(address, server.port) as conn:
                    seen.append(conn)
                    connected.set()
                    await conn.recv()

            async def leave(scope: trio.CancelScope) -> None:
                await aio_as_trio(connected.wait)()
                scope.cancel()

            async with trio.open_nursery() as nursery:
                with trio.CancelScope() as scope:
                    nursery.start_soon(leave, scope)
                    await aio_as_trio(talk)()
            assert scope.cancelled_caught
            (conn,) = seen
            assert conn.is_closing()
            await aio_as_trio(conn.wait_closed)()

    await run(main)
    seen.clear()
