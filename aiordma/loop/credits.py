"""Credits: a semaphore with more than one place at a time, first come, first served."""

from __future__ import annotations

from collections.abc import Callable

from aiordma.loop.wait_line import WaitLine

__all__ = ["Credits"]


class Credits:
    """Counts free places; `acquire` waits for places, in the order of the calls.

    asyncio.Semaphore lacks three things: a fast path without a coroutine (`try_acquire`); acquiring
    several places at once, without which two tasks that acquire one after the other can deadlock;
    and a way to have all waiting tasks raise (`fail`).
    """

    __slots__ = ("_free", "_line", "_reason")

    def __init__(self, free: int) -> None:
        self._free = free
        self._line: WaitLine[int] = WaitLine()
        self._reason: Callable[[], BaseException] | None = None

    @property
    def free(self) -> int:
        """How many places are free."""
        return self._free

    @property
    def waiting(self) -> int:
        """How many tasks wait."""
        return len(self._line)

    def try_acquire(self, count: int = 1) -> bool:
        """Take `count` places if they are free and no task waits; False otherwise.

        Raises:
            BaseException: The exception that the `reason` of `fail` makes.
        """
        if self._reason is not None:
            raise self._reason()
        if self._free < count or self._line.places:
            return False
        self._free -= count
        return True

    async def acquire(self, count: int = 1) -> None:
        """Wait until `count` places are free, and take all of them at once.

        Raises:
            BaseException: The exception that the `reason` of `fail` makes.

        Cancellation: places that were just granted are passed on to the next task.
        """
        if self.try_acquire(count):
            return
        try:
            await self._line.wait(self.release, count)
        except BaseException:
            self._grant()  # the next task in line may need fewer places
            raise

    def release(self, count: int = 1) -> None:
        """Return places."""
        self._free += count
        if self._line.places:
            self._grant()

    def _grant(self) -> None:
        while (count := self._line.next_size) is not None and self._free >= count:
            self._free -= count
            self._line.grant(count)

    def fail(self, reason: Callable[[], BaseException]) -> None:
        """Have every `acquire` raise what `reason` makes, including those that wait already.

        `reason` is a function and not an exception, because each task has to raise an object of its
        own: one object would collect the tracebacks of all tasks, and keep their variables alive.
        """
        if self._reason is None:
            self._reason = reason
        self._line.fail(reason)
