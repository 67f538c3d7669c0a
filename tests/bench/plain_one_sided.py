"""READ and WRITE of 64 bytes as a user writes them, with memory of each kind.

`main([ROLE, FORM, NUMBER, LOOP, OVER, ADDRESS, PORT])`, of which FORM, NUMBER and OVER are those of
the other ordinary programs.  Both ends have default settings.  The server exposes memory
until its client closes; the client reads and writes it, one transfer after the other:

- `bytearray`: an object of the program's own; what is written is `bytes`.
- `region`: a whole region of 64 bytes, of `Connection.register`.
- `view`: 64 bytes out of the middle of a larger region, `region.view[64:128]`.
- `piece`: the same bytes as an `SGE`, which is made for each transfer.

The client prints one JSON object, with microseconds a transfer.
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
ROOM = 4096
FORMS = ("one-sided",)


async def serve(address: str, port: int) -> None:
    """Expose memory to one client."""
    async with (
        aiordma.listen(address, port) as listener,
        await listener.accept() as conn,
        conn.expose(ROOM, read=True, write=True) as region,
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


async def use(address: str, port: int) -> dict[str, float]:
    """Connect, and measure."""
    async with aiordma.connect(address, port) as conn:
        remote = aiordma.RemoteRegion.from_bytes(bytes(await conn.recv()))
        data, into = bytes(SMALL), bytearray(SMALL)
        region, larger = await conn.register(SMALL), await conn.register(ROOM)
        view = larger.view[SMALL : 2 * SMALL]
        return {
            "read bytearray us": await took(lambda: conn.read(remote, into)),
            "write bytearray us": await took(lambda: conn.write(remote, data)),
            "read region us": await took(lambda: conn.read(remote, region)),
            "write region us": await took(lambda: conn.write(remote, region)),
            "read view us": await took(lambda: conn.read(remote, view)),
            "write view us": await took(lambda: conn.write(remote, view)),
            "read piece us": await took(lambda: conn.read(remote, SGE(larger, SMALL, SMALL))),
            "write piece us": await took(lambda: conn.write(remote, SGE(larger, SMALL, SMALL))),
        }


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
