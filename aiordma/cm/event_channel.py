"""EventChannel: the descriptor on which connection events arrive.

Theory of operation
    `CMEvents.next` takes an event from the kernel, copies and acknowledges it.  If the event has
    found the address for an id that is to go on by itself, `next` starts to resolve the route.
    Every other event is routed by the integer token in the id's context, never by pointer, and
    dispatched before the next is taken: a handler may close the id that the next event names.

    An event that answers a pending awaitable of its id completes it.  All other events are kept in
    one line for `get_event` and iterators, which take turns: each event is read once.  While an
    iterator is open or a `get_event` waits, answers are in the line as well.  A program may leave
    an iterator and read on with the next: unread events stay.

    The channel never stops taking events from the kernel, or steps would wait for ever in a
    program that awaits steps and reads nothing.  So the line is bounded: the events of an id that
    is closed are dropped, and above `max_unread` the oldest event.

    As C events are acknowledged at once, no C call can block on them.  The events that `get_event`
    has returned are counted until they are acknowledged; closing before that raises.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import weakref
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from aiordma._core import CMEvents
from aiordma._ffi import ffi, lib
from aiordma._ffi.check import check_minus_one, check_pointer
from aiordma.cm.connection_event import ConnectionEvent
from aiordma.cm.enums import EventType
from aiordma.errors import ResourceClosedError, busy_error, os_error
from aiordma.logs import log_of
from aiordma.loop import fork, registry
from aiordma.loop.pump import FdPump
from aiordma.loop.raised import report
from aiordma.loop.steps import Steps
from aiordma.loop.wait_line import WaitLine
from aiordma.loop.weak import living
from aiordma.loop.workers import reaper
from aiordma.verbs.ah import AHAttributes
from aiordma.verbs.resource import Resource, ResourceState

if TYPE_CHECKING:
    from aiordma.cm.connection_id import ConnectionId

__all__ = ["EventChannel"]

_log = log_of()
# Events that a wake-up may take before other tasks have a turn.  A channel with a listener takes
# many: where its requests are read more slowly than they come, the kernel refuses some
# (interop/test_cmtime.py and test_ucmatose.py).  A channel without a listener takes few, because
# each event starts the next step of a connect: many of them would hold the loop.
_BUDGET = 8
_BUDGET_OF_A_LISTENER = 64
_MOST_TO_CATCH_UP = 1024
# A process recovers from these; the kernel keeps an event for which there is no memory here.
_SHORTAGES = frozenset({errno.ENOMEM, errno.ENOBUFS, errno.EMFILE, errno.ENFILE})
_SHORT_PAUSE_S = 0.5
_KINDS = {int(kind): kind for kind in EventType}
#: Of the ids of all channels: an id has another number than every id before it in the process.
_numbers = itertools.count(1)
# Looked up once: up to Python 3.11 a look at a member takes as long as a call.
_OPEN, _CONNECT_REQUEST = ResourceState.OPEN, EventType.CONNECT_REQUEST
_WITH_WAY = frozenset({EventType.ESTABLISHED, EventType.MULTICAST_JOIN})


def _nobody() -> None:
    """Stand in for the reference to an id that is not known."""


class EventChannel(Resource):
    """A channel for the events of any number of connection ids (`rdma_create_event_channel(3)`).

    It belongs to the event loop on which it is first used.

    Args:
        max_unread: Events that may wait to be read.  Above it the oldest is dropped; if only
            connection requests wait, the newest is refused.  Both are counted in `dropped_events`,
            and logged.

    Attributes:
        dropped_events: Events that were dropped unread because too many waited.

    Raises:
        ValueError: `max_unread` is less than 1.
        ForkedError: This process was forked from one that had made a channel.
        DeviceNotFoundError: The machine has no RDMA device.
        OSError: The kernel module rdma_ucm is not loaded, or its node may not be opened.
    """

    __slots__ = (
        "_budget", "_events", "_ids", "_iterators", "_kept", "_kicking", "_loop", "_max_unread",
        "_over", "_pump", "_requests_go_to", "_short", "_unacked", "_waiters", "dropped_events",
    )  # fmt: skip

    def __init__(self, *, max_unread: int = 4096) -> None:
        if max_unread < 1:
            msg = f"max_unread is {max_unread}, less than one event"
            raise ValueError(msg)
        fork.use_library()
        handle = check_pointer(lib.rdma_create_event_channel(), "rdma_create_event_channel")
        self._events = CMEvents(int(ffi.cast("uintptr_t", handle)))
        # By number.  Not a WeakValueDictionary, which makes a reference of its own for each id:
        # this is that of its parents.  The end of an id takes it out.
        self._ids: dict[int, weakref.ref[ConnectionId]] = {}
        # Made with the first iterator: to go through an empty set takes as long as the rest.
        self._iterators: weakref.WeakSet[Steps[ConnectionEvent]] | None = None
        self._waiters: WaitLine[None] = WaitLine()
        self._max_unread = max_unread
        self.dropped_events: int = 0
        self._over: Exception | None = None  # why nothing will be put into the line any more
        self._kept: deque[ConnectionEvent] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None  # a closed pump forgets its loop
        self._pump: FdPump | None = None
        self._unacked = 0
        self._kicking = False
        self._short = False
        self._budget = _BUDGET
        self._requests_go_to: EventChannel | None = None  # the channel of their ids; None: this
        super().__init__(handle)

    def fileno(self) -> int:
        """The descriptor; owned by the channel."""
        return int(self._require().fd)

    @property
    def unacked(self) -> int:
        """Events that `get_event` has returned and that are not acknowledged."""
        return self._unacked

    def _attach(self, loop: asyncio.AbstractEventLoop | None = None) -> asyncio.AbstractEventLoop:
        """Register with the running loop, once; the channel then belongs to that loop.

        Args:
            loop: The running loop, if the caller knows it: in callbacks of trio_asyncio's loops
                asyncio does not.
        """
        loop = asyncio.get_running_loop() if loop is None else loop
        if self._over is not None:
            raise self._over.with_traceback(None)  # the channel has failed: no event will come
        if self._loop is loop:
            return loop
        if self._pump is None:
            self._loop = loop
            self._pump = FdPump(loop, self.fileno(), self._on_readable, self._on_failure)
        elif self._pump.loop is not loop:
            msg = "the event channel belongs to another event loop"
            raise RuntimeError(msg)
        return loop

    def _expect_requests(self) -> None:
        """An id of the channel is about to listen."""
        self._budget = _BUDGET_OF_A_LISTENER

    def _kick_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        """Look for events in the loop's next round, once for all calls before that."""
        if not self._kicking:
            self._kicking = True
            loop.call_soon(self._kick)

    def _kick(self) -> None:
        """Look for events, although the descriptor may not be readable."""
        self._kicking = False
        if self._pump is not None and not self.closed:
            self._pump.kick()

    def _catch_up(self) -> None:
        """Dispatch the events that are there now: a peer is about to be given up as silent."""
        for _ in range(_MOST_TO_CATCH_UP // self._budget):
            if self.closed or self._pump is None or not self._pump.kick():
                return

    # Dispatch

    def _on_readable(self) -> bool:
        take = self._events.next
        for _ in range(self._budget):
            taken = take()
            if taken is None:
                return False
            if isinstance(taken, int):
                if taken not in _SHORTAGES:
                    raise os_error(taken, "rdma_get_cm_event")
                self._wait_for_means(taken)
                return False
            self._short = False
            self._dispatch(*taken)
            if self._state is not _OPEN:
                return False
        return True

    def _wait_for_means(self, code: int) -> None:
        """Leave the events in the kernel for a moment: the process lacks memory or descriptors."""
        if not self._short:
            self._short = True
            _log.warning(
                "event channel: no event can be taken (%s); it is tried again every %g s",
                os.strerror(code),
                _SHORT_PAUSE_S,
            )
        pump = self._pump
        if pump is not None and pump.loop is not None:
            pump.pause()
            pump.loop.call_later(_SHORT_PAUSE_S, pump.resume)

    def _dispatch(
        self,
        number: int,
        status: int,
        token: int,
        listen_token: int,
        private_data: bytes,
        numbers: tuple[int, ...] | None,
    ) -> None:
        kind = _KINDS.get(number) or EventType(number)
        listener: ConnectionId | None = None
        target: ConnectionId | None
        if kind is _CONNECT_REQUEST:
            listener, handle = self._ids.get(listen_token, _nobody)(), self._requested()
            if listener is None or listener.closed or not self._passed_on(handle):
                self._discard(handle)
                return
            target = listener._adopt(handle, self._requests_go_to or self)
        else:
            target = self._ids.get(token, _nobody)()
            if target is None:
                return
        event = ConnectionEvent(self, kind, status, target, listener, private_data, numbers)
        if kind in _WITH_WAY and (address := self._events.ah_attr):
            event.ah_attr = AHAttributes._from_c(ffi.cast("struct ibv_ah_attr *", address))
        handler = listener or target
        assert handler is not None
        taken = True
        try:
            taken = handler._on_event(event)
        except BaseException as exc:
            self._report(exc)
        # As `_is_read`: a call of it would take as long as the rest, four times for a connect.
        if not event.hidden and (not taken or self._iterators or self._waiters.places):
            self._publish(event)

    def _requested(self) -> Any:
        """The C id of the last request."""
        return ffi.cast("struct rdma_cm_id *", self._events.id)

    def _passed_on(self, handle: Any) -> bool:
        """Move a request's C id to its channel, if that is another; False if that fails."""
        if self._requests_go_to is not None:
            try:
                self._requests_go_to._take_over(handle, self)
            except OSError as exc:
                _log.debug("a request vanished: %s", exc)
                return False
            except BaseException as exc:
                self._report(exc)
                return False
        return True

    def _take_over(self, handle: Any, origin: EventChannel) -> None:
        """Have the events of a C id of `origin` come here (`rdma_migrate_id(3)`)."""
        channel, home = self._require(), origin._home
        if home is not None and home.is_running():
            self._attach(home)  # a task may wait for its next event
            # The kernel moves unread events without waking a wait for the descriptor.
            self._kick_soon(home)
        check_minus_one(lib.rdma_migrate_id(handle, channel), "rdma_migrate_id")

    def _discard(self, handle: Any) -> None:
        """Refuse a request that nobody takes; the channels outlive the calls."""
        channels = [self]
        self._retain()
        if self._requests_go_to is not None:  # to which it may have moved
            with contextlib.suppress(ResourceClosedError):
                self._requests_go_to._retain()
                channels.append(self._requests_go_to)

        def refuse() -> None:
            try:
                lib.rdma_reject(handle, ffi.NULL, 0)
                lib.rdma_destroy_id(handle)
            finally:
                for channel in channels:
                    channel._let_go()

        reaper.submit(refuse)

    def _enroll(self, connection_id: ConnectionId) -> int:
        """Have the events of a C id with the number that this returns go to `connection_id`."""
        number = next(_numbers)
        self._ids[number] = weakref.ref(connection_id)
        return number

    @property
    def _is_read(self) -> bool:
        """Whether an iterator is open, or a `get_event` waits."""
        return bool(self._iterators or self._waiters.places)

    def _publish(self, event: ConnectionEvent) -> None:
        self._kept.append(event)
        if len(self._kept) > self._max_unread:
            self._make_room()
        self._waiters.grant(None)

    def _make_room(self) -> None:
        """Drop the events of closed ids; if there are none, the oldest event, a request last."""
        kept = self._kept
        for event in [e for e in kept if e.connection_id and e.connection_id.closed]:
            kept.remove(event)
        if len(kept) <= self._max_unread:
            return
        dropped = next((e for e in kept if e.type is not EventType.CONNECT_REQUEST), kept[-1])
        kept.remove(dropped)
        self._turn_away(dropped)
        self.dropped_events += 1
        if self.dropped_events & (self.dropped_events - 1) == 0:  # not each: 1, 2, 4, ...
            _log.warning(
                "event channel: %d events were dropped, because %d wait to be read",
                self.dropped_events,
                self._max_unread,
            )

    def _turn_away(self, event: ConnectionEvent) -> None:
        """Refuse the request of an event that will never be read, if it is a request."""
        if event.type is EventType.CONNECT_REQUEST and event.connection_id is not None:
            event.connection_id.close()

    def _drop(self, connection_id: object) -> None:
        """Drop the unread events of an id that was closed: they are of no use, and keep it alive.

        While the program is reading, nothing is dropped: it gets all events, in order.
        """
        if not self._kept or self._is_read:
            return
        mine = [e for e in self._kept if connection_id in (e.connection_id, e.listen_id)]
        for event in mine:
            self._kept.remove(event)
        for event in mine:
            if event.connection_id is not connection_id:
                self._turn_away(event)

    def _report(self, exc: BaseException) -> None:
        loop = self._loop
        if loop is None or loop.is_closed():
            _log.error("event handler failed", exc_info=exc)
            return
        report(loop, exc, "aiordma: dispatching a connection event failed")

    def _on_failure(self, exc: Exception) -> None:
        if isinstance(exc, PermissionError):
            # The process has changed its user: no fault of a handler, so the text is enough.
            _log.error("event channel: %s", exc)
        else:
            self._report(exc)
        if self._loop is not None:
            registry.retire(self, self._loop)  # new connections need one that works
        for connection_id in living(list(self._ids.values())):
            connection_id._step.fail(exc)
            # The ConnectionId's owner waits for events, and no further event will arrive.
            connection_id._on_event(
                ConnectionEvent(self, EventType.DEVICE_REMOVAL, 0, connection_id)
            )
        self._fail_readers(exc)

    # jVerbs-style access

    async def get_event(self, timeout: float | None = None) -> ConnectionEvent | None:
        """Wait for the next event (`rdma_get_cm_event(3)`).

        Each event has to be acknowledged once, by `event.ack()` or `ack_event(event)`.

        Args:
            timeout: Seconds, after which None is returned; None or a negative number: no limit.

        Raises:
            ResourceClosedError: The channel is closed.
            OSError: The channel can no longer be read, and no event is left.

        Cancellation: safe; no event is lost.
        """
        self._require()
        if self._over is None or not self._kept:
            self._attach()
        limit = None if timeout is None or timeout < 0 else timeout
        try:
            async with asyncio.timeout(limit):
                while not self._kept:
                    await self._waiters.wait()
                    self._require()
        except TimeoutError:
            if not self._kept:
                return None
        event = self._kept.popleft()
        account = event.listen_id or event.connection_id
        event._account = account
        if account is not None:
            account._unacked += 1
        self._unacked += 1
        return event

    def ack_event(self, event: ConnectionEvent) -> None:
        """Acknowledge an event that `get_event` returned, exactly once.

        Raises:
            TypeError: Not an event.
            ValueError: Not returned by this channel's `get_event`, or acknowledged already.
        """
        if not isinstance(event, ConnectionEvent):
            msg = f"not a connection event: {event!r}"
            raise TypeError(msg)
        account = event._account
        if event.channel is not self or account is None:
            msg = "the event is acknowledged already, or was not handed out by get_event()"
            raise ValueError(msg)
        event._account = None
        account._unacked -= 1
        self._unacked -= 1

    def __aiter__(self) -> Steps[ConnectionEvent]:
        """Iterate over the events that wait and all later ones; they need no acknowledgement.

        Each event is read once, by an iterator or by `get_event`.  Events that an iterator has not
        read when the program leaves it are there for the next reader.  The iteration ends when the
        channel is closed or has failed; beginning one then raises as `get_event` does.
        """
        self._require()
        if self._over is None or not self._kept:
            self._attach()
        iterator = Steps(self._next)
        if self._iterators is None:
            self._iterators = weakref.WeakSet()
        self._iterators.add(iterator)
        return iterator

    async def _next(self) -> ConnectionEvent:
        """The next event, for an iterator.  Cancellation: no event is lost."""
        while not self._kept:
            if self._over is not None:
                msg = "the event channel has no more events"
                raise ResourceClosedError(msg)
            try:
                await self._waiters.wait()
            except Exception:
                # The channel was closed, or has failed: tasks that wait get the reason.
                if self._over is None:
                    raise
        return self._kept.popleft()

    # Life

    @property
    def _home(self) -> asyncio.AbstractEventLoop | None:
        return None if self._pump is None else self._pump.loop

    def _in_the_way(self) -> Iterator[Resource]:
        # Requests that no reader has fetched are refused when the channel ends.
        unseen = {event.connection_id for event in self._kept if event.listen_id is not None}
        return (child for child in super()._in_the_way() if child not in unseen)

    def _before_close(self) -> None:
        if self._unacked:
            msg = f"{self._unacked} connection events are not acknowledged"
            raise busy_error(msg)

    def _fail_readers(self, exc: Exception) -> None:
        self._over = exc
        self._waiters.fail(lambda: exc)

    def _on_close(self) -> None:
        closed = ResourceClosedError("the event channel was closed")
        for connection_id in living(list(self._ids.values())):
            connection_id._step.fail(closed)
        is_read = self._is_read
        self._fail_readers(closed)
        # Open ids keep the descriptor; a pump without readers would only fill the queue.
        if self._pump is not None:
            self._pump.close()
        self._events.close()
        self._loop = None  # the thread that destroys the channel must not keep it alive
        unread = list(self._kept)
        if not is_read:
            self._kept.clear()
        for event in unread:
            self._turn_away(event)

    def _destroy(self, handle: Any) -> None:
        lib.rdma_destroy_event_channel(handle)
