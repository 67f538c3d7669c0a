"""Private parts of aiordma/memory/ that tests ask for."""

from __future__ import annotations

from collections.abc import Collection, Sized
from typing import TYPE_CHECKING, Any

from aiordma import Memory
from aiordma.memory import governor, large_memory, shared
from aiordma.memory.arena import Arena
from aiordma.memory.governor import Budget, Growth, Kind, Member
from aiordma.memory.large_memory import LargeMemory
from aiordma.memory.lent import LentPart
from aiordma.verbs import Context, MemoryRegion, MWType, ProtectionDomain

if TYPE_CHECKING:
    import pytest


def chunks_of(arena: Arena) -> Collection[Any]:
    """The pieces of memory that it has."""
    return arena._chunks.values()


def squeezing(budget: Growth) -> Collection[Member]:
    """The members that want more than there is."""
    return budget._wanting.values()


# Bytes


def line_of(budget: Budget) -> Sized:
    """The sources that wait for bytes."""
    return budget._line


def give_back(budget: Budget, kind: Kind, size: int, source: str) -> None:
    """Give back what leases have taken, as these do."""
    budget._add(kind, -size, source)
    budget._serve()


# Large messages


def sending_of(memory: LargeMemory) -> int:
    """Bytes of the sends that have a lease."""
    return memory.sends.held()


def hurry(monkeypatch: pytest.MonkeyPatch, *, turn_s: float = 5.0, short_s: float = 30.0) -> None:
    """Give sends less time for their lease, and less for memory that is short."""
    monkeypatch.setattr(large_memory, "SENDS", governor.SENDS._replace(patience_s=turn_s))
    monkeypatch.setattr(large_memory, "SHORT_S", short_s)


def stop_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all leases asked for, and granted, at the same moment."""
    monkeypatch.setattr(governor, "now", lambda: 5.0)


# Shared memory


def region_of(memory: Memory) -> MemoryRegion:
    """Its registration, the only one."""
    assert memory._region is not None
    return memory._region


def retain(part: LentPart) -> None:
    """Note a use of a lent part."""
    part._retain()


def let_go(part: LentPart) -> None:
    """Note the end of a use."""
    part._let_go()


def lend_by(patch: pytest.MonkeyPatch, kind: MWType | None) -> None:
    """Have memory that is opened from now on lend its parts by windows of this type."""
    patch.setattr(shared, "windows_of", lambda _: kind)


def domain_for(memory: Memory, context: Context) -> ProtectionDomain:
    """The protection domain for a connection on a device."""
    return memory._domain(context)
