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
    (`link.shared_queues`).  `Common` holds all that they share: a connection is a user of it,
    instead of a user of each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiordma.endpoint.config import Plan
from aiordma.link.adapter_side import Closing
from aiordma.link.completions import Completions
from aiordma.link.shared_queues import SharedQueues
from aiordma.loop import registry
from aiordma.loop.workers import call_blocking
from aiordma.memory.arena import Arena
from aiordma.memory.budget import Share, SlotBudget, step_budget
from aiordma.memory.elastic import ElasticArena, Keeper
from aiordma.memory.memlock import FIRST
from aiordma.verbs.comp_channel import CompletionChannel, shared_completions
from aiordma.verbs.context import Context
from aiordma.verbs.cq import CompletionQueue
from aiordma.verbs.mr import MemoryRegion
from aiordma.verbs.pd import ProtectionDomain
from aiordma.verbs.qp import QPInitAttr, QueuePair

__all__ = ["Common", "Slots"]


# Bytes of a short message that the adapter need not fetch; each send request is longer by them.
_INLINE = 128


class Common:
    """The common objects of the connections with one plan; closed with the last connection.

    Args:
        context: The device.
        plan: Values of the configuration.

    Raises:
        OSError: The limit of open files is reached.

    Attributes:
        attributes: Of the queue pairs, with room for inline messages where the adapter has it.
        without_inline: The same without that room.
        channel: Completion channel.
        quiet: Whether completion queues are armed for solicited completions only.
        expected: Completions that a connection expects with its first slots; None for all.
        queues: Completion queues; None if each connection has a queue of its own.
        budget: Slots, or their bytes, that come with traffic; None if no slots come.
    """

    __slots__ = (
        "_plan", "_releases", "attributes", "budget", "channel", "expected", "queues", "quiet",
        "without_inline",
    )  # fmt: skip

    channel: CompletionChannel

    def __init__(self, context: Context, plan: Plan) -> None:
        config = plan.config
        self._plan = plan  # keeps its identity, which is a part of the key
        # Messages of a raw peer, and those on iWARP, raise no solicited event.
        self.quiet: bool = not (config.raw or context.is_iwarp)
        # Software iWARP cannot grow a queue: there is room for all completions from the beginning.
        self.expected: int | None = None if context.is_iwarp else plan.expected
        self.without_inline: QPInitAttr = plan.attributes(0)
        self.attributes: QPInitAttr = plan.attributes(0 if context.is_iwarp else _INLINE)
        self.queues: SharedQueues | None = None
        self.budget: SlotBudget | None = None
        self.channel, release = shared_completions(context)
        self._releases: list[Callable[[], None]] = [release]
        if config.shared_queues or config.shared_slots is not None:
            self.queues, release = SharedQueues.of(self.channel, quiet=self.quiet)
            self._releases.append(release)
        total = config.shared_slots
        if total is not None:
            key = ("slots", id(context), total, config.slot_size)
            self.budget, release = registry.acquire(key, lambda: SlotBudget(total))
            self._releases.append(release)
        elif plan.grows:
            self.budget, release = step_budget()
            self._releases.append(release)

    @classmethod
    def of(cls, context: Context, plan: Plan) -> tuple[Common, Callable[[], None]]:
        """Return the common objects of the running loop, and their release.

        Args:
            context: The device.
            plan: Values of the configuration.

        Raises:
            OSError: The limit of open files is reached.
        """
        return registry.acquire(("common", id(context), id(plan)), lambda: cls(context, plan))

    def close(self) -> None:
        """Release all: the last connection has gone."""
        while self._releases:
            self._releases.pop()()


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
        first: Memory of the first slots.
        recv: For messages of the peer.
        send: For messages to the peer.
        control: For messages to the peer without data; None for a raw connection.
        completions: How all requests complete.
    """

    __slots__ = (
        "_loop", "_own_cq", "_share", "completions", "control", "first", "recv", "send",
    )  # fmt: skip

    _loop: asyncio.AbstractEventLoop  # of a member of a budget
    completions: Completions

    recv: Arena
    send: Arena

    def __init__(self, first: MemoryRegion, common: Common, plan: Plan) -> None:
        self.first: MemoryRegion = first
        recv, send, *control = plan.places
        self.control: Arena | None = Arena(first, control[0]) if control else None
        self._own_cq: CompletionQueue | None = None
        self._share: Share | None = None
        if common.budget is None:
            self.recv, self.send = Arena(first, recv), Arena(first, send)
            self._set_completions(common, plan)
            return
        # Further slots come out of the budget.
        self._loop = asyncio.get_running_loop()
        share = self._share = common.budget.join(plan.guaranteed)
        try:
            if plan.guaranteed:
                share.take(plan.guaranteed)
            config, step, unit = plan.config, plan.step, plan.unit
            self.recv = ElasticArena(first, recv, config.receives, step, share, unit)
            self.send = ElasticArena(first, send, config.send_depth, step, share, unit)
            self._set_completions(common, plan)
        except BaseException:
            share.leave()
            raise

    def _set_completions(self, common: Common, plan: Plan) -> None:
        if common.queues is not None:
            cq = common.queues.take(plan.completions, common.expected)
        else:
            channel = common.channel
            cq = self._own_cq = CompletionQueue(channel.context, plan.completions, channel)
        unused = self._own_cq is not None
        self.completions = Completions(common.channel, cq, quiet=common.quiet, unused=unused)

    @classmethod
    async def open(cls, pd: ProtectionDomain, common: Common, plan: Plan) -> Slots:
        """Allocate and register the first slots, in one registration; in a thread if it takes long.

        Raises:
            OSError: Out of memory that may be pinned, or of adapter resources; ENOBUFS, the pool
                cannot guarantee the slots that a connection needs.

        Cancellation: the resources are freed.
        """
        if plan.quick:
            first = MemoryRegion.slab(pd, plan.first_bytes)
        else:
            first = await call_blocking(
                lambda: MemoryRegion.slab(pd, plan.first_bytes), undo=MemoryRegion.close
            )
        try:
            slots = cls(first, common, plan)
        except BaseException:
            first.close()
            raise
        FIRST.count(first.length)
        return slots

    @property
    def regions(self) -> list[MemoryRegion]:
        """All memory that is registered now."""
        return [self.first, *self.recv.steps, *self.send.steps]

    @property
    def pinned_bytes(self) -> int:
        """Bytes of `regions`; in any thread."""
        return sum(region.length for region in self.regions)

    def serve_with(self, keeper: Keeper) -> None:
        """Have `keeper` serve later slots as long as the queue pair may use them."""
        for arena in (self.recv, self.send):
            if isinstance(arena, ElasticArena):
                arena.keeper = keeper

    def _free(self) -> None:
        if self._own_cq is not None:
            self._own_cq.close()
        self.send.close()
        self.recv.close()
        self.first.close()
        FIRST.count(-self.first.length)

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
