"""Clusters of distributed over `rdma://`: processes, killed workers and schedulers, commands."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.device.dask_clusters import LIMIT_S, cluster_of
from tests.device.dask_comms import Client
from tests.device.oracle import until
from tests.inside.contrib import interface

pytestmark = [pytest.mark.device, pytest.mark.dask, pytest.mark.slow, pytest.mark.timeout(280)]


def make(n: int, size: int) -> Any:
    return np.full(size, n, "u4")


def cut(part: Any, n: int, count: int) -> Any:
    return part[n::count].copy()


def join(*parts: Any) -> int:
    return sum(int(part.sum(dtype="u8")) for part in parts)


def die_once(mark: str) -> int:
    """End the worker's process at the first call."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
        os.kill(os.getpid(), signal.SIGKILL)
    return 7


async def shuffled(client: Any, size: int, parts: int) -> int:
    """The sum of arrays of all workers, of which each worker gets a piece."""
    workers = list((await client.scheduler.identity())["workers"])
    made = [
        client.submit(
            make, n, size, workers=[workers[n % len(workers)]], allow_other_workers=True, pure=False
        )
        for n in range(parts)
    ]
    joined = [
        client.submit(
            join, *[client.submit(cut, part, n, parts, pure=False) for part in made],
            workers=[workers[n % len(workers)]], allow_other_workers=True, pure=False,
        )
        for n in range(parts)
    ]  # fmt: skip
    return sum(await client.gather(joined))


async def test_a_cluster_of_processes(address: str) -> None:
    size, parts = 500_000, 6
    async with cluster_of(2) as (cluster, client):
        assert cluster.scheduler_address.startswith(f"rdma://{address}:")
        assert await shuffled(client, size, parts) == size * sum(range(parts))
        large = await client.scatter(np.arange(3_000_000), broadcast=True)
        assert await client.submit(int, await client.submit(len, large)) == 3_000_000
        assert np.array_equal(await large, np.arange(3_000_000))
        await client.restart()
        assert await shuffled(client, size, parts) == size * sum(range(parts))


async def test_a_worker_is_killed_in_the_middle(tmp_path: Path) -> None:
    size, parts = 200_000, 4
    async with cluster_of(2) as (_, client):
        before = set((await client.scheduler.identity())["workers"])
        dying = client.submit(die_once, str(tmp_path / "mark"), pure=False)
        assert await shuffled(client, size, parts) == size * sum(range(parts))
        assert await dying == 7
        await client.wait_for_workers(2, timeout=LIMIT_S)
        after = set((await client.scheduler.identity())["workers"])
        assert len(before & after) == 1, "its nanny has started another"


@pytest.mark.parametrize("where", ["default", "host", "interface"])
async def test_a_cluster_in_this_process(address: str, where: str) -> None:
    options: dict[str, dict[str, Any]] = {
        "default": {},
        "host": {"host": address},
        "interface": {"interface": interface()},
    }
    async with cluster_of(2, processes=False, **options[where]) as (cluster, client):
        addresses = [worker.address for worker in cluster.workers.values()]
        assert all(each.startswith(f"rdma://{address}:") for each in addresses)
        assert await shuffled(client, 100_000, 4) == 100_000 * 6


async def test_an_adaptive_cluster() -> None:
    async with cluster_of(0, processes=False) as (cluster, client):
        cluster.adapt(minimum=0, maximum=2, interval="50ms", wait_count=2)
        futures = client.map(lambda n: n * n, range(20))
        assert await client.submit(sum, futures) == sum(n * n for n in range(20))
        del futures
        await until(lambda: not cluster.workers, LIMIT_S)


# The commands


@contextlib.contextmanager
def dask(*words: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "dask", *words],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(LIMIT_S)


async def test_a_scheduler_is_killed(address: str, tmp_path: Path) -> None:
    """The commands of distributed; after the death of the scheduler nothing hangs."""
    told = tmp_path / "scheduler.json"
    with (
        dask(
            "scheduler", "--protocol", "rdma", "--port", "0", "--no-dashboard",
            "--dashboard-address", ":0", "--scheduler-file", str(told),
        ) as scheduler,
        dask(
            "worker", "--protocol", "rdma", "--scheduler-file", str(told), "--nworkers", "2",
            "--nthreads", "1", "--no-dashboard", "--memory-limit", "0",
            "--local-directory", str(tmp_path),
        ) as workers,
    ):  # fmt: skip
        # It is written in place: the line that is read may be a part of it.
        await until(lambda: told.exists() and told.read_text().rstrip().endswith("}"), LIMIT_S)
        contact = json.loads(told.read_text())["address"]
        assert contact.startswith(f"rdma://{address}:")
        async with (
            asyncio.timeout(LIMIT_S),
            Client(contact, asynchronous=True, timeout=LIMIT_S) as client,
        ):
            await client.wait_for_workers(2, timeout=LIMIT_S)
            assert await shuffled(client, 100_000, 4) == 100_000 * 6
            waiting = client.submit(never, pure=False)
            await until(lambda: waiting.status == "pending")
            scheduler.kill()
            await asyncio.to_thread(scheduler.wait, LIMIT_S)
            with pytest.raises((asyncio.CancelledError, Exception), match=r".*") as caught:
                await waiting
            assert "ancelled" in repr(caught.value) or "losed" in repr(caught.value)
        # Its nannies and workers end without a scheduler.
        assert await asyncio.to_thread(workers.wait, LIMIT_S) is not None


def never() -> None:
    signal.pause()
