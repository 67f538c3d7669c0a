"""Counters of this process, and of its open connections, endpoints and listeners, by `snapshot`.

Nothing is gathered until a program asks.  `serve` and `dump_on_signal` let `aiordma top` ask;
`Operation` is for code that sends requests and wants them timed, counted and traced.
"""

from aiordma.link.tally import Operation, Tracer, add_tracer, remove_tracer
from aiordma.metrics.serving import dump_on_signal, serve
from aiordma.metrics.snapshot import (
    Snapshot,
    snapshot,
)

__all__ = [
    "Operation",
    "Snapshot",
    "Tracer",
    "add_tracer",
    "dump_on_signal",
    "remove_tracer",
    "serve",
    "snapshot",
]
