"""The ways of docs/architecture.md are those that the running library takes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import aiordma
from tests.device.ways import WAYS, differences, told, traced_copy, walk

pytestmark = [pytest.mark.device, pytest.mark.program]


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled module of a copy that notes its entries."""
    return traced_copy(tmp_path_factory.mktemp("traced"))


async def _compare(module: Path, kind: str, address: str, port: int, *names: str) -> None:
    ways = await asyncio.to_thread(walk, module, kind, address, port)
    for name in names:
        wrong = differences(name, ways[name])
        assert not wrong, f"{WAYS[name]}: {'; '.join(wrong)}.  Entered:\n{told(ways[name])}"


async def test_of_a_message_connection(address: str, module: Path) -> None:
    async def answer() -> None:
        async for connection in listener:
            async with connection:
                async for message in connection:
                    await connection.send(message)
                    message.release()
                await connection.wait_closed()  # the client is the first to disconnect

    async with aiordma.listen(address, 0) as listener, asyncio.TaskGroup() as group:
        answering = group.create_task(answer())
        await _compare(
            module, "messages", address, listener.port, "send", "receive", "connect", "close"
        )
        answering.cancel()


async def test_of_a_stream(address: str, module: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(64):
            writer.write(data)
        writer.close()
        await writer.wait_closed()

    async with await aiordma.start_server(answer, address, 0) as server:
        port = server.sockets[0].getsockname()[1]
        await _compare(module, "stream", address, port, "write", "read")
