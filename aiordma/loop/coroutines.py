"""`markcoroutinefunction`: of inspect, where Python has it."""

from __future__ import annotations

import sys

__all__ = ["markcoroutinefunction"]

if sys.version_info >= (3, 12):
    from inspect import markcoroutinefunction
else:
    from collections.abc import Callable
    from typing import TypeVar

    _F = TypeVar("_F", bound=Callable[..., object])

    def markcoroutinefunction(function: _F) -> _F:
        """A function that returns a coroutine of C cannot be marked."""
        return function
