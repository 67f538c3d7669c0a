"""Slots: the memory of a connection's messages and their queues; its own, or out of a pool.

Theory of operation
    By default a connection has receives for `recv_depth` messages and slots for `send_depth`, and
    the connections of a loop and device complete in common queues (`link.shared_queues`).  A
    thousand connections, mostly silent, then pin memory for all that each could have under way.

    With `shared_slots` they share a budget of slots (memory.budget), too.  Each begins with the few
    that it is guaranteed, gets more while its peer uses up credits, and frees some for others.

    They share neither memory nor a protection domain.  A receive that was granted to a connection
    is posted to the queue pair of that connection.  So no peer can use up the receives of another,
    and no key opens the memory of another connection.  A shared receive queue gives neither: a peer
    that sends beyond its credits takes the receives that were promised to others, and on Soft-RoCE
    a queue pair that dies inside a message keeps a receive for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiordma.endpoint.config import (
    CONTROL_SIZE,
    CONTROL_SLOTS,
    MIN_SENDS,
    MIN_WINDOW,
    ConnectionConfig,
    Plan,
)
from aiordma.link.adapter_side import Closing
from aiordma.link.completions import Completions
from aiordma.link.shared_queues import SharedQueues
from aiordma.loop import registry
from aiordma.loop.workers import call_blocking
from aiordma.memory.arena import Arena, arenas
from aiordma.memory.budget import Share, SlotBudget
from aiordma.memory.elastic import ElasticArena, Keeper
from aiordma.verbs.comp_channel import CompletionChannel
from aiordma.verbs.cq import CompletionQueue
from aiordma.verbs.mr import INLINE_BYTES, MemoryRegion
from aiordma.verbs.pd import ProtectionDomain
from aiordma.verbs.qp import QueuePair

__all__ = ["Slots"]

_STEPS = 16  # in which the slots grow from the guaranteed number to the highest


class _Leaving:
    """A connection that leaves its pool: over when its guaranteed slots are free for others."""

    __slots__ = ("_over", "_share")

    def __init__(self, share: Share) -> None:
        self._share = share
        self._over = asyncio.Event()

    def leave(self) -> None:
        """Free the slots: the queue pair is gone."""
        self._share.leave()
        self._over.set()

    async def wait_closed(self) -> None:
        """Wait for `leave`.  Without a bound of its own."""
        await self._over.wait()


class Slots:
    """The slots of one connection, and its completion queue; made by `open`.

    Attributes:
        recv: For messages of the peer.
        send: For messages to the peer.
        control: For messages to the peer without data; None for a raw connection.
        completions: How all requests complete.
    """

    __slots__ = ("_loop", "_own_cq", "_share", "_undo", "completions", "control", "recv", "send")

    _loop: asyncio.AbstractEventLoop  # of a member of a pool
    recv: Arena
    send: Arena
    completions: Completions

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self.control: Arena | None = None
        self._own_cq: CompletionQueue | None = None
        self._share: Share | None = None

    @classmethod
    async def open(cls, pd: ProtectionDomain, channel: CompletionChannel, plan: Plan) -> Slots:
        """Allocate and register.

        Raises:
            OSError: Out of memory that may be pinned, or of adapter resources; ENOBUFS, the pool
                cannot guarantee the slots that a connection needs.

        Cancellation: the resources are freed.
        """
        slots = cls()
        try:
            if plan.config.shared_slots is not None:
                await slots._join(pd, plan.config, plan.config.shared_slots)
            else:
                await slots._register(pd, plan)
            slots._complete(channel, plan)
        except BaseException:
            slots.abandon()
            raise
        return slots

    async def _register(self, pd: ProtectionDomain, plan: Plan) -> None:
        """Make slots of the connection's own, in one registration; in a thread if it takes long."""
        if plan.quick:
            made = arenas(pd, *plan.shapes)
        else:
            made = await call_blocking(
                lambda: arenas(pd, *plan.shapes), undo=lambda made: made[0].close()
            )
        self._undo.append(made[0].close)
        self.recv, self.send = made[:2]
        if not plan.config.raw:
            self.control = made[2]

    async def _join(self, pd: ProtectionDomain, config: ConnectionConfig, total: int) -> None:
        """Become a member of the pool, with the guaranteed slots."""
        receives = MIN_WINDOW + config.control_depth
        sends = min(MIN_SENDS, config.send_depth)
        key = ("slots", id(pd.context), total, config.slot_size)
        budget, release = registry.acquire(key, lambda: SlotBudget(total))
        self._undo.append(release)
        self._loop = asyncio.get_running_loop()
        share = self._share = budget.join(receives + sends)
        share.take(receives + sends)
        self.recv = await _elastic(pd, config.receives, receives, config.slot_size, share)
        self._undo.append(self.recv.close)
        self.send = await _elastic(pd, config.send_depth, sends, config.slot_size, share)
        self._undo.append(self.send.close)
        (self.control,) = arenas(pd, (CONTROL_SLOTS, CONTROL_SIZE))
        self._undo.append(self.control.close)

    def _complete(self, channel: CompletionChannel, plan: Plan) -> None:
        config = plan.config
        # Messages of a raw peer, and those on iWARP, raise no solicited event.
        quiet = not (config.raw or channel.context.is_iwarp)
        if config.shared_queues or config.shared_slots is not None:
            queues, release = SharedQueues.of(channel, quiet=quiet)
            self._undo.append(release)
            cq = queues.take(plan.completions)
        else:
            cq = self._own_cq = CompletionQueue(channel.context, plan.completions, channel)
            self._undo.append(cq.close)
        unused = self._own_cq is not None
        self.completions = Completions(channel, cq, quiet=quiet, unused=unused)

    @property
    def regions(self) -> list[MemoryRegion]:
        """All memory that is registered now."""
        if self._share is None:
            return self.recv.regions
        assert self.control is not None
        return [*self.recv.regions, *self.send.regions, *self.control.regions]

    def pin_with(self, keeper: Keeper) -> None:
        """Have `keeper` keep the memory of later slots as long as the queue pair may use it."""
        for arena in (self.recv, self.send):
            if isinstance(arena, ElasticArena):
                arena.keeper = keeper

    def _free(self) -> None:
        while self._undo:
            self._undo.pop()()

    def abandon(self) -> None:
        """Free everything; there never was a queue pair."""
        self._free()
        if self._share is not None:
            self._share.leave()

    def close(self, qp: QueuePair) -> list[Closing]:
        """Free everything once the queue pair is gone; return the objects to wait for."""
        parts: list[Closing] = [*self.regions]
        if self._own_cq is not None:
            parts.append(self._own_cq)
        self._free()
        if self._share is not None:
            # Not before the queue pair is gone: until then the memory is pinned.
            leaving, loop = _Leaving(self._share), self._loop

            def leave(_: object) -> None:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(leaving.leave)

            qp._gone.add_done_callback(leave)
            parts.append(leaving)
        return parts


async def _elastic(
    pd: ProtectionDomain, most: int, base: int, slot_size: int, share: Share
) -> ElasticArena:
    chunk = min(max(4, (most - base) // _STEPS), max(1, INLINE_BYTES // slot_size))
    if base * slot_size <= INLINE_BYTES:
        return ElasticArena(pd, most, base, chunk, slot_size, share)
    return await call_blocking(
        lambda: ElasticArena(pd, most, base, chunk, slot_size, share), undo=ElasticArena.close
    )
