"""A snapshot with one of everything, as no device is needed for."""

from __future__ import annotations

import dataclasses
from typing import Any

from aiordma import metrics
from aiordma.link.tally import BOUNDS_S
from aiordma.metrics.snapshot import (
    Budget,
    ConnectionMetrics,
    DatagramMetrics,
    Histogram,
    ListenerMetrics,
    StreamMetrics,
    Totals,
)

PEER = ("192.0.2.7", 18515)
HISTOGRAM = Histogram(BOUNDS_S, (1, 2, *[0] * (len(BOUNDS_S) - 2), 4), 42.5, 3)
NONE = Histogram(BOUNDS_S, (0,) * (len(BOUNDS_S) + 1), 0.0, 0)
# Each total has a number of its own.
TOTALS = Totals(**{each.name: 100 + i for i, each in enumerate(dataclasses.fields(Totals))})


def seen(**changes: Any) -> metrics.Snapshot:
    """The snapshot, with some attributes changed."""
    connections = (
        ConnectionMetrics(
            5, "open", "rxe0", 17, PEER, ("192.0.2.1", 4), 18, 1000.0,
            messages_sent=10, bytes_sent=10_000, messages_received=20, bytes_received=2_000_000,
            waiting_to_be_received=3, waiting_to_be_sent=2, pinned_bytes=65536,
        ),
        ConnectionMetrics(9, "connecting", "rxe0", 19),
    )  # fmt: skip
    streams = (
        StreamMetrics(
            7, "open", "rxe0", 20, ("fe80::1%eth0", 9), opened_at=1009.0, bytes_sent=5000,
            pinned_bytes=4096,
        ),
    )  # fmt: skip
    datagrams = (
        DatagramMetrics(
            8, "open", "rxe0", 21, sockname=("192.0.2.1", 7007), opened_at=1000.0,
            datagrams_sent=40, bytes_sent=400, datagrams_received=60, bytes_received=600,
            dropped=1, ignored=2, waiting_to_be_received=5, waiting_to_be_sent=9, pinned_bytes=8192,
        ),
    )  # fmt: skip
    listeners = (
        ListenerMetrics(
            "messages", "listening", (("0.0.0.0", 18515), ("::", 18515)), 2, 1, 4, 5, 6, 7
        ),
    )
    budgets = (
        Budget("large_messages", 11, 1000),
        Budget("listeners", 12, None),
        Budget("growth", 1, 100),
        Budget("growth", 2, 100),
    )
    made = metrics.Snapshot(
        1010.0, 4242, TOTALS, HISTOGRAM, NONE, HISTOGRAM, NONE, connections, streams, listeners,
        budgets, datagrams,
    )  # fmt: skip
    return dataclasses.replace(made, **changes)
