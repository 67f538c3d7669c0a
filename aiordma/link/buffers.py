"""Buffers: the registered memory of a connection other than its first slots.

Large messages are in buffers of two pools: one for messages of the peer, and one for messages that
the peer reads.  Both pools are made at first use, and have their leases from the connection's
account.

Memory that is registered while the queue pair exists can be pinned here.  It is then deregistered
when it is unpinned, or when the queue pair is gone, and not before.
"""

from __future__ import annotations

import errno

from aiordma._core import copy as copy_bytes
from aiordma._core import crc32c
from aiordma.cm.connection_id import ConnectionId
from aiordma.errors import ResourceClosedError
from aiordma.link.source import source_of
from aiordma.loop.workers import call_blocking
from aiordma.memory.governor import Account, Budget
from aiordma.memory.large_memory import LargeMemory, large_memory
from aiordma.memory.lent import LentPart
from aiordma.memory.pool import BufferPool
from aiordma.verbs.enums import Access
from aiordma.verbs.mr import INLINE_BYTES, MemoryRegion
from aiordma.verbs.pd import ProtectionDomain
from aiordma.verbs.qp import QueuePair

__all__ = ["Buffers", "Rights", "settled", "sum_of"]

#: Used until the first region is pinned, because most connections never pin any.
_NOTHING: dict[MemoryRegion | LentPart, None] = {}
# The rights that a peer can have; as integers, because operations on enum flags take longer.
_RIGHTS = (int(Access.REMOTE_READ), int(Access.REMOTE_WRITE), int(Access.REMOTE_ATOMIC))
_LANDS_ON_IWARP = Access.LOCAL_WRITE | Access.REMOTE_WRITE


def settled(view: memoryview, *, check: bool, copy: bool) -> tuple[memoryview, int]:
    """Return `view` or a copy of it, and the CRC32C of the returned bytes, or 0 without `check`."""
    settled = view
    if copy:
        settled = memoryview(bytearray(len(view)))
        copy_bytes(settled, view)
    return settled, crc32c(0, settled) if check else 0


async def sum_of(view: memoryview, before: int = 0) -> int:
    """Compute the CRC32C of bytes, in a thread if they are many.

    Args:
        view: The bytes.
        before: The CRC32C of the bytes before them.
    """
    if len(view) <= INLINE_BYTES:
        return crc32c(before, view)
    return await call_blocking(lambda: crc32c(before, view), undo=lambda _: None)


class Rights:
    """Counts how often each right of the peer is needed; each large message changes the counts."""

    __slots__ = ("_uses", "allowed")

    def __init__(self) -> None:
        self._uses = dict.fromkeys(_RIGHTS, 0)
        self.allowed: int = 0

    def count(self, rights: Access, step: int) -> bool:
        """Add `step` to the count of each right; return whether `allowed` has changed."""
        before, number = self.allowed, int(rights)
        for right in _RIGHTS:
            if number & right:
                self._uses[right] += step
                used = self._uses[right] > 0
                self.allowed = self.allowed | right if used else self.allowed & ~right
        return self.allowed != before


class Buffers:
    """The buffers of one connection.

    Args:
        cm_id: The connection id, which knows the peer's address.
        pd: The protection domain.
        incoming_size: How many bytes of buffers for messages of the peer are kept for further
            messages.
        outgoing_size: The same for messages that the peer reads.
        budget: The budget for large messages.

    Attributes:
        rights: The rights of the peer.
        reads_expose: Whether the peer can write to memory that a READ writes to, as long as it is
            registered.  This is so on iWARP.
    """

    __slots__ = (
        "_account", "_budget", "_closed", "_cm_id", "_incoming", "_memory",
        "_outgoing", "_pd", "_pinned", "_sizes", "reads_expose", "rights",
    )  # fmt: skip

    def __init__(
        self,
        cm_id: ConnectionId,
        pd: ProtectionDomain,
        incoming_size: int,
        outgoing_size: int,
        budget: Budget,
    ) -> None:
        self._cm_id = cm_id
        self._pd = pd
        self._sizes = incoming_size, outgoing_size
        self._incoming: BufferPool | None = None
        self._outgoing: BufferPool | None = None
        self._account: Account | None = None
        self._memory: LargeMemory | None = None
        self.rights: Rights = Rights()
        self._pinned: dict[MemoryRegion | LentPart, None] = _NOTHING
        self._closed = False
        self._budget = budget
        self.reads_expose: bool = pd.context.is_iwarp

    @property
    def account(self) -> Account:
        """The account with the leases of the connection; made for the first large message."""
        if self._account is None:
            self._account = Account(self._budget, source_of(self._cm_id.destination_address))
            if self._closed:
                self._account.close()
        return self._account

    @property
    def memory(self) -> LargeMemory:
        """The memory of all large messages of the loop."""
        if self._memory is None:
            self._memory = large_memory()
        return self._memory

    @property
    def pool(self) -> BufferPool:
        """Buffers for large messages of the peer; made at first use."""
        if self._incoming is None:
            # On iWARP the data of a READ arrive like a remote WRITE of the peer.
            lands = _LANDS_ON_IWARP if self.reads_expose else Access.LOCAL_WRITE
            self._incoming = self._new_pool(lands, self._sizes[0])
        return self._incoming

    @property
    def outgoing(self) -> BufferPool:
        """Buffers that the peer reads; made at first use."""
        if self._outgoing is None:
            self._outgoing = self._new_pool(Access.REMOTE_READ, self._sizes[1], reserve=True)
        return self._outgoing

    def _new_pool(self, access: Access, keep: int, *, reserve: bool = False) -> BufferPool:
        pool = BufferPool(self._pd, keep, access, self.account, self.memory, reserve=reserve)
        if self._closed:
            pool.close()
        return pool

    @property
    def pinned_bytes(self) -> int:
        """The bytes of all leases.  In any thread."""
        return 0 if self._account is None else self._account.size

    @property
    def lent_parts(self) -> list[LentPart]:
        """The pinned parts of a `Memory`, whose protection domain outlives the connection."""
        return [region for region in self._pinned if isinstance(region, LentPart)]

    def pin(self, region: MemoryRegion | LentPart) -> None:
        """Keep a region registered, or a part lent, until `unpin` or the end of the queue pair.

        Raises:
            ForkedError: This process is a forked child.
            ResourceClosedError: The connection is closed.
        """
        if self._closed:
            raise ResourceClosedError(errno.ECONNABORTED, "the connection is closed")
        region._retain()
        if self._pinned is _NOTHING:
            self._pinned = {}
        self._pinned[region] = None

    def unpin(self, region: MemoryRegion | LentPart) -> None:
        """Undo `pin`, because the adapter does not use the region any more."""
        if region in self._pinned:
            del self._pinned[region]
            region._let_go()

    def expect(self, more: int) -> None:
        """Make room for the completions of further slots in the completion queue.

        Raises:
            OSError: The queue cannot grow.
        """
        if self._cm_id.qp is not None:
            self._cm_id.qp._expect(more)

    def close(self, qp: QueuePair) -> None:
        """Free everything; memory that the adapter may use is freed when `qp` is gone."""
        self._closed = True
        if self._pinned:
            pinned, self._pinned = self._pinned, _NOTHING

            def let_go() -> None:
                for region in pinned:
                    region._let_go()

            qp._when_gone(let_go)
        if self._account is not None:
            self._account.close()  # which returns bytes as their memory is deregistered
        for pool in (self._incoming, self._outgoing):
            if pool is not None:
                pool.close()
