"""The slots of a connection: registered memory for short messages, and its completion queue.

Theory of operation
    A connection begins with few slots: receive slots for three messages, for frames without data
    and for one answer to a large message, and one slot to send from.  It gets more in steps, up to
    `recv_depth` and `send_depth`: receive slots when the peer has used up its credits, send slots
    when all of them are in use.  So a connection is made quickly, and a thousand connections that
    are mostly idle pin little memory.  A raw connection, whose peer knows no credits, has all of
    its slots from the beginning.  So has a connection whose slots take little memory anyway.

    Each step needs a lease of the governor (memory.governor).  With `shared_slots` the lease counts
    slots of the pool, and the first slots of each connection come from the pool, too.  Otherwise it
    counts bytes, against what the connections of the loop may pin for further slots.

    Connections share neither memory nor a protection domain, and each has a receive queue of its
    own.  So no peer can use up the receives of another, and no key gives access to the memory of
    another connection.  A shared receive queue could not ensure this: a peer that sends beyond its
    credits would take receives that were granted to others, and on Soft-RoCE a queue pair that dies
    in the middle of a message never returns its receive.

    By default all connections of a loop and device share completion queues (`link.shared_queues`).
    Everything that connections share is in one object, `Common`, so that a connection acquires and
    releases one reference instead of several.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from aiordma.endpoint.config import Plan, hello_of
from aiordma.link.adapter_side import Closing
from aiordma.link.completions import Completions
from aiordma.link.keepalive import Wheel, wheel_of
from aiordma.link.shared_queues import SharedQueues
from aiordma.loop import registry
from aiordma.loop.workers import call_blocking
from aiordma.memory.arena import NO_BYTES, Arena, Keeper, Place
from aiordma.memory.governor import FIRST, GROWTH, Growth, Member, growth_of_loop
from aiordma.verbs.comp_channel import CompletionChannel, shared_completions
from aiordma.verbs.context import Context
from aiordma.verbs.cq import CompletionQueue
from aiordma.verbs.mr import MemoryRegion
from aiordma.verbs.pd import ProtectionDomain
from aiordma.verbs.qp import QPInitAttr

__all__ = ["Common", "Slots"]


# Messages of up to so many bytes go inside the work request, and the adapter need not fetch them.
# Every entry of the send queue becomes larger by this.
_INLINE = 128


class Common:
    """What all connections of a loop with the same device and the same plan have in common.

    It is made with the first of these connections and closed with the last.  Values that follow
    from the configuration and the device are computed here, once for all connections.

    Args:
        context: The device.
        plan: The values that follow from the configuration.

    Raises:
        OSError: The limit of open files is reached.

    Attributes:
        plan: As the argument.
        bare: Whether the adapter has SEND with immediate, so that the immediate can be the header.
        checks: Whether this side asks its peer for checksums of large messages.
        state: The sizes of each connection's `MessageState`, in its order: names take C as long as
            all the rest of making it.
        attributes: The attributes of the queue pairs, with room for inline messages if possible.
        without_inline: The same attributes without that room.
        channel: The completion channel.
        quiet: Whether completion queues are armed for solicited completions only.
        expected: The completions to make room for when a connection is made; None for all that it
            can ever have.
        queues: The shared completion queues; None if each connection has a queue of its own.
        budget: What the leases of further slots are taken from; None if there are none.
        wheel: The checks of the keepalive; None if there is no keepalive.
    """

    __slots__ = (
        "_greeting", "_releases", "attributes", "bare", "budget", "channel", "checks",
        "expected", "plan", "queues", "quiet", "state", "wheel", "without_inline",
    )  # fmt: skip

    channel: CompletionChannel

    def __init__(self, context: Context, plan: Plan) -> None:
        config = plan.config
        self.plan: Plan = plan  # its id() is part of the key in `of`, and must not be reused
        self.bare: bool = not context.is_iwarp
        asks = config.check_large
        self.checks: bool = context.is_software if asks is None else asks
        grows = plan.grows and config.shared_slots is None
        self.state: tuple[int, ...] = tuple(plan.state(grows=grows).values())
        self._greeting: bytes | None = None
        # Messages of a raw peer are not solicited, and software iWARP raises no solicited event.
        self.quiet: bool = not (config.raw or context.is_iwarp)
        # Software iWARP cannot resize a completion queue, so it has its full size at once.
        self.expected: int | None = None if context.is_iwarp else plan.expected
        self.without_inline: QPInitAttr = plan.attributes(0)
        self.attributes: QPInitAttr = plan.attributes(0 if context.is_iwarp else _INLINE)
        self.queues: SharedQueues | None = None
        self.budget: Growth | None = None
        self.wheel: Wheel | None = None
        self.channel, release = shared_completions(context)
        self._releases: list[Callable[[], None]] = [release]
        if config.shared_queues or config.shared_slots is not None:
            self.queues, release = SharedQueues.of(self.channel, quiet=self.quiet)
            self._releases.append(release)
        total = config.shared_slots
        if total is not None:
            # As with `growth_of_loop`, slots of connections that are closed may still be pinned.
            key, loop = ("slots", context.name, total, config.slot_size), asyncio.get_running_loop()
            self.budget = registry.lasting(key, lambda: Growth(total), loop)
        elif plan.grows:
            self.budget = growth_of_loop()
        if (interval := plan.silence[0]) is not None:
            self.wheel, release = wheel_of(interval)
            self._releases.append(release)

    def hello(self, private_data: bytes, room: int) -> bytes:
        """The private data that a connection sends with the handshake.

        Args:
            private_data: The private data of the program, which become part of it.
            room: The largest number of bytes that the connection manager takes.
        """
        if not private_data and self._greeting is not None:
            return self._greeting
        plan = self.plan
        hello = hello_of(
            plan.config, private_data, plan.window, check=self.checks, bare=self.bare
        ).pack(room)
        if not private_data:
            self._greeting = hello
        return hello

    @classmethod
    def of(cls, context: Context, plan: Plan) -> tuple[Common, Callable[[], None]]:
        """Acquire the object of the running loop; return it, and a function that releases it.

        Args:
            context: The device.
            plan: The values that follow from the configuration.

        Raises:
            OSError: The limit of open files is reached.
        """
        return registry.acquire(("common", id(context), id(plan)), lambda: cls(context, plan))

    def close(self) -> None:
        """Release everything, because the last connection is gone."""
        while self._releases:
            self._releases.pop()()


class HasBuffers(Protocol):
    """What the slots need to know of the `Link`."""

    @property
    def buffers(self) -> Keeper:
        """What keeps further slots registered as long as the queue pair may use them."""


class Slots:
    """The slots of one connection, and its completion queue; made by `open`.

    The first slots are in the memory region `first`, and C addresses them directly (`places`).
    Most connections never need more, so the arenas, which manage further slots, are made when the
    first of these are needed.

    Attributes:
        first: The memory of the first slots.
        completions: The entry in the completion channel through which all requests complete.
        crowded: The address of a byte that is set while another connection of the pool waits for
            slots; 0 if there are no further slots.
        link: Its buffers keep further slots registered while the queue pair lives.
    """

    __slots__ = (
        "_budget", "_closed", "_member", "_own_cq", "_plan", "_recv", "_send", "completions",
        "crowded", "first", "link",
    )  # fmt: skip

    _member: Member | None  # takes leases of the budget
    _own_cq: CompletionQueue | None
    _recv: Arena | None
    _send: Arena | None
    link: HasBuffers | None
    completions: Completions

    def __init__(self, first: MemoryRegion, common: Common, plan: Plan) -> None:
        self.first: MemoryRegion = first
        self._plan = plan
        self._closed = False
        self._member = self._own_cq = self._recv = self._send = self.link = None
        budget = self._budget = common.budget
        self.crowded: int = 0 if budget is None else budget.crowded
        if budget is not None and plan.guaranteed:
            self._member = Member(budget, plan.guaranteed)
            self._member.lease(GROWTH, plan.guaranteed)
        try:
            if common.queues is not None:
                cq = common.queues.take(plan.completions, common.expected)
            else:
                channel = common.channel
                cq = self._own_cq = CompletionQueue(channel.context, plan.completions, channel)
        except BaseException:
            self._release_leases()
            raise
        unused = self._own_cq is not None
        self.completions = Completions(common.channel, cq, quiet=common.quiet, unused=unused)

    def _release_leases(self) -> None:
        """Release the leases; the first slots have none of their own, and count for the reserve."""
        if self._member is not None:
            self.first._when_gone(self._member.close)

    def _make_arena(self, place: Place, most: int) -> Arena:
        budget, plan = self._budget, self._plan
        if budget is not None and self._member is None:  # without a guarantee, made on first use
            self._member = Member(budget, 0)
            if self._closed:
                self._release_leases()
        arena = Arena(self.first, place, most, plan.step, self._member, plan.unit)
        if self.link is not None:
            arena.keeper = self.link.buffers
        if self._closed:
            arena.close()
        return arena

    @property
    def recv(self) -> Arena:
        """The receive slots.  To be used in the loop's thread only."""
        if self._recv is None:
            self._recv = self._make_arena(self._plan.places[0], self._plan.config.receives)
        return self._recv

    @property
    def send(self) -> Arena:
        """The send slots.  To be used in the loop's thread only."""
        if self._send is None:
            self._send = self._make_arena(self._plan.places[1], self._plan.config.send_depth)
        return self._send

    @property
    def counts(self) -> tuple[int, int]:
        """The numbers of receive slots and of send slots.  May be read in any thread."""
        recv, send, places = self._recv, self._send, self._plan.places
        received = places[0][1] if recv is None else recv.count
        return received, places[1][1] if send is None else send.count

    @property
    def places(self) -> list[tuple[int, int, int, int]]:
        """Where the first receive slots, send slots, and slots for frames without data are.

        Each entry is the address of the first slot, the size of a slot in bytes, the local key, and
        the number of slots.  A raw connection has no slots for frames without data.
        """
        addr, lkey = self.first.addr, self.first.lkey
        return [(addr + start, size, lkey, count) for start, count, size in self._plan.places]

    @property
    def received(self) -> Any:
        """All bytes of the first receive slots, an object with the buffer protocol."""
        _, count, size = self._plan.places[0]  # the memory begins with them
        return self.first._front(count * size)

    @classmethod
    async def open(cls, pd: ProtectionDomain, common: Common, plan: Plan) -> Slots:
        """Allocate the first slots and register them, all at once; in a thread if they are many.

        Raises:
            OSError: No more memory may be pinned, or the adapter has no more resources.  ENOBUFS:
                the pool cannot guarantee the slots that a connection needs at least.

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
        FIRST.count(first)
        return slots

    @property
    def more_received(self) -> memoryview:
        """All bytes of the receive slots that were added since."""
        return NO_BYTES if self._recv is None else self._recv.more

    @property
    def regions(self) -> list[MemoryRegion]:
        """All memory regions that are registered now."""
        arenas = (self._recv, self._send)
        return [self.first, *(step for arena in arenas if arena for step in arena.steps)]

    @property
    def pinned_bytes(self) -> int:
        """The bytes that are pinned by `regions`.  May be read in any thread."""
        return sum(region.length for region in self.regions)

    def close(self) -> list[Closing]:
        """Free everything as soon as the queue pair is gone; return the objects to wait for."""
        parts: list[Closing] = [*self.regions]
        if self._own_cq is not None:
            parts.append(self._own_cq)
        self._closed = True
        self.link = None
        if self._own_cq is not None:
            self._own_cq.close()
        for arena in (self._recv, self._send):
            if arena is not None:
                arena.close()
        self.first.close()
        self._release_leases()
        return parts
