"""The machine's RDMA devices, and why there may be none."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from aiordma import device_nodes
from aiordma._ffi import CData, ffi, lib, load_error
from aiordma._ffi.check import check_pointer
from aiordma.errors import os_error
from aiordma.verbs.context import Context
from aiordma.verbs.enums import ForkStatus, NodeType, TransportType

__all__ = ["Device", "devices", "fork_status", "is_available", "why_unavailable"]

SYSFS = Path("/sys/class/infiniband")


@dataclass(frozen=True, slots=True)
class Device:
    """One RDMA device, by name.

    Attributes:
        name: Such as `mlx5_0` or `rxe0`.
        guid: 64-bit node GUID.
        node_type: Channel adapter, RNIC, ...
        transport: InfiniBand (RoCE too) or iWARP.
        index: The kernel's number of the device, as in `rdma link`; -1 if it tells none.
    """

    name: str
    guid: int
    node_type: NodeType
    transport: TransportType
    index: int = -1

    def open(self) -> Context:
        """Open the device (`ibv_open_device(3)`); the caller closes the context.

        A context opened here and the context of a connection id are different: objects of the
        former cannot be used with the latter.

        Raises:
            OSError: The device vanished, or its node in /dev/infiniband is not permitted.
        """
        with _device_list() as found:
            for pointer in found:
                if ffi.string(lib.ibv_get_device_name(pointer)).decode() == self.name:
                    handle = check_pointer(lib.ibv_open_device(pointer), "ibv_open_device")
                    return Context(handle)
        raise os_error(errno.ENODEV, "ibv_open_device", detail=f"({self.name})")


@contextlib.contextmanager
def _device_list() -> Iterator[list[CData]]:
    """`ibv_get_device_list` for the length of a `with` block."""
    count = ffi.new("int *")
    found = lib.ibv_get_device_list(count)
    try:
        yield [found[i] for i in range(count[0])] if found else []
    finally:
        if found:
            lib.ibv_free_device_list(found)


def devices() -> list[Device]:
    """The RDMA devices that user space can see; empty if there is none, never raises.

    `why_unavailable()` tells why the list is empty.  Wraps `ibv_get_device_list(3)`.
    """
    if load_error() is not None:
        return []
    with _device_list() as found:
        return [
            Device(
                name=ffi.string(lib.ibv_get_device_name(pointer)).decode(),
                guid=int.from_bytes(lib.ibv_get_device_guid(pointer).to_bytes(8, "little"), "big"),
                node_type=NodeType(pointer.node_type),
                transport=TransportType(pointer.transport_type),
                index=lib.ibv_get_device_index(pointer),
            )
            for pointer in found
        ]


def fork_status() -> ForkStatus:
    """Whether registered memory stays the adapter's when this process forks.

    UNNEEDED where the kernel copies it for the child at once; otherwise a page that the parent
    writes to after the fork may be lost to the adapter (`ibv_is_fork_initialized(3)`).

    Raises:
        LibraryMissingError: rdma-core's libraries are not there.
    """
    return ForkStatus(lib.ibv_is_fork_initialized())


def is_available() -> bool:
    """Whether this process can use RDMA: libraries, a device, and permission to open it."""
    return why_unavailable() is None


def why_unavailable() -> str | None:
    """None if RDMA can be used; otherwise the missing part and how to get it.  Never raises."""
    missing = load_error()
    if missing is not None:
        return str(missing)
    if not SYSFS.is_dir() or not any(SYSFS.iterdir()):
        return (
            "no RDMA device: the kernel lists none in /sys/class/infiniband; for a software "
            "device: `modprobe rdma_rxe && rdma link add rxe0 type rxe netdev NETDEV`; without "
            "root: `python -m aiordma.testing.softroce -- COMMAND`"
        )
    if not devices():
        names = ", ".join(sorted(entry.name for entry in SYSFS.iterdir()))
        if not any(device_nodes.FOLDER.glob("uverbs*")):
            return f"no RDMA device: {names} found, but no {device_nodes.FOLDER}/uverbs* is here"
        if device_nodes.unopened() is None:
            return (
                f"no usable RDMA device: the kernel has {names}, but libibverbs found no driver "
                "for it; install the providers: `apt install ibverbs-providers` or "
                "`dnf install libibverbs`"
            )
    manager = device_nodes.FOLDER / device_nodes.MANAGER
    if not manager.exists():
        return f"{manager} is missing: `modprobe rdma_ucm`, or map it into the container"
    for node in device_nodes.nodes():
        if code := device_nodes.trouble(node):
            advice = (
                "no permission; check its mode and the container's device rules"
                if code in (errno.EACCES, errno.EPERM)
                else os.strerror(code)
            )
            return f"{node} cannot be opened: {advice}"
    return None
