"""Parts of a `Memory` that are lent to peers: their keys, their end, and whether they overlap.

Theory of operation
    If the adapter has memory windows, a part is lent through a window.  The window has a key of its
    own, with the rights of the lease, and the key becomes invalid with the window.  The region
    itself gives no remote rights.  On other adapters the peer gets the key of the region, which
    stays valid as long as the region.

    A part that a peer may write to is not lent to another connection at the same time, because
    programs rely on memory not to change while they use it.  Parts for reading and for atomics may
    overlap, because readers do not disturb one another, and an adapter carries out atomics one
    after the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from aiordma.errors import ResourceClosedError, busy_error
from aiordma.verbs.enums import Access
from aiordma.verbs.mr import SGE
from aiordma.verbs.mw import MemoryWindow

__all__ = ["LentPart", "Overlaps"]

_WRITE = int(Access.REMOTE_WRITE)


class LentPart:
    """A part that is lent to a peer.

    It has the same interface as a region that was registered for a lease.

    Args:
        part: The part.
        rights: What the peer may do with it.
        owner: Identifies the connection, whose own parts may overlap one another.
        window: The memory window; None if the peer has the key of the region.
        over: Called once, in the loop's thread, when the peer has no access any more.

    Attributes:
        part, rights, owner, window: As the arguments.
        addr: The address of the first byte, for the peer.
        length: The size in bytes.
        closed: Whether `close` was called.
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

    # Uses are counted as for a region: access ends after `close`, with the last use.

    def _retain(self) -> None:
        if self.closed:
            msg = "the lent part has ended"
            raise ResourceClosedError(msg)
        self._uses += 1

    def _let_go(self) -> None:
        """Count one use less.  In any thread."""
        self._uses -= 1
        if self.closed and not self._uses:
            self._end()

    def close(self) -> None:
        """End the peer's access after the last use, without waiting for that.  Idempotent."""
        if not self.closed:
            self.closed = True
            if not self._uses:
                self._end()

    def _end(self) -> None:
        if self.window is None:
            self._tell()
        else:
            self.window.close()
            self.window._when_gone(self._tell)

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
            TimeoutError: The window could not be deallocated in time.
            OSError: The C library refused.

        Cancellation: ends the wait.
        """
        if self.window is not None:
            await self.window.wait_closed(timeout)
        self._ended()


class _Spans:
    """Parts, sorted by their first bytes, so that overlapping ones are found quickly."""

    __slots__ = ("_longest", "_parts")

    def __init__(self) -> None:
        # The address, the id() of the part, which makes the tuples comparable, and the part.
        self._parts: list[tuple[int, int, LentPart]] = []
        self._longest = 0  # the size of the largest part since the list was empty

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[LentPart]:
        return (part for _, _, part in self._parts)

    def add(self, part: LentPart) -> None:
        insort(self._parts, (part.addr, id(part), part))
        self._longest = max(self._longest, part.length)

    def remove(self, part: LentPart) -> None:
        at = bisect_left(self._parts, (part.addr, id(part), part))
        if at < len(self) and self._parts[at][2] is part:
            del self._parts[at]
            if not self._parts:
                self._longest = 0

    def overlapping(self, part: LentPart) -> LentPart | None:
        """A part of another owner that overlaps this one; None if there is none."""
        first = bisect_left(self._parts, (part.addr - self._longest + 1, 0, part))
        for at in range(first, len(self)):
            addr, _, other = self._parts[at]
            if addr >= part.addr + part.length:
                break
            if addr + other.length > part.addr and other.owner is not part.owner:
                return other
        return None


class Overlaps:
    """The parts of a `Memory` that are lent.  To be used in the thread of its loop only.

    Args:
        allowed: Whether parts may overlap, whatever their rights.
    """

    __slots__ = ("_allowed", "_others", "_written")

    def __init__(self, *, allowed: bool) -> None:
        self._allowed = allowed
        self._written = _Spans()
        self._others = _Spans()

    def add(self, part: LentPart) -> None:
        """Add a part before it is lent.

        Raises:
            RdmaOSError: It overlaps a part of another connection, and one of the two is for
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
                raise busy_error(msg)
        (self._written if written else self._others).add(part)

    def remove(self, part: LentPart) -> None:
        """Remove a part; harmless if it was not added."""
        self._written.remove(part)
        self._others.remove(part)

    def __len__(self) -> int:
        return len(self._written) + len(self._others)

    @property
    def open(self) -> int:
        """How many parts are not closed."""
        return sum(not part.closed for part in (*self._written, *self._others))
