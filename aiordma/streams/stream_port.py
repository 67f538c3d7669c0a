"""StreamPort: the adapter's side of a stream: queue pair, rings, receives.

Theory of operation
    Bytes land in the ring by the peer's RDMA WRITE; what tells of them is a 32-bit word, which is
    the immediate of that WRITE, or on iWARP a SEND of four bytes behind it.  A receive is there to
    be used up by a word; it takes no bytes of data.

    A few more receives are posted than are announced: words about buffers and the end are counted
    by nobody, and used-up receives are posted again by the chain, not one by one.

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
from aiordma.endpoint.slots import SharedQueues
from aiordma.errors import ProtocolError, os_error
from aiordma.loop.slots import SUB_SHIFT
from aiordma.rsocket.machine import Machine, Place, Post
from aiordma.rsocket.wire import DESCRIPTOR_SIZE, IOMAP_SLOT_SIZE, TABLE_LENGTH
from aiordma.streams.stream_config import StreamConfig
from aiordma.verbs.comp_channel import CompletionChannel, shared_completions
from aiordma.verbs.context import Context
from aiordma.verbs.cq import CompletionQueue
from aiordma.verbs.enums import Access, SendFlags, WCFlags
from aiordma.verbs.mr import MemoryRegion
from aiordma.verbs.pd import ProtectionDomain
from aiordma.verbs.qp import QPInitAttr, QueuePair
from aiordma.verbs.resource import Resource
from aiordma.verbs.rnr_timer import rnr_timer_code
from aiordma.verbs.wc import WCRecord

__all__ = ["StreamPort"]

_RECV = 0x8000
_MESSAGE = 1
_BYTES = 2  # the WRITE before a word on iWARP: completes only when it fails
_PROBE = 4
_CONTROLS = 4  # control messages under way, as the protocol has it
_PAYLOAD = IOMAP_SLOT_SIZE  # of a control message: a descriptor, or a mapping
_MAPPED_WRITES = 16  # under way past the stream, see iomap.py
_CHAIN = 8  # receives that are posted together
_UNANNOUNCED = 16 + _CHAIN
_WORD = struct.Struct("=I")
_INLINE = 64
_WITH_IMM = int(WCFlags.WITH_IMM)
_SIGNALED = int(SendFlags.SIGNALED)
_SEND_INLINE = int(SendFlags.INLINE)


class StreamPort(AdapterSide):
    """What the adapter holds for one stream.

    Made by `open`; `start` begins to receive.

    Attributes:
        ring: Where the peer's bytes land.
        send: Where own bytes lie while they are sent.
    """

    __slots__ = (
        "_config", "_control", "_inline", "_iwarp", "_memory", "_on_sent", "_on_word", "_probing",
        "_regions", "_source", "_used", "_words", "_words_view", "ring", "send",
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
        ring, _, self._source, *words = regions
        self._words = words[0] if words else None
        self._words_view = words[0].view if words else None
        self._config = config
        self._iwarp = context.is_iwarp
        self._inline = qp.limits.max_inline_data
        self._control = 0
        self._probing = False
        self._used: list[int] = []
        self.ring = ring.view
        self._memory = self._source.view
        self.send = self._memory[: config.send_buffer_size]

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
            queues, release_queues = SharedQueues.of(channel)
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

    def machine(self) -> Machine:
        """The protocol's side of this stream."""
        ring, table = self._regions[:2]
        config = self._config
        return Machine(
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
        on_sent: Callable[[], None],
        on_failed: Callable[[], None],
    ) -> None:
        """Set the handlers, have completions delivered and post all receives.

        Messages complete in the order in which they were posted, so that `on_sent` needs no number.
        """
        self._on_word = on_word
        self._on_sent = on_sent
        self._begin(on_failed)
        self._post_receives(list(range(self._config.recv_depth + _UNANNOUNCED)))

    # Completions

    def __call__(self, record: WCRecord) -> None:
        """One of its requests has completed."""
        sub = (record[0] >> SUB_SHIFT) & 0xFFFF
        if sub != _BYTES:
            self.posted -= 1
        if record[1]:
            self._failed(record)
        elif sub & _RECV:
            self._received(sub & 0x7FFF, record)
        elif sub == _MESSAGE:
            self._on_sent()
        else:
            self._probing = False
        if self._idle is not None and not self.posted:
            self._idle.set()

    def _received(self, slot: int, record: WCRecord) -> None:
        if self._words_view is not None:
            word = _WORD.unpack_from(self._words_view, slot * _WORD.size)[0]
            whole = record[4] == _WORD.size
        else:
            word = ntohl(record[5])
            whole = bool(record[8] & _WITH_IMM)
        used = self._used
        used.append(slot)
        if len(used) >= _CHAIN:
            self._used = []
            self._post_receives(used)
        if whole:
            self._on_word(word)
        else:
            self.fail(ProtocolError(71, "the peer broke the protocol: a message without a word"))

    def _operation(self, sub: int) -> str:
        return "receive" if sub & _RECV else "send"

    # Posting

    def post(self, post: Post, offset: int = 0) -> None:
        """Send a message; its bytes lie at `offset` of `send`, unless it brings its own."""
        if self.closed or self.failure is not None:
            return
        length = post.length
        if post.payload:
            # At most four are under way, and complete in order.
            offset = self._config.send_buffer_size + self._control * _PAYLOAD
            self._control = (self._control + 1) % _CONTROLS
            self._memory[offset : offset + length] = post.payload
        code = lib.aio_post_stream(
            self._qp_handle,
            self._base + (_MESSAGE << SUB_SHIFT),
            self._base + (_BYTES << SUB_SHIFT),
            self._source.addr + offset,
            length,
            self._source.lkey,
            post.addr,
            post.key,
            post.word,
            _SIGNALED | _SEND_INLINE if length <= self._inline else _SIGNALED,
            self._iwarp,
        )
        self.posted += 1
        if code:
            self.fail(os_error(code, "ibv_post_send"))

    def probe(self) -> None:
        """Have the peer's adapter acknowledge nothing; a failure tells that it is gone."""
        if self.closed or self.failure is not None or self._probing:
            return
        self._probing = True
        self.posted += 1
        code = lib.aio_post_probe(self._qp_handle, self._base + (_PROBE << SUB_SHIFT))
        if code:
            self.fail(os_error(code, "ibv_post_send"))

    def _post_receives(self, slots: list[int]) -> None:
        if self.closed or self.failure is not None:
            return
        wr_id = self._base + (_RECV << SUB_SHIFT)
        words = self._words
        if words is None:
            code = lib.aio_post_empty_recvs(self._qp_handle, wr_id, len(slots))
        else:
            code = lib.aio_post_recv_slots(
                self._qp_handle,
                wr_id,
                words.addr,
                _WORD.size,
                words.lkey,
                ffi.new("uint16_t[]", slots),
                len(slots),
            )
        self.posted += len(slots)
        if code:
            self.fail(os_error(code, "ibv_post_recv"))

    # Memory of the program's own

    def keep(self, region: MemoryRegion) -> None:
        """Deregister it at the end."""
        self._regions.append(region)

    def forget(self, region: MemoryRegion) -> None:
        """Somebody else has deregistered it."""
        self._regions.remove(region)

    # End

    def _give_back(self) -> list[Resource]:
        for region in self._regions:
            region.close()
        return list(self._regions)

    def describe(self) -> dict[str, object]:
        """Device, port, GID and so on, as `RdmaTransport.get_extra_info` tells them."""
        return describe(self.cm_id, self.context, self.qp)
