"""Wakeup: a task is resumed where `wake` is called, and everything else is as with a future."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import weakref
from collections.abc import Callable

import pytest

from aiordma._core import Wakeup

from ..conftest import Run, settle

_here: contextvars.ContextVar[str] = contextvars.ContextVar("_here", default="outside")


async def parked(wakeup: Wakeup, log: list[str]) -> None:
    log.append("waits")
    try:
        await wakeup
    except BaseException as exc:
        log.append(type(exc).__name__)
        raise
    log.append("goes on")


async def called_by_the_loop(function: Callable[[], object]) -> None:
    """As a reader is: with no task running."""
    done = asyncio.get_running_loop().create_future()

    def call() -> None:
        try:
            function()
        except BaseException as exc:
            done.set_exception(exc)
        else:
            done.set_result(None)

    asyncio.get_running_loop().call_soon(call)
    await done


def test_wake_resumes_before_it_returns(run: Run) -> None:
    async def main() -> None:
        wakeup = Wakeup(asyncio.get_running_loop())
        log: list[str] = []
        task = asyncio.create_task(parked(wakeup, log))
        await settle()
        assert wakeup.waiting

        def drain() -> None:
            assert wakeup.wake() is True
            log.append("drained")

        await called_by_the_loop(drain)
        assert log == ["waits", "goes on", "drained"]
        assert not wakeup.waiting
        await task

    run(main())


def test_again_and_again_and_from_inside(run: Run) -> None:
    async def main() -> None:
        wakeup, count = Wakeup(asyncio.get_running_loop()), 0

        async def work() -> None:
            nonlocal count
            for _ in range(1000):
                await wakeup
                count += 1

        task = asyncio.create_task(work())
        await settle()
        await called_by_the_loop(lambda: [wakeup.wake() for _ in range(1000)])
        await task
        assert count == 1000

    run(main())


def test_nobody_waits(run: Run) -> None:
    async def main() -> None:
        wakeup = Wakeup(asyncio.get_running_loop())
        assert wakeup.wake() is False
        assert wakeup.wake_soon() is False
        assert not wakeup.waiting

    run(main())


def test_wake_soon_takes_a_turn_of_the_loop(run: Run) -> None:
    async def main() -> None:
        wakeup = Wakeup(asyncio.get_running_loop())
        log: list[str] = []
        task = asyncio.create_task(parked(wakeup, log))
        await settle()
        assert wakeup.wake_soon() is True
        assert wakeup.wake_soon() is False, "it is on its way"
        assert wakeup.wake() is False
        assert log == ["waits"]
        await task
        assert log == ["waits", "goes on"]

    run(main())


def test_a_second_task_is_refused(run: Run) -> None:
    async def main() -> None:
        wakeup = Wakeup(asyncio.get_running_loop())
        log: list[str] = []
        task = asyncio.create_task(parked(wakeup, log))
        await settle()
        with pytest.raises(RuntimeError, match="another task waits"):
            await wakeup
        assert wakeup.waiting, "the first is unharmed"
        wakeup.wake_soon()
        await task

    run(main())


def test_canceled(run: Run) -> None:
    async def main() -> None:
        wakeup = Wakeup(asyncio.get_running_loop())
        log: list[str] = []
        task = asyncio.create_task(parked(wakeup, log))
        await settle()
        task.cancel("why")
        assert wakeup.wake() is False, "the cancellation was first"
        with pytest.raises(asyncio.CancelledError, match="why"):
            await task
        assert log == ["waits", "CancelledError"]
        # And it can be waited on again.
        task = asyncio.create_task(parked(wakeup, log))
        await settle()
        await called_by_the_loop(wakeup.wake)
        await task

    run(main())


def test_canceled_when_it_is_on_its_way(run: Run) -> None:
    async def main() -> None:
        wakeup = Wakeup(asyncio.get_running_loop())
        log: list[str] = []
        task = asyncio.create_task(parked(wakeup, log))
        await settle()
        wakeup.wake_soon()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert log == ["waits", "CancelledError"]
        assert not wakeup.waiting

    run(main())


def test_a_time_out(run: Run) -> None:
    async def main() -> None:
        wakeup = Wakeup(asyncio.get_running_loop())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await wakeup
        assert not wakeup.waiting

    run(main())


def test_the_task_keeps_its_context(run: Run) -> None:
    async def main() -> None:
        wakeup = Wakeup(asyncio.get_running_loop())
        seen: list[object] = []

        async def work() -> None:
            _here.set("inside")
            await wakeup
            seen.append((_here.get(), asyncio.current_task()))

        task = asyncio.create_task(work())
        await settle()
        await called_by_the_loop(wakeup.wake)
        await task
        assert seen == [("inside", task)]
        assert _here.get() == "outside"

    run(main())


def test_what_the_task_raises_is_the_tasks(run: Run) -> None:
    async def main() -> None:
        wakeup = Wakeup(asyncio.get_running_loop())

        async def work() -> None:
            await wakeup
            raise ValueError("its own")

        task = asyncio.create_task(work())
        await settle()
        await called_by_the_loop(lambda: wakeup.wake())
        with pytest.raises(ValueError, match="its own"):
            await task

    run(main())


def test_outside_of_a_task(run: Run) -> None:
    async def main() -> None:
        wakeup = Wakeup(asyncio.get_running_loop())
        generator = wakeup.__await__()
        assert next(generator) is wakeup
        with pytest.raises(RuntimeError, match="not ended by wake"):
            next(generator)
        assert not wakeup.waiting

    run(main())


def test_bad_arguments() -> None:
    with pytest.raises(TypeError):
        Wakeup()  # type: ignore[call-arg]
    wakeup = Wakeup(None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="add_done_callback"):
        wakeup.add_done_callback()  # type: ignore[call-arg]


def test_a_cycle_is_collected(run: Run) -> None:
    class Owner:
        wakeup: Wakeup

    async def work(owner: Owner) -> None:
        await owner.wakeup

    async def main() -> None:
        loop = asyncio.get_running_loop()
        owner = Owner()
        owner.wakeup = Wakeup(loop)
        gone = weakref.ref(owner)
        task = loop.create_task(work(owner))
        del owner
        await settle()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        del task
        gc.collect()
        assert gone() is None

    run(main())
