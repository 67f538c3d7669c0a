"""LargeMemory: the memory that the large messages of a loop's connections pin.

Theory of operation
    A fetch asks for memory when it has its share of a `ByteBudget`.  A send has no share: the peer
    decides when it reads.  So sends take turns: they pin a part of the memory that the
    process may pin, and fetches find the rest.  Otherwise the two ends of an echo could each
    wait for memory that the other end's send holds.

    Peers that read nothing hold up the messages to other peers for `TURN_S` only: then a send goes
    on without its turn, and the turns that are as old do not count any more.  Otherwise a client
    that reads nothing could delay each later message to the others.

    The system may refuse memory all the same (ENOMEM).  Then `registered` deregisters the buffers
    that pools keep for their next message, waits for a region that is deregistered or kept, and
    tries again.  As the memory may come free elsewhere, it does not wait long for that.  It gives
    up where there is no region to wait for, or after `SHORT_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from typing import Protocol

from aiordma.loop import registry
from aiordma.loop.job import Job
from aiordma.loop.limit import Limit
from aiordma.loop.timers import now
from aiordma.loop.wait_line import WaitLine
from aiordma.memory.memlock import Room, memory_to_pin
from aiordma.verbs.mr import MemoryRegion

__all__ = ["DEREGISTER_S", "LargeMemory", "Turn", "large_memory"]

TURN_S = 5.0
SHORT_S = 30.0
#: Seconds after which a registration is tried again, though no region was deregistered: the first
#: time, and at most.
_RETRY_S, _MOST_RETRY_S = 0.05, 1.0
#: Seconds that a call waits for the deregistration of a buffer; longer ones go on without it.
DEREGISTER_S = 5.0


class _Keeps(Protocol):
    """A pool of buffers."""

    def drop_kept(self) -> list[MemoryRegion]:
        """Deregister the buffers that are kept, and return them."""


class Turn:
    """The turn of a send, or its place in the line.

    Attributes:
        asked: The time at which it was asked for.
        since: The time at which it was granted; None before.
    """

    __slots__ = ("asked", "owner", "ready", "since", "size")

    def __init__(self, owner: Hashable, size: int) -> None:
        self.owner: Hashable = owner
        self.size: int = size
        self.asked: float = now()
        self.since: float | None = None
        self.ready: asyncio.Future[None] | None = None  # of a send that waits


class LargeMemory:
    """The turns of sends, and the regions of large messages, of one loop.

    Args:
        total: Bytes that sends pin at a time; a larger message goes when no other is under way.
    """

    __slots__ = (
        "_counted", "_frees", "_line", "_loop", "_pools", "_regions", "_sending", "_thread",
        "_total", "_turns",
    )  # fmt: skip

    def __init__(self, total: int) -> None:
        self._total = total
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._sending = 0  # bytes of `_counted`
        self._counted: dict[Turn, None] = {}  # the oldest first
        self._turns: deque[Turn] = deque()
        self._line: WaitLine[None] = WaitLine()
        self._pools: weakref.WeakSet[_Keeps] = weakref.WeakSet()
        self._regions = 0  # that are registered, kept or not
        self._frees = 0  # times that memory became free

    @property
    def total(self) -> int:
        """Bytes that sends pin at a time."""
        return self._total

    def join(self, pool: _Keeps) -> None:
        """Have a pool drop its kept buffers where memory is short."""
        self._pools.add(pool)

    # Sends

    async def turn(self, size: int, owner: Hashable) -> Turn:
        """Wait for the turn of a send, for `TURN_S` at most; `over` ends the turn.

        Args:
            size: Bytes that it pins.
            owner: For `refuse`.

        Returns:
            The turn, for `over`.

        Raises:
            BaseException: The exception that the `reason` of `refuse` makes.

        Cancellation: there is no turn.
        """
        turn = Turn(owner, size)
        if not self._turns and self._fits(size):
            self._count(turn)
            return turn
        ready = turn.ready = self._loop.create_future()
        self._turns.append(turn)
        self._serve()  # a turn before it may have been canceled
        timer = self._loop.call_later(TURN_S, self._late, turn)
        try:
            await ready
        except BaseException:
            if turn.since is not None:
                self.over(turn)
            elif turn in self._turns:
                self._turns.remove(turn)
                self._serve()
            raise
        finally:
            timer.cancel()
            turn.ready = None
            del ready  # its exception has this frame: a cycle
        return turn

    def over(self, turn: Turn) -> None:
        """The memory of a send is free."""
        self._discount(turn)
        self._serve()

    def _count(self, turn: Turn) -> None:
        turn.since = now()
        self._counted[turn] = None
        self._sending += turn.size

    def _discount(self, turn: Turn) -> None:
        if self._counted.pop(turn, turn) is None:  # or it was too old to count
            self._sending -= turn.size

    def _late(self, turn: Turn) -> None:
        """A send has waited long enough: it goes on, and old turns hold up no other send."""
        # Not by the time that it is: a loop may call this somewhat early.
        for each in list(self._counted):
            if each.since is None or each.since > turn.asked:
                break
            self._discount(each)
        self._grant(turn)
        self._serve()

    def _fits(self, size: int) -> bool:
        return not self._sending or self._sending + size <= self.total

    def _serve(self) -> None:
        while self._turns and self._fits(self._turns[0].size):
            self._grant(self._turns[0])

    def _grant(self, turn: Turn) -> None:
        if turn in self._turns:
            self._turns.remove(turn)
            # Or it was canceled, and its task is not resumed yet.
            if turn.ready is not None and not turn.ready.done():
                self._count(turn)
                turn.ready.set_result(None)

    def refuse(self, owner: Hashable, reason: Callable[[], BaseException]) -> None:
        """Have the sends of `owner` that wait raise the exception that `reason` makes."""
        for turn in [each for each in self._turns if each.owner is owner]:
            self._turns.remove(turn)
            if turn.ready is not None and not turn.ready.done():
                turn.ready.set_exception(reason())
        self._serve()

    # Regions

    async def registered(
        self, size: int, register: Callable[[], Awaitable[MemoryRegion]]
    ) -> MemoryRegion:
        """Register memory for a large message, and wait for other messages where it is short.

        Args:
            size: Bytes.
            register: Makes the region.

        Raises:
            OSError: The memory cannot be registered; ENOMEM, not within `SHORT_S` either.
            BaseException: As `register`.

        Cancellation: as that of `register`.
        """
        end: float | None = None
        pause = _RETRY_S
        region: MemoryRegion | None = None
        while region is None:
            frees = self._frees
            try:
                region = await register()
            except OSError as exc:
                if exc.errno != errno.ENOMEM or size > memory_to_pin():
                    raise
                end = now() + SHORT_S if end is None else end
                if not await self._room(frees, min(pause, end - now())):
                    raise
                pause = min(2 * pause, _MOST_RETRY_S)
        self._regions += 1
        region._gone.add_done_callback(self._deregistered)
        return region

    async def _room(self, frees: int, seconds: float) -> bool:
        """Wait for memory, for so long; False if there is none to wait for, or no time."""
        dropped = [region for pool in list(self._pools) for region in pool.drop_kept()]
        for region in dropped:
            with contextlib.suppress(OSError):  # and so TimeoutError
                await region.wait_closed(DEREGISTER_S)
        if dropped or self._frees != frees:
            return True
        if not self._regions or seconds <= 0:
            return False
        with contextlib.suppress(TimeoutError), Limit(seconds):
            await self._line.wait()
        return True

    def freed(self) -> None:
        """A buffer is kept, or deregistered: the tasks that wait for memory try again."""
        self._frees += 1
        if self._line.places:
            self._line.grant_all(None)

    def _deregistered(self, _: Job[None]) -> None:
        if threading.get_ident() == self._thread:
            self._one_less()
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._one_less)

    def _one_less(self) -> None:
        self._regions -= 1
        self.freed()

    def close(self) -> None:
        """Do nothing: the last connection is gone, and no task waits."""


class _OfLoop(LargeMemory):
    """The LargeMemory of a loop: fewer bytes, the more memory first slots have pinned."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        super().__init__(0)
        self._rest = Room()

    @property
    def total(self) -> int:
        """Bytes that sends pin at a time."""
        return self._rest.for_sends


def large_memory() -> tuple[LargeMemory, Callable[[], None]]:
    """Return the LargeMemory of the running loop, and a function that lets it go."""
    return registry.acquire("large memory", _OfLoop)
