"""`Drain.resume_by_loop`: the loop resumes the tasks, each in a turn of its own, and not the drain.

So does aiordma in debug mode, in which a loop names a task that holds it up, and where a task may
run the loop in itself (`loop/running.py`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from aiordma.loop.running import resumes_tasks
from aiordma.streams.stream_reader import RdmaStreamReader

from ..conftest import LOOPS, Run, settle
from ..streams.receiving import Stream
from ..streams.test_stream_reader import LIMIT, Transport
from .test_message_waiting import Side
from .test_waiting import give, many
from .test_wakeup import called_by_the_loop

SLOW_S = 0.05


async def resumed(
    log: list[str], work: Callable[[], Any], event: Callable[[], None]
) -> asyncio.Task[None]:
    """A task that waits is resumed by an event, after the drain, and then holds up the loop."""

    async def wait() -> None:
        await work()
        log.append("resumed")
        time.sleep(SLOW_S)  # noqa: ASYNC251 - it blocks the loop

    def drain() -> None:
        event()
        log.append("drained")

    task = asyncio.create_task(wait(), name="the slow one")
    await settle()
    assert not task.done()
    await called_by_the_loop(drain)
    return task


def check_named(caplog: pytest.LogCaptureFixture, log: list[str]) -> None:
    """The task ran after the drain, and the log has its name; on a busy machine others, too."""
    assert log == ["drained", "resumed"]
    slow = [each.getMessage() for each in caplog.records if "took" in each.getMessage()]
    assert any("the slow one" in line for line in slow), slow


@pytest.fixture
def slow(run: Run, caplog: pytest.LogCaptureFixture) -> Run:
    """Runs with a loop that reports callbacks that take longer than half of `SLOW_S`."""

    def run_slow(main: Any) -> Any:
        async def watched() -> None:
            asyncio.get_running_loop().slow_callback_duration = SLOW_S / 2
            caplog.set_level(logging.WARNING, "asyncio")
            await main
            asyncio.get_running_loop().slow_callback_duration = 60

        return run(watched())

    return run_slow


def test_a_receive(slow: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        side, log = Side(), list[str]()
        side.link.drain.resume_by_loop(True)

        def event() -> None:
            side.arrives(b"one")
            side.tell()

        await (await resumed(log, side.recv, event))
        check_named(caplog, log)

    slow(main())


def test_a_send(slow: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        side, log = many(), list[str]()
        side.link.drain.resume_by_loop(True)
        task = await resumed(log, lambda: side.core.send(b"one"), lambda: give(side, 1))
        await task
        check_named(caplog, log)
        assert side.bodies == [b"one"]

    slow(main())


def test_a_stream(slow: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        loop, log = asyncio.get_running_loop(), list[str]()
        stream = Stream("by C", loop)
        stream.open()
        stream.adapter.drain.resume_by_loop(True)
        reader = RdmaStreamReader(limit=LIMIT, loop=loop)
        reader.set_transport(Transport(stream))
        stream.incoming.set_protocol(asyncio.StreamReaderProtocol(reader, loop=loop))
        task = await resumed(log, lambda: reader.readexactly(3), lambda: stream.say(b"one"))
        await task
        check_named(caplog, log)
        stream.free()

    slow(main())


def test_senders_that_come_while_others_are_on_their_way_are_not_forgotten(run: Run) -> None:
    async def main() -> None:
        side = many()
        side.link.drain.resume_by_loop(True)
        first = asyncio.create_task(side.core.send(b"1"))
        await settle()
        late: list[asyncio.Task[None]] = []

        def drain() -> None:
            give(side, 3)
            late.append(asyncio.create_task(side.core.send(b"2")))
            first.cancel()

        await called_by_the_loop(drain)
        await asyncio.wait([first, *late])
        assert first.cancelled()
        assert side.bodies == [b"2"]
        assert side.state.queued == 0

    run(main())


@pytest.mark.parametrize("kind", list(LOOPS))
def test_which_loops_resume_the_tasks(kind: str) -> None:
    loop = LOOPS[kind]()
    try:
        loop.set_debug(False)  # asyncio's own, as the tests' environment has it on
        assert not resumes_tasks(loop)
        loop.set_debug(True)
        assert resumes_tasks(loop)
    finally:
        loop.close()
    patched: Any = SimpleNamespace(get_debug=lambda: False, _nest_patched=True)
    assert resumes_tasks(patched)
