"""aiohttp over RDMA.  Usage: aiohttp_hello.py (server ADDRESS [PORT] | client URL)."""

import asyncio
import signal
import sys

import aiohttp
from aiohttp import web

from aiordma.contrib.aiohttp import RdmaConnector, RdmaSite


async def hello(request: web.Request) -> web.Response:
    """A greeting, and the bytes that came with a POST."""
    assert request.transport is not None
    name, count = request.match_info["name"], len(await request.read())
    over = request.transport.get_extra_info("backend")
    return web.Response(text=f"hello {name}, {count} bytes over {over}")


async def serve(host: str, port: int) -> None:
    """Serve until Ctrl-C."""
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{name}", hello)
    runner = web.AppRunner(app)
    await runner.setup()
    site = RdmaSite(runner, host, port)
    await site.start()

    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    print("serving", site.name, flush=True)
    await stop.wait()
    await runner.cleanup()
    await site.wait_closed()


async def get(url: str) -> None:
    """A GET, and a POST on the same connection."""
    async with aiohttp.ClientSession(connector=RdmaConnector()) as session:
        async with session.get(url) as response:
            print(response.status, await response.text())
        async with session.post(url, data=bytes(1_000_000)) as response:
            print(response.status, await response.text())


def main(role: str = "", where: str = "", port: str = "8080") -> None:
    """Run the server or the client."""
    if role not in ("server", "client") or not where:
        print("usage: aiohttp_hello.py (server ADDRESS [PORT] | client URL)", file=sys.stderr)
        sys.exit(2)
    asyncio.run(get(where) if role == "client" else serve(where, int(port)))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(130)  # as shells have it for Ctrl-C
