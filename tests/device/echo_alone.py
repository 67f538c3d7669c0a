"""Both ends of a connection in one process and one loop: echo_alone.py ADDRESS TRIPS LOOP."""

from __future__ import annotations

import asyncio
import sys

import aiordma

DATA = bytes(64)


async def main(address: str, trips: int) -> None:
    """Messages there and back."""
    async with aiordma.listen(address, 0) as listener:

        async def answer() -> None:
            async with await listener.accept() as conn:
                for _ in range(trips):
                    (await conn.recv()).release()
                    await conn.send(DATA)
                async for _ in conn:
                    raise AssertionError("one message too many")

        answering = asyncio.create_task(answer())
        async with aiordma.connect(address, listener.port) as conn:
            for _ in range(trips):
                await conn.send(DATA)
                (await conn.recv()).release()
        await answering


if __name__ == "__main__":
    _, address, trips, loop = sys.argv
    factory = None
    if loop == "uvloop":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main(address, int(trips)))
