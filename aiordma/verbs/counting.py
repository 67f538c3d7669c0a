"""Counting completions: for callers who need not know which of their requests have succeeded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aiordma.verbs.wc import WC_STRUCT

__all__ = ["Countable", "count_successes"]

_WORDS = WC_STRUCT.size // 8
_HALVES = WC_STRUCT.size // 4
_STATUS = 2  # which of the halves


class Countable:
    """A sink whose completions may be of interest by their number alone."""

    __slots__ = ()

    def count(self, wr_id: int) -> bool:
        """Take a success that its caller only counts; False to be called with the completion."""
        return False


def count_successes(completions: memoryview, find: Callable[[int], Any]) -> int:
    """Take successes of which only the number counts, from the first on; how many those were.

    Ends with the first completion that has to go another way, so that the order is kept.

    Args:
        completions: An array of `struct ibv_wc`.
        find: From an id to its sink.
    """
    if any(completions.cast("I")[_STATUS::_HALVES].tolist()):
        return 0
    count = 0
    for wr_id in completions.cast("Q")[::_WORDS].tolist():
        sink = find(wr_id)
        if not isinstance(sink, Countable) or not sink.count(wr_id):
            break
        count += 1
    return count
