"""A lease: memory of this side that the peer may access for as long as a block lasts.

Theory of operation
    The memory is registered with the rights of the lease, and the queue pair allows these rights as
    long as any lease needs them.  When the lease ends, the region is deregistered and its key is
    invalid, so the adapter refuses an access that comes too late.  Such a refusal ends the
    connection of that peer and no other, because keys belong to a protection domain and each
    connection has its own.

    The name of the memory says whose it is (`Link.expose`).  So the peer's library refuses a name
    of an earlier life of this program.  It also hears of the end of a lease, and then refuses that
    name, too.  Both save the connection; they replace nothing that the adapter does.

    With memory windows a lease would not need a registration.  But Soft-RoCE does not enforce the
    bounds of a window (docs/surprises.md), so a lease of a part gives access to the whole region.
    Therefore windows are used only for parts of a `Memory` (`memory.shared`), whose documentation
    says so.
"""

from __future__ import annotations

import asyncio
import errno
import functools
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, NoReturn

from aiordma.endpoint.link import Link
from aiordma.endpoint.notes import NoteBook, Notes
from aiordma.endpoint.outcome import Outcome
from aiordma.errors import NotSupportedError, RdmaTimeoutError, ResourceClosedError
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
#: How long `revoke` waits for the deregistration, in seconds, and how much longer for each object
#: that a worker thread has to destroy before: a program may end thousands of leases at once.
_REVOKE_S = 30.0
_EACH_S = 0.05


def rights_of(context: Context, buf: Any, *, read: bool, write: bool, atomic: bool) -> Access:
    """Check the arguments of `Connection.expose`, and return the rights that the peer gets.

    Raises:
        TypeError, ValueError: `buf` is no buffer, or no right is given.
        BufferError: The buffer is read-only, and the peer may not only read.
        NotSupportedError: The device has no atomics, as no iWARP device has.
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
    if not isinstance(buf, SGE):  # a part of a Memory, which has checks of its own
        check_memory(buf, rights)
    if atomic and (context.is_iwarp or context.attributes.atomic_cap == AtomicCap.NONE):
        text = f"{context.name} has no atomic operations"
        raise NotSupportedError(errno.EOPNOTSUPP, text)
    return rights


class Lease(Uncopied):
    """The result of `Connection.expose`, an async context manager.

    `region` is the name of the memory to send to the peer, while the connection is open and the
    block lasts.  `view` gives access to the bytes, as long as the block lasts.
    """

    __slots__ = (
        "__weakref__",
        "_buffer",
        "_bytes",
        "_lend",
        "_link",
        "_memory",
        "_notes",
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
        memory: dict[MemoryRegion | LentPart, None],
        buffer: Any,
        rights: Access,
        timeout: float | None,
        lend: Callable[[SGE, Access], Awaitable[LentPart]] | None = None,
        notes: NoteBook | None = None,
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
        # What `view` shows when the connection has ended, and the region with it: the program's
        # buffer, which it may resize again then, or memory that nobody else has.
        self._bytes: Any = None
        self._revoking: asyncio.Task[None] | None = None
        self._notes: Notes | None = None if notes is None else Notes(notes)
        self._waiting = 0  # calls of `revoke` in progress, which raise if deregistration fails
        fork.guard_public(self)

    @property
    def region(self) -> RemoteRegion | None:
        """The name of the memory to send to the peer; None before and after the block."""
        return None if self._link.closed else self._region

    @property
    def view(self) -> memoryview:
        """A view of the memory; read-only if the buffer is.

        The end of the connection ends the peer's access, but not this view: what the peer has
        written before can be read until the block is left.

        Raises:
            ResourceClosedError: The lease is not open, or has ended.
        """
        if self._open is None:
            msg = "the lease is not open"
            raise ResourceClosedError(msg)
        try:
            return self._open.view
        except ResourceClosedError:
            if self._bytes is None:  # a part of a `Memory` that the program has closed
                raise
            return memoryview(self._bytes).cast("B")

    def notes(self) -> Notes:
        """Iterate over the notes of the peer's writes to the memory, until the lease ends.

        For a lease that was made with `expose(..., notes=True)`.  The peer's
        `write(region, data, imm=number)` then arrives here as a `Note`, and not as a message: when
        the data are in their place, and in the order of its writes.  A write without `imm` sends no
        note.

        There is one reader, and each call returns the same iterator.  Until a note is read, it
        takes the place of a message: a program that reads no notes makes its peer wait, also with
        messages.  So read them in a task of their own.

        Returns:
            An async iterator.  It ends with the lease, and drops notes that were not read then.

        Raises:
            ValueError: The lease has no notes.
        """
        if self._notes is None:
            msg = "the lease has no notes: expose the memory with notes=True"
            raise ValueError(msg)
        return self._notes

    async def __aenter__(self) -> RemoteRegion:
        check_loop(self._link.loop, "lease")
        if self._buffer is None:
            msg = "a lease is used once; expose the memory again"
            raise RuntimeError(msg)
        buffer, self._buffer = self._buffer, None
        if self._timeout == 0:
            raise RdmaTimeoutError(errno.ETIMEDOUT, "the time of the lease is over")
        opened: MemoryRegion | LentPart
        if self._lend is not None:
            opened = await self._lend(buffer, self._rights)
        else:
            access = self._rights
            if access & _WRITES:
                access |= Access.LOCAL_WRITE  # remote write access requires it
            with self._outcome.explaining():
                opened = await self._link.register(buffer, access)
        self._open = opened
        if self._lend is None:
            self._bytes = opened.view if isinstance(buffer, int) else buffer
        self._memory[opened] = None
        self._link.open_access(self._rights)
        owner, generation = self._link.expose()
        noted = self._notes is not None
        region = RemoteRegion(
            opened.addr, opened.length, opened.rkey, self._rights, owner, generation, noted
        )
        self._region = region
        if self._notes is not None:
            self._notes.begin(self, region)
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
        """Begin to end the lease, once; it then ends even if the task is canceled."""
        opened, self._open = self._open, None
        if opened is None:
            return
        self._bytes = None
        region, self._region = self._region, None
        if self._notes is not None and region is not None:
            self._notes.end(region)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if region is not None:
            self._link.revoke(region.generation)
        opened.close()
        self._memory.pop(opened, None)
        wait = functools.partial(opened.wait_closed, _REVOKE_S + _EACH_S * reaper.unfinished)
        self._revoking = background.start(self._link.loop, wait)
        if self._revoking is None:  # the loop is ending, and the connection with it
            self._link.close_access(self._rights)
        else:
            self._revoking.add_done_callback(self._revoked)

    def _revoked(self, task: asyncio.Task[None]) -> None:
        # Not earlier: without the rights, the adapter would refuse an access that is in progress.
        self._link.close_access(self._rights)
        if not task.cancelled() and (error := task.exception()) and not self._waiting:
            _log.warning("the memory of a lease is still registered: %r", error)

    async def revoke(self) -> None:
        """End the lease now, and wait until no access is possible any more.  Idempotent.

        One exception: if a part of a `Memory` was leased on an adapter without windows, the peer
        can still use the key afterwards.

        Raises:
            TimeoutError: The memory could not be deregistered within 30 seconds, plus 50 ms for
                each object of the process that has to be destroyed before.  The attempt goes on in
                the background.
            OSError: The adapter refused to deregister the memory.
            RuntimeError: This is not the connection's event loop; nothing was done.

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
