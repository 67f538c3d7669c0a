"""Remote procedure calls in JSON over requests, and a client with a pool of connections.

Usage: rpc.py (server | client) [HOST] [PORT]
"""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import aiordma


async def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


async def sleep(seconds: float) -> str:
    """Take long; the task is canceled when the caller gives up."""
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        print("a caller gave up", flush=True)
        raise
    return "rested"


METHODS: dict[str, Callable[..., Awaitable[object]]] = {"add": add, "sleep": sleep}


async def handle(request: aiordma.Request) -> bytes:
    """Serve one call; an exception here becomes a RequestError of the caller's `request`."""
    method, arguments = json.loads(bytes(request.body))
    if method not in METHODS:
        raise aiordma.RequestUnknownError(f"no method {method!r}")
    return json.dumps(await METHODS[method](*arguments)).encode()


async def serve(host: str = "0.0.0.0", port: str = "18516") -> None:
    """Serve until Ctrl-C; calls that are under way then get ten seconds to end."""
    async with aiordma.serve_requests(handle, host, int(port), signals=True) as server:
        print("listening on", *server.sockname, flush=True)
        await server.serve_forever()


async def call(pool: aiordma.Pool, method: str, *arguments: Any, timeout: float = 10) -> Any:
    """Call a method of the server.  These methods may be called twice, so calls are retried.

    Raises:
        aiordma.RequestError: The method has failed, or does not exist.
        TimeoutError: There was no answer in time.
    """
    body = json.dumps([method, arguments]).encode()
    with await pool.request(body, timeout=timeout, idempotent=True) as answer:
        return json.loads(bytes(answer))


async def ask(host: str = "10.80.0.1", port: str = "18516") -> None:
    """Make some calls, many of them at a time."""
    async with aiordma.Pool(host, int(port), max_size=2) as pool:
        print("1 + 2 =", await call(pool, "add", 1, 2))
        sums = await asyncio.gather(*(call(pool, "add", n, n) for n in range(100)))
        print("100 calls at a time:", sum(sums))
        for method, arguments in (("add", [1, "x"]), ("multiply", [2, 3]), ("sleep", [60])):
            try:
                await call(pool, method, *arguments, timeout=2)
            except (aiordma.RequestError, TimeoutError) as error:
                print(f"{method}: {type(error).__name__}: {error.args[-1]}")
        print("requests:", pool.stats.requests)


def main(role: str = "", *where: str) -> None:
    """Run the server or the client."""
    parts = {"server": serve, "client": ask}
    if role not in parts:
        print("usage: rpc.py (server | client) [HOST] [PORT]", file=sys.stderr)
        sys.exit(2)
    asyncio.run(parts[role](*where))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(130)  # as shells have it for Ctrl-C
