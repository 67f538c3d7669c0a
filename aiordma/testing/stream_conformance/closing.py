"""Checks of every way in which a connection ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from aiordma.testing.stream_conformance.data import raises
from aiordma.testing.stream_conformance.link import Link, Subject, each_role

__all__ = ["ClosingChecks"]


class _Lines(logging.Handler):
    """Keeps the warnings of a logger."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


class ClosingChecks(Subject):
    """Ends."""

    @each_role
    async def test_close(self, link: Link) -> None:
        """`close` ends both sides in good order; `connection_lost` comes later, not inside it."""
        await link.open()
        link.end.transport.close()
        assert link.end.transport.is_closing()
        assert not link.end.transport.is_reading()
        assert not link.end.is_lost
        await link.end.until_lost()
        assert link.end.lost is None
        assert link.end.calls == ["connection_made", "connection_lost"], link.end.describe()
        await link.peer.until_lost()
        assert link.peer.lost is None
        assert link.peer.calls == ["connection_made", "eof_received", "connection_lost"]

    @each_role
    async def test_close_flushes(self, link: Link) -> None:
        """Everything written before `close` arrives, however long it takes."""
        await link.open()
        link.peer.transport.pause_reading()
        written = await link.fill()
        link.end.transport.close()
        assert link.end.transport.is_closing()
        for _ in range(20):
            await asyncio.sleep(0)
        assert not link.end.is_lost
        link.peer.transport.resume_reading()
        await link.peer.until_lost()
        assert link.peer.received == written
        assert link.peer.lost is None
        await link.end.until_lost()
        assert link.end.lost is None

    @each_role
    async def test_write_while_close_flushes(self, link: Link) -> None:
        """A protocol may write when it is resumed while `close` still flushes, as TLS does.

        asyncio's `SSLProtocol` relies on it: it closes the transport though it is paused, and
        writes the rest of its bytes, its `close_notify` at least, when it is resumed.
        """
        link.end.on["resume_writing"] = lambda: link.end.transport.write(b"last words")
        await link.open()
        link.peer.transport.pause_reading()
        written = await link.fill()
        link.end.transport.close()
        link.peer.transport.resume_reading()
        await link.peer.until_lost()
        assert link.peer.received == written + b"last words"
        await link.end.until_lost()
        assert link.end.lost is None

    @each_role
    async def test_close_again(self, link: Link) -> None:
        """`close`, `resume_reading` and `abort` do nothing on a closing or closed transport."""
        await link.open()
        transport = link.end.transport
        for _ in range(2):
            transport.close()
            transport.close()
            transport.resume_reading()
            transport.abort()
            assert transport.is_closing()
            assert not transport.is_reading()
            await link.end.until_lost()
        assert link.end.lost is None

    @each_role
    async def test_nothing_is_received_after_close(self, link: Link) -> None:
        """A protocol that has closed gets no data, though the peer is still sending."""
        link.peer.on["eof_received"] = lambda: True
        await link.open()
        link.peer.transport.write(b"unheard" * 10_000)
        link.end.transport.close()
        await link.end.until_lost()
        assert link.end.calls == ["connection_made", "connection_lost"], link.end.describe()

    @each_role
    async def test_abort(self, link: Link) -> None:
        """`abort` drops bytes not sent yet; `connection_lost(None)` comes soon, not inside it."""
        await link.open()
        link.peer.transport.pause_reading()
        written = await link.fill()
        link.end.transport.abort()
        assert link.end.transport.is_closing()
        assert not link.end.is_lost
        size = link.end.transport.get_write_buffer_size()
        assert (size > 0) == self.differs("abort keeps size")
        await link.end.until_lost()
        assert link.end.lost is None
        link.peer.transport.resume_reading()
        await link.peer.until_lost()
        assert len(link.peer.received) < len(written)
        assert written.startswith(link.peer.received)
        assert link.peer.lost is None or isinstance(link.peer.lost, OSError), link.peer.lost

    @each_role
    async def test_abort_while_closing(self, link: Link) -> None:
        """A `close` that cannot flush is cut short by `abort`."""
        await link.open()
        link.peer.transport.pause_reading()
        await link.fill()
        link.end.transport.close()
        link.end.transport.abort()
        await link.end.until_lost()
        assert link.end.lost is None

    @each_role
    async def test_both_close_at_once(self, link: Link) -> None:
        """Each side is lost exactly once, in good order."""
        await link.open()
        link.end.transport.close()
        link.peer.transport.close()
        await link.end.until_lost()
        await link.peer.until_lost()
        assert link.end.lost is link.peer.lost is None

    @each_role
    async def test_peer_vanishes(self, link: Link) -> None:
        """A connection that ends without a word is lost once, with an OSError, data or not."""
        await link.open()
        await link.turns(3)
        self.vanish(link.peer.transport)
        await link.end.until_lost()
        if self.differs("silent reset"):
            assert link.end.lost is None
        else:
            assert isinstance(link.end.lost, OSError), link.end.lost
            assert not link.end.has_eof

    @each_role
    async def test_peer_vanishes_while_we_write(self, link: Link) -> None:
        """So is a transport with data on its way out, and no protocol stays paused for ever."""
        await link.open()
        link.peer.transport.pause_reading()
        await link.fill()
        self.vanish(link.peer.transport)
        await link.end.until_lost()
        assert isinstance(link.end.lost, OSError), link.end.lost
        assert link.end.transport.is_closing()

    @each_role
    async def test_write_after_the_end(self, link: Link) -> None:
        """Writing to a lost transport raises nothing; if it goes on, a logger gets a warning."""
        lines = _Lines()
        logger = logging.getLogger()
        await link.open()
        transport = link.end.transport
        transport.close()
        logger.addHandler(lines)
        try:
            transport.write(b"late")
            await link.end.until_lost()
            if self.differs("dead writes raise"):
                raises(RuntimeError, transport.write, b"late")
                raises(RuntimeError, transport.writelines, [b"late"])
            else:
                lines.messages.clear()
                for _ in range(10):
                    transport.write(b"late")
                    if self.differs("dead writelines raise"):
                        raises(Exception, transport.writelines, [b"late"])
                    else:
                        transport.writelines([b"late"])
                assert bool(lines.messages) != self.differs("silent writes")
        finally:
            logger.removeHandler(lines)
        await link.peer.until_lost()
        assert not link.peer.received

    @each_role
    async def test_write_eof(self, link: Link) -> None:
        """Half-close: one direction ends after its last byte, the other goes on."""
        link.peer.on["eof_received"] = lambda: True
        await link.open()
        transport = link.end.transport
        if self.differs("no half-close"):
            assert not transport.can_write_eof()
            raises(NotImplementedError, transport.write_eof)
            return
        assert transport.can_write_eof()
        question, answer = b"question" * 50_000, b"answer" * 50_000
        transport.write(question)
        transport.write_eof()
        transport.write_eof()  # twice is once
        raises(RuntimeError, transport.write, b"more")
        await link.peer.until(lambda: link.peer.has_eof)
        assert link.peer.received == question
        assert not link.peer.transport.is_closing()
        assert not transport.is_closing()
        link.peer.transport.write(answer)
        await link.end.until_received(len(answer))
        assert link.end.received == answer
        link.peer.transport.close()
        await link.end.until_lost()
        await link.peer.until_lost()
        assert link.end.lost is link.peer.lost is None

    @each_role
    async def test_both_write_eof(self, link: Link) -> None:
        """Both directions ended by `write_eof`: still open until a side closes."""
        for end in (link.end, link.peer):
            end.on["eof_received"] = lambda: True
        await link.open()
        if self.differs("no half-close"):
            return
        for end in (link.end, link.peer):
            end.transport.write(b"end")
            end.transport.write_eof()
        for end in (link.end, link.peer):
            await end.until(lambda end=end: end.has_eof)  # type: ignore[misc]
            assert end.received == b"end"
            assert not end.is_lost
        link.end.transport.close()
        await link.end.until_lost()
        assert link.end.lost is None

    @each_role
    async def test_false_of_eof_received_closes(self, link: Link) -> None:
        """Without a true answer of `eof_received` the transport flushes and closes itself."""
        link.end.on["eof_received"] = lambda: link.end.transport.write(b"farewell")
        link.peer.on["eof_received"] = lambda: True
        await link.open()
        if self.differs("no half-close"):
            return
        link.peer.transport.write_eof()
        await link.end.until_lost()
        assert link.end.lost is None
        await link.peer.until(lambda: link.peer.has_eof)
        assert link.peer.received == b"farewell"

    @each_role
    async def test_close_in_connection_made(self, link: Link) -> None:
        """Closed before it was used: `connection_lost(None)`, and nothing in between."""
        link.end.on["connection_made"] = lambda transport: transport.close()
        await link.open()
        await link.end.until_lost()
        assert link.end.calls == ["connection_made", "connection_lost"], link.end.describe()
        assert link.end.lost is None
        await link.peer.until_lost()

    @each_role
    async def test_write_and_close_in_connection_made(self, link: Link) -> None:
        """A protocol that greets and closes, as a daytime server does."""

        def greet(transport: asyncio.Transport) -> None:
            transport.write(b"hello")
            transport.close()

        link.end.on["connection_made"] = greet
        await link.open()
        await link.peer.until_lost()
        assert link.peer.received == b"hello"
        assert link.peer.lost is None
        await link.end.until_lost()

    @each_role
    async def test_close_in_data_received(self, link: Link) -> None:
        """The first data closes: no second data, however much the peer had sent."""
        await _end_in_data_received(link, lambda: link.end.transport.close())

    @each_role
    async def test_abort_in_data_received(self, link: Link) -> None:
        """The same with `abort`."""
        await _end_in_data_received(link, lambda: link.end.transport.abort())

    @each_role
    async def test_close_in_pause_writing(self, link: Link) -> None:
        """Closing when asked to pause still flushes."""
        link.end.on["pause_writing"] = lambda: link.end.transport.close()
        await link.open()
        link.peer.transport.pause_reading()
        written = await link.fill()
        link.peer.transport.resume_reading()
        await link.peer.until_lost()
        assert link.peer.received == written
        await link.end.until_lost()
        assert link.end.lost is None


async def _end_in_data_received(link: Link, end: Callable[[], None]) -> None:
    link.end.on["data_received"] = lambda _: end()
    await link.open()
    link.peer.transport.write(bytes(3_000_000))
    await link.end.until_lost()
    assert link.end.calls == ["connection_made", "data_received", "connection_lost"]
    assert link.end.lost is None
    await link.peer.until_lost()
