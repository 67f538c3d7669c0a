"""Slots: the memory of a connection's messages, and their queues.

Theory of operation
    A connection begins with few slots: receives for three messages ahead, for messages without data
    and for one answer to a large message, and one slot to send from.  It gets more in steps, up to
    `recv_depth` and `send_depth`: for receives when its peer has used up its credits, to send from
    when all are under way.  A thousand connections, mostly silent, then pin little, and a
    connection is made quickly.  A raw connection, whose peer knows no credits, has all of its slots
    from the beginning, and so has a connection whose slots take little memory.

    Steps count in a budget (memory.budget).  With `shared_slots` that is a number of slots, for
    both directions, the first of each connection included; otherwise the bytes that the steps of
    a loop's connections may pin.

    Connections share neither memory nor a protection domain.  A receive that was granted to a
    connection is posted to the queue pair of that connection.  So no peer can use up the receives
    of another, and no key opens the memory of another connection.  A shared receive queue gives
    neither: a peer that sends beyond its credits takes the receives that were promised to others,
    and on Soft-RoCE a queue pair that dies inside a message keeps a receive for ever.

    By default the connections of a loop and device complete in common queues
    (`link.shared_queues`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiordma.endpoint.config import ConnectionConfig, Plan
from aiordma.link.adapter_side import Closing
from aiordma.link.completions import Completions
from aiordma.link.shared_queues import SharedQueues
from aiordma.loop import registry
from aiordma.loop.workers import call_blocking
from aiordma.memory.arena import Arena, arenas
from aiordma.memory.budget import Share, SlotBudget, step_budget
from aiordma.memory.elastic import ElasticArena, Keeper
from aiordma.verbs.comp_channel import CompletionChannel
from aiordma.verbs.cq import CompletionQueue
from aiordma.verbs.mr import INLINE_BYTES, MemoryRegion
from aiordma.verbs.pd import ProtectionDomain
from aiordma.verbs.qp import QueuePair

__all__ = ["Slots"]

#: Slots of a step; 16 of the default size fill whole pages.
_STEP = 16
#: A member of a pool takes smaller steps, for the others: from its first slots to all so many.
_POOL_STEPS = 16


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

    __slots__ = (
        "_first", "_loop", "_own_cq", "_share", "_undo", "completions", "control", "recv", "send",
    )  # fmt: skip

    _first: MemoryRegion
    _loop: asyncio.AbstractEventLoop  # of a member of a budget
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
            await slots._register(pd, plan)
            if plan.grows:
                slots._grow(pd, plan.config)
            slots._complete(channel, plan)
        except BaseException:
            slots.abandon()
            raise
        return slots

    async def _register(self, pd: ProtectionDomain, plan: Plan) -> None:
        """Make the first slots, in one registration; in a thread if it takes long."""
        if plan.quick:
            made = arenas(pd, *plan.shapes)
        else:
            made = await call_blocking(
                lambda: arenas(pd, *plan.shapes), undo=lambda made: made[0].close()
            )
        self._undo.append(made[0].close)
        self._first = made[0].mr
        self.recv, self.send = made[:2]
        if not plan.config.raw:
            self.control = made[2]

    def _grow(self, pd: ProtectionDomain, config: ConnectionConfig) -> None:
        """Join a budget, out of which further slots come."""
        total, first, unit, step = config.shared_slots, 0, config.slot_size, _STEP
        if total is not None:
            first, unit = self.recv.count + self.send.count, 1
            step = max(4, (config.receives - self.recv.count) // _POOL_STEPS)
        if total is None:
            budget, release = step_budget()
        else:
            key = ("slots", id(pd.context), total, config.slot_size)
            budget, release = registry.acquire(key, lambda: SlotBudget(total))
        self._undo.append(release)
        self._loop = asyncio.get_running_loop()
        share = self._share = budget.join(first)
        share.take(first)
        step = max(1, min(step, INLINE_BYTES // config.slot_size))
        self.recv = ElasticArena(pd, self.recv, config.receives, step, share, unit)
        self._undo.append(self.recv.close)
        self.send = ElasticArena(pd, self.send, config.send_depth, step, share, unit)
        self._undo.append(self.send.close)

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
        return [self._first, *self.recv.steps, *self.send.steps]

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
        if self._share is not None and not self._share.used:
            self._share.leave()
        elif self._share is not None:
            # Not before the queue pair is gone: until then the memory is pinned.
            leaving, loop = _Leaving(self._share), self._loop

            def leave(_: object) -> None:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(leaving.leave)

            qp._gone.add_done_callback(leave)
            parts.append(leaving)
        return parts
