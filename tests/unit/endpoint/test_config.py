"""ConnectionConfig: every number is checked, and the sizes that follow from it."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma._core import MessageState
from aiordma.endpoint.config import ConnectionConfig, plan_of
from aiordma.endpoint.wire import HELLO_SIZE, Hello
from aiordma.link.settings import RETRIES, Between, Seconds

RANGES = {
    "slot_size": (64, 1 << 30),
    "rendezvous_threshold": (0, 1 << 50),
    "recv_depth": (1, 16_000),
    "send_depth": (1, 16_000),
    "rendezvous_window": (1, 255),
    "max_message_size": (1024, (1 << 42) - 1),
    "receive_buffer_size": (1, 1 << 50),
    "one_sided_depth": (1, 4096),
    "registration_cache_size": (0, 1 << 50),
    "ack_timeout": (8, 31),
    "rnr_retry_count": (0, 7),
    "tos": (0, 255),
}
SECONDS = (
    "close_timeout_s", "keepalive_s", "idle_timeout_s", "raw_idle_timeout_s", "stall_timeout_s",
    "request_timeout_s",
)  # fmt: skip


def make(**values: Any) -> ConnectionConfig:
    return ConnectionConfig(**values)


def test_every_setting_with_bounds_is_in_a_list_above() -> None:
    kinds: dict[type, set[str]] = {Between: set(), Seconds: set()}
    for name, hint in get_type_hints(ConnectionConfig, include_extras=True).items():
        for bounds in get_args(hint)[1:]:
            kinds.get(type(bounds), set()).add(name)
    assert kinds[Seconds] == {*SECONDS}
    assert kinds[Between] | {"slot_size"} == {*RANGES, "spin_us"}


@pytest.mark.parametrize("name", RANGES)
def test_limits_are_inside_and_their_neighbors_outside(name: str) -> None:
    low, high = RANGES[name]
    for value in (low, high):
        assert getattr(make(**{name: value}), name) == value
    for value in (low - 1, high + 1, -1):
        with pytest.raises(ValueError, match=rf"^{name} is {value}, not in {low}\.\.{high}$"):
            make(**{name: value})


@pytest.mark.parametrize("name", RANGES)
@pytest.mark.parametrize("value", [True, 4.0, "8", None])
def test_numbers_are_ints(name: str, value: object) -> None:
    if value is None and name == "tos":
        assert make(tos=None).tos is None  # the system's
        return
    with pytest.raises(TypeError, match=name):
        make(**{name: value})


@pytest.mark.parametrize("name", SECONDS)
@pytest.mark.parametrize("value", [0, -1, 0.0, float("nan")])
def test_seconds_are_positive(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} is .*, not a positive number of seconds"):
        make(**{name: value})


def test_two_timeouts_are_off_by_default() -> None:
    off = {name for name in SECONDS if getattr(make(), name) is None}
    assert off == {"raw_idle_timeout_s", "stall_timeout_s"}


def test_it_is_frozen_and_takes_keywords_only() -> None:
    config = make()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.slot_size = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        ConnectionConfig(True)  # type: ignore[call-arg]
    assert dataclasses.replace(config, recv_depth=8).recv_depth == 8
    with pytest.raises(ValueError, match="recv_depth"):
        dataclasses.replace(config, recv_depth=0)


def test_every_field_is_described() -> None:
    text = inspect.getdoc(ConnectionConfig) or ""
    for field in dataclasses.fields(ConnectionConfig):
        assert f"\n    {field.name}: " in text, field.name


def test_no_adapter_retries_for_ever() -> None:
    """7 retries, the most that a queue pair can have, have no end on Soft-RoCE."""
    plan = plan_of(make())
    assert plan.policy.max_retry_count == RETRIES == 6


def test_a_raw_connection_has_no_header_and_no_control_slots() -> None:
    raw = make(raw=True, slot_size=1)
    assert (raw.eager_size, raw.control_depth) == (1, 0)
    with pytest.raises(ValueError, match="slot_size"):
        make(raw=True, slot_size=0)


@given(
    st.builds(
        make, recv_depth=st.integers(1, 16_000), rendezvous_window=st.integers(1, 255),
        slot_size=st.integers(64, 1 << 30), max_message_size=st.integers(1024, (1 << 42) - 1),
    )
)  # fmt: skip
def test_every_config_fits_into_the_handshake(config: ConnectionConfig) -> None:
    from aiordma.endpoint.config import hello_of

    hello = hello_of(config, b"x")
    assert Hello.parse(hello.pack(HELLO_SIZE + 1)) == hello
    # Never more than what this side would take: the peer would be cut off for believing it.
    assert hello.max_message_kib * 1024 <= config.max_message_size


async def test_the_sizes_of_a_state_are_in_its_order() -> None:
    """The link gives them without names, and a size in a wrong place would be a wrong number."""
    sizes = list(plan_of(make()).state(grows=True).items())
    for count in range(len(sizes) + 1):
        # C refuses a name that it has a value for already, and a name that lacks a value.
        in_order = [value for _, value in sizes[:count]]
        MessageState(asyncio.get_running_loop(), *in_order, **dict(sizes[count:]))


def test_equal_configurations_have_one_plan() -> None:
    one, other = make(recv_depth=17), make(recv_depth=17)
    assert plan_of(one) is plan_of(other) is plan_of(one)
    assert plan_of(make(recv_depth=18)) is not plan_of(one)


def test_slots_are_shared_by_at_least_one() -> None:
    config = ConnectionConfig(rendezvous_window=2, shared_slots=11)
    assert config.guaranteed == 11
    assert ConnectionConfig(recv_depth=2).guaranteed == 10
    assert config.receives == config.recv_depth + 8
    with pytest.raises(ValueError, match="one connection alone needs 11"):
        ConnectionConfig(rendezvous_window=2, shared_slots=10)
    with pytest.raises(ValueError, match="raw"):
        ConnectionConfig(raw=True, shared_slots=1000)
    for wrong in (1.5, True, "100"):
        with pytest.raises(TypeError, match="shared_slots"):
            ConnectionConfig(shared_slots=wrong)  # type: ignore[arg-type]
