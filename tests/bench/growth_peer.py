"""The other end of the growth benches: accepts, holds, echoes, and tells of itself.

Prints the port.  A line on standard input is a question, answered by a line of JSON:
`wait n` (for so many connections), `memory` (bytes traced, resident, pinned),
`wakeups` (of the loop, if it counts them), `forget` (abort all connections).  Ends with its input.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import tracemalloc
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import aiordma
from tests.bench.growth import CONFIGS, LIMITS, Wakeups, loop_factory


def status(name: str) -> int:
    """Bytes of this process: "VmRSS" for resident ones, "VmPin" for pinned ones."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {name}")


def resident() -> int:
    """Resident bytes of this process.

    By its pages, where the kernel tells them: VmRSS is a counter to which each thread adds up to 64
    pages at a time, late.
    """
    try:
        rollup = Path("/proc/self/smaps_rollup").read_text()
    except FileNotFoundError:
        return status("VmRSS")
    return next(int(line.split()[1]) for line in rollup.splitlines() if line[:4] == "Rss:") * 1024


def memory() -> dict[str, float]:
    """Bytes that Python's allocators hold, resident ones, and pinned ones."""
    gc.collect()
    traced = tracemalloc.get_traced_memory()[0] if tracemalloc.is_tracing() else 0
    return {"traced": traced, "resident": resident(), "pinned": status("VmPin")}


async def echo(connection: aiordma.Connection) -> None:
    """Send back what comes."""
    async for message in connection:
        with message:
            await connection.send(message)


async def serve(options: argparse.Namespace, wakeups: Wakeups) -> None:
    """Accept until the input ends."""
    connections: list[aiordma.Connection] = []
    echoes: list[asyncio.Task[None]] = []
    config = CONFIGS[options.config]
    async with aiordma.listen(
        options.address, 0, config=config, backlog=4096, limits=LIMITS
    ) as listener:
        print(listener.port, flush=True)

        arrived = asyncio.Event()

        async def take() -> None:
            async for connection in listener:
                connections.append(connection)
                arrived.set()
                if options.echo:
                    echoes.append(asyncio.create_task(echo(connection)))

        taking = asyncio.create_task(take())
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while command := (await reader.readline()).decode().strip():
            answer: dict[str, float] = {}
            if command.startswith("wait "):
                while len(connections) < int(command[5:]):
                    arrived.clear()
                    await arrived.wait()
            elif command == "memory":
                answer |= memory()
            elif command == "wakeups":
                answer["count"] = wakeups.count
            elif command == "forget":
                while connections:
                    connections.pop().abort()
            print(json.dumps(answer), flush=True)
        taking.cancel()
        for task in echoes:
            task.cancel()
        for connection in connections:
            connection.abort()


def main() -> None:
    """Parse and run."""
    options = argparse.ArgumentParser()
    options.add_argument("address")
    options.add_argument("config", choices=CONFIGS)
    options.add_argument("--loop", choices=("asyncio", "uvloop"), default="uvloop")
    options.add_argument("--trace", action="store_true", help="trace Python's memory")
    options.add_argument("--echo", action="store_true")
    options.add_argument("--wakeups", action="store_true", help="count them")
    given = options.parse_args()
    if given.trace:
        tracemalloc.start()
    wakeups = Wakeups()
    factory = loop_factory(given.loop, wakeups if given.wakeups else None)
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(serve(given, wakeups))


if __name__ == "__main__":
    main()
