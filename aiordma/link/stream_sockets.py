"""Sockets beside streams: those that a program gives, and the stand-ins that it gets.

A socket of a program cannot change its kind.  A socket that is not connected and does not listen
has nothing but an address so far, and a server over RDMA can take its place there.
"""

from __future__ import annotations

import errno
import socket
from typing import Any, Protocol

from aiordma.cm.address import Address
from aiordma.link.transport_socket import RdmaTransportSocket, SocketOption, address_of

__all__ = ["listening_socket", "obstacle", "only_ipv6", "stream_socket", "take_place"]

_INTERNET = (socket.AF_INET, socket.AF_INET6)


class Settings(Protocol):
    """The part of a `StreamConfig` that a stand-in shows."""

    @property
    def receive_buffer_size(self) -> int:
        """Bytes."""

    @property
    def send_buffer_size(self) -> int:
        """Bytes."""

    @property
    def keepalive_s(self) -> float | None:
        """Seconds; None for never."""

    @property
    def tos(self) -> int | None:
        """The type of service; None for that of the host."""


def obstacle(sock: Any) -> str | None:
    """The reason to use a socket itself, to follow "the socket"; None if there is none."""
    if sock.family not in _INTERNET or sock.type != socket.SOCK_STREAM:
        return "is no stream socket of IPv4 or IPv6"
    if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return "listens already"
    try:
        sock.getpeername()
    except OSError as exc:
        if exc.errno == errno.ENOTCONN:
            return None
        raise
    return "is connected already"


def only_ipv6(sock: Any) -> bool:
    """Whether a socket is of IPv6 and accepts no client of IPv4."""
    if sock.family != socket.AF_INET6:
        return False
    return bool(sock.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY))


def take_place(sock: Any) -> Address:
    """The address that a server over RDMA listens on instead of a socket.

    A socket that is not bound yet is bound first, so that `getsockname()` knows the port.  It stays
    open, so that the port is taken for other programs, too.

    Raises:
        ValueError: It listens, is connected, or is of another kind.
        OSError: It cannot be bound.
    """
    reason = obstacle(sock)
    if reason is not None:
        msg = f"a server over RDMA cannot take the place of the socket: it {reason}"
        raise ValueError(msg)
    # Software iWARP listens with a TCP socket of its own, on the same address.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if not sock.getsockname()[1]:
        sock.bind(("", 0))
    return address_of(sock.getsockname())


def stream_socket(
    sockname: Address, peername: Address | None, config: Settings
) -> RdmaTransportSocket:
    """The stand-in of a connection."""
    facts = {**_buffers(config), **_type_of_service(sockname, config)}
    keepalive = {(socket.SOL_SOCKET, socket.SO_KEEPALIVE): int(config.keepalive_s is not None)}
    return RdmaTransportSocket(sockname, peername, facts=facts, defaults=keepalive)


def listening_socket(sockname: Address, config: Settings) -> RdmaTransportSocket:
    """The stand-in of a server, for one of its addresses."""
    facts = {**_buffers(config), (socket.SOL_SOCKET, socket.SO_ACCEPTCONN): 1}
    if ":" in sockname[0]:
        facts[socket.IPPROTO_IPV6, socket.IPV6_V6ONLY] = 1
    free_at_once = {(socket.SOL_SOCKET, socket.SO_REUSEADDR): 1}
    return RdmaTransportSocket(sockname, facts=facts, defaults=free_at_once)


def _buffers(config: Settings) -> dict[SocketOption, int]:
    return {
        (socket.SOL_SOCKET, socket.SO_RCVBUF): config.receive_buffer_size,
        (socket.SOL_SOCKET, socket.SO_SNDBUF): config.send_buffer_size,
    }


def _type_of_service(sockname: Address, config: Settings) -> dict[SocketOption, int]:
    if config.tos is None:
        return {}
    if ":" in sockname[0]:
        return {(socket.IPPROTO_IPV6, socket.IPV6_TCLASS): config.tos}
    return {(socket.IPPROTO_IP, socket.IP_TOS): config.tos}
