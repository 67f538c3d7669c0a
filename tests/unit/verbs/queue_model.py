"""A model of an adapter and of a caller, for the accounting of work queues.

The adapter completes in order, or, like iWARP, lets messages overtake reads.  It makes completions
for signaled requests and failed ones only, and after the first failure it flushes the rest.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from aiordma._ffi import ffi
from aiordma.errors import (
    RdmaOSError,
    completion_error,
)
from aiordma.loop.slots import SlotTable
from aiordma.verbs import PreparedPost
from aiordma.verbs.enums import Opcode, SendFlags, WCStatus
from aiordma.verbs.wc import WCRecord
from aiordma.verbs.work_queue import WorkQueue
from aiordma.verbs.wr import Built, Planned, SendWR, build_send

DEPTH = 6
Kinds = list[tuple[bool, bool]]  # a read; success is asked for


class Memory:
    """A region that counts who needs it."""

    def __init__(self) -> None:
        self.users = 0

    def _retain(self) -> None:
        self.users += 1

    def _let_go(self) -> None:
        self.users -= 1

    def _require(self) -> Any:
        return ffi.NULL


class Completions:
    """The completion queue: what callers with numbers of their own were told."""

    def __init__(self) -> None:
        self.table: SlotTable[Any] = SlotTable()
        self.told: list[tuple[int, int]] = []

    def _take_all(self) -> None:
        """Nothing waits to be polled: the adapter here routes each completion at once."""

    def _deliver(self, record: WCRecord, number: int) -> None:
        self.told.append((number, record[1]))


@dataclass
class Request:
    """What the adapter knows of a request."""

    wr_id: int
    read: bool
    signaled: bool
    fenced: bool = False


class Adapter:
    """Takes requests and ends them one by one.

    Args:
        overtaking: A message may complete before a read that was posted before it.
        counting: Successes are only counted, as by `CompletionQueue.poll_count`, where that works.
    """

    def __init__(self, *, overtaking: bool, counting: bool = False) -> None:
        self.overtaking = overtaking
        self.counting = counting
        self.counted = 0
        self.cq = Completions()
        cq: Any = self.cq
        self.qp = QueuePairStandIn()
        qp: Any = self.qp
        self.queue = WorkQueue(qp, cq, DEPTH)
        self.under_way: deque[Request] = deque()

    @property
    def cause(self) -> BaseException | None:
        return self.qp._first_failure

    def aio_execute(self, c: Any) -> int:
        """What C does with a prepared post."""
        row = (c.executions & c.history_mask) * c.count
        for i in range(c.count):
            c.history[row + i] = c.caller[i]
            wr = c.send[i]
            self.under_way.append(
                Request(
                    c.entries[i] | (c.executions & 0xFFFF) << 24,
                    wr.opcode == Opcode.RDMA_READ,
                    bool(wr.send_flags & SendFlags.SIGNALED),
                )
            )
        c.executions += 1
        return 0

    def tell(self, wr_id: int, status: int) -> None:
        sink = self.cq.table.get(wr_id)
        if sink is None:
            return
        record = (wr_id, status, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0)
        number = sink.number(record)
        if self.counting and status == 0 and sink.count(wr_id):
            self.counted += 1
            self.cq.told.append((number, status))
        else:
            sink(record)

    def next_to_end(self, *, late: bool) -> int:
        """The first request, or a message that overtakes the reads before it."""
        if late and self.overtaking:
            for i, one in enumerate(self.under_way):
                if not one.read:
                    reads = any(other.read for other in list(self.under_way)[:i])
                    return 0 if one.fenced and reads else i
        return 0

    def step(self, *, late: bool, fails: bool) -> None:
        """Bring one request to its end; a failure flushes the rest, some of it twice."""
        if not self.under_way:
            return
        at = 0 if fails else self.next_to_end(late=late)
        request = self.under_way[at]
        del self.under_way[at]
        if fails:
            self.tell(request.wr_id, WCStatus.REM_ACCESS_ERR)
            while self.under_way:
                flushed = self.under_way.popleft().wr_id
                for _ in range(2 if late else 1):
                    self.tell(flushed, WCStatus.WR_FLUSH_ERR)
        elif request.signaled:
            self.tell(request.wr_id, WCStatus.SUCCESS)


class QueuePairStandIn:
    """What a work queue needs of its queue pair."""

    closed = _in_error = False
    num = 7

    def __init__(self) -> None:
        self._first_failure: BaseException | None = None

    def _failed(self, operation: str, record: WCRecord) -> None:
        if self._first_failure is None:
            self._first_failure = completion_error(record[1])

    def _require(self) -> Any:
        return ffi.NULL


class Caller:
    """Posts in every way that there is, and knows what has to come back."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.queue = adapter.queue
        self.memory = Memory()
        self.lists: list[tuple[asyncio.Future[WCRecord], int]] = []
        self.posted: list[tuple[int, bool]] = []  # number, and whether success is told
        self.prepared: list[tuple[PreparedPost, list[bool]]] = []

    def plan(self, read: bool, asked: bool) -> Planned:
        signaled = asked or (read and self.adapter.overtaking)
        memory: Any = self.memory
        return Planned("read" if read else "send", (memory,), signaled, signaled and not asked)

    def number(self) -> int:
        return (1 << 60) + len(self.posted)

    def raw(self, kinds: Kinds) -> None:
        plan = [self.plan(read, asked) for read, asked in kinds]
        unsignaled = self.queue.unsignaled_after(plan)
        with suppress(RdmaOSError, ValueError):
            self.queue.take(len(plan), unsignaled)
            entered = self.queue.enter(plan, unsignaled)
            for posted, (read, asked) in zip(entered, kinds, strict=True):
                posted.caller_id = self.number()
                self.posted.append((posted.caller_id, asked))
                self.adapter.under_way.append(Request(posted.wr_id, read, posted.signaled))

    def awaited(self, kinds: Kinds) -> None:
        # As `submit`: only the last is signaled, and does not overtake the list's own reads.
        plan = [self.plan(read, i + 1 == len(kinds)) for i, (read, _) in enumerate(kinds)]
        if not self.queue.room.try_acquire(len(plan)):
            return
        future: asyncio.Future[WCRecord] = asyncio.get_running_loop().create_future()
        self.lists.append((future, len(kinds)))
        for i, posted in enumerate(self.queue.enter(plan, 0)):
            posted.future, posted.index, posted.last = future, i, i + 1 == len(plan)
            fenced = posted.last and any(read for read, _ in kinds[:-1])
            request = Request(posted.wr_id, kinds[i][0], posted.signaled, fenced)
            self.adapter.under_way.append(request)

    def prepare(self, kinds: Kinds) -> None:
        plan = [self.plan(read, asked) for read, asked in kinds]
        requests = [
            SendWR(
                opcode=Opcode.RDMA_READ if read else Opcode.SEND,
                send_flags=SendFlags.SIGNALED if planned.signaled else SendFlags(0),
            )
            for (read, _), planned in zip(kinds, plan, strict=True)
        ]
        built = Built("ibv_post_send", *build_send(requests), plan)
        post = PreparedPost(self.queue, requests, built)
        self.prepared.append((post, [asked for _, asked in kinds]))

    def execute(self, which: int) -> None:
        if not self.prepared:
            return
        post, asked = self.prepared[which % len(self.prepared)]
        before = len(self.posted)
        for i, one in enumerate(asked):
            number = self.number()
            post.patch(i, wr_id=number)
            self.posted.append((number, one))
        try:
            post.execute()
        except (RdmaOSError, ValueError):
            assert not post.is_success
            del self.posted[before:]
        else:
            assert post.is_success

    def free(self, which: int) -> None:
        if self.prepared:
            self.prepared.pop(which % len(self.prepared))[0].free()
