"""httpx over RDMA, asking the server of aiohttp_hello.py.  Usage: httpx_get.py URL."""

import asyncio
import sys

import httpx

from aiordma.contrib.httpx import RdmaHTTPTransport


async def main(url: str) -> None:
    """A GET, and a POST on the same connection."""
    async with httpx.AsyncClient(transport=RdmaHTTPTransport()) as client:
        response = await client.get(url)
        print(response.status_code, response.text)
        response = await client.post(url, content=bytes(1_000_000))
        print(response.status_code, response.text)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        print("usage: httpx_get.py URL", file=sys.stderr)
        sys.exit(2)
    try:
        asyncio.run(main(sys.argv[1]))
    except KeyboardInterrupt:
        sys.exit(130)  # as shells have it for Ctrl-C
