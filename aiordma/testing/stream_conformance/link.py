"""One connection under test: its two protocols, its errors in the loop, and a check's run."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from aiordma.testing.stream_conformance.recorder import Record, Recorder

__all__ = ["DEVIATIONS", "ROLES", "Link", "Subject", "each_role"]

ROLES = ("client", "server")
Factory = Callable[[], asyncio.BaseProtocol]


#: The deviations of transports in use from asyncio's own, by the name to put into
#: `Subject.deviations`. A check asserts the deviation if it is named, and the rule if it is not.
DEVIATIONS: dict[str, str] = {
    "no half-close": "`write_eof` raises NotImplementedError and `can_write_eof` returns False.",
    "no addresses": "`peername` and `sockname` are not there, or not those of the other end.",
    "foreign class": "The class does not derive from `asyncio.Transport`.",
    "failed start is deaf": "After an exception in `connection_made` nothing is received.",
    "gaps are fatal": "Writing a view that has gaps is no TypeError but ends the connection.",
    "gaps are filled": "Writing a view that has gaps sends the bytes that it shows.",
    "nothing of any type": "`write` takes anything empty, whatever its type.",
    "buffers are kept": "`write` makes no copy: a buffer may be changed only after it was sent.",
    "start cannot pause": "Pausing within `connection_made` is forgotten.",
    "start pauses in name": "Pausing within `connection_made` changes only what `is_reading` says.",
    "end is not reading": "`is_reading` is False within `eof_received`.",
    "abort keeps size": "`get_write_buffer_size` still counts what `abort` has dropped.",
    "dead writes raise": "`write` and `writelines` raise RuntimeError after `connection_lost`.",
    "dead writelines raise": "`writelines` raises after `connection_lost`, but `write` does not.",
    "short reports": "The report of a fatal exception does not name the method that raised it.",
    "vague get_buffer": "An exception in `get_buffer`, or a bad buffer, becomes a RuntimeError.",
    "silent reset": "A peer that vanishes looks like one that ended in good order.",
    "silent writes": "Repeated writing to a lost connection is not logged.",
}


class Subject:
    """The transport under test, and how it differs from others of its kind.

    Attributes:
        bound_s: seconds that one check may take in one role.
        bulk_size: bytes that the bulk check sends each way.
        deviations: names out of `DEVIATIONS`.
    """

    bound_s: float = 10.0
    bulk_size = 4 * 2**20
    deviations: frozenset[str] = frozenset()

    def differs(self, deviation: str) -> bool:
        """Whether the transport under test has this deviation."""
        assert deviation in DEVIATIONS, deviation
        unknown = self.deviations - DEVIATIONS.keys()
        assert not unknown, f"no such deviations: {unknown}"
        return deviation in self.deviations

    def connection(
        self, server_factory: Factory, client_factory: Factory
    ) -> AbstractAsyncContextManager[None]:
        """Connect a new client to a new server; an async context manager.

        Entering it returns when the client is connected. Leaving it removes the listener, if there
        is one; by then both connections are lost.

        Args:
            server_factory: makes the protocol of the server's end; to be called once.
            client_factory: makes the protocol of the client's end; to be called once.
        """
        raise NotImplementedError("override connection()")

    def vanish(self, transport: asyncio.Transport) -> None:
        """End one side so that the other one sees no end in good order.

        It does so for TCP (SO_LINGER, so that the kernel sends a reset) and for
        `aiordma.RdmaTransport` (as `StreamConfig(linger_s=0)`), and aborts any other transport.
        Override it where `abort` is an end in good order for the other side.
        """
        give_up = getattr(transport, "_give_up", None)
        if give_up is not None:
            give_up(None)
            return
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()


class Link:
    """A connection with the transport to be judged at one end and its peer at the other.

    Attributes:
        subject: the transport under test.
        role: whether the judged end is the client or the server.
        end: protocol of the judged end; may be replaced before `open()`.
        peer: protocol of the other end; may be replaced before `open()`.
        reports: contexts given to the loop's exception handler and not yet checked.
    """

    def __init__(self, subject: Subject, role: str) -> None:
        self.subject = subject
        self.role = role
        self.end: Record = Recorder(f"the judged {role}")
        self.peer: Record = Recorder("its peer")
        self.reports: list[dict[str, Any]] = []
        self._stack = contextlib.AsyncExitStack()

    async def open(self) -> None:
        """Connect the two protocols; returns after `connection_made` of both."""
        ends = {"client": self.end, "server": self.peer}
        if self.role == "server":
            ends = {"client": self.peer, "server": self.end}
        context = self.subject.connection(lambda: ends["server"], lambda: ends["client"])
        await self._stack.enter_async_context(context)
        for end in ends.values():
            await end.until(lambda end=end: end.is_made)  # type: ignore[misc]

    async def close(self) -> None:
        """End the connections that are left, and drop them."""
        ends = (self.end, self.peer)
        if not all(end.is_made for end in ends):
            # The check ended within `open`: the transport of a client that was accepted may follow.
            for end in ends:
                end.on["connection_made"] = lambda transport: transport.abort()
            for _ in range(3):
                await asyncio.sleep(0)
        for end in ends:
            if end.is_made and not end.is_lost:
                end.transport.abort()
                await end.until_lost()
        await self._stack.aclose()

    async def turns(self, count: int = 20) -> None:
        """Let time pass, as measured by bytes that the judged end sends and its peer receives."""
        for _ in range(count):
            expected = len(self.peer.received) + 1
            self.end.transport.write(b".")
            await self.peer.until_received(expected)

    async def fill(self) -> bytes:
        """Write until the judged end is asked to pause, and return the bytes written.

        The peer must not read meanwhile.
        """
        written, chunk = bytearray(), bytes(range(256)) * 256
        while not self.end.is_paused:
            assert len(written) < 2**26, f"no pause_writing() after {len(written)} bytes"
            self.end.transport.write(chunk)
            written += chunk
            await asyncio.sleep(0)
        return bytes(written)

    def report(self) -> dict[str, Any]:
        """The only context that the exception handler was given; takes it off the list."""
        assert len(self.reports) == 1, f"one report expected, not {self.reports}"
        return self.reports.pop()

    def verdict(self) -> None:
        """Raise AssertionError if a rule was broken that holds for every check."""
        for end in (self.end, self.peer):
            end.judge_end(not self.subject.differs("end is not reading"))
            assert not end.violations, f"{end.violations}; {end.describe()}"
            assert not end.is_made or end.calls.count("connection_lost") == 1, end.describe()
        assert not self.reports, f"nobody expected these reports: {self.reports}"


def each_role(
    check: Callable[[Any, Link], Awaitable[None]],
) -> Callable[[Any], Awaitable[None]]:
    """Make a test of a check: run it with the client judged, then with the server judged."""

    async def test(self: Subject) -> None:
        loop = asyncio.get_running_loop()
        for role in ROLES:
            link = Link(self, role)
            handler = loop.get_exception_handler()
            loop.set_exception_handler(lambda _, context, link=link: link.reports.append(context))  # type: ignore[misc]
            try:
                try:
                    async with asyncio.timeout(self.bound_s):
                        await check(self, link)
                finally:
                    # A bound of its own: a check that took all of its time has ends to close, too.
                    async with asyncio.timeout(self.bound_s):
                        await link.close()
                        # A second connection_lost would come in one of the next turns.
                        for _ in range(3):
                            await asyncio.sleep(0)
                link.verdict()
            except TimeoutError:
                raise AssertionError(
                    f"not done within {self.bound_s} s: {link.end.describe()}; "
                    f"{link.peer.describe()}; reports {link.reports}"
                ) from None
            finally:
                loop.set_exception_handler(handler)
                link.end.forget()
                link.peer.forget()

    # Not functools.wraps: pytest would look through it and take `link` for a fixture.
    test.__name__, test.__qualname__, test.__doc__ = (
        check.__name__,
        check.__qualname__,
        check.__doc__,
    )
    test.__module__ = check.__module__
    return test
