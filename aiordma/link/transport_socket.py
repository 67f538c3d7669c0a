"""RdmaTransportSocket: stands for the socket of an RDMA transport or server."""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Mapping
from typing import Any, NoReturn

from aiordma.cm.address import Address
from aiordma.loop.uncopied import Uncopied

__all__ = ["RdmaTransportSocket", "SocketAddress", "SocketOption", "address_of", "shown"]

#: As `socket.getsockname()` has it: (host, port), for IPv6 (host, port, flow, scope).
SocketAddress = tuple[str, int] | tuple[str, int, int, int]
#: (level, option), as `socket.setsockopt` takes them.
SocketOption = tuple[int, int]

_INT = struct.Struct("i")
_KINDS = {socket.SOCK_STREAM: socket.IPPROTO_TCP, socket.SOCK_DGRAM: socket.IPPROTO_UDP}
# Values of options that the program has not set.
_DEFAULTS: dict[SocketOption, int] = {
    (socket.SOL_SOCKET, socket.SO_BROADCAST): 0,
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 0,
    (socket.SOL_SOCKET, socket.SO_OOBINLINE): 0,
    (socket.SOL_SOCKET, socket.SO_REUSEADDR): 0,
    (socket.SOL_SOCKET, socket.SO_REUSEPORT): 0,
    (socket.IPPROTO_TCP, socket.TCP_NODELAY): 1,
}


class RdmaTransportSocket(Uncopied):
    """The stand-in for the socket of an RDMA transport or server, as `asyncio.TransportSocket` is.

    `get_extra_info("socket")` of a transport gives it, and `sockets` of a server has one for each
    address.  There is no socket behind it: `fileno()` is -1, and calls that would change the
    connection past its transport are refused.

    Options can be set and asked for, so that programs that tune their connections run unchanged.
    No option has an effect: the settings of RDMA are in `StreamConfig`.

    Args:
        sockname: Local (address, port).
        peername: Address and port of the peer, None if there is no peer.
        kind: `socket.SOCK_STREAM` or `socket.SOCK_DGRAM`.
        facts: Options whose value is known and cannot be set: {(level, option): value}.
        defaults: Options whose value is this until the program sets them.
    """

    __slots__ = ("__weakref__", "_defaults", "_facts", "_kind", "_peername", "_set", "_sockname")

    def __init__(
        self,
        sockname: Address,
        peername: Address | None = None,
        kind: socket.SocketKind = socket.SOCK_STREAM,
        *,
        facts: Mapping[SocketOption, int] | None = None,
        defaults: Mapping[SocketOption, int] | None = None,
    ) -> None:
        self._sockname = sockname
        self._peername = peername
        self._kind = kind
        self._facts = facts or {}
        self._defaults = defaults or {}
        self._set: dict[SocketOption, int | bytes] = {}

    @property
    def family(self) -> socket.AddressFamily:
        """`socket.AF_INET` or `AF_INET6`, as the local address."""
        return socket.AF_INET6 if ":" in self._sockname[0] else socket.AF_INET

    @property
    def type(self) -> socket.SocketKind:
        """`socket.SOCK_STREAM`, or `SOCK_DGRAM` for a datagram endpoint."""
        return self._kind

    @property
    def proto(self) -> int:
        """`socket.IPPROTO_TCP`, or `IPPROTO_UDP` for a datagram endpoint."""
        return _KINDS[self._kind]

    def fileno(self) -> int:
        """-1: no descriptor."""
        return -1

    def getsockname(self) -> SocketAddress:
        """Local address and port, in the form that `socket.socket` has for the family."""
        return _as_socket(self._sockname)

    def getpeername(self) -> SocketAddress:
        """Address and port of the peer, in the same form.

        Raises:
            OSError: ENOTCONN, it belongs to a server, or to an endpoint without a peer.
        """
        if self._peername is None:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        return _as_socket(self._peername)

    def getsockopt(self, level: int, option: int, buflen: int = 0) -> int | bytes:
        """Return the value of an option: its real value if it has one, else the value that was set.

        Args:
            level: As `socket.SOL_SOCKET`.
            option: As `socket.SO_KEEPALIVE`.
            buflen: Bytes to return of the value; 0 for a number.

        Raises:
            OSError: ENOPROTOOPT, the option was not set and has no value here; EINVAL, the value
                is no number.
        """
        value = self._value((level, option))
        if not buflen:
            if isinstance(value, bytes):
                if len(value) != _INT.size:
                    raise OSError(errno.EINVAL, f"option {option} has {len(value)} bytes")
                (value,) = _INT.unpack(value)
            return value
        return (value if isinstance(value, bytes) else _INT.pack(value))[:buflen]

    def _value(self, key: SocketOption) -> int | bytes:
        own = {
            (socket.SOL_SOCKET, socket.SO_TYPE): int(self._kind),
            (socket.SOL_SOCKET, socket.SO_DOMAIN): int(self.family),
            (socket.SOL_SOCKET, socket.SO_PROTOCOL): self.proto,
            (socket.SOL_SOCKET, socket.SO_ACCEPTCONN): 0,
            (socket.SOL_SOCKET, socket.SO_ERROR): 0,
        }
        for known in (self._facts, own, self._set, self._defaults, _DEFAULTS):
            if key in known:
                return known[key]
        raise OSError(errno.ENOPROTOOPT, os.strerror(errno.ENOPROTOOPT))

    def setsockopt(
        self, level: int, option: int, value: int | bytes | None, optlen: int | None = None
    ) -> None:
        """Keep the value of an option, for `getsockopt`; it has no effect.

        Args:
            level: As `socket.SOL_SOCKET`.
            option: As `socket.SO_KEEPALIVE`.
            value: A number, or bytes-like.
            optlen: Number of zero bytes, if `value` is None, as for `socket.setsockopt`.

        Raises:
            TypeError: An argument is of another type.
            OverflowError: The number does not fit into a C int.
        """
        for name, number in (("level", level), ("option", option)):
            if not isinstance(number, int):
                msg = f"{name} has to be an int, not {number!r}"
                raise TypeError(msg)
        if (value is None) != (optlen is not None):
            msg = "optlen needs the value None"
            raise TypeError(msg)
        kept: int | bytes
        if isinstance(value, int):
            if not -(1 << 31) <= value < 1 << 31:
                msg = f"option value {value} does not fit into a C int"
                raise OverflowError(msg)
            kept = int(value)
        elif value is None:
            kept = bytes(optlen or 0)
        else:
            kept = bytes(memoryview(value))
        self._set[level, option] = kept

    def getblocking(self) -> bool:
        """False, as for every socket of asyncio."""
        return False

    def setblocking(self, flag: bool) -> None:
        """Accept False, which it is.

        Raises:
            ValueError: `flag` is true.
        """
        if flag:
            msg = "setblocking(): transport sockets cannot be blocking"
            raise ValueError(msg)

    def gettimeout(self) -> float:
        """0, as for every socket of asyncio."""
        return 0

    def settimeout(self, value: float | None) -> None:
        """Accept 0, which it is.

        Raises:
            ValueError: `value` is not 0.
        """
        if value != 0:
            msg = "settimeout(): only 0 timeout is allowed on transport sockets"
            raise ValueError(msg)

    def get_inheritable(self) -> bool:
        """False: there is no descriptor to inherit."""
        return False

    def shutdown(self, how: int) -> NoReturn:
        """Not possible; use `write_eof`, `close` or `abort` of the transport.

        Args:
            how: As `socket.SHUT_WR`; ignored.

        Raises:
            OSError: EOPNOTSUPP, always.
        """
        text = "an RDMA connection has no socket: use write_eof() or close() of its transport"
        raise OSError(errno.EOPNOTSUPP, text)

    def dup(self) -> NoReturn:
        """Not possible.

        Raises:
            OSError: EOPNOTSUPP, always.
        """
        raise OSError(errno.EOPNOTSUPP, "an RDMA connection has no socket to duplicate")

    def __repr__(self) -> str:
        peer = "" if self._peername is None else f", raddr={self.getpeername()}"
        return (
            f"<{type(self).__name__} fd=-1, family={self.family!s}, type={self.type!s}, "
            f"proto={self.proto}, laddr={self.getsockname()}{peer}>"
        )


def address_of(sockaddr: Any) -> Address:
    """(host, port) of an address of `getsockname` or `getaddrinfo`; the host with its scope."""
    scope = f"%{sockaddr[3]}" if len(sockaddr) == 4 and sockaddr[3] else ""
    return f"{sockaddr[0]}{scope}", sockaddr[1]


def shown(name: str, fact: Any) -> Any:
    """A fact as `get_extra_info` of asyncio shows it: an address of IPv6 has four parts."""
    return _as_socket(fact) if name in ("peername", "sockname") and fact else fact


def _as_socket(address: Address) -> SocketAddress:
    host, port = address
    if ":" not in host:
        return host, port
    name, _, scope = host.partition("%")
    return name, port, 0, _scope_id(scope)


def _scope_id(scope: str) -> int:
    if not scope or scope.isdecimal():
        return int(scope or 0)
    return socket.if_nametoindex(scope)
