"""Batches: chains of READs and WRITEs, and whatever ends them."""

from __future__ import annotations

import asyncio
import errno
import gc
import sys
import types
import weakref
from collections.abc import Callable, Coroutine, Generator
from typing import Any

import pytest

from aiordma import BatchError, BatchLostError
from aiordma.errors import (
    ConnectionLostError,
    NotSupportedError,
    RemoteAccessError,
    ResourceClosedError,
    ResultLostError,
)
from aiordma.memory.remote import RemoteRegion
from aiordma.verbs import SGE, Access, MemoryRegion
from aiordma.verbs.enums import Opcode, WCStatus
from tests.exports import exported
from tests.inside.verbs import uses_of

from ..conftest import settle
from ..core.test_wakeup import called_by_the_loop
from ..verbs.test_memory_region import Domain, Lib, c
from .operating import BOTH, MIB, REMOTE, End, Place

__all__ = ["c"]

READ, WRITE = int(Opcode.RDMA_READ), int(Opcode.RDMA_WRITE)


def record(status: WCStatus) -> Any:
    return (0, int(status), 0, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0)


def fill(end: End, value: int) -> None:
    """Write to the memory of all READs under way."""
    for memory in end.adapter.memory.values():
        memory[0 : len(memory)] = bytes([value]) * len(memory)


class Counted:
    """How often a coroutine is resumed."""

    times = 0

    @types.coroutine
    def run(self, coro: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
        waits = coro.send(None)
        while True:
            yield waits
            self.times += 1
            try:
                waits = coro.send(None)
            except StopIteration as stop:
                return stop.value


async def test_chains_follow_one_another_without_the_task(c: Lib) -> None:
    """Half of the operations in each chain, one completion for each, and two are under way."""
    place = Place(depth=8)
    end, counted = place.end, Counted()
    batch = end.batch()
    for number in range(100):
        piece = SGE(place.region, number, 1)
        assert batch.read(REMOTE, piece, offset=number) == number
    assert len(batch) == 100
    assert not end.adapter.posted

    async def submit() -> list[Any]:
        return await counted.run(batch.submit())  # type: ignore[no-any-return]

    task = asyncio.create_task(submit())
    await settle()
    assert end.adapter.chains == [4, 4]
    assert len(end.adapter.numbers) == 2
    await end.finish(task)
    assert task.result() == [1] * 100 == batch.results
    assert end.adapter.chains == [4] * 25
    assert [each[4] - REMOTE.addr for each in end.adapter.posted] == [*range(100)]
    assert counted.times <= 2
    assert end.seen()[:3] == (end.seen()[0], 0, 100)
    assert len(end.seen()[0]) == 8
    assert uses_of(place.region) == 0
    await place.close()


@pytest.mark.parametrize("depth", [1, 2, 3, 4096])
async def test_every_depth(c: Lib, depth: int) -> None:
    place = Place(depth=depth)
    end = place.end
    end.adapter.touches = True
    batch = end.batch()
    for number in range(200):
        batch.write(REMOTE, bytes([number]) * 3, offset=3 * number)
    task = asyncio.create_task(batch.submit())
    await end.finish(task)
    assert task.result() == [3] * 200
    assert end.adapter.written == [bytes([number]) * 3 for number in range(200)]
    assert max(end.adapter.chains) == max(1, min(64, depth // 2))
    await place.close()


async def test_a_chain_has_a_mebibyte(c: Lib) -> None:
    place = Place(depth=64)
    region = MemoryRegion(place.pd, 2 * MIB)
    batch = place.end.batch()
    for size in (MIB // 2, MIB // 2, 1, MIB, MIB, 5):
        batch.write(REMOTE, SGE(region, 0, size))
    task = asyncio.create_task(batch.submit())
    await place.end.finish(task)
    assert place.end.adapter.chains == [2, 1, 1, 1, 1]
    region.close()
    await region.wait_closed()
    await place.close()


async def test_results_of_every_kind(c: Lib) -> None:
    place = Place(inline=8)
    end = place.end
    end.adapter.touches = True
    into, data = bytearray(5), bytearray(b"written")
    async with asyncio.TaskGroup() as group:
        batch = end.batch()
        batch.read(REMOTE, size=3)
        batch.read(REMOTE, into)
        batch.read(REMOTE, size=0)
        batch.write(REMOTE, data)  # inline
        batch.write(REMOTE, b"")
        task = group.create_task(batch.submit())
        await settle()
        fill(end, 7)
        end.complete()
        await called_by_the_loop(end.tell)
        await settle()
        fill(end, 8)
        await end.finish(task)
    assert batch.results == [bytes([7]) * 3, 5, b"", 7, 0]
    assert into == bytes([7]) * 5
    assert end.adapter.written == [b"written"]
    assert not exported(into)
    assert len(batch) == 5
    await place.close()


async def test_what_is_wrong_is_refused_at_the_call(c: Lib) -> None:
    place, foreign = Place(), Domain()
    end = place.end
    readonly = MemoryRegion(place.pd, 4096, Access(0))
    other, closed = MemoryRegion(foreign, 4096), MemoryRegion(place.pd, 4096)
    large = MemoryRegion(place.pd, 2 * MIB)
    closed.close()
    no_rights: Any = RemoteRegion(1 << 40, MIB, 7, Access(0))
    batch: Any = end.batch()
    batch.write(REMOTE, b"good")
    wrong: list[tuple[type[Exception], Any]] = [
        (ValueError, lambda: batch.read(REMOTE, size=1, offset=REMOTE.length)),
        (ValueError, lambda: batch.read(REMOTE, size=1, offset=-1)),
        (ValueError, lambda: batch.read(REMOTE, size=1, offset=1 << 70)),
        (ValueError, lambda: batch.read(REMOTE, size=-1)),
        (ValueError, lambda: batch.read(REMOTE, size=1 << 70)),
        (ValueError, lambda: batch.read(REMOTE, size=65_537)),
        (ValueError, lambda: batch.write(REMOTE, bytes(65_537))),
        (ValueError, lambda: batch.write(REMOTE, SGE(large, 0, MIB + 1))),
        (ValueError, lambda: batch.write(REMOTE, other)),
        (TypeError, lambda: batch.read(REMOTE)),
        (TypeError, lambda: batch.read(REMOTE, bytearray(1), size=1)),
        (TypeError, lambda: batch.read(REMOTE, size="1")),
        (TypeError, lambda: batch.read(REMOTE, 5)),
        (TypeError, lambda: batch.read(REMOTE, size=1, offset="0")),
        (TypeError, lambda: batch.write(REMOTE, None)),
        (TypeError, lambda: batch.write(REMOTE, "text")),
        (TypeError, lambda: batch.write(None, b"data")),
        (TypeError, lambda: batch.write(b"bytes of a region", b"data")),
        (PermissionError, lambda: batch.read(no_rights, size=1)),
        (PermissionError, lambda: batch.write(no_rights, b"1")),
        (BufferError, lambda: batch.read(REMOTE, readonly)),
        (BufferError, lambda: batch.read(REMOTE, b"bytes")),
        (ResourceClosedError, lambda: batch.read(REMOTE, closed)),
    ]
    for kind, call in wrong:
        with pytest.raises(kind):
            call()
        assert len(batch) == 1
    task = asyncio.create_task(batch.submit())
    await end.finish(task)
    assert task.result() == [4]
    for region in (readonly, other, large):
        assert uses_of(region) == 0
        region.close()
    for region in (readonly, other, large, closed):
        await region.wait_closed()
    foreign.close()
    await place.close()


async def test_a_piece_that_is_damaged_costs_no_reference(c: Lib) -> None:
    place = Place()
    registration: Any = place.region._registration
    batch, piece = place.end.batch(), SGE(place.region, 0, 8)
    object.__setattr__(piece, "offset", -1)
    before = sys.getrefcount(registration)
    for _ in range(3):
        with pytest.raises(ConnectionLostError):
            batch.read(REMOTE, piece)
    assert sys.getrefcount(registration) == before
    assert len(batch) == 0
    del batch
    await place.close()


async def test_an_offset_of_another_type_and_a_subclass_are_taken(c: Lib) -> None:
    class Mine(RemoteRegion):
        pass

    class Index:
        def __index__(self) -> int:
            return 3

    place = Place()
    batch: Any = place.end.batch()
    batch.read(Mine(1 << 40, 64, 7, BOTH), size=1)
    batch.read(REMOTE, size=1, offset=Index())
    batch.read(REMOTE, size=Index())
    task = asyncio.create_task(batch.submit())
    await place.end.finish(task)
    assert [each[4] for each in place.end.adapter.posted] == [1 << 40, REMOTE.addr + 3, REMOTE.addr]
    await place.close()


async def test_without_initiator_depth_nothing_is_read(c: Lib) -> None:
    place = Place(read_depth=0)
    batch = place.end.batch()
    with pytest.raises(NotSupportedError, match="initiator_depth 0"):
        batch.read(REMOTE, size=1)
    assert batch.read(REMOTE, size=0) == 0
    assert await batch.submit() == [b""]
    await place.close()


async def test_a_batch_is_submitted_once(c: Lib) -> None:
    place = Place()
    batch: Any = place.end.batch()
    with pytest.raises(RuntimeError, match="after it was submitted"):
        assert batch.results
    assert await batch.submit() == []
    with pytest.raises(RuntimeError, match="begin another"):
        batch.read(REMOTE, size=1)
    with pytest.raises(RuntimeError, match="begin another"):
        batch.write(REMOTE, b"1")
    with pytest.raises(RuntimeError, match="begin another"):
        await batch.submit()
    with pytest.raises(RuntimeError, match="begin another"):
        async with batch:
            pass
    await place.close()


async def test_a_block_that_raises_posts_nothing(c: Lib) -> None:
    place = Place()
    data, batch = bytearray(8), place.end.batch()

    async def block() -> None:
        async with batch:
            batch.write(REMOTE, data)
            assert exported(data)
            raise KeyError

    with pytest.raises(KeyError):
        await block()
    assert not exported(data)
    assert not place.end.adapter.posted
    with pytest.raises(RuntimeError):
        batch.write(REMOTE, data)
    await place.close()


async def test_a_single_operation_has_its_turn_between_two_chains(c: Lib) -> None:
    place = Place(depth=4)
    end = place.end
    batch = end.batch()
    for number in range(12):
        batch.read(REMOTE, SGE(place.region, number, 1), offset=number)
    task = asyncio.create_task(batch.submit())
    await settle()
    single = asyncio.create_task(end.read(SGE(place.region, 99, 1), offset=99))
    await settle()
    assert len(end.adapter.posted) == 4, "the single one waits"
    end.complete(end.adapter.numbers[0])
    await called_by_the_loop(end.tell)
    await settle()
    assert end.adapter.posted[4][4] - REMOTE.addr == 99
    await end.finish(task)
    await end.finish(single)
    assert task.result() == [1] * 12
    places = [each[4] - REMOTE.addr for each in end.adapter.posted]
    assert [each for each in places if each != 99] == [*range(12)]
    await place.close()


async def test_two_batches_share_the_operations(c: Lib) -> None:
    place = Place(depth=4)
    end = place.end
    tasks = []
    for size in (1, 2):
        batch = end.batch()
        for _ in range(10):
            batch.read(REMOTE, SGE(place.region, 0, size))
        tasks.append(asyncio.create_task(batch.submit()))
    await settle()
    for _ in range(3):
        end.complete()
        await called_by_the_loop(end.tell)
        await settle()
    assert {each[2] for each in end.adapter.posted} == {1, 2}
    for task in tasks:
        await end.finish(task)
    await place.close()


@pytest.mark.parametrize("kind", ["region", "bytes"])
async def test_a_read_that_is_not_whole_is_found(c: Lib, kind: str) -> None:
    """The others have their results."""
    place = Place(software=True, depth=8)
    end = place.end
    end.adapter.touches = True
    batch = end.batch()
    for number in range(3):
        if kind == "region":
            batch.read(REMOTE, SGE(place.region, 16 * number, 16))
        else:
            batch.read(REMOTE, size=16)
    task = asyncio.create_task(batch.submit())
    await settle()
    memories = [*end.adapter.memory.values()]
    for memory in (memories[0], memories[2]):
        memory[0:16] = b"0123456789abcdef"
    memories[1][0:8] = b"01234567"
    await end.finish(task)
    error = task.exception()
    assert isinstance(error, BatchError)
    assert isinstance(error.__cause__, ResultLostError)
    assert error.errno == errno.EBADMSG
    assert (error.done, error.failed, error.unknown, error.unposted) == ([0, 2], [1], [], [])
    good: Any = 16 if kind == "region" else b"0123456789abcdef"
    assert error.results == [good, None, good]
    assert end.state.facts()["bytes_read"] == 32
    await place.close()


async def test_a_failure_says_what_is_known(c: Lib) -> None:
    place = Place(depth=8)
    end = place.end
    batch = end.batch()
    for number in range(20):
        batch.write(REMOTE, SGE(place.region, number, 1))
    task = asyncio.create_task(batch.submit())
    await settle()
    first, second = end.adapter.quiet[:3], end.adapter.quiet[3:]
    last = [*end.adapter.numbers]
    end.operations.on_ended(first[1], record(WCStatus.REM_ACCESS_ERR))
    end.outcome.cause = ConnectionLostError(errno.ECONNRESET, "gone")
    end.state.advance("SHUT")
    end.operations.on_ended(first[2], record(WCStatus.WR_FLUSH_ERR))
    await settle()
    assert uses_of(place.region) == 8, "the adapter has them still"
    for number in (last[0], *second, last[1]):
        assert not task.done()
        end.operations.on_ended(number, record(WCStatus.WR_FLUSH_ERR))
    await asyncio.wait([task])
    error = task.exception()
    assert isinstance(error, BatchError)
    assert not isinstance(error, ConnectionLostError)
    assert isinstance(error.__cause__, RemoteAccessError)
    assert error.done == [0]
    assert error.failed == [1]
    assert error.unknown == [2, 3, 4, 5, 6, 7]
    assert error.unposted == [*range(8, 20)]
    assert error.results == [1] + [None] * 19
    assert "1 were done, 1 failed, 6 are unknown, and 12 were not posted" in str(error)
    assert uses_of(place.region) == 0
    assert len(end.seen()[0]) == 8
    await place.close()


async def test_a_flushed_batch_is_lost(c: Lib) -> None:
    """The first chain has been done, and it is not known whether the second one was."""
    place = Place(depth=4)
    end = place.end
    batch = end.batch()
    for number in range(5):
        batch.write(REMOTE, SGE(place.region, number, 1))
    task = asyncio.create_task(batch.submit())
    await settle()
    quiet, last = [*end.adapter.quiet], [*end.adapter.numbers]
    end.state.advance("SHUT")
    end.complete(last[0])
    await called_by_the_loop(end.tell)
    for number in (quiet[1], last[1]):
        end.operations.on_ended(number, record(WCStatus.WR_FLUSH_ERR))
    await settle()
    assert not task.done(), "the cause is not known"
    end.outcome.cause = ConnectionLostError(errno.ECONNRESET, "gone")
    end.operations.explained()
    await asyncio.wait([task])
    error = task.exception()
    assert isinstance(error, BatchLostError)
    assert isinstance(error, ConnectionLostError)
    assert isinstance(error.__cause__, ConnectionLostError)
    assert error.errno == errno.ECONNRESET
    assert (error.done, error.failed) == ([0, 1], [])
    assert (error.unknown, error.unposted) == ([2, 3], [4])
    await place.close()


async def test_the_end_of_the_queue_pair_ends_chains(c: Lib) -> None:
    """Their memory stays until it is gone."""
    place = Place(depth=4)
    end = place.end
    batch = end.batch()
    for number in range(5):
        batch.write(REMOTE, SGE(place.region, number, 1))
    task = asyncio.create_task(batch.submit())
    await settle()
    end.state.advance("SHUT")
    end.outcome.cause = ConnectionLostError(errno.ECONNRESET, "gone")
    end.operations._end_all()
    await asyncio.wait([task])
    error = task.exception()
    assert isinstance(error, BatchLostError)
    assert (error.unknown, error.unposted) == ([0, 1, 2, 3], [4])
    assert uses_of(place.region) == 4
    for let_go in end.gone:
        let_go()
    assert uses_of(place.region) == 0
    await place.close()


async def test_a_connection_that_is_over(c: Lib) -> None:
    place = Place()
    end = place.end
    batch = end.batch()
    batch.write(REMOTE, b"1")
    end.outcome.cause = ConnectionLostError(errno.ECONNRESET, "gone")
    end.state.advance("SHUT")
    with pytest.raises(ConnectionLostError, match="gone") as caught:
        await batch.submit()
    assert not isinstance(caught.value, BatchError), "nothing was posted"
    with pytest.raises(ConnectionLostError, match="gone"):
        end.batch()
    assert not end.adapter.posted
    await place.close()


async def test_a_region_that_was_closed_meanwhile(c: Lib) -> None:
    """The other operations are done."""
    place = Place()
    region = MemoryRegion(place.pd, 64)
    batch = place.end.batch()
    batch.write(REMOTE, SGE(place.region, 0, 1))
    batch.write(REMOTE, region)
    batch.write(REMOTE, SGE(place.region, 0, 1))
    region.close()
    await region.wait_closed()
    task = asyncio.create_task(batch.submit())
    await place.end.finish(task)
    error = task.exception()
    assert isinstance(error, BatchError)
    assert isinstance(error.__cause__, ResourceClosedError)
    assert (error.done, error.failed, error.unknown, error.unposted) == ([0, 2], [1], [], [])
    await place.close()


@pytest.mark.parametrize("takes", [0, 1, 2])
async def test_a_refused_post_ends_the_connection(c: Lib, takes: int) -> None:
    """What the adapter's library has taken of the chain is under way."""
    place = Place(depth=8)
    end = place.end
    batch = end.batch()
    for number in range(3):
        batch.write(REMOTE, SGE(place.region, number, 1))
    end.adapter.code, end.adapter.takes = errno.ENOMEM, takes
    task = asyncio.create_task(batch.submit())
    await settle()
    assert isinstance(end.link.failure, OSError)
    assert end.link.failure.errno == errno.ENOMEM
    assert uses_of(place.region) == takes
    if takes:
        assert not task.done()
        end.operations._end_all()
    await asyncio.wait([task])
    error = task.exception()
    assert isinstance(error, ConnectionLostError)
    if takes:
        assert isinstance(error, BatchLostError)
        assert error.unknown == [*range(takes)]
        assert error.unposted == [*range(takes, 3)]
    for let_go in end.gone:
        let_go()
    assert uses_of(place.region) == 0
    await place.close()


@pytest.mark.parametrize("late", [False, True])
async def test_a_canceled_batch_keeps_its_memory_until_the_completion(c: Lib, late: bool) -> None:
    """And posts no more, also if it was canceled in the moment in which it was resumed."""
    place = Place(depth=4)
    end, into = place.end, bytearray(8)
    end.adapter.touches = True
    batch = end.batch()
    batch.read(REMOTE, into)
    for number in range(9):
        batch.read(REMOTE, SGE(place.region, number, 1))
    task = asyncio.create_task(batch.submit())
    await settle()
    fill(end, 9)
    if late:
        end.complete(end.adapter.numbers[0])

        def drain(cancel: Callable[[], object] = task.cancel) -> None:
            end.tell()
            cancel()

        await called_by_the_loop(drain)
        del drain
    else:
        task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    posted = len(end.adapter.posted)
    assert uses_of(place.region) > 0
    assert exported(into), "the batch has it, or the adapter"
    end.complete()
    end.tell()
    assert into == bytes([9]) * 8
    assert not exported(into)
    assert len(end.adapter.posted) == posted
    assert uses_of(place.region) == 0
    assert len(end.seen()[0]) == 4
    await place.close()


@pytest.mark.parametrize("count", [2, 12])
@pytest.mark.parametrize("status", [WCStatus.SUCCESS, WCStatus.REM_ACCESS_ERR])
async def test_no_completion_undoes_a_cancellation(c: Lib, count: int, status: WCStatus) -> None:
    """It comes behind the cancellation, and before the turn of the task."""
    place = Place(depth=4)
    end = place.end
    batch = end.batch()
    for number in range(count):
        batch.read(REMOTE, SGE(place.region, number, 1))
    task = asyncio.create_task(batch.submit())
    await settle()
    posted = len(end.adapter.posted)
    task.cancel()
    if status == WCStatus.SUCCESS:
        end.complete()
        end.tell()
    else:
        for number in [*end.adapter.numbers]:
            end.operations.on_ended(number, record(status))
    await asyncio.wait([task])
    assert task.cancelled()
    assert len(end.adapter.posted) == posted, "more was posted for a task that does not wait"
    await place.close()


async def test_one_that_is_canceled_in_line_gives_its_number_back(c: Lib) -> None:
    place = Place(depth=1)
    end = place.end
    single = asyncio.create_task(end.read(SGE(place.region, 0, 1)))
    await settle()
    batch = end.batch()
    batch.read(REMOTE, size=1)
    task = asyncio.create_task(batch.submit())
    await settle()
    task.cancel()
    await asyncio.wait([task])
    await end.finish(single)
    assert end.seen()[0] == [0]
    assert len(end.adapter.posted) == 1
    await place.close()


@pytest.mark.parametrize("iwarp", [False, True])
async def test_the_last_read_completes_on_iwarp(c: Lib, iwarp: bool) -> None:
    """Such adapters may complete a WRITE before an earlier READ."""
    place = Place(depth=16, iwarp=iwarp)
    end = place.end
    end.link.reads_expose = iwarp
    batch = end.batch()
    for kind in "rrwrww":
        (batch.read if kind == "r" else batch.write)(REMOTE, SGE(place.region, 0, 1))
    task = asyncio.create_task(batch.submit())
    await settle()
    signaled = [*end.adapter.numbers]
    assert len(signaled) == 1 + iwarp
    if iwarp:
        end.complete(signaled[1])
        end.tell()
        await settle()
        assert not task.done()
    await end.finish(task)
    assert task.result() == [1] * 6
    await place.close()


async def test_a_completion_that_comes_twice(c: Lib) -> None:
    """As to a forked child."""
    place = Place(depth=4, iwarp=True)
    end = place.end
    batch = end.batch()
    batch.read(REMOTE, SGE(place.region, 0, 1))
    batch.write(REMOTE, SGE(place.region, 0, 1))
    task = asyncio.create_task(batch.submit())
    await settle()
    first, second = end.adapter.numbers
    end.complete(first)
    end.adapter.numbers.append(first)
    end.complete(first)
    await called_by_the_loop(end.tell)
    await settle()
    assert not task.done()
    end.complete(second)
    await called_by_the_loop(end.tell)
    await asyncio.wait([task])
    end.adapter.numbers.append(second)
    end.complete(second)
    await called_by_the_loop(end.tell)
    assert task.result() == [1, 1]
    assert end.seen()[1] == 0
    await place.close()


async def test_a_batch_in_a_cycle_is_collected(c: Lib) -> None:
    class Holder(bytearray):
        batch: Any = None

    place = Place()
    data = Holder(8)
    data.batch = batch = place.end.batch()
    batch.write(REMOTE, data)
    gone = weakref.ref(batch)
    del data, batch
    gc.collect()
    assert gone() is None
    await place.close()


@pytest.mark.parametrize("size", [1, 64, 65_536])
async def test_copied_writes_and_reads_use_the_pool(c: Lib, size: int) -> None:
    place = Place(depth=16)
    end = place.end
    batch = end.batch()
    for _ in range(9):
        batch.write(REMOTE, bytes(size))
    for _ in range(9):
        batch.read(REMOTE, size=size)
    task = asyncio.create_task(batch.submit())
    await end.finish(task)
    assert task.result()[:9] == [size] * 9
    assert all(len(each) == size for each in task.result()[9:])
    keys = {each[3] for each in end.adapter.posted}
    assert len(keys) <= 2, "two regions"
    await place.close()
