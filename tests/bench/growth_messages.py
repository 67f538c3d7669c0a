"""What a message costs while there are 1, 10, 100, 1,000 connections.

    python -m aiordma_softroce --engine qemu --counted -- \\
        python tests/bench/growth_messages.py

Messages of 64 bytes go to an echo in another process, a few at a time, each over the next of all
connections; the time for both ends, divided by the messages in both directions, is the cost.  Then
over ten of them alone, while the others are idle.  "lean" has a small queue and small slots for
each; growth_sharing.py has what a pool makes of it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import aiordma
from tests.bench.growth import Row, own_address, parser, peer, publish, run
from tests.bench.growth_memory import connect_up_to

GOAL = 1.3
UNDER_WAY = 8
PAYLOAD = bytes(64)


async def cost(connections: list[aiordma.Connection], messages: int) -> float:
    """Microseconds a message, by turns over these connections."""
    turns = itertools.cycle(connections)
    left = messages // 2

    async def worker() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            connection = next(turns)
            await connection.send(PAYLOAD)
            (await connection.recv()).release()

    begun = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(min(UNDER_WAY, len(connections)))))
    return (time.perf_counter() - begun) / messages * 1e6


async def curve(
    address: str, setting: str, loop: str, counts: list[int], messages: int
) -> dict[tuple[int, int], float]:
    """Microseconds by (connections, those of them that are used); median of three."""
    found: dict[tuple[int, int], float] = {}
    connections: list[aiordma.Connection] = []
    async with peer(address, setting, loop, "--echo") as other:
        for count in counts:
            await connect_up_to(connections, count, address, other, setting)
            for used in dict.fromkeys((count, min(count, 10))):
                # Everything that is used has been used before.
                await cost(connections[:used], 2 * used)
                tries = [await cost(connections[:used], messages) for _ in range(3)]
                found[count, used] = statistics.median(tries)
        for connection in connections:
            connection.abort()
    return found


async def measure(options: argparse.Namespace) -> list[Row]:
    """All figures."""
    address = options.address or own_address()
    counts = sorted(int(count) for count in options.connections.split(","))
    rows = []
    for setting in options.settings.split(","):
        found = await curve(address, setting, options.loop, counts, options.messages)
        base = found.get((10, 10))
        for (count, used), us in found.items():
            name = f"cost per message at {count:,} connections"
            if used != count:
                name += f", {used} of them used"
            if setting != "lean":
                name += f" ({setting})"
            whole = count == counts[-1] and used == count and setting == "lean"
            rows.append(Row(name, us, base, GOAL if whole else None, "us"))
    return rows


def main() -> None:
    """Parse, measure, print."""
    options = parser(__doc__)
    options.add_argument("--connections", default="1,10,100,1000")
    options.add_argument("--messages", type=int, default=2000, help="for each figure")
    options.add_argument("--settings", default="lean")
    given = options.parse_args()
    rows = run(given.loop, measure(given))
    publish(f"cost per message, {given.loop}, beside that at 10 connections", rows, given.json)


if __name__ == "__main__":
    main()
