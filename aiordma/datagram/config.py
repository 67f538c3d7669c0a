"""The settings of a datagram endpoint (`DatagramConfig`), and the addresses of its peers."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from aiordma.link.settings import SECONDS, Between, check_settings, suggesting

__all__ = ["DatagramAddress", "DatagramConfig", "Key", "key_of"]

# A destination: ("service", host, port), ("group", host, 0) or ("queue", host, qpn).
Key = tuple[str, str, int]


class DatagramAddress(NamedTuple):
    """The sender of a datagram, as `datagram_received` gets it and `sendto` takes it.

    A datagram carries no port.  If the sender is a service that this endpoint has sent to, `host`
    and `port` are those of the service; otherwise the port is 0.

    Attributes:
        host: The sender's IP address.
        port: The sender's port, or 0.
        qpn: The number of the sender's queue pair, to which an answer is sent.
    """

    host: str
    port: int
    qpn: int


@suggesting
@dataclass(frozen=True, slots=True, kw_only=True)
class DatagramConfig:
    """Settings of a datagram endpoint.

    Attributes:
        recv_depth: How many datagrams can arrive before the program handles them, 1 to 16,000.
            Each takes the MTU plus 40 bytes of registered memory.  A datagram for which there is no
            receive is lost.
        max_buffer_size: Bytes of all datagrams that wait to be sent.  A further datagram is
            dropped, and reported to `error_received` as ENOBUFS.  Answers to senders whose next hop
            is not known yet may take half of it.
        resolve_timeout_s: Seconds within which a destination has to be resolved.  They are counted
            from the moment when its resolution begins: 32 services and groups are resolved at a
            time, and others wait for them.
        refresh_s: Seconds after which a destination that is still in use is resolved again, because
            a service that was restarted has another queue pair, and no event reports that.  None:
            never.
    """

    recv_depth: Annotated[int, Between(1, 16_000)] = 256
    max_buffer_size: Annotated[int, Between(1, 1 << 50)] = 4 << 20
    resolve_timeout_s: Annotated[float, SECONDS] = 5.0
    refresh_s: Annotated[float | None, SECONDS] = 30.0

    def __post_init__(self) -> None:
        check_settings(self)


def key_of(address: Any) -> Key:
    """The destination that an address of `sendto` names.

    Raises:
        TypeError: It is not a tuple of a str and ints.
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
