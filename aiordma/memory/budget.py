"""SlotBudget: the number of slots of registered memory that the connections of a pool may have.

Theory of operation
    A SlotBudget only counts: the memory belongs to each connection, in its own protection domain.

    A byte of C, `crowded`, is 1 while a member waits.  While it is 0, a slot that becomes free
    stays with its member, and C calls no Python function.

    Each member is guaranteed a number of slots from the moment it joins, used or not.  The sum of
    the guarantees never exceeds the total, so that a member can always work, whatever the others
    do.  Slots that are not guaranteed go to the members that ask for them.  When these are used up,
    members that were refused stand in a line, and members above the fair share (the total divided
    by the number of members) give slots back as they become free (`could_spare`).  No member gives
    back slots of its fair share, so that slots do not go back and forth.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from typing import Any

from aiordma._ffi import ffi
from aiordma.errors import plain_error

__all__ = ["Share", "SlotBudget"]


class Share:
    """The slots of one member of the pool.

    Attributes:
        guaranteed: Slots that the member can have at any time.
        used: Slots that the member has.
    """

    __slots__ = ("_budget", "guaranteed", "used")

    def __init__(self, budget: SlotBudget, guaranteed: int) -> None:
        self._budget = budget
        self.guaranteed = guaranteed
        self.used = 0

    def take(self, slots: int) -> bool:
        """Take slots, or none; always succeeds within the guarantee."""
        return self._budget._take(self, slots)

    def give(self, slots: int) -> None:
        """Give slots back."""
        self._budget._give(self, slots)

    def want(self, function: Callable[[], None]) -> None:
        """Have `function` called, once and from the loop, when a refused `take` may succeed."""
        self._budget._want(function, self)

    def could_spare(self, slots: int) -> bool:
        """Whether others wait, and this member keeps its fair share without these slots."""
        return self._budget._others_wait(self) and self.used - slots >= self._budget._fair(self)

    @property
    def crowded(self) -> Any:
        """A `uint8_t *`: not 0 while a member of the pool waits for slots."""
        return self._budget._crowded

    def leave(self) -> None:
        """Remove the member and all its slots from the pool.  Idempotent."""
        self._budget._leave(self)


class SlotBudget:
    """The slots of a pool.

    Args:
        total: Slots.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._loop = asyncio.get_running_loop()
        self._members: set[Share] = set()
        self._committed = 0  # sum of each member's guaranteed or used slots, whichever are more
        self._waiting: dict[Callable[[], None], Share] = {}
        self._serving: asyncio.Handle | None = None
        self._crowded = ffi.new("uint8_t *")

    def __len__(self) -> int:
        """Number of members."""
        return len(self._members)

    @property
    def free(self) -> int:
        """Slots that are neither used nor guaranteed."""
        return self.total - self._committed

    @property
    def used(self) -> int:
        """Slots that the members have."""
        return sum(share.used for share in self._members)

    def join(self, guaranteed: int) -> Share:
        """Return a new member.

        Raises:
            OSError: ENOBUFS, the pool cannot guarantee so much.
        """
        if guaranteed > self.free:
            text = (
                f"the pool of {self.total} slots has {self.free} left for {len(self)} + 1 "
                f"connections, {guaranteed} are needed"
            )
            raise plain_error(errno.ENOBUFS, text, "raise shared_slots")
        share = Share(self, guaranteed)
        self._members.add(share)
        self._committed += guaranteed
        return share

    def close(self) -> None:
        """Cancel the turn that would serve the line; the last user is gone."""
        if self._serving is not None:
            self._serving.cancel()

    def _take(self, share: Share, slots: int) -> bool:
        more = max(share.used + slots, share.guaranteed) - max(share.used, share.guaranteed)
        if more and (more > self.free or share not in self._members):
            return False
        if share.used + slots > self._fair(share) and self._others_wait(share):
            return False
        share.used += slots
        self._committed += more
        return True

    def _give(self, share: Share, slots: int) -> None:
        less = max(share.used, share.guaranteed) - max(share.used - slots, share.guaranteed)
        share.used -= slots
        self._freed(less)

    def _leave(self, share: Share) -> None:
        if share in self._members:
            self._members.discard(share)
            self._waiting = {f: waiting for f, waiting in self._waiting.items() if waiting != share}
            self._crowded[0] = bool(self._waiting)
            self._freed(max(share.used, share.guaranteed))

    def _want(self, function: Callable[[], None], share: Share) -> None:
        self._waiting[function] = share
        self._crowded[0] = True

    def _freed(self, slots: int) -> None:
        self._committed -= slots
        if self._waiting and self._serving is None and not self._loop.is_closed():
            self._serving = self._loop.call_soon(self._serve)

    def _serve(self) -> None:
        """Have members that were refused try again, in the order in which they came."""
        self._serving = None
        for function in list(self._waiting):
            # The members behind it are still in the line: it cannot take more than its fair share.
            if self._waiting.pop(function, None) is not None:
                self._crowded[0] = bool(self._waiting)
                function()

    def _fair(self, share: Share) -> int:
        return max(share.guaranteed, self.total // max(1, len(self)))

    def _others_wait(self, share: Share) -> bool:
        return any(waiting is not share for waiting in self._waiting.values())
