"""Shared stand-ins: an empty deque and an empty frozenset.

An empty deque takes 760 bytes, and a connection has a dozen lines of tasks, which are almost always
empty.  Each line begins as `EMPTY`, which all share, and becomes a deque when a task waits:

    if self._line is EMPTY:
        self._line = deque()
    self._line.append(...)

`EMPTY` has room for nothing: code that forgets the first two lines loses its entry, and no other
line is harmed.  `NOTHING` is the same for a frozenset: an empty frozenset takes 216 bytes.
"""

from __future__ import annotations

from collections import deque
from typing import Any

__all__ = ["EMPTY", "NOTHING"]

EMPTY: deque[Any] = deque(maxlen=0)
NOTHING: frozenset[Any] = frozenset()
