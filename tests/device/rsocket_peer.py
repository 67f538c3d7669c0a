"""A peer of the rsockets protocol made of the native layer: it says what a test tells it to say.

Its own memory is in order, so that an honest answer of the other side arrives: a ring of 2 * 1024
bytes, a table, receives.  It posts and does not wait.
"""

from __future__ import annotations

import struct
import sys

from aiordma.cm import ConnectionEvent, ConnectionId, ConnectionParameter
from aiordma.rsocket import Descriptor, Hello
from aiordma.verbs import SGE, Opcode, RecvWR, SendWR, WCStatus, WorkCompletion
from tests.device.oracle import until
from tests.native_ends import ALL, LIMIT_S, End

# The retries of rnr_retry_count are those of the other side; its own adapter makes as many as the
# other side has asked for.
DEPTHS = ConnectionParameter.exact(
    responder_resources=0, initiator_depth=0, retry_count=6, rnr_retry_count=7
)
READS = ConnectionParameter.exact(
    responder_resources=1, initiator_depth=1, retry_count=6, rnr_retry_count=7
)
RING = 2048
CREDITS = 40
_SENDS = 128
_RECEIVES = 64
_SENT = 1000  # wr_id of what it sends
_WORD = struct.Struct("=I")
# Where things are in its one region.
_TABLE, _WORDS, _RING, _SOURCE, _SIZE = 0, 1024, 4096, 8192, 16384


class Peer(End):
    """One side of a connection.

    Args:
        cm_id: On the active side resolved, on the passive side the request's.
        receives: How many words it can take.

    Attributes:
        theirs: What the other side said of itself.
        failure: The first post that `under_way` has found failed; those behind it are flushed.
    """

    theirs: Hello
    failure: WorkCompletion | None = None

    def __init__(self, cm_id: ConnectionId, receives: int = _RECEIVES) -> None:
        super().__init__(cm_id)
        self.build(room=_SENDS + _RECEIVES, max_send_wr=_SENDS, max_recv_wr=_RECEIVES)
        self.mr = self.region(_SIZE, ALL)
        self.iwarp = self.context.is_iwarp
        self.posted = 0
        self._used = 0
        if receives:
            self.qp.post_recv([self._receive(i) for i in range(receives)])

    def _receive(self, index: int) -> RecvWR:
        if not self.iwarp:
            return RecvWR(index)
        return RecvWR(index, (SGE(self.mr, _WORDS + 4 * index, 4),))

    @property
    def hello(self) -> Hello:
        """Its private data, if it is honest."""
        addr, key = self.mr.addr, self.mr.rkey
        big_endian = sys.byteorder == "big"
        return Hello(
            CREDITS, addr + _TABLE, key, 2, addr + _RING, key, RING // 2, 0, big_endian
        )  # fmt: skip

    @property
    def second_half(self) -> Descriptor:
        """The buffer that it advertises after the first."""
        return Descriptor(self.mr.addr + _RING + RING // 2, self.mr.rkey, RING // 2)

    async def connect(self, private_data: bytes | None = None, *, reads: bool = False) -> None:
        """Connect, and take the reply.

        Args:
            private_data: Instead of honest ones.
            reads: Have the other side allow a read at a time, as far as it goes.

        Raises:
            ConnectionFailedError: The other side refused.
        """
        data = self.hello.pack() if private_data is None else private_data
        # iWARP's connection manager wants a read promised.
        depths = READS if reads or self.iwarp else DEPTHS
        event = await self.cm_id.connect(depths, private_data=data, timeout=20)
        self.theirs = Hello.parse(event.private_data)

    async def accept(self, request: ConnectionEvent, private_data: bytes | None = None) -> None:
        """Answer the other side's request."""
        self.theirs = Hello.parse(request.private_data)
        data = self.hello.pack() if private_data is None else private_data
        depths = READS if self.iwarp else DEPTHS
        await self.cm_id.accept(depths, private_data=data, timeout=20)

    # What it says

    def say(self, word: int, data: bytes = b"", addr: int = 0, key: int = 0) -> None:
        """Write the bytes there, and the word behind them."""
        pieces = self._source(data)
        if self.iwarp:
            if data:
                self._post(SendWR(_SENT, pieces, Opcode.RDMA_WRITE, remote_addr=addr, rkey=key))
            self._post(SendWR(_SENT, self._source(_WORD.pack(word)), Opcode.SEND))
        else:
            opcode = Opcode.RDMA_WRITE_WITH_IMM
            self._post(SendWR(_SENT, pieces, opcode, imm_data=word, remote_addr=addr, rkey=key))

    def advertise(self, entry: int, descriptor: bytes, limit: int = CREDITS) -> None:
        """Write a descriptor into an entry of the other side's table, with a word of credit."""
        place = self.theirs.table_addr + 16 * entry
        self.say(0x80000000 | limit, descriptor, place, self.theirs.table_key)

    def data(self, data: bytes, offset: int = 0) -> None:
        """Write data at that offset of the other side's ring, with the word that fits."""
        theirs = self.theirs
        self.say(len(data), data, theirs.buffer_addr + offset, theirs.buffer_key)

    def message(self, data: bytes) -> None:
        """A message that is no word: too short for one, and without an immediate."""
        self._post(SendWR(_SENT, self._source(data), Opcode.SEND))

    def under_way(self) -> int:
        """Its posts that have not completed, with success or without."""
        done = [wc for wc in self.cq.poll(_SENDS + _RECEIVES) if wc.wr_id == _SENT]
        self.posted -= len(done)
        for wc in done:
            if self.failure is None and wc.status != WCStatus.SUCCESS:
                self.failure = wc
        return self.posted

    async def finished(self) -> None:
        """Wait until each of its posts has completed."""
        await until(lambda: not self.under_way(), LIMIT_S)

    def _source(self, data: bytes) -> tuple[SGE, ...]:
        if not data:
            return ()
        if self._used + len(data) > _SIZE - _SOURCE:
            self._used = 0
        start = _SOURCE + self._used
        self._used += len(data)
        self.mr.view[start : start + len(data)] = data
        return (SGE(self.mr, start, len(data)),)

    def _post(self, request: SendWR) -> None:
        self.posted += 1
        self.qp.post_send(request)
