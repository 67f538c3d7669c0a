"""Measurements of streams through readers and writers, whose waiting is awaited."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

from aiordma.cli.foreign import whole
from aiordma.cli.perf.control import LIMITS, foreign
from aiordma.cli.perf.kinds import Stop
from aiordma.cli.perf.options import Plan
from aiordma.cli.perf.report import Flow
from aiordma.cli.perf.stream_ends import ALL_HERE, STREAM_CONFIG, ended, last
from aiordma.streams.connecting import open_connection
from aiordma.streams.server import RdmaServer, start_server

__all__ = ["StreamClient", "StreamServer"]

_READ = 1 << 18


class StreamClient:
    """The end that measures; see `kinds.ClientSide`."""

    def __init__(self, plan: Plan, host: str) -> None:
        self._host = host
        self._limit_s = plan.timeout_s
        self._ends: tuple[Any, Any] | None = None

    async def connect(self, at: dict[str, Any]) -> None:
        """Connect once."""
        with foreign(at):
            port = whole(at["port"], 1, 0xFFFF)
        self._ends = await open_connection(
            self._host, port, config=STREAM_CONFIG, timeout=self._limit_s
        )

    async def meet(self, lent: dict[str, Any]) -> None:
        """There is nothing more to know."""

    async def lat(self, size: int, stop: Stop) -> list[int]:
        """One message and its answer at a time."""
        assert self._ends is not None
        reader, writer = self._ends
        payload = bytes(size)
        clock = time.perf_counter_ns
        now = stop.begin()
        stamps = [now]
        while len(stamps) <= stop.most and now < stop.deadline:
            writer.write(payload)
            await reader.readexactly(size)
            now = clock()
            stamps.append(now)
        return stamps

    async def flow(self, size: int, stop: Stop) -> Flow:
        """Write as many messages as flow control lets through."""
        assert self._ends is not None
        reader, writer = self._ends
        payload, clock, written = bytes(size), time.perf_counter_ns, 1
        begun = stop.begin()
        while written < stop.most and clock() < stop.deadline:
            writer.write(payload)
            await writer.drain()
            written += 1
        writer.write(last(size))
        await reader.readexactly(len(ALL_HERE))
        return Flow(written, (clock() - begun) / 1e9, 0.0)

    async def close(self) -> None:
        """Close the connection."""
        if self._ends is not None:
            writer = self._ends[1]
            writer.close()
            with contextlib.suppress(OSError):  # its error has been reported
                await writer.wait_closed()


class StreamServer:
    """The end that answers; see `kinds.ServerSide`."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._server: RdmaServer | None = None
        self._ends: asyncio.Future[tuple[Any, Any]] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None

    async def listen(self, host: str) -> dict[str, Any]:
        """Listen on a free port."""
        self._server = await start_server(self._met, host, 0, config=STREAM_CONFIG, limits=LIMITS)
        return {"port": self._server.sockets[0].getsockname()[1]}

    async def _met(self, reader: Any, writer: Any) -> None:
        if not self._ends.done():
            self._ends.set_result((reader, writer))

    async def accept(self) -> dict[str, Any]:
        """Wait for the client."""
        await self._ends
        return {}

    async def start(self, size: int, count: int | None) -> None:
        """Answer from now on as this size needs it."""
        answer = self._echo(size) if self._plan.metric == "lat" else self._take()
        self._task = asyncio.get_running_loop().create_task(answer)

    async def _echo(self, size: int) -> None:
        reader, writer = self._ends.result()
        payload = bytes(size)
        while True:
            await reader.readexactly(size)
            writer.write(payload)

    async def _take(self) -> None:
        reader, writer = self._ends.result()
        while data := await reader.read(_READ):
            if ended(data):
                writer.write(ALL_HERE)
                return

    async def finish(self, count: int) -> None:
        """End without a wait: the client has got the answer that all data have arrived."""
        await self._stop()

    async def _stop(self) -> None:
        if self._task is not None:
            task, self._task = self._task, None
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled() and (exc := task.exception()) is not None:
                raise exc

    async def close(self) -> None:
        """Close the connection."""
        # All are closed before the first wait, which may be canceled.
        writer = self._ends.result()[1] if self._ends.done() else None
        if writer is not None:
            writer.close()
        if self._server is not None:
            self._server.close()
        with contextlib.suppress(OSError, EOFError):  # the client reports the error
            await self._stop()
        if writer is not None:
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        if self._server is not None:
            await self._server.wait_closed()
