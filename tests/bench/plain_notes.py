"""A write that the peer is told of, beside a message of the same bytes, there and back.

`main([ROLE, FORM, NUMBER, LOOP, OVER, ADDRESS, PORT])`, of which FORM and OVER are those of the
other ordinary programs, and NUMBER is the size in bytes.  Both ends have default settings.  Each
way has a connection of its own, over which the ends answer one another:

- `message`: `send`, which `recv` receives.
- `number`: `write(imm=)` to memory without notes, which `recv` receives as an empty message.
- `note`: `write(imm=)` to memory with notes, which `Lease.notes` yields.
- `two`: `write`, and then `send` of an empty message with a number: what `imm=` stands for.

The client prints one JSON object, with microseconds of half a round trip.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import aiordma
from tests.bench.plain_peer import LOOPS

__all__ = ["main"]

TRIPS, WARM_UP = 300, 100
FORMS = ("notes",)
WAYS = ("message", "number", "note", "two")

_Step = Callable[[], Awaitable[None]]


async def steps(
    conn: aiordma.Connection, way: str, size: int, stack: AsyncExitStack
) -> tuple[_Step, _Step]:
    """How this end says something, and how it hears of the peer."""
    lease = conn.expose(size, write=True, notes=way == "note")
    await conn.send((await stack.enter_async_context(lease)).to_bytes())
    remote = aiordma.RemoteRegion.from_bytes(bytes(await conn.recv()))
    data = bytes(size)

    async def hear() -> None:
        with await conn.recv():
            pass

    async def send() -> None:
        await conn.send(data)

    async def write() -> None:
        await conn.write(remote, data, imm=7)

    async def write_and_send() -> None:
        await conn.write(remote, data)
        await conn.send(b"", imm=7)

    if way == "note":
        notes = lease.notes()

        async def hear_note() -> None:
            await anext(notes)

        return write, hear_note
    return {"message": send, "number": write, "two": write_and_send}[way], hear


async def serve(address: str, port: int, size: int) -> None:
    """Answer on one connection for each way."""
    async with aiordma.listen(address, port) as listener:
        for way in WAYS:
            async with await listener.accept() as conn, AsyncExitStack() as stack:
                say, hear = await steps(conn, way, size, stack)
                for _ in range(WARM_UP + TRIPS):
                    await hear()
                    await say()
                await conn.send(b"done")
                async for _ in conn:
                    pass


async def measure(address: str, port: int, size: int) -> dict[str, float]:
    """Microseconds of half a round trip, each way."""
    found = {}
    for way in WAYS:
        async with aiordma.connect(address, port) as conn, AsyncExitStack() as stack:
            say, hear = await steps(conn, way, size, stack)
            begun = 0.0
            for number in range(-WARM_UP, TRIPS):
                if not number:
                    begun = time.perf_counter()
                await say()
                await hear()
            found[f"{way} us"] = (time.perf_counter() - begun) / TRIPS / 2 * 1e6
            await conn.recv()  # the peer is done with the memory of this side
    return found


def main(words: list[str]) -> int:
    """Run one end; returns the exit status."""
    role, _form, number, loop, _over, address, port = words

    async def end() -> None:
        if role == "server":
            await serve(address, int(port), int(number))
        else:
            print(json.dumps(await measure(address, int(port), int(number))))

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(end())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
