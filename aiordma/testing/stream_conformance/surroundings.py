"""Checks of all but the bytes: names, representation, contexts, forgotten transports."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import warnings
from typing import Any

from aiordma.testing.stream_conformance.link import Link, Subject, each_role
from aiordma.testing.stream_conformance.recorder import BufferedRecorder, Recorder

__all__ = ["SurroundingChecks"]

_WHO: contextvars.ContextVar[str] = contextvars.ContextVar("who", default="nobody")


class SurroundingChecks(Subject):
    """Everything else."""

    @each_role
    async def test_extra_info(self, link: Link) -> None:
        """Unknown names have the caller's default; the addresses of both ends fit together."""
        await link.open()
        end, peer = link.end.transport, link.peer.transport
        assert end.get_extra_info("no such thing") is None
        assert end.get_extra_info("no such thing", 17) == 17
        if not self.differs("no addresses"):
            assert end.get_extra_info("peername") == peer.get_extra_info("sockname") is not None
            assert end.get_extra_info("sockname") == peer.get_extra_info("peername") is not None

    @each_role
    async def test_repr(self, link: Link) -> None:
        """A transport can be printed in every state, and the states can be told apart."""
        await link.open()
        transport = link.end.transport
        words = [repr(transport)]
        transport.pause_reading()
        words.append(repr(transport))
        transport.resume_reading()
        transport.close()
        words.append(repr(transport))
        await link.end.until_lost()
        words.append(repr(transport))
        for word in words:
            assert word.startswith("<"), words
            assert type(transport).__name__ in word, words
        assert words[0] != words[-1]

    @each_role
    async def test_after_the_end(self, link: Link) -> None:
        """A lost transport still answers harmless questions."""
        await link.open()
        transport = link.end.transport
        transport.abort()
        await link.end.until_lost()
        await asyncio.sleep(0)
        assert transport.is_closing()
        assert not transport.is_reading()
        transport.close()
        transport.abort()
        transport.pause_reading()
        transport.resume_reading()
        assert transport.get_write_buffer_size() == 0
        assert transport.get_extra_info("no such thing", 17) == 17

    @each_role
    async def test_context_of_callbacks(self, link: Link) -> None:
        """Callbacks run in the context in which the connection was made, and change no other."""
        seen: list[tuple[str, str]] = []

        def look(name: str) -> Any:
            def note(*_: Any) -> None:
                seen.append((name, _WHO.get()))
                _WHO.set(f"changed by {name}")

            return note

        names = ("connection_made", "data_received", "eof_received")
        for name in names:
            link.end.on[name] = look(name)
        _WHO.set("the maker")
        await link.open()
        _WHO.set("somebody else")
        link.peer.transport.write(b"data")
        await link.end.until_received(4)
        link.peer.transport.close()
        await link.end.until_lost()
        assert [name for name, _ in seen] == list(names)
        assert not [who for _, who in seen if who in ("nobody", "somebody else")], seen
        assert seen[0][1] == "the maker"
        assert _WHO.get() == "somebody else"

    @each_role
    async def test_context_of_buffered_callbacks(self, link: Link) -> None:
        """The same with the protocol's own buffer."""
        seen: set[str] = set()
        link.end = BufferedRecorder(f"buffered {link.role}")
        for name in ("connection_made", "get_buffer", "buffer_updated"):
            link.end.on[name] = lambda *_: seen.add(_WHO.get())
        _WHO.set("the maker")
        await link.open()
        _WHO.set("somebody else")
        link.peer.transport.write(b"data")
        await link.end.until_received(4)
        assert seen == {"the maker"}

    async def test_forgotten_transport(self) -> None:
        """A transport that was not closed before its loop ended is a ResourceWarning.

        It comes when the next connection is made, at the latest: whatever knows all transports of
        a loop need not notice before that the loop was closed.
        """
        # A loop of its own, in a thread of its own; the same kind as the loop that runs here.
        new_loop = type(asyncio.get_running_loop())

        async def forget() -> None:
            server, client = Recorder("server"), Recorder("client")
            # Never left: leaving it could wait for the connection.
            self._forgotten = self.connection(lambda: server, lambda: client)
            await self._forgotten.__aenter__()
            await server.until(lambda: server.is_made)

        def run() -> None:
            loop = new_loop()
            try:
                loop.run_until_complete(asyncio.wait_for(forget(), self.bound_s))
            finally:
                loop.close()

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            await asyncio.to_thread(run)
            del self._forgotten
            link = Link(self, "client")
            async with asyncio.timeout(self.bound_s):
                await link.open()
                await link.close()
            del link
            for _ in range(3):
                gc.collect()
        words = [str(w.message) for w in caught if issubclass(w.category, ResourceWarning)]
        assert [word for word in words if "unclosed" in word], words
