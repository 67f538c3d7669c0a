"""What a test may leave behind: nothing."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import subprocess
from collections import Counter
from collections.abc import Callable

from aiordma.loop.workers import _blocking, reaper


def adapter_objects() -> Counter[str]:
    """QPs, CQs, MRs, PDs, connection ids that the kernel holds, over all devices."""
    shown = subprocess.run(
        ["rdma", "-j", "resource", "show"], capture_output=True, check=True, timeout=20
    )
    total: Counter[str] = Counter()
    for device in json.loads(shown.stdout):
        for kind in ("qp", "cq", "mr", "pd", "cm_id", "srq"):
            total[kind] += device.get(kind, 0)
    return total


def rdma_descriptors() -> Counter[str]:
    """Open descriptors of this process that belong to RDMA."""
    total: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if "infiniband" in target:
            total[target] += 1
    return total


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what no event tells of."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def settle() -> None:
    """Let what is already under way come to its end: background closes and their threads."""
    me = asyncio.current_task()
    for _ in range(100):
        others = [task for task in asyncio.all_tasks() if task is not me]
        if not others:
            break
        _, pending = await asyncio.wait(others, timeout=10)
        assert not pending, f"tasks that do not end: {pending}"
    gc.collect()
    # An abandoned call of a thread is undone there, and may leave the reaper something to do.
    assert await asyncio.to_thread(_blocking.drain, 20), "a blocking call is stuck"
    assert await asyncio.to_thread(reaper.drain, 20), "the reaper is stuck"
    # Callbacks that the reaper's threads handed to the loop.
    await asyncio.sleep(0)
    await asyncio.sleep(0)
