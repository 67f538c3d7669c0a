"""Values out of another program's JSON: each wrong one is a ValueError, and no other exception."""

from __future__ import annotations

import pytest

from aiordma.cli.foreign import parsed, real, whole


def test_json() -> None:
    assert parsed('{"a": [1, 2.5, null, "x", 1e300]}') == {"a": [1, 2.5, None, "x", 1e300]}
    assert parsed(b"[]") == []


@pytest.mark.parametrize(
    "text",
    ["", "{", "NaN", "[Infinity]", "-Infinity", "1e999", "-1e999", b"\xff\xfe\xff", "[" * 100_000,
     '{"a":' * 100_000, "1" * 5000],
)  # fmt: skip
def test_no_json(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parsed(text)


@pytest.mark.parametrize("value", [True, 1.0, "1", None, [], -1, 1 << 64, 10**4000])
def test_no_whole_number(value: object) -> None:
    assert whole(0) == 0
    assert whole((1 << 64) - 1) == (1 << 64) - 1
    with pytest.raises(ValueError, match="not a whole number from 0"):
        whole(value)


@pytest.mark.parametrize(
    "value", [True, "1", None, {}, -0.5, 10.5, float("nan"), float("inf"), 10**4000]
)
def test_no_number(value: object) -> None:
    assert real(0, 0, 10) == 0.0
    assert real(10.0, 0, 10) == 10.0
    with pytest.raises(ValueError, match="not a number from 0 to 10"):
        real(value, 0, 10)
