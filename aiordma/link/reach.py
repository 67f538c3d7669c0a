"""The RDMA device that an address belongs to, or through which it is reached.

The kernel answers both: a datagram socket that is connected to an address has the source address
that the routing table chooses (nothing is sent), and a connection id that is bound to a source
address has its device.  So RoCE, iWARP and IPoIB are all found, without reading a table of GIDs.

Loopback belongs to no device, though librdmacm connects to 127.0.0.1 through the first device: a
program that names loopback means this machine.
"""

from __future__ import annotations

import socket

from aiordma.cm.address import Address
from aiordma.cm.connection_id import ConnectionId
from aiordma.errors import DeviceNotFoundError, LibraryMissingError
from aiordma.link.dialing import shared_channel, warm_up
from aiordma.link.transport_socket import address_of
from aiordma.verbs.device import devices

__all__ = ["device_at", "device_towards"]

_ANY = ("0.0.0.0", "::")


async def device_at(host: str) -> str | None:
    """Return the name of the device of a numeric local address, or None if it has none.

    For a wildcard, the names of all devices.

    Cancellation: safe.
    """
    try:
        await warm_up()
    except (LibraryMissingError, DeviceNotFoundError):
        return None
    if host in _ANY:
        return ", ".join(device.name for device in devices()) or None
    return _bound(host)


async def device_towards(address: Address, local_host: str | None = None) -> str | None:
    """Return the name of the device through which a numeric address is reached, or None.

    Args:
        address: The peer's address and port.
        local_host: Numeric local address; by default the address that the routes choose.

    Cancellation: safe.
    """
    source = local_host if local_host and local_host not in _ANY else _source(address)
    return None if source is None else await device_at(source)


def _bound(host: str) -> str | None:
    channel, release = shared_channel()
    try:
        with ConnectionId(channel) as cm_id:
            try:
                cm_id.bind_addr((host, 0))
                context = cm_id.context
            except OSError:  # no address of this machine, or of an interface without a device
                return None
            return None if context is None else context.name
    finally:
        release()


def _source(address: Address) -> str | None:
    """Return the local address of packets to `address`, or None if there is no route."""
    host, port = address
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # Nothing is sent, so connect() cannot block; but some programs look for blocking sockets.
        probe.setblocking(False)
        try:
            probe.connect((host, port or 9))
        except OSError:
            return None
        return address_of(probe.getsockname())[0]
