"""rstream, both roles: pieces of 64 bytes to 1 MiB, blocking and not, compared by both sides."""

from __future__ import annotations

from asyncio import StreamReader, StreamWriter

import pytest

from tests.interop.program import running
from tests.interop.rstream_peer import MODES, Run, Talk, serve_client
from tests.interop.streaming import dialed, serving_one

KINDS = [
    *((64, mode) for mode in MODES),
    *((size, mode) for size in (65_536, 1 << 20) for mode in ("blocking", "nonblocking")),
]
each_kind = pytest.mark.parametrize(("size", "mode"), KINDS)


@each_kind
async def test_aiordma_serves_rstream(address: str, size: int, mode: str) -> None:
    await serve_client(address, Run(size, mode=mode), end=True)


@each_kind
async def test_rstream_serves_aiordma(address: str, port: int, size: int, mode: str) -> None:
    run = Run(size, mode=mode)
    async with dialed(lambda at: run.server(address, at), address, port) as rstream:
        conversation = Talk(rstream.reader, rstream.writer, run, first=True)
        await conversation.all()
        await conversation.end()
        await rstream.program.finish()
    run.assert_told(rstream.program)


async def test_many_small_messages(address: str) -> None:
    """More than the 384 that rstream takes before it has to give a credit."""
    await serve_client(address, Run(64, count=1000), end=False)


async def test_small_buffers(address: str, port: int) -> None:
    """`-B`: a ring of 8 KiB, of which a piece fills many."""
    run = Run(100_000)
    async with dialed(
        lambda at: (*run.server(address, at), "-B", "4096"), address, port
    ) as rstream:
        conversation = Talk(rstream.reader, rstream.writer, run, first=True)
        await conversation.all()
        await conversation.end()
        await rstream.program.finish()


async def test_rstream_notices_a_wrong_byte(address: str) -> None:
    """The comparison on which the other tests rely is one."""
    run = Run(4096)

    async def talk(reader: StreamReader, writer: StreamWriter) -> None:
        conversation = Talk(reader, writer, run, first=False)
        await conversation.begin()
        for _ in range(run.count):
            await conversation.hear(run.size)
        writer.write(bytes(run.size))
        await conversation.end()

    async with (
        serving_one(address, talk) as served,
        running(*run.client(address, served.port)) as rstream,
    ):
        await served.ended
        said = await rstream.finish(255)
    assert said[-1].startswith("data verification failed byte 16")
