"""Checks of protocols with their own receive buffer, and of exchanging the protocol."""

from __future__ import annotations

import asyncio
from typing import Any

from aiordma.testing.stream_conformance.link import Link, Subject, each_role
from aiordma.testing.stream_conformance.recorder import BufferedRecorder, Record, Recorder

__all__ = ["BufferedChecks"]


def _succeed(old: Record, new: Record) -> None:
    """Put a new protocol in the place of an old one, which was lost for its part."""
    transport = old.transport
    new.connection_made(transport)
    transport.set_protocol(new)
    assert transport.get_protocol() is new
    old.connection_lost(None)


class BufferedChecks(Subject):
    """`BufferedProtocol` and `set_protocol`."""

    @each_role
    async def test_buffered_protocol(self, link: Link) -> None:
        """Data goes into the protocol's buffer, however small, whole and in order."""
        for size in (7, 4096, 300_000):
            link.end = BufferedRecorder(f"buffered {link.role}", size)
            link.peer = Recorder("its peer")
            await link.open()
            data = bytes(range(251)) * (20 * size // 251 + 1)
            link.peer.transport.write(data)
            await link.end.until_received(len(data))
            assert link.end.received == data
            link.peer.transport.close()
            await link.end.until_lost()
            assert link.end.lost is None
            assert link.end.has_eof
            await link.close()
            link.verdict()

    @each_role
    async def test_buffered_protocol_with_a_view(self, link: Link) -> None:
        """`get_buffer` may give a part of a larger memory, a new one each time."""
        whole = bytearray(110_000)
        end = BufferedRecorder(f"buffered {link.role}")
        filled = 0

        def advance(nbytes: int) -> None:
            nonlocal filled
            filled += nbytes

        end.on["get_buffer"] = lambda _: memoryview(whole)[filled : filled + 9000]
        end.on["buffer_updated"] = advance
        end.buffer = bytearray(9000)
        link.end = end
        await link.open()
        data = bytes(range(250)) * 400
        link.peer.transport.write(data)
        await link.end.until_received(len(data))
        assert whole == data.ljust(len(whole), b"\0")

    @each_role
    async def test_buffered_protocol_paused(self, link: Link) -> None:
        """Pausing works as for the other kind, from within `buffer_updated` too."""
        link.end = BufferedRecorder(f"buffered {link.role}", 1000)
        link.end.on["buffer_updated"] = lambda _: link.end.transport.pause_reading()
        await link.open()
        link.peer.transport.write(bytes(range(100)) * 50)
        while len(link.end.received) < 5000:
            await link.end.until_received(len(link.end.received) + 1)
            assert not link.end.transport.is_reading()
            link.end.transport.resume_reading()
        assert link.end.received == bytes(range(100)) * 50

    @each_role
    async def test_set_protocol(self, link: Link) -> None:
        """The protocol is exchanged in mid-stream, between both kinds, and no byte is lost."""
        await link.open()
        received = bytearray()
        kinds = (BufferedRecorder, Recorder, BufferedRecorder, Recorder)
        for number, kind in enumerate(kinds):
            link.peer.transport.write(b"%d" % number * 1000)
            await link.end.until_received(1000)
            assert len(link.end.received) == 1000
            received += link.end.received
            old, link.end = link.end, kind(f"protocol {number}")
            _succeed(old, link.end)
            assert not old.violations, old.violations
        link.peer.transport.close()
        await link.end.until_lost()
        assert received == b"0" * 1000 + b"1" * 1000 + b"2" * 1000 + b"3" * 1000

    @each_role
    async def test_set_protocol_in_data_received(self, link: Link) -> None:
        """An upgrade: bytes behind the data that asked for it go to the new protocol."""
        await link.open()
        first = link.end
        second = BufferedRecorder("the upgraded one")

        def upgrade(_: bytes) -> None:
            link.end = second
            _succeed(first, second)

        first.on["data_received"] = upgrade
        link.peer.transport.write(b"upgrade")
        await first.until_lost()
        link.peer.transport.write(b"new words")
        await second.until_received(9)
        assert first.received + second.received == b"upgradenew words"
        assert not first.violations, first.violations

    @each_role
    async def test_an_empty_buffer_is_fatal(self, link: Link) -> None:
        """An empty buffer would loop for ever: RuntimeError, reported, and the connection lost."""
        link.end = BufferedRecorder(f"buffered {link.role}")
        link.end.on["get_buffer"] = lambda _: bytearray()
        await link.open()
        link.peer.transport.write(b"data")
        await link.end.until_lost()
        report = link.report()
        assert isinstance(report["exception"], RuntimeError), report
        assert "empty buffer" in str(report["exception"])
        assert link.end.lost is report["exception"]
        await link.peer.until_lost()

    @each_role
    async def test_a_buffer_that_cannot_be_written_is_fatal(self, link: Link) -> None:
        """So is a protocol that cannot take data."""
        wrongs: tuple[Any, ...] = (b"read-only", 17)
        for wrong in wrongs:
            link.end = BufferedRecorder(f"buffered {link.role}")
            link.end.on["get_buffer"] = lambda _, wrong=wrong: wrong
            link.peer = Recorder("its peer")
            await link.open()
            link.peer.transport.write(b"data")
            await link.end.until_lost()
            report = link.report()
            kinds = (TypeError, BufferError, ValueError)
            vague = self.differs("vague get_buffer")
            assert isinstance(report["exception"], RuntimeError if vague else kinds), report
            assert link.end.lost is report["exception"]
            await link.peer.until_lost()
            await asyncio.sleep(0)
            link.verdict()
