"""Two rsockets machines and what joins them: real memory, and a wire that takes its time.

A message goes through four stages, each in order and each when the test says so: it is posted, it
*lands* (its bytes are in the peer's memory), the peer handles its *word*, and the sender sees its
*completion*.  Between landing and word the peer's memory is ahead of what it has been told, as on
a real adapter.

Every write is held against what the owner of the memory allows: a write outside, onto bytes that
nobody has read or onto a descriptor that nobody has taken fails the test at once.
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import Any, NamedTuple

from aiordma.rsocket import (
    DESCRIPTOR_SIZE,
    IOMAP_SLOT_SIZE,
    TABLE_LENGTH,
    Kind,
    Mapping,
    Place,
)

from . import forms
from .whole import Post

TABLE_SIZE = TABLE_LENGTH * DESCRIPTOR_SIZE
_UNREAD = b"\1"


class Flight(NamedTuple):
    post: Post
    data: bytes


class Side:
    """One end: a machine, its ring and its table, and the program above it."""

    def __init__(
        self,
        *,
        ring: int = 64,
        credit: int = 8,
        send_depth: int = 16,
        iwarp: bool = False,
        slots: int = 0,
        base: int = 0x7F00_0000_1000,
    ) -> None:
        self.ring, self.ring_memory = forms.memory_of(ring, 0x1100 + (base & 0xFF))
        table = Place(base + (1 << 24), 0x2200, TABLE_SIZE + slots * IOMAP_SLOT_SIZE)
        self.table = table
        self.table_memory = bytearray(table.size)
        self.credit = credit
        self.send_depth = send_depth
        self.machine = forms.new(
            ring=self.ring,
            table=table,
            memory=memoryview(self.table_memory),
            credits=credit,
            send_depth=send_depth,
            iwarp=iwarp,
        )
        self.unread = bytearray(ring)  # what has landed and was not consumed
        self.to_land: deque[Flight] = deque()
        self.to_complete: deque[Flight] = deque()
        self.words: deque[int] = deque()  # landed here, not handled
        self.sent = bytearray()
        self.received = bytearray()
        self.peer: Side = self
        self.ends: deque[int] = deque()  # of our messages that the peer has not consumed
        self.advertised = 1
        self.published: dict[int, Mapping] = {}
        self.mappings_posted = 0
        self.mappings_handled = 0  # of the peer's
        self.gave_up = False  # its program said disconnect
        self.control: list[int] = []  # words of the control messages posted

    # -- what the port does

    def write(self, size: int) -> int:
        """Post one message of at most `size` bytes, if there is room; how many went."""
        if not self.machine.room:
            return 0
        start = len(self.sent)
        self._collect()
        post = self.machine.write(size)
        data = bytes((start + i) * 7 % 251 for i in range(post.length))
        self.sent += data
        self.ends.append(len(self.sent))
        self._post(post, data)
        return post.length

    def control_all(self) -> int:
        """Post every control message that may go."""
        count = 0
        while (post := self.machine.next_control()) is not None:
            self._control(post)
            count += 1
        return count

    def _collect(self) -> None:
        """See the control messages that were posted when bytes were read."""
        while self.machine.posted:
            self._control(self.machine.posted.popleft())

    def _control(self, post: Post) -> None:
        assert len(post.payload) == post.length
        if post.word >> 29 == Kind.IOMAP:
            self.mappings_posted += 1
        elif post.length:
            self.advertised += 1
        self.control.append(post.word)
        self._post(post, post.payload)

    def publish(self, number: int) -> None:
        """Publish a mapping, if the peer has a slot for it."""
        mapping = Mapping(number, 0xA000, 0x99, number)
        with contextlib.suppress(OSError):
            self.published[self.machine.publish(mapping)] = mapping

    def withdraw(self) -> None:
        """Give a slot back that the peer has surely seen, so that it is used again."""
        if self.published and not self.machine.iomap.pending:
            slot = next(iter(self.published))
            del self.published[slot]
            self.machine.withdraw(slot)

    def handle(self) -> bool:
        """Handle the next word that has landed."""
        if not self.words:
            return False
        word = self.words.popleft()
        self.machine.on_word(word)
        self.mappings_handled += word >> 29 == Kind.IOMAP
        return True

    def complete(self) -> bool:
        """See the completion of the oldest message that has landed."""
        if not self.to_complete:
            return False
        self.machine.on_sent(self.to_complete.popleft().post)
        return True

    def read(self, size: int) -> int:
        """Take at most `size` bytes."""
        length = min(self.machine.readable, size)
        start = len(self.received)
        # An update may go as soon as they are read.
        for at in range(start, start + length):
            self.unread[at % self.ring.size] = 0
        self.received += self.machine.read(length)
        self._collect()
        return length

    # -- what the adapters do

    def land(self) -> bool:
        """The oldest message that was posted here gets to the peer."""
        if not self.to_land:
            return False
        flight = self.to_land.popleft()
        if flight.data:
            self.peer.take_write(flight)
        self.peer.words.append(flight.post.word)
        self.to_complete.append(flight)
        return True

    def take_write(self, flight: Flight) -> None:
        post, data = flight
        size = len(data)
        is_data = post.key == self.ring.key
        place, memory = (
            (self.ring, self.ring_memory) if is_data else (self.table, self.table_memory)
        )
        offset = post.addr - place.addr
        assert post.key == place.key, f"a write with a foreign key: {post}"
        assert 0 <= offset <= place.size - size, f"a write outside of everything: {post}"
        end = offset + size
        if is_data:
            assert not any(self.unread[offset:end]), f"onto bytes that nobody has read: {post}"
            self.unread[offset:end] = _UNREAD * size
        elif offset >= TABLE_SIZE:
            assert size == IOMAP_SLOT_SIZE, post
            assert (offset - TABLE_SIZE) // IOMAP_SLOT_SIZE == post.word - 0xC0000000, post
        else:
            assert size == DESCRIPTOR_SIZE, post
            assert offset % DESCRIPTOR_SIZE == 0, post
            assert not any(memory[offset:end]), f"onto a descriptor that nobody took: {post}"
        memory[offset:end] = data

    # -- what has to be true always

    def check(self) -> None:
        arrived = len(self.received) + self.machine.readable
        assert self.received == self.peer.sent[: len(self.received)], "other bytes"
        assert arrived <= len(self.peer.sent), "more bytes than were sent"
        filled = arrived // (self.ring.size // 2)
        assert self.advertised - filled <= 2, "more than two buffers are not full"
        ends = self.peer.ends
        while ends and ends[0] <= len(self.received):
            ends.popleft()
        mappings = self.peer.mappings_posted - self.mappings_handled
        assert len(ends) + mappings <= self.credit, "more messages than credits"

    def _post(self, post: Post, data: bytes) -> None:
        assert len(data) == post.length
        self.to_land.append(Flight(post, data))

    @property
    def wrs_out(self) -> tuple[int, int]:
        """Work requests of data and of control messages that have not completed."""
        flights = [*self.to_land, *self.to_complete]
        data = sum(flight.post.wrs for flight in flights if flight.post.word < 1 << 29)
        return data, sum(flight.post.wrs for flight in flights) - data


def join(a: Side, b: Side) -> None:
    """Exchange private data as connecting does, and open both."""
    a.peer, b.peer = b, a
    b.machine.meet(a.machine.hello())
    a.machine.meet(b.machine.hello() + bytes(156))  # as InfiniBand pads a reply
    a.machine.open()
    b.machine.open()


def pair(**options: Any) -> tuple[Side, Side]:
    """Two sides with the same options, joined."""
    a = Side(base=0x7F00_0000_1000, **options)
    b = Side(base=0x7F11_0000_2002, **options)
    join(a, b)
    return a, b


def run_wire(*sides: Side) -> bool:
    """Let everything that is under way arrive and complete; whether anything happened."""
    moved = False
    again = True
    while again:
        again = False
        for side in sides:
            while side.control_all() or side.land() or side.handle() or side.complete():
                again = moved = True
    return moved
