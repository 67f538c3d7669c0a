"""Threads for C calls that can block: the Reaper for destroys, `call_blocking` for the rest.

Destroying a queue pair can take 50 seconds on Soft-RoCE while packets sit in a queue, and
registering memory takes time with its size.  Neither may happen on the loop's thread, and none
of it may keep the interpreter from exiting: the threads are daemons, which is why
concurrent.futures, whose threads are joined at exit, is not used.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

__all__ = ["WorkerPool", "call_blocking", "connecting", "reaper"]

T = TypeVar("T")
_Job = tuple[Callable[[], Any], "Future[Any]"]
_log = logging.getLogger("aiordma")


class WorkerPool:
    """At most `limit` daemon threads, started on demand, that run jobs in order of submission."""

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._limit = limit
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._threads = 0
        self._unfinished = 0
        self._idle = threading.Condition(self._lock)

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Run `job` in a thread of the pool; the future belongs to `concurrent.futures`."""
        future: Future[T] = Future()
        with self._lock:
            self._unfinished += 1
            start = self._unfinished > self._threads and self._threads < self._limit
            if start:
                self._threads += 1
        self._jobs.put((job, future))
        if start:
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        return future

    def _work(self) -> None:
        while True:
            # In a function of its own: a worker must not keep the last job's objects, such as
            # registered memory, alive while it waits for the next.
            _run(*self._jobs.get())
            with self._idle:
                self._unfinished -= 1
                if not self._unfinished:
                    self._idle.notify_all()

    def drain(self, timeout: float) -> bool:
        """Block until every submitted job is done, at most `timeout` seconds; False if not."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._unfinished, timeout)


def _run(job: Callable[[], Any], future: Future[Any]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            result = job()
        except BaseException as exc:
            future.set_exception(exc)
        else:
            future.set_result(result)
    # A failure has this frame in its traceback.
    del job, future


# A destroy can take 50 seconds and a connect to a dead host minutes: each kind has threads of its
# own, enough that a few that are stuck do not stop the others.
reaper = WorkerPool("aiordma-reaper", 16)
connecting = WorkerPool("aiordma-connect", 16)
_blocking = WorkerPool("aiordma-blocking", 4)


def _after_fork() -> None:
    reaper._reset()
    connecting._reset()
    _blocking._reset()


os.register_at_fork(after_in_child=_after_fork)


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
        undo: Gives back what `function` made, should nobody be left to take it.
        timeout: Seconds; None waits as long as the surrounding code does.
        pool: Threads to use instead of the ordinary ones.

    Raises:
        TimeoutError: The call goes on; its late result is undone in the thread.

    Cancellation: likewise, the late result is undone.
    """
    inner = (pool or _blocking).submit(function)
    waiter = asyncio.wrap_future(inner)
    try:
        async with asyncio.timeout(timeout):
            return await asyncio.shield(waiter)
    except BaseException:
        if not (inner.done() and inner.exception() is not None):
            waiter.cancel()
            inner.add_done_callback(lambda done: _undo(done, undo))
        raise


def _undo(done: Future[T], undo: Callable[[T], object]) -> None:
    if done.cancelled() or done.exception() is not None:
        return
    try:
        undo(done.result())
    except Exception:
        _log.exception("undoing an abandoned call failed")
