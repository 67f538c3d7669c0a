"""The bounded cache of values that can be made again."""

from __future__ import annotations

from typing import TypeVar

__all__ = ["BoundedCache"]

_MOST = 64
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class BoundedCache(dict[_Key, _Value]):
    """A dict of at most 64 values, entered by `store`; a key beyond them clears the dict first.

    For values that a method makes, for which `functools.lru_cache` would keep the object alive.
    Most programs use few values of a kind; the bound is for a program, or a peer, that uses a new
    value each time.
    """

    __slots__ = ()

    def store(self, key: _Key, value: _Value) -> _Value:
        """Enter a value, and return it."""
        if len(self) >= _MOST and key not in self:
            self.clear()
        self[key] = value
        return value
