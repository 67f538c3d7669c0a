"""The safety poll of an idle channel: the order of its steps."""

from __future__ import annotations

from tests.inside.verbs import steps_of_an_alarm


def test_what_is_polled_is_dispatched_before_anybody_polls_again() -> None:
    """Otherwise later completions overtake it, and a stream ends as if the adapter were broken."""
    assert steps_of_an_alarm() == ["dispatches what C has", "verifies", "takes events"]
