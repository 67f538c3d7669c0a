"""listen(): a Listener, the requests of its clients (ConnectRequest) and its connections.

Handshakes are completed in the background (link/acceptor.py), whether or not a task waits in
`accept()`.  A program that calls `requests()` answers the requests itself, each within
`handshake_timeout_s`.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import inspect
import logging
import sys
import warnings
import weakref
from collections import deque
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Sequence,
)
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
from aiordma.endpoint.keys import (
    ANSWER_SIZE,
    Claim,
    Ends,
    claims_key,
    plain_hello,
    removed_error,
)
from aiordma.endpoint.link import Link
from aiordma.endpoint.wire import HELLO_SIZE, Hello
from aiordma.errors import (
    AuthenticationError,
    ConnectionLostError,
    ConnectTimeoutError,
    ProtocolError,
    ResourceClosedError,
    busy_error,
    cm_error,
)
from aiordma.link.acceptor import Acceptor, Request
from aiordma.link.dialing import CONNECT_TIMEOUT_S, warm_up
from aiordma.link.limits import DEFAULT_LIMITS, ListenerLimits
from aiordma.link.listening import choose, require_device, resolve, wait_for_port
from aiordma.link.log_share import LogShare
from aiordma.link.networks import Networks
from aiordma.link.refusal import RefusalReason, begins_hello, seal_refusal
from aiordma.link.source import peer_text
from aiordma.link.tally import Operation, peer_attributes
from aiordma.logs import log_of
from aiordma.loop import fork, registry
from aiordma.loop.limit import Limit
from aiordma.loop.running import check_loop, check_thread, from_finalizer, is_canceled
from aiordma.loop.steps import Steps
from aiordma.loop.uncopied import Uncopied
from aiordma.loop.wait_line import WaitLine
from aiordma.memory.governor import PROCESS, Budget
from aiordma.memory.shared import Memory, check_shared

__all__ = ["ConnectRequest", "Listener", "listen"]

_log = log_of("listener")
_BACKLOG = 256

#: Decides whether a client may connect, before it has proved that it has a key.
Authorize = Callable[["ConnectRequest"], bool | Awaitable[bool]]


def listen(
    host: str | None,
    port: int,
    *,
    backlog: int = _BACKLOG,
    config: ConnectionConfig | None = None,
    memory: Memory | None = None,
    ipv6_only: bool = False,
    limits: ListenerLimits | None = None,
    allow: Iterable[str] | None = None,
    deny: Iterable[str] = (),
    authorize: Authorize | None = None,
) -> Opening[Listener]:
    """Listen for connections; await the result, or use it with `async with`.

    Unlike with TCP's SO_REUSEPORT, two listeners never share an address and port.  A new listener
    can use the port of one that has just been closed, without an option like SO_REUSEADDR.

    Args:
        host: Local name or address, IPv4 or IPv6 (link-local with its interface, as in
            `fe80::1%eth0`).  None, "" or "::" means all addresses, "0.0.0.0" all IPv4 addresses.  A
            name means all its addresses that belong to an RDMA device.
        port: 0 to 65535; 0 lets the kernel choose, see `Listener.port`.
        backlog: How many requests and connections may wait for the program; 0 or less means 256.
        config: Settings of the accepted connections.
        memory: Registered memory that the accepted connections share, in one protection domain.
        ipv6_only: Whether to accept only IPv6 clients.
        limits: Limits of the connections and memory that clients may hold; see docs/limits.md.
        allow: Networks and addresses whose clients may connect, as in `["10.0.0.0/8", "fd00::/8"]`;
            None: all may.  A client is refused before anything is allocated for it.  On
            InfiniBand a client can choose its address: see docs/security.md.
        deny: Networks and addresses whose clients may not connect, even if they are in `allow`.
        authorize: A function or coroutine function that decides whether a client may connect.  It
            is called with the `ConnectRequest` of each client that was not refused before, and has
            `limits.handshake_timeout_s`; up to `limits.max_half_open` calls are under way.  True
            lets the client go on.  After False it is refused, and also after an exception or
            another result, which is logged.  `ConnectRequest.reject` refuses it with bytes of the
            program.  The client has not proved its key yet: it is connected only when it has.

    Raises:
        TypeError, ValueError: An argument is invalid; raised by the call, before it is awaited.
        LibraryMissingError, DeviceNotFoundError: RDMA is not available here, or the address belongs
            to no RDMA device.  Loopback addresses ("localhost") rarely do.
        socket.gaierror: The name does not resolve.
        TimeoutError: The name was not resolved within 10 seconds.
        OSError: The port is in use (EADDRINUSE).

    Cancellation: the listener is closed.
    """
    return Opening(
        opener(
            host, port, backlog=backlog, config=config, memory=memory, ipv6_only=ipv6_only,
            limits=limits, allow=allow, deny=deny, authorize=authorize,
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
    allow: Iterable[str] | None,
    deny: Iterable[str],
    authorize: Authorize | None,
) -> Callable[[], Coroutine[Any, Any, Listener]]:
    """Check the arguments of `listen`, and return the function that opens the listener.

    It returns a function, and not a coroutine, because a caller that is itself a coroutine may
    never be awaited, and then there would be two warnings.

    Raises:
        TypeError, ValueError: An argument is invalid.
    """
    check_kind("host", host, str)
    check_port(port)
    backlog = whole("backlog", backlog)
    check_kind("config", config, ConnectionConfig)
    check_shared(memory)
    config = config or DEFAULTS
    networks = Networks.of(allow, deny)
    if authorize is not None and not callable(authorize):
        msg = f"authorize has to be a function that takes a ConnectRequest, not {authorize!r}"
        raise TypeError(msg)

    async def open_() -> Listener:
        await warm_up()
        addresses = await resolve(host, port, CONNECT_TIMEOUT_S)
        addresses = choose(addresses, ipv6_only=ipv6_only)
        addresses = await require_device(addresses, CONNECT_TIMEOUT_S)
        await wait_for_port(addresses, CONNECT_TIMEOUT_S)
        return Listener(
            addresses,
            backlog if backlog > 0 else _BACKLOG,
            config,
            limits or DEFAULT_LIMITS,
            memory,
            networks,
            authorize,
        )

    return open_


class Listener(Uncopied):
    """A listener, which accepts connections; made by `listen`.

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
        networks: Networks | None = None,
        authorize: Authorize | None = None,
    ) -> None:
        self.config = config
        self.limits = limits
        self._networks = networks
        self._authorize = authorize
        self.memory = memory
        self._tracebacks = LogShare("errors of authorize")
        self._budget = Budget(limits.max_large_message_bytes, PROCESS)
        self._request_budget = Budget(limits.request_bytes)
        self._pending: deque[ConnectRequest] = deque()
        self._ready: deque[Connection] = deque()
        self._waiters: WaitLine[None] = WaitLine()
        # In the order in which they were accepted, and in which they are closed.
        self._clients: weakref.WeakKeyDictionary[Connection, None] = weakref.WeakKeyDictionary()
        self._manual = False  # whether the program answers the requests itself
        self._device_removed = False
        # A server's, for connections that `accept()` has not returned when the listener is closed.
        self._left_over: Callable[[Connection], object] | None = None
        self._leaving: list[Connection] = []  # those that it closes itself
        self._loop = asyncio.get_running_loop()
        self._acceptor = Acceptor(self, addresses, backlog, limits, plan_of(config).pinned)
        fork.guard_public(self)

    @property
    def refused(self) -> int:
        """How many requests the library has refused by itself."""
        return self._acceptor.refused

    @property
    def denied(self) -> int:
        """How many clients were refused because they may not connect, or have no key."""
        return self._acceptor.denied

    @property
    def dropped(self) -> int:
        """How many clients did not finish their handshake while others waited, or after `close`."""
        return self._acceptor.dropped

    # Where

    @property
    def sockname(self) -> Address:
        """The local (address, port); the first one if there are several."""
        return self._acceptor.addresses[0]

    @property
    def socknames(self) -> list[Address]:
        """All local (address, port) pairs; all have the same port."""
        return list(self._acceptor.addresses)

    @property
    def port(self) -> int:
        """The local port."""
        return self.sockname[1]

    # Connections

    @property
    def connections(self) -> frozenset[Connection]:
        """The connections of this listener that are not closed, accepted by the program or not."""
        return frozenset(self._open())

    def _open(self) -> list[Connection]:
        return [each for each in self._clients if not each._link.closed]

    def close_clients(self) -> None:
        """Begin to close all connections, as `Connection.close` does; new ones are still accepted.

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

    # Called by the acceptor

    @property
    def _unaccepted(self) -> int:
        return len(self._pending) + len(self._ready)

    @property
    def _unfinished(self) -> Collection[asyncio.Task[None]]:
        """Handshakes that are under way, some of them even after `close`."""
        return self._acceptor.handshakes

    def _examine(self, request: Request) -> tuple[RefusalReason, str] | None:
        if self._networks is not None:
            why = self._networks.why_not(request.peername)
            if why:
                return RefusalReason.DENIED, why
        if self.config.raw:
            return None
        data, keys = request.event.private_data, self.config.keys
        try:
            keyed = begins_hello(data) and claims_key(data)
            request.greeting = Hello.parse(plain_hello(data) if keyed else data)
        except ProtocolError as exc:
            return RefusalReason.VERSION, str(exc)
        if request.greeting is None:
            return RefusalReason.NOT_AIORDMA, "it is no client of messages"
        if keys is None:
            wants = RefusalReason.NO_KEYS, "it wants proof of a key, and this listener has none"
            return wants if keyed else None
        if not keyed:
            return RefusalReason.KEY_MISSING, "it has no key"
        request.claim = Claim.of(keys, data)
        if request.claim is None:
            return RefusalReason.KEY_UNKNOWN, "it has none of the keys of this listener"
        return None

    def _take(self, request: Request) -> bool:
        if self._manual:
            pending = ConnectRequest(self, request)
            self._pending.append(pending)
            pending._limit(self.limits.handshake_timeout_s)
            self._waiters.grant(None)
        return self._manual

    async def _accept(self, request: Request) -> Connection:
        if self._authorize is not None:
            await self._ask(self._authorize, request)
        request.answered = True
        return await _accepted(self, request, b"", self.config, self.memory)

    async def _ask(self, authorize: Authorize, request: Request) -> None:
        """Ask the program whether a client may connect.

        Raises:
            OSError: It may not, and was refused.
        """
        asked = ConnectRequest(self, request)
        asked._by_hand = False
        limit = Limit(self.limits.handshake_timeout_s, "authorize", patient=True)
        reason, why = RefusalReason.DENIED, "authorize says no"
        try:
            with limit:
                allowed = authorize(asked)
                if inspect.isawaitable(allowed):
                    allowed = await allowed
            if request.answered:  # by `reject`
                why = "authorize has refused"
            elif allowed is True:
                return
            elif allowed is not False:
                msg = f"authorize has to return True or False, not {type(allowed).__name__}"
                raise TypeError(msg)
        except (Exception, asyncio.CancelledError) as exc:
            if isinstance(exc, asyncio.CancelledError) and is_canceled():
                raise
            if limit.expired and isinstance(exc, TimeoutError):
                reason, why = RefusalReason.TIMEOUT, f"authorize took over {limit.seconds} s"
            else:
                why = "authorize has raised"
                if self._tracebacks.may_log(request.peername):
                    _log.exception("authorize of %r has raised: the client is refused", self)
        if request.answered:
            request.deny(RefusalReason.DENIED, why)
        else:
            request.refuse(reason, why)
        raise PermissionError(errno.EACCES, why)

    async def _made(self, connection: Connection, _: Request) -> None:
        if self._manual:
            connection.abort()
            return
        if self._acceptor.closed:
            self._leave_over(connection)
            return
        self._ready.append(connection)
        self._waiters.grant(None)

    def _removed(self) -> None:
        self._device_removed = True
        self.close()

    # For the program

    async def _wait(self, queue: deque[Any]) -> Any:
        check_loop(self._loop, "listener")
        while not queue:
            if self._device_removed:
                raise cm_error(EventType.DEVICE_REMOVAL.name, 0)
            if self._acceptor.closed:
                raise ResourceClosedError(errno.ECONNABORTED, "the listener is closed")
            # A task that waits for a socket is kept alive by the loop's reader of that socket.
            # Nothing would refer to this task, if the program does not.
            task = asyncio.current_task()
            registry.keep(task, self._loop)
            try:
                await self._waiters.wait()
            finally:
                registry.let_go(task, self._loop)
                # The task keeps its exception, whose traceback refers to this frame: a cycle.
                del task
        item = queue.popleft()
        if queue:
            self._waiters.grant(None)
        return item

    async def accept(self) -> Connection:
        """Wait for the next connection whose handshake is complete.

        Raises:
            ResourceClosedError: The listener was closed.
            DeviceRemovedError: The RDMA devices of all its addresses were removed.
            RuntimeError: `requests()` was called, so the program answers the requests itself; or
                this is not the listener's event loop.

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
        """Accept connections until the listener is closed; raises if its devices are removed."""
        try:
            return await self.accept()
        except ResourceClosedError:
            raise StopAsyncIteration from None

    def requests(self) -> AsyncIterator[ConnectRequest]:
        """Iterate over the requests of clients, which the program answers, until it is closed.

        A request that is not answered within `limits.handshake_timeout_s` is refused.  If the
        client is gone when the program answers, `ConnectRequest.accept` raises an RdmaError, which
        is no reason to end the iteration.  From this call on, no connection is accepted without the
        program; those that were accepted before, but not returned by `accept()`, are aborted.

        Raises:
            RuntimeError: The listener's event loop runs in another thread; or it has `authorize`,
                which answers the requests.
            DeviceRemovedError: In the iteration, when the RDMA devices of all addresses were
                removed.
        """
        check_thread(self._loop, "listener")
        if self._authorize is not None:
            msg = "the listener has authorize=, which answers its requests: leave one of them out"
            raise RuntimeError(msg)
        self._manual = True
        self._acceptor.stop_handshakes()
        while self._ready:
            self._ready.popleft().abort()
        return Steps(lambda: self._wait(self._pending))

    # End

    def close(self) -> None:
        """Stop listening, and refuse waiting clients.  Accepted connections stay.  Idempotent.

        Connections that `accept()` has not returned are closed in good order, so that a client that
        has sent a request may send it elsewhere.

        Raises:
            RuntimeError: The listener's event loop runs in another thread; nothing was done.
        """
        check_thread(self._loop, "listener")
        self._acceptor.close(finish=True)
        while self._pending:
            self._pending.popleft()._refuse(RefusalReason.BUSY, "the listener was closed")
        while self._ready:
            self._leave_over(self._ready.popleft())
        self._waiters.grant_all(None)

    def _leave_over(self, connection: Connection) -> None:
        if self._left_over is not None:
            self._left_over(connection)
        else:
            connection._begin_close()
            self._leaving.append(connection)

    async def wait_closed(self) -> None:
        """Wait until the port is free again, and what `close` has closed is.

        Cancellation: ends the wait.

        If the kernel refuses to free the port, as it does when the process has changed its user
        since, this is logged, and the port is freed when the process ends.
        """
        await self._acceptor.wait_closed()
        self._left_over = None  # it refers to the server, and so to this: a cycle
        for connection in list(self._leaving):
            await connection.wait_closed()
        self._leaving.clear()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.close()
        await self.wait_closed()

    def _seen(self) -> dict[str, Any]:
        """The listener as `aiordma.metrics` shows it.  In any thread, so without asking C."""
        return {
            "kind": "messages",
            "state": "closed" if self._acceptor.closed else "listening",
            "unaccepted": self._unaccepted,
            **self._acceptor.seen(),
            "large_message_bytes": self._budget.held(),
            "request_bytes": self._request_budget.held(),
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
    """A request of a client, from `Listener.requests()`; answer it once, by `accept` or `reject`.

    `authorize` of `listen` gets one, too, and answers it by its result, or by `reject`.

    Attributes:
        peername: The (address, port) of the client.
        sockname: The (address, port) that the client wants to connect to.
        hello: The client's half of the handshake; None for a raw listener.
        key_id: The name of the key that the client claims to have, in `ConnectionConfig.keys` of
            the listener; None without keys.  A client that does not prove it is not connected.
    """

    _by_hand = True  # from `requests()`

    def __init__(self, listener: Listener, request: Request) -> None:
        self._listener = listener
        self._request = request
        self._timer: asyncio.TimerHandle | None = None
        self.hello: Hello | None = request.greeting
        self.key_id: str | None = None if request.claim is None else request.claim.key_id
        self.peername: Address | None = request.peername
        self.sockname: Address | None = request.sockname
        fork.guard_public(self)

    @property
    def private_data(self) -> bytes:
        """Bytes that the client's program sent with the request."""
        return self._request.event.private_data if self.hello is None else self.hello.user_data

    @property
    def gid(self) -> bytes | None:
        """The GID of the client, 16 bytes; None on iWARP, and when the request was answered."""
        cm_id = self._request.cm_id
        if cm_id.closed or cm_id.context is None or cm_id.context.is_iwarp:
            return None
        return cm_id.peer_gid

    def _limit(self, seconds: float) -> None:
        """Refuse the client if the program has not answered after so many seconds."""
        self._timer = self._listener._loop.call_later(
            seconds, self._refuse, RefusalReason.TIMEOUT, "it was not answered in time"
        )

    def _answer(self) -> None:
        if self._request.answered:
            msg = "the request was answered already"
            raise busy_error(msg, errno.EALREADY)
        self._request.answered = True
        self._settle()

    def _refuse(self, reason: RefusalReason, why: str) -> None:
        """Refuse for a reason of the library, and not of the program."""
        self._settle()
        self._request.refuse(reason, why)

    def _settle(self) -> None:
        """Remove the request from those that the program has to answer."""
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
        """Accept the request, and return the connection when the client has confirmed.

        Args:
            private_data: Bytes for the client's program, at most 176 (127 with `config.keys`, 196
                with `config.raw`).
            config: Settings to use instead of the listener's; `raw` and `keys` must not differ.
            memory: Memory to share instead of the listener's; None for a protection domain of its
                own.

        Raises:
            ValueError: The private data is too long; the request is still open.
            RuntimeError: This is not the listener's event loop, or `authorize` decides about the
                request, which is still open.
            ResourceClosedError: The memory is closed; the request is still open.
            RdmaOSError: The request was answered before (EALREADY).
            ConnectionAbortedError: The client has given up.
            ProtocolError: The client has not proved that it has the key that it claims to have.
            AuthenticationError: This key was removed meanwhile, by `Keys.replace`.
            TimeoutError: The client did not confirm within `limits.handshake_timeout_s`.
            OSError: There is not enough memory, or the adapter has no more resources.  ENOBUFS: the
                listener has as many connections as its limits allow.  The client is refused.

        Cancellation: the client is refused.
        """
        check_loop(self._listener._loop, "request")
        if not self._by_hand:
            msg = "authorize answers by its result: return True"
            raise RuntimeError(msg)
        check_kind("config", config, ConnectionConfig)
        config = config or self._listener.config
        if isinstance(memory, EllipsisType):
            memory = self._listener.memory
        check_shared(memory)
        if config.raw != self._listener.config.raw:
            msg = "raw cannot differ between a listener and its connections"
            raise ValueError(msg)
        if config.keys is not self._listener.config.keys:
            msg = (
                "keys cannot differ between a listener and its connections: make the config by "
                "dataclasses.replace(listener.config, ...)"
            )
            raise ValueError(msg)
        room = ANSWER_ROOM - (0 if config.raw else HELLO_SIZE)
        room -= 0 if config.keys is None else ANSWER_SIZE
        private_data = payload_of("private data", private_data, room)
        self._answer()
        return await _accepted(self._listener, self._request, private_data, config, memory)

    def reject(self, private_data: bytes = b"") -> None:
        """Refuse the request.

        Args:
            private_data: At most 148 bytes, which the client's program finds in its exception.

        Raises:
            ValueError: The private data is too long; the request is still open.
            RuntimeError: The listener's event loop runs in another thread; the request is still
                open.
            RdmaOSError: The request was answered before (EALREADY).
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
    """The attributes of an accept, for tracers."""
    return peer_attributes(request.peername)


async def _accepted(
    listener: Listener,
    request: Request,
    private_data: bytes,
    config: ConnectionConfig,
    memory: Memory | None,
) -> Connection:
    """Accept a request within `limits.handshake_timeout_s`; as `ConnectRequest.accept`."""
    seconds = listener.limits.handshake_timeout_s
    try:
        with (
            Operation("accept", functools.partial(_attributes, request)),
            Limit(seconds, patient=True),
        ):
            return await _made(listener, request, private_data, config, memory)
    except TimeoutError as exc:
        text = f"{request.peername} did not confirm within {seconds} s"
        raise ConnectTimeoutError(errno.ETIMEDOUT, text) from exc


async def _made(
    listener: Listener,
    request: Request,
    private_data: bytes,
    config: ConnectionConfig,
    memory: Memory | None,
) -> Connection:
    """Make the connection, accept, and wait for the confirmation and the client's first frame."""
    plan, event, hello, claim = plan_of(config), request.event, request.greeting, request.claim
    if claim is not None and not claim.stands:
        error = removed_error(claim.key_id)
        request.refuse(RefusalReason.KEY_UNKNOWN, error.args[1])
        raise error
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
    # READs: not more than the client asks for, and not more than it serves.
    offer = plan.offer(link.context.attributes, event.responder_resources, event.initiator_depth)
    if link.log.tells(logging.DEBUG):
        link.note("accepts %s by queue pair %d", peer_text(request.peername), link.qp.num)
    greeting: asyncio.Future[None] | None = None
    try:
        # Before the answer, because the client's first messages may arrive with its confirmation.
        ends = request.peername, request.sockname
        connection._meet(hello, event.initiator_depth, request.peername, ends)
        if hello is not None:
            greeting = connection._await_greeting()
            private_data = link.common.hello(private_data, ANSWER_ROOM)
        if claim is not None:
            gid = b"" if link.context.is_iwarp else request.cm_id.local_gid
            private_data, proof = claim.answer(private_data, Ends(*ends, gid))
            link.state.require_proof(proof)
            connection._facts["key_id"] = claim.key_id
        request.turn(link, functools.partial(_acted, request, connection, greeting))
        if greeting is None:
            await _confirmed(request, offer, private_data, lambda: connection._state.arrived > 0)
        else:
            await _confirmed(request, offer, private_data, greeting.done)
            await greeting
        # Nothing is awaited from here until the connection is in `Listener.connections`, where a
        # program looks for those of a key that it has removed.
        if claim is not None and not claim.stands:
            raise removed_error(claim.key_id)
    except BaseException as exc:
        if claim is not None and isinstance(exc, ProtocolError | AuthenticationError):
            request.deny(RefusalReason.KEY_UNKNOWN, str(exc))
        if not connection.is_closing():
            link.note("is not made: %r", exc)
        connection.abort()
        raise
    finally:
        del greeting  # the traceback of its exception refers to this frame, which makes a cycle
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
    """Accept the request, and wait for the client's confirmation.

    A client may have sent all of its messages and have disconnected already, and then there is no
    confirmation.  If `spoken()` is true, this is no error: the program gets the connection, and
    receives the messages.  Its last frame, ABORT, may even have closed the connection id here.
    """
    try:
        await request.cm_id._accept(offer, private_data, None)
    except (ConnectionLostError, ResourceClosedError):
        if not spoken():
            raise


def _acted(request: Request, connection: Connection, greeting: asyncio.Future[None] | None) -> bool:
    """Whether the client has confirmed or sent a frame, so that its handshake is not dropped."""
    if greeting is None:
        return request.cm_id.stage is Stage.CONNECTED
    return greeting.done() or bool(connection._state.said)
