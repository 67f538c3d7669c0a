"""Tasks that no task of the program waits for end with the loop, whenever they begin."""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import weakref
from collections.abc import AsyncGenerator, Callable

import pytest

from aiordma.loop import background
from tests.inside.loop import give_the_end

from ..conftest import LOOPS


class Owner:
    """Refers to its loop, which refers to it, as what the registry shares does."""

    loop: asyncio.AbstractEventLoop


class Work:
    """What such a task does: it waits until it is canceled, and notes how it went."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def run(self) -> None:
        self.calls.append("begun")
        try:
            await asyncio.Event().wait()
        finally:
            self.calls.append("ended")


@pytest.mark.parametrize("name", list(LOOPS))
def test_a02_a_task_that_begins_while_all_are_canceled_ends_with_the_loop(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    works = [Work() for _ in range(3)]

    async def canceled() -> None:
        loop = asyncio.get_running_loop()
        try:
            await asyncio.Event().wait()
        finally:
            background.start(loop, works[0].run)
            # Too late to take a step before the loop is told to end.
            asyncio.get_running_loop().call_soon(background.start, loop, works[1].run)

    async def main() -> asyncio.AbstractEventLoop:
        asyncio.get_running_loop().slow_callback_duration = 60  # a busy machine is no news
        background.prepare()
        background.prepare()
        kept.append(asyncio.create_task(canceled()))
        await asyncio.sleep(0)
        return asyncio.get_running_loop()

    kept: list[asyncio.Task[None]] = []
    with caplog.at_level(logging.WARNING):
        with asyncio.Runner(loop_factory=LOOPS[name]) as runner:
            loop = runner.run(main())
        kept.clear()
        gc.collect()
    assert not caplog.records
    assert works[0].calls == ["begun", "ended"]
    assert works[1].calls in ([], ["begun", "ended"])
    assert background.start(loop, works[2].run) is None
    assert not works[2].calls


@pytest.mark.parametrize("name", list(LOOPS))
def test_a02_what_is_closing_is_told_of_the_end(name: str) -> None:
    told: list[int] = []
    functions: list[Callable[[], None]] = [functools.partial(told.append, n) for n in range(3)]

    async def main() -> asyncio.AbstractEventLoop:
        background.prepare()
        loop = asyncio.get_running_loop()
        assert all(background.at_end(loop, function) for function in functions)
        background.forget(loop, functions[1])
        background.forget(loop, functions[1])
        return loop

    with asyncio.Runner(loop_factory=LOOPS[name]) as runner:
        loop = runner.run(main())
        assert not told
    assert told == [0, 2]
    assert not background.at_end(loop, functions[1])


class Stream:
    """Delivers in a task that it begins in its first turn, as streams do."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    async def _deliver(self) -> None:
        self.log.append("begins")
        loop = asyncio.get_running_loop()
        task = background.start(loop, self._wait, cancel=False)
        assert task is not None, "the loop takes no task any more"
        await asyncio.wait([task])
        await self._wait()  # longer than its task takes
        self.log.append("delivered")

    async def _wait(self) -> None:
        arrived = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.02, arrived.set_result, None)
        await arrived


@pytest.mark.parametrize("name", list(LOOPS))
def test_h02_streams_deliver_before_the_loop_is_closed(name: str) -> None:
    log: list[str] = []
    work = Work()

    class Failing(Stream):
        async def _deliver(self) -> None:
            raise OSError

    async def main() -> list[Stream]:
        background.prepare()
        loop = asyncio.get_running_loop()
        streams = [Stream(log), Failing(log), Stream(log), Stream(log)]
        for stream in streams:
            background.deliver_at_end(loop, stream)
        del stream, streams[-1]
        background.at_end(loop, lambda: log.append("closing"))
        background.start(loop, work.run)
        return streams

    with asyncio.Runner(loop_factory=LOOPS[name]) as runner:
        streams = runner.run(main())
        gc.collect()
        assert not log
    assert log == ["closing", "begins", "begins", "delivered", "delivered"]
    assert work.calls == ["begun", "ended"]
    assert len(streams) == 3


@pytest.mark.parametrize("name", list(LOOPS))
def test_a02_a_loop_that_is_closed_at_once_complains_of_no_task(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    work = Work()
    owners: list[weakref.ref[Owner]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.slow_callback_duration = 60  # a busy machine is no news
        background.prepare()
        background.start(loop, work.run)
        owner = Owner()
        owner.loop = loop
        loop.owner = owner  # type: ignore[attr-defined]
        owners.append(weakref.ref(owner))
        await asyncio.sleep(0)

    with caplog.at_level(logging.WARNING):
        loop = LOOPS[name]()
        loop.run_until_complete(main())
        loop.close()
        del loop
        gc.collect()
    assert not caplog.records
    assert work.calls == ["begun", "ended"]
    assert owners[0]() is None, "the loop is kept alive"


def test_ctrl_c_that_hits_a_task_is_not_reported_a_second_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def hit() -> None:
        raise KeyboardInterrupt

    async def fails() -> None:
        raise ZeroDivisionError

    async def main() -> None:
        background.prepare()
        loop = asyncio.get_running_loop()
        loop.slow_callback_duration = 60  # a busy machine is no news
        background.start(loop, fails)
        background.start(loop, hit)
        await asyncio.Event().wait()

    with caplog.at_level(logging.WARNING):
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(main())
        gc.collect()
    (record,) = caplog.records
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError, "other exceptions still are"


@pytest.mark.parametrize("name", list(LOOPS))
@pytest.mark.parametrize("limit_s", [10.0, 0.05])
def test_what_the_program_closes_comes_before_the_end(
    name: str, limit_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its generators are closed at the same time, and may still use the library; in their time."""
    give_the_end(monkeypatch, limit_s)
    calls: list[str] = []

    class Stream:
        async def _deliver(self) -> None:
            calls.append("delivered")
            go_on.set()

    async def generator() -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            for _ in range(20):
                await asyncio.sleep(0)
            if limit_s < 1:
                await go_on.wait()  # as for a peer that says nothing
            calls.append("closed")

    stream = Stream()
    go_on = asyncio.Event()
    kept = generator()

    async def main() -> None:
        background.prepare()
        background.deliver_at_end(asyncio.get_running_loop(), stream)
        await anext(kept)

    with asyncio.Runner(loop_factory=LOOPS[name]) as runner:
        runner.run(main())
    assert calls == (["closed", "delivered"] if limit_s > 1 else ["delivered", "closed"])
