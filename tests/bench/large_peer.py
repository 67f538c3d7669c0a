"""Large messages there and back, for the cost of their check: `main([ROLE, ADDRESS, PORT, CHECK])`.

The client prints one JSON object: half a round trip of each size, in microseconds.  Both ends
receive, so that each half has one checksum made and one compared, or none with CHECK `unchecked`.
"""

from __future__ import annotations

import sys
import time

import aiordma
from tests.bench.large_ends import run

__all__ = ["SIZES", "main"]

#: Bytes; none has room in a slot.
SIZES = (16_384, 65_536, 262_144, 1 << 20, 4 << 20)
TRIPS, WARM_UP = 24, 4


async def serve(address: str, port: int, config: aiordma.ConnectionConfig) -> None:
    """Send back whatever comes, to one client."""
    async with (
        aiordma.listen(address, port, config=config) as listener,
        await listener.accept() as connection,
    ):
        async for message in connection:
            with message:
                await connection.send(message)


async def measure(address: str, port: int, config: aiordma.ConnectionConfig) -> dict[str, float]:
    """The client's side."""
    told = {}
    async with aiordma.connect(address, port, config=config) as connection:
        for size in SIZES:
            data = bytearray(size)
            begun = 0.0
            for number in range(WARM_UP + TRIPS):
                if number == WARM_UP:
                    begun = time.perf_counter()
                await connection.send(data)
                (await connection.recv()).release()
            told[f"{size} us"] = (time.perf_counter() - begun) / TRIPS / 2 * 1e6
    return told


def main(words: list[str]) -> int:
    """Run one end; returns the exit status."""
    return run(serve, measure, words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
