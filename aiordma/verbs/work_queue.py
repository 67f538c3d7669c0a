"""WorkQueue: the requests of one queue of a queue pair that have not completed.

Theory of operation
    Room is counted, never probed: a request takes a place when it is posted and gives it back when
    it completes, so that posting cannot fail for lack of room.  A completion also ends the
    unsignaled requests before it, but no signaled one: iWARP lets a message overtake a read, whose
    bytes are still to come when the message has completed.  Reads are always signaled there, and
    the completions that were not asked for are swallowed (`silent`).

    A queue all of whose places are held by unsignaled requests would never complete anything, and
    never have room for the signaled request that would free it.  So the unsignaled requests at the
    tail are counted, and one that would take the last place is refused.

    Each request is an entry of the slot table and keeps its memory regions from being destroyed.
    Canceling a task takes the future out of the entry and leaves the entry: the adapter knows
    nothing of tasks, and the memory belongs to it until the completion.

    Requests of a list that is awaited share one future: the success of the last request, or the
    first failure of any, completes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import weakref
from collections import Counter, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from aiordma.errors import (
    CompletionError,
    FlushedError,
    busy_error,
    os_error,
)
from aiordma.loop.credits import Credits
from aiordma.verbs.cq import CompletionQueue
from aiordma.verbs.enums import QPState
from aiordma.verbs.resource import Resource
from aiordma.verbs.wc import Countable, WCRecord, WorkCompletion, flush_record, record_error
from aiordma.verbs.wr import Built, Planned, RecvWR, SendWR, Transfer

if TYPE_CHECKING:
    from aiordma.verbs.prepared import PreparedPost
    from aiordma.verbs.qp import QueuePair

__all__ = ["Posted", "WorkQueue"]

_UNCONNECTED = frozenset({QPState.RESET, QPState.INIT, QPState.RTR})


class Posted(Countable):
    """One request under way; called with its completion.

    Attributes:
        signaled: Whether its success makes a completion.
        silent: Whether that completion is of no interest to the caller.
        caller_id: The caller's number, if its completion is polled, else None.
        future: That of the task that awaits it, or of the list that it belongs to.
        index: Its place in such a list, or None.
        last: Whether its success is the success of the whole list.
        muted: Whether its end was reported to the caller before the adapter completed it.
    """

    __slots__ = (
        "caller_id", "future", "index", "last", "muted", "operation", "queue", "regions",
        "signaled", "silent", "wr_id",
    )  # fmt: skip

    operation: str
    signaled: bool
    silent: bool
    regions: tuple[Resource, ...]

    def __init__(self, queue: WorkQueue, plan: Planned) -> None:
        self.queue: WorkQueue = queue
        self.operation, self.regions, self.signaled, self.silent = plan
        self.caller_id: int | None = None
        self.future: asyncio.Future[WCRecord] | None = None
        self.index: int | None = None
        self.last: bool = True
        self.muted: bool = False
        self.wr_id: int = 0
        retained: list[Resource] = []
        try:
            for region in self.regions:
                region._retain()
                retained.append(region)
            self.wr_id = queue.cq.table.add(self)
        except BaseException:
            for region in retained:
                region._let_go()
            raise

    def __call__(self, record: WCRecord) -> None:
        """Take the completion of the entry."""
        self.queue._complete(self, record)

    def fail(self, cause: BaseException) -> None:
        """Fail the future: no completion will arrive.  The memory stays until the QP is gone."""
        if self.future is not None and not self.future.done():
            self.future.set_exception(cause)

    # Entries that are posted more than once (prepared.py) override these

    def retire(self) -> None:
        """Release the entry: it has left the queue."""
        self.release()

    def is_stale(self, record: WCRecord) -> bool:
        """Whether the completion has come before; software iWARP flushes some requests twice."""
        return False  # an ordinary entry leaves the table with its completion

    def is_next(self, record: WCRecord) -> bool:
        """Whether the entry's first occurrence in the queue has completed."""
        return True

    def number(self, record: WCRecord) -> int | None:
        """The caller's number for its completion; None if it is not polled."""
        return self.caller_id

    def number_ahead(self, occurrence: int) -> int | None:
        """As `number`, for an occurrence in the queue, counted from the front."""
        return self.caller_id

    def release(self) -> None:
        """Give back the entry's id and release the memory."""
        self.queue.cq.table.remove(self.wr_id)
        self.release_regions()

    def release_regions(self) -> None:
        """Release the memory."""
        regions, self.regions = self.regions, ()
        for region in regions:
            region._let_go()


class WorkQueue:
    """The send or the receive side of a queue pair.

    Args:
        qp: The queue pair.
        cq: Where its completions arrive.
        depth: Places.

    Attributes:
        room: Places for requests.
        unsignaled: Requests behind the last signaled one.
        prepared: Posts that were prepared for it, in their order, and not freed.
    """

    __slots__ = (
        "__weakref__", "_order", "cq", "depth", "prepared", "qp", "room", "unsignaled",
    )  # fmt: skip

    def __init__(self, qp: QueuePair, cq: CompletionQueue, depth: int) -> None:
        self.qp: QueuePair = qp
        self.cq: CompletionQueue = cq
        self.depth: int = depth
        self.room: Credits = Credits(depth)
        self.unsignaled: int = 0
        self.prepared: dict[PreparedPost, None] = {}
        self._order: deque[Posted] = deque()

    def __len__(self) -> int:
        """Requests under way."""
        return len(self._order)

    @property
    def unanswered(self) -> int:
        """Requests under way whose end was not reported to the caller."""
        return sum(not posted.muted for posted in self._order)

    # Posting

    def post(self, built: Built, chain: Sequence[SendWR] | Sequence[RecvWR]) -> None:
        """Post a list whose completions carry the callers' own numbers.

        In the error state of the queue pair they are made at once, without the adapter.

        Raises:
            RdmaOSError, ValueError: See `take`; nothing was posted.
            OSError: The post failed; the queue pair is in the error state.
        """
        if not chain:
            return
        if self.qp._in_error:
            self.cq._flush(self.qp.num, [request.wr_id for request in chain])
            return
        unsignaled = self.unsignaled_after(built.plan)
        self.take(len(chain), unsignaled)
        entered = self.enter(built.plan, unsignaled)
        for i, posted in enumerate(entered):
            posted.caller_id = chain[i].wr_id
        self._ring(built, entered)

    async def completed(
        self, built: Built | Transfer, name: str | None = None, wr_id: int | None = None
    ) -> WorkCompletion:
        """Wait for places, post a list, and wait for the completion of its last request.

        Args:
            built: The list; the last of it is signaled.
            name: For errors, instead of the opcode's name.
            wr_id: The number in the completion.

        Raises:
            CompletionError: The first request that failed, or was flushed.
            ResourceClosedError: The queue pair was closed meanwhile.
            OSError: The post failed; the queue pair is in the error state.

        Cancellation: ends the wait; the posted requests run on.
        """
        count = len(built.plan)
        self.cq.manage()
        if not self.room.try_acquire(count):
            await self.room.acquire(count)
        if self.qp.closed or self.qp._in_error:
            self.room.release(count)
            self.qp._require()
            name = name or built.plan[0].operation
            raise self._flushed(name, 0 if count > 1 else None)
        entered = self.enter(built.plan, 0)
        future: asyncio.Future[WCRecord] = asyncio.get_running_loop().create_future()
        for i, posted in enumerate(entered):
            posted.future = future
            if name is not None:
                posted.operation = name
            if count > 1:
                posted.index, posted.last = i, i + 1 == count
        try:
            self._ring(built, entered)
        except BaseException:
            future.cancel()
            raise
        try:
            return WorkCompletion.from_record(await future, wr_id)
        finally:
            del future, entered, posted  # its exception has this frame: a cycle

    def _ring(self, built: Built | Transfer, entered: Sequence[Posted]) -> None:
        if code := built.post(self.qp._require(), entered):
            raise self.post_failed(built.verb, code)

    def post_failed(self, verb: str, code: int) -> OSError:
        """The exception of a post that has failed.

        The list may have been queued all the same: so nothing is taken back; the queue pair goes to
        the error state and the memory stays until its destruction.
        """
        detail = ""
        with contextlib.suppress(OSError):
            if verb == "ibv_post_send" and (state := self.qp.state) in _UNCONNECTED:
                # Software iWARP says EPERM, as if a right were missing.
                code = errno.EINVAL
                detail = f"(the queue pair is in {state.name}: connect it before it sends)"
            self.qp.to_error()
        return os_error(code, verb, detail=detail)

    # Entering

    def unsignaled_after(self, plan: Sequence[Planned]) -> int:
        """How many requests would stand behind the last signaled one after this list."""
        behind = next((i for i, one in enumerate(reversed(plan)) if one.signaled), None)
        return self.unsignaled + len(plan) if behind is None else behind

    def take(self, count: int, unsignaled: int) -> None:
        """Take places for a list at once, or refuse it; see `unsignaled_after`.

        Raises:
            RdmaOSError: There are not enough free places, or a task waits for them (EAGAIN).
            ValueError: Nothing would ever complete.
        """
        if unsignaled >= self.depth:
            msg = (
                f"all {self.depth} places of the send queue would be held by unsignaled requests, "
                "which could never complete: make the last of this list SIGNALED"
            )
            raise ValueError(msg)
        if not self.room.try_acquire(count):
            msg = f"the queue has {self.room.free} free places, {count} are needed"
            if waiting := self.room.waiting:
                msg += f", and {waiting} wait for places already"
            raise busy_error(msg, errno.EAGAIN)

    def enter(self, plan: Sequence[Planned], unsignaled: int) -> list[Posted]:
        """Note requests that are about to be posted; all or, with an exception, none.

        Their places were taken from `room` before, and are given back if none is entered.
        """
        entered: list[Posted] = []
        try:
            entered.extend(Posted(self, planned) for planned in plan)
        except BaseException:
            for posted in entered:
                posted.release()
            self.room.release(len(plan))
            raise
        self._order.extend(entered)
        self.unsignaled = unsignaled
        return entered

    def enter_again(self, entries: Sequence[Posted], unsignaled: int) -> None:
        """Note requests of a prepared post that are about to be posted once more."""
        self._order.extend(entries)
        self.unsignaled = unsignaled

    def end_with(self, posted: Posted) -> bool:
        """End a request that has completed, with the unsignaled requests ahead of it.

        Returns False if a signaled request is ahead of it: then `_complete` restores the order.
        """
        order, ended, found = self._order, 0, False
        while order and not found:
            found = order[0] is posted
            if order[0].signaled and not found:
                break
            order.popleft().retire()
            ended += 1
        if ended:
            self.room.release(ended)
        return found

    def regions(self) -> list[Resource]:
        """The memory of the requests that are under way."""
        return [region for posted in self._order for region in posted.regions]

    def release_regions(self) -> None:
        """Release the memory: the queue pair keeps it from now on."""
        for posted in self._order:
            posted.release_regions()

    # Completing

    def _end(self, posted: Posted) -> None:
        posted.retire()
        self.room.release()

    def _complete(self, posted: Posted, record: WCRecord) -> None:
        if posted.is_stale(record):
            return
        order = self._order
        if order and order[0] is posted and posted.is_next(record):
            order.popleft()
            self._end(posted)
        else:
            self._end_in_order(posted, record)
        if record[1]:
            self.qp._failed(posted.operation, record)
        future = posted.future
        number = posted.number(record)
        if number is not None:
            if not posted.muted and (record[1] or not posted.silent):
                self.cq._deliver(record, number)
        elif future is not None and not future.done():
            if record[1]:
                future.set_exception(self._explained(posted.operation, record, posted.index))
            elif posted.last:
                future.set_result(record)

    def _end_in_order(self, posted: Posted, record: WCRecord) -> None:
        """End a request that is not at the front, and the requests that end with it."""
        order = self._order
        overtaken: list[Posted] = []
        while order:
            one = order.popleft()
            found = one is posted and posted.is_next(record)
            if one.signaled and not found:
                overtaken.append(one)
            else:
                self._end(one)
            if found:
                break
        order.extendleft(reversed(overtaken))

    def _explained(self, operation: str, record: WCRecord, index: int | None) -> CompletionError:
        if index is not None:
            operation = f"{operation} (request {index} of its list)"
        error = record_error(operation, record)
        error.index = index
        if isinstance(error, FlushedError):
            error.__cause__ = self.qp._first_failure
        return error

    def _flushed(self, operation: str, index: int | None) -> CompletionError:
        """The exception of a request that the error state flushed."""
        return self._explained(operation, flush_record(self.qp.num), index)

    def _fail(self, posted: Posted) -> None:
        future = posted.future
        if future is not None and not future.done() and not future.get_loop().is_closed():
            future.set_exception(self._flushed(posted.operation, posted.index))

    def give_up(self) -> None:
        """End the requests that the adapter has not flushed; entries and memory stay.

        Raw unsignaled requests do not fail: as far as is known they have succeeded.
        """
        self.cq._take_all()  # a success that was not polled yet counts, however late it is
        seen: Counter[Posted] = Counter()
        for posted in self._order:
            number = posted.number_ahead(seen[posted])
            seen[posted] += 1
            if number is None:
                self._fail(posted)
            elif posted.signaled and not posted.muted:
                self.cq._deliver(flush_record(self.qp.num), number)
        for posted in seen:
            posted.muted = True
        self.fail_waiters()  # those places are not free before the queue pair is gone, or RESET

    def fail_waiters(self) -> None:
        """End the tasks that wait for places."""
        # Weakly: the room keeps the function, and this queue, which alone asks it, keeps the room.
        own = weakref.ref(self)

        def flushed() -> CompletionError:
            queue = own()
            assert queue is not None
            return queue._flushed("a request that waited for a place", None)

        self.room.fail(flushed)

    def abandon(self) -> None:
        """Fail requests never flushed, and release their memory: the queue pair is destroyed."""
        while self._order:
            posted = self._order.popleft()
            self._end(posted)
            self._fail(posted)
