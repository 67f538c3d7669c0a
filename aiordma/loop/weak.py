"""Objects that are known by weak references."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TypeVar

__all__ = ["living"]

T = TypeVar("T")


def living(references: Iterable[weakref.ref[T]]) -> list[T]:
    """Return the objects that live.

    For a `WeakValueDictionary` pass its `valuerefs()`, which is a copy: other threads may add
    entries meanwhile, and so may the caller's use of the objects.
    """
    return [found for reference in references if (found := reference()) is not None]
