"""What the configurations have in common: `wait`, `spin_us`, and names that do not exist."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from aiordma import ConnectionConfig, DatagramConfig, ListenerLimits, StreamConfig
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


@pytest.mark.parametrize(
    ("config", "name", "meant"),
    [
        (ConnectionConfig, "idle_timeout", "idle_timeout_s"),
        (StreamConfig, "keepalive", "keepalive_s"),
        (ListenerLimits, "max_connection", "max_connections"),
        (DatagramConfig, "refresh", "refresh_s"),
        (ConnectionConfig, "recv_dept", "recv_depth"),
        (ConnectionConfig, "nonsense", None),
        # Settings that sound like these mean something else.
        (ConnectionConfig, "timeout", None),
        (ConnectionConfig, "timeout_s", None),
        (ConnectionConfig, "connect_timeout", None),
        (ConnectionConfig, "max_size", None),
    ],
)
def test_a_name_that_is_not_there_suggests_the_one_that_is_meant(
    config: Any, name: str, meant: str | None
) -> None:
    with pytest.raises(TypeError) as caught:
        config(**{name: 3})
    suggestion = f". Did you mean {meant!r}?" if meant else ""
    words = f"{config.__name__}.__init__() got an unexpected keyword argument {name!r}"
    assert str(caught.value) == words + suggestion
    with pytest.raises(TypeError, match="takes 1 positional argument"):
        config(3)
    assert config() == dataclasses.replace(config())
