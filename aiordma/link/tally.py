"""Tally: connects, accepts and requests of this process, counted, timed and shown to tracers.

Theory of operation
    C counts messages and bytes, for each connection, and sums them (`_core/tally.c`).  Here is the
    rest: datagrams, rare events, and the durations of operations, in buckets with fixed bounds.
    `aiordma.metrics` reads all of it.

    The counters of a datagram endpoint are in the sums from its making on.  At its end they are
    added to those of the endpoints that have ended, in one step, so that no sum ever falls.

    A tracer (`aiordma.contrib.opentelemetry`) gets the same operations.  While there is none
    it costs a look at an empty tuple.  A tracer that raises is logged, and does no harm.

    Requests and replies are frequent, and looking at the clock takes longer than sending a short
    message.  So they are counted, timed and traced only once somebody wants that: `observed`.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol, Self

from aiordma.logs import log_of
from aiordma.loop import fork
from aiordma.loop.uncopied import Uncopied

__all__ = [
    "BOUNDS_S",
    "COUNTERS",
    "OPERATIONS",
    "ConnectionStats",
    "DatagramCounts",
    "Durations",
    "Operation",
    "Tracer",
    "add_tracer",
    "count",
    "counts",
    "datagram_totals",
    "durations",
    "observe",
    "observed",
    "peer_attributes",
    "remove_tracer",
]

_log = log_of()
#: Upper bounds of the buckets, in seconds: a request on an adapter takes microseconds, and a
#: connect that is tried again takes seconds.
BOUNDS_S = (
    1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
    1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
#: The operations that are timed.
OPERATIONS = ("connect", "accept", "request", "reply")
#: The events that are counted.
EVENTS = (
    *(f"{operation}_failed" for operation in OPERATIONS),
    "connect_retried", "refused", "denied", "dropped", "connections_lost", "streams_lost",
)  # fmt: skip

_lock = fork.new_lock()


@dataclass(slots=True)
class ConnectionStats:
    """Counters of a connection."""

    messages_sent: int = 0
    messages_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    atomics: int = 0


#: Their names.
COUNTERS = tuple(field.name for field in fields(ConnectionStats))


class Tracer(Protocol):
    """An observer of operations; its methods are called in the operation's task."""

    def begin(self, operation: str, attributes: Mapping[str, Any]) -> Any:
        """Note that an operation begins.

        Args:
            operation: "connect", "accept", "request" or "reply".
            attributes: Facts, by the names of OpenTelemetry.

        Returns:
            An object for `end`.
        """

    def end(self, begun: Any, error: BaseException | None) -> None:
        """Note that an operation is over.

        Args:
            begun: The object that `begin` has returned for it.
            error: The exception that it raised, perhaps a cancellation; None if it succeeded.
        """


class Durations:
    """Durations of one kind of operation, in buckets.

    Attributes:
        buckets: Number of durations up to each of `BOUNDS_S`, and above the last; not summed up.
        total_s: Sum of all durations, in seconds.
    """

    __slots__ = ("buckets", "total_s")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all durations."""
        self.buckets: list[int] = [0] * (len(BOUNDS_S) + 1)
        self.total_s: float = 0.0

    def add(self, seconds: float) -> None:
        """Count a duration."""
        bucket = bisect_left(BOUNDS_S, seconds)
        with _lock:
            self.buckets[bucket] += 1
            self.total_s += seconds

    def read(self) -> tuple[tuple[int, ...], float]:
        """The buckets and the sum, as of one moment."""
        with _lock:
            return tuple(self.buckets), self.total_s


#: By operation.
durations: dict[str, Durations] = {operation: Durations() for operation in OPERATIONS}
#: Whether requests and replies are to be counted, timed and traced.
observed: bool = False
_counts = dict.fromkeys(EVENTS, 0)
_tracers: tuple[Tracer, ...] = ()


def observe() -> None:
    """Have requests and replies counted, timed and traced from now on."""
    global observed
    observed = True


def count(event: str) -> None:
    """Count an event of `EVENTS`; in any thread."""
    with _lock:
        _counts[event] += 1


def counts() -> dict[str, int]:
    """The number of each event, as of one moment."""
    with _lock:
        return dict(_counts)


class DatagramCounts:
    """Counters of a datagram endpoint, changed by its loop; in the sums until `end`, and after it.

    Attributes:
        sent: Datagrams that the adapter has been given.
        bytes_sent: Bytes of these datagrams.
        received: Datagrams that the program has been given.
        bytes_received: Bytes of these datagrams.
        dropped: Datagrams of the program that were lost before they left.
        ignored: Datagrams that arrived, but not from the peer or from a group of the endpoint.
    """

    __slots__ = ("bytes_received", "bytes_sent", "dropped", "ignored", "received", "sent")

    def __init__(self) -> None:
        self.sent: int = 0
        self.bytes_sent: int = 0
        self.received: int = 0
        self.bytes_received: int = 0
        self.dropped: int = 0
        self.ignored: int = 0
        with _lock:
            _datagrams.add(self)

    def read(self) -> dict[str, int]:
        """All counters, by name."""
        return {name: getattr(self, name) for name in DATAGRAM_COUNTERS}

    def end(self) -> None:
        """The endpoint ends, and counts nothing more.  Idempotent."""
        with _lock:
            if self in _datagrams:
                _datagrams.remove(self)
                for name, value in self.read().items():
                    _ended[name] += value


#: The attributes of `DatagramCounts`.
DATAGRAM_COUNTERS = (
    "sent", "bytes_sent", "received", "bytes_received", "dropped", "ignored",
)  # fmt: skip
_datagrams: set[DatagramCounts] = set()
_ended = dict.fromkeys(DATAGRAM_COUNTERS, 0)


def datagram_totals() -> dict[str, int]:
    """Sums of the counters of all datagram endpoints that there have been."""
    with _lock:
        # A copy: an endpoint that ends after the lock would be in both.
        seen = [dict(_ended), *(each.read() for each in _datagrams)]
    return {name: sum(each[name] for each in seen) for name in DATAGRAM_COUNTERS}


def add_tracer(tracer: Tracer) -> None:
    """Report the operations that begin from now on to `tracer`."""
    global _tracers
    observe()
    with _lock:
        _tracers = (*_tracers, tracer)


def remove_tracer(tracer: Tracer) -> None:
    """Undo `add_tracer`; `tracer` still gets the end of operations under way.  Idempotent."""
    global _tracers
    with _lock:
        _tracers = tuple(each for each in _tracers if each is not tracer)


class Operation(Uncopied):
    """Counts, times and traces an operation; a context manager around the whole of it.

    An exception inside the block makes it a failed operation, which is counted but not timed; a
    canceled operation is neither.  The exception goes on.

    Args:
        kind: One of `OPERATIONS`.
        attributes: Facts for tracers, such as `server.address`; or a function that returns them,
            called only if there is a tracer.
    """

    __slots__ = ("_attributes", "_began", "_begun", "_kind")

    def __init__(self, kind: str, attributes: Any = None) -> None:
        self._kind = kind
        self._attributes = attributes

    def __enter__(self) -> Self:
        self._begun: tuple[tuple[Tracer, Any], ...] = ()
        if _tracers:
            self._begin()
        self._began = time.perf_counter()
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        seconds = time.perf_counter() - self._began
        if error is None:
            durations[self._kind].add(seconds)
        elif isinstance(error, Exception):
            count(f"{self._kind}_failed")
        for tracer, begun in self._begun:
            try:
                tracer.end(begun, error)
            except Exception as exc:
                _log.error("a tracer failed", exc_info=exc)

    def _begin(self) -> None:
        try:
            attributes = self._attributes
            attributes = attributes() if callable(attributes) else attributes or {}
            self._begun = tuple((each, each.begin(self._kind, attributes)) for each in _tracers)
        except Exception as exc:
            _log.error("a tracer failed", exc_info=exc)


def peer_attributes(address: tuple[str, int] | None) -> dict[str, Any]:
    """The address of a peer by the names of OpenTelemetry."""
    if address is None:
        return {}
    return {"network.peer.address": address[0], "network.peer.port": address[1]}


def _renew() -> None:
    """In a forked child: it has connected to nothing."""
    for event in EVENTS:
        _counts[event] = 0
    _datagrams.clear()
    _ended.update(dict.fromkeys(DATAGRAM_COUNTERS, 0))
    for each in durations.values():
        each.reset()


fork.renew(_renew)
