"""State: the numbers of a connection, on which the protocol in this folder works.

`StreamState` has the same names: C does the frequent cases on the same numbers, and the rules
of the rare cases are written once, in this folder.
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
        offset: Offset of the first readable byte in the ring.
        ring_left: Bytes left in the half of the ring that the peer fills.
        ring_buffers: Halves that the peer may fill after that.
        ring_allowed: Messages that the peer may send.
        ring_free: Bytes of the ring that may be advertised again.
        ring_next: Offset of the first byte that may be advertised again.
        credits: Data messages that may wait to be consumed.
        consumed: Messages consumed since the beginning.
        due: The value of `consumed` at which an update of credits is due.
        addr, key, left: The rest of the peer's current buffer.
        spare_addr, spare_key, spare_left: The peer's next buffer; 0 bytes if there is none.
        allowed: Messages that may be sent before the peer states a new limit.
        limit: Messages that the peer takes at a time.
        sequence: Messages that were sent, modulo 2**16.
        data_out, control_out: Work requests under way.
        data_limit: A message of data fits while `data_out` is at most this.
        data_wrs: Work requests of a message of data.
        entry: Entry of this side's table in which the peer's next descriptor appears.
        peer_entry: Entry of the peer's table for this side's next descriptor.
        table_addr, table_key, table_length: The peer's table.
        swapped: Whether the peer's table has the other byte order.
        receiving, sending, crediting, owing: Flags of the steps that C may do without the
            machine; see `Machine.sync`.
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
