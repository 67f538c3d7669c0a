"""Connections a second, many at once, beside cmtime.

    python -m aiordma_softroce --engine qemu --counted -- \\
        python tests/bench/growth_connect.py

Ours: `asyncio.gather` of so many `connect`, to one listener in another process; until all of them
can send.  cmtime does the same step by step for all connections: the sum of its steps from the
creation of the ids to the connection is compared (bind, disconnect and destroy are not part of it).
Its connections have no memory and send nothing; ours have exchanged a greeting.

Two settings: "lean" (small slots, like cmtime's almost nothing to register) is what is compared;
"ordinary" are the defaults, of which each end registers and pins 2 MiB a connection.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import aiordma
from tests.bench.growth import CONFIGS, LIMIT_S, Row, own_address, parser, peer, publish, run

STEPS = ("create id", "resolve addr", "resolve route", "create qp", "connect")
CMTIME_PORT = 7471


async def ours(address: str, setting: str, loop: str, count: int, rounds: int) -> float:
    """Seconds for `count` connections at once, median of the rounds."""
    config = CONFIGS[setting]
    async with peer(address, setting, loop) as other:

        async def together(many: int) -> float:
            begun = time.perf_counter()
            connections = await asyncio.gather(
                *(
                    aiordma.connect(address, other.port, config=config, timeout=LIMIT_S)
                    for _ in range(many)
                )
            )
            await other.ask(f"wait {many}")
            took = time.perf_counter() - begun
            await asyncio.gather(*(connection.close() for connection in connections))
            await other.ask("forget")
            return took

        await together(2)  # what is loaded and looked up once
        return statistics.median([await together(count) for _ in range(rounds)])


async def theirs(address: str, count: int, rounds: int) -> float:
    """Seconds that cmtime takes for its steps, median of the rounds."""
    server = await asyncio.create_subprocess_exec("cmtime", "-b", address, "-p", str(CMTIME_PORT))
    times: list[float] = []
    try:
        tries = 0
        while len(times) < rounds:
            client = await asyncio.create_subprocess_exec(
                "cmtime", "-s", address, "-p", str(CMTIME_PORT), "-c", str(count),
                stdout=subprocess.PIPE,
            )  # fmt: skip
            output = (await client.communicate())[0].decode()
            found = dict(re.findall(r"^(\w[\w ]*?) *: +([\d.]+)", output, re.MULTILINE))
            if all(step in found for step in STEPS) and float(found["connect"]) > 0:
                times.append(sum(float(found[step]) for step in STEPS) / 1000)
                continue
            tries += 1  # the server was not listening yet
            if tries > 20:
                raise SystemExit(f"cmtime does not work here:\n{output}")
            await asyncio.sleep(0.2)
    finally:
        server.kill()
        await server.wait()
    return statistics.median(times)


async def measure(options: argparse.Namespace) -> list[Row]:
    """All figures."""
    address = options.address or own_address()
    count = options.count
    rows = []
    beside = count / await theirs(address, count, options.rounds)
    for setting in options.settings.split(","):
        took = await ours(address, setting, options.loop, count, options.rounds)
        goal = 0.5 if setting == "lean" else None
        name = f"connections a second, {count} at once"
        if setting != "lean":
            name += f" ({setting} settings)"
        rows.append(Row(name, count / took, beside, goal, better="higher"))
    return rows


def main() -> None:
    """Parse, measure, print."""
    options = parser(__doc__)
    options.add_argument("--count", type=int, default=100, help="connections at once")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--settings", default="lean,ordinary")
    given = options.parse_args()
    rows = run(given.loop, measure(given))
    publish(f"connecting, {given.loop}, beside cmtime", rows, given.json)


if __name__ == "__main__":
    main()
