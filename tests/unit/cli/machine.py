"""A made-up machine for tests of the commands: the kernel's files in a temporary folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiordma import device_nodes
from aiordma.cli import checks_device, devices, sysfs
from aiordma.verbs import device as verbs_device

if TYPE_CHECKING:
    import pytest

__all__ = ["EMPTY", "GID", "LINK_LOCAL", "Machine"]

GID = "0000:0000:0000:0000:0000:ffff:0a50:0001"
LINK_LOCAL = "fe80:0000:0000:0000:0000:0000:0000:0001"
EMPTY = "0000:0000:0000:0000:0000:0000:0000:0000"


class Machine:
    """A made-up machine: the kernel's files below a folder, and what libibverbs lists."""

    def __init__(self, root: Path) -> None:
        self.sysfs, self.verbs, self.dev = root / "infiniband", root / "verbs", root / "dev"
        self.manager = root / "rdma_cm"
        self.dev.mkdir()
        self.listed: list[Any] = []
        self.here = {"10.80.0.1"}  # the addresses of this network namespace

    def add(
        self, name: str = "rxe0", state: str = "4: ACTIVE", gids: tuple[str, ...] = (GID, EMPTY)
    ) -> Path:
        """Add a RoCE device with one port; returns the port's folder."""
        port = self.sysfs / name / "ports" / "1"
        (port / "gids").mkdir(parents=True)
        for index, gid in enumerate(gids):
            (port / "gids" / str(index)).write_text(f"{gid}\n")
        (port / "state").write_text(f"{state}\n")
        for index in range(len(gids)):
            for folder, text in (("types", "RoCE v2"), ("ndevs", "dummy0")):
                (port / "gid_attrs" / folder).mkdir(parents=True, exist_ok=True)
                (port / "gid_attrs" / folder / str(index)).write_text(f"{text}\n")
        (port / "link_layer").write_text("Ethernet\n")
        (self.sysfs / name / "node_type").write_text("1: CA\n")
        return port

    def add_node(self, name: str, device: str, *, made: bool = False) -> None:
        """Offer a device to user space; `made`: by a node that can be opened."""
        (self.verbs / name).mkdir(parents=True)
        (self.verbs / name / "ibdev").write_text(f"{device}\n")
        (self.verbs / name / "dev").write_text("231:192\n")
        if made:
            (self.dev / name).symlink_to("/dev/null")

    def add_manager(self, *, made: bool = False) -> None:
        """Load rdma_ucm; `made`: with a node that can be opened."""
        self.manager.mkdir()
        (self.manager / "dev").write_text("10:256\n")
        if made:
            (self.dev / "rdma_cm").symlink_to("/dev/null")

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have the commands see this machine, whatever the real one has."""
        monkeypatch.setattr(sysfs, "CLASS", self.sysfs)
        monkeypatch.setattr(sysfs, "CLASS_VERBS", self.verbs)
        monkeypatch.setattr(sysfs, "DEV", self.dev)
        monkeypatch.setattr(sysfs, "MANAGER_CLASS", self.manager)
        monkeypatch.setattr(device_nodes, "FOLDER", self.dev)
        monkeypatch.setattr(verbs_device, "SYSFS", self.sysfs)
        monkeypatch.setattr(devices, "devices", lambda: self.listed)
        monkeypatch.setattr(checks_device, "devices", lambda: self.listed)
        monkeypatch.setattr(checks_device, "load_error", lambda: None)
        monkeypatch.setattr(checks_device, "has_address", self.here.__contains__)
