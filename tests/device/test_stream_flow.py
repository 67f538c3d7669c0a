"""Much data: both ways at once, a slow reader, and the bounds of what is kept."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
from typing import Any

import pytest

from aiordma import StreamConfig
from tests.device.oracle import until
from tests.device.streaming import Note, noted
from tests.inside.streams import port_of, with_depths

pytestmark = pytest.mark.device

MIB = 1 << 20
# Each way; at least 64.  A whole GiB takes a minute or two on Soft-RoCE:
# AIORDMA_STREAM_MIB=1024 python -m pytest tests/device/test_stream_flow.py
TOTAL = max(64, int(os.environ.get("AIORDMA_STREAM_MIB", "64"))) * MIB


class Pump(asyncio.Protocol):
    """Sends random chunks as fast as it may, and hashes what it gets.

    A slow one pauses reading now and then.
    """

    def __init__(self, seed: int, *, slow: bool) -> None:
        self.rng = random.Random(seed)
        self.pattern = self.rng.randbytes(MIB)
        self.slow = slow
        self.sent = hashlib.sha256()
        self.got = hashlib.sha256()
        self.left = TOTAL
        self.missing = TOTAL
        self.transport: Any = None
        self.writing = True
        self.pauses = self.resumes = self.holds = 0
        self.most_waiting = self.most_at_once = 0
        loop = asyncio.get_running_loop()
        self.done, self.gone = loop.create_future(), loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.send()

    def send(self) -> None:
        for _ in range(16):  # then others have a turn
            if not self.writing or not self.left:
                break
            size = min(self.left, self.rng.choice((1, 17, 1000, 4096, 65_536, 200_000)))
            at = self.rng.randrange(MIB - size)
            chunk = self.pattern[at : at + size]
            self.sent.update(chunk)
            self.left -= size
            self.transport.write(chunk)
            self.most_waiting = max(self.most_waiting, self.transport.get_write_buffer_size())
        if self.left and self.writing:
            asyncio.get_running_loop().call_soon(self.send)
        elif not self.left and self.writing:
            self.writing = False
            self.transport.write_eof()

    def pause_writing(self) -> None:
        assert self.pauses == self.resumes
        self.pauses += 1
        self.writing = False

    def resume_writing(self) -> None:
        self.resumes += 1
        assert self.pauses == self.resumes
        if self.left:
            self.writing = True
            asyncio.get_running_loop().call_soon(self.send)
        elif not self.writing:
            self.transport.write_eof()

    def data_received(self, data: bytes) -> None:
        assert not self.done.done()
        self.got.update(data)
        self.missing -= len(data)
        self.most_at_once = max(self.most_at_once, len(data))
        if self.slow and self.rng.random() < 0.05:
            self.holds += 1
            self.transport.pause_reading()
            asyncio.get_running_loop().call_later(0.002, self.transport.resume_reading)

    def eof_received(self) -> bool:
        self.done.set_result(None)
        return True

    def connection_lost(self, exc: BaseException | None) -> None:
        self.gone.set_result(exc)


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_much_both_ways_with_a_slow_reader(address: str) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}, {TOTAL // MIB} MiB each way")
    config = StreamConfig()
    made: list[Pump] = []

    def pump(slow: bool) -> Pump:
        made.append(Pump(seed + slow, slow=slow))
        return made[-1]

    async with noted(
        address, config, client=lambda: pump(slow=False), server=lambda: pump(slow=True)
    ):
        async with asyncio.timeout(1700):
            await asyncio.gather(*(one.done for one in made))
        for one in made:
            one.transport.close()
        assert await asyncio.gather(*(one.gone for one in made)) == [None, None]
    one, other = made
    assert one.missing == other.missing == 0
    assert one.sent.hexdigest() == other.got.hexdigest()
    assert other.sent.hexdigest() == one.got.hexdigest()
    for each in made:
        assert each.pauses == each.resumes > 0
        # One chunk above the high-water mark, and never more than the ring at once.
        assert each.most_waiting <= 64 * 1024 + 200_000
        assert each.most_at_once <= config.receive_buffer_size
        print(f"pauses {each.pauses}, most waiting {each.most_waiting}, holds {each.holds}")
    assert other.holds or one.holds


async def test_a_reader_that_stops_holds_the_writer(address: str) -> None:
    """No more is under way than the buffers of both ends, whatever the writer has."""
    config = StreamConfig(receive_buffer_size=8192, send_buffer_size=8192)
    async with noted(address, config) as both:
        both.server.transport.pause_reading()
        assert not both.server.transport.is_reading()
        sent = 0
        for _ in range(100):
            both.client.transport.write(b"x" * 1000)
            sent += 1000
        await asyncio.sleep(0.2)  # what could move has moved; nothing tells that nothing more does
        waiting = both.client.transport.get_write_buffer_size()
        assert sent - 8192 - 8192 <= waiting < sent
        assert both.client.paused
        assert not both.server.data
        both.server.transport.resume_reading()
        assert await both.server.received(sent) == b"x" * sent
        assert not both.client.paused
        assert both.client.calls.count("pause") == both.client.calls.count("resume") == 1


@pytest.mark.parametrize("size", [4096, 4098, 65_536])
async def test_rings_of_all_sizes(address: str, size: int) -> None:
    config = with_depths(StreamConfig(receive_buffer_size=size, send_buffer_size=size), recv=16)
    data = random.Random(size).randbytes(300_000)
    async with noted(address, config) as both:
        rng = random.Random(size)
        at = 0
        while at < len(data):
            step = rng.choice((1, 2, 100, 5000))
            both.client.transport.write(data[at : at + step])
            both.server.transport.write(data[at : at + step])
            at += step
            if rng.random() < 0.1:
                await asyncio.sleep(0)
        assert await both.server.received(len(data)) == data
        assert await both.client.received(len(data)) == data


@pytest.mark.one_device
@pytest.mark.one_loop
async def test_more_small_messages_than_sequence_numbers(address: str) -> None:
    """70,000 of one byte each: the 16 bits of the sequence wrap."""
    rounds, burst = 700, 100

    class Count(Note):
        def data_received(self, data: bytes) -> None:
            self.data += data
            if len(self.data) % burst == 0:
                self.transport.write(b"+")

    config = with_depths(StreamConfig(), recv=512, send=512)
    async with noted(address, config, server=Count) as both:
        sent = bytearray()
        for n in range(rounds):
            for k in range(burst):  # fewer than may be under way, so that none is joined
                byte = bytes(((n + k) & 0xFF,))
                sent += byte
                both.client.transport.write(byte)
            await both.client.received(n + 1)
        assert both.server.data == sent
        # One completion stands for many messages: the last ones are not told of yet.  An answer
        # can be here before the completion of what it answers.
        await until(lambda: port_of(both.client.transport).state.progress > rounds * burst - 32)


async def test_water_marks(address: str) -> None:
    config = StreamConfig(receive_buffer_size=4096, send_buffer_size=4096)
    async with noted(address, config) as both:
        both.server.transport.pause_reading()
        transport = both.client.transport
        transport.set_write_buffer_limits(high=10_000, low=2_000)
        assert transport.get_write_buffer_limits() == (2_000, 10_000)
        while not both.client.paused:
            transport.write(b"y" * 100)
        assert 10_000 < transport.get_write_buffer_size() <= 10_100
        seen: list[int] = []
        resume = both.client.resume_writing

        def resumed() -> None:
            seen.append(transport.get_write_buffer_size())
            resume()

        both.client.resume_writing = resumed
        both.server.transport.resume_reading()
        await until(lambda: not both.client.paused)
        assert seen[0] <= 2_000
        with pytest.raises(ValueError, match="high"):
            transport.set_write_buffer_limits(high=1, low=2)


async def test_bytes_written_on_resuming_are_sent_although_the_stream_is_closing(
    address: str,
) -> None:
    """asyncio's TLS does so with its `close_notify`: the last piece was sent, and there is room."""

    class Closing(Note):
        def resume_writing(self) -> None:
            super().resume_writing()
            if self.calls.count("resume") == 1:
                self.transport.write(b"the last")

    async with noted(address, client=Closing) as both:
        both.server.transport.pause_reading()
        transport = both.client.transport
        transport.set_write_buffer_limits(high=0)
        size = 0
        while not both.client.paused:
            transport.write(b"z" * 50_000)
            size += 50_000
        transport.close()
        both.server.transport.resume_reading()
        assert await both.server.ended() is None
        assert await both.client.ended() is None
        assert both.server.data == b"z" * size + b"the last"


async def test_a_protocol_that_comes_while_writing_is_paused_is_told(address: str) -> None:
    """asyncio's TLS, which takes over with `start_tls`, is resumed only if it was paused."""
    async with noted(address) as both:
        both.server.transport.pause_reading()
        transport, later = both.client.transport, Note()
        while not both.client.paused:
            transport.write(b"z" * 50_000)
        transport.set_protocol(later)
        assert later.calls == ["pause"]
        both.server.transport.resume_reading()
        await until(lambda: not later.paused)
        assert later.calls == ["pause", "resume"]
        assert both.client.calls == ["made", "pause"]
        transport.close()
        assert await later.ended() is None


async def test_a_protocol_that_answers_within_the_callback(address: str) -> None:
    """Ping and pong from data_received alone; no task is woken."""
    rounds = 500

    class Ping(Note):
        def data_received(self, data: bytes) -> None:
            self.data += data
            if len(self.data) < rounds:
                self.transport.write(b"i")

    class Pong(Note):
        def data_received(self, data: bytes) -> None:
            self.data += data
            self.transport.write(b"o")

    async with noted(address, client=Ping, server=Pong) as both:
        both.client.transport.write(b"i")
        assert await both.client.received(rounds) == b"o" * rounds
