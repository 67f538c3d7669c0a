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

    The numbers of both are in a state (`rsocket.state`), which C may change, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiordma.rsocket.wire import MAX_VALUE, Descriptor, protocol_error

if TYPE_CHECKING:
    from aiordma._core import StreamState
    from aiordma.rsocket.state import State

__all__ = ["ReceiveFlow", "SendFlow"]

_SEQUENCE = 0xFFFF  # the wire's numbers of messages are taken modulo 2^16


class SendFlow:
    """What the peer lets us send.

    Args:
        state: Has the numbers.
        limit: Messages that the peer takes at a time.
        first: The buffer to fill first.
    """

    __slots__ = ("_state",)

    def __init__(self, state: State | StreamState, limit: int, first: Descriptor) -> None:
        self._state = state
        state.limit = state.allowed = limit
        state.sequence = 0
        # At most two buffers: the one that is being filled, taken apart, and the one after it.
        state.addr, state.key, state.left = first
        state.spare_addr = state.spare_key = state.spare_left = 0

    @property
    def allowed(self) -> int:
        """Messages that may be sent before the peer states a new limit."""
        return self._state.allowed

    @property
    def room(self) -> int:
        """Bytes that the next message may carry as far as space goes; 0 if there is none."""
        return min(self._state.left, MAX_VALUE)

    def take(self, length: int) -> tuple[int, int]:
        """Count one message of so many bytes, at most `room`; where it goes: address and key.

        The buffer is advanced before the message is posted: the moment the peer has the bytes
        it may put another descriptor in the place of the one that they filled.
        """
        state = self._state
        addr, key = state.addr, state.key
        state.allowed -= 1
        state.sequence = (state.sequence + 1) & _SEQUENCE
        state.left -= length
        if state.left:
            state.addr += length
        elif state.spare_left:
            state.addr, state.key, state.left = state.spare_addr, state.spare_key, state.spare_left
            state.spare_left = 0
        return addr, key

    def allow(self, limit: int) -> None:
        """The peer stated a new limit of messages.

        Raises:
            ProtocolError: It took back what it had allowed, or allows more than it ever takes.
        """
        state = self._state
        allowed = (limit - state.sequence) & _SEQUENCE
        if not state.allowed <= allowed <= state.limit:
            raise protocol_error(
                f"message limit {limit} with {state.sequence} sent, {state.allowed} allowed before "
                f"and {state.limit} announced"
            )
        state.allowed = allowed

    def add(self, buffer: Descriptor) -> None:
        """The peer advertised a buffer.

        Raises:
            ProtocolError: Two are advertised and not full already.
        """
        state = self._state
        if not state.left:
            state.addr, state.key, state.left = buffer
        elif not state.spare_left:
            state.spare_addr, state.spare_key, state.spare_left = buffer
        else:
            raise protocol_error("a third buffer while two are not full")


class ReceiveFlow:
    """What we let the peer send, and what has arrived.

    Args:
        state: Has the numbers.
        size: Bytes of the ring; even.
        limit: Data messages that may wait to be consumed.
    """

    __slots__ = ("_half", "_size", "_state")

    def __init__(self, state: State | StreamState, size: int, limit: int) -> None:
        self._state = state
        self._size = size
        self._half = size // 2
        state.credits = limit
        state.readable = state.offset = 0
        # What the peer may use: bytes left in the half that it fills, and halves after that.
        state.ring_left = self._half
        state.ring_buffers = 0
        state.ring_allowed = limit
        # What may be given back: free bytes not advertised yet, and where they begin.  Private
        # data advertised the first half only.
        state.ring_free = state.ring_next = self._half
        # A message is repaid when its last byte is consumed; `consumed` counts them without a bound
        # and meets the wire modulo 2^16.
        state.consumed = 0
        state.due = max(1, limit // 2)

    def arrived(self, length: int) -> None:
        """One message of data has come.

        Raises:
            ProtocolError: Without a credit, empty, or not within the buffer that it goes to.
        """
        state = self._state
        if not state.ring_allowed:
            raise protocol_error(f"data without a credit: {state.waiting_count} messages wait")
        if not 0 < length <= state.ring_left:
            raise protocol_error(f"{length} bytes of data for {state.ring_left} bytes of buffer")
        state.ring_allowed -= 1
        state.ring_left -= length
        if not state.ring_left and state.ring_buffers:
            state.ring_buffers -= 1
            state.ring_left = self._half
        state.push_waiting(length)
        state.readable += length

    def skipped(self) -> None:
        """One message has come that takes a credit and brings no bytes; it is repaid at once.

        Raises:
            ProtocolError: It came without a credit.
        """
        if not self._state.ring_allowed:
            raise protocol_error("a message without a credit")
        self._state.ring_allowed -= 1
        self._state.consumed += 1

    def contiguous(self) -> int:
        """Bytes that can be read at `offset` without wrapping around."""
        return min(self._state.readable, self._size - self._state.offset)

    def consume(self, length: int) -> None:
        """The application has taken the next `length` bytes.

        Raises:
            ValueError: Fewer have arrived.
        """
        state = self._state
        if not 0 <= length <= state.readable:
            msg = f"{length} bytes consumed, {state.readable} are there"
            raise ValueError(msg)
        state.readable -= length
        state.ring_free += length
        state.offset = (state.offset + length) % self._size
        while length:
            first = state.first_waiting
            if first > length:
                state.first_waiting = first - length
                return
            state.pop_waiting()
            length -= first
            state.consumed += 1

    @property
    def due(self) -> bool:
        """The peer should be told: half of the ring is free, or half of the credits are used."""
        return self._state.ring_free >= self._half or self._state.consumed >= self._state.due

    def repeat(self) -> None:
        """Have the peer told once more what it was told last, as a sign of life."""
        self._state.due = self._state.consumed

    def update(self) -> tuple[int, int | None]:
        """What to tell it now: the new limit, and the offset of the half to advertise or None.

        From here on it counts as told.
        """
        state = self._state
        offset = None
        if state.ring_free >= self._half:
            offset = state.ring_next
            state.ring_free -= self._half
            state.ring_next = (offset + self._half) % self._size
            if state.ring_left:
                state.ring_buffers += 1
            else:
                state.ring_left = self._half
        # What it may send is what it was allowed, and a credit for each message consumed since
        # the last update, which is `limit` minus what waits.
        state.ring_allowed = state.credits - state.waiting_count
        state.due = state.consumed + max(1, state.credits // 2)
        return (state.consumed + state.credits) & _SEQUENCE, offset
