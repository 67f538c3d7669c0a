"""What idle connections cost: `main([ROLE, NUMBER, LOOP, ADDRESS, PORT])`.

An ordinary client has so many connections to an ordinary server, with the settings that a
connection has by default, and both programs do nothing.  The client prints one JSON object:
microseconds of processor time a second, of each process and of both.  The kernel's part is in them:
Soft-RoCE sends, receives and acknowledges in the process that posts.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import AsyncExitStack

import aiordma
from tests.bench.plain_peer import LOOPS

__all__ = ["main"]

#: Of the counted clock, which jumps over the time in which nothing runs.
IDLE_S = 200.0
#: Until the connections are as they stay: the first silence is over.
SETTLE_S = 30.0
#: Connects under way at a time.
AT_ONCE = 10


async def tell(conn: aiordma.Connection) -> None:
    """Answer each message with the processor time of this process."""
    async for _ in conn:
        await conn.send(str(time.process_time()).encode())


async def serve(address: str, port: int) -> None:
    """Serve until the clients have gone."""
    async with aiordma.listen(address, port) as listener, asyncio.TaskGroup() as clients:
        first = clients.create_task(tell(await listener.accept()))

        async def accept() -> None:
            async for conn in listener:
                clients.create_task(tell(conn))

        accepting = asyncio.create_task(accept())
        await first
        accepting.cancel()


async def times(conn: aiordma.Connection) -> tuple[float, float]:
    """Processor time of client and server, seconds."""
    await conn.send(b"?")
    there = float(bytes(await conn.recv()))
    return time.process_time(), there


async def measure(number: int, address: str, port: int) -> dict[str, float]:
    """Connect, and do nothing."""
    async with AsyncExitStack() as stack:
        connections: list[aiordma.Connection] = []
        while len(connections) < number:
            more = min(AT_ONCE, number - len(connections))
            connections += await asyncio.gather(
                *(stack.enter_async_context(aiordma.connect(address, port)) for _ in range(more))
            )
        await asyncio.sleep(SETTLE_S)
        begun = await times(connections[0])
        await asyncio.sleep(IDLE_S)
        ended = await times(connections[0])
    client, server = ((end - begin) / IDLE_S * 1e6 for begin, end in zip(begun, ended, strict=True))
    return {"client us/s": client, "server us/s": server, "us/s": client + server}


def main(words: list[str]) -> int:
    """Run one end; returns the exit status."""
    role, number, loop, address, port = words

    async def end() -> None:
        if role == "server":
            await serve(address, int(port))
        else:
            print(json.dumps(await measure(int(number), address, int(port))))

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(end())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
