"""Measurements through `Connection`, as a program that awaits its messages sees them.

Bandwidth is that of `await conn.send(...)` in a loop; for one-sided operations, that of as many
tasks as the depth, each of which awaits one operation at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from aiordma.cli.foreign import whole
from aiordma.cli.perf.answering import Answering
from aiordma.cli.perf.control import CONFIG, LIMITS, foreign
from aiordma.cli.perf.kinds import Stop
from aiordma.cli.perf.options import Plan
from aiordma.cli.perf.report import Flow
from aiordma.cli.perf.together import together
from aiordma.endpoint.config import ConnectionConfig
from aiordma.endpoint.connect import connect
from aiordma.endpoint.connection import Connection
from aiordma.endpoint.listener import Listener, listen
from aiordma.memory.remote import RemoteRegion
from aiordma.verbs.enums import Access
from aiordma.verbs.wr import SGE

__all__ = ["MessageClient", "MessageServer"]

#: With the peer's memory, and the own piece or the number to add.
_Operation = tuple[Callable[[RemoteRegion, Any], Awaitable[object]], RemoteRegion, Any]


def _config(plan: Plan) -> ConnectionConfig:
    # Half of them may be reads: as many as the plan has, where the adapter can.
    return replace(CONFIG, one_sided_depth=max(16, min(4096, 2 * plan.tx_depth)))


class MessageClient:
    """The end that measures; see `kinds.ClientSide`."""

    def __init__(self, plan: Plan, host: str) -> None:
        self._plan = plan
        self._host = host
        self._stack = contextlib.AsyncExitStack()
        self._conns: list[Connection] = []
        self._lent: list[RemoteRegion] = []
        self._pieces: list[SGE] = []

    async def connect(self, at: dict[str, Any]) -> None:
        """Connect as often as the plan says."""
        with foreign(at):
            port = whole(at["port"], 1, 0xFFFF)
        for _ in range(self._plan.qps):
            opening = connect(
                self._host, port, config=_config(self._plan), timeout=self._plan.timeout_s
            )
            self._conns.append(await self._stack.enter_async_context(opening))

    async def meet(self, lent: dict[str, Any]) -> None:
        """Register memory for one-sided operations."""
        if self._plan.test == "send":
            return
        with foreign(lent):
            self._lent = [RemoteRegion.from_bytes(bytes.fromhex(name)) for name in lent["regions"]]
            whole(len(self._lent), len(self._conns), len(self._conns))
            for remote in self._lent:
                whole(len(remote), max(self._plan.sizes))
        for conn in self._conns:
            access = Access.LOCAL_WRITE
            region = await conn.register(max(self._plan.sizes), access)
            self._stack.callback(region.close)
            self._pieces.append(SGE(region))

    def _operation(self, i: int, size: int) -> _Operation:
        conn, remote = self._conns[i], self._lent[i]
        piece = SGE(self._pieces[i].mr, 0, size)
        if self._plan.test == "write":
            return conn.write, remote, piece
        if self._plan.test == "read":
            return conn.read, remote, piece
        return conn.fetch_add, remote, 1

    async def lat(self, size: int, stop: Stop) -> list[int]:
        """One message and its answer at a time, or one operation."""
        if self._plan.test != "send":
            return await self._operation_lat(self._operation(0, size), stop)
        conn, payload = self._conns[0], bytes(size)
        clock = time.perf_counter_ns
        now = stop.begin()
        stamps = [now]
        # Little of its own between two operations: it would be measured, too.
        deadline, note = stop.deadline, stamps.append
        for _ in range(stop.most):
            await conn.send(payload)
            (await conn.recv()).release()
            now = clock()
            note(now)
            if now >= deadline:
                break
        return stamps

    async def _operation_lat(self, operation: _Operation, stop: Stop) -> list[int]:
        function, remote, local = operation
        clock = time.perf_counter_ns
        now = stop.begin()
        stamps = [now]
        deadline, note = stop.deadline, stamps.append
        for _ in range(stop.most):
            await function(remote, local)
            now = clock()
            note(now)
            if now >= deadline:
                break
        return stamps

    async def flow(self, size: int, stop: Stop) -> Flow:
        """As many messages or operations as the interface allows at a time."""
        clock = time.perf_counter_ns
        left, sent = [stop.most] * len(self._conns), 0

        async def repeat(i: int, operation: _Operation) -> None:
            nonlocal sent
            function, remote, local = operation
            while left[i] > 0 and clock() < stop.deadline:
                left[i] -= 1
                await function(remote, local)
                sent += 1

        async def send(i: int, conn: Connection, payload: bytes) -> None:
            nonlocal sent
            while left[i] > 0 and clock() < stop.deadline:
                left[i] -= 1
                await conn.send(payload)
                sent += 1
            await conn.flush()

        payload, work = bytes(size), []
        for i, conn in enumerate(self._conns):
            if self._plan.test == "send":
                work.append(send(i, conn, payload))
                continue
            operation = self._operation(i, size)
            work += [repeat(i, operation) for _ in range(self._plan.tx_depth)]
        begun = stop.begin()
        await together(work)
        return Flow(sent, (clock() - begun) / 1e9, 0.0)

    async def close(self) -> None:
        """Close the connections."""
        await self._stack.aclose()


class MessageServer:
    """The end that answers; see `kinds.ServerSide`."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._stack = contextlib.AsyncExitStack()
        self._listener: Listener | None = None
        self._conns: list[Connection] = []
        self._answering: Answering | None = None

    async def listen(self, host: str) -> dict[str, Any]:
        """Listen on a free port."""
        opening = listen(host, 0, config=_config(self._plan), limits=LIMITS)
        self._listener = await self._stack.enter_async_context(opening)
        return {"port": self._listener.port}

    async def accept(self) -> dict[str, Any]:
        """Take the connections, and lend memory on each."""
        assert self._listener is not None
        names = []
        kind = {"read": "read", "write": "write", "atomic": "atomic"}.get(self._plan.test)
        for _ in range(self._plan.qps):
            conn = await self._stack.enter_async_context(await self._listener.accept())
            self._conns.append(conn)
            if kind is not None:
                lease = conn.expose(bytearray(max(self._plan.sizes)), **{kind: True})
                region = await self._stack.enter_async_context(lease)
                # The other side may be older.
                names.append(region.to_bytes(version=1).hex())
        return {"regions": names}

    async def start(self, size: int, count: int | None) -> None:
        """Answer messages, or take them; one-sided operations need no task here."""
        self._answering = None
        if self._plan.test != "send":
            return
        self._answering = Answering(None)
        if self._plan.metric == "lat":
            payload = bytes(size)
            self._answering.run(lambda answering: self._echo(answering, payload))
        else:
            self._answering.run(self._take_all)

    async def _echo(self, answering: Answering, payload: bytes) -> None:
        conn = self._conns[0]
        while True:
            (await conn.recv()).release()
            await conn.send(payload)
            answering.seen += 1
            if answering.wanted is not None:
                answering.look()

    async def _take_all(self, answering: Answering) -> None:
        async def take(conn: Connection) -> None:
            async for message in conn:
                message.release()
                answering.add()

        await asyncio.gather(*(take(conn) for conn in self._conns))

    async def finish(self, count: int) -> None:
        """Until the last message is here."""
        if self._answering is not None:
            await self._answering.finish(count)

    async def close(self) -> None:
        """Close the connections."""
        try:
            if self._answering is not None:
                await self._answering.stop()
        finally:
            await self._stack.aclose()
