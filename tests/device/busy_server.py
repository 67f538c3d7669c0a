"""A server of default settings, in a process of its own: busy_server.py ADDRESS LOOP.

It echoes messages and streams, and prints `ready MESSAGES STREAMS`, the two ports.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

import aiordma


async def messages(connection: aiordma.Connection) -> None:
    """Echo."""
    with contextlib.suppress(OSError):
        async with connection:
            async for message in connection:
                with message:
                    await connection.send(message)


async def stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Echo."""
    with contextlib.suppress(OSError):
        while data := await reader.read(4096):
            writer.write(data)
            await writer.drain()
    writer.close()


async def main(address: str) -> None:
    """Serve until the process is killed."""
    async with (
        aiordma.listen(address, 0) as listener,
        await aiordma.start_server(stream, address, 0) as server,
        asyncio.TaskGroup() as group,
    ):
        print("ready", listener.port, server.port, flush=True)
        async for connection in listener:
            group.create_task(messages(connection))


if __name__ == "__main__":
    _, address, loop = sys.argv
    factory = None
    if loop == "uvloop":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main(address))
