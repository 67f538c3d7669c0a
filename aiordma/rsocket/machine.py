"""One connection of the rsockets protocol, without input or output.

Theory of operation
    The caller (the *port*) owns the queue pair and the memory.  It posts every `Post` that the
    machine hands out in that order, tells the machine of each arrived word and of each post
    that has completed, and reads the ring where `peek()` points.  The machine decides what may be
    sent: data when space, a credit and a work request are there, control messages out of four
    work requests of their own, so that data can never keep credits or the end from being told.

    The peer writes descriptors of its buffers into our table, which is ordinary memory that
    may change at any instant.  An entry is looked at when a word says that the table was updated,
    copied out before it is checked, and cleared.  We expect entries in turn, beginning with
    entry 1: entry 0 stands for the first buffer, which private data described.  So entry 1 must not
    be touched when private data comes: the peer's first update may be there already.

    A word can arrive before the private data when the caller looks at completions first; such
    words wait for `meet()`.

    The numbers that data and credits change are in a state, with which C does the frequent cases
    (`_core.StreamState`).  What C may do follows from the rest, and is said by a few flags: each
    method that can change them sets them anew (`sync`).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NamedTuple

from aiordma.rsocket.ending import Ending
from aiordma.rsocket.flow import ReceiveFlow, SendFlow
from aiordma.rsocket.iomap import Iomap
from aiordma.rsocket.state import State
from aiordma.rsocket.wire import (
    DESCRIPTOR_SIZE,
    IOMAP_SLOT_SIZE,
    MAX_CREDITS,
    MAX_VALUE,
    TABLE_LENGTH,
    Descriptor,
    Hello,
    Kind,
    decode_scaled,
    encode_scaled,
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
# Words other than data that a peer may send before its private data is taken; one is usual.
_EARLY_CONTROL = 64


class Place(NamedTuple):
    """Registered memory of ours that the peer may write.

    Attributes:
        addr: Its address.
        key: Its remote key.
        size: Bytes.
    """

    addr: int
    key: int
    size: int


class Post(NamedTuple):
    """One message to post: an RDMA write with the word, or the word alone.

    Attributes:
        addr: Where in the peer's memory; 0 with nothing to write.
        key: Remote key of that memory.
        length: Bytes to write there.
        word: The word that goes along.
        payload: The bytes of a control message; empty for data, which the caller supplies.
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

    The ring must hold nothing of other connections when this one begins, zeros for instance: a
    peer can claim to have written bytes that it has not.

    Args:
        ring: Where the peer puts data; the size must be even.
        table: Where it puts descriptors, and behind them iomap slots.
        memory: The table, writable, as the peer's writes change it.
        credits: Data messages that the peer may have outstanding; the receive queue should
            hold some more, for control messages.
        send_depth: Work requests of the send queue; four are kept for control messages.
        iwarp: Words travel as messages of their own, after the write.
        state: Has the numbers; one of its own by default.

    Attributes:
        iomap: The mappings of both sides.

    Raises:
        ValueError: A size that the protocol cannot express.
    """

    __slots__ = (
        "_early", "_ending", "_hello", "_is_open", "_iwarp", "_listens", "_live", "_max_early",
        "_memory", "_peer", "_receive", "_ring", "_send", "_state", "iomap",
    )  # fmt: skip

    def __init__(
        self,
        *,
        ring: Place,
        table: Place,
        memory: memoryview,
        credits: int,
        send_depth: int,
        iwarp: bool = False,
        state: State | StreamState | None = None,
    ) -> None:
        slots, rest = divmod(table.size - _TABLE_SIZE, IOMAP_SLOT_SIZE)
        if slots < 0 or rest or decode_scaled(encode_scaled(slots)) != slots:
            msg = f"a table of {table.size} bytes: 32 and 24 for each of 0, 1..128, 256... slots"
            raise ValueError(msg)
        if memory.nbytes != table.size or memory.readonly:
            msg = "memory has to be the whole table, and writable"
            raise ValueError(msg)
        if ring.size < 2 or ring.size % 2:
            msg = f"a ring of {ring.size} bytes has no two equal halves"
            raise ValueError(msg)
        if not 1 <= credits <= MAX_CREDITS:
            msg = f"credits of 1 to {MAX_CREDITS}, not {credits}"
            raise ValueError(msg)
        wrs = 2 if iwarp else 1
        if send_depth < _CONTROL_WRS + wrs:
            msg = f"a send queue of {send_depth}: {_CONTROL_WRS} are kept for control messages"
            raise ValueError(msg)
        self._ring = ring
        self._memory = memory.cast("B")
        self.iomap = Iomap(self._memory[_TABLE_SIZE:])
        self._iwarp = iwarp
        self._hello = Hello(
            credits, table.addr, table.key, TABLE_LENGTH, ring.addr, ring.key, ring.size // 2,
            slots, _BIG_ENDIAN,
        ).pack()  # fmt: skip
        state = self._state = State() if state is None else state
        self._receive = ReceiveFlow(state, ring.size, credits)
        # Nothing, until the peer has said more.
        self._send = SendFlow(state, 0, Descriptor(0, 0, 0))
        self._ending = Ending()
        self._peer: Hello | None = None
        self._early: list[int] = []
        self._max_early = credits + _EARLY_CONTROL
        state.entry = state.peer_entry = 1
        state.data_wrs = wrs
        state.data_limit = send_depth - _CONTROL_WRS - wrs
        state.data_out = state.control_out = 0
        self._is_open = False
        self._listens = False
        self._live = False

    # -- what C may do by itself

    def begin(self) -> None:
        """From now on C may take words, as far as the peer may send them."""
        self._live = True
        self.sync()

    def sync(self) -> None:
        """Say what may be done without the protocol."""
        state, ending, met = self._state, self._ending, self._peer is not None
        state.receiving = met and self._live and not ending.eof
        state.sending = self._is_open and ending.writable and not self.iomap.pending
        state.crediting = met and self._is_open and ending.wants_credit
        state.owing = ending.pending is not None or self.iomap.pending

    # -- the handshake

    def hello(self) -> bytes:
        """Our private data, for the request or for its reply."""
        return self._hello

    def meet(self, data: bytes) -> None:
        """Take the peer's private data.

        Raises:
            ProtocolError: It makes no sense, or a word that came before it breaks the protocol.
            RuntimeError: It was taken already.
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
        self._send = SendFlow(self._state, peer.credits, first)
        state = self._state
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
        """Sending may begin: the reply has come, or the connection is established.

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
        """The peer's private data was taken."""
        return self._peer is not None

    # -- what happened

    def on_word(self, word: int) -> None:
        """A receive has completed and brought this word.

        Raises:
            ProtocolError: The peer may not say that, or not now.
        """
        ending = self._ending
        if ending.disconnected:
            return
        if self._peer is None:
            if len(self._early) >= self._max_early:
                raise protocol_error("it sends and sends before it has answered")
            self._early.append(word)
            return
        if self._listens:
            self._listens = False
            self.open()
        if word <= MAX_VALUE:  # data, the frequent one
            if ending.eof:
                raise protocol_error("data after its end")
            self._receive.arrived(word)
            return
        kind, value = unpack_word(word)
        if kind == Kind.SGL:
            self._send.allow(value)
            self._take_descriptor()
        elif kind == Kind.CTRL:
            ending.heard(value)
            self.sync()
        elif kind == Kind.IOMAP:
            self._on_iomap(value & 0xFFFF)
        else:
            raise protocol_error(f"a word of the reserved kind {kind}")

    def on_sent(self, post: Post) -> None:
        """A message has completed; without success counts as well."""
        if post.word <= MAX_VALUE:
            self._state.data_out -= post.wrs
        else:
            self._state.control_out -= post.wrs
            self.completed(post.word)

    def completed(self, word: int) -> None:
        """A message with this word has completed, and its work requests are counted."""
        if word > MAX_VALUE:
            self._ending.completed(word)
            self.sync()

    def lost(self) -> None:
        """The connection is gone; what has arrived can still be read."""
        self._ending.finish()
        self.sync()

    # -- receiving

    @property
    def readable(self) -> int:
        """Bytes that have arrived and were not consumed."""
        return self._state.readable

    def peek(self) -> tuple[int, int]:
        """Where the next bytes are: offset into the ring and length up to its end."""
        receive = self._receive
        length = receive.contiguous()
        return (self._state.offset, length) if length else (0, 0)

    def consume(self, n: int) -> None:
        """The application has taken `n` bytes; their place may be advertised again.

        Raises:
            ValueError: Fewer have arrived.
        """
        self._receive.consume(n)

    # -- sending

    @property
    def room(self) -> int:
        """Bytes that one message of data may carry now; 0 means wait for a word or a post."""
        send = self._send
        if (
            not send.allowed
            or not self._ending.writable
            or not self._is_open
            or self._state.data_out > self._state.data_limit
            or self.iomap.pending
        ):
            return 0
        return send.room

    def write(self, wanted: int) -> Post:
        """One message of data, of `wanted` bytes or as many as there is room for.

        Raises:
            ValueError: No bytes wanted, or no room for one.
        """
        room = self.room
        length = wanted if wanted < room else room
        if length <= 0:
            msg = f"{wanted} bytes to write, room for {room}"
            raise ValueError(msg)
        wrs = self._state.data_wrs
        self._state.data_out += wrs
        addr, key = self._send.take(length)
        return Post(addr, key, length, length, b"", wrs)

    def next_control(self) -> Post | None:
        """The next control message that may be posted now; ask until there is none."""
        peer, ending = self._peer, self._ending
        if peer is None or not self._is_open:
            return None
        free = _CONTROL_WRS - self._state.control_out
        # iWARP may need two work requests; rsockets waits for two in any case, and so do we.
        if ending.wants_credit and self._receive.due and free > self._iwarp:
            return self._update(peer)
        if self._may_publish and free > self._iwarp:
            return self._publish()
        word = ending.say() if free else None
        if word is None:
            return None
        self.sync()
        self._state.control_out += 1
        return Post(0, 0, 0, word, b"", 1)

    def show_life(self) -> None:
        """Have `next_control` say something that changes nothing: the limit of messages again."""
        self._receive.repeat()

    # -- the end; what is said when is in ending.py

    def shutdown(self) -> None:
        """Close our direction, after the last `write()`; again does nothing."""
        self._ending.shutdown()
        self.sync()

    def disconnect(self) -> None:
        """Close both directions, after the last `write()`; again does nothing."""
        self._ending.disconnect()
        self.sync()

    @property
    def writable(self) -> bool:
        """Our direction is open."""
        return self._ending.writable

    @property
    def eof(self) -> bool:
        """The peer will send no more than what is readable."""
        return self._ending.eof

    @property
    def peer_left(self) -> bool:
        """The peer has said DISCONNECT: it reads no more, and what is posted may fail."""
        return self._ending.peer_left

    @property
    def disconnected(self) -> bool:
        """The connection is over, or gone; words that still come mean nothing."""
        return self._ending.disconnected

    @property
    def idle(self) -> bool:
        """Everything that was posted has completed."""
        return not self._state.data_out and not self._state.control_out

    @property
    def unsent_control(self) -> bool:
        """A control message is due and waits for a free work request."""
        ending = self._ending
        return self._is_open and (
            ending.pending is not None
            or self._may_publish
            or (ending.wants_credit and self._receive.due)
        )

    # -- inside

    def _update(self, peer: Hello) -> Post:
        """Tell the peer of credits and, when half of the ring is free, of that half."""
        limit, offset = self._receive.update()
        word = pack_word(Kind.SGL, limit)
        if offset is None:
            self._state.control_out += 1
            return Post(0, 0, 0, word, b"", 1)
        ring, entry, wrs = self._ring, self._state.peer_entry, self._state.data_wrs
        self._state.peer_entry = (entry + 1) % peer.table_length
        self._state.control_out += wrs
        half = Descriptor(ring.addr + offset, ring.key, ring.size // 2).pack(peer.big_endian)
        place = peer.table_addr + entry * DESCRIPTOR_SIZE
        return Post(place, peer.table_key, DESCRIPTOR_SIZE, word, half, wrs)

    def _take_descriptor(self) -> None:
        """Move the expected entry of our table, if it is filled, to the private list.

        Not every update brings one.  The next may be on its way into memory at this instant,
        so the length, which is written last, is seen before the rest is copied.
        """
        start = self._state.entry * DESCRIPTOR_SIZE
        end = start + DESCRIPTOR_SIZE
        memory = self._memory
        if memory[start + _LENGTH_OFFSET : end] == _NO_LENGTH:
            return
        buffer = Descriptor.unpack(bytes(memory[start:end]), _BIG_ENDIAN)
        if not buffer.length:
            return  # taken back in between; a peer that keeps the rules does not
        self._send.add(buffer)
        memory[start:end] = _NO_DESCRIPTOR
        self._state.entry = (self._state.entry + 1) % TABLE_LENGTH

    @property
    def _may_publish(self) -> bool:
        return self.iomap.pending and self._send.allowed > 0 and self._ending.writable

    def _publish(self) -> Post:
        """Write a mapping into a slot of the peer, which takes a credit but no space."""
        slot, place, key, payload = self.iomap.next()
        self._send.take(0)
        self.sync()
        wrs = self._state.data_wrs
        self._state.control_out += wrs
        return Post(place, key, len(payload), pack_word(Kind.IOMAP, slot), payload, wrs)

    def _on_iomap(self, index: int) -> None:
        """The peer published a mapping.

        It took a credit.  rsockets never repays that one, we do.
        """
        if self._ending.eof:
            raise protocol_error("a mapping after its end")
        self.iomap.updated(index)
        self._receive.skipped()
