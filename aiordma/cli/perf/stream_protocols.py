"""Measurements of streams through `asyncio.Protocol`: everything is done in its callbacks."""

from __future__ import annotations

import asyncio
from time import perf_counter_ns as _clock
from typing import Any, cast

from aiordma.cli.foreign import whole
from aiordma.cli.perf.control import LIMITS, foreign
from aiordma.cli.perf.kinds import Stop
from aiordma.cli.perf.options import Plan
from aiordma.cli.perf.report import Flow
from aiordma.cli.perf.stream_ends import ALL_HERE, STREAM_CONFIG, ended, fail, last
from aiordma.streams.connecting import create_connection
from aiordma.streams.server import RdmaServer, create_server

__all__ = ["ProtocolClient", "ProtocolServer"]


class _End(asyncio.Protocol):
    """The client's protocol: one measurement at a time, each with a future for its end."""

    def __init__(self) -> None:
        self.transport: Any = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.payload = b""
        self.stop = Stop(0)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        fail(self.done, exc)

    def arm(self, size: int, stop: Stop) -> int:
        """Begin a measurement; the time."""
        if self.done.done():
            self.done.result()
            self.done = asyncio.get_running_loop().create_future()
        self.payload, self.stop = bytes(size), stop
        return stop.begin()


class _Pinger(_End):
    """Sends the next message within the callback that took the answer to the last."""

    def start(self, size: int, stop: Stop) -> list[int]:
        """Send the first; the times are complete when `done` is."""
        self._missing = self._size = size
        stamps = [self.arm(size, stop)]
        # Little of its own between two messages: it would be measured, too.
        self._left, self._deadline = stop.most, stop.deadline
        self._note, self._write = stamps.append, self.transport.write
        self._write(self.payload)
        return stamps

    def data_received(self, data: bytes) -> None:
        if len(data) != self._missing:
            self._missing -= len(data)
            return
        now = _clock()
        self._note(now)
        self._left -= 1
        if self._left <= 0 or now >= self._deadline:
            self.done.set_result(None)
            return
        self._write(self.payload)
        self._missing = self._size  # not before: the peer works meanwhile


class _Pourer(_End):
    """Writes until the transport asks to pause, and goes on when it asks to resume."""

    def __init__(self) -> None:
        super().__init__()
        self.written = 0
        self._is_paused = False
        self._is_over = True

    def start(self, size: int, stop: Stop) -> int:
        """Write; `done` is done when the peer has everything.  The time."""
        begun = self.arm(size, stop)
        self.written = 0
        self._is_over = False
        self._pour()
        return begun

    def _pour(self) -> None:
        clock, write, payload = _clock, self.transport.write, self.payload
        most, deadline = self.stop.most - 1, self.stop.deadline
        while not self._is_paused:
            self.written += 1
            if self.written > most or clock() >= deadline:
                self._is_over = True
                write(last(len(payload)))
                return
            write(payload)

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        if not self._is_over:
            self._pour()

    def data_received(self, data: bytes) -> None:
        if not self.done.done():  # the server may say it twice
            self.done.set_result(None)


class ProtocolClient:
    """The end that measures; see `kinds.ClientSide`."""

    def __init__(self, plan: Plan, host: str) -> None:
        self._plan = plan
        self._host = host
        self._end: Any = None

    async def connect(self, at: dict[str, Any]) -> None:
        """Connect once."""
        with foreign(at):
            port = whole(at["port"], 1, 0xFFFF)
        factory = _Pinger if self._plan.metric == "lat" else _Pourer
        _, self._end = await create_connection(
            factory,
            self._host,
            port,
            config=STREAM_CONFIG,
            timeout=self._plan.timeout_s,
        )

    async def meet(self, lent: dict[str, Any]) -> None:
        """There is nothing more to know."""

    async def lat(self, size: int, stop: Stop) -> list[int]:
        """One message and its answer at a time."""
        stamps: list[int] = self._end.start(size, stop)
        await self._end.done
        return stamps

    async def flow(self, size: int, stop: Stop) -> Flow:
        """Write as many messages as flow control lets through."""
        begun = self._end.start(size, stop)
        await self._end.done
        return Flow(self._end.written, (_clock() - begun) / 1e9, 0.0)

    async def close(self) -> None:
        """Close the connection."""
        if self._end is not None:
            self._end.transport.close()
            await self._end.transport.wait_closed()


class _Answerer(asyncio.Protocol):
    """The server's protocol."""

    def __init__(self, server: ProtocolServer) -> None:
        self._server = server
        self._missing = 0
        self._payload: bytes | None = None
        self._write: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._write = cast("Any", transport).write
        self._server.met(transport, self)

    def answer(self, payload: bytes | None) -> None:
        """From now on answer as many bytes with these; with None answer only the last message."""
        self._payload, self._missing = payload, len(payload or b"")

    def data_received(self, data: bytes) -> None:
        payload = self._payload
        if payload is None:
            if ended(data):
                self._write(ALL_HERE)
        elif len(data) < self._missing:
            self._missing -= len(data)
        else:
            self._write(payload)
            self._missing = len(payload)


class ProtocolServer:
    """The end that answers; see `kinds.ServerSide`."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._server: RdmaServer | None = None
        self._met: asyncio.Future[tuple[Any, _Answerer]]
        self._met = asyncio.get_running_loop().create_future()

    async def listen(self, host: str) -> dict[str, Any]:
        """Listen on a free port."""
        self._server = await create_server(
            lambda: _Answerer(self), host, 0, config=STREAM_CONFIG, limits=LIMITS
        )
        return {"port": self._server.sockets[0].getsockname()[1]}

    def met(self, transport: Any, answerer: _Answerer) -> None:
        """The client is there."""
        if not self._met.done():
            self._met.set_result((transport, answerer))

    async def accept(self) -> dict[str, Any]:
        """Wait for the client."""
        await self._met
        return {}

    async def start(self, size: int, count: int | None) -> None:
        """Answer from now on as this size needs it."""
        _, answerer = await self._met
        answerer.answer(bytes(size) if self._plan.metric == "lat" else None)

    async def finish(self, count: int) -> None:
        """Nothing to wait for: the client has got the answer that all data have arrived."""

    async def close(self) -> None:
        """Close the connection."""
        # Both are closed before the first wait, which may fail or be canceled.
        transport = self._met.result()[0] if self._met.done() else None
        if transport is not None:
            transport.close()
        if self._server is not None:
            self._server.close()
        if transport is not None:
            await transport.wait_closed()
        if self._server is not None:
            await self._server.wait_closed()
