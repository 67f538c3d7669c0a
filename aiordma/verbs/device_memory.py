"""Memory of a GPU, registered by way of a dmabuf: `register_device_memory`.

Theory of operation
    Three parts have to support it, and are tried in this order: the adapter's driver in the kernel,
    which may not register dmabufs; the GPU's driver, which makes a dmabuf descriptor from an
    address; and the registration itself.  The error names the part that fails.  Nothing else is
    tried: whether to copy through the processor's memory is the program's decision.

    An exporter returns a descriptor, which is closed after the registration, and the place of the
    memory in the dmabuf.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable

from aiordma._ffi import ffi, lib
from aiordma.errors import NotSupportedError, device_memory_error
from aiordma.tensors import DeviceMemory
from aiordma.verbs.enums import Access
from aiordma.verbs.mr import MemoryRegion
from aiordma.verbs.pd import ProtectionDomain

__all__ = ["register_device_memory"]

#: Makes a descriptor and an offset out of an address and a number of bytes.
Exporter = Callable[[int, int], tuple[int, int]]
_PAGE = mmap.PAGESIZE
#: CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD of CUDA's driver API.
_DMABUF = 1


def _takes_dmabufs(pd: ProtectionDomain) -> bool:
    """Ask the kernel by an invalid descriptor: a driver that takes dmabufs answers EBADF."""
    region = lib.ibv_reg_dmabuf_mr(pd._handle, 0, _PAGE, 0, -1, 0)
    code = ffi.errno
    if region:
        lib.ibv_dereg_mr(region)
        return False
    return code == errno.EBADF


def _export_cuda(address: int, nbytes: int) -> tuple[int, int]:
    """Export by CUDA's driver (`cuMemGetHandleForAddressRange`); the range has whole pages.

    Raises:
        NotSupportedError: There is no driver, or it exports nothing.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as exc:
        text = f"the driver of CUDA cannot be loaded: {exc}"
        raise device_memory_error(text) from None
    try:
        export = driver.cuMemGetHandleForAddressRange
    except AttributeError:
        text = "the driver of CUDA has no cuMemGetHandleForAddressRange: it is older than 11.7"
        raise device_memory_error(text) from None
    offset = address % _PAGE
    size = -(-(offset + nbytes) // _PAGE) * _PAGE
    fd = ctypes.c_int(-1)
    code = export(
        ctypes.byref(fd), ctypes.c_uint64(address - offset), ctypes.c_size_t(size),
        ctypes.c_int(_DMABUF), ctypes.c_uint64(0),
    )  # fmt: skip
    if code or fd.value < 0:
        text = f"the driver of CUDA exports no dmabuf of this memory: CUresult {code}"
        raise device_memory_error(text)
    return fd.value, offset


#: Of CUDA's memory; the only kind that is exported.
_export: Exporter = _export_cuda


def register_device_memory(
    pd: ProtectionDomain, memory: DeviceMemory, access: Access
) -> MemoryRegion:
    """Register memory of a GPU; the region keeps the object that has it.

    Args:
        pd: Protection domain.
        memory: The memory.
        access: As of `MemoryRegion`.

    Returns:
        A region without a `view`, whose addresses are those of the GPU.

    Raises:
        ValueError: It is empty.
        BufferError: Write access to read-only memory.
        NotSupportedError: The adapter's driver or the GPU's does not support it; the text says
            which.
        OSError: Resources ran out.
    """
    if not memory.nbytes:
        msg = "a memory region needs at least one byte"
        raise ValueError(msg)
    if memory.readonly and access & (
        Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_ATOMIC
    ):
        msg = f"the memory of {memory.name} is read-only"
        raise BufferError(msg)
    if not _takes_dmabufs(pd):
        text = (
            f"memory of {memory.name}: the kernel's driver of {pd.context.name} registers no "
            "dmabufs (ibv_reg_dmabuf_mr)"
        )
        raise device_memory_error(text)
    if not memory.is_cuda:
        text = f"memory of {memory.name}: only CUDA's is exported as a dmabuf"
        raise device_memory_error(text)
    fd, offset = _export(memory.address, memory.nbytes)
    try:
        region = MemoryRegion.from_dmabuf(
            pd, fd, memory.nbytes, access, offset=offset, iova=memory.address
        )
    except NotSupportedError as exc:
        raise device_memory_error(f"memory of {memory.name}: {exc}") from exc
    finally:
        os.close(fd)
    region._keep = memory.owner
    return region
