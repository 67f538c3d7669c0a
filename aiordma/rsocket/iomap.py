"""Mappings: memory that a side names to its peer, which then writes to it outside of the stream.

Theory of operation
    Behind the descriptors of a side's table are slots, whose number is in the private data.  The
    peer *publishes* a mapping by writing it into a slot: offset (a number that it chooses),
    address, key and length; a word of the kind IOMAP, which takes a credit as data does, reports
    it.  The owner of the table *uses* the mapping by RDMA WRITEs, which take no word, no credit and
    no receive.

    A word of data behind the publication, or behind such a write, arrives after it: the transport
    keeps the order.  So a publication that waits for a credit holds data back.

    No word is sent when a mapping ends.  Its slot stays as it is until another mapping takes it,
    and a write through an ended mapping ends the connection: the programs have to agree before.
"""

from __future__ import annotations

import errno
import struct
import sys
from collections import deque
from typing import NamedTuple

from aiordma.errors import errno_error
from aiordma.rsocket.wire import DESCRIPTOR_SIZE, IOMAP_SLOT_SIZE, Hello, protocol_error

__all__ = ["Iomap", "Mapping"]

_BIG_ENDIAN = sys.byteorder == "big"
_NATIVE = {False: struct.Struct("<QQII"), True: struct.Struct(">QQII")}
_ADDRESS_SPACE = 1 << 64
# In rsockets an offset is an off_t, which has a sign.
_OFFSETS = 1 << 63
_LENGTHS = 1 << 32


class Mapping(NamedTuple):
    """The contents of a slot.

    Attributes:
        offset: The peer's number for the first byte; the first and the last byte have numbers from
            0 to 2**63 - 1.
        addr: Address of the first byte in the publisher's address space.
        key: Remote key.
        length: Bytes; 0 in a table means that the slot is empty.
    """

    offset: int
    addr: int
    key: int
    length: int

    def pack(self, big_endian: bool) -> bytes:
        """As 24 bytes in the byte order of the host that will read them."""
        return _NATIVE[big_endian].pack(*self)


class Iomap:
    """Both directions of mappings of one connection.

    Args:
        memory: The slots of this side's table, which the peer writes to.
    """

    __slots__ = ("_big_endian", "_key", "_memory", "_pending", "_place", "_taken")

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._place = self._key = 0
        self._big_endian = _BIG_ENDIAN
        self._taken: list[bool] = []  # of the peer's slots
        self._pending: deque[tuple[int, Mapping]] = deque()

    def meet(self, peer: Hello) -> None:
        """Take the peer's private data."""
        self._place = peer.table_addr + peer.table_length * DESCRIPTOR_SIZE
        self._key = peer.table_key
        self._big_endian = peer.big_endian
        self._taken = [False] * peer.iomap_slots

    # Mappings of the peer

    def updated(self, index: int) -> None:
        """Check `index`, the number of a slot that the peer reports as written.

        Raises:
            ProtocolError: There is no such slot.
        """
        if index >= len(self._memory) // IOMAP_SLOT_SIZE:
            raise protocol_error(f"a mapping in slot {index}, which does not exist")

    def mappings(self) -> list[Mapping]:
        """Return the mappings in the slots; ended mappings are still among them.

        Raises:
            ProtocolError: A slot holds a mapping that reaches beyond the address space.
        """
        found = []
        # Copied first: the peer may write there at any time.
        for values in _NATIVE[_BIG_ENDIAN].iter_unpack(bytes(self._memory)):
            mapping = Mapping(*values)
            if not mapping.length:
                continue
            if (
                mapping.offset + mapping.length > _OFFSETS
                or mapping.addr + mapping.length > _ADDRESS_SPACE
            ):
                raise protocol_error(f"a mapping of {mapping.length} bytes at {mapping.addr:#x}")
            found.append(mapping)
        return found

    def place(self, offset: int, length: int) -> tuple[int, int]:
        """Return address and key of the peer's memory for `length` bytes at `offset`.

        Raises:
            ValueError: No mapping holds all of them.
            ProtocolError: As `mappings`.
        """
        for mapping in self.mappings():
            within = offset - mapping.offset
            if 0 <= within < mapping.length and within + length <= mapping.length:
                return mapping.addr + within, mapping.key
        msg = f"the peer has published no mapping of offsets {offset} to {offset + length}"
        raise ValueError(msg)

    # Mappings of this side

    def publish(self, mapping: Mapping) -> int:
        """Have a mapping written into a free slot of the peer; return the slot's number.

        Raises:
            ValueError: The offsets do not fit, or the mapping is empty.
            OSError: ENOBUFS, the peer has no free slot.
        """
        if (
            not 0 < mapping.length < _LENGTHS
            or not 0 <= mapping.offset <= _OFFSETS - mapping.length
        ):
            msg = (
                f"{mapping.length} bytes at offset {mapping.offset}: a mapping has 1 to "
                f"{_LENGTHS - 1}, and offsets 63 bits"
            )
            raise ValueError(msg)
        try:
            index = self._taken.index(False)
        except ValueError:
            msg = f"the peer takes {len(self._taken)} mappings at a time, and has that many already"
            raise errno_error(errno.ENOBUFS, msg) from None
        self._taken[index] = True
        self._pending.append((index, mapping))
        return index

    def withdraw(self, index: int) -> None:
        """Free a slot for another mapping; a publication that still waits is dropped."""
        self._taken[index] = False
        self._pending = deque(one for one in self._pending if one[0] != index)

    @property
    def pending(self) -> bool:
        """Whether a publication waits."""
        return bool(self._pending)

    def first(self) -> tuple[int, int, int, bytes]:
        """Return the publication to post: number and address of the slot, key, and its bytes."""
        index, mapping = self._pending[0]
        addr = self._place + index * IOMAP_SLOT_SIZE
        return index, addr, self._key, mapping.pack(self._big_endian)

    def posted(self) -> None:
        """Note that the first publication is posted."""
        self._pending.popleft()
