"""Lease: memory of this side that the peer may use for as long as a block lasts.

Theory of operation
    The memory is registered with the rights of the lease, and the queue pair allows them while a
    lease needs them.  When the lease ends, the region is deregistered: its key is dead, and an
    access that comes too late is refused by the adapter.  Such a refusal ends the connection of
    that peer and no other: keys belong to a protection domain, and each connection has its own.

    Memory windows need no registration for each lease.  They are used for parts of a `Memory` alone
    (`memory.shared`): Soft-RoCE does not enforce their bounds (docs/surprises.md), so that a lease
    of a part opens the whole.
"""

from __future__ import annotations

import asyncio
import errno
import functools
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, NoReturn

from aiordma.arguments import check_seconds
from aiordma.endpoint.link import Link
from aiordma.endpoint.outcome import Outcome
from aiordma.errors import NotSupportedError, ResourceClosedError
from aiordma.logs import log_of
from aiordma.loop import background, fork
from aiordma.loop.running import check_loop
from aiordma.loop.uncopied import Uncopied
from aiordma.loop.workers import reaper
from aiordma.memory.lent import LentPart
from aiordma.memory.remote import RemoteRegion, words_of
from aiordma.verbs.context import Context
from aiordma.verbs.enums import Access, AtomicCap
from aiordma.verbs.mr import SGE, MemoryRegion, check_memory

__all__ = ["Lease", "rights_of"]

_log = log_of("memory")
_WRITES = Access.REMOTE_WRITE | Access.REMOTE_ATOMIC
_NO_AWAIT = "a lease lasts as long as a block: `async with connection.expose(...) as region`"
_REVOKE_S = 30.0
#: Seconds more for each destroy that stands before the lease's: programs end thousands at once.
_EACH_S = 0.05


def rights_of(
    context: Context, buf: Any, *, read: bool, write: bool, atomic: bool, timeout_s: float | None
) -> Access:
    """The rights that a lease gives to the peer; `Connection.expose` has the arguments.

    Raises:
        TypeError, ValueError: No buffer, no right at all, or a time-out that is not positive.
        BufferError: The buffer is read-only, and not only for reading.
        NotSupportedError: Atomics on a device that has none, as all of iWARP.
    """
    rights = Access(0)
    for wanted, right in (
        (read, Access.REMOTE_READ),
        (write, Access.REMOTE_WRITE),
        (atomic, Access.REMOTE_ATOMIC),
    ):
        if wanted:
            rights |= right
    if not rights:
        msg = "say what the peer may do: read, write or atomic"
        raise ValueError(msg)
    check_seconds("timeout_s", timeout_s)
    if not isinstance(buf, SGE):  # of a Memory, which has rules of its own
        check_memory(buf, rights)
    if atomic and (context.is_iwarp or context.attributes.atomic_cap == AtomicCap.NONE):
        text = f"{context.name} has no atomic operations"
        raise NotSupportedError(errno.EOPNOTSUPP, text)
    return rights


class Lease(Uncopied):
    """The result of `Connection.expose`; an async context manager.

    While the block lasts, `region` names the memory for the peer, and `view` has its bytes.
    """

    __slots__ = (
        "__weakref__",
        "_buffer",
        "_lend",
        "_link",
        "_memory",
        "_open",
        "_outcome",
        "_region",
        "_revoking",
        "_rights",
        "_timeout",
        "_timer",
        "_waiting",
    )  # fmt: skip

    if not TYPE_CHECKING:  # for type checkers there are no other attributes

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_") or name not in dir(RemoteRegion):
                raise AttributeError(name)
            msg = f"{name} belongs to the region: `async with connection.expose(...) as region`"
            raise AttributeError(msg, name=name, obj=self)

    def __init__(
        self,
        link: Link,
        outcome: Outcome,
        memory: set[MemoryRegion | LentPart],
        buffer: Any,
        rights: Access,
        timeout: float | None,
        lend: Callable[[SGE, Access], Awaitable[LentPart]] | None = None,
    ) -> None:
        self._region: RemoteRegion | None = None
        self._link = link
        self._outcome = outcome
        self._memory = memory
        self._lend = lend
        self._buffer = buffer
        self._rights = rights
        self._timeout = timeout
        self._timer: asyncio.TimerHandle | None = None
        self._open: MemoryRegion | LentPart | None = None
        self._revoking: asyncio.Task[None] | None = None
        self._waiting = 0  # calls of `revoke` that will raise an error of the deregistration
        fork.guard_public(self)

    @property
    def region(self) -> RemoteRegion | None:
        """The name of the memory for the peer while it is open; None before, and at the end."""
        return None if self._link.closed else self._region

    @property
    def view(self) -> memoryview:
        """The bytes of the memory, as they are now; read-only if the buffer is.

        Raises:
            ResourceClosedError: The lease is not open, or has ended.
            ConnectionLostError: The connection is lost, which ends the lease.
        """
        if self._open is None:
            msg = "the lease is not open"
            raise ResourceClosedError(msg)
        with self._outcome.explaining():
            return self._open.view

    async def __aenter__(self) -> RemoteRegion:
        check_loop(self._link.loop, "lease")
        if self._buffer is None:
            msg = "a lease is used once; expose the memory again"
            raise RuntimeError(msg)
        buffer, self._buffer = self._buffer, None
        opened: MemoryRegion | LentPart
        if self._lend is not None:
            opened = await self._lend(buffer, self._rights)
        else:
            access = self._rights
            if access & _WRITES:
                access |= Access.LOCAL_WRITE  # the device demands it
            with self._outcome.explaining():
                opened = await self._link.register(buffer, access)
        self._open = opened
        self._memory.add(opened)
        self._link.open_access(self._rights)
        region = RemoteRegion(opened.addr, opened.length, opened.rkey, self._rights)
        self._region = region
        if self._timeout is not None:
            self._timer = self._link.loop.call_later(self._timeout, self._begin)
        return region

    def __await__(self) -> NoReturn:
        raise TypeError(_NO_AWAIT)

    def __enter__(self) -> NoReturn:
        raise TypeError(_NO_AWAIT)

    def __exit__(self, *exc_info: object) -> None:
        """Never called: there is no `with` block."""

    def _begin(self) -> None:
        """Begin to end the lease, once; no cancellation stops the end."""
        opened, self._open = self._open, None
        if opened is None:
            return
        self._region = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        opened.close()
        self._memory.discard(opened)
        wait = functools.partial(opened.wait_closed, _REVOKE_S + _EACH_S * reaper.unfinished)
        self._revoking = background.start(self._link.loop, wait)
        if self._revoking is None:  # the loop is ending, and the connection with it
            self._link.close_access(self._rights)
        else:
            self._revoking.add_done_callback(self._revoked)

    def _revoked(self, task: asyncio.Task[None]) -> None:
        # Not before: without the rights the adapter would refuse an access that is under way.
        self._link.close_access(self._rights)
        if not task.cancelled() and (error := task.exception()) and not self._waiting:
            _log.warning("the memory of a lease is still registered: %r", error)

    async def revoke(self) -> None:
        """End the lease now; returns when no access is possible any more.  Idempotent.

        Of a part of a `Memory` on an adapter without windows the peer can go on to use the key.

        Raises:
            TimeoutError: The adapter has not let go of the memory within 30 seconds, and 50 ms more
                for each object of the process whose destruction was begun before; it goes on.
            OSError: The adapter refused to deregister it.
            RuntimeError: Not in the connection's event loop; nothing was done.

        Cancellation: ends the wait; the lease ends all the same.
        """
        check_loop(self._link.loop, "lease")
        self._begin()
        if self._revoking is not None:
            self._waiting += 1
            try:
                await asyncio.wait([self._revoking])
            finally:
                self._waiting -= 1
            self._revoking.result()

    async def __aexit__(self, *exc_info: object) -> None:
        await self.revoke()

    def __repr__(self) -> str:
        # No address and no key: a repr ends up in logs.
        if self._open is not None:
            state = f"open, {self._open.length} bytes"
        elif self._revoking is not None:
            state = "closed" if self._revoking.done() else "closing"
        else:
            state = "new" if self._buffer is not None else "closed"
        return f"<Lease {state}, {words_of(self._rights)}, #{self._link.number}>"
