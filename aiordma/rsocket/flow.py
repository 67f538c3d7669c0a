"""Flow control of the two directions: where bytes may go, and how many messages.

Theory of operation
    A message of data passes two gates.  It needs *space*: the receiver advertises buffers, the
    sender fills each buffer completely before it uses the next, and at most two are advertised and
    not full.  And it needs a *credit*: both sides count data messages, and the receiver states the
    number up to which the sender may count.  That limit is absolute and has 16 bits, so that
    repeating it changes nothing.

    The receiver uses its ring as two halves that it advertises in turn.  A word has no address for
    the receiver: the bytes lie in the ring in the order of the messages, without gaps.

    A larger ring takes over when the first half of the ring is free: the first half of the larger
    ring is advertised in its place.  The rest of the ring is not advertised again.
    The second half of the larger ring is free once the last byte of the ring is read, so that no
    more than two buffers are ever advertised and not full.

    Both gates are enforced exactly.  A message of the peer that was not allowed is a protocol
    error, so that the waiting messages never exceed the ring and the credits.  Every check comes
    before the first change: after an error the state is as before.

The numbers of both directions are in a `StreamState`, which C changes, too: bytes are written and
read in `_core/stream.c`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiordma.rsocket.wire import Descriptor, protocol_error

if TYPE_CHECKING:
    from aiordma._core import StreamState

__all__ = [
    "add_buffer", "allow", "arrived", "begin_receiving", "begin_sending", "is_due", "move",
    "repeat", "skipped", "took_credit", "update",
]  # fmt: skip

_SEQUENCE = 0xFFFF  # the wire's numbers of messages are taken modulo 2^16


# Sending


def begin_sending(state: StreamState, limit: int, first: Descriptor) -> None:
    """Begin with `limit` credits and the peer's first buffer."""
    state.limit = state.allowed = limit
    state.sequence = 0
    # At most two buffers: the current buffer, in `addr`, `key` and `left`, and the next.
    state.addr, state.key, state.left = first
    state.spare_addr = state.spare_key = state.spare_left = 0


def took_credit(state: StreamState) -> None:
    """Count a message of this side that takes a credit and no space."""
    state.allowed -= 1
    state.sequence = (state.sequence + 1) & _SEQUENCE


def allow(state: StreamState, limit: int) -> None:
    """Take a new limit of messages from the peer.

    Raises:
        ProtocolError: The limit takes back credits, or exceeds the number that the peer takes.
    """
    allowed = (limit - state.sequence) & _SEQUENCE
    if not state.allowed <= allowed <= state.limit:
        raise protocol_error(
            f"message limit {limit} with {state.sequence} sent, {state.allowed} allowed before "
            f"and {state.limit} announced"
        )
    state.allowed = allowed


def add_buffer(state: StreamState, buffer: Descriptor) -> None:
    """Take a buffer that the peer has advertised.

    Raises:
        ProtocolError: Two buffers are advertised and not full already.
    """
    if not state.left:
        state.addr, state.key, state.left = buffer
    elif not state.spare_left:
        state.spare_addr, state.spare_key, state.spare_left = buffer
    else:
        raise protocol_error("a third buffer while two are not full")


# Receiving


def begin_receiving(state: StreamState) -> None:
    """Begin with all credits at the peer, and the first half advertised."""
    half = state.ring_size // 2
    state.readable = state.offset = 0
    # Space of the peer: bytes left in the half that it fills, and further halves.
    state.ring_left = half
    state.ring_buffers = 0
    state.ring_allowed = state.credits
    # Space to advertise: free bytes that are not advertised yet, and their offset.  Private data
    # have advertised the first half only.
    state.ring_free = state.ring_next = half
    # The credit of a message is returned when its last byte is consumed; `consumed` counts these
    # messages, and the wire has it modulo 2^16.
    state.consumed = 0
    state.due = max(1, state.credits // 2)


def arrived(state: StreamState, length: int) -> None:
    """Count a message of data that has arrived.

    Raises:
        ProtocolError: It came without a credit, is empty, or exceeds its buffer.
    """
    if not state.ring_allowed:
        raise protocol_error(f"data without a credit: {state.waiting_count} messages wait")
    if not 0 < length <= state.ring_left:
        raise protocol_error(f"{length} bytes of data for {state.ring_left} bytes of buffer")
    state.ring_allowed -= 1
    state.ring_left -= length
    if not state.ring_left and state.ring_buffers:
        state.ring_buffers -= 1
        state.ring_left = (state.wider_size if state.moved else state.ring_size) // 2
    state.push_waiting(length)
    state.readable += length


def skipped(state: StreamState) -> None:
    """Count a message that takes a credit and brings no bytes; its credit is returned at once.

    Raises:
        ProtocolError: It came without a credit.
    """
    if not state.ring_allowed:
        raise protocol_error("a message without a credit")
    state.ring_allowed -= 1
    state.consumed += 1


def is_due(state: StreamState) -> bool:
    """Whether an update is due: half of the ring is free, or half of the credits are used."""
    return state.ring_free >= state.ring_size // 2 or state.consumed >= state.due


def _next_buffer(state: StreamState) -> Descriptor:
    if state.wider_size and not state.ring_next:
        wider = Descriptor(state.wider_addr, state.wider_rkey, state.wider_size // 2)
        state.moved = True
        if state.ring_free == state.ring_size:
            move(state)
        else:
            state.ring_free = 0
        return wider
    half, offset = state.ring_size // 2, state.ring_next
    state.ring_free -= half
    state.ring_next = (offset + half) % state.ring_size
    return Descriptor(state.ring_addr + offset, state.ring_rkey, half)


def move(state: StreamState) -> None:
    """The bytes of the ring are read: go on in the larger ring, whose second half is free."""
    state.ring_addr, state.ring_rkey = state.wider_addr, state.wider_rkey
    state.ring_size, state.wider_size = state.wider_size, 0
    state.moved = False
    state.ring_next = state.ring_size // 2
    state.ring_free = state.ring_next + state.offset


def repeat(state: StreamState) -> None:
    """Have the next update sent although none is due, as a sign of life."""
    state.due = state.consumed


def update(state: StreamState) -> tuple[int, Descriptor | None]:
    """Return the update to send: the limit, and the buffer to advertise or None.

    It counts as sent.
    """
    buffer = None
    if state.ring_free >= state.ring_size // 2:
        buffer = _next_buffer(state)
        if state.ring_left:
            state.ring_buffers += 1
        else:
            state.ring_left = buffer.length
    # The peer has its old credits and one for each message consumed since the last update; both
    # together are `credits` less the messages that wait.
    state.ring_allowed = state.credits - state.waiting_count
    state.due = state.consumed + max(1, state.credits // 2)
    return (state.consumed + state.credits) & _SEQUENCE, buffer
