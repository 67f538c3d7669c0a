"""The bounded cache of values that can be made again, and the plan of each configuration."""

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
    """A dict of at most 64 values, entered by `keep`; a key beyond them clears the dict first.

    Most programs use few values of a kind; the bound is for a program that uses a new value
    each time.
    """

    __slots__ = ()

    def keep(self, key: _Key, value: _Value) -> _Value:
        """Keep a value, and return it."""
        if len(self) >= _MOST and key not in self:
            self.clear()
        self[key] = value
        return value


def kept(make: Callable[[_Config], _Plan]) -> Callable[[_Config], _Plan]:
    """Wrap `make` so that it is called once for each configuration; at most 64 plans are kept.

    Plans are found by the identity of the configuration: to hash its two dozen fields takes longer
    than most of the work that a plan saves.  The configuration is kept with its plan, so that no
    other object gets its identity.
    """
    plans: Kept[int, tuple[_Config, _Plan]] = Kept()

    def plan_of(config: _Config) -> _Plan:
        known = plans.get(id(config))
        if known is None:
            known = plans.keep(id(config), (config, make(config)))
        return known[1]

    return plan_of
