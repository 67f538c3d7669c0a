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
from typing import Protocol

from aiordma.endpoint.config import Plan, hello_of
from aiordma.link.adapter_side import Closing
from aiordma.link.completions import Completions
from aiordma.link.keepalive import Wheel, loop_id, wheel_of
from aiordma.link.shared_queues import SharedQueues
from aiordma.loop import registry
from aiordma.loop.workers import call_blocking
from aiordma.memory.arena import Arena, Place
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

    The values that follow from configuration, device and loop are found here, once for all.

    Args:
        context: The device.
        plan: Values of the configuration.

    Raises:
        OSError: The limit of open files is reached.

    Attributes:
        plan: Values of the configuration.
        bare: Whether the adapter has immediates.
        checks: Whether this side asks for checksums of large messages.
        state: Arguments of the connections' `MessageState`.
        attributes: Of the queue pairs, with room for inline messages where the adapter has it.
        without_inline: The same without that room.
        channel: Completion channel.
        quiet: Whether completion queues are armed for solicited completions only.
        expected: Completions that a connection expects with its first slots; None for all.
        queues: Completion queues; None if each connection has a queue of its own.
        budget: Slots, or their bytes, that come with traffic; None if no slots come.
        wheel: Where the connections stand to be asked for signs of life; None: they are not.
    """

    __slots__ = (
        "_greeting", "_loop_id", "_releases", "attributes", "bare", "budget", "channel", "checks",
        "expected", "plan", "queues", "quiet", "state", "wheel", "without_inline",
    )  # fmt: skip

    channel: CompletionChannel

    def __init__(self, context: Context, plan: Plan) -> None:
        config = plan.config
        loop = asyncio.get_running_loop()
        self.plan: Plan = plan  # keeps its identity, which is a part of the key
        self.bare: bool = not context.is_iwarp
        asks = config.check_large
        self.checks: bool = context.is_software if asks is None else asks
        grows = plan.grows and config.shared_slots is None
        self.state: dict[str, int | bool] = plan.state(grows=grows)
        self._loop_id = loop_id(loop)
        self._greeting: bytes | None = None
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
        self.wheel: Wheel | None = None
        if (interval := plan.silence[0]) is not None:
            self.wheel, release = wheel_of(loop, interval)
            self._releases.append(release)

    def hello(self, private_data: bytes, room: int) -> bytes:
        """A connection's half of the handshake, as private data of at most `room` bytes.

        Args:
            private_data: The program's.
            room: Bytes.
        """
        if not private_data and self._greeting is not None:
            return self._greeting
        plan = self.plan
        hello = hello_of(
            plan.config, private_data, plan.window, check=self.checks, bare=self.bare,
            loop_id=self._loop_id,
        ).pack(room)  # fmt: skip
        if not private_data:
            self._greeting = hello
        return hello

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


class Buffered(Protocol):
    """The adapter's side of a connection, as its slots see it."""

    @property
    def buffers(self) -> Keeper:
        """The keeper of further slots."""


class Slots:
    """The slots of one connection, and its completion queue; made by `open`.

    The first slots are bytes of `first`, and C knows where they are (`places`).  The arenas, which
    get further slots, are made when some are wanted: most connections never want any.

    Attributes:
        first: Memory of the first slots.
        completions: How all requests complete.
        crowded: Address of a byte that is not 0 while a connection of the pool waits for slots; 0
            without further slots.
    """

    __slots__ = (
        "_budget", "_closed", "_own_cq", "_plan", "_recv", "_send", "_share", "_side",
        "completions", "crowded", "first",
    )  # fmt: skip

    _own_cq: CompletionQueue | None
    _recv: Arena | None
    _send: Arena | None
    _share: Share | None  # of the budget
    _side: Buffered | None
    completions: Completions

    def __init__(self, first: MemoryRegion, common: Common, plan: Plan) -> None:
        self.first: MemoryRegion = first
        self._plan = plan
        self._closed = False
        self._own_cq = self._recv = self._send = self._share = self._side = None
        budget = self._budget = common.budget
        self.crowded: int = 0 if budget is None else budget.crowded
        if budget is not None and plan.guaranteed:
            self._share = budget.join(plan.guaranteed)
            self._share.take(plan.guaranteed)
        try:
            if common.queues is not None:
                cq = common.queues.take(plan.completions, common.expected)
            else:
                channel = common.channel
                cq = self._own_cq = CompletionQueue(channel.context, plan.completions, channel)
        except BaseException:
            self._leave()
            raise
        unused = self._own_cq is not None
        self.completions = Completions(common.channel, cq, quiet=common.quiet, unused=unused)

    def _leave(self) -> None:
        if self._share is not None:
            self._share.leave()

    def _arena(self, place: Place, most: int) -> Arena:
        budget, plan = self._budget, self._plan
        if budget is None:
            return Arena(self.first, place)
        if self._share is None:  # it is guaranteed nothing
            self._share = budget.join(0)
            if self._closed:
                self._leave()
        arena = ElasticArena(self.first, place, most, plan.step, self._share, plan.unit)
        if self._side is not None:
            arena.keeper = self._side.buffers
        if self._closed:
            arena.close()
        return arena

    @property
    def recv(self) -> Arena:
        """The slots for messages of the peer.  In the loop's thread."""
        if self._recv is None:
            self._recv = self._arena(self._plan.places[0], self._plan.config.receives)
        return self._recv

    @property
    def send(self) -> Arena:
        """The slots for messages to the peer.  In the loop's thread."""
        if self._send is None:
            self._send = self._arena(self._plan.places[1], self._plan.config.send_depth)
        return self._send

    @property
    def counts(self) -> tuple[int, int]:
        """The numbers of slots for messages of the peer, and to the peer; in any thread."""
        recv, send, places = self._recv, self._send, self._plan.places
        received = places[0][1] if recv is None else recv.count
        return received, places[1][1] if send is None else send.count

    @property
    def places(self) -> tuple[tuple[int, int, int, int], ...]:
        """Where the first slots are: to receive, to send, and to send messages without data.

        Each is the address of the first slot, the bytes of a slot, the local key, and their number.
        A raw connection has no slots for messages without data.
        """
        addr, lkey = self.first.addr, self.first.lkey
        return tuple(
            [(addr + start, size, lkey, count) for start, count, size in self._plan.places]
        )

    @property
    def received(self) -> memoryview:
        """All bytes of the first slots for messages of the peer."""
        start, count, size = self._plan.places[0]
        return self.first.view[start : start + count * size]

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
    def more_received(self) -> memoryview:
        """All bytes of the slots for messages of the peer that have come since."""
        return Arena.more if self._recv is None else self._recv.more

    @property
    def regions(self) -> list[MemoryRegion]:
        """All memory that is registered now."""
        arenas = (self._recv, self._send)
        return [self.first, *(step for arena in arenas if arena for step in arena.steps)]

    @property
    def pinned_bytes(self) -> int:
        """Bytes of `regions`; in any thread."""
        return sum(region.length for region in self.regions)

    def serve_with(self, side: Buffered) -> None:
        """Have the buffers of `side` serve later slots as long as the queue pair may use them."""
        self._side = side

    def _free(self) -> None:
        self._closed = True
        self._side = None
        if self._own_cq is not None:
            self._own_cq.close()
        for arena in (self._recv, self._send):
            if arena is not None:
                arena.close()
        self.first.close()
        FIRST.count(-self.first.length)

    def abandon(self) -> None:
        """Free everything; there never was a queue pair."""
        self._free()
        self._leave()

    def close(self, qp: QueuePair) -> list[Closing]:
        """Free everything once the queue pair is gone; return the objects to wait for."""
        parts: list[Closing] = [*self.regions]
        if self._own_cq is not None:
            parts.append(self._own_cq)
        self._free()
        if self._share is None or not self._share.used:
            self._leave()
        else:
            # Not before the queue pair is gone: until then the memory is pinned.
            leaving, loop = _Leaving(self._share), self._share.loop

            def leave(_: object) -> None:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(leaving.leave)

            qp._gone.add_done_callback(leave)
            parts.append(leaving)
        return parts
