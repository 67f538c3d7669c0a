"""A server, and clients in a pool of processes: arguments ADDRESS START_METHOD LOOP.

The pool is made after the server listens and is connected, as a program does that hands work out.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
from collections.abc import Coroutine
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

import aiordma

_CALLS = 4
_T = TypeVar("_T")


def run(coroutine: Coroutine[Any, Any, _T], loop: str) -> _T:
    """Run it on a loop of this name."""
    factory = None
    if loop == "uvloop":
        import uvloop

        factory = uvloop.new_event_loop
    # Not the debug mode of `-X dev`, which tells of each step that a busy machine takes long for.
    with asyncio.Runner(loop_factory=factory, debug=False) as runner:
        return runner.run(coroutine)


def call(address: str, port: int, loop: str, number: int) -> int:
    """Run in a process of the pool: send a number, and return what comes back."""

    async def ask() -> int:
        async with aiordma.connect(address, port) as conn:
            await conn.send(number.to_bytes(4, "big"))
            return int.from_bytes(await conn.recv(), "big")

    return run(ask(), loop)


async def main(address: str, method: str, loop: str) -> None:
    """Serve what the processes send, and print what they were answered."""

    async def serve(conn: aiordma.Connection) -> None:
        async for message in conn:
            await conn.send((int.from_bytes(message, "big") + 1).to_bytes(4, "big"))

    async with (
        aiordma.serve(serve, address, 0) as server,
        aiordma.connect(address, server.port) as conn,
    ):
        await conn.send(bytes(4))
        (await conn.recv()).release()
        context = multiprocessing.get_context(method)
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            running = asyncio.get_running_loop()
            calls = (
                running.run_in_executor(pool, call, address, server.port, loop, number)
                for number in range(_CALLS)
            )
            print(method, *await asyncio.gather(*calls))
        await conn.send(bytes(4))
        print("parent", int.from_bytes(await conn.recv(), "big"))


if __name__ == "__main__":
    _, address, method, loop = sys.argv
    run(main(address, method, loop), loop)
