"""The tutorial's programs and blocks, run as they are printed there."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import aiordma
from tests.device.meeting import meet, part
from tests.device.shared import name_of_device

pytestmark = pytest.mark.device

PAGE = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text()
LIMIT_S = 60


def blocks(heading: str) -> list[str]:
    """The Python blocks of a section."""
    section = re.split(r"^## ", PAGE.partition(f"## {heading}\n")[2], maxsplit=1, flags=re.M)[0]
    return re.findall(r"^```python\n(.*?)^```$", section, re.M | re.S)


async def run(block: str, **names: Any) -> dict[str, Any]:
    """Run a block that awaits, and return the names that it has made."""
    body = textwrap.indent(f"{block}\nreturn locals()", "    ")
    scope: dict[str, Any] = {"aiordma": aiordma, "asyncio": asyncio, **names}
    exec(f"async def block():\n{body}", scope)
    async with asyncio.timeout(LIMIT_S):
        made: dict[str, Any] = await scope["block"]()
    return made


@pytest.mark.one_loop
def test_the_first_program(tmp_path: Path, address: str, is_siw: bool) -> None:
    (program,) = blocks("One program")
    path = tmp_path / "echo.py"
    path.write_text(program.replace("10.80.0.1", address))
    done = subprocess.run(
        [sys.executable, "-W", "error", path],
        capture_output=True, check=False, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    device = name_of_device(is_siw)
    assert (done.stdout, done.stderr) == (f"b'hello' over {device}\n", "")


async def test_its_server_outlives_a_client_that_aborts(address: str) -> None:
    scope: dict[str, Any] = {}
    exec(blocks("One program")[0].partition("async def main")[0], scope)
    async with aiordma.serve(scope["echo"], address, 0) as server, asyncio.timeout(LIMIT_S):
        conn = await aiordma.connect(address, server.port)
        for _ in range(2):
            await conn.send(b"hello")
            assert bytes(await conn.recv()) == b"hello"
            conn.abort()
            await conn.wait_closed()
            conn = await aiordma.connect(address, server.port)
        await conn.close()


@pytest.mark.one_device
@pytest.mark.one_loop
async def test_a_large_message_as_on_the_page(address: str) -> None:
    sends, configures = blocks("Large messages")
    async with aiordma.listen(address, 0) as listener:
        client, server = await meet(listener, address)
        sending = asyncio.create_task(run(sends, conn=client))
        with await server.recv() as message:
            assert len(message) == 50_000_000
        await sending
        with pytest.raises(aiordma.MessageTooLargeError, match="max_message_size"):
            await client.send(bytearray((64 << 20) + 1))
        await part(client, server)
    asked: list[aiordma.ConnectionConfig] = []

    def listen(*args: Any, config: aiordma.ConnectionConfig) -> Any:
        asked.append(config)
        return aiordma.listen(*args, config=config)

    page: Any = type("Page", (), {"ConnectionConfig": aiordma.ConnectionConfig, "listen": listen})
    await run(configures, aiordma=page, host=address, port=0)
    (config,) = asked
    async with aiordma.listen(address, 0, config=config) as listener:
        client, server = await meet(listener, address)
        sending = asyncio.create_task(client.send(bytearray((64 << 20) + 1)))
        with await server.recv() as message:
            assert len(message) == (64 << 20) + 1
        await sending
        await part(client, server)


async def test_memory_that_the_peer_may_use(address: str) -> None:
    """However late the one side is: the lease lasts until the other says that it is done."""
    opens, uses, registers = blocks("Memory that the peer may use")
    said: list[str] = []
    written = asyncio.Event()

    def tell(*words: object) -> None:
        said.append(" ".join(map(str, words)))
        written.set()

    async with aiordma.listen(address, 0) as listener:
        client, server = await meet(listener, address)
        serving = asyncio.create_task(run(opens, conn=server, print=tell))
        *first, last = uses.splitlines()
        made = await run("\n".join(first), conn=client)
        async with asyncio.timeout(LIMIT_S):
            await written.wait()
        # The message of the write has been taken, and the memory is still open.
        assert await client.read(made["remote"], bytearray(64)) == 64
        await run(last, conn=client)
        assert len((await serving)["table"]) == 1 << 20
        assert made["row"] == bytes(64)
        assert said == ["page 7 is written", "the peer says b'done'"]
        memory = bytearray(b"x" * (1 << 20))
        async with server.expose(memory, read=True, write=True) as region:
            seen: list[bytes] = []

            def process(view: memoryview) -> None:
                seen.append(bytes(view))
                view[4096:4160] = b"y" * 64

            await run(registers, conn=client, remote=region, process=process)
            assert await client.read(region, bytearray(64)) == 64  # behind the write
        assert seen == [b"x" * (1 << 20)]
        assert memory == b"y" * 64 + b"x" * ((1 << 20) - 64)
        await part(client, server)


async def test_the_end_of_one_sides_messages(address: str) -> None:
    scope: dict[str, Any] = {
        "questions": [b"one", b"two"],
        "summary": lambda heard: b" and ".join(heard),
    }
    (block,) = blocks("The end of one side's messages")
    exec(block, scope)
    async with aiordma.listen(address, 0) as listener, asyncio.timeout(LIMIT_S):
        client, server = await meet(listener, address)
        answering = asyncio.create_task(scope["server"](server))
        asking = asyncio.create_task(scope["client"](client))
        await answering
        await server.close()
        assert await asking == [b"one and two"]
        await client.close()
