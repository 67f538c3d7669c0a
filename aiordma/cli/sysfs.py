"""The kernel's files about RDMA devices, which can be read even without any library."""

from __future__ import annotations

import contextlib
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from aiordma import device_nodes

__all__ = [
    "CLASS",
    "CLASS_VERBS",
    "DEV",
    "Port",
    "MANAGER_CLASS",
    "device_names",
    "gid_netdev",
    "gid_type",
    "netdev",
    "numbers_of",
    "ports",
    "uverbs_nodes",
]

CLASS = Path("/sys/class/infiniband")
CLASS_VERBS = Path("/sys/class/infiniband_verbs")
#: There, if the kernel has rdma_ucm, whether or not its node is in `DEV`.
MANAGER_CLASS = Path("/sys/class/misc/rdma_cm")
DEV = device_nodes.FOLDER
_EMPTY_GID = "0000:0000:0000:0000:0000:0000:0000:0000"
_TOOL_LIMIT_S = 5.0


@dataclass(frozen=True, slots=True)
class Port:
    """One port of a device.

    Attributes:
        device: Name of the device.
        number: From 1.
        state: The kernel's word for it, such as `ACTIVE`.
        gid_table: The GIDs that are set: (index, IPv6 address in the long form).
        is_roce: Whether it is Ethernet and not iWARP.
        is_iwarp: Whether it is iWARP.
    """

    device: str
    number: int
    state: str
    gid_table: tuple[tuple[int, str], ...]
    is_roce: bool
    is_iwarp: bool

    @property
    def gids(self) -> tuple[str, ...]:
        """The GIDs that are set, as IPv6 addresses in the long form."""
        return tuple(gid for _, gid in self.gid_table)

    @property
    def active(self) -> bool:
        """Whether packets can pass."""
        return self.state == "ACTIVE"


def _read(path: Path) -> str:
    """The file's text without blanks around; empty if it cannot be read (an unused GID cannot)."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text().strip()
    return ""


def _names(folder: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return sorted(entry.name for entry in folder.iterdir())
    return []


def device_names() -> list[str]:
    """Names of the kernel's RDMA devices."""
    return _names(CLASS)


def uverbs_nodes() -> dict[str, Path]:
    """The node of each device, through which programs reach it; none without ib_uverbs."""
    found = {}
    for name in _names(CLASS_VERBS):
        if device := _read(CLASS_VERBS / name / "ibdev"):
            found[device] = DEV / name
    return found


def numbers_of(node: Path) -> tuple[int, int] | None:
    """Major and minor number that the kernel has for a node in `DEV`; None if it has none."""
    folder = MANAGER_CLASS if node.name == device_nodes.MANAGER else CLASS_VERBS / node.name
    major, _, minor = _read(folder / "dev").partition(":")
    if major.isdecimal() and minor.isdecimal():
        return int(major), int(minor)
    return None


def ports(device: str) -> list[Port]:
    """The ports of a device."""
    folder = CLASS / device / "ports"
    is_iwarp = _read(CLASS / device / "node_type").endswith("RNIC")
    found = []
    for number in sorted(int(name) for name in _names(folder) if name.isdecimal()):
        port = folder / str(number)
        # "4: ACTIVE"
        state = _read(port / "state").rpartition(":")[2].strip() or "unknown"
        indexes = sorted(int(name) for name in _names(port / "gids") if name.isdecimal())
        gids = ((index, _read(port / "gids" / str(index))) for index in indexes)
        used = tuple((index, gid) for index, gid in gids if gid and gid != _EMPTY_GID)
        is_roce = _read(port / "link_layer") == "Ethernet" and not is_iwarp
        found.append(Port(device, number, state, used, is_roce, is_iwarp))
    return found


def gid_netdev(device: str, port: int, index: int) -> str:
    """Network interface of a GID, or an empty text."""
    return _read(CLASS / device / "ports" / str(port) / "gid_attrs" / "ndevs" / str(index))


def gid_type(device: str, port: int, index: int) -> str:
    """The kernel's word for the type of a GID, or an empty text."""
    return _read(CLASS / device / "ports" / str(port) / "gid_attrs" / "types" / str(index))


def netdev(device: str, port: int) -> str:
    """Network interface of a port, or an empty text if none is known."""
    if name := gid_netdev(device, port, 0):
        return name
    if cards := _names(CLASS / device / "device" / "net"):
        return cards[min(port, len(cards)) - 1]
    # Software iWARP reports it over netlink only.
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
        done = subprocess.run(
            ["rdma", "-json", "link", "show"],
            capture_output=True,
            check=True,
            stdin=subprocess.DEVNULL,
            timeout=_TOOL_LIMIT_S,
        )
        for link in json.loads(done.stdout):
            if (link.get("ifname"), link.get("port")) == (device, port):
                return str(link.get("netdev", ""))
    return ""
