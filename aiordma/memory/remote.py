"""RemoteRegion: a name for memory of the peer, as bytes that travel in any message.

A RemoteRegion is a value and no handle: to make, slice or lose it opens and closes nothing.  The
owner's adapter decides at each access whether the memory can be reached.  The checks here
serve the local program: an access that the adapter refuses costs the whole connection, an
exception before the post costs nothing.  They are no protection from a hostile peer.

The bytes that arrive were chosen by the peer, so parsing is total: a value, or ValueError.
"""

from __future__ import annotations

import errno
import struct
from dataclasses import dataclass
from typing import Self

from aiordma.arguments import bytes_of, fitting, whole
from aiordma.errors import errno_error
from aiordma.verbs.enums import Access
from aiordma.verbs.mr import MemoryRegion
from aiordma.verbs.mw import MemoryWindow

__all__ = ["RemoteRegion", "words_of"]

# magic, version, rights, key, address, length
_LAYOUT = struct.Struct("!2sBBIQQ")
_MAGIC = b"aR"
_VERSION = 1
_END_OF_MEMORY = 1 << 64

# The library's own numbers: those of ibv_access_flags belong to C, and are spread over 21 bits.
_RIGHTS = {
    1: (Access.REMOTE_READ, "read"),
    2: (Access.REMOTE_WRITE, "write"),
    4: (Access.REMOTE_ATOMIC, "atomic"),
}
_NO_RIGHTS = Access(0)
_ATOMIC = int(Access.REMOTE_ATOMIC)
_ALL_RIGHTS = Access.REMOTE_READ | Access.REMOTE_WRITE | Access.REMOTE_ATOMIC


@dataclass(frozen=True, slots=True, repr=False)
class RemoteRegion:
    """Memory of the peer that its program has opened for one-sided operations.

    It comes from the peer, by `from_bytes`.  A RemoteRegion is a value: it can be compared, hashed,
    copied and kept after the peer has withdrawn the memory; an access then fails with
    `RemoteAccessError`.
    A peer in the same protection domain that knows the key has the rights: treat it as a
    password of that connection.

    A slice names a part of the memory and keeps key and rights.  As with `memoryview`, negative
    indices count from the end, and those out of range are clamped; a step other than 1 is refused.
    `len()` raises OverflowError for a region that exceeds `sys.maxsize` bytes; `length` does not.

    Args:
        addr: Address of the first byte, as the peer's adapter knows it; 64 bits.
        length: Bytes.
        rkey: The peer's key for it, 32 bits.
        rights: Accesses that it allows: REMOTE_READ, REMOTE_WRITE, REMOTE_ATOMIC or several.

    Raises:
        ValueError: A number is out of range, the memory would not end below 2**64, or `rights`
            has a flag that says nothing about remote access.
    """

    addr: int
    length: int
    rkey: int
    rights: Access = _NO_RIGHTS

    def __post_init__(self) -> None:
        for name, bits in (("addr", 64), ("length", 64), ("rkey", 32)):
            value = fitting(f"{name} of a remote region", getattr(self, name), bits)
            object.__setattr__(self, name, value)
        if self.addr + self.length > _END_OF_MEMORY:
            msg = f"{self.length} bytes at {self.addr:#x} do not end below 2**64"
            raise ValueError(msg)
        rights = fitting("rights", self.rights, 32)
        if rights & ~int(_ALL_RIGHTS):
            msg = f"not a right of remote access: {Access(rights & ~int(_ALL_RIGHTS))!r}"
            raise ValueError(msg)
        object.__setattr__(self, "rights", Access(rights))

    def to_bytes(self) -> bytes:
        """Return the region as 24 bytes in network order, for a message or private data.

        Magic `aR`, version 1, rights (bit 0 read, 1 write, 2 atomic), key (4 bytes), address (8),
        length (8).
        """
        rights = sum(bit for bit, (flag, _) in _RIGHTS.items() if self.rights & flag)
        return _LAYOUT.pack(_MAGIC, _VERSION, rights, self.rkey, self.addr, self.length)

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Self:
        """Return the region that a peer's `to_bytes` has packed.

        Args:
            data: Exactly those 24 bytes.

        Raises:
            ValueError: The bytes are no region, or come from a later version.
            TypeError: `data` is not bytes-like.
        """
        with bytes_of("data", data) as view:
            if view.nbytes != _LAYOUT.size:
                msg = f"a remote region travels as {_LAYOUT.size} bytes, not {view.nbytes}"
                raise ValueError(msg)
            magic, version, rights, rkey, addr, length = _LAYOUT.unpack(view.tobytes())
        if magic != _MAGIC:
            msg = "these bytes are not a remote region"
            raise ValueError(msg)
        if version != _VERSION:
            msg = f"a remote region of version {version}; this side understands {_VERSION}"
            raise ValueError(msg)
        flags = _NO_RIGHTS
        for bit, (flag, _) in _RIGHTS.items():
            if rights & bit:
                flags |= flag
                rights &= ~bit
        if rights:
            msg = f"a remote region with unknown rights: {rights:#x}"
            raise ValueError(msg)
        return cls(addr, length, rkey, flags)

    @classmethod
    def of(cls, memory: MemoryRegion | MemoryWindow) -> Self:
        """Return a name of this side's memory for the peer.

        Args:
            memory: A region, or a window, which names the memory that it is bound to now.

        Raises:
            ResourceClosedError: `memory` is closed.
        """
        memory._require()
        return cls(memory.addr, memory.length, memory.rkey, memory.access & _ALL_RIGHTS)

    def check(self, offset: int, length: int, right: Access) -> int:
        """Refuse an access that the peer's adapter would refuse, before anything is posted.

        Args:
            offset: First byte of the access, from the region's start; never negative.
            length: Bytes; 8 for an atomic operation.
            right: REMOTE_READ, REMOTE_WRITE or REMOTE_ATOMIC.

        Returns:
            The remote address of the access, for the work request.

        Raises:
            ValueError: The access is not inside the region, or an atomic operation is not on 8
                bytes at a multiple of 8.
            PermissionError: The region does not give the right.
        """
        offset, length = whole("offset", offset), whole("length", length)
        if offset < 0 or length < 0 or offset + length > self.length:
            msg = (
                f"bytes {offset} to {offset + length} are not inside a remote region of "
                f"{self.length} bytes"
            )
            raise ValueError(msg)
        # As integers, because `&` of flags is slow.
        asked = int(right)
        missing = asked & ~int(self.rights)
        if missing:
            what = "atomic operations" if missing & _ATOMIC else words_of(Access(missing))
            msg = f"the peer gives no right to {what}: {self!r}"
            raise errno_error(errno.EACCES, msg, "the peer names the rights when it exposes memory")
        where = self.addr + offset
        if asked & _ATOMIC and (length != 8 or where % 8):
            msg = (
                "an atomic operation needs 8 bytes at an address that is a multiple of 8, not "
                f"{length} at {where:#x}"
            )
            raise ValueError(msg)
        return where

    def __getitem__(self, part: slice) -> Self:
        if not isinstance(part, slice):
            msg = "a remote region has slices, no single bytes; use read() for those"
            raise TypeError(msg)
        if part.step not in (None, 1):
            msg = f"a slice of a remote region has step 1, not {part.step}"
            raise ValueError(msg)
        start, stop, _ = part.indices(self.length)
        if stop <= start:  # behind the last byte there may be no address
            start = stop = 0
        return type(self)(self.addr + start, stop - start, self.rkey, self.rights)

    def __len__(self) -> int:
        return self.length

    def __bool__(self) -> bool:
        return self.length > 0  # len() fails above sys.maxsize

    def __repr__(self) -> str:
        # No address and no key: a repr ends up in logs.
        return f"<RemoteRegion {self.length} bytes, {words_of(self.rights)}>"


def words_of(rights: Access) -> str:
    """The names of the rights of a remote access, joined."""
    return "+".join(word for flag, word in _RIGHTS.values() if rights & flag) or "no rights"
