"""asyncio's own calls, over RDMA because of the event loop.  Usage: switched.py ADDRESS."""

import asyncio
import logging
import sys

from aiordma.streams.policy import new_event_loop


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer one line."""
    writer.write(await reader.readline())
    writer.close()
    await writer.wait_closed()


async def main(host: str) -> None:
    """A server and a client that know nothing of RDMA."""
    server = await asyncio.start_server(echo, host, 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"hello\n")
        print((await reader.readline()).decode().strip())
        writer.close()
        await writer.wait_closed()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        print("usage: switched.py ADDRESS", file=sys.stderr)
        sys.exit(2)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(main(sys.argv[1]))
    except KeyboardInterrupt:
        sys.exit(130)  # as shells have it for Ctrl-C
