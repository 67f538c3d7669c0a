"""Neighbors: whether the kernel knows the next hop to an address, asked by rtnetlink(7).

Theory of operation
    An address handle holds the hardware address of the next hop.  If the kernel does not know it,
    ibv_create_ah(3) asks the network, and blocks its thread for seconds if there is no answer.  So
    peers that forge their source addresses could block every thread.

    `look` asks the kernel for the route and for the neighbor entry of its next hop, which takes
    two short calls.  `Neighbors.wait` has the kernel resolve a neighbor, by an empty datagram to
    the discard port of the next hop, as libibverbs does, and then waits for the kernel's message
    about that neighbor.  No thread is held while the network is silent.

    A host that sends to this host has usually asked for its hardware address before.  From that the
    kernel has learned the sender's hardware address, and `look` finds it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from aiordma.errors import errno_error
from aiordma.loop.pump import FdPump
from aiordma.loop.workers import answering, call_blocking

__all__ = ["Neighbors", "NextHop", "look"]

_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
_ROUTE = struct.Struct("=8BI")  # rtmsg: family, dst_len, src_len, tos, table, protocol, scope, type
_NEIGHBOR = struct.Struct("=BxxxiHBB")  # ndmsg: family, interface, state, flags, type
_ATTRIBUTE = struct.Struct("=HH")  # rtattr: length, type
_NUMBER = struct.Struct("=I")  # index of an interface
_FAMILY = struct.Struct("=H")  # of an address of either family
_CODE = struct.Struct("=i")  # negative errno

_REQUEST = 1
_ERROR = 2
_NEW_NEIGHBOR, _GET_ROUTE, _GET_NEIGHBOR = 28, 26, 30
_NEIGHBOR_GROUP = 4  # RTMGRP_NEIGH
_RTA_DST, _RTA_SRC, _RTA_OIF, _RTA_GATEWAY, _RTA_VIA = 1, 2, 4, 5, 18
_NDA_DST = 1
_UNICAST, _LOCAL = 1, 2
# PERMANENT, NOARP, PROBE, DELAY, STALE, REACHABLE: the entry has a hardware address to use.
_VALID = 0x80 | 0x40 | 0x10 | 0x08 | 0x04 | 0x02
_NUD_FAILED = 0x20

_ROOM = 1 << 16
_MESSAGES = 64  # to be read before other callbacks have a turn
_DISCARD_PORT = 9
_PATIENCE_S = 1.0  # the kernel answers a request at once; the bound is for a bug
AGAIN_S = 1.0  # between looks, if no netlink socket could be opened
_IP_UNICAST_IF, _IPV6_UNICAST_IF = 50, 76


@dataclass(frozen=True, slots=True)
class NextHop:
    """The next hop of packets to an address.

    Attributes:
        address: The host itself, a gateway, or an address of this machine; numeric, without a zone.
        interface: Index of the network interface.
        known: Whether the kernel has the hop's hardware address, or needs none.
    """

    address: str
    interface: int
    known: bool


def look(host: str, source: str = "", interface: int = 0) -> NextHop | None:
    """Ask the kernel for the next hop to a unicast address, by a few short system calls.

    Args:
        host: Numeric address, without a zone.
        source: Numeric local address that packets leave from; "" for any.
        interface: Index of the network interface that they leave by; 0 for any.

    Returns:
        The next hop, or None if the kernel does not report it: no route, no netlink, an old kernel.
    """
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as netlink:
            netlink.settimeout(_PATIENCE_S)
            return _look(netlink, host, source, interface)
    except (OSError, ValueError, KeyError, struct.error):
        return None


def _look(netlink: socket.socket, host: str, source: str, interface: int) -> NextHop | None:
    to = ipaddress.ip_address(host)
    family = socket.AF_INET if to.version == 4 else socket.AF_INET6
    attributes = _attribute(_RTA_DST, to.packed)
    if source:
        attributes += _attribute(_RTA_SRC, ipaddress.ip_address(source).packed)
    if interface:
        attributes += _attribute(_RTA_OIF, _NUMBER.pack(interface))
    bits = to.max_prefixlen
    route = _ROUTE.pack(family, bits, bits if source else 0, 0, 0, 0, 0, 0, 0)
    answer = _ask(netlink, _GET_ROUTE, route + attributes)
    kind = _ROUTE.unpack_from(answer)[7]
    if kind not in (_UNICAST, _LOCAL):
        return None
    said = dict(_attributes(answer[_ROUTE.size :]))
    (out,) = _NUMBER.unpack(said[_RTA_OIF])
    if kind == _LOCAL:
        return NextHop(str(to), out, known=True)
    hop = to.packed
    if _RTA_GATEWAY in said:
        hop = said[_RTA_GATEWAY]
    elif _RTA_VIA in said:  # a gateway of the other family, which is its first two bytes
        (family,), hop = _FAMILY.unpack_from(said[_RTA_VIA]), said[_RTA_VIA][_FAMILY.size :]
    question = _NEIGHBOR.pack(family, out, 0, 0, 0) + _attribute(_NDA_DST, hop)
    try:
        state = _NEIGHBOR.unpack_from(_ask(netlink, _GET_NEIGHBOR, question))[2]
    except FileNotFoundError:
        state = 0  # no entry
    return NextHop(str(ipaddress.ip_address(hop)), out, known=bool(state & _VALID))


def _attribute(kind: int, data: bytes) -> bytes:
    return _ATTRIBUTE.pack(_ATTRIBUTE.size + len(data), kind) + data + bytes(-len(data) % 4)


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(data)
        if length < _ATTRIBUTE.size:
            return
        yield kind, data[_ATTRIBUTE.size : length]
        data = data[length + -length % 4 :]


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= _HEADER.size:
        length, kind, *_ = _HEADER.unpack_from(data)
        if length < _HEADER.size:
            return
        yield kind, data[_HEADER.size : length]
        data = data[length + -length % 4 :]


def _ask(netlink: socket.socket, kind: int, body: bytes) -> bytes:
    """Send a request and return the kernel's answer.

    Raises:
        OSError: The kernel refuses the request.
        ValueError: The answer is empty.
    """
    netlink.send(_HEADER.pack(_HEADER.size + len(body), kind, _REQUEST, 0, 0) + body)
    for answer, content in _messages(netlink.recv(_ROOM)):
        if answer == _ERROR:
            raise OSError(-_CODE.unpack_from(content)[0], "netlink")
        return content
    msg = "netlink has answered nothing"
    raise ValueError(msg)


def have_it_found(hop: NextHop, source: str) -> None:
    """Have the kernel resolve a neighbor, by sending it a datagram.

    Raises:
        OSError: The datagram cannot be sent.
    """
    if ":" in hop.address:
        family, level, option = socket.AF_INET6, socket.IPPROTO_IPV6, _IPV6_UNICAST_IF
        scope: tuple[int, ...] = (0, hop.interface)
    else:
        family, level, option, scope = socket.AF_INET, socket.IPPROTO_IP, _IP_UNICAST_IF, ()
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        # As far as the kernel allows it, the datagram takes the same way as the adapter's packets.
        with contextlib.suppress(OSError):
            sock.setsockopt(level, option, hop.interface.to_bytes(4, "big"))
        with contextlib.suppress(OSError):
            sock.bind((source, 0, *scope))
        sock.sendto(b"", (hop.address, _DISCARD_PORT, *scope))


def open_netlink() -> socket.socket:
    """Open a socket on which the kernel reports changes of neighbors.

    Raises:
        OSError: It cannot be opened.
    """
    netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
    try:
        netlink.bind((0, _NEIGHBOR_GROUP))
    except BaseException:
        netlink.close()
        raise
    return netlink


class Neighbors:
    """Waits until the kernel has resolved neighbors; belongs to an event loop.

    The netlink socket is open as long as there is a wait.
    """

    def __init__(self) -> None:
        self._waiting: dict[tuple[int, bytes], set[asyncio.Future[bool]]] = {}
        self._socket: socket.socket | None = None
        self._pump: FdPump | None = None

    async def wait(self, hop: NextHop, host: str, source: str) -> bool:
        """Have the next hop resolved, and wait until it is.

        The only time limit is the caller's.

        Args:
            hop: The result of `look`.
            host: Numeric address of which it is the next hop.
            source: Numeric local address that packets leave from.

        Returns:
            True; or False if `look` finds no next hop, or the datagram cannot be sent.

        Raises:
            OSError: EHOSTUNREACH, the neighbor does not answer.

        Cancellation: ends the wait.
        """
        loop = asyncio.get_running_loop()
        key = hop.interface, ipaddress.ip_address(hop.address).packed

        def ask() -> NextHop | None:
            now = look(host, source, hop.interface)
            if now is None or now.known:
                return now
            try:
                have_it_found(now, source)
            except OSError:
                return None
            return look(host, source, hop.interface)  # known at once on an interface without ARP

        while True:
            told = loop.create_future()
            self._waiting.setdefault(key, set()).add(told)
            try:
                self._listen(loop)
                now = await call_blocking(ask, undo=lambda _: None, pool=answering)
                if now is None or now.known:
                    return now is not None
                await asyncio.wait([told], timeout=AGAIN_S if self._pump is None else None)
                failed = told.done() and told.result()
            finally:
                self._forget(key, told)
            if failed:
                raise errno_error(errno.EHOSTUNREACH, f"the neighbor {hop.address} does not answer")

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._socket is not None:
            return
        with contextlib.suppress(OSError):
            self._socket = open_netlink()
            self._pump = FdPump(loop, self._socket.fileno(), self._drain, self._on_failed)

    def _forget(self, key: tuple[int, bytes], told: asyncio.Future[bool]) -> None:
        waiting = self._waiting[key]
        waiting.discard(told)
        told.cancel()
        if not waiting:
            del self._waiting[key]
        if not self._waiting:
            self._close()

    def _close(self) -> None:
        if self._pump is not None:
            self._pump.close()
            self._pump = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _on_failed(self, exc: Exception) -> None:
        self._close()
        self._look_again()

    def _look_again(self) -> None:
        for waiting in self._waiting.values():
            _tell(waiting, failed=False)

    def _drain(self) -> bool:
        """Read the kernel's messages; True if there may be more."""
        for _ in range(_MESSAGES):
            if self._socket is None:
                return False
            try:
                data = self._socket.recv(_ROOM)
            except BlockingIOError:
                return False
            except OSError as exc:
                if exc.errno != errno.ENOBUFS:
                    raise
                self._look_again()  # messages were lost
                continue
            for kind, content in _messages(data):
                if kind == _NEW_NEIGHBOR:
                    self._on_neighbor(content)
        return True

    def _on_neighbor(self, content: bytes) -> None:
        _, interface, state, *_ = _NEIGHBOR.unpack_from(content)
        address = dict(_attributes(content[_NEIGHBOR.size :])).get(_NDA_DST, b"")
        if state & (_VALID | _NUD_FAILED):
            _tell(self._waiting.get((interface, address), set()), failed=bool(state & _NUD_FAILED))


def _tell(waiting: set[asyncio.Future[bool]], *, failed: bool) -> None:
    for told in waiting:
        if not told.done():
            told.set_result(failed)
