"""An event loop in a simulated world: while it waits, the world goes on."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import selectors
from collections.abc import Coroutine
from typing import Any

from tests.simulation.world import Stuck, World

__all__ = ["Loop", "LoopEnded", "run"]

_NS = 1_000_000_000
Ready = list[tuple[selectors.SelectorKey, int]]


class LoopEnded(SystemExit):
    """Ends the loop, which the program runs again."""


class _Selector(selectors.PollSelector):
    """Reports what is ready in an order of the seed's; time passes while nothing is."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def select(self, timeout: float | None = None) -> Ready:
        """Wait, in virtual time."""
        world = self._world
        if timeout is not None and timeout <= 0:
            world.some_steps()
            return self._shuffled(super().select(0))
        deadline = None if timeout is None else int((world.now + timeout) * _NS) + 1
        while not super().select(0):
            if world.step():
                continue
            moments = [moment for moment in (world.due(), deadline) if moment]
            if not moments:
                msg = "nothing is on its way, no timer is set, and the loop waits"
                raise Stuck(msg)
            world.advance(min(moments))
            if deadline is not None and min(moments) >= deadline:
                break
        world.some_steps()  # more has come when the loop wakes
        return self._shuffled(super().select(0))

    def _shuffled(self, ready: Ready) -> Ready:
        # The order in which poll(2) reports is that of registration in a dict: the same each time.
        ready = sorted(ready, key=lambda each: each[0].fd)
        self._world.random.shuffle(ready)
        return ready


class _Task(asyncio.Task[Any]):
    """A task whose place in a set is that of its birth, and not that of its address."""

    def __init__(self, coro: Coroutine[Any, Any, Any], number: int, **options: Any) -> None:
        self._number = number
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self._number


class Loop(asyncio.SelectorEventLoop):
    """asyncio's own loop, on a simulated selector."""

    def __init__(self, world: World) -> None:
        super().__init__(_Selector(world))
        self._clock_resolution = 1e-9
        numbers = itertools.count()
        self.set_task_factory(
            lambda loop, coro, **options: _Task(coro, next(numbers), loop=loop, **options)
        )


def run(world: World, main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine on a loop of its own."""
    with asyncio.Runner(loop_factory=lambda: Loop(world)) as runner:
        loop = runner.get_loop()
        task = loop.create_task(main)
        while not task.done():
            with contextlib.suppress(LoopEnded):
                loop.run_until_complete(task)
        task.result()


async def run_beside(world: World, main: Coroutine[Any, Any, None]) -> None:
    """`asyncio.run`, on a loop of its own that takes turns with the running one: another program.

    A turn is taken between two tasks of the running loop, for which no loop runs then.
    """
    here, there = asyncio.get_running_loop(), Loop(world)

    def turn(taken: asyncio.Future[None]) -> None:
        asyncio._set_running_loop(None)
        try:
            there.call_soon(there.stop)
            there.run_forever()
        finally:
            asyncio._set_running_loop(here)
            taken.set_result(None)

    async def complete(work: Coroutine[Any, Any, object]) -> None:
        task, turns = there.create_task(work), 0
        while not task.done():
            taken: asyncio.Future[None] = here.create_future()
            here.call_soon(turn, taken)
            await taken
            turns += 1
            await asyncio.sleep(0.0005 if turns < 200 else 0.1)
        task.result()

    try:
        await complete(main)
    finally:
        if tasks := asyncio.all_tasks(there):
            for task in tasks:
                task.cancel()
            await complete(_ended(tasks))
        await complete(there.shutdown_asyncgens())
        there.close()


async def _ended(tasks: set[asyncio.Task[Any]]) -> None:
    await asyncio.wait(tasks)
