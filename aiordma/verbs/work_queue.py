"""WorkQueue: what was posted to one queue of a queue pair and has not completed.

Theory of operation
    Room is counted, never probed: a request takes a place when it is posted and gives it back when
    it completes, so that posting cannot fail for lack of room.  A queue completes in order, so a
    completion also ends every unsignaled request before it.

    Each request is an entry of the slot table and keeps its memory regions from being destroyed.
    Cancelling a task takes the future out of the entry and leaves the entry: the adapter knows
    nothing of tasks, and the memory is its own until the completion.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

from aiordma.errors import FlushedError, completion_error
from aiordma.loop.credits import Credits
from aiordma.verbs.cq import CompletionQueue
from aiordma.verbs.mr import MemoryRegion
from aiordma.verbs.wc import WCRecord, WorkCompletion, flush_record

__all__ = ["Posted", "WorkQueue"]


class Posted:
    """One request under way; called with its completion."""

    __slots__ = ("caller_id", "future", "operation", "queue", "regions", "wr_id")

    def __init__(self, queue: WorkQueue, operation: str, regions: tuple[MemoryRegion, ...]) -> None:
        self.queue = queue
        self.operation = operation
        self.regions = regions
        self.caller_id: int | None = None
        self.future: asyncio.Future[WorkCompletion] | None = None
        self.wr_id = 0

    def __call__(self, record: WCRecord) -> None:
        """Its completion has arrived."""
        self.queue._complete(self, record)

    def fail(self, cause: BaseException) -> None:
        """Its completion will not arrive; the memory stays until the queue pair is gone."""
        if self.future is not None and not self.future.done():
            self.future.set_exception(cause)


class WorkQueue:
    """The send or the receive side of a queue pair.

    Args:
        cq: Where its completions arrive.
        depth: Places.
        failed: Called with each completion that is not a success.
        cause: The exception that explains a flush, or None.
    """

    __slots__ = ("_cause", "_failed", "_order", "cq", "room")

    def __init__(
        self,
        cq: CompletionQueue,
        depth: int,
        failed: Callable[[Posted, WCRecord], None],
        cause: Callable[[], BaseException | None],
    ) -> None:
        self.cq = cq
        self.room = Credits(depth)
        self._order: deque[Posted] = deque()
        self._failed = failed
        self._cause = cause

    def __len__(self) -> int:
        """Requests under way."""
        return len(self._order)

    def enter(self, operation: str, regions: Iterable[MemoryRegion]) -> Posted:
        """Note a request that is about to be posted; its place was taken from `room` before."""
        posted = Posted(self, operation, tuple(regions))
        retained: list[MemoryRegion] = []
        try:
            for region in posted.regions:
                region._retain()
                retained.append(region)
            posted.wr_id = self.cq.table.add(posted)
        except BaseException:
            for region in retained:
                region._let_go()
            raise
        self._order.append(posted)
        return posted

    def withdraw(self, posted: Posted) -> None:
        """Take back the request that was entered last and never reached the adapter."""
        assert self._order[-1] is posted
        self._order.pop()
        self._release(posted)

    def _release(self, posted: Posted) -> None:
        self.cq.table.remove(posted.wr_id)
        for region in posted.regions:
            region._let_go()
        self.room.release()

    def _complete(self, posted: Posted, record: WCRecord) -> None:
        while self._order:
            done = self._order.popleft()
            self._release(done)
            if done is posted:
                break
            if done.future is not None and not done.future.done():
                # An unsignaled request in front of a completion has succeeded.
                done.future.set_result(WorkCompletion.from_record(record, done.wr_id))
        if record[1]:
            self._failed(posted, record)
        future = posted.future
        if posted.caller_id is not None:
            self.cq._deliver(record, posted.caller_id)
        elif future is not None and not future.done():
            if record[1] == 0:
                future.set_result(WorkCompletion.from_record(record))
            else:
                future.set_exception(self._error(posted.operation, record))

    def _error(self, operation: str, record: WCRecord) -> OSError:
        error = completion_error(
            record[1], operation=operation, vendor_err=record[3], qp_num=record[6]
        )
        if isinstance(error, FlushedError):
            error.__cause__ = self._cause()
        return error

    def flushed(self, operation: str, qp_num: int) -> OSError:
        """The exception of a request that the error state ended."""
        return self._error(operation, flush_record(qp_num))

    def fail_waiters(self, qp_num: int) -> None:
        """Fail what is still awaited; the entries stay, and with them the memory."""
        for posted in self._order:
            future = posted.future
            if future is not None and not future.done():
                future.set_exception(self.flushed(posted.operation, qp_num))

    def abandon(self, qp_num: int) -> None:
        """The queue pair is destroyed: fail what the adapter never flushed, let the memory go."""
        while self._order:
            posted = self._order.popleft()
            self._release(posted)
            future = posted.future
            if future is not None and not future.done() and not future.get_loop().is_closed():
                future.set_exception(self.flushed(posted.operation, qp_num))
