"""WorkerPool and call_blocking: nothing blocks the loop, nothing late is lost."""

from __future__ import annotations

import _testcapi
import asyncio
import contextlib
import errno
import functools
import gc
import logging
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from aiordma.errors import RdmaError
from aiordma.loop.job import Job
from aiordma.loop.workers import WorkerPool, call_blocking
from tests.inside.loop import jobs_of, set_jobs, threads_of, wait_for_start

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
    assert pool.drain(LIMIT_S)


def test_jobs_start_in_order_and_return_results(pool: WorkerPool) -> None:
    single = WorkerPool("test-single", 1)
    order: list[int] = []
    futures = [single.submit(functools.partial(order.append, n)) for n in range(50)]
    assert single.drain(LIMIT_S)
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
    second: Job[None] = pool.submit(lambda: ran.append(1))
    assert second.cancel()
    gate.go.set()
    assert pool.drain(LIMIT_S)
    assert first.result() == "made"
    assert ran == []


def test_drain_tells_whether_all_is_done(pool: WorkerPool) -> None:
    gate = Gate()
    pool.submit(gate.call)
    assert not pool.drain(0.01)
    gate.go.set()
    assert pool.drain(LIMIT_S)


def test_a_worker_keeps_nothing_of_its_last_job() -> None:
    pool = WorkerPool("test-refs", 1)

    class Thing:
        pass

    thing = Thing()
    ref = weakref.ref(thing)
    future = pool.submit(functools.partial(same, thing))
    assert pool.drain(LIMIT_S)
    assert future.result() is thing
    del thing, future
    gc.collect()
    assert ref() is None


def test_nor_of_one_that_failed() -> None:
    pool = WorkerPool("test-refs", 1)

    class Thing:
        def fail(self) -> None:
            raise ValueError

    thing = Thing()
    ref = weakref.ref(thing)
    gc.disable()  # the exception has its frames, and these must not have the exception
    try:
        future = pool.submit(thing.fail)
        assert pool.drain(LIMIT_S)
        assert isinstance(future.exception(), ValueError)
        del thing, future
        assert ref() is None
    finally:
        gc.enable()


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


def test_call_blocking_returns_the_result_and_lets_the_loop_run(run: Run) -> None:
    async def main() -> None:
        gate = Gate()
        task = asyncio.create_task(call_blocking(gate.call, undo=gate.undo))
        await begun(gate)
        assert not task.done()
        gate.go.set()
        assert await task == "made"
        assert gate.undone == []

    run(main())


def test_call_blocking_raises_what_the_call_raised(run: Run) -> None:
    async def main() -> None:
        gate = Gate(OSError(12, "no memory"))
        gate.go.set()
        with pytest.raises(OSError, match="no memory"):
            await call_blocking(gate.call, undo=gate.undo)
        assert gate.undone == []

    run(main())


def test_a_late_result_is_undone_after_a_timeout(run: Run) -> None:
    async def main() -> None:
        gate = Gate()
        calling = asyncio.create_task(call_blocking(gate.call, undo=gate.undo, timeout=1))
        await begun(gate)
        with pytest.raises(TimeoutError):
            await calling
        assert gate.undone == []
        gate.go.set()
        undone = await asyncio.to_thread(gate.undo_done.wait, LIMIT_S / 2)
        assert undone, "nobody has the result, and it was not given back"
        assert gate.undone == [("made", "aiordma-blocking")]

    run(main())


def test_a_late_result_is_undone_after_a_cancellation(run: Run) -> None:
    async def main() -> None:
        gate = Gate()
        task = asyncio.create_task(call_blocking(gate.call, undo=gate.undo))
        await begun(gate)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.go.set()
        assert await asyncio.to_thread(gate.undo_done.wait, LIMIT_S)
        assert gate.undone == [("made", "aiordma-blocking")]

    run(main())


@pytest.mark.parametrize("timeout", [None, LIMIT_S])
def test_a_cancellation_beside_the_result_gives_it_back_or_hands_it_out(
    run: Run, timeout: float | None
) -> None:
    async def main() -> None:
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

    run(main())


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


def test_an_undo_that_fails_is_logged(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
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

    run(main())
    deadline = time.monotonic() + LIMIT_S
    while "abandoned call failed" not in caplog.text:  # which the thread writes after the undo
        assert time.monotonic() < deadline
        time.sleep(0.001)


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
            pool.submit(functools.partial(done.append, number))
        assert isinstance(caught.value, RdmaError)
        assert caught.value.errno == errno.EAGAIN
        assert "ulimit" in caught.value.hint
    assert pool.drain(0)  # nothing is left unfinished
    no_threads.clear()
    assert pool.submit(lambda: "works").result(LIMIT_S) == "works"
    # Both threads can be had.
    both = threading.Barrier(2, timeout=LIMIT_S)
    waits = [pool.submit(both.wait) for _ in range(2)]
    assert sorted(wait.result(LIMIT_S) for wait in waits) == [0, 1]
    assert pool.drain(LIMIT_S)
    assert done == []


@pytest.mark.parametrize("late", [False, True], ids=["dead", "late"])
def test_g07_a_thread_that_does_not_run_counts_as_not_started(
    monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """One that does not run at all, or one that runs too late."""
    bootstrap = threading.Thread._bootstrap  # type: ignore[attr-defined]
    gate, over = threading.Event(), threading.Event()

    def instead(thread: threading.Thread) -> None:
        if late:
            assert gate.wait(LIMIT_S)
            bootstrap(thread)
        over.set()

    wait_for_start(monkeypatch, 0.01)
    monkeypatch.setattr(threading.Thread, "_bootstrap", instead)
    pool = WorkerPool("test-pool", 1)
    with pytest.raises(OSError, match=r"no thread can be started: .* not run within 0.01 s"):
        pool.submit(lambda: None)
    monkeypatch.undo()
    gate.set()
    assert over.wait(LIMIT_S)
    assert pool.submit(threading.get_ident).result(LIMIT_S) != threading.get_ident()
    assert pool.drain(LIMIT_S)
    assert threads_of(pool) == 1


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
    assert pool.drain(LIMIT_S)


def test_g07_what_gives_back_is_kept_until_there_is_a_thread(
    run: Run, no_threads: list[bool]
) -> None:
    pool = WorkerPool("test-reaper", 2, keep=True)
    pool.retry_s = 0.001
    pool.most_retries = 1 << 30
    order: list[int] = []

    async def main() -> None:
        futures = [pool.submit(functools.partial(order.append, n)) for n in range(3)]
        for _ in range(20):
            await asyncio.sleep(0.001)  # tries that fail
        assert order == []
        no_threads.clear()
        async with asyncio.timeout(LIMIT_S):
            await asyncio.gather(*(job.future() for job in futures))

    run(main())
    assert order == [0, 1, 2]
    assert pool.drain(LIMIT_S)


def test_g07_without_a_loop_it_is_done_at_once(no_threads: list[bool]) -> None:
    pool = WorkerPool("test-reaper", 2, keep=True)
    assert pool.submit(lambda: "here").result(0) == "here"
    assert pool.drain(0)


def test_g07_a_loop_that_ends_leaves_the_rest_to_drain(run: Run, no_threads: list[bool]) -> None:
    pool = WorkerPool("test-reaper", 2, keep=True)
    order: list[int] = []

    async def main() -> None:
        pool.submit(lambda: order.append(1))

    run(main())
    assert order == []
    assert pool.drain(0)
    assert order == [1]


def test_g07_without_a_thread_for_long_the_loop_does_it_a_job_a_turn(
    run: Run,
    no_threads: list[bool],
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = WorkerPool("test-reaper", 2, keep=True)
    pool.retry_s = 0.001
    here: list[int] = []

    async def main() -> None:
        jobs = [pool.submit(lambda: here.append(threading.get_ident())) for _ in range(3)]
        async with asyncio.timeout(LIMIT_S):
            await asyncio.gather(*(job.future() for job in jobs))

    run(main())
    assert here == [threading.get_ident()] * 3
    assert [record.message.split(":")[0] for record in caplog.records] == ["test-reaper"]
    assert pool.drain(0)


def test_g07_a_later_loop_tries_again(run: Run, no_threads: list[bool]) -> None:
    pool = WorkerPool("test-reaper", 1, keep=True)
    pool.retry_s = 0.001
    pool.most_retries = 1 << 30

    async def first() -> None:
        pool.submit(lambda: None)

    async def second() -> None:
        future = pool.submit(lambda: "done")
        await asyncio.sleep(0.01)
        no_threads.clear()
        async with asyncio.timeout(LIMIT_S):
            assert await future.future() == "done"

    run(first())
    run(second())
    assert pool.drain(LIMIT_S)


def test_g07_a_call_that_got_no_thread_was_not_made(run: Run, no_threads: list[bool]) -> None:
    pool = WorkerPool("test-pool", 1)
    gate = Gate()

    async def main() -> None:
        with pytest.raises(OSError, match="no thread can be started"):
            await call_blocking(gate.call, undo=gate.undo, pool=pool)

    run(main())
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


def test_g07_a_thread_outlives_memory_that_it_cannot_have(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = jobs_of(pool)
    failures = iter(range(3))
    failed = threading.Event()

    class Short:
        """A queue whose first calls find no memory."""

        put = jobs.put

        def get(self, timeout: float) -> object:
            if next(failures, None) is not None:
                raise MemoryError
            failed.set()
            return jobs.get(timeout=timeout)

    set_jobs(monkeypatch, pool, Short())
    threads = set()
    for _ in range(2):
        threads.add(pool.submit(threading.current_thread).result(LIMIT_S))
    assert failed.is_set()
    assert len(threads) == 1
    assert all(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("first", range(48))
def test_g07_a_job_is_done_and_counted_off_whatever_memory_is_refused(first: int) -> None:
    """One allocation of the thread that runs the jobs, whichever it is."""
    pool = WorkerPool("test-short", 1)
    pool.idle_s = LIMIT_S
    gate = threading.Lock()
    gate.acquire()

    def call() -> str:
        gate.acquire()
        _testcapi.set_nomemory(first, first + 1)
        return "made"

    jobs = [pool.submit(call), pool.submit(lambda: "next")]
    ended = threading.Lock()
    ended.acquire()

    def end(_: object) -> None:
        _testcapi.remove_mem_hooks()
        ended.release()

    jobs[1].add_done_callback(end)
    gate.release()
    # In C meanwhile: this thread asks for no memory.
    assert ended.acquire(timeout=LIMIT_S)
    assert pool.drain(LIMIT_S)
    assert jobs[0].result() == "made"
    with contextlib.suppress(MemoryError):  # of the call itself
        assert jobs[1].result() == "next"
    assert pool.submit(lambda: "works").result(LIMIT_S) == "works"


def test_h07_a_job_that_meets_threads_that_end() -> None:
    """Whichever comes first: every job is run."""
    pool = WorkerPool("test-meeting", 2)
    pool.idle_s = 1e-6
    for number in range(2000):
        assert pool.submit(functools.partial(same, number)).result(10) == number
    assert pool.drain(10)
