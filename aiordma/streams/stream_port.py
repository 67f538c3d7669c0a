"""StreamPort: the adapter's side of a stream: queue pair, rings, receives.

Theory of operation
    Bytes land in the ring by the peer's RDMA WRITE; what tells of them is a 32-bit word, which is
    the immediate of that WRITE, or on iWARP a SEND of four bytes behind it.  A receive is there to
    be used up by a word; it takes no bytes of data.

    A few more receives are posted than are announced: words about buffers and the end are counted
    by nobody, and used-up receives are posted again by the chain, not one by one.

    Most completions never get here: `attach` gives them to `_ffi/stream.c`, which hands on what is
    not plain.  Its struct (`lane`) counts what is under way.

    The ring and the table are the only memory that the peer may write to.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable
from socket import ntohl

from aiordma._ffi import ffi, lib
from aiordma.cm.connection_id import ConnectionId
from aiordma.cm.description import describe
from aiordma.cm.qp_transition import QPPolicy
from aiordma.endpoint.adapter_side import AdapterSide
from aiordma.endpoint.shared_queues import SharedQueues
from aiordma.errors import ProtocolError, os_error
from aiordma.loop.empty import nobody
from aiordma.loop.slots import SUB_SHIFT
from aiordma.rsocket.machine import Place, Post
from aiordma.rsocket.wire import DESCRIPTOR_SIZE, IOMAP_SLOT_SIZE, TABLE_LENGTH
from aiordma.streams.lane import LaneMachine, new_lane
from aiordma.streams.stream_config import StreamConfig
from aiordma.verbs.comp_channel import CompletionChannel, shared_completions
from aiordma.verbs.context import Context
from aiordma.verbs.cq import CompletionQueue
from aiordma.verbs.enums import Access, WCFlags
from aiordma.verbs.mr import MemoryRegion
from aiordma.verbs.pd import ProtectionDomain
from aiordma.verbs.qp import QPInitAttr, QueuePair
from aiordma.verbs.resource import Resource
from aiordma.verbs.rnr_timer import rnr_timer_code
from aiordma.verbs.wc import WCRecord

__all__ = ["StreamPort"]

# Sub-indices of the ids; all but the last are stream.c's.
_RECV = 0x8000
_MESSAGE = 0x4000
_PROBE = 4
_CONTROLS = 4  # control messages under way, as the protocol has it
_PAYLOAD = IOMAP_SLOT_SIZE  # of a control message: a descriptor, or a mapping
_MAPPED_WRITES = 16  # under way past the stream, see iomap.py
_CHAIN = 8  # receives that are posted together
_UNANNOUNCED = 16 + _CHAIN
_WORD = struct.Struct("=I")
_INLINE = 64
_WITH_IMM = int(WCFlags.WITH_IMM)


class StreamPort(AdapterSide):
    """What the adapter holds for one stream.

    Made by `open`; `start` begins to receive.

    Attributes:
        ring: Where the peer's bytes land; a piece of it is a `bytes` object, copied once.
        send: Where own bytes lie while they are sent.
        lane: The `struct aio_stream`.
    """

    __slots__ = (
        "_attached", "_config", "_iwarp", "_keep", "_on_sent", "_on_word", "_probing", "_regions",
        "_words_view", "lane", "ring", "send",
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
        config: StreamConfig,
    ) -> None:
        super().__init__(cm_id, context, channel, pd, cq, qp)
        self._regions = regions
        ring, table, source, *words = regions
        self._words_view = words[0].view if words else None
        self._config = config
        self._iwarp = context.is_iwarp
        self._probing = False
        self._attached = False
        self.send = source.view[: config.send_buffer_size]
        self.ring = ffi.buffer(ffi.cast("char *", ring.addr), ring.length)
        self.lane, keep = new_lane(
            ring=Place(ring.addr, ring.rkey, ring.length),
            table=table.addr,
            send=(source.addr, config.send_buffer_size, source.lkey),
            credits=config.recv_depth,
            send_depth=config.send_depth * (2 if self._iwarp else 1),
            iwarp=self._iwarp,
            inline_size=qp.limits.max_inline_data,
        )
        # Addresses keep nothing alive, and a view that exports must not get to the collector.
        self._keep = [keep, *(region.view for region in regions)]
        self.lane.qp = self._qp_handle
        if words:
            self.lane.words = ffi.cast("uint8_t *", words[0].addr)
            self.lane.words_lkey = words[0].lkey

    @classmethod
    async def open(cls, cm_id: ConnectionId, config: StreamConfig) -> StreamPort:
        """Allocate everything on the device of `cm_id`.

        Raises:
            OSError: Out of memory that may be pinned, descriptors or adapter resources.

        Cancellation: what was made is destroyed.
        """
        context = cm_id.context
        assert context is not None
        channel, release = shared_completions(context)
        with contextlib.ExitStack() as undo:
            undo.callback(release)
            queues, release_queues = SharedQueues.of(channel, quiet=False)
            undo.callback(release_queues)
            pd = ProtectionDomain(context)
            undo.callback(pd.close)
            receives = config.recv_depth + _UNANNOUNCED
            # On iWARP a message is two requests; one more is the probe's.
            sends = config.send_depth * (2 if context.is_iwarp else 1) + 1
            theirs = Access.LOCAL_WRITE | Access.REMOTE_WRITE
            slots = config.iomap_slots
            others = _MAPPED_WRITES if slots else 0
            wanted = [
                (config.receive_buffer_size, theirs),
                (TABLE_LENGTH * DESCRIPTOR_SIZE + slots * IOMAP_SLOT_SIZE, theirs),
                (config.send_buffer_size + _CONTROLS * _PAYLOAD, Access.LOCAL_WRITE),
            ]
            if context.is_iwarp:
                wanted.append((receives * _WORD.size, Access.LOCAL_WRITE))
            regions = []
            for size, access in wanted:
                region = await MemoryRegion.register(pd, size, access)
                undo.callback(region.close)
                regions.append(region)
            cq = queues.take(sends + others + receives)
            cm_id.policy = QPPolicy(
                access=Access.REMOTE_WRITE,
                ack_timeout=config.ack_timeout,
                max_retry_count=config.retry_count,
                max_rnr_retry_count=config.rnr_retry_count,
                min_rnr_timer=rnr_timer_code(config.min_rnr_timer_ms),
            )
            attr = QPInitAttr(
                send_cq=cq,
                max_send_wr=sends + others,
                max_recv_wr=receives,
                max_send_sge=1,
                max_recv_sge=1,
                max_inline_data=_INLINE,
            )
            qp = cm_id.create_qp(pd, attr, tuple(regions))
            # The machine counts what is posted; the queue pair's own count is for others.
            qp._sq.room.try_acquire(sends)
            undo.pop_all()
        port = cls(cm_id, context, channel, pd, cq, qp, regions, config)
        port.at_close(release_queues)
        port.at_close(release)
        return port

    def machine(self) -> LaneMachine:
        """The protocol's side of this stream."""
        ring, table = self._regions[:2]
        config = self._config
        return LaneMachine(
            self.lane,
            ring=Place(ring.addr, ring.rkey, ring.length),
            table=Place(table.addr, table.rkey, table.length),
            memory=table.view,
            credits=config.recv_depth,
            send_depth=config.send_depth * (2 if self._iwarp else 1),
            iwarp=self._iwarp,
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
        self.lane.wr_id = self._base
        self.check(lib.aio_stream_fill(self.lane, self._config.recv_depth + _UNANNOUNCED), "recv")

    def attach(self, news: Callable[[int], None]) -> None:
        """Have C take completions from now on, and call `news`; not in the midst of a drain."""
        if not self._attached and not self.closed and self.failure is None:
            self._attached = True
            self._tell(news)

    def _tell(self, news: Callable[[int], None]) -> None:
        sink = ffi.cast("struct aio_sink *", self.lane)
        self._channel.sinks.add(self._base, sink, news)

    def _on_flushed(self, _: int) -> None:
        self._came_back()

    # Completions

    def __call__(self, record: WCRecord) -> None:
        """One of its requests has completed, and was not plain."""
        lane = self.lane
        if self._attached:
            lane.sink.spilled -= 1
        sub = (record[0] >> SUB_SHIFT) & 0xFFFF
        if sub & _RECV and not record[1]:
            self._received(sub & 0x7FFF, record)
        elif sub & _RECV:
            lane.posted -= 1
            self._failed(record)
        elif sub & _MESSAGE:
            self._completed(sub, record)
        elif record[1]:
            self.posted -= sub == _PROBE
            self._failed(record)
        elif sub == _PROBE:
            self.posted -= 1
            self._probing = False
        self._came_back()

    @property
    def under_way(self) -> int:
        """Work requests whose completion will come."""
        return self.posted + int(self.lane.posted)

    def _completed(self, sub: int, record: WCRecord) -> None:
        """A message has completed, and with it all before it."""
        lane, failed = self.lane, bool(record[1])
        count = lib.aio_stream_reach(lane, sub)
        for _ in range(count - failed):
            self._on_sent(lib.aio_stream_retire(lane))
        if failed:
            if count:
                lib.aio_stream_drop(lane)
            self._failed(record)

    def _received(self, slot: int, record: WCRecord) -> None:
        if self._words_view is not None:
            word = _WORD.unpack_from(self._words_view, slot * _WORD.size)[0]
            whole = record[4] == _WORD.size
        else:
            word = ntohl(record[5])
            whole = bool(record[8] & _WITH_IMM)
        self.check(lib.aio_stream_used(self.lane, slot), "recv")
        if whole:
            self._on_word(word)
        else:
            self.fail(ProtocolError(71, "the peer broke the protocol: a message without a word"))

    def _operation(self, sub: int) -> str:
        return "receive" if sub & _RECV else "send"

    # Posting

    def post(self, post: Post) -> None:
        """Send a control message."""
        if self.closed or self.failure is not None:
            return
        code = lib.aio_stream_control(
            self.lane, post.word, post.wrs, post.payload, post.length, post.addr, post.key, 1
        )
        self.check(code)

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
        code = lib.aio_post_probe(self._qp_handle, self._base + (_PROBE << SUB_SHIFT))
        if code:
            self.fail(os_error(code, "ibv_post_send"))

    @property
    def memory(self) -> object:
        """What keeps the lane alive, and all that it points to; it leads nowhere else."""
        return self.lane, self._keep

    # Memory of the program's own

    def keep(self, region: MemoryRegion) -> None:
        """Deregister it at the end."""
        self._regions.append(region)

    def forget(self, region: MemoryRegion) -> None:
        """Somebody else has deregistered it."""
        self._regions.remove(region)

    # End

    def to_error(self) -> None:
        """Queue pair to the error state: what is posted gets flushed.

        C counts the receives; all else that completes from now on is Python's.
        """
        self.lane.dead = 1
        if self._attached and not self.lane.flushing:
            self.lane.flushing = 1
            self._tell(self._on_flushed)
        super().to_error()

    def close(self) -> None:
        """Give everything back; see `AdapterSide.close`."""
        self.lane.dead = 1
        if self._attached:
            self._attached = False
            self._channel.sinks.remove(self._base)
        super().close()
        self._on_word = self._on_sent = self._on_failed = nobody

    def poison_after_fork(self) -> None:
        """In a forked child: nothing may be posted."""
        self.lane.dead = 1
        super().poison_after_fork()

    def _give_back(self) -> list[Resource]:
        for region in self._regions:
            region.close()
        return list(self._regions)

    def describe(self) -> dict[str, object]:
        """Device, port, GID and so on, as `RdmaTransport.get_extra_info` tells them."""
        return describe(self.cm_id, self.context, self.qp)
