"""WorkQueue: exact accounting of what is under way, against a model of an adapter.

The adapter completes in order, or, like iWARP, lets messages overtake reads.  It makes completions
for signaled requests and failed ones only, and after the first failure it flushes the rest.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma._ffi import ffi
from aiordma.errors import CompletionError, FlushedError, RemoteAccessError, ResourceBusyError
from aiordma.loop.slots import SlotTable
from aiordma.verbs.enums import Opcode, SendFlags, WCStatus
from aiordma.verbs.prepared import PreparedPost
from aiordma.verbs.qp_posting import Built
from aiordma.verbs.wc import WCRecord, WorkCompletion
from aiordma.verbs.work_queue import Planned, Posted, WorkQueue
from aiordma.verbs.wr import SendWR, build_send

from .conftest import Run, run_on, settle

DEPTH = 6


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

    def _deliver(self, record: WCRecord, number: int) -> None:
        self.told.append((number, record[1]))


@dataclass
class Request:
    """What the adapter knows of a request."""

    wr_id: int
    read: bool
    signaled: bool


class Adapter:
    """Takes requests and completes them; the callers' side of the story is `expected`."""

    def __init__(self, *, overtaking: bool) -> None:
        self.overtaking = overtaking
        self.cq = Completions()
        self.cause: BaseException | None = None
        self.failed = False
        cq: Any = self.cq
        self.queue = WorkQueue(cq, DEPTH, self._on_failure, lambda: self.cause)
        self.under_way: deque[Request] = deque()

    def _on_failure(self, posted: Posted, record: WCRecord) -> None:
        self.failed = True
        if self.cause is None:
            self.cause = RemoteAccessError("the first", status=record[1])

    def post(self, wr_id: int, *, read: bool, signaled: bool) -> None:
        self.under_way.append(Request(wr_id, read, signaled))

    def tell(self, wr_id: int, status: int) -> None:
        sink = self.cq.table.get(wr_id)
        if sink is not None:
            sink((wr_id, status, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0))

    def step(self, *, late: bool, fails: bool) -> None:
        """Bring one request to its end, the first or one that overtakes reads."""
        if not self.under_way:
            return
        at = 0
        if late and self.overtaking and not fails:
            messages = [i for i, one in enumerate(self.under_way) if not one.read]
            at = messages[0] if messages else 0
        request = self.under_way[at]
        del self.under_way[at]
        if fails:
            self.tell(request.wr_id, WCStatus.REM_ACCESS_ERR)
            while self.under_way:
                self.tell(self.under_way.popleft().wr_id, WCStatus.WR_FLUSH_ERR)
        elif request.signaled:
            self.tell(request.wr_id, WCStatus.SUCCESS)


class Caller:
    """Posts in every way that there is, and knows what has to come back."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.queue = adapter.queue
        self.memory = Memory()
        self.loop = asyncio.get_running_loop()
        self.futures: list[asyncio.Future[WorkCompletion]] = []
        self.next_number = 1 << 20
        self.loud: set[int] = set()  # numbers that have to come back
        self.quiet: set[int] = set()  # numbers that come back with a failure only
        self.prepared: list[PreparedPost] = []

    def plan(self, read: bool, asked: bool) -> Planned:
        signaled = asked or (read and self.adapter.overtaking)
        memory: Any = self.memory
        return Planned("read" if read else "send", (memory,), signaled, signaled and not asked)

    def refused(self, plan: list[Planned]) -> int | None:
        """How many unsignaled requests would be at the tail; None if the list is refused."""
        unsignaled = self.queue.unsignaled_after(plan)
        try:
            self.queue.take(len(plan), unsignaled)
        except ResourceBusyError:
            assert self.queue.room.free < len(plan)
            return None
        except ValueError:
            assert unsignaled == DEPTH
            return None
        return unsignaled

    def numbers(self, asked: list[bool]) -> list[int]:
        numbers = []
        for one in asked:
            self.next_number += 1
            (self.loud if one else self.quiet).add(self.next_number)
            numbers.append(self.next_number)
        return numbers

    def raw(self, kinds: list[tuple[bool, bool]]) -> None:
        plan = [self.plan(read, asked) for read, asked in kinds]
        unsignaled = self.refused(plan)
        if unsignaled is None:
            return
        numbers = self.numbers([asked for _, asked in kinds])
        entered = self.queue.enter(plan, unsignaled)
        for posted, number, (read, _) in zip(entered, numbers, kinds, strict=True):
            posted.caller_id = number
            self.adapter.post(posted.wr_id, read=read, signaled=posted.signaled)

    def awaited(self, kinds: list[tuple[bool, bool]]) -> None:
        # As `submit`: only the last is signaled, and a message that is the last is fenced.
        plan = [self.plan(read, i + 1 == len(kinds)) for i, (read, _) in enumerate(kinds)]
        if not self.queue.room.try_acquire(len(plan)):
            return
        future: asyncio.Future[WorkCompletion] = self.loop.create_future()
        self.futures.append(future)
        for i, posted in enumerate(self.queue.enter(plan, 0)):
            posted.future = future
            posted.last = i + 1 == len(plan)
            posted.index = i
            self.adapter.post(posted.wr_id, read=kinds[i][0], signaled=posted.signaled)

    def prepare(self, kinds: list[tuple[bool, bool]]) -> None:
        requests = [
            SendWR(0, (), Opcode.RDMA_READ if read else Opcode.SEND, SendFlags(0))
            for read, _ in kinds
        ]
        first, keep = build_send(requests)
        plan = [self.plan(read, asked) for read, asked in kinds]
        qp: Any = type("QP", (), {"_prepared": set(), "_require": lambda self: ffi.NULL})()
        self.prepared.append(PreparedPost(qp, self.queue, requests, Built(first, keep, plan)))

    def execute(self, which: int) -> None:
        """What `execute` does, with this adapter in place of C."""
        if not self.prepared:
            return
        post = self.prepared[which % len(self.prepared)]
        entries = post._entries
        unsignaled = self.refused([entry.plan for entry in entries])  # type: ignore[attr-defined]
        if unsignaled is None:
            return
        asked = [entry.signaled and not entry.silent for entry in entries]
        for i, number in enumerate(self.numbers(asked)):
            post.patch(i, wr_id=number)
        self.queue.enter_again(entries, unsignaled)
        c = post._c
        row = (c.executions & c.history_mask) * c.count
        for i, entry in enumerate(entries):
            c.history[row + i] = c.caller[i]
            wr_id = entry.wr_id | (c.executions & 0xFFFF) << 24
            read = post._requests[i].opcode == Opcode.RDMA_READ  # type: ignore[union-attr]
            self.adapter.post(wr_id, read=read, signaled=entry.signaled)
        c.executions += 1
