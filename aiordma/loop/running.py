"""The loop that runs in this thread, if any: the collector calls finalizers in every thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = [
    "is_canceled",
    "check_loop",
    "check_thread",
    "from_finalizer",
    "resumes_tasks",
    "running_loop",
]


def running_loop() -> asyncio.AbstractEventLoop | None:
    """As `asyncio.get_running_loop`, but None if no loop runs.

    asyncio is asked at each call, because libraries such as trio_asyncio replace its function.
    """
    return asyncio._get_running_loop()


def resumes_tasks(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether tasks that wait for the adapter are to be resumed by `loop.call_soon`.

    Usually the reader of the completion channel resumes them itself, which saves a turn of the
    loop.  But in debug mode a loop names what has held it up, which should be the task and not the
    reader.  And a task that runs the loop in itself, as nest_asyncio allows, must not do so inside
    of the reader: the loop cannot call the reader again before the first call has ended.
    """
    return loop.get_debug() or hasattr(loop, "_nest_patched")


def check_loop(loop: asyncio.AbstractEventLoop, what: str) -> None:
    """Refuse a coroutine that does not run in the loop of its object; `what` names the object.

    Raises:
        RuntimeError: It runs in another loop.
    """
    if asyncio._get_running_loop() is not loop:  # without another call: it is for each request
        raise _foreign(what)


def check_thread(loop: asyncio.AbstractEventLoop, what: str) -> None:
    """Refuse a call while the object's loop runs in another thread; `what` names the object.

    While the loop does not run, a program may close its objects in any thread.

    Raises:
        RuntimeError: The loop runs in another thread.
    """
    if loop.is_running() and running_loop() is not loop:
        raise _foreign(what)


def _foreign(what: str) -> RuntimeError:
    return RuntimeError(
        f"the {what} belongs to another event loop (from another thread, use its "
        "loop.call_soon_threadsafe or asyncio.run_coroutine_threadsafe)"
    )


def from_finalizer(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    """Run `function`, which belongs to `loop`, in the loop's thread.

    The collector calls finalizers in any thread, while the loop's thread may be in the middle of a
    C call on the same connection.  If the loop runs in this thread, or does not run, `function` is
    called at once.
    """
    if loop.is_running() and loop is not running_loop():
        try:
            loop.call_soon_threadsafe(function)
        except RuntimeError:  # the loop was closed in this moment
            function()
    else:
        function()


def is_canceled() -> bool:
    """Whether the running task is being canceled.

    In any other task a CancelledError was not meant for the task: something that it awaited was
    canceled, so it is an error like any other.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
