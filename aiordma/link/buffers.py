"""Buffers: the registered memory of a connection beside its slots.

Large messages lie in buffers out of two pools: one for messages of the peer, one for messages that
the peer reads.  Both are made at first use, and counted on the connection's account.

Memory that comes and goes while the queue pair lives is pinned here: the pin ends with the request
or with the queue pair.
"""

from __future__ import annotations

import errno
from collections.abc import Callable

from aiordma._core import copy as copy_bytes
from aiordma._core import crc32c
from aiordma.cm.connection_id import ConnectionId
from aiordma.errors import ResourceClosedError
from aiordma.link.source import source_of
from aiordma.loop.workers import call_blocking
from aiordma.memory.byte_budget import Account, ByteBudget
from aiordma.memory.large_memory import LargeMemory, large_memory
from aiordma.memory.lent import LentPart
from aiordma.memory.pool import BufferPool
from aiordma.verbs.enums import Access
from aiordma.verbs.mr import INLINE_BYTES, MemoryRegion
from aiordma.verbs.pd import ProtectionDomain
from aiordma.verbs.qp import QueuePair

__all__ = ["Buffers", "Rights", "settled", "sum_of"]

#: In place of a dict, until a region is pinned.
_NOTHING: dict[MemoryRegion | LentPart, None] = {}
# The rights that a peer can have; numbers, because flags of an enumeration take longer.
_RIGHTS = (int(Access.REMOTE_READ), int(Access.REMOTE_WRITE), int(Access.REMOTE_ATOMIC))
_LANDS_ON_IWARP = Access.LOCAL_WRITE | Access.REMOTE_WRITE


def settled(view: memoryview, *, check: bool, copy: bool) -> tuple[memoryview, int]:
    """The bytes of a registered buffer, or a copy of them, and the CRC32C of the returned bytes.

    The CRC32C is 0 without `check`.
    """
    settled = view
    if copy:
        settled = memoryview(bytearray(len(view)))
        copy_bytes(settled, view)
    return settled, crc32c(0, settled) if check else 0


async def sum_of(view: memoryview, before: int = 0) -> int:
    """The CRC32C of registered bytes; in a thread if there are many.

    Args:
        view: The bytes.
        before: The CRC32C of those before them.
    """
    if len(view) <= INLINE_BYTES:
        return crc32c(before, view)
    return await call_blocking(lambda: crc32c(before, view), undo=lambda _: None)


class Rights:
    """The uses of each access that the peer may have; a large message changes them four times."""

    __slots__ = ("_uses", "allowed")

    def __init__(self) -> None:
        self._uses = dict.fromkeys(_RIGHTS, 0)
        self.allowed = 0

    def count(self, rights: Access, step: int) -> bool:
        """Count one use more or less; return whether the accesses have changed."""
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
        cm_id: Knows the peer's address.
        pd: Protection domain.
        incoming_size: Bytes of buffers for messages of the peer that are kept for the next message.
        outgoing_size: Likewise, for messages that the peer reads.
        budget: Counts large messages.

    Attributes:
        rights: The rights of the peer.
        in_the_open: Whether the peer may write where its data land, for as long as that is
            registered.
    """

    __slots__ = (
        "_account", "_budget", "_closed", "_cm_id", "_incoming", "_let_memory_go", "_memory",
        "_outgoing", "_pd", "_pinned", "_sizes", "in_the_open", "rights",
    )  # fmt: skip

    def __init__(
        self,
        cm_id: ConnectionId,
        pd: ProtectionDomain,
        incoming_size: int,
        outgoing_size: int,
        budget: ByteBudget,
    ) -> None:
        self._cm_id = cm_id
        self._pd = pd
        self._sizes = incoming_size, outgoing_size
        self._incoming: BufferPool | None = None
        self._outgoing: BufferPool | None = None
        self._account: Account | None = None
        self._memory: LargeMemory | None = None
        self._let_memory_go: Callable[[], None] | None = None
        self.rights: Rights = Rights()
        self._pinned: dict[MemoryRegion | LentPart, None] = _NOTHING
        self._closed = False
        self._budget = budget
        self.in_the_open: bool = pd.context.is_iwarp

    @property
    def account(self) -> Account:
        """The connection's share of the budget; made for the first large message."""
        if self._account is None:
            self._account = Account(self._budget, source_of(self._cm_id.destination_address))
            if self._closed:
                self._account.close()
        return self._account

    @property
    def memory(self) -> LargeMemory:
        """The memory of all large messages of the loop."""
        if self._memory is None:
            self._memory, let_go = large_memory()
            if self._closed:
                let_go()
            else:
                self._let_memory_go = let_go
        return self._memory

    @property
    def pool(self) -> BufferPool:
        """Buffers for large messages of the peer; made at first use."""
        if self._incoming is None:
            # iWARP writes the answer of a read as if the peer wrote it.
            lands = _LANDS_ON_IWARP if self.in_the_open else Access.LOCAL_WRITE
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
        """Bytes of its account; in any thread."""
        return 0 if self._account is None else self._account.pinned

    @property
    def lent_parts(self) -> list[LentPart]:
        """The pinned parts of a shared memory, which do not end with the protection domain."""
        return [region for region in self._pinned if isinstance(region, LentPart)]

    def pin(self, region: MemoryRegion | LentPart) -> None:
        """Keep a region registered until `unpin`, or until the queue pair is gone; a part, open.

        Raises:
            ForkedError: This process was forked from the connection's.
            ResourceClosedError: The connection is closed.
        """
        if self._closed:
            raise ResourceClosedError(errno.ECONNABORTED, "the connection is closed")
        region._retain()
        if self._pinned is _NOTHING:
            self._pinned = {}
        self._pinned[region] = None

    def unpin(self, region: MemoryRegion | LentPart) -> None:
        """The adapter is done with the region."""
        if region in self._pinned:
            del self._pinned[region]
            region._let_go()

    def expect(self, more: int) -> None:
        """Have the completion queue expect completions of further slots.

        Raises:
            OSError: It cannot grow.
        """
        if self._cm_id.qp is not None:
            self._cm_id.qp._expect(more)

    def close(self, qp: QueuePair) -> None:
        """Give everything back; memory that the adapter may use when `qp` is gone."""
        self._closed = True
        if self._pinned:
            pinned, self._pinned = self._pinned, _NOTHING

            def let_go(_: object) -> None:
                for region in pinned:
                    region._let_go()

            qp._gone.add_done_callback(let_go)
        for pool in (self._incoming, self._outgoing):
            if pool is not None:
                pool.close()
        if self._let_memory_go is not None:
            self._let_memory_go()
        if self._account is not None:
            # Its memory stays pinned until the queue pair is gone.
            self._account.end()
            qp._gone.add_done_callback(self._account.close)
