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
        index: The kernel's number of the device, as in `rdma link`; -1 if it has none.
    """

    name: str
    guid: int
    node_type: NodeType
    transport: TransportType
    index: int = -1

    def open(self) -> Context:
        """Open the device (`ibv_open_device(3)`); the caller closes the context.

        A context opened here is not that of a connection id: objects made from one cannot be used
        with the other.

        Raises:
            OSError: The device vanished, or its node in /dev/infiniband may not be opened.
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

    `why_unavailable()` says why the list is empty.  Wraps `ibv_get_device_list(3)`.
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
    """Whether registered memory stays usable for the adapter when this process forks.

    UNNEEDED where the kernel copies such memory for the child at once; otherwise the adapter may
    lose a page that the parent writes to after the fork (`ibv_is_fork_initialized(3)`).

    Raises:
        LibraryMissingError: rdma-core's libraries are not installed.
    """
    return ForkStatus(lib.ibv_is_fork_initialized())


def is_available() -> bool:
    """Whether this process can use RDMA: libraries, a device, and permission to open it."""
    return why_unavailable() is None


def why_unavailable() -> str | None:
    """None if RDMA can be used; otherwise the missing part and how to get it.  Never raises.

    RDMA can be used if a device opens and an event channel can be made.  The libraries decide this,
    as they need not use the kernel's RDMA; if they fail, the kernel's files say why.
    """
    missing = load_error()
    if missing is not None:
        return str(missing)
    return _why_no_device() or _why_no_channel()


def _why_no_device() -> str | None:
    with _device_list() as found:
        for pointer in found:
            if context := lib.ibv_open_device(pointer):
                lib.ibv_close_device(context)
                return None
        code = ffi.errno
        names = ", ".join(
            ffi.string(lib.ibv_get_device_name(pointer)).decode() for pointer in found
        )
    if found:
        return _why_no_node() or f"no RDMA device can be opened: {names}: {os.strerror(code)}"
    known = _kernel_names()
    if not known:
        return (
            "no RDMA device: the kernel lists none in /sys/class/infiniband; for a software "
            "device: `modprobe rdma_rxe && rdma link add rxe0 type rxe netdev NETDEV`; without "
            "root: `python -m aiordma_softroce -- COMMAND`, after `pip install aiordma-softroce`, "
            "or in a checkout `pip install ./softroce`; in memory, for tests: "
            "`aiordma-fabric -- COMMAND`, `pytest --fabric`"
        )
    if not any(device_nodes.FOLDER.glob("uverbs*")):
        return f"no RDMA device: {known} found, but no {device_nodes.FOLDER}/uverbs* is here"
    if device_nodes.unopened() is not None and (why := _why_no_node()):
        return why
    return (
        f"no usable RDMA device: the kernel has {known}, but libibverbs found no driver "
        "for it; install the providers: `apt install ibverbs-providers` or "
        "`dnf install libibverbs`"
    )


def _kernel_names() -> str:
    try:
        return ", ".join(sorted(entry.name for entry in SYSFS.iterdir()))
    except OSError:
        return ""


def _why_no_channel() -> str | None:
    if channel := lib.rdma_create_event_channel():
        lib.rdma_destroy_event_channel(channel)
        return None
    code = ffi.errno
    manager = device_nodes.FOLDER / device_nodes.MANAGER
    if not manager.exists():
        return f"{manager} is missing: `modprobe rdma_ucm`, or map it into the container"
    return _why_no_node() or f"librdmacm cannot make an event channel: {os.strerror(code)}"


def _why_no_node() -> str | None:
    """The first node that this process cannot open, in words."""
    for node in device_nodes.nodes():
        if code := device_nodes.trouble(node):
            advice = (
                "no permission; check its mode and the container's device rules"
                if code in (errno.EACCES, errno.EPERM)
                else os.strerror(code)
            )
            return f"{node} cannot be opened: {advice}"
    return None
