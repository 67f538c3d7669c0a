"""CompletionChannel: one descriptor that becomes readable when any of its CQs has completions.

Theory of operation
    When the descriptor is readable, one C call drains the channel (`Drain`, which explains the
    order of arming, polling and acknowledging).  C handles most completions of connections and
    streams itself, and they never become Python objects.  The others are returned as a list.  If
    a wr_id was made by the slot table of the channel, its completion is dispatched to the sink in
    the table.  All other ids belong to callers that post with ids of their own, and their
    completions are added to the queue of the CQ.

    Dispatching never runs code of the program and never raises.  It completes futures and calls
    sinks of this library; if a sink raises, this is reported to the loop, and dispatching goes on.
    A sink that has to run code of the program passes a function to `after_drain`, which is called
    when all completions have been dispatched, in the same iteration of the loop.

    A receive of a shared receive queue completes in the CQ of the queue pair that has used it.  So
    its id names the shared queue, and not an entry of a channel's table.

    The loop does not poll a CQ that no task awaits.  It only reports the event (`get_cq_event`),
    and the program polls.
"""

from __future__ import annotations

import asyncio
import functools
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from aiordma._core import Drain, Poller, Readable, Spin
from aiordma._ffi import ffi, lib
from aiordma._ffi.check import check_errno, check_pointer
from aiordma.errors import ResourceClosedError, busy_error, os_error
from aiordma.logs import log_of
from aiordma.loop import registry
from aiordma.loop.pump import FdPump
from aiordma.loop.raised import ENDS_THE_LOOP, report
from aiordma.loop.running import resumes_tasks
from aiordma.loop.slots import TAG, TAG_SHIFT, SlotTable, sub_index
from aiordma.loop.wait_line import WaitLine
from aiordma.loop.weak import living
from aiordma.verbs import async_event
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
Swept = tuple[int, int, list[Any], bool]

_log = log_of()
_BUDGET = 256  # completions a wake-up may take before other tasks have a turn


def refuse_unacknowledged(events: int) -> None:
    """Refuse to close an object if events that it has returned were not acknowledged.

    Raises:
        RdmaOSError: EBUSY, there are such events.
    """
    if events:
        msg = f"{events} completion events are not acknowledged"
        raise busy_error(msg)


def route(record: WCRecord, table: SlotTable[Sink], cq: CompletionQueue | None) -> None:
    """Pass a completion to the sink of its request; a stale completion has none, and is dropped."""
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
        #: How many completions were only found by the safety poll, because the kernel drops events
        #: when it has no memory for them.
        self.lost_events: int = 0
        self._cqs: weakref.WeakValueDictionary[int, CompletionQueue] = weakref.WeakValueDictionary()
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
        """The descriptor, which belongs to the channel."""
        return int(self._require().fd)

    def _attach(self) -> None:
        """Register the descriptor with the running loop, to which the channel then belongs."""
        loop = asyncio.get_running_loop()
        if self._failure is not None:
            raise self._failure
        if self._pump is None:
            # The failure of a queue is reported on the descriptor of the device, not on this one.
            self._unwatch = async_event.watch(self.context)
            self._loop = loop
            self._pump = FdPump(
                loop, self.fileno(), self._on_readable, self._on_failure,
                lambda slow: Readable(self.drain, slow).run,
            )  # fmt: skip
        elif self._pump.loop is not loop:
            msg = "the completion channel belongs to another event loop"
            raise RuntimeError(msg)
        self.drain.resume_by_loop(resumes_tasks(loop))

    # Completions

    def _on_readable(self) -> bool:
        # Usually called by `Readable`, which has drained already, and leaves the rest to this.
        try:
            done = self.drain.drain()
        except ENDS_THE_LOOP as exc:
            # The loop is going to end.  Deliver the other events when it runs again.
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
        # Fetch all results first, because dispatching may drain again, which overwrites them.
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
        """Deliver the events of connections and streams to their owners."""
        try:
            self.drain.deliver()
        finally:
            self._tell_later()

    def _tell_later(self) -> None:
        """Deliver the remaining events in the next iteration of the loop."""
        if self.drain.undelivered and (loop := self._home) is not None:
            loop.call_soon(self._tell)

    def after_drain(self, function: Callable[[], None]) -> None:
        """Call `function` when the present drain is over, or in the next iteration of the loop.

        The function may run code of the program.  If it raises, this is reported to the loop; only
        SystemExit and KeyboardInterrupt end the loop, and the remaining functions are called when
        it runs again.
        """
        if self.drain.defer():
            self._deferred.append(function)
        else:
            # This may be a channel that has failed: its connections still have to be told why.
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
            self.drain.finish()
            while self._deferred:
                self.after_drain(self._deferred.popleft())

    def _count_lost(self, missed: int) -> None:
        self.lost_events += missed
        CompletionChannel.all_lost_events += missed

    def _kick(self) -> None:
        """Process the events that are waiting in the descriptor."""
        if self._pump is not None:
            self.drain.take_all()
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
        """Fail everything, because the descriptor cannot be read; usually the device is gone."""
        self._report(exc)
        self._failure = exc
        if self._loop is not None:
            registry.retire(self, self._loop)  # new connections are to make another channel
        self._end_spins()
        self.drain.forget(0)
        for sink in self.table.entries():
            try:
                sink.fail(exc)
            except BaseException as failed:
                self._report(failed)
        for cq in living(self._cqs.valuerefs()):
            cq._fail(lambda: exc)
            if cq.managed and not cq.closed:  # a queue that the program polls still works
                cq._break_users(lambda: exc)
        self._waiters.fail(lambda: exc)

    def _sweep(self, cq: CompletionQueue, found: Swept | None = None) -> tuple[int, int, int]:
        """Poll one managed CQ without an event, and dispatch its completions.

        It takes at most as many completions as the queue has room for, which includes all that were
        there at the beginning.  So a peer that sends fast cannot keep the loop here.

        Args:
            cq: The queue.
            found: The result of a first poll, if C has polled it already.

        Returns:
            How many completions there were; how many of them should have raised an event; and how
            many were dispatched in Python.
        """
        polled = missed = dispatched = 0
        for _ in range(0 if cq.closed else cq._room.size // _BUDGET + 1):
            swept, found = found or self.drain.sweep(address_of(cq)), None
            if swept is None:
                break
            count, arrived, records, more = swept
            polled += count
            # If the queue is armed for solicited completions, only messages of the peer should
            # have raised an event, and not completions of this side's sends.
            missed += count if cq._aio.armed_for_all else arrived
            dispatched += len(records)
            self._dispatch(records, cq)
            if cq.closed or not more:
                break
        if self.drain.undelivered:
            self.after_drain(self._tell)
        return polled, missed, dispatched

    def _spin(self, cq: CompletionQueue, bound_s: float, *, adaptive: bool, yields: bool) -> Spin:
        """Return a Spin, with which waits for completions of a queue begin by polling (poller.c).

        Args:
            cq: A queue of this channel.
            bound_s: How long to poll at most, in seconds.
            adaptive: Whether to poll only while recent waits were shorter than that.
            yields: Whether to yield the processor to other processes between two polls.
        """
        self._attach()
        poller = self.drain.poller
        if poller is None:
            assert self._pump is not None
            assert self._loop is not None
            turn = Readable(self.drain, self._pump.kick).spin
            ask = functools.partial(self._loop.call_soon, turn)
            poller = Poller(ask)
            self.drain.poll_with(poller)
        handle = int(ffi.cast("uintptr_t", cq._require()))
        bound_ns = max(1, round(bound_s * 1e9))
        return Spin(poller, cq._aio, handle, bound_ns, adaptive, yields)

    def _end_spins(self) -> None:
        if self.drain.poller is not None:
            self.drain.poller.stop()

    # jVerbs-style notification

    def _notify(self, cq: CompletionQueue) -> None:
        self._notified.append(cq)
        self._waiters.grant(None)

    def _check_by_hand(self) -> None:
        """Refuse a wait that could never end.  A channel without queues may still get some."""
        served = [cq.managed for cq in living(self._cqs.valuerefs()) if not cq.closed]
        if served and all(served):
            raise RuntimeError(MANAGED)

    async def get_cq_event(self, timeout: float | None = None) -> CompletionQueue | None:
        """Wait for the event of a CQ, and return the CQ (`ibv_get_cq_event(3)`).

        Args:
            timeout: Seconds, after which None is returned; None or a negative number: no limit.

        The event has to be acknowledged with `CompletionQueue.ack_events`, and the next one
        requested with `req_notify`.  This is only for CQs that the program polls; the event loop
        takes the events of the others.

        Raises:
            RuntimeError: The loop takes the events of all queues of the channel, so none can
                arrive here.  The wait ends like this, too, when a task awaits the last.

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
        """Drain nothing any more in a forked child."""
        if self._state is not ResourceState.FORKED:
            # The loop may still run in the child.  Before `super()`, after which nothing works.
            self.drain.stop()
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
        """Forget a CQ that was closed, and acknowledge the event of an unfinished drain."""
        self.drain.forget(address_of(cq))
        self._safety.forget(cq)
        while cq in self._notified:
            self._notified.remove(cq)
        self._stop_unused()

    def _stop_unused(self) -> None:
        """Remove the reader from the loop once the channel and its last CQ are closed.

        Not when the channel alone is closed, because flushed requests of its CQs still arrive
        through it.  And not when it is destroyed, because another thread does that, and the
        descriptor has to be removed from the loop before it is closed.
        """
        if (
            self.closed
            and self._pump is not None
            and all(cq.closed for cq in living(self._cqs.valuerefs()))
        ):
            self.drain.stop()
            self._pump.close()
            self._safety.stop()
            self._loop = None  # the thread that destroys the channel must not keep it alive
            self.drain.forget(0)
            if self._unwatch is not None:
                self._unwatch()

    def _destroy(self, handle: Any) -> None:
        check_errno(lib.ibv_destroy_comp_channel(handle), "ibv_destroy_comp_channel")


def shared_completions(context: Context) -> tuple[CompletionChannel, Callable[[], None]]:
    """The channel that connections of the running loop and a device share, and its release."""
    return registry.acquire(
        ("completions", id(context)), functools.partial(CompletionChannel, context)
    )
