"""Prometheus: a collector of prometheus_client over `aiordma.metrics.snapshot`.

Needs prometheus_client: `pip install aiordma[prometheus]`.  Nothing is gathered between scrapes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import REGISTRY, Collector, CollectorRegistry

from aiordma.logs import log_of
from aiordma.metrics import Snapshot, snapshot
from aiordma.metrics.snapshot import Histogram

__all__ = ["RdmaCollector", "register"]

_log = log_of("metrics")

# The name without `aiordma_`, the attribute of Totals for each value of the label `direction`.
_DIRECTED = {
    "messages": ("Messages of connections.", "messages"),
    "message_bytes": ("Bytes of the messages of connections.", "bytes"),
    "stream_bytes": ("Bytes of streams.", "stream_bytes"),
    "datagrams": ("Datagrams.", "datagrams"),
    "datagram_bytes": ("Bytes of datagrams.", "datagram_bytes"),
}
_PLAIN = {
    "one_sided_read_bytes": ("Bytes of RDMA READs.", "bytes_read"),
    "one_sided_written_bytes": ("Bytes of RDMA WRITEs.", "bytes_written"),
    "atomics": ("Atomic operations.", "atomics"),
    "connect_retries": ("Refusals after which a connect was tried again.", "connect_retries"),
    "refused": ("Clients that listeners refused by themselves.", "refused"),
    "denied": ("Clients that may not connect.", "denied"),
    "dropped": ("Clients dropped in the middle of a handshake.", "dropped"),
    "connections_lost": ("Connections that broke.", "connections_lost"),
    "streams_lost": ("Streams that broke.", "streams_lost"),
    "datagrams_dropped": ("Datagrams lost before they left.", "datagrams_dropped"),
    "datagrams_ignored": ("Datagrams not for the endpoint.", "datagrams_ignored"),
}
_TIMED = {
    "connect": "Time to connect, retries included.",
    "accept": "Time of the handshake with a client.",
    "request": "Time from a request to its reply.",
    "reply": "Time from the call of a handler to the end of its reply.",
}
_OF_CONNECTION = {
    "connection_waiting_messages": (
        "Messages that have arrived and that the program has not taken.", "waiting_to_be_received"
    ),
    "connection_waiting_senders": ("Tasks that wait in send().", "waiting_to_be_sent"),
    "connection_pinned_bytes": ("Bytes of registered memory.", "pinned_bytes"),
}  # fmt: skip


class RdmaCollector(Collector):
    """Makes metrics from a snapshot at each scrape.

    Args:
        each_connection: Whether to have gauges for each connection, with the labels `number` and
            `peer`; off by default, as each connection then has time series of its own.
        take: Returns the snapshot.
    """

    def __init__(
        self, *, each_connection: bool = False, take: Callable[[], Snapshot] = snapshot
    ) -> None:
        self._each = each_connection
        self._take = take

    def describe(self) -> Iterable[Metric]:
        """Nothing: no metric needs to be gathered for the registration."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """The metrics of the process as of now; in any thread."""
        seen = self._take()
        yield from _totals(seen)
        for name, text in _TIMED.items():
            yield _histogram(f"aiordma_{name}_seconds", text, getattr(seen, f"{name}_s"))
            failed = getattr(seen, f"{name}_s").failed
            kind = f"aiordma_{name}_failures"
            yield CounterMetricFamily(kind, f"Operations that failed: {name}.", value=failed)
        yield from _now(seen)
        if self._each:
            yield from _connections(seen)


def _totals(seen: Snapshot) -> Iterator[Metric]:
    totals = seen.totals
    for name, (text, attribute) in _DIRECTED.items():
        family = CounterMetricFamily(f"aiordma_{name}", text, labels=["direction"])
        for direction in ("sent", "received"):
            family.add_metric([direction], getattr(totals, f"{attribute}_{direction}"))
        yield family
    for name, (text, attribute) in _PLAIN.items():
        yield CounterMetricFamily(f"aiordma_{name}", text, value=getattr(totals, attribute))


def _histogram(name: str, text: str, seen: Histogram) -> Metric:
    buckets, below = [], 0
    for bound, count in zip((*map(repr, seen.bounds_s), "+Inf"), seen.counts, strict=True):
        below += count
        buckets.append((bound, below))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=seen.total_s)


def _now(seen: Snapshot) -> Iterator[Metric]:
    open_ = GaugeMetricFamily("aiordma_open", "What is open now.", labels=["kind"])
    for kind in ("connections", "streams", "listeners", "datagrams"):
        open_.add_metric([kind], len(getattr(seen, kind)))
    yield open_
    pinned = GaugeMetricFamily(
        "aiordma_pinned_bytes", "Registered memory of what is open.", labels=["kind"]
    )
    for kind in ("connections", "streams", "datagrams"):
        pinned.add_metric([kind], sum(each.pinned_bytes for each in getattr(seen, kind)))
    yield pinned
    used = GaugeMetricFamily("aiordma_budget_used_bytes", "Bytes held.", labels=["budget"])
    total = GaugeMetricFamily("aiordma_budget_bytes", "Bytes that there are.", labels=["budget"])
    sums: dict[str, list[int]] = {}
    for budget in seen.budgets:  # each loop has one of the same name
        sum_ = sums.setdefault(budget.name, [0, 0])
        sum_[0] += budget.used
        sum_[1] += budget.total or 0
    for name, (held, most) in sums.items():
        used.add_metric([name], held)
        if most:
            total.add_metric([name], most)
    yield used
    yield total
    for name in ("half_open", "waiting", "unaccepted"):
        family = GaugeMetricFamily(
            f"aiordma_listener_{name}", f"Clients of a listener: {name}.", labels=["address"]
        )
        for each in seen.listeners:
            family.add_metric([_text(each.addresses[0])], getattr(each, name))
        yield family


def _connections(seen: Snapshot) -> Iterator[Metric]:
    for name, (text, attribute) in _OF_CONNECTION.items():
        family = GaugeMetricFamily(f"aiordma_{name}", text, labels=["number", "peer"])
        for each in seen.connections:
            labels = [str(each.number), _text(each.peername)]
            family.add_metric(labels, getattr(each, attribute))
        yield family


def _text(address: Any) -> str:
    return "" if address is None else f"{address[0]} port {address[1]}"


def register(
    registry: CollectorRegistry = REGISTRY, *, each_connection: bool = False
) -> RdmaCollector:
    """Have a registry, by default prometheus_client's own, show aiordma's metrics.

    In the multiprocess mode of prometheus_client (`PROMETHEUS_MULTIPROC_DIR`) a scrape adds up the
    files of its own counters, and asks no collector: have each process serve its own metrics.  A
    warning in the log says so.

    Args:
        registry: The registry.
        each_connection: As for `RdmaCollector`.

    Returns:
        The collector, for `registry.unregister`.
    """
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        _log.warning(
            "prometheus_client is in multiprocess mode, whose MultiProcessCollector shows nothing "
            "of aiordma: let each process serve its own metrics on a port of its own"
        )
    collector = RdmaCollector(each_connection=each_connection)
    registry.register(collector)
    return collector
