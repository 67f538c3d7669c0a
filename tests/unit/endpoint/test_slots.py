"""Slots: the arenas of further slots, which are made when some are wanted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from aiordma import ConnectionConfig
from aiordma.endpoint.config import plan_of
from aiordma.endpoint.slots import Slots
from aiordma.memory.governor import FIRST, Growth
from tests.inside.core import let_go, retain

from ..memory.fake_memory import FakeRegion
from .fabric import use_fake_regions

POOLED = ConnectionConfig(shared_slots=100)
DEFAULTS = ConnectionConfig()


@pytest.fixture(autouse=True)
def fake_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_regions(monkeypatch)
    FakeRegion.regions.clear()


def slots_of(config: ConnectionConfig, budget: Growth) -> Slots:
    """The slots of a connection that has just been opened."""
    plan = plan_of(config)
    pd: Any = None
    first: Any = FakeRegion(pd, memoryview(bytearray(plan.first_bytes)))
    queues = SimpleNamespace(take=lambda completions, expected: None)
    common: Any = SimpleNamespace(
        budget=budget, queues=queues, channel=None, quiet=True, expected=None
    )
    first.pd = pd
    FIRST.count(first)  # as `open`
    return Slots(first, common, plan)


def as_queue_pair(slots: Slots) -> Callable[[], None]:
    """Use the first slots as a queue pair does; the function returned is its end."""
    retain(slots.first)
    return lambda: let_go(slots.first)


@pytest.mark.parametrize("config", [DEFAULTS, POOLED], ids=["defaults", "pool"])
async def test_numbers_and_memory_need_no_arena(config: ConnectionConfig) -> None:
    budget = Growth(1 << 30)
    slots = slots_of(config, budget)
    (_, receives, size), (_, sends, _), *_ = plan_of(config).places
    assert slots.counts == (receives, sends)
    assert (len(slots.received), len(slots.more_received)) == (receives * size, 0)
    assert slots.regions == [slots.first]
    assert slots.pinned_bytes == slots.first.length
    assert budget.members == (config is POOLED), "the others join with the first step"
    slots.close()
    assert (budget.members, FakeRegion.regions) == (0, {})
    assert slots.first.closed


@pytest.mark.parametrize("config", [DEFAULTS, POOLED], ids=["defaults", "pool"])
async def test_further_slots(config: ConnectionConfig) -> None:
    budget, pinned = Growth(1 << 30), list[Any]()
    slots = slots_of(config, budget)

    def pin(region: Any) -> None:
        retain(region)
        pinned.append(region)

    slots.link = SimpleNamespace(buffers=SimpleNamespace(expect=lambda count: None, pin=pin))
    end_of_qp = as_queue_pair(slots)
    before = slots.counts
    for arena, place in ((slots.recv, 0), (slots.send, 1)):
        assert arena.count == before[place]
        assert list(arena.grow(lambda: None))
        assert slots.counts[place] == arena.count > before[place]
    assert slots.regions == [slots.first, *pinned]
    assert len(slots.more_received) > 0
    # The slots are counted until they are deregistered, each by itself, after the queue pair.
    used, grown = budget.used, len(FakeRegion.regions)
    parts = slots.close()
    assert all(region.closed for region in (slots.first, *pinned))
    assert (budget.members, budget.used, len(FakeRegion.regions)) == (1, used, grown)
    end_of_qp()
    assert budget.members == 0
    further = budget.used
    assert 0 < further <= used
    let_go(pinned[0])
    assert budget.used == further - further // 2
    let_go(pinned[1])
    await asyncio.wait_for(asyncio.gather(*(part.wait_closed() for part in parts)), 10)
    assert (budget.used, FakeRegion.regions) == (0, {})


@pytest.mark.parametrize("config", [DEFAULTS, POOLED], ids=["defaults", "pool"])
async def test_an_arena_that_is_first_asked_for_after_the_end(config: ConnectionConfig) -> None:
    """It has no slots to give, and no share of the budget stays behind."""
    budget = Growth(1 << 30)
    slots = slots_of(config, budget)
    end_of_qp = as_queue_pair(slots)
    slots.close()
    for arena in (slots.recv, slots.send):
        assert list(arena.grow(lambda: None)) == []
        assert arena.spare == 0
    assert budget.members == 1, "until the queue pair goes"
    end_of_qp()
    assert (budget.members, budget.used, FakeRegion.regions) == (0, 0, {})
