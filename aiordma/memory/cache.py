"""RegistrationCache: keeps buffers registered, so that their next use needs no system call.

Theory of operation
    An entry is found by address, length and rights.  But an address does not identify an object:
    when memory is freed, another object may get the same address, and possibly other pages.  A
    registration that was kept would then refer to the wrong memory.  So each entry keeps its buffer
    exported as long as it is registered, and Python can neither free the memory nor move it.

    This has a price: a cached bytearray or array cannot be resized, an mmap or a received message
    cannot be closed, and objects to which nothing else refers stay alive, up to the limits of the
    cache.  Weak references would not help: an export is itself a reference to the object, and
    without it the address may belong to another object before the weak reference is cleared.
    `drop` releases a buffer.

    Entries that are in use are never evicted.  Others are evicted when a limit is exceeded, the
    least recently used first.
"""

from __future__ import annotations

import asyncio
import functools
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Self

from aiordma._ffi import ffi
from aiordma.errors import ResourceClosedError, busy_error
from aiordma.loop import background, fork
from aiordma.loop.lasting import result_of
from aiordma.loop.uncopied import Uncopied
from aiordma.tensors import buffer_of
from aiordma.verbs.enums import Access
from aiordma.verbs.mr import INLINE_BYTES, MemoryRegion, bytes_of
from aiordma.verbs.pd import ProtectionDomain

__all__ = ["CacheStats", "RegistrationCache"]

_Key = tuple[int, int, Access]


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counters of a `RegistrationCache`.

    Attributes:
        hits: How often a buffer was registered already, or was just being registered.
        misses: How often a buffer had to be registered.
        evictions: How many entries were removed because of a limit.
        entries: How many entries there are.
        in_use: How many of them are in use.
        bytes: How many bytes are registered.
    """

    hits: int
    misses: int
    evictions: int
    entries: int
    in_use: int
    bytes: int


class _Entry:
    __slots__ = ("key", "region", "registering", "users")

    def __init__(self, key: _Key) -> None:
        self.key = key
        self.users = 1
        self.region: MemoryRegion | None = None
        self.registering: asyncio.Task[MemoryRegion] | None = None


class _Use:
    """The context manager that `get` returns."""

    __slots__ = ("_access", "_buffer", "_cache", "_region")

    def __init__(self, cache: RegistrationCache, buffer: Any, access: Access) -> None:
        self._cache = cache
        self._buffer = buffer
        self._access = access
        self._region: MemoryRegion | None = None

    async def __aenter__(self) -> MemoryRegion:
        self._region = region = await self._cache.take(self._buffer, self._access)
        return region

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._region is not None
        self._cache.give(self._region)


class RegistrationCache(Uncopied):
    """Keeps the registrations of buffers for their next use.

    ::

        async with cache.get(array) as region:
            await qp.write(region, remote.addr, remote.rkey)

    As long as a buffer has an entry, it stays exported: resizing it raises BufferError, and its
    memory is not freed.  An entry ends by `drop(buffer)`, by the limits, by `close()`, or with the
    protection domain.  numpy's `resize(refcheck=False)` moves memory in spite of an export, so drop
    the buffer first.  A cache belongs to one event loop.

    Args:
        pd: The protection domain of all regions.
        max_bytes: How many registered bytes to keep.  Entries in use may exceed this; a single
            buffer that exceeds it is not kept after its use.  What is evicted for a new buffer may
            still be pinned for a moment while that one is registered, as a thread deregisters it:
            leave room for both below the limit of locked memory.
        max_entries: How many entries to keep; those in use may exceed this, too.

    Raises:
        ValueError: A limit is negative.
    """

    def __init__(
        self, pd: ProtectionDomain, *, max_bytes: int = 256 << 20, max_entries: int = 1024
    ) -> None:
        for name, value in (("max_bytes", max_bytes), ("max_entries", max_entries)):
            if value < 0:
                msg = f"{name} is negative: {value}"
                raise ValueError(msg)
        self._pd = pd
        self._max_bytes = max_bytes
        self._max_entries = max_entries
        self._entries: dict[_Key, _Entry] = {}
        self._idle: OrderedDict[_Key, _Entry] = OrderedDict()  # in the order of their last use
        self._taken: dict[MemoryRegion, _Entry] = {}
        self._registering: set[asyncio.Task[MemoryRegion]] = set()
        self._leaving: list[MemoryRegion] = []
        self._bytes = self._kept = 0
        self._hits = self._misses = self._evictions = 0
        self._closed = False
        fork.guard_public(self)

    @property
    def stats(self) -> CacheStats:
        """The present values of the counters."""
        return CacheStats(
            hits=self._hits, misses=self._misses, evictions=self._evictions,
            entries=len(self._entries), in_use=len(self._entries) - len(self._idle),
            bytes=self._bytes,
        )  # fmt: skip

    def get(self, buffer: Any, access: Access = Access.LOCAL_WRITE) -> _Use:
        """Call `take` and `give` around an `async with` block, which gets the region.

        Args:
            buffer: As for `take`.
            access: As for `take`.

        Raises and cancellation: as `take`.
        """
        return _Use(self, buffer, access)

    async def take(self, buffer: Any, access: Access = Access.LOCAL_WRITE) -> MemoryRegion:
        """Return the region of a buffer, and register it if necessary; return it with `give`.

        Concurrent calls for the same buffer get the same region.  A large buffer is registered in a
        thread (see `MemoryRegion.register`).

        Args:
            buffer: As for `MemoryRegion`, but not a number of bytes.
            access: As for `MemoryRegion`; each combination of flags has an entry of its own.

        Raises:
            ResourceClosedError: The cache is closed.
            TypeError, ValueError, BufferError, NotSupportedError, OSError: As `MemoryRegion`.

        Cancellation: ends the wait.  A registration that has begun goes on, for other tasks that
        wait for it and for the next call.
        """
        self._require()
        buffer = buffer_of("memory to register", buffer)
        with memoryview(buffer) as view:
            where = int(ffi.cast("uintptr_t", bytes_of(view, access)))
            key = (where, view.nbytes, access)
        entry = self._entries.get(key)
        if entry is not None and entry.region is not None and entry.region.closed:
            self._remove(entry)  # the program has closed it, or its protection domain
            entry = None
        if entry is None:
            self._misses += 1
            entry = self._enter(key, buffer)
        else:
            self._hits += 1
            self._idle.pop(key, None)
            entry.users += 1
        if entry.region is None:
            assert entry.registering is not None
            try:
                return await result_of(entry.registering)
            except BaseException:
                self._return(entry)
                raise
        return entry.region

    def _enter(self, key: _Key, buffer: Any) -> _Entry:
        entry = _Entry(key)
        # Evict before registering, so that the entries never exceed the limit.
        self._shrink(self._max_entries - 1, self._max_bytes - self._counted(key))
        if key[1] <= INLINE_BYTES:
            self._ready(entry, MemoryRegion(self._pd, buffer, key[2]))
        else:
            loop = asyncio.get_running_loop()
            # The task has a view of its own: the caller may be canceled while others wait for it.
            view = memoryview(buffer)
            task = background.start(loop, functools.partial(self._register, entry, view))
            if task is None:  # the loop is ending
                with view:
                    self._ready(entry, MemoryRegion(self._pd, view, key[2]))
            else:
                entry.registering = task
                self._registering.add(task)
                task.add_done_callback(self._registered)
        self._entries[key] = entry
        self._bytes += key[1]
        self._kept += self._counted(key)
        return entry

    def _counted(self, key: _Key) -> int:
        """The bytes that count against the limit; 0 for a buffer that is too large to be kept."""
        return key[1] if key[1] <= self._max_bytes else 0

    async def _register(self, entry: _Entry, view: memoryview) -> MemoryRegion:
        try:
            with view:
                region = await MemoryRegion.register(self._pd, view, entry.key[2])
        except BaseException:
            self._remove(entry)
            raise
        if self._closed:
            self._let_go(region)
            self._require()
        self._ready(entry, region)
        return region

    def _registered(self, task: asyncio.Task[MemoryRegion]) -> None:
        self._registering.discard(task)
        if not task.cancelled():
            task.exception()  # otherwise asyncio logs it, if no task waits any more

    def _ready(self, entry: _Entry, region: MemoryRegion) -> None:
        entry.region = region
        entry.registering = None
        self._taken[region] = entry
        if not entry.users:
            self._make_idle(entry)  # all tasks that waited for it were canceled

    def give(self, region: MemoryRegion) -> None:
        """Return a region to the cache, once for each `take`.

        Work requests in flight keep the region registered, whatever happens to its entry.

        Raises:
            ValueError: The region is not from this cache, or was returned already.
        """
        entry = self._taken.get(region)
        if entry is None or not entry.users:
            if self._closed or region.closed:
                return  # its entry was removed meanwhile
            msg = f"not taken from this cache: {region!r}"
            raise ValueError(msg)
        self._return(entry)

    def _return(self, entry: _Entry) -> None:
        entry.users -= 1
        if not entry.users and entry.region is not None and not self._closed:
            self._make_idle(entry)

    def _make_idle(self, entry: _Entry) -> None:
        if not self._counted(entry.key):
            self._evictions += 1
            self._remove(entry)
            return
        self._idle[entry.key] = entry
        self._shrink(self._max_entries, self._max_bytes)

    def _shrink(self, entries: int, size: int) -> None:
        """Evict entries until the limits are kept, or all others are in use."""
        while self._idle and (len(self._entries) > entries or self._kept > size):
            self._evictions += 1
            self._remove(next(iter(self._idle.values())))

    def _remove(self, entry: _Entry) -> None:
        if self._entries.get(entry.key) is not entry:
            return
        del self._entries[entry.key]
        self._idle.pop(entry.key, None)
        self._bytes -= entry.key[1]
        self._kept -= self._counted(entry.key)
        if entry.region is not None:
            del self._taken[entry.region]
            self._let_go(entry.region)

    def _let_go(self, region: MemoryRegion) -> None:
        region.close()
        self._leaving = [left for left in self._leaving if left._outcome is None]
        self._leaving.append(region)

    async def drop(self, buffer: Any) -> int:
        """Deregister a buffer, so that it can be resized, closed or freed.

        Args:
            buffer: The object, or any part of it.  Every entry that shares a byte with it is
                removed.

        Returns:
            How many entries were removed.  Their memory is deregistered when the call returns.

        Raises:
            RdmaOSError: EBUSY, an entry is in use; nothing was removed.
            ValueError: The buffer is not contiguous.
            TimeoutError: The memory could not be deregistered within a minute.

        Cancellation: ends the wait only.
        """
        with memoryview(buffer_of("memory to drop", buffer)) as view:
            if not view.nbytes:
                return 0
            start = int(ffi.cast("uintptr_t", bytes_of(view, Access(0))))
            stop = start + view.nbytes
        while True:
            found = [
                entry for entry in self._entries.values()
                if entry.key[0] < stop and start < entry.key[0] + entry.key[1]
            ]  # fmt: skip
            if any(entry.users for entry in found):
                msg = "the buffer is in use: give its region back first"
                raise busy_error(msg)
            pending = [entry.registering for entry in found if entry.registering is not None]
            if not pending:
                break
            await asyncio.wait(pending)
        regions = [entry.region for entry in found]
        for entry in found:
            self._remove(entry)
        for region in regions:
            if region is not None:
                await region.wait_closed()
        return len(found)

    def close(self) -> None:
        """Deregister all entries, even those in use.  Idempotent.

        Work requests in flight keep their regions registered until they have completed.
        """
        self._closed = True
        for entry in list(self._entries.values()):
            self._remove(entry)

    async def wait_closed(self) -> None:
        """Wait until no buffer is registered or exported any more.

        Raises:
            TimeoutError: A region could not be deregistered within a minute; the attempt goes on.

        Cancellation: ends the wait only.
        """
        while self._registering:
            await asyncio.wait(list(self._registering))
        for region in list(self._leaving):
            await region.wait_closed()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.close()
        await self.wait_closed()

    def _require(self) -> None:
        if self._closed:
            msg = "the registration cache is closed"
            raise ResourceClosedError(msg)

    def __repr__(self) -> str:
        return f"<RegistrationCache{' closed' if self._closed else ''} {self.stats!r}>"
