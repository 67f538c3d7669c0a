"""The bytes of the rsockets protocol on the network: private data, words and descriptors.

Theory of operation
    Each side sends 40 bytes of private data: the number of messages that it takes, the address of
    its table of descriptors, and the part of its receive ring that may be written first.  After
    that every message carries one 32-bit word: three bits of kind, 29 bits of value.  Some messages
    write a descriptor of 16 bytes (address, key, length) into the peer's table.

    Private data are always big-endian.  A descriptor has the byte order of the host that owns the
    table and reads it; private data report that order.

Everything that arrives was chosen by the peer.  Parsing returns a value that makes sense or raises
`ProtocolError`; no number is used before it was compared with a bound.
"""

from __future__ import annotations

import errno
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from aiordma._core import WORD_SGL
from aiordma.errors import ProtocolError

__all__ = [
    "DESCRIPTOR_SIZE",
    "HELLO_SIZE",
    "IOMAP_SLOT_SIZE",
    "MAX_VALUE",
    "TABLE_LENGTH",
    "VERSION",
    "Control",
    "Descriptor",
    "Hello",
    "Kind",
    "decode_scaled",
    "encode_scaled",
    "pack_word",
    "protocol_error",
    "unpack_word",
]

VERSION = 1

# version, flags, credits, three reserved bytes, scaled count of iomap slots,
# the table's address, key and count of entries, the first buffer's address, key and length.
_HELLO = struct.Struct("!BBH3xBQIIQII")
HELLO_SIZE = _HELLO.size

_BIG_ENDIAN_HOST = 0x01
_HAS_IOMAP = 0x02

_NATIVE = {False: struct.Struct("<QII"), True: struct.Struct(">QII")}
DESCRIPTOR_SIZE = 16
IOMAP_SLOT_SIZE = 24

# Entries of this side's table.  The peer's table has two as well in every known implementation;
# entries are numbered from 0 and the first update goes to entry 1, so fewer than two make no sense.
TABLE_LENGTH = 2
_MAX_TABLE_LENGTH = 1024

_KIND_SHIFT = 29
MAX_VALUE = (1 << _KIND_SHIFT) - 1
_MAX_WORD = (1 << 32) - 1
_ADDRESS_SPACE = 1 << 64

# The count of iomap slots travels in eight bits: up to 128 as it is, above in units of 256.
_EXACT = 128
_MAX_SCALED = 0x7F << 8


class Kind(IntEnum):
    """Kind of a word; other numbers are reserved, and a protocol error on the wire."""

    DATA = 0
    SGL = WORD_SGL
    IOMAP = 6
    CTRL = 7


class Control(IntEnum):
    """Value of a CTRL word."""

    DISCONNECT = 0
    KEEPALIVE = 1
    SHUTDOWN = 2


def protocol_error(text: str) -> ProtocolError:
    """Return the exception for a peer that broke the protocol by `text`."""
    return ProtocolError(errno.EPROTO, f"the peer broke the rsockets protocol: {text}")


def pack_word(kind: int, value: int) -> int:
    """Return a word: 3 bits of kind above 29 bits of value.

    Raises:
        ValueError: A number does not fit its bits.
    """
    if not 0 <= kind <= 7 or not 0 <= value <= MAX_VALUE:
        msg = f"kind {kind} needs 3 bits and value {value} 29"
        raise ValueError(msg)
    return kind << _KIND_SHIFT | value


def unpack_word(word: int) -> tuple[int, int]:
    """Return kind and value of a word; the kind may be a number that is not in `Kind`.

    Raises:
        ValueError: The word is not a number of 32 bits.
    """
    if not 0 <= word <= _MAX_WORD:
        msg = f"{word} is not a word of 32 bits"
        raise ValueError(msg)
    return word >> _KIND_SHIFT, word & MAX_VALUE


def encode_scaled(count: int) -> int:
    """Return a count of iomap slots in 8 bits, rounded down if it cannot be exact.

    Raises:
        ValueError: The count is negative, or above 32767, which rounds down to the largest, 32512.
    """
    if not 0 <= count < _MAX_SCALED + 256:
        msg = f"a count of iomap slots is 0 to {_MAX_SCALED + 255}, not {count}"
        raise ValueError(msg)
    return count if count <= _EXACT else 0x80 | count >> 8


def decode_scaled(byte: int) -> int:
    """Return the count that 8 bits stand for."""
    return byte if byte <= _EXACT else (byte & 0x7F) << 8


class Descriptor(NamedTuple):
    """A piece of memory that the peer of its owner may write.

    Attributes:
        addr: Address in the owner's address space.
        key: Remote key of the region that holds it.
        length: Bytes; 0 in a table means that there is no buffer.
    """

    addr: int
    key: int
    length: int

    def pack(self, big_endian: bool) -> bytes:
        """Return 16 bytes in the byte order of the host that will read them."""
        return _NATIVE[big_endian].pack(*self)

    @classmethod
    def unpack(cls, data: bytes, big_endian: bool) -> Descriptor:
        """Return the descriptor in `data`, 16 copied bytes: the peer may write the table meanwhile.

        Raises:
            ProtocolError: It reaches beyond the end of the address space.
        """
        self = cls(*_NATIVE[big_endian].unpack(data))
        if self.addr + self.length > _ADDRESS_SPACE:
            raise protocol_error(f"a buffer of {self.length} bytes at {self.addr:#x}")
        return self


@dataclass(frozen=True, slots=True)
class Hello:
    """Private data of a request and of its reply.

    Attributes:
        credits: Messages that the reader may have outstanding: 1 to 65535.
        table_addr: Address of the sender's table of descriptors.
        table_key: Remote key of the table, and of the iomap slots behind it.
        table_length: Entries in the table, not bytes.
        buffer_addr: Address of the first buffer that the reader may fill.
        buffer_key: Its remote key.
        buffer_length: Its length, bytes: half of the sender's ring.
        iomap_slots: Mappings that the reader may publish to the sender.
        big_endian: Byte order of the sender's host, and so of its table.
    """

    credits: int
    table_addr: int
    table_key: int
    table_length: int
    buffer_addr: int
    buffer_key: int
    buffer_length: int
    iomap_slots: int = 0
    big_endian: bool = False

    def pack(self) -> bytes:
        """Return the 40 bytes.

        Raises:
            ValueError: A value does not fit its field.
        """
        try:
            return _HELLO.pack(
                VERSION, _HAS_IOMAP | (_BIG_ENDIAN_HOST if self.big_endian else 0), self.credits,
                encode_scaled(self.iomap_slots),
                self.table_addr, self.table_key, self.table_length,
                self.buffer_addr, self.buffer_key, self.buffer_length,
            )  # fmt: skip
        except struct.error as exc:
            msg = f"{self} does not fit the private data: {exc}"
            raise ValueError(msg) from None

    @classmethod
    def parse(cls, data: bytes) -> Hello:
        """Return the hello in private data, which padding may follow.

        Unknown flags and reserved bytes are ignored: rsockets sends zeros there.

        Raises:
            ProtocolError: The data are too short, of another version, or make no sense.
        """
        if len(data) < HELLO_SIZE:
            raise protocol_error(f"private data of {len(data)} bytes instead of {HELLO_SIZE}")
        version, flags, credit, slots, *places = _HELLO.unpack_from(data)
        addr, key, length, buffer_addr, buffer_key, buffer_length = places
        if version != VERSION:
            raise protocol_error(f"version {version}, this side speaks {VERSION}")
        # In rsockets from before October 2012 that byte has another meaning.
        slots = decode_scaled(slots) if flags & _HAS_IOMAP else 0
        self = cls(
            credit, addr, key, length, buffer_addr, buffer_key, buffer_length, slots,
            bool(flags & _BIG_ENDIAN_HOST),
        )  # fmt: skip
        table_size = DESCRIPTOR_SIZE * self.table_length + IOMAP_SLOT_SIZE * slots
        if not credit:
            raise protocol_error("it takes no messages: 0 credits")
        if not TABLE_LENGTH <= self.table_length <= _MAX_TABLE_LENGTH:
            raise protocol_error(f"a table of {self.table_length} descriptors")
        if self.table_addr + table_size > _ADDRESS_SPACE:
            raise protocol_error(f"a table of {table_size} bytes at {self.table_addr:#x}")
        if not self.buffer_length or self.buffer_addr + self.buffer_length > _ADDRESS_SPACE:
            raise protocol_error(
                f"a first buffer of {self.buffer_length} bytes at {self.buffer_addr:#x}"
            )
        return self
