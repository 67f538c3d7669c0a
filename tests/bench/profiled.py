"""Programs of aiordma with marks where their figure is taken, forked by guest.py.

    perf ...                            `aiordma perf`; the last of its measurements
    connect ROLE ADDRESS PORT LOOP      so many connections at once, as growth_connect.py has them

The marks are those of marks.c.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import socket
from typing import Any

import aiordma
from aiordma.cli import __main__ as cli
from aiordma.cli.perf.kinds import Stop
from aiordma.cli.perf.messages import MessageClient
from aiordma.cli.perf.stream_protocols import ProtocolClient
from tests.bench.growth import CONFIGS, loop_factory
from tests.bench.jobs import MARKS
from tests.bench.profile_jobs import CONNECTIONS

#: Connected before, for what is loaded and looked up once.
FEW = 2
_marks = ctypes.CDLL(str(MARKS))


def mark_perf() -> None:
    """Have `aiordma perf` say where a measurement of latency begins and ends."""
    begin = Stop.begin

    def begun(self: Stop) -> int:
        now = begin(self)
        _marks.bench_start()
        return now

    def ending(function: Any) -> Any:
        async def lat(self: Any, size: int, stop: Stop) -> Any:
            stamps = await function(self, size, stop)
            _marks.bench_stop()
            return stamps

        return lat

    Stop.begin = begun  # type: ignore[method-assign]
    for kind in MessageClient, ProtocolClient:
        kind.lat = ending(kind.lat)  # type: ignore[method-assign]


def told_at(port: int) -> str:
    """Where the client hears that the server has all connections."""
    return f"\0bench-{port}"


async def serve(address: str, port: int) -> None:
    """Take the connections."""
    listening = aiordma.listen(address, port, config=CONFIGS["lean"], backlog=4096)
    taken: list[aiordma.Connection] = []
    async with listening as listener:
        for many in FEW, CONNECTIONS:
            taken = [await listener.accept() for _ in range(many)]
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as teller:
                teller.sendto(b"all", told_at(port))
        with contextlib.suppress(aiordma.RdmaError, OSError):
            await taken[0].recv()
    # What follows says nothing about connecting.
    os._exit(0)


async def connect(address: str, port: int) -> None:
    """Make the connections: a few for what is loaded and looked up once, then all at once."""
    loop = asyncio.get_running_loop()
    kept = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as hearing:
        hearing.bind(told_at(port))
        hearing.setblocking(False)
        for many in FEW, CONNECTIONS:
            _marks.bench_start()
            kept += await asyncio.gather(
                *(aiordma.connect(address, port, config=CONFIGS["lean"]) for _ in range(many))
            )
            await loop.sock_recv(hearing, 16)
            _marks.bench_stop()
    os._exit(0)


def main(words: list[str]) -> int:
    """One end; the exit status."""
    kind, *words = words
    if kind == "perf":
        mark_perf()
        return int(cli.main([kind, *words]))
    role, address, port, loop = words
    side = serve if role == "server" else connect
    with asyncio.Runner(loop_factory=loop_factory(loop)) as runner:
        runner.run(side(address, int(port)))
    return 0
