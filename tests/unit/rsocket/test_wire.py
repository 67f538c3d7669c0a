"""The bytes of the rsockets protocol, against vectors written out by hand."""

from __future__ import annotations

import dataclasses
import errno

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma.errors import ProtocolError
from aiordma.rsocket import (
    HELLO_SIZE,
    VERSION,
    Control,
    Descriptor,
    Hello,
    Kind,
    pack_word,
    unpack_word,
)
from aiordma.rsocket.wire import decode_scaled, encode_scaled

HELLO = Hello(
    credits=384,
    table_addr=0x0102_0304_0506_0708,
    table_key=0x1112_1314,
    table_length=2,
    buffer_addr=0x2122_2324_2526_2728,
    buffer_key=0x3132_3334,
    buffer_length=0x10000,
)
BYTES = bytes.fromhex(
    "01 02 0180 000000 000102030405060708 11121314 000000022122232425262728 31323334 00010000"
)


def patched(offset: int, data: bytes) -> bytes:
    return BYTES[:offset] + data + BYTES[offset + len(data) :]


def test_private_data_is_the_40_bytes_of_rsockets() -> None:
    assert HELLO_SIZE == 40
    assert HELLO.pack() == BYTES
    assert Hello.parse(BYTES) == HELLO


def test_private_data_of_a_big_endian_host_with_iomap_slots() -> None:
    hello = dataclasses.replace(HELLO, iomap_slots=512, big_endian=True)
    data = hello.pack()
    assert (data[1], data[7]) == (3, 0x82)
    assert data[:1] + data[2:7] + data[8:] == BYTES[:1] + BYTES[2:7] + BYTES[8:]
    assert Hello.parse(data) == hello


@pytest.mark.parametrize("padding", [0, 1, 16, 156])
def test_padding_of_the_network_is_ignored(padding: int) -> None:
    assert Hello.parse(BYTES + bytes(padding)) == HELLO
    assert Hello.parse(BYTES + b"\xff" * padding) == HELLO


def test_a_sender_of_before_2012_has_no_iomap_slots() -> None:
    """Its flag is missing, and where the count is now it had other things."""
    assert Hello.parse(patched(1, b"\x00\x01\x80\xff\xff\xff\xff")) == HELLO


def test_unknown_flags_and_reserved_bytes_are_ignored() -> None:
    assert Hello.parse(patched(1, b"\xfe")) == HELLO
    assert Hello.parse(patched(4, b"\xff\xff\xff")) == HELLO


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "0 bytes instead of 40"),
        (BYTES[:39], "39 bytes"),
        (patched(0, b"\0"), "version 0"),
        (patched(0, b"\2"), "version 2"),
        (patched(0, b"\xff"), "version 255"),
        (patched(2, b"\0\0"), "0 credits"),
        (patched(20, b"\0\0\0\0"), "a table of 0 descriptors"),
        (patched(20, b"\0\0\0\1"), "a table of 1 descriptors"),
        (patched(20, b"\0\0\x04\x01"), "a table of 1025 descriptors"),
        (patched(20, b"\xff\xff\xff\xff"), "a table of 4294967295 descriptors"),
        (patched(8, b"\xff" * 8), "a table of 32 bytes at 0xffffffffffffffff"),
        (patched(8, b"\xff" * 7 + b"\xe1"), "a table of 32 bytes"),
        # The table fits, the mappings behind it do not.
        (patched(7, b"\x01" + b"\xff" * 7 + b"\xe0"), "a table of 56 bytes"),
        (patched(36, b"\0\0\0\0"), "a first buffer of 0 bytes"),
        (patched(24, b"\xff" * 8), "a first buffer of 65536 bytes"),
        (patched(24, b"\xff" * 6 + b"\x00\x01"), "a first buffer of 65536 bytes"),
    ],
)
def test_private_data_that_makes_no_sense(data: bytes, words: str) -> None:
    with pytest.raises(ProtocolError, match=words) as caught:
        Hello.parse(data)
    assert caught.value.errno == errno.EPROTO


@pytest.mark.parametrize(
    "data",
    [
        patched(2, b"\0\1"),
        patched(2, b"\xff\xff"),
        patched(8, b"\xff" * 7 + b"\xe0"),  # a table that ends where addresses end
        patched(20, b"\0\0\x04\x00"),
        patched(24, b"\xff" * 6 + b"\0\0"),
        patched(36, b"\0\0\0\1"),
        patched(16, bytes(4)),  # keys are the adapter's business
        patched(32, bytes(4)),
    ],
)
def test_private_data_at_the_edge_of_sense(data: bytes) -> None:
    hello = Hello.parse(data)
    assert hello.pack() == data


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("credits", 0x10000),
        ("credits", -1),
        ("table_addr", 1 << 64),
        ("table_key", 1 << 32),
        ("buffer_length", 1 << 32),
        ("iomap_slots", 1 << 15),
        ("iomap_slots", -1),
    ],
)
def test_our_own_private_data_that_does_not_fit(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=r"fit|iomap slots"):
        dataclasses.replace(HELLO, **{name: value}).pack()  # type: ignore[arg-type]


@given(st.binary(min_size=0, max_size=196))
def test_parsing_is_total(data: bytes) -> None:
    try:
        hello = Hello.parse(data)
    except ProtocolError:
        return
    assert hello.credits
    assert hello.buffer_length


@pytest.mark.parametrize(
    ("kind", "value", "word"),
    [
        (Kind.CTRL, Control.DISCONNECT, 0xE0000000),
        (Kind.CTRL, Control.KEEPALIVE, 0xE0000001),
        (Kind.CTRL, Control.SHUTDOWN, 0xE0000002),
        (Kind.SGL, 384, 0x80000180),
        (Kind.SGL, 131069, 0x8001FFFD),
        (Kind.IOMAP, 3, 0xC0000003),
        (Kind.DATA, 2048, 0x00000800),
        (Kind.DATA, (1 << 29) - 1, 0x1FFFFFFF),
    ],
)
def test_words(kind: Kind, value: int, word: int) -> None:
    assert pack_word(kind, value) == word
    assert unpack_word(word) == (kind, value)


@given(st.integers(0, (1 << 32) - 1))
def test_each_word_is_its_kind_and_value(word: int) -> None:
    assert pack_word(*unpack_word(word)) == word


@pytest.mark.parametrize(("kind", "value"), [(8, 0), (-1, 0), (0, 1 << 29), (0, -1)])
def test_a_word_of_too_many_bits(kind: int, value: int) -> None:
    with pytest.raises(ValueError, match="29"):
        pack_word(kind, value)


@pytest.mark.parametrize("word", [-1, 1 << 32])
def test_a_number_that_is_no_word(word: int) -> None:
    with pytest.raises(ValueError, match="32 bits"):
        unpack_word(word)


@pytest.mark.parametrize(
    ("big_endian", "data"),
    [
        (False, "0807060504030201 14131211 00800000"),
        (True, "0102030405060708 11121314 00008000"),
    ],
)
def test_descriptor_in_both_byte_orders(big_endian: bool, data: str) -> None:
    descriptor = Descriptor(0x0102_0304_0506_0708, 0x1112_1314, 0x8000)
    assert descriptor.pack(big_endian) == bytes.fromhex(data)
    assert Descriptor.unpack(bytes.fromhex(data), big_endian) == descriptor


def test_a_descriptor_beyond_the_end_of_addresses() -> None:
    edge = Descriptor((1 << 64) - 0x8000, 1, 0x8000)
    assert Descriptor.unpack(edge.pack(False), False) == edge
    with pytest.raises(ProtocolError, match="a buffer of 32768 bytes at 0xffffffffffff8001"):
        Descriptor.unpack(edge._replace(addr=edge.addr + 1).pack(False), False)


@pytest.mark.parametrize(
    ("count", "byte", "decoded"),
    [
        (0, 0, 0), (1, 1, 1), (127, 127, 127), (128, 128, 128), (129, 0x80, 128),
        (255, 0x80, 128), (256, 0x81, 256), (511, 0x81, 256), (32512, 0xFF, 32512),
        (32767, 0xFF, 32512),
    ],
)  # fmt: skip
def test_scaled_counts(count: int, byte: int, decoded: int) -> None:
    assert encode_scaled(count) == byte
    assert decode_scaled(byte) == decoded


def test_each_scaled_count_stands_for_itself() -> None:
    for byte in range(256):
        assert encode_scaled(decode_scaled(byte)) == byte


@pytest.mark.parametrize("count", [-1, 32768])
def test_counts_that_no_byte_stands_for(count: int) -> None:
    with pytest.raises(ValueError, match="iomap"):
        encode_scaled(count)


def test_version() -> None:
    assert VERSION == 1
