"""loop.weak_table: what it finds, what it forgets, and that dead entries do not pile up."""

from __future__ import annotations

import gc

from aiordma.loop.weak_table import WeakTable


class Thing:
    """Anything that can be referred to."""


def test_it_finds_what_lives_and_keeps_nothing_alive() -> None:
    table: WeakTable[Thing] = WeakTable()
    kept, lost = Thing(), Thing()
    table[1], table[2] = kept, lost
    assert table.get(1) is kept
    assert table.get(2) is lost
    assert table.get(3) is None
    del lost
    gc.collect()
    assert table.get(2) is None
    assert table.values() == [kept]


def test_a_number_is_forgotten_once() -> None:
    table: WeakTable[Thing] = WeakTable()
    thing = Thing()
    table[1] = thing
    table.pop(1)
    table.pop(1)
    assert table.get(1) is None
    assert len(table) == 0


def test_dead_entries_do_not_pile_up() -> None:
    table: WeakTable[Thing] = WeakTable()
    kept = [Thing() for _ in range(100)]
    for number, thing in enumerate(kept):
        table[number] = thing
    for number in range(100, 10_000):
        table[number] = Thing()
        gc.collect(0)
    assert len(table) < 400
    assert table.values()[:100] == kept


def test_each_object_gets_a_number_of_its_own() -> None:
    table: WeakTable[Thing] = WeakTable()
    first, second = Thing(), Thing()
    numbers = [table.add(first), table.add(second)]
    assert numbers == [1, 2]
    table.pop(2)
    assert table.add(second) == 3
    assert table.values() == [first, second]
