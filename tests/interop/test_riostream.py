"""riostream, both roles: each side writes to the other's memory, and watches its own.

Each maps its buffer at offset 0 and sends 16 bytes to tell.  Then, in rounds, the client and after
it the server write the whole buffer of the other side, `-C` times.  The last byte of the last time
is a number that the two count up by turns: the other side reads it in its memory again and again
until it is there.  With `-T v` the bytes before it are as those of rstream (see rstream_peer.py).
"""

from __future__ import annotations

import asyncio
from asyncio import StreamReader, StreamWriter

import pytest

from aiordma import StreamConfig
from aiordma.streams.iomap import StreamIomap
from aiordma.verbs import MemoryRegion
from tests.inside.streams import takes_mappings
from tests.interop.program import assert_bytes, running
from tests.interop.rstream_peer import ROUNDS, SYNC, Pattern, Run
from tests.interop.streaming import Dialed, dialed, serving_one

#: The one mapping of riostream.
CONFIG = StreamConfig(iomap_slots=1)
#: What is in the last byte before the first number.
NOTHING = 0xFF

each_kind = pytest.mark.parametrize(
    ("size", "mode"),
    [(64, "nonblocking"), (65_536, "blocking"), (1 << 20, "blocking"), (1 << 20, "nonblocking")],
)


class Talk:
    """This side of a conversation."""

    def __init__(self, iomap: StreamIomap, run: Run, ours: MemoryRegion, shown: MemoryRegion):
        self._iomap = iomap
        self._run = run
        self._ours, self._shown = ours.view, shown.view
        self._source = ours
        self._shown[-1] = NOTHING
        self._said, self._heard = Pattern(), Pattern()
        self._number = 0

    def _next(self) -> int:
        self._number += 1
        return self._number - 1

    async def say(self) -> None:
        """Write the peer's memory; the number comes with the last time."""
        size = self._run.size
        for _ in range(self._run.count - 1):
            self._ours[:] = bytes(size - 1) + bytes([NOTHING])
            await self._iomap.write(self._source, 0)
        self._ours[:] = self._said.take(size - 1) + bytes([self._next()])
        await self._iomap.write(self._source, 0)

    async def hear(self) -> None:
        """Wait for the number, and compare what is before it."""
        number = self._next()
        # Nothing tells of the peer's writes: this is how riostream notices ours, too.
        while self._shown[-1] != number:  # noqa: ASYNC110 -- there is no event
            await asyncio.sleep(0)
        assert_bytes(self._shown[:-1], self._heard.take(self._run.size - 1))


async def converse(reader: StreamReader, writer: StreamWriter, run: Run, *, first: bool) -> None:
    """All of it; `first` is the client."""
    iomap = writer.transport.iomap  # type: ignore[attr-defined]
    async with await iomap.register(run.size) as source:
        with await iomap.map(run.size, 0) as shown:
            talk = Talk(iomap, run, source, shown.region)
            if first:
                writer.write(bytes(SYNC))
            assert len(await reader.readexactly(SYNC)) == SYNC
            if not first:
                writer.write(bytes(SYNC))
            await writer.drain()
            assert [(one.offset, one.length) for one in iomap.mappings()] == [(0, run.size)]
            for _ in range(ROUNDS):
                for turn in (talk.say, talk.hear) if first else (talk.hear, talk.say):
                    await turn()
            assert await reader.read() == b""


@each_kind
async def test_aiordma_serves_riostream(address: str, size: int, mode: str) -> None:
    run = Run(size, mode=mode, program="riostream")
    async with (
        serving_one(address, lambda r, w: converse(r, w, run, first=False), CONFIG) as served,
        running(*run.client(address, served.port)) as riostream,
    ):
        await served.ended
        await riostream.finish()
    run.assert_told(riostream)


def _takes_mappings(riostream: Dialed) -> bool:
    """It listens first and sets its options then: who comes in between cannot map anything."""
    return takes_mappings(riostream.writer.transport)


@each_kind
async def test_riostream_serves_aiordma(address: str, port: int, size: int, mode: str) -> None:
    run = Run(size, mode=mode, program="riostream")
    async with dialed(
        lambda at: run.server(address, at), address, port, CONFIG, is_ready=_takes_mappings
    ) as riostream:
        await converse(riostream.reader, riostream.writer, run, first=True)
        await riostream.program.finish()
    run.assert_told(riostream.program)


async def test_riostream_finds_no_slot(address: str) -> None:
    """We have none by default: riostream cannot publish its buffer, and hangs up at once.

    Its end may be here before our side of the connection has begun.
    """
    run = Run(64, program="riostream")

    async def talk(reader: StreamReader, _: StreamWriter) -> None:
        assert await reader.read() == b""

    async with (
        serving_one(address, talk) as served,
        running(*run.client(address, served.port)) as riostream,
    ):
        await served.ended
        said = await riostream.finish(255)
    assert said[-1] == "riomap: Cannot allocate memory"
