"""Streams on a wire that loses, repeats and reorders, and on one that is cut."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
from contextlib import asynccontextmanager

import pytest

from aiordma import StreamConfig
from tests.device.netem import dropped, faults
from tests.device.streaming import Both, noted, read_hash, stream_pair

pytestmark = [pytest.mark.device, pytest.mark.two_hosts]

OTHER = os.environ.get("AIORDMA_SOFTROCE_ADDR2", "")
CONFIG = StreamConfig(keepalive_s=2, close_timeout_s=3)
#: A dead peer is noticed within so many seconds of guest time: the next sign of life, then seven
#: timeouts, which Soft-RoCE lets grow, and some for good measure.
NOTICED_S = 40.0


@pytest.mark.parametrize(
    "fault",
    [
        ("loss", "5%"),
        ("duplicate", "10%"),
        ("delay", "2ms", "reorder", "25%", "50%"),
        ("delay", "1ms", "loss", "5%", "duplicate", "10%", "reorder", "25%", "50%"),
        ("corrupt", "1%"),
        ("delay", "100ms"),
        ("rate", "50mbit"),
    ],
    ids=[
        *("5% lost", "10% twice", "25% out of order", "all together"),
        *("1% damaged", "late", "a slow wire"),
    ],
)
async def test_every_byte_arrives(address: str, wire: None, fault: tuple[str, ...]) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    total = 2_000_000
    data = random.Random(seed).randbytes(total)
    config = StreamConfig(close_timeout_s=120)
    async with stream_pair(address, config, other=OTHER) as (
        (reader, writer),
        (theirs, answers),
    ):
        assert writer.get_extra_info("device") != answers.get_extra_info("device")
        faults(*fault)

        async def send(to: asyncio.StreamWriter, n: int) -> None:
            rng = random.Random(seed + n)
            at = 0
            while at < total:
                step = rng.choice((1, 500, 5000, 60_000))
                to.write(data[at : at + step])
                at += step
                await to.drain()
            to.write_eof()

        async def expect(stream: asyncio.StreamReader) -> None:
            got = await stream.read()
            assert len(got) == total
            assert got == data

        await asyncio.gather(send(writer, 1), send(answers, 2), expect(reader), expect(theirs))
        if "loss" in fault:
            assert dropped() > 0
        faults()


@asynccontextmanager
async def cut_off(address: str, config: StreamConfig):  # type: ignore[no-untyped-def]
    """Two protocols whose wire carries nothing from now on."""
    async with noted(address, config, local_addr=(OTHER, 0)) as both:
        both.client.transport.write(b"hello")
        await both.server.received(5)
        faults("loss", "100%")
        try:
            yield both
        finally:
            await asyncio.gather(both.client.ended(), both.server.ended())
            faults()


async def test_a_cut_is_noticed_on_both_sides(address: str, wire: None) -> None:
    """By the keepalive alone: nobody sends anything."""
    both: Both
    async with cut_off(address, CONFIG) as both, asyncio.timeout(NOTICED_S):
        for end in (both.client, both.server):
            assert isinstance(await end.gone, (ConnectionError, TimeoutError))


async def test_a_cut_with_bytes_on_their_way(address: str, wire: None) -> None:
    config = StreamConfig(keepalive_s=None)
    async with cut_off(address, config) as both, asyncio.timeout(NOTICED_S):
        both.client.transport.write(b"x" * 1_000_000)
        assert isinstance(await both.client.gone, (ConnectionError, TimeoutError))
        # The other side has nothing to send and asks for nothing.
        both.server.transport.abort()


async def test_closing_into_a_cut(address: str, wire: None) -> None:
    async with cut_off(address, CONFIG) as both, asyncio.timeout(NOTICED_S):
        both.client.transport.write(b"x" * 1_000_000)
        both.client.transport.close()
        assert isinstance(await both.client.gone, (ConnectionError, TimeoutError))
        assert isinstance(await both.server.gone, (ConnectionError, TimeoutError))


async def test_a_short_break_is_bridged(address: str, wire: None) -> None:
    """Half a second without the wire: the adapter's retries are enough."""
    async with stream_pair(address, StreamConfig(), other=OTHER) as (
        (_, writer),
        (theirs, _),
    ):
        writer.write(b"a" * 100_000)
        await theirs.readexactly(100_000)
        faults("loss", "100%")
        writer.write(b"b" * 100_000)
        await asyncio.sleep(0.5)  # how long the break is, not a wait for anything
        faults()
        reading = asyncio.create_task(read_hash(theirs, 100_000))
        async with asyncio.timeout(60):
            await reading


def test_the_two_ends_are_on_a_wire() -> None:
    shown = subprocess.run(
        ["ip", "-br", "link", "show", "type", "veth"], check=True, capture_output=True, text=True
    )
    assert "veth0" in shown.stdout
    assert "veth1" in shown.stdout
