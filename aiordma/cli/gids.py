"""`aiordma gids`: a line for each GID, with its type, its IPv4 form and its interface.

It reads the kernel's files, so that neither a library nor a permission is needed.
"""

from __future__ import annotations

import ipaddress
from dataclasses import asdict, dataclass

from aiordma.cli import sysfs
from aiordma.cli.output import print_hint, print_json, print_line

__all__ = ["Gid", "list_gids", "run"]

_HEADER = ("DEVICE", "PORT", "INDEX", "GID", "TYPE", "IPv4", "INTERFACE")
_STYLES = ("bold", "", "cyan", "", "green", "", "")
_NONE = "-"


@dataclass(frozen=True, slots=True)
class Gid:
    """One entry of a GID table.

    Attributes:
        device: Name of the device.
        port: Its port, from 1.
        index: Index of the entry.
        gid: The GID as an IPv6 address in its short form.
        type: `RoCE v1`, `RoCE v2`, `InfiniBand`, or `iWARP`, whose entry is a MAC address.
        ipv4: The IPv4 address that the GID is made of; None for another.
        netdev: The network interface; None if none is known.
    """

    device: str
    port: int
    index: int
    gid: str
    type: str
    ipv4: str | None
    netdev: str | None


def run(device: str | None, *, as_json: bool) -> int:
    """Print the GIDs of all devices, or of one.

    Args:
        device: Name of the device; None for all.
        as_json: Print them for programs.

    Returns:
        0; 1 if there is none, or no such device.
    """
    names = sysfs.device_names()
    if device is not None and device not in names:
        print_hint(f"aiordma gids: no device {device}: {', '.join(names) or 'there is none'}")
        return 1
    found = [gid for name in names if device in (None, name) for gid in list_gids(name)]
    if as_json:
        print_json([asdict(gid) for gid in found])
    elif found:
        rows = [_HEADER, *(_row(gid) for gid in found)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for number, row in enumerate(rows):
            cells = [f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)]
            cells[-1] = row[-1]
            styles = _STYLES if number else ("dim",) * len(_HEADER)
            gaps = ("  ",) * (len(cells) - 1) + ("",)
            print_line(
                *((cell + gap, style) for cell, gap, style in zip(cells, gaps, styles, strict=True))
            )
    if not found:
        none = "no port of a device has a GID" if names else "there is no RDMA device"
        print_hint(f"aiordma gids: {none}; more: aiordma doctor")
    return 0 if found else 1


def list_gids(device: str) -> list[Gid]:
    """The GIDs of a device that are set, by port and index."""
    found = []
    for port in sysfs.ports(device):
        for index, text in port.gid_table:
            address = ipaddress.IPv6Address(text)
            kind = sysfs.gid_type(device, port.number, index)
            if port.is_iwarp:
                kind = "iWARP"  # the kernel calls it RoCE v1
            elif kind == "IB/RoCE v1":
                kind = "RoCE v1" if port.is_roce else "InfiniBand"
            mapped = None if port.is_iwarp else address.ipv4_mapped
            found.append(
                Gid(
                    device=device,
                    port=port.number,
                    index=index,
                    gid=f"::ffff:{mapped}" if mapped else str(address),
                    type=kind or "unknown",
                    ipv4=str(mapped) if mapped else None,
                    netdev=sysfs.gid_netdev(device, port.number, index) or None,
                )
            )
    return found


def _row(gid: Gid) -> tuple[str, ...]:
    # A cell is a word, for awk.
    cells = (
        gid.device, gid.port, gid.index, gid.gid, gid.type.replace(" ", "-"), gid.ipv4, gid.netdev
    )  # fmt: skip
    return tuple(_NONE if cell is None else str(cell) for cell in cells)
