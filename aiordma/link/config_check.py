"""Checks that the configurations of messages, streams and datagrams have in common."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Any

__all__ = ["check_numbers", "check_seconds"]


def check_numbers(
    config: Any, ranges: Iterable[tuple[str, int, int]], optional: Collection[str] = ()
) -> None:
    """Check that each named attribute is an int from low to high; those of `optional` may be None.

    Raises:
        TypeError: A value is no int.
        ValueError: A value is out of its range.
    """
    for name, low, high in ranges:
        value = getattr(config, name)
        if value is None and name in optional:
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            msg = f"{name} is an int, not {value!r}"
            raise TypeError(msg)
        if not low <= value <= high:
            msg = f"{name} is {value}, not in {low}..{high}"
            raise ValueError(msg)


def check_seconds(config: Any, names: Iterable[str], optional: Collection[str] = ()) -> None:
    """Check that each named attribute is a positive, finite number, or None if in `optional`.

    Raises:
        ValueError: A value is not.
    """
    for name in names:
        value = getattr(config, name)
        if value is None and name in optional:
            continue
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            msg = f"{name} is {value!r}, not a positive number of seconds"
            raise ValueError(msg)
