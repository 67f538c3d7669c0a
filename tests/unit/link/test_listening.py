"""Which addresses a listener listens on."""

from __future__ import annotations

import errno

import pytest

from aiordma.cm.address import look_up
from aiordma.link.listening import choose

from ..conftest import Run


@pytest.mark.parametrize(
    ("hosts", "ipv6_only", "expected"),
    [
        (["10.0.0.1"], False, ["10.0.0.1"]),
        (["0.0.0.0"], False, ["0.0.0.0"]),
        (["::"], False, ["::", "0.0.0.0"]),
        (["::"], True, ["::"]),
        (["0.0.0.0", "::"], False, ["0.0.0.0", "::"]),
        (["0.0.0.0", "::"], True, ["::"]),
        (["10.0.0.1", "fd80::1", "10.0.0.2"], False, ["10.0.0.1", "fd80::1", "10.0.0.2"]),
        (["10.0.0.1", "fd80::1", "10.0.0.2"], True, ["fd80::1"]),
        (["127.0.1.1", "10.0.0.1", "::1"], False, ["10.0.0.1"]),
        (["127.0.0.1", "::1"], False, ["127.0.0.1", "::1"]),
        (["fe80::1%lo"], False, ["fe80::1%lo"]),
    ],
)
def test_choice(hosts: list[str], ipv6_only: bool, expected: list[str]) -> None:
    chosen = choose([(host, 7) for host in hosts], ipv6_only=ipv6_only)
    assert chosen == [(host, 7) for host in expected]


def test_no_host_is_all_of_both_families(run: Run) -> None:
    addresses = run(look_up(None, 7, passive=True))
    assert choose(addresses, ipv6_only=False) == [("0.0.0.0", 7), ("::", 7)]
    assert choose(addresses, ipv6_only=True) == [("::", 7)]


def test_ipv6_alone_needs_an_ipv6_address() -> None:
    with pytest.raises(OSError, match=r"no IPv6 address to listen on: 10\.0\.0\.1") as caught:
        choose([("10.0.0.1", 7)], ipv6_only=True)
    assert caught.value.errno == errno.EAFNOSUPPORT
