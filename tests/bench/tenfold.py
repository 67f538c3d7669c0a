"""The measured curve carried on to 10,000 and 100,000 connections, one end: plain arithmetic.

What is multiplied is either measured, or follows from the settings and from the limits of the
kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import aiordma
from aiordma.endpoint.config import plan_of
from tests.bench.growth import OWN
from tests.bench.tables import Row, markdown

COUNTS = (10_000, 100_000)
#: net.ipv4.ip_local_port_range and vm.max_map_count as kernels come.
LOCAL_PORTS = 60_999 - 32_768 + 1
MAPPINGS = 65_530
#: What is counted, how much of it for a connection, how it is written, the limit, the limit's name.
Line = tuple[str, float | None, Callable[[float], str], float | None, str]


def pinned(config: aiordma.ConnectionConfig) -> int:
    """Bytes that an idle connection pins."""
    return plan_of(config).pinned


def amount(number: float) -> str:
    """Bytes in words."""
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if number >= size:
            return (
                f"{number / size:,.3g} {unit}"
                if number < 100 * size
                else f"{number / size:,.0f} {unit}"
            )
    return f"{number / 1e3:.3g} kB"


def seconds(number: float) -> str:
    """A time in words."""
    if number >= 120:
        return f"{number / 60:,.0f} min"
    return f"{number:.3g} s" if number >= 1 else f"{number * 1000:.3g} ms"


def count(number: float) -> str:
    """A number of things, of which there is no part."""
    return f"{math.ceil(number - 1e-6):,}"


def adapters(name: str, limit: float | None) -> str:
    """A limit of the adapter."""
    return f"`{name}`" if limit is None else f"{limit:,.0f} (`{name}`)"


def tenfold_table(
    *,
    python_kib: float | None,
    idle_us: float | None,
    rate: float | None,
    mappings: float | None,
    limits: Mapping[str, float | None],
) -> str:
    """The table.

    Args:
        python_kib: Python memory of an idle connection.
        idle_us: Its processor time a second.
        rate: Connections a second.
        mappings: Mappings of memory that one has.
        limits: What the adapter can hold, by the names of its attributes.
    """
    default = aiordma.ConnectionConfig()
    pool = aiordma.ConnectionConfig(
        shared_slots=100_000 * OWN.guaranteed, slot_size=OWN.slot_size, recv_depth=OWN.recv_depth,
        send_depth=OWN.send_depth, rendezvous_window=OWN.rendezvous_window,
    )  # fmt: skip
    room = limits["max_cqe"]
    queues = room and (default.sends + default.receives) / room
    ports = f"{LOCAL_PORTS:,} by default"
    lines: list[Line] = [
        ("pinned, default settings", pinned(default), amount, None, "`RLIMIT_MEMLOCK`, memory"),
        ("pinned, pool of [](sharing.md), all idle", pinned(pool), amount, None, "the same"),
        ("Python memory", python_kib and python_kib * 1024, amount, None, "memory"),
        ("memory mappings", mappings, count, MAPPINGS, f"{MAPPINGS:,} by default"),
        ("local ports towards one listener", 1, count, LOCAL_PORTS, ports),
        *(
            (name, each, count, limits[limit], adapters(limit, limits[limit]))
            for name, each, limit in (
                ("queue pairs", 1, "max_qp"),
                ("completion queues, default settings", queues, "max_cq"),
                ("memory regions", 1, "max_mr"),
                ("memory regions, pool, all idle", 1, "max_mr"),
            )
        ),
        (
            "processor time without PING, each second",
            None if idle_us is None else max(idle_us, 0) / 1e6,
            seconds,
            1,
            "the loop's time",
        ),
        ("PINGs a second, all idle", 1 / (2 * default.keepalive_s), count, None, "the loop's time"),
        ("connecting, both ends together", rate and 1 / rate, seconds, None, "patience"),
    ]
    rows: list[Row] = []
    for name, each, shown, limit, said in lines:
        cells = [name]
        for many in COUNTS:
            if each is None:
                cells.append("-")
                continue
            cell = shown(each * many)
            cells.append(f"**{cell}**" if limit is not None and each * many > limit else cell)
        rows.append((*cells, said))
    return markdown(("", *(f"{many:,}" for many in COUNTS), "limit"), rows)
