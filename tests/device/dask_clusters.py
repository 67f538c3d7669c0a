"""Clusters of distributed over the device."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from typing import Any

import dask.config
from distributed.deploy.local import LocalCluster

from tests.device.dask_comms import Client

LIMIT_S = 120
#: Of the dashboards, whose server is Tornado's: none.
QUIET = {"dashboard_address": None, "silence_logs": "CRITICAL"}
#: On a busy machine a new worker takes longer than those after which the cluster gives it up.
PATIENT = {"distributed.deploy.lost-worker-timeout": f"{LIMIT_S} s"}


@contextlib.asynccontextmanager
async def cluster_of(
    workers: int, limit_s: float = LIMIT_S, **options: Any
) -> AsyncIterator[tuple[Any, Any]]:
    """A cluster and its client, which have so many seconds."""
    with (
        tempfile.TemporaryDirectory() as folder,  # not that of clusters of other guests
        dask.config.set(PATIENT | {"temporary-directory": folder}),
    ):
        async with (
            asyncio.timeout(limit_s),
            LocalCluster(
                n_workers=workers, threads_per_worker=1, protocol="rdma", memory_limit=None,
                asynchronous=True, **QUIET, **options,
            ) as cluster,
            Client(cluster, asynchronous=True) as client,
        ):  # fmt: skip
            yield cluster, client
