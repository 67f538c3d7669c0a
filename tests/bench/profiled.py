"""Programs of aiordma with marks where their figure is taken, forked by guest.py.

    perf ...                            `aiordma perf`; the last of its measurements
    connect ROLE ADDRESS PORT LOOP      so many connections at once, as growth_connect.py has them
    plain MODULE ROLE ...               a program of plain_peer.py, plain_streams.py, plain_dask.py
                                        or plain_many.py; the last of its measurements
    into ROLE ADDRESS PORT CHECK        into_peer.py, where the server measures

The marks are those of marks.c.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import socket
import time
from typing import Any

import aiordma
from aiordma.cli import __main__ as cli
from aiordma.cli.perf.kinds import Stop
from aiordma.cli.perf.messages import MessageClient
from aiordma.cli.perf.stream_protocols import ProtocolClient
from tests.bench import into_peer, plain_dask, plain_many, plain_peer, plain_streams
from tests.bench.growth import CONFIGS, loop_factory
from tests.bench.jobs import MARKS
from tests.bench.profile_jobs import CONNECTIONS

#: A few first, for what is loaded and looked up once, and all of them once, for the pages that they
#: fill: a process that was forked copies each page that it changes for the first time.
ROUNDS = (2, CONNECTIONS, CONNECTIONS)
_PLAIN = {
    "peer": plain_peer, "streams": plain_streams, "dask": plain_dask, "many": plain_many,
}  # fmt: skip
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


class Marking:
    """A clock in place of `time`, read where a measurement begins and ends."""

    def __init__(self) -> None:
        self._begun = False

    def perf_counter(self) -> float:
        """Seconds, and a mark."""
        if self._begun:
            _marks.bench_stop()
        else:
            _marks.bench_start()
        self._begun = not self._begun
        return time.perf_counter()

    def process_time(self) -> float:
        """Seconds, and no mark."""
        return time.process_time()


def told_at(port: int) -> str:
    """Where the client hears that the server has all connections."""
    return f"\0bench-{port}"


async def until_closed(connection: aiordma.Connection) -> None:
    """The client closes it."""
    with contextlib.suppress(aiordma.RdmaError, OSError):
        await connection.recv()
    connection.abort()


async def serve(address: str, port: int) -> None:
    """Take the connections."""
    listening = aiordma.listen(address, port, config=CONFIGS["lean"], backlog=4096)
    async with listening as listener:
        for many in ROUNDS:
            taken = [await listener.accept() for _ in range(many)]
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as teller:
                teller.sendto(b"all", told_at(port))
            await asyncio.gather(*(until_closed(connection) for connection in taken))
            taken.clear()  # now, and not while the next ones are made


async def connect(address: str, port: int) -> None:
    """Make the connections; the last window counts."""
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as hearing:
        hearing.bind(told_at(port))
        hearing.setblocking(False)
        for many in ROUNDS:
            _marks.bench_start()
            made = await asyncio.gather(
                *(aiordma.connect(address, port, config=CONFIGS["lean"]) for _ in range(many))
            )
            await loop.sock_recv(hearing, 16)
            _marks.bench_stop()
            await asyncio.gather(*(connection.close() for connection in made))
            made.clear()


def main(words: list[str]) -> int:
    """One end; the exit status."""
    kind, *words = words
    if kind == "perf":
        mark_perf()
        return int(cli.main([kind, *words]))
    if kind == "plain":
        module: Any = _PLAIN[words[0]]
        if words[1] == "client":
            module.time = Marking()
        return int(module.main(words[1:]))
    if kind == "into":
        into: Any = into_peer
        if words[0] == "server":
            into.time = Marking()
        return int(into.main(words))
    # What was there before the fork is collected now, and not again: that would copy all of it.
    gc.collect()
    gc.freeze()
    role, address, port, loop = words
    side = serve if role == "server" else connect
    with asyncio.Runner(loop_factory=loop_factory(loop)) as runner:
        runner.run(side(address, int(port)))
    return 0
