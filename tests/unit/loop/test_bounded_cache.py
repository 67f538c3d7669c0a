"""BoundedCache: values that can be made again, and how many of them."""

from __future__ import annotations

from aiordma.loop.bounded_cache import BoundedCache


def test_it_never_holds_more_than_its_bound() -> None:
    values: BoundedCache[int, str] = BoundedCache()
    for number in range(1000):
        assert values.store(number, str(number)) == str(number)
        assert values[number] == str(number)
        assert len(values) <= 64
    for _ in range(3):
        values.store(1000, "again")  # known, so that nothing is forgotten for it
    assert values.get(999) == "999"
