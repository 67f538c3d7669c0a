"""How streams with foreign programs end: both at once, by a signal, and with bytes unread."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from asyncio import StreamReader, StreamWriter

import pytest

from tests.interop.program import running
from tests.interop.rstream_peer import Run, Talk, serve_client
from tests.interop.streaming import dialed, serving_one

#: So many pieces that nobody gets to the end of them.
ENDLESS = Run(65_536, count=1_000_000)


@pytest.mark.parametrize("size", [64, 1 << 20])
async def test_server_ends_at_once(address: str, size: int) -> None:
    """Both ends close as soon as the last byte is written, and read."""
    await serve_client(address, Run(size), end=False)


@pytest.mark.parametrize("size", [64, 1 << 20])
async def test_client_ends_at_once(address: str, port: int, size: int) -> None:
    run = Run(size)
    async with dialed(lambda at: run.server(address, at), address, port) as rstream:
        await Talk(rstream.reader, rstream.writer, run, first=True).all()
        rstream.writer.close()
        await rstream.writer.wait_closed()
        await rstream.program.finish()
    run.assert_told(rstream.program)


async def test_client_is_killed(address: str) -> None:
    """While it sends: that is no end of the stream but a failure."""
    begun = asyncio.Event()

    async def talk(reader: StreamReader, writer: StreamWriter) -> None:
        conversation = Talk(reader, writer, ENDLESS, first=False)
        await conversation.begin()
        await conversation.hear(ENDLESS.size)
        begun.set()
        while True:
            await conversation.hear(ENDLESS.size)

    async with (
        serving_one(address, talk) as served,
        running(*ENDLESS.client(address, served.port)) as rstream,
    ):
        await begun.wait()
        rstream.kill()
        with pytest.raises(ConnectionResetError):
            await served.ended
        await rstream.finish(-signal.SIGKILL)


async def test_server_is_killed(address: str, port: int) -> None:
    """While we send: `drain` raises, and so do the readers, as long as they like."""
    async with dialed(lambda at: ENDLESS.server(address, at), address, port) as rstream:
        reader, writer = rstream.reader, rstream.writer
        conversation = Talk(reader, writer, ENDLESS, first=True)
        await conversation.begin()
        await conversation.say(ENDLESS.size)
        rstream.program.kill()
        with pytest.raises(ConnectionResetError):
            await conversation.go_on()
        for _ in range(2):
            with pytest.raises(ConnectionResetError):
                await reader.read()
        writer.close()
        with pytest.raises(ConnectionResetError):
            await writer.wait_closed()
        await rstream.program.finish(-signal.SIGKILL)


async def test_idle_server_is_killed(address: str, port: int) -> None:
    """While we wait for its bytes."""
    async with dialed(lambda at: ENDLESS.server(address, at), address, port) as rstream:
        reader, writer = rstream.reader, rstream.writer
        conversation = Talk(reader, writer, ENDLESS, first=True)
        await conversation.begin()
        waiting = asyncio.create_task(reader.readexactly(1))
        await asyncio.sleep(0)
        rstream.program.kill()
        with pytest.raises(ConnectionResetError):
            await waiting
        writer.close()
        with pytest.raises(ConnectionResetError):
            await writer.wait_closed()
        await rstream.program.finish(-signal.SIGKILL)


async def test_client_leaves_without_reading(address: str) -> None:
    """What is written after its end is lost, and the writer hears of it."""
    run = Run(64, count=1)

    async def talk(reader: StreamReader, writer: StreamWriter) -> None:
        conversation = Talk(reader, writer, run, first=False)
        await conversation.all()
        await conversation.end()  # rstream has closed both directions
        with pytest.raises(ConnectionResetError):
            await conversation.go_on()

    async with (
        serving_one(address, talk) as served,
        running(*run.client(address, served.port)) as rstream,
    ):
        with contextlib.suppress(ConnectionResetError):  # of wait_closed
            await served.ended
        await rstream.finish()
