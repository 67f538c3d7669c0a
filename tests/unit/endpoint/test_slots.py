"""Slots: the arenas of further slots, which are made when some are wanted."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from aiordma import ConnectionConfig
from aiordma.endpoint.config import plan_of
from aiordma.endpoint.slots import Slots
from aiordma.memory.governor import FIRST, Growth

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


def queue_pair() -> tuple[Any, asyncio.Future[None]]:
    """A queue pair, and the future of its end."""
    gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    return SimpleNamespace(_when_gone=lambda do: gone.add_done_callback(lambda _: do())), gone


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
    slots.abandon()
    assert (budget.members, FakeRegion.regions) == (0, {})
    assert slots.first.closed


@pytest.mark.parametrize("config", [DEFAULTS, POOLED], ids=["defaults", "pool"])
async def test_further_slots(config: ConnectionConfig) -> None:
    budget, pinned = Growth(1 << 30), list[Any]()
    slots = slots_of(config, budget)
    keeper = SimpleNamespace(expect=lambda count: None, pin=pinned.append)
    slots.link = SimpleNamespace(buffers=keeper)
    before = slots.counts
    for arena, place in ((slots.recv, 0), (slots.send, 1)):
        assert arena.count == before[place]
        assert list(arena.grow(lambda: None))
        assert slots.counts[place] == arena.count > before[place]
    assert slots.regions == [slots.first, *pinned]
    assert len(slots.more_received) > 0
    # The slots are counted until the queue pair is gone.
    qp, gone = queue_pair()
    parts = slots.close(qp)
    assert budget.members == 1
    assert all(region.closed for region in (slots.first, *pinned))
    gone.set_result(None)
    await asyncio.wait_for(asyncio.gather(*(part.wait_closed() for part in parts[-1:])), 10)
    assert (budget.members, budget.used) == (0, 0)


@pytest.mark.parametrize("config", [DEFAULTS, POOLED], ids=["defaults", "pool"])
async def test_an_arena_that_is_first_asked_for_after_the_end(config: ConnectionConfig) -> None:
    """It has no slots to give, and no share of the budget stays behind."""
    budget = Growth(1 << 30)
    slots = slots_of(config, budget)
    slots.close(queue_pair()[0])
    for arena in (slots.recv, slots.send):
        assert list(arena.grow(lambda: None)) == []
        assert arena.spare == 0
    assert budget.members == (config is POOLED), "until the queue pair goes"
    assert not FakeRegion.regions
