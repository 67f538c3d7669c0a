"""Arena: slots of one size, in a registered slab that several arenas may share.

They share a registration, because for little memory the call costs more than the pages do.  The
slab is never memory of Python's heap: small objects share pages with others, and a fork would have
to copy them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from aiordma.verbs.mr import MemoryRegion

__all__ = ["Arena", "Place"]

#: Where the slots of an arena are in their slab: the byte of the first, their number, bytes each.
Place = tuple[int, int, int]


class Arena:
    """Slots in a memory region.

    Args:
        mr: The slab.
        place: Where they are in it.

    Attributes:
        mr: The slab.
        count: Slots in service.
        slot_size: Bytes each.
        addr: Address of slot 0.
        lkey: Local key of the slab.
    """

    #: Bytes of slots that have come.
    more: memoryview[int] = memoryview(b"")

    __slots__ = ("addr", "count", "enough", "lkey", "mr", "slot_size")

    count: int
    enough: int

    def __init__(self, mr: MemoryRegion, place: Place) -> None:
        start, count, slot_size = place
        self.mr: MemoryRegion = mr
        self.count = self.enough = count
        self.slot_size: int = slot_size
        self.addr: int = mr.addr + start
        self.lkey: int = mr.lkey

    @property
    def view(self) -> memoryview:
        """All bytes of the slots that are there from the beginning."""
        start = self.addr - self.mr.addr
        return self.mr.view[start : start + self.count * self.slot_size]

    # `ElasticArena` overrides these; here the slots neither come nor go.

    @property
    def steps(self) -> list[MemoryRegion]:
        """Memory of slots that have come."""
        return []

    def grow(self, again: Callable[[], None]) -> Iterable[int]:
        """Return further slots; `again` is called when another call may return more."""
        return ()

    @property
    def spare(self) -> int:
        """Number of slots that `shrink` would take away because other connections need them."""
        return 0

    def shrink(self) -> Iterable[int]:
        """Have some slots leave and return them; the caller calls `hand_in` for the free slots."""
        return ()

    def leaving(self, slot: int) -> bool:
        """Whether a slot has to go to `hand_in` instead of being used again."""
        return False

    def hand_in(self, slot: int) -> None:
        """Take back a leaving slot that neither the adapter nor the program uses."""

    def close(self) -> None:
        """Deregister the memory; its bytes stay readable while a view of them exists."""
        self.mr.close()
