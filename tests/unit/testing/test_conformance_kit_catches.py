"""The conformance kit catches broken transports: each breaks one rule of a working one."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from aiordma.testing.stream_conformance import StreamConformance
from aiordma.testing.stream_conformance.link import Link, each_role

pytestmark = pytest.mark.one_loop  # the shim is for asyncio's own transports

Factory = Callable[[], Any]


class Working(asyncio.Transport):
    """A transport on top of another one, which lies about nothing."""

    def __init__(self, inner: Any, protocol: Any) -> None:
        super().__init__()
        self.inner = inner
        self.protocol = protocol

    def write(self, data: Any) -> None:
        # From Python 3.12 on asyncio's own transport keeps what it could not send at once.
        copied = isinstance(data, bytearray) or (isinstance(data, memoryview) and data.contiguous)
        self.inner.write(bytes(data) if copied else data)

    def close(self) -> None:
        self.inner.close()

    def abort(self) -> None:
        self.inner.abort()

    def write_eof(self) -> None:
        self.inner.write_eof()

    def can_write_eof(self) -> bool:
        return True

    def is_closing(self) -> bool:
        return bool(self.inner.is_closing())

    def is_reading(self) -> bool:
        return bool(self.inner.is_reading())

    def pause_reading(self) -> None:
        self.inner.pause_reading()

    def resume_reading(self) -> None:
        self.inner.resume_reading()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.inner.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        return int(self.inner.get_write_buffer_size())

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def get_protocol(self) -> Any:
        return self.protocol

    # What the loop's own transport calls, on its way to the protocol.

    def data_received(self, data: bytes) -> None:
        if not isinstance(self.protocol, asyncio.BufferedProtocol):
            self.protocol.data_received(data)
            return
        while data and not self.is_closing():
            buffer = memoryview(self.protocol.get_buffer(-1))
            count = min(len(buffer), len(data))
            buffer[:count], data = data[:count], data[count:]
            self.protocol.buffer_updated(count)

    def eof_received(self) -> Any:
        return self.protocol.eof_received()

    def pause_writing(self) -> None:
        self.protocol.pause_writing()

    def resume_writing(self) -> None:
        self.protocol.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self.protocol.connection_lost(exc)


class LostTwice(Working):
    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        super().connection_lost(exc)


class LostAndFound(Working):
    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.data_received(b"late")


class LostWithinClose(Working):
    def close(self) -> None:
        if not self.is_closing():
            super().close()
            super().connection_lost(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.protocol.lost is None and not self.protocol.is_lost:
            super().connection_lost(exc)


class NoEnd(Working):
    def eof_received(self) -> Any:
        return None


class NoCause(Working):
    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(None)


class DropsAtClose(Working):
    def close(self) -> None:
        self.abort()


class HalfCloseCloses(Working):
    def write_eof(self) -> None:
        self.close()


class SwapsWrites(Working):
    held: Any = None

    def write(self, data: Any) -> None:
        if self.held is None:
            self.held = data
        else:
            super().write(bytes(data) + bytes(self.held))
            self.held = None


class KeepsBuffers(Working):
    def write(self, data: Any) -> None:
        asyncio.get_running_loop().call_soon(super().write, data)


class TakesText(Working):
    def write(self, data: Any) -> None:
        super().write(data.encode() if isinstance(data, str) else data)


class RaisesAfterEnd(Working):
    def write(self, data: Any) -> None:
        if self.is_closing():
            raise ConnectionResetError
        super().write(data)


class EmptyData(Working):
    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        super().data_received(b"")


class ReadsWhenPaused(Working):
    paused = False

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def is_reading(self) -> bool:
        return not self.paused and super().is_reading()


class NeverPauses(Working):
    def pause_writing(self) -> None:
        """The protocol is not told."""

    resume_writing = pause_writing


class NeverResumes(Working):
    def resume_writing(self) -> None:
        """The protocol is not told."""


class PausesTwice(Working):
    def pause_writing(self) -> None:
        super().pause_writing()
        super().pause_writing()


class WrongSize(Working):
    def get_write_buffer_size(self) -> int:
        return 1


class SwallowsErrors(Working):
    def data_received(self, data: bytes) -> None:
        try:
            super().data_received(data)
        except Exception:
            self.close()


class KeepsProtocol(Working):
    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Nothing changes."""


class LosesContext(Working):
    def data_received(self, data: bytes) -> None:
        contextvars.Context().run(super().data_received, data)


class Shim(asyncio.Protocol):
    """Between the loop's transport and the one under test."""

    def __init__(self, kind: type[Working], protocol: Any) -> None:
        self.kind = kind
        self.protocol = protocol
        self.outer: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.outer = self.kind(transport, self.protocol)
        self.protocol.connection_made(self.outer)

    def __getattribute__(self, name: str) -> Any:
        if name in (
            "data_received", "eof_received", "pause_writing", "resume_writing", "connection_lost"
        ):  # fmt: skip
            return getattr(self.outer, name)
        return super().__getattribute__(name)


class Shimmed(StreamConformance):
    """TCP through a shim."""

    bound_s = 1.0

    def __init__(self, kind: type[Working]) -> None:
        self.kind = kind

    @asynccontextmanager
    async def connection(
        self, server_factory: Factory, client_factory: Factory
    ) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        # A server that is canceled while it starts by itself would leave its socket.
        server = await loop.create_server(
            lambda: Shim(self.kind, server_factory()), "127.0.0.1", 0, start_serving=False
        )
        try:
            await server.start_serving()
            await loop.create_connection(
                lambda: Shim(self.kind, client_factory()), *server.sockets[0].getsockname()
            )
            yield
        finally:
            server.close()


CAUGHT: dict[type[Working], str] = {
    LostTwice: "test_close",
    LostAndFound: "test_close",
    LostWithinClose: "test_close",
    NoEnd: "test_close",
    NoCause: "test_peer_vanishes_while_we_write",
    DropsAtClose: "test_close_flushes",
    HalfCloseCloses: "test_write_eof",
    SwapsWrites: "test_bytes_arrive_in_order",
    KeepsBuffers: "test_write_leaves_the_buffer_to_its_owner",
    TakesText: "test_write_refuses_what_is_no_buffer",
    RaisesAfterEnd: "test_write_after_the_end",
    EmptyData: "test_bytes_arrive_in_order",
    ReadsWhenPaused: "test_pause_and_resume_reading",
    NeverPauses: "test_writing_is_paused_and_resumed_at_the_marks",
    NeverResumes: "test_writing_is_paused_and_resumed_at_the_marks",
    PausesTwice: "test_writing_is_paused_and_resumed_at_the_marks",
    WrongSize: "test_the_write_buffer_empties",
    SwallowsErrors: "test_data_received_raises",
    KeepsProtocol: "test_set_protocol",
    LosesContext: "test_context_of_callbacks",
}


@pytest.mark.parametrize("name", sorted(set(CAUGHT.values()) - {"test_data_received_raises"}))
async def test_a_working_transport_passes(name: str) -> None:
    suite = Shimmed(Working)
    suite.bound_s = 10.0
    await getattr(suite, name)()


async def test_a_deviation_that_is_not_there_is_caught() -> None:
    suite = Shimmed(Working)
    suite.deviations = frozenset({"foreign class"})
    with pytest.raises(AssertionError):
        await suite.test_first_call_is_connection_made()
    suite.deviations = frozenset({"no such deviation"})
    with pytest.raises(AssertionError, match="no such deviation"):
        await suite.test_first_call_is_connection_made()


class Late(asyncio.Transport):
    """A transport of a server whose client gave up in the middle of the handshake."""

    aborted = False

    def start(self, protocol: Any) -> None:
        self.protocol = protocol
        protocol.connection_made(self)

    def abort(self) -> None:
        self.aborted = True
        asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)


class FailsToOpen(StreamConformance):
    """The client is refused, and then the server's end is there."""

    def __init__(self) -> None:
        self.made: list[Late] = []

    @asynccontextmanager
    async def connection(
        self, server_factory: Factory, client_factory: Factory
    ) -> AsyncIterator[None]:
        self.made.append(Late())
        asyncio.get_running_loop().call_soon(self.made[-1].start, server_factory())
        raise ConnectionRefusedError
        yield


async def test_an_end_that_follows_a_failed_open_is_aborted() -> None:
    suite = FailsToOpen()
    with pytest.raises(ConnectionRefusedError):
        await suite.test_close()
    assert [late.aborted for late in suite.made] == [True]


class Fails(Shimmed):
    """A check that has used up all of its time when it fails."""

    bound_s = 10.0

    def __init__(self) -> None:
        super().__init__(Working)
        self.links: list[Link] = []

    @each_role
    async def spend(self, link: Link) -> None:
        await link.open()
        self.links.append(link)
        loop = asyncio.get_running_loop()
        real = loop.time
        loop.time = lambda: real() + self.bound_s  # type: ignore[method-assign]
        raise AssertionError("the verdict")


async def test_the_ends_of_a_check_that_took_all_of_its_time_are_closed() -> None:
    suite = Fails()
    loop = asyncio.get_running_loop()
    try:
        with pytest.raises(AssertionError, match="the verdict"):
            await suite.spend()
    finally:
        vars(loop).pop("time", None)
    (link,) = suite.links
    assert link.end.is_lost
    assert link.peer.is_lost


@pytest.mark.parametrize("kind", CAUGHT, ids=lambda kind: kind.__name__)
async def test_a_broken_transport_is_caught(kind: type[Working]) -> None:
    with pytest.raises((AssertionError, BufferError, ConnectionResetError)):
        await getattr(Shimmed(kind), CAUGHT[kind])()
