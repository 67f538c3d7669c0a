"""SlotTable: finds the entry that handles a completion, by the 64-bit wr_id.

Theory of operation
    The completion of a work request returns its wr_id, possibly long after the entry was removed.
    So an id contains an index and a generation.  If the index is in use again when a late
    completion arrives, the generation differs, and the completion is dropped instead of being
    delivered to the wrong entry.

    Layout of an id, from the most significant bit: tag (8 bits), generation (16), sub-index (16),
    index (24).  The sub-index is assigned by the owner of the entry.  A connection has one entry,
    and tells its work requests apart by their sub-index, so that a message needs neither an entry
    nor a future.

    A request that was posted by the raw functions of a queue pair has an entry, too, which puts the
    caller's own wr_id back into the completion (`Posted.caller_id` in verbs/work_queue.py).
"""

from __future__ import annotations

from typing import Generic, TypeVar

from aiordma._core import INDEX_BITS, SUB_SHIFT

__all__ = ["INDEX_BITS", "SUB_SHIFT", "TAG", "TAG_SHIFT", "SlotTable", "sub_index"]

T = TypeVar("T")

TAG = 0xA1
TAG_SHIFT = 56
_GENERATION_SHIFT = 40
_INDEX_MASK = (1 << INDEX_BITS) - 1
_IDENTITY_MASK = (0xFFFF << _GENERATION_SHIFT) | _INDEX_MASK
_TAG_BITS = TAG << TAG_SHIFT


def sub_index(wr_id: int) -> int:
    """The 16 bits of an id that belong to its entry."""
    return (wr_id >> SUB_SHIFT) & 0xFFFF


class SlotTable(Generic[T]):
    """A table of entries, found by ids with a generation.  To be used in the loop's thread only."""

    __slots__ = ("_entries", "_free", "_identities")

    def __init__(self) -> None:
        self._entries: list[T | None] = []
        self._identities: list[int] = []
        self._free: list[int] = []

    def __len__(self) -> int:
        """The number of entries in use."""
        return len(self._entries) - len(self._free)

    def add(self, entry: T) -> int:
        """Store `entry` and return its id, with sub-index 0.

        Raises:
            OverflowError: All 2**24 entries are in use.
        """
        if self._free:
            index = self._free.pop()
            self._entries[index] = entry
        else:
            index = len(self._entries)
            if index > _INDEX_MASK:
                msg = "too many work requests under way"
                raise OverflowError(msg)
            self._entries.append(entry)
            self._identities.append(index)
        return _TAG_BITS | self._identities[index]

    def entries(self) -> list[T]:
        """All entries in use."""
        return [entry for entry in self._entries if entry is not None]

    def get(self, wr_id: int) -> T | None:
        """Return the entry of `wr_id`, or None if the id is stale, or not of this table."""
        index = wr_id & _INDEX_MASK
        if index >= len(self._entries) or wr_id & _IDENTITY_MASK != self._identities[index]:
            return None
        return self._entries[index]

    def remove(self, wr_id: int) -> T | None:
        """Remove an entry and return it; None if the id is stale.  Afterwards the id is stale."""
        index = wr_id & _INDEX_MASK
        if index >= len(self._entries) or wr_id & _IDENTITY_MASK != self._identities[index]:
            return None
        entry = self._entries[index]
        self._entries[index] = None
        generation = ((self._identities[index] >> _GENERATION_SHIFT) + 1) & 0xFFFF
        self._identities[index] = (generation << _GENERATION_SHIFT) | index
        self._free.append(index)
        return entry
