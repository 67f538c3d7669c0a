"""rstream: its command lines, and this side of what it says on a stream.

The client and then the server send 16 bytes.  Then, as many times as `-I` says, the client sends
`-C` pieces of `-S` bytes and gets as many back; no byte stands for anything but itself.  With
`-T v` every byte is one more than the one before it in the same direction, modulo 256, all through
the conversation; rstream ends with status 255 at the first that is not.  Whoever is done first
ends both directions at once.

`-T b` blocks in one call for the whole piece, `-T n` calls until it is there, `-T a` asks poll
before each call.  The last two never sleep: on a machine with one processor they take whole slices
of its time, and the peer has what is left.
"""

from __future__ import annotations

import asyncio
from asyncio import StreamReader, StreamWriter
from dataclasses import dataclass

from tests.interop.program import Program, assert_bytes, running
from tests.interop.streaming import serving_one

#: Before the pieces.
SYNC = 16
BYTES = bytes(range(256))
#: How often all pieces go there and back.
ROUNDS = 2
MODES = {"blocking": "b", "nonblocking": "n", "poll": "a"}


class Pattern:
    """The bytes of one direction."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, size: int) -> bytes:
        """The next `size` bytes."""
        first = self._next
        self._next = (first + size) % 256
        return (BYTES * (size // 256 + 2))[first : first + size]


def _short(number: int, thousand: int) -> str:
    """A number as rstream writes it."""
    for power, letter in (2, "m"), (1, "k"):
        if number >= thousand**power:
            return f"{number // thousand**power}{letter}"
    return str(number)


@dataclass(frozen=True)
class Run:
    """One conversation.

    Attributes:
        size: Bytes of a piece.
        count: Pieces before the direction changes.
        mode: A key of MODES.
        program: Or riostream, of which the options are the same.
    """

    size: int
    count: int = 2
    mode: str = "blocking"
    program: str = "rstream"

    def _options(self, port: int) -> tuple[str, ...]:
        pieces = ("-S", str(self.size), "-C", str(self.count), "-I", str(ROUNDS))
        return (*pieces, "-T", MODES[self.mode], "-T", "v", "-p", str(port))

    def client(self, address: str, port: int) -> tuple[str, ...]:
        """The command of a client."""
        return (self.program, "-s", address, *self._options(port))

    def server(self, address: str, port: int) -> tuple[str, ...]:
        """The command of a server, which takes one connection."""
        return (self.program, "-b", address, *self._options(port))

    def assert_told(self, program: Program) -> None:
        """It says what it has done after it has compared every byte."""
        told = program.lines[-1].split()
        size, count = _short(self.size, 1024), _short(self.count, 1000)
        assert told[:4] == ["custom", size, count, str(ROUNDS)]


class Talk:
    """This side of a conversation.

    Args:
        reader: Of the connection.
        writer: Of the connection.
        run: What is to be said.
        first: Whether this side is the client.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, run: Run, *, first: bool
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._run = run
        self._turns = (self.say, self.hear) if first else (self.hear, self.say)
        self._ours, self._theirs = Pattern(), Pattern()

    async def say(self, size: int) -> None:
        """Send a piece."""
        self._writer.write(self._ours.take(size))
        await self._writer.drain()

    async def hear(self, size: int) -> None:
        """Receive a piece, and compare."""
        assert_bytes(await self._reader.readexactly(size), self._theirs.take(size))

    async def go_on(self) -> None:
        """Send pieces until that fails."""
        while True:
            await self.say(65_536)

    async def begin(self) -> None:
        """The first bytes of both."""
        for turn in self._turns:
            await turn(SYNC)

    async def all(self) -> None:
        """The whole conversation; the end of the stream is left to the caller."""
        await self.begin()
        for _ in range(ROUNDS):
            for turn in self._turns:
                for _ in range(self._run.count):
                    await turn(self._run.size)

    async def end(self) -> None:
        """rstream, too, is done: nothing more comes."""
        assert await self._reader.read() == b""


async def serve_client(address: str, run: Run, *, end: bool) -> None:
    """Serve a program's client; `end` says the end of the stream as well, before it is closed."""

    async def talk(reader: StreamReader, writer: StreamWriter) -> None:
        conversation = Talk(reader, writer, run, first=False)
        await conversation.all()
        if end:
            await conversation.end()

    async with (
        serving_one(address, talk) as served,
        running(*run.client(address, served.port)) as rstream,
    ):
        await served.ended
        await rstream.finish()
    run.assert_told(rstream)
