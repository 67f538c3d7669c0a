"""Thousands of connections with default settings, between programs without privileges.

`crowd` starts a server and clients as processes of their own, in which RLIMIT_MEMLOCK is in
proportion to 1 GiB for 10,000 connections, and leads them through their lives: all connect and
exchange a message, stay idle, talk again in a random order with messages of many sizes, and close.

Run as: python thousands.py crowd ADDRESS CONNECTIONS LOOP
It prints a line of JSON for each phase of each end, and the figures of docs/growth.md.  The ends:
    python thousands.py server ADDRESS CONNECTIONS LOOP
        python thousands.py client ADDRESS CONNECTIONS LOOP PORT
A line on their standard input is a phase, answered by a line of JSON when it is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import aiordma
from aiordma._ffi import load_error

__all__ = [
    "CONNECTING", "LIMIT_S", "NUMBER_OF_MESSAGES", "SEED", "USER", "End", "Figures", "Process",
    "crowd", "descriptors", "memlock_of", "status",
]  # fmt: skip

USER = 65534
#: Bytes of RLIMIT_MEMLOCK for each connection of a process: 1 GiB for 10,000.
MEMLOCK_EACH = (1 << 30) // 10_000
MEMLOCK_LEAST = 8 << 20
#: For `fill_heap`: one heap, which returns nothing to the system, and bytes for a connection.
HEAP = {"PYTHONMALLOC": "malloc", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_ARENA_MAX": "1"}
HEAP_EACH = 26_000
#: More connections than this need it.
SCATTERED = 4000
#: Connects under way at a time.
CONNECTING = 32
#: Connections that talk at a time, and the sizes of their messages.
TALKING = 64
SIZES = (1, 64, 5000, 20_000, 200_000)
#: With more than `SCATTERED` connections the machine has few mappings left for larger memory.
SMALL_SIZES = (1, 64, 5000)
#: Messages of a connection in its life: at the connect, after it, and in the random order.
NUMBER_OF_MESSAGES = 4
#: Seconds of a phase, for each connection, and in all cases.
LIMIT_EACH_S, LIMIT_S = 0.2, 90.0
#: Silence that is measured: two looks of the keepalive at least.
IDLE_S = 25.0
SEED = int(os.environ.get("AIORDMA_TEST_SEED", "20261124"))

Figures = dict[str, float]


def memlock_of(connections: int) -> int:
    """RLIMIT_MEMLOCK of a process that holds so many ends."""
    return max(MEMLOCK_LEAST, connections * MEMLOCK_EACH)


def status(name: str) -> int:
    """A number of /proc/self/status; sizes in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            words = line.split()
            return int(words[1]) * (1024 if words[2:] == ["kB"] else 1)
    raise AssertionError(name)


def descriptors() -> int:
    """Open descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def tenths(ends: list[float]) -> Figures:
    """Milliseconds of the processor for a piece of the first tenth of the work, and of the last."""
    tenth = (len(ends) - 1) // 10
    return {
        "first_cpu_ms": (ends[tenth] - ends[0]) / tenth * 1000,
        "last_cpu_ms": (ends[-1] - ends[-1 - tenth]) / tenth * 1000,
    }


def spent() -> Figures:
    """Seconds of the processor, wake-ups, and seconds of the clock, until now."""
    return {
        "cpu_s": time.process_time(),
        "wakeups": status("voluntary_ctxt_switches"),
        "wall_s": time.monotonic(),
    }


class End:
    """One of the processes: its phases, and its memory without that of its beginning."""

    def __init__(self, number: int) -> None:
        self.number = number
        gc.collect()
        self.before = status("VmRSS")

    def memory(self) -> Figures:
        """Of all connections."""
        gc.collect()
        links = (path.resolve().name for path in Path("/proc/self/fd").iterdir())
        return {
            "pinned": status("VmPin"),
            "resident": status("VmRSS") - self.before,
            "descriptors": descriptors(),
            "timers": sum("timerfd" in link for link in links),
        }

    async def nothing(self) -> Figures:
        """For the figures that come with each phase."""
        return {}

    async def follow(self, phases: dict[str, Callable[[], Awaitable[Figures]]]) -> None:
        """Run the phases that the input names, until it ends."""
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
        )
        try:
            while name := (await reader.readline()).decode().strip():
                begun = time.monotonic()
                async with asyncio.timeout(LIMIT_S + LIMIT_EACH_S * self.number):
                    told = await phases[name]()
                took = {**spent(), "took_s": time.monotonic() - begun}
                print(json.dumps({**took, **told}), flush=True)
        finally:
            transport.close()


class Server(End):
    """Echoes the messages of all its clients."""

    messages = 0

    async def echo(self, connection: aiordma.Connection) -> None:
        async for message in connection:
            self.messages += 1
            await connection.send(message)

    async def counted(self) -> Figures:
        return {"messages": self.messages, **self.memory()}

    async def run(self, address: str) -> None:
        limits = aiordma.ListenerLimits(
            # A source has three quarters of it at most.
            max_connections=self.number * 4 // 3 + 64,
            max_connections_per_source=self.number + 16,
        )
        async with aiordma.serve(self.echo, address, 0, limits=limits) as server:
            print(server.port, flush=True)
            await self.follow({"count": self.counted, "pass": self.nothing})


class Client(End):
    """Has so many connections to the server."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.connections: list[aiordma.Connection] = []
        self.order = random.Random(f"{SEED}/{os.getppid()}")

    async def each(self, count: int, at_once: int, work: Callable[[int], Awaitable[None]]) -> None:
        """Have `work` done for 0 to count - 1, so many at a time."""
        numbers = iter(range(count))

        async def worker() -> None:
            for number in numbers:
                await work(number)

        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(worker())

    async def ask(self, connection: aiordma.Connection, size: int) -> None:
        data = self.order.randbytes(size)
        await connection.send(data)
        with await connection.recv() as answer:
            assert answer == data

    async def connect(self, address: str, port: int) -> Figures:
        ends = [time.process_time()]

        async def one(_: int) -> None:
            connection = await aiordma.connect(address, port)
            self.connections.append(connection)
            await self.ask(connection, 64)
            ends.append(time.process_time())

        await self.each(self.number, CONNECTING, one)
        return {**tenths(ends), **self.memory()}

    async def again(self) -> Figures:
        """A message on each, and nothing else."""

        async def one(number: int) -> None:
            await self.ask(self.connections[number], 64)

        await self.each(self.number, TALKING, one)
        return {}

    async def talk(self) -> Figures:
        self.order.shuffle(self.connections)
        sizes = SMALL_SIZES if self.number > SCATTERED else SIZES

        async def one(number: int) -> None:
            for size in self.order.sample(sizes, 2):
                await self.ask(self.connections[number], size)

        await self.each(self.number, TALKING, one)
        return self.memory()

    async def close(self) -> Figures:
        ends = [time.process_time()]

        async def one(number: int) -> None:
            await self.connections[number].close()
            ends.append(time.process_time())

        await self.each(self.number, TALKING, one)
        self.connections.clear()
        return {**tenths(ends), **self.memory()}

    async def run(self, address: str, port: int) -> None:
        await self.follow({
            "connect": lambda: self.connect(address, port), "again": self.again,
            "talk": self.talk, "pass": self.nothing, "close": self.close,
        })  # fmt: skip


def fill_heap(number: int) -> None:
    """Have the heap's pages lie in a row.

    A User-Mode Linux maps each piece of memory that does not lie in a row by a mapping of the
    machine, which gives a process 65,530 (`vm.max_map_count`).
    """
    blocks = [bytearray(b"x") * 100_000 for _ in range(number * HEAP_EACH // 100_000)]
    del blocks


def become_a_user(memlock: int) -> None:
    """Go on without the rights of root, and with so many bytes that may be pinned."""
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (memlock, memlock))
    os.setgroups([])
    os.setresgid(USER, USER, USER)
    os.setresuid(USER, USER, USER)


def main(role: str, address: str, number: str, loop: str, *port: str) -> None:
    factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    if loop == "uvloop":
        import uvloop

        factory = uvloop.new_event_loop
    load_error()  # the libraries, while their files may be read
    if int(number) > SCATTERED:
        fill_heap(int(number))
    become_a_user(memlock_of(int(number)))
    with asyncio.Runner(loop_factory=factory) as runner:
        if role == "server":
            runner.run(Server(int(number)).run(address))
        else:
            runner.run(Client(int(number)).run(address, int(port[0])))


class Process:
    """One of the processes, as the test sees it."""

    def __init__(
        self, role: str, address: str, number: int, *more: object, program: str = __file__
    ) -> None:
        heap = HEAP if number > SCATTERED else {}
        arguments = (role, address, number, *more)
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", program, *map(str, arguments)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **heap},
        )  # fmt: skip

    def told(self) -> Any:
        """Its next line."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the process has ended"
        return json.loads(line)

    def ask(self, phase: str) -> Figures:
        """The figures of a phase, when it is over."""
        assert self._process.stdin is not None
        self._process.stdin.write(phase + "\n")
        self._process.stdin.flush()
        told: Figures = self.told()
        return told

    def end(self) -> int:
        """Its status; after its input has ended."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.stdin = None
        return self._process.wait(LIMIT_S)

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextlib.contextmanager
def started(role: str, address: str, number: int, *more: object) -> Iterator[Process]:
    """One of the ends, for the length of a block."""
    process = Process(role, address, number, *more)
    try:
        yield process
    finally:
        process.kill()


def crowd(address: str, number: int, loop: str, idle_s: float = IDLE_S) -> dict[str, Figures]:
    """Lead so many connections through their lives; figures by end and phase."""
    told: dict[str, Figures] = {}

    def note(name: str, figures: Figures) -> None:
        told[name] = figures
        print(name, json.dumps(figures), flush=True)

    with started("server", address, number, loop) as server:
        port = server.told()
        with started("client", address, number, loop, port) as client:
            ends = {"server": server, "client": client}
            note("server begin", server.ask("count"))
            note("client connect", client.ask("connect"))
            note("server connect", server.ask("count"))
            note("client again", client.ask("again"))
            before = {name: end.ask("pass") for name, end in ends.items()}
            time.sleep(idle_s)
            for name, end in ends.items():
                after = end.ask("pass")
                note(f"{name} idle", {key: after[key] - before[name][key] for key in spent()})
            note("client talk", client.ask("talk"))
            note("server talk", server.ask("count"))
            note("client close", client.ask("close"))
            assert client.end() == 0
        deadline = time.monotonic() + LIMIT_S
        while (closed := server.ask("count"))["pinned"] and time.monotonic() < deadline:
            pass  # the server's ends follow those of the client
        note("server close", closed)
        assert server.end() == 0
    return told


if __name__ == "__main__":
    if sys.argv[1] == "crowd":
        from tests.device.test_permissions import modes

        with modes():
            crowd(sys.argv[2], int(sys.argv[3]), sys.argv[4] if len(sys.argv) > 4 else "uvloop")
    else:
        main(*sys.argv[1:])
