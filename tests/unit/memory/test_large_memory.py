"""LargeMemory: sends take turns, and wait for memory that the system refuses."""

from __future__ import annotations

import asyncio
import errno
import random
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from aiordma.errors import errno_error
from aiordma.memory import governor, memlock
from aiordma.memory import pool as pool_module
from aiordma.memory.governor import (
    AHEAD,
    AWAITED,
    FIRST,
    GROWTH,
    Account,
    Budget,
    Growth,
    Lease,
    Member,
    growth_of_loop,
    left,
)
from aiordma.memory.large_memory import LargeMemory, large_memory
from aiordma.memory.pool import BufferPool, room_of
from aiordma.verbs.enums import Access
from aiordma.verbs.mr import MemoryRegion
from tests.inside.memory import hurry, sending_of, stop_clock

from ..conftest import Run, settle
from .fake_memory import FakeRegion, registered_with

LIMIT_S = 20.0


class Scarce:
    """A system that lets so many bytes be registered."""

    def __init__(self, total: int) -> None:
        self.left = total

    def register(self, size: int) -> Callable[[], Awaitable[MemoryRegion]]:
        async def register() -> MemoryRegion:
            await asyncio.sleep(0)
            return self.region(size)

        return register

    def region(self, size: int) -> MemoryRegion:
        if size > self.left:
            raise errno_error(errno.ENOMEM, "ibv_reg_mr")
        self.left -= size
        region = FakeRegion(None, size)
        region.when_gone(lambda: self._back(size))
        return cast("MemoryRegion", region)

    def _back(self, size: int) -> None:
        self.left += size


async def test_sends_take_turns_in_order() -> None:
    memory = LargeMemory(100)
    done: list[int] = []
    turns: dict[int, Lease] = {}

    async def send(number: int, size: int) -> None:
        turns[number] = await memory.lease(size, None)
        done.append(number)

    sizes = (60, 40, 50, 10, 500, 1)
    tasks = [asyncio.create_task(send(n, size)) for n, size in enumerate(sizes)]
    await settle()
    assert done == [0, 1]
    turns[1].release()
    await settle()
    assert done == [0, 1], "no later one goes past the first in line"
    turns[0].release()
    await settle()
    assert done == [0, 1, 2, 3]
    turns[2].release()
    turns[3].release()
    await settle()
    assert done == [0, 1, 2, 3, 4], "a larger one goes alone"
    turns[4].release()
    await asyncio.gather(*tasks)
    turns[5].release()
    assert sending_of(memory) == 0


async def test_connections_take_turns() -> None:
    """One that sends many messages does not have another one's wait for all of them."""
    memory = LargeMemory(100)
    held = [await memory.lease(100, "a")]
    done: list[str] = []

    async def send(source: str) -> None:
        held.append(await memory.lease(100, source))
        done.append(source)

    tasks = [asyncio.create_task(send(source)) for source in "aaab"]
    for _ in tasks:
        await settle()
        held.pop().release()
    await asyncio.gather(*tasks)
    assert done == ["a", "b", "a", "a"]


async def test_a_send_goes_on_without_its_turn_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch, turn_s=0.02)
    stop_clock(monkeypatch)  # a loop may call a millisecond before the time
    memory = LargeMemory(100)
    stuck = await memory.lease(100, None)  # its peer never reads
    region = registered_with(stuck)
    late = await asyncio.wait_for(memory.lease(70, None), LIMIT_S)
    assert sending_of(memory) == 70, "the old turn does not count any more"
    await asyncio.wait_for(memory.lease(30, None), LIMIT_S)
    for turn in (stuck, late):
        turn.release()
    assert sending_of(memory) == 30
    region.close()
    assert sending_of(memory) == 30


async def test_a_canceled_turn_is_given_on() -> None:
    memory = LargeMemory(100)
    first = await memory.lease(100, None)
    tasks = [asyncio.create_task(memory.lease(80, None)) for _ in range(3)]
    await settle()
    tasks[1].cancel()
    await settle()
    first.release()
    tasks[0].cancel()  # in the turn of the loop in which it got its turn
    await asyncio.wait_for(tasks[2], LIMIT_S)
    assert tasks[0].cancelled()
    assert sending_of(memory) == 80


async def test_the_sends_of_a_connection_that_is_over_leave_the_line() -> None:
    memory = LargeMemory(100)
    mine, other = "mine", "other"
    first = await memory.lease(100, other)
    refused = asyncio.create_task(memory.lease(200, mine))
    waits = asyncio.create_task(memory.lease(50, other))
    await settle()
    memory.sends.refuse(mine, lambda: ConnectionError("over"))
    with pytest.raises(ConnectionError, match="over"):
        await refused
    assert not waits.done()
    first.release()
    await waits
    assert sending_of(memory) == 50


async def test_memory_that_is_short_is_waited_for() -> None:
    memory, system = LargeMemory(1 << 30), Scarce(100)
    first = await memory.registered(80, system.register(80))
    second = asyncio.create_task(memory.registered(60, system.register(60)))
    await settle()
    assert not second.done()
    first.close()
    (await asyncio.wait_for(second, LIMIT_S)).close()
    assert system.left == 100


async def test_memory_that_comes_free_elsewhere_is_found() -> None:
    memory, system = LargeMemory(1 << 30), Scarce(100)
    held = await memory.registered(40, system.register(40))
    waits = asyncio.create_task(memory.registered(80, system.register(80)))
    await settle()
    assert not waits.done()
    system.left += 40  # none of this loop's regions is deregistered
    (await asyncio.wait_for(waits, LIMIT_S)).close()
    held.close()


async def test_where_there_is_nothing_to_wait_for_it_fails_at_once() -> None:
    memory, system = LargeMemory(1 << 30), Scarce(100)
    with pytest.raises(OSError, match="ibv_reg_mr") as caught:
        await asyncio.wait_for(memory.registered(101, system.register(101)), LIMIT_S)
    assert caught.value.errno == errno.ENOMEM
    held = await memory.registered(80, system.register(80))
    with pytest.raises(OSError, match="ibv_reg_mr"):  # more than the machine has
        await asyncio.wait_for(memory.registered(1 << 60, system.register(1 << 60)), LIMIT_S)
    held.close()


async def test_the_wait_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch, short_s=0.05)
    memory, system = LargeMemory(1 << 30), Scarce(100)
    held = await memory.registered(80, system.register(80))
    with pytest.raises(OSError, match="ibv_reg_mr"):
        await asyncio.wait_for(memory.registered(60, system.register(60)), LIMIT_S)
    held.close()


def test_kept_buffers_make_room(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    room = room_of(1)
    system = Scarce(4 * room)

    def register(_: object, size: int, access: object) -> MemoryRegion:
        return system.region(size)

    async def main() -> None:
        memory = LargeMemory(1 << 30)
        budget = Budget(1 << 30)
        account = Account(budget, "a")
        none: Any = None
        keeps, takes = (
            BufferPool(none, 1 << 30, Access.REMOTE_READ, account, memory, reserve=reserve)
            for reserve in (True, False)
        )
        regions = [await keeps.take(1) for _ in range(4)]
        for region in regions[:2]:
            keeps.give(region)
        assert (budget.held(AHEAD), system.left) == (2 * room, 0)
        large = await asyncio.wait_for(takes.take(2 * room), LIMIT_S)
        assert (budget.held(AHEAD), system.left) == (0, 0), "the kept ones are deregistered"
        waits = asyncio.create_task(takes.take(1))
        await settle()
        assert not waits.done()
        keeps.give(regions[2])  # kept, and dropped for the one that waits
        small = await asyncio.wait_for(waits, LIMIT_S)
        for pool, region in ((takes, large), (takes, small), (keeps, regions[3])):
            pool.give(region)
        keeps.close()
        takes.close()
        assert system.left == 4 * room
        account.close()
        assert budget.held(AHEAD) == 0

    monkeypatch.setattr(pool_module, "MemoryRegion", register)
    run(main())


@pytest.mark.parametrize("seed", range(20))
async def test_whatever_is_asked_for_comes_in_the_end(seed: int) -> None:
    """Random sizes and cancellations, with less memory than the turns allow."""
    rng = random.Random(seed)
    memory, system = LargeMemory(300), Scarce(200)

    async def one() -> None:
        for _ in range(20):
            size = rng.randrange(1, 200)
            turn = await memory.lease(size, None)
            try:
                region = await memory.registered(size, system.register(size))
                try:
                    for _ in range(rng.randrange(4)):
                        await asyncio.sleep(0)
                finally:
                    region.close()
            finally:
                turn.release()

    tasks = [asyncio.create_task(one()) for _ in range(8)]
    for _ in range(40):
        await asyncio.sleep(0)
        if rng.random() < 0.1:
            rng.choice(tasks).cancel()
    _, waiting = await asyncio.wait(tasks, timeout=LIMIT_S)
    assert not waiting, f"seed {seed}"
    assert all(task.cancelled() or task.exception() is None for task in tasks), f"seed {seed}"
    assert (sending_of(memory), system.left) == (0, 200), f"seed {seed}"


async def test_a_loop_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memlock, "memory_to_pin", lambda: 8 << 20)
    memory = large_memory()
    assert memory is large_memory()
    assert 511 << 10 <= memory.sends.total <= 512 << 10


async def test_g01_a_loop_counts_what_connections_that_are_closed_still_pin() -> None:
    """Also where all are closed, and others come."""
    member = Member(growth_of_loop(), 0)
    slots, send = member.lease(GROWTH, 100), await large_memory().lease(200, "a connection")
    assert slots is not None
    regions = [registered_with(lease) for lease in (slots, send)]
    send.release()
    member.close()
    assert (growth_of_loop().used, sending_of(large_memory())) == (100, 200)
    assert growth_of_loop().members == 0
    for region in regions:
        region.close()
    assert (growth_of_loop().used, sending_of(large_memory())) == (0, 0)


async def test_budgets_are_parts_of_what_the_first_slots_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Together with the slots of ten thousand connections they stay within 1 GiB."""
    may = 1 << 30

    def sum_of(budget: Budget, growth: Growth, sends: Budget) -> int:
        # Messages that the program has count once more.
        return 2 * budget.total + growth.total + sends.total

    monkeypatch.setattr(memlock, "memory_to_pin", lambda: may)
    monkeypatch.setattr(governor, "FIRST", first := type(FIRST)())
    budget = Budget(left(4, most=256 << 20))
    growth, memory = growth_of_loop(), large_memory()
    assert sum_of(budget, growth, memory.sends) == may * 11 // 16
    first.pinned += 10_000 * 65_536
    rest = may - first.pinned
    assert sum_of(budget, growth, memory.sends) <= rest * 11 // 16
    assert budget.total == rest // 4
    # The budget for growth refuses no connection, whatever others have.
    member = Member(growth, 0)
    assert member.lease(GROWTH, growth.total)
    first.pinned += 200 << 20
    assert growth.free < 0
    Member(growth, 0).close()
    assert not member.lease(GROWTH, 1)
    member.close()
    first.pinned += may
    assert sum_of(budget, growth, memory.sends) == 0
    lease = await budget.wait(AWAITED, 1 << 20, "a source")
    assert lease, "a single message is always fetched"
    lease.release()
    assert budget.held() == 0
    await memory.lease(1 << 20, "a connection")
    first.pinned += -may - (200 << 20) - 10_000 * 65_536
    assert sum_of(budget, growth, memory.sends) == may * 11 // 16
