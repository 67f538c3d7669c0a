"""Mappings between two streams of aiordma; tests/interop/test_riostream.py has a foreign peer."""

from __future__ import annotations

import pytest

from aiordma import ConnectionLostError, RemoteAccessError, StreamConfig
from aiordma.streams.iomap import StreamIomap
from aiordma.verbs import SGE
from tests.device.oracle import until
from tests.device.streaming import Streams, stream_pair
from tests.exports import exported

CONFIG = StreamConfig(iomap_slots=2)
SIZE = 3000


def iomap(side: Streams) -> StreamIomap:
    """The mappings of one end."""
    found: StreamIomap = side[1].transport.iomap  # type: ignore[attr-defined]
    return found


async def tell(one: Streams, other: Streams) -> None:
    """Send a word, behind which everything before it is known there."""
    one[1].write(b"!")
    assert await other[0].readexactly(1) == b"!"


async def test_writes_by_both_sides(address: str) -> None:
    """Each writes a piece of its memory to a piece of the other's."""
    async with stream_pair(address, CONFIG) as sides:
        for here, there in (sides, sides[::-1]):
            with await iomap(here).map(SIZE, 1 << 40) as shown:
                shown.region.view[:] = b"." * SIZE
                await tell(here, there)
                with await iomap(there).register(bytearray(b"0123456789")) as source:
                    await iomap(there).write(SGE(source, 2, 5), (1 << 40) + 1000)
                await tell(there, here)
                assert bytes(shown.region.view[995:1010]) == b".....23456....."


async def test_a_forgotten_source_is_given_back(address: str) -> None:
    """When the write from it has ended, with a warning; a mapping stays, for the peer's sake."""
    async with stream_pair(address, CONFIG) as (here, there):
        mine = bytearray(SIZE)
        await iomap(here).map(SIZE, 0)
        await tell(here, there)

        async def forget() -> None:
            await iomap(there).write(await iomap(there).register(mine), 0)
            await until(lambda: not exported(mine))

        with pytest.warns(ResourceWarning, match="unclosed <MemoryRegion open .*async with"):
            await forget()
        assert len(iomap(there).mappings()) == 1


async def test_where_nothing_is_mapped(address: str) -> None:
    async with stream_pair(address, CONFIG) as (here, there):
        source = await iomap(there).register(SIZE)
        with pytest.raises(ValueError, match="no mapping"):
            await iomap(there).write(source, 0)
        with await iomap(here).map(SIZE, 0), source:
            await tell(here, there)
            await iomap(there).write(source, 0)
            for offset in (-1, 1, SIZE):
                with pytest.raises(ValueError, match="no mapping"):
                    await iomap(there).write(source, offset)


async def test_a_mapping_that_has_ended(address: str, is_siw: bool) -> None:
    """A write by one who was not told ends the connection."""
    async with stream_pair(address, CONFIG) as (here, there):
        with await iomap(here).map(SIZE, 0) as shown:
            await tell(here, there)
        await shown.region.wait_closed()
        with await iomap(there).register(SIZE) as source:
            if is_siw:  # which tells a write complete before it is refused
                await iomap(there).write(source, 0)
            else:
                with pytest.raises(RemoteAccessError):
                    await iomap(there).write(source, 0)
        for reader, _ in (here, there):
            with pytest.raises(ConnectionLostError):
                await reader.read()


async def test_after_the_end(address: str) -> None:
    async with stream_pair(address, CONFIG) as (here, there):
        mapped = await iomap(here).map(SIZE, 0)
        await tell(here, there)
        source = await iomap(there).register(SIZE)
        for _, writer in (here, there):
            writer.close()
            await writer.wait_closed()
            await writer.transport.wait_closed()  # type: ignore[attr-defined]
        assert mapped.region.closed
        assert source.closed
        mapped.close()
        for side in (here, there):
            with pytest.raises(ConnectionLostError):
                await iomap(side).map(SIZE)
            with pytest.raises(ConnectionLostError):
                await iomap(side).register(SIZE)
            with pytest.raises(ConnectionLostError):
                await iomap(side).write(source, 0)
