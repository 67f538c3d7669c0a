"""Link: the adapter's side of a connection: queue pair, completion queue, slots, and their end.

Theory of operation
    The sub-index of a wr_id tells what completed: 0x8000 + n is receive slot n, 0x5000 + n is
    operation n of the program, 0x4000 + n is RDMA read n of a large message, and n alone send slot
    n.  The plain completions are taken in C (`MessageState`).  The others a link delivers to four
    handlers, and a failure once; how a failure is found, and how it all ends, is in
    `link.adapter_side`.

    Memory.  Slots lie in arenas that the queue pair outlives by construction (Resource).
    `endpoint.slots` knows whether slots and completion queue are shared.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

from aiordma._core import SUB_OPERATE, SUB_READ, SUB_RECV, SUB_SHIFT, MessageState
from aiordma._ffi import ffi
from aiordma.cm.connection_id import ConnectionId
from aiordma.endpoint.config import CONTROL_SLOTS, ConnectionConfig
from aiordma.endpoint.plan import Plan, plan_of
from aiordma.endpoint.slots import Slots
from aiordma.errors import os_error
from aiordma.link.adapter_side import AdapterSide, Closing
from aiordma.link.source import source_of
from aiordma.loop.empty import nobody
from aiordma.memory.byte_budget import PROCESS_BUDGET, Account, Reserve
from aiordma.memory.elastic import ElasticArena
from aiordma.memory.pool import BufferPool
from aiordma.verbs.attention import expect, listen, unlisten
from aiordma.verbs.comp_channel import CompletionChannel, shared_completions
from aiordma.verbs.context import Context
from aiordma.verbs.enums import Access, QPAttrMask, SendFlags
from aiordma.verbs.mr import MemoryRegion
from aiordma.verbs.pd import ProtectionDomain
from aiordma.verbs.qp import QueuePair
from aiordma.verbs.wc import WCRecord

__all__ = ["COPIED_BYTES", "Link"]

# Bytes: of a short message the adapter need not fetch anything.  Each work request of the send
# queue gets longer by it.
_INLINE = 128
_SIGNALED = int(SendFlags.SIGNALED)
_SOLICITED = int(SendFlags.SOLICITED)
#: Larger messages are read out of the program's own buffer, which is registered for it.
COPIED_BYTES = 1 << 18
_LANDS_ON_IWARP = Access.LOCAL_WRITE | Access.REMOTE_WRITE


def _create_qp(cm_id: ConnectionId, pd: ProtectionDomain, slots: Slots, plan: Plan) -> QueuePair:
    """The queue pair, with room for inline messages where the adapter has it.

    How much an adapter takes it does not say: one asks, and is refused.
    """
    memory = tuple(slots.regions)
    inline = 0 if pd.context.is_iwarp else _INLINE
    try:
        return cm_id.create_qp(pd, plan.attributes(inline), memory, slots.cq)
    except OSError:
        if not inline:
            raise
    return cm_id.create_qp(pd, plan.attributes(0), memory, slots.cq)


class Link(AdapterSide):
    """What the adapter holds for one connection of messages.

    Made by `open`; `start` begins to receive.
    """

    __slots__ = (
        "_account", "_elastic", "_inline_size", "_listeners", "_on_ended", "_on_read", "_on_sent",
        "_open_rights", "_outgoing", "_outgoing_size", "_pool",
        "_pool_size", "_quiet", "_rights", "_slots", "before_close", "budget", "check_large",
        "control", "lands_in_the_open", "last_word", "on_unexplained", "recv", "send", "state",
    )  # fmt: skip

    def __init__(
        self,
        cm_id: ConnectionId,
        context: Context,
        channel: CompletionChannel,
        pd: ProtectionDomain,
        slots: Slots,
        qp: QueuePair,
        config: ConnectionConfig,
    ) -> None:
        super().__init__(cm_id, context, channel, pd, slots.cq, qp)
        plan = plan_of(config)
        self.recv, self.send, self.control = slots.recv, slots.send, slots.control
        recv, send = slots.recv, slots.send
        #: Messages, credits and operations, as C has them.
        self.state = MessageState(
            self.loop,
            sends=send.count,
            receives=recv.count,
            send_depth=config.send_depth,
            arrivals=plan.arrivals,
            controls=0 if config.raw else CONTROL_SLOTS,
            exchanges=0 if config.raw else config.rendezvous_window,
            reads=config.initiator_depth,
            raw=config.raw,
        )
        self._inline_size = qp.limits.max_inline_data
        self._elastic = isinstance(recv, ElasticArena)
        # A foreign peer asks for no attention.
        self._quiet = not (config.raw or context.is_iwarp)
        self._listeners = 0
        self._slots = slots
        #: Whether large messages of the peer are to be checked end to end.
        self.check_large = context.is_software if config.check_large is None else config.check_large
        #: Whether the peer may write where its data land, for as long as that is registered.
        self.lands_in_the_open = context.is_iwarp
        #: Called once, while everything is still open.
        self.before_close: Callable[[], object] | None = None
        #: Called once, when what was posted is flushed and the reason is not known yet.
        self.on_unexplained: Callable[[], object] = nobody
        #: Called once, with the failure that this side has found; whether the peer was told.
        self.last_word: Callable[[BaseException], bool] | None = None
        self._pool: BufferPool | None = None
        self._outgoing: BufferPool | None = None
        self._pool_size = config.receive_buffer_size
        self._outgoing_size = config.rendezvous_window * COPIED_BYTES
        #: What large messages are counted on; a listener sets its own before they can come.
        self.budget = PROCESS_BUDGET
        self._account: Account | None = None
        self._open_rights: dict[int, int] | None = None  # made when memory is first exposed
        self._rights = 0
        slots.pin_with(self.pin, self.unpin)

    @classmethod
    async def open(cls, cm_id: ConnectionId, config: ConnectionConfig) -> Link:
        """Allocate everything on the device of `cm_id`.

        Raises:
            OSError: Out of memory that may be pinned, descriptors or adapter resources.

        Cancellation: what was made is destroyed.
        """
        context = cm_id.context
        assert context is not None
        plan = plan_of(config)
        channel, release = shared_completions(context)
        pd: ProtectionDomain | None = None
        slots: Slots | None = None
        try:
            pd = ProtectionDomain(context)
            if plan.quick:
                slots = Slots.own(pd, channel, plan)
            else:
                slots = await Slots.open(pd, channel, config)
            cm_id.policy = plan.policy
            qp = _create_qp(cm_id, pd, slots, plan)
        except BaseException:
            if slots is not None:
                slots.abandon()
            if pd is not None:
                pd.close()
            release()
            raise
        link = cls(cm_id, context, channel, pd, slots, qp, config)
        link.at_close(release)
        return link

    @property
    def _unused(self) -> bool:  # type: ignore[override]
        return self._slots._own_cq

    def start(
        self,
        on_sent: Callable[[int], None],
        on_read: Callable[[int], None],
        on_failed: Callable[[], None],
        on_ended: Callable[[int, WCRecord], None],
    ) -> None:
        """Set the handlers, have completions delivered and post all receives."""
        self._on_sent = on_sent
        self._on_read = on_read
        self._on_ended = on_ended
        self._begin(on_failed)
        self._bind()
        self._channel.drain.add(self._base, self.state, self.state)
        self._post_all()

    def _bind(self) -> None:
        recv, send, control = self.recv, self.send, self.control
        self.state.bind(
            int(ffi.cast("uintptr_t", self._qp_handle)),
            self._base,
            _SIGNALED if control is None else _SIGNALED | _SOLICITED,
            self._inline_size,
            (send.addr, send.slot_size, send.lkey, send.count),
            (recv.addr, recv.slot_size, recv.lkey, recv.count),
            (0, 0, 0) if control is None else (control.addr, control.slot_size, control.lkey),
            int(ffi.cast("uintptr_t", recv.crowded)) if isinstance(recv, ElasticArena) else 0,
        )
        self.fit()

    # Completions

    def __call__(self, record: WCRecord) -> None:
        """One of its requests has completed, and was not plain."""
        sub = (record[0] >> SUB_SHIFT) & 0xFFFF
        if sub & SUB_RECV:
            self.state.receives -= 1
        elif sub >= SUB_OPERATE:
            self._on_ended(sub - SUB_OPERATE, record)
        elif sub & SUB_READ:
            self._read_ended()
        elif record[1] or self.closed:
            self.state.completed += 1
        else:
            self._on_sent(sub)
        if record[1]:
            self._failed(record)
        self._came_back()

    def _read_ended(self) -> None:
        self.posted -= 1
        self.unlisten()

    def on_reads(self) -> None:
        """READs of large messages have completed, which C has taken."""
        for number in self.state.take_reads():
            self._read_ended()
            self._on_read(number)

    # Wake-ups: by default for what the peer asks attention for

    def listen(self) -> None:
        """Be woken by the completion of own requests, too, until as many `unlisten`."""
        self._listeners += 1
        wanted = self._listeners == 1 and self._quiet and not self.closed
        if wanted and listen(self._cq):
            self.sweep()

    def unlisten(self) -> None:
        """One fewer wants that."""
        self._listeners -= 1
        if not self._listeners and self._quiet and not self.closed:
            unlisten(self._cq)

    def expect(self, *, answers: bool) -> None:
        """Whether what the program posts is mostly answered at once, and each answer makes it post.

        Then the queue is armed late; see `drain_once` in _core/drain.c.  Each of the two by turns.
        """
        if self._quiet:
            expect(self._cq, 1 if answers else -1)

    @property
    def under_way(self) -> int:
        """Work requests that the adapter has not given back."""
        return self.posted + self.state.under_way

    def _last_word(self, cause: BaseException) -> bool:
        return self.last_word is not None and self.last_word(cause)

    def _unexplained_end(self) -> None:
        self.on_unexplained()

    def _operation(self, sub: int) -> str:
        if sub & SUB_RECV:
            return "receive"
        if sub >= SUB_OPERATE:
            return "one-sided operation"
        return "RDMA read" if sub & SUB_READ else "send"

    # Posting

    def check(self, code: int) -> None:
        """What a function of C that posts has returned: anything but 0 ends the connection."""
        if code:
            self.fail(os_error(code, "ibv_post_send"))

    def post_read(
        self, number: int, region: MemoryRegion, offset: int, length: int, remote: tuple[int, int]
    ) -> None:
        """RDMA READ `length` bytes of `remote` (address, key) into a region."""
        if self.closed:
            return
        code = self.state.post_read(number, region.addr + offset, length, region.lkey, *remote)
        self.posted += 1
        self.listen()
        if code:
            self.fail(os_error(code, "ibv_post_send"))

    def _post_all(self) -> None:
        """Post every receive slot, at the beginning."""
        arena = self.recv
        if self.failure is not None:
            return
        if not arena.whole:
            self.post_recv(range(arena.count))
            return
        if code := self.state.post_receives(arena.lkey, arena.count):
            self.fail(os_error(code, "ibv_post_recv"))

    def post_recv(self, slots: Iterable[int]) -> None:
        """Post receive slots; those that follow one another in one registration, in one chain."""
        arena = self.recv
        chains: Iterable[tuple[int, Iterable[int]]] = ((arena.lkey, slots),)
        if not arena.whole:
            chains = itertools.groupby(slots, arena.key)
        for key, chain in chains:
            if self.closed or self.failure is not None:
                return
            if code := self.state.post_receives(key, list(chain)):
                self.fail(os_error(code, "ibv_post_recv"))

    def fit(self) -> None:
        """Tell C which slots of a pool there are: some have come, or gone."""
        if not self._elastic:
            return
        for receives, arena in ((True, self.recv), (False, self.send)):
            assert isinstance(arena, ElasticArena)
            self.state.fit(receives, arena.step, arena.keys, arena.some_leave, arena.full)

    # Memory beside the slots

    @property
    def pool(self) -> BufferPool:
        """Buffers for what does not fit into slots; made at first use."""
        if self._pool is None:
            # iWARP writes the answer of a read as if the peer wrote it.
            lands = _LANDS_ON_IWARP if self.lands_in_the_open else Access.LOCAL_WRITE
            self._pool = self._new_pool(lands, self._pool_size, self.account)
        return self._pool

    @property
    def account(self) -> Account:
        """What the connection holds of the budget; made for the first large message."""
        if self._account is None:
            self._account = Account(self.budget, source_of(self.cm_id.destination_address))
            if self.closed:
                self._account.close()
        return self._account

    @property
    def outgoing(self) -> BufferPool:
        """Buffers that the peer reads; made at first use."""
        if self._outgoing is None:
            reserve = Reserve(self.account)
            self._outgoing = self._new_pool(Access.REMOTE_READ, self._outgoing_size, reserve)
        return self._outgoing

    def _new_pool(self, access: Access, keep: int, account: Account | Reserve) -> BufferPool:
        pool = BufferPool(self.pd, keep, access, account)
        if self.closed:
            pool.close()
        return pool

    def open_access(self, rights: Access) -> None:
        """Let the peer use regions registered for it in these ways; counted."""
        if self._open_rights is None:
            self._open_rights = {}
        if self._count_rights(self._open_rights, int(rights), 1):
            self._set_access()

    def close_access(self, rights: Access) -> None:
        """Undo one `open_access`; a right that no lease needs any more is off again."""
        assert self._open_rights is not None
        changed = self._count_rights(self._open_rights, int(rights), -1)
        if changed and not self.closed and self.failure is None:
            self._set_access()

    # Plain numbers: what an enumeration of flags does takes longer than all else here.

    def _count_rights(self, users: dict[int, int], rights: int, step: int) -> bool:
        """Count users of each right; whether one has got its first, or lost its last."""
        before = self._rights
        while rights:
            right = rights & -rights
            rights ^= right
            count = users[right] = users.get(right, 0) + step
            if count > 0:
                self._rights |= right
            else:
                self._rights &= ~right
        return self._rights != before

    def _set_access(self) -> None:
        try:
            self.qp.modify(QPAttrMask.ACCESS_FLAGS, qp_access_flags=self._rights)
        except OSError as exc:
            self.fail(exc)

    # End

    def end(self) -> None:
        """No task waits for messages any more: what comes back unused is only counted, in C.

        That is each receive; one by one through Python they would be a fifth of all closing.
        """
        if not self.closed:
            self.state.flushing = True

    async def quiesce(self) -> None:
        """After the error state: wait until everything posted came back, for a bounded time."""
        self.listen()  # what is flushed asks for no attention
        await super().quiesce()

    def came_back(self) -> None:
        """The adapter has nothing of the connection any more."""
        self._came_back()

    def close(self) -> None:
        """Give everything back, in the order that C needs; the C calls run in the reaper."""
        if not self.closed and self.before_close is not None:
            self.before_close()
            self.before_close = None
        self.state.closed = True
        if self._base and not self.closed:
            self._channel.drain.remove(self._base)
            if self._listeners and self._quiet:
                unlisten(self._cq)
        super().close()
        self._on_sent = self._on_read = self._on_ended = nobody
        self._on_failed = self.on_unexplained = nobody
        self.last_word = None

    def poison_after_fork(self) -> None:
        """In a forked child: the rings are shared with the parent, so nothing may be posted."""
        super().poison_after_fork()
        self.state.closed = self.state.blocked = True
        self.state.python = True  # recv() asks Python first, which refuses

    def _give_back(self) -> Sequence[Closing]:
        parts = self._slots.close(self.qp)
        for pool in (self._pool, self._outgoing):
            if pool is not None:
                pool.close()
        if self._account is not None:
            # Its memory stays pinned until the queue pair is gone.
            self.qp._gone.add_done_callback(self._account.closer())
        return parts
