"""Mappings of the rsockets protocol: published before data, used by nobody but their peer."""

from __future__ import annotations

import errno
import struct
import sys

import pytest

from aiordma.errors import ProtocolError
from aiordma.rsocket import Descriptor, Hello, Mapping, Place

from . import forms

pytestmark = pytest.mark.usefixtures("form")

SLOT = struct.Struct("=QQII")
BIG_ENDIAN = sys.byteorder == "big"


class Side:
    """A machine with slots, met by a peer that is the test."""

    def __init__(
        self, *, slots: int = 2, theirs: int = 2, credit: int = 4, iwarp: bool = False,
        big_endian: bool = BIG_ENDIAN,
    ) -> None:  # fmt: skip
        self.table = bytearray(32 + 24 * slots)
        self.machine = forms.new(
            ring=Place(0x1000, 0x11, 64),
            table=Place(0x2000, 0x22, len(self.table)),
            memory=memoryview(self.table),
            credits=8,
            send_depth=10,
            iwarp=iwarp,
        )
        hello = Hello(credit, 0x10000, 0x77, 2, 0x20000, 0x88, 100, theirs, big_endian)
        self.machine.meet(hello.pack())
        self.machine.open()
        self.iomap = self.machine.iomap
        first = self.machine.next_control()  # its second half
        assert first is not None
        self.machine.on_sent(first)

    def show(self, slot: int, *values: int) -> None:
        """Write a slot of its table, as the peer does, and say so."""
        SLOT.pack_into(self.table, 32 + 24 * slot, *values)
        self.machine.on_word(0xC0000000 | slot)


def test_a_mapping_goes_before_data() -> None:
    side = Side()
    machine = side.machine
    assert machine.room == 100
    assert side.machine.publish(Mapping(7, 0xABCDE, 0x99, 4096)) == 0
    assert machine.room == 0
    post = machine.next_control()
    assert post is not None
    assert post[:4] == (0x10020, 0x77, 24, 0xC0000000)
    assert post.payload == SLOT.pack(7, 0xABCDE, 0x99, 4096)
    assert machine.room == 100
    assert machine.next_control() is None
    machine.on_sent(post)
    assert machine.idle


def test_it_takes_a_credit() -> None:
    side = Side(credit=2)
    machine = side.machine
    side.machine.publish(Mapping(0, 0xA000, 1, 10))
    post = machine.next_control()
    assert post is not None
    data = machine.write(5)
    assert data.addr == 0x20000  # no space was taken
    assert machine.room == 0
    side.machine.publish(Mapping(10, 0xB000, 2, 10))
    assert machine.next_control() is None
    machine.on_word(0x80000003)  # one message more
    post = machine.next_control()
    assert post is not None
    assert (post.addr, post.word) == (0x10038, 0xC0000001)
    assert machine.room == 0  # that one is used up


def test_it_needs_no_space() -> None:
    side = Side()
    machine = side.machine
    machine.write(100)
    assert machine.room == 0
    side.machine.publish(Mapping(0, 0xA000, 1, 10))
    assert machine.next_control() is not None
    side.table[16:32] = Descriptor(0x30000, 0x99, 50).pack(BIG_ENDIAN)
    machine.on_word(0x80000000 | 6)
    assert machine.write(50).addr == 0x30000


def test_two_work_requests_on_iwarp() -> None:
    side = Side(iwarp=True)
    side.machine.publish(Mapping(0, 0xA000, 1, 10))
    post = side.machine.next_control()
    assert post is not None
    assert post.wrs == 2
    side.machine.on_sent(post)
    assert side.machine.idle


def test_byte_order_of_the_peer() -> None:
    side = Side(big_endian=True)
    side.machine.publish(Mapping(1, 2, 3, 4))
    post = side.machine.next_control()
    assert post is not None
    assert post.payload == struct.pack(">QQII", 1, 2, 3, 4)


def test_slots_are_used_again() -> None:
    side = Side(theirs=2)
    machine = side.machine
    mappings = [Mapping(10 * n, 0xA000, n, 10) for n in range(3)]
    assert [machine.publish(mapping) for mapping in mappings[:2]] == [0, 1]
    with pytest.raises(OSError, match="2 mappings") as caught:
        machine.publish(mappings[2])
    assert caught.value.errno == errno.ENOBUFS
    machine.withdraw(0)  # before it was said
    assert machine.publish(mappings[2]) == 0
    posts = [post for post in iter(machine.next_control, None) if post.payload]
    assert [(post.word & 1, post.payload) for post in posts] == [
        (1, SLOT.pack(*mappings[1])),
        (0, SLOT.pack(*mappings[2])),
    ]


def test_a_peer_without_slots() -> None:
    with pytest.raises(OSError, match="0 mappings"):
        Side(theirs=0).machine.publish(Mapping(0, 1, 2, 3))


@pytest.mark.parametrize(("offset", "length"), [(-1, 5), (0, 0), (0, 1 << 32), ((1 << 63) - 4, 5)])
def test_offsets_that_do_not_fit(offset: int, length: int) -> None:
    side = Side()
    with pytest.raises(ValueError, match="63 bits"):
        side.machine.publish(Mapping(offset, 0, 0, length))
    assert not side.iomap.pending


def test_nothing_is_published_after_the_end() -> None:
    side = Side(credit=1)
    side.machine.write(5)
    side.machine.publish(Mapping(0, 0xA000, 1, 10))
    side.machine.shutdown()
    post = side.machine.next_control()
    assert post is not None
    assert post.word == 0xE0000002
    side.machine.on_word(0x80000002)
    assert side.machine.next_control() is None


def test_places_in_the_peers_mappings() -> None:
    side = Side()
    iomap = side.iomap
    with pytest.raises(ValueError, match="no mapping"):
        iomap.place(0, 1)
    side.show(0, 100, 0xA000, 1, 50)
    side.show(1, 150, 0xB000, 2, 50)
    assert iomap.place(100, 50) == (0xA000, 1)
    assert iomap.place(149, 1) == (0xA031, 1)
    assert iomap.place(150, 0) == (0xB000, 2)
    for offset, length in [(99, 1), (149, 2), (199, 2), (200, 1)]:  # none goes across
        with pytest.raises(ValueError, match="no mapping"):
            iomap.place(offset, length)
    assert [mapping.offset for mapping in iomap.mappings()] == [100, 150]


@pytest.mark.parametrize(
    "values",
    [(0, (1 << 64) - 4, 1, 5), ((1 << 63) - 4, 0, 1, 5), ((1 << 64) - 1, 0, 1, 1)],
)
def test_mappings_that_make_no_sense(values: tuple[int, ...]) -> None:
    side = Side()
    side.show(0, *values)
    with pytest.raises(ProtocolError, match="mapping"):
        side.iomap.place(0, 1)


def test_a_slot_that_is_not_there() -> None:
    side = Side(slots=2)
    with pytest.raises(ProtocolError, match="slot 2"):
        side.machine.on_word(0xC0000002)
