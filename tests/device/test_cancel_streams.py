"""Cancel at every await of the stream API: see test_cancel."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import aiordma
from aiordma import RdmaServer, StreamConfig
from tests.device.oracle import settle, until
from tests.device.stepping import Steps, for_every_step, run_canceled
from tests.device.streaming import Note, stream_pair

pytestmark = [pytest.mark.device, pytest.mark.virtual_time]

CONFIG = StreamConfig(receive_buffer_size=4096, send_buffer_size=4096)


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1000):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass  # a client that was canceled
    finally:
        writer.close()


@asynccontextmanager
async def echoing(address: str) -> AsyncIterator[RdmaServer]:
    server = await aiordma.start_server(echo, address, 0, config=CONFIG)
    try:
        yield server
        # It is unharmed.
        reader, writer = await aiordma.open_connection(address, server.port, config=CONFIG)
        writer.write(b"still there?")
        assert await reader.readexactly(12) == b"still there?"
        writer.close()
        await writer.wait_closed()
    finally:
        server.close()
        server.abort_clients()
        await server.wait_closed()


async def test_open_connection(address: str, late: bool) -> None:
    async def scenario(steps: Steps) -> None:
        async with echoing(address) as server:

            async def connect() -> Any:
                return await aiordma.open_connection(address, server.port, config=CONFIG)

            opened = await run_canceled(connect(), steps)
            if opened is not None:
                reader, writer = opened
                writer.write(b"hello")
                assert await reader.readexactly(5) == b"hello"
                writer.close()
                await writer.wait_closed()

    assert await for_every_step(scenario, late=late) >= 3


async def test_start_server(address: str, late: bool) -> None:
    async def scenario(steps: Steps) -> None:
        async def start() -> RdmaServer:
            return await aiordma.start_server(echo, address, 0, config=CONFIG)

        server = await run_canceled(start(), steps)
        if server is not None:
            server.close()
            await server.wait_closed()

    # With a numeric address there is nothing to wait for once the libraries are loaded.
    await for_every_step(scenario, late=late)


async def test_accepting(address: str, late: bool) -> None:
    """A server that closes at every step of a handshake."""

    async def scenario(steps: Steps) -> None:
        server = await aiordma.create_server(Note, address, 0, config=CONFIG)

        async def serve() -> None:
            await server.serve_forever()

        serving = asyncio.create_task(run_canceled(serve(), steps))
        try:
            transport, protocol = await aiordma.create_connection(
                Note, address, server.port, config=CONFIG
            )
        except OSError:
            pass
        else:
            transport.abort()
            await protocol.ended()
        server.close()
        await asyncio.wait([serving])
        server.abort_clients()
        await server.wait_closed()

    await for_every_step(scenario, late=late)


@pytest.mark.parametrize("size", [1000, 100_000])
async def test_a_conversation(address: str, late: bool, size: int) -> None:
    """write, drain, read, readinto, close, wait_closed: the bytes before the cancel are right."""
    data = bytes(range(250)) * (size // 250)

    async def scenario(steps: Steps) -> None:
        async with echoing(address) as server:
            got = bytearray()

            async def talk() -> None:
                reader, writer = await aiordma.open_connection(address, server.port, config=CONFIG)
                try:
                    await asyncio.gather(send(writer), receive(reader))
                finally:
                    writer.close()
                    await writer.wait_closed()

            async def send(writer: asyncio.StreamWriter) -> None:
                for at in range(0, size, 30_000):
                    writer.write(data[at : at + 30_000])
                    await writer.drain()

            async def receive(reader: aiordma.RdmaStreamReader) -> None:
                into = bytearray(700)
                while len(got) < size:
                    got.extend(await reader.read(700))
                    if len(got) < size:
                        count = await reader.readinto(into)
                        got.extend(into[:count])

            await run_canceled(talk(), steps)
            assert got == data[: len(got)]
            if not steps.canceled:
                assert len(got) == size

    assert await for_every_step(scenario, late=late) >= 5


@pytest.mark.parametrize("how", ["drain", "read", "readexactly", "readinto"])
async def test_what_was_canceled_can_go_on(address: str, late: bool, how: str) -> None:
    """A wait that is canceled takes no byte with it."""

    async def scenario(steps: Steps) -> None:
        async with stream_pair(address, CONFIG) as ((reader, writer), (theirs, answers)):
            into = bytearray(200_000)

            async def wait() -> bytes:
                if how == "drain":
                    writer.write(b"q" * 200_000)
                    await writer.drain()
                    return b""
                if how == "read":
                    return await reader.read(200_000)
                if how == "readexactly":
                    return await reader.readexactly(100_000)
                return bytes(into[: await reader.readinto(into)])

            waiting = asyncio.create_task(run_canceled(wait(), steps))
            await until(lambda: steps.count > 0)
            if how == "drain":
                assert await theirs.readexactly(200_000) == b"q" * 200_000
                await waiting
                writer.write(b"more")
                assert await theirs.readexactly(4) == b"more"
                return
            answer = b"a" * (99_999 if how == "readexactly" else 3000) + b"b"
            answers.write(answer)
            got = await waiting or b""
            while not got.endswith(b"b"):
                got += await reader.read(200_000)
            assert got == answer
        await settle()

    assert await for_every_step(scenario, late=late) >= 1


async def test_wait_closed(address: str, late: bool) -> None:
    async def scenario(steps: Steps) -> None:
        async with stream_pair(address, CONFIG) as ((_, writer), (theirs, _)):

            async def end() -> None:
                writer.write(b"z" * 20_000)
                writer.close()
                await writer.wait_closed()

            ending = asyncio.create_task(run_canceled(end(), steps))
            assert await theirs.read() == b"z" * 20_000
            await ending

    assert await for_every_step(scenario, late=late) >= 1
