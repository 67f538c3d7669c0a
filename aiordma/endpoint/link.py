"""Link: the adapter's side of a connection: queue pair, completion queue and slots.

Theory of operation
    16 bits of each wr_id say what the work request is for: n is send slot n, 0x4000 + n is RDMA
    READ n of a large message, 0x5000 + n is operation n of the program, and 0x8000 + n is receive
    slot n.  C handles the completions of the common cases (`MessageState`).  The link handles the
    others, passes them to its owner, and reports a failure once; see `link.adapter_side`.

    The memory of the slots cannot be freed before the queue pair, because a `Resource` keeps what
    it was made from.  `endpoint.slots` decides whether slots and completion queue are shared,
    `link.buffers` has the memory of large messages that are fetched, and `endpoint.large.landings`
    the memory that the peer writes messages to.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from aiordma._core import (
    SUB_NOTED,
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
    ConnectionConfig,
    Plan,
    plan_of,
)
from aiordma.endpoint.outcome import closed_error
from aiordma.endpoint.slots import Common, Slots
from aiordma.endpoint.wire import NUMBERS_MESSAGES, Hello
from aiordma.errors import os_error
from aiordma.link.adapter_side import AdapterSide, Closing, Owner
from aiordma.link.buffers import Buffers
from aiordma.logs import Log, log_of
from aiordma.memory.governor import PROCESS, Budget, Lease
from aiordma.memory.large_memory import DEREGISTER_S
from aiordma.memory.shared import Memory, Sharer
from aiordma.verbs.enums import Access, QPAttrMask, SendFlags
from aiordma.verbs.mr import MemoryRegion, make_region
from aiordma.verbs.pd import ProtectionDomain
from aiordma.verbs.qp import QueuePair
from aiordma.verbs.wc import WCRecord

__all__ = ["Link", "lent", "memory_log"]

#: The log of memory that connections get as their traffic requires.
memory_log: Log = log_of("memory")

_SIGNALED = int(SendFlags.SIGNALED)
_SOLICITED = int(SendFlags.SOLICITED)
#: The credits of a raw connection, whose peer knows none.
_UNLIMITED = 1 << 60


def lent(view: memoryview) -> memoryview | Loan:
    """An object that keeps the bytes of `view` alive while the adapter reads them.

    For bytes of a received message this is a loan: the program may release the message meanwhile,
    and its memory is freed when the last loan has ended.
    """
    owner = view.obj
    if isinstance(owner, Message) and not owner._released:
        return owner._lend(view)
    return view


def _create_qp(
    cm_id: ConnectionId, pd: ProtectionDomain, slots: Slots, common: Common
) -> QueuePair:
    """Make the queue pair, with room for inline messages if the adapter supports that."""
    memory, cq = (slots.first,), slots.completions.cq
    try:
        return cm_id.create_qp(pd, common.attributes, memory, cq, common.expected)
    except OSError:
        if not common.attributes.max_inline_data:
            raise
    # An adapter does not say how many inline bytes it supports; it refuses a larger value.
    qp = cm_id.create_qp(pd, common.without_inline, memory, cq, common.expected)
    common.attributes = common.without_inline
    return qp


class LinkOwner(Owner, Sharer, Protocol):
    """What a link needs of its connection."""

    def _on_sent(self, slot: int) -> None:
        """Handle the completion of a send whose slot may have to leave for the pool."""

    def _on_ended(self, number: int, record: WCRecord) -> None:
        """Handle an operation of the program that failed, or completed after a failure."""

    def _on_unexplained(self) -> None:
        """Called once, if work requests are flushed and the reason is not known yet."""

    def _last_word(self, cause: BaseException) -> bool:
        """Post ABORT for a failure that this side has found; return whether that was possible.

        Called once.
        """

    def _drop_references(self) -> None:
        """Called once, when everything is closed: nothing refers to the owner from now on."""


class Link(AdapterSide):
    """The queue pair of one connection, and the resources that belong to it.

    It is made by `open`; `start` begins to receive.

    Attributes:
        common: What it shares with other connections that have the same configuration.
        state: The state of messages, credits and operations.
        slots: The memory of short messages.
        shared: The `Memory` whose protection domain it uses; None: the domain is its own.
        budget: The budget for large messages; a listener sets its own before any can arrive.
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
        release: Callable[[], None],
    ) -> None:
        super().__init__(cm_id, pd.context, slots.completions, pd, qp)
        self._at_close.append(release)  # of what is common
        qp._posted_in_c = True
        self.common: Common = common
        self.slots: Slots = slots
        self.shared: Memory | None = memory
        self.budget: Budget = PROCESS
        self.state: MessageState = MessageState(self.loop, *common.state)
        config = common.plan.config
        if config.wait != "event" and (spins := self.completions.spins(config, 2)):
            self.state.spin_with(*spins)
        self._buffers: Buffers | None = None  # made for the first large message, or lease
        slots.link = self

    @classmethod
    async def open(
        cls, cm_id: ConnectionId, config: ConnectionConfig, memory: Memory | None = None
    ) -> Link:
        """Allocate everything on the device of `cm_id`.

        Args:
            cm_id: The connection id.
            config: The settings of the connection.
            memory: A `Memory` whose protection domain to use; None for a domain of its own.

        Raises:
            RuntimeError, ResourceClosedError: The memory is not open.
            OSError: No more memory may be pinned, or there are no more descriptors or resources of
                the adapter.

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
                slots.close()
            if pd is not None and memory is None:
                pd.close()
            release()
            raise
        return cls(cm_id, common, pd, slots, qp, memory, release)

    @property
    def plan(self) -> Plan:
        """The values that follow from the configuration."""
        return self.common.plan

    @property
    def buffers(self) -> Buffers:
        """Memory other than the first slots.  To be used in the loop's thread only."""
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
        """Whether the protection domain belongs to this connection alone."""
        return self.shared is None

    @property
    def identity(self) -> int:
        """What names of this side's memory say of their owner; 0 where the peer is raw."""
        return 0 if self.plan.config.raw else self.pd._identify()

    def agree(self, theirs: Hello | None) -> None:
        """Apply the peer's half of the handshake; messages may be sent from now on.

        Args:
            theirs: That half; None on a raw connection.
        """
        state = self.state
        if theirs is None:
            state.agree(_UNLIMITED, self.plan.config.slot_size)
            return
        common = self.common
        eager, bare, fragmented, written, landed = common.plan.terms(theirs, bare=common.bare)
        if self.shared is not None:
            landed = 0  # in a shared domain, peers of other connections could write to the landings
        # Without names, which take C longer than all the rest.
        numbered = bool(theirs.flags & NUMBERS_MESSAGES)
        state.agree(
            theirs.recv_depth, eager, bare, fragmented, written, landed, numbered, self.identity
        )  # fmt: skip

    def start(self, owner: LinkOwner) -> None:
        """Post all receives, and begin to handle completions, for which `owner` is called.

        Raises:
            OSError: The completion queue cannot be armed, or the receives cannot be posted.
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
        """Tell C where the queue pair and the slots are; return the number of receives."""
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
        if self.slots.crowded and self.common.plan.complete:
            self.fit()
        return recv[3]

    # Completions

    def __call__(self, record: WCRecord) -> None:
        """Handle a completion that C leaves to Python."""
        sub = (record[0] >> SUB_SHIFT) & 0xFFFF
        owner = self._owner
        if sub & SUB_RECV:
            self.state.count_returned(True, record[1] != 0)
        elif sub >= SUB_NOTED:  # a send, with which the WRITE before it has ended
            number, failed = sub - SUB_NOTED, record[1] != 0
            if owner is None or failed:
                self.state.count_returned(False, failed)
            else:
                owner._on_sent(self.state.noted_slot(number))
            if owner is not None:
                owner._on_ended(number, record)
        elif sub >= SUB_OPERATE:
            if owner is not None:
                owner._on_ended(sub - SUB_OPERATE, record)
        elif sub & SUB_READ:
            self.read_completed()
        elif record[1] or owner is None:
            self.state.count_returned(False, record[1] != 0)
        else:
            owner._on_sent(sub)
        if record[1]:
            self._failed(record)
        self.came_back()

    def read_completed(self) -> None:
        """Note that a READ of a large message has completed."""
        self.posted -= 1
        self.completions.unlisten()

    @property
    def under_way(self) -> int:
        """How many work requests have not completed."""
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
        """End the connection if `code`, the result of posting in C, is an errno and not 0."""
        if code:
            _, receives, _ = self.state.failure
            self.fail(os_error(code, "ibv_post_recv" if receives else "ibv_post_send"))

    def post_read(
        self, number: int, region: MemoryRegion, offset: int, length: int, remote: tuple[int, int]
    ) -> None:
        """Post an RDMA READ of `length` bytes of `remote` (address, key) into a region."""
        if self.closed:
            return
        code = self.state.post_read(number, region.addr + offset, length, region.lkey, *remote)
        self.posted += 1
        self.listen()
        self.check(code)

    def add_receives(self, slots: list[int]) -> None:
        """Post receive slots, new ones or free ones, and grant credits for them."""
        if not self.closed and self.failure is None:
            self.check(self.state.add_receives(slots))

    def fit(self) -> None:
        """Tell C the keys of the slots in the arenas, after slots were added or removed."""
        for receives, arena in ((True, self.slots.recv), (False, self.slots.send)):
            if arena.grows:
                self.state.set_keys(
                    receives, arena.more_addr, arena.step, arena.keys, arena.some_leave, arena.full
                )

    # Memory of the program, and the peer's rights to it

    async def register(
        self, buffer: Any, access: Access, lease: Lease | None = None
    ) -> MemoryRegion:
        """Register memory in the connection's protection domain, in a thread if it is large.

        Args:
            buffer: As for `MemoryRegion`.
            access: As for `MemoryRegion`.
            lease: A lease of the governor; None for memory that the program registers.

        Raises:
            OSError: The memory cannot be registered.
            ResourceClosedError: The connection is closed, or was closed meanwhile.

        Cancellation: the region is closed.
        """
        size = buffer if isinstance(buffer, int) else memoryview(buffer).nbytes
        make = functools.partial(MemoryRegion, self.pd, buffer, access)
        if lease is not None:
            make = functools.partial(lease.register, make)
        region = await make_region(size, make)
        if self.closed:
            region.close()
            # The caller is to find its buffer no longer exported.  OSError includes TimeoutError.
            with contextlib.suppress(OSError):
                await region.wait_closed(DEREGISTER_S)
            raise closed_error()
        return region

    @property
    def allowed(self) -> int:
        """What the queue pair allows the peer to do, as access flags."""
        return 0 if self._buffers is None else self._buffers.rights.allowed

    def open_access(self, rights: Access) -> None:
        """Allow the peer these accesses, until `close_access` was called as often."""
        if self.buffers.rights.count(rights, 1):
            self._set_access()

    def close_access(self, rights: Access) -> None:
        """Undo one call of `open_access`; a right that nothing else needs is taken back."""
        changed = self.buffers.rights.count(rights, -1)
        if changed and not self.closed and self.failure is None:
            self._set_access()

    def expose(self) -> tuple[int, int]:
        """What the name of memory that is exposed now says of its owner: identity, generation.

        The peer is told the identity, and asked for its own; a peer that has one also hears of the
        end (`revoke`).  A raw peer knows nothing of this: (0, 0).
        """
        if not self.identity:
            return 0, 0
        self.check(self.state.ask_identity(False))
        return self.identity, self.pd._next_exposure()

    def revoke(self, generation: int) -> None:
        """Tell the peer that the exposure has ended, so that it asks its adapter for no access.

        That is a courtesy to the peer, which may come too late, or not at all.
        """
        if generation and not self.closed and self.failure is None:
            self.check(self.state.revoke(generation))

    def _set_access(self) -> None:
        try:
            self.qp.modify(QPAttrMask.ACCESS_FLAGS, qp_access_flags=Access(self.allowed))
        except OSError as exc:
            self.fail(exc)

    # Information

    @property
    def pinned_bytes(self) -> int:
        """The bytes of the slots, and of leases for large messages.  In any thread."""
        buffers = self._buffers
        return self.slots.pinned_bytes + (0 if buffers is None else buffers.pinned_bytes)

    def _sums(self) -> str:
        counts = self.state.counters
        return (
            f": {counts['messages_sent']} messages of {counts['bytes_sent']} bytes sent, "
            f"{counts['messages_received']} of {counts['bytes_received']} received"
        )

    # End

    def end(self) -> None:
        """Have C count the receives that are going to be flushed, as no task waits for messages.

        If Python handled them, they would take a fifth of the time of a close.
        """
        if not self.closed:
            self.state.advance("FLUSH")

    async def quiesce(self) -> None:
        """As in `AdapterSide`, but listen first, because flushed requests are not solicited."""
        self.listen()
        await super().quiesce()

    def close(self) -> None:
        """Close all resources, in the order that C requires; worker threads make the C calls."""
        if self.closed:
            return
        owner = self._owner
        self.state.close()
        super().close()
        if owner is not None:
            owner._drop_references()

    def poison_after_fork(self) -> None:
        """Post nothing in a forked child, which shares the adapter's queues with its parent."""
        super().poison_after_fork()
        self.state.close()
        self.state.forget_done()  # the memory of these operations may not exist in the child
        self.state.delegate(True)  # recv() calls Python, which refuses

    def _give_back(self) -> Sequence[Closing]:
        parts = self.slots.close()
        if self._buffers is not None:
            parts += self._buffers.lent_parts
            self._buffers.close(self.qp)
        return parts
