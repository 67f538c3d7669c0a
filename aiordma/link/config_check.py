"""Checks that the configurations of messages, streams and datagrams have in common."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Any, Protocol

__all__ = ["WAITS", "Waiting", "check_numbers", "check_seconds", "check_wait"]

#: How a wait for completions begins.
WAITS = ("event", "adaptive", "spin")
_MOST_SPIN_US = 1_000_000


class Waiting(Protocol):
    """A configuration that says how a wait for completions begins."""

    @property
    def wait(self) -> str:
        """One of `WAITS`."""

    @property
    def spin_us(self) -> float:
        """Microseconds of polling, at most."""


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


def check_wait(config: Waiting) -> None:
    """Check `wait` and `spin_us`.

    Raises:
        TypeError: `wait` is no str, or `spin_us` no number.
        ValueError: `wait` is another word, or `spin_us` out of range.
    """
    if not isinstance(config.wait, str):
        msg = f"wait is a str, not {config.wait!r}"
        raise TypeError(msg)
    if config.wait not in WAITS:
        msg = f"wait is {config.wait!r}, not one of {', '.join(map(repr, WAITS))}"
        raise ValueError(msg)
    if not isinstance(config.spin_us, int | float) or isinstance(config.spin_us, bool):
        msg = f"spin_us is a number of microseconds, not {config.spin_us!r}"
        raise TypeError(msg)
    if not 1 <= config.spin_us <= _MOST_SPIN_US:
        msg = f"spin_us is {config.spin_us}, not in 1..{_MOST_SPIN_US}"
        raise ValueError(msg)
