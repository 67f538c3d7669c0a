"""Turns: tasks that begin something in one order, and end it in the same."""

from __future__ import annotations

import asyncio

__all__ = ["Turns"]


class Turns:
    """Turns, which come up in the order in which they were taken.  They belong to one loop.

    Unlike a WaitLine, a task takes its turn before it has to wait, and does something else in
    between.  It may give the turn back at any time.
    """

    __slots__ = ("_taken",)

    def __init__(self) -> None:
        self._taken: list[asyncio.Future[None]] = []

    def __len__(self) -> int:
        """How many turns are taken, and not given back."""
        return len(self._taken)

    def take(self) -> asyncio.Future[None]:
        """Take a turn: a future that ends when all earlier turns were given back."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._taken.append(turn)
        self._call_first()
        return turn

    def give_back(self, turn: asyncio.Future[None]) -> None:
        """Give a turn back, whether it has come up or not."""
        self._taken.remove(turn)
        self._call_first()

    def _call_first(self) -> None:
        # If its task was canceled, the task gives it back.
        if self._taken and not self._taken[0].done():
            self._taken[0].set_result(None)
