"""Memory: registered once, in a protection domain that connections share by choice.

Theory of operation
    An adapter finds memory by a key that is valid in one protection domain, and a queue pair is in
    one domain.  So connections that are to use one registration have to be in its domain, with all
    that they register for themselves: the connections that were made with the memory, and no
    others (docs/adr/shared-memory.md has the price).

    A part is lent by a window of the adapter (`LentPart`).  A window of type 2 serves a single
    queue pair; but on Soft-RoCE a peer could crash the kernel by it, so that windows are of type 1
    there, which any queue pair of the domain can use; and their bounds are not enforced.  Software
    iWARP has no windows.  Where an adapter does not hold a lease to its part, a part is lent only
    with rights with which the program trusts its peers in all of the memory (`trusted`).

    The bytes count as those that connections pin from their beginning on (`memlock.FIRST`), so that
    the budgets of messages are parts of the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import sys
import warnings
import weakref
from collections.abc import Callable
from numbers import Integral
from typing import Any, Protocol, Self

from aiordma.arguments import Buffer, check_kind, fitting
from aiordma.cm.devices import find_device
from aiordma.errors import (
    NotSupportedError,
    ResourceBusyError,
    ResourceClosedError,
    errno_error,
)
from aiordma.logs import log_of
from aiordma.loop import fork
from aiordma.loop.running import check_loop, from_finalizer
from aiordma.loop.uncopied import Uncopied
from aiordma.loop.workers import call_blocking
from aiordma.memory.lent import LentPart, Overlaps
from aiordma.memory.memlock import FIRST
from aiordma.memory.remote import words_of
from aiordma.tensors import buffer_of
from aiordma.verbs.context import Context
from aiordma.verbs.device import Device
from aiordma.verbs.enums import Access, DeviceCapFlags, MWType
from aiordma.verbs.mr import SGE, MemoryRegion, check_memory
from aiordma.verbs.mw import MemoryWindow
from aiordma.verbs.pd import ProtectionDomain

__all__ = ["Memory", "Sharer", "check_shared"]

_log = log_of("memory")
_WRITES = Access.REMOTE_WRITE | Access.REMOTE_ATOMIC
_RIGHTS = Access.REMOTE_READ | _WRITES
_NO_RIGHTS = Access(0)
_TYPE_2 = DeviceCapFlags.MEM_WINDOW_TYPE_2A | DeviceCapFlags.MEM_WINDOW_TYPE_2B
#: Seconds that an adapter has to let go of the memory.
_CLOSE_S = 60.0


class Sharer(Protocol):
    """A connection, as its memory sees it."""

    @property
    def _stage(self) -> str:
        """Whether it is "connecting", "open", "closing" or "closed"."""

    def abort(self) -> None:
        """End it at once."""


def windows_of(context: Context) -> MWType | None:
    """The type of the windows by which parts are lent on a device; None if it has none."""
    flags = context.attributes.device_cap_flags
    if flags & _TYPE_2 and not context.is_software:
        return MWType.TYPE_2
    return MWType.TYPE_1 if flags & DeviceCapFlags.MEM_WINDOW else None


class Memory(Uncopied):
    """Memory that is registered once, for all connections that are made with it.

    ``async with Memory(1 << 30) as memory`` registers it; `connect`, `listen`, `serve`, `Pool` and
    so on take it as `memory`.  Such a connection sends a part, ``memory[a:b]``, without a
    registration, reads into it and writes from it without a copy, and leases it to its peer
    (`Connection.expose`): each lease has rights of its own, and ends by itself, with its block or
    with its connection.  `view` has the bytes.

    The connections share a protection domain, in which a key of one connection is valid for the
    peers of all.  How far a lease holds depends on the adapter:

    - With memory windows of type 2 a lease is for its peer, its part and its time alone
      (`guarded`).
    - Soft-RoCE enforces rights and time of a lease, but neither its bounds nor whose it is: a peer
      with a lease reaches all of the memory with the rights of that lease, until it ends.
    - Software iWARP has no windows: a peer that knows the key reaches all of the memory, with the
      rights `trusted`, until the memory is closed, by any connection to it.  The end of a lease
      takes nothing from the peer.  Count a peer that may write there as one that may read.
    - With any adapter, a peer that guesses keys reaches more memory of the connections, as far as
      their own peers may: buffers that they expose, large messages on their way to a peer, and
      copies of up to 256 KiB, which stay readable until the next message takes their buffer; on
      iWARP also those that arrive.

    Args:
        memory: A contiguous buffer, such as a bytearray, a numpy array or an mmap, which stays
            exported until the memory is closed; or a number of bytes, for fresh zeroed memory.
            Read-only buffers can be read alone.  Soft-RoCE registers 1 GiB at most.
        device: The device, or its name, if the machine has several.
        trusted: Rights to all of the memory that every peer may be trusted with, where the adapter
            does not guard parts: REMOTE_READ, REMOTE_WRITE, REMOTE_ATOMIC or several.  There a
            lease with another right is refused, and a message is registered for itself unless
            REMOTE_READ is among them.  Without an effect where `guarded` is true.
        overlap: Whether a part may be lent for writing while another connection has a lease of the
            same bytes: the program keeps its peers in order itself.

    Raises:
        TypeError: No buffer, or another class than expected.
        ValueError: The buffer is empty or not contiguous, or `trusted` has another flag.
        BufferError: The buffer is read-only, and `trusted` has a right to write.

    It belongs to the event loop that has opened it.  At the end of the `async with` block no
    connection may be open that shares it; after an exception those that are open are aborted.
    """

    def __init__(
        self,
        memory: Buffer | int,
        *,
        device: str | Device | None = None,
        trusted: Access = _NO_RIGHTS,
        overlap: bool = False,
    ) -> None:
        self._region: MemoryRegion | None = None
        check_kind("overlap", overlap, bool, none=False)
        if isinstance(device, Device):
            device = device.name
        check_kind("device", device, str)
        if isinstance(trusted, bool) or not isinstance(trusted, int):
            msg = f"trusted has to be rights, such as Access.REMOTE_READ, not {trusted!r}"
            raise TypeError(msg)
        trusted = Access(fitting("trusted", trusted, 31))
        if trusted & ~_RIGHTS:
            msg = f"trusted has a flag that is no right of a peer: {trusted & ~_RIGHTS!r}"
            raise ValueError(msg)
        memory = buffer_of("memory to share", memory)
        check_memory(memory, trusted)
        self._buffer: Any = int(memory) if isinstance(memory, Integral) else memory
        self._device = device
        self._trusted = trusted
        self._opening = self._closed = False
        self._windows: MWType | None = None
        self._lent = Overlaps(allowed=overlap)
        self._sharers: weakref.WeakSet[Any] = weakref.WeakSet()
        fork.guard_public(self)

    async def open(self) -> None:
        """Register the memory, in a thread if that takes long.  Idempotent.

        Raises:
            LibraryMissingError, DeviceNotFoundError: RDMA is not available here, or there is no
                such device.
            ValueError: The machine has several devices, and none was named.
            OSError: ENOMEM mostly means that RLIMIT_MEMLOCK is too low.
            ResourceClosedError: The memory was closed.
            RuntimeError: It is being opened by another task, or was opened in another event loop.

        Cancellation: nothing stays registered.
        """
        if self._region is not None:
            self._require_here()
            return
        if self._opening:
            msg = "the memory is being opened by another task"
            raise RuntimeError(msg)
        if self._closed:
            raise _closed_error()
        self._opening = True
        try:
            handle = await call_blocking(lambda: find_device(self._device), undo=lambda _: None)
            await self._register(Context.borrow(handle))
        finally:
            self._opening = False

    async def _register(self, context: Context) -> None:
        self._windows = windows_of(context)
        self._loop = asyncio.get_running_loop()
        pd = ProtectionDomain(context)
        try:
            region = await MemoryRegion.register(pd, self._buffer, self._access(context))
        except BaseException:
            pd.close()
            raise
        if self._closed:  # meanwhile
            region.close()
            pd.close()
            raise _closed_error()
        FIRST.count(region.length)
        region._gone.add_done_callback(functools.partial(_unpinned, region.length))
        self._region, self._buffer = region, None

    def _access(self, context: Context) -> Access:
        """The rights of the registration."""
        buffer = self._buffer
        readonly = False
        if not isinstance(buffer, int):
            with memoryview(buffer) as view:
                readonly = view.readonly
        if self._windows is not None:
            access = Access.MW_BIND
        else:
            access = self._trusted
            if context.is_iwarp:
                access &= ~Access.REMOTE_ATOMIC
                # To read into a part tells the peer the key, by which it can write there.
                readonly = readonly or not access & Access.REMOTE_WRITE
        return access if readonly else access | Access.LOCAL_WRITE

    # Facts

    def _require(self) -> MemoryRegion:
        if self._region is None or self._closed:
            if self._closed:
                raise _closed_error()
            msg = "the memory is not open: use `async with memory`, or `await memory.open()`"
            raise RuntimeError(msg)
        return self._region

    def _require_here(self) -> MemoryRegion:
        region = self._require()
        check_loop(self._loop, "memory")
        return region

    @property
    def device(self) -> str | None:
        """The name of its device; before it is open, the name that was given, or None."""
        return self._device if self._region is None else self._region.pd.context.name

    @property
    def guarded(self) -> bool:
        """Whether the adapter holds each lease to its peer, its part, its rights and its time.

        Raises:
            RuntimeError: The memory is not open.
            ResourceClosedError: It is closed.
        """
        self._require()
        return self._windows is MWType.TYPE_2

    @property
    def view(self) -> memoryview:
        """All bytes; read-only if the buffer is.

        Raises:
            RuntimeError: The memory is not open.
            ResourceClosedError: It is closed.
        """
        return self._require().view

    @property
    def leases(self) -> int:
        """Leases of parts that are open."""
        return self._lent.open

    @property
    def connections(self) -> int:
        """Connections that share it, and are not closed."""
        return sum(each._stage != "closed" for each in self._sharers)

    def __len__(self) -> int:
        return self._require().length

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, part: slice) -> SGE:
        """A part, such as ``memory[4096:8192]``, for `send`, `read`, `write` and `expose`.

        Negative numbers count from the end.

        Raises:
            TypeError: No slice.
            ValueError: It is not inside the memory, ends before it begins, or has a step.
            RuntimeError, ResourceClosedError: The memory is not open.
        """
        region = self._require()
        if not isinstance(part, slice):
            msg = "a Memory has slices, which are parts of it; its bytes are in `view`"
            raise TypeError(msg)
        if part.step not in (None, 1):
            msg = f"a slice of a Memory has step 1, not {part.step}"
            raise ValueError(msg)
        length = region.length
        start, stop, _ = part.indices(length)
        # Not clamped, as other slices are: a part that is shorter than it seems is an error.
        for bound, meant in ((part.start, start), (part.stop, stop)):
            if bound is not None and bound not in (meant, meant - length):
                msg = f"byte {bound} is not inside a memory of {length} bytes"
                raise ValueError(msg)
        if stop < start:
            msg = f"the part ends at byte {stop}, before it begins at {start}"
            raise ValueError(msg)
        return SGE(region, start, stop - start)

    # Of connections

    def _domain(self, context: Context) -> ProtectionDomain:
        """The protection domain for a connection on a device.

        Raises:
            RuntimeError: The memory is not open, or belongs to another event loop.
            ResourceClosedError: It is closed.
            RdmaOSError: EXDEV, it is registered with another device.
        """
        pd = self._require_here().pd
        if pd.context is not context:
            msg = f"the memory is registered with {pd.context.name}, not with {context.name}"
            raise errno_error(errno.EXDEV, msg, "make the Memory with device=")
        return pd

    def _join(self, sharer: Sharer) -> None:
        self._sharers.add(sharer)

    def _has(self, part: SGE) -> bool:
        return part.mr is self._region

    def _check(self, part: SGE, rights: Access) -> None:
        """Refuse a lease that the adapter, or the program's trust, does not allow.

        Raises:
            ValueError: The part is empty.
            BufferError: The memory is read-only, and the lease is not only for reading.
            NotSupportedError: The adapter does not guard parts, and a right is not trusted.
            RuntimeError, ResourceClosedError: The memory is not open.
        """
        region = self._require_here()
        if not len(part):
            msg = "a lease needs at least one byte"
            raise ValueError(msg)
        if rights & _WRITES and region.view.readonly:
            msg = "the memory is read-only: expose it for reading alone"
            raise BufferError(msg)
        if not self._gives(rights):
            name = region.pd.context.name
            text = (
                f"{name} does not hold a lease to its part: a peer would {words_of(rights)} all of "
                f"the memory, and is trusted with {words_of(self._trusted)}"
            )
            error = NotSupportedError(errno.EOPNOTSUPP, text)
            error.hint = "if all peers are trusted with it, say so by Memory(..., trusted=...)"
            try:
                raise error
            finally:
                del error  # its traceback has this frame: a cycle

    def _gives(self, rights: Access) -> bool:
        """Whether a part can be opened with these rights."""
        return self._windows is MWType.TYPE_2 or not rights & ~self._trusted

    def _lend(self, part: SGE, rights: Access, owner: object, *, message: bool) -> LentPart:
        """A part that is to be opened for a peer: the caller binds its window.

        Args:
            part: The part.
            rights: The peer's.
            owner: The connection's; its own parts may overlap.
            message: Whether it is opened for a message, and not by a lease.

        Raises:
            ResourceBusyError: It overlaps a lent part.
            OSError: Out of windows.
            RuntimeError, ResourceClosedError: The memory is not open.
        """
        pd = self._require_here().pd
        lent = LentPart(part, rights, owner, None, None if message else self._lent.remove)
        if not message:
            self._lent.add(lent)
        if self._windows is not None:
            try:
                lent.window = MemoryWindow(pd, self._windows)
            except BaseException:
                self._lent.remove(lent)
                raise
        return lent

    # End

    async def close(self) -> None:
        """Deregister the memory.  Idempotent.

        Raises:
            ResourceBusyError: Connections that share the memory are open, perhaps with leases: end
                those first.  Nothing was done.
            TimeoutError: The adapter has not let go of it within a minute; it goes on.
            OSError: The C library refused.
            RuntimeError: Not in its event loop.

        Connections that are closing are waited for; those that are being made are given up.
        Cancellation: ends the wait; the memory is
        deregistered.
        """
        if self._region is None:
            self._closed = True  # it was never opened
            return
        check_loop(self._loop, "memory")
        if not self._closed:
            self._refuse_while_used()
            self._abort("connecting")
        await self._end()

    def _refuse_while_used(self) -> None:
        users = sum(each._stage == "open" for each in self._sharers)
        if users:
            msg = f"the memory cannot be closed: {users} connections share it, {self.leases} leases"
            raise ResourceBusyError(errno.EBUSY, msg)

    def _abort(self, *stages: str) -> None:
        for sharer in list(self._sharers):
            if sharer._stage in stages:
                sharer.abort()

    def _shut(self) -> None:
        self._closed = True
        if self._region is not None:
            self._region.close()
            self._region.pd.close()

    async def _end(self) -> None:
        region = self._region
        assert region is not None
        self._shut()
        await region.wait_closed(_CLOSE_S)
        await region.pd.wait_closed(_CLOSE_S)

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        """Close it; after an exception in the block, abort the connections that still share it."""
        if kind is None or self._region is None:
            await self.close()
            return
        check_loop(self._loop, "memory")
        self._abort("connecting", "open")
        with contextlib.suppress(TimeoutError):  # the exception of the block says more
            await self._end()

    def __repr__(self) -> str:
        region = self._region
        if self._closed:
            return "<Memory closed>"
        if region is None:
            return "<Memory not open>"
        return (
            f"<Memory open, {region.length} bytes of {region.pd.context.name}, "
            f"{self.connections} connections, {self.leases} leases>"
        )

    def __del__(
        self, _warn: Callable[..., None] = warnings.warn, _gone: Any = sys.is_finalizing
    ) -> None:
        if getattr(self, "_region", None) is None or self._closed or _gone():
            return
        try:
            _warn(f"unclosed {self!r}", ResourceWarning, source=self, stacklevel=1)
        finally:
            from_finalizer(self._loop, self._shut)


def check_shared(memory: Memory | None) -> None:
    """Refuse the argument of a call that connections cannot be made with.

    Raises:
        TypeError: It is no Memory.
        RuntimeError, ResourceClosedError: It is not open.
    """
    check_kind("memory", memory, Memory)
    if memory is not None:
        memory._require()


def _closed_error() -> ResourceClosedError:
    return ResourceClosedError(errno.ECONNABORTED, "the memory is closed")


def _unpinned(size: int, _: object) -> None:
    FIRST.count(-size)
