"""A server of requests for tests, as a program of its own: ``request_server.py HOST PORT``.

A request is the seed of its answer, its size, and seconds to wait, as text; padding may follow.
"""

from __future__ import annotations

import asyncio
import random
import sys

import aiordma


def question(seed: int, size: int, wait_s: float, padding: int) -> bytes:
    """A request whose answer has `size` bytes, and comes after `wait_s`."""
    return b"%d %d %f " % (seed, size, wait_s) + bytes(padding)


def answer_to(seed: int, size: int) -> bytes:
    """The right answer."""
    return random.Random(seed).randbytes(size)


async def handler(request: aiordma.Request) -> bytes:
    """Answer a request."""
    seed, size, wait_s, padding = bytes(request.body).split(b" ", 3)
    if padding.strip(b"\0"):
        msg = "the padding is damaged"
        raise ValueError(msg)
    if float(wait_s):
        await asyncio.sleep(float(wait_s))
    if int(size) < 0:
        msg = f"no answer has {int(size)} bytes"
        raise ValueError(msg)
    return answer_to(int(seed), int(size))


async def main(host: str, port: str) -> None:
    """Serve until Ctrl-C."""
    async with aiordma.serve_requests(handler, host, int(port)) as server:
        print(server.port, flush=True)
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
