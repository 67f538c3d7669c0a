"""The seven objects of one end of a native connection, for tests of closing them."""

from __future__ import annotations

import asyncio
from typing import Any

from aiordma.cm import ConnectionId, ConnectionParameter, EventChannel, Stage
from aiordma.verbs import SGE, Access, CompletionQueue, RecvWR
from aiordma.verbs.resource import Resource
from tests import native_ends
from tests.device.oracle import until
from tests.native_ends import joined, listening, resolved

#: In the order that C needs.
NAMES = ("qp", "cq", "completion channel", "mr", "pd", "id", "event channel")
_PARAMETER = (1, 1, 6, 6)


class End(native_ends.End):
    """One end with a receive under way.

    Args:
        cm_id: Its id, which knows its device.
        events: Its event channel, which belongs to the end from now on.
        await_: Have tasks wait for a receive, completions and events, too.

    Attributes:
        named: Its objects by name.
        waiting: Tasks that wait on them.
    """

    def __init__(self, cm_id: ConnectionId, events: EventChannel, *, await_: bool = True) -> None:
        super().__init__(cm_id)
        self.parts.append(events)
        self.build(room=8, max_send_wr=2, max_recv_wr=4)
        mr = self.region(4096, Access.LOCAL_WRITE)
        qp, cq = self.qp, self.cq
        qp.post_recv(RecvWR(wr_id=7, sg_list=[SGE(mr, 0, 64)]))
        self.named: dict[str, Resource] = dict(
            zip(NAMES, (qp, cq, self.channel, mr, self.pd, cm_id, events), strict=True)
        )
        self.waiting: list[asyncio.Task[Any]] = []
        if await_:
            waits = (qp.recv(SGE(mr, 64, 64)), self._count(cq), self._count(events))
            self.waiting = [asyncio.create_task(wait) for wait in waits]

    @staticmethod
    async def _count(source: CompletionQueue | EventChannel) -> int:
        return len([item async for item in source])

    def __getitem__(self, name: str) -> Resource:
        return self.named[name]

    async def disconnected(self) -> None:
        """Wait until its id has read the disconnection."""
        await until(lambda: self.cm_id.stage is Stage.DISCONNECTED)

    async def ended(self, timeout: float = 30.0) -> list[Any]:
        """Wait until every object is destroyed; what the waiting tasks ended with."""
        for part in self.named.values():
            await part.wait_closed(timeout)
        async with asyncio.timeout(timeout):
            return await asyncio.gather(*self.waiting, return_exceptions=True)


class Hall:
    """A listening id, and connections to it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.events = EventChannel()
        self.listener = listening(self.events, address)

    async def resolved(self) -> tuple[ConnectionId, EventChannel]:
        """A new id with an event channel of its own that knows its way to the listener."""
        events = EventChannel()
        return await resolved(events, self.address, self.listener.source_port), events

    async def connected(self, *, await_: bool = True) -> tuple[End, End]:
        """Two connected ends, each with an event channel of its own: (client, server)."""

        def serve(cm_id: ConnectionId) -> End:
            events = EventChannel()
            cm_id.migrate(events)
            return End(cm_id, events, await_=await_)

        client = End(*await self.resolved(), await_=await_)
        parameter = ConnectionParameter(*_PARAMETER)
        return client, await joined(client.cm_id, self.listener, serve, parameter)

    async def close(self) -> None:
        """Stop listening."""
        self.listener.close()
        self.events.close()
        await self.events.wait_closed()


class Heartbeat:
    """Measures how long the loop was away, by a callback every millisecond."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._handle: asyncio.TimerHandle | None = None
        self._last = 0.0
        self.gaps: list[float] = []

    def __enter__(self) -> Heartbeat:
        self._last = self._loop.time()
        self._tick()
        return self

    def _tick(self) -> None:
        now = self._loop.time()
        self.gaps.append(now - self._last)
        self._last = now
        self._handle = self._loop.call_later(0.001, self._tick)

    def __exit__(self, *exc_info: object) -> None:
        assert self._handle is not None
        self._handle.cancel()
        self.gaps.append(self._loop.time() - self._last)

    @property
    def longest(self) -> float:
        """Seconds of the longest gap."""
        return max(self.gaps)
