"""StreamPort: the adapter's side of a stream: queue pair, rings, receives.

Theory of operation
    Bytes land in the ring by the peer's RDMA WRITE; what tells of them is a 32-bit word, which is
    the immediate of that WRITE, or on iWARP a SEND of four bytes behind it.  A receive is there to
    be used up by a word; it takes no bytes of data.

    A few more receives are posted than are announced: words about buffers and the end are not
    counted, and used-up receives are posted again by the chain, not one by one.

    Most completions never get here: `attach` gives them to `StreamState`, which hands on what is
    not plain, and counts what is under way.

    The ring and the table are the only memory that the peer may write to.  They are registered
    each for itself, so that the adapter refuses what is written beyond one of them; what is for
    this side alone is one registration.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from socket import ntohl

from aiordma._core import STREAM_MESSAGE, STREAM_PROBE, STREAM_RECV, SUB_SHIFT, StreamState
from aiordma._ffi import ffi
from aiordma.cm.connection_id import ConnectionId
from aiordma.cm.description import describe
from aiordma.errors import ProtocolError, os_error
from aiordma.link.adapter_side import AdapterSide
from aiordma.link.shared_queues import SharedQueues
from aiordma.loop.empty import nobody
from aiordma.loop.workers import call_blocking
from aiordma.rsocket.machine import Machine, Place, Post
from aiordma.streams.plan import WORD_SIZE, Plan, plan_of
from aiordma.streams.stream_config import StreamConfig
from aiordma.verbs.comp_channel import CompletionChannel, shared_completions
from aiordma.verbs.context import Context
from aiordma.verbs.cq import CompletionQueue
from aiordma.verbs.enums import Access, WCFlags
from aiordma.verbs.mr import INLINE_BYTES, MemoryRegion
from aiordma.verbs.pd import ProtectionDomain
from aiordma.verbs.qp import QueuePair
from aiordma.verbs.resource import Resource
from aiordma.verbs.wc import WCRecord

__all__ = ["StreamPort"]

_WORD = struct.Struct("=I")
_THEIRS = Access.LOCAL_WRITE | Access.REMOTE_WRITE
_WITH_IMM = int(WCFlags.WITH_IMM)


async def _registered(
    pd: ProtectionDomain, size: int, access: Access, *, clear: bool
) -> MemoryRegion:
    """Memory of the stream's own, in a thread if that takes long."""
    if size <= INLINE_BYTES:
        return MemoryRegion.slab(pd, size, access, clear=clear)
    return await call_blocking(
        lambda: MemoryRegion.slab(pd, size, access, clear=clear), undo=MemoryRegion.close
    )


class StreamPort(AdapterSide):
    """What the adapter holds for one stream.

    Made by `open`; `start` begins to receive.

    Attributes:
        ring: Where the peer's bytes land; a piece of it is a `bytes` object, copied once.
        send: Where own bytes lie while they are sent.
        state: Data and credits.
        plan: What follows from its configuration.
    """

    __slots__ = (
        "_attached", "_iwarp", "_on_flushed_out", "_on_sent", "_on_word", "_probing", "_regions",
        "_words_view", "plan", "ring", "send", "state",
    )  # fmt: skip

    def __init__(
        self,
        cm_id: ConnectionId,
        context: Context,
        channel: CompletionChannel,
        pd: ProtectionDomain,
        cq: CompletionQueue,
        qp: QueuePair,
        regions: list[MemoryRegion],
        plan: Plan,
    ) -> None:
        super().__init__(cm_id, context, channel, pd, cq, qp)
        config = plan.config
        self.plan = plan
        self._regions = regions
        ring, table, own = regions
        self._iwarp = context.is_iwarp
        self._words_view = own.view[plan.words :] if self._iwarp else None
        self._probing = False
        self._on_flushed_out: Callable[[], None] | None = None
        self._attached = False
        self.send = own.view[: config.send_buffer_size]
        self.ring = ffi.buffer(ffi.cast("char *", ring.addr), ring.length)
        self.state = StreamState(
            ring=(ring.addr, ring.rkey, ring.length),
            table=table.addr,
            send=(own.addr, config.send_buffer_size, own.lkey),
            credits=config.recv_depth,
            send_depth=plan.sends - 1,
            iwarp=self._iwarp,
            inline_size=qp.limits.max_inline_data,
            # Addresses keep nothing alive.
            memory=[region.view for region in regions],
        )

    @classmethod
    async def open(cls, cm_id: ConnectionId, config: StreamConfig) -> StreamPort:
        """Allocate everything on the device of `cm_id`.

        Raises:
            OSError: Out of memory that may be pinned, descriptors or adapter resources.

        Cancellation: what was made is destroyed.
        """
        context = cm_id.context
        assert context is not None
        plan = plan_of(config, iwarp=context.is_iwarp)
        channel, release = shared_completions(context)
        undo = [release]
        try:
            queues, release_queues = SharedQueues.of(channel, quiet=False)
            undo.append(release_queues)
            pd = ProtectionDomain(context)
            undo.append(pd.close)
            regions = []
            for size, access in (
                (config.receive_buffer_size, _THEIRS),
                (plan.table, _THEIRS),
                (plan.own, Access.LOCAL_WRITE),
            ):
                # What others have left in a ring the peer could claim to have sent.
                region = await _registered(pd, size, access, clear=access is _THEIRS)
                undo.append(region.close)
                regions.append(region)
            cq = queues.take(plan.completions)
            cm_id.policy = plan.policy
            qp = cm_id.create_qp(pd, plan.attributes, tuple(regions), cq)
        except BaseException:
            for function in reversed(undo):
                function()
            raise
        # The machine counts what is posted; the queue pair's own count is for others.
        qp._sq.room.try_acquire(plan.sends)
        port = cls(cm_id, context, channel, pd, cq, qp, regions, plan)
        port.at_close(release_queues)
        port.at_close(release)
        return port

    def machine(self) -> Machine:
        """The protocol's side of this stream."""
        (ring, table), plan = self._regions[:2], self.plan
        return Machine(
            ring=Place(ring.addr, ring.rkey, ring.length),
            table=Place(table.addr, table.rkey, table.length),
            memory=table.view,
            credits=plan.config.recv_depth,
            send_depth=plan.sends - 1,
            iwarp=self._iwarp,
            state=self.state,
        )

    def start(
        self,
        on_word: Callable[[int], None],
        on_sent: Callable[[int], None],
        on_failed: Callable[[], None],
    ) -> None:
        """Set the handlers, have completions delivered and post all receives.

        Messages complete in the order in which they were posted; `on_sent` gets the word of each.
        """
        self._on_word = on_word
        self._on_sent = on_sent
        self._begin(on_failed)
        own = self._regions[2]
        words = own.addr + self.plan.words if self._iwarp else 0
        qp = int(ffi.cast("uintptr_t", self._qp_handle))
        self.state.bind(qp, self._base, words, own.lkey)
        self.check(self.state.fill(self.plan.receives), "recv")

    def attach(self, news: Callable[[int], None]) -> None:
        """Have C take completions from now on, and call `news`; not in the midst of a drain."""
        if not self._attached and not self.closed and self.failure is None:
            self._attached = True
            self._tell(news)

    def _tell(self, news: Callable[[int], None]) -> None:
        self._channel.drain.add(self._base, self.state, news)

    def _on_flushed(self, _: int) -> None:
        self._came_back()

    # Completions

    def __call__(self, record: WCRecord) -> None:
        """One of its requests has completed, and was not plain."""
        if self._attached:
            self.state.passed -= 1
        sub = (record[0] >> SUB_SHIFT) & 0xFFFF
        if sub & STREAM_RECV and not record[1]:
            self._received(sub & 0x7FFF, record)
        elif sub & STREAM_RECV:
            self.state.posted -= 1
            self._failed(record)
        elif sub & STREAM_MESSAGE:
            self._completed(sub, record)
        elif record[1]:
            self.posted -= sub == STREAM_PROBE
            self._failed(record)
        elif sub == STREAM_PROBE:
            self.posted -= 1
            self._probing = False
            self._probed()
        self._came_back()

    @property
    def under_way(self) -> int:
        """Work requests whose completion will come."""
        return self.posted + self.state.posted

    def _completed(self, sub: int, record: WCRecord) -> None:
        """A message has completed, and with it all before it."""
        failed = bool(record[1])
        count = self.state.reach(sub)
        for _ in range(count - failed):
            self._on_sent(self.state.retire())
        if failed:
            if count:
                self.state.drop()
            self._failed(record)

    def _received(self, slot: int, record: WCRecord) -> None:
        if self._words_view is not None:
            word = _WORD.unpack_from(self._words_view, slot * WORD_SIZE)[0]
            whole = record[4] == WORD_SIZE
        else:
            word = ntohl(record[5])
            whole = bool(record[8] & _WITH_IMM)
        self.check(self.state.used(slot), "recv")
        if whole:
            self._on_word(word)
        else:
            self.fail(ProtocolError(71, "the peer broke the protocol: a message without a word"))

    def _operation(self, sub: int) -> str:
        return "receive" if sub & STREAM_RECV else "send"

    # Posting

    def post(self, post: Post) -> None:
        """Send a control message."""
        if self.closed or self.failure is not None:
            return
        self.check(self.state.control(post.word, post.wrs, post.payload, post.addr, post.key, True))

    def check(self, code: int, what: str = "send") -> None:
        """What a function of stream.c returned: anything but 0 ends the connection."""
        if code:
            self.fail(os_error(code, f"ibv_post_{what}"))

    def probe(self) -> None:
        """Have the peer's adapter acknowledge nothing; a failure tells that it is gone."""
        if self.closed or self.failure is not None or self._probing:
            return
        self._probing = True
        self.posted += 1
        if code := self.state.probe():
            self.fail(os_error(code, "ibv_post_send"))

    def flush(self, done: Callable[[], None]) -> None:
        """Have `done` called when the peer's adapter has everything that was posted; once.

        Not where the connection breaks before.
        """
        # A probe that is on its way already stands for what was posted before it, and no more.
        waiting = self._probing
        self._on_flushed_out = (lambda: self.flush(done)) if waiting else done
        self.probe()

    def _probed(self) -> None:
        done, self._on_flushed_out = self._on_flushed_out, None
        if done is not None:
            done()

    # Memory of the program's own

    def keep(self, region: MemoryRegion) -> None:
        """Deregister it at the end."""
        self._regions.append(region)

    def forget(self, region: MemoryRegion) -> None:
        """The program has deregistered it."""
        self._regions.remove(region)

    # End

    def to_error(self) -> None:
        """Queue pair to the error state: what is posted gets flushed.

        C counts the receives; all else that completes from now on is Python's.
        """
        self.state.dead = True
        if self._attached and not self.state.flushing:
            self.state.flushing = True
            self._tell(self._on_flushed)
        super().to_error()

    def close(self) -> None:
        """Give everything back; see `AdapterSide.close`."""
        self.state.dead = True
        if self._attached:
            self._attached = False
            self._channel.drain.remove(self._base)
        super().close()
        self._on_word = self._on_sent = self._on_failed = nobody
        self._on_flushed_out = None

    def poison_after_fork(self) -> None:
        """In a forked child: nothing may be posted."""
        self.state.dead = True
        super().poison_after_fork()

    def _give_back(self) -> list[Resource]:
        for region in self._regions:
            region.close()
        return list(self._regions)

    def describe(self) -> dict[str, object]:
        """Device, port, GID and so on, as `RdmaTransport.get_extra_info` tells them."""
        return describe(self.cm_id, self.context, self.qp)
