"""Private parts of aiordma/loop/ that tests ask for."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, TypeVar

from aiordma.loop import background, signals, slots, workers
from aiordma.loop.limit import Limit
from aiordma.loop.workers import WorkerPool

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    import pytest

T = TypeVar("T")


def threads_of(pool: WorkerPool) -> int:
    """How many threads it has."""
    return pool._threads


def all_done(pool: WorkerPool, seconds: float) -> bool:
    """Block until the pool has made every call, at most so many seconds; False if not."""
    deadline = time.monotonic() + seconds
    while pool.unfinished and time.monotonic() < deadline:
        time.sleep(0.001)
    return not pool.unfinished


def make_call(function: Callable[[], T], future: Future[T]) -> None:
    """What a thread of a pool does with a call."""
    workers.Call(future, function).make()


def entries_of(timers: Any) -> int:
    """The timers of a loop that are kept, canceled ones too."""
    return len(timers._heap)


def have_two_entries(patch: pytest.MonkeyPatch) -> None:
    """Have tables of slots that are full with two entries."""
    patch.setattr(slots, "_INDEX_MASK", 1)


def default_pool() -> WorkerPool:
    """The threads of calls that have no pool of their own."""
    return workers._blocking


def is_ticking(limit: Limit) -> bool:
    """Whether steps of its time are left."""
    return limit._steps > 0


def give_the_end(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let what ends with the loop have so many seconds."""
    patch.setattr(background, "_END_S", seconds)


def be_patient_with_loops(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let a signal wait so long for a loop that does not run until the next one does not."""
    patch.setattr(signals, "_PATIENCE_S", seconds)
