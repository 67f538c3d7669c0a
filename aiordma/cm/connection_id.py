"""ConnectionId: the steps from an address to a connection and to its end.

Each step is a C call that returns at once and an event that tells how it ended; cm.identifier
brings the two together.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import weakref

from aiordma._ffi import ffi, lib
from aiordma._ffi.check import check_minus_one
from aiordma.arguments import check_seconds, payload_of, whole
from aiordma.cm.address import Address, is_local, to_sockaddr
from aiordma.cm.connection_event import ConnectionEvent
from aiordma.cm.connection_parameter import ConnectionParameter
from aiordma.cm.datagram import Datagrams
from aiordma.cm.enums import EventType
from aiordma.cm.identifier import _RTS, Stage
from aiordma.cm.options import Options
from aiordma.cm.qp_transition import CLIENT_LEFT
from aiordma.cm.resolving import Resolving
from aiordma.errors import RdmaOSError, cm_error, os_error
from aiordma.loop.timers import call_later
from aiordma.verbs.context import Context
from aiordma.verbs.cq import CompletionQueue
from aiordma.verbs.pd import ProtectionDomain
from aiordma.verbs.qp import QPInitAttr, QueuePair
from aiordma.verbs.qp_attr import check_init
from aiordma.verbs.resource import Resource

__all__ = ["ANSWER_ROOM", "REQUEST_ROOM", "ConnectionId", "Stage"]

_MAX_PRIVATE_DATA = 255
#: Seconds in which a confirmation may come after the message that shows that it was sent.
_CONFIRMATION_S = 0.25
#: Private data of a request and of its answer on InfiniBand and RoCE, in bytes.
REQUEST_ROOM = 56
ANSWER_ROOM = 196
_ESTABLISHED = frozenset({EventType.ESTABLISHED})
_DISCONNECTED = frozenset({EventType.DISCONNECTED})
# What iWARP returns from the call and InfiniBand reports by an event.
_REFUSED_IN_THE_CALL = {
    errno.ECONNREFUSED: "REJECTED",
    errno.EHOSTUNREACH: "UNREACHABLE",
}


def _check_offer(
    param: ConnectionParameter | None, private_data: bytes, timeout: float | None
) -> bytes:
    """Refuse what is no offer, before anything is changed; the private data as C takes it."""
    if param is not None and not isinstance(param, ConnectionParameter):
        msg = f"not a ConnectionParameter: {param!r}"
        raise TypeError(msg)
    check_seconds("timeout", timeout, zero=True)
    return payload_of("private data", private_data, _MAX_PRIVATE_DATA)


def _check_room(private_data: bytes, context: Context, room: int, what: str) -> None:
    """Refuse private data that the transport does not carry, before anything is changed."""
    if len(private_data) > room and not context.is_iwarp:
        msg = (
            f"{what} carries at most {room} bytes of private data on InfiniBand and RoCE, "
            f"not {len(private_data)}"
        )
        raise ValueError(msg)


def _confirm(cm_id: weakref.ref[ConnectionId]) -> None:
    if (alive := cm_id()) is not None:
        alive._confirm()


class ConnectionId(Resolving, Options, Datagrams):
    """An identifier of the connection manager (`rdma_create_id(3)`).

    Args:
        channel: Where its events arrive.
        port_space: TCP for connections, UDP for datagrams.

    Raises:
        TypeError: Not an event channel, or not a port space.
        OSError: No RDMA device, or out of resources.

    Attributes:
        stage: How far it has come.
        policy: What the queue pair's transitions apply; set before `connect` or `accept`.
        qp: The queue pair after `create_qp`, else None.
    """

    __slots__ = ()

    # Addresses

    def bind_addr(self, address: Address) -> None:
        """Bind to a numeric local (address, port) (`rdma_bind_addr(3)`).

        A specific address binds to its device too; a wildcard does not.  Port 0 lets the
        kernel choose.

        Raises:
            ValueError: The address is not numeric, or the port is out of range.
            OSError: EADDRINUSE, the port is taken; EADDRNOTAVAIL, it is no address of this
                machine; ENODEV, no RDMA device has it.
        """
        sockaddr = ffi.cast("struct sockaddr *", keep := to_sockaddr(address))
        if lib.rdma_bind_addr(self._require(), sockaddr):
            code = ffi.errno
            # What the kernel says, too, where one of the two addresses is a wildcard.
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
            OSError: Not bound, or the port is taken.
        """
        backlog = whole("backlog", backlog)
        if self.is_datagram:
            self._need_datagrams("rdma_listen")
        self._channel._attach()
        self._channel._expect_requests()
        code = lib.rdma_listen(self._require(), backlog if backlog > 0 else 50)
        check_minus_one(code, "rdma_listen")
        self.stage = Stage.LISTENING

    # Queue pair

    def create_qp(
        self,
        pd: ProtectionDomain,
        attr: QPInitAttr,
        uses: tuple[Resource, ...] = (),
        cq: CompletionQueue | None = None,
    ) -> QueuePair:
        """Make the id's queue pair, ready for receives (`ibv_create_qp(3)`).

        Args:
            pd: Protection domain, on the id's device.
            attr: Sizes, completion queues, type.
            uses: Resources that outlive it, whatever is closed first; so does the id.
            cq: Where all of it completes, if `attr` does not say.

        Raises:
            TypeError: Not a protection domain, or not a `QPInitAttr`.
            ConnectionAbortedError: The client whose request made this id has left.
            OSError: EINVAL if the id has one already, is bound to no device, or beyond limits.
        """
        self._require()
        check_init(pd, attr, cq)
        if self.qp is not None:
            raise os_error(errno.EINVAL, "rdma_create_qp", detail="(the id has a queue pair)")
        if (self._context or self.context) is not pd.context:
            raise os_error(errno.EINVAL, "rdma_create_qp", detail="(not the id's device)")
        self._check_qp_type(attr)
        qp = QueuePair(pd, attr, (self, *uses), cq, checked=True)
        self.qp = qp
        try:
            self._start_qp(qp)
        except BaseException:
            self.qp = None
            qp.close()
            raise
        return qp

    def destroy_qp(self) -> None:
        """Destroy the queue pair (`ibv_destroy_qp(3)`); after it the id can only be closed."""
        self._require()
        if self.qp is None:
            raise os_error(errno.EINVAL, "rdma_destroy_qp", detail="(the id has no queue pair)")
        self.qp.close()
        self.stage = Stage.FAILED

    # Connection

    def _offer(self, param: ConnectionParameter | None) -> tuple[int, int, bool, int, int]:
        context = self._context or self.context
        assert context is not None
        return (param or ConnectionParameter())._numbers(context.attributes)

    async def connect(
        self,
        param: ConnectionParameter | None = None,
        *,
        private_data: bytes = b"",
        timeout: float | None = 10.0,
    ) -> ConnectionEvent:
        """Connect to the resolved peer (`rdma_connect(3)`); the ESTABLISHED event.

        For datagrams: find out which queue pair serves the resolved address and port.  The event's
        `ah_attr`, `qp_num` and `qkey` are what a datagram to it needs; the id can be closed then.

        Args:
            param: Depths and retries; of no use for datagrams.
            private_data: At most 56 bytes on InfiniBand and RoCE, 180 for datagrams; 255 on
                iWARP, of which peers on software iWARP take 251.
            timeout: Seconds; the kernel's own limit is about 98.

        Raises:
            TypeError, ValueError: Not a `ConnectionParameter`; more private data than the transport
                takes.  Nothing was sent, and the id can be used.
            ConnectionRejectedError: The peer said no; `private_data` holds its words.
            ConnectTimeoutError: The event UNREACHABLE.
            TimeoutError: `timeout` has passed.
            OSError: EINVAL before the route is resolved or without a queue pair (which datagrams
                do not need here).

        Cancellation: ends the wait; close the id then.
        """
        private_data = _check_offer(param, private_data, timeout)
        if self.is_datagram:
            return await self._ask_service(private_data, timeout)
        self._need("rdma_connect", Stage.ROUTE_RESOLVED)
        if self.qp is None:
            raise os_error(errno.EINVAL, "rdma_connect", detail="(no queue pair)")
        assert self.context is not None
        _check_room(private_data, self.context, REQUEST_ROOM, "a request to connect")
        offer = self._offer(param)
        handle, number = self._require(), self.qp.num

        def call() -> None:
            code = lib.aio_connect(handle, private_data, len(private_data), *offer, number)
            check_minus_one(code, "rdma_connect")

        self.stage = Stage.CONNECTING
        try:
            # Software iWARP opens its TCP connection inside the call.
            return await self._step(call, _ESTABLISHED, timeout, in_thread=self.context.is_iwarp)
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
    ) -> ConnectionEvent:
        """Accept the request that made this id (`rdma_accept(3)`); the ESTABLISHED event.

        Receives should be posted before: the peer may send at once.  A datagram's client confirms
        nothing: the event is made here then, and the id can be closed.

        Args:
            param: Depths and retries; of no use for datagrams.
            private_data: At most 196 bytes on InfiniBand and RoCE, 136 for datagrams; on iWARP as
                in `connect`.
            timeout: Seconds to wait for the confirmation.
            qp: For datagrams: the queue pair that is to serve the client, if not the id's own.

        Raises:
            TypeError, ValueError: Not a `ConnectionParameter`; more private data than the transport
                takes.  Nothing was sent, and the id can be used.
            ConnectionAbortedError: The peer has given up.
            ConnectTimeoutError, TimeoutError: The peer did not confirm.
            OSError: EINVAL if the id is no request, or has no queue pair.

        Cancellation: ends the wait; close the id then.
        """
        private_data = _check_offer(param, private_data, timeout)
        if self.is_datagram:
            return self._answer_service(private_data, qp)
        if qp is not None:
            msg = "a connection is served by the id's own queue pair"
            raise ValueError(msg)
        return await self._step(lambda: self._accept(param, private_data), _ESTABLISHED, timeout)

    def _accept(self, param: ConnectionParameter | None, private_data: bytes) -> None:
        self._need("rdma_accept", Stage.REQUESTED)
        if self.qp is None:
            raise os_error(errno.EINVAL, "rdma_accept", detail="(no queue pair)")
        assert self.context is not None
        _check_room(private_data, self.context, ANSWER_ROOM, "an answer")
        offer = self._offer(param)
        if not self.context.is_iwarp:
            self._move(_RTS, self.policy.granting(offer[0], offer[1]))
        data, handle = private_data, self._require()
        if lib.aio_accept(handle, data, len(data), *offer, self.qp.num):
            code = ffi.errno
            self.stage = Stage.FAILED
            # A client that gives up before it is accepted is reported by this failure only.
            if code == errno.EINVAL:
                raise os_error(errno.ECONNABORTED, "rdma_accept", detail=CLIENT_LEFT)
            raise os_error(code, "rdma_accept")
        self.stage = Stage.ACCEPTED

    def notify_established(self) -> None:
        """A message arrived before ESTABLISHED did: tell the connection manager (`rdma_notify(3)`).

        Without it a lost confirmation would end the connection.  Mostly it is not lost but about to
        come, and so it is waited for: told between the arrival of a confirmation and its
        processing, and with a disconnection behind that, the kernel goes on repeating its answer,
        and destroying the id takes 66 seconds.
        """
        if self.stage is Stage.ACCEPTED and self._confirming is None:
            confirm = functools.partial(_confirm, weakref.ref(self))
            self._confirming = call_later(asyncio.get_running_loop(), _CONFIRMATION_S, confirm)

    def _confirm(self) -> None:
        if self.stage is Stage.ACCEPTED and not self.closed:
            lib.rdma_notify(self._require(), lib.IBV_EVENT_COMM_EST)

    def reject(self, private_data: bytes = b"") -> None:
        """Refuse the request that made this id (`rdma_reject(3)`); close the id after it.

        Args:
            private_data: Bytes for the peer's program.

        Raises:
            ValueError: More than 148 bytes, or 136 for datagrams.
            OSError: EINVAL if the id is no request.
        """
        private_data = bytes(memoryview(private_data))
        if len(private_data) > 148:
            msg = f"a refusal carries at most 148 bytes of private data, not {len(private_data)}"
            raise ValueError(msg)
        self._check_refusal(private_data)
        self._need("rdma_reject", Stage.REQUESTED)
        data = ffi.new("uint8_t[]", private_data or b"\0")
        code = lib.rdma_reject(self._require(), data, len(private_data))
        check_minus_one(code, "rdma_reject")
        self.stage = Stage.DISCONNECTED

    async def disconnect(self, timeout: float = 2.0) -> None:
        """End the connection (`rdma_disconnect(3)`).

        What is posted is flushed, and both sides get DISCONNECTED.

        Args:
            timeout: Seconds to wait for the peer's answer; after it the connection counts as
                ended all the same.

        Raises:
            OSError: EINVAL if it was never connected; an id that is connecting is left by
                canceling `connect`.

        Cancellation: ends the wait; the connection is down.
        """
        check_seconds("timeout", timeout, zero=True, none=False)
        if self.stage is Stage.DISCONNECTED:
            return
        self._need("rdma_disconnect", Stage.CONNECTED, Stage.ACCEPTED)
        try:
            await self._step(self.start_disconnect, _DISCONNECTED, timeout)
        except TimeoutError:
            self.stage = Stage.DISCONNECTED

    def start_disconnect(self) -> None:
        """The call of `disconnect` without the wait."""
        # Where connecting blocks in its thread, the kernel would have this call wait for it.
        self._need("rdma_disconnect", Stage.CONNECTED, Stage.ACCEPTED, Stage.DISCONNECTED)
        code = lib.rdma_disconnect(self._require())
        if self.qp is not None:
            self.qp.to_error()
        check_minus_one(code, "rdma_disconnect")
