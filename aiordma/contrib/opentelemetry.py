"""OpenTelemetry: observable instruments over `aiordma.metrics`, and spans of its operations.

Needs opentelemetry-api: `pip install aiordma[opentelemetry]`.  The program provides the SDK and an
exporter; without them nothing is gathered.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from opentelemetry import metrics, trace
from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, TracerProvider

from aiordma.metrics import Snapshot, add_tracer, remove_tracer, snapshot

__all__ = ["Instrumentation", "instrument"]

_NAME = "aiordma"
_KINDS = {
    "connect": SpanKind.CLIENT,
    "accept": SpanKind.SERVER,
    "request": SpanKind.CLIENT,
    "reply": SpanKind.SERVER,
}
#: One snapshot serves all instruments of a collection.
_FRESH_S = 0.1

_Values = Callable[[Snapshot], Iterable[Observation]]


def _directed(attribute: str) -> _Values:
    return lambda seen: [
        Observation(getattr(seen.totals, f"{attribute}_{direction}"), {"direction": direction})
        for direction in ("sent", "received")
    ]


def _one(attribute: str) -> _Values:
    return lambda seen: [Observation(getattr(seen.totals, attribute))]


def _open(seen: Snapshot) -> Iterable[Observation]:
    kinds = ("connections", "streams", "listeners", "datagrams")
    return [Observation(len(getattr(seen, kind)), {"kind": kind}) for kind in kinds]


def _pinned(seen: Snapshot) -> Iterable[Observation]:
    kinds = ("connections", "streams", "datagrams")
    return [
        Observation(sum(each.pinned_bytes for each in getattr(seen, kind)), {"kind": kind})
        for kind in kinds
    ]


def _used(seen: Snapshot) -> Iterable[Observation]:
    return _sums((budget.name, budget.used) for budget in seen.budgets)


def _budgets(seen: Snapshot) -> Iterable[Observation]:
    known = (budget for budget in seen.budgets if budget.total is not None)
    return _sums((budget.name, budget.total or 0) for budget in known)


def _sums(parts: Iterable[tuple[str, int]]) -> Iterable[Observation]:
    sums: dict[str, int] = {}
    for name, part in parts:
        sums[name] = sums.get(name, 0) + part
    return [Observation(sum_, {"budget": name}) for name, sum_ in sums.items()]


_COUNTERS: dict[str, tuple[str, str, _Values]] = {
    "aiordma.messages": ("{message}", "Messages of connections.", _directed("messages")),
    "aiordma.message.bytes": ("By", "Bytes of these messages.", _directed("bytes")),
    "aiordma.stream.bytes": ("By", "Bytes of streams.", _directed("stream_bytes")),
    "aiordma.datagrams": ("{datagram}", "Datagrams.", _directed("datagrams")),
    "aiordma.datagram.bytes": ("By", "Bytes of datagrams.", _directed("datagram_bytes")),
    "aiordma.datagrams.dropped": ("{datagram}", "Lost before leaving.", _one("datagrams_dropped")),
    "aiordma.datagrams.ignored": ("{datagram}", "Not for the endpoint.", _one("datagrams_ignored")),
    "aiordma.one_sided.read": ("By", "Bytes of RDMA READs.", _one("bytes_read")),
    "aiordma.one_sided.written": ("By", "Bytes of RDMA WRITEs.", _one("bytes_written")),
    "aiordma.atomics": ("{operation}", "Atomic operations.", _one("atomics")),
    "aiordma.connects": ("{connection}", "Connections made.", _one("connects")),
    "aiordma.connects.failed": ("{connection}", "Connects that failed.", _one("connects_failed")),
    "aiordma.connects.retried": ("{retry}", "Refusals tried again.", _one("connect_retries")),
    "aiordma.accepts": ("{connection}", "Connections accepted.", _one("accepts")),
    "aiordma.refused": ("{client}", "Clients that listeners refused.", _one("refused")),
    "aiordma.denied": ("{client}", "Clients that may not connect.", _one("denied")),
    "aiordma.dropped": ("{client}", "Clients dropped in a handshake.", _one("dropped")),
    "aiordma.connections.lost": ("{connection}", "Broken connections.", _one("connections_lost")),
    "aiordma.streams.lost": ("{connection}", "Broken streams.", _one("streams_lost")),
}
_GAUGES: dict[str, tuple[str, str, _Values]] = {
    "aiordma.open": ("{connection}", "What is open now.", _open),
    "aiordma.pinned": ("By", "Registered memory.", _pinned),
    "aiordma.budget": ("By", "Bytes of each budget.", _budgets),
    "aiordma.budget.used": ("By", "Bytes held of each budget.", _used),
}


class Instrumentation:
    """Instruments and spans, until `close`; made by `instrument`."""

    def __init__(self, meter: metrics.Meter, tracer: trace.Tracer) -> None:
        self._tracer = tracer
        self._lock = threading.Lock()
        self._seen: Snapshot | None = None
        self._taken = 0.0
        self._closed = False
        for name, (unit, text, values) in _COUNTERS.items():
            meter.create_observable_counter(name, [self._watch(values)], unit, text)
        for name, (unit, text, values) in _GAUGES.items():
            meter.create_observable_gauge(name, [self._watch(values)], unit, text)
        add_tracer(self)

    def _watch(self, values: _Values) -> Callable[[CallbackOptions], Iterable[Observation]]:
        return lambda _: () if self._closed else values(self._fresh())

    def _fresh(self) -> Snapshot:
        with self._lock:
            if self._seen is None or time.monotonic() - self._taken > _FRESH_S:
                self._seen, self._taken = snapshot(), time.monotonic()
            return self._seen

    def begin(self, operation: str, attributes: Mapping[str, Any]) -> Span:
        """Begin the span of an operation, as a child of the task's current span."""
        return self._tracer.start_span(
            f"{_NAME} {operation}", kind=_KINDS.get(operation, SpanKind.INTERNAL),
            attributes=dict(attributes),
        )  # fmt: skip

    def end(self, begun: Span, error: BaseException | None) -> None:
        """End the span, with the error of the operation."""
        if error is not None:
            begun.set_attribute("error.type", type(error).__qualname__)
            if isinstance(error, Exception):
                begun.record_exception(error)
                begun.set_status(Status(StatusCode.ERROR, str(error)))
        begun.end()

    def close(self) -> None:
        """Make no more spans and observations.  Idempotent."""
        self._closed = True
        remove_tracer(self)


def instrument(
    *,
    meter_provider: MeterProvider | None = None,
    tracer_provider: TracerProvider | None = None,
) -> Instrumentation:
    """Show aiordma's metrics to a meter provider, and its operations to a tracer provider.

    Spans: `aiordma connect`, `aiordma accept`, `aiordma request` for `Connection.request`, and
    `aiordma reply` for each call of a request handler, with `server.address` or
    `network.peer.address`; and the blocks of code that uses `aiordma.metrics.Operation`.

    Args:
        meter_provider: By default the program's global provider.
        tracer_provider: Likewise.

    Returns:
        The instrumentation; `close()` ends it.
    """
    meter = metrics.get_meter(_NAME, meter_provider=meter_provider)
    tracer = trace.get_tracer(_NAME, tracer_provider=tracer_provider)
    return Instrumentation(meter, tracer)
