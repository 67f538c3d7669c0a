"""Job: a call that a thread makes, and its outcome.

A Job is a small part of `concurrent.futures.Future`, which a lack of memory may leave without a
result.  Each step of a Job that raises MemoryError can be repeated until it succeeds.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Generic, TypeVar, cast

from aiordma.logs import log_of

__all__ = ["Job"]

T = TypeVar("T")
_log = log_of()


class _State(enum.Enum):
    PENDING = enum.auto()
    RUNNING = enum.auto()
    DONE = enum.auto()
    CANCELED = enum.auto()


class Job(Generic[T]):
    """A call and its outcome.

    Args:
        function: The call; none for an outcome that `finish` sets.
    """

    __slots__ = ("_callbacks", "_error", "_function", "_lock", "_result", "_state")

    def __init__(self, function: Callable[[], T] | None = None) -> None:
        # A lock of C: `with` of a lock in Python may find no memory for the call that releases it.
        self._lock = threading.Lock()
        self._function = function
        self._state = _State.PENDING
        self._callbacks: deque[Callable[[Job[T]], object]] = deque()
        self._result: T | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Call the function, once, unless the job is canceled, and the callbacks.

        An exception of the function is the outcome and is not raised.

        Raises:
            MemoryError: A step found no memory; another call of `run` goes on with it.
        """
        with self._lock:
            if self._state is _State.PENDING:
                self._state = _State.RUNNING
            elif self._state is _State.CANCELED:
                return  # `cancel` calls the callbacks
        if self._function is not None:
            self._call()
        self._tell()
        # The traceback of an outcome refers to this frame, and the frame to the job: a cycle.
        del self

    def _call(self) -> None:
        function, self._function = self._function, None
        assert function is not None
        try:
            self._result = function()
        except BaseException as exc:
            self._error = exc
        del function, self

    def finish(self, error: BaseException | None = None) -> None:
        """Set the outcome of a job without a function: `error`, or None.  In any thread."""
        self._error = error
        self._tell()

    def _tell(self) -> None:
        with self._lock:
            if self._state is not _State.CANCELED:
                self._state = _State.DONE
        callbacks = self._callbacks
        while callbacks:
            self._call_back(callbacks[0])
            callbacks.popleft()

    def _call_back(self, callback: Callable[[Job[T]], object]) -> None:
        try:
            callback(self)
        except MemoryError:
            raise
        except Exception:
            _log.exception("a callback of a job in a thread failed")

    def add_done_callback(self, callback: Callable[[Job[T]], object]) -> None:
        """Have `callback` called with this job in the thread that ends it; here if it is done.

        A callback that raises MemoryError is called again.
        """
        with self._lock:
            if self._state in (_State.PENDING, _State.RUNNING):
                self._callbacks.append(callback)
                return
        self._call_back(callback)

    def cancel(self) -> bool:
        """Cancel the job if its function was not called yet; return whether it is canceled."""
        with self._lock:
            if self._state is _State.PENDING:
                self._state = _State.CANCELED
                self._function = None
        if self._state is _State.CANCELED:
            self._tell()
        return self._state is _State.CANCELED

    @property
    def done(self) -> bool:
        """Whether the job has an outcome or is canceled."""
        return self._state in (_State.DONE, _State.CANCELED)

    def result(self, timeout: float = 0.0) -> T:
        """Block until the job is done, at most `timeout` seconds, and return the function's result.

        Raises:
            TimeoutError: The job is not done yet.
            CancelledError: The job is canceled.
            BaseException: The exception of the function.
        """
        error = self.exception(timeout)
        if error is not None:
            try:
                raise error
            finally:
                del error, self  # the exception has this frame in its traceback
        return cast("T", self._result)

    def exception(self, timeout: float = 0.0) -> BaseException | None:
        """Block as `result` does, and return the function's exception, or None."""
        ended = threading.Event()
        self.add_done_callback(lambda _: ended.set())
        if not ended.wait(timeout):
            raise TimeoutError
        if self._state is _State.CANCELED:
            raise CancelledError
        return self._error

    def future(self) -> asyncio.Future[T]:
        """Return a future of the running loop with the outcome; its cancellation ends no job."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle() -> None:
            if future.done():
                return
            if self._state is _State.CANCELED:
                future.cancel()
            elif self._error is not None:
                future.set_exception(self._error)
            else:
                future.set_result(cast("T", self._result))

        def tell(_: Job[T]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(settle)

        self.add_done_callback(tell)
        return future
