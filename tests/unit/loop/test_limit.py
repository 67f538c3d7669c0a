"""Limit: as asyncio.timeout, whatever ends the block."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any

import pytest

from aiordma.loop.limit import Limit, PatientLimit
from tests.inside.loop import is_ticking

from ..conftest import Run, settle

Kind = Callable[[float | None], AbstractAsyncContextManager[Any]]


class Own:
    """A Limit, entered as asyncio's is."""

    def __init__(self, seconds: float | None) -> None:
        self._limit = Limit(seconds)

    async def __aenter__(self) -> Limit:
        return self._limit.__enter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._limit.__exit__(kind, error, traceback)


@pytest.fixture(params=[asyncio.timeout, Own], ids=["asyncio", "own"])
def kind(request: pytest.FixtureRequest) -> Kind:
    made: Kind = request.param
    return made


async def for_ever() -> None:
    await asyncio.get_running_loop().create_future()


@pytest.mark.parametrize("seconds", [0.002, 0, -5])
def test_the_time_is_up(run: Run, kind: Kind, seconds: float) -> None:
    async def main() -> None:
        task = asyncio.current_task()
        assert task is not None
        with pytest.raises(TimeoutError) as caught:
            async with kind(seconds):
                await for_ever()
        if kind is Own:  # asyncio's has it in some releases of 3.11, and not in others
            assert isinstance(caught.value.__cause__, asyncio.CancelledError)
        assert task.cancelling() == 0
        await asyncio.sleep(0)  # and nothing comes later

    run(main())


def test_one_that_is_up_already_lets_nothing_on(run: Run, kind: Kind) -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with kind(-1):
                await settle()

    run(main())


@pytest.mark.parametrize("seconds", [None, 3600.0])
def test_a_block_that_ends_in_time(run: Run, kind: Kind, seconds: float | None) -> None:
    async def main() -> None:
        async with kind(seconds):
            await asyncio.sleep(0)
        with pytest.raises(LookupError, match="mine"):
            async with kind(seconds):
                raise LookupError("mine")

    run(main())


def test_another_cancellation_is_none_of_its(run: Run, kind: Kind) -> None:
    async def main() -> None:
        begun = asyncio.Event()

        async def work() -> None:
            async with kind(3600.0):
                begun.set()
                await for_ever()

        task = asyncio.create_task(work())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main())


def test_both_at_once_is_a_cancellation(run: Run, kind: Kind) -> None:
    async def main() -> None:
        async def work() -> None:
            me = asyncio.current_task()
            assert me is not None
            async with kind(0.002):
                try:
                    await for_ever()
                finally:
                    me.cancel()

        with pytest.raises(asyncio.CancelledError):
            await asyncio.create_task(work())

    run(main())


@pytest.mark.parametrize(("outer", "inner"), [(0.002, 3600.0), (3600.0, 0.002)])
def test_one_in_another(run: Run, kind: Kind, outer: float, inner: float) -> None:
    async def main() -> None:
        ended: list[str] = []
        try:
            async with kind(outer):
                try:
                    async with kind(inner):
                        await for_ever()
                except TimeoutError:
                    ended.append("inner")
        except TimeoutError:
            ended.append("outer")
        assert ended == ["inner" if inner < outer else "outer"]

    run(main())


def test_it_is_for_a_task(run: Run) -> None:
    async def main() -> None:
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

    run(main())


def test_what_has_arrived_is_returned(run: Run) -> None:
    """The loop was busy past the deadline; the result reaches the block by another task."""

    async def main() -> None:
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

    run(main())


def test_a_patient_limit_that_is_held_in_its_last_turns_ends_all_the_same(run: Run) -> None:
    async def main() -> None:
        limit = PatientLimit(0.01)

        def meddle() -> None:
            if is_ticking(limit):
                asyncio.get_running_loop().call_soon(meddle)
            else:
                limit.hold()
                limit.go_on()

        meddle_soon = asyncio.get_running_loop().call_later(0.005, meddle)
        async with asyncio.timeout(10):
            with pytest.raises(TimeoutError), limit:
                await for_ever()
        assert limit.expired
        meddle_soon.cancel()

    run(main())


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("kind", [Limit, PatientLimit])
def test_what_a_late_task_has_goes_with_the_task(run: Run, kind: type[Limit]) -> None:
    async def main() -> None:
        gone: list[weakref.ref[Own]] = []

        async def late() -> None:
            limit, own = kind(0.002), Own(None)
            gone.append(weakref.ref(own))
            with limit:
                await for_ever()

        task = asyncio.create_task(late())
        await asyncio.wait([task])
        assert isinstance(task.exception(), TimeoutError)
        del task
        await settle()
        assert gone[0]() is None

    run(main())
