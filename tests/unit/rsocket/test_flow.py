"""Words of data and of credit that one machine takes and gives, and its work requests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aiordma.errors import ProtocolError
from aiordma.rsocket import Descriptor

from .lone import KEEPALIVE, PEER, SHUTDOWN, Lone
from .whole import Post

pytestmark = pytest.mark.usefixtures("form")

# -- credits and descriptors to the peer


def test_the_first_message_advertises_the_second_half() -> None:
    lone = Lone()
    (post,) = lone.control()
    half = Descriptor(lone.ring.addr + 32, 0x11, 32).pack(False)
    assert post == Post(0x10010, 0x77, 16, 0x80000008, half, 1)


def test_halves_are_advertised_in_turn_when_they_are_free() -> None:
    lone = Lone(credit=100)
    lone.settle()
    seen = []
    for _ in range(8):
        lone.machine.on_word(16)
        lone.machine.consume(15)
        before = lone.control()
        lone.machine.consume(1)
        seen += [(post.addr, Descriptor.unpack(post.payload, False)[0]) for post in lone.control()]
        assert not before
    # Entry 0 describes the first half, entry 1 the second; 16 bytes are half of a half.
    first = lone.ring.addr
    assert seen == [(0x10000, first), (0x10010, first + 32)] * 2
    # Four are out now, and none has completed.
    assert not lone.machine.idle


def test_a_longer_table_of_the_peer_is_filled_in_turn() -> None:
    lone = Lone(replace(PEER, table_length=3))
    entries = []
    for _ in range(5):
        for post in lone.control():
            entries.append((post.addr - 0x10000) // 16)
            lone.machine.on_sent(post)
        lone.machine.on_word(32)
        lone.machine.consume(32)
    assert entries == [1, 2, 0, 1, 2]


def test_both_halves_free_are_two_messages() -> None:
    lone = Lone()
    lone.settle()
    lone.machine.on_word(32)
    lone.machine.on_word(32)
    lone.machine.consume(64)
    posts = lone.control()
    assert [post.word for post in posts] == [0x8000000A, 0x8000000A]
    assert [post.addr for post in posts] == [0x10000, 0x10010]


def test_credits_are_given_back_when_half_of_them_are_used() -> None:
    lone = Lone()
    assert lone.settle() == [0x80000008]
    for number in range(1, 9):
        lone.machine.on_word(1)
        lone.machine.consume(1)
        words = lone.settle()
        assert words == ([0x80000008 + number] if number % 4 == 0 else []), number


def test_a_message_is_repaid_when_its_last_byte_is_consumed() -> None:
    lone = Lone()
    lone.settle()
    for _ in range(4):
        lone.machine.on_word(2)
    lone.machine.consume(7)
    assert lone.control() == []
    lone.machine.consume(1)
    (post,) = lone.control()
    assert post == Post(0, 0, 0, 0x8000000C, b"", 1)


@pytest.mark.parametrize("credit", [1, 2, 3])
def test_few_credits_are_given_back_once_each(credit: int) -> None:
    lone = Lone(credit=credit)
    assert lone.settle() == [0x80000000 + credit]
    lone.machine.on_word(1)
    lone.machine.consume(1)
    assert lone.settle() == [0x80000001 + credit]
    assert lone.settle() == []


def test_an_iomap_message_is_repaid_at_once() -> None:
    """rsockets never repays it, so that each mapping costs its sender a credit for ever."""
    lone = Lone(slots=2)
    lone.settle()
    for _ in range(3):
        lone.machine.on_word(0xC0000001)
    assert lone.settle() == []
    lone.machine.on_word(0xC0000000)
    assert lone.settle() == [0x8000000C]
    assert lone.machine.readable == 0


def test_an_iomap_message_counts_as_one_of_the_messages() -> None:
    lone = Lone(slots=1)
    for _ in range(7):
        lone.machine.on_word(1)
    lone.machine.on_word(0xC0000000)
    with pytest.raises(ProtocolError, match="without a credit"):
        lone.machine.on_word(0xC0000000)
    with pytest.raises(ProtocolError, match="without a credit"):
        lone.machine.on_word(1)


@pytest.mark.parametrize(("slots", "index"), [(0, 0), (2, 2), (2, 0xFFFF)])
def test_an_iomap_message_for_a_slot_that_is_not_there(slots: int, index: int) -> None:
    lone = Lone(slots=slots)
    with pytest.raises(ProtocolError, match=f"slot {index}"):
        lone.machine.on_word(0xC0000000 | index)


def test_a_peer_with_iomap_slots_is_left_alone() -> None:
    """Its slots lie behind its table; only its two descriptors are ever written."""
    lone = Lone(replace(PEER, iomap_slots=128))
    places = set()
    for _ in range(6):
        for post in lone.control():
            lone.machine.on_sent(post)
            places.add((post.addr, post.length))
        lone.machine.on_word(32)
        lone.machine.consume(32)
    assert places == {(0x10000, 16), (0x10010, 16)}


# -- data to the peer


def test_data_fills_a_buffer_before_the_next_one() -> None:
    lone = Lone()
    machine = lone.machine
    lone.advertise(1, Descriptor(0x30000, 0x99, 30))
    machine.on_word(0x80000004)
    assert not any(lone.table), "the entry is taken and cleared"
    assert machine.room == 100
    assert machine.write(60) == Post(0x20000, 0x88, 60, 60, b"", 1)
    assert machine.room == 40
    assert machine.write(1000) == Post(0x20000 + 60, 0x88, 40, 40, b"", 1)
    assert machine.write(29) == Post(0x30000, 0x99, 29, 29, b"", 1)
    assert machine.write(29) == Post(0x30000 + 29, 0x99, 1, 1, b"", 1)
    assert machine.room == 0
    with pytest.raises(ValueError, match="room for 0"):
        machine.write(1)


@pytest.mark.parametrize("wanted", [0, -1])
def test_no_bytes_are_not_a_message(wanted: int) -> None:
    lone = Lone()
    with pytest.raises(ValueError, match="to write"):
        lone.machine.write(wanted)
    assert lone.machine.room == 100


def test_entries_are_expected_in_turn() -> None:
    """What stands in the other entry is not looked at before its turn."""
    lone = Lone()
    machine = lone.machine
    lone.advertise(0, Descriptor(0x40000, 0xAA, 7))
    machine.on_word(0x80000004)
    machine.write(100)
    assert machine.room == 0
    lone.advertise(1, Descriptor(0x30000, 0x99, 3))
    machine.on_word(0x80000005)
    machine.on_word(0x80000005)
    assert [machine.write(100)[:3] for _ in range(2)] == [(0x30000, 0x99, 3), (0x40000, 0xAA, 7)]


def test_a_message_has_at_most_29_bits_of_length() -> None:
    lone = Lone(replace(PEER, buffer_length=(1 << 29) + 10))
    machine = lone.machine
    assert machine.room == (1 << 29) - 1
    assert machine.write(1 << 31).length == (1 << 29) - 1
    assert machine.room == 11
    assert machine.write(1 << 31) == Post(0x20000 + (1 << 29) - 1, 0x88, 11, 11, b"", 1)


def test_credits_bound_the_messages() -> None:
    lone = Lone()
    machine = lone.machine
    for _ in range(4):
        machine.on_sent(machine.write(1))
    assert machine.room == 0
    machine.on_word(0x80000000 + 4 + 2)
    assert machine.room == 96
    machine.write(1)
    machine.write(1)
    assert machine.room == 0


@pytest.mark.parametrize("limit", [3, 5 + 4, 0xFFFF, 0x8000])
def test_limits_that_make_no_sense(limit: int) -> None:
    """One message is sent and four are allowed: 4 is said again, 5 is all, more is impossible."""
    lone = Lone()
    lone.machine.write(1)
    for good in (4, 4, 5, 0x10005, 5):
        lone.machine.on_word(0x80000000 | good)
    with pytest.raises(ProtocolError, match="message limit"):
        lone.machine.on_word(0x80000000 | limit)
    with pytest.raises(ProtocolError, match="message limit"):
        lone.machine.on_word(0x80000004)


def test_limits_wrap_around() -> None:
    lone = Lone(replace(PEER, credits=0xFFFE, buffer_length=1 << 20))
    machine = lone.machine
    for _ in range(0xFFFE):
        machine.on_sent(machine.write(1))
    assert machine.room == 0
    machine.on_word(0x80000000 + 0xFFFE + 3)
    for _ in range(3):
        assert machine.room
        machine.on_sent(machine.write(1))
    assert machine.room == 0
    with pytest.raises(ProtocolError, match="message limit 0"):
        machine.on_word(0x80000000)  # back by one
    machine.on_word(0x80000002)
    assert machine.room


def test_a_third_buffer_is_one_too_many() -> None:
    lone = Lone()
    lone.advertise(1, Descriptor(0x30000, 0x99, 30))
    lone.machine.on_word(0x80000004)
    lone.advertise(0, Descriptor(0x40000, 0x99, 30))
    with pytest.raises(ProtocolError, match="third buffer"):
        lone.machine.on_word(0x80000004)


def test_a_descriptor_beyond_the_end_of_addresses() -> None:
    lone = Lone()
    lone.advertise(1, Descriptor((1 << 64) - 1, 0x99, 2))
    with pytest.raises(ProtocolError, match="a buffer of 2 bytes"):
        lone.machine.on_word(0x80000004)


def test_a_descriptor_without_a_length_is_none() -> None:
    lone = Lone()
    lone.advertise(1, Descriptor(0x30000, 0x99, 0))
    lone.machine.on_word(0x80000004)
    lone.machine.write(100)
    assert lone.machine.room == 0
    lone.advertise(1, Descriptor(0x30000, 0x99, 1))
    lone.machine.on_word(0x80000004)
    assert lone.machine.room == 1


# -- data from the peer


def test_reading_wraps_at_the_end_of_the_ring() -> None:
    lone = Lone()
    machine = lone.machine
    lone.settle()
    machine.on_word(32)
    machine.consume(32)
    lone.settle()
    lone.ring_memory[:9], lone.ring_memory[32:] = b"continues", bytes(range(32))
    machine.on_word(20)
    machine.on_word(12)
    machine.on_word(9)
    assert machine.readable == 41
    assert machine.read(30) == bytes(range(30))
    assert machine.read(7) == bytes((30, 31)) + b"conti"
    assert machine.read(4) == b"nues"
    assert machine.readable == 0


@pytest.mark.parametrize("size", [-1, 6])
def test_consuming_what_is_not_there(size: int) -> None:
    lone = Lone()
    lone.machine.on_word(5)
    with pytest.raises(ValueError, match="5 are there"):
        lone.machine.consume(size)
    assert lone.machine.readable == 5


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([0], "0 bytes of data"),
        ([33], "33 bytes of data for 32"),
        ([0x1FFFFFFF], "536870911 bytes"),
        ([30, 3], "3 bytes of data for 2"),  # across the two halves
        ([32, 32, 1], "1 bytes of data for 0"),
        ([1] * 9, "without a credit: 8 messages wait"),
        ([0x20000001], "kind 1"),
        ([0x40000001], "kind 2"),
        ([0x60000001], "kind 3"),
        ([0xA0000001], "kind 5"),
        ([SHUTDOWN, 1], "after its end"),
    ],
)
def test_words_that_no_peer_may_send(words: list[int], text: str) -> None:
    lone = Lone()
    lone.settle()
    for word in words[:-1]:
        lone.machine.on_word(word)
    before = lone.machine.readable, lone.machine.room
    with pytest.raises(ProtocolError, match=text):
        lone.machine.on_word(words[-1])
    assert (lone.machine.readable, lone.machine.room) == before


def test_the_second_half_may_be_used_once_it_is_advertised() -> None:
    lone = Lone()
    lone.machine.on_word(32)
    with pytest.raises(ProtocolError, match="for 0 bytes"):
        lone.machine.on_word(1)
    lone.settle()
    lone.machine.on_word(32)


def test_a_mapping_after_the_end() -> None:
    lone = Lone(slots=1)
    lone.machine.on_word(SHUTDOWN)
    with pytest.raises(ProtocolError, match="after its end"):
        lone.machine.on_word(0xC0000000)


@pytest.mark.parametrize("word", [KEEPALIVE, 0xE0000003, 0xFFFFFFFF])
def test_control_words_without_a_meaning(word: int) -> None:
    lone = Lone()
    lone.settle()
    lone.machine.on_word(word)
    assert not lone.machine.eof
    assert not lone.machine.disconnected
    assert lone.machine.writable
    assert lone.settle() == []


# -- work requests


def test_control_messages_take_at_most_four_work_requests() -> None:
    lone = Lone(credit=2)
    machine = lone.machine
    posts = lone.control()
    for _ in range(4):
        machine.on_word(1)
        machine.consume(1)
        posts += lone.control()
    assert [post.word for post in posts] == [0x80000002 + number for number in range(4)]
    machine.shutdown()
    assert lone.control() == []
    machine.on_sent(posts[0])
    # What waited is told in one message, and then the end.
    assert [post.word for post in lone.control()] == [0x80000006]
    machine.on_sent(posts[1])
    assert [post.word for post in lone.control()] == [SHUTDOWN]


def test_data_leaves_the_four_alone() -> None:
    lone = Lone(replace(PEER, credits=100))
    machine = lone.machine
    posts = [machine.write(1) for _ in range(6)]
    assert machine.room == 0
    (control,) = lone.control()
    assert control.word == 0x80000008
    machine.on_sent(posts[0])
    assert machine.room == 94
    assert not machine.idle
    posts += [control, machine.write(1)]
    assert machine.room == 0
    for post in posts[1:]:
        machine.on_sent(post)
    assert machine.idle


def test_iwarp_takes_two_work_requests_for_a_write_and_its_word() -> None:
    lone = Lone(replace(PEER, credits=100), iwarp=True)
    machine = lone.machine
    data = [machine.write(1) for _ in range(3)]
    assert [post.wrs for post in data] == [2, 2, 2]
    assert machine.room == 0
    (first,) = lone.control()
    assert (first.length, first.wrs) == (16, 2)
    machine.on_word(32)
    machine.consume(32)
    (second,) = lone.control()
    assert (second.length, second.wrs) == (16, 2)
    machine.shutdown()
    for post in data:
        machine.on_sent(post)
    assert lone.control() == []
    machine.on_sent(first)
    (end,) = lone.control()
    assert (end.word, end.wrs) == (SHUTDOWN, 1)
    # One is free.  A credit alone would fit, but rsockets waits for two, whatever it is.
    for _ in range(4):
        machine.on_word(1)
        machine.consume(1)
    assert lone.control() == []
    machine.on_sent(second)
    assert [post.wrs for post in lone.control()] == [1]


def test_iwarp_sends_the_end_when_one_work_request_is_free() -> None:
    lone = Lone(iwarp=True, credit=2)
    machine = lone.machine
    posts = lone.control()
    machine.on_word(1)
    machine.consume(1)
    posts += lone.control()
    assert [post.wrs for post in posts] == [2, 1]
    machine.on_word(1)
    machine.consume(1)
    assert lone.control() == []
    machine.shutdown()
    assert [post.word for post in lone.control()] == [SHUTDOWN]
