"""READs and WRITEs that C posts: as Python posts them, and whatever ends them."""

from __future__ import annotations

import asyncio
import errno
import random
from typing import Any

import pytest

from aiordma._core import Operation
from aiordma.errors import ConnectionLostError, NotSupportedError, RemoteAccessError
from aiordma.memory.remote import RemoteRegion
from aiordma.verbs import SGE, Access, MemoryRegion
from aiordma.verbs.enums import Opcode, WCStatus
from tests.inside.endpoint import attend, still_listens
from tests.inside.verbs import uses_of

from ..conftest import settle
from ..core.test_message_waiting import traced
from ..core.test_wakeup import called_by_the_loop
from ..verbs.test_memory_region import Domain, Lib, c
from .operating import BOTH, MIB, REMOTE, End, Place

__all__ = ["c"]


def outcome(task: asyncio.Task[int]) -> Any:
    error = task.exception()
    return task.result() if error is None else (type(error), str(error))


def _input(rng: random.Random, regions: list[MemoryRegion]) -> tuple[Any, Any, Any]:
    """The peer's memory, a piece of local memory, an offset; mostly as it should be."""
    rights = rng.choice((BOTH, BOTH, Access.REMOTE_READ, Access.REMOTE_WRITE, Access(0)))
    size = rng.choice((0, 1, 100, MIB, 3 * MIB))
    remote: Any = RemoteRegion(rng.getrandbits(40), size, rng.getrandbits(32), rights)
    region = rng.choice(regions)
    start = rng.choice((0, 0, 1, 4096, region.length))
    rest = region.length - start
    length = rng.choice((0, 1, 17, min(rest, size), MIB, MIB + 1, rest))
    piece: Any = SGE(region, start, min(length, rest))
    if rng.random() < 0.1:
        piece = region
    offset: Any = rng.choice((0, 0, 1, 99, max(0, size - len(piece)), size))
    odd = rng.random()
    if odd < 0.03:
        piece = rng.choice((None, "text", 5))
    elif odd < 0.06:
        offset = rng.choice((-1, 1 << 64, 1 << 70))
    return remote, piece, offset


@pytest.mark.parametrize("seed", range(20))
async def test_c_posts_what_python_posts(c: Lib, seed: int) -> None:
    print("seed", seed)
    rng = random.Random(seed)
    pd, foreign = Domain(), Domain()
    regions = [MemoryRegion(pd, 2 * MIB), MemoryRegion(pd, 4096)]
    readonly = MemoryRegion(pd, 4096 + MIB, Access(0))
    other = MemoryRegion(foreign, 4096)
    closed = MemoryRegion(pd, 4096)
    all_regions = [*regions, *regions, readonly, other, closed]
    closed.close()
    by_c, by_python = End(pd), End(pd)
    quick = 0
    for _ in range(60):
        remote, piece, offset = _input(rng, all_regions)
        kind = rng.choice(("read", "write"))
        by_python.adapter.posted.clear()
        by_c.adapter.posted.clear()
        opcode = Opcode.RDMA_READ if kind == "read" else Opcode.RDMA_WRITE
        long_way = by_python.one_sided.transfer(opcode, remote, piece, offset)
        task = asyncio.create_task(long_way)
        await by_python.finish(task)
        attend(by_c.operations)  # it rests after a time, which a slow machine may take here
        before = by_c.seen()
        by_c.state.listen_for_operations()  # on a busy machine the time to linger is soon over
        numbers = () if kind == "read" else (None,)
        operation = getattr(by_c.state, kind)(remote, piece, offset, *numbers)
        if operation is None:
            assert by_c.seen() == before, "refused, and yet something has changed"
            plain = isinstance(piece, SGE | MemoryRegion) and len(by_python.adapter.posted) == 1
            assert not plain, "it was plain"
            again = asyncio.create_task(getattr(by_c, kind)(piece, offset, remote))
        else:
            quick += 1
            assert len(by_c.adapter.posted) == 1

            async def wait(operation: Operation = operation) -> int:
                return await operation

            again = asyncio.create_task(wait())
        await by_c.finish(again)
        assert outcome(again) == outcome(task)
        assert by_c.adapter.posted == by_python.adapter.posted
        assert by_c.state.facts()["operating"] == 0
    assert quick, "the quick way was never gone"
    assert by_c.state.facts()["bytes_read"] == by_python.state.facts()["bytes_read"]
    assert by_c.state.facts()["bytes_written"] == by_python.state.facts()["bytes_written"]
    for region in (*regions, readonly, other):
        assert uses_of(region) == 0
        region.close()
    for region in (*regions, readonly, other, closed):
        await region.wait_closed()
    pd.close()
    foreign.close()


async def test_their_completions_wake_the_loop_while_tasks_wait(c: Lib) -> None:
    """Also in the moment in which none is under way, however long ago the tasks have begun."""
    place = Place(depth=1)
    end, piece = place.end, SGE(place.region, 0, 1)
    tasks = [asyncio.create_task(end.read(piece)) for _ in range(3)]
    await settle()
    end.complete()
    seen: list[tuple[int, bool]] = []

    def tell() -> None:
        end.tell()
        seen.append((end.state.facts()["operating"], still_listens(end.operations)))

    await called_by_the_loop(tell)
    assert seen == [(0, True)]
    for task in tasks:
        await end.finish(task)
    number = await end.operations.number()
    assert still_listens(end.operations), "it is about to be posted"
    end.operations.release_number(number)
    assert not still_listens(end.operations)
    await place.close()


async def test_who_is_resumed_and_posts_again_does_not_overtake(c: Lib) -> None:
    """Its number is free while it runs, and others wait for one."""
    place = Place(depth=1)
    end, piece = place.end, SGE(place.region, 0, 1)

    async def twice() -> None:
        await end.read(piece, offset=1)
        await end.read(piece, offset=3)

    first = asyncio.create_task(twice())
    await settle()
    second = asyncio.create_task(end.read(piece, offset=2))
    await settle()
    end.complete()
    await called_by_the_loop(end.tell)
    await settle()
    await end.finish(second)
    await end.finish(first)
    # Field 4 is the address at the peer.
    assert [posted[4] - REMOTE.addr for posted in end.adapter.posted] == [1, 2, 3]
    await place.close()


async def test_one_that_was_handed_a_number_and_canceled_passes_it_on(c: Lib) -> None:
    place = Place(depth=1)
    end = place.end
    tasks = [asyncio.create_task(end.read(SGE(place.region, n, 1))) for n in range(3)]
    await settle()
    end.complete()

    def drain() -> None:
        end.tell()
        tasks[1].cancel()  # it has the number, and has not run

    await called_by_the_loop(drain)
    await settle()
    assert tasks[1].cancelled()
    assert end.adapter.posted[1][1] == place.region.addr + 2
    await end.finish(tasks[2])
    assert end.seen()[0] == [0]
    await place.close()


@pytest.mark.parametrize("trace", [False, True])
async def test_an_end_before_it_is_awaited_and_an_object_that_is_used_again(
    c: Lib, trace: bool
) -> None:
    place = Place(depth=1)
    end, seen = place.end, set[int]()
    held: Operation | None = None
    with traced(trace):
        for size in (1, 300, 4096):
            operation = end.state.write(REMOTE, SGE(place.region, 0, size), 0, None)
            assert operation is not None
            assert operation.opcode == Opcode.RDMA_WRITE
            seen.add(id(operation))
            end.complete()
            end.tell()
            assert await operation == size
            if size == 300:
                held = operation
            operation = None
    assert len(seen) == 2, "used again unless somebody has it"
    assert held is not None
    await place.close()


@pytest.mark.parametrize("status", [WCStatus.SUCCESS, WCStatus.REM_ACCESS_ERR])
async def test_no_completion_undoes_a_cancellation(c: Lib, status: WCStatus) -> None:
    """It comes behind the cancellation, and before the turn of the task."""
    place = Place()
    end = place.end
    task = asyncio.create_task(end.read(SGE(place.region, 0, 8)))
    await settle()
    task.cancel()
    if status == WCStatus.SUCCESS:
        end.complete()
        end.tell()
    else:
        (number,) = end.adapter.numbers
        end.operations.on_ended(number, (0, int(status), 0, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0))
    await asyncio.wait([task])
    assert task.cancelled()
    await place.close()


async def test_a_canceled_one_keeps_the_memory_until_its_completion(c: Lib) -> None:
    place = Place()
    end, region = place.end, place.region
    task = asyncio.create_task(end.read(SGE(region, 0, 8)))
    await settle()
    assert uses_of(region) == 1
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert uses_of(region) == 1
    region.close()
    await settle()
    assert ("dereg",) not in c.calls, "the adapter writes to it"
    assert end.state.read(REMOTE, SGE(region, 0, 8), 0) is None, "it is being closed"
    end.complete()
    end.tell()
    await region.wait_closed()
    assert c.calls[-1] == ("dereg",)
    assert uses_of(region) == 0
    place.pd.close()


@pytest.mark.parametrize("awaited", [False, True])
async def test_a_failure_is_raised(c: Lib, awaited: bool) -> None:
    place = Place()
    end = place.end
    operation = end.state.read(REMOTE, SGE(place.region, 0, 8), 0)
    assert operation is not None

    async def wait() -> int:
        return await operation

    task = asyncio.create_task(wait()) if awaited else None
    await settle()
    status = int(WCStatus.REM_ACCESS_ERR)
    failed = (0, status, 0, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0)
    end.operations.on_ended(end.adapter.numbers[0], failed)
    with pytest.raises(RemoteAccessError):
        await (task or wait())
    assert uses_of(place.region) == 0
    assert end.state.facts()["bytes_read"] == 0
    assert len(end.seen()[0]) == 4
    end.operations.on_ended(0, failed)  # one that is not under way
    assert len(end.seen()[0]) == 4
    await place.close()


@pytest.mark.parametrize("when", ["with its turn", "later"])
async def test_memory_that_the_end_has_closed_tells_of_the_end(c: Lib, when: str) -> None:
    """The connection closes the regions of `register`; that is no doing of the program."""
    place = Place(depth=1)
    end = place.end
    calls = [end.read(SGE(place.region, 0, 8)) for _ in range(2)]
    first, second = (asyncio.create_task(call) for call in calls)
    await settle()
    end.outcome.cause = ConnectionLostError(errno.ECONNRESET, "gone")
    end.state.advance("SHUT")
    place.region.close()
    end.complete()
    await called_by_the_loop(end.tell)  # the second is granted the number of the first
    await first
    with pytest.raises(ConnectionLostError, match="gone"):
        await second
    if when == "later":
        for local in (place.region, SGE(place.region, 0, 8)):
            with pytest.raises(ConnectionLostError, match="gone"):
                await end.read(local)
            with pytest.raises(ConnectionLostError, match="gone"):
                await end.write(local)
    await place.close()


async def test_what_ends_the_loop_leaves_the_others_to_the_next_turn(c: Lib) -> None:
    place = Place()
    end, log = place.end, list[str]()

    async def read(name: str) -> None:
        await end.read(SGE(place.region, 0, 8))
        log.append(name)
        if name == "ends":
            raise SystemExit(3)

    first, second = (asyncio.create_task(read(name)) for name in ("ends", "other"))
    await settle()
    end.complete()
    with pytest.raises(SystemExit):
        await called_by_the_loop(end.tell)
    await settle()
    assert log == ["ends", "other"]
    assert second.done()
    assert isinstance(first.exception(), SystemExit)
    await place.close()


async def test_a_refused_post_ends_the_connection(c: Lib) -> None:
    place = Place()
    end = place.end
    before = end.seen()
    end.adapter.code = errno.ENOMEM
    with pytest.raises(ConnectionLostError):
        await end.read(SGE(place.region, 0, 8))
    assert isinstance(end.link.failure, OSError)
    assert end.link.failure.errno == errno.ENOMEM
    assert end.seen() == before
    assert uses_of(place.region) == 0
    await place.close()


async def test_without_initiator_depth_nothing_is_read(c: Lib) -> None:
    place = Place(read_depth=0)
    end = place.end
    write = asyncio.create_task(end.write(SGE(place.region, 0, 8)))
    await end.finish(write)
    with pytest.raises(NotSupportedError, match="initiator_depth 0"):
        async with asyncio.timeout(1):
            await end.read(SGE(place.region, 0, 8))
    assert len(end.adapter.posted) == 1
    await place.close()
