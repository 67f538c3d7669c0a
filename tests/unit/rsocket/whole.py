"""The frequent cases of the protocol in Python: data written and read, and posts counted off.

The library has them in C alone (`_core/stream.c`).  `Whole` is the second opinion: with the rules
of `aiordma.rsocket` it is both halves of a connection without an adapter.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import cast

from aiordma._core import StreamState
from aiordma.rsocket import Machine, Place, Post, flow
from aiordma.rsocket.wire import MAX_VALUE

__all__ = ["State", "Whole"]


@dataclass
class State:
    """The numbers of a connection, by the names of `StreamState`."""

    ring_addr: int
    ring_rkey: int
    ring_size: int
    credits: int
    wider_addr: int = 0
    wider_rkey: int = 0
    wider_size: int = 0
    moved: bool = False
    readable: int = 0
    offset: int = 0
    ring_left: int = 0
    ring_buffers: int = 0
    ring_allowed: int = 0
    ring_free: int = 0
    ring_next: int = 0
    consumed: int = 0
    due: int = 0
    addr: int = 0
    key: int = 0
    left: int = 0
    spare_addr: int = 0
    spare_key: int = 0
    spare_left: int = 0
    allowed: int = 0
    limit: int = 0
    sequence: int = 0
    data_out: int = 0
    control_out: int = 0
    data_limit: int = 0
    data_wrs: int = 0
    entry: int = 0
    peer_entry: int = 0
    table_addr: int = 0
    table_key: int = 0
    table_length: int = 0
    swapped: bool = False
    receiving: bool = False
    sending: bool = False
    crediting: bool = False
    owing: bool = False
    _waiting: deque[int] = field(default_factory=deque)

    @property
    def waiting_count(self) -> int:
        """Messages that wait."""
        return len(self._waiting)

    @property
    def first_waiting(self) -> int:
        """Bytes left of the first message that waits."""
        return self._waiting[0]

    @first_waiting.setter
    def first_waiting(self, length: int) -> None:
        self._waiting[0] = length

    def push_waiting(self, length: int) -> None:
        """Append a message of `length` bytes."""
        self._waiting.append(length)

    def pop_waiting(self) -> None:
        """Remove the first message."""
        self._waiting.popleft()


class Whole(Machine):
    """A machine that also writes and reads data.

    Args:
        ring: As for `Machine`; table, memory, send_depth, iwarp and state likewise.
        credits: Data messages that the peer may have outstanding.
        state: By default a new `State`.

    Attributes:
        numbers: The state.
    """

    __slots__ = ("numbers",)

    def __init__(
        self,
        *,
        ring: Place,
        table: Place,
        memory: memoryview,
        credits: int,
        send_depth: int,
        iwarp: bool = False,
        state: StreamState | None = None,
    ) -> None:
        # In Python or in C.
        self.numbers = state or cast("StreamState", State(*ring, credits))
        super().__init__(
            ring=ring, table=table, memory=memory, send_depth=send_depth, iwarp=iwarp,
            state=self.numbers,
        )  # fmt: skip

    def on_sent(self, post: Post) -> None:
        """Count off a post that has completed, with or without success."""
        if post.word <= MAX_VALUE:
            self.numbers.data_out -= post.wrs
        else:
            self.numbers.control_out -= post.wrs
            self.completed(post.word)

    def lost(self) -> None:
        """The connection is lost; arrived bytes can still be read."""
        self._ending.finish()
        self.sync()

    # Receiving

    @property
    def readable(self) -> int:
        """Bytes that have arrived and were not consumed."""
        return self.numbers.readable

    def peek(self) -> tuple[int, int]:
        """The place of the next bytes: offset into the ring, and length up to its end."""
        state = self.numbers
        length = min(state.readable, state.ring_size - state.offset)
        return (state.offset, length) if length else (0, 0)

    def consume(self, length: int) -> None:
        """Free the next `length` bytes, which the application has taken.

        Raises:
            ValueError: Fewer bytes have arrived.
        """
        state = self.numbers
        if not 0 <= length <= state.readable:
            msg = f"{length} bytes consumed, {state.readable} are there"
            raise ValueError(msg)
        state.readable -= length
        state.offset += length
        if not state.moved:
            state.ring_free += length
        if state.offset >= state.ring_size:
            state.offset -= state.ring_size
            if state.moved:
                flow.move(state)
        while length:
            first = state.first_waiting
            if first > length:
                state.first_waiting = first - length
                return
            state.pop_waiting()
            length -= first
            state.consumed += 1

    # Sending

    @property
    def room(self) -> int:
        """Bytes that a message of data may carry now; 0 until the next word or completion."""
        state = self.numbers
        blocked = not state.allowed or state.data_out > state.data_limit
        if blocked or not self.opened or not self.writable or self.iomap.pending:
            return 0
        return min(state.left, MAX_VALUE)

    def write(self, wanted: int) -> Post:
        """A message of data, of `wanted` bytes or as many as there is room for.

        Raises:
            ValueError: `wanted` is 0, or there is no room.
        """
        state = self.numbers
        length = min(wanted, self.room)
        if length <= 0:
            msg = f"{wanted} bytes to write, room for {self.room}"
            raise ValueError(msg)
        addr, key = state.addr, state.key
        state.data_out += state.data_wrs
        flow.took_credit(state)
        state.left -= length
        if state.left:
            state.addr += length
        elif state.spare_left:
            state.addr, state.key, state.left = state.spare_addr, state.spare_key, state.spare_left
            state.spare_left = 0
        return Post(addr, key, length, length, b"", state.data_wrs)

    @property
    def idle(self) -> bool:
        """Whether all posts have completed."""
        return not self.numbers.data_out and not self.numbers.control_out

    @property
    def unsent_control(self) -> bool:
        """Whether a control message waits for a free work request."""
        ending = self._ending
        return self.opened and (
            ending.pending is not None
            or self._may_publish
            or (ending.wants_credit and flow.is_due(self.numbers))
        )
