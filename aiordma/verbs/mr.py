"""MemoryRegion: memory that the adapter may read or write."""

from __future__ import annotations

import mmap
from typing import Any

from aiordma._ffi import CData, ffi, lib
from aiordma._ffi.check import check_errno
from aiordma.errors import os_error
from aiordma.verbs.enums import Access
from aiordma.verbs.pd import ProtectionDomain
from aiordma.verbs.resource import Resource

__all__ = ["MemoryRegion"]


class MemoryRegion(Resource):
    """A registered buffer (`ibv_reg_mr(3)`).

    Args:
        pd: Protection domain; only its queue pairs can use the memory.
        buffer: Any object with the buffer protocol, which stays exported (so that it cannot be
            resized) until the region is destroyed; or a number of bytes, for fresh page-aligned
            zeroed memory of the region's own.
        access: What the adapter may do; local read is always allowed.

    Registering pins the pages and takes time with the size; above about 1 MiB do it off the loop
    (`aiordma.loop.workers.call_blocking`).

    Raises:
        ValueError: The buffer is empty or not contiguous.
        BufferError: Write access to a read-only buffer.
        OSError: ENOMEM mostly means that RLIMIT_MEMLOCK is too low.
    """

    __slots__ = ("_keep", "_view", "access", "addr", "length", "lkey", "pd", "rkey")

    def __init__(
        self, pd: ProtectionDomain, buffer: Any, access: Access = Access.LOCAL_WRITE
    ) -> None:
        if isinstance(buffer, int):
            if buffer <= 0:
                msg = f"a memory region needs at least one byte, not {buffer}"
                raise ValueError(msg)
            buffer = mmap.mmap(-1, buffer, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        view = memoryview(buffer)
        if not view.c_contiguous:
            msg = "a memory region needs a contiguous buffer"
            raise ValueError(msg)
        if not view.nbytes:
            msg = "a memory region needs at least one byte"
            raise ValueError(msg)
        writes = Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_ATOMIC
        if view.readonly and access & writes:
            msg = "the buffer is read-only: register it without write access"
            raise BufferError(msg)
        self._keep: CData | None = ffi.from_buffer(view)
        self._view: memoryview | None = view.cast("B")
        memory = self._keep
        self.pd = pd
        self.access = access
        self.addr = int(ffi.cast("uintptr_t", memory))
        self.length = view.nbytes
        # May run in a worker thread while the loop gives up and closes the domain: it has to
        # outlive the call.
        pd._retain()
        try:
            handle = lib.ibv_reg_mr(pd._handle, memory, self.length, int(access))
            if handle == ffi.NULL:
                raise os_error(ffi.errno, "ibv_reg_mr", detail=f"({self.length} bytes)")
            self.lkey = int(handle.lkey)
            self.rkey = int(handle.rkey)
            super().__init__(handle, (pd,))
        finally:
            pd._let_go()

    @property
    def view(self) -> memoryview:
        """The registered bytes.

        Raises:
            ResourceClosedError: The region is closed.
        """
        self._require()
        assert self._view is not None
        return self._view

    def _destroy(self, handle: Any) -> None:
        try:
            check_errno(lib.ibv_dereg_mr(handle), "ibv_dereg_mr")
        except OSError:
            # Still registered: the adapter may write to it.  A leak is a bug report, memory that
            # is freed under an adapter is a corruption; so keep it for good.
            _leaked.append((self._keep, self._view))
            raise
        finally:
            self._keep = self._view = None

    def __len__(self) -> int:
        return self.length

    def __repr__(self) -> str:
        return (
            f"<MemoryRegion {self._state.value} length={self.length} lkey={self.lkey:#x} "
            f"rkey={self.rkey:#x} {self.access!r}>"
        )


_leaked: list[object] = []
