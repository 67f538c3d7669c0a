"""BufferPool: registered buffers for large messages, kept for the next message."""

from __future__ import annotations

from aiordma.memory.byte_budget import AHEAD, Account
from aiordma.memory.large_memory import LargeMemory
from aiordma.verbs.enums import Access
from aiordma.verbs.mr import MemoryRegion
from aiordma.verbs.pd import ProtectionDomain

__all__ = ["BufferPool", "room_of"]

_SMALLEST = 64 * 1024


def room_of(size: int) -> int:
    """Bytes of the buffer that a pool has for a message of `size` bytes."""
    return max(_SMALLEST, 1 << (size - 1).bit_length())


class BufferPool:
    """Registered buffers in powers of two.

    Registering costs more than moving the bytes.  So released buffers are kept, up to `keep` bytes
    in all.  The pool knows the buffers in use, too, and `close` deregisters them: their bytes stay
    readable while a message is held, but the adapter cannot write there any more.

    Args:
        pd: Protection domain.
        keep: Bytes of released buffers to keep.
        access: Rights; on iWARP the target of an RDMA READ needs REMOTE_WRITE.
        account: Released buffers are kept only while the account has room for them.
        memory: Registers the buffers, and has kept ones dropped where memory is short.
        reserve: Whether the bytes of a kept buffer stay counted while it is in use again.  A
            message that finds the buffer of an earlier message then asks no budget; otherwise the
            message has a share of its own.
    """

    __slots__ = (
        "__weakref__", "_access", "_account", "_closed", "_free", "_keep", "_kept", "_memory",
        "_out", "_pd", "_reserve", "_spare",
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
        self._spare = 0  # bytes counted for buffers that are in use, or were dropped
        self._kept = 0
        self._free: dict[int, list[MemoryRegion]] = {}
        self._out: dict[MemoryRegion, None] = {}  # an empty dict is a quarter of an empty set
        self._closed = False
        memory.join(self)

    def take_kept(self, size: int) -> MemoryRegion | None:
        """Return a kept region of at least `size` bytes, or None; the caller owns it until `give`.

        Without `reserve` the bytes stay counted in AHEAD, and the caller owns that share, too.
        """
        room = room_of(size)
        shelf = self._free.get(room)
        if not shelf:
            return None
        self._kept -= room
        region = shelf.pop()
        if self._reserve:
            self._spare += room
        self._out[region] = None
        return region

    async def take(self, size: int) -> MemoryRegion:
        """Return a region of at least `size` bytes; the caller owns it until `give`.

        Raises:
            OSError: The memory cannot be registered, not within half a minute either.
            ResourceClosedError: The connection is closed, perhaps meanwhile.

        Cancellation: the region is destroyed.
        """
        region = self.take_kept(size)
        if region is None:
            room = room_of(size)
            region = await self._memory.registered(
                room, lambda: MemoryRegion.register(self._pd, room, self._access)
            )
            self._out[region] = None
        elif not self._reserve:
            self._account.give(region.length)
        return region

    def give(self, region: MemoryRegion) -> None:
        """Take a region back."""
        self._out.pop(region, None)
        if self._closed or not self._may_keep(region.length):
            region.close()
            return
        self._kept += region.length
        self._free.setdefault(region.length, []).append(region)
        self._memory.freed()

    def drop_kept(self) -> list[MemoryRegion]:
        """Deregister the buffers that are kept, and return them."""
        dropped = [region for shelf in self._free.values() for region in shelf]
        self._free.clear()
        for region in dropped:
            region.close()
        self._account.give(self._kept)
        self._kept = 0
        return dropped

    def _may_keep(self, size: int) -> bool:
        missing = size - self._spare
        fits = self._kept + size <= self._keep and (
            missing <= 0 or self._account.try_take(AHEAD, missing, keep=True)
        )
        if fits:
            self._spare = max(-missing, 0)
        return fits

    def lend(self, region: MemoryRegion) -> bool:
        """Lend the region that was given back last until `close`; False if it was not kept."""
        shelf = self._free.get(region.length)
        if not shelf or shelf[-1] is not region:
            return False
        self._out[shelf.pop()] = None  # and it counts as kept
        return True

    def drop(self, region: MemoryRegion) -> None:
        """Deregister a region instead of taking it back."""
        self._out.pop(region, None)
        region.close()

    def close(self) -> None:
        """Deregister all buffers, also those in use."""
        self._closed = True
        for region in (*self._out, *(region for shelf in self._free.values() for region in shelf)):
            region.close()
        self._out.clear()
        self._free.clear()
        self._kept = 0
