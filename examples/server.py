"""Echo server: `python server.py [HOST] [PORT]`. Sends every message back, to many clients."""

import asyncio
import sys

import aiordma


async def echo(conn: aiordma.Connection) -> None:
    """Send back the messages of one client, until it closes."""
    async for message in conn:
        await conn.send(message)


async def main(host: str = "0.0.0.0", port: str = "18515") -> None:
    """Serve each client by a call of `echo`, until Ctrl-C."""
    async with aiordma.serve(echo, host, int(port), signals=True) as server:
        print("listening on", *server.sockname, flush=True)
        await server.serve_forever()


asyncio.run(main(*sys.argv[1:]))
