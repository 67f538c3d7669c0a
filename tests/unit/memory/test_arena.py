"""Arena: chunks of slots come and go, and what is registered is what is counted."""

from __future__ import annotations

import errno
import mmap
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from aiordma.memory import arena as arenas
from aiordma.memory.governor import GROWTH, Growth, Member

from ..endpoint.fabric import use_fake_regions
from .fake_memory import FakeElastic, FakeRegion

PAGE = mmap.PAGESIZE


@pytest.fixture(autouse=True)
def fake_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_regions(monkeypatch)
    FakeRegion.regions.clear()


def nothing() -> None:
    """Nobody asks again."""


def arena_of(member: Member, most: int = 12, base: int = 3, chunk: int = 4) -> FakeElastic:
    assert member.lease(GROWTH, base)
    return FakeElastic(most, base, chunk, PAGE, member)


async def test_slots_come_in_chunks_until_there_are_no_more() -> None:
    budget = Growth(20)
    arena = arena_of(member := Member(budget, 3))
    assert (arena.count, len(arena.steps), member.size) == (3, 0, 3)
    assert [list(arena.grow(nothing)) for _ in range(4)] == [
        [3, 4, 5, 6], [7, 8, 9, 10], [11], [],
    ]  # fmt: skip
    assert (arena.count, len(arena.steps), member.size, budget.free) == (12, 3, 12, 8)
    keys = [arena.key(slot) for slot in range(12)]
    assert [keys.count(key) for key in dict.fromkeys(keys)] == [3, 4, 4, 1]
    assert [region.length for region in arena.steps] == [4 * PAGE, 4 * PAGE, PAGE]
    # What a slot's memory is called is where its bytes are.
    for slot in range(12):
        arena.slot(slot, 1)[0] = slot
    assert [region.view[0] for region in arena.steps] == [3, 7, 11]
    arena.close()
    assert all(region.closed for region in arena.steps)
    assert list(arena.grow(nothing)) == []


def keeper(expect: Callable[[int], object]) -> Any:
    """Nothing is pinned; the completion queue is asked by `expect`."""
    return SimpleNamespace(expect=expect, pin=lambda region: None, unpin=lambda region: None)


async def test_the_completion_queue_expects_each_chunk_once() -> None:
    arena = arena_of(Member(Growth(20), 3))
    told: list[int] = []
    arena.keeper = keeper(told.append)
    assert [len(list(arena.grow(nothing))) for _ in range(2)] == [4, 4]
    for slot in arena.shrink():
        arena.hand_in(slot)
    assert len(list(arena.grow(nothing))) == 4, "the chunk has come back"
    assert told == [4, 4]
    arena.close()


async def test_no_slots_come_for_which_the_completion_queue_cannot_grow() -> None:
    arena = arena_of(member := Member(Growth(20), 3))

    def refuse(more: int) -> None:
        raise OSError(errno.ENOMEM, f"no room for {more}")

    arena.keeper = keeper(refuse)
    assert list(arena.grow(nothing)) == []
    assert (arena.count, len(arena.steps), member.size) == (3, 0, 3)
    told: list[int] = []
    arena.keeper = keeper(told.append)
    assert len(list(arena.grow(nothing))) == 4
    assert told == [4]


async def test_a_chunk_leaves_with_its_last_slot() -> None:
    budget = Growth(20)
    arena = arena_of(member := Member(budget, 3), chunk=2)
    other = Member(budget, 2)
    pinned: list[object] = []
    arena.keeper = SimpleNamespace(pin=pinned.append, unpin=pinned.remove, expect=lambda more: None)
    arena.grow(nothing)
    arena.grow(nothing)
    assert (member.size, len(pinned)) == (7, 2)
    assert other.lease(GROWTH, 13)
    assert arena.spare == 0, "nobody waits"
    other.want(nothing)
    assert arena.spare == 0, "it has less than its share"
    third = [Member(budget, 0) for _ in range(4)]
    assert arena.spare == 2
    page = arena.slot(5, 1)
    page[0] = 1
    assert list(arena.shrink()) == [5, 6]
    assert (arena.count, arena.spare) == (5, 0)
    assert arena.leaving(5)
    assert arena.leaving(6)
    assert not arena.leaving(4)
    arena.hand_in(6)
    assert (member.size, len(pinned)) == (7, 2)
    arena.hand_in(5)
    assert (member.size, len(pinned), len(arena.steps)) == (5, 1, 1)
    assert page[0] == 0, "the page went back to the system"
    assert len(third) == 4


async def test_a_chunk_that_is_leaving_comes_back_if_nobody_waits_any_more() -> None:
    budget = Growth(12)
    arena = arena_of(member := Member(budget, 3), most=11, chunk=4)
    arena.grow(nothing)
    arena.grow(nothing)
    others = [Member(budget, 0) for _ in range(3)]
    assert not others[0].lease(GROWTH, 9)
    others[0].want(nothing)
    assert arena.spare == 4
    assert list(arena.shrink()) == [7, 8, 9, 10]
    arena.hand_in(8)
    told: list[str] = []
    assert list(arena.grow(lambda: told.append("again"))) == []
    others[0].close()
    assert list(arena.grow(nothing)) == [8]
    assert (arena.count, member.size) == (11, 11)
    assert not arena.leaving(7)


async def test_a_message_that_is_collected_while_slots_come_brings_no_second_chunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The collector may run anywhere, and a message that it finds asks for slots, too."""
    budget = Growth(20)
    arena = arena_of(member := Member(budget, 3))
    inner: list[list[int]] = []

    class Region(FakeRegion):
        def __init__(self, *args: Any) -> None:
            if not inner:
                inner.append([])
                inner[0] += arena.grow(nothing)
            super().__init__(*args)

    monkeypatch.setattr(arenas, "MemoryRegion", Region)
    slots = [*arena.grow(nothing), *inner[0]]
    assert sorted(slots) == sorted(set(slots)), "a slot came twice"
    assert arena.count == 3 + len(slots) == member.size
    assert len(arena.steps) == len(FakeRegion.regions)
    inner.append([])
    assert list(arena.grow(nothing)), "it can grow later"


async def test_memory_that_the_system_refuses_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A peer has it asked for whenever it uses up its credits, so that it could fill a log."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, "ibv_reg_mr")

    budget = Growth(20)
    arena = arena_of(member := Member(budget, 3))
    with monkeypatch.context() as patch:
        patch.setattr(arenas, "MemoryRegion", refuse)
        for _ in range(3):
            assert list(arena.grow(nothing)) == []
    assert (arena.count, member.size) == (3, 3)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert list(arena.grow(nothing)) == [3, 4, 5, 6], "it is asked for again"
