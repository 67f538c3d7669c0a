"""Credits: a counter that tasks may wait on, first come, first served."""

from __future__ import annotations

from collections.abc import Callable

from aiordma.loop.wait_line import WaitLine

__all__ = ["Credits"]


class Credits:
    """Counts free places; `acquire` waits for places, in the order of the calls.

    asyncio.Semaphore lacks three things: a fast path without a coroutine (`try_acquire`); several
    places at once, without which two tasks that take place after place can wait for each other for
    ever; and a way to fail every waiter (`fail`).
    """

    __slots__ = ("_free", "_line", "_reason")

    def __init__(self, free: int) -> None:
        self._free = free
        self._line: WaitLine[int] = WaitLine()
        self._reason: Callable[[], BaseException] | None = None

    @property
    def free(self) -> int:
        """Places free now."""
        return self._free

    @property
    def waiting(self) -> int:
        """Tasks that wait."""
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
        """Wait until `count` places are free and take them, all in one moment.

        Raises:
            BaseException: The exception that the `reason` of `fail` makes.

        Cancellation: places that were granted in the same moment go to the next waiter.
        """
        if self.try_acquire(count):
            return
        try:
            await self._line.wait(self.release, count)
        except BaseException:
            self._grant()  # the next in line may need less
            raise

    def release(self, count: int = 1) -> None:
        """Give places back."""
        self._free += count
        if self._line.places:
            self._grant()

    def _grant(self) -> None:
        while (count := self._line.next_size) is not None and self._free >= count:
            self._free -= count
            self._line.grant(count)

    def fail(self, reason: Callable[[], BaseException]) -> None:
        """Have each `acquire` raise the exception that `reason` makes, in the tasks that wait, too.

        `reason` is a function, not an exception: an exception object that is raised many times
        collects the tracebacks of all its raises, and keeps the variables of their frames.
        """
        if self._reason is None:
            self._reason = reason
        self._line.fail(reason)
