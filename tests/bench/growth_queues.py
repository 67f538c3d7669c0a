"""Queue pairs alone: a completion queue for each, one for all, and one shared receive queue beside.

    python -m aiordma_softroce --engine qemu --counted -- \\
        python tests/bench/growth_queues.py

Without the messages, credits and slots of connections: what sharing gives by itself.  Both ends are
queue pairs of one loop.  "own": each has a completion queue and receives of its own.  "queue": all
of an end complete in one queue.  "receives": and take their receives out of one, which holds as
many as all that can be under way.  A busy queue pair has one message of 64 bytes under way at any
time, there and back.  Told are microseconds and wake-ups for a message, and what two queue pairs
keep resident.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from aiordma.cm import ConnectionId, ConnectionParameter, EventChannel, EventType
from aiordma.verbs import (
    SGE,
    CompletionChannel,
    CompletionQueue,
    MemoryRegion,
    ProtectionDomain,
    QPInitAttr,
    QueuePair,
    RecvWR,
    SendFlags,
    SendWR,
    SharedReceiveQueue,
    WCOpcode,
    WorkCompletion,
)
from aiordma.verbs.resource import Resource
from tests.bench.growth import LIMIT_S, Row, Wakeups, compare, own_address
from tests.bench.growth_peer import memory
from tests.native_ends import listening

SETTINGS = ("own", "queue", "receives")
COUNTS = (10, 100, 1000)
COUNTED = "queue pairs"
FEW = 10
SIZE = 64
RECEIVES = 8  # of a queue pair of its own; they are posted again in chains of half
CHAIN = RECEIVES // 2
SIGNALED = 8  # every so many sends one, so that the send queue never fills


def name(setting: str, count: int, what: str) -> str:
    """What a figure is called."""
    return f"{setting}, {count:,} queue pairs, {what}"


class End:
    """One queue pair; its completions come to `dispatch`."""

    def __init__(self, side: Side, cm_id: ConnectionId) -> None:
        rig = side.rig
        self.side, self.cm_id = side, cm_id
        self.cq = side.cq or rig.queue()
        attr = QPInitAttr(
            send_cq=self.cq, srq=side.srq, max_send_wr=2 * SIGNALED, max_recv_wr=RECEIVES
        )
        self.qp: QueuePair = cm_id.create_qp(rig.pd, attr)
        self.used = self.sent = self.left = 0
        piece = [SGE(rig.mr, 0, SIZE)]
        self.silent = self.qp.prepare_send(SendWR(0, piece))
        self.loud = self.qp.prepare_send(SendWR(0, piece, send_flags=SendFlags.SIGNALED))
        if side.srq is None:
            self.post = self.qp.prepare_recv([side.receive] * CHAIN)
            for _ in range(RECEIVES // CHAIN):
                self.post.execute()
        if side.cq is None:
            rig.serve(self.cq, self.dispatch)

    def dispatch(self, completion: WorkCompletion) -> None:
        """Post receives again, and hand the message on."""
        if not completion.ok:
            raise completion.error("the measurement")
        assert completion.opcode is not None
        if not completion.opcode & WCOpcode.RECV:
            return
        counter: End | Side = self if self.side.srq is None else self.side
        counter.used += 1
        if counter.used == CHAIN:
            counter.used = 0
            if self.side.srq is None:
                self.post.execute()
            else:
                self.side.srq.post_recv([self.side.receive] * CHAIN)
        self.side.arrived(self)

    def send(self) -> None:
        """One message."""
        self.sent += 1
        (self.silent if self.sent % SIGNALED else self.loud).execute()


class Side:
    """The queue pairs of one end, and what they share."""

    def __init__(self, rig: Rig, most: int, arrived: Callable[[End], None]) -> None:
        self.rig, self.arrived = rig, arrived
        self.ends: dict[int, End] = {}
        self.cq = None if rig.setting == "own" else rig.queue()
        self.receive = RecvWR(0, [SGE(rig.mr)])
        self.srq: SharedReceiveQueue | None = None
        self.used = 0
        if rig.setting == "receives":
            # One message each, and a chain that waits to be posted again.
            room = most + 2 * CHAIN
            self.srq = SharedReceiveQueue(rig.pd, room)
            for _ in range(room // CHAIN):
                self.srq.post_recv([self.receive] * CHAIN)
        if self.cq is not None:
            rig.serve(self.cq, self.dispatch)

    def dispatch(self, completion: WorkCompletion) -> None:
        """Whose it is."""
        self.ends[completion.qp_num].dispatch(completion)

    def make(self, cm_id: ConnectionId) -> End:
        """One queue pair more."""
        end = End(self, cm_id)
        self.ends[end.qp.num] = end
        return end


class Rig:
    """Both ends, of so many queue pairs at most."""

    def __init__(self, setting: str, address: str, first: ConnectionId, most: int) -> None:
        self.setting, self.address = setting, address
        context = first.context
        assert context is not None
        self.events = first.event_channel
        self.pd = ProtectionDomain(context)
        self.channel = CompletionChannel(context)
        self.mr = MemoryRegion(self.pd, 4096)
        self.tasks: list[asyncio.Task[None]] = []
        self.busy = 0
        self.done = asyncio.Event()
        self.listener = listening(self.events, address)
        self.clients = Side(self, most, self.back)
        self.servers = Side(self, most, End.send)

    def queue(self) -> CompletionQueue:
        """A completion queue; the shared ones grow with their queue pairs."""
        room = RECEIVES + 2 * SIGNALED
        return CompletionQueue(self.pd.context, room, self.channel)

    def serve(self, cq: CompletionQueue, dispatch: Callable[[WorkCompletion], None]) -> None:
        """Take what completes there."""

        async def take() -> None:
            async for completion in cq:
                dispatch(completion)

        self.tasks.append(asyncio.create_task(take()))

    async def dial(self) -> None:
        """One pair more."""
        parameter = ConnectionParameter(1, 1, 6, 6)
        client = ConnectionId(self.events)
        await client.resolve_addr((self.address, self.listener.source_port), timeout=LIMIT_S)
        await client.resolve_route(timeout=LIMIT_S)
        self.clients.make(client)
        connecting = asyncio.create_task(client.connect(parameter))
        event = await self.events.get_event(LIMIT_S)
        assert event is not None
        assert event.type == EventType.CONNECT_REQUEST, event
        server = event.connection_id
        assert server is not None
        event.ack()
        self.servers.make(server)
        await server.accept(parameter)
        await connecting

    def back(self, end: End) -> None:
        """An answer has come."""
        end.left -= 1
        if end.left:
            end.send()
            return
        self.busy -= 1
        if not self.busy:
            self.done.set()

    async def run(self, ends: list[End], each: int) -> None:
        """So many round trips on each of these, all at once."""
        self.done.clear()
        self.busy = len(ends)
        for end in ends:
            end.left = each
            end.send()
        done = asyncio.create_task(self.done.wait())
        # A task that fails says why; the others never end.
        await asyncio.wait([done, *self.tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in self.tasks:
            if task.done():
                task.result()

    async def close(self) -> None:
        """All of it."""
        for task in self.tasks:
            task.cancel()
        await asyncio.wait(self.tasks)
        ends = [*self.clients.ends.values(), *self.servers.ends.values()]
        parts: list[Resource] = [end.qp for end in ends]
        parts += [side.srq for side in (self.clients, self.servers) if side.srq is not None]
        parts += dict.fromkeys(end.cq for end in ends)
        parts += [self.channel, self.mr, self.pd, *(end.cm_id for end in ends), self.listener]
        for part in parts:
            part.close()
        for part in parts:
            await part.wait_closed(LIMIT_S)


async def one_setting(
    setting: str, options: argparse.Namespace, counts: list[int], wakeups: Wakeups
) -> list[Row]:
    """All figures of a setting."""
    address = options.address or own_address()
    rows: list[Row] = []
    events = EventChannel()
    first = ConnectionId(events)
    await first.resolve_addr((address, 1), timeout=LIMIT_S)
    rig = Rig(setting, address, first, counts[-1])
    await rig.dial()
    before = memory()
    for count in counts:
        while len(rig.clients.ends) < count:
            await rig.dial()
        now = memory()
        kib = (now["resident"] - before["resident"]) / (count - 1) / 1024
        rows.append(Row(name(setting, count, "resident KiB"), kib, unit="KiB"))
        ends = list(rig.clients.ends.values())
        for used in dict.fromkeys((FEW, count)):
            each = max(5, options.messages // 2 // used)
            await rig.run(ends[:used], 2)  # everything that is used has been used before
            then, begun = wakeups.count, time.perf_counter()
            await rig.run(ends[:used], each)
            took = time.perf_counter() - begun
            sent, what = 2 * each * used, "all busy" if used == count else f"{used} busy"
            rows.append(Row(name(setting, count, f"{what}, us"), took / sent * 1e6, unit="us"))
            times = (wakeups.count - then) / sent
            rows.append(Row(name(setting, count, f"{what}, wake-ups"), times))
    await rig.close()
    first.close()
    events.close()
    await events.wait_closed(LIMIT_S)
    return rows


if __name__ == "__main__":
    compare(one_setting, "queue pairs alone", __doc__, SETTINGS, 2000)
