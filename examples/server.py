"""Echo server: `python server.py [HOST] [PORT]`. Sends every message back, to many clients."""

import asyncio
import contextlib
import sys

import aiordma


async def echo(conn: aiordma.Connection) -> None:
    """Send back what one client sends, until it closes."""
    with contextlib.suppress(aiordma.RdmaError):  # whatever a client does harms no other
        async with conn:
            async for message in conn:
                await conn.send(message)


async def main(host: str = "0.0.0.0", port: str = "18515") -> None:
    """Serve each client in a task of its own."""
    async with aiordma.listen(host, int(port)) as listener, asyncio.TaskGroup() as clients:
        print("listening on", *listener.sockname, flush=True)
        async for conn in listener:
            clients.create_task(echo(conn))


with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is how it ends
    asyncio.run(main(*sys.argv[1:]))
