"""readexactly() of many bytes: they are copied once, and none is lost where it ends otherwise."""

from __future__ import annotations

import asyncio
import gc
import random
import tracemalloc

import pytest

from tests.device.oracle import until
from tests.device.streaming import LIMIT_S, stream_pair
from tests.inside.streams import buffered, in_the_ring

pytestmark = pytest.mark.device

MIB = 1 << 20


async def put(writer: asyncio.StreamWriter, data: bytes) -> None:
    for start in range(0, len(data), MIB):
        writer.write(data[start : start + MIB])
        await writer.drain()


@pytest.mark.parametrize("size", [65_535, 65_536, 65_537, 3 * MIB + 1])
@pytest.mark.parametrize("early", [0, 5, 70_000])
async def test_every_way_that_bytes_come(address: str, size: int, early: int) -> None:
    """Some lie in the reader before, and some lie behind them."""
    data = random.Random(f"{size}.{early}").randbytes(early + size + 9)
    async with stream_pair(address) as ((reader, _), (_, writer)):
        sending = asyncio.create_task(put(writer, data))
        async with asyncio.timeout(LIMIT_S):
            if early:
                assert await reader.read(1) == data[:1]
                await until(lambda: len(buffered(reader)) >= min(early, 1000))
            got = await reader.readexactly(size)
            assert type(got) is bytes
            assert got == data[min(early, 1) :][:size]
            rest = await reader.readexactly(len(data) - min(early, 1) - size)
        assert got + rest == data[min(early, 1) :]
        await sending


async def test_bytes_are_copied_once(address: str) -> None:
    """Memory is taken for the result alone, and not for a second or third copy of it."""
    size = 16 * MIB
    data = bytes(size)
    async with stream_pair(address) as ((reader, _), (_, writer)):
        sending = asyncio.create_task(put(writer, data))
        gc.collect()
        tracemalloc.start()
        try:
            async with asyncio.timeout(LIMIT_S):
                got = await reader.readexactly(size)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert got == data
        # The sender is in this process: two of its pieces, and what the tasks take.
        assert peak < size + 4 * MIB
        await sending


async def test_no_memory_is_taken_for_bytes_that_have_not_come(address: str) -> None:
    """The length was the peer's, who lied."""
    async with stream_pair(address) as ((reader, _), (_, writer)):
        writer.write(b"few")
        tracemalloc.start()
        try:
            reading = asyncio.create_task(reader.readexactly(1 << 44))
            # They lie in the ring, or in the reader if they were faster than the call.
            await until(lambda: in_the_ring(reader) == 3 or buffered(reader) == b"few")
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 4 * MIB
        reading.cancel()
        await asyncio.wait([reading])
        assert await reader.readexactly(3) == b"few"


@pytest.mark.parametrize("size", [3 * MIB, 65 * MIB])
async def test_the_end_of_the_connection(address: str, size: int) -> None:
    """The same, whichever way the bytes take."""
    data = random.Random(2).randbytes(2 * MIB)
    async with stream_pair(address) as ((reader, _), (_, writer)):
        reading = asyncio.create_task(reader.readexactly(size))
        await put(writer, data)
        writer.transport.abort()
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(asyncio.IncompleteReadError) as raised:
                await reading
        assert (raised.value.partial, raised.value.expected) == (data, size)


@pytest.mark.parametrize("size", [3 * MIB, 65 * MIB])
async def test_an_exception_of_the_protocol(address: str, size: int) -> None:
    """As of asyncio's reader, whichever way the bytes take: they stay, and every call raises."""
    data = random.Random(2).randbytes(2 * MIB)
    async with stream_pair(address) as ((reader, _), (_, writer)):
        reading = asyncio.create_task(reader.readexactly(size))
        await put(writer, data)
        reader.set_exception(ZeroDivisionError("of a protocol"))
        for wait in (reading, reader.readexactly(size)):
            with pytest.raises(ZeroDivisionError):
                await wait
        assert data.startswith(buffered(reader))
        assert len(buffered(reader)) > MIB


async def test_canceled_in_the_middle_again_and_again(address: str) -> None:
    """Whatever has come by then is there for the next call."""
    random_ = random.Random(4)
    data = random_.randbytes(4 * MIB)
    async with stream_pair(address) as ((reader, _), (_, writer)):
        sending = asyncio.create_task(put(writer, data))
        canceled = 0
        async with asyncio.timeout(LIMIT_S):
            while True:
                reading = asyncio.create_task(reader.readexactly(len(data)))
                for _ in range(random_.randrange(1, 12)):
                    await asyncio.sleep(0)
                if reading.done():
                    break
                reading.cancel()
                await asyncio.wait([reading])
                if not reading.cancelled():
                    break
                canceled += 1
        assert reading.result() == data
        assert canceled > 3
        await sending
