"""Exposer: exposes large messages, so that the peer can read them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeAlias

from aiordma._core import copy as copy_bytes
from aiordma.endpoint.config import COPIED_BYTES, ConnectionConfig
from aiordma.endpoint.link import Link, lent, memory_log
from aiordma.endpoint.outcome import Outcome, stalled_error
from aiordma.endpoint.sending import Sender
from aiordma.endpoint.window import Window
from aiordma.endpoint.wire import (
    ASKS_CHECKSUMS,
    CHECKSUM,
    MOST_PIECES,
    PIECE,
    RENDEZVOUS,
    TAKES_PIECES,
    Hello,
    protocol_error,
)
from aiordma.errors import MessageTooLargeError, RdmaTimeoutError
from aiordma.link.buffers import sum_of
from aiordma.loop.credits import Credits
from aiordma.loop.limit import Limit
from aiordma.loop.timers import now
from aiordma.loop.wait_line import WaitLine
from aiordma.memory.governor import Lease
from aiordma.memory.large_memory import DEREGISTER_S
from aiordma.memory.lent import LentPart
from aiordma.memory.pool import room_of
from aiordma.requests.place import COPY_STEP
from aiordma.verbs.enums import Access
from aiordma.verbs.mr import INLINE_BYTES, MemoryRegion, is_unpinnable

__all__ = ["Exposer"]


#: If a message has several buffers, those of fewer bytes are copied, which is faster than to
#: register them.
_LEAST_PIECE = 1 << 16
#: Memory that the peer reads: a region that was registered for the message, or part of a `Memory`.
Readable: TypeAlias = MemoryRegion | LentPart
#: Lends a part of a `Memory` to the peer.
Opening: TypeAlias = Callable[[], Awaitable[LentPart]]


class _Piece(NamedTuple):
    """A piece of a message, in memory that the peer can read.

    Attributes:
        region: The memory, a `Readable`.
        length: The size of the piece, which begins at the start of the memory.
        pooled: Whether it is a copy in a buffer of the pool.
    """

    region: Any
    length: int
    pooled: bool


class _Exposure(NamedTuple):
    """A message that the peer may read.

    Attributes:
        pieces: Where it is.
        done: Ends when the peer has read it.
        lease: What it takes of the budget.
        since: When it was exposed, in seconds of `now()`.
    """

    pieces: list[_Piece]
    done: asyncio.Future[None]
    lease: Lease
    since: float


class _Run(NamedTuple):
    """The buffers that make up a piece of a message.

    Attributes:
        parts: A single buffer, which the peer reads in place; or buffers that are copied.
        length: Their size together.
        copied: Whether they are copied.
    """

    parts: list[memoryview]
    length: int
    copied: bool

    @property
    def room(self) -> int:
        """How many bytes of memory are registered for it."""
        return room_of(self.length) if self.is_pooled else self.length

    @property
    def is_pooled(self) -> bool:
        """Whether the copy is made in a buffer of the pool."""
        return self.copied and self.length <= COPIED_BYTES


def _runs(parts: list[memoryview]) -> list[_Run]:
    """Group the buffers of a message: each large one is a run, and small ones between them are."""
    runs: list[_Run] = []
    small: list[memoryview] = []
    for part in (*parts, None):
        if part is not None and len(part) < _LEAST_PIECE:
            small.append(part)
            continue
        if length := sum(map(len, small)):
            runs.append(_Run(small, length, copied=True))
        small = []
        if part is not None:
            runs.append(_Run([part], len(part), copied=False))
    return runs


async def _copy(parts: list[memoryview], into: memoryview) -> None:
    """Copy the buffers, one behind the other."""
    start = held = 0
    for part in parts:
        for first in range(0, len(part), COPY_STEP):
            data = part[first : first + COPY_STEP]
            if held + len(data) > COPY_STEP:
                await asyncio.sleep(0)  # let other tasks run: a copy blocks the loop
                held = 0
            copy_bytes(into[start : start + len(data)], data)
            start += len(data)
            held += len(data)


class Exposer:
    """The sending side of large messages.

    Attributes:
        limit: The largest message that the peer accepts, in bytes.
        sums: Whether the peer has asked for checksums.
        most_pieces: In how many pieces of memory a message may be; 1 if the peer does not support
            several.
        places: How many messages may be exposed at a time.
        window: How many more may be exposed now.
    """

    __slots__ = (
        "_allowed", "_config", "_drainers", "_exposures", "_link", "_most", "_next", "_order",
        "_outcome", "_receives", "_sender", "limit", "most_pieces", "places", "sums", "window",
    )  # fmt: skip

    places: int

    def __init__(
        self,
        link: Link,
        sender: Sender,
        outcome: Outcome,
        config: ConnectionConfig,
        receives: Window,
    ) -> None:
        self._link = link
        self._sender = sender
        self._outcome = outcome
        self._config = config
        self._allowed = False  # whether the queue pair allows reads
        self._exposures: dict[int, _Exposure] = {}
        sender.exposures = self._exposures
        self._next = 1
        self._drainers: WaitLine[None] = WaitLine()
        self.limit: int = config.slot_size if config.raw else 0
        self.sums: bool = False
        self.most_pieces: int = 1
        self.window: Credits = Credits(config.rendezvous_window)
        self._order: Credits = Credits(1)
        self._receives = receives
        self._most = self.places = 0

    def __len__(self) -> int:
        """How many messages are exposed."""
        return len(self._exposures)

    async def send(
        self, parts: list[memoryview], size: int, imm: int | None, opening: Opening | None = None
    ) -> None:
        """Send a message that does not fit into a slot; return when the peer has read all of it.

        Args:
            parts: The buffers that make up the message.
            size: Their size together.
            imm: The immediate, or None.
            opening: Lends the only part, which belongs to a `Memory`, to the peer.

        Raises:
            MessageTooLargeError: The peer does not accept a message of this size; nothing was sent.
            OSError: The buffer cannot be registered.
            ConnectionLostError, ResourceClosedError: The connection is over.
            TimeoutError: The peer has accepted nothing for `config.stall_timeout_s`.

        Cancellation: the peer may still receive the message; a buffer that was not copied stays
        exported until the peer has read it or the connection is gone.
        """
        self._outcome.require_open()
        self.check_size(size)
        patience = self._config.stall_timeout_s
        try:
            with Limit(patience), self._outcome.explaining():
                regions = await self._exposed(parts, size, imm, opening)
        except RdmaTimeoutError:
            raise
        except TimeoutError as exc:
            assert patience is not None
            raise stalled_error(patience) from exc
        # The message has arrived, even if the deregistration fails or takes long.
        self._link.state.count_large_sent(size)
        if size > INLINE_BYTES:
            with contextlib.suppress(OSError, MemoryError), Limit(DEREGISTER_S):
                for region in regions:
                    await region.wait_closed()

    def check_size(self, size: int) -> None:
        """Raise MessageTooLargeError if the peer does not accept a message of this size."""
        if size <= self.limit:
            return
        if self._config.raw:
            text, hint = "a raw connection", "send it in pieces, or raise slot_size on both sides"
        else:
            text, hint = "the peer", MessageTooLargeError.hint
        text = f"{text} takes messages up to {self.limit} bytes, this has {size} ({hint})"
        error = MessageTooLargeError(text)
        error.hint = hint
        try:
            raise error
        finally:
            del error  # its traceback refers to this frame, which would make a cycle

    async def _exposed(
        self, parts: list[memoryview], size: int, imm: int | None, opening: Opening | None
    ) -> list[Readable]:
        """Wait until the peer has read a message; return the memory that is being deregistered."""
        state = self._link.state
        state.large_begins()  # so that no later message overtakes it in fragments
        try:
            if not self._order.try_acquire():
                await self._order.acquire()
            try:
                exposure = await self._announced(parts, size, imm, opening)
            finally:
                self._order.release()
        finally:
            state.large_ends()
        own = [each.region for each in exposure.pieces if not each.pooled]
        done = exposure.done
        try:
            await done
        finally:
            del done, exposure  # the traceback of its exception refers to this frame: a cycle
            # Deregisters them when they are no longer pinned: after DONE, or with the queue pair.
            for region in own:
                region.close()
        return own

    def _plan(self, parts: list[memoryview], size: int) -> list[_Run]:
        """Decide into which pieces a message is divided, not more than the peer supports."""
        if size <= COPIED_BYTES:
            return [_Run(parts, size, copied=True)]
        runs = _runs(parts) if len(parts) > 1 else [_Run(parts, size, copied=False)]
        return runs if len(runs) <= self.most_pieces else [_Run(parts, size, copied=True)]

    async def _announced(
        self, parts: list[memoryview], size: int, imm: int | None, opening: Opening | None
    ) -> _Exposure:
        """Expose a message, and announce it.

        Messages do this one at a time, to keep their order: memory of more than 1 MiB is registered
        in a thread, and meanwhile a later message could be announced.
        """
        if not self.window.try_acquire():
            if self.places < self._most:
                self._widen()
            await self.window.acquire()
        runs = self._plan(parts, size)
        room = 0 if opening else sum(run.room for run in runs)
        try:
            lease = await self._link.buffers.memory.lease(room, self)
        except BaseException:
            self.window.release()
            raise
        pieces: list[_Piece] = []
        try:
            for run in runs:
                await self._add(pieces, run, opening, lease)
            number = self._open(pieces, lease)
        except BaseException:
            for each in pieces:
                if each.pooled:
                    self._link.buffers.outgoing.give(each.region)
                else:
                    each.region.close()
            self._over(lease)
            raise
        exposure = self._exposures[number]
        try:
            await self._sender.rendezvous(await self._head(number, pieces), imm, size)
        except BaseException:
            # It was not announced.  But the peer may know the key of a pooled buffer from an
            # earlier message, so the buffer is not used again.
            self._withdraw(number, keep=False)
            for each in pieces:
                if not each.pooled:
                    each.region.close()
            raise
        return exposure

    async def _add(
        self, pieces: list[_Piece], run: _Run, opening: Opening | None, lease: Lease
    ) -> None:
        """Register a piece of a message, or memory for a copy of it, and add it to `pieces`."""
        region: Readable
        copied = run.copied
        if run.is_pooled:
            region = await self._link.buffers.outgoing.take(run.length, lease)
        elif opening is not None:
            region = await opening()
        elif copied:
            region = await self._registered(run.length, run.length, lease)
        else:
            try:
                region = await self._registered(run.length, lent(run.parts[0]), lease)
            except OSError as exc:
                if not is_unpinnable(exc):
                    raise
                self._link.note("copies a large message: %s", exc, log=memory_log)
                copied = True
                region = await self._registered(run.length, run.length, lease)
        pieces.append(_Piece(region, run.length, run.is_pooled))
        if copied:
            await _copy(run.parts, region.view)

    async def _registered(self, size: int, memory: Any, lease: Lease) -> MemoryRegion:
        """Register memory that the peer may read: a buffer, or new memory of `memory` bytes."""
        return await self._link.buffers.memory.registered(
            size, lambda: self._link.register(memory, Access.REMOTE_READ, lease)
        )

    def _open(self, pieces: list[_Piece], lease: Lease) -> int:
        """Record an exposure of the pieces, and return its number.

        Raises:
            BaseException: The connection was closed meanwhile, and nothing is exposed.
        """
        buffers = self._link.buffers
        if not self._allowed:
            self._link.open_access(Access.REMOTE_READ)
            self._allowed = True
        pinned: list[Any] = []
        try:
            for each in pieces:
                buffers.pin(each.region)
                pinned.append(each.region)
        except BaseException:
            for region in pinned:
                buffers.unpin(region)
            raise
        number = self._next
        self._next = number % 0xFFFFFFFF + 1
        done = self._link.loop.create_future()
        self._exposures[number] = _Exposure(pieces, done, lease, now())
        return number

    async def _head(self, number: int, pieces: list[_Piece]) -> bytes:
        """The body of an announcement."""
        first = pieces[0].region
        head = RENDEZVOUS.pack(first.addr, first.rkey, number)
        if self.sums:
            checksum = 0
            for each in pieces:
                checksum = await sum_of(each.region.view[: each.length], checksum)
            head += CHECKSUM.pack(checksum)
        for each in pieces[1:]:
            head += PIECE.pack(each.region.addr, each.length, each.region.rkey)
        return head

    def agree(self, hello: Hello) -> None:
        """Apply the peer's half of the handshake; to be called before the first send."""
        self.limit = hello.max_message_kib * 1024
        self.sums = bool(hello.flags & ASKS_CHECKSUMS)
        if hello.flags & TAKES_PIECES:
            room = self._link.state.eager_size - RENDEZVOUS.size - CHECKSUM.size
            self.most_pieces = min(MOST_PIECES, 1 + max(0, room) // PIECE.size)
        self._most = min(self._config.rendezvous_window, hello.rendezvous_window)
        self.places = min(self._most, self._receives.answers)
        if self.places != self.window.free:
            self.window = Credits(self.places)

    def _widen(self) -> None:
        """Allow more exposures at a time, as many as there are receives for DONE frames."""
        places = min(self._most, self._receives.expect(self._most, self._widen))
        if places > self.places:
            more, self.places = places - self.places, places
            self.window.release(more)

    async def drained(self) -> None:
        """Wait until no message is exposed."""
        while self._exposures:
            await self._drainers.wait()

    def _wake_drainers(self) -> None:
        if self._drainers.places and not self._exposures:
            self._drainers.grant_all(None)

    def _withdraw(self, number: int, *, keep: bool = True) -> None:
        exposure = self._exposures.pop(number, None)
        if exposure is None:
            # The connection has broken meanwhile.  Its pool is closed, and the link unpins the
            # region when the queue pair is gone.
            return
        buffers = self._link.buffers
        for each in exposure.pieces:
            buffers.unpin(each.region)
            if each.pooled:  # the others are closed by the task that sends
                (buffers.outgoing.give if keep else buffers.outgoing.drop)(each.region)
        self._over(exposure.lease)
        self._wake_drainers()

    def _over(self, lease: Lease) -> None:
        """Release the lease of a message, and its place in the window."""
        lease.release()
        self.window.release()

    def on_done(self, number: int, flags: int) -> None:
        """Handle a DONE frame: the peer has read a message."""
        exposure = self._exposures.get(number)
        if exposure is None or flags:
            why = "not open" if exposure is None else f"flags {flags:#x}"
            self._link.fail(protocol_error(f"the peer answered exchange {number}: {why}"))
            return
        self._withdraw(number)
        if not exposure.done.done():
            exposure.done.set_result(None)

    def refuse(self, failure: Callable[[], BaseException]) -> None:
        """Have calls that wait for their turn raise what `failure` makes."""
        self._order.fail(failure)
        self.window.fail(failure)
        self._link.buffers.memory.sends.refuse(self, failure)

    def fail(self, failure: Callable[[], BaseException]) -> None:
        """Have all calls raise what `failure` makes, because the connection is over."""
        self.refuse(failure)
        for number in list(self._exposures):
            exposure = self._exposures.pop(number)
            exposure.lease.release()
            if not exposure.done.done():
                exposure.done.set_exception(failure())
                exposure.done.exception()
        self._wake_drainers()
