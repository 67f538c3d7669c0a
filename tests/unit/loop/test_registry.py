"""The registry: one shared object of a kind for each loop, closed by its last user."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from aiordma.loop import registry

from ..conftest import LOOPS, run_on


class Thing:
    """Something shared."""

    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


async def test_users_share_and_the_last_one_closes() -> None:
    first, release_first = registry.acquire("thing", Thing)
    second, release_second = registry.acquire("thing", Thing)
    assert first is second
    release_first()
    assert first.closed == 0
    release_second()
    assert first.closed == 1
    third, release_third = registry.acquire("thing", Thing)
    assert third is not first
    release_third()


async def test_letting_go_twice_counts_once() -> None:
    thing, release = registry.acquire("thing", Thing)
    _, other = registry.acquire("thing", Thing)
    release()
    release()
    release()
    assert thing.closed == 0
    other()
    other()
    assert thing.closed == 1


async def test_letting_go_late_does_not_close_the_next_one() -> None:
    old, release_old = registry.acquire("thing", Thing)
    release_old()
    new, release_new = registry.acquire("thing", Thing)
    release_old()
    assert (old.closed, new.closed) == (1, 0)
    release_new()
    assert new.closed == 1


async def test_keys_are_apart() -> None:
    one, release_one = registry.acquire("one", Thing)
    two, release_two = registry.acquire(("two", 2), Thing)
    assert one is not two
    release_one()
    assert (one.closed, two.closed) == (1, 0)
    release_two()


async def test_a_factory_that_fails_leaves_nothing() -> None:
    def fail() -> Thing:
        raise OSError(19, "no device")

    with pytest.raises(OSError, match="no device"):
        registry.acquire("thing", fail)
    thing, release = registry.acquire("thing", Thing)
    release()
    assert thing.closed == 1


@pytest.mark.parametrize("name", list(LOOPS))
def test_loops_are_apart_and_not_kept(name: str) -> None:
    loops: list[weakref.ref[asyncio.AbstractEventLoop]] = []
    things: list[Thing] = []

    async def main() -> None:
        loops.append(weakref.ref(asyncio.get_running_loop()))
        thing, release = registry.acquire("thing", Thing)
        things.append(thing)
        release()

    run_on(name, main())
    run_on(name, main())
    assert things[0] is not things[1]
    gc.collect()
    assert [ref() for ref in loops] == [None, None]


class Standing(Thing):
    """Something that fails with another."""

    def __init__(self, channel: Thing) -> None:
        super().__init__()
        self.channel = channel


async def test_what_is_retired_is_made_anew_and_closed_by_its_users() -> None:
    loop = asyncio.get_running_loop()
    old, release_old = registry.acquire("thing", Thing)
    on_old, release_on_old = registry.acquire("on it", lambda: Standing(old))
    apart, release_apart = registry.acquire("apart", Thing)
    registry.retire(old, loop)
    new, release_new = registry.acquire("thing", Thing)
    on_new, release_on_new = registry.acquire("on it", lambda: Standing(new))
    assert new is not old
    assert on_new is not on_old
    assert registry.find("apart", loop) is apart
    release_on_old()
    release_old()
    assert (old.closed, on_old.closed, new.closed, on_new.closed) == (1, 1, 0, 0)
    assert registry.find("thing", loop) is new
    for release in (release_apart, release_on_new, release_new):
        release()
    assert (apart.closed, new.closed, on_new.closed) == (1, 1, 1)


def test_needs_a_running_loop() -> None:
    with pytest.raises(RuntimeError, match="no running event loop"):
        registry.acquire("thing", Thing)
