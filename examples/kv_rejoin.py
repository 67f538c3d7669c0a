"""A KV cache that clients read by RDMA, and find again by names after its server was killed.

The server has blocks in a piece of memory.  A client asks for a block by its name, and is told
where it is: a `RemoteRegion`.  Clients keep these regions, and read blocks as often as they like,
without the server's program.  When the server is killed and starts again, at the same address, it
has other memory, and its blocks may have changed.  A client then loses its connection, connects
again, and goes on with the regions that it has.  As they are of an earlier life of the server, a
read raises `StaleRegionError` before anything is read, and the client asks for the block again.  So
no client ever reads another block, or that of another life.

    kv_rejoin.py serve [--host ADDRESS] [--port PORT]
    kv_rejoin.py read [--host ADDRESS] [--port PORT] [--rejoin TIMES] [--count READS]

Kill the server, and start it again, while a client reads.  On a machine without a device:

    python -m aiordma_softroce -- bash -c '
        coproc python examples/kv_rejoin.py serve; read <&${COPROC[0]}
        exec 3< <(python examples/kv_rejoin.py read); read <&3
        kill -9 $COPROC_PID; python examples/kv_rejoin.py serve & cat <&3; kill $!'
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import sys
import time

import aiordma
from aiordma.verbs import Access

BLOCKS = 16
BLOCK = 4096  # bytes
NAMES = [f"layer {number}" for number in range(BLOCKS)]


def content(life: str, name: str) -> bytes:
    """The bytes of a block: a program has keys and values of tokens here."""
    text = f"life {life}, {name}; ".encode()
    return (text * (BLOCK // len(text) + 1))[:BLOCK]


# The server


async def serve(args: argparse.Namespace) -> None:
    """Tell clients where the blocks are, until Ctrl-C."""
    life = os.urandom(4).hex()

    async def answer(conn: aiordma.Connection) -> None:
        async with conn.expose(memory[:], read=True) as cache:
            async for message in conn:
                with message:
                    place = NAMES.index(message.decode()) * BLOCK
                region = cache[place : place + BLOCK]
                await conn.send([life.encode(), region.to_bytes()])

    # The peers may read all of the memory, also on adapters that cannot restrict them to less.
    async with aiordma.Memory(BLOCKS * BLOCK, trusted=Access.REMOTE_READ) as memory:
        for number, name in enumerate(NAMES):
            memory.view[number * BLOCK : (number + 1) * BLOCK] = content(life, name)
        async with aiordma.serve(answer, args.host, args.port, memory=memory) as server:
            print("listening on", args.host, server.port, "life", life, flush=True)
            await server.serve_forever()


# A client


class Cache:
    """What a client knows of the server's blocks, from any of its lives."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[bytes, aiordma.RemoteRegion]] = {}
        self.reads = 0
        self.stale = 0

    async def read(self, conn: aiordma.Connection, name: str) -> None:
        """Read a block, wherever it is now, and check it."""
        if name not in self._known:
            await self._ask(conn, name)
        block = bytearray(BLOCK)
        try:
            await conn.read(self._known[name][1], block)
        except aiordma.StaleRegionError:
            self.stale += 1
            await self._ask(conn, name)
            await conn.read(self._known[name][1], block)
        life = self._known[name][0].decode()
        if block != content(life, name):
            raise ValueError(f"{name} has other bytes than life {life}: {bytes(block[:40])!r}")
        self.reads += 1

    async def _ask(self, conn: aiordma.Connection, name: str) -> None:
        await conn.send(name.encode())
        with await conn.recv() as answer:
            self._known[name] = answer[:8], aiordma.RemoteRegion.from_bytes(answer[8:])


async def read(args: argparse.Namespace) -> None:
    """Read blocks, and rejoin the server whenever the connection is lost."""
    cache, names, joined, lost_at = Cache(), itertools.cycle(NAMES), -1, 0.0
    while True:
        try:
            async with aiordma.connect(args.host, args.port) as conn:
                joined += 1
                if joined:
                    print(f"joined again after {time.monotonic() - lost_at:.1f} s", flush=True)
                lost_at, until = 0.0, cache.reads + args.count
                while joined < args.rejoin or cache.reads < until:
                    await cache.read(conn, next(names))
                    if cache.reads % 500 == 0:
                        print(cache.reads, "blocks read, all of them right", flush=True)
            break
        except OSError as error:  # the server is gone, or not there again yet
            lost_at = lost_at or time.monotonic()
            if time.monotonic() - lost_at > args.patience:
                raise
            print("the connection is lost:", type(error).__name__, flush=True)
            await asyncio.sleep(0.1)
    print(f"{cache.reads} blocks read, {cache.stale} regions of earlier lives refused")


def main() -> None:
    """Run the server or a reader."""
    parser = argparse.ArgumentParser(
        prog="kv_rejoin.py", description="Read a KV cache, and rejoin."
    )
    parts = parser.add_subparsers(required=True, metavar="serve | read")
    for part, text in ((serve, "own the cache"), (read, "read the blocks of a server")):
        options = parts.add_parser(part.__name__, help=text)
        options.set_defaults(part=part)
        options.add_argument("--host", default="0.0.0.0" if part is serve else "10.80.0.1")
        options.add_argument("--port", type=int, default=18525)
    options = parts.choices["read"]
    options.add_argument(
        "--rejoin", type=int, default=1, help="read until it has rejoined this often"
    )
    options.add_argument("--count", type=int, default=1000, help="and then so many more blocks")
    options.add_argument("--patience", type=float, default=60.0, help="seconds without the server")
    args = parser.parse_args()
    asyncio.run(args.part(args))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)  # as shells have it for Ctrl-C
    except OSError as error:
        sys.exit(f"kv_rejoin.py: {error}")
