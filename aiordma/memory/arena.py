"""Arena: slots of one size, which are registered as they are needed, with leases of a budget.

Theory of operation
    The first slots are the base, which stays.  It is in a slab that several arenas may share,
    because for little memory the call that registers it costs more than the pages.  Further slots
    come in chunks with `grow`, if the budget allows, and go with `shrink`: such a chunk is
    *leaving*, its slots go to `hand_in` as they become free, and with the last slot the chunk is
    deregistered and its pages go back to the system.

    Slots are never memory of Python's heap: small objects share pages with others, and a fork would
    have to copy them.

    The addresses of the slots behind the base are reserved with the first chunk, which costs
    nothing.  A slot has memory, and is registered, only while its chunk is in service.

    Each connection registers its own memory in its own protection domain.  A budget is shared, and
    memory is not.
"""

from __future__ import annotations

import functools
import mmap
from collections.abc import Callable, Iterable
from typing import Protocol

from aiordma.logs import log_of
from aiordma.memory.governor import GROWTH, Lease, Member
from aiordma.verbs.enums import Access
from aiordma.verbs.mr import MemoryRegion

__all__ = ["NO_BYTES", "Arena", "Keeper", "Place"]

_log = log_of("memory")

#: Where the first slots are in their slab: the byte of the first, their number, bytes each.
Place = tuple[int, int, int]


class Keeper(Protocol):
    """Keeps memory registered while a queue pair may use it, and room for its completions."""

    def pin(self, region: MemoryRegion) -> None:
        """Keep it until `unpin`, or until the queue pair is gone."""

    def unpin(self, region: MemoryRegion) -> None:
        """The queue pair does not use it any more."""

    def expect(self, more: int) -> None:
        """Have the completion queue expect so many more completions.

        Raises:
            OSError: It cannot grow.
        """


class _Chunk:
    __slots__ = ("inside", "lease", "leaving", "mr", "slots")

    def __init__(self, slots: range, mr: MemoryRegion, lease: Lease) -> None:
        self.slots = slots
        self.mr = mr
        self.lease = lease
        self.leaving = False
        self.inside = set(slots)  # slots that were not given to `hand_in`


#: The bytes of slots that have come, until some have.
NO_BYTES = memoryview(b"")
#: In place of a dict, until there is a chunk: most connections have none.
_NO_CHUNKS: dict[int, _Chunk] = {}


@functools.lru_cache(64)
def _steps(first: int, most: int, chunk: int) -> tuple[range, ...]:
    """The slots of each chunk behind the first slots."""
    return tuple(range(n, min(n + chunk, most)) for n in range(first, most, chunk))


class Arena:
    """Up to `most` slots, of which `count` are in service.

    Args:
        mr: The slab of the first slots.
        place: Where they are in it; the caller counts what they take.
        most: Largest number of slots; none are added without `member`.
        chunk: How many slots are added and removed together.
        member: Has the leases of the added slots.
        unit: Units of the budget that a slot takes.

    Attributes:
        mr: The slab.
        addr: Address of slot 0.
        lkey: Local key of the slab.
        slot_size: Bytes each.
        count: Slots in service, those that are leaving not among them.
        enough: Slots for the window; more of them, up to `most`, are for answers alone.
        more: All bytes of the slots behind the base; only those in service are registered.
        more_addr: Address of the first of these slots; 0 before any was in service.
        keeper: Serves chunks that come later; None before the queue pair is there, and at the end.
    """

    __slots__ = (
        "_base", "_chunks", "_closed", "_entering", "_expected", "_member", "_memory", "_refused",
        "_steps", "_unit", "addr", "count", "enough", "keeper", "lkey", "more", "more_addr", "mr",
        "slot_size",
    )  # fmt: skip

    def __init__(
        self,
        mr: MemoryRegion,
        place: Place,
        most: int,
        chunk: int,
        member: Member | None,
        unit: int = 1,
    ) -> None:
        start, count, slot_size = place
        self.mr: MemoryRegion = mr
        self.addr: int = mr.addr + start
        self.lkey: int = mr.lkey
        self.slot_size: int = slot_size
        self.count: int = count
        self.enough: int = count if member is None else most
        self._base = count
        self._expected = 0  # chunks whose completions are expected
        self._member = member
        self._unit = unit
        self._steps = _steps(count, self.enough, chunk)
        self._closed = False
        self._entering = False  # a message that the collector finds meanwhile asks for slots, too
        self._refused = False  # the system has refused memory, which is logged once
        self._memory: mmap.mmap | None = None
        self._chunks: dict[int, _Chunk] = _NO_CHUNKS
        self.keeper: Keeper | None = None
        self.more: memoryview[int] = NO_BYTES
        self.more_addr: int = 0

    @property
    def grows(self) -> bool:
        """Whether slots may be added."""
        return self._member is not None

    def _enter(self, number: int, lease: Lease) -> _Chunk:
        if self._memory is None:
            size = (self._steps[-1].stop - self._base) * self.slot_size
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
            self._memory = mmap.mmap(-1, size, flags=flags)
            self.more = memoryview(self._memory)
        slots = self._steps[number]
        start, stop = ((slot - self._base) * self.slot_size for slot in (slots.start, slots.stop))
        memory = self.more[start:stop]
        region = lease.register(lambda: MemoryRegion(self.mr.pd, memory, Access.LOCAL_WRITE))
        chunk = _Chunk(slots, region, lease)
        if self._chunks is _NO_CHUNKS:
            self._chunks = {}
        self._chunks[number] = chunk
        self.more_addr = chunk.mr.addr - start
        return chunk

    @property
    def view(self) -> memoryview:
        """All bytes of the slots that are there from the beginning."""
        start = self.addr - self.mr.addr
        return self.mr.view[start : start + self._base * self.slot_size]

    @property
    def keys(self) -> list[int]:
        """Local keys of all chunks but the base, in order; 0 for a chunk that is not there."""
        chunks = map(self._chunks.get, range(len(self._steps)))
        return [0 if chunk is None else chunk.mr.lkey for chunk in chunks]

    @property
    def step(self) -> int:
        """Slots of a chunk other than the base; the last chunk may have fewer."""
        return len(self._steps[0]) if self._steps else 1

    @property
    def some_leave(self) -> bool:
        """Whether any chunk is leaving."""
        return any(chunk.leaving for chunk in self._chunks.values())

    @property
    def full(self) -> bool:
        """Whether there are enough slots in service."""
        return self.count >= self.enough

    def _number(self, slot: int) -> int:
        return (slot - self._base) // self.step

    @property
    def steps(self) -> list[MemoryRegion]:
        """Memory that is registered now, without the base."""
        return [chunk.mr for chunk in list(self._chunks.values())]  # in any thread

    def grow(self, again: Callable[[], None]) -> Iterable[int]:
        """Bring a chunk into service and return its slots; none if all are, or the pool has none.

        Args:
            again: Called when another call may return more.
        """
        member = self._member
        if self._closed or self._entering or member is None:
            return ()
        for chunk in list(self._chunks.values()):  # finalizers may hand in slots meanwhile
            if chunk.leaving and chunk.inside:
                if member.could_spare(len(chunk.slots) * self._unit):
                    member.want(again)
                    return ()
                # The slots that `hand_in` has taken come back; the others never left.
                chunk.leaving = False
                self.count += len(chunk.slots)
                back = set(chunk.slots) - chunk.inside
                chunk.inside |= back
                return sorted(back)
        number = 0
        while number in self._chunks:
            number += 1
        if number == len(self._steps):
            return ()
        slots = self._steps[number]
        lease = member.lease(GROWTH, len(slots) * self._unit)
        if lease is None:
            member.want(again)
            return ()
        self._entering = True
        try:
            if self.keeper is not None and number >= self._expected:
                # For good: a chunk that leaves and comes back is expected already.
                self.keeper.expect(len(slots))
                self._expected = number + 1
            chunk = self._enter(number, lease)
        except BaseException as exc:
            lease.release()
            if not isinstance(exc, OSError):
                raise
            # The connection goes on with its present slots.
            if not self._refused:  # the peer decides how often there is a call
                _log.warning("no more slots: %s", exc)
            self._refused = True
            return ()
        finally:
            self._entering = False
        if self.keeper is not None:
            self.keeper.pin(chunk.mr)
        self.count += len(slots)
        return slots

    @property
    def spare(self) -> int:
        """Number of slots that `shrink` would take away because other connections need them."""
        if not self._chunks or self._member is None:
            return 0
        chunk = self._chunks[max(self._chunks)]
        slots = len(chunk.slots)
        return slots if not chunk.leaving and self._member.could_spare(slots * self._unit) else 0

    def shrink(self) -> Iterable[int]:
        """Have the last chunk leave; return its slots: the caller calls `hand_in` if free."""
        chunk = self._chunks[max(self._chunks)]
        chunk.leaving = True
        self.count -= len(chunk.slots)
        return chunk.slots

    def leaving(self, slot: int) -> bool:
        """Whether a slot has to go to `hand_in` instead of being used again."""
        return slot >= self._base and self._chunks[self._number(slot)].leaving

    def hand_in(self, slot: int) -> None:
        """Take back a leaving slot that neither the adapter nor the program uses."""
        number = self._number(slot)
        chunk = self._chunks[number]
        chunk.inside.discard(slot)
        if chunk.inside or self._closed:
            return
        del self._chunks[number]
        if self.keeper is not None:
            self.keeper.unpin(chunk.mr)
        chunk.mr.close()
        self._forget(chunk.slots)
        chunk.lease.release()

    def _forget(self, slots: range) -> None:
        """Give the pages of slots back to the system, if the slots fill whole pages."""
        start, length = (slots.start - self._base) * self.slot_size, len(slots) * self.slot_size
        assert self._memory is not None
        if start % mmap.PAGESIZE == 0 and length % mmap.PAGESIZE == 0:
            self._memory.madvise(mmap.MADV_DONTNEED, start, length)

    def close(self) -> None:
        """Deregister all but the base; the bytes stay readable while a view of them exists."""
        self._closed = True
        self.keeper = None
        for chunk in self._chunks.values():
            chunk.mr.close()
