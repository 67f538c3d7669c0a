"""ByteBudget: the bytes of large messages that a listener's, or a process's, connections may hold.

Theory of operation
    To announce a large message costs the peer a few bytes; to fetch it costs this side all of its
    bytes, and pins them.  So a fetch needs a share of each budget that its connection belongs to:
    the budget of its listener and the budget of the process.  The share is held until the message
    is taken.

    A budget has three parts.  One half, AHEAD, is for messages that are fetched before the program
    asks for them, and for buffers that stay registered in between; a share is taken if it is free.
    The other half is for messages that `recv()` waits for: a quarter of it, SMALL, for messages of
    at most 1 MiB, and the rest, LARGE, for all.  A message of this half is taken when it has
    arrived, and has to arrive in time; so the line always moves on, whatever the first half holds.

    Of AHEAD and of SMALL a source gets `fair_share`, so that another source always finds room.  The
    line for LARGE is served by sources in turn, and in each source in the order of asking; while
    other sources wait, a source gets no more than its `fair_share`.  A fetch that waits is granted
    any part that becomes free.  A connection whose listener has used up its budget does not delay
    connections of another listener.

    HELD counts the bytes that the program has and has not released, up to as many as the budget
    has.  A message for which HELD has no room is delivered as a copy that is not pinned.

    A message that is larger than LARGE is fetched when no other message holds bytes of LARGE: the
    program has set the limit of its size.

    A ByteBudget only counts.  Loops in several threads share the process's budget.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import OrderedDict, deque
from typing import Self

from aiordma.loop import fork
from aiordma.memory.memlock import Room

__all__ = [
    "AHEAD",
    "HELD",
    "LARGE",
    "PROCESS_BUDGET",
    "SMALL",
    "Account",
    "ByteBudget",
    "fair_share",
    "set_large_message_budget",
]

AHEAD, SMALL, LARGE, HELD = range(4)  # the parts of a budget
_PARTS = 4

_PROCESS_BYTES = 256 << 20
_SMALL_BYTES = 1 << 20  # the largest message that SMALL takes
_lock = fork.new_lock()


def fair_share(total: int, held: int, own: int) -> int:
    """The share of a total that a source may hold: three quarters of the part others leave free.

    So no source takes all that is left.

    Args:
        total: Bytes, or connections, that there may be.
        held: Number that all sources hold.
        own: Number that the source itself holds.
    """
    return (total - (held - own)) * 3 // 4


class _Waiter:
    """A fetch that waits for its share."""

    __slots__ = ("budget", "future", "loop", "part", "short", "size", "source", "thread")

    def __init__(self, budget: ByteBudget, size: int, source: str) -> None:
        self.budget = budget
        self.size = size
        self.source = source
        self.loop = asyncio.get_running_loop()
        self.thread = threading.get_ident()
        self.future: asyncio.Future[None] = self.loop.create_future()
        self.part: int | None = None  # the part that its share was taken of
        self.short: ByteBudget | None = None  # the budget that lacks room for it

    def wake(self) -> None:
        """Resume the fetch in its loop; called in any thread."""
        if threading.get_ident() == self.thread:
            self._resume()
            return
        with contextlib.suppress(RuntimeError):  # its loop is closed, and its connections with it
            self.loop.call_soon_threadsafe(self._resume)

    def _resume(self) -> None:
        if not self.future.done():
            self.future.set_result(None)


class ByteBudget:
    """Bytes for large messages that are being fetched, or were fetched and not yet taken.

    Args:
        total: Bytes; None for those of a process without a setting.
        parent: The budget in which the bytes of this budget count, too.
    """

    __slots__ = ("_held", "_line", "_own", "_parents", "_room", "_total")

    def __init__(self, total: int | None, parent: Self | None = None) -> None:
        self._total = total
        self._room: Room | None = None
        self._held = [0] * _PARTS
        self._own: tuple[dict[str, int], ...] = ({}, {}, {}, {})  # `_held` of each source
        self._parents: tuple[ByteBudget, ...] = () if parent is None else parent._chain
        # The fetches that wait, by source; the first source is served next.  All budgets with a
        # common parent have one line.
        self._line: OrderedDict[str, deque[_Waiter]]
        self._line = OrderedDict() if parent is None else parent._line

    @property
    def total(self) -> int:
        """Bytes that there are."""
        if self._total is not None:
            return self._total
        if self._room is None:
            # At the first use: by then the program has given up its privileges.
            self._room = Room()
        return min(_PROCESS_BYTES, self._room.for_messages)

    def _size_of(self, part: int) -> int:
        total = self.total
        half = total - total // 2
        return (total // 2, half // 4, half - half // 4, total)[part]

    @property
    def _chain(self) -> tuple[ByteBudget, ...]:
        # Made anew each time: kept, it would be a cycle, which only the collector frees.
        return (self, *self._parents)

    @property
    def ahead(self) -> int:
        """Bytes of the first half that are held."""
        return self._held[AHEAD]

    @property
    def wanted(self) -> int:
        """Bytes of the second half that are held."""
        return self._held[SMALL] + self._held[LARGE]

    @property
    def used(self) -> int:
        """Bytes that are held, those that the program has among them."""
        return sum(self._held)

    def __repr__(self) -> str:
        waiting = sum(map(len, list(self._line.values())))
        return f"<ByteBudget {self.used} of {self.total} bytes, {waiting} fetches wait>"

    def try_take(self, part: int, size: int, source: str, *, keep: bool = False) -> bool:
        """Take a share of AHEAD or HELD, if it has room; return whether it had.

        Args:
            part: AHEAD; or HELD, of which a source may take all: others then get copies.
            size: Bytes.
            source: The source that they count for.
            keep: For a buffer that stays registered, to which half of AHEAD is open.
        """
        with _lock:
            for budget in (self, *self._parents):
                if not budget._has(part, size, source, keep=keep):
                    return False
            self._count(part, size, source)
        return True

    async def take(self, size: int, source: str) -> int:
        """Wait in line for a share for a message that `recv()` waits for, and take it.

        Returns:
            The part of which the share was taken.

        Cancellation: nothing was taken.
        """
        waiter = _Waiter(self, size, source)
        with _lock:
            self._drop_dead()
            self._line.setdefault(source, deque()).append(waiter)
            woken = self._serve()
        _wake(woken)
        try:
            await waiter.future
        except BaseException:
            with _lock:
                if waiter.part is None:
                    self._leave_line(waiter)
                else:
                    self._count(waiter.part, -size, source)
                woken = self._serve()
            _wake(woken)
            raise
        assert waiter.part is not None
        return waiter.part

    def give(self, sizes: tuple[int, ...], source: str) -> None:
        """Give bytes of each part back."""
        with _lock:
            for part, size in enumerate(sizes):
                if size:
                    self._count(part, -size, source)
            woken = self._serve() if self._line else None
        if woken:
            _wake(woken)

    def resize(self, total: int) -> None:
        """Change the number of bytes; shares that are held stay."""
        with _lock:
            self._total = total
            woken = self._serve()
        _wake(woken)

    def presses(self, source: str) -> bool:
        """Whether a fetch of another source waits for bytes of this budget, or of a parent."""
        with _lock:
            return any(
                waiter.short in self._chain
                for other, line in self._line.items()
                if other != source
                for waiter in line
            )

    # With the lock

    def _count(self, part: int, size: int, source: str) -> None:
        for budget in (self, *self._parents):
            budget._held[part] += size
            own = budget._own[part]
            left = own.get(source, 0) + size
            if left:
                own[source] = left
            else:
                del own[source]

    def _leave_line(self, waiter: _Waiter) -> None:
        line = self._line.get(waiter.source)
        if line is not None and waiter in line:  # or it was dropped
            line.remove(waiter)
            if not line:
                del self._line[waiter.source]

    def _drop_dead(self) -> None:
        """Remove the fetches of loops that were closed without canceling their tasks."""
        for waiter in [each for line in self._line.values() for each in line]:
            if waiter.loop.is_closed():
                self._leave_line(waiter)

    def _serve(self) -> list[_Waiter]:
        """Grant the fetches that fit, by sources in turn; return those to be resumed."""
        woken: list[_Waiter] = []
        served = True
        while served:
            served = False
            full: set[ByteBudget] = set()  # no room for a fetch here: later fetches wait behind it
            for source in list(self._line):
                waiter = self._next(source, full)
                if waiter is None:
                    continue
                assert waiter.part is not None
                self._leave_line(waiter)
                waiter.budget._count(waiter.part, waiter.size, source)
                if waiter.part == LARGE and source in self._line:
                    self._line.move_to_end(source)  # the others' turn
                woken.append(waiter)
                served = True
        return woken

    def _next(self, source: str, full: set[ByteBudget]) -> _Waiter | None:
        """Return the first fetch of a source that gets a share now, with its part set, or None."""
        behind = set(full)
        for waiter in self._line[source]:
            chain = waiter.budget._chain
            for part in (AHEAD, SMALL):
                if all(budget._has(part, waiter.size, source) for budget in chain):
                    waiter.part = part
                    return waiter
            waiter.short = next((b for b in chain if b in behind), None)
            if waiter.short is None:
                waiter.short = next((b for b in chain if b._is_more_than_fair(waiter)), None)
                if waiter.short is None:
                    waiter.short = next((b for b in chain if not b._has_large(waiter.size)), None)
                    if waiter.short is None:
                        waiter.part = LARGE
                        return waiter
                    full.add(waiter.short)
                behind.add(waiter.short)
        return None

    def _has(self, part: int, size: int, source: str, *, keep: bool = False) -> bool:
        """Whether a part but LARGE has room for a source.

        The first share of a source in AHEAD or SMALL may exceed `fair_share`.
        """
        if part == SMALL and size > _SMALL_BYTES:
            return False
        total = self.total // 4 if keep else self._size_of(part)
        held = self._held[part]
        if held + size > total:
            return False
        own = self._own[part].get(source)
        return part == HELD or own is None or own + size <= fair_share(total, held, own)

    def _has_large(self, size: int) -> bool:
        return not self._held[LARGE] or self._held[LARGE] + size <= self._size_of(LARGE)

    def _is_more_than_fair(self, waiter: _Waiter) -> bool:
        """Whether a source would get more than `fair_share` of LARGE while others wait."""
        own = self._own[LARGE].get(waiter.source)
        if own is None or len(self._line) == 1:
            return False
        share = fair_share(self._size_of(LARGE), self._held[LARGE], own)
        return own + waiter.size > share


def _wake(waiters: list[_Waiter]) -> None:
    for waiter in waiters:
        waiter.wake()


class Account:
    """The bytes of a budget that one connection holds.

    Args:
        budget: The innermost budget that the connection belongs to.
        source: The source of the connection.
    """

    __slots__ = ("_budget", "_closed", "_held", "_source")

    def __init__(self, budget: ByteBudget, source: str) -> None:
        self._budget = budget
        self._source = source
        self._held = [0] * _PARTS
        self._closed = False

    @property
    def pinned(self) -> int:
        """Bytes that it holds, those that the program has among them; in any thread."""
        return sum(self._held)

    def try_take(self, part: int, size: int, *, keep: bool = False) -> bool:
        """As `ByteBudget.try_take`."""
        if self._closed or not self._budget.try_take(part, size, self._source, keep=keep):
            return False
        self._held[part] += size
        return True

    async def take(self, size: int) -> int:
        """As `ByteBudget.take`."""
        part = await self._budget.take(size, self._source)
        self._held[part] += size
        if self._closed:
            self.close()
        return part

    def give(self, size: int, part: int = AHEAD) -> None:
        """Give a share of a part back; after `end` only `close` does."""
        if self._closed:
            return
        self._held[part] -= size
        self._budget.give((0,) * part + (size,), self._source)

    def is_pressed(self) -> bool:
        """Whether another source waits for bytes of the budget."""
        return not self._closed and self._budget.presses(self._source)

    def end(self) -> None:
        """Refuse further shares; those that the connection has are held until `close`."""
        self._closed = True

    def close(self, _: object = None) -> None:
        """Refuse further shares, and give all back, in any thread.  Idempotent."""
        self._closed = True
        held, self._held = tuple(self._held), [0] * _PARTS
        if any(held):
            self._budget.give(held, self._source)


PROCESS_BUDGET = ByteBudget(None)


def set_large_message_budget(size: int) -> None:
    """Set the bytes of large messages that this process may hold, over all its connections.

    Three kinds of bytes count: messages that are being fetched, messages that `recv()` has not
    returned yet, and buffers that stay registered for the next message, in either direction.  A
    message that does not fit waits; the sources (IPv4 address or IPv6 /64 of the peer) are served
    in turn.  A single message is always fetched, up to `ConnectionConfig.max_message_size`.

    Args:
        size: Bytes; by default 256 MiB, or a quarter of the memory that the process may pin, if
            that is less: of the memory beside the slots and rings with which its connections and
            streams began.  A listener has a budget of its own besides.

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
    PROCESS_BUDGET.resize(size)
