"""The source of a client: the address or network by which limits are counted."""

from __future__ import annotations

import socket

__all__ = ["source_of"]

_MAPPED = bytes(10) + b"\xff\xff"  # an IPv4 address as IPv6 follows


def source_of(address: str | None) -> str:
    """Return the source that an IP address belongs to.

    An IPv4 address is a source of its own.  A host may give itself any address of its IPv6 network;
    so the source of an IPv6 address is its /64.

    Args:
        address: IP address as the kernel writes it, perhaps with a scope; None: not known.
    """
    if address is None or ":" not in address:
        return address or ""
    plain, mark, scope = address.partition("%")
    packed = socket.inet_pton(socket.AF_INET6, plain)
    if packed.startswith(_MAPPED):
        return socket.inet_ntop(socket.AF_INET, packed[12:])
    return f"{socket.inet_ntop(socket.AF_INET6, packed[:8] + bytes(8))}/64{mark}{scope}"
