"""Streams beside rstream: throughput of 64 KiB pieces, and the round trip of 64 bytes.

    python -m aiordma.testing.softroce --engine qemu --counted -- python tests/bench/bench_stream.py

Each pair is two processes on one machine that hold rstream's conversation (see
tests/interop/rstream_peer.py): a client and then a server send all pieces.  First rstream has it
with itself, blocking; then aiordma with itself, by StreamReader and StreamWriter and by a Protocol,
on asyncio's loop and on uvloop; then aiordma with rstream.  A ratio is rstream's time over ours,
both of the client: 1 means as fast.  Nothing is compared with a goal; status 1 is a failure to run.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

import aiordma

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.interop.program import running, until_listening

SYNC = 16
LIMIT_S = 600.0
LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


@dataclass(frozen=True)
class Load:
    """What is exchanged: `count` pieces of `size` bytes there, then back, `rounds` times."""

    size: int
    count: int
    rounds: int

    @property
    def transfers(self) -> int:
        """Pieces of both directions."""
        return 2 * self.count * self.rounds

    def command(self, *where: str) -> tuple[str, ...]:
        """rstream's part in it."""
        sizes = ("-S", str(self.size), "-C", str(self.count), "-I", str(self.rounds))
        return ("rstream", *where, *sizes, "-T", "b")


class Streams:
    """By StreamReader and StreamWriter."""

    @staticmethod
    async def connect(address: str, port: int) -> Streams:
        return Streams(*await aiordma.open_connection(address, port))

    @staticmethod
    async def serve(address: str, talk: Callable[[Streams], Awaitable[None]]) -> aiordma.RdmaServer:
        return await aiordma.start_server(lambda r, w: talk(Streams(r, w)), address, 0)

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, piece: bytes, count: int) -> None:
        for _ in range(count):
            self._writer.write(piece)
            await self._writer.drain()

    async def receive(self, size: int, count: int) -> None:
        for _ in range(count):
            await self._reader.readexactly(size)

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()


class Counting(asyncio.Protocol):
    """By a Protocol that counts what arrives."""

    @staticmethod
    async def connect(address: str, port: int) -> Counting:
        end = Counting()
        await aiordma.create_connection(lambda: end, address, port)
        return end

    @staticmethod
    async def serve(
        address: str, talk: Callable[[Counting], Coroutine[Any, Any, None]]
    ) -> aiordma.RdmaServer:
        return await aiordma.create_server(lambda: Counting(talk), address, 0)

    def __init__(self, talk: Callable[[Counting], Coroutine[Any, Any, None]] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._talk = talk
        self._there = 0
        self._wanted = 0
        self._arrived: asyncio.Future[None] | None = None
        self._ended = self._loop.create_future()
        self._writable = asyncio.Event()
        self._writable.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        if self._talk is not None:
            self._task = self._loop.create_task(self._talk(self))

    def data_received(self, data: bytes) -> None:
        self._there += len(data)
        if self._arrived is not None and self._there >= self._wanted:
            self._arrived.set_result(None)
            self._arrived = None

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended.set_result(exc)

    async def send(self, piece: bytes, count: int) -> None:
        for _ in range(count):
            self._transport.write(piece)
            if not self._writable.is_set():
                await self._writable.wait()

    async def receive(self, size: int, count: int) -> None:
        self._wanted = size * count
        if self._there < self._wanted:
            self._arrived = self._loop.create_future()
            await self._arrived
        self._there -= self._wanted

    async def close(self) -> None:
        self._transport.close()
        await self._ended


FORMS: dict[str, type[Streams] | type[Counting]] = {"streams": Streams, "protocol": Counting}


async def connected(form: str, address: str, port: int) -> Streams | Counting:
    """Connect."""
    return await FORMS[form].connect(address, port)


async def converse(end: Streams | Counting, load: Load, *, first: bool) -> float:
    """Hold the conversation; returns the seconds of all but its first messages."""
    piece = bytes(load.size)
    if first:
        await end.send(bytes(SYNC), 1)
    await end.receive(SYNC, 1)
    if not first:
        await end.send(bytes(SYNC), 1)
    start = time.perf_counter()
    for _ in range(load.rounds):
        if first:
            await end.send(piece, load.count)
        await end.receive(load.size, load.count)
        if not first:
            await end.send(piece, load.count)
    took = time.perf_counter() - start
    await end.close()
    return took


async def serve(form: str, load: Load, address: str) -> None:
    """The other process: serve one connection."""
    done = asyncio.Event()

    async def talk(end: Streams | Counting) -> None:
        await converse(end, load, first=False)
        done.set()

    async with await FORMS[form].serve(address, talk) as server:
        print(server.port, flush=True)
        async with asyncio.timeout(LIMIT_S):
            await done.wait()


async def ours(form: str, loop: str, load: Load, address: str) -> float:
    """aiordma with aiordma: seconds."""
    numbers = (str(load.size), str(load.count), str(load.rounds))
    other = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--serve", form, loop, *numbers, stdout=PIPE
    )
    assert other.stdout is not None
    port = int(await other.stdout.readline())
    took = await converse(await connected(form, address, port), load, first=True)
    if await other.wait():
        msg = "the other process failed"
        raise RuntimeError(msg)
    return took


async def mixed(form: str, load: Load, address: str, port: int) -> float:
    """aiordma with rstream: seconds."""
    command = load.command("-b", address, "-p", str(port))
    async with running(*command, limit_s=LIMIT_S) as rstream:
        end = await until_listening(rstream, port, lambda: connected(form, address, port))
        took = await converse(end, load, first=True)
        await rstream.finish()
    return took


async def theirs(load: Load, address: str, port: int) -> float:
    """rstream with rstream: seconds, as the client tells them."""
    where = ("-p", str(port))
    async with running(*load.command("-b", address, *where), limit_s=LIMIT_S) as server:
        told = ""
        while not told.startswith("custom"):  # until it listens
            async with running(*load.command("-s", address, *where), limit_s=LIMIT_S) as client:
                await client.over()
                told = client.lines[-1]
        await server.finish()
    return float(told.split()[-1]) * 1e-6 * load.transfers


def in_loop(loop: str, job: Awaitable[float]) -> float:
    """Run a part of the benchmark on the loop of that name."""
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        return runner.run(job)  # type: ignore[arg-type]


def main(address: str, pieces: int, trips: int) -> None:
    """Measure and print."""
    engine = os.environ.get("AIORDMA_SOFTROCE_ENGINE", "this machine")
    device = os.environ.get("AIORDMA_SOFTROCE_DEVICE", "device")
    clock = "counted time" if os.environ.get("AIORDMA_SOFTROCE_COUNTED") else "wall time"
    print("command:", " ".join(sys.orig_argv))
    print(f"{engine}, {device}, {clock}; the ratio is rstream's time over ours")
    throughput, trip = Load(65_536, pieces, 1), Load(64, 1, trips)

    def tell(who: str, load: Load, took: float, base: float) -> None:
        if load is throughput:
            number = f"{load.transfers * load.size / took / 1e6:10.1f} MB/s"
        else:
            number = f"{took / load.rounds * 1e6:10.1f} us"
        print(f"{who:<42}{number:>16}   ratio {base / took:.3f}", flush=True)

    port = 21_000
    for load, what in (throughput, f"{pieces} x 64 KiB each way"), (trip, "round trip of 64 bytes"):
        print(what)
        port += 1
        base = in_loop("asyncio", theirs(load, address, port))
        tell("rstream -T b with rstream -T b", load, base, base)
        for form in FORMS:
            for loop in LOOPS:
                took = in_loop(loop, ours(form, loop, load, address))
                tell(f"aiordma {form}, {loop}, with the same", load, took, base)
        for loop in LOOPS:
            port += 1
            took = in_loop(loop, mixed("protocol", load, address, port))
            tell(f"aiordma protocol, {loop}, with rstream", load, took, base)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--pieces", type=int, default=200)
    parser.add_argument("--trips", type=int, default=500)
    parser.add_argument("--serve", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    where = os.environ["AIORDMA_SOFTROCE_ADDR"]
    if arguments.serve:
        form, loop, *numbers = arguments.serve
        with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
            runner.run(serve(form, Load(*map(int, numbers)), where))
    else:
        main(where, arguments.pieces, arguments.trips)
