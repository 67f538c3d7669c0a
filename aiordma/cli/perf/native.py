"""Measurements on the native layer: both ends, for all tests but streams."""

from __future__ import annotations

from typing import Any

from aiordma.cli.foreign import whole
from aiordma.cli.perf.answering import Answering
from aiordma.cli.perf.control import foreign
from aiordma.cli.perf.kinds import Stop
from aiordma.cli.perf.native_ends import End, Gate, closed_all, dialed
from aiordma.cli.perf.native_flow import Taker, flow, joined
from aiordma.cli.perf.native_lat import PingPong, one_sided_lat
from aiordma.cli.perf.options import Plan
from aiordma.cli.perf.report import Flow
from aiordma.cli.perf.together import together
from aiordma.cm.connection_id import ConnectionId
from aiordma.cm.event_channel import EventChannel

__all__ = ["NativeClient", "NativeServer"]


class NativeClient:
    """The end that measures; see `kinds.ClientSide`."""

    def __init__(self, plan: Plan, host: str) -> None:
        self._plan = plan
        self._host = host
        self._events: EventChannel | None = None
        self._ends: list[End] = []
        self._ping: PingPong | None = None
        self._remote: list[tuple[int, int]] = []

    async def connect(self, at: dict[str, Any]) -> None:
        """Connect as often as the plan says."""
        plan = self._plan
        self._events = EventChannel()
        is_ping = plan.test == "send" and plan.metric == "lat"

        def make(cm_id: ConnectionId) -> End:
            return End(cm_id, plan, waits_for_receives=is_ping)

        with foreign(at):
            address = (self._host, whole(at["port"], 1, 0xFFFF))
        for _ in range(plan.qps):
            self._ends.append(await dialed(self._events, address, plan, make))
        if is_ping:
            self._ping = PingPong(self._ends[0], plan)

    async def meet(self, lent: dict[str, Any]) -> None:
        """Learn where the server's memory is."""
        with foreign(lent):
            self._remote = [
                (whole(addr), whole(rkey, 0, 0xFFFFFFFF)) for addr, rkey in lent["memory"]
            ]
            whole(len(self._remote), len(self._ends), len(self._ends))

    async def lat(self, size: int, stop: Stop) -> list[int]:
        """One message and its answer at a time, or one operation."""
        if self._ping is not None:
            self._ping.prepare(size)
            return await self._ping.measure(stop)
        return await one_sided_lat(self._ends[0], self._plan, size, self._remote[0], stop)

    async def flow(self, size: int, stop: Stop) -> Flow:
        """As many operations at a time on each connection as the depth says."""
        plan = self._plan
        ends = zip(self._ends, self._remote, strict=True)
        return joined(await together(flow(end, plan, size, remote, stop) for end, remote in ends))

    async def close(self) -> None:
        """Close the connections."""
        await closed_all([*self._ends, *([] if self._events is None else [self._events])])


class NativeServer:
    """The end that answers; see `kinds.ServerSide`."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._gate: Gate | None = None
        self._ends: list[End] = []
        self._pings: list[PingPong] = []
        self._takers: list[Taker] = []
        self._answering: Answering | None = None

    async def listen(self, host: str) -> dict[str, Any]:
        """Listen on a free port."""
        self._gate = Gate(host, self._plan)
        return {"port": self._gate.port}

    async def accept(self) -> dict[str, Any]:
        """Take the connections; their memory is open to the client."""
        assert self._gate is not None
        for _ in range(self._plan.qps):
            self._ends.append(await self._gate.accept(self._make, self._ready))
        return {"memory": [(end.mr.addr, end.mr.rkey) for end in self._ends]}

    def _make(self, cm_id: ConnectionId) -> End:
        return End(cm_id, self._plan, waits_for_receives=True)

    def _ready(self, end: End) -> None:
        if self._plan.test != "send":
            return
        if self._plan.metric == "lat":
            self._pings.append(PingPong(end, self._plan))
        else:
            self._takers.append(Taker(end, self._plan))

    async def start(self, size: int, count: int | None) -> None:
        """Answer messages, or take them; one-sided operations need no task here."""
        self._answering = None
        if self._plan.test != "send":
            return
        self._answering = Answering(None)
        for ping in self._pings:
            ping.prepare(size)
            self._answering.run(ping.answer)
        for taker in self._takers:
            self._answering.run(taker.take)

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
            await closed_all([*self._ends, *([] if self._gate is None else [self._gate])])
