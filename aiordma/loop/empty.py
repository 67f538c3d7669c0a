"""What stands in for lines in which nobody waits, sets in which nothing is, and who is not told.

An empty deque is 760 bytes, and a connection has a dozen lines in which almost always nobody
waits.  Each begins with this one object, which all of them share, and gets a deque of its own when
the first one comes:

    if self._line is EMPTY:
        self._line = deque()
    self._line.append(...)

It has room for nothing, so that whoever forgets the first two lines finds nothing in it, and no
other line is harmed.  `NOTHING` is the same for a frozenset, of which an empty one is 216 bytes
and made anew each time.

`nobody` takes the place of whoever was told, by the parts of something that has come to its end.
What is closed is to go with the last reference to it, and its memory with it, and not when the
collector runs next; so its parts must not lead back to it.
"""

from __future__ import annotations

from collections import deque
from typing import Any

__all__ = ["EMPTY", "NOTHING", "nobody"]

EMPTY: deque[Any] = deque(maxlen=0)
NOTHING: frozenset[Any] = frozenset()


def nobody(*_args: object) -> Any:
    """Take whatever is told, and do nothing."""
