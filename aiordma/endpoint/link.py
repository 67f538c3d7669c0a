"""Link: the adapter's side of a connection: queue pair, completion queue, slots, and their end.

Theory of operation
    One entry of the channel's slot table serves the whole connection; the 16-bit sub-index of a
    wr_id tells what completed: 0x8000 + n is receive slot n, 0x4000 + n is RDMA read n, and n
    alone send slot n.  So a message costs no table entry and no future.

    A link delivers completions to three handlers and a failure once, with its first cause:
    whatever follows a failure is flushed and is not a reason.

    Memory.  Slots lie in arenas that the queue pair outlives by construction (Resource).  Other
    regions under a request are pinned here; the pin ends with the request or with the queue pair.
    `endpoint.slots` knows whether slots and completion queue are shared.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from aiordma._ffi import ffi, lib
from aiordma.cm.connection_id import ConnectionId
from aiordma.cm.qp_transition import QPPolicy
from aiordma.endpoint.config import ConnectionConfig
from aiordma.endpoint.slots import Slots
from aiordma.errors import ConnectionLostError, ResourceClosedError, completion_error, os_error
from aiordma.loop import fork, registry
from aiordma.loop.slots import SUB_SHIFT
from aiordma.memory.pool import BufferPool
from aiordma.verbs.comp_channel import CompletionChannel
from aiordma.verbs.context import Context
from aiordma.verbs.enums import Access, PortState, QPAttrMask, SendFlags
from aiordma.verbs.mr import MemoryRegion
from aiordma.verbs.pd import ProtectionDomain
from aiordma.verbs.qp import QPInitAttr, QueuePair
from aiordma.verbs.resource import Resource
from aiordma.verbs.rnr_timer import rnr_timer_code
from aiordma.verbs.wc import WCRecord

__all__ = ["Link"]

_log = logging.getLogger("aiordma")
_RECV = 0x8000
_READ = 0x4000
_WR_FLUSH_ERR = 5
_FLUSH_GRACE_S = 0.5
_REASON_S = 0.5
_DESTROY_S = 5.0
_SIGNALED = int(SendFlags.SIGNALED)


class Link:
    """What the adapter holds for one connection.

    Made by `open`; `start` begins to receive.

    Attributes:
        posted: Work requests whose completion has not arrived.
        failure: First cause of its end, or None.
    """

    __slots__ = (
        "__weakref__", "_at_close", "_base", "_channel", "_cq", "_data_slots", "_idle",
        "_on_failed", "_on_frame", "_on_read", "_on_sent", "_open_rights", "_parts", "_pinned",
        "_qp_handle", "_slots", "_thread", "_unexplained", "closed", "cm_id", "context", "control",
        "failure", "loop", "pd", "pool", "posted", "qp", "recv", "send",
    )  # fmt: skip

    def __init__(
        self,
        cm_id: ConnectionId,
        context: Context,
        channel: CompletionChannel,
        pd: ProtectionDomain,
        slots: Slots,
        qp: QueuePair,
        pool: BufferPool,
        data_slots: int,
    ) -> None:
        self.cm_id = cm_id
        self.context = context
        self.pd = pd
        self.recv, self.send, self.control = slots.recv, slots.send, slots.control
        self._slots = slots
        self._data_slots = data_slots  # send slots from this number on are control slots
        self._parts: list[Resource] = []
        self.qp = qp
        self.pool = pool
        self.loop = asyncio.get_running_loop()
        self.posted = 0
        self.failure: BaseException | None = None
        self.closed = False
        self._channel = channel
        self._cq = slots.cq
        self._qp_handle = qp._require()
        self._thread = threading.get_ident()
        self._idle: asyncio.Event | None = None
        self._pinned: set[MemoryRegion] = set()
        self._at_close: list[Callable[[], None]] = []
        self._open_rights: Counter[Access] = Counter()
        self._base = 0
        self._unexplained: asyncio.TimerHandle | None = None
        slots.pin_with(self.pin, self.unpin)
        fork.guard(self)

    def poison_after_fork(self) -> None:
        """In a forked child: the rings are shared with the parent, so nothing may be posted."""
        self.closed = True
        self._qp_handle = None

    @classmethod
    async def open(cls, cm_id: ConnectionId, config: ConnectionConfig) -> Link:
        """Allocate everything on the device of `cm_id`.

        Raises:
            OSError: Out of memory that may be pinned, descriptors or adapter resources.

        Cancellation: what was made is destroyed.
        """
        context = cm_id.context
        assert context is not None
        channel, release = registry.acquire(
            ("completions", id(context)), lambda: CompletionChannel(context)
        )
        with contextlib.ExitStack() as undo:
            undo.callback(release)
            pd = ProtectionDomain(context)
            undo.callback(pd.close)
            slots = await Slots.open(pd, channel, config)
            undo.callback(slots.abandon)
            cm_id.policy = QPPolicy(
                access=Access(0),
                ack_timeout=config.ack_timeout,
                max_retry_count=config.retry_count,
                max_rnr_retry_count=config.rnr_retry_count,
                min_rnr_timer=rnr_timer_code(config.min_rnr_timer_ms),
                max_dest_rd_atomic=config.responder_resources,
                max_rd_atomic=config.initiator_depth,
            )
            attr = QPInitAttr(
                send_cq=slots.cq, max_send_wr=config.sends, max_recv_wr=config.receives
            )
            qp = cm_id.create_qp(pd, attr, tuple(slots.regions))
            # Messages are counted by their slots; the queue pair's own count is for the rest.
            qp._sq.room.try_acquire(config.sends - config.one_sided_depth)
            undo.pop_all()
        # iWARP writes the answer of a read as if the peer wrote it.
        lands = Access.LOCAL_WRITE
        if context.is_iwarp:
            lands |= Access.REMOTE_WRITE
        pool = BufferPool(pd, config.receive_buffer_size // 4, lands)
        link = cls(cm_id, context, channel, pd, slots, qp, pool, config.send_depth)
        link.at_close(release)
        return link

    def start(
        self,
        on_frame: Callable[[int, WCRecord], None],
        on_sent: Callable[[int], None],
        on_read: Callable[[int], None],
        on_failed: Callable[[], None],
    ) -> None:
        """Set the handlers, have completions delivered and post all receives."""
        self._on_frame = on_frame
        self._on_sent = on_sent
        self._on_read = on_read
        self._on_failed = on_failed
        self._base = self._channel.table.add(self)
        self.qp._on_first_failure = self.fail
        self._cq.manage()
        self.post_recv(range(self.recv.count))

    # Completions

    def __call__(self, record: WCRecord) -> None:
        """One of its requests has completed."""
        self.posted -= 1
        sub = (record[0] >> SUB_SHIFT) & 0xFFFF
        if record[1]:
            self._failed(sub, record)
        elif sub & _RECV:
            self._on_frame(sub & 0x7FFF, record)
        elif sub & _READ:
            self._on_read(sub & 0x3FFF)
        else:
            self._on_sent(sub)
        if self._idle is not None and not self.posted:
            self._idle.set()

    def _failed(self, sub: int, record: WCRecord) -> None:
        if record[1] == _WR_FLUSH_ERR:
            # The reason has come before, or comes by another descriptor; or, where Soft-RoCE has
            # no way to send a packet, never.
            if self._unexplained is None and self.failure is None and not self.closed:
                self._unexplained = self.loop.call_later(_REASON_S, self._without_reason)
            return
        operation = "receive" if sub & _RECV else "RDMA read" if sub & _READ else "send"
        self.fail(
            completion_error(record[1], operation=operation, vendor_err=record[3], qp_num=record[6])
        )

    def _without_reason(self) -> None:
        if self.failure is not None or self.closed:
            return
        text = "the adapter ended the connection and gave no reason"
        with contextlib.suppress(OSError):
            port = self.cm_id.port_num
            state = self.context.query_port(port).state
            if state != PortState.ACTIVE:
                text += f" (port {port} of {self.context.name} is {state.name})"
        self.fail(ConnectionLostError(errno.ECONNRESET, text))

    def fail(self, cause: BaseException) -> None:
        """The connection is broken; the first cause counts, and is reported once."""
        if self.failure is not None:
            return
        self.failure = cause
        self.to_error()
        if self._base:
            self._on_failed()

    def to_error(self) -> None:
        """Queue pair to the error state: what is posted gets flushed."""
        try:
            self.qp.to_error()
        except OSError as exc:
            # The device is gone, or an iWARP connection has ended it before us.
            _log.debug("queue pair %d to error: %s", self.qp.num, exc)

    def sweep(self) -> None:
        """Take what has completed already, without waiting for the descriptor."""
        self._channel._sweep(self._cq)

    # Posting

    def post_send(self, slot: int, length: int, imm: int | None = None) -> None:
        """Send the first `length` bytes of a send slot, with the adapter's immediate if given."""
        if self.closed:
            return
        arena, place = self.send, slot
        if slot >= self._data_slots and self.control is not None:
            arena, place = self.control, slot - self._data_slots
        code = lib.aio_post_send(
            self._qp_handle,
            self._base + (slot << SUB_SHIFT),
            arena.addr + place * arena.slot_size,
            length,
            arena.key(place),
            _SIGNALED,
            imm is not None,
            imm or 0,
        )
        self.posted += 1
        if code:
            self.fail(os_error(code, "ibv_post_send"))

    def post_read(
        self, number: int, region: MemoryRegion, offset: int, length: int, remote: tuple[int, int]
    ) -> None:
        """RDMA READ `length` bytes of `remote` (address, key) into a region."""
        if self.closed:
            return
        code = lib.aio_post_read(
            self._qp_handle,
            self._base + ((_READ | number) << SUB_SHIFT),
            region.addr + offset,
            length,
            region.lkey,
            remote[0],
            remote[1],
        )
        self.posted += 1
        if code:
            self.fail(os_error(code, "ibv_post_send"))

    def post_recv(self, slots: Iterable[int]) -> None:
        """Post receive slots; those that follow one another in one registration, in one chain."""
        arena = self.recv
        for key, chain in itertools.groupby(slots, arena.key):
            if self.closed or self.failure is not None:
                return
            numbers = ffi.new("uint16_t[]", list(chain))
            code = lib.aio_post_recv_slots(
                self._qp_handle,
                self._base + (_RECV << SUB_SHIFT),
                arena.addr,
                arena.slot_size,
                key,
                numbers,
                len(numbers),
            )
            self.posted += len(numbers)
            if code:
                self.fail(os_error(code, "ibv_post_recv"))

    def in_loop(self, function: Callable[[], None]) -> None:
        """Run `function` in the connection's loop: now if that is this thread, else soon.

        A message may be released, or collected, in any thread.
        """
        if threading.get_ident() == self._thread:
            function()
        elif not self.loop.is_closed():
            self.loop.call_soon_threadsafe(function)

    # Memory beside the slots

    def pin(self, region: MemoryRegion) -> None:
        """Keep a region registered until `unpin`, or until the queue pair is gone.

        Raises:
            ResourceClosedError: The connection is closed.
        """
        if self.closed:
            raise ResourceClosedError(errno.ECONNABORTED, "the connection is closed")
        region._retain()
        self._pinned.add(region)

    def unpin(self, region: MemoryRegion) -> None:
        """The adapter is done with the region."""
        if region in self._pinned:
            self._pinned.discard(region)
            region._let_go()

    def open_access(self, rights: Access) -> None:
        """Let the peer use regions registered for it in these ways; counted."""
        before = self._rights()
        self._open_rights.update(rights)
        if self._rights() != before:
            self._set_access(self._rights())

    def close_access(self, rights: Access) -> None:
        """Undo one `open_access`; a right that nobody needs any more is off again."""
        before = self._rights()
        self._open_rights.subtract(rights)
        if self._rights() != before and not self.closed and self.failure is None:
            self._set_access(self._rights())

    def _rights(self) -> Access:
        rights = Access(0)
        for right, users in self._open_rights.items():
            if users > 0:
                rights |= right
        return rights

    def _set_access(self, access: Access) -> None:
        try:
            self.qp.modify(QPAttrMask.ACCESS_FLAGS, qp_access_flags=int(access))
        except OSError as exc:
            self.fail(exc)

    # End

    async def quiesce(self) -> None:
        """After the error state: wait until everything posted came back, for a bounded time.

        Soft-RoCE may never flush some receives; destroying the queue pair ends them too.
        """
        if not self.posted:
            return
        self._idle = asyncio.Event()
        try:
            async with asyncio.timeout(_FLUSH_GRACE_S):
                await self._idle.wait()
        except TimeoutError:
            _log.debug("queue pair %d: %d requests never flushed", self.qp.num, self.posted)

    def close(self) -> None:
        """Give everything back, in the order that C needs; the C calls run in the reaper."""
        if self.closed:
            return
        self.closed = True
        if self._unexplained is not None:
            self._unexplained.cancel()
        pinned, self._pinned = self._pinned, set()

        def let_go(_: object) -> None:
            for region in pinned:
                region._let_go()

        self.qp._gone.add_done_callback(let_go)
        self.qp._on_first_failure = None
        self.qp.close()
        if self._base:
            self._channel.table.remove(self._base)
        self._parts = self._slots.close(self.qp)
        self.pool.close()
        self.pd.close()
        self.cm_id.close()
        for function in self._at_close:
            function()

    def at_close(self, function: Callable[[], None]) -> None:
        """Have `function` called by `close()`."""
        self._at_close.append(function)

    async def wait_closed(self) -> None:
        """Wait until the adapter holds nothing of this connection any more, for a bounded time.

        Soft-RoCE can take 50 seconds for a destroy.  That goes on in the reaper.
        """
        try:
            async with asyncio.timeout(_DESTROY_S):
                for resource in (self.qp, *self._parts, self.pd, self.cm_id):
                    try:
                        await resource.wait_closed()
                    except OSError as exc:
                        _log.warning("%r: %s", resource, exc)
        except TimeoutError:
            _log.warning("queue pair %d: destroying it takes long", self.qp.num)

    def describe(self) -> dict[str, Any]:
        """Device, port, GID and so on, as `Connection.get_extra_info` tells them."""
        port = self.cm_id.port_num
        attributes = self.context.query_port(port)
        gid = self.cm_id.local_gid
        if not any(gid):  # iWARP connects without one
            gid = self.context.query_gid(port).gid
        return {
            "device": self.context.name,
            "port": port,
            "gid": gid,
            "link_layer": attributes.link_layer.name,
            "transport": self.context.transport.name,
            "mtu": 128 << int(attributes.active_mtu),
            "qpn": self.qp.num,
            "backend": "rdma",
        }
