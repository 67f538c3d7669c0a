"""Networks: whose addresses may connect."""

from __future__ import annotations

from ipaddress import ip_address, ip_network
from typing import Any

import pytest

from aiordma.link.networks import Networks

PRIVATE = ["10.0.0.0/8", "fd00::/8"]


def may(host: str, allow: Any = None, deny: Any = ()) -> bool:
    networks = Networks.of(allow, deny)
    return networks is None or not networks.why_not((host, 1))


def test_without_networks_there_is_nothing_to_ask() -> None:
    assert Networks.of(None, ()) is None
    assert Networks.of([], ()) is not None


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("10.1.2.3", True),
        ("11.1.2.3", False),
        ("::ffff:10.1.2.3", True),
        ("::ffff:11.1.2.3", False),
        ("fd00::1", True),
        ("fe80::1%eth0", False),
    ],
)
def test_what_is_allowed(host: str, allowed: bool) -> None:
    assert may(host, PRIVATE) is allowed
    assert may(host, None, PRIVATE) is not allowed
    assert not may(host, [])
    assert not may(host, ["0.0.0.0/0", "::/0"], [host.partition("%")[0]])


def test_the_scope_of_a_peer_makes_no_difference() -> None:
    assert may("fe80::1%eth0", ["fe80::/10"])
    assert not may("fe80::1%7", None, ["fe80::1"])


def test_networks_may_be_written_as_ipv6_maps_them_and_as_objects() -> None:
    assert may("10.1.2.3", ["::ffff:10.0.0.0/104"])
    assert may("10.1.2.3", [ip_network("10.0.0.0/8"), ip_address("192.0.2.1")])
    assert not may("10.1.2.3", ["::/0"]), "IPv4 is no part of IPv6"


def test_a_peer_without_an_address_may_not() -> None:
    networks = Networks.of(None, ["10.0.0.0/8"])
    assert networks is not None
    assert "not known" in networks.why_not(None)


@pytest.mark.parametrize(
    ("networks", "error", "words"),
    [
        (["10.0.0.1/8"], ValueError, "host bits"),
        (["nonsense"], ValueError, "no network"),
        (["fe80::/10%eth0"], ValueError, "scope"),
        ([7], TypeError, "int instead of a network"),
        ([None], TypeError, "NoneType"),
        ("10.0.0.0/8", TypeError, "list of networks"),
        (7, TypeError, "list of networks"),
    ],
)
def test_what_is_no_network_is_refused(networks: Any, error: type, words: str) -> None:
    with pytest.raises(error, match=f"^allow .*{words}"):
        Networks.of(networks, ())
    with pytest.raises(error, match=f"^deny .*{words}"):
        Networks.of(None, networks)
