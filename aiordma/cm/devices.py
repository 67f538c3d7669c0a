"""The devices as librdmacm has opened them: memory that is registered before a connection needs one.

A device that is removed goes when nothing of librdmacm uses it any more.  A list of
`rdma_get_devices` is such a use, so that an `OpenDevice` keeps its list.
"""

from __future__ import annotations

import errno
from typing import Any

from aiordma._ffi import ffi, lib
from aiordma.errors import DeviceNotFoundError, os_error
from aiordma.loop import fork
from aiordma.verbs.context import Context

__all__ = ["OpenDevice"]


class OpenDevice:
    """A device whose context is that of the connections, for as long as `close` is not called.

    Blocks while librdmacm opens the devices of the machine.

    Args:
        name: Of the device; None for the only device.

    Raises:
        LibraryMissingError: rdma-core is not installed.
        DeviceNotFoundError: There is no device, or none of that name.
        ValueError: No name, and several devices.
        OSError: A device cannot be opened.
    """

    __slots__ = ("_list", "_pointer")

    def __init__(self, name: str | None) -> None:
        fork.use_library()
        count = ffi.new("int *")
        self._list: Any = lib.rdma_get_devices(count)
        if not self._list:
            raise os_error(ffi.errno or errno.ENODEV, "rdma_get_devices")
        try:
            self._pointer: Any = _chosen([self._list[i] for i in range(count[0])], name)
        except BaseException:
            self.close()
            raise

    @property
    def context(self) -> Context:
        """The context; in the thread of a loop."""
        return Context.borrow(self._pointer)

    def close(self) -> None:
        """Let the device go: nothing that was made with the context is left.  Idempotent."""
        found, self._list = self._list, None
        if found:
            lib.rdma_free_devices(found)


def _chosen(pointers: list[Any], name: str | None) -> Any:
    names = [
        str(ffi.string(lib.ibv_get_device_name(each.device)).decode()) for each in pointers
    ]
    if name is None and len(names) > 1:
        msg = f"the machine has several RDMA devices ({', '.join(names)}): name the device"
        raise ValueError(msg)
    for pointer, its_name in zip(pointers, names, strict=True):
        if name in (None, its_name):
            return pointer
    text = f"there is no RDMA device {name}, only {', '.join(names)}" if names else "no RDMA device"
    raise DeviceNotFoundError(errno.ENODEV, text)
