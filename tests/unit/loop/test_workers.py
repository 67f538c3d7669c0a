"""WorkerPool and call_blocking: nothing blocks the loop, nothing late is lost."""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from aiordma.errors import RdmaError
from aiordma.loop.workers import WorkerPool, call_blocking
from tests.inside.loop import all_done, threads_of

from ..conftest import LIMIT_S, Run, settle


class Gate:
    """A blocking call that ends when it is told to."""

    def __init__(self, result: object = "made") -> None:
        self.result = result
        self.begun = threading.Event()
        self.go = threading.Event()
        self.undone: list[tuple[object, str]] = []
        self.undo_done = threading.Event()

    def call(self) -> object:
        self.begun.set()
        assert self.go.wait(LIMIT_S)
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result

    def undo(self, result: object) -> None:
        self.undone.append((result, threading.current_thread().name))
        self.undo_done.set()


async def begun(gate: Gate) -> None:
    assert await asyncio.to_thread(gate.begun.wait, LIMIT_S)


def same(thing: Any) -> Any:
    return thing


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool("test-pool", 2)
    yield pool
    assert all_done(pool, LIMIT_S)


def test_jobs_start_in_order_and_return_results(pool: WorkerPool) -> None:
    single = WorkerPool("test-single", 1)
    order: list[int] = []
    futures = [single.submit(functools.partial(order.append, n)) for n in range(50)]
    assert all_done(single, LIMIT_S)
    assert order == list(range(50))
    assert all(future.done for future in futures)
    assert pool.submit(lambda: 42).result(LIMIT_S) == 42


def test_never_more_threads_than_the_limit() -> None:
    pool = WorkerPool("test-limit", 2)
    gates = [Gate() for _ in range(5)]
    futures = [pool.submit(gate.call) for gate in gates]
    assert gates[0].begun.wait(LIMIT_S)
    assert gates[1].begun.wait(LIMIT_S)
    threads = [t for t in threading.enumerate() if t.name == "test-limit"]
    assert len(threads) == 2
    assert all(thread.daemon for thread in threads)
    assert not gates[2].begun.is_set()
    for gate in gates:
        gate.go.set()
    assert [future.result(LIMIT_S) for future in futures] == ["made"] * 5


def test_a_failed_job_fails_its_future_and_nothing_else(pool: WorkerPool) -> None:
    def fail() -> None:
        raise OSError(16, "busy")

    assert isinstance(pool.submit(fail).exception(LIMIT_S), OSError)
    assert pool.submit(lambda: 1).result(LIMIT_S) == 1


def test_a_job_that_was_cancelled_before_it_began_is_not_run() -> None:
    pool = WorkerPool("test-cancel", 1)
    gate, ran = Gate(), []
    first = pool.submit(gate.call)
    assert gate.begun.wait(LIMIT_S)
    second: Future[None] = pool.submit(lambda: ran.append(1))
    assert second.cancel()
    gate.go.set()
    assert all_done(pool, LIMIT_S)
    assert first.result() == "made"
    assert ran == []


@pytest.mark.parametrize("fails", [False, True])
def test_a_job_is_dropped_before_its_end_is_told(fails: bool) -> None:
    """Who waits may close the memory at once, which fails while anything refers to it."""
    pool = WorkerPool("test-refs", 1)
    gate = Gate()

    class Thing:
        def job(self) -> None:
            if fails:
                raise ValueError

    thing = Thing()
    ref = weakref.ref(thing)
    told: list[bool] = []

    def tell(future: Future[None]) -> None:
        if (failure := future.exception()) is not None:
            traceback.clear_frames(failure.__traceback__)
        told.append(ref() is None)

    before = pool.submit(gate.call)
    future = pool.submit(thing.job)
    future.add_done_callback(tell)
    del thing
    gate.go.set()
    assert all_done(pool, LIMIT_S)
    assert before.result() == "made"
    assert told == [True]


def test_a_job_under_way_does_not_keep_the_interpreter() -> None:
    code = (
        "import threading\n"
        "from aiordma.loop.workers import reaper\n"
        "reaper.submit(threading.Event().wait)\n"
        "print('end')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, text=True, timeout=LIMIT_S
    )
    assert done.stdout == "end\n"
    assert done.stderr == ""


async def test_call_blocking_returns_the_result_and_lets_the_loop_run() -> None:
    gate = Gate()
    task = asyncio.create_task(call_blocking(gate.call, undo=gate.undo))
    await begun(gate)
    assert not task.done()
    gate.go.set()
    assert await task == "made"
    assert gate.undone == []


async def test_call_blocking_raises_what_the_call_raised() -> None:
    gate = Gate(OSError(12, "no memory"))
    gate.go.set()
    with pytest.raises(OSError, match="no memory"):
        await call_blocking(gate.call, undo=gate.undo)
    assert gate.undone == []


@pytest.mark.parametrize("how", ["timeout", "cancellation"])
async def test_a_late_result_is_undone(how: str) -> None:
    gate = Gate()
    timeout = 1 if how == "timeout" else None
    task = asyncio.create_task(call_blocking(gate.call, undo=gate.undo, timeout=timeout))
    await begun(gate)
    if how == "cancellation":
        task.cancel()
    with pytest.raises((TimeoutError, asyncio.CancelledError)):
        await task
    assert task.cancelled() == (how == "cancellation")
    assert gate.undone == []
    gate.go.set()
    undone = await asyncio.to_thread(gate.undo_done.wait, LIMIT_S / 2)
    assert undone, "nobody has the result, and it was not given back"
    assert gate.undone == [("made", "aiordma-blocking")]


@pytest.mark.parametrize("timeout", [None, LIMIT_S])
async def test_a_cancellation_beside_the_result_gives_it_back_or_hands_it_out(
    timeout: float | None,
) -> None:
    for rounds in range(4):
        gate = Gate()
        task = asyncio.create_task(call_blocking(gate.call, undo=gate.undo, timeout=timeout))
        await begun(gate)
        gate.go.set()
        await settle(rounds)  # the result arrives in one of the rounds, or in none
        if not task.cancel():
            assert task.result() == "made"
            continue
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(gate.undo_done.wait, LIMIT_S)
        assert [result for result, _ in gate.undone] == ["made"]


def test_a_late_failure_is_nobodys(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        gate = Gate(OSError(5, "late"))
        task = asyncio.create_task(call_blocking(gate.call, undo=gate.undo))
        await begun(gate)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.go.set()
        # Four threads take jobs; one job on each means that ours is over.
        ends = [call_blocking(lambda: None, undo=lambda _: None) for _ in range(4)]
        await asyncio.gather(*ends)
        assert gate.undone == []

    with caplog.at_level(logging.ERROR):
        run(main())
    assert caplog.records == []


async def test_an_undo_that_fails_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate()

    def undo(result: object) -> None:
        gate.undo(result)
        raise OSError(16, "busy")

    task = asyncio.create_task(call_blocking(gate.call, undo=undo))
    await begun(gate)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.go.set()
    assert await asyncio.to_thread(gate.undo_done.wait, LIMIT_S)
    deadline = time.monotonic() + LIMIT_S
    while "abandoned call failed" not in caplog.text:  # which the thread writes after the undo
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)


# ---- threads that cannot be started ---------------------------------------------------------


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """While the list is not empty no thread of a pool can be started."""
    failing = [True]
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if failing:
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    return failing


def test_g07_failed_starts_do_not_use_up_the_pool(no_threads: list[bool]) -> None:
    pool = WorkerPool("test-pool", 2)
    done: list[int] = []
    for number in range(6):
        with pytest.raises(OSError, match="no thread can be started") as caught:
            pool.submit(functools.partial(done.append, number)).result(0)
        assert isinstance(caught.value, RdmaError)
        assert caught.value.errno == errno.EAGAIN
        assert "ulimit" in caught.value.hint
    assert all_done(pool, 0)  # nothing is left unfinished
    no_threads.clear()
    assert pool.submit(lambda: "works").result(LIMIT_S) == "works"
    # Both threads can be had.
    both = threading.Barrier(2, timeout=LIMIT_S)
    waits = [pool.submit(both.wait) for _ in range(2)]
    assert sorted(wait.result(LIMIT_S) for wait in waits) == [0, 1]
    assert all_done(pool, LIMIT_S)
    assert done == []


def test_g07_one_thread_does_the_work_of_those_that_did_not_start(no_threads: list[bool]) -> None:
    pool = WorkerPool("test-pool", 4)
    gate = Gate()
    no_threads.clear()
    first = pool.submit(gate.call)
    assert gate.begun.wait(LIMIT_S)
    no_threads.append(True)
    later = [pool.submit(functools.partial(same, n)) for n in range(3)]
    gate.go.set()
    assert first.result(LIMIT_S) == "made"
    assert [each.result(LIMIT_S) for each in later] == [0, 1, 2]
    assert all_done(pool, LIMIT_S)


async def test_g07_what_has_to_be_made_is_made_without_a_thread(no_threads: list[bool]) -> None:
    pool = WorkerPool("test-reaper", 2, inline=True)
    assert pool.submit(threading.get_ident).result(0) == threading.get_ident()
    call = asyncio.wrap_future(pool.submit(threading.get_ident))
    async with asyncio.timeout(LIMIT_S):
        assert await call == threading.get_ident()
    assert threads_of(pool) == pool.unfinished == 0


@pytest.mark.parametrize("inline", [True, False], ids=["made", "refused"])
def test_g07_calls_that_counted_on_a_thread_that_fails_do_not_wait(
    monkeypatch: pytest.MonkeyPatch, inline: bool
) -> None:
    """Another thread submits a call while the only thread that may be had does not start."""
    pool = WorkerPool("test-pool", 1, inline=inline)
    other: list[Future[str]] = []

    def start(_: threading.Thread) -> None:
        other.append(pool.submit(lambda: "other"))
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    first = pool.submit(lambda: "first")
    for call, result in ((first, "first"), (other[0], "other")):
        assert call.done()
        if inline:
            assert call.result(0) == result
        else:
            with pytest.raises(OSError, match="no thread can be started"):
                call.result(0)
    assert threads_of(pool) == pool.unfinished == 0


async def test_g07_a_call_that_got_no_thread_was_not_made(no_threads: list[bool]) -> None:
    pool = WorkerPool("test-pool", 1)
    gate = Gate()
    with pytest.raises(OSError, match="no thread can be started"):
        await call_blocking(gate.call, undo=gate.undo, pool=pool)
    assert not gate.begun.is_set()
    assert gate.undone == []


def test_h07_threads_with_nothing_to_do_end() -> None:
    pool = WorkerPool("test-idle", 3)
    pool.idle_s = 0.01

    def threads() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "test-idle"]

    for _ in range(3):
        together = threading.Barrier(3)
        for future in [pool.submit(together.wait) for _ in range(3)]:
            future.result(10)
        for thread in threads():
            thread.join(10)
        assert not threads()
        assert threads_of(pool) == 0


def test_h07_a_job_that_meets_threads_that_end() -> None:
    """Whichever comes first: every job is run."""
    pool = WorkerPool("test-meeting", 2)
    pool.idle_s = 1e-6
    for number in range(2000):
        assert pool.submit(functools.partial(same, number)).result(10) == number
    assert all_done(pool, 10)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_call_that_cannot_be_submitted_counts_no_thread(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    pool = WorkerPool("test-raised", 1)

    def raised(*_: object, **__: object) -> None:
        monkeypatch.undo()
        raise error

    monkeypatch.setattr(threading, "Thread", raised)
    if error is KeyboardInterrupt:
        with pytest.raises(error):
            pool.submit(lambda: 1)
    else:
        assert isinstance(pool.submit(lambda: 1).exception(LIMIT_S), OSError)
    assert pool.submit(lambda: 2).result(LIMIT_S) == 2
    assert all_done(pool, LIMIT_S)


def test_a_callback_that_would_end_its_thread(caplog: pytest.LogCaptureFixture) -> None:
    pool = WorkerPool("test-callback", 1)
    gate = Gate()

    def leave(_: Future[Any]) -> None:
        raise SystemExit

    pool.submit(gate.call).add_done_callback(leave)
    gate.go.set()
    assert pool.submit(lambda: 2).result(LIMIT_S) == 2
    assert all_done(pool, LIMIT_S)
    assert "what follows a call in a thread failed" in caplog.text


async def test_a_call_that_raises_stop_iteration() -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        await call_blocking(lambda: next(iter(())), undo=same, timeout=LIMIT_S)
