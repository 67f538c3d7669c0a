"""A registered memory, parts of which many connections lease, between unprivileged programs.

`share` starts a server and a client as processes of their own.  The server registers 256 MiB, and
leases a part of its own to each connection: the connections with an even number for reading, the
others for writing, too.  RLIMIT_MEMLOCK has room for the memory once, and for the connections.

The ends are started as
    python shared_by_many.py server ADDRESS CONNECTIONS LOOP
    python shared_by_many.py client ADDRESS CONNECTIONS LOOP PORT
A line on their standard input is a phase, answered by a line of JSON when it is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from mmap import PAGESIZE
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import aiordma
from aiordma._ffi import load_error
from aiordma.verbs import Access
from tests.device.thousands import (
    CONNECTING,
    LIMIT_S,
    SEED,
    End,
    Figures,
    Process,
    become_a_user,
    descriptors,
    memlock_of,
    status,
)

__all__ = ["ENDED", "LOST", "SIZE", "regions_of", "share"]

SIZE = 256 << 20
#: Connections that end one by one while the others work: these close, and these abort.
ENDED, LOST = 5, 5
#: Bytes of a part that are looked at.
STAMP = 32
READ, WRITE = Access.REMOTE_READ, Access.REMOTE_WRITE


def stamp(number: int) -> bytes:
    """The first bytes of the part of a connection."""
    return random.Random(f"{SEED}/{number}").randbytes(STAMP)


def regions_of(length: int) -> int:
    """How many regions of this length any process has registered."""
    shown = subprocess.run(
        ["rdma", "-j", "resource", "show", "mr"], capture_output=True, check=True, timeout=60
    )
    return sum(each.get("mrlen") == length for each in json.loads(shown.stdout))


class Server(End):
    """Leases a part of its memory to each client."""

    shared: aiordma.Memory

    def __init__(self, number: int) -> None:
        super().__init__(number)
        # A connection that looks for each that ends, and a last.  In whole pages.
        self.size = SIZE // (number + ENDED + LOST + 1) // PAGESIZE * PAGESIZE
        self.came = 0

    async def serve(self, connection: aiordma.Connection) -> None:
        number, self.came = self.came, self.came + 1
        part = self.shared[number * self.size : (number + 1) * self.size]
        async with connection.expose(part, read=True, write=bool(number % 2)) as region:
            await connection.send(region.to_bytes(), imm=number)
            async for _ in connection:
                raise AssertionError

    async def count(self) -> Figures:
        memory = self.shared
        return {
            "leases": memory.leases, "connections": memory.connections, "pinned": status("VmPin"),
            "regions": regions_of(SIZE), "descriptors": descriptors(),
        }  # fmt: skip

    async def written(self) -> Figures:
        """How many parts have the bytes that their connection has written."""
        view, size = self.shared.view, self.size
        return {
            "written": sum(
                view[n * size + STAMP : n * size + 2 * STAMP] == stamp(-n)
                for n in range(1, self.came, 2)
            )
        }

    async def run(self, address: str) -> None:
        limits = aiordma.ListenerLimits(
            max_connections=self.number * 4 // 3 + 64,
            max_connections_per_source=self.number + 16,
        )
        async with aiordma.Memory(SIZE, trusted=READ | WRITE) as self.shared:
            for n in range(SIZE // self.size):
                self.shared.view[n * self.size : n * self.size + STAMP] = stamp(n)
            async with aiordma.serve(
                self.serve, address, 0, limits=limits, memory=self.shared
            ) as server:
                print(server.port, flush=True)
                await self.follow({"count": self.count, "written": self.written})


class Client(End):
    """Has so many connections to the server."""

    def __init__(self, number: int, address: str, port: int) -> None:
        super().__init__(number)
        self.where = address, port
        self.ends: dict[int, tuple[aiordma.Connection, aiordma.RemoteRegion]] = {}
        self.old: list[tuple[int, aiordma.RemoteRegion]] = []  # of those that have ended
        self.order = random.Random(SEED)

    async def one(self) -> tuple[int, aiordma.Connection, aiordma.RemoteRegion]:
        connection = await aiordma.connect(*self.where)
        with await connection.recv() as message:
            region = aiordma.RemoteRegion.from_bytes(bytes(message))
            assert message.imm is not None
            return message.imm, connection, region

    async def connect(self) -> Figures:
        async def some(count: int) -> None:
            for _ in range(count):
                number, connection, region = await self.one()
                self.ends[number] = connection, region

        async with asyncio.TaskGroup() as group:
            for n in range(CONNECTING):
                group.create_task(some(len(range(n, self.number, CONNECTING))))
        return {"connections": len(self.ends)}

    async def work(self) -> Figures:
        """Each reads its part, and writes to it if it may."""
        worked = 0
        for number, (connection, region) in self.ends.items():
            into = bytearray(STAMP)
            await connection.read(region, into)
            assert into == stamp(number), number
            if number % 2:
                await connection.write(region, stamp(-number), offset=STAMP)
            worked += 1
        return {"worked": worked}

    async def drop(self, how: str) -> Figures:
        number = self.order.choice(sorted(self.ends))
        connection, region = self.ends.pop(number)
        if how == "abort":
            connection.abort()
        await connection.close()
        self.old.append((number, region))
        return {"left": len(self.ends)}

    async def look(self) -> Figures:
        """A fresh connection of the domain works, and uses the key of the one that ended last."""
        dropped, old = self.old[-1]
        number, connection, region = await self.one()
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(connection.close)
            into = bytearray(STAMP)
            await connection.read(region, into)
            assert into == stamp(number)
            try:
                await connection.read(old, into)
            except (aiordma.RemoteAccessError, aiordma.ConnectionLostError):
                return {"refused": 1}
            assert into == stamp(dropped)
            return {"refused": 0}

    async def close(self) -> Figures:
        for connection, _ in self.ends.values():
            await connection.close()
        self.ends.clear()
        return {}

    async def run(self) -> None:
        await self.follow({
            "connect": self.connect, "work": self.work, "look": self.look, "close": self.close,
            "drop close": lambda: self.drop("close"), "drop abort": lambda: self.drop("abort"),
        })  # fmt: skip


def main(role: str, address: str, number: str, loop: str, *port: str) -> None:
    factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    if loop == "uvloop":
        import uvloop

        factory = uvloop.new_event_loop
    load_error()  # the libraries, while their files may be read
    become_a_user(memlock_of(int(number)) + (SIZE if role == "server" else 0))
    with asyncio.Runner(loop_factory=factory) as runner:
        if role == "server":
            runner.run(Server(int(number)).run(address))
        else:
            runner.run(Client(int(number), address, int(port[0])).run())


@contextlib.contextmanager
def _started(*arguments: object) -> Iterator[Process]:
    process = Process(*arguments, program=__file__)  # type: ignore[arg-type]
    try:
        yield process
    finally:
        process.kill()


def share(address: str, number: int, loop: str) -> Iterator[tuple[str, Figures]]:
    """Lead both ends through their lives; the figures of each phase, with its name."""
    with _started("server", address, number, loop) as server:
        port = server.told()
        yield "server begin", server.ask("count")
        with _started("client", address, number, loop, port) as client:
            yield "client connect", client.ask("connect")
            yield "client work", client.ask("work")
            yield "server shared", server.ask("count")
            yield "server written", server.ask("written")
            for n in range(ENDED + LOST):
                left = client.ask("drop close" if n < ENDED else "drop abort")["left"]
                _until_left(server, int(left))
                yield "client look", client.ask("look")
                _until_left(server, int(left))
                yield "client left", client.ask("work")
            client.ask("close")
            _until_left(server, 0)
            yield "client look", client.ask("look")
            _until_left(server, 0)
            assert client.end() == 0
        yield "server end", server.ask("count")
        assert server.end() == 0


def _until_left(server: Process, count: int) -> None:
    """Ask until so many are left: the server learns of the end of a connection by an event."""
    deadline = time.monotonic() + LIMIT_S
    while (told := server.ask("count"))["leases"] != count or told["connections"] != count:
        assert time.monotonic() < deadline, told


if __name__ == "__main__":
    main(*sys.argv[1:])
