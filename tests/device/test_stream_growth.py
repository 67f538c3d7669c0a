"""The rings of a stream: small at first, larger with traffic that the program takes."""

from __future__ import annotations

import asyncio
import random

import pytest

import aiordma
from aiordma import StreamConfig
from tests.device.oracle import until
from tests.device.streaming import LIMIT_S, noted, stream_pair
from tests.inside.streams import bytes_of_steps, limit_steps, port_of, refuse_larger_rings

pytestmark = pytest.mark.device

FIRST, FULL = 16 * 1024, 256 * 1024
PIECE = 50_001


def rings(transport: asyncio.BaseTransport) -> tuple[int, int]:
    """Bytes of the newest ring that is read, and of the ring for sending."""
    memory = port_of(transport).memory
    sizes = [region.length for region in (memory.ring, *memory.grown)]
    if (send := len(memory.send)) > FIRST:
        sizes.remove(send)
    return sizes[-1], send


def reading(writer: asyncio.StreamWriter) -> asyncio.ReadTransport:
    assert isinstance(writer.transport, asyncio.Transport)
    return writer.transport


async def send(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Write and drain pieces."""
    for at in range(0, len(data), PIECE):
        writer.write(data[at : at + PIECE])
        await writer.drain()


@pytest.mark.parametrize("larger", [True, False], ids=["memory", "no memory"])
async def test_rings_grow_with_traffic(
    address: str, larger: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All bytes arrive, in order, by the first rings and by larger ones."""
    data = random.Random(7).randbytes(20 * PIECE)
    async with stream_pair(address) as ((reader, writer), (there, _back)):
        assert rings(writer.transport) == rings(_back.transport) == (FIRST, FIRST)
        if not larger:
            refuse_larger_rings(monkeypatch)
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
            tasks.create_task(send(writer, data))
            got = await there.readexactly(len(data))
        assert got == data
        full = FULL if larger else FIRST
        assert rings(writer.transport) == (FIRST, full)
        assert rings(_back.transport) == (full, FIRST)
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
            tasks.create_task(send(_back, data))
            tasks.create_task(send(writer, data))
            first = tasks.create_task(reader.readexactly(len(data)))
            second = tasks.create_task(there.readexactly(len(data)))
        assert first.result() == second.result() == data
        assert rings(writer.transport) == rings(_back.transport) == (full, full)


async def test_larger_rings_count_in_the_budget_of_the_loop(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ring that the budget refuses is the next stream's once the first stream is gone."""
    data = random.Random(9).randbytes(20 * PIECE)
    config = StreamConfig(send_buffer_size=FIRST)
    limit_steps(monkeypatch, FULL + FULL // 2)

    async def there_and_back() -> None:
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
            tasks.create_task(send(writer, data))
            assert await there.readexactly(len(data)) == data

    async with stream_pair(address, config) as ((_, writer), (there, back)):
        await there_and_back()
        assert rings(back.transport) == (FULL, FIRST)
        async with stream_pair(address, config) as ((_, writer), (there, back)):
            await there_and_back()
            assert rings(back.transport) == (FIRST, FIRST)
    await until(lambda: not bytes_of_steps(), LIMIT_S)
    async with stream_pair(address, config) as ((_, writer), (there, back)):
        await there_and_back()
        assert rings(back.transport) == (FULL, FIRST)
        assert bytes_of_steps() == FULL


async def test_small_lines_need_no_larger_ring(address: str) -> None:
    async with stream_pair(address) as ((_, writer), (there, _back)):
        for _ in range(2 * FULL // 1000):
            writer.write(bytes(999) + b"\n")
            await writer.drain()
            assert len(await there.readline()) == 1000
        assert rings(writer.transport) == rings(_back.transport) == (FIRST, FIRST)


async def test_no_ring_grows_while_reading_is_paused(address: str) -> None:
    """The peer has to wait, as over TCP."""
    data = random.Random(8).randbytes(2 * FULL)
    async with stream_pair(address) as ((_, writer), (there, back)):
        reading(back).pause_reading()
        sending = asyncio.create_task(send(writer, data))
        await until(lambda: not port_of(writer.transport).state.next_place()[1], LIMIT_S)
        assert not sending.done()
        assert rings(back.transport)[0] == FIRST
        assert len(port_of(back.transport).memory.grown) == 0
        reading(back).resume_reading()
        assert await there.readexactly(len(data)) == data
        await sending


async def test_abort_keeps_bytes_that_wait_for_room(address: str) -> None:
    """Bytes that `drain` lets pass arrive; of those that it holds back nothing more does."""
    config = StreamConfig(receive_buffer_size=FIRST)
    for size, whole in ((FIRST + 40_000, True), (FIRST + 80_000, False)):
        async with noted(address, config) as both:
            both.server.transport.pause_reading()
            both.client.transport.write(b"x" * size)
            assert both.client.paused is not whole
            both.client.transport.abort()
            assert await both.client.ended() is None
            both.server.transport.resume_reading()
            lost = await both.server.ended()
            if whole:
                assert (lost, len(both.server.data)) == (None, size)
            else:
                assert isinstance(lost, aiordma.ConnectionLostError)
                assert len(both.server.data) < size
