"""The RDMA objects of a process, as the kernel has them."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections import Counter

import pytest

import aiordma
from aiordma.testing.kernel_objects import objects_of_process
from tests.device.meeting import paired
from tests.device.oracle import adapter_objects, settle

pytestmark = pytest.mark.one_loop

_SHORT = {
    "queue pair": "qp", "connection id": "cm_id", "completion queue": "cq",
    "memory region": "mr", "protection domain": "pd", "shared receive queue": "srq",
}  # fmt: skip


def _counted(process: int) -> Counter[str]:
    kinds = (re.sub(r" \d+ of .*", "", text) for text in objects_of_process(process))
    return Counter(_SHORT[kind] for kind in kinds)


async def test_they_are_those_that_the_kernel_counts(address: str) -> None:
    before, whole = _counted(os.getpid()), adapter_objects()
    async with paired(address):
        now = _counted(os.getpid()) - before
        assert now["qp"] == 2
        assert now["cm_id"] >= 2
        assert now == Counter({k: n for k, n in (adapter_objects() - whole).items() if n})
        names = objects_of_process(os.getpid())
        device = aiordma.devices()[0].name
        assert all(name.endswith(f" of {device}") for name in names)
        assert len(set(names)) == len(names)
    await settle()
    assert _counted(os.getpid()) == before


async def test_those_of_another_process_are_its_own(address: str) -> None:
    program = (
        "import asyncio, sys, aiordma\n"
        "async def main():\n"
        f"    async with aiordma.listen({address!r}, 0) as listener:\n"
        "        print(listener.port, flush=True)\n"
        "        await asyncio.to_thread(sys.stdin.read)\n"
        "asyncio.run(main())\n"
    )
    before = objects_of_process(os.getpid())
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline()
    assert _counted(process.pid)["cm_id"] >= 1
    assert objects_of_process(os.getpid()) == before
    await asyncio.wait_for(process.communicate(b""), 60)
    assert objects_of_process(process.pid) == []
