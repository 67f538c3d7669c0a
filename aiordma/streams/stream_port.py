"""StreamPort: the adapter's side of a stream: queue pair, rings, receives.

Theory of operation
    Bytes land in the ring by the peer's RDMA WRITE; a 32-bit word reports them, which is the
    immediate of that WRITE, or on iWARP a SEND of four bytes behind it.  A word uses up a receive,
    which takes no bytes of data.

    A few more receives are posted than are announced: words about buffers and the end are not
    counted, and used-up receives are posted again in chains, not one by one.

    Most completions never get here: from `attach` on `StreamState` takes them, counts requests, and
    passes on the others, such as failures.

    The ring and the table are the only memory that the peer may write to.  Each is a registration
    of its own, so that the adapter refuses a write beyond it; this side's memory is one.
"""

from __future__ import annotations

import errno
import struct
from socket import ntohl
from typing import ClassVar, Protocol

from aiordma._core import STREAM_MESSAGE, STREAM_PROBE, STREAM_RECV, SUB_SHIFT, StreamState
from aiordma._ffi import ffi
from aiordma.cm.connection_id import ConnectionId
from aiordma.errors import ConnectionLostError, ProtocolError, os_error
from aiordma.link.adapter_side import AdapterSide, Owner
from aiordma.link.completions import Completions
from aiordma.link.shared_queues import SharedQueues
from aiordma.logs import Log, log_of
from aiordma.rsocket.machine import Machine, Place
from aiordma.streams.plan import WORD_SIZE, Plan, plan_of
from aiordma.streams.stream_config import StreamConfig
from aiordma.streams.stream_memory import StreamMemory
from aiordma.verbs.comp_channel import shared_completions
from aiordma.verbs.context import Context
from aiordma.verbs.enums import WCFlags
from aiordma.verbs.pd import ProtectionDomain
from aiordma.verbs.qp import QueuePair
from aiordma.verbs.resource import Resource
from aiordma.verbs.wc import WCRecord

__all__ = ["StreamOwner", "StreamPort"]

_WORD = struct.Struct("=I")
_WITH_IMM = int(WCFlags.WITH_IMM)
_OUT_OF_TURN = "the adapter completed a receive twice, or out of order"


class StreamOwner(Owner, Protocol):
    """A stream, as its port sees it: called in the midst of a drain."""

    def _on_word(self, word: int) -> None:
        """The peer has sent a word."""

    def _on_sent(self, words: list[int]) -> None:
        """Messages have completed, with these words of control messages, in the order of posts."""

    def _on_flushed(self) -> None:
        """The peer's adapter has acknowledged the requests that were posted before `flush`."""


class StreamPort(AdapterSide):
    """The queue pair of one stream and its resources.

    Made by `open`; `start` begins to receive.  Its probe is a WRITE of no bytes, which the peer's
    adapter acknowledges behind all earlier requests.  `posted` counts the probe under way: C counts
    the other requests.

    Attributes:
        memory: The rings.
        state: Data and credits.
    """

    __slots__ = ("_awaited", "memory", "plan", "state")

    _owner: StreamOwner | None
    log: ClassVar[Log] = log_of("stream")

    posted: int

    def __init__(
        self,
        cm_id: ConnectionId,
        context: Context,
        completions: Completions,
        pd: ProtectionDomain,
        qp: QueuePair,
        memory: StreamMemory,
        plan: Plan,
    ) -> None:
        super().__init__(cm_id, context, completions, pd, qp)
        config = plan.config
        self.plan: Plan = plan
        self.memory: StreamMemory = memory
        self._awaited = 0  # acknowledgements until the requests posted before `flush` have arrived
        ring, table, own = memory.ring, memory.table, memory.own
        self.state: StreamState = StreamState(
            ring=(ring.addr, ring.rkey, ring.length),
            table=table.addr,
            send=(own.addr, plan.sending, own.lkey),
            credits=plan.credits,
            send_depth=plan.sends - 1,
            iwarp=context.is_iwarp,
            inline_size=qp.limits.max_inline_data,
            memory=memory.views,  # addresses keep nothing alive
        )
        if spins := self.completions.spins(config, 1):
            self.state.spin_with(*spins)
        if plan.ring < config.receive_buffer_size:
            self.state.grow_after(plan.ring)

    @classmethod
    async def open(cls, cm_id: ConnectionId, config: StreamConfig) -> StreamPort:
        """Allocate everything on the device of `cm_id`.

        Raises:
            OSError: Out of memory that may be pinned, descriptors or adapter resources.

        Cancellation: the resources are destroyed.
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
            memory = await StreamMemory.register(pd, plan)
            undo.append(memory.close)
            cq = queues.take(plan.completions)
            cm_id.policy = plan.policy
            qp = cm_id.create_qp(pd, plan.attributes, memory.regions, cq)
        except BaseException:
            for function in reversed(undo):
                function()
            raise
        # The machine counts posted requests; the queue pair's own count is for others.
        qp._sq.room.try_acquire(plan.sends)
        port = cls(cm_id, context, Completions(channel, cq), pd, qp, memory, plan)
        port.at_close(release_queues)
        port.at_close(release)
        return port

    def machine(self) -> Machine:
        """The protocol's side of this stream."""
        ring, table = self.memory.ring, self.memory.table
        return Machine(
            ring=Place(ring.addr, ring.rkey, ring.length),
            table=Place(table.addr, table.rkey, table.length),
            memory=table.view,
            credits=self.plan.credits,
            iwarp=self.context.is_iwarp,
            state=self.state,
        )

    def start(self, owner: StreamOwner) -> None:
        """Call `owner` from now on, have completions delivered and post all receives.

        Raises:
            OSError: The queue cannot be armed, or the adapter takes no receives.
        """
        self._owner = owner
        self._begin()
        own = self.memory.own
        words = own.addr + self.plan.words if self.context.is_iwarp else 0
        qp = int(ffi.cast("uintptr_t", self._qp_handle))
        if code := self.state.bind(qp, self.completions.id, words, own.lkey, self.plan.receives):
            raise os_error(code, "ibv_post_recv")

    @property
    def attached(self) -> bool:
        """Whether C takes completions."""
        return self.completions.in_c

    def attach(self) -> None:
        """Have C take completions from now on; not in the midst of a drain."""
        if not self.attached and not self.closed and self.failure is None:
            self.completions.let_c_take(self.state, self.state)

    def _on_flush(self, _: int) -> None:
        self.came_back()

    # Completions

    def __call__(self, record: WCRecord) -> None:
        """Take a completion that C leaves to Python."""
        if self.attached:
            self.state.seen()
        sub = (record[0] >> SUB_SHIFT) & 0xFFFF
        if sub & STREAM_RECV and not record[1]:
            self._received(sub & 0x7FFF, record)
        elif sub & STREAM_RECV:
            self.state.complete_receive(sub & 0x7FFF, True)
            self._failed(record)
        elif sub & STREAM_MESSAGE:
            self._completed(sub, record)
        else:
            self.posted -= sub == STREAM_PROBE
            if record[1]:
                self._failed(record)
            elif sub == STREAM_PROBE:
                self._probed()
        self.came_back()

    @property
    def under_way(self) -> int:
        """Work requests whose completion will come."""
        return self.posted + self.state.posted

    def _completed(self, sub: int, record: WCRecord) -> None:
        """Note that a message, and all before it, have completed."""
        failed = bool(record[1])
        words = self.state.complete_send(sub, failed)
        if self._owner is not None:
            self._owner._on_sent(words)
        if failed:
            self._failed(record)

    def _received(self, slot: int, record: WCRecord) -> None:
        if self.context.is_iwarp:
            word = _WORD.unpack_from(self.memory.words, slot * WORD_SIZE)[0]
            whole = record[4] == WORD_SIZE
        else:
            word = ntohl(record[5])
            whole = bool(record[8] & _WITH_IMM)
        code = self.state.complete_receive(slot, False)
        if code == errno.EPROTO:
            self.fail(ConnectionLostError(code, _OUT_OF_TURN))
            return
        self.check(code)
        if not whole:
            self.fail(ProtocolError(71, "the peer broke the protocol: a message without a word"))
        elif self._owner is not None:
            self._owner._on_word(word)

    def _operation(self, sub: int) -> str:
        return "receive" if sub & STREAM_RECV else "send"

    # Posting

    def check(self, code: int) -> None:
        """Take the result of a function of stream.c: anything but 0 ends the connection."""
        if code:
            receives = self.state.recv_failed
            self.fail(os_error(code, "ibv_post_recv" if receives else "ibv_post_send"))

    def probe(self) -> None:
        """Post a WRITE of no bytes: the peer's adapter acknowledges it, or the stream fails."""
        if self.closed or self.failure is not None or self.posted:
            return
        self.posted += 1
        self.check(self.state.probe())

    def flush(self) -> None:
        """Call the owner, once, when the peer's adapter has everything that was posted.

        It is not called if the connection breaks before.
        """
        # A probe under way stands for the requests posted before it, and no more.
        self._awaited = 2 if self.posted else 1
        self.probe()

    def _probed(self) -> None:
        if not self._awaited:
            return
        self._awaited -= 1
        if self._awaited:
            self.probe()
        elif self._owner is not None:
            self._owner._on_flushed()

    # Seen from outside

    @property
    def pinned_bytes(self) -> int:
        """Bytes of its rings and its table; in any thread."""
        return sum(region.length for region in self.memory.regions)

    def _sums(self) -> str:
        return f": {self.state.bytes_sent} bytes sent, {self.state.bytes_received} received"

    # End

    def to_error(self) -> None:
        """Move the queue pair to the error state: the posted requests are flushed.

        C counts the receives; all other completions from now on go to Python.
        """
        if not self.attached:
            self.state.end()
        elif self.state.flush():
            self.completions.let_c_take(self.state, self._on_flush)
        super().to_error()

    def close(self) -> None:
        """Give everything back; see `AdapterSide.close`."""
        self.state.close()
        super().close()

    def poison_after_fork(self) -> None:
        """In a forked child: nothing may be posted."""
        self.state.close()
        super().poison_after_fork()

    def _give_back(self) -> list[Resource]:
        self.memory.close()
        return [*self.memory.regions, *self.memory.sources]
