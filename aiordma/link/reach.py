"""Which RDMA device an address belongs to, or is reached through.

The kernel's own answers: a datagram socket that is connected to an address has the source
address that its routes choose (nothing is sent), and a connection identifier that is bound to a
source address knows the device behind it.  So RoCE, iWARP and IPoIB are all found, and no table
of GIDs has to be read.

Loopback belongs to no device, though librdmacm connects to 127.0.0.1 through the first one: a
program that says loopback means this machine.
"""

from __future__ import annotations

import socket

from aiordma.cm.address import Address
from aiordma.cm.connection_id import ConnectionId
from aiordma.errors import DeviceNotFoundError, LibraryMissingError
from aiordma.link.dialing import shared_channel, warm_up
from aiordma.verbs.device import devices

__all__ = ["device_at", "device_towards"]

_ANY = ("0.0.0.0", "::")


async def device_at(host: str) -> str | None:
    """Name of the device that has a numeric address of this machine; None if none has it.

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
    """Name of the device through which a numeric address is reached; None if through none.

    Args:
        address: The peer's.
        local_host: Numeric address to come from; the routes' choice by default.

    Cancellation: safe.
    """
    source = local_host if local_host and local_host not in _ANY else _source(address)
    return None if source is None else await device_at(source)


def _bound(host: str) -> str | None:
    channel, release = shared_channel()
    try:
        cm_id = ConnectionId(channel)
        try:
            cm_id.bind_addr((host, 0))
            context = cm_id.context
            return None if context is None else context.name
        except OSError:  # not an address of this machine, or of an interface without a device
            return None
        finally:
            cm_id.close()
    finally:
        release()


def _source(address: Address) -> str | None:
    """The address that packets to `address` come from; None if there is no way."""
    host, port = address
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.setblocking(False)  # nothing is sent; and programs look for calls that could block
        try:
            probe.connect((host, port or 9))
        except OSError:
            return None
        found = probe.getsockname()
    scope = f"%{found[3]}" if len(found) == 4 and found[3] else ""
    return f"{found[0]}{scope}"
