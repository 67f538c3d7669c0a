"""ConnectionParameter: the fallback rules, and the parameters that are sent as given."""

from __future__ import annotations

import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma.cm.connection_parameter import ConnectionParameter

DEPTHS = ("responder_resources", "initiator_depth")
RETRIES = ("retry_count", "rnr_retry_count")
FIELDS = DEPTHS + RETRIES


def values(parameter: ConnectionParameter) -> tuple[int, ...]:
    return tuple(getattr(parameter, name) for name in FIELDS)


def test_order_of_the_arguments() -> None:  # J61
    assert values(ConnectionParameter(1, 2, 3, 4)) == (1, 2, 3, 4)
    names = list(inspect.signature(ConnectionParameter).parameters)
    assert tuple(names) == FIELDS
    assert tuple(inspect.signature(ConnectionParameter.exact).parameters) == FIELDS


def test_defaults_are_the_devices_limit_and_seven() -> None:  # J59, J60
    parameter = ConnectionParameter()
    assert values(parameter) == (255, 255, 7, 7), "before it meets a device"
    parameter.bind(16)
    assert values(parameter) == (16, 16, 7, 7)


@pytest.mark.parametrize("limit", [1, 16, 128, 255])
@pytest.mark.parametrize("name", DEPTHS)
def test_a_depth_out_of_range_means_the_limit(name: str, limit: int) -> None:  # J62
    for value, expected in (
        (-1, limit), (0, limit), (limit + 1, limit), (1 << 40, limit), (1, 1), (limit, limit),
    ):  # fmt: skip
        built = ConnectionParameter(**{name: value})
        changed = ConnectionParameter()
        setattr(changed, name, value)
        for parameter in (built, changed):
            parameter.bind(limit)
            assert getattr(parameter, name) == expected


@pytest.mark.parametrize("name", RETRIES)
def test_retries_out_of_range_mean_seven(name: str) -> None:  # J63, J64
    for value, expected in ((-1, 7), (8, 7), (1 << 40, 7), *((n, n) for n in range(8))):
        built = ConnectionParameter(**{name: value})
        changed = ConnectionParameter()
        setattr(changed, name, value)
        assert getattr(built, name) == getattr(changed, name) == expected


@given(st.integers(), st.integers(), st.integers(), st.integers(), st.integers(1, 1 << 16))
def test_any_numbers_end_in_range(a: int, b: int, c: int, d: int, limit: int) -> None:
    parameter = ConnectionParameter(a, b, c, d)
    parameter.bind(limit)
    assert all(1 <= getattr(parameter, name) <= min(limit, 255) for name in DEPTHS)
    assert all(0 <= getattr(parameter, name) <= 7 for name in RETRIES)


def test_one_device_after_another() -> None:  # J66: the same object, here or there
    parameter = ConnectionParameter(100)
    parameter.bind(16)
    assert values(parameter)[:2] == (16, 16)
    parameter.bind(128)
    assert values(parameter)[:2] == (100, 128)


def test_setting_none_returns_to_the_limit() -> None:
    parameter = ConnectionParameter(4, 4)
    parameter.bind(16)
    parameter.initiator_depth = None
    assert values(parameter)[:2] == (4, 16)


@given(st.integers(0, 255), st.integers(0, 255), st.integers(0, 7), st.integers(0, 7))
def test_exact_is_sent_as_given(a: int, b: int, c: int, d: int) -> None:
    parameter = ConnectionParameter.exact(a, b, c, d)
    parameter.bind(1)
    assert values(parameter) == (a, b, c, d)


def test_exact_defaults_are_finite() -> None:
    assert values(ConnectionParameter.exact()) == (0, 0, 6, 6)


@pytest.mark.parametrize("name", FIELDS)
def test_exact_refuses_instead_of_falling_back(name: str) -> None:
    top = 255 if name in DEPTHS else 7
    for value in (-1, top + 1):
        with pytest.raises(ValueError, match=rf"{name} {value} is not in 0\.\.{top}"):
            ConnectionParameter.exact(**{name: value})


@pytest.mark.parametrize("name", FIELDS)
def test_exact_refuses_later_changes_too(name: str) -> None:
    parameter = ConnectionParameter.exact()
    for value in (-1, 256):
        with pytest.raises(ValueError, match=name):
            setattr(parameter, name, value)
    setattr(parameter, name, 3)
    assert getattr(parameter, name) == 3


def test_it_prints_all_four() -> None:
    text = repr(ConnectionParameter(1, 2, 3, 4))
    assert all(f"{name}={n}" in text for n, name in enumerate(FIELDS, 1))
