"""ByteBudget: how many bytes of large messages a listener's connections, and a process's, may hold.

Theory of operation
    What a peer announces costs it a few bytes; to fetch the message costs this side all of them,
    and pins them.  So a fetch needs a share of each budget that its connection belongs to: that of
    its listener, and that of the process.  The share is held until the program has taken the
    message.

    One half is for what is fetched before the program asks for it, and for buffers that stay
    registered in between: it is taken if it is free, and nothing waits for it.  The other half is
    for messages that `recv()` waits for.  These wait for their share in one line, first come, first
    served; a connection whose listener has used up its budget keeps no connection of another from
    its turn.  As they are taken when they have arrived, and have to arrive in time, the line
    always moves on, whatever is held in the first half.

    A message that is larger than the half is fetched when no other is: the program has set the
    limit of its size.

    Counting only: nothing is allocated here.  Loops in several threads share the process's budget.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from typing import Self

from aiordma.loop import fork

__all__ = ["PROCESS_BUDGET", "Account", "ByteBudget", "fair_share", "set_large_message_budget"]

_PROCESS_BYTES = 256 << 20
_lock = fork.new_lock()


def fair_share(total: int, held: int, own: int) -> int:
    """Bytes of a total that one source may hold: three quarters of what the others leave.

    So no source takes all that is left, however much that is.

    Args:
        total: Bytes that there are.
        held: Bytes that all sources hold.
        own: Of those, bytes that the source holds.
    """
    return (total - (held - own)) * 3 // 4


class _Waiter:
    """A fetch that waits for its share."""

    __slots__ = ("budget", "future", "granted", "loop", "size", "thread")

    def __init__(self, budget: ByteBudget, size: int) -> None:
        self.budget = budget
        self.size = size
        self.loop = asyncio.get_running_loop()
        self.thread = threading.get_ident()
        self.future: asyncio.Future[None] = self.loop.create_future()
        self.granted = False

    def wake(self) -> None:
        """Resume it, in whatever thread this is."""
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
        total: Bytes.
        parent: The budget that this is a part of.

    Attributes:
        total: Bytes.
        ahead: Bytes of the first half that are held.
        wanted: Bytes of the second half that are held.
    """

    __slots__ = ("_line", "_parent", "ahead", "total", "wanted")

    def __init__(self, total: int, parent: Self | None = None) -> None:
        self.total = total
        self.ahead = 0
        self.wanted = 0
        self._parent = parent
        # One for all budgets that have a parent in common.
        self._line: deque[_Waiter] = deque() if parent is None else parent._line

    def _chain(self) -> list[ByteBudget]:
        return [self] if self._parent is None else [self, *self._parent._chain()]

    def _try(self, size: int, part: int) -> bool:
        chain = self._chain()
        with _lock:
            if any(budget.ahead + size > budget.total // part for budget in chain):
                return False
            for budget in chain:
                budget.ahead += size
        return True

    def try_ahead(self, size: int) -> bool:
        """Take a share for a message that `recv()` does not wait for yet, if there is one."""
        return self._try(size, 2)

    def try_keep(self, size: int) -> bool:
        """Take a share for a buffer that stays registered, if there is plenty."""
        return self._try(size, 4)

    async def take(self, size: int) -> None:
        """Take a share for a message that `recv()` waits for; waits in line.

        Cancellation: nothing was taken.
        """
        waiter = _Waiter(self, size)
        with _lock:
            self._line.append(waiter)
            woken = self._serve()
        _wake(woken)
        try:
            await waiter.future
        except BaseException:
            with _lock:
                if waiter.granted:
                    woken = self._return(0, size)
                else:
                    self._line.remove(waiter)
                    woken = self._serve()
            _wake(woken)
            raise

    def give(self, ahead: int, wanted: int) -> None:
        """Give bytes of each half back."""
        with _lock:
            woken = self._return(ahead, wanted)
        _wake(woken)

    def resize(self, total: int) -> None:
        """Change the number of bytes; what is held stays."""
        with _lock:
            self.total = total
            woken = self._serve()
        _wake(woken)

    # With the lock

    def _return(self, ahead: int, wanted: int) -> list[_Waiter]:
        for budget in self._chain():
            budget.ahead -= ahead
            budget.wanted -= wanted
        return self._serve() if wanted else []

    def _serve(self) -> list[_Waiter]:
        """Grant what fits, in order; those to be resumed."""
        full: set[ByteBudget] = set()
        left: list[_Waiter] = []
        woken = []
        for waiter in self._line:
            chain = waiter.budget._chain()
            short = next((b for b in chain if b in full or not b._fits(waiter.size)), None)
            if short is not None:
                full.add(short)  # whatever needs it has to wait behind this one
                left.append(waiter)
                continue
            for budget in chain:
                budget.wanted += waiter.size
            waiter.granted = True
            woken.append(waiter)
        if woken:
            self._line.clear()
            self._line.extend(left)
        return woken

    def _fits(self, size: int) -> bool:
        return not self.wanted or self.wanted + size <= self.total - self.total // 2


def _wake(waiters: list[_Waiter]) -> None:
    for waiter in waiters:
        waiter.wake()


class Account:
    """What one connection holds of a budget.

    Args:
        budget: The innermost that the connection belongs to.
    """

    __slots__ = ("_ahead", "_budget", "_closed", "_wanted")

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self._ahead = self._wanted = 0
        self._closed = False

    def try_ahead(self, size: int) -> bool:
        """As `ByteBudget.try_ahead`."""
        return self._got(size, taken=not self._closed and self._budget.try_ahead(size))

    def try_keep(self, size: int) -> bool:
        """As `ByteBudget.try_keep`."""
        return self._got(size, taken=not self._closed and self._budget.try_keep(size))

    def _got(self, size: int, *, taken: bool) -> bool:
        self._ahead += size * taken
        return taken

    async def take(self, size: int) -> None:
        """As `ByteBudget.take`."""
        await self._budget.take(size)
        if self._closed:
            self._budget.give(0, size)
        else:
            self._wanted += size

    def give(self, size: int, *, wanted: bool = False) -> None:
        """Give a share back; `wanted` is that of `take`."""
        if self._closed:
            return
        if wanted:
            self._wanted -= size
            self._budget.give(0, size)
        else:
            self._ahead -= size
            self._budget.give(size, 0)

    def close(self) -> None:
        """Give everything back.  Idempotent."""
        if not self._closed:
            self._closed = True
            if self._ahead or self._wanted:
                self._budget.give(self._ahead, self._wanted)


PROCESS_BUDGET = ByteBudget(_PROCESS_BYTES)


def set_large_message_budget(size: int) -> None:
    """Set how many bytes of large messages this process may hold, over all its connections.

    Counted is what is being fetched, what was fetched and `recv()` has not returned yet, and what
    stays registered for the next message.  What does not fit waits, in the order in which it was
    asked for.  A single message is always fetched, up to `ConnectionConfig.max_message_size`.

    Args:
        size: Bytes; 256 MiB by default.  A listener has a budget of its own besides.

    Raises:
        TypeError: No int.
        ValueError: Less than 1 MiB.
    """
    if not isinstance(size, int) or isinstance(size, bool):
        msg = f"a budget is an int, the number of bytes, not {size!r}"
        raise TypeError(msg)
    if size < 1 << 20:
        msg = f"a budget for large messages of {size} bytes: at least 1 MiB is needed"
        raise ValueError(msg)
    PROCESS_BUDGET.resize(size)
