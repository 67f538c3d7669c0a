"""What memory can be registered, and with which rights; what a device cannot do has its name."""

from __future__ import annotations

import errno
import mmap
import sys
from numbers import Integral
from typing import Any

from aiordma._core import Held
from aiordma._ffi import CData, ffi
from aiordma.arguments import no_buffer, whole
from aiordma.errors import NotSupportedError, os_error
from aiordma.verbs.context import Context
from aiordma.verbs.enums import Access, ODPGeneralCaps

__all__ = [
    "ADDRESSES",
    "bytes_of",
    "check_access",
    "check_iova",
    "check_memory",
    "fresh",
    "refusal",
    "unsupported",
]

# As plain numbers: an operation on flags makes a new member, which takes as long as the call.
_REMOTE_WRITES = int(Access.REMOTE_WRITE | Access.REMOTE_ATOMIC)
_ZERO_BASED = int(Access.ZERO_BASED)
_ON_DEMAND = int(Access.ON_DEMAND)
_LOCAL_BITS = int(Access.LOCAL_WRITE)
_HUGETLB = int(Access.HUGETLB)
_EVERYWHERE = Access.LOCAL_WRITE | Access.REMOTE_READ | _REMOTE_WRITES
ADDRESSES = 1 << 64
_MOST_BYTES = sys.maxsize
# Software iWARP takes an iova and goes on using the buffer's own address.
_IGNORES_IOVA = frozenset({0x626D74})  # vendor_id


def bytes_of(view: memoryview, access: Access) -> CData:
    """What a view shows, as C sees it; holds the export.

    Raises:
        ValueError: It is empty or not contiguous.
        BufferError: Write access to a read-only buffer.
    """
    _check_view(view, access)
    return ffi.from_buffer(Held(view))


def _check_view(view: memoryview, access: Access) -> None:
    if not view.c_contiguous:
        msg = "a memory region needs a contiguous buffer in C order"
        raise ValueError(msg)
    if not view.nbytes:
        msg = "a memory region needs at least one byte"
        raise ValueError(msg)
    if view.readonly and access & (Access.LOCAL_WRITE | _REMOTE_WRITES):
        msg = (
            "the buffer is read-only, and not for writing: use a writable one, such as a bytearray"
        )
        raise BufferError(msg)


def check_memory(buffer: Any, access: Access) -> None:
    """Refuse what `MemoryRegion` would refuse, without making or exporting anything that stays.

    Raises:
        TypeError: No buffer, and no number of bytes.
        ValueError: It is empty or not contiguous.
        BufferError: Write access to a read-only buffer.
    """
    if isinstance(buffer, Integral):
        whole("the number of bytes", buffer, 1, _MOST_BYTES)
        return
    try:
        view = memoryview(buffer)
    except TypeError:
        raise no_buffer("memory to register", buffer) from None
    with view:
        _check_view(view, access)


def fresh(size: int, access: Access) -> mmap.mmap:
    """Zeroed memory for a region of its own.

    Raises:
        ValueError: No bytes, or huge ones.
    """
    whole("the number of bytes", size, 1, _MOST_BYTES)
    if int(access) & _HUGETLB:
        msg = "HUGETLB promises huge pages: pass a buffer that lies in them, not a size"
        raise ValueError(msg)
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def check_access(context: Context, access: Access, verb: str = "ibv_reg_mr") -> None:
    """Refuse rights that do not fit each other, or the device.

    Raises:
        ValueError, NotSupportedError: They do not.
    """
    rights = int(access)
    if rights & _REMOTE_WRITES and not rights & _LOCAL_BITS:
        msg = "remote write and atomic access need LOCAL_WRITE, too"
        raise ValueError(msg)
    if rights & _ZERO_BASED:
        # Soft-RoCE refuses it, software iWARP takes and ignores it.
        msg = "register with iova=0 instead of ZERO_BASED"
        raise ValueError(msg)
    if rights & _ON_DEMAND and not context.query_odp().general_caps & ODPGeneralCaps.SUPPORT:
        raise unsupported(verb, context, "on-demand paging (ODP)")


def check_iova(context: Context, iova: int, own: int, length: int) -> None:
    """Refuse an address that the device cannot give the memory at `own`.

    Raises:
        ValueError, NotSupportedError: It cannot.
    """
    if iova == own:
        return
    if not 0 <= iova <= ADDRESSES - length:
        msg = f"{length} bytes from iova {iova:#x} on do not fit into 64-bit addresses"
        raise ValueError(msg)
    if (iova - own) % mmap.PAGESIZE:
        msg = f"iova {iova:#x} has another offset within its page than the memory, {own:#x}"
        raise ValueError(msg)
    if context.attributes.vendor_id in _IGNORES_IOVA:
        raise unsupported("ibv_reg_mr_iova", context, "addresses other than the memory's own")


def refusal(code: int, verb: str, context: Context, access: Access, length: int) -> OSError:
    """The exception for what the device has refused with `code`."""
    if code in (errno.EOPNOTSUPP, errno.ENOSYS):
        special = access & ~_EVERYWHERE
        what = f"the access flags {special!r}" if special else "this kind of memory"
        if verb == "ibv_reg_dmabuf_mr":
            what = "dmabuf memory"
        return unsupported(verb, context, what)
    return os_error(code or errno.EIO, verb, detail=f"({length} bytes)")


def unsupported(verb: str, context: Context, what: str) -> NotSupportedError:
    """The exception for what the device cannot do."""
    text = f"{verb}: the device {context.name} does not support {what}"
    return NotSupportedError(errno.EOPNOTSUPP, text)
