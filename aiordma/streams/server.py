"""RdmaServer: asyncio's Server for streams over RDMA; and the calls that make one.

Theory of operation
    Requests are accepted in the background, as link/acceptor.py has it.  A client that does not
    speak the protocol is refused.

    TLS handshakes take longer and prove more.  They have places of their own, by the same rules; a
    client that finds none there keeps its place among the half-open ones until it does.

    Accepted connections are the loop's, not the server's; it counts them, and can end them.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import functools
import socket
import ssl as ssl_module
import sys
import warnings
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Self

from aiordma.arguments import check_kind, whole
from aiordma.cm.address import Address, check_port
from aiordma.cm.connection_id import Stage
from aiordma.errors import ConnectionLostError, DeviceRemovedError, ProtocolError
from aiordma.link.acceptor import Acceptor, Request
from aiordma.link.admission import Place, Places
from aiordma.link.dialing import CONNECT_TIMEOUT_S, warm_up
from aiordma.link.limits import (
    DEFAULT_LIMITS,
    MOST_TLS_HANDSHAKES,
    PATIENCE_S,
    PRESSED_TLS_S,
    ListenerLimits,
)
from aiordma.link.listening import choose, require_device, resolve, wait_for_port
from aiordma.link.refusal import RefusalReason, begins_hello
from aiordma.link.source import peer_text, source_of
from aiordma.link.stream_sockets import listening_socket, only_ipv6, take_place
from aiordma.link.tally import Operation, count, peer_attributes
from aiordma.link.transport_socket import RdmaTransportSocket
from aiordma.logs import log_of
from aiordma.loop import fork, registry
from aiordma.loop.limit import Limit
from aiordma.loop.raised import ENDS_THE_LOOP
from aiordma.loop.running import check_loop, check_thread, from_finalizer
from aiordma.loop.uncopied import Uncopied
from aiordma.loop.wait_line import WaitLine
from aiordma.rsocket.wire import Hello
from aiordma.streams.plan import plan_of
from aiordma.streams.stream_config import DEFAULTS, StreamConfig
from aiordma.streams.stream_port import StreamPort
from aiordma.streams.stream_reader import READER_LIMIT, RdmaStreamReader, RdmaStreamWriter
from aiordma.streams.tls import check_times, secured
from aiordma.streams.transport import RdmaTransport

__all__ = ["RdmaServer", "create_server", "start_server"]

_log = log_of("listener")


class RdmaServer(Uncopied, asyncio.AbstractServer):
    """A stream server; made by `create_server` and `start_server`.

    `wait_closed()` waits for the connections to end, as asyncio's does since Python 3.12.  While it
    serves it is kept alive by its loop, as asyncio's is, until `close()`.  An `async with` block
    that an exception ends, such as a cancellation, closes the connections, too, and aborts those
    that are left after `StreamConfig.close_timeout_s`.

    Attributes:
        limits: Limits of the connections and memory that clients may hold.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        protocol_factory: Callable[[], Any],
        backlog: int,
        config: StreamConfig,
        context: ssl_module.SSLContext | None,
        tls_times: dict[str, float | None],
        limits: ListenerLimits,
        *,
        listen: bool,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._factory = protocol_factory
        self._config = config
        self._tls = context
        self._tls_times = tls_times
        # Not a count: Ctrl-C can come between any two steps of the end of a connection.  The oldest
        # first, as they are closed in this order.
        self._clients: weakref.WeakKeyDictionary[RdmaTransport, None] = weakref.WeakKeyDictionary()
        self._aborting = False
        self.limits = limits
        self._tls_places = Places(
            MOST_TLS_HANDSHAKES,
            (MOST_TLS_HANDSHAKES + 1) // 2,
            pressed_s=PRESSED_TLS_S,
            patience_s=PATIENCE_S,
        )
        self._serving = False
        self._forever: asyncio.Future[None] | None = None
        self._ended = False  # all of `close` is done: an exception of a signal's handler may end it
        self._waiters: WaitLine[None] = WaitLine()
        self._place: socket.socket | None = None  # in whose place it listens
        # On iWARP a little more is pinned.
        pinned = plan_of(config, iwarp=True).pinned
        # A port that the kernel chooses may turn out to be taken only where it is listened on.
        self._acceptor = Acceptor(
            self, addresses, backlog, limits, pinned, contextvars.copy_context(), listen=listen
        )
        self._sockets = tuple(listening_socket(each, config) for each in self.socknames)
        fork.guard_public(self)
        if listen:
            self._serve()

    @property
    def refused(self) -> int:
        """Requests that were refused."""
        return self._acceptor.refused

    @property
    def dropped(self) -> int:
        """Clients that were dropped in the middle of a handshake because others waited."""
        return self._acceptor.dropped

    # Where

    @property
    def sockets(self) -> tuple[RdmaTransportSocket, ...]:
        """A stand-in for each address; empty when the server is closed."""
        return () if self._acceptor.closed else self._sockets

    @property
    def sockname(self) -> Address:
        """Local (address, port); the first if there are several."""
        return self._acceptor.addresses[0]

    @property
    def socknames(self) -> list[Address]:
        """All local (address, port) pairs; the port is the same."""
        return list(self._acceptor.addresses)

    @property
    def addresses(self) -> list[Address]:
        """Deprecated; use `socknames`."""
        warnings.warn("RdmaServer.addresses is now socknames", DeprecationWarning, stacklevel=2)
        return self.socknames

    @property
    def port(self) -> int:
        """Local port."""
        return self.sockname[1]

    # From the acceptor

    @property
    def _unaccepted(self) -> int:
        return 0

    def _examine(self, request: Request) -> tuple[RefusalReason, str] | None:
        data = request.event.private_data
        if begins_hello(data):
            return RefusalReason.STREAMS, "it is a client of messages"
        try:
            Hello.parse(data)
        except ProtocolError as exc:
            return RefusalReason.STREAMS, str(exc)
        return None

    def _take(self, _: Request) -> bool:
        return False

    async def _accept(self, request: Request) -> RdmaTransport:
        with (
            Operation("accept", functools.partial(peer_attributes, request.peername)),
            Limit(self.limits.handshake_timeout_s, "the handshake", patient=True),
        ):
            request.answered = True
            port = await request.open(functools.partial(StreamPort.open, config=self._config))
            discard = port.close
            try:
                transport = RdmaTransport(port, self._config)
                discard = functools.partial(transport._discard, reset=True)
                await self._answer(transport, request)
            except BaseException as exc:
                port.note("is not made: %r", exc)
                discard()
                raise
            return transport

    async def _answer(self, transport: RdmaTransport, request: Request) -> None:
        port, event = transport._port, request.event
        if port.context.is_iwarp:
            transport._machine.listen_first()
        port.note("accepts %s by queue pair %d", peer_text(request.peername), port.qp.num)
        transport._meet(event)
        # The client's parameter, within the device's limits; rsockets expects it in the answer.
        limits = port.context.attributes
        parameter = port.plan.parameter(
            min(event.initiator_depth, limits.max_qp_init_rd_atom),
            min(event.responder_resources, limits.max_qp_rd_atom),
        )
        request.turn(port, lambda: request.cm_id.stage is Stage.CONNECTED)
        try:
            # The caller has a limit for all of it.
            await request.cm_id.accept(parameter, private_data=transport._hello(), timeout=None)
        except ConnectionLostError as exc:
            # The client had the answer, and has gone since; its confirmation came after that,
            # or got lost. With TCP it has been there, and so it has here.
            if isinstance(exc, DeviceRemovedError):
                raise
        if self._tls is None:
            request.leave()
        elif request.place is not None:
            request.place.acted()

    async def _made(self, transport: RdmaTransport, request: Request) -> None:
        if self._acceptor.closed:
            transport._discard(reset=True)
            return
        try:
            protocol = self._factory()
            if self._tls is None:
                transport._start(protocol, None, self)
            else:
                await self._secure(transport, protocol, request)
        except BaseException as exc:
            if transport._protocol is None:
                transport._discard(reset=True)
            if isinstance(exc, ENDS_THE_LOOP):
                raise
            if isinstance(exc, OSError):
                _log.info("a connection from %s failed at once: %s", request.peername, exc)
                return
            if isinstance(exc, asyncio.CancelledError):
                raise
            self._loop.call_exception_handler({
                "message": "Error on transport creation for incoming connection",
                "exception": exc,
                "transport": transport,
            })  # fmt: skip

    def _removed(self) -> None:
        self.close()

    # TLS

    async def _secure(self, transport: RdmaTransport, protocol: Any, request: Request) -> None:
        """TLS, as soon as there is a place for its handshake.

        From then on it is one of the connections that go on when the server is closed, as over TCP:
        the client, and the protocol, may take the handshake for complete before this task does.
        """
        task = asyncio.current_task()
        assert task is not None
        assert self._tls is not None
        place = await self._tls_place(transport, request.source, task.cancel)
        self._acceptor.handshakes.pop(task, None)
        del task  # it keeps its error, whose traceback has this frame: a cycle
        request.leave()
        await secured(transport, protocol, self._tls, self._tls_times, server=self)
        place.leave()

    async def _tls_begins(self, transport: RdmaTransport) -> Place:
        """Take a place for the TLS handshake of a connection, which leaves it at the end.

        Raises:
            ConnectionLostError: There was none in time.
        """
        source = source_of(transport._extra["peername"][0])
        return await self._tls_place(transport, source, transport.abort)

    async def _tls_place(
        self, transport: RdmaTransport, source: str, end: Callable[[], object]
    ) -> Place:
        port = transport._port
        # None if it is refused: an exception of the future would have this frame, which has it.
        secure: asyncio.Future[Place | None] = self._loop.create_future()

        def refuse() -> None:
            if not secure.done():
                self._acceptor.refused += 1
                count("refused")
                secure.set_result(None)

        def begin(place: Place) -> None:
            # Free when its memory is, or when the handshake is over.
            port.when_gone(place.leave)
            if secure.done():  # the wait was canceled
                place.leave()
            else:
                secure.set_result(place)

        self._tls_places.arrive(source, begin, refuse)
        place = await secure
        if place is None:
            text = "too many TLS handshakes are under way"
            raise ConnectionLostError(errno.ECONNABORTED, text)
        place.turn(functools.partial(self._acceptor.drop, port, end, lambda: False))
        return place

    # Clients

    def _attach(self, transport: RdmaTransport) -> None:
        self._clients[transport] = None

    def _detach(self, transport: RdmaTransport) -> None:
        self._clients.pop(transport, None)
        self._wake()

    def close_clients(self) -> None:
        """Close all connections: bytes that they have written are still sent.

        Raises:
            RuntimeError: The server's event loop runs in another thread; nothing was done.
        """
        check_thread(self._loop, "server")
        for transport in list(self._clients):
            transport.close()

    def abort_clients(self) -> None:
        """End all connections at once.

        Raises:
            RuntimeError: The server's event loop runs in another thread; nothing was done.
        """
        check_thread(self._loop, "server")
        for transport in list(self._clients):
            transport.abort()

    # As asyncio.Server

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """The loop that it belongs to."""
        return self._loop

    def is_serving(self) -> bool:
        """Whether the server accepts connections."""
        return self._serving

    async def start_serving(self) -> None:
        """Accept connections from now on; idempotent.

        Raises:
            RuntimeError: The server is closed, or this is not its event loop.
            OSError: EADDRINUSE, a socket of TCP has the port (on iWARP).

        Cancellation: it accepts all the same.
        """
        self._listen()
        # A turn for requests that wait, as asyncio has it.
        await asyncio.sleep(0)

    def _listen(self) -> None:
        check_loop(self._loop, "server")
        if self._acceptor.closed:
            msg = f"server {self!r} is closed"
            raise RuntimeError(msg)
        if not self._serving:
            self._serve()
            self._acceptor.listen()

    def _serve(self) -> None:
        self._serving = True
        registry.keep(self, self._loop)

    async def serve_forever(self) -> None:
        """Accept connections until this is canceled or the server is closed.

        Raises:
            RuntimeError: The server is closed, this is awaited already, or this is not the server's
                event loop.

        Cancellation: closes the server and its clients, as asyncio's does since Python 3.13, and
        waits for them; after `close_timeout_s`, or when it is canceled again, they are aborted.
        """
        if self._forever is not None:
            msg = f"server {self!r} is already being awaited on serve_forever()"
            raise RuntimeError(msg)
        self._listen()
        self._forever = self._loop.create_future()
        try:
            await self._forever
        except asyncio.CancelledError:
            try:
                await self._end()
            finally:
                raise
        finally:
            self._forever = None

    def close(self) -> None:
        """Stop accepting; existing connections go on, also those in a TLS handshake.  Idempotent.

        Clients that have connected, but have no protocol yet, get a `ConnectionLostError`, as a
        kernel resets those that no program has accepted.

        Raises:
            RuntimeError: The server's event loop runs in another thread; nothing was done.
        """
        check_thread(self._loop, "server")
        if self._ended:
            return
        self._serving = False
        registry.let_go(self, self._loop)
        self._acceptor.close()
        if self._forever is not None and not self._forever.done():
            self._forever.cancel()
        if self._place is not None:
            self._place.close()
        self._wake()
        self._ended = True

    def _wake(self) -> None:
        if self._acceptor.closed and not self._clients:
            self._waiters.grant_all(None)

    async def wait_closed(self) -> None:
        """Wait until the server is closed and its connections have ended, and the port is free.

        Connections end when their protocols or peers end them; `close_clients()` and
        `abort_clients()` end them now.

        Cancellation: ends the wait.
        """
        while not self._acceptor.closed or self._clients:
            await self._waiters.wait()  # a factory may have closed it, and its connection begin
        await self._acceptor.wait_closed()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if exc_info[0] is not None:
            # Waiting for clients would keep the exception from the program until they leave.
            await self._end()
            return
        self.close()
        await self.wait_closed()

    async def _end(self) -> None:
        """Close it all, in bounded time whatever clients do."""
        seconds = self._config.close_timeout_s
        task = asyncio.current_task()
        if task is not None and task.cancelling() > 1:
            self._aborting = True  # canceled again before it has run
        del task  # it keeps its error, whose traceback has this frame: a cycle
        try:
            self.close()
            self.close_clients()
            if not self._aborting:
                async with asyncio.timeout(seconds):
                    await self.wait_closed()
                return
        except TimeoutError:
            self._aborting = True
        except BaseException:
            # Canceled again; or a second Ctrl-C has hit this task between two steps of the end of a
            # connection, which only an abort makes up for.
            self._aborting = True
            self.abort_clients()
            raise
        self.abort_clients()
        try:
            async with asyncio.timeout(seconds):
                await self.wait_closed()
        except TimeoutError:
            _log.warning("%r: %d connections did not end in time", self, len(self._clients))

    def _seen(self) -> dict[str, Any]:
        """The server as `aiordma.metrics` shows it; in any thread, without a C call."""
        state = "listening" if self._serving else "bound"
        return {
            "kind": "streams",
            "state": "closed" if self._acceptor.closed else state,
            "unaccepted": 0,
            **self._acceptor.seen(),
        }

    def __repr__(self) -> str:
        closed = self._acceptor.closed
        where = "closed" if closed else ", ".join(f"{h} port {p}" for h, p in self.socknames)
        return f"<RdmaServer {where}, {len(self._clients)} connections>"

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


async def create_server(
    protocol_factory: Callable[[], Any],
    host: str | Sequence[str] | None = None,
    port: int | str | None = None,
    *,
    family: int = socket.AF_UNSPEC,
    flags: int = socket.AI_PASSIVE,
    sock: socket.socket | None = None,
    backlog: int = 100,
    ssl: ssl_module.SSLContext | None = None,
    reuse_address: bool | None = None,
    reuse_port: bool | None = None,
    ssl_handshake_timeout: float | None = None,
    ssl_shutdown_timeout: float | None = None,
    start_serving: bool = True,
    config: StreamConfig | None = None,
    limits: ListenerLimits | None = None,
) -> RdmaServer:
    """Serve streams, as `loop.create_server` does over TCP.

    Clients may be aiordma's, or any program that uses rsockets, such as one under
    `librspreload.so` (`rsocket(7)`).

    Args:
        protocol_factory: Makes the protocol of each connection.
        host: Local name or address, or several; None or "" for all.
        port: A number or the name of a service; 0 or None lets the kernel choose, see
            `RdmaServer.port`.
        family: `socket.AF_INET` or `AF_INET6` for that family alone.
        flags: Ignored; asyncio's signature has it.
        sock: Instead of host and port: an IPv4 or IPv6 stream socket, bound or not, that neither
            listens nor is connected.  The server listens on its address over RDMA, keeps the socket
            to reserve the port, and closes it in the end.
        backlog: Requests that may wait, including those in the middle of the handshake, but not TLS
            handshakes.  Further requests are refused, and aiordma's clients try again.
        ssl: A context, to speak TLS.
        reuse_address: Ignored: an address is free as soon as its server is gone.
        reuse_port: Must not be True: two servers cannot share a port.
        ssl_handshake_timeout: Seconds for the TLS handshake, 60 by default.
        ssl_shutdown_timeout: Seconds for the end of TLS, 30 by default.
        start_serving: Accept at once; otherwise from `start_serving()` or `serve_forever()` on.
        config: Settings of the connections.
        limits: Limits of the connections and memory that clients may hold; see docs/limits.md.

    Raises:
        TypeError, ValueError: An argument is invalid.
        LibraryMissingError, DeviceNotFoundError: RDMA is not available here, or no RDMA device has
            the address; few devices have a loopback address ("localhost").
        socket.gaierror: The name does not resolve.
        TimeoutError: The name was not resolved within 10 seconds.
        OSError: The port is taken (EADDRINUSE).

    Cancellation: the resources are closed.
    """
    if isinstance(ssl, bool):
        msg = "ssl argument must be an SSLContext or None"
        raise TypeError(msg)
    times = {
        "ssl_handshake_timeout": ssl_handshake_timeout,
        "ssl_shutdown_timeout": ssl_shutdown_timeout,
    }
    check_times(ssl, times)
    if sock is not None and (host is not None or port is not None):
        msg = "host/port and sock can not be specified at the same time"
        raise ValueError(msg)
    if reuse_port:
        msg = "reuse_port is not supported: two RDMA servers cannot share a port"
        raise ValueError(msg)
    if family not in (socket.AF_UNSPEC, socket.AF_INET, socket.AF_INET6):
        msg = f"family {family} is neither AF_INET nor AF_INET6"
        raise ValueError(msg)
    check_kind("config", config, StreamConfig)
    if whole("backlog", backlog) < 1:
        msg = f"backlog {backlog} is not positive"
        raise ValueError(msg)
    if sock is not None:
        host, port = take_place(sock)
        family = socket.AF_INET6 if only_ipv6(sock) else socket.AF_UNSPEC
    number = socket.getservbyname(port, "tcp") if isinstance(port, str) else port or 0
    check_port(number)
    config = config or DEFAULTS
    hosts = [host] if host is None or isinstance(host, str) else list(host)
    await warm_up()
    found: list[Address] = []
    for each in hosts:
        found += await resolve(each or None, number, CONNECT_TIMEOUT_S)
    if family:
        v6 = family == socket.AF_INET6
        found = [address for address in found if (":" in address[0]) == v6]
        if not found:
            msg = f"no address of {host!r} has the family {family}"
            raise ValueError(msg)
    addresses = choose(list(dict.fromkeys(found)), ipv6_only=family == socket.AF_INET6)
    addresses = await require_device(addresses, CONNECT_TIMEOUT_S)
    await wait_for_port(addresses, CONNECT_TIMEOUT_S)
    server = RdmaServer(
        addresses, protocol_factory, backlog, config, ssl, times, limits or DEFAULT_LIMITS,
        listen=start_serving,
    )  # fmt: skip
    server._place = sock
    return server


def _handle(handling: Coroutine[Any, Any, None], writer: RdmaStreamWriter) -> None:
    """Run the callback as asyncio does from Python 3.12 on: its failure closes the stream.

    asyncio itself lets go of the writer of a task that is canceled before it begins, which warns
    then that the stream is not closed.
    """
    # The protocol keeps the task, as asyncio's own.
    task = writer._protocol._task = asyncio.get_running_loop().create_task(handling)
    task.add_done_callback(functools.partial(_handled, writer))


def _handled(writer: RdmaStreamWriter, task: asyncio.Task[None]) -> None:
    if task.cancelled():
        writer.close()
    elif task.exception() is not None:
        task.get_loop().call_exception_handler({
            "message": "Unhandled exception in client_connected_cb",
            "exception": task.exception(),
            "transport": writer.transport,
        })  # fmt: skip
        writer.close()


async def start_server(
    client_connected_cb: Callable[[RdmaStreamReader, RdmaStreamWriter], Awaitable[None] | None],
    host: str | Sequence[str] | None = None,
    port: int | str | None = None,
    *,
    limit: int = READER_LIMIT,
    **kwds: Any,
) -> RdmaServer:
    """Serve streams, as `asyncio.start_server` does over TCP.

    Args:
        client_connected_cb: Called with a reader and a writer for each connection; a coroutine
            function becomes a task.  If it raises, the loop's exception handler is called and the
            stream is closed, as in asyncio from Python 3.12 on.
        host: Local name or address, or several; None for all.
        port: Its port; 0 or None lets the kernel choose.
        limit: Bytes that a reader keeps before the peer has to wait; see `asyncio.StreamReader`.
        kwds: As for `create_server`.

    Raises: as `create_server`.

    Cancellation: the resources are closed.
    """
    loop = asyncio.get_running_loop()

    def connected(reader: Any, writer: Any) -> None:
        # asyncio makes the writer itself; ours has the same attributes and one more method.
        writer.__class__ = RdmaStreamWriter
        fork.guard_public(writer)
        handling = client_connected_cb(reader, writer)
        if asyncio.iscoroutine(handling):
            _handle(handling, writer)

    def factory() -> asyncio.StreamReaderProtocol:
        reader = RdmaStreamReader(limit=limit, loop=loop)
        return asyncio.StreamReaderProtocol(reader, connected, loop=loop)

    return await create_server(factory, host, port, **kwds)
