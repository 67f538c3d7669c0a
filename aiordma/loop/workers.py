"""Threads for C calls that can block: `reaper` for destroys, `call_blocking` for the rest.

Destroying a queue pair can take 50 seconds on Soft-RoCE while packets sit in a queue, and
registering memory takes time with its size.  Neither may happen on the loop's thread, and neither
may keep the interpreter from exiting.  `concurrent.futures.ThreadPoolExecutor` joins its threads
at exit, however long their calls take; the threads here are daemons.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from aiordma.errors import errno_error
from aiordma.logs import log_of
from aiordma.loop import fork
from aiordma.loop.limit import Limit

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


class Call(Generic[T]):
    """A call that a thread is to make.

    Args:
        future: Gets the result or the exception.
        function: The call.
    """

    __slots__ = ("function", "future")

    def __init__(self, future: Future[T], function: Callable[[], T]) -> None:
        self.future: Future[T] = future
        self.function: Callable[[], T] | None = function

    def make(self) -> None:
        """Make the call, and set the future."""
        function, self.function = self.function, None
        assert function is not None
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = function()
        except StopIteration as exc:  # which no future of asyncio takes
            del function
            error = RuntimeError("a call in a thread raised StopIteration")
            error.__cause__ = exc
            self.future.set_exception(error)
            del error
        except BaseException as exc:
            del function
            self.future.set_exception(exc)
        else:
            # First: the waiting task goes on at once, and may close memory that the call refers to.
            del function
            self.future.set_result(result)
        finally:
            del self  # an exception of the call has this frame in its traceback


class WorkerPool:
    """At most `limit` daemon threads, started on demand, that make calls in the order of `submit`.

    Args:
        name: Name of the threads.
        limit: The most threads.
        inline: What happens if the pool has no thread and none can be started.  True: `submit`
            makes the call itself, before it returns; for calls that release resources, which have
            to be made.  False: the call fails with EAGAIN.
    """

    #: Seconds after which a thread that has nothing to do ends: tests of programs look for threads
    #: that are left over, and wait a second or more for them.
    idle_s: float = 0.5

    def __init__(self, name: str, limit: int, *, inline: bool = False) -> None:
        self._name = name
        self._limit = limit
        self._inline = inline
        self._reset()

    def _reset(self) -> None:
        # No Python function is called under the lock: the collector could run there, and a
        # finalizer that submits a call would wait for the lock for ever.
        self._lock = threading.Lock()
        self._calls: queue.SimpleQueue[Call[Any]] = queue.SimpleQueue()
        self._threads = 0
        self._unfinished = 0

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Have a thread call `function`; the result or exception is that of the future."""
        future: Future[T] = Future()
        call = Call(future, function)
        counted = put = start = False
        thread: threading.Thread | None = None
        try:
            with self._lock:
                start = self._threads <= self._unfinished and self._threads < self._limit
                self._unfinished += 1
                self._threads += start
            counted = True
            self._calls.put(call)
            put = True
            if start:
                thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                thread.start()
        except BaseException as exc:
            if not counted:
                raise
            with self._lock:
                self._unfinished -= not put
                # A signal handler may have raised when the thread had begun.
                self._threads -= start and (thread is None or thread.ident is None)
                left = self._threads
            if not put or not isinstance(exc, RuntimeError | MemoryError):
                raise
            if not left:
                self._do_without_threads(exc)
        return future

    def _do_without_threads(self, reason: Exception) -> None:
        """Make the calls that wait for a thread here, or refuse them."""
        refuse = None if self._inline else lambda: _refuse(reason)
        with contextlib.suppress(queue.Empty):
            while True:
                self._make_next_call(0, refuse)

    def _work(self) -> None:
        while True:
            try:
                self._make_next_call(self.idle_s)
            except queue.Empty:
                with self._lock:
                    # The thread goes on if a call has come meanwhile that counts on it.
                    if self._unfinished < self._threads:
                        self._threads -= 1
                        return
            except BaseException:  # of a callback: a thread that ended here would be counted still
                _log.exception("what follows a call in a thread failed")

    def _make_next_call(self, timeout: float, instead: Callable[[], Any] | None = None) -> None:
        """Make the next call, or call `instead`, which raises its exception.

        In a function of its own: a thread that waits must not keep the last call's objects, such
        as registered memory, alive.

        Raises:
            queue.Empty: No call has come in `timeout` seconds.
        """
        call = self._calls.get(timeout=timeout)
        if instead is not None:
            call.function = instead
        try:
            call.make()
        finally:
            del call
            with self._lock:
                self._unfinished -= 1

    @property
    def unfinished(self) -> int:
        """Calls that are being made, or wait for a thread.  In any thread."""
        return self._unfinished


def _refuse(reason: Exception) -> Any:
    hint = "is the limit of processes or of memory reached? see `ulimit -u` and `-v`"
    raise errno_error(errno.EAGAIN, f"no thread can be started: {reason}", hint) from reason


# A destroy can take 50 seconds and a connect to a dead host minutes.  Each kind of call has threads
# of its own, and so many that a few calls that hang do not stop the others.
reaper: WorkerPool = WorkerPool("aiordma-reaper", 16, inline=True)
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
    call = (pool or _blocking).submit(function)
    future = asyncio.wrap_future(call)
    try:
        with Limit(timeout, "a call in a thread", "it goes on there: look into `dmesg`"):
            return await future
    except BaseException:
        if future.done() and not future.cancelled():
            future.exception()  # retrieved here, because the task that would do so is canceled
        if not call.cancel():
            call.add_done_callback(lambda done: _undo(done, undo))
        raise
    finally:
        del call, future  # an exception of the call has this frame in its traceback


def _undo(done: Future[T], undo: Callable[[T], object]) -> None:
    if done.exception() is not None:
        return
    try:
        undo(done.result())
    except Exception:
        _log.exception("undoing an abandoned call failed")
