"""Lent parts of a `Memory`: the key that a peer has, its end, and the overlaps of parts.

Theory of operation
    Where the adapter has memory windows, a part is opened by a window: a key of its own, with the
    rights of the lease, which ends with the window.  The region behind it gives no remote right at
    all.  Elsewhere the peer gets the key of the region, which ends with the region.

    A part that a peer may write to is lent to no other connection meanwhile: a program relies on
    it that bytes do not change between two reads of them.  Parts for reading and for atomics
    overlap as they like, because readers do not disturb one another, and an adapter carries out
    atomics one after the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
from bisect import bisect_left, insort
from collections.abc import Callable

from aiordma.errors import ResourceBusyError, ResourceClosedError
from aiordma.verbs.enums import Access
from aiordma.verbs.mr import SGE
from aiordma.verbs.mw import MemoryWindow

__all__ = ["LentPart", "Overlaps"]

_WRITE = int(Access.REMOTE_WRITE)


class LentPart:
    """A part that is open to a peer, or is being opened; as a region that a lease has registered.

    Args:
        part: The part.
        rights: The peer's.
        owner: An object of the connection: its own parts may overlap.
        window: Opens it; None where the peer has the key of the region.
        over: Called in the loop's thread when the peer has no access any more; once.

    Attributes:
        part, rights, owner, window: As the arguments.
        addr: Address of the first byte for the peer.
        length: Bytes.
        closed: Whether it ends, or has ended.
    """

    __slots__ = (
        "__weakref__", "_loop", "_over", "_thread", "_uses", "addr", "closed", "length", "owner",
        "part", "rights", "window",
    )  # fmt: skip

    def __init__(
        self,
        part: SGE,
        rights: Access,
        owner: object,
        window: MemoryWindow | None,
        over: Callable[[LentPart], None] | None,
    ) -> None:
        self.part: SGE = part
        self.rights: Access = rights
        self.owner: object = owner
        self.window: MemoryWindow | None = window
        self.addr: int = part.mr.addr + part.offset
        self.length: int = len(part)
        self.closed: bool = False
        self._over = over
        self._uses = 0
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    @property
    def rkey(self) -> int:
        """The key for the peer."""
        return self.part.mr.rkey if self.window is None else self.window.rkey

    @property
    def view(self) -> memoryview:
        """The bytes of the part.

        Raises:
            ResourceClosedError: The memory is closed.
        """
        return self.part.mr.view[self.part.offset : self.part.offset + self.length]

    # As of a region: a message is read until its last use has ended.

    def _retain(self) -> None:
        if self.closed:
            msg = "the lent part has ended"
            raise ResourceClosedError(msg)
        self._uses += 1

    def _let_go(self) -> None:
        """One use less; in any thread."""
        self._uses -= 1
        if self.closed and not self._uses:
            self._end()

    def close(self) -> None:
        """End the peer's access, after the last use.  Idempotent; `wait_closed` waits."""
        if not self.closed:
            self.closed = True
            if not self._uses:
                self._end()

    def _end(self) -> None:
        if self.window is None:
            self._tell()
        else:
            self.window.close()
            self.window._gone.add_done_callback(lambda _: self._tell())

    def _tell(self) -> None:
        if threading.get_ident() == self._thread:
            self._ended()
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and the memory with it
                self._loop.call_soon_threadsafe(self._ended)

    def _ended(self) -> None:
        over, self._over = self._over, None
        if over is not None:
            over(self)

    async def wait_closed(self, timeout: float = 60.0) -> None:
        """Wait until the peer has no access any more.

        Args:
            timeout: Seconds.

        Raises:
            TimeoutError: The adapter has not let go of it yet.
            OSError: The C library refused.

        Cancellation: ends the wait.
        """
        if self.window is not None:
            await self.window.wait_closed(timeout)
        self._ended()


class _Spans:
    """Parts in the order of their first bytes, to be asked for those that overlap another."""

    __slots__ = ("_longest", "_order", "_parts")

    def __init__(self) -> None:
        self._order: list[tuple[int, int]] = []  # first byte, and a number that is unique
        self._parts: dict[int, LentPart] = {}
        self._longest = 0  # of all since it was empty

    def add(self, part: LentPart) -> None:
        insort(self._order, (part.addr, id(part)))
        self._parts[id(part)] = part
        self._longest = max(self._longest, part.length)

    def remove(self, part: LentPart) -> None:
        if self._parts.pop(id(part), None) is not None:
            del self._order[bisect_left(self._order, (part.addr, id(part)))]
            if not self._parts:
                self._longest = 0

    def overlapping(self, part: LentPart) -> LentPart | None:
        """A part of another owner that has bytes of this part."""
        end = part.addr + part.length
        for at in range(bisect_left(self._order, (part.addr - self._longest + 1, 0)), len(self)):
            addr, number = self._order[at]
            if addr >= end:
                break
            other = self._parts[number]
            if addr + other.length > part.addr and other.owner is not part.owner:
                return other
        return None

    def __len__(self) -> int:
        return len(self._order)


class Overlaps:
    """The parts of a memory that are lent; in the thread of its loop.

    Args:
        allowed: Whether parts may overlap whatever their rights.
    """

    __slots__ = ("_allowed", "_others", "_written")

    def __init__(self, *, allowed: bool) -> None:
        self._allowed = allowed
        self._written = _Spans()
        self._others = _Spans()

    def add(self, part: LentPart) -> None:
        """Note a part before it is opened.

        Raises:
            ResourceBusyError: It overlaps a part of another connection, and one of both is lent for
                writing.
        """
        written = bool(int(part.rights) & _WRITE)
        if not self._allowed:
            other = self._written.overlapping(part)
            if other is None and written:
                other = self._others.overlapping(part)
            if other is not None:
                first = other.part.offset
                msg = (
                    f"bytes {part.part.offset} to {part.part.offset + part.length} overlap bytes "
                    f"{first} to {first + other.length}, which are lent to another connection, and "
                    "one of both may write: end that lease first, or make the Memory with "
                    "overlap=True"
                )
                raise ResourceBusyError(errno.EBUSY, msg)
        (self._written if written else self._others).add(part)

    def remove(self, part: LentPart) -> None:
        """The part has ended; in any case."""
        self._written.remove(part)
        self._others.remove(part)

    def __len__(self) -> int:
        return len(self._written) + len(self._others)

    @property
    def open(self) -> int:
        """Parts that have not begun to end."""
        return sum(
            not part.closed
            for spans in (self._written, self._others)
            for part in spans._parts.values()
        )
