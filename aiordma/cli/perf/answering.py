"""Answering: the server's tasks of one measurement, whose length they learn only at its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

__all__ = ["Answering"]


class Answering:
    """Tasks that answer the client beside the control conversation, until all data have arrived.

    Attributes:
        seen: Iterations that were answered, or messages that have arrived.
        wanted: How many there will be; None while the client has not said it.
    """

    __slots__ = ("_done", "_tasks", "seen", "wanted")

    def __init__(self, wanted: int | None) -> None:
        self.seen: int = 0
        self.wanted = wanted
        self._done = asyncio.get_running_loop().create_future()
        self._tasks: list[asyncio.Task[None]] = []

    def run(self, coroutine: Callable[[Answering], Coroutine[Any, Any, None]]) -> None:
        """Start a task; it calls `add`, and may go on for ever."""
        task = asyncio.get_running_loop().create_task(coroutine(self))
        task.add_done_callback(self._ended)
        self._tasks.append(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (exc := task.exception()) is not None:
            self.fail(exc)

    def add(self, count: int = 1) -> None:
        """Count so many more."""
        self.seen += count
        self.look()

    def fail(self, exc: BaseException) -> None:
        """Have `finish` raise `exc`."""
        if not self._done.done():
            self._done.set_exception(exc)

    def look(self) -> None:
        """Check whether those were all."""
        if self.wanted is not None and self.seen >= self.wanted and not self._done.done():
            self._done.set_result(None)

    async def finish(self, wanted: int) -> None:
        """Wait until `seen` is `wanted`; the caller bounds the wait.  Raises a task's exception."""
        self.wanted = wanted
        self.look()
        try:
            await self._done
        finally:
            await self.stop()

    async def stop(self) -> None:
        """End the tasks.  Idempotent."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._done.done() and not self._done.cancelled():
            self._done.exception()  # has been seen
