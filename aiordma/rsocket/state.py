"""State: the numbers of one connection, which the protocol in this folder works on.

`_core.StreamState` has the same names: there C does the frequent cases on the same numbers, and
each rule of the rare ones is written once, here.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

__all__ = ["State"]


@dataclass
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

    readable: int = 0
    offset: int = 0
    ring_left: int = 0
    ring_buffers: int = 0
    ring_allowed: int = 0
    ring_free: int = 0
    ring_next: int = 0
    credits: int = 0
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
