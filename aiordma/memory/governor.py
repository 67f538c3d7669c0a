"""The governor of memory: who may use how many bytes, and for what.

Theory of operation
    An adapter works on pinned memory, and often the peer decides when more of it is needed:
    announcing a large message costs the peer a few bytes, but costs this side all bytes of the
    message.  So no memory is pinned for traffic without a lease.  A `Lease` is a number of bytes of
    one kind, for one source, from a `Budget`.  A budget may have a parent, in which its bytes
    count, too.

    Memory stays pinned until a worker thread has deregistered it, which can be long after a message
    or a connection has ended: Soft-RoCE may take 50 seconds to destroy a queue pair.  So a region
    refers to the lease with which it is registered, and a lease that was released keeps its bytes
    as long as there is such a region.  A region that is used for something else changes its lease.

    The rules are data.  A `Kind` says how many eighths of a budget it may take, and how much of
    that one source may have.  A source is the address of a peer, or the connection itself.

    A fair share is three quarters of what the other sources leave, so that there is always room for
    another source.  Awaited messages, and sends, wait in line for their lease; everything else gets
    its lease at once or does without.  The sources in line take turns, and the leases of a source
    are granted in order.  An awaited message gets the first of AHEAD, SMALL and LARGE that has
    room.  As the program waits for the message, and there is a limit for its arrival, its memory is
    soon free again, and the line moves on.  A message that exceeds all of LARGE is fetched when no
    other has bytes of LARGE, because the program itself has set the limit of its size.

    The first slots and rings of connections and streams are pinned as long as these exist, and need
    no lease; a listener counts them before it admits a client (link/admission.py).  The same is
    true of what datagram endpoints and `Memory` objects pin.  `FIRST` sums them up, because the
    budgets are fractions of the memory that is left.  Fractions of all memory would promise bytes
    that the first slots of many connections have already pinned.

    All counts are changed under `_lock`, because that happens in any thread: loops in several
    threads share the budget of the process, and a lease ends in the thread that deregisters its
    memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import errno
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable
from typing import NamedTuple

from aiordma._ffi import ffi
from aiordma.errors import ResourceClosedError, errno_error
from aiordma.loop import fork, registry
from aiordma.loop.timers import now
from aiordma.memory import memlock
from aiordma.verbs.mr import MemoryRegion

__all__ = [
    "AHEAD", "AWAITED", "CLIENTS", "FIRST", "GROWTH", "HELD", "KEPT", "LARGE", "PROCESS",
    "REQUESTS", "SENDS", "SMALL", "Account", "Budget", "Count", "Growth", "Kind", "Lack", "Lease",
    "Member", "fair_share", "growth_of_loop", "left", "set_large_message_budget",
]  # fmt: skip

_PROCESS_BYTES = 256 << 20
_lock = fork.new_lock()


def fair_share(total: int, held: int, own: int) -> int:
    """The share of a source: three quarters of what all other sources leave.

    So no source can take everything that is left.

    Args:
        total: How many bytes, or connections, there may be.
        held: How many all sources have.
        own: How many of these the source itself has.
    """
    return (total - (held - own)) * 3 // 4


# The rules


class Part(enum.Enum):
    """How much of a kind one source may have."""

    ALL = enum.auto()
    FAIR = enum.auto()
    # The first lease of a source only needs room, so that every source can make progress.
    FAIR_AFTER_THE_FIRST = enum.auto()
    FAIR_WHILE_OTHERS_WAIT = enum.auto()
    # In any case a source may have its reserve.
    EQUAL_WHILE_OTHERS_WAIT = enum.auto()


class Kind(NamedTuple):
    """The rule for one kind of bytes."""

    name: str  # kinds with the same name are counted together
    eighths: int  # how many eighths of the budget they may take
    part: Part  # how much of that one source may have
    single: bool = False  # whether a lease may exceed the limit if it is the only one
    largest: int | None = None  # the largest lease, in bytes
    # How long a task waits for its lease, in seconds.  Then it gets the lease even without room,
    # and leases that are older than the wait are no longer counted.
    patience_s: float | None = None


# Budgets of listeners and of the process: messages that are fetched before `recv()` asks for them;
# buffers that stay registered for the next message; awaited messages, with an eighth reserved for
# small ones; and messages that the program has received.
AHEAD = Kind("ahead", 4, Part.FAIR_AFTER_THE_FIRST)
KEPT = Kind("ahead", 2, Part.FAIR_AFTER_THE_FIRST)
SMALL = Kind("small", 1, Part.FAIR_AFTER_THE_FIRST, largest=1 << 20)
LARGE = Kind("large", 3, Part.FAIR_WHILE_OTHERS_WAIT, single=True)
HELD = Kind("held", 8, Part.ALL)
# Listeners: clients, and the bytes that each pins from the beginning (link/admission.py).
CLIENTS = Kind("clients", 8, Part.FAIR_AFTER_THE_FIRST)
# Listeners: the bodies of requests, which are not pinned.
REQUESTS = Kind("requests", 8, Part.FAIR, single=True)
# Loops: large messages until the peer has read them.  Peers that read nothing can delay messages to
# other peers by 5 seconds.
SENDS = Kind("sends", 8, Part.ALL, single=True, patience_s=5.0)
# Loops and pools: slots and rings that connections and streams get as their traffic requires.
GROWTH = Kind("growth", 8, Part.EQUAL_WHILE_OTHERS_WAIT)

#: An awaited message gets the first of these kinds that has room, and waits for the last one.
AWAITED = (AHEAD, SMALL, LARGE)


class Lack(enum.Enum):
    """Why a lease is refused."""

    ROOM = enum.auto()  # the budget is used up
    PART = enum.auto()  # the source already has its share


class Count:
    """How many bytes, or connections, are in use, altogether and by source.

    Attributes:
        held: The sum.  A source with a reserve counts at least with that.
        sources: How many each source has.
        reserved: How many are reserved for a source.
    """

    __slots__ = ("held", "reserved", "sources")

    def __init__(self) -> None:
        self.held: int = 0
        self.sources: dict[Hashable, int] = {}
        self.reserved: dict[Hashable, int] = {}

    def _more(self, size: int, own: int, source: Hashable) -> int:
        """By how much `held` grows if a source that has `own` gets `size` more."""
        reserve = self.reserved.get(source, 0)
        return max(own + size, reserve) - max(own, reserve) if reserve else size

    def add(self, size: int, source: Hashable) -> None:
        """Count `size` more for a source, or less if it is negative."""
        own = self.sources.get(source, 0)
        self.held += self._more(size, own, source) if self.reserved else size
        if own + size:
            self.sources[source] = own + size
        else:
            self.sources.pop(source, None)

    def reserve(self, size: int | None, source: Hashable) -> None:
        """Reserve `size` for a source, as a new member; None removes the member."""
        own = self.sources.get(source, 0)
        self.held -= max(own, self.reserved.pop(source, 0))
        if size is not None:
            self.reserved[source] = size
        self.held += max(own, size or 0)

    def lack(
        self, kind: Kind, limit: int, size: int, source: Hashable, *, others_wait: bool = False
    ) -> Lack | None:
        """Why a source may not have `size` more; None if it may."""
        if not size or (kind.single and not self.held):
            return None
        if kind.largest is not None and size > kind.largest:
            return Lack.ROOM
        if 4 * (self.held + size) <= limit and kind.part is not Part.EQUAL_WHILE_OTHERS_WAIT:
            return None  # with so little in use, no source can exceed its share
        own = self.sources.get(source, 0)
        share = self._share(kind.part, limit, own, source, others_wait=others_wait)
        if share is not None and own + size > share:
            return Lack.PART
        more = self._more(size, own, source)
        return Lack.ROOM if more > 0 and self.held + more > limit else None

    def _share(
        self, part: Part, limit: int, own: int, source: Hashable, *, others_wait: bool
    ) -> int | None:
        """How much a source may have; None: as much as there is room for."""
        if part is Part.EQUAL_WHILE_OTHERS_WAIT:
            return self.equal_share(limit, source) if others_wait else None
        if (
            part is Part.ALL
            or (part is Part.FAIR_AFTER_THE_FIRST and not own)
            or (part is Part.FAIR_WHILE_OTHERS_WAIT and not (own and others_wait))
        ):
            return None
        return fair_share(limit, self.held, own)

    def equal_share(self, limit: int, source: Hashable) -> int:
        """An equal share for each member, but not less than the reserve of the source."""
        return max(self.reserved.get(source, 0), limit // max(1, len(self.reserved)))

    def forget(self) -> None:
        """Reset everything to 0 in a forked child, which has no connections."""
        self.held = 0
        self.sources.clear()


# Leases


class Lease:
    """Bytes of a budget that a source has, or waits for.

    Attributes:
        kind: What they are for; None while the lease waits in line.
        size: The number of bytes; 0 once they are returned.
    """

    __slots__ = (
        "_account", "_budget", "_future", "_kinds", "_regions", "_released", "_short", "_since",
        "_source", "kind", "size",
    )  # fmt: skip

    _short: Budget  # while it waits, the budget that lacks room for it
    _since: float  # since when it waits or, for kinds with `patience_s`, is in use

    def __init__(
        self, budget: Budget, kinds: tuple[Kind, ...], size: int, source: Hashable
    ) -> None:
        self.kind: Kind | None = None
        self.size: int = size
        self._budget = budget
        self._kinds = kinds
        self._source = source
        self._account: Account | None = None
        self._regions = 0  # how many are registered, or being registered, with it
        self._released = False
        self._future: asyncio.Future[None] | None = None  # what the task waits for

    def release(self) -> None:
        """Return the bytes to the budget, once no memory is registered with the lease any more.

        Idempotent.  May be called in any thread.
        """
        with _lock:
            self._released = True
            if not self._regions:
                self._give_back()

    def _give_back(self) -> None:
        """Return the bytes now.  To be called with the lock held."""
        if self._account is not None:
            self._account._leases.pop(self, None)
        kind, budget = self.kind, self._budget
        size, self.size = self.size, 0
        if size and kind is not None:
            if kind.patience_s is not None:
                budget._old.pop(self, None)
            budget._add(kind, -size, self._source)
            budget._serve()

    def register(self, make: Callable[[], MemoryRegion]) -> MemoryRegion:
        """Call `make`, which registers memory, with this lease.  May be called in any thread.

        Raises:
            ResourceClosedError: The lease was released meanwhile; nothing was registered.
            BaseException: As `make`.
        """
        with _lock:
            if self._released:
                raise ResourceClosedError(errno.ECONNABORTED, "the connection is closed")
            self._regions += 1  # before the call: it may take longer than the connection lives
        region: MemoryRegion | None = None
        try:
            region = make()
            region._pinned_in = self
            return region
        finally:
            if region is None:
                self.deregistered()

    def cover(self, region: MemoryRegion) -> None:
        """Have a region count for this lease, and no longer for the lease that it had.

        A region that is closed, in which case a thread may be deregistering it, keeps its lease.
        """
        if region.closed:
            return
        with _lock:
            self._regions += 1
        before, region._pinned_in = region._pinned_in, self
        if before is not None:
            before.deregistered(region.length)

    def deregistered(self, _: int = 0) -> None:
        """Note that a region does not count for the lease any more.  In any thread."""
        with _lock:
            self._regions -= 1
            if self._released and not self._regions:
                self._give_back()

    def resize(self, size: int) -> bool:
        """Change the size; return False if it was to grow and there is no room."""
        with _lock:
            kind, more = self.kind, size - self.size
            assert kind is not None
            if more > 0 and self._budget._lacks(kind, more, self._source):
                return False
            self.size = size
            self._budget._add(kind, more, self._source)
            if more < 0:
                self._budget._serve()
        return True

    def _resume(self) -> None:
        """Resume the task that waits for it.  May be called in any thread."""
        if self._future is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and so the connection
                self._future.get_loop().call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        if self._future is not None and not self._future.done():
            self._future.set_result(None)


class Account:
    """The leases of one connection.

    Args:
        budget: The budget of the connection's listener, or of the process.
        source: The source for which the leases count.
    """

    __slots__ = ("_budget", "_closed", "_leases", "source")

    def __init__(self, budget: Budget, source: Hashable) -> None:
        self._budget = budget
        self._leases: dict[Lease, None] = {}  # in a reproducible order, unlike a set
        self._closed = False
        self.source: Hashable = source

    @property
    def size(self) -> int:
        """The bytes of all leases.  In any thread."""
        return sum(lease.size for lease in tuple(self._leases))

    def lease(self, kind: Kind, size: int) -> Lease | None:
        """Return a lease if there is room for it now, otherwise None."""
        with _lock:
            lease = None if self._closed else self._budget.lease(kind, size, self.source)
            return None if lease is None else self._own(lease)

    async def wait(self, size: int) -> Lease:
        """Wait in line for a lease for an awaited message.

        Cancellation: there is no lease.
        """
        return self._own(await self._budget.wait(AWAITED, size, self.source))

    def _own(self, lease: Lease) -> Lease:
        with _lock:
            if self._closed:
                lease.release()
            else:
                self._leases[lease] = None
                lease._account = self
        return lease

    def is_pressed(self) -> bool:
        """Whether another source waits for bytes of the budget."""
        return not self._closed and self._budget.presses(self.source)

    def close(self, _: object = None) -> None:
        """Refuse further leases, and release all.  Idempotent.  May be called in any thread."""
        with _lock:
            self._closed = True
            for lease in tuple(self._leases):
                lease.release()


# Budgets


class Budget:
    """A number of bytes to be shared, and the leases of them.

    Args:
        total: The number of bytes, or a function that returns it.
        parent: A budget in which the bytes of this budget count, too.
    """

    __slots__ = ("_counts", "_line", "_old", "_parent", "_total")

    def __init__(self, total: int | Callable[[], int], parent: Budget | None = None) -> None:
        self._total = total
        self._parent = parent
        self._counts: defaultdict[str, Count] = defaultdict(Count)
        self._old: dict[Lease, None] = {}  # leases of kinds with `patience_s`, the oldest first
        # The line: leases that wait, by source.  The first source is served next.  Budgets with a
        # common parent share one line.
        self._line: OrderedDict[Hashable, deque[Lease]]
        self._line = OrderedDict() if parent is None else parent._line

    @property
    def total(self) -> int:
        """The number of bytes to be shared."""
        return self._total if isinstance(self._total, int) else self._total()

    def count(self, kind: Kind) -> Count:
        """The count of a kind, together with kinds of the same name."""
        return self._counts[kind.name]

    def held(self, *kinds: Kind) -> int:
        """How many bytes of these kinds, or of all, are in use.  In any thread."""
        counts = [self.count(kind) for kind in kinds] or list(self._counts.values())
        return sum(count.held for count in counts)

    def __repr__(self) -> str:
        waiting = sum(map(len, list(self._line.values())))
        return f"<{type(self).__name__} {self.held()} of {self.total} bytes, {waiting} wait>"

    def lease(self, kind: Kind, size: int, source: Hashable) -> Lease | None:
        """Return a lease if there is room for it now, otherwise None."""
        with _lock:
            if self._lacks(kind, size, source):
                return None
            lease = Lease(self, (kind,), size, source)
            self._grant(lease, kind)
        return lease

    async def wait(self, kinds: tuple[Kind, ...], size: int, source: Hashable) -> Lease:
        """Wait in line for a lease.

        Args:
            kinds: The lease gets the first of these kinds that has room.  If the last one has
                `patience_s`, it is granted after that time even without room.
            size: The number of bytes.
            source: The source for which they count.

        Raises:
            BaseException: The exception that the function given to `refuse` makes.

        Cancellation: there is no lease.
        """
        lease = Lease(self, kinds, size, source)
        with _lock:
            for kind in () if self._line else kinds:
                if not self._lacks(kind, size, source):
                    self._grant(lease, kind)
                    return lease
            self._line.setdefault(source, deque()).append(lease)
            self._serve()
            if lease.kind is not None:
                return lease
            loop = asyncio.get_running_loop()
            lease._future = loop.create_future()
        lease._since = now()
        patience_s = kinds[-1].patience_s
        timer = None if patience_s is None else loop.call_later(patience_s, self._late, lease)
        try:
            await lease._future
        except BaseException:
            with _lock:
                self._leave_line(lease)
                lease.release()
                self._serve()
            raise
        finally:
            lease._future = None  # the traceback of its exception refers to this frame: a cycle
            if timer is not None:
                timer.cancel()
        return lease

    def refuse(self, source: Hashable, reason: Callable[[], BaseException]) -> None:
        """Have all waiting tasks of a source raise the exception that `reason` makes."""
        with _lock:
            refused = list(self._line.pop(source, ()))
            self._serve()
        for lease in refused:
            if lease._future is not None and not lease._future.done():
                lease._future.set_exception(reason())

    def resize(self, total: int) -> None:
        """Change the total number of bytes; the present leases stay."""
        with _lock:
            self._total = total
            self._serve()

    def presses(self, source: Hashable) -> bool:
        """Whether another source waits for bytes of this budget, or of its parent."""
        with _lock:
            return any(
                lease._short in self._chain
                for other, line in self._line.items()
                if other != source
                for lease in line
            )

    def forget(self) -> None:
        """Reset everything in a forked child, which has no connections."""
        self._counts.clear()
        self._line.clear()

    # To be called with the lock held

    @property
    def _chain(self) -> tuple[Budget, ...]:
        return (self,) if self._parent is None else (self, self._parent)

    def _lack(self, kind: Kind, size: int, source: Hashable) -> Lack | None:
        limit, others_wait = self.total * kind.eighths // 8, self._others_wait(source)
        return self.count(kind).lack(kind, limit, size, source, others_wait=others_wait)

    def _lacks(self, kind: Kind, size: int, source: Hashable) -> bool:
        if self._lack(kind, size, source) is not None:
            return True
        return self._parent is not None and self._parent._lacks(kind, size, source)

    def _others_wait(self, source: Hashable) -> bool:
        return len(self._line) > (source in self._line)

    def _grant(self, lease: Lease, kind: Kind) -> None:
        lease.kind = kind
        if kind.patience_s is not None:
            lease._since = now()
            self._old[lease] = None
        self._add(kind, lease.size, lease._source)

    def _add(self, kind: Kind, size: int, source: Hashable) -> None:
        self.count(kind).add(size, source)
        if self._parent is not None:
            self._parent._add(kind, size, source)

    def _late(self, lease: Lease) -> None:
        """Grant a lease that has waited for `patience_s`; no longer count leases older than it."""
        with _lock:
            if lease.kind is not None or not self._leave_line(lease):
                return
            for old in list(self._old):
                if old._since > lease._since:
                    break
                old._give_back()
            self._grant(lease, lease._kinds[-1])
            lease._resume()
            self._serve()

    def _leave_line(self, lease: Lease) -> bool:
        line = self._line.get(lease._source)
        if line is None or lease not in line:
            return False
        line.remove(lease)
        if not line:
            del self._line[lease._source]
        return True

    def _serve(self) -> None:
        """Grant leases in line as long as there is room, taking turns between the sources."""
        served = bool(self._line)
        while served:
            served = False
            # Budgets without room for an earlier lease; later leases must not overtake it there.
            full: set[Budget] = set()
            for source in list(self._line):
                granted = self._next(source, full)
                if granted is not None:
                    served = True
                    lease, kind = granted
                    self._leave_line(lease)
                    lease._budget._grant(lease, kind)
                    lease._resume()
                    if kind is lease._kinds[-1] and source in self._line:
                        self._line.move_to_end(source)  # now it is the turn of the others

    def _next(self, source: Hashable, full: set[Budget]) -> tuple[Lease, Kind] | None:
        """Return the first lease of a source that can be granted, and its kind."""
        behind = set(full)
        for lease in list(self._line[source]):
            future = lease._future
            # A loop that was closed without canceling its tasks leaves leases in the line.
            if future is not None and future.get_loop().is_closed():
                self._leave_line(lease)
                continue
            *others, last = lease._kinds
            for kind in others:
                if not lease._budget._lacks(kind, lease.size, source):
                    return lease, kind
            chain = lease._budget._chain
            short = next((budget for budget in chain if budget in behind), None)
            if short is None:
                lacks = [budget._lack(last, lease.size, source) for budget in chain]
                if not any(lacks):
                    return lease, last
                lack = Lack.PART if Lack.PART in lacks else Lack.ROOM
                short = chain[lacks.index(lack)]
                if lack is Lack.ROOM:
                    full.add(short)
            lease._short = short
            behind.add(short)
        return None


class Growth(Budget):
    """Slots of a pool, or bytes of a loop, that connections and streams get when they need them.

    Each member has its reserve from the beginning, whether it uses it or not, so that it can always
    work, whatever the others do.  When everything is used up, members that were refused wait in a
    line, and members with more than an equal share return slots as these become free
    (`Member.could_spare`).  No member has to return slots of its equal share, so slots do not move
    back and forth.

    Args:
        total: The number of slots or bytes.  If it shrinks, members keep what they have.

    Attributes:
        crowded: The address of a byte that is set while a member waits.  While it is 0, a slot that
            becomes free stays with its member, and C need not call Python.
    """

    __slots__ = ("_crowded", "_loop", "_serving", "_wanting", "crowded")

    def __init__(self, total: int | Callable[[], int]) -> None:
        super().__init__(total)
        self._loop = asyncio.get_running_loop()
        self._wanting: dict[Callable[[], None], Member] = {}
        self._serving = False
        self._crowded = ffi.new("uint8_t *")
        self.crowded: int = int(ffi.cast("uintptr_t", self._crowded))

    @property
    def members(self) -> int:
        """The number of members."""
        return len(self.count(GROWTH).reserved)

    @property
    def used(self) -> int:
        """How much the members have.  In any thread."""
        return sum(tuple(self.count(GROWTH).sources.values()))

    @property
    def free(self) -> int:
        """How much is neither used nor reserved; negative if the total has shrunk below that."""
        return self.total - self.count(GROWTH).held

    def _others_wait(self, source: Hashable) -> bool:
        return any(member.source is not source for member in self._wanting.values())

    def _serve(self) -> None:
        if self._wanting and not self._serving:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._ask_again)
                self._serving = True

    def _ask_again(self) -> None:
        """Have the members that were refused try again, in the order of their requests."""
        with _lock:
            self._serving = False
            functions = list(self._wanting)
        for function in functions:
            # Those behind this member are still in the line, so it gets only its equal share.
            with _lock:
                wanted = self._wanting.pop(function, None) is not None
                self._crowded[0] = bool(self._wanting)
            if wanted:
                function()


class Member(Account):
    """A member of a `Growth`, and its leases.

    Args:
        growth: The pool, or the bytes of a loop.
        reserve: How much the member can have in any case.

    Raises:
        OSError: ENOBUFS, there is not enough left for the reserve.
    """

    __slots__ = ("growth",)

    def __init__(self, growth: Growth, reserve: int) -> None:
        super().__init__(growth, object())
        self.growth: Growth = growth
        with _lock:
            if reserve > max(0, growth.free):
                text = (
                    f"the pool of {growth.total} slots has {growth.free} left for "
                    f"{growth.members} + 1 connections, {reserve} are needed"
                )
                raise errno_error(errno.ENOBUFS, text, "raise shared_slots")
            growth.count(GROWTH).reserve(reserve, self.source)

    def want(self, function: Callable[[], None]) -> None:
        """Have `function` called, once and by the loop, when a refused lease may be possible."""
        with _lock:
            self.growth._wanting[function] = self
            self.growth._crowded[0] = True

    def could_spare(self, size: int) -> bool:
        """Whether others wait, and this member has its equal share even with `size` less."""
        growth = self.growth
        with _lock:
            share = growth.count(GROWTH).equal_share(growth.total, self.source)
            return growth._others_wait(self.source) and self.size - size >= share

    def close(self, _: object = None) -> None:
        """End the membership, with all leases and the reserve.  Idempotent.  In any thread."""
        growth = self.growth
        with _lock:
            super().close()
            for function in [f for f, each in growth._wanting.items() if each is self]:
                del growth._wanting[function]
            growth._crowded[0] = bool(growth._wanting)
            growth.count(GROWTH).reserve(None, self.source)
            growth._serve()


# Counts of the process


class First:
    """What is pinned without a lease: first slots and rings, slots for datagrams, every `Memory`.

    Attributes:
        pinned: The number of bytes.
    """

    __slots__ = ("pinned",)

    def __init__(self) -> None:
        self.pinned: int = 0

    def count(self, region: MemoryRegion) -> None:
        """Count a region until it is deregistered."""
        with _lock:
            self.pinned += region.length
        region._pinned_in = self

    def deregistered(self, size: int) -> None:
        """Note that a region of `size` bytes is not pinned any more.  In any thread."""
        with _lock:
            self.pinned -= size

    def forget(self) -> None:
        """Reset the number in a forked child, which has no connections."""
        self.pinned = 0


FIRST = First()


def left(
    part: int, *, part_of_all: int | None = None, most: int = sys.maxsize
) -> Callable[[], int]:
    """Return a function for a fraction of what the process may pin beside `FIRST`.

    How much the process may pin is determined by the first call of that function, when the program
    has given up its privileges, if it does so.

    Args:
        part: The denominator of the fraction.
        part_of_all: The denominator if the process may pin all memory of the machine.
        most: An upper limit in bytes.
    """
    size = parts = 0

    def bytes_left() -> int:
        nonlocal size, parts
        if not size:
            size = memlock.memory_to_pin()
            parts = (part_of_all or part) if size >= memlock.memory_of_machine() else part
        return min(max(0, size - FIRST.pinned) // parts, most)

    return bytes_left


def growth_of_loop() -> Growth:
    """The budget of further slots and rings of the running loop's connections and streams.

    It is an eighth; the rest is for large messages and for the program.  It lasts as long as the
    loop: memory of connections that are closed may still be pinned.
    """
    return registry.lasting("growth", lambda: Growth(left(8)), asyncio.get_running_loop())


PROCESS = Budget(left(4, most=_PROCESS_BYTES))
fork.renew(FIRST.forget)
fork.renew(PROCESS.forget)


def set_large_message_budget(size: int) -> None:
    """Limit the memory for large messages of all connections of this process.

    Three things count: messages that are being fetched, messages that `recv()` has not returned
    yet, and buffers that stay registered for the next message, in either direction.  A message that
    does not fit waits; the sources (IPv4 address or IPv6 /64 network of the peer) take turns.  A
    single message is always fetched, up to `ConnectionConfig.max_message_size`.

    Args:
        size: The number of bytes.  The default is 256 MiB, or a quarter of the memory that the
            process may pin, if that is less; slots and rings that its connections and streams have
            from the beginning are subtracted first.  In addition each listener has a budget, see
            `ListenerLimits.max_large_message_bytes`.

    Raises:
        TypeError: `size` is no int.
        ValueError: `size` is less than 1 MiB.
    """
    if not isinstance(size, int) or isinstance(size, bool):
        msg = f"a budget is an int, the number of bytes, not {size!r}"
        raise TypeError(msg)
    if size < 1 << 20:
        msg = f"a budget for large messages of {size} bytes: at least 1 MiB is needed"
        raise ValueError(msg)
    PROCESS.resize(size)
