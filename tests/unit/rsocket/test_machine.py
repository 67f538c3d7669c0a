"""One machine of the rsockets protocol: how it meets its peer."""

from __future__ import annotations

import pytest

from aiordma.errors import ProtocolError
from aiordma.rsocket import Descriptor, Hello, Place

from . import forms
from .joined import Side
from .lone import KEEPALIVE, PEER, SHUTDOWN, Lone

pytestmark = pytest.mark.usefixtures("form")


def test_private_data_announces_half_of_the_ring() -> None:
    lone = Lone(slots=2)
    assert Hello.parse(lone.machine.hello()) == Hello(
        credits=8,
        table_addr=0x2000,
        table_key=0x22,
        table_length=2,
        buffer_addr=lone.ring.addr,
        buffer_key=0x11,
        buffer_length=32,
        iomap_slots=2,
    )


def test_nothing_is_sent_before_the_connection_is_open() -> None:
    lone = Lone(open_=False)
    machine = lone.machine
    assert machine.room == 0
    assert machine.next_control() is None
    machine.shutdown()
    assert machine.next_control() is None
    machine.open()
    assert [post.word for post in lone.control()] == [0x80000008, SHUTDOWN]


def test_words_are_taken_before_the_connection_is_open() -> None:
    """The other side's first message can be seen before the event that opens this one."""
    lone = Lone(open_=False)
    lone.machine.on_word(5)
    assert lone.machine.readable == 5


def test_words_that_come_before_the_private_data_wait_for_it() -> None:
    """On the active side completions can be looked at before the reply."""
    table = bytearray(32)
    machine = forms.new(
        ring=Place(0x1000, 0x11, 64), table=Place(0x2000, 0x22, 32), memory=memoryview(table),
        credits=8, send_depth=10,
    )  # fmt: skip
    table[16:] = Descriptor(0x30000, 0x99, 50).pack(False)
    machine.on_word(0x80000004)
    machine.on_word(5)
    assert machine.readable == 0
    machine.meet(PEER.pack())
    machine.open()
    assert machine.readable == 5
    assert not any(table)
    assert [machine.write(1000)[:3] for _ in range(2)] == [
        (0x20000, 0x88, 100),
        (0x30000, 0x99, 50),
    ]


def test_a_bad_word_that_came_early_fails_the_meeting() -> None:
    machine = forms.new(
        ring=Place(0x1000, 0x11, 64), table=Place(0x2000, 0x22, 32),
        memory=memoryview(bytearray(32)), credits=8, send_depth=10,
    )  # fmt: skip
    machine.on_word(33)
    with pytest.raises(ProtocolError, match="33 bytes"):
        machine.meet(PEER.pack())


def test_words_that_wait_are_bounded() -> None:
    machine = forms.new(
        ring=Place(0x1000, 0x11, 64), table=Place(0x2000, 0x22, 32),
        memory=memoryview(bytearray(32)), credits=8, send_depth=10,
    )  # fmt: skip
    for _ in range(72):
        machine.on_word(KEEPALIVE)
    with pytest.raises(ProtocolError, match="before its private data"):
        machine.on_word(KEEPALIVE)


def test_the_meeting_takes_place_once() -> None:
    lone = Lone()
    with pytest.raises(RuntimeError, match="already"):
        lone.machine.meet(PEER.pack())
    stranger = Side().machine
    with pytest.raises(RuntimeError, match="before meet"):
        stranger.open()


def test_a_bad_meeting_changes_nothing() -> None:
    machine = Side().machine
    with pytest.raises(ProtocolError, match="version 2"):
        machine.meet(b"\2" + PEER.pack()[1:])
    machine.meet(PEER.pack())
    machine.open()
    assert machine.room == 100


def test_mixed_byte_orders_work_but_not_on_iwarp() -> None:
    data = PEER.pack()
    foreign = bytes((data[0], data[1] ^ 1)) + data[2:]
    lone = Lone(Hello.parse(foreign))
    (post,) = lone.control()
    assert Descriptor.unpack(post.payload, True) == Descriptor(lone.ring.addr + 32, 0x11, 32)
    with pytest.raises(ProtocolError, match="byte order"):
        Lone(Hello.parse(foreign), iwarp=True)
