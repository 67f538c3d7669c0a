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

from aiordma._ffi import ffi
from aiordma.errors import errno_error
from aiordma.loop import registry
from aiordma.memory.memlock import Room

__all__ = ["Share", "SlotBudget", "step_budget"]


class Share:
    """The slots of one member of the pool.

    Attributes:
        crowded: Address of a byte that is not 0 while a member of the pool waits for slots.
        guaranteed: Slots that the member can have at any time.
        used: Slots that the member has.
    """

    __slots__ = ("_budget", "crowded", "guaranteed", "used")

    def __init__(self, budget: SlotBudget, guaranteed: int) -> None:
        self._budget = budget
        self.crowded: int = budget.crowded
        self.guaranteed: int = guaranteed
        self.used: int = 0

    def take(self, slots: int) -> bool:
        """Take slots, or none; always succeeds within the guarantee."""
        budget, used = self._budget, self.used + slots
        more = max(used, self.guaranteed) - self._committed
        if more and (more > budget.free or self not in budget._members):
            return False
        if used > self._fair and self._others_wait:
            return False
        self.used = used
        budget._committed += more
        return True

    def give(self, slots: int) -> None:
        """Give slots back."""
        before = self._committed
        self.used -= slots
        self._budget._freed(before - self._committed)

    def want(self, function: Callable[[], None]) -> None:
        """Have `function` called, once and from the loop, when a refused `take` may succeed."""
        self._budget._waiting[function] = self
        self._budget._crowded[0] = True

    def could_spare(self, slots: int) -> bool:
        """Whether others wait, and this member keeps its fair share without these slots."""
        return self._others_wait and self.used - slots >= self._fair

    def leave(self) -> None:
        """Remove the member and all its slots from the pool.  Idempotent."""
        budget = self._budget
        if self in budget._members:
            budget._members.discard(self)
            waiting = {f: share for f, share in budget._waiting.items() if share is not self}
            budget._waiting = waiting
            budget._crowded[0] = bool(waiting)
            budget._freed(self._committed)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop of the pool."""
        return self._budget._loop

    @property
    def _committed(self) -> int:
        return max(self.used, self.guaranteed)

    @property
    def _fair(self) -> int:
        return max(self.guaranteed, self._budget.total // max(1, len(self._budget)))

    @property
    def _others_wait(self) -> bool:
        return any(share is not self for share in self._budget._waiting.values())


class SlotBudget:
    """The slots of a pool.

    Args:
        total: Slots.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._loop = asyncio.get_running_loop()
        self._members: set[Share] = set()
        self._committed = 0  # sum of each member's guaranteed or used slots, whichever are more
        self._waiting: dict[Callable[[], None], Share] = {}
        self._serving: asyncio.Handle | None = None
        self._crowded = ffi.new("uint8_t *")
        self.crowded: int = int(ffi.cast("uintptr_t", self._crowded))

    def __len__(self) -> int:
        """Number of members."""
        return len(self._members)

    @property
    def total(self) -> int:
        """Slots that there are."""
        return self._total

    @property
    def free(self) -> int:
        """Slots that are neither used nor guaranteed."""
        return self.total - self._committed

    @property
    def used(self) -> int:
        """Slots that the members have."""
        return sum(share.used for share in list(self._members))  # in any thread

    def __repr__(self) -> str:
        waiting = len(self._waiting)
        return f"<SlotBudget {self.used} of {self.total}, {len(self)} members, {waiting} wait>"

    def join(self, guaranteed: int) -> Share:
        """Return a new member.

        Raises:
            OSError: ENOBUFS, the pool cannot guarantee so much.
        """
        if guaranteed > max(0, self.free):
            text = (
                f"the pool of {self.total} slots has {self.free} left for {len(self)} + 1 "
                f"connections, {guaranteed} are needed"
            )
            raise errno_error(errno.ENOBUFS, text, "raise shared_slots")
        share = Share(self, guaranteed)
        self._members.add(share)
        self._committed += guaranteed
        return share

    def close(self) -> None:
        """Cancel the turn that would serve the line; the last user is gone."""
        if self._serving is not None:
            self._serving.cancel()

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


class _StepBudget(SlotBudget):
    """Bytes for steps: fewer, the more connections have pinned their first slots.

    Members that have bytes keep them, so that `free` may be negative for a time.
    """

    def __init__(self) -> None:
        super().__init__(0)
        self._room = Room()

    @property
    def total(self) -> int:
        """Bytes that there are now."""
        return self._room.for_steps


def step_budget() -> tuple[SlotBudget, Callable[[], None]]:
    """The bytes that come with traffic, of the running loop's connections and streams.

    Returns:
        The budget, and a function that lets it go.
    """
    return registry.acquire("steps", _StepBudget)
