"""RequestBudget: the bytes of requests that the clients of a listener may have a server hold.

Theory of operation
    A connection may hold `FREE_BYTES` of requests whatever the others hold, so that small requests
    are not counted.  A `Share` takes what a connection holds beyond that, and gives it back as the
    requests are done; the bytes between are rounded up, so that not every request takes and gives.

    A source gets `fair_share` of the budget, so that another source always finds room.  A single
    request is admitted while the budget is unused, whatever its size: the program has set the limit
    of that.
"""

from __future__ import annotations

from aiordma.memory.byte_budget import fair_share

__all__ = ["FREE_BYTES", "RequestBudget", "Share"]

#: Bytes that each connection may hold.
FREE_BYTES = 64 << 10
_STEP = 64 << 10


class RequestBudget:
    """The bytes of one listener; its connections are of one loop.

    Args:
        total: Bytes that there are.

    Attributes:
        used: Bytes that are held.
    """

    __slots__ = ("_own", "_total", "used")

    def __init__(self, total: int) -> None:
        self._total = total
        self._own: dict[str, int] = {}  # `used` of each source
        self.used: int = 0

    def take(self, source: str, size: int) -> bool:
        """Take bytes for a source, or none."""
        own = self._own.get(source, 0)
        if self.used and own + size > fair_share(self._total, self.used, own):
            return False
        self._own[source] = own + size
        self.used += size
        return True

    def give(self, source: str, size: int) -> None:
        """Give bytes back."""
        self.used -= size
        self._own[source] -= size
        if not self._own[source]:
            del self._own[source]


class Share:
    """The bytes that one connection may hold.

    Args:
        budget: The budget of its listener.
        source: The source of its peer.

    Attributes:
        size: The bytes.
    """

    __slots__ = ("_budget", "_source", "size")

    def __init__(self, budget: RequestBudget, source: str) -> None:
        self._budget = budget
        self._source = source
        self.size: int = FREE_BYTES

    def widen(self, held: int) -> bool:
        """Make room for so many bytes in all; return whether there is."""
        more = -(-(held - self.size) // _STEP) * _STEP
        if not self._budget.take(self._source, more):
            return False
        self.size += more
        return True

    def narrow(self, held: int) -> None:
        """Give back the room that so many bytes in all do not need."""
        size = max(FREE_BYTES, -(-held // _STEP) * _STEP)
        if size < self.size:
            self._budget.give(self._source, self.size - size)
            self.size = size
