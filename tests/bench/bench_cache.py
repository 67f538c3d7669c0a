"""What a registration costs, and what the cache makes of it.

    python -m aiordma.testing.softroce -- python tests/bench/bench_cache.py

One line a size: microseconds of `MemoryRegion(...)` alone, of that and the wait until it is
deregistered (which a thread does), of a hit, and the first divided by the last; each the best of
several rounds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import aiordma
from aiordma.memory import RegistrationCache
from aiordma.verbs import MemoryRegion, ProtectionDomain

SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20)
ROUNDS = 5


async def best(count: int, action: Callable[[], Awaitable[None]]) -> float:
    """Microseconds of one action, in the fastest round."""
    rounds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(count):
            await action()
        rounds.append((time.perf_counter() - start) / count)
    return min(rounds) * 1e6


async def measure(pd: ProtectionDomain, size: int) -> tuple[float, float, float]:
    """Microseconds of a registration, of one with its end, and of a use of the cache."""
    data = bytearray(size)
    alone: list[float] = []

    async def register() -> None:
        start = time.perf_counter()
        region = MemoryRegion(pd, data)
        alone.append(time.perf_counter() - start)
        region.close()
        await region.wait_closed()

    async with RegistrationCache(pd) as cache:

        async def hit() -> None:
            async with cache.get(data):
                pass

        await hit()
        cached = await best(2000, hit)
        assert cache.stats.misses == 1
    registered = await best(20, register)
    return min(alone) * 1e6, registered, cached


async def main() -> None:
    """Measure and print."""
    with aiordma.devices()[0].open() as context, ProtectionDomain(context) as pd:
        print(f"device {context.name}, times in us")
        print(f"{'bytes':>10} {'register':>9} {'and end':>9} {'hit':>6} {'ratio':>6}")
        for size in SIZES:
            alone, registered, cached = await measure(pd, size)
            ratio = alone / cached
            print(f"{size:>10} {alone:>9.1f} {registered:>9.1f} {cached:>6.2f} {ratio:>6.0f}")
    await context.wait_closed()


if __name__ == "__main__":
    asyncio.run(main())
