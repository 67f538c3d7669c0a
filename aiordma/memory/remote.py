"""RemoteRegion: the name of memory of the peer, which can be sent as bytes in any message.

A RemoteRegion is a value and not a handle: making, slicing or dropping one opens and closes
nothing.  The owner's adapter decides at each access whether it is allowed.  The checks here are for
the benefit of the local program: an access that the adapter refuses ends the connection, whereas an
exception before the access is posted has no such consequence.  They do not protect the owner from
a hostile peer.

A region also says whose it is: `owner` identifies the protection domain in which the memory is
registered, which does not outlive its process, and `generation` the exposure in it.  A connection
knows the domain of its peer (docs/wire.md, "Identity"), and refuses a region of any other.  That
protects a program from its own old names, not the owner from a peer.

The peer chooses the bytes that arrive, so any bytes result either in a value or in ValueError.
"""

from __future__ import annotations

import errno
import struct
from dataclasses import dataclass
from typing import Self

from aiordma._core import REFUSED_ALIGNMENT, REFUSED_OUTSIDE, REFUSED_RIGHT, admit
from aiordma.arguments import bytes_of, check_kind, fitting, whole
from aiordma.errors import errno_error
from aiordma.verbs.enums import Access
from aiordma.verbs.mr import MemoryRegion
from aiordma.verbs.mw import MemoryWindow

__all__ = ["RemoteRegion", "words_of"]

# magic, version, rights, key, address, length
_LAYOUT = struct.Struct("!2sBBIQQ")
# What version 2 has behind them: owner, generation.
_IDENTITY = struct.Struct("!QI")
_SIZES = {1: _LAYOUT.size, 2: _LAYOUT.size + _IDENTITY.size}
_MAGIC = b"aR"
_VERSION = 2
_END_OF_MEMORY = 1 << 64
_BITS = (("addr", 64), ("length", 64), ("rkey", 32), ("owner", 64), ("generation", 32))

# Bits of our own on the wire: those of enum ibv_access_flags are spread over 21 bits.
_RIGHTS = {
    1: (Access.REMOTE_READ, "read"),
    2: (Access.REMOTE_WRITE, "write"),
    4: (Access.REMOTE_ATOMIC, "atomic"),
}
_NOTES = 8  # on the wire, beside the rights, from version 2 on: the owner gets notes of writes
_NO_RIGHTS = Access(0)
_ATOMIC = int(Access.REMOTE_ATOMIC)
_ALL_RIGHTS = Access.REMOTE_READ | Access.REMOTE_WRITE | Access.REMOTE_ATOMIC


@dataclass(frozen=True, slots=True, repr=False)
class RemoteRegion:
    """Memory of the peer that its program has exposed for one-sided operations.

    The peer sends it, and `from_bytes` parses it.  A RemoteRegion is a value: it can be compared,
    hashed, copied, and kept after the peer has withdrawn the memory; an access then fails with
    `RemoteAccessError`.  Whoever knows the key and has a connection in the same protection domain
    can access the memory, so treat the key like a password of that connection.

    A slice names a part of the memory, with the same key and rights.  As with `memoryview`,
    negative indices count from the end, and indices out of range are clamped; a step other than 1
    is refused.  `len()` raises OverflowError for a region of more than `sys.maxsize` bytes;
    `length` does not.

    Args:
        addr: The address of the first byte on the peer's side, 64 bits.
        length: The size in bytes.
        rkey: The peer's key for the memory, 32 bits.
        rights: What is allowed: REMOTE_READ, REMOTE_WRITE, REMOTE_ATOMIC or several of them.
        owner: Identifies the protection domain of the memory, 64 bits: that of one connection, or
            of a `Memory`, in one process.  0: unknown, and not checked.
        generation: The number of the exposure in that domain, 32 bits.  0: unknown.
        notes: Whether writes with an immediate reach the owner as notes (`Lease.notes`), and not as
            empty messages.

    Raises:
        TypeError: `notes` is no bool.
        ValueError: A number is out of range, the memory would not end below 2**64, or `rights`
            has a flag that does not concern remote access.
    """

    addr: int
    length: int
    rkey: int
    rights: Access = _NO_RIGHTS
    owner: int = 0
    generation: int = 0
    notes: bool = False

    def __post_init__(self) -> None:
        for name, bits in _BITS:
            value = fitting(f"{name} of a remote region", getattr(self, name), bits)
            object.__setattr__(self, name, value)
        check_kind("notes", self.notes, bool, none=False)
        if self.addr + self.length > _END_OF_MEMORY:
            msg = f"{self.length} bytes at {self.addr:#x} do not end below 2**64"
            raise ValueError(msg)
        rights = fitting("rights", self.rights, 32)
        if rights & ~int(_ALL_RIGHTS):
            msg = f"not a right of remote access: {Access(rights & ~int(_ALL_RIGHTS))!r}"
            raise ValueError(msg)
        object.__setattr__(self, "rights", Access(rights))
        object.__setattr__(self, "notes", bool(self.notes))

    def to_bytes(self, version: int = _VERSION) -> bytes:
        """Return the region as 36 bytes in network order, for a message or private data.

        Magic `aR`, version 2, rights (bit 0 read, 1 write, 2 atomic, 3 notes), key (4 bytes),
        address (8), length (8), owner (8), generation (4).

        Args:
            version: 1 gives 24 bytes, without owner, generation and notes, for a peer whose aiordma
                is older, or that parses them itself.  The owner of such a region is not checked,
                and writes to it with an immediate arrive as empty messages.

        Raises:
            ValueError: There is no such version.
        """
        if version not in _SIZES:
            msg = f"a remote region has version 1 or 2, not {version!r}"
            raise ValueError(msg)
        rights = sum(bit for bit, (flag, _) in _RIGHTS.items() if self.rights & flag)
        if self.notes and version > 1:
            rights |= _NOTES
        packed = _LAYOUT.pack(_MAGIC, version, rights, self.rkey, self.addr, self.length)
        return packed if version == 1 else packed + _IDENTITY.pack(self.owner, self.generation)

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Self:
        """Return the region that a peer's `to_bytes` has packed.

        Args:
            data: Exactly those bytes: 36, or 24 of version 1.

        Raises:
            ValueError: The bytes are no region, or come from a later version.
            TypeError: `data` is not bytes-like.
        """
        with bytes_of("data", data) as view:
            if view.nbytes < _LAYOUT.size:
                raise _size_error(view.nbytes)
            magic, version, rights, rkey, addr, length = _LAYOUT.unpack(view[: _LAYOUT.size])
            identity = view[_LAYOUT.size :].tobytes()
        if magic != _MAGIC:
            msg = "these bytes are not a remote region"
            raise ValueError(msg)
        if version not in _SIZES:
            msg = f"a remote region of version {version}; this side understands 1 to {_VERSION}"
            raise ValueError(msg)
        if _LAYOUT.size + len(identity) != _SIZES[version]:
            raise _size_error(_LAYOUT.size + len(identity), version)
        owner, generation = _IDENTITY.unpack(identity) if identity else (0, 0)
        flags = _NO_RIGHTS
        for bit, (flag, _) in _RIGHTS.items():
            if rights & bit:
                flags |= flag
                rights &= ~bit
        notes = version > 1 and bool(rights & _NOTES)
        if unknown := rights & ~(_NOTES if notes else 0):
            msg = f"a remote region with unknown rights: {unknown:#x}"
            raise ValueError(msg)
        return cls(addr, length, rkey, flags, owner, generation, notes)

    @classmethod
    def of(cls, memory: MemoryRegion | MemoryWindow) -> Self:
        """Return the name of memory of this side, to be sent to the peer.

        Args:
            memory: A region, or a window, which stands for the memory that it is bound to now.

        Raises:
            ResourceClosedError: `memory` is closed.
        """
        memory._require()
        rights = memory.access & _ALL_RIGHTS
        return cls(memory.addr, memory.length, memory.rkey, rights, memory.pd._identity)

    def check(self, offset: int, length: int, right: Access) -> int:
        """Check an access before it is posted, and refuse what the peer's adapter would refuse.

        Args:
            offset: The first byte of the access, counted from the start of the region; never
                negative.
            length: The number of bytes; 8 for an atomic operation.
            right: REMOTE_READ, REMOTE_WRITE or REMOTE_ATOMIC.

        Returns:
            The remote address of the access, for the work request.

        Raises:
            ValueError: The access is not inside the region, or an atomic operation does not concern
                8 bytes at a multiple of 8.
            PermissionError: The region does not allow it.
        """
        offset, length = whole("offset", offset), whole("length", length)
        # As integers, because `&` of enum flags is slow.
        asked, rights = int(right), int(self.rights)
        refused = admit(self.addr, self.length, rights, offset, length, asked)
        if refused == REFUSED_OUTSIDE:
            msg = (
                f"bytes {offset} to {offset + length} are not inside a remote region of "
                f"{self.length} bytes"
            )
            raise ValueError(msg)
        if refused == REFUSED_RIGHT:
            missing = asked & ~rights
            what = "atomic operations" if missing & _ATOMIC else words_of(Access(missing))
            msg = f"the peer gives no right to {what}: {self!r}"
            raise errno_error(errno.EACCES, msg, "the peer names the rights when it exposes memory")
        where = self.addr + offset
        if refused == REFUSED_ALIGNMENT:
            msg = (
                "an atomic operation needs 8 bytes at an address that is a multiple of 8, not "
                f"{length} at {where:#x}"
            )
            raise ValueError(msg)
        return where

    def __getitem__(self, part: slice) -> Self:
        if not isinstance(part, slice):
            msg = "a remote region has slices, but no single bytes: use read() for those"
            raise TypeError(msg)
        if part.step not in (None, 1):
            msg = f"a slice of a remote region has step 1, not {part.step}"
            raise ValueError(msg)
        start, stop, _ = part.indices(self.length)
        if stop <= start:  # an empty slice at the end may have no valid address
            start = stop = 0
        identity = self.owner, self.generation, self.notes
        return type(self)(self.addr + start, stop - start, self.rkey, self.rights, *identity)

    def __len__(self) -> int:
        return self.length

    def __bool__(self) -> bool:
        return self.length > 0  # len() fails above sys.maxsize

    def __repr__(self) -> str:
        # No address and no key: a repr ends up in logs.
        notes = ", notes" if self.notes else ""
        return f"<RemoteRegion {self.length} bytes, {words_of(self.rights)}{notes}>"


def _size_error(size: int, version: int = _VERSION) -> ValueError:
    return ValueError(
        f"a remote region of version {version} travels as {_SIZES[version]} bytes, not {size}"
    )


def words_of(rights: Access) -> str:
    """The names of the rights, joined by "+"."""
    return "+".join(word for flag, word in _RIGHTS.values() if rights & flag) or "no rights"
