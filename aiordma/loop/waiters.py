"""Waiters: coroutines that wait for something to be there, first come, first served.

What they wait for stays where it is, in a queue beside; a waiter is only told to look.  So that
nothing is ever bound to a coroutine that may be canceled: one that was told and is canceled
before it could look tells the next.
"""

from __future__ import annotations

import asyncio
from collections import deque

from aiordma.loop.empty import EMPTY

__all__ = ["Waiters"]


class Waiters:
    """A line of coroutines.  Belongs to one loop.

    Attributes:
        line: Their places; for others only to see whether there are any.
    """

    __slots__ = ("line",)

    def __init__(self) -> None:
        self.line: deque[asyncio.Future[None]] = EMPTY

    def __len__(self) -> int:
        """How many wait."""
        return len(self.line)

    async def wait(self) -> None:
        """Wait to be told to look; the caller looks, and waits again if somebody was faster.

        Raises:
            BaseException: What `fail` was called with.

        Cancellation: leaves the line; the next is told instead.
        """
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.line is EMPTY:
            self.line = deque()
        self.line.append(place)
        try:
            await place
        except BaseException:
            if place.done() and not place.cancelled() and place.exception() is None:
                self.wake()
            elif place in self.line:
                self.line.remove(place)
            raise

    def wake(self) -> None:
        """Tell the first to look."""
        while self.line:
            place = self.line.popleft()
            if not place.done():
                place.set_result(None)
                return

    def wake_all(self) -> None:
        """Tell all to look: there will be nothing more to wait for."""
        line, self.line = self.line, EMPTY
        for place in line:
            if not place.done():
                place.set_result(None)

    def fail(self, cause: BaseException) -> None:
        """Have all that wait raise `cause`."""
        line, self.line = self.line, EMPTY
        for place in line:
            if not place.done():
                place.set_exception(cause)
