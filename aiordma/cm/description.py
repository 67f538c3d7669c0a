"""What a connection, a stream and a datagram endpoint tell of the adapter they use."""

from __future__ import annotations

import os
from typing import Any

from aiordma.cm.connection_id import ConnectionId
from aiordma.verbs.context import Context
from aiordma.verbs.qp import QueuePair

__all__ = ["describe"]

# Devices of software have no driver that sysfs could name.
_SOFTWARE = {0xFFFFFF: "rdma_rxe", 0x626D74: "siw"}


def describe(cm_id: ConnectionId, context: Context, qp: QueuePair) -> dict[str, Any]:
    """Device, port, GID and so on, by the names that `get_extra_info` knows.

    Asks the adapter; so it is called once, while the three are open, and the result is kept.

    Args:
        cm_id: Bound to an address of the device, or connected.
        context: The device.
        qp: The queue pair that carries the data.

    Raises:
        ResourceClosedError: One of the three is closed.
        OSError: The device is gone.
    """
    number = cm_id.port_num
    port = context.query_port(number)
    gid = cm_id.local_gid
    if not any(gid):  # iWARP connects without one
        gid = context.query_gid(number).gid
    return {
        "device": context.name,
        "port": number,
        "gid": gid,
        "link_layer": port.link_layer.name,
        "transport": context.transport.name,
        "mtu": port.active_mtu.in_bytes,
        "qpn": qp.num,
        "provider": _provider(context),
        "backend": "rdma",
    }


def _provider(context: Context) -> str:
    """The kernel's driver of the device, such as mlx5_core; "" where nothing tells."""
    try:
        return os.path.basename(os.readlink(f"/sys/class/infiniband/{context.name}/device/driver"))
    except OSError:
        return _SOFTWARE.get(context.attributes.vendor_id, "")
