"""What follows from a configuration alone, worked out once for all of its connections.

`Kept` is the library's cache of values that can be made again: bounded, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

__all__ = ["Kept", "kept"]

_MOST = 64
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
_Config = TypeVar("_Config")
_Plan = TypeVar("_Plan")


class Kept(dict[_Key, _Value]):
    """A dict of at most 64 values, by `keep`; above that it forgets all and begins anew.

    Programs use few values of a kind, so that which of them to forget does not matter; the bound is
    for those that use a new one each time.
    """

    __slots__ = ()

    def keep(self, key: _Key, value: _Value) -> _Value:
        """Note a value, and return it."""
        if len(self) >= _MOST and key not in self:
            self.clear()
        self[key] = value
        return value


def kept(make: Callable[[_Config], _Plan]) -> Callable[[_Config], _Plan]:
    """`make`, called once for each configuration, of which the last few are kept.

    A configuration is a value, and hashing its two dozen fields takes longer than most of what is
    looked up by it.  So plans are kept by the configuration's identity; it is kept with its plan,
    so that its identity remains its own.
    """
    plans: Kept[int, tuple[_Config, _Plan]] = Kept()

    def plan_of(config: _Config) -> _Plan:
        known = plans.get(id(config))
        if known is None:
            known = plans.keep(id(config), (config, make(config)))
        return known[1]

    return plan_of
