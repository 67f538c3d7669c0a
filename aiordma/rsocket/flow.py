"""Flow control of the two directions: where bytes may go, and how many messages.

Theory of operation
    A message of data passes two gates.  It needs *space*: the receiver advertises buffers, the
    sender fills each buffer completely before it uses the next, and at most two are advertised and
    not full.  And it needs a *credit*: both sides count data messages, and the receiver states the
    number up to which the sender may count.  That limit is absolute and has 16 bits, so that
    repeating it changes nothing.

    `ReceiveFlow` uses its ring as two halves that it advertises in turn.  A word has no address for
    the receiver: the bytes lie in the ring in the order of the messages, without gaps.

    Both gates are enforced exactly.  A message of the peer that was not allowed is a protocol
    error, so that the waiting messages never exceed the ring and the credits.  Every check comes
    before the first change: after an error the state is as before.

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
    """The space and credits that this side has for sending.

    Args:
        state: Holds the numbers.
        limit: Messages that the peer takes at a time.
        first: The buffer to fill first.
    """

    __slots__ = ("_state",)

    def __init__(self, state: State | StreamState, limit: int, first: Descriptor) -> None:
        self._state = state
        state.limit = state.allowed = limit
        state.sequence = 0
        # At most two buffers: the current buffer, in `addr`, `key` and `left`, and the next.
        state.addr, state.key, state.left = first
        state.spare_addr = state.spare_key = state.spare_left = 0

    @property
    def allowed(self) -> int:
        """Messages that may be sent before the peer states a new limit."""
        return self._state.allowed

    @property
    def room(self) -> int:
        """Bytes that the next message may carry by the space in the peer's buffers."""
        return min(self._state.left, MAX_VALUE)

    def take(self, length: int) -> tuple[int, int]:
        """Count one message of `length` bytes, at most `room`; return its address and key.

        The buffer is advanced before the message is posted: as soon as the peer has the bytes, it
        may replace the descriptor of a buffer that they have filled.
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
        """Take a new limit of messages from the peer.

        Raises:
            ProtocolError: The limit takes back credits, or exceeds the number that the peer takes.
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
        """Take a buffer that the peer has advertised.

        Raises:
            ProtocolError: Two buffers are advertised and not full already.
        """
        state = self._state
        if not state.left:
            state.addr, state.key, state.left = buffer
        elif not state.spare_left:
            state.spare_addr, state.spare_key, state.spare_left = buffer
        else:
            raise protocol_error("a third buffer while two are not full")


class ReceiveFlow:
    """The space and credits that the peer has for sending, and the bytes that have arrived.

    Args:
        state: Holds the numbers.
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
        # Space of the peer: bytes left in the half that it fills, and further halves.
        state.ring_left = self._half
        state.ring_buffers = 0
        state.ring_allowed = limit
        # Space to advertise: free bytes that are not advertised yet, and their offset.  Private
        # data have advertised the first half only.
        state.ring_free = state.ring_next = self._half
        # The credit of a message is returned when its last byte is consumed; `consumed` counts
        # these messages, and the wire has it modulo 2^16.
        state.consumed = 0
        state.due = max(1, limit // 2)

    def arrived(self, length: int) -> None:
        """Count a message of data that has arrived.

        Raises:
            ProtocolError: It came without a credit, is empty, or exceeds its buffer.
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
        """Count a message that takes a credit and brings no bytes; its credit is returned at once.

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
        """Free the next `length` bytes, which the application has taken.

        Raises:
            ValueError: Fewer bytes have arrived.
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
        """Whether an update is due: half of the ring is free, or half of the credits are used."""
        return self._state.ring_free >= self._half or self._state.consumed >= self._state.due

    def repeat(self) -> None:
        """Have the next update sent although none is due, as a sign of life."""
        self._state.due = self._state.consumed

    def update(self) -> tuple[int, int | None]:
        """Return the update to send: the limit, and the offset of the half to advertise or None.

        It counts as sent.
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
        # The peer has its old credits and one for each message consumed since the last update; both
        # together are `credits` less the messages that wait.
        state.ring_allowed = state.credits - state.waiting_count
        state.due = state.consumed + max(1, state.credits // 2)
        return (state.consumed + state.credits) & _SEQUENCE, offset
