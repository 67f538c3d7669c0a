"""Addresses that sendto() takes, and the numbers of an endpoint."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from aiordma.datagram import destinations
from aiordma.datagram.config import DatagramAddress, DatagramConfig, key_of
from aiordma.datagram.destinations import Destinations
from tests.inside.datagram import sources_of


@pytest.mark.parametrize(
    ("address", "key"),
    [
        (("10.0.0.1", 7000), ("service", "10.0.0.1", 7000)),
        (("fd80:0:0::1", 7000), ("service", "fd80::1", 7000)),
        (("fe80::1%3", 7000), ("service", "fe80::1%3", 7000)),
        (("fe80::1", 7000, 0, 3), ("service", "fe80::1%3", 7000)),
        (("fd80::1", 7000, 9, 0), ("service", "fd80::1", 7000)),
        (("239.1.2.3", 7000), ("group", "239.1.2.3", 0)),
        (("239.1.2.3", 0), ("group", "239.1.2.3", 0)),
        (("ff0e::1", 5), ("group", "ff0e::1", 0)),
        (DatagramAddress("10.0.0.1", 0, 17), ("queue", "10.0.0.1", 17)),
        (DatagramAddress("10.0.0.1", 7000, 17), ("queue", "10.0.0.1", 17)),
        (("10.0.0.1", 7000, 17), ("queue", "10.0.0.1", 17)),
        (DatagramAddress("10.0.0.1", 7000, 0), ("service", "10.0.0.1", 7000)),
    ],
)
def test_what_an_address_names(address: Any, key: tuple[str, str, int]) -> None:
    assert key_of(address) == key


@pytest.mark.parametrize(
    ("address", "words"),
    [
        (("host.example", 7000), "numeric"),
        (("", 7000), "numeric"),
        (("10.0.0.1", 0), "neither a port nor a queue pair"),
        (("10.0.0.1", 0, 0), "neither a port nor a queue pair"),
        (("10.0.0.1", -1), "not in 0..65535"),
        (("10.0.0.1", 65536), "not in 0..65535"),
        (("10.0.0.1", 5, 1 << 24), "queue pair 16777216"),
    ],
)
def test_addresses_out_of_range(address: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        key_of(address)


@pytest.mark.parametrize(
    "address", ["10.0.0.1:5", ("10.0.0.1",), (5, 5), ("10.0.0.1", "5"), ["10.0.0.1", 5], None]
)
def test_what_is_no_address(address: Any) -> None:
    with pytest.raises(TypeError):
        key_of(address)


@pytest.mark.parametrize("name", ["recv_depth", "max_buffer_size"])
def test_whole_numbers(name: str) -> None:
    assert getattr(DatagramConfig(**{name: 1}), name) == 1
    for value in (0, -1, 1 << 60):
        with pytest.raises(ValueError, match=name):
            DatagramConfig(**{name: value})
    wrong: Any
    for wrong in (1.5, "1", True, None):
        with pytest.raises(TypeError, match=name):
            DatagramConfig(**{name: wrong})


@pytest.mark.parametrize("name", ["resolve_timeout_s", "refresh_s"])
def test_seconds(name: str) -> None:
    half: Any = {name: 0.5}
    assert getattr(DatagramConfig(**half), name) == 0.5
    wrong: Any
    for wrong in (0, -1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=name):
            DatagramConfig(**{name: wrong})
    for wrong in ("1", True):
        with pytest.raises(TypeError, match=name):
            DatagramConfig(**{name: wrong})
    assert DatagramConfig(refresh_s=None).refresh_s is None


async def test_g09_addresses_of_senders_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sends from ever new queue pairs is remembered in place of the first."""
    monkeypatch.setattr(destinations, "MOST_SOURCES", 3)
    none: Any = None
    known = Destinations(none, none, DatagramConfig(), none, none)
    header: Any = SimpleNamespace(sgid=bytes(10) + b"\xff\xff" + bytes([10, 0, 0, 1]))
    for number in range(10):
        record: Any = (0,) * 7 + (number,)
        assert known.source(header, record) == DatagramAddress("10.0.0.1", 0, number)
        assert len(sources_of(known)) <= 3
    assert [qpn for _, qpn in sources_of(known)] == [7, 8, 9]
