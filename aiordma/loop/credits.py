"""Credits: a counter that coroutines may wait on, first come first served."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from aiordma.loop.empty import EMPTY

__all__ = ["Credits"]


class Credits:
    """Counts free places; `acquire` waits for some, in order of arrival.

    asyncio.Semaphore is not used because a fast path without a coroutine (`try_acquire`),
    several places at once (two who take theirs one by one can wait for each other for ever) and
    a way to fail every waiter with one exception (`fail`) are needed.
    """

    __slots__ = ("_free", "_reason", "_waiters")

    def __init__(self, free: int) -> None:
        self._free = free
        self._waiters: deque[tuple[asyncio.Future[None], int]] = EMPTY
        self._reason: Callable[[], BaseException] | None = None

    @property
    def free(self) -> int:
        """Places free now."""
        return self._free

    @property
    def waiting(self) -> int:
        """Coroutines that wait."""
        return sum(not waiter.done() for waiter, _ in self._waiters)

    def try_acquire(self, count: int = 1) -> bool:
        """Take `count` places if they are free and nobody waits for them; False otherwise.

        Raises:
            BaseException: What the function that `fail` was called with makes.
        """
        if self._reason is not None:
            raise self._reason()
        if self._free < count or self._waiters:
            return False
        self._free -= count
        return True

    async def acquire(self, count: int = 1) -> None:
        """Wait until `count` places are free and take them, all in one moment.

        Raises:
            BaseException: What the function that `fail` was called with makes.

        Cancellation: places that were granted in the same moment go to the next waiter.
        """
        if self.try_acquire(count):
            return
        waiter = asyncio.get_running_loop().create_future()
        if self._waiters is EMPTY:
            self._waiters = deque()
        self._waiters.append((waiter, count))
        try:
            await waiter
        except BaseException:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._free += count
            elif (waiter, count) in self._waiters:
                self._waiters.remove((waiter, count))
            self._wake()
            raise
        finally:
            del waiter  # its exception has this frame

    def release(self, count: int = 1) -> None:
        """Give places back."""
        self._free += count
        if self._waiters:
            self._wake()

    def _wake(self) -> None:
        while self._waiters:
            waiter, count = self._waiters[0]
            if not waiter.done():
                if self._free < count:
                    break
                self._free -= count
                waiter.set_result(None)
            self._waiters.popleft()

    def fail(self, reason: Callable[[], BaseException]) -> None:
        """From now on every `acquire` raises what `reason` makes; those that wait raise it now.

        A function, not an exception: one object raised many times would collect the traceback,
        and with it the variables, of everybody who ever caught it.
        """
        if self._reason is None:
            self._reason = reason
        while self._waiters:
            waiter, _ = self._waiters.popleft()
            if not waiter.done():
                waiter.set_exception(reason())
