"""listen(): a Listener, its requests and its connections.

Theory of operation
    The listener's ids have an event channel of their own, so that a flood of requests can be left
    unread and starves no connection.  Each request is moved to the loop's shared channel at once:
    connections do not depend on their listener.

    An asyncio reader fetches requests as they come, so the kernel's backlog never fills; the
    limit is kept here instead.  What is neither answered nor taken counts, and above `backlog`
    a request is refused with the reason in its private data.

    As with TCP, handshakes are completed in the background, several at a time, whether or not
    `accept()` is waiting.  A handshake takes memory before the client has proved anything, so that
    their number is limited (`admission.Places`): a request beyond it waits, and takes none.  A
    client that stops in the middle is dropped after `handshake_timeout_s`, and sooner while
    requests wait.
    `requests()` leaves the answer to the program, which has `handshake_timeout_s` for it.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import sys
import warnings
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Self

from aiordma.arguments import check_kind, whole
from aiordma.cm.address import Address, check_port
from aiordma.cm.connection_event import ConnectionEvent
from aiordma.cm.connection_id import ConnectionId
from aiordma.cm.enums import EventType
from aiordma.cm.event_channel import EventChannel
from aiordma.endpoint.config import DEFAULTS, ConnectionConfig
from aiordma.endpoint.connect import Opening
from aiordma.endpoint.connection import Connection
from aiordma.endpoint.plan import plan_of
from aiordma.endpoint.request import ConnectRequest
from aiordma.endpoint.wire import Hello
from aiordma.errors import ProtocolError, ResourceClosedError, cm_error
from aiordma.link.admission import Ledger, Place, Places
from aiordma.link.dialing import shared_channel, warm_up
from aiordma.link.limits import DEFAULT_LIMITS, ListenerLimits
from aiordma.link.listening import Shortages, choose, listen_on, require_device, resolve
from aiordma.link.refusal import RefusalReason
from aiordma.loop import background, fork, registry
from aiordma.loop.running import check_loop, check_thread, from_finalizer
from aiordma.loop.steps import Steps
from aiordma.loop.wait_line import WaitLine
from aiordma.memory.byte_budget import PROCESS_BUDGET, ByteBudget

__all__ = ["Listener", "listen"]

_log = logging.getLogger("aiordma")
_BACKLOG = 256
# What the kernel allows by default (net.rdma_ucm.max_backlog).  When it is full, the kernel refuses
# without a reason.
_KERNEL_BACKLOG = 1024


def listen(
    host: str | None,
    port: int,
    *,
    backlog: int = _BACKLOG,
    config: ConnectionConfig | None = None,
    ipv6_only: bool = False,
    limits: ListenerLimits | None = None,
) -> Opening[Listener]:
    """Listen for connections; the result is awaited, or used with `async with`.

    Two listeners never share an address and port, as TCP's SO_REUSEPORT lets them; and one can
    listen again at once where another has just ended, without the help of an option.

    Args:
        host: Local name or address, IPv4 or IPv6 (link-local with its interface, as in
            `fe80::1%eth0`); None, "" or "::" for all, "0.0.0.0" for all of IPv4.  With a name,
            all its addresses that an RDMA device has.
        port: 0 to 65535; 0 lets the kernel choose, see `Listener.port`.
        backlog: Requests and connections that may wait for the program; 0 or less means 256.
        config: Settings of the accepted connections.
        ipv6_only: Take IPv6 clients alone.
        limits: What clients may hold, in total and for each source; see docs/limits.md.

    Raises:
        TypeError, ValueError: An argument is of no use, at the call.
        LibraryMissingError, DeviceNotFoundError: RDMA is not available here, or no RDMA device
            has the address, as seldom one has an address of loopback ("localhost").
        HostNotFoundError: The name does not resolve.
        TimeoutError: It does not within `config.connect_timeout_s`.
        OSError: The port is taken (EADDRINUSE).

    Cancellation: what was begun is undone.
    """
    check_kind("host", host, str)
    check_port(port)
    backlog = whole("backlog", backlog)
    check_kind("config", config, ConnectionConfig)
    config = config or DEFAULTS

    async def open_() -> Listener:
        await warm_up()
        addresses = await resolve(host, port, config.connect_timeout_s)
        addresses = choose(addresses, ipv6_only=ipv6_only)
        addresses = await require_device(addresses, config.connect_timeout_s)
        return Listener(
            addresses, backlog if backlog > 0 else _BACKLOG, config, limits or DEFAULT_LIMITS
        )

    return Opening(open_(), "listen")


class Listener:
    """Accepts connections; made by `listen`.

    Attributes:
        config: Settings of the accepted connections.
        limits: What clients may hold.
        refused: Requests that the library refused by itself.
        dropped: Clients that were dropped in the middle of their handshake because others waited.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        backlog: int,
        config: ConnectionConfig,
        limits: ListenerLimits,
    ) -> None:
        self._shared, self._release_shared = shared_channel()
        self.config = config
        self.limits = limits
        self.refused = 0
        self.dropped = 0
        pinned = plan_of(config).pinned
        self._ledger = Ledger(limits, pinned)
        self._places = Places.of_handshakes(limits, pinned)
        self._shortages = Shortages()
        self._budget = ByteBudget(limits.max_large_message_bytes, PROCESS_BUDGET)
        self._backlog = backlog
        self._loop = asyncio.get_running_loop()
        self._pending: deque[ConnectRequest] = deque()
        self._ready: deque[Connection] = deque()
        self._waiters = WaitLine[None]()
        self._handshakes: set[asyncio.Task[None]] = set()
        self._manual = False  # the program answers the requests
        self._closed = False
        self._device_removed = False
        self._channel: EventChannel | None = None
        self._cm_ids: list[ConnectionId] = []
        self._going: list[ConnectionId] = []  # closed, perhaps not yet destroyed
        try:
            self._channel = EventChannel()
            # The kernel's backlog is for the moment until a request is fetched; if it were
            # ours, a refusal for want of room would come without a reason.
            self._cm_ids = listen_on(
                self._channel, addresses, max(backlog, _KERNEL_BACKLOG), self._on_event
            )
            self._socknames = [cm_id.source or ("0.0.0.0", 0) for cm_id in self._cm_ids]
        except BaseException:
            self._closed = True
            self._give_back()
            raise
        fork.guard_public(self)

    # Where

    @property
    def sockname(self) -> Address:
        """Local (address, port); the first, if there are several."""
        return self._socknames[0]

    @property
    def socknames(self) -> list[Address]:
        """All local (address, port) pairs; the port is the same."""
        return list(self._socknames)

    @property
    def port(self) -> int:
        """Local port."""
        return self.sockname[1]

    # Requests

    def _on_event(self, event: ConnectionEvent) -> bool:
        if event.type != EventType.CONNECT_REQUEST:
            if event.type == EventType.DEVICE_REMOVAL:
                self._on_removal(event.connection_id)
            return True
        cm_id = event.connection_id
        assert cm_id is not None
        try:
            cm_id.migrate(self._shared)
        except OSError as exc:
            _log.debug("a request vanished: %s", exc)
            cm_id.close()
            return True
        request = ConnectRequest(self, cm_id, event)
        reason = None
        if not self.config.raw:
            try:
                request.hello = Hello.parse(event.private_data)
                if request.hello is None:
                    reason = RefusalReason.NOT_AIORDMA
            except ProtocolError as exc:
                _log.info("refused %s: %s", request.peername, exc)
                reason = RefusalReason.VERSION
        if reason is None:
            reason = self._why_not(request)
        if reason is not None:
            self.refused += 1
            request._refuse(reason)
        elif self._manual:
            self._pend(request)
        else:
            self._places.arrive(
                request._source,
                functools.partial(self._begin, request),
                functools.partial(self._send_away, request),
            )
        return True

    def _why_not(self, request: ConnectRequest) -> RefusalReason | None:
        full = self._ledger.why_full(request._source)
        if full:
            self._shortages.full(request.peername, full)
            return RefusalReason.FULL
        waiting = len(self._pending) + len(self._ready) + self._places.waiting + self._places.open
        if waiting >= self._backlog and not self._places.make_room(request._source):
            return RefusalReason.BUSY
        return None

    def _pend(self, request: ConnectRequest) -> None:
        """The program answers it."""
        self._pending.append(request)
        request._start_timer()
        self._waiters.grant(None)

    def _forget(self, request: ConnectRequest) -> None:
        """The request was answered, or its time is up."""
        if request in self._pending:
            self._pending.remove(request)

    def _send_away(self, request: ConnectRequest) -> None:
        """There was no place for its handshake in time."""
        if self._manual and not self._closed:
            self._pend(request)
            return
        self.refused += 1
        request._refuse(RefusalReason.BUSY)

    def _begin(self, request: ConnectRequest, place: Place) -> None:
        request._place = place
        task = background.start(self._loop, functools.partial(self._handshake, request))
        if task is None:  # the loop is ending
            place.leave()
            request._refuse_if_open()
            return
        self._handshakes.add(task)
        task.add_done_callback(functools.partial(self._handshake_over, request))

    def _handshake_over(self, request: ConnectRequest, task: asyncio.Task[None]) -> None:
        self._handshakes.discard(task)
        # A task that is canceled before it runs has not answered.
        request._refuse_if_open()

    async def _handshake(self, request: ConnectRequest) -> None:
        try:
            connection = await request.accept()
        except OSError as exc:
            # The client has gone, or this machine is short of something: its problem only.
            _log.info("a connection from %s was not made: %s", request.peername, exc)
            return
        if self._closed or self._manual:
            connection.abort()
            return
        self._ready.append(connection)
        self._waiters.grant(None)

    # To the program

    async def _wait(self, queue: deque[Any]) -> Any:
        check_loop(self._loop, "listener")
        while not queue:
            if self._device_removed:
                raise cm_error(EventType.DEVICE_REMOVAL.name, 0)
            if self._closed:
                raise ResourceClosedError(errno.ECONNABORTED, "the listener is closed")
            # A loop keeps the task that waits for a socket: mostly nothing else has this one.
            task = asyncio.current_task()
            registry.keep(task, self._loop)
            try:
                await self._waiters.wait()
            finally:
                registry.let_go(task, self._loop)
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

        One that is not answered within `config.handshake_timeout_s` is refused.  A client may be
        gone when it is answered: `accept()` raises an RdmaError then, which is no reason to end.
        From this call
        on nothing is accepted unseen; a connection that was accepted before it, and not yet
        taken by `accept()`, is dropped.

        Raises:
            RuntimeError: The listener's event loop runs in another thread.
        """
        check_thread(self._loop, "listener")
        self._manual = True
        self._places.close()
        for task in list(self._handshakes):
            task.cancel()
        while self._ready:
            self._ready.popleft().abort()
        return Steps(lambda: self._wait(self._pending))

    # End

    def _on_removal(self, cm_id: ConnectionId | None) -> None:
        """A device was removed, and with it one of the addresses."""
        if cm_id not in self._cm_ids:
            return
        self._cm_ids.remove(cm_id)
        cm_id.close()
        self._going.append(cm_id)
        if not self._cm_ids:
            _log.warning("listener on port %d: the RDMA device was removed", self.port)
            self._device_removed = True
            self.close()

    def close(self) -> None:
        """Stop listening; refuse clients that wait.  Accepted connections go on.  Idempotent.

        Raises:
            RuntimeError: The listener's event loop runs in another thread; nothing was done.
        """
        check_thread(self._loop, "listener")
        if self._closed:
            return
        self._closed = True
        self._places.close()
        while self._pending:
            self._pending.popleft()._refuse(RefusalReason.BUSY)
        for task in list(self._handshakes):
            task.cancel()
        while self._ready:
            self._ready.popleft().abort()
        self._waiters.grant_all(None)
        self._give_back()

    def _give_back(self) -> None:
        for cm_id in self._cm_ids:
            cm_id.close()
        self._going += self._cm_ids
        self._cm_ids.clear()
        if self._channel is not None:
            self._channel.close()
        self._release_shared()

    async def wait_closed(self) -> None:
        """Wait until the port is free again.  Cancellation: ends the wait."""
        if self._handshakes:
            await asyncio.wait(list(self._handshakes))
        for cm_id in self._going:
            await cm_id.wait_closed()
        if self._channel is not None:
            await self._channel.wait_closed()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.close()
        await self.wait_closed()

    def __repr__(self) -> str:
        if self._closed:
            return "<Listener closed>"
        return f"<Listener {self.sockname[0]} port {self.sockname[1]}>"

    def __del__(
        self, _warn: Callable[..., None] = warnings.warn, _gone: Any = sys.is_finalizing
    ) -> None:
        if getattr(self, "_closed", True) or _gone():
            return
        try:
            _warn(f"unclosed {self!r}", ResourceWarning, source=self, stacklevel=1)
        finally:
            from_finalizer(self._loop, self.close)
