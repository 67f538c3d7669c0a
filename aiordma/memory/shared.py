"""Memory that is registered once, and used by every connection that was made with it.

Theory of operation
    A key is valid in one protection domain only, and a queue pair belongs to one domain.  So all
    connections that use a registration have to be in its domain, together with everything that
    they register for themselves.  Only the connections that were made with the memory are in that
    domain; docs/adr/shared-memory.md explains what this means for security.

    A part of the memory is lent to a peer through a memory window (`LentPart`).  A window of type 2
    is bound to one queue pair.  On Soft-RoCE a peer could crash the kernel through such a window,
    so windows are of type 1 there: any queue pair of the domain can use them, and the adapter does
    not enforce their bounds.  Software iWARP has no windows at all.  Where an adapter does not
    confine a lease to its part, a part is lent only with rights that the program grants to all
    peers for the whole memory (`trusted`).

    The governor counts the memory as pinned from the beginning (`governor.FIRST`), like the first
    slots of a connection: the budgets for messages are fractions of what remains.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
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
    ResourceClosedError,
    busy_error,
    errno_error,
)
from aiordma.logs import log_of
from aiordma.loop import fork
from aiordma.loop.running import check_loop, from_finalizer
from aiordma.loop.uncopied import Uncopied
from aiordma.loop.workers import call_blocking
from aiordma.memory.governor import FIRST
from aiordma.memory.lent import LentPart, Overlaps
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
#: How long `close` waits for a worker thread to deregister the memory, in seconds.
_CLOSE_S = 60.0


class Sharer(Protocol):
    """What the memory needs to know of a connection that shares it."""

    @property
    def _stage(self) -> str:
        """One of "connecting", "open", "closing" and "closed"."""

    def abort(self) -> None:
        """End the connection at once."""


def windows_of(context: Context) -> MWType | None:
    """The type of memory window to use on a device; None if the device has no windows."""
    flags = context.attributes.device_cap_flags
    if flags & _TYPE_2 and not context.is_software:
        return MWType.TYPE_2
    return MWType.TYPE_1 if flags & DeviceCapFlags.MEM_WINDOW else None


class Memory(Uncopied):
    """Memory that is registered once, for all connections that are made with it.

    ``async with Memory(1 << 30) as memory`` registers it.  Pass it as `memory` to `connect`,
    `listen`, `serve`, `Pool` and so on.  Such a connection can send a part of it, ``memory[a:b]``,
    without registering anything, can read into a part and write from one without a copy, and can
    lease a part to its peer (`Connection.expose`).  Each lease has rights of its own, and ends
    with its block or with its connection.  `view` gives access to the bytes.

    The connections share a protection domain, and in a domain every key is valid for the peers of
    all connections.  How well a lease is enforced depends on the adapter:

    - With memory windows of type 2, a lease is good for its own peer, its own part and its own
      duration only.  `guarded` is true.
    - Soft-RoCE enforces the rights and the duration of a lease, but neither its bounds nor who
      uses it: a peer with a lease can access all of the memory, with the rights of the lease,
      until the lease ends.
    - Software iWARP has no windows: a peer that knows the key can access all of the memory, with
      the rights in `trusted`, over any connection, until the memory is closed.  The end of a lease
      takes nothing away from the peer.  A peer that may write there may also read.
    - With any adapter, a peer that guesses keys can access other memory of these connections, with
      the rights that their own peers have: buffers that they expose, large messages that are on
      their way to a peer, and copies of messages of up to 256 KiB, which stay readable until the
      next message reuses the buffer.  On iWARP this includes large messages that arrive.

    Args:
        memory: A contiguous buffer, such as a bytearray, a numpy array or an mmap, which stays
            exported until the memory is closed; or a number of bytes, for fresh zeroed memory.
            A read-only buffer can be leased for reading only.  Soft-RoCE registers at most 1 GiB.
        device: The device, or its name, if the machine has several.
        trusted: Rights to all of the memory that the program grants to every peer, for adapters
            that do not guard parts: REMOTE_READ, REMOTE_WRITE, REMOTE_ATOMIC or several of them.
            Software iWARP grants them also to a peer that has not yet proved its key.
            On such an adapter a lease with any other right is refused, and unless REMOTE_READ is
            included, a large message is registered separately.  It has no effect where `guarded`
            is true.
        overlap: Whether a part may be lent for writing while another connection holds a lease of
            the same bytes.  The program then has to coordinate its peers itself.

    Raises:
        TypeError: `memory` is no buffer, or another argument has the wrong type.
        ValueError: The buffer is empty or not contiguous, or `trusted` contains any other flag.
        BufferError: The buffer is read-only, and `trusted` contains a right to write.

    The memory belongs to the event loop that has opened it.  When the `async with` block ends, all
    connections that share it have to be closed; if it ends with an exception, those that are still
    open are aborted.
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
        """Register the memory, in a thread if it is large.  Idempotent.

        Raises:
            LibraryMissingError, DeviceNotFoundError: RDMA is not available here, or there is no
                such device.
            ValueError: The machine has several devices, and none was named.
            OSError: The memory could not be registered.  ENOMEM usually means that RLIMIT_MEMLOCK
                is too low.
            ResourceClosedError: The memory was closed.
            RuntimeError: Another task is opening it, or it was opened in another event loop.

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
        FIRST.count(region)
        self._region, self._buffer = region, None

    def _access(self, context: Context) -> Access:
        """The access flags to register the memory with."""
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
                # On iWARP, a READ tells the peer the key of the memory that it reads into, and
                # with that key the peer can write there.  So a program that does not trust its
                # peers to write gets no READ into the memory, either.
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
        """The name of the device; until the memory is open, the name that was given, or None."""
        return self._device if self._region is None else self._region.pd.context.name

    @property
    def guarded(self) -> bool:
        """Whether the adapter enforces the peer, the part, the rights and the end of each lease.

        Raises:
            RuntimeError: The memory is not open.
            ResourceClosedError: It is closed.
        """
        self._require()
        return self._windows is MWType.TYPE_2

    @property
    def view(self) -> memoryview:
        """All bytes of the memory; read-only if the buffer is.

        Raises:
            RuntimeError: The memory is not open.
            ResourceClosedError: It is closed.
        """
        return self._require().view

    @property
    def leases(self) -> int:
        """The number of open leases."""
        return self._lent.open

    @property
    def connections(self) -> int:
        """The number of connections that share the memory and are not closed."""
        return sum(each._stage != "closed" for each in self._sharers)

    def __len__(self) -> int:
        return self._require().length

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, part: slice) -> SGE:
        """A part, such as ``memory[4096:8192]``, for `send`, `read`, `write` and `expose`.

        Negative indices count from the end, as in any slice.

        Raises:
            TypeError: The index is not a slice.
            ValueError: The slice is not inside the memory, ends before it begins, or has a step.
            RuntimeError: The memory is not open.
            ResourceClosedError: It is closed.
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
        # Other slices are clamped to the length.  Here that would silently shorten the part.
        for bound, meant in ((part.start, start), (part.stop, stop)):
            if bound is not None and bound not in (meant, meant - length):
                msg = f"byte {bound} is not inside a memory of {length} bytes"
                raise ValueError(msg)
        if stop < start:
            msg = f"the part ends at byte {stop}, before it begins at {start}"
            raise ValueError(msg)
        return SGE(region, start, stop - start)

    # For the connections that share the memory

    def _domain(self, context: Context) -> ProtectionDomain:
        """The protection domain that a connection on this device has to use.

        Raises:
            RuntimeError: The memory is not open, or belongs to another event loop.
            ResourceClosedError: It is closed.
            RdmaOSError: EXDEV, the memory is registered with another device.
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
        """Refuse a lease that the memory, the adapter or `trusted` does not allow.

        Raises:
            ValueError: The part is empty.
            BufferError: The memory is read-only, and the lease is not only for reading.
            NotSupportedError: The adapter does not guard parts, and a right is not in `trusted`.
            RuntimeError: The memory is not open.
            ResourceClosedError: It is closed.
        """
        region = self._require_here()
        if not len(part):
            msg = "a lease needs at least one byte"
            raise ValueError(msg)
        if rights & _WRITES and region.view.readonly:
            msg = "the memory is read-only: expose it for reading only"
            raise BufferError(msg)
        if not self._can_lend(rights):
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
                del error  # its traceback refers to this frame, which would make a cycle

    def _can_lend(self, rights: Access) -> bool:
        """Whether a part can be lent with these rights."""
        return self._windows is MWType.TYPE_2 or not rights & ~self._trusted

    def _lend(self, part: SGE, rights: Access, owner: object, *, message: bool) -> LentPart:
        """Record that a part is lent to a peer, and allocate its window; the caller binds that.

        Args:
            part: The part.
            rights: What the peer may do with it.
            owner: Identifies the connection, whose own leases may overlap one another.
            message: Whether the part is lent for a large message, and not by a lease.

        Raises:
            RdmaOSError: EBUSY, the part overlaps one that is lent to another connection.
            OSError: The adapter has no more windows.
            RuntimeError: The memory is not open.
            ResourceClosedError: It is closed.
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
            RdmaOSError: Connections that share the memory are open, perhaps with leases.  Close
                them first; nothing was done.
            TimeoutError: The memory could not be deregistered within a minute.  The attempt goes
                on in the background.
            OSError: The C library refused.
            RuntimeError: This is not the memory's event loop.

        Connections that are closing are waited for; those that are still being made are aborted.

        Cancellation: ends the wait; the memory is deregistered all the same.
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
            raise busy_error(msg)

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
        """Close the memory; after an exception, abort the connections that still share it first."""
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
    """Check the argument `memory` of a call that makes connections.

    Raises:
        TypeError: It is no `Memory`.
        RuntimeError: It is not open.
        ResourceClosedError: It is closed.
    """
    check_kind("memory", memory, Memory)
    if memory is not None:
        memory._require()


def _closed_error() -> ResourceClosedError:
    return ResourceClosedError(errno.ECONNABORTED, "the memory is closed")
