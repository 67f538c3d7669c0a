"""Steps: an async iterator that awaits a call again and again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Generic, Self, TypeVar

from aiordma.errors import ResourceClosedError
from aiordma.loop import fork

__all__ = ["Steps"]

T = TypeVar("T")


class Steps(Generic[T]):
    """Await a call again and again, until its object is closed.

    An async generator would be shorter.  But if a program leaves it by `break`, the generator ends
    only when it is collected, in a task that the event loop makes for it.  At the end of a program
    that task may come too late to run, and from Python 3.12 on uvloop's debug mode cannot note
    where it was made.

    Args:
        call: Returns the next item; ResourceClosedError ends the iteration.  Canceling the
            iteration cancels the call.
    """

    __slots__ = ("__weakref__", "_call")

    def __init__(self, call: Callable[[], Awaitable[T]]) -> None:
        self._call = call
        fork.guard_public(self)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        try:
            return await self._call()
        except ResourceClosedError:
            raise StopAsyncIteration from None
