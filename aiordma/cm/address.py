"""Addresses: (host, port) to `struct sockaddr` and back, and names by the loop's resolver."""

from __future__ import annotations

import asyncio
import errno
import functools
import ipaddress
import socket
import struct
from typing import Any

from aiordma._ffi import ffi
from aiordma.arguments import whole
from aiordma.errors import HostNotFoundError, errno_error
from aiordma.interfaces import has_address
from aiordma.loop.bounded_cache import BoundedCache

__all__ = [
    "Address",
    "check_address",
    "check_port",
    "from_gid",
    "from_sockaddr",
    "is_local",
    "is_loopback",
    "look_up",
    "to_sockaddr",
]

Address = tuple[str, int]
_IPV4 = struct.Struct("=HH4s")  # the beginning of a sockaddr_in; no sockaddr is shorter
_AF_INET = int(socket.AF_INET)
_ANY = ("0.0.0.0", "::")
_sockaddrs: BoundedCache[Address, Any] = BoundedCache()  # a client connects to few addresses


@functools.lru_cache(256)  # the connections of a process have few addresses
def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(host)


def to_sockaddr(address: Address) -> Any:
    """A `struct sockaddr_storage` for a numeric IPv4 or IPv6 address.

    An IPv4 address in IPv6 form (`::ffff:10.0.0.1`) becomes IPv4, the only form that RDMA knows.

    Raises:
        ValueError: The host is not numeric, is link-local and names no interface, or the port is
            not in 0..65535.
        TypeError: Not a pair of str and int.
        OSError: ENODEV, there is no interface of the name after the `%`.
    """
    check_address(address)
    host, port = address
    if (known := _sockaddrs.get((host, port))) is not None:
        return known
    name, _, scope = host.partition("%")
    ip = _ip(name or "0.0.0.0")
    ip = getattr(ip, "ipv4_mapped", None) or ip
    storage = ffi.new("struct sockaddr_storage *")
    if ip.version == 4:
        sin = ffi.cast("struct sockaddr_in *", storage)
        sin.sin_family = socket.AF_INET
        sin.sin_port = socket.htons(port)
        ffi.memmove(ffi.addressof(sin, "sin_addr"), ip.packed, 4)
        _sockaddrs.store((host, port), storage)  # not so IPv6: interfaces get new numbers
    else:
        sin6 = ffi.cast("struct sockaddr_in6 *", storage)
        sin6.sin6_family = socket.AF_INET6
        sin6.sin6_port = socket.htons(port)
        ffi.memmove(ffi.addressof(sin6, "sin6_addr"), ip.packed, 16)
        if scope:
            sin6.sin6_scope_id = _scope_id(scope)
        elif ip.is_link_local:
            msg = f"{host} is link-local: name its interface, as in {host}%eth0"
            raise ValueError(msg)
    return storage


def check_address(address: Address) -> None:
    """Raise unless `address` is a pair of host and port.

    Raises:
        TypeError: Not a pair of str and int.
        ValueError: The port is not in 0..65535.
    """
    pair = isinstance(address, tuple | list) and len(address) == 2
    if not pair or not isinstance(address[0], str) or not isinstance(address[1], int):
        msg = f"an address is a pair of str and int, not {address!r}"
        raise TypeError(msg)
    check_port(address[1])


def check_port(port: int, lowest: int = 0) -> None:
    """Raise unless `port` is the number of a port.

    Raises:
        TypeError: Not an int.
        ValueError: Not in `lowest`..65535.
    """
    whole("the port", port, lowest, 0xFFFF)


def _scope_id(scope: str) -> int:
    if scope.isdecimal():
        return int(scope)
    try:
        return socket.if_nametoindex(scope)
    except OSError:
        hint = "`ip link` lists them"
        raise errno_error(errno.ENODEV, f"there is no network interface {scope!r}", hint) from None


def is_local(address: Address) -> bool:
    """Whether a numeric address is a wildcard, or an interface of this machine has it."""
    host = address[0] or "0.0.0.0"
    return host in _ANY or has_address(host)


def is_loopback(address: Address) -> bool:
    """Whether a numeric address is a loopback address, which belongs to no RDMA device."""
    ip = _ip(address[0].partition("%")[0] or "0.0.0.0")
    return (getattr(ip, "ipv4_mapped", None) or ip).is_loopback


def from_gid(gid: bytes) -> str:
    """The IP address that a GID of RoCE stands for."""
    ip = ipaddress.IPv6Address(gid)
    return str(ip.ipv4_mapped or ip)


def from_sockaddr(pointer: Any) -> Address | None:
    """(host, port) of a `struct sockaddr *`; None if it holds no IP address."""
    if not pointer:
        return None
    family, port, address = _IPV4.unpack(ffi.buffer(pointer, _IPV4.size))
    if family == _AF_INET:
        return socket.inet_ntop(_AF_INET, address), socket.ntohs(port)
    if family == socket.AF_INET6:
        sin6 = ffi.cast("struct sockaddr_in6 *", pointer)
        ip6 = ipaddress.IPv6Address(bytes(ffi.buffer(ffi.addressof(sin6, "sin6_addr"), 16)))
        scope = f"%{sin6.sin6_scope_id}" if ip6.is_link_local and sin6.sin6_scope_id else ""
        return f"{ip6}{scope}", socket.ntohs(sin6.sin6_port)
    return None


async def look_up(
    host: str | None, port: int, *, passive: bool = False, **hints: int
) -> list[Address]:
    """Numeric addresses for a name, by the loop's resolver; numeric hosts need no resolver.

    rdma_getaddrinfo is not used: it blocks, without a bound if ibacm hangs.  The loop's resolver
    has no bound either: the caller's deadline ends the wait; the resolver may go on in a thread.

    Args:
        host: Name or numeric address; None or "" for none.
        port: Port.
        passive: Whether the addresses are to listen on.
        hints: As for `getaddrinfo`; by default those for streams.

    Returns:
        Each address once, in the resolver's order; for no host, loopback or (`passive`) wildcards.

    Raises:
        TypeError, ValueError: Not a port.
        socket.gaierror: The name does not resolve.
    """
    check_port(port)
    if not host:
        return [(any_, port) for any_ in _ANY] if passive else [("127.0.0.1", port)]
    try:
        ip = _ip(host.partition("%")[0])
    except ValueError:
        usual = {"type": socket.SOCK_STREAM, "flags": socket.AI_PASSIVE if passive else 0}
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host, port, **{**usual, **hints})
        except socket.gaierror as exc:
            code, words = exc.args
            raise HostNotFoundError(code, f"{host}: {words}") from None
        except RuntimeError as exc:  # of the loop's executor
            raise errno_error(errno.EAGAIN, f"{host} was not looked up: {exc}") from exc
        hosts = (f"{sa[0]}%{sa[3]}" if len(sa) == 4 and sa[3] else str(sa[0]) for *_, sa in found)
        return [(numeric, port) for numeric in dict.fromkeys(hosts)]
    mapped = getattr(ip, "ipv4_mapped", None)
    return [(host if mapped is None else str(mapped), port)]
