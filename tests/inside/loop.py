"""Private parts of aiordma/loop/ that tests ask for."""

from __future__ import annotations

import queue
from typing import TYPE_CHECKING, Any

from aiordma.loop import background, slots, workers
from aiordma.loop.job import Job
from aiordma.loop.limit import PatientLimit
from aiordma.loop.workers import WorkerPool

if TYPE_CHECKING:
    import pytest


def threads_of(pool: WorkerPool) -> int:
    """How many threads it has."""
    return pool._threads


def jobs_of(pool: WorkerPool) -> queue.SimpleQueue[Job[Any]]:
    """The calls that wait for a thread."""
    return pool._jobs


def set_jobs(patch: pytest.MonkeyPatch, pool: WorkerPool, jobs: object) -> None:
    """Have another queue of them."""
    patch.setattr(pool, "_jobs", jobs)


def wait_for_start(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """For how long a thread that was started may take to run."""
    patch.setattr(workers, "_START_S", seconds)


def entries_of(timers: Any) -> int:
    """The timers of a loop that are kept, canceled ones too."""
    return len(timers._heap)


def have_two_entries(patch: pytest.MonkeyPatch) -> None:
    """Have tables of slots that are full with two entries."""
    patch.setattr(slots, "_INDEX_MASK", 1)


def default_pool() -> WorkerPool:
    """The threads of calls that have no pool of their own."""
    return workers._blocking


def unfinished(pool: WorkerPool) -> int:
    """How many of its calls have not returned."""
    return pool._unfinished


def is_ticking(limit: PatientLimit) -> bool:
    """Whether steps of its time are left."""
    return limit._left > 0


def give_the_end(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let what ends with the loop have so many seconds."""
    patch.setattr(background, "_END_S", seconds)
