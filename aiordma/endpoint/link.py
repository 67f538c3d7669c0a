"""Link: the adapter's side of a connection: queue pair, completion queue, slots, and their end.

Theory of operation
    The sub-index of a wr_id tells the request: 0x8000 + n is receive slot n, 0x5000 + n is
    operation n of the program, 0x4000 + n is RDMA read n of a large message, and n alone send slot
    n.  The plain completions are taken in C (`MessageState`).  A link delivers the others to its
    owner, and a failure once; see `link.adapter_side`.

    Memory.  Slots lie in arenas that outlive the queue pair by construction (Resource).
    `endpoint.slots` knows whether slots and completion queue are shared; `link.buffers` has the
    memory of large messages.
"""

from __future__ import annotations

import contextlib
import itertools
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
from aiordma.cm.address import Address
from aiordma.cm.connection_id import ConnectionId
from aiordma.endpoint.config import CONTROL_SLOTS, ConnectionConfig, Plan, plan_of
from aiordma.endpoint.slots import Slots
from aiordma.errors import ForkedError, ResourceClosedError, os_error
from aiordma.link.adapter_side import AdapterSide, Closing, Owner
from aiordma.link.buffers import Buffers
from aiordma.link.completions import Completions
from aiordma.memory.elastic import ElasticArena
from aiordma.verbs.comp_channel import CompletionChannel, shared_completions
from aiordma.verbs.context import Context
from aiordma.verbs.enums import Access, QPAttrMask, SendFlags
from aiordma.verbs.mr import MemoryRegion
from aiordma.verbs.pd import ProtectionDomain
from aiordma.verbs.qp import QueuePair
from aiordma.verbs.wc import WCRecord

__all__ = ["COPIED_BYTES", "Facts", "Link", "lent"]

# Bytes of a short message that the adapter need not fetch; each send request is longer by them.
_INLINE = 128
_SIGNALED = int(SendFlags.SIGNALED)
_SOLICITED = int(SendFlags.SOLICITED)
#: Larger messages are read out of the program's own buffer, which is registered for it.
COPIED_BYTES = 1 << 18


def lent(view: memoryview) -> memoryview | Loan:
    """The object that keeps the bytes of `view` while the adapter reads them, after a send, too.

    A message lends its bytes: the program can release the message, and the memory is free when the
    last loan has ended.
    """
    owner = view.obj
    if isinstance(owner, Message) and not owner._released:
        return owner._lend(view)
    return view


def _create_qp(cm_id: ConnectionId, pd: ProtectionDomain, slots: Slots, plan: Plan) -> QueuePair:
    """The queue pair, with room for inline messages where the adapter has it.

    An adapter does not say how much it takes: a larger value is refused.
    """
    memory = tuple(slots.regions)
    inline = 0 if pd.context.is_iwarp else _INLINE
    try:
        return cm_id.create_qp(pd, plan.attributes(inline), memory, slots.cq)
    except OSError:
        if not inline:
            raise
    return cm_id.create_qp(pd, plan.attributes(0), memory, slots.cq)


class LinkOwner(Owner, Protocol):
    """A connection, as its link sees it."""

    def _on_sent(self, slot: int) -> None:
        """The adapter is done with a send slot."""

    def _on_read(self, number: int) -> None:
        """A READ of a large message has completed."""

    def _on_ended(self, number: int, record: WCRecord) -> None:
        """An operation of the program has ended, and not with success."""

    def _on_unexplained(self) -> None:
        """The posted requests are flushed, and the reason is not known yet; once."""

    def _last_word(self, cause: BaseException) -> bool:
        """This side has found a failure: tell the peer; whether it is told.  Once."""

    def _on_closing(self) -> None:
        """Everything is still open, and about to be given back; once."""


class _Rights:
    """The peer's rights to memory that is registered for it: how many uses need each.

    Plain numbers: an enumeration of flags takes longer than all else here.

    Attributes:
        now: Rights that a use needs.
    """

    __slots__ = ("_users", "now")

    def __init__(self) -> None:
        self._users: dict[int, int] = {}
        self.now = 0

    def count(self, rights: Access, step: int) -> bool:
        """Count `step` uses more; return whether a right has got its first, or lost its last."""
        before, rest = self.now, int(rights)
        while rest:
            right = rest & -rest
            rest ^= right
            count = self._users[right] = self._users.get(right, 0) + step
            if count > 0:
                self.now |= right
            else:
                self.now &= ~right
        return self.now != before


class Link(AdapterSide):
    """The queue pair of one connection of messages and its resources.

    Made by `open`; `start` begins to receive.

    Attributes:
        state: Messages, credits and operations, as C has them.
        slots: Where messages of the peer land, and where own messages lie.
        buffers: Memory beside the slots.
    """

    __slots__ = ("_rights", "buffers", "slots", "state")

    _owner: LinkOwner | None

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
        # A foreign peer asks for no attention.
        quiet = not (config.raw or context.is_iwarp)
        completions = Completions(channel, slots.cq, quiet=quiet, unused=slots.own_cq)
        super().__init__(cm_id, context, completions, pd, qp)
        plan = plan_of(config)
        self.slots = slots
        self.state = MessageState(
            self.loop,
            sends=slots.send.count,
            receives=slots.recv.count,
            send_depth=config.send_depth,
            arrivals=plan.arrivals,
            controls=0 if config.raw else CONTROL_SLOTS,
            exchanges=0 if config.raw else config.rendezvous_window,
            reads=config.initiator_depth,
            raw=config.raw,
        )
        window = config.rendezvous_window * COPIED_BYTES
        self.buffers = Buffers(cm_id, pd, config.receive_buffer_size, window)
        self._rights = _Rights()
        slots.pin_with(self.buffers)

    @classmethod
    async def open(cls, cm_id: ConnectionId, config: ConnectionConfig) -> Link:
        """Allocate everything on the device of `cm_id`.

        Raises:
            OSError: Out of memory that may be pinned, descriptors or adapter resources.

        Cancellation: the resources are destroyed.
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

    def start(self, owner: LinkOwner) -> None:
        """Tell `owner` from now on, have completions delivered and post all receives."""
        self._owner = owner
        self._begin()
        self._bind(self.qp.limits.max_inline_data)
        self.completions.let_c_take(self.state, self.state)
        self._post_all()

    def _bind(self, inline_size: int) -> None:
        recv, send, control = self.slots.recv, self.slots.send, self.slots.control
        self.state.bind(
            int(ffi.cast("uintptr_t", self._qp_handle)),
            self.completions.id,
            _SIGNALED if control is None else _SIGNALED | _SOLICITED,
            inline_size,
            (send.addr, send.slot_size, send.lkey, send.count),
            (recv.addr, recv.slot_size, recv.lkey, recv.count),
            (0, 0, 0) if control is None else (control.addr, control.slot_size, control.lkey),
            int(ffi.cast("uintptr_t", recv.crowded)) if isinstance(recv, ElasticArena) else 0,
        )
        self.fit()

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
            self._read_ended()
        elif record[1] or owner is None:
            self.state.completed += 1
        else:
            owner._on_sent(sub)
        if record[1]:
            self._failed(record)
        self._came_back()

    def _read_ended(self) -> None:
        self.posted -= 1
        self.completions.unlisten()

    def on_reads(self) -> None:
        """READs of large messages have completed, which C has taken."""
        for number in self.state.take_reads():
            self._read_ended()
            if self._owner is not None:
                self._owner._on_read(number)

    @property
    def under_way(self) -> int:
        """Work requests that the adapter has not given back."""
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
        """Take the result of a function of C that posts: anything but 0 ends the connection."""
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
        self.completions.listen()
        if code:
            self.fail(os_error(code, "ibv_post_send"))

    def _post_all(self) -> None:
        """Post every receive slot, at the beginning."""
        arena = self.slots.recv
        if self.failure is not None:
            return
        if not arena.whole:
            self.post_recv(range(arena.count))
            return
        if code := self.state.post_receives(arena.lkey, arena.count):
            self.fail(os_error(code, "ibv_post_recv"))

    def post_recv(self, slots: Iterable[int]) -> None:
        """Post receive slots; those that follow one another in one registration, in one chain."""
        arena = self.slots.recv
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
        for receives, arena in ((True, self.slots.recv), (False, self.slots.send)):
            if isinstance(arena, ElasticArena):
                self.state.fit(receives, arena.step, arena.keys, arena.some_leave, arena.full)

    # The peer's rights to memory that is registered for it

    def open_access(self, rights: Access) -> None:
        """Let the peer use regions registered for it in these ways; counted."""
        if self._rights.count(rights, 1):
            self._set_access()

    def close_access(self, rights: Access) -> None:
        """Undo one `open_access`; a right that no lease needs any more is off again."""
        changed = self._rights.count(rights, -1)
        if changed and not self.closed and self.failure is None:
            self._set_access()

    def _set_access(self) -> None:
        try:
            self.qp.modify(QPAttrMask.ACCESS_FLAGS, qp_access_flags=self._rights.now)
        except OSError as exc:
            self.fail(exc)

    # End

    def end(self) -> None:
        """No task waits for messages any more: flushed requests are only counted, in C.

        That is each receive; one by one through Python they would be a fifth of all closing.
        """
        if not self.closed:
            self.state.flushing = True

    async def quiesce(self) -> None:
        """Wait for all posted requests, for a bounded time, after the error state."""
        self.completions.listen()  # a flushed request is not solicited
        await super().quiesce()

    def came_back(self) -> None:
        """The adapter has nothing of the connection any more."""
        self._came_back()

    def close(self) -> None:
        """Give everything back, in the order that C needs; the C calls run in the reaper."""
        if not self.closed and self._owner is not None:
            self._owner._on_closing()
        self.state.closed = True
        super().close()

    def poison_after_fork(self) -> None:
        """In a forked child: the rings are shared with the parent, so nothing may be posted."""
        super().poison_after_fork()
        self.state.closed = self.state.blocked = True
        self.state.python = True  # recv() asks Python first, which refuses

    def _give_back(self) -> Sequence[Closing]:
        parts = self.slots.close(self.qp)
        self.buffers.close(self.qp)
        return parts


class Facts:
    """Facts about a connection: asked for at the first use, or when the link closes.

    Args:
        link: The adapter's side.
    """

    __slots__ = ("_ends", "_known", "_link")

    def __init__(self, link: Link) -> None:
        self._link = link
        self._known: dict[str, Any] | None = None
        #: Addresses of both ends; empty: not asked for yet; None: not connected yet.
        self._ends: tuple[Address | None, Address | None] | tuple[()] | None = None

    def connected(self, ends: tuple[Address | None, Address | None] | None) -> None:
        """The peer has answered; `ends` are the addresses of peer and this side, if known."""
        self._ends = ends or ()

    def all(self, *, checked: bool) -> dict[str, Any]:
        """The facts by name; `checked`, whether large messages of the peer have checksums."""
        if self._known is None:
            # A device that is gone has no names, and a forked child has no device.
            with contextlib.suppress(OSError, ResourceClosedError, ForkedError):
                known = self._link.describe()
                ends = self._ends or self._link.cm_id._ends()
                known["peername"], known["sockname"] = ends
                known["large_messages_checked"] = checked
                self._known = known
        return self._known or {}

    def keep(self, *, checked: bool) -> None:
        """The link is about to close: ask while there is an answer."""
        if self._ends is not None:
            self._known = self.all(checked=checked)
