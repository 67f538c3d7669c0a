"""snapshot(): all counters of the process, as of now.

Theory of operation
    C keeps the counters of each connection, and their sums (`_core/tally.c`); those of datagrams,
    rare events and durations are in `link.tally`.  A snapshot reads all objects that exist, in any
    thread.  Each figure is read in one step, but figures of one connection may be from slightly
    different moments while its loop runs in another thread.  No C library is called, so that a
    snapshot waits for no adapter.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from aiordma import _core
from aiordma.cm.address import Address
from aiordma.datagram.transport import RdmaDatagramTransport
from aiordma.endpoint.connection import Connection
from aiordma.endpoint.listener import Listener
from aiordma.errors import ForkedError, ResourceClosedError
from aiordma.link import tally
from aiordma.link.admission import PINNED
from aiordma.loop import fork, registry
from aiordma.memory.governor import PROCESS, Growth
from aiordma.streams.server import RdmaServer
from aiordma.streams.transport import RdmaTransport

__all__ = [
    "Budget", "ConnectionMetrics", "DatagramMetrics", "Histogram", "ListenerMetrics", "Snapshot",
    "StreamMetrics", "Totals", "snapshot",
]  # fmt: skip

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Histogram:
    """Durations of operations that succeeded, in buckets with fixed bounds.

    Attributes:
        bounds_s: Upper bounds of the buckets, in seconds.
        counts: Number of durations in each bucket, not cumulative; the last bucket is for those
            above all bounds.
        total_s: Sum of the durations, in seconds.
        failed: Operations that failed; they are in no bucket.  Canceled operations do not count.
    """

    bounds_s: tuple[float, ...]
    counts: tuple[int, ...]
    total_s: float
    failed: int

    @property
    def count(self) -> int:
        """Number of durations."""
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over the life of the process, closed connections included; none of them ever falls.

    Attributes:
        messages_sent: Messages of connections.
        messages_received: Messages that programs have taken.
        bytes_sent: Bytes of these messages.
        bytes_received: Bytes of these messages.
        bytes_read: Bytes of RDMA READs that programs asked for.
        bytes_written: Bytes of RDMA WRITEs that programs asked for.
        atomics: Atomic operations.
        stream_bytes_sent: Bytes of streams.
        stream_bytes_received: Bytes that the programs of streams have taken.
        connects: Connections and streams that this process has made.
        connects_failed: Calls of connect that have failed.
        connect_retries: Refusals after which a connect was tried again.
        accepts: Connections and streams that it has accepted.
        accepts_failed: Handshakes of clients that have failed.
        refused: Requests that the library refused by itself.
        denied: Clients that may not connect: those without the key, and those that the networks or
            `authorize` of a listener exclude; most of them count as refused, too.
        dropped: Clients that were dropped in the middle of a handshake because others waited, or
            the listener was closed.
        connections_lost: Open connections that ended without either side closing in good order.
        streams_lost: Likewise for streams.
        datagrams_sent: As in `DatagramMetrics`, and so the next five.
        datagram_bytes_sent: Bytes.
        datagrams_received: Datagrams.
        datagram_bytes_received: Bytes.
        datagrams_dropped: Datagrams.
        datagrams_ignored: Datagrams.
    """

    messages_sent: int = 0
    bytes_sent: int = 0
    messages_received: int = 0
    bytes_received: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    atomics: int = 0
    stream_bytes_sent: int = 0
    stream_bytes_received: int = 0
    connects: int = 0
    connects_failed: int = 0
    connect_retries: int = 0
    accepts: int = 0
    accepts_failed: int = 0
    refused: int = 0
    denied: int = 0
    dropped: int = 0
    connections_lost: int = 0
    streams_lost: int = 0
    datagrams_sent: int = 0
    datagram_bytes_sent: int = 0
    datagrams_received: int = 0
    datagram_bytes_received: int = 0
    datagrams_dropped: int = 0
    datagrams_ignored: int = 0


@dataclass(frozen=True, slots=True)
class ConnectionMetrics:
    """A connection of messages that is not closed yet.

    Attributes:
        number: Its number, also in the log; no other connection of the process has had it.
        state: "connecting", "open" or "closing".
        peername: (address, port) of the peer; None where it is not known yet.
        sockname: (address, port) of this side; None where it was not asked for.
        device: Name of the device.
        qpn: Number of the queue pair.
        peer_qpn: Number of the peer's queue pair; None if the peer does not transmit it.
        opened_at: Seconds since 1970; None before the end of the handshake.
        cause: The reason of its end, if that was a failure.
        messages_sent: As in `ConnectionStats`, and so the next six.
        bytes_sent: Bytes.
        messages_received: Messages.
        bytes_received: Bytes.
        bytes_read: Bytes.
        bytes_written: Bytes.
        atomics: Operations.
        waiting_to_be_received: Messages that have arrived and that the program has not taken.
        waiting_to_be_sent: Tasks that wait in send().
        under_way: Work requests that have not completed, posted receives among them.
        credits: Messages that may be sent before the peer gives further credits; at most 65535.
        receive_slots: Slots for messages of the peer.
        send_slots: Slots for messages to the peer.
        pinned_bytes: Bytes of its slots, and of the memory of large messages.
    """

    number: int
    state: str
    device: str
    qpn: int
    peername: Address | None = None
    sockname: Address | None = None
    peer_qpn: int | None = None
    opened_at: float | None = None
    cause: str | None = None
    messages_sent: int = 0
    bytes_sent: int = 0
    messages_received: int = 0
    bytes_received: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    atomics: int = 0
    waiting_to_be_received: int = 0
    waiting_to_be_sent: int = 0
    under_way: int = 0
    credits: int = 0
    receive_slots: int = 0
    send_slots: int = 0
    pinned_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StreamMetrics:
    """A stream that is not closed yet; attributes as in `ConnectionMetrics`, in bytes.

    Attributes:
        bytes_sent: Bytes that the adapter has been given.
        bytes_received: Bytes that the program has taken.
        waiting_to_be_received: Bytes that have arrived and that the program has not taken.
        waiting_to_be_sent: Bytes in the write buffer.
        pinned_bytes: Bytes of its rings.
    """

    number: int
    state: str
    device: str
    qpn: int
    peername: Address | None = None
    sockname: Address | None = None
    peer_qpn: int | None = None
    opened_at: float | None = None
    cause: str | None = None
    bytes_sent: int = 0
    bytes_received: int = 0
    waiting_to_be_received: int = 0
    waiting_to_be_sent: int = 0
    under_way: int = 0
    pinned_bytes: int = 0


@dataclass(frozen=True, slots=True)
class DatagramMetrics:
    """A datagram endpoint that is not closed yet; attributes as in `ConnectionMetrics`.

    Attributes:
        peername: (address, port) to which the endpoint is connected; None if it is not.
        datagrams_sent: Datagrams that the adapter has been given.
        bytes_sent: Bytes of these datagrams.
        datagrams_received: Datagrams that the program has been given.
        bytes_received: Bytes of these datagrams.
        dropped: Datagrams of the program that were lost before they left, because there was no room
            or no route to the receiver, the network was down, or the endpoint ended.  If the
            network was down, some of them are in `datagrams_sent`, too.
        ignored: Datagrams that arrived, but not from the peer to which the endpoint is connected,
            or for a group that it has left.  Those for which the adapter had no receive are not
            counted, because the adapter does not report them.
        waiting_to_be_received: Datagrams that have arrived and that the program has not been given.
        waiting_to_be_sent: Bytes, with 8 more for each datagram.
        pinned_bytes: Bytes of its slots.
    """

    number: int
    state: str
    device: str
    qpn: int
    peername: Address | None = None
    sockname: Address | None = None
    opened_at: float | None = None
    cause: str | None = None
    datagrams_sent: int = 0
    bytes_sent: int = 0
    datagrams_received: int = 0
    bytes_received: int = 0
    dropped: int = 0
    ignored: int = 0
    waiting_to_be_received: int = 0
    waiting_to_be_sent: int = 0
    pinned_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ListenerMetrics:
    """A listener of messages, or a server of streams, that is not closed.

    Attributes:
        kind: "messages" or "streams".
        state: "listening", or "bound": a server that does not serve yet.
        addresses: Local (address, port) pairs.
        connections: Connections of its clients, half-open ones included.
        half_open: Handshakes under way.
        waiting: Requests that wait for a handshake.
        unaccepted: Requests and connections that wait for the program.
        refused: Requests that the library refused by itself.
        denied: Clients that may not connect, as in `Totals`.
        dropped: Clients that were dropped in the middle of a handshake because others waited, or
            the listener was closed.
        pinned_bytes: Bytes that count in `ListenerLimits.max_pinned_bytes`.
        large_message_bytes: Bytes that count in `ListenerLimits.max_large_message_bytes`, and those
            that the program holds.
        request_bytes: Bytes that count in `ListenerLimits.max_request_bytes`.
        max_process_pinned_bytes: `ListenerLimits.max_process_pinned_bytes`, or its default.
    """

    kind: str
    state: str
    addresses: tuple[Address, ...]
    connections: int = 0
    half_open: int = 0
    waiting: int = 0
    unaccepted: int = 0
    refused: int = 0
    denied: int = 0
    dropped: int = 0
    pinned_bytes: int = 0
    large_message_bytes: int = 0
    request_bytes: int = 0
    max_process_pinned_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes that connections share.

    Attributes:
        name: "large_messages" (see `set_large_message_budget`), "listeners" (bytes that the
            connections of all listeners pin; the total is the least `max_process_pinned_bytes` of
            the open ones) or "growth" (bytes of slots and rings that have come with traffic, of
            one loop).
        used: Bytes that are held.
        total: Bytes that may be held; None for "listeners" if none is open.
    """

    name: str
    used: int
    total: int | None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All counters of a process, as of one moment.

    Attributes:
        time: Seconds since 1970.
        pid: Number of the process.
        totals: Sums over the life of the process.
        connect_s: Durations of connects in seconds, retries included.
        accept_s: Durations of handshakes with clients, in seconds.
        request_s: Durations of requests in seconds, from the request to its reply.
        reply_s: Durations of replies in seconds, from the call of the handler to the end of its
            reply.
        connections: Connections of messages, by number.
        streams: Streams, by number.
        listeners: Listeners and servers.
        budgets: Budgets of the process and of its loops.
        datagrams: Datagram endpoints, by number.
    """

    time: float
    pid: int
    totals: Totals
    connect_s: Histogram
    accept_s: Histogram
    request_s: Histogram
    reply_s: Histogram
    connections: tuple[ConnectionMetrics, ...] = ()
    streams: tuple[StreamMetrics, ...] = ()
    listeners: tuple[ListenerMetrics, ...] = ()
    budgets: tuple[Budget, ...] = field(default=())
    datagrams: tuple[DatagramMetrics, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The same as dicts, lists, strings and numbers, for `json.dumps`."""
        return dataclasses.asdict(self)


#: The sums when the process was forked: a child has sent nothing yet.
_inherited: tuple[int, ...] = ()


def _inherit() -> None:
    global _inherited
    _inherited = _sums()


def _sums() -> tuple[int, ...]:
    # None where the compiled module is missing: then there are no connections.
    totals: Callable[[], tuple[int, ...]] | None = getattr(_core, "totals", None)
    return () if totals is None else totals()


fork.renew(_inherit)


def _totals() -> Totals:
    sums, before = _sums(), _inherited or (0,) * 9
    counts, datagrams = tally.counts(), tally.datagram_totals()
    # In the order of the attributes, and of the sums in C.
    names = [each.name for each in dataclasses.fields(Totals)]
    moved = {name: now - then for name, now, then in zip(names, sums, before, strict=False)}
    return Totals(
        **moved,
        connects=sum(tally.durations["connect"].read()[0]),
        connects_failed=counts["connect_failed"],
        connect_retries=counts["connect_retried"],
        accepts=sum(tally.durations["accept"].read()[0]),
        accepts_failed=counts["accept_failed"],
        refused=counts["refused"],
        denied=counts["denied"],
        dropped=counts["dropped"],
        connections_lost=counts["connections_lost"],
        streams_lost=counts["streams_lost"],
        datagrams_sent=datagrams["sent"],
        datagram_bytes_sent=datagrams["bytes_sent"],
        datagrams_received=datagrams["received"],
        datagram_bytes_received=datagrams["bytes_received"],
        datagrams_dropped=datagrams["dropped"],
        datagrams_ignored=datagrams["ignored"],
    )


def _histogram(operation: str) -> Histogram:
    buckets, total_s = tally.durations[operation].read()
    return Histogram(tally.BOUNDS_S, buckets, total_s, tally.counts()[f"{operation}_failed"])


def _open(kind: Callable[..., T], names: frozenset[str], each: Any) -> list[T]:
    """The figures of an object; none if it is closed, perhaps in this moment."""
    try:
        seen = each._seen()
    except (ResourceClosedError, ForkedError):
        return []
    if seen["state"] == "closed":
        return []
    return [kind(**{name: value for name, value in seen.items() if name in names})]


def _names_of(kind: Any) -> frozenset[str]:
    return frozenset(each.name for each in dataclasses.fields(kind))


_CONNECTION, _STREAM = _names_of(ConnectionMetrics), _names_of(StreamMetrics)
_LISTENER, _DATAGRAM = _names_of(ListenerMetrics), _names_of(DatagramMetrics)


def _budgets(
    loops: set[asyncio.AbstractEventLoop], listeners: list[ListenerMetrics]
) -> list[Budget]:
    least = min((each.max_process_pinned_bytes for each in listeners), default=None)
    found = [
        Budget("large_messages", PROCESS.held(), PROCESS.total),
        Budget("listeners", PINNED.held, least),
    ]
    for loop in loops:
        growth = registry.find("growth", loop)
        if isinstance(growth, Growth):
            found.append(Budget("growth", growth.used, growth.total))
    return found


def snapshot() -> Snapshot:
    """Return all counters of this process, as of now; in any thread, and in any loop.

    It takes some ten microseconds for each connection, and waits for nothing.  Requests and replies
    are counted and timed from the first call on.
    """
    tally.observe()
    connections: list[ConnectionMetrics] = []
    streams: list[StreamMetrics] = []
    listeners: list[ListenerMetrics] = []
    datagrams: list[DatagramMetrics] = []
    loops: set[asyncio.AbstractEventLoop] = set()
    for each in fork.public_objects():
        if isinstance(each, Connection):
            loops.add(each._loop)
            connections += _open(ConnectionMetrics, _CONNECTION, each)
        elif isinstance(each, RdmaTransport):
            loops.add(each._loop)
            streams += _open(StreamMetrics, _STREAM, each)
        elif isinstance(each, (Listener, RdmaServer)):
            listeners += _open(ListenerMetrics, _LISTENER, each)
        elif isinstance(each, RdmaDatagramTransport):
            datagrams += _open(DatagramMetrics, _DATAGRAM, each)
    return Snapshot(
        time.time(),
        os.getpid(),
        _totals(),
        _histogram("connect"),
        _histogram("accept"),
        _histogram("request"),
        _histogram("reply"),
        tuple(sorted(connections, key=lambda each: each.number)),
        tuple(sorted(streams, key=lambda each: each.number)),
        tuple(sorted(listeners, key=lambda each: (each.kind, each.addresses))),
        tuple(_budgets(loops, listeners)),
        tuple(sorted(datagrams, key=lambda each: each.number)),
    )
