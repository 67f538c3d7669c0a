"""The RNR timer's codes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma.verbs.rnr_timer import RNR_TIMERS_MS, rnr_timer_code


def test_every_delay_has_its_code() -> None:
    assert len(RNR_TIMERS_MS) == 32
    assert sorted(RNR_TIMERS_MS[1:]) == list(RNR_TIMERS_MS[1:])
    for code, delay in enumerate(RNR_TIMERS_MS):
        assert rnr_timer_code(delay) == code
    # Rows of the InfiniBand specification's table.
    assert [RNR_TIMERS_MS[code] for code in (0, 1, 12, 14, 31)] == [
        655.36,
        0.01,
        0.64,
        1.28,
        491.52,
    ]


@given(st.floats(0.01, 655.36))
def test_the_shortest_that_is_not_too_short(delay: float) -> None:
    chosen = RNR_TIMERS_MS[rnr_timer_code(delay)]
    assert chosen >= delay
    assert not [other for other in RNR_TIMERS_MS if delay <= other < chosen]


@pytest.mark.parametrize("delay", [0, -1, 0.009, 655.4, float("nan"), float("inf")])
def test_out_of_range(delay: float) -> None:
    with pytest.raises(ValueError, match=r"not in 0\.01\.\.655\.36"):
        rnr_timer_code(delay)


@pytest.mark.parametrize("delay", [None, "1", True])
def test_no_number(delay: object) -> None:
    with pytest.raises(TypeError, match="a number of milliseconds"):
        rnr_timer_code(delay)  # type: ignore[arg-type]
