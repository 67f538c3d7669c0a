"""What a test may leave behind: nothing."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiordma.loop.workers import (
    answering,
    answering_slowly,
    connecting,
    reaper,
)
from aiordma.memory.governor import FIRST, PROCESS
from aiordma.testing.kernel_objects import object_counts
from aiordma.verbs import CompletionQueue, WorkCompletion
from tests.inside.loop import all_done, default_pool


def adapter_objects() -> Counter[str]:
    """QPs, CQs, MRs, PDs, connection ids that the kernel holds, over all devices."""
    # Each test asks twice, and to start the program rdma takes a guest longer than many tests.
    counts = object_counts()
    return Counter({kind: counts[kind] for kind in ("qp", "cq", "mr", "pd", "cm_id", "srq")})


def leased() -> tuple[int, int]:
    """Bytes that the governor has counted: of first slots and rings, and of large messages."""
    return FIRST.pinned, PROCESS.held()


def rdma_descriptors() -> Counter[str]:
    """Open descriptors of this process that belong to RDMA, or tell the time for it."""
    total: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if "infiniband" in target or "timerfd" in target:
            total[target] += 1
    return total


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for what no event tells of."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@contextmanager
def reported() -> Iterator[list[dict[str, Any]]]:
    """The contexts that the exception handler of the loop gets in the block, in place of others."""
    loop = asyncio.get_running_loop()
    reports: list[dict[str, Any]] = []
    before = loop.get_exception_handler()
    loop.set_exception_handler(lambda _, context: reports.append(context))
    try:
        yield reports
    finally:
        loop.set_exception_handler(before)


async def polled(cq: CompletionQueue, count: int) -> list[WorkCompletion]:
    """Poll by hand until so many have come, and never for more than are missing.

    A sender may be told of its message before the receiver is: iWARP asks for no acknowledgement.
    """
    found: list[WorkCompletion] = []

    def all_there() -> bool:
        found.extend(cq.poll(count - len(found)))
        return len(found) >= count

    await until(all_there)
    return found


class Connecting:
    """The connects of a test in threads: a thread holds the objects of its call until that ends.

    The thread hands the result to the loop before it leaves the call, so that the loop can be ahead
    of it.  On iWARP a connect that an earlier test has given up keeps its thread for minutes.
    """

    def __init__(self) -> None:
        self._before = connecting.unfinished

    def let_go(self) -> None:
        """Wait until no thread has an object of a connect that has ended."""
        assert all_done(default_pool(), 20), "a blocking call is stuck"
        deadline = time.monotonic() + 10
        while connecting.unfinished > self._before:
            assert time.monotonic() < deadline, "a connect is stuck"
            time.sleep(0.001)


def collect() -> None:
    """Collect all garbage, in this thread.

    `gc.collect` returns at once while another thread collects, which may be in the middle of a
    finalizer's system call.  What a finalizer ends, such as a task in the middle of a handshake,
    can leave new garbage, so that it takes several collections until one finds nothing.
    """
    me, done = threading.get_ident(), []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == 2 and threading.get_ident() == me:
            done.append(info["collected"])

    gc.callbacks.append(note)
    try:
        deadline = time.monotonic() + 20
        while not done or done[-1]:
            gc.collect()
            assert time.monotonic() < deadline, "collections are stuck, or always find garbage"
            if not done:
                time.sleep(0.001)
    finally:
        gc.callbacks.remove(note)


async def settle(seconds: float = 20.0) -> None:
    """Let what is already under way come to its end: background closes and their threads."""
    await _end_of_tasks(seconds)
    collect()
    # An abandoned call of a thread is undone there, and may leave the reaper something to do; the
    # reaper's threads hand callbacks to the loop, and these may leave something to the threads.
    for _ in range(3):
        await _end_of_tasks(seconds)
        for pool in (default_pool(), answering, answering_slowly):
            assert await asyncio.to_thread(all_done, pool, 20), "a blocking call is stuck"
        assert await asyncio.to_thread(all_done, reaper, 20), "the reaper is stuck"
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def _end_of_tasks(seconds: float) -> None:
    me = asyncio.current_task()
    for _ in range(100):
        others = [task for task in asyncio.all_tasks() if task is not me]
        if not others:
            break
        _, pending = await asyncio.wait(others, timeout=seconds)
        assert not pending, f"tasks that do not end: {pending}"
