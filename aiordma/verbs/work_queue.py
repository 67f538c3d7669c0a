"""WorkQueue: what was posted to one queue of a queue pair and has not completed.

Theory of operation
    Room is counted, never probed: a request takes a place when it is posted and gives it back when
    it completes, so that posting cannot fail for lack of room.  A completion also ends the
    unsignaled requests before it, but no signaled one: iWARP lets a message overtake a read, whose
    bytes are still to come when the message has completed.  Reads are always signaled there, and
    the completions that nobody asked for are swallowed (`silent`).

    A queue of which every place is held by unsignaled requests would never complete anything, and
    never have room for the signaled request that would free it.  So the unsignaled requests at the
    tail are counted, and the one that would take the last place is refused.

    Each request is an entry of the slot table and keeps its memory regions from being destroyed.
    Cancelling a task takes the future out of the entry and leaves the entry: the adapter knows
    nothing of tasks, and the memory is its own until the completion.

    Requests of a list that is awaited share one future: the success of the last one completes it,
    or the first failure of any.
"""

from __future__ import annotations

import asyncio
import errno
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from aiordma.errors import CompletionError, FlushedError, ResourceBusyError, completion_error
from aiordma.loop.credits import Credits
from aiordma.loop.empty import EMPTY, nobody
from aiordma.verbs.counting import Countable
from aiordma.verbs.cq import CompletionQueue
from aiordma.verbs.resource import Resource
from aiordma.verbs.wc import WCRecord, flush_record

__all__ = ["Planned", "Posted", "WorkQueue"]


class Posted(Countable):
    """One request under way; called with its completion.

    Attributes:
        signaled: Whether its success makes a completion.
        silent: Whether that completion is of no interest to the caller.
        caller_id: The number of a caller who polls for it himself, else None.
        future: Whoever awaits it, or the list that it belongs to.
        index: Its place in such a list, or None.
        last: Whether its success is the success of the whole list.
        muted: Whether the caller was told of its end before the adapter told of it.
    """

    __slots__ = (
        "caller_id", "future", "index", "last", "muted", "operation", "queue", "regions",
        "signaled", "silent", "wr_id",
    )  # fmt: skip

    def __init__(self, queue: WorkQueue, plan: Planned) -> None:
        self.queue = queue
        self.operation, self.regions, self.signaled, self.silent = plan
        self.caller_id: int | None = None
        self.future: asyncio.Future[WCRecord] | None = None
        self.index: int | None = None
        self.last = True
        self.muted = False
        self.wr_id = 0
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
        """Its completion has arrived."""
        self.queue._complete(self, record)

    def fail(self, cause: BaseException) -> None:
        """Its completion will not arrive; the memory stays until the queue pair is gone."""
        if self.future is not None and not self.future.done():
            self.future.set_exception(cause)

    # Entries that are posted more than once (see prepared.py) do these in their own way.

    def retire(self) -> None:
        """It has left the queue."""
        self.release()

    def is_stale(self, record: WCRecord) -> bool:
        """Whether that completion has come before; software iWARP flushes some requests twice."""
        return False  # an ordinary entry leaves the table with its completion

    def is_next(self, record: WCRecord) -> bool:
        """Whether the occurrence of it that leaves the queue next is the one that completed."""
        return True

    def number(self, record: WCRecord) -> int | None:
        """The caller's number for its completion; None if nobody polls for it."""
        return self.caller_id

    def number_ahead(self, occurrence: int) -> int | None:
        """The same for one of its occurrences in the queue, counted from the front."""
        return self.caller_id

    def release(self) -> None:
        """Give back its id and let the memory go."""
        self.queue.cq.table.remove(self.wr_id)
        self.release_regions()

    def release_regions(self) -> None:
        """Let the memory go."""
        regions, self.regions = self.regions, ()
        for region in regions:
            region._let_go()


class Planned(NamedTuple):
    """A request that is about to be posted; see `Posted`."""

    operation: str
    regions: tuple[Resource, ...]
    signaled: bool = True
    silent: bool = False


class WorkQueue:
    """The send or the receive side of a queue pair.

    Args:
        cq: Where its completions arrive.
        depth: Places.
        failed: Called with each completion that is not a success.
        cause: The exception that explains a flush, or None.
    """

    __slots__ = (
        "_cause", "_failed", "_order", "cq", "depth", "room", "unsignaled",
    )  # fmt: skip

    def __init__(
        self,
        cq: CompletionQueue,
        depth: int,
        failed: Callable[[Posted, WCRecord], None],
        cause: Callable[[], BaseException | None],
    ) -> None:
        self.cq = cq
        self.depth = depth
        self.room = Credits(depth)
        #: Requests behind the last signaled one.
        self.unsignaled = 0
        self._order: deque[Posted] = EMPTY
        self._failed = failed
        self._cause = cause

    def __len__(self) -> int:
        """Requests under way."""
        return len(self._order)

    # Entering

    def unsignaled_after(self, plan: Sequence[Planned]) -> int:
        """How many requests would stand behind the last signaled one after this list."""
        behind = next((i for i, one in enumerate(reversed(plan)) if one.signaled), None)
        return self.unsignaled + len(plan) if behind is None else behind

    def take(self, count: int, unsignaled: int) -> None:
        """Take places for a list at once, or refuse it; see `unsignaled_after`.

        Raises:
            ResourceBusyError: There are not enough free places, or somebody waits for them.
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
            raise ResourceBusyError(errno.EAGAIN, msg)

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
        if self._order is EMPTY:
            self._order = deque()
        self._order.extend(entered)
        self.unsignaled = unsignaled
        return entered

    def enter_again(self, entries: Sequence[Posted], unsignaled: int) -> None:
        """Note requests of a prepared post that are about to be posted once more."""
        if self._order is EMPTY:
            self._order = deque()
        self._order.extend(entries)
        self.unsignaled = unsignaled

    def end_before(self, posted: Posted) -> bool:
        """End the unsignaled requests ahead of one that has completed.

        False if another signaled one is ahead of it, too: then order is `_complete`'s business.
        """
        order, ended = self._order, 0
        while order and order[0] is not posted:
            if order[0].signaled:
                break
            order.popleft().retire()
            ended += 1
        if ended:
            self.room.release(ended)
        return bool(order) and order[0] is posted

    def end_first(self) -> None:
        """End the request at the front."""
        self._order.popleft().retire()
        self.room.release()

    def regions(self) -> list[Resource]:
        """The memory of what is under way."""
        return [region for posted in self._order for region in posted.regions]

    def release_regions(self) -> None:
        """Somebody else keeps the memory from now on."""
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
            self._failed(posted, record)
        future = posted.future
        number = posted.number(record)
        if number is not None:
            if not posted.muted and (record[1] or not posted.silent):
                self.cq._deliver(record, number)
        elif future is not None and not future.done():
            if record[1]:
                future.set_exception(self._error(posted, record))
            elif posted.last:
                future.set_result(record)

    def _end_in_order(self, posted: Posted, record: WCRecord) -> None:
        """End a request that is not at the front, and what its completion ends with it."""
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

    def _error(self, posted: Posted, record: WCRecord) -> CompletionError:
        return self._explained(posted.operation, record, posted.index)

    def _explained(
        self, operation: str, record: WCRecord, index: int | None = None
    ) -> CompletionError:
        if index is not None:
            operation = f"{operation} (request {index} of its list)"
        error = completion_error(
            record[1], operation=operation, vendor_err=record[3], qp_num=record[6]
        )
        error.index = index
        if isinstance(error, FlushedError):
            error.__cause__ = self._cause()
        return error

    def flushed(self, operation: str, qp_num: int, index: int | None = None) -> CompletionError:
        """The exception of a request that the error state ended."""
        return self._explained(operation, flush_record(qp_num), index)

    def _fail(self, posted: Posted, qp_num: int) -> None:
        future = posted.future
        if future is not None and not future.done() and not future.get_loop().is_closed():
            future.set_exception(self.flushed(posted.operation, qp_num, posted.index))

    def give_up(self, qp_num: int) -> None:
        """End what the adapter has not flushed; the entries stay, and with them the memory.

        Not the raw requests that are unsignaled: as far as anybody knows they have succeeded.
        """
        self.cq._take_all()  # a success that was not polled yet is one, however late
        seen: Counter[Posted] = Counter()
        for posted in self._order:
            number = posted.number_ahead(seen[posted])
            seen[posted] += 1
            if number is None:
                self._fail(posted, qp_num)
            elif posted.signaled and not posted.muted:
                self.cq._deliver(flush_record(qp_num), number)
        for posted in seen:
            posted.muted = True

    def abandon(self, qp_num: int) -> None:
        """The queue pair is destroyed: fail what the adapter never flushed, let the memory go."""
        while self._order:
            posted = self._order.popleft()
            self._end(posted)
            self._fail(posted, qp_num)
        self._failed = self._cause = nobody
