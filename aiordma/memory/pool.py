"""BufferPool: registered buffers for large messages, which are kept for further messages."""

from __future__ import annotations

import functools

from aiordma.memory.governor import KEPT, Account, Lease
from aiordma.memory.large_memory import LargeMemory
from aiordma.verbs.enums import Access
from aiordma.verbs.mr import MemoryRegion, make_region
from aiordma.verbs.pd import ProtectionDomain

__all__ = ["BufferPool", "room_of"]

_SMALLEST = 64 * 1024


def room_of(size: int) -> int:
    """The size of a pool's buffer for a message of `size` bytes."""
    return max(_SMALLEST, 1 << (size - 1).bit_length())


class BufferPool:
    """Registered buffers, whose sizes are powers of two.

    Registering memory takes longer than transferring its bytes.  So buffers that are not in use any
    more are kept, up to `keep` bytes together.  `close` also deregisters buffers that are in use:
    the program can still read a message there, but the adapter cannot write to it any more.

    A buffer counts for a lease at any time: for that of its message, or for that with which it is
    kept.  One that is neither used nor kept counts for its last lease until it is deregistered.

    Args:
        pd: The protection domain.
        keep: How many bytes of unused buffers to keep.
        access: The access flags; on iWARP the target of an RDMA READ needs REMOTE_WRITE.
        account: A buffer is kept only with a lease of this account.
        memory: What registers the buffers; it has unused ones deregistered if memory is short.
        reserve: Whether a kept buffer keeps its lease while it is used again, whatever lease its
            message has.  Otherwise `take_kept` passes the lease on to the caller.
    """

    __slots__ = (
        "__weakref__", "_access", "_account", "_closed", "_keep", "_kept", "_memory", "_out", "_pd",
        "_reserve", "_shelves",
    )  # fmt: skip

    def __init__(
        self,
        pd: ProtectionDomain,
        keep: int,
        access: Access,
        account: Account,
        memory: LargeMemory,
        *,
        reserve: bool = False,
    ) -> None:
        self._pd = pd
        self._account = account
        self._memory = memory
        self._keep = keep
        self._access = access
        self._reserve = reserve
        self._kept = 0
        self._shelves: dict[int, list[tuple[MemoryRegion, Lease]]] = {}  # unused buffers, by size
        self._out: dict[MemoryRegion, Lease | None] = {}  # buffers in use
        self._closed = False
        memory.join(self)

    def take_kept(self, size: int) -> tuple[MemoryRegion, Lease] | None:
        """Return an unused region of at least `size` bytes, and its lease, or None.

        The caller owns the region until `give`, and without `reserve` the lease, too.
        """
        room = room_of(size)
        shelf = self._shelves.get(room)
        if not shelf:
            return None
        self._kept -= room
        region, lease = shelf.pop()
        self._out[region] = lease if self._reserve else None
        return region, lease

    async def take(self, size: int, lease: Lease | None = None) -> MemoryRegion:
        """Return a region of at least `size` bytes; the caller owns it until `give`.

        Args:
            size: The number of bytes.
            lease: The lease of the message, which stays the caller's.  None for operations of the
                program: the region then has no lease, unless it was kept with one.

        Raises:
            OSError: The memory could not be registered within half a minute.
            ResourceClosedError: The connection is closed, or was closed meanwhile.

        Cancellation: the region is destroyed.
        """
        if kept := self.take_kept(size):
            region, own = kept
            if lease is None:
                self._out[region] = own
            elif not self._reserve:
                lease.cover(region)
                own.release()
            return region
        room = room_of(size)
        make = functools.partial(MemoryRegion, self._pd, room, self._access)
        if lease is not None:
            make = functools.partial(lease.register, make)
        region = await self._memory.registered(room, lambda: make_region(room, make))
        self._out[region] = None
        return region

    def give(self, region: MemoryRegion) -> None:
        """Return a region to the pool."""
        lease = self._out.pop(region, None)
        keeps = not self._closed and self._kept + region.length <= self._keep
        if lease is None and keeps:
            lease = self._account.lease(KEPT, region.length)
            if lease is not None:
                lease.cover(region)
        if lease is None or not keeps:
            _drop(region, lease)
            return
        self._kept += region.length
        self._shelves.setdefault(region.length, []).append((region, lease))
        self._memory.freed()

    def drop_kept(self) -> list[MemoryRegion]:
        """Deregister all unused buffers, and return them."""
        kept = [each for shelf in self._shelves.values() for each in shelf]
        self._shelves.clear()
        self._kept = 0
        for region, lease in kept:
            _drop(region, lease)
        return [region for region, _ in kept]

    def lend(self, region: MemoryRegion) -> bool:
        """Remove the region that was just returned, for use until `close`; False if not kept."""
        shelf = self._shelves.get(region.length)
        if not shelf or shelf[-1][0] is not region:
            return False
        shelf.pop()
        self._out[region] = None  # its lease ends with the account
        return True

    def drop(self, region: MemoryRegion) -> None:
        """Deregister a region instead of returning it to the pool."""
        _drop(region, self._out.pop(region, None))

    def close(self) -> None:
        """Deregister all buffers, even those in use."""
        self._closed = True
        for region in list(self._out):
            region.close()
        self._out.clear()
        self.drop_kept()


def _drop(region: MemoryRegion, lease: Lease | None) -> None:
    region.close()
    if lease is not None:
        lease.release()
