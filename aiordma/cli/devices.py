"""`aiordma devices`: the facts of ibv_devinfo, a block for each device, with all GIDs."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

from aiordma.cli import sysfs
from aiordma.cli.bounded import call_bounded
from aiordma.cli.output import print_hint, print_json, print_line
from aiordma.errors import RdmaError
from aiordma.verbs.context import Context
from aiordma.verbs.device import Device, devices, why_unavailable
from aiordma.verbs.enums import GIDType, LinkLayer, TransportType

__all__ = ["describe_all", "run"]

_TRANSPORTS = {TransportType.IB: "InfiniBand", TransportType.IWARP: "iWARP"}
_LINK_LAYERS = {LinkLayer.INFINIBAND: "InfiniBand", LinkLayer.ETHERNET: "Ethernet"}
_GID_TYPES = {GIDType.IB: "InfiniBand", GIDType.ROCE_V1: "RoCE v1", GIDType.ROCE_V2: "RoCE v2"}


def run(*, as_json: bool) -> int:
    """Print all devices.

    Returns:
        0; 1 if there is no device, or a device does not answer.
    """
    try:
        found = call_bounded(describe_all)
    except TimeoutError as exc:
        print_hint(f"the devices cannot be listed: {exc}; try `aiordma doctor`")
        found = []
    else:
        if not found:
            print_hint(why_unavailable() or "no RDMA device", "more: aiordma doctor")
    if as_json:
        print_json(found)
    else:
        for number, device in enumerate(found):
            if number:
                print_line()
            for label, value, indent in _lines(device):
                print_line((f"{'':{indent}}{label:{20 - indent}}", "dim"), (value, ""))
    return 0 if found and not any("error" in device for device in found) else 1


def describe_all() -> list[dict[str, Any]]:
    """Every device as a dictionary, ready for JSON; a device that cannot be opened has `error`."""
    return [_describe(device) for device in devices()]


def _guid(number: int) -> str:
    text = f"{number:016x}"
    return ":".join(text[i : i + 4] for i in range(0, 16, 4))


def _describe(device: Device) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": device.name,
        "node_guid": _guid(device.guid),
        "node_type": device.node_type.name,
        "transport": _TRANSPORTS.get(device.transport, device.transport.name),
    }
    try:
        context = device.open()
    except (OSError, RdmaError) as exc:
        return {**found, "error": str(exc)}
    try:
        limits = context.query_device()
        gids = _gids(context)
        numbers = range(1, limits.phys_port_cnt + 1)
        return {
            **found,
            "firmware": limits.fw_ver,
            "vendor_id": f"0x{limits.vendor_id:04x}",
            "vendor_part_id": limits.vendor_part_id,
            "hw_ver": f"0x{limits.hw_ver:x}",
            "ports": [_port(context, number, gids) for number in numbers],
        }
    except (OSError, RdmaError) as exc:
        return {**found, "error": str(exc)}
    finally:
        context.close()


def _gids(context: Context) -> list[dict[str, Any]]:
    return [
        {
            "port": entry.port,
            "index": entry.index,
            # iWARP has no GIDs in its packets; the table's entry holds the MAC address.
            "type": "iWARP" if context.is_iwarp else _GID_TYPES.get(entry.type, entry.type.name),
            "gid": socket.inet_ntop(socket.AF_INET6, entry.gid),
            "netdev": sysfs.gid_netdev(context.name, entry.port, entry.index),
        }
        for entry in context.gid_table()
    ]


def _port(context: Context, number: int, gids: list[dict[str, Any]]) -> dict[str, Any]:
    attributes = context.query_port(number)
    layer = attributes.link_layer
    return {
        "port": number,
        "state": attributes.state.name,
        "max_mtu": attributes.max_mtu.in_bytes,
        "active_mtu": attributes.active_mtu.in_bytes,
        "link_layer": _LINK_LAYERS.get(layer, layer.name),
        "lid": attributes.lid,
        "sm_lid": attributes.sm_lid,
        "netdev": sysfs.netdev(context.name, number),
        "gids": [
            {key: value for key, value in gid.items() if key != "port"}
            for gid in gids
            if gid["port"] == number
        ],
    }


def _lines(device: dict[str, Any]) -> Iterator[tuple[str, str, int]]:
    """(label, value, indentation) for each line of a device's block."""
    for label, value in device.items():
        if label != "ports":
            yield label, str(value), 2 if label != "name" else 0
    for port in device.get("ports", ()):
        for label, value in port.items():
            if label != "gids":
                yield label, str(value), 2 if label == "port" else 4
        for gid in port["gids"]:
            text = f"{gid['type']:10}  {gid['gid']}"
            yield f"gid[{gid['index']}]", f"{text}  {gid['netdev']}".rstrip(), 4
