"""Networks: whose addresses may connect to a listener."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)
from typing import Self

from aiordma.cm.address import Address

__all__ = ["Networks"]

_Network = IPv4Network | IPv6Network
_MAPPED_BITS = 96  # before the IPv4 address in an IPv6 address that maps it
_MAPPED = IPv6Network("::ffff:0:0/96")


class Networks:
    """The networks whose clients may connect, and those whose clients may not.

    An IPv4 address and its IPv6-mapped form are the same.  The scope of a link-local address makes
    no difference.
    """

    __slots__ = ("_allowed", "_denied")

    def __init__(self, allowed: tuple[_Network, ...] | None, denied: tuple[_Network, ...]) -> None:
        self._allowed = allowed
        self._denied = denied

    @classmethod
    def of(cls, allow: Iterable[str] | None, deny: Iterable[str]) -> Self | None:
        """The networks of a listener; None if it excludes none.

        Args:
            allow: Networks and addresses as text, or as objects of `ipaddress`; None: all.
            deny: Likewise; these are excluded even if they are in `allow`.

        Raises:
            TypeError: They are no list of networks.
            ValueError: One is no network.
        """
        allowed = None if allow is None else _parse("allow", allow)
        denied = _parse("deny", deny)
        return None if allowed is None and not denied else cls(allowed, denied)

    def why_not(self, peer: Address | None) -> str:
        """The reason why a client of this address may not connect; empty if it may."""
        if peer is None:
            return "its address is not known, and the listener restricts networks"
        address = _plain(ip_address(peer[0]))
        if any(address in network for network in self._denied):
            return "its network is in deny"
        if self._allowed is None or any(address in network for network in self._allowed):
            return ""
        return "its network is not in allow"


def _plain(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return address if mapped is None else mapped


def _parse(name: str, networks: Iterable[str]) -> tuple[_Network, ...]:
    if isinstance(networks, str | bytes) or not isinstance(networks, Iterable):
        msg = f'{name} has to be a list of networks, as in ["10.0.0.0/8"], not {networks!r}'
        raise TypeError(msg)
    return tuple(_network(name, each) for each in networks)


def _network(name: str, text: object) -> _Network:
    if not isinstance(text, str | IPv4Network | IPv6Network | IPv4Address | IPv6Address):
        msg = f"{name} has a {type(text).__name__} instead of a network such as '10.0.0.0/8'"
        raise TypeError(msg)
    if "%" in str(text):
        msg = f"{name} has {str(text)!r}: leave the scope out, which networks do not have"
        raise ValueError(msg)
    try:
        network = ip_network(text)
    except ValueError as exc:
        msg = f"{name} has {text!r}, which is no network such as '10.0.0.0/8': {exc}"
        raise ValueError(msg) from None
    if isinstance(network, IPv6Network) and network.subnet_of(_MAPPED):
        mapped = network.network_address.ipv4_mapped
        assert mapped is not None
        return IPv4Network((mapped, network.prefixlen - _MAPPED_BITS))
    return network
