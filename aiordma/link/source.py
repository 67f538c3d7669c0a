"""The addresses of peers: their source, by which limits are counted, and their text for logs."""

from __future__ import annotations

import socket

__all__ = ["peer_text", "source_of"]

_MAPPED = bytes(10) + b"\xff\xff"  # an IPv4 address as IPv6 follows


def peer_text(address: tuple[str, int] | None) -> str | None:
    """An address and port as one word for logs, as in `192.0.2.1:5` and `[fe80::1%eth0]:5`."""
    if address is None:
        return None
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


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
