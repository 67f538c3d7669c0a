"""StreamConfig: what it refuses, and at which call."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from aiordma import StreamConfig

SIZES = ("receive_buffer_size", "send_buffer_size")
SECONDS = (
    "close_timeout_s", "keepalive_s", "idle_timeout_s",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in SIZES for value in (0, 4095, (1 << 30) + 1, -4096)),
        ("receive_buffer_size", 4097),
        ("iomap_slots", 129),
        ("iomap_slots", -1),
        ("ack_timeout", 7),
        ("ack_timeout", 32),
        ("tos", 256),
        *((name, value) for name in SECONDS for value in (0, -1, math.inf, math.nan)),
    ],
)
def test_out_of_range(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        StreamConfig(**{name: value})


@pytest.mark.parametrize("name", [*SIZES, "tos", "iomap_slots"])
@pytest.mark.parametrize("value", [1e5, "100000", True])
def test_no_int(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=name):
        StreamConfig(**{name: value})


@pytest.mark.parametrize("name", SECONDS)
@pytest.mark.parametrize("value", ["1", True])
def test_no_number(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=name):
        StreamConfig(**{name: value})


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(StreamConfig)])
def test_none_where_it_means_something(name: str) -> None:
    none: dict[str, Any] = {name: None}
    if name in ("tos", "keepalive_s", "idle_timeout_s"):
        assert getattr(StreamConfig(**none), name) is None
    else:
        with pytest.raises((TypeError, ValueError)):
            StreamConfig(**none)


def test_it_does_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        StreamConfig().tos = 20  # type: ignore[misc]
