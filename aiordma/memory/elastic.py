"""ElasticArena: slots that are registered as they are needed, out of a pool's budget.

Theory of operation
    The addresses of all slots are reserved from the start, which costs nothing.  A slot has memory,
    and is registered, only while its chunk is in service.  The first chunk is the base and stays.
    Further chunks come with `grow`, if the budget allows, and go with `shrink`: such a chunk is
    *leaving*, its slots go to `hand_in` as they become free, and with the last slot the chunk is
    deregistered and its pages go back to the system.

    Each connection registers its own memory in its own protection domain.  A pool shares the number
    of slots, not the memory.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from aiordma.memory.arena import Arena
from aiordma.memory.budget import Share
from aiordma.verbs.enums import Access
from aiordma.verbs.mr import MemoryRegion
from aiordma.verbs.pd import ProtectionDomain

__all__ = ["ElasticArena", "Keeper"]

_log = logging.getLogger("aiordma")


class Keeper(Protocol):
    """Keeps memory registered as long as a queue pair may use it."""

    def pin(self, region: MemoryRegion) -> None:
        """Keep it until `unpin`, or until the queue pair is gone."""

    def unpin(self, region: MemoryRegion) -> None:
        """The queue pair does not use it any more."""


class _Chunk:
    __slots__ = ("inside", "leaving", "mr", "slots")

    def __init__(self, slots: range, mr: MemoryRegion) -> None:
        self.slots = slots
        self.mr = mr
        self.leaving = False
        self.inside = set(slots)  # slots that were not given to `hand_in`


class ElasticArena(Arena):
    """Up to `most` slots of `slot_size` bytes, of which `count` are in service.

    Args:
        pd: Protection domain.
        most: Slots at most.
        base: Slots that are always there; the caller has taken them out of `share`.
        chunk: Slots that come and go together.
        slot_size: Bytes of a slot.
        share: The connection's share of the pool, where its slots are counted.

    Raises:
        OSError: ENOMEM mostly means that RLIMIT_MEMLOCK is too low.

    Attributes:
        count: Slots in service, those that are leaving not among them.
        view: All bytes; only those of slots in service are registered.
        keeper: Keeps chunks that come later; None before the queue pair is there, and at the end.
    """

    whole = False

    __slots__ = ("_chunks", "_closed", "_memory", "_pd", "_share", "_steps", "keeper")

    def __init__(
        self, pd: ProtectionDomain, most: int, base: int, chunk: int, slot_size: int, share: Share
    ) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self._memory = mmap.mmap(-1, most * slot_size, flags=flags)
        self._pd = pd
        self._share = share
        # Chunk n has the slots steps[n]; the base is chunk 0.
        self._steps = [range(base)]
        self._steps += [range(n, min(n + chunk, most)) for n in range(base, most, chunk)]
        self._closed = False
        self.slot_size = slot_size
        self.view = memoryview(self._memory)
        self.keeper: Keeper | None = None
        self._chunks: dict[int, _Chunk] = {}
        self._enter(0)
        self.mr = self._chunks[0].mr
        self.addr = self.mr.addr
        self.lkey = self.mr.lkey  # of the base only; see `key`
        self.count = base

    def _enter(self, number: int) -> _Chunk:
        slots = self._steps[number]
        piece = self.view[slots.start * self.slot_size : slots.stop * self.slot_size]
        chunk = _Chunk(slots, MemoryRegion(self._pd, piece, Access.LOCAL_WRITE))
        self._chunks[number] = chunk
        return chunk

    @property
    def keys(self) -> list[int]:
        """Local keys of all chunks but the base, in order; 0 for a chunk that is not there."""
        chunks = map(self._chunks.get, range(1, len(self._steps)))
        return [0 if chunk is None else chunk.mr.lkey for chunk in chunks]

    @property
    def step(self) -> int:
        """Slots of a chunk but the base; the last may have fewer."""
        return len(self._steps[1]) if len(self._steps) > 1 else 1

    @property
    def some_leave(self) -> bool:
        """Whether any chunk is leaving."""
        return any(chunk.leaving for chunk in self._chunks.values())

    @property
    def full(self) -> bool:
        """Whether all slots are in service."""
        return self.count == self._steps[-1].stop

    @property
    def crowded(self) -> Any:
        """A `uint8_t *`: not 0 while a connection of the pool waits for slots."""
        return self._share.crowded

    def _number(self, slot: int) -> int:
        base = self._steps[0].stop
        return 0 if slot < base else 1 + (slot - base) // len(self._steps[1])

    def key(self, slot: int) -> int:
        """Local key of a slot's memory."""
        return self._chunks[self._number(slot)].mr.lkey

    @property
    def regions(self) -> list[MemoryRegion]:
        """All memory that is registered now."""
        return [chunk.mr for chunk in self._chunks.values()]

    def grow(self, again: Callable[[], None]) -> Iterable[int]:
        """Bring a chunk into service and return its slots; none if all are, or the pool has none.

        Args:
            again: Called when another call may return more.
        """
        if self._closed:
            return ()
        for chunk in self._chunks.values():
            if chunk.leaving:
                if self._share.could_spare(len(chunk.slots)):
                    self._share.want(again)
                    return ()
                # The slots that `hand_in` has taken come back; the others never left.
                chunk.leaving = False
                self.count += len(chunk.slots)
                back = set(chunk.slots) - chunk.inside
                chunk.inside |= back
                return sorted(back)
        number = next((n for n in range(len(self._steps)) if n not in self._chunks), None)
        if number is None:
            return ()
        slots = self._steps[number]
        if not self._share.take(len(slots)):
            self._share.want(again)
            return ()
        try:
            chunk = self._enter(number)
        except OSError as exc:
            # The connection goes on with its present slots.
            _log.warning("no more slots: %s", exc)
            self._share.give(len(slots))
            return ()
        if self.keeper is not None:
            self.keeper.pin(chunk.mr)
        self.count += len(slots)
        return slots

    @property
    def spare(self) -> int:
        """Number of slots that `shrink` would take away because other connections need them."""
        number = max(self._chunks)
        chunk = self._chunks[number]
        slots = len(chunk.slots)
        return slots if number and not chunk.leaving and self._share.could_spare(slots) else 0

    def shrink(self) -> Iterable[int]:
        """Have the last chunk leave; return its slots: the caller calls `hand_in` if free."""
        chunk = self._chunks[max(self._chunks)]
        chunk.leaving = True
        self.count -= len(chunk.slots)
        return chunk.slots

    def leaving(self, slot: int) -> bool:
        """Whether a slot has to go to `hand_in` instead of being used again."""
        return self._chunks[self._number(slot)].leaving

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
        self._share.give(len(chunk.slots))

    def _forget(self, slots: range) -> None:
        """Give the pages of slots back to the system, if the slots fill whole pages."""
        start, length = slots.start * self.slot_size, len(slots) * self.slot_size
        if start % mmap.PAGESIZE == 0 and length % mmap.PAGESIZE == 0:
            self._memory.madvise(mmap.MADV_DONTNEED, start, length)

    def close(self) -> None:
        """Deregister the memory; its bytes stay readable while a view of them exists."""
        self._closed = True
        self.keeper = None
        for region in self.regions:
            region.close()
