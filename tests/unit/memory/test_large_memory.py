"""LargeMemory: sends take turns, and wait for memory that the system refuses."""

from __future__ import annotations

import asyncio
import errno
import random
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from aiordma.errors import errno_error
from aiordma.memory import memlock
from aiordma.memory.budget import SlotBudget, step_budget
from aiordma.memory.byte_budget import Account, ByteBudget
from aiordma.memory.large_memory import LargeMemory, Turn, large_memory
from aiordma.memory.memlock import FIRST, Room
from aiordma.memory.pool import BufferPool, room_of
from aiordma.verbs.enums import Access
from aiordma.verbs.mr import MemoryRegion
from tests.inside.memory import hurry, sending_of, stop_clock

from ..conftest import Run, settle
from .fake_memory import FakeRegion

LIMIT_S = 20.0


class Scarce:
    """A system that lets so many bytes be registered."""

    def __init__(self, total: int) -> None:
        self.left = total

    def register(self, size: int) -> Callable[[], Awaitable[MemoryRegion]]:
        async def register() -> MemoryRegion:
            await asyncio.sleep(0)
            if size > self.left:
                raise errno_error(errno.ENOMEM, "ibv_reg_mr")
            self.left -= size
            region = FakeRegion(None, size)
            region.when_gone(lambda: self._back(size))
            return cast("MemoryRegion", region)

        return register

    def _back(self, size: int) -> None:
        self.left += size


def test_sends_take_turns_in_order(run: Run) -> None:
    async def main() -> None:
        memory = LargeMemory(100)
        done: list[int] = []
        turns: dict[int, Turn] = {}

        async def send(number: int, size: int) -> None:
            turns[number] = await memory.turn(size, None)
            done.append(number)

        sizes = (60, 40, 50, 10, 500, 1)
        tasks = [asyncio.create_task(send(n, size)) for n, size in enumerate(sizes)]
        await settle()
        assert done == [0, 1]
        memory.over(turns[1])
        await settle()
        assert done == [0, 1], "no later one goes past the first in line"
        memory.over(turns[0])
        await settle()
        assert done == [0, 1, 2, 3]
        memory.over(turns[2])
        memory.over(turns[3])
        await settle()
        assert done == [0, 1, 2, 3, 4], "a larger one goes alone"
        memory.over(turns[4])
        await asyncio.gather(*tasks)
        memory.over(turns[5])
        assert sending_of(memory) == 0

    run(main())


def test_a_send_goes_on_without_its_turn_in_the_end(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        hurry(monkeypatch, turn_s=0.02)
        stop_clock(monkeypatch)  # a loop may call a millisecond before the time
        memory = LargeMemory(100)
        stuck = await memory.turn(100, None)  # its peer never reads
        late = await asyncio.wait_for(memory.turn(70, None), LIMIT_S)
        assert sending_of(memory) == 70, "the old turn does not count any more"
        await asyncio.wait_for(memory.turn(30, None), LIMIT_S)
        for turn in (stuck, late):
            memory.over(turn)
        assert sending_of(memory) == 30

    run(main())


def test_a_canceled_turn_is_given_on(run: Run) -> None:
    async def main() -> None:
        memory = LargeMemory(100)
        first = await memory.turn(100, None)
        tasks = [asyncio.create_task(memory.turn(80, None)) for _ in range(3)]
        await settle()
        tasks[1].cancel()
        await settle()
        memory.over(first)
        tasks[0].cancel()  # in the turn of the loop in which it got its turn
        await asyncio.wait_for(tasks[2], LIMIT_S)
        assert tasks[0].cancelled()
        assert sending_of(memory) == 80

    run(main())


def test_the_sends_of_a_connection_that_is_over_leave_the_line(run: Run) -> None:
    async def main() -> None:
        memory = LargeMemory(100)
        mine, other = "mine", "other"
        first = await memory.turn(100, other)
        refused = asyncio.create_task(memory.turn(200, mine))
        waits = asyncio.create_task(memory.turn(50, other))
        await settle()
        memory.refuse(mine, lambda: ConnectionError("over"))
        with pytest.raises(ConnectionError, match="over"):
            await refused
        assert not waits.done()
        memory.over(first)
        await waits
        assert sending_of(memory) == 50

    run(main())


def test_memory_that_is_short_is_waited_for(run: Run) -> None:
    async def main() -> None:
        memory, system = LargeMemory(1 << 30), Scarce(100)
        first = await memory.registered(80, system.register(80))
        second = asyncio.create_task(memory.registered(60, system.register(60)))
        await settle()
        assert not second.done()
        first.close()
        (await asyncio.wait_for(second, LIMIT_S)).close()
        assert system.left == 100

    run(main())


def test_memory_that_comes_free_elsewhere_is_found(run: Run) -> None:
    async def main() -> None:
        memory, system = LargeMemory(1 << 30), Scarce(100)
        held = await memory.registered(40, system.register(40))
        waits = asyncio.create_task(memory.registered(80, system.register(80)))
        await settle()
        assert not waits.done()
        system.left += 40  # none of this loop's regions is deregistered
        (await asyncio.wait_for(waits, LIMIT_S)).close()
        held.close()

    run(main())


def test_where_there_is_nothing_to_wait_for_it_fails_at_once(run: Run) -> None:
    async def main() -> None:
        memory, system = LargeMemory(1 << 30), Scarce(100)
        with pytest.raises(OSError, match="ibv_reg_mr") as caught:
            await asyncio.wait_for(memory.registered(101, system.register(101)), LIMIT_S)
        assert caught.value.errno == errno.ENOMEM
        held = await memory.registered(80, system.register(80))
        with pytest.raises(OSError, match="ibv_reg_mr"):  # more than the machine has
            await asyncio.wait_for(memory.registered(1 << 60, system.register(1 << 60)), LIMIT_S)
        held.close()

    run(main())


def test_the_wait_has_an_end(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        hurry(monkeypatch, short_s=0.05)
        memory, system = LargeMemory(1 << 30), Scarce(100)
        held = await memory.registered(80, system.register(80))
        with pytest.raises(OSError, match="ibv_reg_mr"):
            await asyncio.wait_for(memory.registered(60, system.register(60)), LIMIT_S)
        held.close()

    run(main())


def test_kept_buffers_make_room(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    room = room_of(1)
    system = Scarce(4 * room)

    async def register(_: object, size: int, access: object) -> MemoryRegion:
        return await system.register(size)()

    async def main() -> None:
        memory = LargeMemory(1 << 30)
        budget = ByteBudget(1 << 30)
        account = Account(budget, "a")
        none: Any = None
        keeps, takes = (
            BufferPool(none, 1 << 30, Access.REMOTE_READ, account, memory, reserve=reserve)
            for reserve in (True, False)
        )
        regions = [await keeps.take(1) for _ in range(4)]
        for region in regions[:2]:
            keeps.give(region)
        assert (budget.ahead, system.left) == (2 * room, 0)
        large = await asyncio.wait_for(takes.take(2 * room), LIMIT_S)
        assert (budget.ahead, system.left) == (0, 0), "the kept ones are not registered any more"
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
        assert budget.ahead == 0

    monkeypatch.setattr(MemoryRegion, "register", register)
    run(main())


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_asked_for_comes_in_the_end(run: Run, seed: int) -> None:
    """Random sizes and cancellations, with less memory than the turns allow."""

    async def main() -> None:
        rng = random.Random(seed)
        memory, system = LargeMemory(300), Scarce(200)

        async def one() -> None:
            for _ in range(20):
                size = rng.randrange(1, 200)
                turn = await memory.turn(size, None)
                try:
                    region = await memory.registered(size, system.register(size))
                    try:
                        for _ in range(rng.randrange(4)):
                            await asyncio.sleep(0)
                    finally:
                        region.close()
                finally:
                    memory.over(turn)

        tasks = [asyncio.create_task(one()) for _ in range(8)]
        for _ in range(40):
            await asyncio.sleep(0)
            if rng.random() < 0.1:
                rng.choice(tasks).cancel()
        _, waiting = await asyncio.wait(tasks, timeout=LIMIT_S)
        assert not waiting, f"seed {seed}"
        assert all(task.cancelled() or task.exception() is None for task in tasks), f"seed {seed}"
        assert (sending_of(memory), system.left) == (0, 200), f"seed {seed}"

    run(main())


def test_a_loop_has_one(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        (first, let_go), (second, let_go_again) = large_memory(), large_memory()
        assert first is second
        assert first.total == Room().for_sends
        let_go()
        let_go_again()

    run(main())
    monkeypatch.setattr(memlock, "memory_to_pin", lambda: 8 << 20)
    assert Room().for_sends == 512 << 10


def test_budgets_are_parts_of_what_the_first_slots_leave(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together with the slots of ten thousand connections they stay within 1 GiB."""
    may = 1 << 30

    def sum_of(budget: ByteBudget, steps: SlotBudget, sends: LargeMemory) -> int:
        # Messages that the program has count once more.
        return 2 * budget.total + steps.total + sends.total

    async def main() -> None:
        monkeypatch.setattr(memlock, "memory_to_pin", lambda: may)
        monkeypatch.setattr(memlock, "FIRST", first := type(FIRST)())
        budget = ByteBudget(None)
        (steps, let_steps_go), (sends, let_go) = step_budget(), large_memory()
        assert sum_of(budget, steps, sends) == may * 11 // 16
        first.count(10_000 * 65_536)
        left = may - first.pinned
        assert sum_of(budget, steps, sends) <= left * 11 // 16
        assert budget.total == left // 4
        # The step budget refuses no connection, whatever others have.
        share = steps.join(0)
        assert share.take(steps.total)
        first.count(200 << 20)
        assert steps.free < 0
        steps.join(0).leave()
        assert not share.take(1)
        share.leave()
        first.count(may)
        assert sum_of(budget, steps, sends) == 0
        assert await budget.take(1 << 20, "a source"), "a single message is always fetched"
        budget.give((0, 0, 1 << 20, 0), "a source")
        assert budget.used == 0
        await sends.turn(1 << 20, "a connection")
        first.count(-may - (200 << 20) - 10_000 * 65_536)
        assert sum_of(budget, steps, sends) == may * 11 // 16
        let_steps_go()
        let_go()

    run(main())
