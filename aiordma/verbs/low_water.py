"""LowWater: coroutines that wait until fewer than so many receives are posted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["LowWater"]


class LowWater:
    """The marks of one shared receive queue.

    Attributes:
        armed: What the device's own limit is, as far as is known here; 0 for none.
    """

    __slots__ = ("_marks", "armed")

    def __init__(self) -> None:
        self.armed = 0
        self._marks: list[tuple[int, asyncio.Future[None]]] = []

    def __bool__(self) -> bool:
        """Whether anybody waits."""
        return bool(self._marks)

    async def wait(self, limit: int, arm: Callable[[int], None]) -> None:
        """Wait for a mark; `arm` sets the device's limit.  Cancellation: the mark is taken back."""
        mark = (limit, asyncio.get_running_loop().create_future())
        self._marks.append(mark)
        try:
            self.arm(arm)
            await mark[1]
        finally:
            if mark in self._marks:
                self._marks.remove(mark)

    def arm(self, arm: Callable[[int], None]) -> None:
        """Have the device say when its own count falls below the highest mark."""
        highest = max((limit for limit, _ in self._marks), default=0)
        if highest and highest != self.armed:
            arm(highest)

    def reached(self, below: int) -> None:
        """Fewer receives than any mark above `below` are posted."""
        for limit, future in list(self._marks):
            if limit > below and not future.done():
                future.set_result(None)

    def told(self) -> None:
        """The device says that its limit was reached; it is not armed any more."""
        armed, self.armed = self.armed, 0
        if armed:
            self.reached(armed - 1)
        self._marks = [mark for mark in self._marks if not mark[1].done()]

    def futures(self) -> list[asyncio.Future[None]]:
        """Those who wait."""
        return [future for _, future in self._marks]
