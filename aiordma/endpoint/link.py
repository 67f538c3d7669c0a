"""Link: the adapter's side of a connection: queue pair, completion queue, slots, and their end.

Theory of operation
    The sub-index of a wr_id names the request: 0x8000 + n is receive slot n, 0x5000 + n is
    operation n of the program, 0x4000 + n is RDMA read n of a large message, and n alone send slot
    n.  C takes the completions of the frequent cases (`MessageState`).  The link takes the others,
    calls its owner for them, and reports a failure once; see `link.adapter_side`.

    Slots lie in arenas that outlive the queue pair by construction (Resource).  `endpoint.slots`
    decides whether slots and completion queue are shared; `link.buffers` has the memory of large
    messages.  `Landings` is the memory that the peer writes messages to (`endpoint.large`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from aiordma._core import (
    SUB_OPERATE,
    SUB_READ,
    SUB_RECV,
    SUB_SHIFT,
    Loan,
    Message,
    MessageState,
)
from aiordma._ffi import ffi
from aiordma.cm.connection_id import ConnectionId
from aiordma.endpoint.config import (
    COPIED_BYTES,
    LANDING_SIZES,
    ConnectionConfig,
    Plan,
    plan_of,
)
from aiordma.endpoint.outcome import closed_error
from aiordma.endpoint.slots import Common, Slots
from aiordma.endpoint.wire import Hello
from aiordma.errors import os_error
from aiordma.link.adapter_side import AdapterSide, Closing, Owner
from aiordma.link.buffers import Buffers
from aiordma.logs import Log, log_of
from aiordma.loop.workers import call_blocking
from aiordma.memory.byte_budget import AHEAD, PROCESS_BUDGET, ByteBudget
from aiordma.memory.elastic import ElasticArena
from aiordma.memory.large_memory import DEREGISTER_S
from aiordma.memory.shared import Memory, Sharer
from aiordma.verbs.enums import Access, QPAttrMask, SendFlags
from aiordma.verbs.mr import INLINE_BYTES, MemoryRegion
from aiordma.verbs.pd import ProtectionDomain
from aiordma.verbs.qp import QueuePair
from aiordma.verbs.wc import WCRecord

__all__ = ["Landings", "Link", "lent", "memory_log"]

#: Of memory that comes with traffic.
memory_log: Log = log_of("memory")

_SIGNALED = int(SendFlags.SIGNALED)
_SOLICITED = int(SendFlags.SOLICITED)
#: Messages that a raw connection may send.
_UNLIMITED = 1 << 60
_LANDS = Access.LOCAL_WRITE | Access.REMOTE_WRITE


def lent(view: memoryview) -> memoryview | Loan:
    """The object that keeps the bytes of `view` while the adapter reads them, after a send, too.

    A message lends its bytes: the program can release the message, and the memory is free when the
    last loan has ended.
    """
    owner = view.obj
    if isinstance(owner, Message) and not owner._released:
        return owner._lend(view)
    return view


def _create_qp(
    cm_id: ConnectionId, pd: ProtectionDomain, slots: Slots, common: Common
) -> QueuePair:
    """The queue pair, with room for inline messages where the adapter has it."""
    memory, cq = (slots.first,), slots.completions.cq
    try:
        return cm_id.create_qp(pd, common.attributes, memory, cq, common.expected)
    except OSError:
        if not common.attributes.max_inline_data:
            raise
    # An adapter does not say how much it takes, and refuses a larger value.
    qp = cm_id.create_qp(pd, common.without_inline, memory, cq, common.expected)
    common.attributes = common.without_inline
    return qp


class LinkOwner(Owner, Sharer, Protocol):
    """A connection, as its link sees it."""

    def _on_sent(self, slot: int) -> None:
        """The adapter is done with a send slot that C has left to Python."""

    def _on_ended(self, number: int, record: WCRecord) -> None:
        """An operation of the program has failed, or completed behind a failure."""

    def _on_unexplained(self) -> None:
        """The posted requests are flushed, and the reason is not known yet; called once."""

    def _last_word(self, cause: BaseException) -> bool:
        """Post ABORT to the peer, for a failure that this side has found; whether it was posted.

        Called once.
        """


class Link(AdapterSide):
    """The queue pair of one connection of messages and its resources.

    Made by `open`; `start` begins to receive.

    Attributes:
        common: The objects that it shares with the other connections of its configuration.
        state: Messages, credits and operations.
        slots: Memory of short messages, of the peer and to the peer.
        shared: The memory in whose protection domain it is; None: the domain is its own.
        budget: Counts large messages; a listener sets its own before they can come.
    """

    __slots__ = ("_buffers", "budget", "common", "shared", "slots", "state")

    _owner: LinkOwner | None

    posted: int

    def __init__(
        self,
        cm_id: ConnectionId,
        common: Common,
        pd: ProtectionDomain,
        slots: Slots,
        qp: QueuePair,
        memory: Memory | None,
    ) -> None:
        super().__init__(cm_id, pd.context, slots.completions, pd, qp)
        qp._posted_in_c = True
        self.common: Common = common
        self.slots: Slots = slots
        self.shared: Memory | None = memory
        self.budget: ByteBudget = PROCESS_BUDGET
        self.state: MessageState = MessageState(self.loop, **common.state)  # type: ignore[arg-type]
        config = self.plan.config
        if config.wait != "event" and (spins := self.completions.spins(config, 2)):
            self.state.spin_with(*spins)
        self._buffers: Buffers | None = None  # made for the first large message, or right
        slots.serve_with(self)

    @classmethod
    async def open(
        cls, cm_id: ConnectionId, config: ConnectionConfig, memory: Memory | None = None
    ) -> Link:
        """Allocate everything on the device of `cm_id`.

        Args:
            cm_id: The connection id.
            config: Numbers.
            memory: To be in its protection domain; None for a domain of its own.

        Raises:
            RuntimeError, ResourceClosedError: The memory is not open.
            OSError: Out of memory that may be pinned, descriptors or adapter resources.

        Cancellation: the resources are destroyed.
        """
        context = cm_id.context
        assert context is not None
        plan = plan_of(config)
        common, release = Common.of(context, plan)
        pd: ProtectionDomain | None = None
        slots: Slots | None = None
        try:
            pd = ProtectionDomain(context) if memory is None else memory._domain(context)
            slots = await Slots.open(pd, common, plan)
            cm_id.policy = plan.policy
            qp = _create_qp(cm_id, pd, slots, common)
        except BaseException:
            if slots is not None:
                slots.abandon()
            if pd is not None and memory is None:
                pd.close()
            release()
            raise
        link = cls(cm_id, common, pd, slots, qp, memory)
        link.at_close(release)
        return link

    @property
    def plan(self) -> Plan:
        """Values of its configuration."""
        return self.common.plan

    @property
    def buffers(self) -> Buffers:
        """The memory beside the first slots.  In the loop's thread."""
        if self._buffers is None:
            config = self.plan.config
            window = config.rendezvous_window * COPIED_BYTES
            self._buffers = Buffers(
                self.cm_id, self.pd, config.receive_buffer_size, window, self.budget
            )
            if self.closed:
                self._buffers.close(self.qp)
        return self._buffers

    @property
    def own_pd(self) -> bool:
        """Whether the protection domain ends with the connection."""
        return self.shared is None

    def agree(self, theirs: Hello | None) -> None:
        """Fit the state to the peer's half of the handshake: messages may be sent from now on.

        Args:
            theirs: That half; None of a raw connection.
        """
        state = self.state
        if theirs is None:
            state.credits = _UNLIMITED
            state.eager_size = self.plan.config.slot_size
            return
        terms = self.plan.terms(theirs, bare=self.common.bare)
        state.eager_size, state.bare_size, state.fragmented_size, state.written_size, landed = terms
        if self.own_pd:  # else the peers of others could write where messages land
            state.landed_size = landed
        state.numbered = theirs.numbers_messages
        state.credits += theirs.recv_depth

    def start(self, owner: LinkOwner) -> None:
        """Begin to take completions, call `owner` for them, and post all receives.

        Raises:
            OSError: The queue cannot be armed, or the adapter takes no receives.
        """
        self._owner = owner
        if (memory := self.shared) is not None:
            memory._join(owner)
        self._begin()
        receives = self._bind()
        self.completions.let_c_take(self.state, self.state)
        if code := self.state.post_receives(receives):
            raise os_error(code, "ibv_post_recv")

    def _bind(self) -> int:
        """Tell C where queue pair and slots are; return the number of receives."""
        recv, send, *control = self.slots.places
        self.state.bind(
            int(ffi.cast("uintptr_t", self._qp_handle)),
            self.completions.id,
            _SIGNALED | _SOLICITED if control else _SIGNALED,
            self.qp.limits.max_inline_data,
            send,
            recv,
            control[0][:3] if control else (0, 0, 0),
            self.slots.crowded,
            self.slots,
        )
        if self.slots.crowded and recv[3] >= self.plan.config.receives:
            self.fit()
        return recv[3]

    # Completions

    def __call__(self, record: WCRecord) -> None:
        """Take a completion that C leaves to Python."""
        sub = (record[0] >> SUB_SHIFT) & 0xFFFF
        owner = self._owner
        if sub & SUB_RECV:
            self.state.receives -= 1
        elif sub >= SUB_OPERATE:
            if owner is not None:
                owner._on_ended(sub - SUB_OPERATE, record)
        elif sub & SUB_READ:
            self.posted -= 1
            self.completions.unlisten()
        elif record[1]:
            self.state.flushed += 1
        elif owner is None:
            self.state.completed += 1
        else:
            owner._on_sent(sub)
        if record[1]:
            self._failed(record)
        self.came_back()

    def take_reads(self) -> list[int]:
        """The numbers of READs of large messages that have completed, as C has taken them."""
        numbers = self.state.take_reads()
        self.posted -= len(numbers)
        for _ in numbers:
            self.completions.unlisten()
        return numbers

    @property
    def under_way(self) -> int:
        """Work requests that have not completed."""
        return self.posted + self.state.under_way

    def _last_word(self, cause: BaseException) -> bool:
        return self._owner is not None and self._owner._last_word(cause)

    def _unexplained_end(self) -> None:
        if self._owner is not None:
            self._owner._on_unexplained()

    def _operation(self, sub: int) -> str:
        if sub & SUB_RECV:
            return "receive"
        if sub >= SUB_OPERATE:
            return "one-sided operation"
        return "RDMA read" if sub & SUB_READ else "send"

    # Posting

    def check(self, code: int) -> None:
        """End the connection if `code`, the result of a post in C, is not 0."""
        if code:
            receives = self.state.recv_failed
            self.fail(os_error(code, "ibv_post_recv" if receives else "ibv_post_send"))

    def post_read(
        self, number: int, region: MemoryRegion, offset: int, length: int, remote: tuple[int, int]
    ) -> None:
        """RDMA READ `length` bytes of `remote` (address, key) into a region."""
        if self.closed:
            return
        code = self.state.post_read(number, region.addr + offset, length, region.lkey, *remote)
        self.posted += 1
        self.listen()
        self.check(code)

    def post_recv(self, slots: Iterable[int]) -> None:
        """Post receive slots."""
        if not self.closed and self.failure is None:
            self.check(self.state.post_receives(list(slots)))

    def fit(self) -> None:
        """Set the keys of slots that come and go in the state, after some have."""
        for receives, arena in ((True, self.slots.recv), (False, self.slots.send)):
            if isinstance(arena, ElasticArena):
                self.state.fit(
                    receives, arena.more_addr, arena.step, arena.keys, arena.some_leave, arena.full
                )

    # Memory of the program, and the peer's rights to it

    async def register(self, buffer: Any, access: Access) -> MemoryRegion:
        """Register memory in the connection's protection domain, in a thread if it takes long.

        Raises:
            OSError: The memory cannot be registered.
            ResourceClosedError: The connection is closed, perhaps meanwhile.

        Cancellation: the region is closed.
        """
        size = buffer if isinstance(buffer, int) else memoryview(buffer).nbytes
        if size <= INLINE_BYTES:
            return MemoryRegion(self.pd, buffer, access)
        region = await call_blocking(
            lambda: MemoryRegion(self.pd, buffer, access), undo=MemoryRegion.close
        )
        if self.closed:
            region.close()
            with contextlib.suppress(OSError):  # and so TimeoutError; the buffer is free before
                await region.wait_closed(DEREGISTER_S)
            raise closed_error()
        return region

    @property
    def allowed(self) -> int:
        """The accesses that the queue pair allows the peer."""
        return 0 if self._buffers is None else self._buffers.rights.allowed

    def open_access(self, rights: Access) -> None:
        """Allow the peer these accesses to regions that are registered for it; counted."""
        if self.buffers.rights.count(rights, 1):
            self._set_access()

    def close_access(self, rights: Access) -> None:
        """Undo one `open_access`: a right that no use needs is taken back."""
        changed = self.buffers.rights.count(rights, -1)
        if changed and not self.closed and self.failure is None:
            self._set_access()

    def _set_access(self) -> None:
        try:
            self.qp.modify(QPAttrMask.ACCESS_FLAGS, qp_access_flags=Access(self.allowed))
        except OSError as exc:
            self.fail(exc)

    # Seen from outside

    @property
    def pinned_bytes(self) -> int:
        """Bytes of its slots, and of its share of the budget of large messages.  In any thread."""
        buffers = self._buffers
        return self.slots.pinned_bytes + (0 if buffers is None else buffers.pinned_bytes)

    def _sums(self) -> str:
        state = self.state
        return (
            f": {state.messages_sent} messages of {state.bytes_sent} bytes sent, "
            f"{state.messages_received} of {state.bytes_received} received"
        )

    # End

    def end(self) -> None:
        """Have C count flushed receives without a call of Python: no task waits for messages.

        By way of Python they would take a fifth of the time of a close.
        """
        if not self.closed:
            self.state.flushing = True

    async def quiesce(self) -> None:
        """As in AdapterSide; flushed requests are not solicited, so that the link listens."""
        self.listen()
        await super().quiesce()

    def close(self) -> None:
        """Close all resources, in the order that C needs; worker threads make the C calls."""
        self.state.close()
        super().close()

    def poison_after_fork(self) -> None:
        """In a forked child: the rings are shared with the parent, so nothing may be posted."""
        super().poison_after_fork()
        self.state.close()
        self.state.blocked = True
        self.state.forget_done()  # the child may not have the memory of these operations
        self.state.python = True  # recv() asks Python first, which refuses

    def _give_back(self) -> Sequence[Closing]:
        parts = self.slots.close(self.qp)
        if self._buffers is not None:
            parts += self._buffers.lent_parts
            self._buffers.close(self.qp)
        return parts


class Landings:
    """The landings of one connection, and its stage; they live as long as its queue pair.

    Args:
        link: The adapter's side.
    """

    __slots__ = ("_link",)

    def __init__(self, link: Link) -> None:
        self._link = link

    def look(self) -> None:
        """Make what C has found missing: a landing for the peer's messages, a stage for its own.

        Without memory for it messages go as before, and later messages try again.
        """
        state = self._link.state
        if wanted := state.landing_wanted:
            state.landing_wanted = 0
            self._offer(wanted)
        size = LANDING_SIZES[state.peer_landing]
        if state.stage_size < size and (made := self._registered(size, Access.LOCAL_WRITE)):
            region, _ = made
            state.set_stage(region.addr, region.lkey, size)

    def _offer(self, wanted: int) -> None:
        state = self._link.state
        number = next(n for n, size in enumerate(LANDING_SIZES) if size >= wanted)
        if made := self._registered(LANDING_SIZES[number], _LANDS):
            region, view = made
            self._link.note("has a landing of %d bytes", region.length, log=memory_log)
            if not state.landing:
                self._link.open_access(Access.REMOTE_WRITE)
            self._link.check(state.land(number, region.addr, region.rkey, view))

    def _registered(self, size: int, access: Access) -> tuple[MemoryRegion, memoryview] | None:
        """Memory that is registered until the queue pair is gone; None if it cannot be had."""
        buffers = self._link.buffers
        if not buffers.account.try_take(AHEAD, size, keep=True):
            return None
        try:
            region = MemoryRegion(self._link.pd, size, access)
        except OSError:
            buffers.account.give(size)
            return None
        buffers.pin(region)
        view = region.view
        region.close()  # when the pin has ended
        return region, view
