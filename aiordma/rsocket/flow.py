"""Flow control of the two directions: where bytes may go, and how many messages.

Theory of operation
    A message of data passes two gates.  It needs *space*: the receiver advertises buffers, each is
    filled completely before the next one is used, and at most two are advertised and not full.
    And it needs a *credit*: both sides count data messages, and the receiver states up to which
    number the sender may count.  That limit is absolute and has 16 bits, so that repeating it
    changes nothing.

    `ReceiveFlow` uses its ring as two halves that it advertises in turn.  The receiver is not told
    addresses: bytes lie in the ring in the order of the messages, without gaps.

    Both gates are held against the peer exactly.  A message that was not allowed is an error of
    the protocol, so that what waits here never exceeds the ring and the credits.  Every check
    comes before the first change: after an error everything is as it was.
"""

from __future__ import annotations

from collections import deque

from aiordma.rsocket.wire import MAX_VALUE, Descriptor, protocol_error

__all__ = ["ReceiveFlow", "SendFlow"]

_SEQUENCE = 0xFFFF  # the wire's numbers of messages are taken modulo 2^16


class SendFlow:
    """What the peer lets us send.

    Attributes:
        room: Bytes that the next message may carry as far as space goes; 0 if there is none.
        allowed: Messages that may be sent before the peer states a new limit.

    Args:
        limit: Messages that the peer takes at a time.
        first: The buffer to fill first.
    """

    __slots__ = ("_addr", "_key", "_left", "_limit", "_sequence", "_spare", "allowed", "room")

    def __init__(self, limit: int, first: Descriptor) -> None:
        self._limit = limit
        self._sequence = 0
        self.allowed = limit
        self.room = 0
        # At most two buffers: the one that is being filled, taken apart, and the one after it.
        self._spare: Descriptor | None = None
        self._use(first)

    def take(self, length: int) -> tuple[int, int]:
        """Count one message of so many bytes, at most `room`; where it goes: address and key.

        The buffer is advanced before the message is posted: the moment the peer has the bytes
        it may put another descriptor in the place of the one that they filled.
        """
        addr, key = self._addr, self._key
        self.allowed -= 1
        self._sequence = (self._sequence + 1) & _SEQUENCE
        self._left -= length
        if self._left:
            self._addr += length
            if self._left < self.room:
                self.room = self._left
        elif self._spare is None:
            self.room = 0
        else:
            self._use(self._spare)
            self._spare = None
        return addr, key

    def allow(self, limit: int) -> None:
        """The peer stated a new limit of messages.

        Raises:
            ProtocolError: It took back what it had allowed, or allows more than it ever takes.
        """
        allowed = (limit - self._sequence) & _SEQUENCE
        if not self.allowed <= allowed <= self._limit:
            raise protocol_error(
                f"message limit {limit} with {self._sequence} sent, {self.allowed} allowed before "
                f"and {self._limit} announced"
            )
        self.allowed = allowed

    def add(self, buffer: Descriptor) -> None:
        """The peer advertised a buffer.

        Raises:
            ProtocolError: Two are advertised and not full already.
        """
        if not self._left:
            self._use(buffer)
        elif self._spare is None:
            self._spare = buffer
        else:
            raise protocol_error("a third buffer while two are not full")

    def _use(self, buffer: Descriptor) -> None:
        self._addr, self._key, self._left = buffer
        self.room = min(self._left, MAX_VALUE)


class ReceiveFlow:
    """What we let the peer send, and what has arrived.

    Attributes:
        readable: Bytes that arrived and were not consumed.
        offset: Where in the ring the first of them is.

    Args:
        size: Bytes of the ring; even.
        limit: Data messages that may wait to be consumed.
    """

    __slots__ = (
        "_allowed", "_buffers", "_consumed", "_due", "_free", "_half", "_left", "_limit",
        "_next", "_size", "_waiting", "offset", "readable",
    )  # fmt: skip

    def __init__(self, size: int, limit: int) -> None:
        self._size = size
        self._half = size // 2
        self._limit = limit
        self.readable = 0
        self.offset = 0
        # What the peer may use: bytes left in the half that it fills, and halves after that.
        self._left = self._half
        self._buffers = 0
        self._allowed = limit
        # What may be given back: free bytes not advertised yet, and where they begin.  Private
        # data advertised the first half only.
        self._free = self._half
        self._next = self._half
        # Lengths of the messages that wait.  A message is repaid when its last byte is consumed;
        # `_consumed` counts them without a bound and meets the wire modulo 2^16.
        self._waiting: deque[int] = deque()
        self._consumed = 0
        self._due = max(1, limit // 2)

    def arrived(self, length: int) -> None:
        """One message of data has come.

        Raises:
            ProtocolError: Without a credit, empty, or not within the buffer that it goes to.
        """
        if not self._allowed:
            raise protocol_error(f"data without a credit: {len(self._waiting)} messages wait")
        if not 0 < length <= self._left:
            raise protocol_error(f"{length} bytes of data for {self._left} bytes of buffer")
        self._allowed -= 1
        self._left -= length
        if not self._left and self._buffers:
            self._buffers -= 1
            self._left = self._half
        self._waiting.append(length)
        self.readable += length

    def skipped(self) -> None:
        """One message has come that takes a credit and brings no bytes; it is repaid at once.

        Raises:
            ProtocolError: It came without a credit.
        """
        if not self._allowed:
            raise protocol_error("a message without a credit")
        self._allowed -= 1
        self._consumed += 1

    def contiguous(self) -> int:
        """Bytes that can be read at `offset` without wrapping around."""
        return min(self.readable, self._size - self.offset)

    def consume(self, length: int) -> None:
        """The application has taken the next `length` bytes.

        Raises:
            ValueError: Fewer have arrived.
        """
        if not 0 <= length <= self.readable:
            msg = f"{length} bytes consumed, {self.readable} are there"
            raise ValueError(msg)
        self.readable -= length
        self._free += length
        self.offset = (self.offset + length) % self._size
        waiting = self._waiting
        while length:
            first = waiting[0]
            if first > length:
                waiting[0] = first - length
                return
            del waiting[0]
            length -= first
            self._consumed += 1

    @property
    def due(self) -> bool:
        """The peer should be told: half of the ring is free, or half of the credits are used."""
        return self._free >= self._half or self._consumed >= self._due

    def repeat(self) -> None:
        """Have the peer told once more what it was told last, as a sign of life."""
        self._due = self._consumed

    def update(self) -> tuple[int, int | None]:
        """What to tell it now: the new limit, and the offset of the half to advertise or None.

        From here on it counts as told.
        """
        offset = None
        if self._free >= self._half:
            offset = self._next
            self._free -= self._half
            self._next = (offset + self._half) % self._size
            if self._left:
                self._buffers += 1
            else:
                self._left = self._half
        # What it may send is what it was allowed, and a credit for each message consumed since
        # the last update, which is `limit` minus what waits.
        self._allowed = self._limit - len(self._waiting)
        self._due = self._consumed + max(1, self._limit // 2)
        return (self._consumed + self._limit) & _SEQUENCE, offset
