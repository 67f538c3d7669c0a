"""Packets of RoCE v2 with forged addresses, on the wire between the two hosts."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.native_ends import beside

__all__ = ["forged_datagrams", "forged_request"]

_SEND_ONLY, _UDP = 0x64, 4791
_KEY = 0x01234567
_CM_QPN, _CM_KEY = 1, 0x80010000  # the queue pair of the connection manager
_CM_CLASS, _SEND, _CM_REQUEST = 7, 3, 0x10
_TCP_SPACE = 0x01060000  # a service id is a port in a port space
_TICK_S = 0.05  # where time is virtual the clock of the loop has steps of 10 ms


def _mac(card: str) -> bytes:
    text = Path(f"/sys/class/net/{card}/address").read_text().strip()
    return bytes.fromhex(text.replace(":", ""))


def _packet(source: str, to: str, qpn: int, source_qpn: int, key: int, data: bytes) -> bytes:
    """A packet of RoCE v2 with a datagram, from any address."""
    transport = struct.pack("!BBHII", _SEND_ONLY, 0x40, 0xFFFF, qpn, random.getrandbits(24))
    rest = struct.pack("!II", key, source_qpn) + data
    size = 20 + 8 + len(transport) + len(rest) + 4

    def ip(tos: int, ttl: int, check: int) -> bytes:
        ends = socket.inet_aton(source) + socket.inet_aton(to)
        return struct.pack("!BBHHHBBH", 0x45, tos, size, 0, 0x4000, ttl, 17, check) + ends

    def udp(check: int) -> bytes:
        return struct.pack("!HHHH", 0xC000, _UDP, size - 20, check)

    # What routers change counts as ones in the check of the content.
    fixed = transport[:4] + b"\xff" + transport[5:]
    content = b"\xff" * 8 + ip(0xFF, 0xFF, 0xFFFF) + udp(0xFFFF) + fixed + rest
    total = sum(struct.unpack("!10H", ip(0, 64, 0)))
    total = (total & 0xFFFF) + (total >> 16)
    total = (total & 0xFFFF) + (total >> 16)
    head = ip(0, 64, ~total & 0xFFFF) + udp(0)
    return head + transport + rest + struct.pack("<I", zlib.crc32(content))


@asynccontextmanager
async def forged_datagrams(address: str, qpn: int, rate: float) -> AsyncIterator[None]:
    """Send datagrams to a queue pair on the first host, from ever new sources that do not exist.

    Args:
        address: The first host's.
        qpn: The queue pair.
        rate: Datagrams a second.
    """
    net = address.rpartition(".")[0]
    head = _mac("veth0") + _mac("veth1") + b"\x08\x00"

    async def send() -> None:
        number = 0
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as raw:
            raw.bind(("veth1", 0))
            while True:
                for _ in range(round(rate * _TICK_S)):
                    number += 1
                    source = f"{net}.{100 + number % 150}"
                    raw.send(head + _packet(source, address, qpn, 0x1000 + number, _KEY, b"evil"))
                await asyncio.sleep(_TICK_S)

    async with beside(send()):
        yield


def forged_request(source: str, to: str, port: int, named: str, private_data: bytes) -> None:
    """Send a request of the connection manager from the second host to a listener on the first.

    Args:
        source: The second host's address, from which the packet comes and where the path leads.
        to: The first host's.
        port: The listener's.
        named: The client's address as the request has it.
        private_data: The program's, up to 56 bytes.
    """
    head = struct.pack("!BBBBHHQHHI", 1, _CM_CLASS, 2, _SEND, 0, 0, 1, _CM_REQUEST, 0, 0)
    queue_pair = struct.pack(
        "!IIQQIIIIIIHBB",
        *(random.getrandbits(32), 0, _TCP_SPACE + port, 1, 0, 0),
        *(0x123 << 8 | 4, 4, 20 << 3 | 1, 1 << 8 | 20 << 3 | 7, 0xFFFF, 3 << 4 | 7, 15 << 4),
    )
    lids = struct.pack("!HH", 0xFFFF, 0xFFFF)
    path = lids + _gid(source) + _gid(to) + struct.pack("!IBBBB", 3, 0, 64, 1 << 3, 14 << 3)
    ends = bytes(12) + socket.inet_aton(named) + bytes(12) + socket.inet_aton(to)
    addresses = struct.pack("!BBH", 0, 4 << 4, 40_000) + ends
    request = head + queue_pair + path + bytes(44) + addresses + private_data.ljust(56, b"\0")
    frame = _mac("veth0") + _mac("veth1") + b"\x08\x00"
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as raw:
        raw.bind(("veth1", 0))
        raw.send(frame + _packet(source, to, _CM_QPN, _CM_QPN, _CM_KEY, request))


def _gid(address: str) -> bytes:
    return bytes(10) + b"\xff\xff" + socket.inet_aton(address)
