"""WaitLine: tasks that wait for a resource, first come, first served.

A task is resumed with a grant, which can be the resource itself, such as the number of a slot; or
None, if the task is to take the resource from elsewhere.  If the task was canceled just before it
could run, the grant is passed on to the next task in line, or to the function `hand_on`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

__all__ = ["WaitLine"]

T = TypeVar("T")
_Place = tuple[asyncio.Future[T], int, Any]


class WaitLine(Generic[T]):
    """A line of tasks.  It belongs to one loop.

    Attributes:
        places: For each task its future, and the arguments `size` and `about` of `wait`.
    """

    __slots__ = ("places",)

    def __init__(self) -> None:
        # Not a deque: an empty one takes 760 bytes, and a connection has several empty lines.
        self.places: list[_Place[T]] = []

    def __len__(self) -> int:
        """How many tasks wait."""
        return len(self.places)

    def wait(
        self,
        hand_on: Callable[[T], object] | None = None,
        size: int = 1,
        about: Any = None,
        *,
        again: bool = False,
    ) -> Coroutine[Any, Any, T]:
        """Enter the line now, and return a coroutine that waits for the grant.

        Args:
            hand_on: Called with the grant if the task was canceled just before it could run.  By
                default the next task in line gets the grant.
            size: How much the task needs, for `next_size`.
            about: Any object, for the owner of the line, who can find it in `places`.
            again: Whether to enter at the front, because the task was resumed in vain.

        Raises:
            BaseException: The exception that the `reason` of `fail` makes.

        Cancellation: the task leaves the line.
        """
        place = (asyncio.get_running_loop().create_future(), size, about)
        self.places.insert(0 if again else len(self.places), place)
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
            del granted, place  # the traceback of its exception refers to this frame: a cycle

    @property
    def next_size(self) -> int | None:
        """The `size` of the first task in line; None if no task waits."""
        while self.places and self.places[0][0].done():
            self.places.pop(0)  # a task that was canceled, and has not run yet
        return self.places[0][1] if self.places else None

    def grant(self, value: T) -> bool:
        """Resume the first task in line with a grant; return whether a task got it."""
        while self.places:
            place, *_ = self.places.pop(0)
            if not place.done():
                place.set_result(value)
                return True
        return False

    def grant_all(self, value: T) -> None:
        """Resume all tasks, each with the same grant."""
        line, self.places = self.places, []
        for place, *_ in line:
            if not place.done():
                place.set_result(value)

    def fail(self, reason: Callable[[], BaseException]) -> None:
        """Have all waiting tasks raise what `reason` makes.

        `reason` is a function and not an exception, because each task has to raise an object of its
        own: one object would collect the tracebacks of all tasks, and keep their variables alive.
        """
        line, self.places = self.places, []
        for place, *_ in line:
            if not place.done():
                place.set_exception(reason())
