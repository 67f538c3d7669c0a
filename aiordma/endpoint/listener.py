"""listen(): a Listener, its requests (ConnectRequest) and its connections.

Handshakes are completed in the background, whether or not a task waits in `accept()`:
link/acceptor.py.  `requests()` leaves the answers to the program, which has `handshake_timeout_s`
for each.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import sys
import warnings
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from types import EllipsisType
from typing import Any, Self

from aiordma.arguments import check_kind, payload_of, whole
from aiordma.cm.address import Address, check_port
from aiordma.cm.connection_id import ANSWER_ROOM, Stage
from aiordma.cm.connection_parameter import Offer
from aiordma.cm.enums import EventType
from aiordma.endpoint.config import DEFAULTS, ConnectionConfig, plan_of
from aiordma.endpoint.connect import Opening
from aiordma.endpoint.connection import Connection
from aiordma.endpoint.link import Link
from aiordma.endpoint.wire import HELLO_SIZE, Hello
from aiordma.errors import (
    ConnectionLostError,
    ConnectTimeoutError,
    ProtocolError,
    ResourceBusyError,
    ResourceClosedError,
    cm_error,
)
from aiordma.link.acceptor import Acceptor, Request
from aiordma.link.dialing import warm_up
from aiordma.link.limits import DEFAULT_LIMITS, ListenerLimits
from aiordma.link.listening import choose, require_device, resolve, wait_for_port
from aiordma.link.refusal import RefusalReason, seal_refusal
from aiordma.link.source import peer_text
from aiordma.link.tally import Operation, peer_attributes
from aiordma.loop import fork, registry
from aiordma.loop.limit import PatientLimit
from aiordma.loop.running import check_loop, check_thread, from_finalizer
from aiordma.loop.steps import Steps
from aiordma.loop.uncopied import Uncopied
from aiordma.loop.wait_line import WaitLine
from aiordma.memory.byte_budget import PROCESS_BUDGET, ByteBudget
from aiordma.memory.shared import Memory, check_shared
from aiordma.requests.budget import RequestBudget

__all__ = ["ConnectRequest", "Listener", "listen"]

_BACKLOG = 256


def listen(
    host: str | None,
    port: int,
    *,
    backlog: int = _BACKLOG,
    config: ConnectionConfig | None = None,
    memory: Memory | None = None,
    ipv6_only: bool = False,
    limits: ListenerLimits | None = None,
) -> Opening[Listener]:
    """Listen for connections; the result is awaited, or used with `async with`.

    Two listeners never share an address and port, as TCP's SO_REUSEPORT lets them; and a listener
    can listen again at once where another has just ended, without the help of an option.

    Args:
        host: Local name or address, IPv4 or IPv6 (link-local with its interface, as in
            `fe80::1%eth0`); None, "" or "::" for all, "0.0.0.0" for all of IPv4.  With a name,
            all its addresses that an RDMA device has.
        port: 0 to 65535; 0 lets the kernel choose, see `Listener.port`.
        backlog: Requests and connections that may wait for the program; 0 or less means 256.
        config: Settings of the accepted connections.
        memory: Registered memory that the accepted connections share, in one protection domain.
        ipv6_only: Take IPv6 clients alone.
        limits: Limits of the connections and memory that clients may hold; see docs/limits.md.

    Raises:
        TypeError, ValueError: An argument is invalid; raised by the call, before it is awaited.
        LibraryMissingError, DeviceNotFoundError: RDMA is not available here, or no RDMA device has
            the address; seldom has a device an address of loopback ("localhost").
        HostNotFoundError: The name does not resolve.
        TimeoutError: It does not within `config.connect_timeout_s`.
        OSError: The port is taken (EADDRINUSE).

    Cancellation: the listener is closed.
    """
    return Opening(
        opener(
            host, port, backlog=backlog, config=config, memory=memory, ipv6_only=ipv6_only,
            limits=limits,
        )(),
        "listen",
    )  # fmt: skip


def opener(
    host: str | None,
    port: int,
    *,
    backlog: int,
    config: ConnectionConfig | None,
    memory: Memory | None,
    ipv6_only: bool,
    limits: ListenerLimits | None,
) -> Callable[[], Coroutine[Any, Any, Listener]]:
    """Check the arguments of `listen`; return the function that opens the listener.

    A coroutine of it that was made and not awaited would warn beside that of the caller.

    Raises:
        TypeError, ValueError: An argument is invalid.
    """
    check_kind("host", host, str)
    check_port(port)
    backlog = whole("backlog", backlog)
    check_kind("config", config, ConnectionConfig)
    check_shared(memory)
    config = config or DEFAULTS

    async def open_() -> Listener:
        await warm_up()
        addresses = await resolve(host, port, config.connect_timeout_s)
        addresses = choose(addresses, ipv6_only=ipv6_only)
        addresses = await require_device(addresses, config.connect_timeout_s)
        await wait_for_port(addresses, config.connect_timeout_s)
        return Listener(
            addresses,
            backlog if backlog > 0 else _BACKLOG,
            config,
            limits or DEFAULT_LIMITS,
            memory,
        )

    return open_


class Listener(Uncopied):
    """Accepts connections; made by `listen`.

    Attributes:
        config: Settings of the accepted connections.
        limits: Limits of the connections and memory that clients may hold.
        memory: Registered memory that the accepted connections share, or None.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        backlog: int,
        config: ConnectionConfig,
        limits: ListenerLimits,
        memory: Memory | None = None,
    ) -> None:
        self.config = config
        self.limits = limits
        self.memory = memory
        self._budget = ByteBudget(limits.max_large_message_bytes, PROCESS_BUDGET)
        self._request_budget = RequestBudget(limits.request_bytes)
        self._pending: deque[ConnectRequest] = deque()
        self._ready: deque[Connection] = deque()
        self._waiters: WaitLine[None] = WaitLine()
        # The oldest first: they are closed in this order.
        self._clients: weakref.WeakKeyDictionary[Connection, None] = weakref.WeakKeyDictionary()
        self._manual = False  # the program answers the requests
        self._device_removed = False
        self._loop = asyncio.get_running_loop()
        self._acceptor = Acceptor(self, addresses, backlog, limits, plan_of(config).pinned)
        fork.guard_public(self)

    @property
    def refused(self) -> int:
        """Requests that the library refused by itself."""
        return self._acceptor.refused

    @property
    def dropped(self) -> int:
        """Clients that were dropped in the middle of their handshake because others waited."""
        return self._acceptor.dropped

    # Where

    @property
    def sockname(self) -> Address:
        """Local (address, port); the first, if there are several."""
        return self._acceptor.addresses[0]

    @property
    def socknames(self) -> list[Address]:
        """All local (address, port) pairs; the port is the same."""
        return list(self._acceptor.addresses)

    @property
    def port(self) -> int:
        """Local port."""
        return self.sockname[1]

    # Connections

    @property
    def connections(self) -> frozenset[Connection]:
        """The connections of this listener that are not closed, accepted by the program or not."""
        return frozenset(self._open())

    def _open(self) -> list[Connection]:
        return [each for each in self._clients if not each._link.closed]

    def close_clients(self) -> None:
        """Begin to close all connections, as `Connection.close` does; new clients still come.

        Raises:
            RuntimeError: The listener's event loop runs in another thread; nothing was done.
        """
        check_thread(self._loop, "listener")
        for connection in self._open():
            connection._begin_close()

    def abort_clients(self) -> None:
        """End all connections at once, as `Connection.abort` does.

        Raises:
            RuntimeError: The listener's event loop runs in another thread; nothing was done.
        """
        check_thread(self._loop, "listener")
        for connection in self._open():
            connection.abort()

    # From the acceptor

    @property
    def _unaccepted(self) -> int:
        return len(self._pending) + len(self._ready)

    def _examine(self, request: Request) -> tuple[RefusalReason, str] | None:
        if self.config.raw:
            return None
        try:
            request.greeting = Hello.parse(request.event.private_data)
        except ProtocolError as exc:
            return RefusalReason.VERSION, str(exc)
        if request.greeting is None:
            return RefusalReason.NOT_AIORDMA, "it is no client of messages"
        return None

    def _take(self, request: Request) -> bool:
        if self._manual:
            pending = ConnectRequest(self, request)
            self._pending.append(pending)
            pending._limit(self.config.handshake_timeout_s)
            self._waiters.grant(None)
        return self._manual

    def _accept(self, request: Request) -> Coroutine[Any, Any, Connection]:
        request.answered = True
        return _accepted(self, request, b"", self.config, self.memory)

    async def _made(self, connection: Connection, _: Request) -> None:
        if self._acceptor.closed or self._manual:
            connection.abort()
            return
        self._ready.append(connection)
        self._waiters.grant(None)

    def _removed(self) -> None:
        self._device_removed = True
        self.close()

    # To the program

    async def _wait(self, queue: deque[Any]) -> Any:
        check_loop(self._loop, "listener")
        while not queue:
            if self._device_removed:
                raise cm_error(EventType.DEVICE_REMOVAL.name, 0)
            if self._acceptor.closed:
                raise ResourceClosedError(errno.ECONNABORTED, "the listener is closed")
            # A loop refers to a task that waits for a socket.  Mostly nothing refers to this task.
            task = asyncio.current_task()
            registry.keep(task, self._loop)
            try:
                await self._waiters.wait()
            finally:
                registry.let_go(task, self._loop)
                del task  # it keeps its error, whose traceback has this frame: a cycle
        item = queue.popleft()
        if queue:
            self._waiters.grant(None)
        return item

    async def accept(self) -> Connection:
        """The next connection whose handshake is complete.

        Raises:
            ResourceClosedError: The listener was closed.
            DeviceRemovedError: The RDMA devices of all its addresses were removed.
            RuntimeError: `requests()` was called: the program answers the requests itself; or this
                is not the listener's event loop.

        Cancellation: no connection is lost.
        """
        if self._manual:
            msg = "this listener's requests are answered through requests()"
            raise RuntimeError(msg)
        connection: Connection = await self._wait(self._ready)
        return connection

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Connection:
        """Connections until the listener is closed; raises when its device is removed."""
        try:
            return await self.accept()
        except ResourceClosedError:
            raise StopAsyncIteration from None

    def requests(self) -> AsyncIterator[ConnectRequest]:
        """Requests to be answered by the program, until the listener is closed.

        Raises DeviceRemovedError when the RDMA devices of all its addresses were removed.

        A request that is not answered within `config.handshake_timeout_s` is refused.  A client may
        be gone when it is answered: `accept()` raises an RdmaError then, which is no reason to end.
        From this call on nothing is accepted unseen; a connection that was accepted before it, and
        not yet taken by `accept()`, is dropped.

        Raises:
            RuntimeError: The listener's event loop runs in another thread.
        """
        check_thread(self._loop, "listener")
        self._manual = True
        self._acceptor.stop_handshakes()
        while self._ready:
            self._ready.popleft().abort()
        return Steps(lambda: self._wait(self._pending))

    # End

    def close(self) -> None:
        """Stop listening; refuse clients that wait.  Accepted connections go on.  Idempotent.

        Raises:
            RuntimeError: The listener's event loop runs in another thread; nothing was done.
        """
        check_thread(self._loop, "listener")
        self._acceptor.close()
        while self._pending:
            self._pending.popleft()._refuse(RefusalReason.BUSY, "the listener was closed")
        while self._ready:
            self._ready.popleft().abort()
        self._waiters.grant_all(None)

    async def wait_closed(self) -> None:
        """Wait until the port is free again.  Cancellation: ends the wait.

        A port that the kernel refuses to free, as it does once the process has changed its user, is
        in the log, and free when the process ends.
        """
        await self._acceptor.wait_closed()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.close()
        await self.wait_closed()

    def _seen(self) -> dict[str, Any]:
        """The listener as `aiordma.metrics` shows it; in any thread, without a call of C."""
        return {
            "kind": "messages",
            "state": "closed" if self._acceptor.closed else "listening",
            "unaccepted": self._unaccepted,
            **self._acceptor.seen(),
            "large_message_bytes": self._budget.used,
            "request_bytes": self._request_budget.used,
        }

    def __repr__(self) -> str:
        if self._device_removed:
            return "<Listener closed, cause=its RDMA device was removed>"
        if self._acceptor.closed:
            return "<Listener closed>"
        where = f"{self.sockname[0]} port {self.sockname[1]}"
        return f"<Listener {where}, {self._acceptor.ledger.connections} connections>"

    def __del__(
        self, _warn: Callable[..., None] = warnings.warn, _gone: Any = sys.is_finalizing
    ) -> None:
        acceptor = getattr(self, "_acceptor", None)
        if acceptor is None or acceptor.closed or _gone():
            return
        try:
            _warn(f"unclosed {self!r}", ResourceWarning, source=self, stacklevel=1)
        finally:
            from_finalizer(self._loop, self.close)


class ConnectRequest(Uncopied):
    """A request to connect, from `Listener.requests()`; answer it once, by accept or reject.

    Attributes:
        peername: The client's (address, port).
        sockname: The (address, port) that it asked for.
        hello: The client's half of the handshake; None for a raw listener.
    """

    def __init__(self, listener: Listener, request: Request) -> None:
        self._listener = listener
        self._request = request
        self._timer: asyncio.TimerHandle | None = None
        self.hello: Hello | None = request.greeting
        self.peername: Address | None = request.peername
        self.sockname: Address | None = request.sockname
        fork.guard_public(self)

    @property
    def private_data(self) -> bytes:
        """Bytes that the client's program sent along."""
        return self._request.event.private_data if self.hello is None else self.hello.user_data

    def _limit(self, seconds: float) -> None:
        """Refuse the client if the program has not answered after so many seconds."""
        self._timer = self._listener._loop.call_later(
            seconds, self._refuse, RefusalReason.TIMEOUT, "it was not answered in time"
        )

    def _answer(self) -> None:
        if self._request.answered:
            msg = "the request was answered already"
            raise ResourceBusyError(errno.EALREADY, msg)
        self._request.answered = True
        self._settle()

    def _refuse(self, reason: RefusalReason, why: str) -> None:
        """Refuse for a reason of the library, and not of the program."""
        self._settle()
        self._request.refuse(reason, why)

    def _settle(self) -> None:
        """Take the request from those that the program has to answer."""
        pending = self._listener._pending
        if self in pending:
            pending.remove(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def accept(
        self,
        private_data: bytes = b"",
        *,
        config: ConnectionConfig | None = None,
        memory: Memory | EllipsisType | None = ...,
    ) -> Connection:
        """Accept; the connection once the client has confirmed.

        Args:
            private_data: Bytes for the client's program, at most 176 (196 with `config.raw`).
            config: Settings instead of the listener's; `raw` cannot differ.
            memory: Memory instead of the listener's; None for a protection domain of its own.

        Raises:
            ValueError: The private data is too long; the request is still open.
            RuntimeError: This is not the listener's event loop; the request is still open.
            ResourceClosedError: The memory is closed; the request is still open.
            ResourceBusyError: It was answered before.
            ConnectionAbortedError: The client has given up.
            TimeoutError: The client did not confirm within `config.handshake_timeout_s`.
            OSError: This side is short of memory or adapter resources; ENOBUFS, the listener has
                all connections that its limits allow.  The client is refused.

        Cancellation: the client is refused.
        """
        check_loop(self._listener._loop, "request")
        check_kind("config", config, ConnectionConfig)
        config = config or self._listener.config
        if isinstance(memory, EllipsisType):
            memory = self._listener.memory
        check_shared(memory)
        if config.raw != self._listener.config.raw:
            msg = "raw cannot differ between a listener and its connections"
            raise ValueError(msg)
        room = ANSWER_ROOM - (0 if config.raw else HELLO_SIZE)
        private_data = payload_of("private data", private_data, room)
        self._answer()
        return await _accepted(self._listener, self._request, private_data, config, memory)

    def reject(self, private_data: bytes = b"") -> None:
        """Refuse; the client's program finds up to 148 bytes of `private_data` in its exception.

        Raises:
            ValueError: The private data is too long; the request is still open.
            RuntimeError: The listener's event loop runs in another thread; the request is still
                open.
            ResourceBusyError: It was answered before.
        """
        check_thread(self._listener._loop, "request")
        data = bytes(memoryview(private_data))
        if self.hello is not None:
            data = seal_refusal(data)
        if len(data) > 148:
            msg = f"a refusal carries at most 148 bytes of private data, not {len(data)}"
            raise ValueError(msg)
        self._answer()
        self._request.reject(data)

    def __repr__(self) -> str:
        state = "answered" if self._request.answered else "open"
        return f"<ConnectRequest {state} peer={self.peername}>"


def _attributes(request: Request) -> dict[str, Any]:
    """Facts about an accept, for tracers."""
    return peer_attributes(request.peername)


async def _accepted(
    listener: Listener,
    request: Request,
    private_data: bytes,
    config: ConnectionConfig,
    memory: Memory | None,
) -> Connection:
    """Accept a request within `config.handshake_timeout_s`; as `ConnectRequest.accept`."""
    try:
        with (
            Operation("accept", functools.partial(_attributes, request)),
            PatientLimit(config.handshake_timeout_s),
        ):
            return await _made(listener, request, private_data, config, memory)
    except TimeoutError as exc:
        text = f"{request.peername} did not confirm within {config.handshake_timeout_s} s"
        raise ConnectTimeoutError(errno.ETIMEDOUT, text) from exc


async def _made(
    listener: Listener,
    request: Request,
    private_data: bytes,
    config: ConnectionConfig,
    memory: Memory | None,
) -> Connection:
    """Make the connection, answer, and wait until the client has confirmed, and has greeted."""
    plan, event, hello = plan_of(config), request.event, request.greeting
    link = await request.open(
        functools.partial(Link.open, config=config, memory=memory), plan.pinned
    )
    link.budget = listener._budget
    try:
        connection = Connection(link, config)
    except BaseException:
        request.refuse(RefusalReason.RESOURCES, "out of resources")
        link.close()
        raise
    connection._request_budget = listener._request_budget
    # Not more than the client wants, and serves.
    offer = plan.offer(link.context.attributes, event.responder_resources, event.initiator_depth)
    if link.log.tells(logging.DEBUG):
        link.note("accepts %s by queue pair %d", peer_text(request.peername), link.qp.num)
    greeting: asyncio.Future[None] | None = None
    try:
        # Before the answer: the client's first messages may come with its confirmation.
        ends = request.peername, request.sockname
        connection._meet(hello, event.initiator_depth, request.peername, ends)
        if hello is not None:
            greeting = connection._await_greeting()
            private_data = connection._hello(private_data, ANSWER_ROOM)
        request.turn(link, functools.partial(_acted, request, connection, greeting))
        if greeting is None:
            await _confirmed(request, offer, private_data, lambda: connection._state.alive)
        else:
            await _confirmed(request, offer, private_data, greeting.done)
            await greeting
    except BaseException as exc:
        if not connection.is_closing():
            link.note("is not made: %r", exc)
        connection.abort()
        raise
    finally:
        del greeting  # its exception has this frame: a cycle
    request.leave()
    listener._clients[connection] = None
    connection._opened(event.qp_num)
    if hello is None:
        connection.private_data = event.private_data
        connection._watch()
    return connection


async def _confirmed(
    request: Request, offer: Offer, private_data: bytes, spoken: Callable[[], bool]
) -> None:
    """Answer, and wait for the confirmation, or for a disconnection if the client has `spoken`.

    A client may have sent all of its messages, and be gone already: the disconnection comes in
    place of the confirmation, and the program gets the connection with the messages.
    """
    try:
        await request.cm_id._accept(offer, private_data, None)
    except ConnectionLostError:
        if not spoken():
            raise


def _acted(request: Request, connection: Connection, greeting: asyncio.Future[None] | None) -> bool:
    """Whether the client has confirmed, or greeted: its handshake is not dropped then."""
    if greeting is None:
        return request.cm_id.stage is Stage.CONNECTED
    return greeting.done() or bool(connection._state.said)
