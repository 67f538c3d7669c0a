"""`wait` and `spin_us`, which the configurations of connections and streams have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from aiordma import ConnectionConfig, StreamConfig
from aiordma.link.settings import WAITS


@pytest.mark.parametrize("config", [ConnectionConfig, StreamConfig])
def test_the_default_is_by_event(config: Callable[..., Any]) -> None:
    assert (config().wait, config().spin_us) == ("event", 50)
    for wait in WAITS:
        for spin_us in (1, 2.5, 1_000_000):
            made = config(wait=wait, spin_us=spin_us)
            assert (made.wait, made.spin_us) == (wait, spin_us)


@pytest.mark.parametrize("config", [ConnectionConfig, StreamConfig])
@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"wait": "poll"}, ValueError),
        ({"wait": ""}, ValueError),
        ({"wait": True}, TypeError),
        ({"wait": None}, TypeError),
        ({"spin_us": 0}, ValueError),
        ({"spin_us": -1}, ValueError),
        ({"spin_us": 1_000_001}, ValueError),
        ({"spin_us": float("nan")}, ValueError),
        ({"spin_us": float("inf")}, ValueError),
        ({"spin_us": "50"}, TypeError),
        ({"spin_us": True}, TypeError),
        ({"spin_us": None}, TypeError),
    ],
)
def test_bad_values_fail_at_the_call(
    config: Callable[..., object], values: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error, match=next(iter(values))):
        config(**values)
