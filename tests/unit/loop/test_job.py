"""Job: an outcome that comes from another thread, once."""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import CancelledError

import pytest

from aiordma.loop.job import Job

from ..conftest import LIMIT_S, Run


def test_its_function_is_called_once() -> None:
    calls: list[int] = []
    job = Job(lambda: calls.append(1))
    assert not job.done
    job.run()
    job.run()
    assert job.done
    assert calls == [1]
    assert not job.cancel()


def test_what_the_function_raises_is_the_outcome() -> None:
    for error in (ValueError("x"), MemoryError(), KeyboardInterrupt()):

        def fail(error: BaseException = error) -> None:
            raise error

        job = Job(fail)
        job.run()
        assert job.exception() is error
        with pytest.raises(type(error)):
            job.result()


def test_who_asks_for_the_result_waits_so_long() -> None:
    job = Job(lambda: 7)
    with pytest.raises(TimeoutError):
        job.result(0.01)
    thread = threading.Timer(0.01, job.run)
    thread.start()
    assert job.result(LIMIT_S) == 7
    thread.join()
    assert job.result() == 7


def test_a_canceled_job_is_not_run() -> None:
    calls: list[object] = []
    job = Job(lambda: calls.append("run"))
    job.add_done_callback(calls.append)
    assert job.cancel()
    assert job.done
    assert job.cancel()
    job.run()
    assert calls == [job]
    with pytest.raises(CancelledError):
        job.result()


def test_callbacks_are_called_before_and_after_the_end(caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: object) -> None:
        raise ValueError

    calls: list[Job[int]] = []
    job = Job(lambda: 1)
    job.add_done_callback(fail)
    job.add_done_callback(calls.append)
    with caplog.at_level(logging.ERROR):
        job.run()
    assert calls == [job]
    assert [record.message for record in caplog.records] == [
        "a callback of a job in a thread failed"
    ]
    job.add_done_callback(calls.append)
    assert calls == [job, job]


def test_g07_a_callback_that_finds_no_memory_is_called_again() -> None:
    failures = iter([True, True])
    calls: list[str] = []

    def first(_: object) -> None:
        if next(failures, False):
            raise MemoryError
        calls.append("first")

    job = Job(lambda: calls.append("run"))
    job.add_done_callback(first)
    job.add_done_callback(lambda _: calls.append("second"))
    for _ in range(2):
        with pytest.raises(MemoryError):
            job.run()
    job.run()
    assert calls == ["run", "first", "second"]


def test_futures_of_loops_have_the_outcome(run: Run) -> None:
    async def main() -> None:
        error = OSError(16, "busy")
        good, bad, canceled = Job(lambda: 1), Job[int](), Job(lambda: 1)
        futures = [job.future() for job in (good, bad, canceled)]
        dropped = good.future()
        dropped.cancel()
        await asyncio.to_thread(good.run)
        await asyncio.to_thread(bad.finish, error)
        assert canceled.cancel()
        async with asyncio.timeout(LIMIT_S):
            await asyncio.wait(futures)
            assert await good.future() == 1
        assert futures[0].result() == 1
        assert futures[1].exception() is error
        assert futures[2].cancelled()
        assert dropped.cancelled()

    run(main())


def test_a_loop_that_is_closed_is_told_nothing() -> None:
    job = Job(lambda: 1)

    async def main() -> None:
        job.future()

    asyncio.run(main())
    job.run()
    assert job.result() == 1
