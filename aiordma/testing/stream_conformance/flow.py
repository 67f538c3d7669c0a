"""Checks of flow control: `pause_reading`, `pause_writing` and their opposites."""

from __future__ import annotations

import asyncio

from aiordma.testing.stream_conformance.data import raises
from aiordma.testing.stream_conformance.link import Link, Subject, each_role

__all__ = ["FlowChecks"]


class FlowChecks(Subject):
    """Flow control."""

    @each_role
    async def test_pause_and_resume_reading(self, link: Link) -> None:
        """Nothing is received while reading is paused, and nothing is lost by it."""
        await link.open()
        transport = link.end.transport
        assert transport.is_reading()
        for _ in range(3):
            transport.pause_reading()
            transport.pause_reading()  # twice is once
            assert not transport.is_reading()
            link.peer.transport.write(b"0123456789")
            before = len(link.end.received)
            await link.turns()
            assert len(link.end.received) == before
            transport.resume_reading()
            transport.resume_reading()
            assert transport.is_reading()
            await link.end.until_received(before + 10)
        assert link.end.received == b"0123456789" * 3

    @each_role
    async def test_pause_in_connection_made(self, link: Link) -> None:
        """Reading that is paused from the first moment stays paused."""
        link.end.on["connection_made"] = lambda transport: transport.pause_reading()
        await link.open()
        assert link.end.transport.is_reading() == self.differs("start cannot pause")
        link.end.transport.pause_reading()
        link.peer.transport.write(b"later")
        await link.turns()
        if self.differs("start pauses in name"):
            await link.end.until_received(5)
            assert link.end.violations
            link.end.violations.clear()
            return
        assert not link.end.received
        link.end.transport.resume_reading()
        await link.end.until_received(5)

    @each_role
    async def test_pause_in_data_received(self, link: Link) -> None:
        """Each piece of data may stop the next one: how programs process one at a time."""
        link.end.on["data_received"] = lambda _: link.end.transport.pause_reading()
        await link.open()
        data = bytes(range(250)) * 4000
        link.peer.transport.write(data)
        while len(link.end.received) < len(data):
            before = len(link.end.received)
            await link.end.until_received(before + 1)
            calls = len(link.end.calls)
            await asyncio.sleep(0)
            assert len(link.end.calls) == calls
            link.end.transport.resume_reading()
        assert link.end.received == data

    @each_role
    async def test_end_of_stream_waits_for_reading(self, link: Link) -> None:
        """Data and then the end of stream: neither comes while paused, both in order after it."""
        await link.open()
        link.end.transport.pause_reading()
        link.peer.transport.write(b"the last words")
        link.peer.transport.close()
        await link.peer.until_lost()
        for _ in range(20):
            await asyncio.sleep(0)
        assert link.end.calls == ["connection_made"], link.end.describe()
        link.end.transport.resume_reading()
        await link.end.until_lost()
        assert link.end.received == b"the last words"
        assert link.end.has_eof
        assert link.end.lost is None

    @each_role
    async def test_limits(self, link: Link) -> None:
        """The write buffer's limits: defaults, one limit derived from the other, wrong values."""
        await link.open()
        transport = link.end.transport
        low, high = transport.get_write_buffer_limits()
        assert 0 <= low <= high
        for arguments, expected in (
            ({}, (16 * 1024, 64 * 1024)),
            ({"high": 1000}, (250, 1000)),
            ({"low": 1000}, (1000, 4000)),
            ({"high": 1000, "low": 999}, (999, 1000)),
            ({"high": 0}, (0, 0)),
        ):
            transport.set_write_buffer_limits(**arguments)
            assert transport.get_write_buffer_limits() == expected
        for high, low in ((1, 2), (10, -1), (-1, -1)):
            raises(ValueError, transport.set_write_buffer_limits, high, low)
        assert transport.get_write_buffer_limits() == (0, 0)

    @each_role
    async def test_writing_is_paused_and_resumed_at_the_marks(self, link: Link) -> None:
        """Paused only above the high mark, once; resumed only at or below the low one, once."""
        sizes: list[int] = []
        for call in ("pause_writing", "resume_writing"):
            link.end.on[call] = lambda: sizes.append(link.end.transport.get_write_buffer_size())
        await link.open()
        high, low = 300_000, 100_000
        link.end.transport.set_write_buffer_limits(high, low)
        assert link.end.transport.get_write_buffer_size() == 0
        for _ in range(2):
            sizes.clear()
            link.peer.received.clear()
            link.peer.transport.pause_reading()
            written = await link.fill()
            assert sizes[0] > high, sizes
            assert link.end.transport.get_write_buffer_size() > low
            link.peer.transport.resume_reading()
            await link.peer.until_received(len(written))
            await link.end.until(lambda: not link.end.is_paused)
            assert sizes[1] <= low, sizes
            assert len(sizes) == 2
            assert link.peer.received == written
        marks = [call for call in link.end.calls if call.endswith("_writing")]
        assert marks == ["pause_writing", "resume_writing"] * 2

    @each_role
    async def test_the_write_buffer_empties(self, link: Link) -> None:
        """`get_write_buffer_size` is 0 again when the peer has everything and answered."""
        link.peer.on["data_received"] = lambda data: link.peer.transport.write(data)
        await link.open()
        link.end.transport.write(bytes(500_000))
        assert link.end.transport.get_write_buffer_size() <= 500_000
        await link.end.until_received(500_000)
        assert link.end.transport.get_write_buffer_size() == 0

    @each_role
    async def test_a_limit_of_zero(self, link: Link) -> None:
        """With limits of 0 every byte that cannot go out at once pauses the writer."""
        await link.open()
        link.end.transport.set_write_buffer_limits(high=0)
        link.peer.transport.pause_reading()
        written = await link.fill()
        link.peer.transport.resume_reading()
        await link.end.until(lambda: not link.end.is_paused)
        assert link.end.transport.get_write_buffer_size() == 0
        await link.peer.until_received(len(written))

    @each_role
    async def test_writing_in_resume_writing(self, link: Link) -> None:
        """A protocol that writes when resumed is paused again; no byte is lost or overtaken."""
        await link.open()
        link.peer.transport.pause_reading()
        expected = bytearray(await link.fill())
        more = [b"a" * 400_000, b"b" * 400_000, b"c"]

        def write_on() -> None:
            while more and not link.end.is_paused:
                expected.extend(more[0])
                link.end.transport.write(more.pop(0))

        link.end.on["resume_writing"] = write_on
        link.peer.transport.resume_reading()
        await link.end.until(lambda: not more)
        await link.peer.until_received(len(expected))
        assert link.peer.received == expected

    @each_role
    async def test_drain_waits(self, link: Link) -> None:
        """`StreamWriter.drain` waits as long as the peer does not read, and no longer."""
        await link.open()
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        protocol.connection_made(link.end.transport)
        link.end.transport.set_protocol(protocol)
        writer = asyncio.StreamWriter(link.end.transport, protocol, reader, loop)
        link.peer.transport.pause_reading()
        total = 0
        while link.end.transport.get_write_buffer_size() <= 65536:
            writer.write(bytes(65536))
            total += 65536
            await asyncio.sleep(0)
        drain = loop.create_task(writer.drain())
        for _ in range(50):
            await asyncio.sleep(0)
        assert not drain.done()
        link.peer.transport.resume_reading()
        await drain
        await link.peer.until_received(total)
        writer.close()
        await writer.wait_closed()
        # The recorder was replaced: it gets the call that its successor got.
        link.end.connection_lost(None)
