"""MemoryRegion: memory that the adapter may read or write.

Theory of operation
    A region keeps its buffer exported until the memory is deregistered, so that Python can neither
    free nor resize it.  This also holds if the region is closed while it is in use, or if the C
    library refuses to deregister it.

    `addr` is the address of the first byte for the adapter: the address of the buffer, or the
    `iova`.  Scatter/gather elements and remote accesses are relative to it.

    If the device does not support a registration, the error names the missing capability.  Some
    capabilities can be queried before (on-demand paging); others can only be tried, because
    libibverbs has no way to ask (dmabuf).  A device that accepts a flag and ignores it counts as
    one that does not support it.
"""

from __future__ import annotations

import errno
import mmap
import sys
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Protocol, Self, TypeVar

from aiordma._core import BufferExport, Registration
from aiordma._ffi import CData, ffi, lib
from aiordma._ffi.check import check_errno
from aiordma.arguments import check_kind, fitting, no_buffer, refuse_objects, whole
from aiordma.errors import NotSupportedError, os_error
from aiordma.loop.workers import call_blocking
from aiordma.tensors import buffer_of
from aiordma.verbs.context import Context
from aiordma.verbs.enums import Access, MRAdvice, ODPGeneralCaps
from aiordma.verbs.pd import ProtectionDomain
from aiordma.verbs.resource import Resource
from aiordma.verbs.slab import slab

__all__ = [
    "INLINE_BYTES", "SGE", "MemoryRegion", "bytes_of", "check_inside", "check_memory",
    "is_unpinnable", "make_region",
]  # fmt: skip

_Region = TypeVar("_Region", bound="MemoryRegion")

#: How errors name the buffer.
_WHAT = "memory to register"
_LOCAL = Access.LOCAL_WRITE
_MAX_SGE_LENGTH = (1 << 32) - 1
# Registering more bytes than this takes so long that it is done in a thread.
INLINE_BYTES = 1 << 20
# As integers, because an operation on enum flags takes as long as the whole call.
_REMOTE_WRITES = int(Access.REMOTE_WRITE | Access.REMOTE_ATOMIC)
_ZERO_BASED = int(Access.ZERO_BASED)
_ON_DEMAND = int(Access.ON_DEMAND)
_LOCAL_BITS = int(Access.LOCAL_WRITE)
_HUGETLB = int(Access.HUGETLB)
_EVERYWHERE = Access.LOCAL_WRITE | Access.REMOTE_READ | _REMOTE_WRITES
_ADDRESSES = 1 << 64
_MOST_BYTES = sys.maxsize
# Software iWARP accepts an iova, but goes on using the address of the buffer.
_IGNORES_IOVA = frozenset({0x626D74})  # vendor_id


class _Count(Protocol):
    """What counts the bytes of a region as pinned."""

    def deregistered(self, size: int) -> None:
        """Note that a region of `size` bytes is not pinned any more.  In any thread."""


class MemoryRegion(Resource):
    """A registered buffer (`ibv_reg_mr(3)`).

    Args:
        pd: The protection domain; only its queue pairs can use the memory.
        buffer: Any object with the buffer protocol that is contiguous in C order, whatever its
            shape and format: bytearray, memoryview, array, mmap, ctypes, numpy.  Or an object with
            DLPack in host memory, such as a torch tensor.  It stays exported until the region is
            destroyed, so it cannot be resized.  Or a number of bytes, for new page-aligned memory
            filled with zeros, which belongs to the region.
        access: What the adapter may do; local reads are always allowed.  RELAXED_ORDERING is
            optional: a device that does not support it silently ignores it.
        iova: The address of the first byte for the adapter and the peer, 64 bits; None for the
            address of the buffer.  Both need to have the same offset within a page.

    Pinning the pages takes longer the more there are; `await register(...)` does it in a thread.

    Raises:
        TypeError: `buffer` is no buffer, or an array of Python objects, or a masked array.
        ValueError: The buffer is empty or not contiguous, or `access` or `iova` is invalid.
        BufferError: Write access was requested for a read-only buffer.
        NotSupportedError: The device does not support a flag or the iova; the text names both.
        OSError: The memory cannot be registered.  ENOMEM usually means that RLIMIT_MEMLOCK is too
            low.  Soft-RoCE cannot register more than 1 GiB at a time, although its `max_mr_size`
            says otherwise.

    Attributes:
        addr: The address of the first byte, for work requests and for the peer.
        length: The size in bytes.
        lkey: The key for local use.
        rkey: The key for the peer.
    """

    _use = "unfinished work request"
    __slots__ = (
        "_keep",
        "_pinned_in",
        "_registration",
        "_view",
        "access",
        "addr",
        "length",
        "lkey",
        "pd",
        "rkey",
    )

    pd: ProtectionDomain
    access: Access
    addr: int
    length: int
    lkey: int
    rkey: int

    def __init__(
        self,
        pd: ProtectionDomain,
        buffer: Any,
        access: Access = Access.LOCAL_WRITE,
        *,
        iova: int | None = None,
    ) -> None:
        check_kind("pd", pd, ProtectionDomain, none=False)
        if type(access) is not Access:
            access = Access(fitting("access", access, 31))
        if iova is not None:
            iova = fitting("iova", iova, 64)
        _check_access(pd.context, access)
        if isinstance(buffer, Integral):
            buffer = _fresh(whole("the number of bytes", buffer), access)
        memory: Any = None
        data: Any = None
        self._keep: Any = None
        self._view: memoryview | None = None
        found = buffer_of(_WHAT, buffer)
        has_own = found is buffer and not isinstance(buffer, memoryview)
        view = memoryview(found)
        del found
        try:
            memory = bytes_of(view, access)
            if has_own:
                # The buffer's own export, which the collector can traverse: if the buffer refers
                # to the region, the collector finds the cycle.
                memory = ffi.from_buffer(buffer)
            own = int(ffi.cast("uintptr_t", memory))
            where = own if iova is None else iova
            _check_iova(pd.context, where, own, view.nbytes)
            # Not view.cast("B"), which knows neither ctypes' formats nor numpy's structures.
            data = memoryview(ffi.buffer(memory, view.nbytes))
            self._keep = memory
            self._view = data.toreadonly() if view.readonly else data
            self._register(
                "ibv_reg_mr", lib.ibv_reg_mr_iova, (memory, view.nbytes, where),
                pd, access, where, view.nbytes, own,
            )  # fmt: skip
        except BaseException:
            # As in `_register`.
            memory = data = self._keep = self._view = None
            view.release()
            raise

    def _register(
        self,
        verb: str,
        function: Callable[..., Any],
        memory: tuple[Any, ...],
        pd: ProtectionDomain,
        access: Access,
        addr: int,
        length: int,
        own: int = 0,
    ) -> None:
        """Call `function` with the domain, `memory` and the rights; `verb` is for errors.

        `own` is the address of the memory for this process, if it has one.
        """
        #: What counts it as pinned until it is deregistered.
        self._pinned_in: _Count | None = None
        self.pd, self.access, self.addr, self.length = pd, access, addr, length
        self.lkey = self.rkey = 0
        try:
            # May run in a thread while the loop closes the domain, which has to outlive the call.
            super().__init__(None, (pd,))
            try:
                # Where the adapter, a program of the kernel, may complete a READ too early.
                seen = own if own and pd.context.is_software else 0
                handle = function(pd._handle, *memory, access)
                if not handle:
                    raise _refusal(ffi.errno, verb, pd.context, access, length)
                self._handle = handle
                self.lkey, self.rkey = handle.lkey, handle.rkey
                self._registration = Registration(addr, length, self.lkey, access, pd, seen)
                pd._require()  # it may have been closed meanwhile
            except BaseException:
                self._finish()
                raise
        finally:
            del memory  # the exception holds this frame; it must not hold the caller's buffer

    @classmethod
    def slab(
        cls, pd: ProtectionDomain, size: int, access: Access = _LOCAL, *, clear: bool = False
    ) -> Self:
        """Kept memory (`verbs.slab`); the arguments are not checked.

        Args:
            pd: Protection domain.
            size: Bytes.
            access: Accesses that are allowed to the adapter.
            clear: Whether to fill it with zeros; otherwise it may hold anything.

        Raises:
            OSError: As the class.
        """
        self = cls.__new__(cls)
        memory = self._keep = slab(size, clear=clear)
        self._view = None  # made when it is asked for: C uses most of these by their address
        where = int(ffi.cast("uintptr_t", memory))
        self._register(
            "ibv_reg_mr", lib.ibv_reg_mr_iova, (memory, size, where),
            pd, access, where, size, where,
        )  # fmt: skip
        return self

    @classmethod
    async def register(
        cls,
        pd: ProtectionDomain,
        buffer: Any,
        access: Access = Access.LOCAL_WRITE,
        *,
        iova: int | None = None,
    ) -> Self:
        """Register without holding up the loop: above 1 MiB a thread does it.

        Args, raises: as the class.

        Cancellation: ends the wait; the thread deregisters the region that it has made, and until
        then the buffer stays exported.
        """
        if isinstance(buffer, Integral):
            size = int(buffer)
        else:
            with memoryview(buffer_of(_WHAT, buffer)) as view:
                size = view.nbytes
        return await make_region(size, lambda: cls(pd, buffer, access, iova=iova))

    @classmethod
    def from_dmabuf(
        cls,
        pd: ProtectionDomain,
        fd: int,
        length: int,
        access: Access = Access.LOCAL_WRITE,
        *,
        offset: int = 0,
        iova: int | None = None,
    ) -> Self:
        """Register memory of another device, such as a GPU's (`ibv_reg_dmabuf_mr(3)`).

        Args:
            pd: Protection domain.
            fd: Descriptor of the dmabuf; it may be closed afterwards.
            length: Bytes.
            access: As for the class.
            offset: First byte, from the start of the dmabuf.
            iova: Address for work requests and for the peer; None for `offset`.  Both have the
                same offset within a page.

        Returns:
            A region without a `view`, because the processor may not be able to reach the memory.

        Raises:
            ValueError: A number is out of range.
            NotSupportedError: The device or its driver supports no dmabufs.
            OSError: There is no such descriptor (EBADF), or it is no dmabuf.
        """
        where = offset if iova is None else iova
        _check_access(pd.context, access)
        if length <= 0 or offset < 0 or offset + length > _ADDRESSES:
            msg = f"{length} bytes at offset {offset} cannot be part of a dmabuf"
            raise ValueError(msg)
        _check_iova(pd.context, where, offset, length)
        self = cls.__new__(cls)
        self._keep = self._view = None
        self._register(
            "ibv_reg_dmabuf_mr", lib.ibv_reg_dmabuf_mr, (offset, length, where, fd),
            pd, access, where, length,
        )  # fmt: skip
        return self

    @classmethod
    def implicit(cls, pd: ProtectionDomain, access: Access = Access.LOCAL_WRITE) -> Self:
        """Register all memory of the process, present and future, by on-demand paging.

        Nothing is pinned or kept alive: a piece of the region is `SGE(region, address, length)`,
        and the caller makes sure that its memory exists.  With remote rights the region opens the
        whole process to the peer.

        Args:
            pd: Protection domain.
            access: As for the class; ON_DEMAND is added.

        Raises:
            NotSupportedError: The device has no implicit on-demand paging.
            OSError: Resources ran out.
        """
        access |= Access.ON_DEMAND
        _check_access(pd.context, access)
        if not pd.context.query_odp().general_caps & ODPGeneralCaps.SUPPORT_IMPLICIT:
            raise _unsupported("ibv_reg_mr", pd.context, "implicit on-demand paging")
        self = cls.__new__(cls)
        self._keep = self._view = None
        everything = _ADDRESSES - 1
        self._register(
            "ibv_reg_mr", lib.ibv_reg_mr, (ffi.NULL, everything), pd, access, 0, everything
        )
        return self

    async def advise(self, advice: MRAdvice, offset: int = 0, length: int | None = None) -> None:
        """Bring in pages of on-demand memory before they are needed (`ibv_advise_mr(3)`).

        Args:
            advice: PREFETCH for reading, PREFETCH_WRITE, or PREFETCH_NO_FAULT for pages that are
                in memory already.
            offset: First byte, from the region's start.
            length: Bytes; None for all from `offset` on.

        Returns when the pages are in memory; a thread waits for them.

        Raises:
            ValueError: The piece is not inside the region.
            NotSupportedError: The device has no on-demand paging.
            OSError: The region is not ON_DEMAND, or its memory is gone (EFAULT).

        Cancellation: ends the wait only.
        """
        end = self.length if length is None else offset + length
        if not 0 <= offset <= end <= self.length:
            msg = f"bytes {offset} to {end} are not inside a region of {self.length} bytes"
            raise ValueError(msg)
        _check_access(self.pd.context, Access.ON_DEMAND, "ibv_advise_mr")
        starts = range(offset, end, _MAX_SGE_LENGTH)
        pieces = ffi.new("struct ibv_sge[]", len(starts))
        for piece, start in zip(pieces, starts, strict=True):
            piece.addr = self.addr + start
            piece.length = min(end - start, _MAX_SGE_LENGTH)
            piece.lkey = self.lkey
        flags = lib.IBV_ADVISE_MR_FLAG_FLUSH
        self._retain()

        def run() -> None:
            try:
                handle = self.pd._handle
                result = lib.ibv_advise_mr(handle, int(advice), flags, pieces, len(starts))
                check_errno(result, "ibv_advise_mr")
            finally:
                self._let_go()

        await call_blocking(run, undo=lambda _: None)

    @property
    def view(self) -> memoryview:
        """The registered bytes, as a flat writable (or read-only) view.

        Raises:
            ResourceClosedError: The region is closed.
            BufferError: It has no such view, as it was made by `from_dmabuf` or `implicit`.
        """
        self._require()
        if (view := self._look()) is None:
            msg = "the region was not made from a buffer of this process"
            raise BufferError(msg)
        return view

    def _look(self) -> memoryview | None:
        """`view`, or None without memory of this process."""
        if self._view is None and self._keep is not None:
            self._view = memoryview(ffi.buffer(self._keep, self.length))
        return self._view

    def _front(self, size: int) -> Any:
        """The first bytes of kept memory, an object with the buffer protocol that keeps it alive.

        It is lighter than a part of `view`, which takes five objects.
        """
        return ffi.buffer(self._keep, size)

    # Operations of connections are counted in C.

    @property
    def _transfers(self) -> int:
        return self._registration.uses

    def _stay(self) -> None:
        if self._registration.shut():
            self._children += 1

    def _transferred(self) -> None:
        """An operation that C has counted, and that did not end by way of C, has ended."""
        if self._registration.leave():
            self._let_go()

    def _schedule(self) -> None:
        # A few pages are deregistered where they were registered, without a thread, unless the peer
        # may write there: then the deregistration may take long, as on Soft-RoCE.  A protection
        # domain that waits for its last region is destroyed in the thread, and so is that region: a
        # wait for the region is a wait for both.
        quick = self.length <= INLINE_BYTES and not int(self.access) & _REMOTE_WRITES
        if quick and not self.pd.closed:
            self._finish()
        else:
            super()._schedule()

    def _destroy(self, handle: Any) -> None:
        try:
            check_errno(lib.ibv_dereg_mr(handle), "ibv_dereg_mr")
        except OSError as exc:
            # Still registered: the adapter may write to it.  A leak is a bug report, memory that
            # is freed under an adapter is a corruption; so keep it for good.
            if exc.errno != errno.EIO:  # not there any more
                _leaked.append((self._keep, self._view))
            raise
        finally:
            self._keep = self._view = None
            count, self._pinned_in = self._pinned_in, None
            if count is not None:
                count.deregistered(self.length)

    def __getitem__(self, part: slice) -> SGE:
        """A piece of the region, such as `region[4096:8192]`."""
        if not isinstance(part, slice):
            msg = "a region has slices, which are pieces of it; its bytes are in `view`"
            raise TypeError(msg)
        if part.step not in (None, 1):
            msg = f"a slice of a region has step 1, not {part.step}"
            raise ValueError(msg)
        start, stop, _ = part.indices(self.length)
        return SGE(self, start, max(stop - start, 0))

    def __len__(self) -> int:
        return self.length

    def __bool__(self) -> bool:
        return True  # by len() it would fail above sys.maxsize

    def __repr__(self) -> str:
        return (
            f"<MemoryRegion {self._state.value} length={self.length} lkey={self.lkey:#x} "
            f"rkey={self.rkey:#x} {self.access!r}>"
        )


_leaked: list[object] = []


async def make_region(size: int, make: Callable[[], _Region]) -> _Region:
    """Call `make`, which registers `size` bytes; in a thread if these are many.

    Cancellation: ends the wait; the thread closes the region that it has made.
    """
    if size <= INLINE_BYTES:
        return make()
    return await call_blocking(make, undo=lambda region: region.close())


def check_region(region: object, pd: ProtectionDomain) -> None:
    """Check a region that is to replace another.

    Raises:
        TypeError: Not a region.
        ValueError: It belongs to another protection domain.
        ResourceClosedError: It is closed.
    """
    if not isinstance(region, MemoryRegion):
        check_kind("region", region, MemoryRegion, none=False)
        return
    region._require()
    if region.pd is not pd:
        msg = "the region belongs to another protection domain"
        raise ValueError(msg)


def check_inside(region: MemoryRegion, offset: int, length: int) -> None:
    """Raise ValueError unless the bytes lie in the region."""
    if offset < 0 or length < 0 or offset + length > region.length:
        msg = (
            f"bytes {offset} to {offset + length} are not inside a region of {region.length} bytes"
        )
        raise ValueError(msg)


def check_index(name: str, index: int, count: int) -> None:
    """Raise IndexError unless `index` is that of one of `count` requests, or pieces."""
    if not 0 <= index < count:
        msg = f"there is no {name} {index}: there are {count}"
        raise IndexError(msg)


def place_of(
    sge: Any,
    region: MemoryRegion,
    other: MemoryRegion | None,
    offset: int | None,
    length: int | None,
    pd: ProtectionDomain,
) -> tuple[MemoryRegion, int, int]:
    """Region, address and length that a piece of a prepared request is to have.

    Args:
        sge: The piece in C, as it is now.
        region: The region of the piece now.
        other: The new region, from its start on unless `offset` is given; None for the same.
        offset: First byte, from the start of the region; None for the same.
        length: Bytes; None for the same number.
        pd: Protection domain of the queue.

    Raises:
        TypeError, ValueError, ResourceClosedError: As `check_region`, `check_inside` and `fitting`.
    """
    if other is not None:
        check_region(other, pd)
        region, offset = other, offset or 0
    if offset is None:
        offset = sge.addr - region.addr
    if length is None:
        length = sge.length
    check_inside(region, offset, length)
    return region, region.addr + offset, fitting("the length of a piece,", length, 32)


@dataclass(frozen=True, slots=True, init=False)
class SGE:
    """A piece of a registered buffer.

    Args:
        mr: The region; it cannot be destroyed while a request that names it is under way.
        offset: First byte, from the region's start.
        length: Bytes; None for all from `offset` on.

    Raises:
        ValueError: The piece is not inside the region.
    """

    mr: MemoryRegion
    offset: int = 0
    length: int | None = None

    # Not the dataclass's own: a program may make a piece for each transfer, and that one would take
    # nearly twice as long.
    def __init__(self, mr: MemoryRegion, offset: int = 0, length: int | None = None) -> None:
        try:
            room = mr.length
        except AttributeError:
            msg = f"a piece belongs to a MemoryRegion, not to {mr!r}"
            raise TypeError(msg) from None
        if type(offset) is not int:
            offset = whole("offset", offset)
        if length is None:
            length = room - offset
        elif type(length) is not int:
            length = whole("length", length)
        if offset < 0 or length < 0 or offset + length > room:
            check_inside(mr, offset, length)
        _set_mr(self, mr)
        _set_offset(self, offset)
        _set_length(self, length)

    def __len__(self) -> int:
        assert self.length is not None
        return self.length


_set_mr, _set_offset, _set_length = (vars(SGE)[name].__set__ for name in ("mr", "offset", "length"))


def bytes_of(view: memoryview, access: Access) -> CData:
    """The bytes of a view, for C; keeps it exported.

    Raises:
        TypeError: They are references to Python objects.
        ValueError: It is empty or not contiguous.
        BufferError: Write access to a read-only buffer.
    """
    _check_view(view, access)
    return ffi.from_buffer(BufferExport(view))


def _check_view(view: memoryview, access: Access) -> None:
    refuse_objects(_WHAT, view)
    if not view.c_contiguous:
        msg = "a memory region needs a contiguous buffer in C order"
        raise ValueError(msg)
    if not view.nbytes:
        msg = "a memory region needs at least one byte"
        raise ValueError(msg)
    if view.readonly and int(access) & (_LOCAL_BITS | _REMOTE_WRITES):
        msg = (
            "the buffer is read-only, and would be written to: use a writable one, such as a "
            "bytearray, or give the right to read alone"
        )
        raise BufferError(msg)


def check_memory(buffer: Any, access: Access) -> None:
    """Raise as `MemoryRegion` would, without making or exporting anything that stays.

    Raises:
        TypeError: Neither a buffer nor a number of bytes; or an array of Python objects.
        ValueError: It is empty or not contiguous.
        BufferError: Write access to a read-only buffer.
    """
    if isinstance(buffer, Integral):
        whole("the number of bytes", buffer, 1, _MOST_BYTES)
        return
    try:
        view = memoryview(buffer)
    except TypeError:
        raise no_buffer(_WHAT, buffer) from None
    with view:
        _check_view(view, access)


def is_unpinnable(exc: OSError) -> bool:
    """Whether a registration has failed because the kernel does not pin memory of this kind.

    Which mappings of files these are depends on the kernel and the file system (docs/buffers.md).
    """
    return exc.errno in (errno.EFAULT, errno.EOPNOTSUPP)


def _fresh(size: int, access: Access) -> mmap.mmap:
    """Zeroed memory that belongs to the region.

    Raises:
        ValueError: The size is not positive, or `access` asks for huge pages.
    """
    whole("the number of bytes", size, 1, _MOST_BYTES)
    if int(access) & _HUGETLB:
        msg = "HUGETLB promises huge pages: pass a buffer that lies in them, not a size"
        raise ValueError(msg)
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _check_access(context: Context, access: Access, verb: str = "ibv_reg_mr") -> None:
    """Refuse rights that contradict each other, or that the device does not support.

    Raises:
        ValueError, NotSupportedError: The rights are refused.
    """
    rights = int(access)
    if rights & _REMOTE_WRITES and not rights & _LOCAL_BITS:
        msg = "remote write and atomic access need LOCAL_WRITE, too"
        raise ValueError(msg)
    if rights & _ZERO_BASED:
        # Soft-RoCE refuses it, software iWARP accepts and ignores it.
        msg = "register with iova=0 instead of ZERO_BASED"
        raise ValueError(msg)
    if rights & _ON_DEMAND and not context.query_odp().general_caps & ODPGeneralCaps.SUPPORT:
        raise _unsupported(verb, context, "on-demand paging (ODP)")


def _check_iova(context: Context, iova: int, own: int, length: int) -> None:
    """Refuse an address that the device cannot give the memory at `own`.

    Raises:
        ValueError, NotSupportedError: The address is refused.
    """
    if iova == own:
        return
    if not 0 <= iova <= _ADDRESSES - length:
        msg = f"{length} bytes from iova {iova:#x} on do not fit into 64-bit addresses"
        raise ValueError(msg)
    if (iova - own) % mmap.PAGESIZE:
        msg = f"iova {iova:#x} has another offset within its page than the memory, {own:#x}"
        raise ValueError(msg)
    if context.attributes.vendor_id in _IGNORES_IOVA:
        raise _unsupported("ibv_reg_mr_iova", context, "addresses other than the memory's own")


def _refusal(code: int, verb: str, context: Context, access: Access, length: int) -> OSError:
    """The exception for a registration that the device has refused with `code`."""
    if code in (errno.EOPNOTSUPP, errno.ENOSYS):
        special = access & ~_EVERYWHERE
        what = f"the access flags {special!r}" if special else "this kind of memory"
        if verb == "ibv_reg_dmabuf_mr":
            what = "dmabuf memory"
        return _unsupported(verb, context, what)
    error = os_error(code or errno.EIO, verb, detail=f"({length} bytes)")
    error._unpinned = True
    return error


def _unsupported(verb: str, context: Context, what: str) -> NotSupportedError:
    """The exception for a capability that the device does not have."""
    text = f"{verb}: the device {context.name} does not support {what}"
    return NotSupportedError(errno.EOPNOTSUPP, text)
