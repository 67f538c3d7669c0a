"""Programs that are written for asyncio's streams, over aiordma and over TCP.

`main([ROLE, FORM, NUMBER, LOOP, OVER, ADDRESS, PORT])`, with OVER "rdma", "tcp" or "aiofastnet":
the calls are `aiordma.start_server` and `aiordma.open_connection`, or asyncio's, or those of
aiofastnet over TCP, with the settings that they have by default.  All else is the same program.

- `lines`, with bytes a line: each line goes there and back.  The server is that of the README.  The
  figure is half a round trip in microseconds.
- `blocks`, with bytes a block: each block goes there and back, and the server sends back what it
  has read.  The figure is the same.
- `pieces`, with bytes a piece: the client writes and drains, and the server reads until the last is
  there, and answers.  The figures are MiB/s, and microseconds a piece.

The client prints one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import aiordma
from tests.bench.plain_peer import LOOPS, Told

__all__ = ["main"]

#: Of pieces so many that the turns of the two processes, which differ, are an average.
LINES, BLOCKS, PIECES = 400, 60, 1280
WARM_UP = 20
ROOM = 65_536
END = b"end\n"

Serve = Callable[[StreamReader, StreamWriter], Awaitable[None]]
Use = Callable[[StreamReader, StreamWriter, int], Awaitable[Told]]

# There and back


async def answer(reader: StreamReader, writer: StreamWriter) -> None:
    """The server of the README."""
    while line := await reader.readline():
        writer.write(line.upper())
        await writer.drain()
    writer.close()


async def exchange_lines(reader: StreamReader, writer: StreamWriter, size: int, count: int) -> None:
    """Write a line and read the answer, again and again."""
    line = b"x" * (size - 1) + b"\n"
    for _ in range(count):
        writer.write(line)
        await writer.drain()
        await reader.readline()


async def echo(reader: StreamReader, writer: StreamWriter) -> None:
    """Send back what is read."""
    while data := await reader.read(ROOM):
        writer.write(data)
        await writer.drain()
    writer.close()


async def exchange_blocks(
    reader: StreamReader, writer: StreamWriter, size: int, count: int
) -> None:
    """Write a block and read it again, again and again."""
    block = bytes(size)
    for _ in range(count):
        writer.write(block)
        await writer.drain()
        await reader.readexactly(size)


def ask(
    exchange: Callable[[StreamReader, StreamWriter, int, int], Awaitable[None]], count: int
) -> Use:
    """Exchange in this way; half a round trip."""

    async def use(reader: StreamReader, writer: StreamWriter, size: int) -> Told:
        await exchange(reader, writer, size, WARM_UP)
        begun = time.perf_counter()
        await exchange(reader, writer, size, count)
        return {"us": (time.perf_counter() - begun) / count / 2 * 1e6}

    return use


# One way


async def collect(reader: StreamReader, writer: StreamWriter) -> None:
    """Read what comes, and answer each end."""
    while data := await reader.read(ROOM):
        if data.endswith(END):
            writer.write(END)
            await writer.drain()
    writer.close()


async def deliver(reader: StreamReader, writer: StreamWriter, size: int) -> Told:
    """Write pieces one after the other; the answer is part of the time."""
    piece = bytes(size)
    took = 0.0
    for count in (WARM_UP, PIECES):
        begun = time.perf_counter()
        for _ in range(count):
            writer.write(piece)
            await writer.drain()
        writer.write(END)
        await reader.readline()
        took = time.perf_counter() - begun
    return {"us": took / PIECES * 1e6, "MiB/s": PIECES * size / took / 2**20}


#: By name: the server's side and the client's.
FORMS: dict[str, tuple[Serve, Use]] = {
    "lines": (answer, ask(exchange_lines, LINES)),
    "blocks": (echo, ask(exchange_blocks, BLOCKS)),
    "pieces": (collect, deliver),
}


def calls(over: str) -> tuple[Any, Any]:
    """`start_server` and `open_connection`."""
    if over == "aiofastnet":
        import aiofastnet  # it is there for `make bench` alone

        loop = asyncio.get_running_loop()
        return partial(aiofastnet.start_server, loop), partial(aiofastnet.open_connection, loop)
    module = aiordma if over == "rdma" else asyncio
    return module.start_server, module.open_connection


async def serve(talk: Serve, over: str, address: str, port: int) -> None:
    """Serve one client."""
    done = asyncio.Event()

    async def client(reader: StreamReader, writer: StreamWriter) -> None:
        try:
            await talk(reader, writer)
            await writer.wait_closed()
        finally:
            done.set()

    start_server, _ = calls(over)
    async with await start_server(client, address, port):
        await done.wait()


async def use(talk: Use, number: int, over: str, address: str, port: int) -> None:
    """Connect, measure, and print."""
    _, open_connection = calls(over)
    reader, writer = await open_connection(address, port)
    print(json.dumps(await talk(reader, writer, number)))
    writer.close()
    await writer.wait_closed()


def main(words: list[str]) -> int:
    """Run one end; returns the exit status."""
    role, form, number, loop, over, address, port = words
    server, client = FORMS[form]
    to = (over, address, int(port))
    end = serve(server, *to) if role == "server" else use(client, int(number), *to)
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(end)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
