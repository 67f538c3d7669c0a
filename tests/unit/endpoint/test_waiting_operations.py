"""Calls that wait for their turn hold no memory; and atomics, whose result may be missing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from aiordma.errors import ConnectionLostError, ResultLostError
from aiordma.memory.remote import RemoteRegion
from aiordma.verbs import SGE, Access

from ..conftest import settle
from ..core.test_wakeup import called_by_the_loop
from ..verbs.test_memory_region import Lib, c
from .operating import MIB, End
from .test_copied_operations import ROOM, Copying, copying

__all__ = ["c"]

COUNTER = RemoteRegion(1 << 40, 64, 77, Access.REMOTE_ATOMIC)
DEPTH = 4
CALLS: dict[str, Callable[[End], Any]] = {
    "small write": lambda end: end.write(bytes(100)),
    "small read": lambda end: end.read(bytearray(100)),
    "write of all that is lent": lambda end: end.write(bytes(ROOM)),
    "large write": lambda end: end.write(bytes(ROOM + 1)),
    "large read in pieces": lambda end: end.read(bytearray(2 * MIB)),
    "atomic": lambda end: end.fetch_add(COUNTER, 1),
}


def registered(c: Lib) -> int:
    """Regions that are registered now, beside that of the place."""
    names = [str(call[0]) for call in c.calls]
    return names.count("iova") - names.count("dereg") - 1


@pytest.mark.parametrize("call", CALLS)
async def test_calls_that_wait_hold_no_memory(c: Lib, call: str) -> None:
    """As many regions as operations, and one that is lent, however many calls there are."""
    place = Copying(depth=DEPTH)
    end, most = place.end, 0
    tasks = [asyncio.create_task(CALLS[call](end)) for _ in range(100)]
    while not all(task.done() for task in tasks):
        await settle()
        most = max(most, registered(c))
        assert len(end.adapter.numbers) <= DEPTH
        for number in end.adapter.numbers:
            place.lands(number, bytes(len(end.adapter.memory[number])))
        if end.adapter.numbers:
            end.complete()
            await called_by_the_loop(end.tell)
    assert {task.exception() for task in tasks} == {None}
    assert 0 < most <= DEPTH + 1
    assert sorted(end.seen()[0]) == list(range(DEPTH)), "a number was lost"
    await place.close()


@pytest.mark.parametrize("call", CALLS)
async def test_calls_that_wait_are_canceled_and_go_on_in_order(c: Lib, call: str) -> None:
    place = Copying(depth=1)
    end, log = place.end, list[int]()

    async def one(number: int) -> None:
        await CALLS[call](end)
        log.append(number)

    tasks = [asyncio.create_task(one(number)) for number in range(8)]
    await settle()
    for number in (3, 5):
        tasks[number].cancel()
    while not all(task.done() for task in tasks):
        await settle()
        for number in end.adapter.numbers:
            place.lands(number, bytes(len(end.adapter.memory[number])))
        if end.adapter.numbers:
            end.complete()
            await called_by_the_loop(end.tell)
    assert log == [0, 1, 2, 4, 6, 7]
    assert [task.cancelled() for task in tasks] == [n in (3, 5) for n in range(8)]
    assert end.seen()[0] == [0]
    await place.close()


@pytest.mark.parametrize("call", CALLS)
async def test_the_end_of_the_link_ends_calls_that_wait(c: Lib, call: str) -> None:
    place = Copying(depth=1)
    end = place.end
    tasks = [asyncio.create_task(CALLS[call](end)) for _ in range(5)]
    while not end.adapter.numbers:
        await settle()
    end.outcome.cause = ConnectionLostError(104, "gone")
    end.state.advance("SHUT")
    end.link.close()
    await asyncio.wait(tasks, timeout=10)
    assert {type(task.exception()) for task in tasks} == {ConnectionLostError}
    for function in end.gone:
        function()
    await place.close()


async def test_a_call_that_finds_no_memory_gives_its_turn_to_the_next(
    c: Lib, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Copying(depth=1)
    end = place.end
    with monkeypatch.context() as broken:

        async def take(size: int) -> Any:
            raise MemoryError(size)

        broken.setattr(type(end.link.pool), "take", lambda _, size: take(size))
        with pytest.raises(MemoryError):
            await end.write(b"data")
    assert end.seen()[0] == [0]
    await end.finish(asyncio.create_task(end.write(b"data")))
    await place.close()


# Atomics


@pytest.mark.parametrize("lent", [False, True])
async def test_an_atomic_without_its_result_is_an_error(c: Lib, lent: bool) -> None:
    """The adapter has completed it, and not touched the memory.  The connection goes on."""
    place = await copying(software=True) if lent else Copying(software=True)
    end = place.end
    calls: dict[str, Callable[[], Coroutine[Any, Any, int]]] = {
        "fetch_add": lambda: end.fetch_add(COUNTER, 5),
        "compare_swap": lambda: end.compare_swap(COUNTER, 5, 6),
    }
    for name, call in calls.items():
        task = asyncio.create_task(call())
        await settle()
        await place.ended()
        with pytest.raises(ResultLostError, match=f"{name} completed without"):
            task.result()
        again = asyncio.create_task(call())
        await settle()
        place.lands(end.adapter.numbers[0], bytes(8))
        await place.ended()
        assert again.result() == 0
    await place.close()


async def test_each_atomic_finds_other_bytes_in_its_memory(c: Lib) -> None:
    """So what an earlier one has left there is never taken for a result."""
    place = await copying(depth=1, software=True)
    end, found = place.end, set[bytes]()
    for _ in range(20):
        task = asyncio.create_task(end.fetch_add(COUNTER, 1))
        await settle()
        (number,) = end.adapter.numbers
        found.add(bytes(end.adapter.memory[number]))
        place.lands(number, b"12345678")
        await place.ended()
        assert task.result() == int.from_bytes(b"12345678", "little")
    assert len(found) == 20
    await place.close()


@pytest.mark.parametrize("kind", ["region", "piece", "lent", "pool", "registered"])
async def test_a_read_without_its_end_is_an_error(c: Lib, kind: str) -> None:
    """The adapter has completed it, and the last bytes have not come.  The connection goes on."""
    place = Copying(software=True) if kind == "pool" else await copying(software=True)
    end, size = place.end, 2 * MIB if kind == "registered" else 64
    into: Any = bytearray(size)
    if kind in ("region", "piece"):
        into = SGE(place.region, 128, size) if kind == "piece" else place.region
        size = len(into)
    for lacking in (size, 100, 9, 8, 1):
        task = asyncio.create_task(end.read(into))
        await settle()
        while not task.done():
            numbers = end.adapter.numbers
            for number in numbers:
                memory = end.adapter.memory[number]
                came = len(memory) if number != numbers[-1] else max(0, len(memory) - lacking)
                memory[:came] = b"x" * came
            await (place.ended() if numbers else settle())
        if lacking < 8:
            assert task.result() == size, "not the marked bytes alone"
        else:
            with pytest.raises(ResultLostError, match="before its last bytes"):
                task.result()
        if kind in ("lent", "pool"):
            assert bytes(into) == bytes(size) or lacking < 8, "left as it was"
    assert end.state.facts()["bytes_read"] == (6 * MIB if kind == "registered" else size)
    assert end.state.facts()["operating"] == 0
    await place.close()


async def test_the_memory_of_a_read_is_marked_where_that_says_something(c: Lib) -> None:
    """Not for a real adapter, nor for a single packet of a few bytes, nor for what is written."""
    for software, size in ((False, 64), (True, 7), (True, 8)):
        place = Copying(software=software)
        end, view = place.end, place.region.view
        view[:] = bytes(len(view))
        for call in (end.write, end.read):
            task = asyncio.create_task(call(SGE(place.region, 8, size)))
            await settle()
            marked = call == end.read and software and size == 8
            assert any(view[8 : 8 + size]) == marked
            assert not any(view[:8])
            assert not any(view[8 + size :])
            view[8 : 8 + size] = bytes(size)  # as it lands
            await place.ended()
            assert task.result() == size
        await place.close()
