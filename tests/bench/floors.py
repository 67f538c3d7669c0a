"""The least that a message of 64 bytes can take from Python, there and back: see floors.c.

    python:tests.bench.floors ROLE ADDRESS PORT WAY LOOP TIMER     as a job of jobs.py

A way is how much of Python stands between the loop and the next message, of both ends.  With a
timer there is one in the loop that is not going to fire: a loop that has any reads the clock and
sleeps with a limit.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import importlib.machinery
import importlib.util
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiordma._core import Wakeup
from tests.bench.growth import loop_factory
from tests.bench.jobs import FLOORS, MARKS, TRIPS

WARM_UP = 50
FAR_OFF_S = 36_000.0


def load(path: Path = FLOORS) -> Any:
    """The module in C."""
    loader = importlib.machinery.ExtensionFileLoader("floors", str(path))
    spec = importlib.util.spec_from_loader("floors", loader)
    assert spec is not None
    return importlib.util.module_from_spec(spec)


_c: Any = None


async def pump(fd: int, messages: int, answers: int) -> None:
    """C, with epoll; the loop stands still."""
    _c.expect(messages, answers, None)
    if answers < messages:
        _c.send()
    _c.pump()


async def reader(fd: int, messages: int, answers: int) -> None:
    """The loop calls C, which answers: no line of Python."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    _c.expect(messages, answers, functools.partial(ended.set_result, None))
    loop.add_reader(fd, _c.reader)
    if answers < messages:
        _c.send()
    await ended
    loop.remove_reader(fd)


async def callback(fd: int, messages: int, answers: int) -> None:
    """The loop calls a function of Python's, which calls C once."""
    loop = asyncio.get_running_loop()
    ended, answer = loop.create_future(), _c.answer

    def called() -> None:
        if answer() and not ended.done():
            ended.set_result(None)

    _c.expect(messages, answers, None)
    loop.add_reader(fd, called)
    if answers < messages:
        _c.send()
    await ended
    loop.remove_reader(fd)


async def resume(fd: int, messages: int, answers: int) -> None:
    """The loop calls C, which resumes a task, as in the library; the task calls C twice."""
    loop = asyncio.get_running_loop()
    parked = Wakeup(loop)
    send, there = _c.send, _c.there
    _c.expect(messages, answers, parked.wake)
    loop.add_reader(fd, _c.arrive)
    first = answers < messages
    for _ in range(messages):
        if first:
            send()
        if not there():
            await parked
        if not first:
            send()
    loop.remove_reader(fd)


async def wakeup(fd: int, messages: int, answers: int) -> None:
    """The same by a callback in Python, which calls C once more."""
    loop = asyncio.get_running_loop()
    arrived, take, send = 0, _c.take, _c.send
    parked = Wakeup(loop)
    wake = parked.wake

    def called() -> None:
        nonlocal arrived
        arrived += take()
        if arrived:
            wake()

    loop.add_reader(fd, called)
    first = answers < messages
    for _ in range(messages):
        if first:
            send()
        if not arrived:
            await parked
        arrived -= 1
        if not first:
            send()
    loop.remove_reader(fd)


async def future(fd: int, messages: int, answers: int) -> None:
    """That with a future, which resumes the task in another turn of the loop."""
    loop = asyncio.get_running_loop()
    arrived, take, send = 0, _c.take, _c.send
    waiter: asyncio.Future[None] | None = None

    def called() -> None:
        nonlocal arrived, waiter
        arrived += take()
        if arrived and waiter is not None:
            waiter.set_result(None)
            waiter = None

    loop.add_reader(fd, called)
    first = answers < messages
    for _ in range(messages):
        if first:
            send()
        if not arrived:
            waiter = loop.create_future()
            await waiter
        arrived -= 1
        if not first:
            send()
    loop.remove_reader(fd)


WAYS: dict[str, Callable[[int, int, int], Any]] = {
    way.__name__: way for way in (pump, reader, callback, resume, wakeup, future)
}


async def run(way: str, timer: str, server: bool, fd: int) -> None:
    """One end; the client prints half a round trip in microseconds."""
    far_off = asyncio.get_running_loop().call_later(FAR_OFF_S, print) if timer == "timer" else None
    if server:
        await WAYS[way](fd, WARM_UP + TRIPS, WARM_UP + TRIPS)
    else:
        await WAYS[way](fd, WARM_UP, WARM_UP - 1)
        # Profiled: the marks are those of marks.c.
        marks = ctypes.CDLL(str(MARKS)) if "BENCH_WINDOW" in os.environ else None
        begun = time.perf_counter()
        if marks is not None:
            marks.bench_start()
        await WAYS[way](fd, TRIPS, TRIPS - 1)
        if marks is not None:
            marks.bench_stop()
        print(json.dumps({"us": (time.perf_counter() - begun) / TRIPS / 2 * 1e6}), flush=True)
    # Here, where the server sleeps at once: what it does after its last answer would be measured.
    _c.hang_up(server)
    if far_off is not None:
        far_off.cancel()


def main(words: list[str]) -> None:
    """Connect and run."""
    global _c
    _c = load()
    role, address, port, way, loop, timer = words
    server = role == "server"
    fd = _c.connect(server, address, int(port))
    with asyncio.Runner(loop_factory=loop_factory(loop)) as runner:
        runner.run(run(way, timer, server, fd))
    # The connection ends with its process.
    os._exit(0)
