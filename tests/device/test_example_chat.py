"""examples/chat.py: lines for all, and a slow or lost client harms no other."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Iterator

import pytest

import aiordma
from aiordma.streams.stream_reader import READER_LIMIT
from examples import chat
from tests.device.running import LIMIT_S, Program

pytestmark = [pytest.mark.device, pytest.mark.program]

PROGRAM = "chat.py"


class Client:
    """A client of the room."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def say(self, line: str) -> None:
        self.writer.write(f"{line}\n".encode())
        async with asyncio.timeout(LIMIT_S):
            await self.writer.drain()

    async def hear(self) -> str:
        async with asyncio.timeout(LIMIT_S):
            return (await self.reader.readline()).decode().rstrip("\n")


@contextlib.asynccontextmanager
async def joined(port: int, address: str, name: str) -> AsyncIterator[Client]:
    client = Client(*await aiordma.open_connection(address, port))
    try:
        await client.say(name)
        yield client
    finally:
        client.writer.close()
        with contextlib.suppress(ConnectionError):
            await client.writer.wait_closed()


@pytest.fixture
async def port(address: str) -> AsyncIterator[int]:
    server = await aiordma.start_server(chat.Room().welcome, address, 0)
    yield server.port
    server.close()
    async with asyncio.timeout(LIMIT_S):
        await server.wait_closed()


async def test_lines_go_to_all_others(port: int, address: str) -> None:
    async with joined(port, address, "ann") as ann:
        assert await ann.hear() == "* here: ann"
        async with joined(port, address, "bob") as bob:
            assert await bob.hear() == "* here: ann, bob"
            assert await ann.hear() == "* bob has come"
            await bob.say("hello\r")
            await ann.say("h\u00e4\x1b[2J")
            assert await ann.hear() == "bob: hello"
            assert await bob.hear() == "ann: h\u00e4?[2J"
        assert await ann.hear() == "* bob has left"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ann", "the name ann is taken"),
        ("", "a name has 1 to 30 letters, digits, - and _"),
        ("* ann", "a name has 1 to 30"),
        ("x" * 31, "a name has 1 to 30"),
        ("x" * 200_000, "a line has at most 1000 characters"),
    ],
    ids=lambda words: words[:20],
)
async def test_a_name_that_is_refused(name: str, words: str, port: int, address: str) -> None:
    async with joined(port, address, "ann") as ann:
        assert await ann.hear() == "* here: ann"
        try:
            async with joined(port, address, name) as other:
                assert (await other.hear()).startswith(f"! {words}")
                assert await other.hear() == ""
        except ConnectionError:
            # A server that closes before it has taken all breaks the stream, as over TCP.
            assert len(name) > 2 * READER_LIMIT
        await ann.say("undisturbed")


async def test_a_line_that_is_too_long_ends_its_client(port: int, address: str) -> None:
    async with joined(port, address, "ann") as ann, joined(port, address, "bob") as bob:
        while await ann.hear() != "* bob has come":
            pass
        await bob.say("x" * 1001)
        assert await ann.hear() == "* bob has left (a line has at most 1000 characters)"


async def test_many_lines_at_once_reach_a_client_that_reads(port: int, address: str) -> None:
    """More than are kept for a client."""
    async with joined(port, address, "ann") as ann, joined(port, address, "bob") as bob:
        while await ann.hear() != "* bob has come":
            pass
        bob.writer.write(b"".join(b"%d\n" % number for number in range(3000)))
        for number in range(3000):
            assert await ann.hear() == f"bob: {number}"


async def test_a_client_that_does_not_read_is_let_go(port: int, address: str) -> None:
    """All lines reach the client that reads, before and after."""
    lines = 3000
    async with (
        joined(port, address, "ann") as ann,
        joined(port, address, "slow") as slow,
        joined(port, address, "bob") as bob,
    ):
        while await ann.hear() != "* bob has come":
            pass

        async def talk() -> None:
            for number in range(lines):
                await bob.say(f"{number} ".ljust(900, "x"))

        talking = asyncio.create_task(talk())
        count, news = 0, []
        while count < lines:
            line = await ann.hear()
            if line.startswith("bob: "):
                assert int(line.split()[1]) == count
                count += 1
            else:
                news.append(line)
        await talking
        assert news == ["* slow has left (too slow)"]
        # Its connection ends, behind a part of the lines.
        with contextlib.suppress(ConnectionError):
            while await slow.hear():
                pass


async def test_a_lost_client(port: int, address: str) -> None:
    async with joined(port, address, "ann") as ann, joined(port, address, "bob") as bob:
        while await ann.hear() != "* bob has come":
            pass
        bob.writer.transport.abort()
        assert (await ann.hear()).startswith("* bob has left")


# Programs of their own, whatever the tests' loop.


@pytest.fixture
def server(address: str) -> Iterator[Program]:
    with Program(PROGRAM, "serve", "--host", address) as program:
        assert program.line() == f"listening on {address} 18523"
        yield program


@pytest.mark.one_loop
def test_clients_that_leave_in_any_way(server: Program, address: str) -> None:
    join = (PROGRAM, "join", "--host", address)
    with Program(*join, "ann") as ann:
        assert ann.line() == "* here: ann"
        for name, how, status in (
            ("eof", None, 0),
            ("interrupted", signal.SIGINT, 130),
            ("killed", signal.SIGKILL, -9),
        ):
            with Program(*join, name) as other:
                assert other.line() == f"* here: ann, {name}"
                assert ann.line() == f"* {name} has come"
                other.say("hello")
                assert ann.line() == f"{name}: hello"
                assert other.end(how) == (status, "")
            assert ann.line() == f"* {name} has left" + (" (lost)" if status == -9 else "")
        with Program(*join, "ann") as twice:
            assert twice.end() == (1, "chat: the name ann is taken\n")
        assert server.end(signal.SIGINT) == (0, "")
        assert ann.end() == (1, "chat: the server has ended the conversation\n")


@pytest.mark.one_loop
def test_a_killed_server(server: Program, address: str) -> None:
    with Program(PROGRAM, "join", "--host", address, "ann") as ann:
        assert ann.line() == "* here: ann"
        server.end(signal.SIGKILL)
        status, error = ann.end()
        assert status == 1
        assert error.startswith("chat: ")
        assert "the peer disconnected" in error
