"""Dask with much memory: frames above 256 MiB, and a shuffle over four workers of which some die.

The sizes are small enough for each run of the suite; AIORDMA_TEST_DASK_MIB sets that of the shuffle
and of the largest frame, in MiB.  1024 of them take a guest of 6 GiB.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from multiprocessing import resource_tracker
from typing import Any

import numpy as np
import psutil
import pytest

from aiordma.contrib.dask import RdmaComm
from aiordma.testing.kernel_objects import objects_of_process
from tests.device.dask_clusters import cluster_of
from tests.device.dask_comms import as_completed, comms, passed, to_serialize, wait
from tests.device.oracle import until

SHUFFLED_MIB = int(os.environ.get("AIORDMA_TEST_DASK_MIB", "64"))
FRAME_MIB = max(SHUFFLED_MIB, 320)
WORKERS = 4
#: Large: a busy machine starts a worker in ten seconds.
LIMIT_S = 400 + SHUFFLED_MIB
#: Of the shuffle: arrays, of which each is cut into as many pieces.
PARTS = 8

pytestmark = [pytest.mark.device, pytest.mark.dask, pytest.mark.timeout(LIMIT_S + 40)]


@pytest.fixture(autouse=True)
async def in_time() -> AsyncIterator[None]:
    """Each wait of these tests has a bound."""
    async with asyncio.timeout(LIMIT_S):
        yield


# Frames


@pytest.mark.one_device
@pytest.mark.parametrize("writeable", [True, False], ids=["writeable", "read-only"])
@pytest.mark.parametrize("split", [True, False], ids=["split", "whole"])
async def test_an_array_above_256_mib(
    address: str, monkeypatch: pytest.MonkeyPatch, split: bool, writeable: bool
) -> None:
    """Its frame is longer than what large messages of a process may pin."""
    if not split:
        monkeypatch.setattr(RdmaComm, "max_shard_size", 1 << 40)
    sent = np.arange(FRAME_MIB << 17, dtype="u8")
    sent.flags.writeable = writeable
    async with comms(address) as (client, server):
        received = (await passed(client, server, {"array": to_serialize(sent)}))["array"]
        assert received.flags.writeable == writeable
        assert np.array_equal(received, sent)
        assert await passed(server, client, {"n": 1}) == {"n": 1}


# The shuffle


def make(n: int, size: int) -> Any:
    return np.arange(n, n + 7 * size, 7, dtype="u4")


def cut(array: Any, n: int, count: int) -> Any:
    return array[n::count].copy()


def join(*pieces: Any) -> int:
    """A sum over all bytes, in their order."""
    total = 0
    for piece in pieces:
        total = zlib.crc32(piece, total)
    return total


def sums_of(size: int) -> list[int]:
    """What `join` has to return."""
    sums = [0] * PARTS
    for n in range(PARTS):
        array = make(n, size)
        for k in range(PARTS):
            sums[k] = zlib.crc32(memoryview(cut(array, k, PARTS)), sums[k])
    return sums


def own_processes() -> set[str]:
    """The processes below this, but that of multiprocessing which stays."""
    found = psutil.Process().children(recursive=True)
    texts = {str(each.pid): " ".join(each.cmdline()) for each in found}
    return {pid for pid, text in texts.items() if "resource_tracker" not in text}


def own_descriptors() -> Counter[str]:
    """The open descriptors of this process, by what they are."""
    kinds: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the list
            kinds[os.readlink(f"/proc/self/fd/{fd}").partition(":[")[0]] += 1
    return kinds


class Shuffle:
    """Arrays of all workers, of which each worker gets a piece; and the deaths meanwhile."""

    def __init__(self, cluster: Any, client: Any, size: int) -> None:
        self._cluster = cluster
        self.killed: list[int] = []
        self.made = [client.submit(make, n, size, pure=False) for n in range(PARTS)]
        pieces = [
            [client.submit(cut, array, n, PARTS, pure=False) for array in self.made]
            for n in range(PARTS)
        ]
        self.joined = [client.submit(join, *some, pure=False) for some in pieces]

    async def kill(self) -> None:
        """Kill a worker that has made arrays, and was not killed before."""
        keys = {future.key for future in self.made}
        tasks = self._cluster.scheduler.tasks
        holders = {holder.nanny for key in keys if key in tasks for holder in tasks[key].who_has}
        nanny = next(
            nanny
            for nanny in self._cluster.workers.values()
            if nanny.address in holders and nanny.pid not in self.killed
        )
        pid = nanny.pid
        assert objects_of_process(pid), "it has connections"
        os.kill(pid, signal.SIGKILL)
        self.killed.append(pid)
        await until(lambda: not objects_of_process(pid), LIMIT_S)


@pytest.mark.slow
async def test_a_shuffle_over_workers_that_are_killed(
    record_testsuite_property: Callable[[str, object], None],
) -> None:
    size = (SHUFFLED_MIB << 18) // PARTS
    async with cluster_of(1, processes=False):
        pass  # what distributed opens once and keeps is no leak
    resource_tracker.ensure_running()
    descriptors, before = own_descriptors(), own_processes()
    began = time.monotonic()
    async with cluster_of(WORKERS, LIMIT_S) as (cluster, client):
        started = time.monotonic()
        shuffle = Shuffle(cluster, client, size)
        await wait(shuffle.made, timeout=LIMIT_S)
        await shuffle.kill()
        async for future in as_completed(shuffle.joined):
            del future
            break
        await shuffle.kill()
        assert await client.gather(shuffle.joined) == sums_of(size)
        ended = time.monotonic()
        await client.wait_for_workers(WORKERS, timeout=LIMIT_S)
        pids = {nanny.pid for nanny in cluster.workers.values()}
        assert not pids & set(shuffle.killed), "their nannies have started others"
        del shuffle
    figures = {
        "MiB": SHUFFLED_MIB, "cluster s": started - began, "shuffle s": ended - started,
        "end s": time.monotonic() - ended,
    }  # fmt: skip
    record_testsuite_property("shuffle", figures)
    print(figures)
    assert not multiprocessing.active_children()
    await until(lambda: own_processes() == before)
    with contextlib.suppress(TimeoutError):
        await until(lambda: own_descriptors() <= descriptors)
    assert own_descriptors() - descriptors == Counter()
