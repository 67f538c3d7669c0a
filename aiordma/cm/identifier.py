"""What a connection id is, and how its events find it; the steps are in connection_id.

Theory of operation
    The C id's context holds an integer token of its channel; events are routed by it.  At most one
    step is under way: a waiter notes which events may answer, and the first event that ends the
    step completes it.

    The queue pair is made with ibv_create_qp and driven here (cm.qp_transition); for librdmacm
    the id has none.  The connecting side therefore gets CONNECT_RESPONSE where C programs see
    ESTABLISHED; it moves the queue pair, confirms with rdma_establish, and then reports
    ESTABLISHED to the channel's readers.

    When the peer disconnects, C leaves the queue pair alone.  Here it goes to the error state and
    the peer is answered, so that pending receives end without a call.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any, Self

from aiordma._core import CMEvents
from aiordma._ffi import ffi, lib
from aiordma._ffi.check import check_minus_one
from aiordma.cm.address import Address, from_sockaddr
from aiordma.cm.connection_event import ConnectionEvent
from aiordma.cm.enums import EventType, PortSpace
from aiordma.cm.qp_transition import QPPolicy, advance
from aiordma.errors import (
    ConnectTimeoutError,
    ResourceBusyError,
    ResourceClosedError,
    cm_error,
    os_error,
    plain_error,
)
from aiordma.loop.timers import Timer
from aiordma.loop.workers import call_blocking, connecting
from aiordma.verbs.context import Context
from aiordma.verbs.enums import Access, QPState
from aiordma.verbs.qp import QueuePair
from aiordma.verbs.resource import Resource, ResourceState

if TYPE_CHECKING:
    from aiordma.cm.event_channel import EventChannel

__all__ = ["Identifier", "Stage"]

_log = logging.getLogger("aiordma")
_INIT, _RTR, _RTS = int(QPState.INIT), int(QPState.RTR), int(QPState.RTS)
_DEFAULT_POLICY = QPPolicy()
# Events that tell of something beside the step under way and never end it.
_ASIDE = frozenset({
    EventType.TIMEWAIT_EXIT, EventType.ADDR_CHANGE, EventType.CONNECT_REQUEST,
    EventType.MULTICAST_JOIN, EventType.MULTICAST_ERROR,
})  # fmt: skip


def _late(answers: frozenset[EventType], timeout: float | None) -> ConnectTimeoutError:
    text = f"no {' or '.join(sorted(kind.name for kind in answers))} within {timeout} s"
    return ConnectTimeoutError(errno.ETIMEDOUT, text)


def _expire(
    future: asyncio.Future[ConnectionEvent], answers: frozenset[EventType], timeout: float
) -> None:
    if not future.done():
        future.set_exception(_late(answers, timeout))


class Stage(Enum):
    """How far an id has come."""

    IDLE = "idle"
    BOUND = "bound"
    LISTENING = "listening"
    ADDRESS_RESOLVED = "address resolved"
    ROUTE_RESOLVED = "route resolved"
    CONNECTING = "connecting"
    REQUESTED = "requested"
    ACCEPTED = "accepted"
    CONNECTED = "connected"
    SERVICE_RESOLVED = "service resolved"
    ANSWERED = "answered"
    DISCONNECTED = "disconnected"
    FAILED = "failed"


_WITHOUT_PEER = (
    Stage.IDLE, Stage.BOUND, Stage.LISTENING, Stage.ADDRESS_RESOLVED, Stage.ROUTE_RESOLVED,
    Stage.CONNECTING, Stage.FAILED,
)  # fmt: skip

# What to do with an id that a step refuses.
_REMEDIES = {
    Stage.CONNECTING: "cancel its connect() or wait for the end of that; close() ends both",
    Stage.FAILED: "a step of it has failed or was canceled; close it and make another",
}


class Identifier(Resource):
    """The C id, its events and its properties; arguments and attributes as `ConnectionId`."""

    __slots__ = (
        "_access", "_channel", "_confirming", "_context", "_sink", "_token", "_trying", "_unacked",
        "_waiter", "policy", "port_space", "qp", "stage",
    )  # fmt: skip

    def __init__(self, channel: EventChannel, port_space: PortSpace = PortSpace.TCP) -> None:
        if not hasattr(channel, "_enroll"):
            msg = f"not an event channel: {channel!r}"
            raise TypeError(msg)
        if not isinstance(port_space, PortSpace):
            msg = f"not a port space: {port_space!r}"
            raise TypeError(msg)
        if port_space is not PortSpace.TCP and port_space not in list(PortSpace):
            msg = f"not a port space: {port_space!r}"
            raise ValueError(msg)
        out = ffi.new("struct rdma_cm_id **")
        code = lib.rdma_create_id(channel._require(), out, ffi.NULL, int(port_space))
        check_minus_one(code, "rdma_create_id")
        self._setup(channel, out[0], port_space, Stage.IDLE)

    def _setup(
        self, channel: EventChannel, handle: Any, port_space: PortSpace, stage: Stage
    ) -> None:
        self._channel = channel
        self._context: Context | None = None
        self._access: Access | None = None  # rights of the queue pair, once it has any from here
        self._confirming: Timer | None = None
        self._waiter: tuple[frozenset[EventType], asyncio.Future[ConnectionEvent]] | None = None
        self._sink: Callable[[ConnectionEvent], bool] | None = None
        self._unacked = 0
        self._trying = False  # a time-out is not the last word: another try follows
        self.policy = _DEFAULT_POLICY
        self.port_space = port_space
        self.qp: QueuePair | None = None
        self.stage = stage
        Resource.__init__(self, handle, (channel,))
        self._token = channel._enroll(self)
        handle.context = ffi.cast("void *", self._token)

    @classmethod
    def _adopt(cls, channel: EventChannel, handle: Any, listener: Identifier) -> Self:
        """The new id of a CONNECT_REQUEST; its context is still a copy of the listener's."""
        self = cls.__new__(cls)
        self._setup(channel, handle, listener.port_space, Stage.REQUESTED)
        return self

    # What it is

    @property
    def event_channel(self) -> EventChannel:
        """The channel of its events."""
        return self._channel

    @property
    def context(self) -> Context | None:
        """The device it is bound to; None before."""
        if self._context is None or self._state is not ResourceState.OPEN:
            handle = self._require()
            if self._context is None and handle.verbs != ffi.NULL:
                self._context = Context.borrow(handle.verbs)
        return self._context

    @property
    def port_num(self) -> int:
        """Port of the device, from 1; 0 before it is bound."""
        return int(self._require().port_num)

    @property
    def source(self) -> Address | None:
        """Local (address, port), None before it is bound."""
        return from_sockaddr(lib.rdma_get_local_addr(self._require()))

    @property
    def destination(self) -> Address | None:
        """(address, port) of the peer, None while it is not connected."""
        if self.stage in _WITHOUT_PEER:
            return None
        return from_sockaddr(lib.rdma_get_peer_addr(self._require()))

    @property
    def source_address(self) -> str | None:
        """Local IP address."""
        source = self.source
        return source[0] if source else None

    @property
    def source_port(self) -> int:
        """Local port; 0 before it is bound."""
        source = self.source
        return source[1] if source else 0

    @property
    def destination_address(self) -> str | None:
        """The peer's IP address, None while it is not connected."""
        destination = self.destination
        return destination[0] if destination else None

    @property
    def destination_port(self) -> int:
        """The peer's port, 0 while it is not connected."""
        destination = self.destination
        return destination[1] if destination else 0

    def _ends(self) -> tuple[Address | None, Address | None]:
        """`destination` and `source` of an id that has a peer."""
        both = CMEvents.ends(int(ffi.cast("uintptr_t", self._require())))
        return both or (self.destination, self.source)

    @property
    def local_gid(self) -> bytes:
        """The GID that the connection uses on this side; 16 bytes."""
        return bytes(ffi.buffer(self._require().route.addr.addr.ibaddr.sgid.raw))

    # Events

    def _on_event(self, event: ConnectionEvent) -> bool:
        """Called by the channel for each event of this id; True if it was taken."""
        kind = event.type
        if kind is EventType.ESTABLISHED:
            datagram = event.ah_attr is not None
            if self.stage is Stage.CONNECTING and not datagram:
                # The answer to a client on iWARP, which tells the two exchanged.
                own_reads = event.responder_resources
                event.responder_resources = event.initiator_depth
                event.initiator_depth = own_reads
            self.stage = Stage.SERVICE_RESOLVED if datagram else Stage.CONNECTED
            self._stop_confirming()
        elif kind is EventType.CONNECT_RESPONSE:
            self._on_response(event)
            kind = event.type
        elif kind is EventType.DISCONNECTED or kind is EventType.DEVICE_REMOVAL:
            if kind is EventType.DEVICE_REMOVAL and self.qp is not None:
                self.qp._broken(cm_error(kind.name, event.status))
            self._peer_left()
        elif kind is EventType.ADDR_ERROR and self._trying:
            event.hidden = event.status == -errno.ETIMEDOUT
        taken = self._sink(event) if self._sink is not None else False
        waiter = self._waiter
        if waiter is None or waiter[1].done():
            return taken
        if kind in waiter[0]:
            waiter[1].set_result(event)
        elif kind in _ASIDE:
            return taken
        elif kind is EventType.ADDR_RESOLVED and event.status:
            # It was to go on by itself, and could not.
            waiter[1].set_exception(os_error(-event.status, "rdma_resolve_route"))
        else:
            # Whatever else arrives, known or not, ends the step: no wait is for ever.
            waiter[1].set_exception(cm_error(kind.name, event.status, event.private_data))
        return True

    def _on_response(self, event: ConnectionEvent) -> None:
        """Finish the handshake; the event becomes ESTABLISHED or CONNECT_ERROR in place."""
        try:
            assert self.qp is not None
            self._move(_RTS, self.policy)
            check_minus_one(lib.rdma_establish(self._require()), "rdma_establish")
        except OSError as exc:
            event.type = EventType.CONNECT_ERROR
            event.status = -(exc.errno or errno.EIO)
        else:
            event.type = EventType.ESTABLISHED
            self.stage = Stage.CONNECTED

    def _peer_left(self) -> None:
        if self.stage is Stage.CONNECTED or self.stage is Stage.ACCEPTED:
            # Answers the peer, whose own DISCONNECTED waits for it.
            lib.rdma_disconnect(self._handle)
        self.stage = Stage.DISCONNECTED
        if self.qp is not None:
            try:
                self.qp.to_error()
            except OSError as exc:
                _log.debug("queue pair %d to error: %s", self.qp.num, exc)

    def _fail(self, exc: BaseException) -> None:
        if self._waiter is not None and not self._waiter[1].done():
            self._waiter[1].set_exception(exc)

    async def _step(
        self,
        call: Callable[[], None],
        answers: frozenset[EventType],
        timeout: float | None,
        *,
        in_thread: bool = False,
    ) -> ConnectionEvent:
        """Make the call and await its answer; `in_thread` for a call that can block."""
        self._require()
        if self._waiter is not None:
            msg = "another step of this connection id is under way"
            raise ResourceBusyError(errno.EBUSY, msg)
        future: asyncio.Future[ConnectionEvent] = self._channel._attach().create_future()
        self._waiter = (answers, future)
        timer: asyncio.TimerHandle | None = None
        try:
            if in_thread:
                return await self._step_in_thread(call, future, answers, timeout)
            call()
            if timeout is not None:
                # Lighter than asyncio.timeout(), and the future is all that is waited for.
                timer = future.get_loop().call_later(timeout, _expire, future, answers, timeout)
            return await future
        finally:
            if timer is not None:
                timer.cancel()
            self._waiter = None
            future.cancel()
            del future  # what it has raised has this frame in its traceback

    async def _step_in_thread(
        self,
        call: Callable[[], None],
        future: asyncio.Future[ConnectionEvent],
        answers: frozenset[EventType],
        timeout: float | None,
    ) -> ConnectionEvent:
        limit = asyncio.timeout(timeout)
        try:
            async with limit:
                await self._call_in_thread(call)
                return await future
        except TimeoutError as exc:
            if not limit.expired() or isinstance(exc, ConnectTimeoutError):
                raise
            raise _late(answers, timeout) from exc
        finally:
            del future

    async def _call_in_thread(self, call: Callable[[], None]) -> None:
        def run() -> None:
            self._retain()  # the C id outlives the call, whatever happens to its caller
            try:
                call()
            finally:
                self._let_go()

        await call_blocking(run, undo=lambda _: None, pool=connecting)

    def _need(self, verb: str, *stages: Stage) -> None:
        self._require()
        if self.stage not in stages:
            # Not `os_error`, whose hint is for what the kernel refuses.
            text = f"{verb}: EINVAL: the connection id is {self.stage.value}"
            raise plain_error(errno.EINVAL, text, _REMEDIES.get(self.stage, ""))

    def _move(self, last: int, policy: QPPolicy) -> None:
        """Take the queue pair from INIT, or to it, as far as `last`.

        Through INIT once more where the rights are the connection manager's to say: they follow
        the depths that the peer has granted.
        """
        assert self.qp is not None
        ready = last != _INIT and self._access is not None and self._access == policy.access
        advance(
            self._require(), self.qp, _RTR if ready else _INIT, last, policy,
            requested=self.stage is Stage.REQUESTED,
        )  # fmt: skip
        self._access = policy.access

    def migrate(self, channel: EventChannel) -> None:
        """Move the id to another channel, and with it its events (`rdma_migrate_id(3)`).

        Events that the old channel has not read yet move, too.  Those that it has read and no
        reader has fetched stay there.  A step under way goes on.

        Only for ids that do not listen: requests under way would stay behind.

        Raises:
            TypeError: Not an event channel.
            ResourceBusyError: Events of the id are not acknowledged.
            ResourceClosedError: The id or the channel is closed.
            OSError: EINVAL for a listening id.
        """
        if not hasattr(channel, "_enroll"):
            msg = f"not an event channel: {channel!r}"
            raise TypeError(msg)
        self._require()
        channel._require()
        self._refuse_with_debt()
        if self.stage is Stage.LISTENING:
            raise os_error(errno.EINVAL, "rdma_migrate_id", detail="(the id is listening)")
        if channel is self._channel:
            return
        home = self._channel._home
        if home is not None and home.is_running():
            channel._attach()  # a task may wait for its next event
            # The kernel moves unread events without waking a wait for the descriptor.
            channel._kick_soon(home)
        check_minus_one(lib.rdma_migrate_id(self._handle, channel._require()), "rdma_migrate_id")
        old, self._channel = self._channel, channel
        old._ids.pop(self._token)
        channel._retain(self)
        self._parents = (channel,)
        old._let_go(self)
        self._token = channel._enroll(self)
        self._handle.context = ffi.cast("void *", self._token)

    # Life

    def _refuse_with_debt(self) -> None:
        if self._unacked:
            msg = f"{self._unacked} events of the connection id are not acknowledged"
            raise ResourceBusyError(errno.EBUSY, msg)

    @property
    def _home(self) -> asyncio.AbstractEventLoop | None:
        return self._channel._home

    def _before_close(self) -> None:
        self._refuse_with_debt()

    def _before_destroy(self) -> None:
        if self.stage in (Stage.CONNECTING, Stage.ACCEPTED, Stage.CONNECTED):
            remedy = _REMEDIES.get(self.stage, "disconnect it first")
            msg = f"the connection id is {self.stage.value}: {remedy}"
            raise ResourceBusyError(errno.EBUSY, msg)

    def _stop_confirming(self) -> None:
        if self._confirming is not None:
            self._confirming.cancel()

    def _on_close(self) -> None:
        self._stop_confirming()
        self._channel._ids.pop(self._token)
        self._sink = None
        self._fail(ResourceClosedError("the connection id was closed"))
        self._channel._drop(self)

    def _destroy(self, handle: Any) -> None:
        check_minus_one(lib.rdma_destroy_id(handle), "rdma_destroy_id")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._state.value}: {self.stage.value}>"
