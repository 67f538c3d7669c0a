"""WeakTable: from a number to an object that the table does not keep alive.

Theory of operation
    `weakref.WeakValueDictionary` makes a reference of its own class, in Python, for each entry.  A
    `weakref.ref` is made in C, and all users of an object share it.  It has no callback for the
    end of its object, so dead entries stay until the table has doubled; then all are taken out.

    Entries may be added and taken out in any thread.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

__all__ = ["WeakTable"]

T = TypeVar("T")
_FEW = 64


class WeakTable(Generic[T]):
    """Objects by number.

    Args:
        numbers: Where `add` takes its numbers from; by default 1, 2, 3, ...

    Attributes:
        references: Weak references by number, of dead objects, too.
    """

    __slots__ = ("_numbers", "_sweep_at", "references")

    def __init__(self, numbers: Iterator[int] | None = None) -> None:
        self._numbers = itertools.count(1) if numbers is None else numbers
        self.references: dict[int, weakref.ref[T]] = {}
        self._sweep_at = _FEW

    def __len__(self) -> int:
        """Number of entries, those of dead objects included."""
        return len(self.references)

    def __setitem__(self, number: int, thing: T) -> None:
        if len(self.references) >= self._sweep_at:
            self._sweep()
        self.references[number] = weakref.ref(thing)

    def _sweep(self) -> None:
        entries = self.references
        for known, reference in list(entries.items()):
            if reference() is None:
                entries.pop(known, None)
        self._sweep_at = 2 * len(entries) + _FEW

    def add(self, thing: T) -> int:
        """Enter an object; return its number, which `add` has never returned before."""
        number = next(self._numbers)
        if len(self.references) >= self._sweep_at:
            self._sweep()
        self.references[number] = weakref.ref(thing)
        return number

    def get(self, number: int) -> T | None:
        """Return the object with that number, or None if it lives no more."""
        reference = self.references.get(number)
        return None if reference is None else reference()

    def pop(self, number: int) -> None:
        """Forget a number, if it is known."""
        self.references.pop(number, None)

    def values(self) -> list[T]:
        """Return all objects that live."""
        found = (reference() for reference in list(self.references.values()))
        return [thing for thing in found if thing is not None]
