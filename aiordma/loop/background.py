"""The library's own tasks, for which no task of the program waits, and the end of the loop.

`asyncio.run` ends in three steps: it cancels all tasks and waits for them, closes the asynchronous
generators, and closes the loop.  A connection whose peer was canceled in the first step ends after
that step: a task that begins then would be destroyed while it is pending.  So each loop gets an
asynchronous generator that does nothing until the second step.  Then it acts, in this order:

0.  It waits for the program's own generators, which asyncio closes at the same time: their last
    blocks may still ask a peer, and hear from it.
1.  Datagram transports that are closing, which have no task, end at once (`at_end`).
2.  Streams begin to deliver the bytes that their adapters have (`deliver_at_end`).  For TCP the
    kernel does so, whatever becomes of the process; a queue pair ends with its process.
3.  From here on `start` begins no task any more; the tasks that it has begun are canceled.
4.  The generator waits for these tasks and for the streams, and then the loop is closed.

If a program closes its loop without the second step, the tasks are collected with the loop, and
finalizers do their work.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextvars import Context
from typing import Any, Protocol, TypeVar

from aiordma.loop.raised import ENDS_THE_LOOP
from aiordma.loop.running import running_loop

__all__ = ["Delivering", "at_end", "deliver_at_end", "forget", "prepare", "start", "stay"]

T = TypeVar("T")

_ATTRIBUTE = "_aiordma_background"
#: Seconds in which tasks that were canceled have to end.
_END_S = 10.0


class Delivering(Protocol):
    """A stream, for `deliver_at_end`."""

    async def _deliver(self) -> None:
        """Wait until the posted bytes have arrived, in bounded time."""


class _Background:
    """The tasks of the running loop."""

    __slots__ = (
        "_guard", "_loop", "closing", "delivering", "ended", "gone", "over", "patient", "tasks",
    )  # fmt: skip

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self.ended = False
        self.tasks: set[asyncio.Task[Any]] = set()
        self.over: Callable[[asyncio.Task[Any]], None] = functools.partial(_over, self.tasks)
        self.patient: set[asyncio.Task[Any]] = set()  # tasks of `tasks` that are not canceled
        self.closing: dict[Callable[[], None], None] = {}
        self.delivering: set[weakref.ref[Delivering]] = set()
        self.gone: Callable[[weakref.ref[Delivering]], None] = self.delivering.discard
        self._guard = self._until_the_end()
        # Its first step makes the generator known to the loop.  The loop's own hook for finalizing
        # would be a reference to the loop that the collector does not see.
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(finalizer=None)
        try:
            with contextlib.suppress(StopIteration):
                self._guard.__anext__().send(None)
        finally:
            sys.set_asyncgen_hooks(*hooks)

    async def _until_the_end(self) -> AsyncGenerator[None, None]:
        try:
            yield
        except GeneratorExit:
            running = running_loop()
            if running is not None and running is self._loop():  # else it is being collected
                await self._end()
            raise

    async def _end(self) -> None:
        if others := _closing_generators():
            await asyncio.wait(others, timeout=_END_S)
        for function in list(self.closing):
            function()
        delivered = asyncio.gather(
            *(stream._deliver() for each in list(self.delivering) if (stream := each())),
            return_exceptions=True,
        )
        # connection_lost() has a turn of its own, and a delivery may begin a task in its first.
        for _ in range(2):
            await asyncio.sleep(0)
        self.ended = True
        if tasks := set(self.tasks):
            for task in tasks - self.patient:
                task.cancel()
            await asyncio.wait(tasks, timeout=_END_S)
        await delivered


async def _generator() -> AsyncGenerator[None, None]:
    yield


def _type_of_close() -> type:
    close = _generator().aclose()
    close.close()
    return type(close)


#: The type of what closes an asynchronous generator, as the coroutine of a task.
_CLOSE = _type_of_close()


def _closing_generators() -> set[asyncio.Task[Any]]:
    """The tasks by which the loop closes its asynchronous generators, except the running one."""
    return {task for task in asyncio.all_tasks() if type(task.get_coro()) is _CLOSE} - {
        asyncio.current_task()
    }


def prepare() -> None:
    """Have the running loop end the tasks that `start` will begin.

    To be called when the program begins to use the library in the loop: while generators are being
    closed it is too late.
    """
    loop = asyncio.get_running_loop()
    if not hasattr(loop, _ATTRIBUTE):
        setattr(loop, _ATTRIBUTE, _Background(loop))


def _of(loop: asyncio.AbstractEventLoop) -> _Background | None:
    background: _Background | None = getattr(loop, _ATTRIBUTE, None)
    return background


def at_end(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> bool:
    """Have `function` called when the loop ends, unless `forget` comes first.

    Returns:
        Whether it will be; if not, the loop has ended, or is ending.
    """
    background = _of(loop)
    if loop.is_closed() or (background is not None and background.ended):
        return False
    if background is not None:
        background.closing[function] = None
    return True


def forget(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    """Undo `at_end`."""
    background = _of(loop)
    if background is not None:
        background.closing.pop(function, None)


def deliver_at_end(loop: asyncio.AbstractEventLoop, stream: Delivering) -> None:
    """Have `stream` deliver its adapter's bytes when the loop ends; this keeps no stream alive."""
    background: _Background | None = getattr(loop, _ATTRIBUTE, None)
    if background is not None:
        background.delivering.add(weakref.ref(stream, background.gone))


def start(
    loop: asyncio.AbstractEventLoop,
    function: Callable[[], Coroutine[Any, Any, T]],
    context: Context | None = None,
    *,
    cancel: bool = True,
) -> asyncio.Task[T] | None:
    """Run `function()` as a task of `loop`.

    Args:
        loop: The loop.
        function: Makes the coroutine.
        context: As `loop.create_task` takes it.
        cancel: Whether to cancel the task when the loop ends.  If not, the loop waits for it, at
            most 10 seconds.

    Returns:
        The task; None if the loop is closed, or is ending and takes no task any more: the caller
        then has to do the task's work at once.
    """
    background = _of(loop)
    if loop.is_closed() or (background is not None and background.ended):
        return None
    task = loop.create_task(function(), context=context)
    # That a loop is closed without the generator is not the program's fault.  asyncio itself sets
    # this attribute for the same purpose.
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    if background is None:
        task.add_done_callback(functools.partial(_over, {task}))
        return task
    background.tasks.add(task)
    task.add_done_callback(background.over)
    if not cancel:
        background.patient.add(task)
        task.add_done_callback(background.patient.discard)
    return task


def _over(tasks: set[asyncio.Task[Any]], task: asyncio.Task[Any]) -> None:
    tasks.discard(task)
    # A KeyboardInterrupt that hit the task has left the loop: asyncio need not report it again.
    if isinstance(getattr(task, "_exception", None), ENDS_THE_LOOP):
        task.exception()


def stay() -> None:
    """Undo the cancellation of the running task, which has just caught the CancelledError.

    For a task of `start` that waits, for a bounded time, until sent messages have arrived: a loop
    that ends cancels it, and then waits for it.
    """
    task = asyncio.current_task()
    assert task is not None
    task.uncancel()
