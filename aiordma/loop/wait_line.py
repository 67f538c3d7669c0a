"""WaitLine: the tasks that wait for a resource, first come, first served.

A task is resumed with a grant: the number of a slot; or None where the resource stays in a queue
beside the line, in which the task then looks.  If the task is canceled in the same moment, the
grant goes to the next task in line, or to the caller's `hand_on`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from aiordma.loop.empty import EMPTY

__all__ = ["WaitLine"]

T = TypeVar("T")
_Place = tuple[asyncio.Future[T], int, Any]


class WaitLine(Generic[T]):
    """A line of tasks.  Belongs to one loop.

    Attributes:
        places: A future, a size and what `wait` was told of it, for each task.
    """

    __slots__ = ("places",)

    def __init__(self) -> None:
        self.places: deque[_Place[T]] = EMPTY

    def __len__(self) -> int:
        """Tasks that wait."""
        return len(self.places)

    def wait(
        self, hand_on: Callable[[T], object] | None = None, size: int = 1, about: Any = None
    ) -> Coroutine[Any, Any, T]:
        """Wait for a grant; the task stands in line at once, so that the result is to be awaited.

        Args:
            hand_on: Called with the grant of a task that was canceled in the same moment; by
                default the next in line gets it.
            size: How much the task needs, for `next_size`.
            about: For whoever looks at `places`.  To end a wait early, let its future raise.

        Raises:
            BaseException: The exception that the `reason` of `fail` makes.

        Cancellation: leaves the line.
        """
        place = (asyncio.get_running_loop().create_future(), size, about)
        if self.places is EMPTY:
            self.places = deque()
        self.places.append(place)
        return self._granted(place, hand_on or self.grant)

    async def _granted(self, place: _Place[T], hand_on: Callable[[T], object]) -> T:
        granted = place[0]
        try:
            return await granted
        except BaseException:
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                hand_on(granted.result())
            elif place in self.places:
                self.places.remove(place)
            raise
        finally:
            del granted, place  # its exception has this frame: a cycle

    @property
    def next_size(self) -> int | None:
        """Size that the first task in line needs; None if no task waits."""
        while self.places and self.places[0][0].done():
            self.places.popleft()  # canceled, and not resumed yet
        return self.places[0][1] if self.places else None

    def grant(self, value: T) -> bool:
        """Resume the first task in line with a grant; return whether a task got it."""
        while self.places:
            place, *_ = self.places.popleft()
            if not place.done():
                place.set_result(value)
                return True
        return False

    def grant_all(self, value: T) -> None:
        """Resume all tasks with the same grant: there will be no other."""
        line, self.places = self.places, EMPTY
        for place, *_ in line:
            if not place.done():
                place.set_result(value)

    def fail(self, reason: Callable[[], BaseException]) -> None:
        """Have all tasks that wait raise the exception that `reason` makes.

        A function, not an exception: an object that is raised many times would collect the
        traceback, and with it the variables, of every task that ever caught it.
        """
        line, self.places = self.places, EMPTY
        for place, *_ in line:
            if not place.done():
                place.set_exception(reason())
