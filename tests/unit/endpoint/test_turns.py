"""Who comes first is served first: numbers of operations, and writes that the peer is told of."""

from __future__ import annotations

import asyncio
import errno
import random
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from aiordma.errors import ConnectionLostError
from aiordma.memory.remote import RemoteRegion
from aiordma.verbs import SGE, Access
from aiordma.verbs.enums import WCStatus

from ..conftest import settle
from ..core.test_wakeup import called_by_the_loop
from ..verbs.test_memory_region import Lib, c
from .operating import BOTH, MIB, REMOTE, Place
from .test_copied_operations import Copying, copying

__all__ = ["c"]

THEIRS = RemoteRegion(1 << 40, 4 * MIB, 77, BOTH | Access.REMOTE_ATOMIC)
Call = Callable[[Copying, int], Coroutine[Any, Any, Any]]


async def _batch(place: Copying, offset: int) -> None:
    batch = place.end.batch()
    batch.write(THEIRS, SGE(place.region, 0, 1), offset=offset)
    await batch.submit()


async def _unused(place: Copying, _: int) -> None:
    """As a binding of a window that could not be posted."""
    place.end.operations.release_number(await place.end.operations.number())


#: Each posts a single request, for this offset; the last posts none.
CALLS: dict[str, Call] = {
    "read": lambda at, n: at.end.read(SGE(at.region, 0, 1), n, THEIRS),
    "write": lambda at, n: at.end.write(SGE(at.region, 0, 1), n, THEIRS),
    "copied read": lambda at, n: at.end.read(bytearray(100), n, THEIRS),
    "copied write": lambda at, n: at.end.write(bytes(100), n, THEIRS),
    "large write": lambda at, n: at.end.write(at.region, n, THEIRS),
    "fetch_add": lambda at, n: at.end.fetch_add(THEIRS, 1, offset=n),
    "compare_swap": lambda at, n: at.end.compare_swap(THEIRS, 1, 2, offset=n),
    "batch": _batch,
    "unused": _unused,
}
POSTING = [name for name in CALLS if name != "unused"]


def posted(place: Place) -> list[int]:
    """The offsets at the peer, in the order of the posts."""
    return [each[4] - THEIRS.addr for each in place.end.adapter.posted]


@pytest.mark.parametrize("call", POSTING)
@pytest.mark.parametrize("while_", ["in line", "granted"])
async def test_no_newcomer_is_posted_before_who_has_waited(c: Lib, call: str, while_: str) -> None:
    """It comes when two numbers are free again: in the drain, or before the granted task runs."""
    place = await copying(depth=2)
    end, tasks = place.end, list[asyncio.Task[Any]]()

    async def twice() -> None:
        await CALLS["read"](place, 8)
        if while_ == "granted":
            await asyncio.sleep(0)  # it runs before the task that waits, and after the grant
        await CALLS[call](place, 32)

    tasks.append(asyncio.create_task(twice()))
    tasks.append(asyncio.create_task(CALLS["read"](place, 16)))
    await settle()
    assert posted(place) == [8, 16]
    tasks.append(asyncio.create_task(CALLS[call](place, 24)))
    await settle()
    assert posted(place) == [8, 16], "it has to wait"
    end.complete()
    await called_by_the_loop(end.tell)
    await settle()
    assert posted(place) == [8, 16, 24, 32]
    for task in tasks:
        await end.finish(task)
    assert sorted(end.seen()[0]) == [0, 1], "a number was lost"
    await place.close()


@pytest.mark.parametrize("seed", range(12))
async def test_calls_are_posted_in_their_order(c: Lib, seed: int) -> None:
    """Of many tasks, some of which are canceled, at whatever moment they begin and end."""
    print("seed", seed)
    rng = random.Random(seed)
    depth = rng.choice((1, 2, 3, 5))
    place = await copying(depth=depth)
    end, begun, finished = place.end, list[int](), set[int]()

    async def work() -> None:
        for _ in range(rng.randint(1, 8)):
            name = rng.choice(POSTING if rng.random() < 0.9 else [*CALLS])
            offset = 8 * (len(begun) + 1)
            begun.append(offset)
            await CALLS[name](place, offset)
            if name != "unused":
                finished.add(offset)
            for _ in range(rng.choice((0, 0, 0, 1, 2))):
                await asyncio.sleep(0)

    tasks = [asyncio.create_task(work()) for _ in range(12)]
    while not all(task.done() for task in tasks):
        for _ in range(rng.randint(0, 3)):
            await asyncio.sleep(0)
        if rng.random() < 0.1:
            rng.choice(tasks).cancel()
        if len(begun) < 150 and rng.random() < 0.2:
            tasks.append(asyncio.create_task(work()))
        if not (numbers := end.adapter.numbers):
            continue
        if rng.random() < 0.15:  # C leaves it to Python
            done = (0, int(WCStatus.SUCCESS), 0, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0)
            end.operations.on_ended(numbers.pop(0), done)
            continue
        end.complete(*numbers[: rng.randint(1, len(numbers))])
        await called_by_the_loop(end.tell)
    assert finished <= set(posted(place))
    assert posted(place) == [each for each in begun if each in set(posted(place))]
    while end.adapter.numbers:  # those of canceled tasks
        end.complete()
        await called_by_the_loop(end.tell)
    assert sorted(end.seen()[0]) == list(range(depth)), "a number was lost"
    await place.close()


async def test_a_newcomer_at_the_end_of_the_link_is_told_of_it(c: Lib) -> None:
    """It comes between the end and those that have waited, and nobody waits for ever."""
    place = Place(depth=1)
    end, piece = place.end, SGE(place.region, 0, 1)
    tasks = [asyncio.create_task(end.read(piece)) for _ in range(3)]
    await settle()
    end.outcome.cause = ConnectionLostError(errno.ECONNRESET, "gone")
    end.state.advance("SHUT")
    end.link.close()
    number = asyncio.create_task(end.operations.number())
    await asyncio.wait([*tasks, number], timeout=10)
    assert [type(task.exception()) for task in tasks] == [ConnectionLostError] * 3
    end.operations.release_number(number.result())
    assert end.seen()[0] == [0]
    for function in end.gone:
        function()
    await place.close()


# Writes that the peer is told of

NOTED = RemoteRegion(REMOTE.addr, REMOTE.length, REMOTE.rkey, BOTH, notes=True)


class Telling(Copying):
    """A place whose end tells of writes.

    Attributes:
        told: The numbers that the peer was told.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.told: list[int] = []
        end: Any = self.end
        end._telling, end._carries_requests = None, False
        end._receiver = SimpleNamespace(exchange=None)
        end._sender = SimpleNamespace(require_open=lambda: None, note=self._note)

    async def _note(self, _key: int, _addr: int, _size: int, imm: int) -> None:
        self.told.append(imm)

    def write(self, data: Any, imm: int) -> Coroutine[Any, Any, int]:
        end: Any = self.end
        written: Coroutine[Any, Any, int] = end._write(NOTED, data, imm=imm)
        return written

    async def until_written(self, size: int) -> None:
        """Let the adapter write until so many bytes are at the peer."""
        while self.end.state.facts()["bytes_written"] < size:
            await settle(2)
            if self.end.adapter.numbers:
                self.end.complete()
                await called_by_the_loop(self.end.tell)
        await settle()


@pytest.mark.parametrize("fate", ["goes on", "refused"])
@pytest.mark.parametrize("second", ["goes on", "canceled"])
@pytest.mark.parametrize("size", [2 * MIB, 100])
async def test_writes_are_told_of_in_the_order_of_the_calls(
    c: Lib, fate: str, second: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of the first is registered last, as a thread may do it."""
    place = Telling()
    end, registers, real = place.end, list[asyncio.Event](), place.end.link.register

    async def register(buffer: Any, access: Access) -> Any:
        registers.append(asyncio.Event())
        if len(registers) == 1:
            await registers[0].wait()
            if fate == "refused":
                raise OSError(errno.EACCES, "not this memory")
        return await real(buffer, access)

    monkeypatch.setattr(end.link, "register", register)
    calls = [place.write(bytes(each), n) for n, each in enumerate((2 * MIB, size, size))]
    tasks = [asyncio.create_task(call) for call in calls]
    await place.until_written(2 * size)
    assert place.told == [], "the first was told of last"
    if second == "canceled":
        tasks[1].cancel()
        await asyncio.wait([tasks[1]], timeout=10)
        assert place.told == [], "the third went past the first"
    registers[0].set()
    for task in tasks:
        await end.finish(task)
    left = [0][: fate != "refused"] + [1][: second != "canceled"] + [2]
    assert place.told == left
    assert [
        n for n, task in enumerate(tasks) if not task.cancelled() and not task.exception()
    ] == left
    await place.close()


async def test_writes_that_wait_for_a_number_are_told_of_in_the_order_of_the_calls(
    c: Lib,
) -> None:
    place = Telling(depth=2)
    end, piece = place.end, SGE(place.region, 0, 1)

    async def twice() -> None:
        await end.write(piece)
        await asyncio.sleep(0)  # it runs before the task that waits, and after the grant
        await place.write(piece, 2)

    tasks = [asyncio.create_task(twice()), asyncio.create_task(end.write(piece))]
    await settle()
    tasks.append(asyncio.create_task(place.write(piece, 1)))
    await settle()
    for task in tasks:
        await end.finish(task)
    assert place.told == [1, 2]
    await place.close()
