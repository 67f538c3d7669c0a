"""Acceptor: listens at addresses, admits requests, and runs their handshakes.

Theory of operation
    The listening ids have an event channel of their own, so that a flood of requests can be left
    unread and starves no connection.  Each request is moved to the loop's shared channel at once:
    connections do not depend on their listener.

    An asyncio reader fetches requests as they come, so the kernel's backlog never fills; the
    limit is kept here instead.  Requests in their handshake count, and connections that wait for
    the program; above `backlog` a request is refused with the reason in its private data.

    As with TCP, handshakes are completed in the background, several at a time.  A handshake takes
    memory before the client has proved anything, so their number is limited (`admission.Places`): a
    request beyond it waits, and takes none.  A client that stops in the middle is dropped after
    `handshake_timeout_s`, and sooner while requests wait.

    A listener of messages and a server of streams say by a few methods how a client is accepted
    (`Server`).  The acceptor refers to them by its open ids and handshakes, and not after `close`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from typing import Any, Protocol, TypeVar

from aiordma.cm.address import Address
from aiordma.cm.connection_event import ConnectionEvent
from aiordma.cm.connection_id import ConnectionId, Stage
from aiordma.cm.enums import EventType
from aiordma.cm.event_channel import EventChannel
from aiordma.errors import ResourceClosedError
from aiordma.link.adapter_side import AdapterSide
from aiordma.link.admission import Ledger, Place, Places
from aiordma.link.dialing import shared_channel
from aiordma.link.limits import PATIENCE_S, PRESSED_HANDSHAKE_S, ListenerLimits
from aiordma.link.listening import Shortages, leave, listen_on
from aiordma.link.log_share import DENIED
from aiordma.link.refusal import DENIALS, RefusalReason, refusal
from aiordma.link.source import peer_text, source_of
from aiordma.link.tally import count
from aiordma.logs import log_of
from aiordma.loop import background
from aiordma.verbs.resource import Resource

__all__ = ["Acceptor", "Request"]

_log = log_of("listener")
_CONNECT_REQUEST = EventType.CONNECT_REQUEST
#: The client was told of its connection.
_TOLD = (Stage.ACCEPTED, Stage.CONNECTED)
# The kernel's backlog is for the moment until a request is fetched; if it were the limit, a refusal
# for lack of room would come without a reason.  This is what the kernel allows by default
# (net.rdma_ucm.max_backlog).
_KERNEL_BACKLOG = 1024

Made = TypeVar("Made")
Side = TypeVar("Side", bound=AdapterSide)


class Server(Protocol[Made]):
    """A listener of messages or a server of streams, as its acceptor sees it."""

    @property
    def _unaccepted(self) -> int:
        """Requests and connections that wait for the program."""

    def _examine(self, request: Request) -> tuple[RefusalReason, str] | None:
        """The reason to refuse a request that does not speak the protocol; None if it does."""

    def _take(self, request: Request) -> bool:
        """Keep a request for the program to answer; False: its handshake is to begin."""

    async def _accept(self, request: Request) -> Made:
        """Answer a request; the connection once the client has confirmed."""

    async def _made(self, connection: Made, request: Request) -> None:
        """Give the connection to the program."""

    def _removed(self) -> None:
        """The devices of all addresses were removed."""


class Request:
    """A request to connect, until it is accepted or refused.

    Attributes:
        cm_id: The id of the connection that is to be.
        source: Source of the client, as `source_of` returns it.
        greeting: The result of `Server._examine`: the client's wishes in its private data.
        claim: Likewise: the key that the client claims to have; None without keys.
        peername: Address of the client, to which its answers go.
        named: Address that the client says it has, if that is another one; it is refused then.
        answered: Whether it is being accepted, or was refused.
        place: Place of its handshake; None while it waits for a place.
    """

    __slots__ = (
        "_acceptor", "answered", "claim", "cm_id", "event", "greeting", "named", "peername",
        "place", "sockname", "source",
    )  # fmt: skip

    peername: tuple[str, int] | None
    sockname: tuple[str, int] | None

    def __init__(self, acceptor: Acceptor, cm_id: ConnectionId, event: ConnectionEvent) -> None:
        self._acceptor = acceptor
        self.cm_id: ConnectionId = cm_id
        self.event: ConnectionEvent = event
        self.answered: bool = False
        self.place: Place | None = None
        self.greeting: Any = None
        self.claim: Any = None
        self.named: str | None = None
        self.peername, self.sockname = cm_id._ends()
        if self.peername is not None and (stray := cm_id._stray()) is not None:
            self.named, port = self.peername
            self.peername = stray, port
        self.source: str = source_of(self.peername[0] if self.peername is not None else None)

    def refuse(self, reason: RefusalReason, why: str) -> None:
        """Refuse for a reason of the library, and not of the program."""
        self._acceptor.refused += 1
        count("refused")
        if reason in DENIALS:
            self.deny(reason, why)
        else:
            extra = {"peer": peer_text(self.peername), "reason": reason.name}
            _log.tell(logging.INFO, "refused %s: %s", self.peername, why, extra=extra)
        self.reject(refusal(reason))

    def deny(self, reason: RefusalReason, why: str) -> None:
        """Count and log a client that may not connect; the log lines of a source are limited."""
        self._acceptor.denied += 1
        count("denied")
        if DENIED.may_log(self.peername):
            extra = {"peer": peer_text(self.peername), "reason": reason.name}
            _log.tell(logging.WARNING, "refused %s: %s", self.peername, why, extra=extra)

    def reject(self, data: bytes) -> None:
        """Refuse, with private data."""
        self.answered = True
        self.leave()
        try:
            self.cm_id.reject(data)
        except OSError as exc:
            _log.debug("refusing %s: %s", self.peername, exc)
        self.cm_id.close()

    async def open(
        self, make: Callable[[ConnectionId], Awaitable[Side]], size: int | None = None
    ) -> Side:
        """Make the AdapterSide of the connection; it is counted until its queue pair is gone.

        `size` is the bytes that it pins; None: as many as each of the listener's.

        Raises:
            ConnectionAbortedError: The client has left.
            OSError: The limits allow no further connection, or this side is short of memory or
                adapter resources.  The client is refused.
        """
        acceptor = self._acceptor
        try:
            give_back = acceptor.ledger.take(self.source, size)
        except OSError as exc:  # of those that came together, others were first
            acceptor.shortages.full(self.peername, str(exc))
            self.refuse(RefusalReason.FULL, str(exc))
            raise
        release: Callable[[], None] | None = None
        try:
            _, release = shared_channel()
            side = await make(self.cm_id)
        except BaseException as exc:
            acceptor.shortages.tell(self.peername, exc)
            if _has_left(exc):  # nobody is there to be refused
                self.leave()
                self.cm_id.close()
            elif isinstance(exc, asyncio.CancelledError):
                self.refuse(RefusalReason.TIMEOUT, "its handshake was canceled")
            else:
                self.refuse(RefusalReason.RESOURCES, "out of resources")
            if release is not None:
                release()
            give_back()
            raise

        side.at_close(release)
        side.qp._when_gone(functools.partial(_count_out, give_back, side, self.place))
        return side

    def turn(self, side: AdapterSide, acted: Callable[[], bool]) -> None:
        """The client has to act now; if it does not and others wait, the running task is canceled.

        `acted` tells whether the client has acted already.
        """
        task = asyncio.current_task()
        if self.place is not None and task is not None:
            self.place.turn(functools.partial(self._acceptor.drop, side, task.cancel, acted))

    def leave(self) -> None:
        """The handshake is over, or the request answered.  Idempotent."""
        if self.place is not None:
            self.place.leave()


def _has_left(exc: BaseException) -> bool:
    """Whether the client has left, and not something of this side been closed."""
    return isinstance(exc, ConnectionAbortedError) and not isinstance(exc, ResourceClosedError)


def _count_out(give_back: Callable[[], None], side: AdapterSide, place: Place | None) -> None:
    """Count a connection out whose queue pair is gone; in any thread."""
    give_back()
    if place is not None:
        side.in_loop(place.leave)


class Acceptor:
    """The listening ids of one listener or server, and the requests of their clients.

    Args:
        server: Owner of the ids; accepts the clients.
        addresses: To listen on.
        backlog: Requests and connections that may wait.
        limits: Limits of the connections and memory that clients may hold.
        pinned: Bytes that each connection pins.
        context: The context in copies of which handshakes run; None: the current one.
        listen: Whether to listen at once, or from `listen` on.

    Raises:
        OSError: No address can be listened on, or an address is taken; then it listens on none.

    Attributes:
        addresses: Local (address, port) pairs; the port is the same.
        handshakes: Tasks that are under way, and their requests.
        refused: Requests that the library refused by itself.
        denied: Clients that may not connect.
        dropped: Clients that were dropped in the middle of a handshake because others waited, or
            the listener was closed.
    """

    __slots__ = (
        "_backlog", "_channel", "_context", "_ended", "_gone", "_ids", "_kernel_backlog",
        "_release", "_shared", "addresses", "closed", "denied", "dropped", "handshakes", "ledger",
        "loop", "places", "refused", "shortages",
    )  # fmt: skip

    def __init__(
        self,
        server: Server[Made],
        addresses: Sequence[Address],
        backlog: int,
        limits: ListenerLimits,
        pinned: int,
        context: Context | None = None,
        *,
        listen: bool = True,
    ) -> None:
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self.ledger: Ledger = Ledger(limits, pinned)
        self.places: Places = Places(
            limits.half_open(pinned),
            (limits.max_half_open + 1) // 2,
            pressed_s=PRESSED_HANDSHAKE_S,
            patience_s=PATIENCE_S,
        )
        self.shortages: Shortages = Shortages()
        self.handshakes: dict[asyncio.Task[None], Request] = {}  # the oldest first
        self.refused: int = 0
        self.denied: int = 0
        self.dropped: int = 0
        self.closed: bool = False
        self._ended = False  # all of `close` is done
        self._backlog = backlog
        self._kernel_backlog = max(_KERNEL_BACKLOG, 2 * backlog)
        self._context = context
        self._ids: list[ConnectionId] = []
        self._gone: list[ConnectionId] = []  # closed, perhaps not yet destroyed
        self._channel: EventChannel | None = None
        self._shared, self._release = shared_channel()
        try:
            self._channel = EventChannel()
            self._channel._requests_go_to = self._shared
            sink = functools.partial(self._on_event, server)
            self._ids = listen_on(
                self._channel, addresses, self._kernel_backlog if listen else None, sink
            )
            self.addresses: list[tuple[str, int]] = [
                cm_id.source or ("0.0.0.0", 0) for cm_id in self._ids
            ]
            if listen:
                self._tell("listening")
        except BaseException:
            self.close()
            raise

    def listen(self) -> None:
        """Listen from now on."""
        for cm_id in self._ids:
            cm_id.listen(self._kernel_backlog)
        self._tell("listening")

    def _tell(self, what: str) -> None:
        if _log.tells(logging.INFO):
            where = [peer_text(address) for address in self.addresses]
            extra = {"addresses": where}
            _log.tell(logging.INFO, "%s on %s", what, ", ".join(map(str, where)), extra=extra)

    def seen(self) -> dict[str, Any]:
        """Figures for `aiordma.metrics`; in any thread."""
        return {
            "addresses": tuple(self.addresses),
            "refused": self.refused,
            "denied": self.denied,
            "dropped": self.dropped,
            "half_open": self.places.open,
            "waiting": self.places.waiting,
            "connections": self.ledger.connections,
            "pinned_bytes": self.ledger.pinned,
            "max_process_pinned_bytes": self.ledger.most_of_process,
            "large_message_bytes": 0,
            "request_bytes": 0,
        }

    # Requests

    def _on_event(self, server: Server[Made], event: ConnectionEvent) -> bool:
        cm_id = event.connection_id
        if event.type is not _CONNECT_REQUEST:
            if event.type == EventType.DEVICE_REMOVAL and cm_id in self._ids:
                self._remove(server, cm_id)
            return True
        assert cm_id is not None
        request = Request(self, cm_id, event)
        refused = server._examine(request) or self._why_not(server, request)
        if refused is not None:
            request.refuse(*refused)
        elif not server._take(request):
            self.places.arrive(
                request.source,
                functools.partial(self._begin, server, request),
                functools.partial(self._send_away, server, request),
            )
        return True

    def _remove(self, server: Server[Made], cm_id: ConnectionId) -> None:
        """A device was removed, and with it one of the addresses."""
        self._ids.remove(cm_id)
        self._gone.append(cm_id)
        cm_id.close()
        if not self._ids:
            _log.warning("listening on port %d: the RDMA device was removed", self.addresses[0][1])
            server._removed()

    def _why_not(self, server: Server[Made], request: Request) -> tuple[RefusalReason, str] | None:
        if request.named is not None:
            return RefusalReason.DENIED, f"it names {request.named} as its address"
        full = self.ledger.why_full(request.source)
        if full:
            self.shortages.full(request.peername, full)
            return RefusalReason.FULL, full
        waiting = self.places.waiting + self.places.open + server._unaccepted
        if self.closed or (waiting >= self._backlog and not self.places.make_room(request.source)):
            return RefusalReason.BUSY, "too many are waiting"
        return None

    def _send_away(self, server: Server[Made], request: Request) -> None:
        """Refuse a request without a place in time, unless the server keeps it for the program."""
        if self.closed or not server._take(request):
            request.refuse(RefusalReason.BUSY, "too many waited")

    def _begin(self, server: Server[Made], request: Request, place: Place) -> None:
        request.place = place
        context = None if self._context is None else self._context.copy()
        run = functools.partial(self._handshake, server, request)
        task = background.start(self.loop, run, context)
        if task is None:
            request.refuse(RefusalReason.BUSY, "the loop is ending")
            return
        self.handshakes[task] = request
        task.add_done_callback(functools.partial(self._over, request))

    def _over(self, request: Request, task: asyncio.Task[None]) -> None:
        self.handshakes.pop(task, None)
        if not request.answered:  # canceled before its first step
            request.refuse(RefusalReason.BUSY, "the listener was closed")

    async def _handshake(self, server: Server[Made], request: Request) -> None:
        try:
            connection = await server._accept(request)
        except OSError as exc:
            # The client has gone, or this machine is short of something: its problem only.
            _log.info("a connection from %s was not made: %s", request.peername, exc)
            return
        await server._made(connection, request)

    def drop(self, side: AdapterSide, end: Callable[[], object], acted: Callable[[], bool]) -> bool:
        """End a handshake that takes too long, unless the client has `acted`; for `Place.turn`."""
        # Its confirmation and its greeting may be here, and this loop late.
        self._shared._catch_up()
        if side.closed:
            return True  # it has ended already, and its place with its memory
        side.completions.sweep()
        if acted():
            return False
        why = "the listener is closed" if self.closed else "others wait"
        _log.info("dropped %s: its handshake takes long, and %s", side.peer_name(), why)
        self.dropped += 1
        count("dropped")
        end()
        return True

    # End

    def stop_handshakes(self) -> None:
        """End the handshakes under way, and refuse the requests that wait."""
        self.places.close()
        for task in list(self.handshakes):
            task.cancel()

    def _stop_most_handshakes(self) -> None:
        """As `stop_handshakes`, but clients that were told of their connection get it.

        They may have sent requests by now.  Their confirmations are under way, so that the time of
        those to whom others wait is enough.
        """
        self.places.close()
        for task, request in list(self.handshakes.items()):
            if request.cm_id.stage not in _TOLD:
                task.cancel()
        if self.handshakes:
            self.loop.call_later(PRESSED_HANDSHAKE_S, self.places.drop_acting)

    def close(self, *, finish: bool = False) -> None:
        """Stop listening; refuse clients that wait.  Idempotent.

        Args:
            finish: Whether handshakes go on if the client was told of its connection; `wait_closed`
                waits for them.

        After an exception of a signal's handler, another call goes on.
        """
        if self._ended:
            return
        self.closed = True
        if finish:
            self._stop_most_handshakes()
        else:
            self.stop_handshakes()
        leave(self._ids)
        if self._ids:
            self._tell("no longer listening")
        self._gone += self._ids
        self._ids.clear()
        if self._channel is not None:
            self._channel.close()
        self._release()
        self._ended = True

    async def wait_closed(self) -> None:
        """Wait until the port is free again.  Cancellation: ends the wait.

        It does not raise where the kernel refuses to free it, as for a process that has changed its
        user: the server has ended all the same, and the refusal is in the log.
        """
        if self.handshakes:
            await asyncio.wait(list(self.handshakes))
        gone: list[Resource] = [*self._gone]
        if self._channel is not None:
            gone.append(self._channel)
        for each in gone:
            try:
                await each.wait_closed()
            except OSError as exc:
                _log.info("%r: %s", each, exc)
