"""Wakeup and the tasks of asyncio: both kinds, told of an ended future, in their context."""

from __future__ import annotations

import asyncio
import asyncio.tasks
import contextvars
import functools
import sys
from collections.abc import Coroutine
from typing import Any

import pytest

from aiordma._core import Wakeup

from ..conftest import LOOPS, Run, settle
from .test_wakeup import called_by_the_loop

_name: contextvars.ContextVar[str] = contextvars.ContextVar("_name", default="outside")
TASKS: dict[str, Any] = {"C": asyncio.Task, "Python": vars(asyncio.tasks)["_PyTask"]}
#: Makes a task that runs at once; None before Python 3.12.
EAGER: Any = None
if sys.version_info >= (3, 12):
    EAGER = functools.partial(asyncio.Task, eager_start=True)


@pytest.fixture(params=list(TASKS))
def task_class(request: pytest.FixtureRequest) -> Any:
    return TASKS[request.param]


def test_the_two_kinds_differ() -> None:
    assert TASKS["C"] is not TASKS["Python"], "without the compiled one this tests nothing"


async def waiter(wakeup: Wakeup, seen: list[object]) -> str:
    _name.set("inside")
    seen.append((_name.get(), asyncio.current_task()))
    for _ in range(3):
        await wakeup
        seen.append((_name.get(), asyncio.current_task()))
    return "done"


@pytest.mark.parametrize("how", ["wake", "wake_soon"])
def test_a_task_of_either_kind_is_resumed(run: Run, task_class: Any, how: str) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        wakeup, seen = Wakeup(loop), list[object]()
        task = task_class(waiter(wakeup, seen), loop=loop)
        for count in range(3):
            await settle()
            assert wakeup.waiting
            await called_by_the_loop(getattr(wakeup, how))
            await settle()
            # From 3.14 on, asyncio.current_task() does not know a task of pure Python.
            current = task if task_class is TASKS["C"] or sys.version_info < (3, 14) else None
            assert seen == [("inside", current)] * (count + 2)
        assert await task == "done"
        assert _name.get() == "outside"

    run(main())


def test_canceled_in_a_task_of_either_kind(run: Run, task_class: Any) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        wakeup, seen = Wakeup(loop), list[object]()
        task = task_class(waiter(wakeup, seen), loop=loop)
        await settle()
        assert task.cancel("why")
        assert wakeup.waiting, "it has not run yet"
        assert wakeup.wake() is False
        with pytest.raises(asyncio.CancelledError, match="why"):
            await task
        assert not wakeup.waiting
        assert len(seen) == 1, "before its first wait"

    run(main())


def test_a_given_context_is_the_tasks(run: Run) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        wakeup, seen = Wakeup(loop), list[str]()
        context = contextvars.copy_context()
        context.run(_name.set, "given")

        async def work() -> None:
            await wakeup
            seen.append(_name.get())
            _name.set("changed")

        task = loop.create_task(work(), context=context)
        await settle()

        def wake() -> None:
            _name.set("the waker's")
            wakeup.wake()
            seen.append(_name.get())

        await called_by_the_loop(wake)
        await task
        assert seen == ["given", "the waker's"]
        assert context[_name] == "changed"

    run(main())


def test_the_callback_is_told_of_a_future_that_has_ended() -> None:
    told: list[Any] = []
    loop: Any = None
    wakeup: Any = Wakeup(loop)
    generator = wakeup.__await__()
    assert next(generator) is wakeup
    wakeup.add_done_callback(told.append)
    assert wakeup.wake()
    assert [(type(future), future.done(), future.result()) for future in told] == [
        (asyncio.Future, True, None)
    ]
    with pytest.raises(StopIteration):
        next(generator)
    assert told[0].done(), "and it stays so"


@pytest.mark.parametrize("kind", list(LOOPS))
def test_one_of_another_loop_is_refused(run: Run, task_class: Any, kind: str) -> None:
    async def main() -> None:
        other = LOOPS[kind]()
        try:
            wakeup = Wakeup(other)
            work: Coroutine[Any, Any, str] = waiter(wakeup, [])
            task = task_class(work, loop=asyncio.get_running_loop())
            with pytest.raises(RuntimeError, match="attached to a different loop"):
                await task
            assert wakeup.wake() is False, "nobody can be resumed"
        finally:
            other.close()

    run(main())
