"""Echo client: `python client.py [HOST] [PORT]`. Sends messages and prints the answers."""

import asyncio
import sys

import aiordma


async def main(host: str = "10.80.0.1", port: str = "18515") -> None:
    """Connect, send, receive; leaving the block closes the connection."""
    async with aiordma.connect(host, int(port)) as conn:
        for text in ("hello", "over", "RDMA"):
            await conn.send(text.encode())
            print((await conn.recv()).decode())


try:
    asyncio.run(main(*sys.argv[1:]))
except KeyboardInterrupt:
    sys.exit(130)  # as shells have it for Ctrl-C
