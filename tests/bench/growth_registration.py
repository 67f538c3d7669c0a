"""What it costs to register memory, and what the registration cache makes of it; and the limits.

    python -m aiordma_softroce --engine qemu --counted -- \\
        python tests/bench/growth_registration.py

For each size, the median of some rounds: microseconds of a registration on the loop's thread and
of its end, of a look-up in the cache that finds the buffer, and of one that does not (it registers,
and drops another).  The memory has been written to before: what the kernel does when it is first
touched is no part of it.  At the end what the adapter says that it can hold.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import aiordma
from aiordma.memory import RegistrationCache
from aiordma.verbs import Context, MemoryRegion, ProtectionDomain
from tests.bench.growth import Row, parser, publish, run

SIZES = tuple(4096 << (2 * step) for step in range(8))  # 4 KiB to 64 MiB
LIMITS = ("max_qp", "max_cq", "max_mr", "max_pd", "max_cqe", "max_qp_wr", "max_srq")


def title(size: int) -> str:
    """A size in words."""
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


async def registration(pd: ProtectionDomain, data: bytearray, rounds: int) -> tuple[float, float]:
    """Microseconds of a registration, and of its end until the memory is the program's again."""
    made, ended = [], []
    for _ in range(rounds):
        begun = time.perf_counter()
        region = MemoryRegion(pd, data)
        made.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        region.close()
        await region.wait_closed()
        ended.append(time.perf_counter() - begun)
    return statistics.median(made) * 1e6, statistics.median(ended) * 1e6


async def looked_up(cache: RegistrationCache, buffers: list[bytearray], rounds: int) -> float:
    """Microseconds of one use of the cache, by turns over the buffers."""
    times = []
    for turn in range(rounds):
        begun = time.perf_counter()
        async with cache.get(buffers[turn % len(buffers)]):
            times.append(time.perf_counter() - begun)
        await asyncio.sleep(0)
    return statistics.median(times) * 1e6


async def one_size(pd: ProtectionDomain, size: int, rounds: int) -> list[Row]:
    """The four figures of a size."""
    data, other = (bytearray(b"\1") * size for _ in range(2))
    made, ended = await registration(pd, data, rounds)
    async with RegistrationCache(pd, max_bytes=4 * size) as cache:
        async with cache.get(data):
            pass
        hit = await looked_up(cache, [data], rounds)
        assert cache.stats.misses == 1
    async with RegistrationCache(pd, max_bytes=size) as cache:  # room for one of the two
        miss = await looked_up(cache, [data, other], rounds)
        assert cache.stats.hits == 0
    name = title(size)
    return [
        Row(f"registering {name}", made, unit="us"),
        Row(f"deregistering {name}", ended, unit="us"),
        Row(f"cache hit, {name}, beside registering it", hit, made, unit="us"),
        Row(f"cache miss, {name}, beside registering it", miss, made, unit="us"),
    ]


async def measure(options: argparse.Namespace) -> list[Row]:
    """All figures, on the first device."""
    rows = []
    context: Context
    with aiordma.devices()[0].open() as context, ProtectionDomain(context) as pd:
        for size in SIZES:
            if size <= options.largest:
                rows += await one_size(pd, size, options.rounds)
        rows += [
            Row(f"{context.name}: {name}", getattr(context.attributes, name)) for name in LIMITS
        ]
    await context.wait_closed()
    return rows


def main() -> None:
    """Parse, measure, print."""
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--largest", type=int, default=SIZES[-1], help="bytes")
    given = options.parse_args()
    rows = run(given.loop, measure(given))
    publish(f"registering memory, {given.loop}", rows, given.json)


if __name__ == "__main__":
    main()
