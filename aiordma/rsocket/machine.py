"""One connection of the rsockets protocol, without input or output.

Theory of operation
    The caller (the *port*) owns the queue pair and the memory.  It posts every `Post` of the
    machine in the order in which the machine returns them, passes each arrived word and each
    completed post to the machine.  Control messages have four work requests of their own, so that
    data never delay credits or the end.

    The peer writes descriptors of its buffers into this side's table, which is ordinary memory that
    may change at any instant.  When a word reports an update of the table, the entry is copied,
    checked and cleared.  Entries are expected in turn, beginning with entry 1: entry 0 stands for
    the first buffer, which private data have described.  So entry 1 must not be touched when
    private data arrive: the peer's first update may be there already.

    If the caller takes completions first, a word may come before the private data; such words wait
    for `meet()`.

    The numbers that data and credits change are in a `StreamState`, with which C does the frequent
    cases: data is written and read there alone.  A few flags of the state say which cases C may do:
    each method that can change the flags sets them anew (`sync`).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NamedTuple

from aiordma.rsocket import flow
from aiordma.rsocket.ending import Ending
from aiordma.rsocket.iomap import Iomap
from aiordma.rsocket.wire import (
    DESCRIPTOR_SIZE,
    IOMAP_SLOT_SIZE,
    MAX_VALUE,
    TABLE_LENGTH,
    Descriptor,
    Hello,
    Kind,
    pack_word,
    protocol_error,
    unpack_word,
)

if TYPE_CHECKING:
    from aiordma._core import StreamState

__all__ = ["Machine", "Place", "Post"]

_BIG_ENDIAN = sys.byteorder == "big"
_CONTROL_WRS = 4
_TABLE_SIZE = TABLE_LENGTH * DESCRIPTOR_SIZE
_NO_DESCRIPTOR = bytes(DESCRIPTOR_SIZE)
_LENGTH_OFFSET, _NO_LENGTH = 12, bytes(4)
# Control words that a peer may send before its private data are taken; mostly it is a single word.
_EARLY_CONTROL = 64


class Place(NamedTuple):
    """Registered memory of this side that the peer may write.

    Attributes:
        addr: Address of its first byte.
        key: Remote key.
        size: Bytes.
    """

    addr: int
    key: int
    size: int


class Post(NamedTuple):
    """A message to post: an RDMA write with the word, or the word alone.

    Attributes:
        addr: Address in the peer's memory; 0 if there is nothing to write.
        key: Remote key of that memory.
        length: Bytes to write there.
        word: The word that follows the bytes.
        payload: The bytes to write.
        wrs: Work requests of the send queue that the message takes.
    """

    addr: int
    key: int
    length: int
    word: int
    payload: bytes
    wrs: int


class Machine:
    """Both directions of one connection.

    The ring must not hold bytes of other connections when the connection begins; zeros will do.  A
    peer can claim to have written bytes that it has not written.

    Args:
        ring: Memory that the peer writes data to first; the size must be even.
        table: Memory that the peer writes descriptors to, and behind them iomap slots.
        memory: The bytes of the table, writable.
        send_depth: Work requests of the send queue; four are kept for control messages.
        iwarp: Words travel as messages of their own, after the write.
        state: Holds the numbers.

    Attributes:
        iomap: The mappings of both sides.
    """

    __slots__ = (
        "_early", "_ending", "_hello", "_is_open", "_iwarp", "_listens", "_live", "_memory",
        "_peer", "_state", "iomap",
    )  # fmt: skip

    def __init__(
        self,
        *,
        ring: Place,
        table: Place,
        memory: memoryview,
        send_depth: int,
        iwarp: bool,
        state: StreamState,
    ) -> None:
        self._memory = memory
        self.iomap: Iomap = Iomap(self._memory[_TABLE_SIZE:])
        self._iwarp = iwarp
        slots = (table.size - _TABLE_SIZE) // IOMAP_SLOT_SIZE
        self._hello = Hello(
            state.credits, table.addr, table.key, TABLE_LENGTH, ring.addr, ring.key, ring.size // 2,
            slots, _BIG_ENDIAN,
        ).pack()  # fmt: skip
        self._state = state
        flow.begin_receiving(state)
        # No space and no credit before the peer's private data.
        flow.begin_sending(state, 0, Descriptor(0, 0, 0))
        self._ending = Ending()
        self._peer: Hello | None = None
        self._early: list[int] = []
        state.entry = state.peer_entry = 1
        state.data_wrs = 2 if iwarp else 1
        state.data_limit = send_depth - _CONTROL_WRS - state.data_wrs
        state.data_out = state.control_out = 0
        self._is_open = False
        self._listens = False
        self._live = False

    # -- the frequent cases, which C does

    def begin(self) -> None:
        """Allow C to take words, as far as the peer may send them."""
        self._live = True
        self.sync()

    def sync(self) -> None:
        """Set the flags of the steps that C may do without the machine."""
        state, ending, met = self._state, self._ending, self._peer is not None
        state.receiving = met and self._live and not ending.eof
        state.sending = self._is_open and ending.writable and not self.iomap.pending
        state.crediting = met and self._is_open and ending.wants_credit
        state.owing = ending.pending is not None or self.iomap.pending

    # -- the handshake

    def hello(self) -> bytes:
        """Return this side's private data, for the request or for its reply."""
        return self._hello

    def meet(self, data: bytes) -> None:
        """Take the peer's private data.

        Raises:
            ProtocolError: They make no sense, or a word that came before breaks the protocol.
            RuntimeError: They were taken already.
        """
        if self._peer is not None:
            msg = "the peer's private data was taken already"
            raise RuntimeError(msg)
        peer = Hello.parse(data)
        if self._iwarp and peer.big_endian != _BIG_ENDIAN:
            raise protocol_error("words of iWARP have its own byte order, which is not ours")
        self._peer = peer
        self.iomap.meet(peer)
        first = Descriptor(peer.buffer_addr, peer.buffer_key, peer.buffer_length)
        state = self._state
        flow.begin_sending(state, peer.credits, first)
        state.table_addr, state.table_key = peer.table_addr, peer.table_key
        state.table_length = peer.table_length
        state.swapped = peer.big_endian != _BIG_ENDIAN
        early, self._early = self._early, []
        for word in early:
            self.on_word(word)
        self.sync()

    def listen_first(self) -> None:
        """Sending begins with the peer's first word, and not with `open()`.

        A server on iWARP: the client begins, with a word about its buffers.  Its kernel takes for a
        bad answer what comes so early that it follows the answer.
        """
        self._listens = True

    def open(self) -> None:
        """Allow sending: the reply has come, or the connection is established.

        Raises:
            RuntimeError: Before `meet()`.
        """
        if self._peer is None:
            msg = "open() before meet()"
            raise RuntimeError(msg)
        if not self._listens:
            self._is_open = True
            self.sync()

    @property
    def opened(self) -> bool:
        """Whether sending has begun."""
        return self._is_open

    @property
    def met(self) -> bool:
        """Whether the peer's private data were taken."""
        return self._peer is not None

    # -- what happened

    def on_word(self, word: int) -> None:
        """Take the word of a completed receive.

        Raises:
            ProtocolError: The word is not allowed, or not now.
        """
        ending = self._ending
        if ending.disconnected:
            return
        if self._peer is None:
            if len(self._early) >= self._state.credits + _EARLY_CONTROL:
                raise protocol_error("it sends and sends before it has answered")
            self._early.append(word)
            return
        if self._listens:
            self._listens = False
            self.open()
        if word <= MAX_VALUE:  # data, the frequent one
            if ending.eof:
                raise protocol_error("data after its end")
            flow.arrived(self._state, word)
            return
        kind, value = unpack_word(word)
        if kind == Kind.SGL:
            flow.allow(self._state, value)
            self._take_descriptor()
        elif kind == Kind.CTRL:
            ending.heard(value)
            self.sync()
        elif kind == Kind.IOMAP:
            self._on_iomap(value & 0xFFFF)
        else:
            raise protocol_error(f"a word of the reserved kind {kind}")

    def completed(self, word: int) -> None:
        """Note that a message with this word has completed; its work requests are counted off."""
        if word > MAX_VALUE:
            self._ending.completed(word)
            self.sync()

    # -- sending

    def next_control(self) -> Post | None:
        """Return the next control message that may be posted now; to be called until it is None."""
        peer, ending = self._peer, self._ending
        if peer is None or not self._is_open:
            return None
        free = _CONTROL_WRS - self._state.control_out
        # iWARP may need two work requests; rsockets waits for two in any case, and so does this.
        if ending.wants_credit and flow.is_due(self._state) and free > self._iwarp:
            return self._update(peer)
        if self._may_publish and free > self._iwarp:
            return self._publish()
        word = ending.say() if free else None
        if word is None:
            return None
        self.sync()
        return self._post(word)

    def show_life(self) -> None:
        """Have `next_control` repeat the limit of messages, as a sign of life."""
        flow.repeat(self._state)

    # -- the end; ending.py has its rules

    def shutdown(self) -> None:
        """Close this side's direction, after the last `write()`.  Idempotent."""
        self._ending.shutdown()
        self.sync()

    def disconnect(self) -> None:
        """Close both directions, after the last `write()`.  Idempotent."""
        self._ending.disconnect()
        self.sync()

    @property
    def writable(self) -> bool:
        """Whether this side's direction is open."""
        return self._ending.writable

    @property
    def eof(self) -> bool:
        """Whether the peer will send no further bytes than those that are readable."""
        return self._ending.eof

    @property
    def disconnected(self) -> bool:
        """Whether the connection is over; words that still arrive are ignored."""
        return self._ending.disconnected

    # -- inside

    def _update(self, peer: Hello) -> Post:
        """Return the update of credits and, if half of the ring is free, of that half."""
        limit, buffer = flow.update(self._state)
        word = pack_word(Kind.SGL, limit)
        if buffer is None:
            return self._post(word)
        entry = self._state.peer_entry
        self._state.peer_entry = (entry + 1) % peer.table_length
        packed = buffer.pack(peer.big_endian)
        return self._post(word, packed, peer.table_addr + entry * DESCRIPTOR_SIZE, peer.table_key)

    def _post(self, word: int, payload: bytes = b"", addr: int = 0, key: int = 0) -> Post:
        """Return a control message; its work requests count as posted."""
        wrs = self._state.data_wrs if payload else 1
        self._state.control_out += wrs
        return Post(addr, key, len(payload), word, payload, wrs)

    def _take_descriptor(self) -> None:
        """Take the expected entry of this side's table, if it is filled.

        Not every update brings a descriptor.  The next descriptor may be arriving in memory at this
        instant; so the length, which is written last, is looked at before the rest is copied.
        """
        start = self._state.entry * DESCRIPTOR_SIZE
        end = start + DESCRIPTOR_SIZE
        memory = self._memory
        if memory[start + _LENGTH_OFFSET : end] == _NO_LENGTH:
            return
        buffer = Descriptor.unpack(bytes(memory[start:end]), _BIG_ENDIAN)
        if not buffer.length:
            return  # cleared by the peer in between, which breaks the rules
        flow.add_buffer(self._state, buffer)
        memory[start:end] = _NO_DESCRIPTOR
        self._state.entry = (self._state.entry + 1) % TABLE_LENGTH

    @property
    def _may_publish(self) -> bool:
        return self.iomap.pending and self._state.allowed > 0 and self._ending.writable

    def _publish(self) -> Post:
        """Return the publication of a mapping, which takes a credit but no space."""
        slot, place, key, payload = self.iomap.next()
        flow.took_credit(self._state)
        self.sync()
        return self._post(pack_word(Kind.IOMAP, slot), payload, place, key)

    def _on_iomap(self, index: int) -> None:
        """Take the peer's publication of a mapping.

        It takes a credit.  rsockets never returns that credit; this side does.
        """
        if self._ending.eof:
            raise protocol_error("a mapping after its end")
        self.iomap.updated(index)
        flow.skipped(self._state)
