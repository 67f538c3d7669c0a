"""DatagramConfig: every number of a datagram endpoint, with its unit; and addresses of peers."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Any, NamedTuple

from aiordma.link.config_check import check_numbers, check_seconds

__all__ = ["DatagramAddress", "DatagramConfig", "Key", "key_of"]

# Kind and parts of a destination: ("service", host, port), ("group", host, 0), ("queue", host,
# qpn).
Key = tuple[str, str, int]


class DatagramAddress(NamedTuple):
    """The sender of a datagram, as `datagram_received` gets it and `sendto` takes it.

    A datagram carries no port.  If this endpoint has asked for the service that sent it, `host` and
    `port` are those of the service; otherwise the port is 0.

    Attributes:
        host: The sender's IP address.
        port: The sender's port, or 0.
        qpn: The number of the sender's queue pair, to which an answer goes.
    """

    host: str
    port: int
    qpn: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DatagramConfig:
    """Settings of a datagram endpoint.

    Attributes:
        recv_depth: Datagrams that can arrive ahead of the program, 1 to 16,000.  Each takes 40
            bytes and the MTU of registered memory; a datagram that finds no room is lost.
        send_depth: Datagrams that the adapter has at a time, 1 to 16,000.
        max_buffer_size: Bytes that wait to be sent, in all; a datagram beyond them is dropped,
            and reported to `error_received` as ENOBUFS.  Answers to senders whose next hop is not
            known yet take at most half of it.
        max_destinations: Destinations that are kept, 1 to 65,536; the destination that was not used
            for longest is forgotten first.
        max_sources: Senders whose addresses are remembered, 1 to 65,536; the sender that is known
            for longest is forgotten first.
        max_unresolved_sources: Senders to be answered whose next hop the kernel does not know and
            resolves, at a time, 1 to 1,024.  As many again wait; when another comes, the sender
            that has waited longest is given up: its answers are reported to `error_received` as
            ENOBUFS.  Such a sender may have forged its address; the kernel has room for 1,024
            neighbors by default, and keeps each that is silent for 3 s.
        resolve_timeout_s: Seconds in which a destination has to be found, from the moment it is
            looked for: 32 services and groups are looked for at a time, and the others wait.
        refresh_s: Seconds after which a destination that is still used is looked for again: a
            service that was restarted has another queue pair; no event reports it.  None: never.
        close_timeout_s: Seconds that `close()` waits until sent datagrams have left.
    """

    recv_depth: int = 256
    send_depth: int = 64
    max_buffer_size: int = 4 << 20
    max_destinations: int = 1024
    max_sources: int = 4096
    max_unresolved_sources: int = 128
    resolve_timeout_s: float = 5.0
    refresh_s: float | None = 30.0
    close_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        check_numbers(
            self,
            (
                ("recv_depth", 1, 16_000),
                ("send_depth", 1, 16_000),
                ("max_buffer_size", 1, 1 << 50),
                ("max_destinations", 1, 1 << 16),
                ("max_sources", 1, 1 << 16),
                ("max_unresolved_sources", 1, 1 << 10),
            ),
        )
        names = ("resolve_timeout_s", "refresh_s", "close_timeout_s")
        check_seconds(self, names, optional=("refresh_s",))


def key_of(address: Any) -> Key:
    """The destination that an address of `sendto` names.

    Raises:
        TypeError: Not a tuple of a str and ints.
        ValueError: The host is not numeric, or a number is out of range.
    """
    if not isinstance(address, tuple) or not 2 <= len(address) <= 4:
        msg = f"an address is (host, port) or a DatagramAddress, not {address!r}"
        raise TypeError(msg)
    host, port, *rest = address
    if not isinstance(host, str) or not all(isinstance(n, int) for n in (port, *rest)):
        msg = f"an address is a str and ints, not {address!r}"
        raise TypeError(msg)
    if not 0 <= port <= 0xFFFF:
        msg = f"port {port} is not in 0..65535"
        raise ValueError(msg)
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        msg = f"sendto() takes numeric addresses, not {host!r}: getaddrinfo() finds them"
        raise ValueError(msg) from None
    if ip.is_multicast:
        return ("group", str(ip), 0)
    if len(rest) == 1 and rest[0]:
        if not 0 < rest[0] < 1 << 24:
            msg = f"queue pair {rest[0]} is not in 1..16777215"
            raise ValueError(msg)
        return ("queue", str(ip), rest[0])
    if not port:
        msg = f"{address!r} has neither a port nor a queue pair"
        raise ValueError(msg)
    scope = f"%{rest[1]}" if len(rest) == 2 and rest[1] and "%" not in host else ""
    return ("service", f"{ip}{scope}", port)
