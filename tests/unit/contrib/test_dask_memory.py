"""Memory for received frames: what is kept, what fits, and deaths at any time."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest

from aiordma.contrib import dask_memory
from aiordma.contrib.dask_memory import LEAST_BYTES, FrameMemory
from tests.inside.contrib import idle_of, lock_of

MIB = 1 << 20


def place_of(view: memoryview) -> int:
    return int(np.frombuffer(view, "u1").ctypes.data)


def test_memory_is_used_again_when_its_last_view_is_gone() -> None:
    frames = FrameMemory(8 * MIB)
    first = frames.take(MIB)
    place = place_of(first)
    view: Any = np.frombuffer(first[100:200], "u1")[10:20]  # numpy would skip arrays in between
    del first
    second = frames.take(MIB)
    assert place_of(second) != place
    view[:] = 7
    del view
    third = frames.take(MIB - 100)
    assert place_of(third) == place
    assert len(third) == MIB - 100
    third[:] = bytes(len(third))


def test_a_view_of_the_array_itself_keeps_it() -> None:
    frames = FrameMemory(8 * MIB)
    owner: Any = frames.take(MIB).obj
    view = owner[5:10]
    del owner
    assert not idle_of(frames)
    del view
    assert idle_of(frames) == [MIB]


def test_no_more_than_the_limit_is_kept_and_the_oldest_goes() -> None:
    frames = FrameMemory(3 * MIB)
    taken = [frames.take(n * MIB // 2) for n in (1, 2, 3, 2)]
    while taken:
        taken.pop(0)
    assert idle_of(frames) == [MIB + MIB // 2, MIB]


def test_what_is_much_larger_is_not_taken() -> None:
    frames = FrameMemory(8 * MIB)
    frames.take(4 * MIB)
    place = place_of(frames.take(MIB))
    assert idle_of(frames) == [4 * MIB, MIB]
    assert place_of(frames.take(MIB)) == place
    assert idle_of(frames) == [4 * MIB, MIB]


@pytest.mark.parametrize("size", [0, 1, LEAST_BYTES - 1, 8 * MIB + 1])
def test_what_is_not_kept(size: int) -> None:
    frames = FrameMemory(8 * MIB)
    taken = frames.take(size)
    assert len(taken) == size
    assert not taken.readonly
    del taken
    assert not idle_of(frames)


def test_nothing_is_kept_without_a_limit_or_without_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = FrameMemory(0)
    assert len(nothing.take(MIB)) == MIB
    assert not idle_of(nothing)
    monkeypatch.setattr(dask_memory, "np", None)
    frames = FrameMemory(8 * MIB)
    assert len(frames.take(MIB)) == MIB
    assert not idle_of(frames)


def test_a_death_while_the_lock_is_held_waits_for_nothing() -> None:
    frames = FrameMemory(8 * MIB)
    taken = frames.take(MIB)
    with lock_of(frames):
        del taken
        assert len(frames.take(MIB)) == MIB, "fresh memory: it does not wait either"
        assert not idle_of(frames)
    frames.take(2 * MIB)  # sorts what has been given back
    assert sorted(idle_of(frames)) == [MIB, MIB, 2 * MIB]


def test_more_memory_than_there_is() -> None:
    with pytest.raises(MemoryError):
        FrameMemory(1 << 60).take(1 << 50)


def test_threads_that_take_and_let_go_with_the_collector_in_between() -> None:
    frames = FrameMemory(4 * MIB)
    wrong: list[str] = []

    def work(mark: int) -> None:
        for n in range(200):
            view: Any = np.frombuffer(frames.take(LEAST_BYTES * (1 + n % 3)), "u1")
            view[:] = mark
            ring = [view]
            ring.append(ring)  # dies in a collection
            if n % 20 == 0:
                gc.collect(0)
            if not (view == mark).all():
                wrong.append(f"{mark}: it is another thread's, too")

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    gc.collect()
    assert not wrong
    assert sum(idle_of(frames)) <= 4 * MIB
