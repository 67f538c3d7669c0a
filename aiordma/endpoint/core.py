"""ConnectionCore: the parts of a connection, and how they are joined.

Theory of operation
    `Link` is the adapter, `Sender` and `Receiver` are slots and credits, `Exposer` and `Fetcher`
    large messages, `Keepalive` silence.  Each does one thing and knows nothing of the others; a
    word of one part to another goes through here.

    The end has one cause and one path.  `_over` notes the cause once and makes every part raise it;
    `Ending` does the rest.  `close()`, `abort()`, a disconnection and a failed request lead there.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
from dataclasses import dataclass
from typing import Any

from aiordma._core import (
    EVENT_FAILED,
    EVENT_FRAMES,
    EVENT_IDLE,
    EVENT_ROOM,
    EVENT_SENT,
)
from aiordma.cm.address import Address
from aiordma.cm.connection_event import ConnectionEvent
from aiordma.cm.enums import EventType
from aiordma.endpoint.config import ConnectionConfig, plan_of
from aiordma.endpoint.events import EventHub
from aiordma.endpoint.large import Exposer, Fetcher
from aiordma.endpoint.link import Link
from aiordma.endpoint.one_sided import OneSided, Operations
from aiordma.endpoint.outcome import (
    Outcome,
    abort_reason,
    aborted_error,
    closed_error,
    ended_error,
    left_error,
    vanished_error,
    violation,
)
from aiordma.endpoint.receiving import Receiver
from aiordma.endpoint.sending import Goodbye, Sender
from aiordma.endpoint.wire import FRAME_SIZE, AbortReason, FrameKind, Hello
from aiordma.errors import (
    DeviceRemovedError,
    ForkedError,
    ProtocolError,
    ResourceClosedError,
    cm_error,
)
from aiordma.link.ending import Ending, LastSteps
from aiordma.link.keepalive import Keepalive
from aiordma.loop import background, fork
from aiordma.loop.running import check_loop
from aiordma.memory.remote import RemoteRegion
from aiordma.verbs.mr import MemoryRegion
from aiordma.verbs.wc import WCRecord
from aiordma.verbs.wr import SGE

__all__ = ["ConnectionCore", "ConnectionStats"]

_log = logging.getLogger("aiordma")
_UNLIMITED = 1 << 60


@dataclass(slots=True)
class ConnectionStats:
    """Counters of a connection."""

    messages_sent: int = 0
    messages_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    atomics: int = 0


class ConnectionCore:
    """The parts of a connection; `Connection` adds what programs call.

    Args:
        link: The adapter's side, not yet started.
        config: Its settings.
    """

    def __init__(self, link: Link, config: ConnectionConfig) -> None:
        self.config = config
        self.private_data = b""
        self._link = link
        self._loop = link.loop
        self._receiver = Receiver(link, config)
        self._state = link.state
        self._state.sge, self._state.remote, self._state.pd = SGE, RemoteRegion, link.pd
        self._sender = Sender(link, config)
        self._exposer = Exposer(link, self._sender, config.rendezvous_window)
        self._fetcher: Fetcher | None = None  # made for the first large message
        self._reads = 0  # that the peer serves at a time
        self._checked = False  # whether the peer's large messages have checksums
        self._keepalive: Keepalive | None = None
        self._peer_max = config.slot_size if config.raw else 0
        self._established: asyncio.Future[None] | None = None
        self._outcome = Outcome()
        self._ending = Ending(link)
        self._goodbye = Goodbye(link, config, self._sender, self._exposer, self._ending)
        self._known: dict[str, Any] | None = None
        #: Addresses of both ends; empty: not asked for yet; None: not connected yet.
        self._ends: tuple[Address | None, Address | None] | tuple[()] | None = None
        self._memory: set[MemoryRegion] = set()  # registered by the program with it
        # Made at first use: most connections have messages only.
        self._own_operations: Operations | None = None
        self._own_one_sided: OneSided | None = None
        self._own_events: EventHub | None = None
        link.at_close(self._part)
        fork.guard_public(self)
        link.cm_id._sink = self._on_cm_event
        self._state.handler = self._on_events
        link.start(self)

    @property
    def _operations(self) -> Operations:
        if self._own_operations is None:
            self._own_operations = Operations(self._link, self.config, self._outcome)
        return self._own_operations

    @property
    def _one_sided(self) -> OneSided:
        if self._own_one_sided is None:
            self._own_one_sided = OneSided(self._link, self.config, self._operations, self._outcome)
        return self._own_one_sided

    @property
    def _events(self) -> EventHub:
        if self._own_events is None:
            self._own_events = EventHub()
            if self._link.closed:
                self._own_events.end()
            else:
                self._link.at_close(self._own_events.end)
        return self._own_events

    @property
    def _names(self) -> dict[str, Any]:
        """Facts about the connection: asked for at the first use, or when the link closes."""
        if self._known is None:
            # A device that is gone has no names, and a forked child has no device.
            with contextlib.suppress(OSError, ResourceClosedError, ForkedError):
                known = self._link.describe()
                ends = self._ends or self._link.cm_id._ends()
                known["peername"], known["sockname"] = ends
                known["large_messages_checked"] = self._checked
                self._known = known
        return self._known or {}

    # Handshake: called by connect and accept

    @property
    def _window(self) -> int:
        """Data messages that the peer may send at first."""
        return self._receiver.window.size

    def _meet(
        self,
        hello: Hello | None,
        reads: int,
        ends: tuple[Address | None, Address | None] | None = None,
    ) -> None:
        """The peer's numbers are known, and perhaps where both ends are; messages may be sent."""
        link, config = self._link, self.config
        self._ends = ends or ()
        if hello is None:
            self._state.credits = _UNLIMITED
            self._state.eager_size = config.slot_size
            return
        self.private_data = hello.user_data
        self._peer_max = hello.max_message_kib * 1024
        eager = min(config.slot_size, hello.slot_size) - FRAME_SIZE
        self._state.eager_size = min(eager, self._peer_max)
        window = min(config.rendezvous_window, hello.rendezvous_window)
        self._exposer.resize(window)
        self._exposer.sums = hello.asks_checksums
        self._checked = hello.knows_checksums and link.check_large
        self._reads = min(config.initiator_depth, reads)
        self._state.credits += hello.recv_depth
        self._sender.room()

    def _greet(self) -> None:
        """The connecting side sends first, as iWARP demands; the other waits for it."""
        self._sender.control(FrameKind.CREDIT)
        self._watch()

    def _watch(self) -> None:
        """From now on silence is noticed; not before the first message may be sent."""
        if self._keepalive is None and self._outcome.cause is None:
            interval, limit = plan_of(self.config).silence
            name = f"{'raw_' * self.config.raw}idle_timeout_s of this side's ConnectionConfig"
            self._keepalive = Keepalive(self._loop, interval, limit, name)
            self._keepalive.start(self)
            background.deliver_at_end(self._loop, self)

    def _was_heard(self) -> bool:
        heard, self._state.heard = self._state.heard, False
        return heard

    def _on_interval(self, *, silent: bool) -> None:
        if silent and not self._state.asking and not self.config.raw:
            self._state.asking = True
            self._sender.control(FrameKind.PING)

    def _give_up(self, cause: BaseException) -> None:
        self._link.fail(cause)

    def _await_greeting(self) -> asyncio.Future[None]:
        """Before accepting: a future for the client's first message."""
        self._established = self._link.loop.create_future()
        self._established.add_done_callback(self._greeted)
        return self._established

    def _greeted(self, future: asyncio.Future[None]) -> None:
        self._established = None
        if not future.cancelled():
            future.exception()  # seen here in case that no task waits any more

    def _check_loop(self) -> None:
        if self._link.forked:
            raise fork.forked_error("connection")
        check_loop(self._link.loop, "connection")

    # From the parts

    def _on_events(self, events: int) -> None:
        """Act on the events that C leaves to Python, at the end of a drain."""
        if events & EVENT_FRAMES:
            self._on_frames()
        if events & EVENT_ROOM:
            self._sender.room()
        if events & EVENT_SENT:
            self._sender.sent()
        if events & EVENT_FAILED:
            self._link.check(self._state.error)
            # While ABORT is on its way: an answer to a message that is given up is no violation.
            if (wrong := self._state.wrong)[0] and self._outcome.cause is None:
                self._link.fail(violation(*wrong))
        if events & EVENT_IDLE:
            self._link.came_back()
        if self._state.unsaid:
            self._sender.attend()

    def _sweep(self) -> None:
        """Take what the adapter has completed, now: the events of a sweep are told later."""
        self._link.completions.sweep()
        self._on_events(EVENT_FRAMES | EVENT_ROOM | EVENT_SENT | EVENT_FAILED)

    def _on_frames(self) -> None:
        state, window = self._state, self._receiver.window
        if self._established is not None and state.said:
            self._greeted_by_peer()
        self._link.on_reads()
        for slot in state.take_freed():
            window.back(slot)
        while (large := state.next_large(self.config.receives)) is not None:
            length, imm, body, slot = large
            try:
                if self._outcome.cause is None:
                    self._announce(length, body, imm)
            finally:
                code = state.back_now(slot)
                if code < 0:
                    window.back(slot)
                else:
                    self._link.check(code)
        while (done := state.next_done()) is not None:
            if self._outcome.cause is None:
                self._exposer.on_done(*done)
        if self._outcome.cause is None and state.said & 1 << FrameKind.END:
            self._receiver.end(ended_error)
        if self._outcome.cause is None and state.said & 1 << FrameKind.ABORT:
            error = aborted_error(state.peer_reason)
            if state.peer_reason:
                _log.warning("connection with %s: %s", self._link.peer_name(), error.args[1])
            self._over(error)

    def _greeted_by_peer(self) -> None:
        """The first frame of the client has come."""
        assert self._established is not None
        self._link.cm_id.notify_established()
        self._watch()
        if not self._established.done():
            self._established.set_result(None)

    def _announce(self, length: int, body: bytes, imm: int | None) -> None:
        if not self._reads:
            # It would never begin, and all that is posted behind it would wait.
            text = "the peer announced a large message and serves no RDMA reads"
            self._link.fail(ProtocolError(errno.EPROTO, text))
            return
        if self.config.check_large and not self._checked:
            text = "the peer's library knows no checksums of large messages, check_large is True"
            self._link.fail(ProtocolError(errno.EPROTO, text))
            return
        if self._fetcher is None and self._outcome.cause is None:
            link, config = self._link, self.config
            self._fetcher = Fetcher(
                link, self._sender, self._receiver, config, self._reads, checked=self._checked
            )
            self._receiver.fetcher = self._fetcher
        if self._fetcher is not None:
            self._fetcher.announce(length, body, imm)

    def _on_sent(self, slot: int) -> None:
        self._sender.on_sent(slot)

    def _on_unexplained(self) -> None:
        self._sender.hold()

    def _on_closing(self) -> None:
        if self._ends is not None:
            self._known = self._names  # while they can be asked for

    def _on_ended(self, number: int, record: WCRecord) -> None:
        self._operations.on_ended(number, record)

    def _on_read(self, number: int) -> None:
        if self._fetcher is not None:
            self._fetcher.on_read(number)

    def _on_cm_event(self, event: ConnectionEvent) -> bool:
        if self._own_events is not None:
            self._own_events.publish(event)
        if event.type == EventType.ESTABLISHED:
            return True
        if event.type in (EventType.TIMEWAIT_EXIT, EventType.ADDR_CHANGE):
            return True
        self._sweep()  # messages from before the disconnection count before it
        self._ending.peer_left()
        if not self._outcome.closing:
            if event.type == EventType.DISCONNECTED and not self.config.raw:
                self._gone(vanished_error())  # the peer's adapter would have brought END or ABORT
            else:
                self._gone(cm_error(event.type.name, event.status, event.private_data))
        # True takes the event: the channel, which all connections share, would keep it otherwise.
        # A step of the handshake that waits for the event gets it all the same.
        return True

    def _on_failed(self) -> None:
        failure = self._link.failure
        assert failure is not None
        self._ending.wake()
        self._gone(failure)

    def _gone(self, error: BaseException) -> None:
        """The adapter has lost the peer; where that has said END before, it was its close."""
        if self._receiver.ended and not isinstance(error, (ProtocolError, DeviceRemovedError)):
            error = left_error()
        self._over(error)

    def _say_aborted(self, reason: int = AbortReason.PROGRAM) -> bool:
        """Tell the peer that there will be no END, if it can be told at once; whether it can."""
        if self.config.raw or self._keepalive is None or self._outcome.cause is not None:
            return False
        self._sender.control(FrameKind.ABORT, reason)
        return True

    def _last_word(self, cause: BaseException) -> bool:
        reason = abort_reason(cause)
        if reason is None or not self._say_aborted(reason):
            return False
        self._goodbye.abort()
        return True

    async def _deliver(self) -> None:
        """The connection waits for the requests that it has posted; it sends no END or ABORT."""
        await self._goodbye.deliver()

    # End

    @property
    def _alive(self) -> bool:
        return self._outcome.cause is None

    def _end(self) -> None:
        self._over(closed_error())

    def _over(self, cause: BaseException) -> None:
        """No more messages in either direction; the first cause counts."""
        outcome = self._outcome
        if outcome.cause is not None:
            return
        outcome.cause = cause
        self._state.over = True
        if self._established is not None and not self._established.done():
            self._established.set_exception(outcome.failure())
            self._ending.met = False  # its resources are given back without waiting for it
        self._sender.fail(outcome.failure)
        self._exposer.fail(outcome.failure)
        self._receiver.fail(outcome.failure)
        if self._own_operations is not None:
            self._own_operations.explained()
        self._begin_end()

    def _begin_end(self) -> None:
        leave = functools.partial(self._goodbye.leave, self)
        self._ending.begin(LastSteps(leave, self._stop_parts, self._end))

    async def _stop_parts(self) -> None:
        if self._keepalive is not None:
            self._keepalive.stop()
        if self._fetcher is not None:
            self._fetcher.stop()
            await self._fetcher.stopped()

    def _part(self) -> None:
        """Everything was given back, and nothing will be told any more."""
        for region in self._memory:
            region.close()
        self._memory.clear()
        self._state.handler = None
        self._receiver.part()
        if self._fetcher is not None:
            self._fetcher.stop()
        if self._keepalive is not None:
            self._keepalive.stop()
