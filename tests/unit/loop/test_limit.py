"""Limit: as asyncio.timeout, whatever ends the block."""

from __future__ import annotations

import asyncio
import time
import weakref

import pytest

from aiordma.loop.limit import Limit
from tests.inside.loop import is_ticking

from ..conftest import settle


async def for_ever() -> None:
    await asyncio.get_running_loop().create_future()


@pytest.mark.parametrize("seconds", [0.002, 0, -5])
async def test_the_time_is_up(seconds: float) -> None:
    task = asyncio.current_task()
    assert task is not None
    with pytest.raises(TimeoutError) as caught, Limit(seconds):
        await for_ever()
    assert isinstance(caught.value.__cause__, asyncio.CancelledError)
    assert task.cancelling() == 0
    await asyncio.sleep(0)  # and nothing comes later


@pytest.mark.parametrize("seconds", [None, 3600.0])
async def test_a_block_that_ends_in_time(seconds: float | None) -> None:
    with Limit(seconds):
        await asyncio.sleep(0)
    with pytest.raises(LookupError, match="mine"), Limit(seconds):
        raise LookupError("mine")


async def test_another_cancellation_is_none_of_its() -> None:
    begun = asyncio.Event()

    async def work() -> None:
        with Limit(3600.0):
            begun.set()
            await for_ever()

    task = asyncio.create_task(work())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_both_at_once_is_a_cancellation() -> None:
    async def work() -> None:
        me = asyncio.current_task()
        assert me is not None
        with Limit(0.002):
            try:
                await for_ever()
            finally:
                me.cancel()

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(work())


@pytest.mark.parametrize(("outer", "inner"), [(0.002, 3600.0), (3600.0, 0.002)])
async def test_one_in_another(outer: float, inner: float) -> None:
    ended: list[str] = []
    try:
        with Limit(outer):
            try:
                with Limit(inner):
                    await for_ever()
            except TimeoutError:
                ended.append("inner")
    except TimeoutError:
        ended.append("outer")
    assert ended == ["inner" if inner < outer else "outer"]


async def test_it_is_for_a_task() -> None:
    failed: list[BaseException] = []

    def call() -> None:
        try:
            with Limit(1.0):
                pass
        except RuntimeError as exc:
            failed.append(exc)

    asyncio.get_running_loop().call_soon(call)
    await asyncio.sleep(0)
    assert "a time limit is for a task" in str(failed[0])


async def test_what_has_arrived_is_returned() -> None:
    """The loop was busy past the deadline; the result reaches the block by another task."""
    loop = asyncio.get_running_loop()
    arrives: asyncio.Future[int] = loop.create_future()

    async def passed_on() -> int:
        return await arrives

    def be_busy() -> None:
        time.sleep(0.02)
        loop.call_soon(arrives.set_result, 5)

    loop.call_later(0.009, be_busy)
    with Limit(0.01) as limit:
        assert await asyncio.create_task(passed_on()) == 5
    assert not limit.expired
    with pytest.raises(TimeoutError), Limit(0.01):
        await loop.create_future()


async def test_a_patient_limit_that_is_held_in_its_last_turns_ends_all_the_same() -> None:
    limit = Limit(0.01, patient=True)

    def meddle() -> None:
        if is_ticking(limit):
            asyncio.get_running_loop().call_soon(meddle)
        else:
            limit.pause()
            limit.resume()

    meddle_soon = asyncio.get_running_loop().call_later(0.005, meddle)
    async with asyncio.timeout(10):
        with pytest.raises(TimeoutError), limit:
            await for_ever()
    assert limit.expired
    meddle_soon.cancel()


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("patient", [False, True])
async def test_what_a_late_task_has_goes_with_the_task(*, patient: bool) -> None:
    gone: list[weakref.ref[asyncio.Event]] = []

    async def late() -> None:
        limit, own = Limit(0.002, patient=patient), asyncio.Event()
        gone.append(weakref.ref(own))
        with limit:
            await for_ever()

    task = asyncio.create_task(late())
    await asyncio.wait([task])
    assert isinstance(task.exception(), TimeoutError)
    del task
    await settle()
    assert gone[0]() is None
