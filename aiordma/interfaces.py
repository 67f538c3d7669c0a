"""The addresses of this network namespace.

Network namespaces may share an RDMA device: its table of GIDs then names the addresses of all.
"""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path

__all__ = ["eui_64", "has_address"]

_ANY_PORT = 9  # nothing is sent


def has_address(host: str) -> bool:
    """Whether an interface of this network namespace has a numeric address.

    The answer comes from the routing table, which knows each address of an interface that is up: a
    packet to one of these addresses has it as its source, too.  For IPv4 the socket has to be bound
    to it, as otherwise a packet to a secondary address comes from the primary one.  The bind proves
    nothing by itself: it succeeds with any address under `ip_nonlocal_bind`, and in a namespace
    whose loopback interface is down.

    Args:
        host: IPv4 or IPv6, with a scope if it is link-local (`fe80::1%eth0`).
    """
    ip = _ip(host)
    family = socket.AF_INET if ip.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            if ip.version == 4:
                probe.bind((host, 0))
            probe.connect((host, _ANY_PORT))
        except OSError:
            return False
        return _ip(probe.getsockname()[0]) == ip and not ip.is_multicast


def eui_64(name: str) -> bytes:
    """The last 8 bytes of the link-local address made from a hardware address (RFC 4291).

    Args:
        name: The interface; empty bytes if it has no Ethernet address.
    """
    try:
        mac = bytes.fromhex(Path(f"/sys/class/net/{name}/address").read_text().replace(":", ""))
    except OSError:
        return b""
    return bytes((mac[0] ^ 2, *mac[1:3], 0xFF, 0xFE, *mac[3:])) if len(mac) == 6 else b""


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(host.partition("%")[0])
