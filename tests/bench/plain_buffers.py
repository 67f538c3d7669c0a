"""Messages out of, and into, memory of each kind.

`main([ROLE, FORM, NUMBER, LOOP, OVER, ADDRESS, PORT])`, of which NUMBER and OVER are those of the
other ordinary programs; NUMBER is the bytes of a message.  In the form `buffers` the server is the
echo of the README.  The client sends a message and receives the answer, again and again, one way
after the other:

- `recv`: `send(bytes)`, and `bytes(await recv())`; the other ways stand beside this one.
- `into bytearray`, `into memoryview`, `into ndarray`: `send(bytes)`, and `recv_into` such a buffer.
- `of memoryview`, `of ndarray`: `send` of such a buffer, and `bytes(await recv())`.

In the form `outgoing` the client sends messages that are answered together, as in the form
`one-way` of plain_peer.py: out of `bytes`, a `memoryview` and an `ndarray`.

The client prints one JSON object, with microseconds of half a round trip, or of a message.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

import aiordma
from tests.bench.plain_peer import END, LOOPS, MESSAGES, collect, echo, trips

__all__ = ["FORMS", "main"]

WARM_UP = 100
#: By name, what the server does.
FORMS = {"buffers": echo, "outgoing": collect}


async def serve(form: str, address: str, port: int) -> None:
    """Serve one client."""
    async with aiordma.listen(address, port) as listener, await listener.accept() as conn:
        await FORMS[form](conn)


async def received(conn: aiordma.Connection, data: Any, count: int) -> None:
    """Send a message and read the answer as bytes, again and again."""
    for _ in range(count):
        await conn.send(data)
        bytes(await conn.recv())


async def received_into(conn: aiordma.Connection, data: Any, into: Any, count: int) -> None:
    """The same; the answer goes into memory that is there."""
    for _ in range(count):
        await conn.send(data)
        await conn.recv_into(into)


async def sent(conn: aiordma.Connection, data: Any, count: int) -> None:
    """Send messages, and wait for the answer to all of them."""
    for _ in range(count):
        await conn.send(data)
    await conn.send(END)
    bytes(await conn.recv())


async def send_often(size: int, address: str, port: int) -> dict[str, float]:
    """Connect, and measure messages of one way."""
    data = bytes(size)
    told = {}
    async with aiordma.connect(address, port) as conn:
        for name, each in (
            ("bytes", data),
            ("memoryview", memoryview(data)),
            ("ndarray", np.zeros(size, np.uint8)),
        ):
            await sent(conn, each, WARM_UP)
            begun = time.perf_counter()
            await sent(conn, each, MESSAGES)
            told[f"{name} us"] = (time.perf_counter() - begun) / MESSAGES * 1e6
    return told


async def use(size: int, address: str, port: int) -> dict[str, float]:
    """Connect, and measure round trips."""
    data, memory = bytes(size), bytearray(size)
    array = np.zeros(size, np.uint8)
    ways: dict[str, Callable[[aiordma.Connection, int], Awaitable[None]]] = {
        "recv": lambda conn, count: received(conn, data, count),
        "into bytearray": lambda conn, count: received_into(conn, data, memory, count),
        "into memoryview": lambda conn, count: received_into(conn, data, memoryview(memory), count),
        "into ndarray": lambda conn, count: received_into(conn, data, array, count),
        "of memoryview": lambda conn, count: received(conn, memoryview(data), count),
        "of ndarray": lambda conn, count: received(conn, array, count),
    }
    told = {}
    async with aiordma.connect(address, port) as conn:
        for name, way in ways.items():
            await way(conn, WARM_UP)
            begun = time.perf_counter()
            await way(conn, trips(size))
            told[f"{name} us"] = (time.perf_counter() - begun) / trips(size) / 2 * 1e6
    return told


def main(words: list[str]) -> int:
    """Run one end; returns the exit status."""
    role, form, number, loop, _over, address, port = words

    async def end() -> None:
        if role == "server":
            await serve(form, address, int(port))
        else:
            measure = use if form == "buffers" else send_often
            print(json.dumps(await measure(int(number), address, int(port))))

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(end())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
