"""RdmaServer: asyncio's Server for streams over RDMA.

Theory of operation
    Each request becomes a task that accepts it, several at a time; `admission.Places` says how
    many, and more than `backlog` requests that wait are refused.  A client that stops in the middle
    of its handshake is dropped after `handshake_timeout_s`, and sooner while requests wait.  What
    does not speak the protocol is refused.

    TLS handshakes take longer and prove more.  They have places of their own, by the same rules; a
    client that finds none there keeps its place among the half-open ones until it does.

    Accepted connections are the loop's, not the server's; it counts them, and can end them.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import functools
import logging
import socket
import ssl as ssl_module
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Self

from aiordma.cm.address import Address
from aiordma.cm.connection_event import ConnectionEvent
from aiordma.cm.connection_id import ConnectionId, Stage
from aiordma.cm.enums import EventType
from aiordma.cm.event_channel import EventChannel
from aiordma.errors import ConnectionLostError, DeviceRemovedError, ProtocolError
from aiordma.link.admission import Ledger, Place, Places, when_gone
from aiordma.link.dialing import shared_channel
from aiordma.link.limits import ListenerLimits
from aiordma.link.listening import Shortages, listen_on
from aiordma.link.refusal import RefusalReason, begins_hello, refusal
from aiordma.link.source import source_of
from aiordma.link.transport_socket import RdmaTransportSocket
from aiordma.loop import background, fork, registry
from aiordma.loop.limit import PatientLimit
from aiordma.loop.raised import ENDS_THE_LOOP
from aiordma.loop.running import check_loop, check_thread, from_finalizer
from aiordma.loop.wait_line import WaitLine
from aiordma.rsocket.wire import HELLO_SIZE, Hello
from aiordma.streams.plan import plan_of
from aiordma.streams.sockets import listening_socket
from aiordma.streams.stream_config import StreamConfig
from aiordma.streams.stream_port import StreamPort
from aiordma.streams.tls import secured
from aiordma.streams.transport import RdmaTransport

__all__ = ["RdmaServer"]

_log = logging.getLogger("aiordma")
# Requests are fetched as they come: the limit is kept here, not by the kernel, which says nothing.
_KERNEL_BACKLOG = 1024


def _is_connected(cm_id: ConnectionId) -> bool:
    return cm_id.stage is Stage.CONNECTED


def _still_shaking() -> bool:
    return False


class RdmaServer(asyncio.AbstractServer):
    """A stream server; made by `create_server` and `start_server`.

    `wait_closed()` waits for the connections to end, as asyncio's does since Python 3.12.  While it
    serves it is kept alive by its loop, as asyncio's is, until `close()`.  An `async with` block
    that an exception ends, such as a cancellation, closes the connections, too, and aborts those
    that are left after `StreamConfig.close_timeout_s`.

    Attributes:
        limits: What clients may hold.
        refused: Requests that were refused.
        dropped: Clients that were dropped in the middle of a handshake because others waited.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        protocol_factory: Callable[[], Any],
        backlog: int,
        config: StreamConfig,
        context: ssl_module.SSLContext | None,
        tls_timeouts: dict[str, Any],
        limits: ListenerLimits,
    ) -> None:
        self._shared, self._release_shared = shared_channel()
        self._loop = asyncio.get_running_loop()
        self._factory = protocol_factory
        self._backlog = backlog
        self._config = config
        self._tls = context
        self._tls_timeouts = tls_timeouts
        self._context = contextvars.copy_context()
        self._clients: weakref.WeakSet[RdmaTransport] = weakref.WeakSet()
        self._aborting = False
        self._handshakes: set[asyncio.Task[None]] = set()
        self._unanswered: set[ConnectionId] = set()
        self.limits = limits
        # On iWARP a little more is pinned.
        pinned = plan_of(config, iwarp=True).pinned
        self._ledger = Ledger(limits, pinned)
        self._shortages = Shortages()
        self._places = Places.of_handshakes(limits, pinned)
        self._tls_places = Places(
            limits.max_tls_handshakes,
            limits.max_tls_handshakes_per_source,
            pressed_s=limits.pressed_tls_handshake_timeout_s,
            patience_s=limits.max_wait_s,
        )
        self._serving = False
        self._closed = False
        self._forever: asyncio.Future[None] | None = None
        self._waiters = WaitLine[None]()
        self._ids: list[ConnectionId] = []
        self._ended: list[ConnectionId] = []
        self._place: socket.socket | None = None  # in whose place it listens
        self.refused = 0
        self.dropped = 0
        try:
            self._channel = EventChannel()
        except BaseException:
            self._closed = True
            self._release_shared()
            raise
        try:
            self._ids = listen_on(self._channel, addresses, None, self._on_event)
            self._addresses: list[Address] = [
                cm_id.source for cm_id in self._ids if cm_id.source is not None
            ]
            self._sockets = tuple(listening_socket(each, config) for each in self._addresses)
        except BaseException:
            self._closed = True
            self._give_back()
            raise
        fork.guard_public(self)

    # Where

    @property
    def sockets(self) -> tuple[RdmaTransportSocket, ...]:
        """A stand-in for each address; empty when the server is closed."""
        return () if self._closed else self._sockets

    @property
    def addresses(self) -> list[Address]:
        """All local (address, port) pairs; the port is the same."""
        return list(self._addresses)

    @property
    def port(self) -> int:
        """Local port."""
        return self._addresses[0][1]

    # Requests

    def _on_event(self, event: ConnectionEvent) -> bool:
        cm_id = event.connection_id
        if event.type != EventType.CONNECT_REQUEST:
            if event.type == EventType.DEVICE_REMOVAL and cm_id in self._ids:
                self._ids.remove(cm_id)
                self._ended.append(cm_id)
                cm_id.close()
                if not self._ids:
                    _log.warning("server on port %d: the RDMA device was removed", self.port)
                    self.close()
            return True
        assert cm_id is not None
        try:
            cm_id.migrate(self._shared)
        except OSError as exc:
            _log.debug("a request vanished: %s", exc)
            cm_id.close()
            return True
        if begins_hello(event.private_data):
            self._refuse(cm_id, "it is a client of messages", RefusalReason.STREAMS)
            return True
        try:
            if len(event.private_data) < HELLO_SIZE:
                self._refuse(cm_id, "its private data is too short", RefusalReason.STREAMS)
                return True
            Hello.parse(event.private_data)
        except ProtocolError as exc:
            self._refuse(cm_id, str(exc), RefusalReason.STREAMS)
            return True
        source = source_of(cm_id.destination_address)
        full = self._ledger.why_full(source)
        waiting = self._places.waiting + self._places.open
        if full:
            self._shortages.full(cm_id.destination, full)
            self._refuse(cm_id, full, RefusalReason.FULL)
        elif self._closed or (waiting >= self._backlog and not self._places.make_room(source)):
            self._refuse(cm_id, "too many are waiting", RefusalReason.BUSY)
        else:
            self._places.arrive(
                source,
                functools.partial(self._begin, cm_id, event),
                functools.partial(self._refuse, cm_id, "too many waited", RefusalReason.BUSY),
            )
        return True

    def _begin(self, cm_id: ConnectionId, event: ConnectionEvent, place: Place) -> None:
        task = background.start(
            self._loop,
            functools.partial(self._handshake, cm_id, event, place),
            self._context.copy(),
        )
        if task is None:
            self._refuse(cm_id, "the loop is ending", RefusalReason.BUSY)
            place.leave()
            return
        self._handshakes.add(task)
        self._unanswered.add(cm_id)

        def done(_: object) -> None:
            self._handshakes.discard(task)
            if cm_id in self._unanswered:  # it was canceled before it ran
                self._unanswered.discard(cm_id)
                self._refuse(cm_id, "the server was closed", RefusalReason.BUSY)
                place.leave()

        task.add_done_callback(done)

    def _refuse(self, cm_id: ConnectionId, why: str, reason: RefusalReason | None = None) -> None:
        self.refused += 1
        _log.info("refused %s: %s", cm_id.destination, why)
        try:
            cm_id.reject(b"" if reason is None else refusal(reason))
        except OSError as exc:
            _log.debug("refusing %s: %s", cm_id.destination, exc)
        cm_id.close()

    async def _handshake(self, cm_id: ConnectionId, event: ConnectionEvent, place: Place) -> None:
        peer = cm_id.destination
        try:
            with PatientLimit(self._config.handshake_timeout_s, "the handshake"):
                transport = await self._accept(cm_id, event, place)
        except OSError as exc:
            # The client has gone, or this machine is short of something: its problem only.
            _log.info("a connection from %s was not made: %s", peer, exc)
            return
        if self._closed:
            transport._discard()
            return
        try:
            protocol = self._factory()
            if self._tls is None:
                transport._start(protocol, None, self)
            else:
                await self._secure(transport, protocol, place)
        except BaseException as exc:
            if transport._protocol is None:
                transport._discard()
            if isinstance(exc, ENDS_THE_LOOP):
                raise
            if isinstance(exc, OSError):
                _log.info("a connection from %s failed at once: %s", peer, exc)
                return
            if isinstance(exc, asyncio.CancelledError):
                raise
            self._loop.call_exception_handler({
                "message": "Error on transport creation for incoming connection",
                "exception": exc,
                "transport": transport,
            })  # fmt: skip

    async def _secure(self, transport: RdmaTransport, protocol: Any, place: Place) -> None:
        """TLS, as soon as there is a place for its handshake."""
        task = asyncio.current_task()
        assert task is not None
        assert self._tls is not None
        mine = await self._tls_place(transport, place.source)
        place.leave()
        mine.turn(functools.partial(self._drop, task.cancel, transport, _still_shaking))
        await secured(transport, protocol, self._tls, server=self, **self._tls_timeouts)
        mine.leave()

    async def _tls_begins(self, transport: RdmaTransport) -> Place:
        """A connection goes over to TLS: a place for its handshake, to be left at the end of it.

        Raises:
            ConnectionLostError: There was none in time.
        """
        mine = await self._tls_place(transport, transport._extra["peername"][0])
        mine.turn(functools.partial(self._drop, transport.abort, transport, _still_shaking))
        return mine

    async def _tls_place(self, transport: RdmaTransport, source: str) -> Place:
        port = transport._port
        secure: asyncio.Future[Place] = self._loop.create_future()
        text = "too many TLS handshakes are under way"

        def refuse() -> None:
            if not secure.done():
                self.refused += 1
                secure.set_exception(ConnectionLostError(errno.ECONNABORTED, text))

        def begin(mine: Place) -> None:
            # Free when its memory is, or when the handshake is over.
            port.qp._gone.add_done_callback(when_gone(port.in_loop, mine.leave))
            if secure.done():  # it was canceled
                mine.leave()
            else:
                secure.set_result(mine)

        self._tls_places.arrive(source, begin, refuse)
        return await secure

    def _drop(
        self, end: Callable[[], object], transport: RdmaTransport, acted: Callable[[], bool]
    ) -> bool:
        """Others wait for the place of a client that does not get on."""
        # Its answer may be here, and this loop late.
        self._shared._catch_up()
        transport._port.sweep()
        if acted():
            return False
        _log.info("dropped %s: its handshake takes long, and others wait", transport)
        self.dropped += 1
        end()
        return True

    async def _accept(
        self, cm_id: ConnectionId, event: ConnectionEvent, place: Place
    ) -> RdmaTransport:
        self._unanswered.discard(cm_id)
        try:
            give_back = self._ledger.take(place.source)
        except OSError as exc:  # of those that came together, others were first
            self._shortages.full(cm_id.destination, str(exc))
            self._refuse(cm_id, str(exc), RefusalReason.FULL)
            place.leave()
            raise
        _, release = shared_channel()
        port: StreamPort | None = None
        transport: RdmaTransport | None = None
        try:
            port = await StreamPort.open(cm_id, self._config)
            port.at_close(release)
            port.qp._gone.add_done_callback(when_gone(port.in_loop, place.leave, give_back))
            transport = RdmaTransport(port, self._config)
            # On iWARP the client begins, with a word about its buffers.  Its kernel takes for a bad
            # answer what comes so early that it follows the answer.
            transport._listens_first = port.context.is_iwarp
            transport._meet(event.private_data)
            # What the client asked for, which rsockets expects to hear again, within the device's.
            limits = port.context.attributes
            parameter = port.plan.parameter(
                min(event.initiator_depth, limits.max_qp_init_rd_atom),
                min(event.responder_resources, limits.max_qp_rd_atom),
            )
            confirmed = functools.partial(_is_connected, cm_id)
            task = asyncio.current_task()
            assert task is not None
            place.turn(functools.partial(self._drop, task.cancel, transport, confirmed))
            try:
                # The caller has a limit for all of it.
                await cm_id.accept(parameter, private_data=transport._hello(), timeout=None)
            except ConnectionLostError as exc:
                # The client had the answer, and has gone since; its confirmation came after that,
                # or got lost. With TCP it has been there, and so it has here.
                if isinstance(exc, DeviceRemovedError):
                    raise
            if self._tls is None:
                place.leave()
            else:
                place.acted()
        except BaseException as exc:
            if transport is not None:
                transport._discard()
            elif port is not None:
                port.close()
            else:
                release()
                give_back()
                self._shortages.tell(cm_id.destination, exc)
                self._refuse(cm_id, "out of resources", RefusalReason.RESOURCES)
                place.leave()
            raise
        return transport

    # Clients

    @property
    def _active(self) -> int:
        # Not a count: Ctrl-C can come between any two steps of the end of a connection.
        return len(self._clients)

    def _attach(self, transport: RdmaTransport) -> None:
        self._clients.add(transport)

    def _detach(self, transport: RdmaTransport) -> None:
        self._clients.discard(transport)
        self._wake()

    def close_clients(self) -> None:
        """Close all connections: what they have written is still sent.

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
        """Whether it accepts connections."""
        return self._serving

    async def start_serving(self) -> None:
        """Accept connections from now on; idempotent.

        Raises:
            RuntimeError: The server is closed, or this is not its event loop.

        Cancellation: it accepts all the same.
        """
        self._listen()
        # A turn for requests that wait, as asyncio has it.
        await asyncio.sleep(0)

    def _listen(self) -> None:
        check_loop(self._loop, "server")
        if self._closed:
            msg = f"server {self!r} is closed"
            raise RuntimeError(msg)
        if not self._serving:
            self._serving = True
            registry.keep(self, self._loop)
            for cm_id in self._ids:
                cm_id.listen(max(_KERNEL_BACKLOG, 2 * self._backlog))

    async def serve_forever(self) -> None:
        """Accept connections until it is canceled, or the server closed.

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
        """Accept no more; connections that are there go on.  Idempotent.

        Raises:
            RuntimeError: The server's event loop runs in another thread; nothing was done.
        """
        check_thread(self._loop, "server")
        if self._closed:
            return
        self._closed = True
        self._serving = False
        registry.let_go(self, self._loop)
        self._places.close()
        self._tls_places.close()
        for task in list(self._handshakes):
            task.cancel()
        if self._forever is not None and not self._forever.done():
            self._forever.cancel()
        self._give_back()
        self._wake()

    def _give_back(self) -> None:
        for cm_id in self._ids:
            cm_id.close()
        self._ended += self._ids
        self._ids = []
        self._channel.close()
        self._release_shared()
        if self._place is not None:
            self._place.close()

    def _wake(self) -> None:
        if self._closed and not self._active:
            self._waiters.grant_all(None)

    async def wait_closed(self) -> None:
        """Wait until the server is closed and its connections have ended, and the port is free.

        Connections end when their protocols or peers end them: `close_clients()` and
        `abort_clients()` make that now.

        Cancellation: ends the wait.
        """
        if not self._closed or self._active:
            await self._waiters.wait()
        if self._handshakes:
            await asyncio.wait(list(self._handshakes))
        for cm_id in self._ended:
            await cm_id.wait_closed()
        await self._channel.wait_closed()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if exc_info[0] is not None:
            # To wait for clients would keep the exception from the program until they go.
            await self._end()
            return
        self.close()
        await self.wait_closed()

    async def _end(self) -> None:
        """Close it all, in bounded time whatever clients do."""
        self.close()
        self.close_clients()
        seconds = self._config.close_timeout_s
        if not self._aborting:
            try:
                async with asyncio.timeout(seconds):
                    await self.wait_closed()
                return
            except (TimeoutError, asyncio.CancelledError) as exc:
                self._aborting = True
                if isinstance(exc, asyncio.CancelledError):
                    self.abort_clients()
                    raise
        self.abort_clients()
        try:
            async with asyncio.timeout(seconds):
                await self.wait_closed()
        except TimeoutError:
            _log.warning("%r: %d connections did not end in time", self, self._active)

    def __repr__(self) -> str:
        where = "closed" if self._closed else ", ".join(f"{h} port {p}" for h, p in self._addresses)
        return f"<RdmaServer {where}>"

    def __del__(
        self, _warn: Callable[..., None] = warnings.warn, _gone: Any = sys.is_finalizing
    ) -> None:
        if getattr(self, "_closed", True) or _gone():
            return
        try:
            _warn(f"unclosed {self!r}", ResourceWarning, source=self, stacklevel=1)
        finally:
            from_finalizer(self._loop, self.close)
