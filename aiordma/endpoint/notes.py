"""Notes: what the peer says about its writes to memory that this side has exposed.

Theory of operation
    A noted write is a WRITE and, behind it on the same reliable connection, a NOTE frame: when the
    frame has arrived, the bytes are in their place.  The frame names the memory by key and address,
    so that it finds its lease among several of the connection.

    C keeps the frames in the receive slots in which they lie, in the order of arrival
    (`MessageState.next_note`).  `NoteBook` distributes them among the leases.  The slot of a note
    is released, and so the peer gets its credit back, when the program has read the note, or when
    the lease has ended.  So the notes of a connection are bounded by its receive slots, and a
    program that reads none slows down its peer only.

    A note of memory that no lease wants notes of is dropped.  It may have been sent for a lease
    that has just ended; and where parts of a `Memory` share a key, a note that is late looks like
    one of the wrong memory.

    A note is never assigned to a waiting task, so that a canceled wait loses nothing.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop, _get_running_loop
from collections import deque
from collections.abc import Callable
from typing import Protocol, Self

from aiordma._core import MessageState, Wakeup
from aiordma.endpoint.link import Link
from aiordma.endpoint.outcome import Outcome
from aiordma.endpoint.receiving import Receiver
from aiordma.endpoint.wire import FrameKind
from aiordma.errors import ProtocolError, ResourceClosedError
from aiordma.loop import fork
from aiordma.loop.running import check_loop
from aiordma.loop.uncopied import Uncopied
from aiordma.memory.remote import RemoteRegion

__all__ = ["Note", "NoteBook", "Notes"]


class Viewed(Protocol):
    """What a note needs of its lease."""

    @property
    def view(self) -> memoryview:
        """The memory, until the lease ends."""


class Note(Uncopied):
    """One noted write of the peer: `Connection.write(..., imm=)` to memory exposed with notes.

    The peer chooses all three numbers; the bytes that they name are inside the memory of the lease.

    Attributes:
        imm: The 32-bit number that the peer has given.
        offset: The first byte that was written, counted from the start of the memory.
        length: How many bytes were written, 0 or more.
    """

    __slots__ = ("_lease", "imm", "length", "offset")

    def __init__(self, lease: Viewed, imm: int, offset: int, length: int) -> None:
        self._lease = lease
        self.imm: int = imm
        self.offset: int = offset
        self.length: int = length

    @property
    def data(self) -> memoryview:
        """The bytes that were written, in place, as a part of `Lease.view`.

        The peer may write there again at any time, so agree with it when.  The bytes can be read
        until the block of the lease is left, even if the connection is over.

        Raises:
            ResourceClosedError: The lease has ended.
        """
        return self._lease.view[self.offset : self.offset + self.length]

    def __repr__(self) -> str:
        return f"<Note imm={self.imm}, {self.length} bytes at {self.offset}>"


class Notes(Uncopied):
    """The notes of one lease, for `async for`; see `Lease.notes`."""

    # wakeup: what the task that waits is parked on

    __slots__ = (
        "__weakref__", "_addr", "_book", "_lease", "_loop", "_queue", "_release", "_size", "wakeup",
    )  # fmt: skip

    def __init__(self, book: NoteBook) -> None:
        self._book = book
        self._release = book.release
        self._lease: Viewed | None = None  # while it is open
        self._addr = -1  # before it is open
        self._size = 0
        self._queue: deque[tuple[Note, int]] = deque()
        self._loop = book.loop
        self.wakeup: Wakeup = Wakeup(book.loop)
        fork.guard_public(self)

    def begin(self, lease: Viewed, region: RemoteRegion) -> None:
        """Note that the `lease` is open, and that `region` names its memory."""
        self._lease = lease
        self._addr, self._size = region.addr, region.length
        self._book.open(region.rkey, self)

    def end(self, region: RemoteRegion) -> None:
        """Note that the lease of `region` has ended.  Notes that were not read are dropped."""
        self._lease = None
        self._book.close(region.rkey, self)
        self.drop()
        self.wakeup.wake_soon()

    def drop(self) -> None:
        """Drop the notes that were not read."""
        while self._queue:
            self._release(self._queue.popleft()[1])

    def take(self, addr: int, length: int, imm: int, slot: int) -> bool:
        """Take a note, unless it concerns other memory than that of this lease.

        Args:
            addr: The address of the first byte that was written.
            length: How many bytes were written.
            imm: The number that the peer has given.
            slot: The receive slot that the note has until it is read.

        Returns:
            Whether it was taken.
        """
        offset, lease = addr - self._addr, self._lease
        if offset < 0 or offset + length > self._size or lease is None:
            return False
        self._queue.append((Note(lease, imm, offset, length), slot))
        return True

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Note:
        """Wait for the next note, in the order in which the peer has written.

        When it is returned, the bytes are in their place.

        Raises:
            StopAsyncIteration: The lease has ended; or the connection was closed, by this side or
                in good order by the peer, and all notes that had arrived were read.
            ConnectionLostError: The connection broke, and all notes that had arrived were read.
            ResourceClosedError: The lease is not open yet.
            RuntimeError: Another task waits for the notes of this lease, or this is not the
                connection's event loop.

        Cancellation: no note is lost.
        """
        if _get_running_loop() is not self._loop:
            check_loop(self._loop, "lease")
        queue = self._queue
        while not queue:
            if self._addr < 0:
                msg = "the lease is not open: read its notes inside its block"
                raise ResourceClosedError(msg)
            if self._lease is None:
                raise StopAsyncIteration
            if self.wakeup.waiting:
                msg = "another task waits for the notes of this lease: it has one reader"
                raise RuntimeError(msg)
            self._book.prepare_to_wait()
            await self.wakeup
        note, slot = queue.popleft()
        self._release(slot)
        return note


class NoteBook:
    """The leases of one connection that want notes, and the notes that have arrived for them.

    Attributes:
        state: The messages of the connection.
        loop: Its event loop.
        release: Releases the slot of a note, which gives the peer its credit back.
    """

    __slots__ = (
        "_link", "_open", "_outcome", "_over", "_receiver", "loop", "release", "state",
    )  # fmt: skip

    def __init__(self, link: Link, receiver: Receiver, outcome: Outcome) -> None:
        self.state: MessageState = link.state
        self.loop: AbstractEventLoop = link.loop
        self._link = link
        self._receiver = receiver
        self.release: Callable[..., None] = receiver.free_slot
        self._outcome = outcome
        # Whether no further note will arrive.
        self._over = outcome.decided or bool(self.state.said & 1 << FrameKind.END)
        self._open: dict[int, list[Notes]] = {}  # by the keys of their memory
        self.state.allow_notes()

    def open(self, key: int, notes: Notes) -> None:
        """Distribute notes to a lease from now on."""
        self._open.setdefault(key, []).append(notes)

    def close(self, key: int, notes: Notes) -> None:
        """Distribute no notes to it any more."""
        others = self._open[key]
        others.remove(notes)
        if not others:
            del self._open[key]

    def prepare_to_wait(self) -> None:
        """Send the credits that are due, as the peer may need them for its next note.

        Raises:
            StopAsyncIteration, ConnectionLostError: No further note will arrive, as
                `Notes.__anext__` says.
        """
        if not self._over:
            if not (code := self.state.credit()):
                return
            self._link.check(code)
        if self._over:
            outcome = self._outcome
            cause = outcome.cause  # None if the peer has sent END
            ended = self._receiver.ended and not isinstance(cause, ProtocolError)
            if cause is None or ended or isinstance(cause, ResourceClosedError):
                raise StopAsyncIteration
            raise outcome.failure()

    def distribute(self, *, resume: bool) -> None:
        """Put the notes that have arrived into the queues of their leases, and resume the readers.

        Args:
            resume: Whether to resume them at once, because no task is running.
        """
        state = self.state
        while (found := state.next_note()) is not None:
            key, addr, length, imm, slot = found
            for notes in self._open.get(key, ()):
                if notes.take(addr, length, imm, slot):
                    # The task may do anything, end leases and the connection included; if it raises
                    # SystemExit, C calls once more for the notes behind this one.
                    if resume:
                        state.resume(notes.wakeup)
                    else:
                        notes.wakeup.wake_soon()
                    break
            else:
                self.release(slot)

    def end(self, *, drop: bool) -> None:
        """Have all readers end, or raise, because no further note will arrive.

        Args:
            drop: Whether to drop the notes that were not read, as this side closes the connection.
        """
        self._over = True
        self.distribute(resume=False)
        for several in self._open.values():
            for notes in several:
                if drop:
                    notes.drop()
                notes.wakeup.wake_soon()
