"""A look at tasks, descriptors and RDMA objects before and after a test."""

from __future__ import annotations

import asyncio
import gc
import inspect
import math
import os
import threading
import time
from dataclasses import dataclass

import aiordma
from aiordma.datagram.transport import RdmaDatagramTransport
from aiordma.testing.kernel_objects import objects_of_process
from aiordma_pytest.device import DeviceError, address

__all__ = ["Snapshot", "is_coroutine", "left_behind", "left_behind_in_loop", "warm"]

_POLL_S = 0.01
_WARM_S = 60.0
_told: set[str] = set()


def is_coroutine(item: object) -> bool:
    """Whether a test is a coroutine."""
    return inspect.iscoroutinefunction(getattr(item, "obj", None))


def warm() -> None:
    """Have librdmacm open what it keeps for the life of the process, which is no leak."""
    if aiordma.why_unavailable() is not None:
        return

    async def listen() -> None:
        try:
            host = address()
        except DeviceError:
            return
        async with aiordma.listen(host, 0) as listener:
            if "AIORDMA_FABRIC" in os.environ:
                # Its library may keep a descriptor from the first byte on that is sent.
                async with (
                    aiordma.connect(host, listener.port, timeout=_WARM_S) as client,
                    await listener.accept(),
                ):
                    await client.send(b"x")

    # In a thread, whose loop is no other's.
    thread = threading.Thread(target=asyncio.run, args=(listen(),), daemon=True)
    thread.start()
    thread.join(_WARM_S)


@dataclass(frozen=True)
class Snapshot:
    """Tasks, descriptors and RDMA objects of a process at a moment.

    Attributes:
        tasks: of the running loop that have not ended, without the task that looks.
        descriptors: each open one, with its target.
        objects: RDMA objects that the kernel holds for the process, with a description.
    """

    tasks: frozenset[asyncio.Task[object]]
    descriptors: frozenset[tuple[int, str]]
    objects: frozenset[str]

    @classmethod
    def now(cls) -> Snapshot:
        """Look."""
        return cls(_tasks(), _descriptors(), _objects())

    def without(self, before: Snapshot) -> list[str]:
        """Return a line for each thing that was not there before."""
        return [
            *(f"{task!r}" for task in self.tasks - before.tasks),
            *(
                f"descriptor {number}: {target}"
                for number, target in sorted(self.descriptors - before.descriptors)
            ),
            *sorted(self.objects - before.objects),
        ]


def left_behind(before: Snapshot, settle_s: float) -> list[str]:
    """Return the things that a test has left, after a time to end in; blocks meanwhile.

    The library ends connections in the background, and other libraries do the like.
    """
    for _ in _pauses(settle_s):
        if not Snapshot.now().without(before):
            break
        time.sleep(_POLL_S)
    return _verdict(before, Snapshot.now())


async def left_behind_in_loop(before: Snapshot, settle_s: float) -> list[str]:
    """Return the things that a test has left, after a time in which the loop runs."""
    for _ in _pauses(settle_s):
        if not Snapshot.now().without(before):
            break
        await asyncio.sleep(_POLL_S)
    return _verdict(before, Snapshot.now())


def _pauses(settle_s: float) -> range:
    """Pauses of so many seconds in all.

    They are counted: by a clock, a machine that stands still for a while would take the time that
    a task has to end in.
    """
    return range(math.ceil(settle_s / _POLL_S))


def _verdict(before: Snapshot, now: Snapshot) -> list[str]:
    left = now.without(before)
    if now.objects - before.objects:
        left += _still_open()
    if left:
        gc.collect()  # the next test begins without garbage
    return left


def _tasks() -> frozenset[asyncio.Task[object]]:
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return frozenset()
    return frozenset(asyncio.all_tasks(loop) - {asyncio.current_task(loop)})


def _descriptors() -> frozenset[tuple[int, str]]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append((int(name), os.readlink(f"/proc/self/fd/{name}")))
        except OSError:
            continue  # that of the listing itself
    return frozenset(found)


def _objects() -> frozenset[str]:
    try:
        return frozenset(objects_of_process(os.getpid()))
    except OSError:
        return frozenset()  # a kernel without RDMA, or without this netlink family


def _still_open() -> list[str]:
    """Return a line for each object of aiordma that is open, and that no earlier test had left."""
    kinds = (
        aiordma.Connection, aiordma.Listener, aiordma.RdmaServer, aiordma.RdmaTransport,
        RdmaDatagramTransport,
    )  # fmt: skip
    found = {repr(each) for each in gc.get_objects() if isinstance(each, kinds)}
    new = sorted(text for text in found - _told if "closed" not in text)
    _told.update(new)
    return [f"still open: {text}" for text in new]
