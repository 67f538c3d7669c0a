"""READs and WRITEs of the program's own buffers, which C copies through memory that was lent."""

from __future__ import annotations

import array
import asyncio
import ctypes
import errno
import gc
import random
import sys
import threading
import weakref
from collections.abc import Coroutine
from typing import Any

import numpy
import pytest

from aiordma._core import Message, Operation
from aiordma._ffi import ffi
from aiordma.errors import ConnectionLostError, RemoteAccessError
from aiordma.memory.governor import AHEAD
from aiordma.memory.remote import RemoteRegion
from aiordma.verbs import SGE, Access
from aiordma.verbs.enums import WCStatus
from tests.exports import exported
from tests.inside.verbs import uses_of

from ..conftest import settle
from ..core.test_references import collected
from ..core.test_wakeup import called_by_the_loop
from ..verbs.test_memory_region import Lib, c
from .operating import MIB, REMOTE, Place
from .test_operations import outcome

__all__ = ["c"]

ROOM = 65_536  # bytes of the memory that is lent
INLINE = 112


class Copying(Place):
    """A place where memory is lent already."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.end.adapter.touches = True

    async def lend(self) -> None:
        end = self.end
        await end.finish(asyncio.create_task(end.write(b"the first goes by way of Python")))
        assert end.state.bounce_region is not None
        end.adapter.posted.clear()
        end.adapter.written.clear()

    def lands(self, number: int, data: bytes) -> None:
        """The adapter writes what a READ has read."""
        memory = self.end.adapter.memory[number]
        assert len(memory) == len(data)
        memory[:] = data

    async def ended(self) -> None:
        """All that is under way completes, and its tasks are resumed."""
        self.end.complete()
        await called_by_the_loop(self.end.tell)
        await settle()

    async def close(self) -> None:
        lent = self.end.state.bounce_region
        assert lent is None or uses_of(lent) == 0
        await super().close()
        if lent is not None:
            await lent.wait_closed()


async def copying(**settings: Any) -> Copying:
    place = Copying(**settings)
    await place.lend()
    return place


async def test_c_takes_what_python_takes_and_refuses_what_it_refuses(c: Lib) -> None:
    """An object, wrong or not, has the outcome that it had without memory that is lent."""
    square = numpy.zeros((8, 8))
    with memoryview(b"released") as released:
        pass
    things: list[Any] = [
        None, 5, "text", object(), b"", bytearray(), b"read-only", memoryview(b"read-only"),
        released, memoryview(bytearray(64))[::2], square, square.T, square[:, 1],
        numpy.zeros(3, dtype=[("a", "<u2"), ("b", ">f8")]),
        numpy.zeros(4, dtype=">u4"), numpy.zeros(4, dtype="f2"), numpy.zeros(()),
        (ctypes.c_char * 8)(), ctypes.c_int(5), array.array("d", [1.5]),
        memoryview(bytearray(64)).cast("B", [4, 4, 4]), bytearray(ROOM), bytearray(ROOM + 1),
        bytearray(MIB + 1), Message(memoryview(bytearray(5))), SGE, bytearray, REMOTE,
    ]  # fmt: skip
    remotes = [REMOTE, REMOTE[:10], RemoteRegion(0, MIB, 7, Access(0)), None]
    quick, slow = await copying(inline=INLINE), Copying(inline=INLINE)
    ways = 0
    for thing in things:
        for remote in remotes:
            for offset in (0, 3, -1, 1 << 70, True, "1"):
                for kind in ("read", "write"):
                    ends = []
                    for place in (quick, slow):
                        end = place.end
                        if place is quick:
                            end.adapter.posted.clear()
                        else:
                            end.state.rest_operations()  # so C takes nothing
                        task = asyncio.create_task(
                            getattr(end, kind)(thing, offset=offset, remote=remote)
                        )
                        await end.finish(task)
                        ends.append(outcome(task))
                    assert ends[0] == ends[1], (thing, remote, offset, kind)
                    ways += isinstance(ends[0], int)
    assert ways > 50
    assert quick.end.adapter.written[-20:] == slow.end.adapter.written[-20:]
    await quick.close()
    await slow.close()


async def test_a_canceled_read_exports_its_buffer_until_its_completion(c: Lib) -> None:
    place = await copying()
    end, into = place.end, bytearray(64)
    task = asyncio.create_task(end.read(into))
    await settle()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    lent = end.state.bounce_region
    assert (exported(into), uses_of(lent), end.state.facts()["operating"]) == (True, 1, 1)
    again = asyncio.create_task(end.read(bytearray(64)))
    await settle()
    first, second = (posted[1] for posted in end.adapter.posted)
    assert abs(first - second) >= 64, "the adapter still writes there"
    await place.ended()
    assert again.result() == 64
    assert (exported(into), uses_of(lent), end.state.facts()["operating"]) == (False, 0, 0)
    await place.close()


@pytest.mark.parametrize("status", [WCStatus.SUCCESS, WCStatus.REM_ACCESS_ERR])
async def test_a_read_that_ends_by_way_of_python(c: Lib, status: WCStatus) -> None:
    """The bytes are copied if it has succeeded; the export ends in any case."""
    place = await copying()
    end, into = place.end, bytearray(64)
    task = asyncio.create_task(end.read(into))
    await settle()
    number = end.adapter.numbers[0]
    place.lands(number, b"x" * 64)
    end.operations.on_ended(number, (0, int(status), 0, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0))
    await asyncio.wait([task])
    if status == WCStatus.SUCCESS:
        assert task.result() == 64
        assert into == b"x" * 64
    else:
        assert isinstance(task.exception(), RemoteAccessError)
        assert into == bytes(64)
    assert not exported(into)
    await place.close()


async def test_the_end_of_the_link_ends_the_export_and_then_the_registration(c: Lib) -> None:
    place = await copying()
    end, into = place.end, bytearray(64)
    tasks = [asyncio.create_task(end.read(into)) for _ in range(3)]
    await settle()
    tasks[1].cancel()
    lent = end.state.bounce_region
    end.outcome.cause = ConnectionLostError(errno.ECONNRESET, "gone")
    end.state.advance("SHUT")
    assert end.state.read(REMOTE, bytearray(8), 0) is None
    end.link.close()
    await asyncio.wait(tasks)
    assert not exported(into)
    assert ("dereg",) not in c.calls, "the queue pair is still there, and may write"
    with pytest.raises(ConnectionLostError):
        await end.read(into)
    for function in end.gone:
        function()
    await lent.wait_closed()
    assert c.calls[-1] == ("dereg",)
    await place.close()


async def test_a_read_leaves_the_memoryview_to_the_program(c: Lib) -> None:
    place = await copying()
    end, into = place.end, bytearray(64)
    with memoryview(into) as view:
        task = asyncio.create_task(end.read(view))
        await settle()
    assert exported(into), "of the program alone the memoryview was released"
    del view
    gc.collect()
    place.lands(end.adapter.numbers[0], b"y" * 64)
    await place.ended()
    assert task.result() == 64
    assert into == b"y" * 64
    assert not exported(into)
    await place.close()


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("ended", [False, True])
async def test_a_buffer_that_only_a_canceled_read_has_is_freed_with_it(
    c: Lib, view: bool, ended: bool
) -> None:
    """It refers to itself: the collector finds it, but not before the adapter is done."""

    class Own(bytearray):
        itself: Any

    place = await copying()
    end, into = place.end, Own(64)
    into.itself = memoryview(into), into
    alive = weakref.ref(into)
    task = asyncio.create_task(end.read(into.itself[0] if view else into))
    await settle()
    task.cancel()
    await asyncio.wait([task])
    del into, task
    gc.collect()
    assert alive() is not None
    if ended:
        await place.ended()
    else:
        end.link.close()
        for function in end.gone:
            function()
    gc.collect()
    assert alive() is None
    await place.close()


async def test_a_function_that_the_end_of_the_export_runs_may_post(c: Lib) -> None:
    place = await copying(depth=1)
    end, other = place.end, bytearray(8)
    posted: list[Any] = []

    class Own(bytearray):
        def __del__(self) -> None:
            posted.append(end.state.read(REMOTE, other, 0))

    task = asyncio.create_task(end.read(Own(8)))
    await settle()
    task.cancel()
    await asyncio.wait([task])
    del task
    await place.ended()
    assert isinstance(posted[0], Operation), "its number is free"
    assert end.state.facts()["operating"] == 1
    place.lands(end.adapter.numbers[0], b"nextnext")
    end.complete()
    end.tell()
    assert await posted[0] == 8
    assert other == b"nextnext"
    assert end.state.facts()["free_numbers"] == [0]
    await place.close()


@pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="the collector runs between the steps of Python alone"
)
@pytest.mark.parametrize("ahead", range(6))
async def test_a_function_that_the_collector_runs_may_post(c: Lib, ahead: int) -> None:
    """Where an operation is made: its number has gone by then."""
    place = await copying(depth=1)
    end, first, second = place.end, bytearray(8), bytearray(8)
    posted: list[Any] = []
    held = end.state.write(REMOTE, b"x", 0, None)  # so that the next object is made
    await place.ended()

    class Poster:
        def __del__(self) -> None:
            posted.append(end.state.read(REMOTE, first, 0))

    made: list[Any] = [None] * 6
    with collected(Poster):
        for index in range(ahead):
            made[index] = [index]
        posted.append(end.state.read(REMOTE, second, 0))
    gc.collect()
    assert sum(operation is not None for operation in posted) == end.state.facts()["operating"] == 1
    place.lands(end.adapter.numbers[0], b"1 of two")
    end.complete()
    end.tell()
    assert sorted((first, second)) == [bytes(8), b"1 of two"]
    assert end.state.facts()["free_numbers"] == [0]
    assert held is not None
    await place.close()


@pytest.mark.parametrize("seed", range(10))
async def test_many_under_way_do_not_share_room(c: Lib, seed: int) -> None:
    print("seed", seed)
    rng = random.Random(seed)
    place = await copying(depth=12)
    end, lent = place.end, place.end.state.bounce_region
    under_way: dict[int, tuple[int, int, bytes, bytearray | None, Any]] = {}
    full = most = 0
    largest = rng.choice((200, 9000, ROOM))
    for _ in range(400):
        size = rng.choice((1, 63, 64, 65, rng.randint(1, largest), largest))
        data, into = rng.randbytes(size), bytearray(size)
        reads = rng.random() < 0.6
        operation = (
            end.state.read(REMOTE, into, 0) if reads else end.state.write(REMOTE, data, 0, None)
        )
        if operation is None:
            full += end.state.facts()["n_operations_free"] > 0
        else:
            number = end.adapter.numbers[-1]
            start = end.adapter.posted[-1][1]
            assert lent.addr <= start
            assert start + size <= lent.addr + ROOM
            for other, length, *_ in under_way.values():
                assert start >= other + length or other >= start + size
            under_way[number] = (start, size, data, into if reads else None, operation)
        most = max(most, len(under_way))
        while under_way and (operation is None or rng.random() < 0.4):
            # In any order: only so many are under way.
            number = rng.choice(list(under_way))
            start, size, data, target, operation = under_way.pop(number)
            memory = end.adapter.memory[number]
            if target is not None:
                memory[:] = data
            assert bytes(memory) == data
            end.complete(number)
            end.tell()
            assert await operation == size
            if target is not None:
                assert target == data
    assert most > 2
    assert full or largest == 200
    while under_way:
        number = next(iter(under_way))
        del under_way[number]
        end.complete(number)
        end.tell()
    operation = end.state.read(REMOTE, bytearray(ROOM), 0)
    assert operation is not None, "all room is free"
    await place.ended()
    await place.close()


async def test_in_another_thread_or_loop_c_takes_nothing(c: Lib) -> None:
    place = await copying()
    end = place.end
    before, found = end.seen(), list[object]()
    into = bytearray(8)

    def elsewhere() -> None:
        found.append(end.state.read(REMOTE, into, 0))
        found.append(end.state.write(REMOTE, b"data", 0, None))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [None, None]
    assert end.seen() == before
    assert not exported(into)
    await place.close()


async def test_a_refused_post_ends_the_export(c: Lib) -> None:
    place = await copying()
    end, into = place.end, bytearray(64)
    end.adapter.code = errno.ENOMEM
    with pytest.raises(ConnectionLostError):
        await end.read(into)
    assert not exported(into)
    assert (end.state.facts()["operating"], uses_of(end.state.bounce_region)) == (0, 0)
    await place.close()


async def test_what_is_lent_counts_as_kept_and_is_not_lent_without_room(c: Lib) -> None:
    place = await copying()
    assert place.end.budget.held(AHEAD) == ROOM
    await place.end.finish(asyncio.create_task(place.end.write(bytearray(9))))
    assert place.end.budget.held(AHEAD) == ROOM
    poor = Copying()
    poor.end.account.close()
    await poor.end.finish(asyncio.create_task(poor.end.write(b"data")))
    assert poor.end.state.bounce_region is None
    assert poor.end.state.write(REMOTE, b"data", 0, None) is None
    await poor.close()
    await place.close()


@pytest.mark.parametrize("size", [ROOM + 1, 2 * ROOM, 5 * ROOM + 7])
async def test_memory_that_the_kernel_does_not_pin_is_copied_in_parts(
    c: Lib, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """As some mappings of files: no more than a part is in registered memory at a time."""
    most = _refuse_more_than(c, monkeypatch, ROOM, errno.EFAULT)
    place = await copying()
    end, data = place.end, random.Random(size).randbytes(size)
    before = end.state.facts()["bytes_written"]
    assert await _served(place, end.write(data, 3)) == size
    assert b"".join(end.adapter.written) == data
    assert end.state.facts()["bytes_written"] - before == size
    assert [(where - REMOTE.addr, n) for _, _, n, _, where, *_ in end.adapter.posted] == [
        (3 + start, min(ROOM, size - start)) for start in range(0, size, ROOM)
    ]
    end.adapter.posted.clear()
    into = bytearray(size)
    assert await _served(place, end.read(into, 3), data) == size
    assert into == data
    assert max(most) == ROOM
    into.append(0)  # it is exported no more
    await place.close()


@pytest.mark.parametrize("call", ["read", "write"])
async def test_a_buffer_is_exported_no_more_when_the_call_has_ended(
    c: Lib, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Although a thread deregisters so many bytes, here a slow one."""
    real, begun, go = c.ibv_dereg_mr, threading.Event(), threading.Event()

    def deregister(handle: Any) -> int:
        begun.set()
        assert go.wait(10)
        return real(handle)

    place = await copying()
    buffer = bytearray(2 * MIB)
    monkeypatch.setattr(c, "ibv_dereg_mr", deregister)
    task = asyncio.create_task(_served(place, getattr(place.end, call)(buffer)))
    assert await asyncio.to_thread(begun.wait, 10)
    await settle()
    assert not task.done()
    go.set()
    assert await task == len(buffer)
    buffer.append(0)
    monkeypatch.setattr(c, "ibv_dereg_mr", real)
    await place.close()


async def test_another_failure_of_a_registration_is_raised(
    c: Lib, monkeypatch: pytest.MonkeyPatch
) -> None:
    _refuse_more_than(c, monkeypatch, ROOM, errno.EIO)
    place = await copying()
    into = bytearray(ROOM + 1)
    with pytest.raises(OSError, match="ibv_reg_mr: EIO"):
        await place.end.read(into)
    into.append(0)
    assert place.end.adapter.posted == []
    await place.close()


async def test_a_part_that_is_canceled_ends_the_call(
    c: Lib, monkeypatch: pytest.MonkeyPatch
) -> None:
    _refuse_more_than(c, monkeypatch, ROOM, errno.EFAULT)
    place = await copying()
    end, into = place.end, bytearray(3 * ROOM)
    task = asyncio.create_task(end.read(into))
    await settle()
    assert len(end.adapter.numbers) == 1
    task.cancel()
    await asyncio.wait([task])
    with pytest.raises(BufferError):  # it is copied into when the READ under way ends
        into.append(0)
    await place.ended()
    into.append(0)
    assert len(end.adapter.posted) == 1
    await place.close()


def _refuse_more_than(c: Lib, monkeypatch: pytest.MonkeyPatch, size: int, code: int) -> list[int]:
    """Have memory of more bytes not be registered; the bytes of each region that is."""
    real, sizes = c.ibv_reg_mr_iova, list[int]()

    def register(pd: Any, addr: Any, length: int, iova: int, access: int) -> Any:
        if length > size:
            ffi.errno = code
            return ffi.NULL
        sizes.append(length)
        return real(pd, addr, length, iova, access)

    monkeypatch.setattr(c, "ibv_reg_mr_iova", register)
    return sizes


async def _served(place: Copying, call: Coroutine[Any, Any, int], data: bytes = b"") -> int:
    """The result of a call whose requests succeed; READs get `data`."""
    end, task = place.end, asyncio.create_task(call)
    while not task.done():
        await settle(2)
        for number in end.adapter.numbers:
            if data:
                start = end.adapter.posted[-1][4] - REMOTE.addr - 3
                place.lands(number, data[start : start + len(end.adapter.memory[number])])
        if end.adapter.numbers:
            await place.ended()
    return task.result()


@pytest.mark.parametrize("size", [1, INLINE, INLINE + 1, ROOM])
async def test_a_write_lets_go_of_its_buffer_at_once(c: Lib, size: int) -> None:
    place = await copying(inline=INLINE)
    end, data = place.end, bytearray(random.Random(size).randbytes(size))
    sent, where = bytes(data), ctypes.addressof(ctypes.c_char.from_buffer(data))
    task = asyncio.create_task(end.write(data))
    await settle()
    own = end.adapter.posted[0][1] == where
    assert own == (size <= INLINE), "inline goes out of the buffer itself, the rest does not"
    data[:] = bytes(size)
    assert not exported(data)
    if not own:
        assert bytes(end.adapter.memory[end.adapter.numbers[0]]) == sent
    await place.ended()
    assert task.result() == size
    assert end.adapter.written == [sent]
    await place.close()
