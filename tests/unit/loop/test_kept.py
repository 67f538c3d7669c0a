"""Kept: values that can be made again, and how many of them."""

from __future__ import annotations

from aiordma.loop.kept import Kept, kept


def test_it_never_holds_more_than_its_bound() -> None:
    values: Kept[int, str] = Kept()
    for number in range(1000):
        assert values.keep(number, str(number)) == str(number)
        assert values[number] == str(number)
        assert len(values) <= 64
    for _ in range(3):
        values.keep(1000, "again")  # known, so that nothing is forgotten for it
    assert values.get(999) == "999"


def test_a_plan_is_made_once_for_a_configuration() -> None:
    made: list[object] = []

    def make(config: object) -> int:
        made.append(config)
        return len(made)

    plan_of = kept(make)
    one, other = object(), object()
    assert [plan_of(one), plan_of(other), plan_of(one)] == [1, 2, 1]
    for _ in range(100):
        plan_of(object())
    assert len(made) == 102
