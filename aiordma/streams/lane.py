"""Lane: the protocol of a stream whose numbers lie in C, where its plain cases are dealt with.

Theory of operation
    `struct aio_stream` (glue.cdef.h) holds what data and credits change.  `stream.c` changes it for
    the plain cases, the protocol of aiordma/rsocket for all others: `LaneMachine` is that very
    code, of which some attributes are fields of the struct.  So each rule of the rare cases is
    written once, and whoever of the two comes first finds what the other has left.

    What C may do by itself is said by a few flags, which follow the protocol's state: every method
    that can change that state sets them anew (`sync`).
"""

from __future__ import annotations

import operator
import sys
from typing import Any

from aiordma._ffi import CData, ffi, lib
from aiordma.rsocket.flow import ReceiveFlow, SendFlow
from aiordma.rsocket.machine import Machine, Place, Post
from aiordma.rsocket.wire import MAX_VALUE, Descriptor

__all__ = ["LaneMachine", "new_lane"]

_PARTS = 4  # of the ring for sending; a message is at most one of them
_MOST_UNTOLD = 32  # messages of which one asks for its completion


def _field(name: str) -> Any:
    """An attribute that is a field of the object's struct."""

    def put(obj: Any, value: Any) -> None:
        setattr(obj._c, name, value)

    return property(operator.attrgetter(f"_c.{name}"), put)


class _Waiting:
    """As much of a deque of numbers as `ReceiveFlow` uses, in C."""

    __slots__ = ("_c",)

    def __init__(self, c: CData) -> None:
        self._c = c

    def __len__(self) -> int:
        return int(self._c.waiting_count)

    def append(self, length: int) -> None:
        c = self._c
        c.waiting[(c.waiting_first + c.waiting_count) & c.waiting_mask] = length
        c.waiting_count += 1

    def __getitem__(self, index: int) -> int:
        c = self._c
        return int(c.waiting[(c.waiting_first + index) & c.waiting_mask])

    def __setitem__(self, index: int, length: int) -> None:
        c = self._c
        c.waiting[(c.waiting_first + index) & c.waiting_mask] = length

    def __delitem__(self, index: int) -> None:
        c = self._c
        c.waiting_first = (c.waiting_first + 1) & 0xFFFFFFFF
        c.waiting_count -= 1


class _LaneReceive(ReceiveFlow):
    __slots__ = ("_c",)

    readable: Any = _field("readable")
    offset: Any = _field("offset")
    _left: Any = _field("ring_left")
    _buffers: Any = _field("ring_buffers")
    _allowed: Any = _field("ring_allowed")
    _free: Any = _field("ring_free")
    _next: Any = _field("ring_next")
    _limit: Any = _field("credits")
    _consumed: Any = _field("consumed")
    _due: Any = _field("due")

    def __init__(self, c: CData, size: int, limit: int) -> None:
        self._c = c
        super().__init__(size, limit)

    @property
    def _waiting(self) -> Any:
        return _Waiting(self._c)

    @_waiting.setter
    def _waiting(self, value: Any) -> None:
        self._c.waiting_count = 0


class _LaneSend(SendFlow):
    __slots__ = ("_c",)

    allowed: Any = _field("allowed")
    _addr: Any = _field("addr")
    _key: Any = _field("key")
    _left: Any = _field("left")
    _limit: Any = _field("limit")
    _sequence: Any = _field("sequence")

    def __init__(self, c: CData, limit: int, first: Descriptor) -> None:
        self._c = c
        super().__init__(limit, first)

    @property
    def room(self) -> Any:
        return min(self._c.left, MAX_VALUE)

    @room.setter
    def room(self, value: Any) -> None:
        """It follows from what is left of the buffer."""

    @property
    def _spare(self) -> Any:
        c = self._c
        left = c.spare_left
        return Descriptor(c.spare_addr, c.spare_key, left) if left else None

    @_spare.setter
    def _spare(self, value: Descriptor | None) -> None:
        c = self._c
        c.spare_addr, c.spare_key, c.spare_left = value or (0, 0, 0)


def new_lane(
    *,
    ring: Place,
    table: int,
    send: tuple[int, int, int],
    credits: int,
    send_depth: int,
    iwarp: bool,
    inline_size: int = 0,
) -> tuple[CData, list[Any]]:
    """A struct for a stream that has not begun, and what has to live as long as it.

    Args:
        ring: Where the peer's bytes land.
        table: Address of our table of descriptors.
        send: Address, bytes and local key of the ring for sending.  The payloads of control
            messages lie behind it, 96 bytes.
        credits: Messages that may wait.
        send_depth: Work requests of the send queue.
        iwarp: Words travel as messages of their own.
        inline_size: Bytes that fit into a work request.
    """
    c = ffi.new("struct aio_stream *")
    lib.aio_stream_init(c)
    wrs = 2 if iwarp else 1
    waiting = ffi.new("uint32_t[]", _power(credits))
    messages = ffi.new("struct aio_message[]", _power(send_depth))
    c.iwarp, c.inline_size = iwarp, inline_size
    c.ring, c.ring_size, c.ring_rkey = ffi.cast("uint8_t *", ring.addr), ring.size, ring.key
    c.table = ffi.cast("uint8_t *", table)
    addr, size, c.send_lkey = send
    c.send, c.send_size = ffi.cast("uint8_t *", addr), size
    c.send_free = size
    c.largest = max(1, size // _PARTS)
    c.tell_bytes = max(1, size // _PARTS)
    c.tell_messages = max(1, min(_MOST_UNTOLD, (send_depth // wrs - 4) // 4))
    c.waiting, c.waiting_mask = waiting, len(waiting) - 1
    c.messages, c.messages_mask = messages, len(messages) - 1
    c.want = 1
    c.held = 1
    return c, [waiting, messages]


def _power(count: int) -> int:
    """A power of two of at least `count`."""
    return 1 << (count - 1).bit_length()


class LaneMachine(Machine):
    """The protocol of one stream; its numbers lie in a struct of `new_lane`.

    Args:
        c: The struct.
        live: C may take words from now on, see `begin`.
        options: As for `Machine`.
    """

    __slots__ = ("_c", "_live")

    _control_out: Any = _field("control_out")
    _data_limit: Any = _field("data_limit")
    _data_out: Any = _field("data_out")
    _data_wrs: Any = _field("data_wrs")
    _entry: Any = _field("entry")
    _peer_entry: Any = _field("peer_entry")

    def __init__(self, c: CData, *, live: bool = False, **options: Any) -> None:
        self._c = c
        self._live = live
        super().__init__(**options)

    def _new_receive(self, size: int, limit: int) -> ReceiveFlow:
        return _LaneReceive(self._c, size, limit)

    def _new_send(self, limit: int, first: Descriptor) -> SendFlow:
        return _LaneSend(self._c, limit, first)

    def sync(self) -> None:
        """Tell C what it may do by itself."""
        c, ending, met = self._c, self._ending, self._peer is not None
        c.receiving = met and self._live and not ending.eof
        c.sending = self._is_open and ending.writable and not self.iomap.pending
        c.crediting = met and self._is_open and ending.wants_credit
        c.owing = ending.pending is not None or self.iomap.pending

    def begin(self) -> None:
        """From now on C may take words, as far as the peer may send them."""
        self._live = True
        self.sync()

    def meet(self, data: bytes) -> None:
        """As `Machine.meet`."""
        super().meet(data)
        peer, c = self._peer, self._c
        assert peer is not None
        c.table_addr, c.table_key = peer.table_addr, peer.table_key
        c.table_length = peer.table_length
        c.swapped = peer.big_endian != (sys.byteorder == "big")
        self.sync()

    def open(self) -> None:
        """As `Machine.open`."""
        super().open()
        self.sync()

    def on_word(self, word: int) -> None:
        """As `Machine.on_word`."""
        try:
            super().on_word(word)
        finally:
            self.sync()

    def on_sent(self, post: Post) -> None:
        """As `Machine.on_sent`."""
        super().on_sent(post)
        self.sync()

    def completed(self, word: int) -> None:
        """A message with this word has completed, and C has counted it."""
        if word > MAX_VALUE:
            self._ending.completed(word)
            self.sync()

    def lost(self) -> None:
        """As `Machine.lost`."""
        super().lost()
        self.sync()

    def next_control(self) -> Post | None:
        """As `Machine.next_control`."""
        post = super().next_control()
        if post is not None:
            self.sync()
        return post

    def shutdown(self) -> None:
        """As `Machine.shutdown`."""
        super().shutdown()
        self.sync()

    def disconnect(self) -> None:
        """As `Machine.disconnect`."""
        super().disconnect()
        self.sync()
