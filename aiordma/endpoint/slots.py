"""Slots: the memory of a connection's messages and their queues; its own, or out of a pool.

Theory of operation
    By default a connection has receives for `recv_depth` messages and slots for `send_depth`, and
    the connections of a loop and device complete in common queues (`link.shared_queues`).  A
    thousand connections, mostly silent, then pin memory for all that each could have under way.

    With `shared_slots` they share a budget of slots (memory.budget), too.  Each begins with the few
    that it is guaranteed, gets more while its peer uses up credits, and gives some back to others.

    They share neither memory nor a protection domain: a receive that one connection was
    granted is posted to that connection's queue pair, so that no peer can use up another's, and no
    key opens another's memory.  A shared receive queue would do neither: a peer that sends beyond
    its credits takes the receives that others were promised, and on Soft-RoCE a queue pair that
    dies inside a message keeps a receive for ever.
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
    plan_of,
)
from aiordma.link.adapter_side import Closing
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

_STEPS = 16  # from the guaranteed slots to all


class _Leaving:
    """A connection that leaves its pool: over when others may have what it was guaranteed."""

    __slots__ = ("_over", "_share")

    def __init__(self, share: Share) -> None:
        self._share = share
        self._over = asyncio.Event()

    def leave(self) -> None:
        """The queue pair is gone."""
        self._share.leave()
        self._over.set()

    async def wait_closed(self) -> None:
        """Wait for it.  Without a bound of its own."""
        await self._over.wait()


class Slots:
    """The slots of one connection, and its completion queue; made by `open`.

    Attributes:
        recv: Where the peer's messages land.
        send: Where messages lie while they are sent.
        control: Where those without data lie; None for a raw connection.
        cq: Where all of it completes.
        own_cq: Whether nothing else does.
    """

    __slots__ = ("_loop", "_share", "_undo", "control", "cq", "own_cq", "recv", "send")

    _loop: asyncio.AbstractEventLoop  # of a member of a pool
    recv: Arena
    send: Arena
    control: Arena | None
    cq: CompletionQueue

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self.own_cq = True
        self._share: Share | None = None

    @classmethod
    def own(cls, pd: ProtectionDomain, channel: CompletionChannel, plan: Plan) -> Slots:
        """Slots of its own that are registered quickly.

        Raises:
            OSError: As `open`.
        """
        slots = cls()
        made = arenas(pd, *plan.shapes)
        slots.recv, slots.send = made[:2]
        slots.control = None if plan.config.raw else made[2]
        slots._undo.append(slots.recv.close)
        try:
            slots._complete(channel, plan)
        except BaseException:
            slots.abandon()
            raise
        return slots

    @classmethod
    async def open(
        cls, pd: ProtectionDomain, channel: CompletionChannel, config: ConnectionConfig
    ) -> Slots:
        """Allocate and register.

        Raises:
            OSError: Out of memory that may be pinned, or of adapter resources; ENOBUFS, the pool
                cannot guarantee what a connection needs.

        Cancellation: the resources are given back.
        """
        slots = cls()
        try:
            if config.shared_slots is None:
                await slots._register(pd, config)
            else:
                await slots._join(pd, config, config.shared_slots)
                (slots.control,) = arenas(pd, (CONTROL_SLOTS, CONTROL_SIZE))
                slots._undo.append(slots.control.close)
            slots._complete(channel, plan_of(config))
        except BaseException:
            slots.abandon()
            raise
        return slots

    async def _register(self, pd: ProtectionDomain, config: ConnectionConfig) -> None:
        """Slots of its own, all in one registration, off the loop because that takes long."""
        shapes = plan_of(config).shapes
        made = await call_blocking(lambda: arenas(pd, *shapes), undo=lambda m: m[0].close())
        self._undo.append(made[0].close)
        self.recv, self.send = made[:2]
        self.control = None if config.raw else made[2]

    async def _join(self, pd: ProtectionDomain, config: ConnectionConfig, total: int) -> None:
        """Become a member of the pool, with the slots that are guaranteed."""
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

    def _complete(self, channel: CompletionChannel, plan: Plan) -> None:
        config = plan.config
        if not (config.shared_queues or config.shared_slots):
            self.cq = CompletionQueue(channel.context, plan.completions, channel)
            self._undo.append(self.cq.close)
        else:
            # Only messages ask for attention, and not those of foreign peers, nor on iWARP.
            quiet = not (config.raw or channel.context.is_iwarp)
            queues, release = SharedQueues.of(channel, quiet=quiet)
            self._undo.append(release)
            self.own_cq = False
            self.cq = queues.take(plan.completions)

    @property
    def regions(self) -> list[MemoryRegion]:
        """All memory that is registered now."""
        if self._share is None:
            return self.recv.regions
        assert self.control is not None
        return [*self.recv.regions, *self.send.regions, *self.control.regions]

    def pin_with(self, keeper: Keeper) -> None:
        """Have `keeper` keep memory that comes later as long as the queue pair may use it."""
        for arena in (self.recv, self.send):
            if isinstance(arena, ElasticArena):
                arena.keeper = keeper

    def _give_up(self) -> None:
        while self._undo:
            self._undo.pop()()

    def abandon(self) -> None:
        """Give everything back; there never was a queue pair."""
        self._give_up()
        if self._share is not None:
            self._share.leave()

    def close(self, qp: QueuePair) -> list[Closing]:
        """Give everything back once the queue pair is gone; return the objects to wait for."""
        parts: list[Closing] = [*self.regions, *([self.cq] if self.own_cq else [])]
        self._give_up()
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
