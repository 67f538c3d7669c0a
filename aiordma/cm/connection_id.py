"""ConnectionId: the steps from an address to a connection, and to its end.

Theory of operation
    The C id's context holds an integer token of its channel; events are routed by it.  At most one
    step is under way (cm.step).

    The queue pair is made with ibv_create_qp and driven here (cm.qp_transition); for librdmacm
    the id has none.  The connecting side therefore gets CONNECT_RESPONSE where C programs see
    ESTABLISHED; it moves the queue pair, confirms with rdma_establish, and then reports
    ESTABLISHED to the channel's readers.  A queue pair that is not the id's own is known here by
    its number alone: the program moves it by `init_qp_attr`, and confirms by `establish`.

    When the peer disconnects, C leaves the queue pair alone.  Here it goes to the error state and
    the peer is answered, so that pending receives end without a call.  A connection of messages
    moves its queue pair itself, in its end.

    Datagrams have no connection.  The client asks which queue pair serves an address and a port
    (service id resolution), the server's program answers with its number, or refuses, and that is
    all: the id can then be closed, and the answer stays true as long as the queue pair lives.  No
    event reports its end, and the server does not learn the client's queue pair before the first
    datagram.  A datagram queue pair belongs to no peer: it is ready to receive and to send once it
    is made, and can answer for any number of ports and clients.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, Self

from aiordma._core import CMEvents
from aiordma._ffi import ffi, lib
from aiordma._ffi.check import check_minus_one
from aiordma._ffi.newer import newer
from aiordma.arguments import check_seconds, fitting, whole
from aiordma.cm.address import Address, from_gid, from_sockaddr, is_local, to_sockaddr
from aiordma.cm.addrinfo import AddressInfo, c_names, hints_of, taken
from aiordma.cm.connection_event import ConnectionEvent
from aiordma.cm.connection_parameter import (
    ANSWER_ROOM,
    REFUSAL_ROOM,
    REQUEST_ROOM,
    SERVICE_ANSWER_ROOM,
    SERVICE_REQUEST_ROOM,
    ConnectionParameter,
    Offer,
    check_offer,
    check_room,
)
from aiordma.cm.enums import EventType, Option, PortSpace
from aiordma.cm.event_channel import EventChannel
from aiordma.cm.multicast import Memberships, group_host, refuse_join
from aiordma.cm.options import set_option
from aiordma.cm.qp_transition import CLIENT_LEFT, QPPolicy, advance, make_ready, proposal
from aiordma.cm.resolving import (
    LONGEST_ROUTE_MS,
    ROUTE_RESOLVED,
    check_resolve,
    resolve,
    route_call_can_block,
)
from aiordma.cm.step import Stage, Step
from aiordma.errors import (
    RdmaOSError,
    ResourceClosedError,
    busy_error,
    cm_error,
    errno_error,
    os_error,
)
from aiordma.logs import log_of
from aiordma.loop.timers import Timer, call_later
from aiordma.verbs.context import Context
from aiordma.verbs.cq import CompletionQueue
from aiordma.verbs.enums import Access, QPState, QPType
from aiordma.verbs.pd import ProtectionDomain
from aiordma.verbs.qp import QPInitAttr, QueuePair
from aiordma.verbs.qp_attr import check_init
from aiordma.verbs.qp_changes import QPChanges
from aiordma.verbs.resource import Resource, ResourceState

__all__ = ["ANSWER_ROOM", "REQUEST_ROOM", "ConnectionId", "Stage"]

_log = log_of()
#: Seconds in which a confirmation may come after the message that shows that it was sent.
_CONFIRMATION_S = 0.25
# Looked up once, for the steps of each connection: up to Python 3.11 a look at a member of an
# enumeration takes as long as a call.
_ESTABLISHED_EVENT, _RESPONSE_EVENT = EventType.ESTABLISHED, EventType.CONNECT_RESPONSE
_OPEN = ResourceState.OPEN
_IDLE, _BOUND, _WITH_ROUTE = Stage.IDLE, Stage.BOUND, Stage.ROUTE_RESOLVED
_CONNECTING, _REQUESTED, _ACCEPTED = Stage.CONNECTING, Stage.REQUESTED, Stage.ACCEPTED
_CONNECTED, _DATAGRAM_QP = Stage.CONNECTED, QPType.UD
_PORT_SPACES = frozenset(PortSpace)
_FOR_DATAGRAMS = frozenset({PortSpace.UDP, PortSpace.IPOIB})
_INIT, _RTR, _RTS = int(QPState.INIT), int(QPState.RTR), int(QPState.RTS)
_DEFAULT_POLICY = QPPolicy()
_NO_OFFER: Offer = 0, 0, False, 0, 0  # datagram services know no depths and no retries
_ESTABLISHED = frozenset({EventType.ESTABLISHED})
# InfiniBand's and iWARP's, for a queue pair that the program moves.
_ANSWERED = frozenset({EventType.CONNECT_RESPONSE, EventType.ESTABLISHED})
_NAMES_RESOLVED = frozenset({EventType.ADDRINFO_RESOLVED})
_DISCONNECTED = frozenset({EventType.DISCONNECTED})
_LEAVING = frozenset({EventType.DISCONNECTED, EventType.DEVICE_REMOVAL})
# iWARP returns these from the call, and InfiniBand reports them by an event.
_REFUSED_IN_THE_CALL = {
    errno.ECONNREFUSED: "REJECTED",
    errno.EHOSTUNREACH: "UNREACHABLE",
}
_WITHOUT_PEER = (
    Stage.IDLE, Stage.BOUND, Stage.LISTENING, Stage.ADDRESS_RESOLVED, Stage.ROUTE_RESOLVED,
    Stage.CONNECTING, Stage.FAILED,
)  # fmt: skip
# There is a path to a peer's queue pair.
_WITH_PATH = (Stage.REQUESTED, Stage.RESPONDED, Stage.ACCEPTED, Stage.CONNECTED)

# For an id that a step refuses.
_REMEDIES = {
    Stage.CONNECTING: "cancel its connect() or wait for the end of that; close() ends both",
    Stage.FAILED: "a step of it has failed or was canceled; close it and make another",
}


def _check_channel(channel: object) -> None:
    if not isinstance(channel, EventChannel):
        msg = f"not an event channel: {channel!r}"
        raise TypeError(msg)


def _confirm(cm_id: weakref.ref[ConnectionId]) -> None:
    if (alive := cm_id()) is not None:
        alive._confirm()


class ConnectionId(Resource):
    """An identifier of the connection manager (`rdma_create_id(3)`).

    Args:
        channel: Where its events arrive.
        port_space: TCP for connections, UDP for datagrams.

    Raises:
        TypeError: Not an event channel, or not a port space.
        OSError: No RDMA device, or out of resources.

    Attributes:
        stage: How far the id has come.
        is_datagram: Whether its port space is for datagrams.
        policy: Bounds for the queue pair's attributes; to be set before `connect` or `accept`.
        qp: The queue pair after `create_qp`, else None.
    """

    __slots__ = (
        "_access", "_channel", "_confirming", "_context", "_memberships", "_sink", "_step",
        "_token", "_unacked", "is_datagram", "policy", "port_space", "qp", "stage",
    )  # fmt: skip

    def __init__(self, channel: EventChannel, port_space: PortSpace = PortSpace.TCP) -> None:
        _check_channel(channel)
        if not isinstance(port_space, PortSpace):
            msg = f"not a port space: {port_space!r}"
            raise TypeError(msg)
        if port_space not in _PORT_SPACES:
            msg = f"not a port space: {port_space!r}"
            raise ValueError(msg)
        out = ffi.new("struct rdma_cm_id **")
        if code := lib.rdma_create_id(channel._require(), out, ffi.NULL, int(port_space)):
            check_minus_one(code, "rdma_create_id")
        self._setup(channel, out[0], port_space, _IDLE)

    def _setup(
        self, channel: EventChannel, handle: Any, port_space: PortSpace, stage: Stage
    ) -> None:
        self._channel = channel
        self._context: Context | None = None
        self._access: Access | None = None  # rights of the queue pair, once it has any from here
        self._confirming: Timer | None = None
        self._memberships: Memberships | None = None  # made with the first join
        self._sink: Callable[[ConnectionEvent], bool] | None = None
        self._step = Step()
        self._unacked = 0
        self.policy: QPPolicy = _DEFAULT_POLICY
        self.port_space: PortSpace = port_space
        self.is_datagram: bool = port_space in _FOR_DATAGRAMS
        self.qp: QueuePair | None = None
        self.stage: Stage = stage
        super().__init__(handle, (channel,))
        self._token = channel._enroll(self)  # of 40 bits at most: token_of in _core/cm.c
        handle.context = ffi.cast("void *", self._token)

    def _adopt(self, handle: Any, channel: EventChannel) -> Self:
        """Return the id of a CONNECT_REQUEST to this id; it gets a token of its own."""
        made = type(self).__new__(type(self))
        made._setup(channel, handle, self.port_space, _REQUESTED)
        return made

    # Properties

    @property
    def number(self) -> int:
        """Number of the id, also in the log; no other id of the process has had it."""
        return self._token

    @property
    def event_channel(self) -> EventChannel:
        """The channel of its events."""
        return self._channel

    @property
    def context(self) -> Context | None:
        """The device it is bound to; None before."""
        if self._context is None or self._state is not _OPEN:
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

    @property
    def peer_gid(self) -> bytes:
        """The GID of the other side; 16 bytes.

        For a request on RoCE the kernel makes it from `destination`, which the client has written.
        """
        return bytes(ffi.buffer(self._require().route.addr.addr.ibaddr.dgid.raw))

    def _stray(self) -> str | None:
        """The address that packets to the client of a request go to, if that is another one.

        A request names the addresses in its private data.  On RoCE the kernel makes `peer_gid` from
        the client's address, and compares it with nothing; the packets of the connection go to the
        GID of the path, which is also in the request.  The two are the same unless the client has
        written the request itself, as root can.  On InfiniBand `peer_gid` is the path's, and iWARP
        has no path.
        """
        route = self._require().route
        if not route.num_paths:
            return None
        gid = bytes(ffi.buffer(route.path_rec.dgid.raw))
        return None if gid == self.peer_gid else from_gid(gid)

    def set_option(self, option: Option, value: int) -> None:
        """Set an option of the id (`rdma_set_option(3)`).

        Args:
            option: The option.
            value: `ID_TOS`: type of service of the packets, 0 to 255, chosen by the connecting side
                for both.  `ID_REUSEADDR`: 1 lets other ids that have it bind to the same address
                and port, but never two listeners.  `ID_AFONLY`: 1 makes an id on `::` take IPv6
                only.  `ID_ACK_TIMEOUT`: exponent e of the acknowledgement timeout 4.096 us * 2**e,
                0 to 31; 0 is for ever.

        Raises:
            TypeError: `option` is not an `Option`, or `value` not an int.
            ValueError: The value is out of range, or the option is unknown.
            OSError: EINVAL, it is too late for this option.
        """
        set_option(self, self.stage, option, value)

    # Addresses

    def bind_addr(self, address: Address) -> None:
        """Bind to a numeric local (address, port) (`rdma_bind_addr(3)`).

        A specific address also binds the id to its device, a wildcard does not.  For port 0 the
        kernel chooses one.

        Raises:
            ValueError: The address is not numeric, or the port is out of range.
            OSError: EADDRINUSE, the port is taken; EADDRNOTAVAIL, it is not an address of this
                machine; ENODEV, no RDMA device has it.
        """
        sockaddr = ffi.cast("struct sockaddr *", keep := to_sockaddr(address))
        if lib.rdma_bind_addr(self._require(), sockaddr):
            code = ffi.errno
            # The kernel says the same if one of the two addresses is a wildcard.
            if code == errno.EADDRNOTAVAIL and is_local(address):
                code = errno.EADDRINUSE
            raise os_error(code, "rdma_bind_addr")
        del keep
        self.stage = Stage.BOUND

    def listen(self, backlog: int = 50) -> None:
        """Listen for requests (`rdma_listen(3)`).

        Args:
            backlog: Requests that may wait; 0 or less means 50.

        Raises:
            OSError: The id is not bound, or the port is taken.
        """
        backlog = whole("backlog", backlog)
        if self.is_datagram:
            self._need_datagrams("rdma_listen")
        self._channel._attach()
        self._channel._expect_requests()
        code = lib.rdma_listen(self._require(), backlog if backlog > 0 else 50)
        check_minus_one(code, "rdma_listen")
        self.stage = Stage.LISTENING

    async def resolve_addr(
        self, dst: Address, src: Address | None = None, timeout: float = 2.0
    ) -> None:
        """Find the device and the neighbor for a numeric address (`rdma_resolve_addr(3)`).

        Args:
            dst: (address, port) of the peer.
            src: Local (address, port) to use, or None.
            timeout: Seconds.

        Raises:
            ValueError: An address is not numeric, or `timeout` is negative.
            ConnectionFailedError: There is no route, or no neighbor.
            ConnectTimeoutError: There was no answer in time.
            DeviceNotFoundError: The route there does not go through an RDMA device.

        Cancellation: ends the wait; close the id then.
        """
        await self._find(dst, src, timeout)

    def find(
        self,
        dst: Address,
        src: Address | None = None,
        timeout: float = 2.0,
        *,
        limited: bool = False,
    ) -> Coroutine[Any, Any, None]:
        """`resolve_addr` and `resolve_route` in one step.

        Readers of the channel do not get the event of the address, unless ibacm runs: then
        resolving the route can block, and is a call of its own in a thread.

        Args:
            dst: As `resolve_addr`.
            src: As `resolve_addr`.
            timeout: Seconds for the address, and as many again for the route.
            limited: Whether the caller has a limit of its own, which ends the wait if an event gets
                lost.

        Raises, cancellation: as these two.
        """
        return self._find(dst, src, timeout, route=True, limited=limited)

    async def _find(
        self,
        dst: Address,
        src: Address | None,
        timeout: float,
        *,
        route: bool = False,
        limited: bool = False,
    ) -> None:
        """Resolve the address, and the route if it is asked for."""
        check_seconds("timeout", timeout, zero=True, none=False)
        route_ms = 0
        if route:
            if await route_call_can_block():
                await self._find(dst, src, timeout)
                await self.resolve_route(timeout)
                return
            route_ms = min(max(1, int(timeout * 1000)), LONGEST_ROUTE_MS)
        self._need("rdma_resolve_addr", _IDLE, _BOUND)
        c_dst = to_sockaddr(dst)
        c_src = None if src is None else to_sockaddr(src)
        source = 0 if c_src is None else int(ffi.cast("uintptr_t", c_src))
        destination = int(ffi.cast("uintptr_t", c_dst))

        def call(limit_ms: int) -> None:
            handle = int(ffi.cast("uintptr_t", self._require()))
            code = CMEvents.resolve(handle, source, destination, limit_ms, self._token, route_ms)
            if code:
                check_resolve(code, dst)

        loop = self._channel._attach()
        try:
            await resolve(self._step, loop, call, timeout, route_ms, limited=limited)
            del c_src, c_dst
        except asyncio.CancelledError:
            self.stage = Stage.FAILED  # the kernel goes on, and accepts no other address
            raise
        self.stage = _WITH_ROUTE if route else Stage.ADDRESS_RESOLVED

    async def resolve_route(self, timeout: float = 2.0) -> None:
        """Find the path to the resolved address (`rdma_resolve_route(3)`).

        Args:
            timeout: Seconds.

        Raises:
            ValueError: `timeout` is negative.
            OSError: EINVAL before `resolve_addr`.
            ConnectionFailedError: There is no path.

        Cancellation: ends the wait; close the id then.
        """
        check_seconds("timeout", timeout, zero=True, none=False)
        self._need("rdma_resolve_route", Stage.ADDRESS_RESOLVED)
        milliseconds = max(1, int(timeout * 1000))
        handle = self._require()

        def call() -> None:
            check_minus_one(lib.rdma_resolve_route(handle, milliseconds), "rdma_resolve_route")

        in_thread = await route_call_can_block()
        try:
            await self._run(call, ROUTE_RESOLVED, timeout + 1.0, in_thread=in_thread)
        except asyncio.CancelledError:
            self.stage = Stage.FAILED  # as after `resolve_addr`
            raise
        self.stage = Stage.ROUTE_RESOLVED

    async def resolve_addrinfo(
        self, node: str | None, service: str | int | None = None, timeout: float = 10.0
    ) -> list[AddressInfo]:
        """Resolve names by the connection manager (`rdma_resolve_addrinfo(3)`).

        It needs rdma-core 60 or later, and InfiniBand, whose subnet administrator knows the
        services.  `cm.getaddrinfo` uses the host's resolver, on every transport.

        Args:
            node: Name of the host, or None.
            service: Name or number of the service, or None.
            timeout: Seconds.

        Raises:
            TypeError, ValueError: A name has the wrong type or a NUL, or both are None.
            NotSupportedError: The installed librdmacm does not have the call.
            OSError: EINVAL, the id is bound or resolved already; or the kernel refused.
            ConnectTimeoutError: There was no answer in time.

        Cancellation: ends the wait; close the id then.
        """
        check_seconds("timeout", timeout, none=False)
        names, hints = c_names(node, service), hints_of(self.port_space)
        ask, query = newer("rdma_resolve_addrinfo"), newer("rdma_query_addrinfo")
        self._need("rdma_resolve_addrinfo", Stage.IDLE)
        handle = self._require()

        def call() -> None:
            check_minus_one(ask(handle, *names, hints), "rdma_resolve_addrinfo")

        try:
            await self._run(call, _NAMES_RESOLVED, timeout)
        except asyncio.CancelledError:
            self.stage = Stage.FAILED  # as after `resolve_addr`
            raise
        out = ffi.new("struct rdma_addrinfo **")
        check_minus_one(query(self._require(), out), "rdma_query_addrinfo")
        return taken(out[0])

    # Queue pair

    def create_qp(
        self,
        pd: ProtectionDomain,
        attr: QPInitAttr,
        uses: tuple[Resource, ...] = (),
        cq: CompletionQueue | None = None,
        expected: int | None = None,
    ) -> QueuePair:
        """Make the id's queue pair, ready for receives (`ibv_create_qp(3)`).

        Args:
            pd: Protection domain, on the id's device.
            attr: Sizes, completion queues, type.
            uses: Resources that outlive it, as the id does, whatever is closed first.
            cq: Completion queue of both queues, if `attr` names none.
            expected: Completions for which `cq` needs room at first; None for all that are
                possible.

        Raises:
            TypeError: Not a protection domain, or not a `QPInitAttr`.
            ValueError: The port space needs another type of queue pair.
            ConnectionAbortedError: The client whose request made this id has left.
            OSError: EINVAL, the id has a queue pair already or is not bound to the device of `pd`,
                or a size exceeds the device's limits.
        """
        self._require()
        check_init(pd, attr, cq)
        if self.qp is not None:
            raise os_error(errno.EINVAL, "rdma_create_qp", detail="(the id has a queue pair)")
        if (self._context or self.context) is not pd.context:
            raise os_error(errno.EINVAL, "rdma_create_qp", detail="(not the id's device)")
        if self.is_datagram != (attr.qp_type == _DATAGRAM_QP):
            kind = "UD" if self.is_datagram else "RC"
            msg = f"an id of port space {self.port_space.name} needs a queue pair of type {kind}"
            raise ValueError(msg)
        if self.is_datagram:
            self._need_datagrams("rdma_create_qp")
        qp = QueuePair._checked(pd, attr, (self, *uses), cq, expected)
        self.qp = qp
        try:
            self._start_qp(qp)
        except BaseException:
            self.qp = None
            qp.close()
            raise
        return qp

    def _start_qp(self, qp: QueuePair) -> None:
        """Make the first transitions of the id's new queue pair; for datagrams, all of them."""
        # Port, partition, and the Q_Key of the port space.
        self._move(_INIT, self.policy)
        if self.is_datagram:
            make_ready(qp, self.port_num)

    def destroy_qp(self) -> None:
        """Destroy the queue pair (`ibv_destroy_qp(3)`); afterwards the id can only be closed.

        Raises:
            OSError: EINVAL, the id has no queue pair.
        """
        self._require()
        if self.qp is None:
            raise os_error(errno.EINVAL, "rdma_destroy_qp", detail="(the id has no queue pair)")
        self.qp.close()
        self.stage = Stage.FAILED

    def _move(self, last: int, policy: QPPolicy) -> None:
        """Take the queue pair from INIT, or to it, as far as `last`.

        The queue pair passes INIT once more where the connection manager chooses the rights: they
        follow the depths that the peer has granted.
        """
        assert self.qp is not None
        ready = last != _INIT and self._access is not None and self._access == policy.access
        advance(
            self._require(), self.qp, _RTR if ready else _INIT, last, policy,
            requested=self.stage is _REQUESTED,
        )  # fmt: skip
        self._access = policy.access

    # Connection

    def _offer(self, param: ConnectionParameter | None) -> Offer:
        assert self.context is not None
        return (param or ConnectionParameter())._numbers(self.context.attributes)

    async def connect(
        self,
        param: ConnectionParameter | None = None,
        *,
        private_data: bytes = b"",
        timeout: float | None = 10.0,
        qp_num: int | None = None,
    ) -> ConnectionEvent:
        """Connect to the resolved peer (`rdma_connect(3)`); return the ESTABLISHED event.

        For datagrams: find out which queue pair serves the resolved address and port.  A datagram
        to it needs `ah_attr`, `qp_num` and `qkey` of the event; the id can be closed then.

        For a queue pair that is not the id's own, of this library or another, the event is
        CONNECT_RESPONSE.  Then the program moves the queue pair to INIT once more, to RTR and to
        RTS, by `init_qp_attr`, and calls `establish`.  On iWARP the kernel does all of this, and
        the event is ESTABLISHED.  Such a queue pair is not moved when the connection ends.

        Args:
            param: Depths and retries; without meaning for datagrams.
            private_data: At most 56 bytes on InfiniBand and RoCE, 180 for datagrams; 255 on
                iWARP, or 251 if the peer is on software iWARP.
            timeout: Seconds; the kernel's own limit is about 98.
            qp_num: Number of a queue pair that is not the id's own, in INIT.

        Raises:
            TypeError, ValueError: Not a `ConnectionParameter`; more private data than the transport
                takes.  Nothing was sent, and the id can be used.
            ConnectionRejectedError: The peer refused; `private_data` holds what it sent.
            ConnectTimeoutError: The kernel got no answer (UNREACHABLE).
            TimeoutError: `timeout` has passed.
            OSError: EINVAL, the route is not resolved, or there is no queue pair (which datagrams
                do not need here).

        Cancellation: ends the wait; close the id then.
        """
        private_data = check_offer(param, private_data, timeout)
        offer: Offer = _NO_OFFER
        if self.is_datagram:
            check_room(private_data, SERVICE_REQUEST_ROOM, "a request of a datagram service")
            self._need_datagrams("rdma_connect")
        self._need("rdma_connect", Stage.ROUTE_RESOLVED)
        number = 0
        if not self.is_datagram:
            number = self._number_of_qp("rdma_connect", qp_num)
            self._check_room(private_data, REQUEST_ROOM, "a request to connect")
            offer = self._offer(param)
        return await self._connect(offer, private_data, timeout, number)

    def _number_of_qp(self, verb: str, qp_num: int | None) -> int:
        """The number of the id's queue pair, or of the queue pair that stands in for it."""
        if self.qp is not None:
            if qp_num is not None:
                msg = "qp_num is for an id without a queue pair of its own"
                raise ValueError(msg)
            return self.qp.num
        if qp_num is None:
            raise os_error(errno.EINVAL, verb, detail="(no queue pair)")
        return fitting("qp_num", qp_num, 24)

    async def _connect(
        self, offer: Offer, private_data: bytes, timeout: float | None, number: int
    ) -> ConnectionEvent:
        """`connect` with arguments that were checked: the numbers of parameter and queue pair."""
        # Software iWARP opens its TCP connection inside the call.
        context = self._context or self.context
        blocks = bool(number) and context is not None and context.is_iwarp
        answers = _ESTABLISHED if self.qp is not None or not number else _ANSWERED
        handle = self._require()

        def call() -> None:
            code = lib.aio_connect(handle, private_data, len(private_data), *offer, number)
            if code:
                check_minus_one(code, "rdma_connect")

        self.stage = _CONNECTING
        try:
            return await self._run(call, answers, timeout, in_thread=blocks)
        except BaseException as exc:
            if self.stage is Stage.CONNECTING:
                self.stage = Stage.FAILED
            if isinstance(exc, RdmaOSError):
                event = _REFUSED_IN_THE_CALL.get(exc.errno or 0)
                if event is not None:
                    raise cm_error(event, -(exc.errno or 0)) from exc
            raise

    async def accept(
        self,
        param: ConnectionParameter | None = None,
        *,
        private_data: bytes = b"",
        timeout: float | None = 10.0,
        qp: QueuePair | None = None,
        qp_num: int | None = None,
    ) -> ConnectionEvent:
        """Accept the request that made this id (`rdma_accept(3)`); return the ESTABLISHED event.

        Receives should be posted before: the peer may send at once.  A client of datagrams confirms
        nothing: then the event is made here, and the id can be closed.

        Args:
            param: Depths and retries; without meaning for datagrams.
            private_data: At most 196 bytes on InfiniBand and RoCE, 136 for datagrams; on iWARP as
                in `connect`.
            timeout: Seconds to wait for the confirmation.
            qp: For datagrams: the queue pair that is to serve the client, if not the id's own.
            qp_num: For connections: the number of a queue pair that is not the id's own, of this
                library or another.  The program has moved it to RTS by `init_qp_attr`; on iWARP
                only to INIT, and the kernel does the rest.

        Raises:
            TypeError, ValueError: Not a `ConnectionParameter`; more private data than the transport
                takes.  Nothing was sent, and the id can be used.
            ConnectionAbortedError: The peer has given up.
            ConnectTimeoutError, TimeoutError: The peer did not confirm.
            OSError: EINVAL, the id is not that of a request, or has no queue pair.

        Cancellation: ends the wait; close the id then.
        """
        private_data = check_offer(param, private_data, timeout)
        if self.is_datagram:
            return self._answer_service(private_data, qp)
        if qp is not None:
            msg = "a connection is served by the id's own queue pair, or by the one of qp_num"
            raise ValueError(msg)
        self._need("rdma_accept", Stage.REQUESTED)
        number = self._number_of_qp("rdma_accept", qp_num)
        self._check_room(private_data, ANSWER_ROOM, "an answer")
        offer = self._offer(param)
        if self.qp is not None:
            return await self._accept(offer, private_data, timeout)
        give = functools.partial(self._answer, number, private_data, offer, Stage.ACCEPTED)
        return await self._run(give, _ESTABLISHED, timeout)

    def _accept(
        self, offer: Offer, private_data: bytes, timeout: float | None
    ) -> Coroutine[Any, Any, ConnectionEvent]:
        """`accept` with arguments that were checked: the numbers of a parameter."""
        grant = functools.partial(self._grant, offer, private_data)
        return self._run(grant, _ESTABLISHED, timeout)

    def _grant(self, offer: Offer, private_data: bytes) -> None:
        qp = self._answering(self.qp)
        if not qp.pd.context.is_iwarp:
            self._move(_RTS, self.policy.granting(offer[0], offer[1]))
        self._answer(qp.num, private_data, offer, _ACCEPTED)

    def _answer_service(self, private_data: bytes, qp: QueuePair | None) -> ConnectionEvent:
        """`accept` for datagrams.  No event follows: the answer is not confirmed."""
        check_room(private_data, SERVICE_ANSWER_ROOM, "an answer of a datagram service")
        self._need_datagrams("rdma_accept")
        number = self._answering(qp or self.qp).num
        self._answer(number, private_data, _NO_OFFER, Stage.ANSWERED)
        return ConnectionEvent(self._channel, EventType.ESTABLISHED, 0, self)

    def _answering(self, qp: QueuePair | None) -> QueuePair:
        """The queue pair for an answer; refuses an answer that the id cannot give."""
        self._need("rdma_accept", _REQUESTED)
        if qp is None:
            raise os_error(errno.EINVAL, "rdma_accept", detail="(no queue pair)")
        qp._require()
        return qp

    def _answer(self, number: int, private_data: bytes, offer: Offer, stage: Stage) -> None:
        handle = self._require()
        if lib.aio_accept(handle, private_data, len(private_data), *offer, number):
            code = ffi.errno
            self.stage = Stage.FAILED
            # A client that gives up before it is accepted is reported by this failure only.
            if code == errno.EINVAL:
                raise os_error(errno.ECONNABORTED, "rdma_accept", detail=CLIENT_LEFT)
            raise os_error(code, "rdma_accept")
        self.stage = stage

    def init_qp_attr(self, state: QPState) -> QPChanges:
        """Return the attributes of a queue pair for its change to a state (`rdma_init_qp_attr(3)`).

        For a queue pair that is not the id's own; the id moves its own.  The connection manager
        proposes them, for `QueuePair.modify`, which takes them by name
        (``qp.modify(**cm_id.init_qp_attr(QPState.INIT))``), or for another library.

        The program may change its proposals, such as `min_rnr_timer` (0, which is 655 ms), and the
        accesses and retries that the peer has asked for.

        Args:
            state: INIT, from the time that the id is bound to a device; RTR and RTS, once there is
                an answer of the peer, or on the id of a request.

        Raises:
            ValueError: Another state.
            ConnectionAbortedError: The client whose request made this id has left.
            OSError: EINVAL, the id has no device or no peer yet.
        """
        if state not in (QPState.INIT, QPState.RTR, QPState.RTS):
            msg = f"attributes are proposed for INIT, RTR and RTS, not {state!r}"
            raise ValueError(msg)
        self._require()
        if self.context is None:
            detail = "(the id is bound to no device)"
            raise os_error(errno.EINVAL, "rdma_init_qp_attr", detail=detail)
        if state != QPState.INIT:
            # The kernel would propose the attributes of INIT for it.
            self._need("rdma_init_qp_attr", *_WITH_PATH)
        return proposal(self._require(), state, self.stage)

    def establish(self) -> None:
        """Confirm the connection of a queue pair that is not the id's own (`rdma_establish(3)`).

        To be called after CONNECT_RESPONSE, when the queue pair is in RTS; the peer then gets
        ESTABLISHED.

        Raises:
            OSError: EINVAL, `connect` has not returned CONNECT_RESPONSE.
        """
        self._need("rdma_establish", Stage.RESPONDED)
        check_minus_one(lib.rdma_establish(self._require()), "rdma_establish")
        self.stage = Stage.CONNECTED

    def _check_room(self, private_data: bytes, room: int, carrier: str) -> None:
        assert self.context is not None
        if not self.context.is_iwarp:
            check_room(private_data, room, carrier, " on InfiniBand and RoCE")

    def notify_established(self) -> None:
        """Report a message that came before ESTABLISHED (`rdma_notify(3)`).

        Without the report a lost confirmation would end the connection.  Usually the confirmation
        is about to come, and the report waits for it: after a report at the wrong moment,
        destroying the id takes 66 seconds.
        """
        if self.stage is _ACCEPTED and self._confirming is None:
            confirm = functools.partial(_confirm, weakref.ref(self))
            self._confirming = call_later(asyncio.get_running_loop(), _CONFIRMATION_S, confirm)

    def _confirm(self) -> None:
        if self.stage is Stage.ACCEPTED and not self.closed:
            lib.rdma_notify(self._require(), lib.IBV_EVENT_COMM_EST)

    def reject(self, private_data: bytes = b"") -> None:
        """Refuse the request that made this id (`rdma_reject(3)`); close the id afterwards.

        Args:
            private_data: Bytes for the peer's program.

        Raises:
            ValueError: More than 148 bytes, or 136 for datagrams.
            OSError: EINVAL, the id is not that of a request.
        """
        private_data = bytes(memoryview(private_data))
        check_room(private_data, REFUSAL_ROOM, "a refusal")
        if self.is_datagram:
            check_room(private_data, SERVICE_ANSWER_ROOM, "a refusal of a datagram service")
        self._need("rdma_reject", Stage.REQUESTED)
        data = ffi.new("uint8_t[]", private_data or b"\0")
        code = lib.rdma_reject(self._require(), data, len(private_data))
        check_minus_one(code, "rdma_reject")
        self.stage = Stage.DISCONNECTED

    async def disconnect(self, timeout: float = 2.0) -> None:
        """End the connection (`rdma_disconnect(3)`).

        Posted requests are flushed, and both sides get DISCONNECTED.

        Args:
            timeout: Seconds to wait for the peer's answer; without one the connection ends as well.

        Raises:
            OSError: EINVAL, the id was never connected; to stop connecting, cancel `connect`.

        Cancellation: ends the wait; the connection has ended.
        """
        check_seconds("timeout", timeout, zero=True, none=False)
        if self.stage is Stage.DISCONNECTED:
            return
        self._need("rdma_disconnect", Stage.CONNECTED, Stage.ACCEPTED)
        try:
            await self._run(self.start_disconnect, _DISCONNECTED, timeout)
        except TimeoutError:
            self.stage = Stage.DISCONNECTED

    def start_disconnect(self) -> None:
        """Make the call of `disconnect`, without the wait."""
        # Where connecting blocks in its thread, the kernel would have this call wait for it.
        self._need("rdma_disconnect", Stage.CONNECTED, Stage.ACCEPTED, Stage.DISCONNECTED)
        code = lib.rdma_disconnect(self._require())
        if self.qp is not None:
            self.qp.to_error()
        check_minus_one(code, "rdma_disconnect")

    # Multicast

    def _need_datagrams(self, verb: str) -> None:
        self._require()
        if not self.is_datagram:
            raise os_error(errno.EINVAL, verb, detail="(not an id for datagrams: PortSpace.UDP)")
        if self.context is not None and self.context.is_iwarp:
            raise os_error(errno.EOPNOTSUPP, verb, detail="(iWARP has no datagrams)")

    @property
    def groups(self) -> tuple[str, ...]:
        """Addresses of the multicast groups that it is a member of."""
        return () if self._memberships is None else self._memberships.hosts

    async def join_multicast(
        self, group: str | Address, *, send_only: bool = False, timeout: float = 5.0
    ) -> ConnectionEvent:
        """Join a multicast group (`rdma_join_multicast_ex(3)`); return the MULTICAST_JOIN event.

        A datagram to the group needs its `ah_attr`, `qp_num` (0xFFFFFF) and `qkey`.  Unless
        `send_only`, the id's queue pair then receives all datagrams to the group, its own included.

        Args:
            group: Numeric address, alone or with a port, which is ignored.
            send_only: Become a member that only sends; the id then needs no queue pair.
            timeout: Seconds.

        Raises:
            ValueError: Not a multicast address.
            OSError: EINVAL, the id is not bound to a device by `bind_addr` or `resolve_addr`, or
                has gone on to a connection, or has no queue pair; EADDRINUSE, it is a member
                already; NotSupportedError on iWARP, and on RoCE v2 for IPv6 groups.
            ConnectionFailedError: The network refused.
            ConnectTimeoutError: It did not answer.

        Cancellation: the group is left again.
        """
        host = group_host(group)
        self._need_datagrams("rdma_join_multicast")
        self._need("rdma_join_multicast", Stage.BOUND, Stage.ADDRESS_RESOLVED)
        if self.context is None:
            refuse_join(errno.EINVAL, "the id is bound to no device")
        if self.qp is None and not send_only:
            refuse_join(errno.EINVAL, "no queue pair")
        if self._memberships is None:
            self._memberships = Memberships()
        run = functools.partial(self._run, timeout=timeout)
        receiver = None if send_only else self.qp
        return await self._memberships.join(self, run, host, receiver, timeout)

    async def leave_multicast(self, group: str | Address, *, timeout: float = 5.0) -> None:
        """Leave a multicast group (`rdma_leave_multicast(3)`).

        From the call on, the queue pair receives nothing that is sent to the group.

        Args:
            group: As in `join_multicast`.
            timeout: Seconds to wait; leaving goes on afterwards.

        Raises:
            ValueError: Not a multicast address.
            OSError: EADDRNOTAVAIL, the id is not a member.
            RdmaOSError: Joining is still under way (EBUSY).
            TimeoutError: It was not left in time.

        Cancellation: ends the wait; the group is left all the same.
        """
        host = group_host(group)
        self._need_datagrams("rdma_leave_multicast")
        await (self._memberships or Memberships()).leave(self, host, timeout)

    # Events and steps

    def _on_event(self, event: ConnectionEvent) -> bool:
        """Called by the channel for each event of this id; True if it was taken."""
        kind = event.type
        if kind is _ESTABLISHED_EVENT:
            datagram = event.ah_attr is not None
            if self.stage is _CONNECTING and not datagram:
                # The answer on iWARP, whose kernel gives a client the two depths exchanged.
                own_reads = event.responder_resources
                event.responder_resources = event.initiator_depth
                event.initiator_depth = own_reads
            self.stage = Stage.SERVICE_RESOLVED if datagram else _CONNECTED
            self._stop_confirming()
        elif kind is _RESPONSE_EVENT:
            self._on_response(event)
        elif kind in _LEAVING:
            if kind is EventType.DEVICE_REMOVAL and self.qp is not None:
                self.qp._broken(cm_error(kind.name, event.status))
            self._peer_left()
        taken = self._sink(event) if self._sink is not None else False
        return self._step.answer(event) or taken

    def _on_response(self, event: ConnectionEvent) -> None:
        """Finish the handshake; the event becomes ESTABLISHED or CONNECT_ERROR in place."""
        if self.qp is None:
            self.stage = Stage.RESPONDED  # the program finishes it, by `establish`
            return
        try:
            self._move(_RTS, self.policy)
            check_minus_one(lib.rdma_establish(self._require()), "rdma_establish")
        except OSError as exc:
            event.type = EventType.CONNECT_ERROR
            event.status = -(exc.errno or errno.EIO)
        else:
            event.type = _ESTABLISHED_EVENT
            self.stage = _CONNECTED

    def _peer_left(self) -> None:
        if self.stage is Stage.CONNECTED or self.stage is Stage.ACCEPTED:
            # Answers the peer, whose own DISCONNECTED waits for it.
            lib.rdma_disconnect(self._handle)
        self.stage = Stage.DISCONNECTED
        # The event may have overtaken completions: a connection of messages ends its queue pair
        # itself, a moment later.
        if self.qp is not None and not self.qp._posted_in_c:
            try:
                self.qp.to_error()
            except OSError as exc:
                _log.debug("queue pair %d to error: %s", self.qp.num, exc)

    def _run(
        self,
        call: Callable[[], None],
        answers: frozenset[EventType],
        timeout: float | None,
        *,
        in_thread: bool = False,
    ) -> Coroutine[Any, Any, ConnectionEvent]:
        """Make the call and await its answer; `in_thread` for a call that can block."""
        self._require()
        loop = self._channel._attach()
        return self._step.run(loop, call, answers, timeout, blocks=self if in_thread else None)

    def _need(self, verb: str, *stages: Stage) -> None:
        self._require()
        if self.stage not in stages:
            # Not `os_error`: its hint is for calls that the kernel refuses.
            text = f"{verb}: EINVAL: the connection id is {self.stage.value}"
            raise errno_error(errno.EINVAL, text, _REMEDIES.get(self.stage, ""))

    def migrate(self, channel: EventChannel) -> None:
        """Move the id and its events to another channel (`rdma_migrate_id(3)`).

        Events that the old channel has not read yet move, too; those that it has read, but no
        reader has fetched, stay there.  A step under way goes on.

        A listening id cannot move: requests under way would stay behind.

        Raises:
            TypeError: Not an event channel.
            RdmaOSError: Events of the id are not acknowledged (EBUSY).
            ResourceClosedError: The id or the channel is closed.
            OSError: EINVAL, the id is listening.
        """
        _check_channel(channel)
        self._require()
        channel._require()
        self._refuse_with_debt()
        if self.stage is Stage.LISTENING:
            raise os_error(errno.EINVAL, "rdma_migrate_id", detail="(the id is listening)")
        if channel is self._channel:
            return
        channel._take_over(self._handle, self._channel)
        old, self._channel = self._channel, channel
        old._ids.pop(self._token, None)
        channel._ids[self._token] = weakref.ref(self)
        channel._retain(self)
        self._parents = (channel,)
        old._let_go(self)

    # Life

    def _refuse_with_debt(self) -> None:
        if self._unacked:
            msg = f"{self._unacked} events of the connection id are not acknowledged"
            raise busy_error(msg)

    @property
    def _home(self) -> asyncio.AbstractEventLoop | None:
        return self._channel._home

    def _before_close(self) -> None:
        self._refuse_with_debt()

    def _before_destroy(self) -> None:
        if self.stage in (Stage.CONNECTING, Stage.ACCEPTED, Stage.CONNECTED):
            remedy = _REMEDIES.get(self.stage, "disconnect it first")
            msg = f"the connection id is {self.stage.value}: {remedy}"
            raise busy_error(msg)

    def _stop_confirming(self) -> None:
        if self._confirming is not None:
            self._confirming.cancel()

    def _on_close(self) -> None:
        self._stop_confirming()
        if self._memberships is not None:
            self._memberships.detach()
        self._channel._ids.pop(self._token, None)
        self._sink = None
        self._step.fail(ResourceClosedError("the connection id was closed"))
        self._channel._drop(self)

    def _destroy(self, handle: Any) -> None:
        if self._memberships is not None:
            self._memberships.leave_all(handle)
        check_minus_one(lib.rdma_destroy_id(handle), "rdma_destroy_id")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._state.value}: {self.stage.value}>"
