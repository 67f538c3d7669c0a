"""Addresses: (host, port) to `struct sockaddr` and back, and names by the loop's resolver."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from typing import Any

from aiordma._ffi import ffi

__all__ = ["Address", "from_sockaddr", "look_up", "to_sockaddr"]

Address = tuple[str, int]


def to_sockaddr(address: Address) -> Any:
    """A `struct sockaddr_storage` for a numeric IPv4 or IPv6 address.

    Raises:
        ValueError: The host is not numeric, or the port is not in 0..65535.
        TypeError: Not a pair of str and int.
    """
    host, port = address
    if not isinstance(host, str) or not isinstance(port, int):
        msg = f"an address is a pair of str and int, not {address!r}"
        raise TypeError(msg)
    if not 0 <= port <= 0xFFFF:
        msg = f"port {port} is not in 0..65535"
        raise ValueError(msg)
    name, _, scope = host.partition("%")
    ip = ipaddress.ip_address(name or "0.0.0.0")
    storage = ffi.new("struct sockaddr_storage *")
    if ip.version == 4:
        sin = ffi.cast("struct sockaddr_in *", storage)
        sin.sin_family = socket.AF_INET
        sin.sin_port = socket.htons(port)
        ffi.memmove(ffi.addressof(sin, "sin_addr"), ip.packed, 4)
    else:
        sin6 = ffi.cast("struct sockaddr_in6 *", storage)
        sin6.sin6_family = socket.AF_INET6
        sin6.sin6_port = socket.htons(port)
        ffi.memmove(ffi.addressof(sin6, "sin6_addr"), ip.packed, 16)
        if scope:
            sin6.sin6_scope_id = int(scope) if scope.isdecimal() else socket.if_nametoindex(scope)
    return storage


def from_sockaddr(pointer: Any) -> Address | None:
    """(host, port) of a `struct sockaddr *`; None if it holds no IP address."""
    if pointer == ffi.NULL:
        return None
    family = ffi.cast("struct sockaddr *", pointer).sa_family
    if family == socket.AF_INET:
        sin = ffi.cast("struct sockaddr_in *", pointer)
        raw = bytes(ffi.buffer(ffi.addressof(sin, "sin_addr"), 4))
        return str(ipaddress.IPv4Address(raw)), socket.ntohs(sin.sin_port)
    if family == socket.AF_INET6:
        sin6 = ffi.cast("struct sockaddr_in6 *", pointer)
        ip6 = ipaddress.IPv6Address(bytes(ffi.buffer(ffi.addressof(sin6, "sin6_addr"), 16)))
        scope = f"%{sin6.sin6_scope_id}" if ip6.is_link_local and sin6.sin6_scope_id else ""
        return f"{ip6}{scope}", socket.ntohs(sin6.sin6_port)
    return None


async def look_up(host: str | None, port: int, *, passive: bool = False) -> list[Address]:
    """Numeric addresses for a name, by the loop's resolver; numeric hosts need no resolver.

    rdma_getaddrinfo is not used: it blocks, without a bound if ibacm hangs.

    Raises:
        ValueError: The port is not in 0..65535.
        socket.gaierror: The name does not resolve.
    """
    if not isinstance(port, int):
        msg = f"a port is an int, not {port!r}"
        raise TypeError(msg)
    if not 0 <= port <= 0xFFFF:
        msg = f"port {port} is not in 0..65535"
        raise ValueError(msg)
    if not host:
        return [("0.0.0.0" if passive else "127.0.0.1", port)]
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        found = await asyncio.get_running_loop().getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE if passive else 0
        )
        return [
            (f"{sa[0]}%{sa[3]}" if len(sa) == 4 and sa[3] else str(sa[0]), port) for *_, sa in found
        ]
    return [(host, port)]
