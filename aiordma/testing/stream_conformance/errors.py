"""Checks of protocols whose methods raise."""

from __future__ import annotations

from typing import Any

from aiordma.testing.stream_conformance.link import Link, Subject, each_role
from aiordma.testing.stream_conformance.recorder import BufferedRecorder

__all__ = ["ErrorChecks", "Oops"]


class Oops(Exception):
    """The exception of the protocols under test."""


def _raise(*_: Any) -> None:
    raise Oops


class ErrorChecks(Subject):
    """Exceptions in callbacks: the handler that gets them, and the connection afterwards."""

    async def _fatal(self, link: Link, call: str) -> None:
        """The exception ends the connection: reported with all its facts, given to the protocol."""
        await link.end.until_lost()
        report = link.report()
        vague = call == "get_buffer" and self.differs("vague get_buffer")
        assert isinstance(report["exception"], RuntimeError if vague else Oops), report
        assert link.end.lost is report["exception"]
        assert (f"protocol.{call}()" in report["message"]) != self.differs("short reports"), report
        assert report["transport"] is link.end.transport
        assert report["protocol"] is link.end
        assert link.end.calls.count(call) == 1
        assert link.end.transport.is_closing()
        await link.peer.until_lost()

    @each_role
    async def test_data_received_raises(self, link: Link) -> None:
        """Fatal: no more data after that which could not be processed."""
        link.end.on["data_received"] = _raise
        await link.open()
        link.peer.transport.write(bytes(1_000_000))
        await self._fatal(link, "data_received")

    @each_role
    async def test_eof_received_raises(self, link: Link) -> None:
        """Fatal."""
        link.end.on["eof_received"] = _raise
        await link.open()
        link.peer.transport.close()
        await self._fatal(link, "eof_received")

    @each_role
    async def test_get_buffer_raises(self, link: Link) -> None:
        """Fatal."""
        link.end = BufferedRecorder(f"buffered {link.role}")
        link.end.on["get_buffer"] = _raise
        await link.open()
        link.peer.transport.write(b"data")
        await self._fatal(link, "get_buffer")

    @each_role
    async def test_buffer_updated_raises(self, link: Link) -> None:
        """Fatal."""
        link.end = BufferedRecorder(f"buffered {link.role}")
        link.end.on["buffer_updated"] = _raise
        await link.open()
        link.peer.transport.write(bytes(1_000_000))
        await self._fatal(link, "buffer_updated")

    @each_role
    async def test_pause_and_resume_writing_raise(self, link: Link) -> None:
        """Reported, and the connection goes on: nothing is wrong with its data."""
        link.end.on.update(pause_writing=_raise, resume_writing=_raise)
        await link.open()
        link.peer.transport.pause_reading()
        written = await link.fill()
        report = link.report()
        assert isinstance(report["exception"], Oops), report
        assert "protocol.pause_writing()" in report["message"], report
        assert report["transport"] is link.end.transport
        link.peer.transport.resume_reading()
        await link.peer.until_received(len(written))
        await link.end.until(lambda: not link.end.is_paused)
        report = link.report()
        assert isinstance(report["exception"], Oops), report
        assert "protocol.resume_writing()" in report["message"], report
        assert link.peer.received == written
        await link.turns(1)

    @each_role
    async def test_connection_lost_raises(self, link: Link) -> None:
        """Reported; the connection ends in good order all the same."""
        link.end.on["connection_lost"] = _raise
        await link.open()
        link.end.transport.close()
        await link.end.until_lost()
        assert isinstance(link.report()["exception"], Oops)
        await link.peer.until_lost()
        assert link.peer.lost is None

    @each_role
    async def test_connection_made_raises(self, link: Link) -> None:
        """Reported, and the connection goes on, as with any other callback of the loop."""
        link.end.on["connection_made"] = _raise
        await link.open()
        assert isinstance(link.report()["exception"], Oops)
        link.peer.transport.write(b"data")
        if self.differs("failed start is deaf"):
            await link.turns()
            assert not link.end.received
            return
        await link.end.until_received(4)
        await link.turns(1)
