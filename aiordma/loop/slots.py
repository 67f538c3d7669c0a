"""SlotTable: from the 64-bit id of a completion to the entry that takes it.

Theory of operation
    A work request carries an id and its completion brings it back once, possibly long after the
    entry was removed.  So an id has an index and a generation: a late completion of an entry whose
    index is in use again finds another generation and is dropped, never delivered to another entry.

    Layout of an id, from the top: tag (8 bits), generation (16), sub-index (16), index (24).
    The sub-index belongs to the entry: a connection has one table entry for all its buffers,
    which differ by it, so that a message costs neither an entry nor a future.

    Ids without the tag belong to callers of the raw posting functions and never get here.  A
    caller's id that has the tag by chance is carried through an entry of its own (verbs/qp.py).
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
    """Entries with generation-counted ids.  Not thread-safe: one table belongs to one loop."""

    __slots__ = ("_entries", "_free", "_identities")

    def __init__(self) -> None:
        self._entries: list[T | None] = []
        self._identities: list[int] = []
        self._free: list[int] = []

    def __len__(self) -> int:
        """Number of entries in use."""
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
        """Return the entry of `wr_id`, or None for a stale or foreign id."""
        index = wr_id & _INDEX_MASK
        if index >= len(self._entries) or wr_id & _IDENTITY_MASK != self._identities[index]:
            return None
        return self._entries[index]

    def remove(self, wr_id: int) -> T | None:
        """Take the entry out and return it; None if the id is stale.  The id is stale then."""
        index = wr_id & _INDEX_MASK
        if index >= len(self._entries) or wr_id & _IDENTITY_MASK != self._identities[index]:
            return None
        entry = self._entries[index]
        self._entries[index] = None
        generation = ((self._identities[index] >> _GENERATION_SHIFT) + 1) & 0xFFFF
        self._identities[index] = (generation << _GENERATION_SHIFT) | index
        self._free.append(index)
        return entry
