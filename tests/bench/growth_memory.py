"""What one more idle connection costs: memory, mappings, descriptors, time.

    python -m aiordma_softroce --engine qemu --counted -- \\
        python tests/bench/growth_memory.py

So many connections are made, then many more; the differences, divided, are what one costs.  Both
ends are told apart, each in its own process.  Python memory is what tracemalloc knows after a
garbage collection; slots and rings are mapped past it, and are part of the resident memory, which
is measured in a second pass without tracing.  The slots are small, so that 1,000 connections fit.
Processor time is that of some idle seconds without a PING; with the default settings one of the
two ends sends one every ten seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
import tracemalloc
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import aiordma
from tests.bench.growth import CONFIGS, LIMIT_S, Peer, Row, own_address, parser, peer, publish, run
from tests.bench.growth_peer import memory

GOAL_KIB = 16
AT_ONCE = 50
IDLE_S = 5.0


async def connect_up_to(
    connections: list[aiordma.Connection], count: int, address: str, other: Peer, setting: str
) -> None:
    """Make more connections, some at a time, until there are so many on both ends."""
    while len(connections) < count:
        more = min(AT_ONCE, count - len(connections))
        connections += await asyncio.gather(
            *(
                aiordma.connect(address, other.port, config=CONFIGS[setting], timeout=LIMIT_S)
                for _ in range(more)
            )
        )
    await other.ask(f"wait {count}")


def mappings() -> int:
    """Pieces of memory that this process has mapped; the kernel limits them."""
    return len(Path("/proc/self/maps").read_text().splitlines())


async def costs(
    address: str, setting: str, loop: str, few: int, many: int, *, trace: bool
) -> dict[str, float]:
    """Bytes and descriptors of one connection more."""
    connections: list[aiordma.Connection] = []
    points: list[dict[str, float]] = []
    async with peer(address, setting, loop, *(["--trace"] if trace else [])) as other:
        for count in (few, many):
            await connect_up_to(connections, count, address, other, setting)
            if trace and not points:
                tracemalloc.start()  # what the first ones allocated is of no interest
            here, there = memory(), await other.ask("memory")
            descriptors = len(os.listdir("/proc/self/fd"))
            mapped = mappings()
            begun = time.process_time()
            await asyncio.sleep(IDLE_S)
            idle = time.process_time() - begun
            points.append({
                "traced here": here["traced"], "traced there": there["traced"],
                "resident here": here["resident"], "resident there": there["resident"],
                "descriptors": descriptors, "mappings": mapped, "idle": idle / IDLE_S * 1e6,
            })  # fmt: skip
        for connection in connections:
            connection.abort()
        tracemalloc.stop()
    first, last = points
    return {name: (last[name] - first[name]) / (many - few) for name in first}


async def measure(options: argparse.Namespace) -> list[Row]:
    """All figures."""
    address = options.address or own_address()
    few, many = options.few, options.many
    traced = await costs(address, options.setting, options.loop, few, many, trace=True)
    plain = await costs(address, options.setting, options.loop, few, many, trace=False)
    here, there = traced["traced here"] / 1024, traced["traced there"] / 1024
    name = "Python memory per idle connection (KiB)"
    return [
        Row(name, max(here, there), goal=GOAL_KIB, unit=f"{few} to {many}"),
        Row(f"{name}, connecting end", here),
        Row(f"{name}, accepting end", there),
        Row("resident memory per connection (KiB), connecting end", plain["resident here"] / 1024),
        Row("resident memory per connection (KiB), accepting end", plain["resident there"] / 1024),
        Row("descriptors per connection, connecting end", plain["descriptors"]),
        Row("memory mappings per connection, connecting end", plain["mappings"]),
        Row(
            "processor time per idle connection, connecting end", plain["idle"], unit="us a second"
        ),
    ]


def main() -> None:
    """Parse, measure, print."""
    options = parser(__doc__)
    options.add_argument("--few", type=int, default=100)
    options.add_argument("--many", type=int, default=1000)
    options.add_argument("--setting", choices=CONFIGS, default="lean")
    given = options.parse_args()
    rows = run(given.loop, measure(given))
    publish(f"an idle connection, {given.loop}, {given.setting} slots", rows, given.json)


if __name__ == "__main__":
    main()
