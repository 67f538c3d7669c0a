"""WorkQueue: exact accounting of what is under way, against a model of an adapter.

The adapter completes in order, or, like iWARP, lets messages overtake reads.  It makes completions
for signaled requests and failed ones only, and after the first failure it flushes the rest.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma._ffi import ffi
from aiordma.errors import (
    CompletionError,
    FlushedError,
    RemoteAccessError,
    ResourceBusyError,
    completion_error,
)
from aiordma.loop.slots import SlotTable
from aiordma.verbs import prepared
from aiordma.verbs.enums import Opcode, SendFlags, WCStatus
from aiordma.verbs.prepared import PreparedPost
from aiordma.verbs.qp_posting import Built
from aiordma.verbs.wc import WCRecord, WorkCompletion
from aiordma.verbs.work_queue import Planned, Posted, WorkQueue
from aiordma.verbs.wr import SendWR, build_send

from .conftest import Run, run_on, settle

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
    """Takes requests and ends them one by one."""

    def __init__(self, *, overtaking: bool) -> None:
        self.overtaking = overtaking
        self.cq = Completions()
        self.cause: BaseException | None = None
        cq: Any = self.cq
        self.queue = WorkQueue(cq, DEPTH, self._on_failure, lambda: self.cause)
        self.under_way: deque[Request] = deque()

    def _on_failure(self, posted: Posted, record: WCRecord) -> None:
        if self.cause is None:
            self.cause = completion_error(record[1])

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
        if sink is not None:
            sink((wr_id, status, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0))

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
    """What a prepared post needs of its queue pair."""

    _in_error = False
    num = 7

    def __init__(self) -> None:
        self._prepared: set[PreparedPost] = set()

    def _require(self) -> Any:
        return ffi.NULL


class Caller:
    """Posts in every way that there is, and knows what has to come back."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.queue = adapter.queue
        self.memory = Memory()
        self.qp: Any = QueuePairStandIn()
        self.lists: list[tuple[asyncio.Future[WorkCompletion], int]] = []
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
        with suppress(ResourceBusyError, ValueError):
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
        future: asyncio.Future[WorkCompletion] = asyncio.get_running_loop().create_future()
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
        post = PreparedPost(self.qp, self.queue, requests, Built(*build_send(requests), plan))
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
        except (ResourceBusyError, ValueError):
            assert not post.is_success
            del self.posted[before:]
        else:
            assert post.is_success

    def free(self, which: int) -> None:
        if self.prepared:
            self.prepared.pop(which % len(self.prepared))[0].free()


KINDS = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=4)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["raw", "awaited", "prepare"]), KINDS),
        st.tuples(st.just("execute"), st.integers(0, 3)),
        st.tuples(st.just("execute"), st.integers(0, 3)),
        st.tuples(st.just("free"), st.integers(0, 3)),
        st.tuples(st.just("end"), st.booleans()),
        st.tuples(st.just("end"), st.booleans()),
    ),
    max_size=60,
)


async def _simulate(
    lists: list[Kinds], steps: list[tuple[str, Any]], overtaking: bool, failure: bool | None
) -> None:
    adapter = Adapter(overtaking=overtaking)
    caller = Caller(adapter)
    for kinds in lists:
        caller.prepare(kinds)
    queue, memory = adapter.queue, caller.memory
    with mock.patch.object(prepared, "lib", adapter):
        for name, argument in steps:
            if name == "end":
                adapter.step(late=argument, fails=False)
            else:
                getattr(caller, name)(argument)
            assert len(queue) + queue.room.free == DEPTH
            assert len(adapter.under_way) <= len(queue) <= DEPTH
            assert queue.unsignaled < DEPTH
    if failure is not None:
        adapter.step(late=failure, fails=True)
    while adapter.under_way:
        adapter.step(late=False, fails=False)
    told = dict(adapter.cq.told)
    assert len(told) == len(adapter.cq.told), "told twice"
    # Each number that was asked for comes back, and of the others only what failed.
    for number, asked in caller.posted:
        assert told.pop(number, None) is not None or not asked, number
    assert not told, "told of what nobody posted"
    for future, count in caller.lists:
        assert future.done()
        error = future.exception()
        if error is not None:
            assert isinstance(error, CompletionError)
            assert error.index is not None
            assert 0 <= error.index < count
    # What is left is unsignaled, and a signaled request behind it ends it all.
    if adapter.cause is None:
        assert len(queue) == queue.unsignaled
        caller.raw([(False, True)])
        adapter.under_way.clear()
        adapter.tell(queue._order[-1].wr_id, WCStatus.SUCCESS)
    elif overtaking:  # an unsignaled message that overtook a read is known to be done at the end
        told_before = len(adapter.cq.told)
        queue.give_up(7)
        assert len(adapter.cq.told) == told_before
        queue.abandon(7)
    assert len(queue) == 0
    assert queue.room.free == DEPTH
    assert memory.users == sum(len(post) for post, _ in caller.prepared)
    for post, _ in caller.prepared:
        post.free()
    assert memory.users == 0
    assert len(adapter.cq.table) == 0


@given(
    st.lists(KINDS, min_size=1, max_size=3),
    STEPS,
    st.booleans(),
    st.sampled_from([None, False, True]),
)
def test_nothing_is_lost_told_twice_or_kept(
    lists: list[Kinds], steps: list[tuple[str, Any]], overtaking: bool, failure: bool | None
) -> None:
    run_on("asyncio", _simulate(lists, steps, overtaking, failure))


def test_the_first_failure_of_a_list_is_told(run: Run) -> None:
    async def main() -> None:
        adapter = Adapter(overtaking=False)
        caller = Caller(adapter)
        caller.awaited([(False, False)] * 4)
        caller.awaited([(False, False)] * 2)
        adapter.step(late=False, fails=False)
        adapter.step(late=False, fails=True)
        (first, _), (second, _) = caller.lists
        with pytest.raises(RemoteAccessError, match="request 1 of its list") as caught:
            first.result()
        assert caught.value.index == 1
        with pytest.raises(FlushedError) as flushed:
            second.result()
        assert flushed.value.index == 0
        assert isinstance(flushed.value.__cause__, RemoteAccessError)

    run(main())


def test_one_of_many_equal_executions_fails(run: Run) -> None:
    async def main() -> None:
        adapter = Adapter(overtaking=False)
        caller = Caller(adapter)
        caller.prepare([(False, False)])
        with mock.patch.object(prepared, "lib", adapter):
            for _ in range(4):
                caller.execute(0)
        adapter.step(late=False, fails=False)
        adapter.step(late=True, fails=True)  # each is flushed twice, and told once
        numbers = [number for number, _ in caller.posted]
        failed = WCStatus.REM_ACCESS_ERR, WCStatus.WR_FLUSH_ERR, WCStatus.WR_FLUSH_ERR
        assert adapter.cq.told == list(zip(numbers[1:], failed, strict=True))
        assert len(adapter.queue) == 0
        caller.free(0)
        assert caller.memory.users == 0

    run(main())


def test_an_overtaken_read_waits_for_its_own_completion(run: Run) -> None:
    async def main() -> None:
        adapter = Adapter(overtaking=True)
        caller = Caller(adapter)
        caller.awaited([(True, False)])
        caller.awaited([(False, False)])
        adapter.step(late=True, fails=False)
        (read, _), (send, _) = caller.lists
        assert send.done()
        assert not read.done()
        assert len(adapter.queue) == 1
        assert caller.memory.users == 1
        adapter.step(late=True, fails=False)
        assert read.done()
        assert caller.memory.users == 0

    run(main())


def test_what_is_never_flushed_is_given_up(run: Run) -> None:
    async def main() -> None:
        adapter = Adapter(overtaking=False)
        caller = Caller(adapter)
        with mock.patch.object(prepared, "lib", adapter):
            caller.raw([(False, True)])
            caller.prepare([(False, True)])
            caller.execute(0)
            caller.awaited([(False, False)])
            caller.execute(0)
        lost = list(adapter.under_way)
        adapter.queue.give_up(7)
        numbers = [number for number, _ in caller.posted]
        assert adapter.cq.told == [(number, WCStatus.WR_FLUSH_ERR) for number in numbers]
        assert isinstance(caller.lists[0][0].exception(), FlushedError)
        # The memory stays, and a flush that comes late is not told again.
        assert caller.memory.users == 3
        adapter.queue.give_up(7)
        for request in lost:
            adapter.tell(request.wr_id, WCStatus.WR_FLUSH_ERR)
        assert len(adapter.cq.told) == len(numbers)
        assert len(adapter.queue) == 0
        caller.free(0)
        assert caller.memory.users == 0

    run(main())


def test_entering_is_all_or_nothing(run: Run) -> None:
    class Closed(Memory):
        def _retain(self) -> None:
            raise ConnectionAbortedError

    async def main() -> None:
        adapter = Adapter(overtaking=False)
        queue, good, bad = adapter.queue, Memory(), Closed()
        parts: Any = [(good,), (good, bad), (good,)]
        plan = [Planned("send", part) for part in parts]
        queue.take(3, 0)
        with pytest.raises(ConnectionAbortedError):
            queue.enter(plan, 0)
        assert queue.room.free == DEPTH
        assert len(queue) == 0
        assert good.users == 0
        assert len(adapter.cq.table) == 0

    run(main())


def test_the_last_place_is_kept_for_a_signaled_request(run: Run) -> None:
    async def main() -> None:
        adapter = Adapter(overtaking=False)
        queue, caller = adapter.queue, Caller(adapter)
        quiet, loud = (False, False), (False, True)
        for chain, taken in (
            ([quiet] * DEPTH, 0),
            ([quiet] * (DEPTH - 2), DEPTH - 2),
            ([quiet] * 2, DEPTH - 2),
            ([quiet], DEPTH - 1),
            ([quiet], DEPTH - 1),
            ([loud], DEPTH),
            ([loud], DEPTH),
        ):
            caller.raw(chain)
            assert len(queue) == taken
        while adapter.under_way:
            adapter.step(late=False, fails=False)
        assert len(queue) == 0

    run(main())


def test_who_waits_for_places_comes_first(run: Run) -> None:
    async def main() -> None:
        queue = Adapter(overtaking=False).queue
        queue.take(DEPTH - 1, 0)
        waiting = asyncio.ensure_future(queue.room.acquire(2))
        await settle()
        with pytest.raises(ResourceBusyError, match="1 wait for places already"):
            queue.take(1, 0)
        queue.room.release()
        await waiting
        assert queue.room.free == 0

    run(main())
