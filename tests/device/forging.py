"""Datagrams with forged source addresses, on the wire between the two hosts."""

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

__all__ = ["forged_datagrams"]

_SEND_ONLY, _KEY, _UDP = 0x64, 0x01234567, 4791
_TICK_S = 0.05  # where time is virtual the clock of the loop has steps of 10 ms


def _mac(card: str) -> bytes:
    text = Path(f"/sys/class/net/{card}/address").read_text().strip()
    return bytes.fromhex(text.replace(":", ""))


def _packet(source: str, to: str, qpn: int, source_qpn: int) -> bytes:
    """A packet of RoCE v2 with a datagram, from any address."""
    transport = struct.pack("!BBHII", _SEND_ONLY, 0x40, 0xFFFF, qpn, random.getrandbits(24))
    rest = struct.pack("!II", _KEY, source_qpn) + b"evil"
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
                    raw.send(head + _packet(source, address, qpn, 0x1000 + number))
                await asyncio.sleep(_TICK_S)

    async with beside(send()):
        yield
