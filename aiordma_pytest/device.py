"""The device that the fixtures use."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import IPv6Address
from pathlib import Path

import aiordma
from aiordma import RdmaStreamReader, RdmaStreamWriter
from aiordma.cm import ConnectionId, EventChannel

__all__ = ["DeviceError", "address", "device", "stream_pair"]

StreamEnd = tuple[RdmaStreamReader, RdmaStreamWriter]


_DEVICES = Path("/sys/class/infiniband")
_SIOCGIFADDR = 0x8915
_IFREQ = struct.Struct("16sHH4s16x")  # with a sockaddr_in


class DeviceError(Exception):
    """There is a device, and it has no address."""


def address() -> str:
    """Return the address of the device: the fabric's, softroce's, or that of the first active one.

    Raises:
        DeviceError: none is active, or its network card has no address.
    """
    for name in ("AIORDMA_FABRIC_ADDR", "AIORDMA_SOFTROCE_ADDR"):
        if told := os.environ.get(name):
            return told
    names = _active()
    if not names:
        raise DeviceError("no RDMA device has an active port")
    for card in _cards(names[0]):
        if found := _ipv4(card) or _ipv6(card):
            return found
    raise DeviceError(f"the RDMA device {names[0]} has no IP address: give its network card one")


def _active() -> list[str]:
    """The names of the devices with an active port."""
    found = []
    for state in sorted(_DEVICES.glob("*/ports/*/state")):
        # A device may go away between the listing and the reading.
        with contextlib.suppress(OSError):
            if "ACTIVE" in state.read_text():
                found.append(state.parts[-4])
    return found


def _cards(device: str) -> list[str]:
    """The network cards of a device."""
    cards = sorted(path.name for path in (_DEVICES / device / "device/net").glob("*"))
    if not cards:
        # Software devices have no hardware parent; they name their card themselves.
        with contextlib.suppress(OSError):
            cards = [(_DEVICES / device / "parent").read_text().strip()]
    return cards


def _ipv4(card: str) -> str:
    """The first IPv4 address of a card; empty if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        asked = _IFREQ.pack(card.encode(), 0, 0, b"")
        try:
            told = fcntl.ioctl(any_socket, _SIOCGIFADDR, asked)
        except OSError:
            return ""
    return socket.inet_ntoa(_IFREQ.unpack(told)[3])


def _ipv6(card: str) -> str:
    """The first IPv6 address of a card that is not link-local; empty if it has none."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            found = IPv6Address(bytes.fromhex(digits))
            if name == card and not found.is_link_local:
                return str(found)
    return ""


def device(address: str) -> aiordma.Device:
    """Return the device that the connection manager finds for this address; else the first."""
    name = _name_of(address)
    found = aiordma.devices()
    return next((each for each in found if each.name == name), found[0])


def _name_of(address: str) -> str | None:
    """The name of the device that the connection manager finds for an address."""
    with (
        contextlib.suppress(OSError),  # an address of no card
        EventChannel() as channel,
        ConnectionId(channel) as cm_id,
    ):
        cm_id.bind_addr((address, 0))
        return cm_id.context.name if cm_id.context is not None else None
    return None


@asynccontextmanager
async def stream_pair(address: str, seconds: float) -> AsyncIterator[tuple[StreamEnd, StreamEnd]]:
    """Two ends of a stream, each (reader, writer): the client's and the server's."""
    accepted: asyncio.Future[StreamEnd] = asyncio.get_running_loop().create_future()

    def note(reader: RdmaStreamReader, writer: RdmaStreamWriter) -> None:
        if not accepted.done():
            accepted.set_result((reader, writer))

    async with await aiordma.start_server(note, address, 0) as server:
        async with asyncio.timeout(seconds):
            client = await aiordma.open_connection(address, server.port)
        try:
            async with asyncio.timeout(seconds):
                remote = await accepted
            try:
                yield client, remote
            finally:
                await _close(remote[1])
        finally:
            await _close(client[1])


async def _close(writer: RdmaStreamWriter) -> None:
    writer.close()
    try:
        await writer.wait_closed()
    except OSError:
        return  # a test may have broken it
