"""State: the numbers of one connection, which the protocol in this folder works on.

`_core.StreamState` has the same names: there C does the frequent cases on the same numbers, and
each rule of the rare ones is written once, here.
"""

from __future__ import annotations

from collections import deque

__all__ = ["State"]


class State:
    """The numbers of a connection whose completions Python takes, all of them.

    Attributes:
        readable: Bytes that have arrived and were not consumed.
        offset: Where in the ring the first of them is.
        ring_left: Bytes that are left in the half of the ring that the peer fills.
        ring_buffers: Halves that it may fill after that.
        ring_allowed: Messages that it may send.
        ring_free: Bytes of the ring that may be advertised again.
        ring_next: Offset where these begin.
        credits: Data messages that may wait to be consumed.
        consumed: Messages that were consumed, ever.
        due: The peer is told of credits when so many were.
        addr, key, left: What is left of the peer's buffer that is being filled.
        spare_addr, spare_key, spare_left: The buffer after it; 0 bytes: there is none.
        allowed: Messages that may be sent before the peer states a new limit.
        limit: Messages that it takes at a time.
        sequence: Messages that were sent, modulo 2**16.
        data_out, control_out: Work requests under way.
        data_limit: With at most so many of data under way, another message of data fits.
        data_wrs: Work requests of a message of data.
        entry: Of our table: where the peer's next descriptor appears.
        peer_entry: Of its table: where our next one goes.
        table_addr, table_key, table_length: The peer's table.
        swapped: It has the other byte order.
        receiving, sending, crediting, owing: What may be done without the protocol; see
            `Machine.sync`.
    """

    def __init__(self) -> None:
        self.readable = self.offset = 0
        self.ring_left = self.ring_buffers = self.ring_allowed = 0
        self.ring_free = self.ring_next = 0
        self.credits = self.consumed = self.due = 0
        self.addr = self.key = self.left = 0
        self.spare_addr = self.spare_key = self.spare_left = 0
        self.allowed = self.limit = self.sequence = 0
        self.data_out = self.control_out = self.data_limit = self.data_wrs = 0
        self.entry = self.peer_entry = 0
        self.table_addr = self.table_key = self.table_length = 0
        self.swapped = self.receiving = self.sending = self.crediting = self.owing = False
        self._waiting: deque[int] = deque()

    # Lengths of the messages that wait to be consumed

    @property
    def waiting_count(self) -> int:
        """How many messages wait."""
        return len(self._waiting)

    @property
    def first_waiting(self) -> int:
        """Bytes that are left of the first of them."""
        return self._waiting[0]

    @first_waiting.setter
    def first_waiting(self, length: int) -> None:
        self._waiting[0] = length

    def push_waiting(self, length: int) -> None:
        """A message of so many bytes waits."""
        self._waiting.append(length)

    def pop_waiting(self) -> None:
        """The first of them waits no more."""
        self._waiting.popleft()
