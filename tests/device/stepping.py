"""Cancel a coroutine at its k-th suspension, for every k."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from typing import Any, TypeVar

from tests.device.oracle import adapter_objects, settle

T = TypeVar("T")
MAX_STEPS = 200


def _cancel_of_this_task() -> Callable[[], object]:
    task = asyncio.current_task()
    assert task is not None
    return task.cancel


class Steps:
    """Counts the suspensions of one run and cancels at a chosen one.

    Args:
        at: The suspension, from 1, at which the task is canceled; 0 for none.
        late: Cancel in the moment in which what is waited for is done, before the task runs
            again, instead of at once.

    Attributes:
        act: Called at the chosen suspension; None: the task is canceled.
    """

    act: Callable[[], object] | None = None

    def __init__(self, at: int, *, late: bool) -> None:
        self.at = at
        self.late = late
        self.count = 0

    @property
    def canceled(self) -> bool:
        """Whether the run got as far as the chosen suspension."""
        return 0 < self.at <= self.count

    def _act(self, _: object = None) -> None:
        act, self.act = self.act, None
        assert act is not None
        act()

    async def drive(self, coro: Coroutine[Any, Any, T]) -> T:
        """Run `coro` in the current task, suspension by suspension."""
        return await self._drive(coro)

    @types.coroutine
    def _drive(self, coro: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
        # An exception has this frame in its traceback: what has it is dropped before it goes on,
        # and the task is no variable here.
        thrown: list[BaseException] = []
        while True:
            try:
                waits_for = coro.throw(thrown.pop()) if thrown else coro.send(None)
            except StopIteration as stop:
                result: T = stop.value
                return result
            self.count += 1
            if self.count == self.at:
                if self.act is None:
                    self.act = _cancel_of_this_task()
                if self.late and isinstance(waits_for, asyncio.Future):
                    waits_for.add_done_callback(self._act)
                else:
                    asyncio.get_running_loop().call_soon(self._act)
            try:
                yield waits_for
            except BaseException as exc:
                thrown.append(exc)
            finally:
                del waits_for


async def run_canceled(coro: Coroutine[Any, Any, T], steps: Steps) -> T | None:
    """The result, or None if the cancellation came through."""
    task = asyncio.create_task(steps.drive(coro))
    try:
        return await task
    except asyncio.CancelledError:
        assert task.cancelled()
        return None


def every_step(*, late: bool) -> Iterator[Steps]:
    """Steps for k = 1, 2, ..., until a run ends before its k."""
    for at in range(1, MAX_STEPS):
        steps = Steps(at, late=late)
        yield steps
        if not steps.canceled:
            return
    msg = "the scenario does not come to an end"
    raise AssertionError(msg)


async def for_every_step(
    scenario: Callable[[Steps], Awaitable[None]], *, late: bool, complete: bool = True
) -> int:
    """Run the scenario for k = 1, 2, ... until it ends before k; returns how many k there were.

    `complete`: the scenario gives back all that it takes, which is checked after each run.
    """
    before = None
    for steps in every_step(late=late):
        async with asyncio.timeout(60):
            await scenario(steps)
        await settle()
        if before is not None and complete:
            assert adapter_objects() == before, f"left after a cancel at step {steps.at}"
        before = adapter_objects()
    return steps.at - 1
