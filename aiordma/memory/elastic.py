"""ElasticArena: slots that are registered as they are needed, out of a pool's budget.

Theory of operation
    The addresses of all slots are reserved from the start, which costs nothing; a slot is memory,
    and registered, only while its chunk is in service.  The first chunk is the base and stays.
    Further ones come with `grow`, if the budget allows, and go with `shrink`: such a chunk is
    *leaving*, its slots are handed in one by one as they become free (`hand_in`), and with the last
    one it is deregistered and its pages go back to the system.

    Every connection registers its own memory in its own protection domain.  What a pool shares is
    the right to have some.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable

from aiordma.memory.budget import Share
from aiordma.verbs.enums import Access
from aiordma.verbs.mr import MemoryRegion
from aiordma.verbs.pd import ProtectionDomain

__all__ = ["ElasticArena"]


class _Chunk:
    __slots__ = ("inside", "leaving", "mr", "slots")

    def __init__(self, slots: range, mr: MemoryRegion) -> None:
        self.slots = slots
        self.mr = mr
        self.leaving = False
        self.inside = set(slots)  # those that were not handed in


class ElasticArena:
    """Up to `most` slots of `slot_size` bytes, of which `count` are in service.

    Args:
        pd: Protection domain.
        most: Slots at most.
        base: Slots that are always there.
        chunk: Slots that come and go together.
        slot_size: Bytes each.
        share: Where they are counted.

    Raises:
        OSError: ENOMEM mostly means that RLIMIT_MEMLOCK is too low.

    Attributes:
        count: Slots in service, those that are leaving not among them.
        view: All bytes; only those of slots in service are registered.
        addr: Address of slot 0.
        pin: Called with a region that must outlive the queue pair's use of it; set by the link.
        unpin: The opposite.
    """

    __slots__ = (
        "_base", "_chunks", "_closed", "_memory", "_most", "_pd", "_share", "_size", "addr",
        "count", "mr", "pin", "slot_size", "unpin", "view",
    )  # fmt: skip

    def __init__(
        self, pd: ProtectionDomain, most: int, base: int, chunk: int, slot_size: int, share: Share
    ) -> None:
        self._pd = pd
        self._most = most
        self._base = base
        self._size = chunk
        self._share = share
        self._closed = False
        self.slot_size = slot_size
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self._memory = mmap.mmap(-1, most * slot_size, flags=flags)
        self.view = memoryview(self._memory)
        self.pin: Callable[[MemoryRegion], None] = lambda region: None
        self.unpin: Callable[[MemoryRegion], None] = lambda region: None
        self._chunks: dict[int, _Chunk] = {}
        share.take(base)  # within what it is guaranteed
        self.mr = self._register(range(base))
        self._chunks[-1] = _Chunk(range(base), self.mr)
        self.addr = self.mr.addr
        self.count = base

    def _register(self, slots: range) -> MemoryRegion:
        piece = self.view[slots.start * self.slot_size : slots.stop * self.slot_size]
        return MemoryRegion(self._pd, piece, Access.LOCAL_WRITE)

    def _number(self, slot: int) -> int:
        return -1 if slot < self._base else (slot - self._base) // self._size

    def key(self, slot: int) -> int:
        """Local key of a slot's memory."""
        return self._chunks[self._number(slot)].mr.lkey

    @property
    def regions(self) -> list[MemoryRegion]:
        """All memory that is registered now."""
        return [chunk.mr for chunk in self._chunks.values()]

    # Growing

    def grow(self, again: Callable[[], None]) -> Iterable[int]:
        """Slots that have come into service, none if the pool has none to give.

        Args:
            again: Called when it may be worth to ask again.

        Raises:
            OSError: The memory cannot be registered.
        """
        if self._closed:
            return ()
        for chunk in self._chunks.values():
            if chunk.leaving:
                # Those that were handed in come back; the others never left.
                chunk.leaving = False
                self.count += len(chunk.slots)
                back = set(chunk.slots) - chunk.inside
                chunk.inside |= back
                return sorted(back)
        start = next(
            (n for n in range(self._base, self._most, self._size) if self._number(n) not in
             self._chunks), None,
        )  # fmt: skip
        if start is None:
            return ()
        slots = range(start, min(start + self._size, self._most))
        if not self._share.take(len(slots)):
            self._share.want(again)
            return ()
        try:
            mr = self._register(slots)
        except BaseException:
            self._share.give(len(slots))
            raise
        self.pin(mr)
        self._chunks[self._number(start)] = _Chunk(slots, mr)
        self.count += len(slots)
        return slots

    # Shrinking

    @property
    def pressed(self) -> bool:
        """Whether others of the pool need slots more than this connection."""
        return self._share.pressed

    def shrink(self) -> range:
        """Have the last chunk leave; its slots, to be handed in as they become free."""
        number = max(self._chunks)
        chunk = self._chunks[number]
        if number < 0 or chunk.leaving:
            return range(0)
        chunk.leaving = True
        self.count -= len(chunk.slots)
        return chunk.slots

    def leaving(self, slot: int) -> bool:
        """Whether a slot should be handed in instead of being used again."""
        return self._chunks[self._number(slot)].leaving

    def hand_in(self, slot: int) -> None:
        """A leaving slot is free: neither the adapter nor the program has it."""
        number = self._number(slot)
        chunk = self._chunks[number]
        chunk.inside.discard(slot)
        if chunk.inside:
            return
        del self._chunks[number]
        self.unpin(chunk.mr)
        chunk.mr.close()
        self._forget(chunk.slots)
        self._share.give(len(chunk.slots))

    def _forget(self, slots: range) -> None:
        """Give the pages back to the system, where they are whole."""
        start, length = slots.start * self.slot_size, len(slots) * self.slot_size
        if start % mmap.PAGESIZE == 0 and length % mmap.PAGESIZE == 0:
            self._memory.madvise(mmap.MADV_DONTNEED, start, length)

    def close(self) -> None:
        """Deregister; the bytes live on for those who still look at them."""
        self._closed = True
        for mr in self.regions:
            mr.close()
