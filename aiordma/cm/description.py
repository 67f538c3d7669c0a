"""The adapter of a connection, a stream or a datagram endpoint, for their extra info."""

from __future__ import annotations

import os
import time
from typing import Any

from aiordma.cm.connection_id import ConnectionId
from aiordma.verbs.context import SOFTWARE_DRIVERS, Context
from aiordma.verbs.qp import QueuePair

__all__ = ["describe"]

_FRESH_S = 1.0
_NO_GID = bytes(16)


def describe(cm_id: ConnectionId, context: Context, qp: QueuePair) -> dict[str, Any]:
    """Device, port, GID and so on, by the names that `get_extra_info` knows.

    Asks the adapter; so it is called once, while the three are open, and the result is kept.

    Raises:
        ResourceClosedError: One of the three is closed.
        OSError: The device is gone.
    """
    number = cm_id.port_num
    names = _of_the_port(context, number).copy()
    gid = cm_id.local_gid
    # iWARP connects without a GID.
    names["gid"] = context.query_gid(number).gid if gid == _NO_GID else gid
    names["qpn"] = qp.num
    return names


def _of_the_port(context: Context, number: int) -> dict[str, Any]:
    """Kept for a second: many connections are made at a time."""
    now = time.monotonic()
    asked: tuple[float, dict[str, Any]] | None = context._cache.get(("port", number))
    if asked is None or now - asked[0] > _FRESH_S:
        port = context.query_port(number)
        names = {
            "device": context.name,
            "port": number,
            "link_layer": port.link_layer.name,
            "transport": context.transport.name,
            "mtu": port.active_mtu.in_bytes,
            "provider": _provider(context),
            "backend": "rdma",
        }
        asked = context._cache.store(("port", number), (now, names))
    return asked[1]


def _provider(context: Context) -> str:
    """The kernel's driver of the device, such as mlx5_core; "" where it is not known."""
    known: str | None = context._cache.get("provider")
    if known is not None:
        return known
    try:
        link = os.readlink(f"/sys/class/infiniband/{context.name}/device/driver")
        provider = os.path.basename(link)
    except OSError:
        # sysfs names no driver for software devices.
        provider = SOFTWARE_DRIVERS.get(context.attributes.vendor_id, "")
    context._cache.store("provider", provider)
    return provider
