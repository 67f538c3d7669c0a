"""The other process of the two-process tests: python peer.py ROLE ADDRESS PORT LOOP.

Roles: `echo` answers every message of every client; `sink` takes messages and says nothing;
`memory` sends where memory is that each client may read.  Prints `ready PORT` when it listens.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable

import aiordma


async def serve(role: str, address: str, port: int) -> None:
    async with aiordma.listen(address, port) as listener:
        print("ready", listener.port, flush=True)

        async def one(connection: aiordma.Connection) -> None:
            async with connection, contextlib.AsyncExitStack() as leases:
                if role == "memory":
                    lease = connection.expose(bytearray(1 << 16), read=True)
                    await connection.send((await leases.enter_async_context(lease)).to_bytes())
                async for message in connection:
                    if role == "echo":
                        await connection.send(message, imm=message.imm)
                    message.release()

        async with asyncio.TaskGroup() as group:
            async for connection in listener:
                group.create_task(one(connection))


def main() -> None:
    role, address, port, loop = sys.argv[1:]
    factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    if loop == "uvloop":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(debug=True, loop_factory=factory) as runner:
        runner.run(serve(role, address, int(port)))


if __name__ == "__main__":
    main()
