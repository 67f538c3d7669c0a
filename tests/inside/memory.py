"""Private parts of aiordma/memory/ that tests ask for."""

from __future__ import annotations

from collections.abc import Collection, Sized
from typing import Any

from aiordma.memory.budget import Share, SlotBudget
from aiordma.memory.byte_budget import ByteBudget
from aiordma.memory.elastic import ElasticArena


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
