"""READ and WRITE of 64 bytes, and atomics, as a user writes them, with memory of each kind.

`main([ROLE, FORM, NUMBER, LOOP, OVER, ADDRESS, PORT])`, of which FORM, NUMBER and OVER are those of
the other ordinary programs.  Both ends have default settings.  The server exposes memory
until its client closes; the client reads and writes it, one transfer after the other:

- `bytearray`: an object of the program's own; what is written is `bytes`.
- `region`: a whole region of 64 bytes, of `Connection.register`.
- `view`: 64 bytes out of the middle of a larger region, `region.view[64:128]`.
- `piece`: the same bytes as an `SGE`, which is made for each transfer.
- `fetch_add` and `compare_swap` have no memory on this side.

Then batches of 1,000 transfers, from the first call to the results; and as many READs that are
awaited together, as a program does it that knows no batches.

The client prints one JSON object, with microseconds a transfer, and millions of READs a second.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable

import aiordma
from aiordma.verbs import SGE
from tests.bench.plain_peer import LOOPS, SMALL

__all__ = ["main"]

TRIPS, WARM_UP = 300, 100
BATCH = 1000
ROOM = 4096
FORMS = ("one-sided",)


async def serve(address: str, port: int) -> None:
    """Expose memory to one client."""
    async with (
        aiordma.listen(address, port) as listener,
        await listener.accept() as conn,
        conn.expose(ROOM, read=True, write=True, atomic=True) as region,
    ):
        await conn.send(region.to_bytes())
        async for _ in conn:
            pass


async def took(transfer: Callable[[], Awaitable[int]]) -> float:
    """Microseconds of a transfer."""
    begun = 0.0
    for number in range(-WARM_UP, TRIPS):
        if not number:
            begun = time.perf_counter()
        await transfer()
    return (time.perf_counter() - begun) / TRIPS * 1e6


async def batches(
    conn: aiordma.Connection, remote: aiordma.RemoteRegion, into: list[SGE]
) -> dict[str, float]:
    """Microseconds of a transfer in a batch."""
    data = bytes(SMALL)
    offsets = [number * SMALL % ROOM for number in range(BATCH)]
    figures = {}
    for name in ("warm up", "read bytes", "read pieces", "write bytes"):
        begun = time.perf_counter()
        async with conn.batch() as batch:
            if name == "read pieces":
                for offset, piece in zip(offsets, into, strict=True):
                    batch.read(remote, piece, offset=offset)
            elif name == "write bytes":
                for offset in offsets:
                    batch.write(remote, data, offset=offset)
            else:
                for offset in offsets:
                    batch.read(remote, offset=offset, size=SMALL)
        assert len(batch.results) == BATCH
        figures[f"batch, {name} us"] = (time.perf_counter() - begun) / BATCH * 1e6
    begun = time.perf_counter()
    await asyncio.gather(
        *(conn.read(remote, bytearray(SMALL), offset=offset) for offset in offsets)
    )
    figures["gathered us"] = (time.perf_counter() - begun) / BATCH * 1e6
    figures["batch, read Mpps"] = 1 / figures["batch, read bytes us"]
    return figures


async def use(address: str, port: int) -> dict[str, float]:
    """Connect, and measure."""
    async with aiordma.connect(address, port) as conn:
        remote = aiordma.RemoteRegion.from_bytes(bytes(await conn.recv()))
        data, into = bytes(SMALL), bytearray(SMALL)
        region, larger = await conn.register(SMALL), await conn.register(ROOM)
        view = larger.view[SMALL : 2 * SMALL]
        figures = {
            "read bytearray us": await took(lambda: conn.read(remote, into)),
            "write bytearray us": await took(lambda: conn.write(remote, data)),
            "read region us": await took(lambda: conn.read(remote, region)),
            "write region us": await took(lambda: conn.write(remote, region)),
            "read view us": await took(lambda: conn.read(remote, view)),
            "write view us": await took(lambda: conn.write(remote, view)),
            "read piece us": await took(lambda: conn.read(remote, SGE(larger, SMALL, SMALL))),
            "write piece us": await took(lambda: conn.write(remote, SGE(larger, SMALL, SMALL))),
            "fetch_add us": await took(lambda: conn.fetch_add(remote, 1)),
            "compare_swap us": await took(lambda: conn.compare_swap(remote, 0, 1)),
        }
        pieces = [SGE(larger, number * SMALL % ROOM, SMALL) for number in range(BATCH)]
        return figures | await batches(conn, remote, pieces)


def main(words: list[str]) -> int:
    """Run one end; returns the exit status."""
    role, _form, _number, loop, _over, address, port = words

    async def end() -> None:
        if role == "server":
            await serve(address, int(port))
        else:
            print(json.dumps(await use(address, int(port))))

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(end())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
