"""What follows from a configuration alone, worked out once for all of its connections."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

__all__ = ["kept"]

_MOST = 64
_Config = TypeVar("_Config")
_Plan = TypeVar("_Plan")


def kept(make: Callable[[_Config], _Plan]) -> Callable[[_Config], _Plan]:
    """`make`, called once for each configuration, of which the last few are kept.

    A configuration is a value, and hashing its two dozen fields takes longer than most of what is
    looked up by it.  So plans are kept by the configuration's identity; it is kept with its plan,
    so that its identity remains its own.
    """
    plans: dict[int, tuple[_Config, _Plan]] = {}

    def plan_of(config: _Config) -> _Plan:
        known = plans.get(id(config))
        if known is None:
            if len(plans) >= _MOST:
                plans.clear()
            known = plans[id(config)] = config, make(config)
        return known[1]

    return plan_of
