"""Threads for C calls that can block: the Reaper for destroys, `call_blocking` for the rest.

Destroying a queue pair can take 50 seconds on Soft-RoCE while packets sit in a queue, and
registering memory takes time with its size.  Neither may happen on the loop's thread, and neither
may keep the interpreter from exiting.  So the threads are daemons; concurrent.futures is not used,
because its threads are joined at exit.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from aiordma.errors import errno_error
from aiordma.logs import log_of
from aiordma.loop import fork
from aiordma.loop.job import Job
from aiordma.loop.limit import Limit
from aiordma.loop.running import running_loop

__all__ = [
    "WorkerPool",
    "answering",
    "answering_slowly",
    "call_blocking",
    "connecting",
    "reaper",
]

T = TypeVar("T")
_log = log_of()

#: Seconds in which a thread that the kernel has made must have begun to run.
_START_S = 1.0
#: Seconds until a thread that has found no memory tries again.
_PAUSE_S = 0.01


class _Started(threading.Event):
    """The event for which `Thread.start` waits, with a bound, as all waits of the library have."""

    def wait(self, timeout: float | None = None) -> bool:
        return super().wait(_START_S if timeout is None else timeout)


class WorkerPool:
    """At most `limit` daemon threads, started on demand, that run jobs in order of submission.

    Args:
        name: Name of the threads.
        limit: The most threads.
        keep: If there is no thread and none can be started, a job is not refused but kept: the loop
            tries again for two seconds, and then runs the job itself, since `wait_closed()` has to
            end.  For jobs that release resources.
    """

    #: Seconds after which a thread that has nothing to do ends: tests of programs look for threads
    #: that are left over, and wait a second or more for them.
    idle_s: float = 0.5
    #: Seconds until the loop tries again to start a thread, and tries until it does a job itself.
    retry_s: float = 0.1
    most_retries: int = 20

    def __init__(self, name: str, limit: int, *, keep: bool = False) -> None:
        self._name = name
        self._limit = limit
        self._keep = keep
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[Job[Any]] = queue.SimpleQueue()
        self._threads = 0
        self._late: set[threading.Thread] = set()
        self._unfinished = 0
        self._retrying: asyncio.AbstractEventLoop | None = None
        self._retries = 0
        #: Locks that `drain` waits for.  No Condition: after a MemoryError a step can be repeated.
        self._draining: list[Any] = []

    def submit(self, function: Callable[[], T]) -> Job[T]:
        """Run `function` in a thread of the pool.

        Raises:
            RdmaOSError: EAGAIN, there is no thread, none can be started, and the pool keeps no
                jobs.  The function is not called.
            MemoryError: Likewise.
        """
        job = Job(function)
        with self._lock:
            self._unfinished += 1
            start = self._unfinished > self._threads and self._threads < self._limit
            if start:
                self._threads += 1
        try:
            if start:
                self._start()
        except (RuntimeError, MemoryError) as exc:
            with self._lock:
                self._threads -= 1
                refused = not self._threads and not self._keep
            if refused:
                self._count_off()
                if self._unfinished:  # another call has counted on the thread of this call
                    self._retry_later()
                hint = "is the limit of processes or of memory reached? see `ulimit -u` and `-v`"
                raise errno_error(errno.EAGAIN, f"no thread can be started: {exc}", hint) from exc
        try:
            self._jobs.put(job)
        except MemoryError:
            self._count_off()
            raise
        if not self._threads:
            # Without memory for a timer the next job tries to start a thread, or `drain` runs it.
            with contextlib.suppress(MemoryError):
                self._retry_later()
        return job

    def _start(self) -> None:
        thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        started = thread._started = _Started()  # type: ignore[attr-defined]
        thread.start()
        with self._lock:
            if started.is_set():
                return
            self._late.add(thread)  # if the thread begins late, `_work` ends it
        msg = f"a thread has not run within {_START_S:g} s"
        raise RuntimeError(msg)

    def _retry_later(self) -> None:
        """Start a thread for kept jobs later, by the running loop; without a loop run them here."""
        loop = running_loop()
        if loop is None:
            self._run_kept()
        elif self._retrying is not loop:  # another loop may have ended, and tries no more
            self._retrying = loop
            loop.call_later(self.retry_s, self._retry)

    def _retry(self) -> None:
        self._retrying = None
        with self._lock:
            if self._threads or not self._unfinished:
                return
            self._threads += 1
        try:
            self._start()
        except (RuntimeError, MemoryError) as exc:
            with self._lock:
                self._threads -= 1
            self._retries += 1
            if self._retries == self.most_retries:
                _log.warning("%s: the event loop does what a thread would: %s", self._name, exc)
            if self._retries >= self.most_retries:
                self._run_one()
            self._retry_later()
        else:
            self._retries = 0

    def _run_kept(self) -> None:
        while not self._threads and self._run_one():
            pass

    def _run_one(self) -> bool:
        """Run a job in this thread; False if there is none."""
        try:
            self._do_next(0)
        except queue.Empty:
            return False
        return True

    def _work(self) -> None:
        thread = threading.current_thread()
        with self._lock:
            if thread in self._late:
                self._late.remove(thread)
                return
        del thread
        going = True
        while going:
            try:
                going = self._work_on()
            except MemoryError:  # if it ended the thread, the thread would be counted for ever
                time.sleep(_PAUSE_S)

    def _work_on(self) -> bool:
        """Run the next job; False if none has come for `idle_s`, and the thread is to end."""
        try:
            self._do_next(self.idle_s)
        except queue.Empty:
            with self._lock:
                # The thread goes on if a job has come meanwhile that counts on it.
                if self._unfinished < self._threads:
                    self._threads -= 1
                    return False
        return True

    def _do_next(self, timeout: float) -> None:
        """Run the next job, and count it off, although memory may be refused meanwhile.

        Raises:
            queue.Empty: No job has come in `timeout` seconds.
            MemoryError: No job was taken.
        """
        # In a function of its own: a worker must not keep the last job's objects, such as
        # registered memory, alive while it waits for the next.
        job: Job[Any] | None = self._jobs.get(timeout=timeout)
        counted = False
        while not counted:
            try:
                if job is not None:
                    job.run()
                    job = None
                self._count_off()
                counted = True
            except MemoryError:  # of a step that can be repeated
                time.sleep(_PAUSE_S)

    def _count_off(self) -> None:
        with self._lock:
            self._unfinished -= 1
            if not self._unfinished:
                while self._draining:
                    self._draining.pop().release()

    @property
    def unfinished(self) -> int:
        """Jobs that run, or wait to.  In any thread."""
        return self._unfinished

    def drain(self, timeout: float) -> bool:
        """Block until every submitted job is done, at most `timeout` seconds; False if not.

        Kept jobs are run in this thread, whatever time they take.
        """
        self._run_kept()
        gate = threading.Lock()
        gate.acquire()
        with self._lock:
            if not self._unfinished:
                return True
            self._draining.append(gate)
        if gate.acquire(timeout=timeout):
            return True
        with self._lock:
            if gate in self._draining:
                self._draining.remove(gate)
            return not self._unfinished


# A destroy can take 50 seconds and a connect to a dead host minutes.  Each kind of call has threads
# of its own, and so many that a few calls that hang do not stop the others.
reaper: WorkerPool = WorkerPool("aiordma-reaper", 16, keep=True)
connecting: WorkerPool = WorkerPool("aiordma-connect", 16)
_blocking = WorkerPool("aiordma-blocking", 4)
# Calls that any peer can cause by a datagram: calls that end at once, and calls that may block.
answering: WorkerPool = WorkerPool("aiordma-answer", 2)
answering_slowly: WorkerPool = WorkerPool("aiordma-answer-slow", 2)


def _after_fork() -> None:
    for pool in (reaper, connecting, _blocking, answering, answering_slowly):
        pool._reset()


fork.renew(_after_fork)


async def call_blocking(
    function: Callable[[], T],
    *,
    undo: Callable[[T], object],
    timeout: float | None = None,
    pool: WorkerPool | None = None,
) -> T:
    """Run a C call that may block in a thread and await it.

    Args:
        function: The call.
        undo: Releases the result of `function`, if no task is left to take it.
        timeout: Seconds; None for no limit but the caller's.
        pool: Threads to use instead of the ordinary threads.

    Raises:
        TimeoutError: The call goes on; its late result is undone in the thread.
        RdmaOSError: EAGAIN, no thread can be started; the call was not made.

    Cancellation: likewise, the late result is undone.
    """
    job = (pool or _blocking).submit(function)
    future = job.future()
    try:
        with Limit(timeout, "a call in a thread", "it goes on there: look into `dmesg`"):
            return await future
    except BaseException:
        if future.done() and not future.cancelled():
            future.exception()  # retrieved here, because the task that would do so is canceled
        if not job.cancel():
            job.add_done_callback(lambda done: _undo(done, undo))
        raise
    finally:
        del job, future  # an exception of the call has this frame in its traceback


def _undo(done: Job[T], undo: Callable[[T], object]) -> None:
    if done.exception() is not None:
        return
    try:
        undo(done.result())
    except Exception:
        _log.exception("undoing an abandoned call failed")
