"""Flow control once more, in Python, and with it data written and read, and posts counted off.

The library has them in C alone (`_core/stream.c`).  `State` is the second opinion on its rules: it
has the commands of `StreamState` that a `Machine` gives.  `Whole` is a connection on it, without
an adapter; forms.py has the same connection on C.
"""

from __future__ import annotations

import ctypes
import sys
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from aiordma._core import (
    NO_ROOM,
    OWES_MAPPING,
    OWES_NOTHING,
    STREAM_BAD_BUFFER,
    STREAM_BAD_LIMIT,
    STREAM_NO_CREDIT,
    STREAM_NO_SPACE,
    STREAM_THIRD_BUFFER,
    StreamState,
)
from aiordma.rsocket import Descriptor, Kind, Machine, Place, pack_word, unpack_word
from aiordma.rsocket.wire import DESCRIPTOR_SIZE, MAX_VALUE

__all__ = ["Connection", "Post", "State", "Whole"]

_SEQUENCE = 0xFFFF  # the wire's numbers of messages are taken modulo 2^16
_BIG_ENDIAN = sys.byteorder == "big"
_CONTROL_WRS = 4

#: How the peer broke a rule, with two numbers.
_Broken = tuple[int, int, int]


class Post(NamedTuple):
    """A posted message: an RDMA write with the word, or the word alone.

    Attributes:
        addr: Address in the peer's memory; 0 if there is nothing to write.
        key: Remote key of that memory.
        length: Bytes to write there.
        word: The word that follows the bytes.
        payload: The bytes, of a control message.
        wrs: Work requests of the send queue that the message takes.
    """

    addr: int
    key: int
    length: int
    word: int
    payload: bytes
    wrs: int


@dataclass
class State:
    """Flow control of a connection; `posted` are its messages until somebody takes them."""

    ring_addr: int
    ring_rkey: int
    ring_size: int
    credits: int
    table: memoryview
    send_depth: int
    iwarp: bool
    wider_addr: int = 0
    wider_rkey: int = 0
    wider_size: int = 0
    moved: bool = False
    readable: int = 0
    offset: int = 0
    ring_buffers: int = 0
    consumed: int = 0
    addr: int = 0
    key: int = 0
    left: int = 0
    spare: tuple[int, int, int] = (0, 0, 0)
    allowed: int = 0
    limit: int = 0
    sequence: int = 0
    data_out: int = 0
    control_out: int = 0
    # Entry 0 of both tables stands for the first buffer.
    entry: int = 1
    peer_entry: int = 1
    peer_table: tuple[int, int, int] = (0, 0, 0)
    swapped: bool = False
    opened: bool = False
    writable: bool = True
    wanted: bool = True
    owed: int = OWES_NOTHING
    waiting: deque[int] = field(default_factory=deque)
    posted: deque[Post] = field(default_factory=deque)

    def __post_init__(self) -> None:
        # All credits are at the peer, and the first half of the ring is advertised.
        self.ring_left = self.ring_free = self.ring_next = self.ring_size // 2
        self.ring_allowed = self.credits
        self.due = max(1, self.credits // 2)
        self.data_wrs = 2 if self.iwarp else 1

    def meet(
        self,
        credits: int,
        buffer: tuple[int, int, int],
        table: tuple[int, int, int],
        swapped: bool,
    ) -> None:
        """Begin with the peer's credits, first buffer and table."""
        self.limit = self.allowed = credits
        self.addr, self.key, self.left = buffer
        self.peer_table = table
        self.swapped = swapped

    def open(self) -> None:
        """Data may go both ways."""
        self.opened = True

    def permit(self, writable: bool, wanted: bool, ended: bool, owed: int) -> None:
        """Note what the end leaves open."""
        self.writable, self.wanted, self.owed = writable, wanted and not ended, owed

    # Control messages

    def announce(self, repeat: bool) -> int:
        """Post the updates that are due, with a buffer if half of the ring is free."""
        if repeat:
            self.due = self.consumed
        half = self.ring_size // 2
        while (
            self.opened
            and self.wanted
            and (self.ring_free >= half or self.consumed >= self.due)
            and _CONTROL_WRS - self.control_out > self.iwarp
        ):
            self._update()
            half = self.ring_size // 2
        return 0

    def _update(self) -> None:
        wrs, payload, addr, key = 1, b"", 0, 0
        if self.ring_free >= self.ring_size // 2:
            buffer = self._next_buffer()
            if self.ring_left:
                self.ring_buffers += 1
            else:
                self.ring_left = buffer.length
            table_addr, key, table_length = self.peer_table
            payload = buffer.pack(self.swapped != _BIG_ENDIAN)
            addr = table_addr + self.peer_entry * DESCRIPTOR_SIZE
            wrs = self.data_wrs
            self.peer_entry = (self.peer_entry + 1) % table_length
        self.ring_allowed = self.credits - len(self.waiting)
        self.due = self.consumed + max(1, self.credits // 2)
        word = pack_word(Kind.SGL, (self.consumed + self.credits) & _SEQUENCE)
        self._post(Post(addr, key, len(payload), word, payload, wrs))

    def say(self, word: int) -> int:
        """Post a word, if a work request is free."""
        if self.control_out == _CONTROL_WRS:
            return NO_ROOM
        self._post(Post(0, 0, 0, word, b"", 1))
        return 0

    def publish(self, word: int, payload: bytes, addr: int, key: int) -> int:
        """Post a word behind bytes, which takes a credit."""
        if not self.allowed or self.control_out + self.data_wrs > _CONTROL_WRS:
            return NO_ROOM
        self.allowed -= 1
        self.sequence = (self.sequence + 1) & _SEQUENCE
        self._post(Post(addr, key, len(payload), word, payload, self.data_wrs))
        return 0

    def _post(self, post: Post) -> None:
        self.control_out += post.wrs
        assert self.control_out <= _CONTROL_WRS
        self.posted.append(post)

    # What the peer says

    def take_word(self, word: int) -> _Broken | None:
        """Count a message of the peer."""
        kind, value = unpack_word(word)
        if word <= MAX_VALUE:
            return self._take_data(word)
        if kind == Kind.SGL:
            return self._take_limit(value)
        assert kind == Kind.IOMAP
        return self._take_empty()

    def _take_limit(self, limit: int) -> _Broken | None:
        """Take a new limit of messages, and the expected entry of the table if it is filled."""
        allowed = (limit - self.sequence) & _SEQUENCE
        if not self.allowed <= allowed <= self.limit:
            return STREAM_BAD_LIMIT, self.sequence, self.allowed
        start = self.entry * DESCRIPTOR_SIZE
        packed = bytes(self.table[start : start + DESCRIPTOR_SIZE])
        if any(packed[12:]):
            addr = int.from_bytes(packed[:8], sys.byteorder)
            key = int.from_bytes(packed[8:12], sys.byteorder)
            length = int.from_bytes(packed[12:], sys.byteorder)
            if addr + length > 1 << 64:
                return STREAM_BAD_BUFFER, addr, length
            if self.left and self.spare[2]:
                return STREAM_THIRD_BUFFER, 0, 0
            if self.left:
                self.spare = addr, key, length
            else:
                self.addr, self.key, self.left = addr, key, length
            self.table[start : start + DESCRIPTOR_SIZE] = bytes(DESCRIPTOR_SIZE)
            self.entry = 1 - self.entry
        self.allowed = allowed
        return None

    def _take_data(self, length: int) -> _Broken | None:
        """Count a message of data that has arrived."""
        if not self.ring_allowed:
            return STREAM_NO_CREDIT, len(self.waiting), 0
        if not 0 < length <= self.ring_left:
            return STREAM_NO_SPACE, length, self.ring_left
        self.ring_allowed -= 1
        self.ring_left -= length
        if not self.ring_left and self.ring_buffers:
            self.ring_buffers -= 1
            self.ring_left = (self.wider_size if self.moved else self.ring_size) // 2
        self.waiting.append(length)
        self.readable += length
        return None

    def _take_empty(self) -> _Broken | None:
        """Count a message that takes a credit and brings no bytes; the credit goes back at once."""
        if not self.ring_allowed:
            return STREAM_NO_CREDIT, len(self.waiting), 0
        self.ring_allowed -= 1
        self.consumed += 1
        return None

    # The rings

    def widen(self, addr: int, rkey: int, size: int) -> None:
        """Have a larger ring take over when the first half of the ring is free."""
        self.wider_addr, self.wider_rkey, self.wider_size = addr, rkey, size

    def _next_buffer(self) -> Descriptor:
        if self.wider_size and not self.ring_next:
            wider = Descriptor(self.wider_addr, self.wider_rkey, self.wider_size // 2)
            self.moved = True
            if self.ring_free == self.ring_size:
                self._move()
            else:
                self.ring_free = 0
            return wider
        half, offset = self.ring_size // 2, self.ring_next
        self.ring_free -= half
        self.ring_next = (offset + half) % self.ring_size
        return Descriptor(self.ring_addr + offset, self.ring_rkey, half)

    def _move(self) -> None:
        """The bytes of the ring are read: go on in the larger ring, whose second half is free."""
        self.ring_addr, self.ring_rkey = self.wider_addr, self.wider_rkey
        self.ring_size, self.wider_size = self.wider_size, 0
        self.moved = False
        self.ring_next = self.ring_size // 2
        self.ring_free = self.ring_next + self.offset

    def read(self, length: int) -> bytes:
        """The next `length` bytes, which free their room."""
        here = min(length, self.ring_size - self.offset)
        data = ctypes.string_at(self.ring_addr + self.offset, here)
        behind = self.wider_addr if self.moved else self.ring_addr
        data += ctypes.string_at(behind, length - here)
        self.readable -= length
        self.offset += length
        if not self.moved:
            self.ring_free += length
        if self.offset >= self.ring_size:
            self.offset -= self.ring_size
            if self.moved:
                self._move()
        while length:
            first = self.waiting[0]
            if first > length:
                self.waiting[0] = first - length
                break
            self.waiting.popleft()
            length -= first
            self.consumed += 1
        self.announce(False)
        return data

    # Data to the peer

    @property
    def room(self) -> int:
        """Bytes that a message of data may carry now."""
        blocked = not self.allowed or self.data_out > self.send_depth - _CONTROL_WRS - self.data_wrs
        if blocked or not self.opened or not self.writable or self.owed == OWES_MAPPING:
            return 0
        return min(self.left, MAX_VALUE)

    def write(self, length: int) -> Post:
        """A message of data, of at most `room` bytes."""
        addr, key = self.addr, self.key
        self.data_out += self.data_wrs
        self.allowed -= 1
        self.sequence = (self.sequence + 1) & _SEQUENCE
        self.left -= length
        if self.left:
            self.addr += length
        elif self.spare[2]:
            self.addr, self.key, self.left = self.spare
            self.spare = 0, 0, 0
        return Post(addr, key, length, length, b"", self.data_wrs)

    def complete(self, post: Post) -> None:
        """Count a message off."""
        if post.word <= MAX_VALUE:
            self.data_out -= post.wrs
        else:
            self.control_out -= post.wrs


class Connection(Machine):
    """A machine that also writes and reads data; a subclass says by what.

    Attributes:
        posted: Control messages that were posted, until a test has seen them.
    """

    __slots__ = ("posted",)

    posted: deque[Post]

    def next_control(self) -> Post | None:
        """The next control message that is posted; None if none may be posted now."""
        assert self.post_control() == 0
        return self.posted.popleft() if self.posted else None

    def lost(self) -> None:
        """The connection is lost; arrived bytes can still be read."""
        self._ending.finish()
        self._sync()

    def consume(self, length: int) -> None:
        """Read bytes that are of no interest.  Raises as `read`."""
        self.read(length)

    def read(self, length: int) -> bytes:
        """Take the next `length` bytes.

        Raises:
            ValueError: Fewer bytes have arrived.
        """
        if not 0 <= length <= self.readable:
            msg = f"{length} bytes consumed, {self.readable} are there"
            raise ValueError(msg)
        return self._read(length) if length else b""

    def write(self, wanted: int) -> Post:
        """Post a message of data, of `wanted` bytes or as many as there is room for.

        Raises:
            ValueError: `wanted` is 0, or there is no room.
        """
        length = min(wanted, self.room)
        if length <= 0:
            msg = f"{wanted} bytes to write, room for {self.room}"
            raise ValueError(msg)
        return self._write(length)

    def on_sent(self, post: Post) -> None:
        """A post has completed, the oldest."""
        raise NotImplementedError

    @property
    def readable(self) -> int:
        """Bytes that have arrived and were not read."""
        raise NotImplementedError

    @property
    def room(self) -> int:
        """Bytes that a message of data may carry now; 0 until the next word or completion."""
        raise NotImplementedError

    @property
    def idle(self) -> bool:
        """Whether all posts have completed."""
        raise NotImplementedError

    def _read(self, length: int) -> bytes:
        raise NotImplementedError

    def _write(self, length: int) -> Post:
        raise NotImplementedError


class Whole(Connection):
    """A connection on the `State` in Python.

    Args:
        ring: As for `Machine`; table, memory and iwarp likewise.
        credits: Data messages that the peer may have outstanding.
        send_depth: Work requests for sending.

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
    ) -> None:
        self.numbers = State(*ring, credits, memory, send_depth, iwarp)
        self.posted = self.numbers.posted
        super().__init__(
            ring=ring, table=table, memory=memory, credits=credits, iwarp=iwarp,
            state=cast("StreamState", self.numbers),
        )  # fmt: skip

    def on_sent(self, post: Post) -> None:
        self.numbers.complete(post)
        if post.word > MAX_VALUE:
            self.completed(post.word)

    @property
    def readable(self) -> int:
        return self.numbers.readable

    @property
    def room(self) -> int:
        return self.numbers.room

    @property
    def idle(self) -> bool:
        return not self.numbers.data_out and not self.numbers.control_out

    def _read(self, length: int) -> bytes:
        return self.numbers.read(length)

    def _write(self, length: int) -> Post:
        return self.numbers.write(length)
