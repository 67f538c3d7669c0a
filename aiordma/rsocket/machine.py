"""One connection of the rsockets protocol, without input or output.

Theory of operation
    The caller (the *port*) owns the queue pair and the memory, and passes each arrived word and
    each completed control message to the machine.  Control messages have four work requests of
    their own, so that data never delay credits or the end.

    Flow control is not here, but in `_core/stream.c`, which has the space and the credits of both
    directions in a `StreamState`, and posts.  The machine gives it commands, and words the error
    for a peer that breaks its rules.  `permit` tells C what the end and the mappings leave open;
    every method that changes the answer calls it again.

    The peer writes descriptors of its buffers into this side's table, which is ordinary memory that
    may change at any instant.  Entries are expected in turn, beginning with entry 1: entry 0 stands
    for the first buffer, which private data have described.  So entry 1 must not be touched when
    private data arrive: the peer's first update may be there already.

    If the caller takes completions first, a word may come before the private data; such words wait
    for `meet()`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NamedTuple

from aiordma._core import (
    NO_ROOM,
    OWES_MAPPING,
    OWES_NOTHING,
    OWES_WORD,
    STREAM_BAD_BUFFER,
    STREAM_BAD_LIMIT,
    STREAM_NO_CREDIT,
    STREAM_NO_SPACE,
    STREAM_THIRD_BUFFER,
)
from aiordma.rsocket.ending import Ending
from aiordma.rsocket.iomap import Iomap, Mapping
from aiordma.rsocket.wire import (
    DESCRIPTOR_SIZE,
    IOMAP_SLOT_SIZE,
    MAX_VALUE,
    TABLE_LENGTH,
    Hello,
    Kind,
    pack_word,
    protocol_error,
    unpack_word,
)

if TYPE_CHECKING:
    from aiordma._core import StreamState

__all__ = ["Machine", "Place"]

_BIG_ENDIAN = sys.byteorder == "big"
_TABLE_SIZE = TABLE_LENGTH * DESCRIPTOR_SIZE
# Control words that a peer may send before its private data are taken; usually it is a single word.
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


class Machine:
    """Both directions of one connection.

    The ring must not hold bytes of other connections when the connection begins; zeros will do.  A
    peer can claim to have written bytes that it has not written.

    Args:
        ring: Memory that the peer writes data to first; the size must be even.
        table: Memory that the peer writes descriptors to, and behind them iomap slots.
        memory: The bytes of the table, writable.
        credits: Data messages that the peer may have outstanding.
        iwarp: Words travel as messages of their own, after the write.
        state: Has flow control; made for the same ring and table.

    Attributes:
        iomap: The mappings of both sides.
    """

    __slots__ = (
        "_early", "_ending", "_hello", "_is_open", "_iwarp", "_listens", "_most_early", "_peer",
        "_state", "iomap",
    )  # fmt: skip

    def __init__(
        self,
        *,
        ring: Place,
        table: Place,
        memory: memoryview,
        credits: int,
        iwarp: bool,
        state: StreamState,
    ) -> None:
        self.iomap: Iomap = Iomap(memory[_TABLE_SIZE:])
        self._iwarp = iwarp
        slots = (table.size - _TABLE_SIZE) // IOMAP_SLOT_SIZE
        self._hello = Hello(
            credits, table.addr, table.key, TABLE_LENGTH, ring.addr, ring.key, ring.size // 2,
            slots, _BIG_ENDIAN,
        ).pack()  # fmt: skip
        self._state = state
        self._ending = Ending()
        self._peer: Hello | None = None
        self._early: list[int] = []
        self._is_open = False
        self._most_early = credits + _EARLY_CONTROL
        self._listens = False

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
            raise protocol_error("its words on iWARP are in its own byte order, which is not ours")
        self._peer = peer
        self.iomap.meet(peer)
        self._state.meet(
            peer.credits,
            (peer.buffer_addr, peer.buffer_key, peer.buffer_length),
            (peer.table_addr, peer.table_key, peer.table_length),
            peer.big_endian != _BIG_ENDIAN,
        )
        early, self._early = self._early, []
        for word in early:
            self.on_word(word)

    def listen_first(self) -> None:
        """Have sending begin with the peer's first word, and not with `open()`.

        For a server on iWARP: the client begins, with a word about its buffers.  If the server sent
        at once, the client's kernel could take bytes that follow the answer for a bad answer.
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
            self._state.open()

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
            if len(self._early) >= self._most_early:
                raise protocol_error("it sent too many words before its private data")
            self._early.append(word)
            return
        if self._listens:
            self._listens = False
            self.open()
        kind, value = unpack_word(word)
        if word <= MAX_VALUE and ending.eof:
            raise protocol_error("data after its end")
        if word <= MAX_VALUE or kind == Kind.SGL:
            self._check(self._state.take_word(word), value)
        elif kind == Kind.CTRL:
            ending.heard(value)
            self._sync()
        elif kind == Kind.IOMAP:
            self._on_iomap(word, value & 0xFFFF)
        else:
            raise protocol_error(f"a word of the reserved kind {kind}")

    def completed(self, word: int) -> None:
        """Note that a control message with this word has completed."""
        self._ending.completed(word)
        self._sync()

    # -- sending

    def post_control(self) -> int:
        """Post the control messages that may go now.

        Returns:
            0, or the errno of a post that has failed.
        """
        if not self._is_open:
            return 0
        state, ending, iomap = self._state, self._ending, self.iomap
        code = state.announce(False)
        while not code and iomap.pending and ending.writable:
            slot, place, key, payload = iomap.first()
            code = state.publish(pack_word(Kind.IOMAP, slot), payload, place, key)
            if not code:
                iomap.posted()
                self._sync()
        if code in {0, NO_ROOM} and ending.pending is not None:
            code = state.say(ending.pending)
            if not code:
                ending.said()
                self._sync()
        return 0 if code == NO_ROOM else code

    def publish(self, mapping: Mapping) -> int:
        """Have a mapping posted before further data; return its slot.

        Raises:
            ValueError, OSError: As `Iomap.publish`.
        """
        slot = self.iomap.publish(mapping)
        self._sync()
        return slot

    def withdraw(self, slot: int) -> None:
        """Free a slot for another mapping; a publication that still waits is dropped."""
        self.iomap.withdraw(slot)
        self._sync()

    def show_life(self) -> int:
        """Repeat the limit of messages, as a sign of life; the result is as of `post_control`."""
        return self._state.announce(True)

    # -- the end; ending.py has its rules

    def shutdown(self) -> None:
        """Close this side's direction, after the last `write()`.  Idempotent."""
        self._ending.shutdown()
        self._sync()

    def disconnect(self) -> None:
        """Close both directions, after the last `write()`.  Idempotent."""
        self._ending.disconnect()
        self._sync()

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

    def _sync(self) -> None:
        """Tell C what the end leaves open, and what waits to be posted."""
        ending = self._ending
        owed = OWES_NOTHING
        if self.iomap.pending:
            owed = OWES_MAPPING
        elif ending.pending is not None:
            owed = OWES_WORD
        self._state.permit(ending.writable, ending.wants_credit, ending.eof, owed)

    def _check(self, broken: tuple[int, int, int] | None, limit: int = 0) -> None:
        """Raise `ProtocolError` if the peer has broken flow control, with the words for it."""
        if broken is None:
            return
        kind, first, second = broken
        if kind == STREAM_NO_CREDIT:
            text = f"a message without a credit: {first} messages wait"
        elif kind == STREAM_NO_SPACE:
            text = f"{first} bytes of data for {second} bytes of buffer"
        elif kind == STREAM_BAD_LIMIT:
            assert self._peer is not None
            text = (
                f"message limit {limit} with {first} sent, {second} allowed before "
                f"and {self._peer.credits} announced"
            )
        elif kind == STREAM_BAD_BUFFER:
            text = f"a buffer of {second} bytes at {first:#x}"
        else:
            assert kind == STREAM_THIRD_BUFFER
            text = "a third buffer while two are not full"
        raise protocol_error(text)

    def _on_iomap(self, word: int, index: int) -> None:
        """Take the peer's publication of a mapping.

        It takes a credit.  rsockets never returns that credit; this side does.
        """
        if self._ending.eof:
            raise protocol_error("a mapping after its end")
        self.iomap.updated(index)
        self._check(self._state.take_word(word))
