"""StreamMemory: the registered memory of a stream, and its growth.

Theory of operation
    Both rings begin small, and each is joined by a larger one when there is traffic for it.  If
    that cannot be registered, it is no failure: the stream goes on with the ring that it has.  The
    first rings stay until the end: control messages and words are beside them, and they are small.
"""

from __future__ import annotations

import functools
import weakref

from aiordma._core import StreamState
from aiordma.logs import log_of
from aiordma.loop.workers import call_blocking
from aiordma.memory.governor import FIRST, GROWTH, Member, growth_of_loop
from aiordma.streams.plan import Plan
from aiordma.verbs.enums import Access
from aiordma.verbs.mr import INLINE_BYTES, MemoryRegion
from aiordma.verbs.pd import ProtectionDomain

__all__ = ["StreamMemory"]

_log = log_of("memory")
_THEIRS = Access.LOCAL_WRITE | Access.REMOTE_WRITE
_PATIENCE = 1024  # messages between two attempts to get a larger ring for sending


class StreamMemory:
    """Registered memory of one stream; made by `register`.

    Larger rings have leases of the loop's budget (`governor.growth_of_loop`).

    Attributes:
        ring: Where the peer's bytes land.
        table: Where the peer writes descriptors, and mappings.
        own: For this side alone: the ring for sending, control messages, and on iWARP words.
        send: Where this side's bytes lie while they are sent.
        grown: Larger rings.
        views: Of all rings and the table, for an object that has their addresses.
        words: Where words land, on iWARP.
        mapped: Regions of the program that the peer may write to.
        sources: Regions of the program to write from; weak, as they have no use once the program
            has dropped them.
    """

    __slots__ = (
        "_ask_at", "_member", "_pd", "_plan", "grown", "mapped", "own", "ring", "send",
        "sources", "table", "views", "words",
    )  # fmt: skip

    def __init__(
        self,
        pd: ProtectionDomain,
        plan: Plan,
        ring: MemoryRegion,
        table: MemoryRegion,
        own: MemoryRegion,
    ) -> None:
        self._pd = pd
        self._plan = plan
        self._ask_at = 0  # completed messages, before a larger ring for sending is tried
        self._member: Member | None = None
        self.ring: MemoryRegion = ring
        self.table: MemoryRegion = table
        self.own: MemoryRegion = own
        self.send: memoryview[int] = own.view[: plan.sending]
        self.words: memoryview[int] = own.view[plan.words :]
        self.mapped: list[MemoryRegion] = []
        self.sources: weakref.WeakSet[MemoryRegion] = weakref.WeakSet()
        self.grown: list[MemoryRegion] = []
        self.views: list[memoryview[int]] = [ring.view, table.view, own.view]

    @classmethod
    async def register(cls, pd: ProtectionDomain, plan: Plan) -> StreamMemory:
        """Allocate and register.

        Raises:
            OSError: Out of memory that may be pinned.

        Cancellation: the memory is given back.
        """
        made: list[MemoryRegion] = []
        try:
            for size, access in (
                (plan.ring, _THEIRS),
                (plan.table, _THEIRS),
                (plan.own, Access.LOCAL_WRITE),
            ):
                # The peer could claim to have sent bytes that other streams have left in a ring.
                clear = access is _THEIRS
                make = functools.partial(MemoryRegion.slab, pd, size, access, clear=clear)
                if size <= INLINE_BYTES:
                    made.append(make())
                else:
                    made.append(await call_blocking(make, undo=MemoryRegion.close))
        except BaseException:
            for region in made:
                region.close()
            raise
        for region in made:
            FIRST.count(region)
        return cls(pd, plan, *made)

    @property
    def regions(self) -> tuple[MemoryRegion, ...]:
        """All memory that the peer or the stream may use."""
        return (self.ring, self.table, self.own, *self.mapped, *self.grown)

    def close(self) -> None:
        """Deregister.  Idempotent."""
        for region in (*self.regions, *self.sources):
            region.close()
        if self._member is not None:
            self._member.close()

    def widen_ring(self, state: StreamState) -> None:
        """Offer the peer a ring of full size, from the next time that its first half is free."""
        if state.is_over:
            return
        region = self._larger(self._plan.config.receive_buffer_size, _THEIRS)
        if region is not None:
            state.widen(region.addr, region.rkey, region.length)

    def widen_send(self, state: StreamState) -> bool:
        """Send from a ring of full size if the ring is full and the peer has room for more than it.

        Returns:
            Whether there is a new ring.
        """
        size, there = self._plan.config.send_buffer_size, self.send
        if len(there) >= size or state.progress < self._ask_at or not state.wants_send_ring():
            return False
        region = self._larger(size, Access.LOCAL_WRITE)
        if region is None:
            self._ask_at = state.progress + _PATIENCE
            return False
        self.send = region.view[:size]
        state.send_from(region.addr, size, region.lkey)
        return True

    def _larger(self, size: int, access: Access) -> MemoryRegion | None:
        """Register memory; None if that is not possible."""
        if self._member is None:
            self._member = Member(growth_of_loop(), 0)
        lease = self._member.lease(GROWTH, size)
        if lease is None:
            return None
        try:
            region = lease.register(
                lambda: MemoryRegion.slab(self._pd, size, access, clear=access is _THEIRS)
            )
        except OSError as exc:
            _log.debug("a ring of %d bytes cannot be registered: %s", size, exc)
            lease.release()
            return None
        self.grown.append(region)
        self.views.append(region.view)
        return region
