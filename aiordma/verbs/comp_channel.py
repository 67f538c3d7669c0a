"""CompletionChannel: one descriptor that becomes readable when any of its CQs has completions.

Theory of operation
    The channel is drained by one C call per wake-up (`Drain`, where the order of arm, poll and
    acknowledge is explained).  Its completions come back as a list; ids that the channel's slot
    table made are dispatched to their waiters, all others belong to callers that post with ids of
    their own and go to the CQ's queue.

    Dispatch never runs user code and never raises: it completes futures and calls sinks of this
    library.  A sink that raises is reported to the loop and the drain goes on.

    A receive of a shared receive queue completes in the CQ of the queue pair that took it, so that
    its id names the shared queue, not an entry of a channel's table.

    A sink that has to run code of the program passes a function to `after_drain`.  It runs when all
    completions of the wake-up have been dispatched, within the same turn of the loop.

    Most completions of connections and streams never become objects: C takes them (`Drain`), and
    calls Python once a wake-up for the events of all connections.

    A CQ that no task awaits is only reported (`get_cq_event`): its owner polls it.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from aiordma._core import Drain, Poller, Readable, Spin
from aiordma._ffi import ffi, lib
from aiordma._ffi.check import check_errno, check_pointer
from aiordma.errors import ResourceBusyError, ResourceClosedError, os_error
from aiordma.logs import log_of
from aiordma.loop import registry
from aiordma.loop.pump import FdPump
from aiordma.loop.raised import ENDS_THE_LOOP, report
from aiordma.loop.running import resumes_tasks
from aiordma.loop.slots import TAG, TAG_SHIFT, SlotTable, sub_index
from aiordma.loop.wait_line import WaitLine
from aiordma.loop.weak_table import WeakTable
from aiordma.verbs import async_event
from aiordma.verbs.attention import ARMED_FOR_ALL
from aiordma.verbs.context import Context
from aiordma.verbs.resource import Resource, ResourceState
from aiordma.verbs.safety import Safety, address_of
from aiordma.verbs.wc import WCRecord

if TYPE_CHECKING:
    from aiordma.verbs.cq import CompletionQueue

__all__ = [
    "SHARED_TAG", "CompletionChannel", "SharedSink", "Sink", "refuse_unacknowledged", "route",
    "shared_completions", "shared_queues",
]  # fmt: skip


class Sink(Protocol):
    """The receiver of a request's completion."""

    def __call__(self, record: WCRecord, /) -> None:
        """Take the completion of the request."""

    def fail(self, cause: BaseException, /) -> None:
        """Fail the request: the device is gone, and no completion will arrive."""


class SharedSink(Protocol):
    """A shared receive queue."""

    def _complete(self, record: WCRecord, cq: CompletionQueue | None, /) -> None:
        """Take the completion of a receive, which has arrived in this CQ."""


# First byte of the ids of shared receives; their sub-index is the number of the shared queue.
SHARED_TAG = TAG + 1
shared_queues: weakref.WeakValueDictionary[int, SharedSink] = weakref.WeakValueDictionary()

#: The text of the refusal of `req_notify` and `get_cq_event` for a queue that the loop drains.
MANAGED = (
    "an operation of this completion queue was awaited, so that the event loop takes its events: "
    "take completions with `async for` or `poll`, or use another queue for `req_notify` and "
    "`get_cq_event`"
)

#: As `Drain.sweep` has it.
_Swept = tuple[int, int, list[Any], bool]

_log = log_of()
_BUDGET = 256  # completions a wake-up may take before other tasks have a turn


def refuse_unacknowledged(events: int) -> None:
    """Refuse to close an object that has returned events which are not acknowledged.

    Raises:
        ResourceBusyError: There are such events.
    """
    if events:
        msg = f"{events} completion events are not acknowledged"
        raise ResourceBusyError(errno.EBUSY, msg)


def route(record: WCRecord, table: SlotTable[Sink], cq: CompletionQueue | None) -> None:
    """Pass a completion to the sink of its request; a stale completion has no sink."""
    wr_id = record[0]
    tag = wr_id >> TAG_SHIFT
    if tag == TAG:
        if (sink := table.get(wr_id)) is not None:
            sink(record)
    elif tag == SHARED_TAG:
        if (shared := shared_queues.get(sub_index(wr_id))) is not None:
            shared._complete(record, cq)
    elif cq is not None:
        cq._deliver(record)


class CompletionChannel(Resource):
    """A completion channel (`ibv_create_comp_channel(3)`), drained by the running loop.

    Args:
        context: The device.

    Raises:
        OSError: The limit of open files is reached.
    """

    __slots__ = (
        "_cqs", "_deferred", "_failure", "_loop", "_notified", "_pump", "_safety", "_unacked",
        "_unwatch", "_waiters", "context", "drain", "lost_events", "table",
    )  # fmt: skip

    #: `lost_events` of all channels that this process has had.
    all_lost_events: ClassVar[int] = 0

    def __init__(self, context: Context) -> None:
        handle = check_pointer(
            lib.ibv_create_comp_channel(context._require()), "ibv_create_comp_channel"
        )
        self.context: Context = context
        # Waiters of every CQ of this channel, by wr_id.
        self.table: SlotTable[Sink] = SlotTable()
        #: Completions that raised no event, so that only the safety poll found them: the kernel
        #: drops events when it has no memory for them.
        self.lost_events: int = 0
        self._cqs: WeakTable[CompletionQueue] = WeakTable()
        #: Takes its events and completions; those of connections and streams never get to Python.
        self.drain: Drain = Drain(int(ffi.cast("uintptr_t", handle)), _BUDGET)
        self._deferred: deque[Callable[[], None]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None  # the pump forgets it when it is closed
        self._pump: FdPump | None = None
        self._unwatch: Callable[[], None] | None = None
        self._safety = Safety(self)
        self._notified: deque[CompletionQueue] = deque()
        self._waiters: WaitLine[None] = WaitLine()
        self._unacked = 0
        self._failure: Exception | None = None
        super().__init__(handle, (context,))

    def fileno(self) -> int:
        """The descriptor; owned by the channel."""
        return int(self._require().fd)

    def _attach(self) -> None:
        """Register with the running loop, once; the channel then belongs to that loop."""
        loop = asyncio.get_running_loop()
        if self._failure is not None:
            raise self._failure
        if self._pump is None:
            # The failure of a queue is reported on the device's descriptor, not on the channel's.
            self._unwatch = async_event.watch(self.context)
            self._loop = loop
            self._pump = FdPump(
                loop, self.fileno(), self._on_readable, self._on_failure,
                lambda slow: Readable(self.drain, slow).run,
            )  # fmt: skip
        elif self._pump.loop is not loop:
            msg = "the completion channel belongs to another event loop"
            raise RuntimeError(msg)
        self.drain.soon = resumes_tasks(loop)

    # Completions

    def _on_readable(self) -> bool:
        # Mostly by way of `Readable`, which has drained already, and leaves the rest to this.
        self.drain.draining = True
        try:
            done = self.drain.drain()
        except ENDS_THE_LOOP as exc:
            # The other events of this drain are for the next turn of the loop.
            self._report(exc)
            self._tell_later()
            self._run_deferred()
            return True
        except BaseException as exc:
            self._report(exc)
            done = True
        if not done:
            return self._dispatch_all()
        self._tell_later()
        self._run_deferred()
        return bool(self.drain.n_pending)

    def _dispatch_all(self) -> bool:
        """Dispatch the completions of a drain; return whether there is more."""
        # Polled completions are gone from the adapter: copy them before a dispatch drains again.
        segments, more, error, call = self.drain.result()
        for token, records in segments:
            cq = self._cqs.get(token)
            if records is not None:
                self._dispatch(records, cq)
            elif cq is not None:
                self._notify(cq)
        if self.drain.undelivered:
            self.after_drain(self._tell)
        self._run_deferred()
        if error:
            raise os_error(error, call)
        return more

    def _tell(self) -> None:
        """Call the owners of states that have events."""
        try:
            self.drain.deliver()
        finally:
            self._tell_later()

    def _tell_later(self) -> None:
        """Call the other owners in the next turn of the loop."""
        if self.drain.undelivered and (loop := self._home) is not None:
            loop.call_soon(self._tell)

    def after_drain(self, function: Callable[[], None]) -> None:
        """For sinks: run `function` once the drain is over; from elsewhere, in the next turn.

        It may run the program's code: its exception is reported.  SystemExit and KeyboardInterrupt
        end the loop instead, and the remaining functions are left to the next turn.
        """
        if self.drain.draining:
            self._deferred.append(function)
            self.drain.deferred = True
        else:
            # Also of a channel that has failed and has no pump: its connections get the reason.
            assert self._loop is not None
            self._loop.call_soon(function)

    def _run_deferred(self) -> None:
        try:
            while self._deferred:
                try:
                    self._deferred.popleft()()
                except BaseException as exc:
                    self._report(exc)
                    if isinstance(exc, ENDS_THE_LOOP):
                        break
        finally:
            self.drain.draining = self.drain.deferred = False
            while self._deferred:
                self.after_drain(self._deferred.popleft())

    def _count_lost(self, missed: int) -> None:
        self.lost_events += missed
        CompletionChannel.all_lost_events += missed

    def _kick(self) -> None:
        """Take the events that the descriptor still has."""
        if self._pump is not None:
            self.drain.spare = 0
            self._pump.kick()

    def _dispatch(self, records: list[Any], cq: CompletionQueue | None) -> None:
        for record in records:
            try:
                route(record, self.table, cq)
            except BaseException as exc:
                self._report(exc)

    def _report(self, exc: BaseException) -> None:
        loop = self._loop
        if loop is None or loop.is_closed():
            _log.error("completion sink failed", exc_info=exc)
            return
        report(loop, exc, "aiordma: dispatching a completion failed")

    def _on_failure(self, exc: Exception) -> None:
        """The descriptor cannot be read any more, mostly because the device is gone."""
        self._report(exc)
        self._failure = exc
        if self._loop is not None:
            registry.retire(self, self._loop)  # new connections need one that works
        self._end_spins()
        self.drain.forget(0)
        for sink in self.table.entries():
            try:
                sink.fail(exc)
            except BaseException as failed:
                self._report(failed)
        for cq in self._cqs.values():
            cq._fail(lambda: exc)
        self._waiters.fail(lambda: exc)

    def _sweep(self, cq: CompletionQueue, found: _Swept | None = None) -> tuple[int, int, int]:
        """Poll one managed CQ without an event; how many it found, lack one, and were Python's.

        `found` is the result of a first poll by C.

        At most as many as the queue has room for, which is all that was there when it began: a
        peer that sends faster than they are dispatched must not keep the loop here.
        """
        polled = missed = dispatched = 0
        for _ in range(0 if cq.closed else cq._room.size // _BUDGET + 1):
            swept, found = found or self.drain.sweep(address_of(cq)), None
            if swept is None:
                break
            count, arrived, records, more = swept
            polled += count
            # Own sends may lie there without an event; messages of the peer may not.
            missed += count if cq._aio.armed == ARMED_FOR_ALL else arrived
            dispatched += len(records)
            self._dispatch(records, cq)
            if cq.closed or not more:
                break
        if self.drain.undelivered:
            self.after_drain(self._tell)
        return polled, missed, dispatched

    def _spin(self, cq: CompletionQueue, bound_s: float, *, adaptive: bool, yields: bool) -> Spin:
        """Return how waits for completions of a queue begin with polling (poller.c).

        Args:
            cq: The queue, of this channel.
            bound_s: Seconds of polling, at most.
            adaptive: Whether it is polled only while recent waits were shorter.
            yields: Whether other processes get the processor between two polls.
        """
        self._attach()
        poller = self.drain.poller
        if poller is None:
            assert self._pump is not None
            assert self._loop is not None
            turn = Readable(self.drain, self._pump.kick).spin
            ask = functools.partial(self._loop.call_soon, turn)
            poller = self.drain.poller = Poller(ask, yields)
        poller.yields = yields
        handle = int(ffi.cast("uintptr_t", cq._require()))
        return Spin(poller, cq._aio, handle, max(1, round(bound_s * 1e9)), adaptive)

    def _end_spins(self) -> None:
        if self.drain.poller is not None:
            self.drain.poller.ask = None

    # jVerbs-style notification

    def _notify(self, cq: CompletionQueue) -> None:
        self._notified.append(cq)
        self._waiters.grant(None)

    def _check_by_hand(self) -> None:
        """Refuse a wait that could not end; a channel without queues may still get some."""
        served = [cq.managed for cq in self._cqs.values() if not cq.closed]
        if served and all(served):
            raise RuntimeError(MANAGED)

    async def get_cq_event(self, timeout: float | None = None) -> CompletionQueue | None:
        """Wait until one of the channel's CQs is notified; the CQ, or None after `timeout`.

        Args:
            timeout: Seconds; None or a negative number waits without limit.

        The event has to be acknowledged with `CompletionQueue.ack_events`, and the next event asked
        for with `req_notify`.  Only for CQs that are polled by hand: the loop serves awaited CQs.
        `ibv_get_cq_event(3)`.

        Raises:
            RuntimeError: The loop serves every queue of the channel, so that no event can come;
                also of a wait during which the last of them is awaited.

        Cancellation: safe; no event is lost.
        """
        self._require()
        self._attach()
        deadline = None if timeout is None or timeout < 0 else timeout
        try:
            async with asyncio.timeout(deadline):
                while not self._notified:
                    self._check_by_hand()
                    await self._waiters.wait()
                    self._require()
        except TimeoutError:
            if not self._notified:
                return None
        cq = self._notified.popleft()
        cq._unacked += 1
        self._unacked += 1
        return cq

    # Life

    def poison_after_fork(self) -> None:
        """In a forked child: nothing is drained any more."""
        if self._state is not ResourceState.FORKED:
            self.drain.stopped = True  # the loop may run on there; `super()` hides it
        super().poison_after_fork()

    @property
    def _home(self) -> asyncio.AbstractEventLoop | None:
        return None if self._pump is None else self._pump.loop

    def _before_close(self) -> None:
        refuse_unacknowledged(self._unacked)

    def _on_close(self) -> None:
        self._end_spins()
        self._safety.stop()
        self._stop_unused()
        self._waiters.fail(lambda: ResourceClosedError("the completion channel was closed"))

    def _forget(self, cq: CompletionQueue) -> None:
        """A CQ was closed: give back the event that an unfinished drain may hold of it."""
        self.drain.forget(address_of(cq))
        self._safety.forget(cq)
        while cq in self._notified:
            self._notified.remove(cq)
        self._stop_unused()

    def _stop_unused(self) -> None:
        """Take the reader off the loop once the channel and its last CQ are closed.

        Not with the channel alone: where it is closed before its CQ, flushes still come in
        through it.  Not at the destruction: that is done by another thread, and the descriptor
        has to leave the loop before it is closed.
        """
        if self.closed and self._pump is not None and all(cq.closed for cq in self._cqs.values()):
            self.drain.stopped = True
            self._pump.close()
            self._safety.stop()
            self._loop = None  # the thread that destroys the channel must not keep it alive
            self.drain.forget(0)
            if self._unwatch is not None:
                self._unwatch()

    def _destroy(self, handle: Any) -> None:
        check_errno(lib.ibv_destroy_comp_channel(handle), "ibv_destroy_comp_channel")


def shared_completions(context: Context) -> tuple[CompletionChannel, Callable[[], None]]:
    """The channel that all connections of the running loop on a device share, and its release."""
    return registry.acquire(
        ("completions", id(context)), functools.partial(CompletionChannel, context)
    )
