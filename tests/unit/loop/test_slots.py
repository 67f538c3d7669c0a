"""SlotTable: a completion finds its waiter, or nobody."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from aiordma.loop.slots import SUB_SHIFT, TAG_SHIFT, SlotTable, sub_index
from tests.inside.loop import have_two_entries


class Slots(RuleBasedStateMachine):
    """Against a dictionary that never forgets an id."""

    def __init__(self) -> None:
        super().__init__()
        self.table: SlotTable[object] = SlotTable()
        self.live: dict[int, object] = {}
        self.stale: list[int] = []

    @rule()
    def add(self) -> None:
        entry = object()
        wr_id = self.table.add(entry)
        assert wr_id not in self.live
        assert wr_id not in self.stale
        assert wr_id >> TAG_SHIFT == 0xA1
        assert sub_index(wr_id) == 0
        assert 0 <= wr_id < 1 << 64
        self.live[wr_id] = entry

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if self.live:
            wr_id = data.draw(st.sampled_from(sorted(self.live)))
            assert self.table.remove(wr_id) is self.live.pop(wr_id)
            self.stale.append(wr_id)

    @rule(data=st.data())
    def remove_again(self, data: st.DataObject) -> None:
        if self.stale:
            assert self.table.remove(data.draw(st.sampled_from(self.stale))) is None

    @rule(wr_id=st.integers(0, (1 << 64) - 1))
    def foreign(self, wr_id: int) -> None:
        entry = self.table.get(wr_id)
        assert entry is None or entry in self.live.values()

    @invariant()
    def stale_ids_never_resolve(self) -> None:
        assert all(self.table.get(wr_id) is None for wr_id in self.stale)

    @invariant()
    def live_ids_resolve_whatever_their_sub_index(self) -> None:
        for wr_id, entry in self.live.items():
            assert self.table.get(wr_id) is entry
            assert self.table.get(wr_id + (0xFFFF << SUB_SHIFT)) is entry

    @invariant()
    def counts(self) -> None:
        assert len(self.table) == len(self.live)


TestSlots: Any = Slots.TestCase


@given(st.integers(0, 0xFFFF))
def test_sub_index_comes_back(number: int) -> None:
    wr_id = SlotTable[str]().add("x") + (number << SUB_SHIFT)
    assert sub_index(wr_id) == number
    assert wr_id >> TAG_SHIFT == 0xA1


def test_a_slot_is_used_65535_times_before_an_id_repeats() -> None:
    table: SlotTable[int] = SlotTable()
    first = table.add(0)
    table.remove(first)
    seen = {first}
    for use in range(1, 1 << 16):
        wr_id = table.add(use)
        assert table.get(first) is None
        seen.add(wr_id)
        table.remove(wr_id)
    assert len(seen) == 1 << 16
    assert table.add(0) == first


def test_entries_are_let_go() -> None:
    table: SlotTable[set[int]] = SlotTable()
    wr_id = table.add(entry := {1})
    gone = weakref.ref(entry)
    assert table.remove(wr_id) is entry
    del entry
    assert gone() is None


def test_a_full_table_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    have_two_entries(monkeypatch)
    table: SlotTable[int] = SlotTable()
    table.add(0)
    last = table.add(1)
    with pytest.raises(OverflowError, match="too many"):
        table.add(2)
    table.remove(last)
    assert table.get(table.add(3)) == 3
