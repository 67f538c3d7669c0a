"""Private parts of aiordma/memory/ that tests ask for."""

from __future__ import annotations

from collections.abc import Collection, Sized
from typing import TYPE_CHECKING, Any

from aiordma import Memory
from aiordma.memory import large_memory, shared
from aiordma.memory.budget import Share, SlotBudget
from aiordma.memory.byte_budget import ByteBudget
from aiordma.memory.elastic import ElasticArena
from aiordma.memory.large_memory import LargeMemory
from aiordma.memory.lent import LentPart
from aiordma.verbs import Context, MemoryRegion, MWType, ProtectionDomain

if TYPE_CHECKING:
    import pytest


def chunks_of(arena: ElasticArena) -> Collection[Any]:
    """The pieces of memory that it has."""
    return arena._chunks.values()


def members_of(budget: SlotBudget) -> set[Share]:
    """Those that have a share."""
    return budget._members


def squeezing(budget: SlotBudget) -> Collection[Share]:
    """The shares that want more than there is."""
    return budget._waiting.values()


# Bytes


def held_of(budget: ByteBudget) -> list[int]:
    """The bytes that are taken, for each part."""
    return budget._held


def own_of(budget: ByteBudget) -> tuple[dict[str, int], ...]:
    """The same, for each source."""
    return budget._own


def line_of(budget: ByteBudget) -> Sized:
    """The sources that wait for bytes."""
    return budget._line


def waiting_of(budget: ByteBudget, source: str) -> int:
    """How many large messages of a source wait for memory."""
    return len(budget._line.get(source, ()))


# Large messages


def sending_of(memory: LargeMemory) -> int:
    """Bytes of the sends that have a turn."""
    return memory._sending


def hurry(monkeypatch: pytest.MonkeyPatch, *, turn_s: float = 5.0, short_s: float = 30.0) -> None:
    """Give sends less time for their turn, and less for memory that is short."""
    monkeypatch.setattr(large_memory, "TURN_S", turn_s)
    monkeypatch.setattr(large_memory, "SHORT_S", short_s)


def stop_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all turns asked for, and granted, at the same moment."""
    monkeypatch.setattr(large_memory, "now", lambda: 5.0)


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
