"""The devices as librdmacm has opened them, for memory that is registered before a connection."""

from __future__ import annotations

import errno
from typing import Any

from aiordma._ffi import ffi, lib
from aiordma.errors import DeviceNotFoundError, os_error
from aiordma.loop import fork

__all__ = ["find_device"]


def find_device(name: str | None) -> Any:
    """The `struct ibv_context` of a device, which is that of its connections; `Context.borrow`.

    Blocks while librdmacm opens the devices of the machine; they stay open.

    Args:
        name: Name of the device; None for the only device.

    Raises:
        LibraryMissingError: rdma-core is not installed.
        DeviceNotFoundError: There is no device, or none of that name.
        ValueError: No name, and several devices.
        OSError: A device cannot be opened.
    """
    fork.use_library()
    count = ffi.new("int *")
    found = lib.rdma_get_devices(count)
    if not found:
        raise os_error(ffi.errno or errno.ENODEV, "rdma_get_devices")
    try:
        return _chosen([found[i] for i in range(count[0])], name)
    finally:
        # Not kept: the domain that librdmacm makes for its ids would stay when the last of them
        # ends before the list does.
        lib.rdma_free_devices(found)


def _chosen(contexts: list[Any], name: str | None) -> Any:
    names = [ffi.string(lib.ibv_get_device_name(each.device)).decode() for each in contexts]
    if name is None and len(names) > 1:
        msg = f"the machine has several RDMA devices ({', '.join(names)}): name the device"
        raise ValueError(msg)
    for context, its_name in zip(contexts, names, strict=True):
        if name in (None, its_name):
            return context
    text = f"there is no RDMA device {name}, only {', '.join(names)}" if names else "no RDMA device"
    raise DeviceNotFoundError(errno.ENODEV, text)
