"""LargeMemory: registers the memory for large messages of all connections of a loop.

Theory of operation
    Memory is registered only with a lease (`memory.governor`), for messages that are fetched and
    for those that are sent.  Sends need one because the program decides when a send begins, but the
    peer decides when it ends.  The leases of sends are limited to a fraction of what the process
    may pin, so that there is memory left to fetch messages.  Otherwise the two sides of an echo
    could each wait for memory that the sends of the other side use.

    The system may refuse to pin memory all the same (ENOMEM).  Then `registered` deregisters unused
    buffers of the pools, waits until a region is deregistered or returned to a pool, and tries
    again.  As memory may also be freed by others, each wait is short.  It gives up if there is no
    region to wait for, or after `SHORT_S` seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from typing import Any, Protocol

from aiordma.loop import registry
from aiordma.loop.limit import Limit
from aiordma.loop.timers import now
from aiordma.loop.wait_line import WaitLine
from aiordma.memory.governor import SENDS, Budget, Lease, left
from aiordma.memory.memlock import memory_to_pin
from aiordma.verbs.mr import MemoryRegion

__all__ = ["DEREGISTER_S", "LargeMemory", "large_memory"]

#: How long to try to register memory, in seconds.
SHORT_S = 30.0
#: The first and the longest pause between two attempts if no region was deregistered meanwhile.
_RETRY_S, _MOST_RETRY_S = 0.05, 1.0
#: How long a call waits for the deregistration of a buffer, in seconds, before it returns anyway.
DEREGISTER_S = 5.0


class _Pool(Protocol):
    """A pool of buffers."""

    def drop_kept(self) -> list[MemoryRegion]:
        """Deregister all unused buffers, and return them."""


class LargeMemory:
    """Registers the memory for the large messages of one loop.

    Args:
        sends: How many bytes messages to peers may pin, or a function that returns the number.

    Attributes:
        sends: The budget of these bytes.
    """

    __slots__ = ("_frees", "_line", "_loop", "_pools", "_regions", "sends")

    def __init__(self, sends: int | Callable[[], int]) -> None:
        self._loop = asyncio.get_running_loop()
        self._line: WaitLine[None] = WaitLine()
        self._pools: weakref.WeakSet[_Pool] = weakref.WeakSet()
        self._regions = 0  # how many regions are registered, in use or not
        self._frees = 0  # how often memory became free
        self.sends: Budget = Budget(sends)

    def join(self, pool: _Pool) -> None:
        """Have a pool deregister its unused buffers if memory is short."""
        self._pools.add(pool)

    def lease(self, size: int, source: Hashable) -> Coroutine[Any, Any, Lease]:
        """Wait in line for the lease of a send; the connections take turns.

        Raises:
            BaseException: The exception that the function given to `sends.refuse` makes.

        Cancellation: there is no lease.
        """
        return self.sends.wait((SENDS,), size, source)

    async def registered(
        self, size: int, register: Callable[[], Awaitable[MemoryRegion]]
    ) -> MemoryRegion:
        """Register memory for a large message; if it is short, wait for other messages to end.

        Args:
            size: The number of bytes.
            register: Makes the region.

        Raises:
            OSError: The memory cannot be registered.  ENOMEM: not even within `SHORT_S` seconds.
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
                if not await self._wait_for_memory(frees, min(pause, end - now())):
                    raise
                pause = min(2 * pause, _MOST_RETRY_S)
        self._regions += 1
        region._when_gone(self._deregistered)
        return region

    async def _wait_for_memory(self, frees: int, seconds: float) -> bool:
        """Wait until memory may be free again; False if that is hopeless, or no time is left."""
        dropped = [region for pool in list(self._pools) for region in pool.drop_kept()]
        for region in dropped:
            with contextlib.suppress(OSError):  # which includes TimeoutError
                await region.wait_closed(DEREGISTER_S)
        if dropped or self._frees != frees:
            return True
        if not self._regions or seconds <= 0:
            return False
        with contextlib.suppress(TimeoutError), Limit(seconds):
            await self._line.wait()
        return True

    def freed(self) -> None:
        """Have waiting tasks try again, as a buffer was deregistered or returned to its pool."""
        self._frees += 1
        if self._line.places:
            self._line.grant_all(None)

    def _deregistered(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._one_less)

    def _one_less(self) -> None:
        self._regions -= 1
        self.freed()


def large_memory() -> LargeMemory:
    """Return the LargeMemory of the running loop.

    Sends pin a sixteenth of the memory that is left to pin at a time, as fetches need more; without
    RLIMIT_MEMLOCK half.  It lasts as long as the loop: memory of connections that are closed may
    still be pinned.
    """
    loop = asyncio.get_running_loop()
    return registry.lasting("large memory", lambda: LargeMemory(left(16, part_of_all=2)), loop)
