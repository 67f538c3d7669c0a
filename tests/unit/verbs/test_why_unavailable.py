"""Whether RDMA can be used: the libraries say it, and files of the kernel why not."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from aiordma import device_nodes
from aiordma._ffi import ffi, lib, load_error
from aiordma.verbs import device
from aiordma.verbs.device import is_available, why_unavailable

pytestmark = pytest.mark.skipif(
    load_error() is not None, reason="rdma-core's libraries are not there"
)


class Libraries:
    """Devices that libibverbs lists, those that open, and whether a channel can be made.

    Attributes:
        listed: Names of devices.
        opens: Those that open; the others fail with `code`.
        has_channel: Whether an event channel can be made; if not, it fails with `code`.
        code: An errno.
        held: What was made and is not given back.
    """

    def __init__(self) -> None:
        self.listed: list[str] = []
        self.opens: list[str] = []
        self.has_channel = True
        self.code = errno.EIO
        self.held: list[Any] = []
        self._names: list[Any] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have aiordma call it."""
        for name in (
            "ibv_get_device_list", "ibv_free_device_list", "ibv_get_device_name",
            "ibv_open_device", "ibv_close_device", "rdma_create_event_channel",
            "rdma_destroy_event_channel",
        ):  # fmt: skip
            monkeypatch.setitem(lib.__dict__, name, getattr(self, name))

    def ibv_get_device_list(self, count: Any) -> list[str]:
        count[0] = len(self.listed)
        self.held.append("list")
        return [*self.listed, "end"]

    def ibv_free_device_list(self, _: list[str]) -> None:
        self.held.remove("list")

    def ibv_get_device_name(self, name: str) -> Any:
        self._names.append(ffi.new("char[]", name.encode()))
        return self._names[-1]

    def ibv_open_device(self, name: str) -> str:
        ffi.errno = self.code
        if name not in self.opens:
            return ""
        self.held.append(name)
        return name

    def ibv_close_device(self, name: str) -> int:
        self.held.remove(name)
        return 0

    def rdma_create_event_channel(self) -> str:
        ffi.errno = self.code
        if not self.has_channel:
            return ""
        self.held.append("channel")
        return "channel"

    def rdma_destroy_event_channel(self, channel: str) -> None:
        self.held.remove(channel)


class Machine:
    """Files of a kernel: devices in sysfs, and nodes that may not be opened."""

    def __init__(self, root: Path) -> None:
        self.sysfs, self.dev = root / "infiniband", root / "dev"
        self.dev.mkdir()
        self.troubles: dict[str, int] = {}

    def add(self, name: str) -> None:
        """Add a device to sysfs."""
        (self.sysfs / name).mkdir(parents=True)

    def add_node(self, name: str, code: int = 0) -> None:
        """Add a node, which fails to open with an errno if it is not 0."""
        (self.dev / name).touch()
        self.troubles[name] = code


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> Libraries:
    """Libraries that list nothing."""
    monkeypatch.delenv("AIORDMA_FABRIC", raising=False)
    made = Libraries()
    made.install(monkeypatch)
    return made


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """A machine without RDMA in its kernel."""
    made = Machine(tmp_path)
    monkeypatch.setattr(device_nodes, "FOLDER", made.dev)
    monkeypatch.setattr(device_nodes, "trouble", lambda node: made.troubles[node.name])
    monkeypatch.setattr(device, "SYSFS", made.sysfs)
    return made


def test_a_device_that_opens_is_enough(libraries: Libraries, machine: Machine) -> None:
    """Whatever the kernel has: the libraries need not be its own."""
    libraries.listed, libraries.opens = ["other0", "fab0"], ["fab0"]
    assert why_unavailable() is None
    assert is_available()
    machine.add("rxe0")
    machine.add_node("uverbs0", errno.EACCES)
    assert why_unavailable() is None
    assert libraries.held == []


def test_no_device_at_all(libraries: Libraries, machine: Machine) -> None:
    assert str(why_unavailable()).startswith("no RDMA device: the kernel lists none in /sys/class/")
    machine.sysfs.mkdir()
    assert str(why_unavailable()).startswith("no RDMA device: the kernel lists none in /sys/class/")
    assert libraries.held == []


def test_a_device_of_the_kernel_that_is_not_listed(libraries: Libraries, machine: Machine) -> None:
    machine.add("rxe1")
    machine.add("rxe0")
    said = f"no RDMA device: rxe0, rxe1 found, but no {machine.dev}/uverbs* is here"
    assert why_unavailable() == said
    machine.add_node("uverbs0")
    assert str(why_unavailable()).startswith(
        "no usable RDMA device: the kernel has rxe0, rxe1, but"
    )
    machine.add_node("uverbs1", errno.EMFILE)
    said = f"{machine.dev}/uverbs1 cannot be opened: Too many open files"
    assert why_unavailable() == said
    assert libraries.held == []


def test_a_device_that_does_not_open(libraries: Libraries, machine: Machine) -> None:
    libraries.listed = ["rxe0", "rxe1"]
    assert why_unavailable() == "no RDMA device can be opened: rxe0, rxe1: Input/output error"
    machine.add_node("uverbs0", errno.EPERM)
    said = (
        f"{machine.dev}/uverbs0 cannot be opened: no permission; check its mode and the container"
    )
    assert str(why_unavailable()).startswith(said)
    assert libraries.held == []


def test_no_channel(libraries: Libraries, machine: Machine) -> None:
    libraries.listed = libraries.opens = ["rxe0"]
    libraries.has_channel = False
    assert str(why_unavailable()).startswith(
        f"{machine.dev}/rdma_cm is missing: `modprobe rdma_ucm`"
    )
    machine.add_node("rdma_cm")
    said = "librdmacm cannot make an event channel: Input/output error"
    assert why_unavailable() == said
    machine.add_node("rdma_cm", errno.EACCES)
    assert str(why_unavailable()).startswith(
        f"{machine.dev}/rdma_cm cannot be opened: no permission"
    )
    assert libraries.held == []
