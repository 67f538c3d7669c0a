"""Sender: tasks that wait for room to send, and those that wait until all has arrived.

Theory of operation
    A data message needs a free send slot and a credit: a receive that the peer has posted for it.
    Where both are there and no task waits, C sends (`MessageState.send`).  Otherwise tasks stand in
    line, in C (`_core/waiting.c`): first come, first served.  The drain that brings slots and
    credits resumes as many tasks as there is room for, and each sends when it runs; so a canceled
    task has nothing to give back.  Slots of a pool come when none is free, and leave when other
    connections need them.

    Completed sends wake the loop only while a task waits for them: in `flush`, or in line for a
    slot while there are credits.  Credits come with messages, which wake the loop in any case.

    A send that has completed with success has reached the peer's adapter, and the end of the
    connection takes nothing of that back: so `flush` compares numbers of sends, and asks for the
    end only if some of them have come back without success, or not at all.  The peer's
    disconnection can overtake the completion of a send that the peer has acknowledged before: on
    Soft-RoCE one of a few hundred did.  So the queue pair gets a moment for it.

    `Goodbye` sends the last messages, and waits until they have arrived.  If the connection is
    closed in good order, the peer reads the large messages that were announced, and END follows the
    last message.  After an abort sent messages, and ABORT behind them, may arrive until the peer
    has disconnected.  Each wait has a bound.

    `Exposer` sends large messages, which the peer reads: see `endpoint.large`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeAlias

from aiordma._core import EVENT_ROOM, MessageState, Waiting
from aiordma._core import copy as copy_bytes
from aiordma.endpoint.config import COPIED_BYTES, ConnectionConfig
from aiordma.endpoint.link import Link, lent, memory_log
from aiordma.endpoint.outcome import Outcome, stalled_error
from aiordma.endpoint.receiving import Window
from aiordma.endpoint.wire import (
    CHECKSUM,
    MOST_PIECES,
    PIECE,
    RENDEZVOUS,
    FrameKind,
    Hello,
    protocol_error,
)
from aiordma.errors import ConnectionLostError, MessageTooLargeError, RdmaTimeoutError
from aiordma.link.buffers import sum_of
from aiordma.link.ending import Ending
from aiordma.logs import log_of
from aiordma.loop import background
from aiordma.loop.credits import Credits
from aiordma.loop.empty import EMPTY
from aiordma.loop.limit import Limit
from aiordma.loop.timers import Timer, call_later, now
from aiordma.loop.wait_line import WaitLine
from aiordma.memory.large_memory import DEREGISTER_S, Turn
from aiordma.memory.lent import LentPart
from aiordma.memory.pool import room_of
from aiordma.requests.place import COPY_STEP
from aiordma.verbs.enums import Access
from aiordma.verbs.mr import INLINE_BYTES, MemoryRegion, is_unpinnable

__all__ = ["Exposer", "Goodbye", "Sender"]

_log = log_of("connection")
#: A buffer of fewer bytes among several is copied: to register it would take longer.
_LEAST_PIECE = 1 << 16
#: Seconds for completions that the peer's disconnection has overtaken.
_OVERTAKEN_S = 1.0


class Sender:
    """The sending side of one connection."""

    __slots__ = (
        "_config", "_failure", "_flushers", "_held", "_link", "_listening", "_settled", "_state",
        "_timer",
    )  # fmt: skip

    def __init__(self, link: Link, config: ConnectionConfig) -> None:
        self._link = link
        self._config = config
        self._state: MessageState = link.state
        self._state.eager_size = config.eager_size
        self._state.watched = config.stall_timeout_s is None
        self._timer: Timer | None = None
        # With each task the number of the send that it waits for: sends complete in order.
        self._flushers: deque[tuple[int, asyncio.Future[None]]] = EMPTY
        self._failure: Callable[[], BaseException] | None = None
        self._held = False
        self._settled = False  # no further send is going to complete with success
        self._listening = False

    def attend(self) -> None:
        """Fit the state to the waiting tasks: may C send, and do completed sends wake the loop?"""
        state = self._state
        state.blocked = self._held or self._failure is not None
        lacking = state.lacks_slot or bool(state.slot_awaited and state.queued)
        state.slot_awaited = lacking
        state.flush_at = self._flushers[0][0] if self._flushers else 0
        waiting = bool(self._flushers or (not state.dead and (lacking or state.has_pending)))
        if waiting != self._listening:
            self._listening = waiting
            if waiting:
                self._link.listen()
            else:
                self._link.completions.unlisten()

    # Room

    async def _send(
        self, kind: FrameKind, data: memoryview | bytes, argument: int, imm: int | None
    ) -> None:
        """Send one frame, in turn; returns when its bytes are copied."""
        self.require_open()
        state = self._state
        lacks_slot = not (state.queued or state.n_free) and state.credits > 0
        if lacks_slot and not (state.grows and self._more()):
            # Completed sends wake no loop: some may be in the queue.
            self._link.completions.sweep()
            self.require_open()
            if not state.n_free:
                self._more()
        self._watch()
        sent = state.stand_in_line(kind, data, argument, imm)
        if isinstance(sent, Waiting):
            if self._failure is not None:  # since the first look: slots were asked for
                sent.close()
                raise self._failure()
            self.attend()
            sent = await sent
        self.check(sent)

    def room(self) -> None:
        """Have tasks in line resumed, if there is room for them; a task may be running."""
        if self._state.lacks_slot:
            self._more()
        if self._state.has_room:
            self._link.loop.call_soon(self._state, EVENT_ROOM)
        self.attend()

    def _watch(self) -> None:
        """Bound the waits: a timer for all in line, of which the first is due first."""
        if not self._state.watched:
            assert self._config.stall_timeout_s is not None
            self._wake_in(self._config.stall_timeout_s)

    def _wake_in(self, seconds: float) -> None:
        self._timer = call_later(self._link.loop, seconds, self._end_stalled)
        self._state.watched = True

    def _end_stalled(self) -> None:
        self._state.watched = False
        limit = self._config.stall_timeout_s
        assert limit is not None
        left = self._state.end_waits(lambda: stalled_error(limit), limit)
        if left is not None:
            self._wake_in(left)

    def _more(self) -> bool:
        """Get more slots; whether a slot is free."""
        arena = self._link.slots.send
        before = arena.count
        slots = list(arena.grow(self.room))
        if arena.count != before:
            self._link.fit()  # the keys of the slots, before a send can have one
            self._link.note("has %d slots to send", arena.count, log=memory_log)
        for slot in slots:
            self._state.give_slot(slot)
        return bool(self._state.n_free)

    def _give(self, slot: int) -> None:
        """Take a free data slot; give it, or others, to the pool if connections wait there."""
        arena = self._link.slots.send
        if arena.leaving(slot):
            arena.hand_in(slot)
            self._link.fit()
            return
        self._state.give_slot(slot)
        if arena.spare and not self._state.queued:
            for leaving in arena.shrink():
                if self._state.withdraw_slot(leaving):
                    arena.hand_in(leaving)
            self._link.fit()

    def on_sent(self, slot: int) -> None:
        """Take a completed send that C has left to Python, because slots are leaving."""
        self._give(slot)
        self._state.completed += 1
        self.room()
        self.sent()

    # Sending

    def require_open(self) -> None:
        """Raise the exception of the end if this side sends no more messages."""
        if self._failure is not None:
            raise self._failure()

    def check(self, code: int) -> None:
        """Raise the exception of the end if `code` is the errno of a post, which ends it."""
        if code > 0:
            self._link.check(code)
            self.require_open()

    async def data(self, payload: memoryview, imm: int | None) -> None:
        """Send one message that fits into a slot; returns when its bytes are copied."""
        await self._send(FrameKind.DATA, payload, payload.nbytes, imm)

    def in_fragments(self, parts: list[memoryview], size: int, imm: int | None) -> bool:
        """Send a message in fragments, if more slots are all that it lacks; whether it was sent."""
        state = self._state
        frames = -(-size // state.eager_size)
        if (
            not state.grows
            or state.blocked
            or state.queued
            or state.large_waiting
            or size > state.fragmented_size
            or state.credits < frames
        ):
            return False
        while (free := state.n_free) < frames:
            if not self._more() or state.n_free == free:
                return False
        code = state.send_pieces(parts, imm)
        self.check(code)
        return code >= 0

    async def rendezvous(self, head: bytes, imm: int | None, length: int) -> None:
        """Announce a large message."""
        await self._send(FrameKind.RENDEZVOUS, head, length, imm)

    def control(self, kind: FrameKind, argument: int = 0, flags: int = 0) -> None:
        """Send a frame without data as soon as a control slot is free; never waits."""
        self._link.check(self._state.send_control(kind, argument, flags))
        if self._state.has_pending:
            self.attend()

    # End

    def sent(self) -> None:
        """End the waits for messages that have reached the peer's adapter."""
        self._end_flush(self._state.completed)

    def _end_flush(self, completed: int) -> None:
        while self._flushers and self._flushers[0][0] <= completed:
            flusher = self._flushers.popleft()[1]
            if not flusher.done():
                flusher.set_result(None)
        self.attend()

    async def flush_all(self) -> None:
        """As `flush`, with the frames without data that still wait for a slot."""
        while self._state.has_pending and not (self._state.dead or self._link.closed):
            await self.flush()
        if self._state.has_pending:  # they will never be sent
            self.require_open()
        await self.flush()

    async def flush(self, number: int | None = None) -> None:
        """Wait until all messages sent before this call have reached the peer's adapter.

        Args:
            number: Wait for so many sends only, counted from the first.

        Raises:
            BaseException: The connection is over, and some have not, as far as is known; the
                function of `fail` makes the exception.
        """
        state = self._state
        if number is None:
            number = state.sent
        if state.completed < number and not self._settled:
            await self._flusher(number)
        if state.completed < number:
            self.require_open()

    def _flusher(self, number: int) -> asyncio.Future[None]:
        """A future that ends when so many sends have reached the peer's adapter, or never will."""
        flusher: asyncio.Future[None] = self._link.loop.create_future()
        if self._flushers is EMPTY:
            self._flushers = deque()
        self._flushers.append((number, flusher))
        self.attend()
        return flusher

    def arriving(self) -> asyncio.Future[None] | None:
        """A future that ends when all posted messages have reached the peer's adapter.

        None if they have, or never will.  As `flush`, of a connection that is over, too.
        """
        number = self._state.sent - self._state.flushed
        if self._held or self._state.completed >= number:
            return None
        return self._flusher(number)

    def hold(self) -> None:
        """Have sends wait: the adapter has failed, and the reason is not known yet."""
        self._held = True
        self._state.drop()
        if self._state.dead:
            self.settle()
        self.attend()

    def fail(self, failure: Callable[[], BaseException]) -> None:
        """The connection is over: sends raise the exception that `failure` makes.

        So do flushes of what has not arrived, from `settle` on.
        """
        self._state.dead = True
        self._state.drop()
        self.refuse(failure)
        if self._held:
            self.settle()

    def settle(self) -> None:
        """No further send is going to complete with success, or it is not waited for."""
        self._settled = True
        self._end_flush(self._state.sent)

    def refuse(self, failure: Callable[[], BaseException]) -> None:
        """Have sends raise the exception that `failure` makes; posted messages go on."""
        self._failure = failure
        if self._timer is not None:
            self._timer.cancel()
        self._state.end_waits(failure, 0)
        self.attend()


class Goodbye:
    """The last messages of one connection.

    Args:
        link: The adapter's side.
        config: Times.
        outcome: Whether the connection is over.
        sender: Sends END.
        ending: The end that this is a part of.

    Attributes:
        said: The number of sends before END; None: it was not said yet.
    """

    __slots__ = ("_aborted", "_config", "_ending", "_link", "_outcome", "_sender", "_task", "said")

    def __init__(
        self,
        link: Link,
        config: ConnectionConfig,
        outcome: Outcome,
        sender: Sender,
        ending: Ending,
    ) -> None:
        self._link = link
        self._config = config
        self._outcome = outcome
        self._sender = sender
        self._ending = ending
        self._aborted = False
        self.said: int | None = None
        self._task: asyncio.Task[None] | None = None

    def abort(self) -> bool:
        """Give up END, but let sent messages arrive; whether END was about to be sent."""
        self._aborted = True
        self._ending.wake()
        return self._task is not None and not self._task.done()

    async def leave(self, drained: Callable[[], Awaitable[None]], over: Callable[[], None]) -> bool:
        """As in `LastSteps`; a disconnection follows in any case.

        Args:
            drained: Waits until the peer has read all large messages.
            over: Fails the calls that still wait: no message follows any more.
        """
        if self._outcome.cause is None and not self._ending.left:
            await self._say(drained)
        elif not self._aborted:
            await self._arrived(_OVERTAKEN_S)
        over()
        if self._aborted:
            await self.linger()
        self._link.end()
        return True

    async def _say(self, drained: Callable[[], Awaitable[None]]) -> None:
        ending = self._ending
        say_end = functools.partial(self._say_end, drained)
        goodbye = self._task = background.start(self._link.loop, say_end)
        if goodbye is None:
            return
        goodbye.add_done_callback(ending.wake)
        try:
            while not (goodbye.done() or ending.left or self._aborted):
                await ending.event()
                self._aborted |= ending.canceled
        finally:
            goodbye.cancel()
            self._task = None  # the exception of a canceled task has frames that have this object

    async def _say_end(self, drained: Callable[[], Awaitable[None]]) -> None:
        try:
            with Limit(self._config.close_timeout_s, "the goodbye"):
                await self.say_end(drained)
        except Exception as exc:
            self._link.note("closes without the peer's confirmation: %r", exc)

    async def say_end(self, drained: Callable[[], Awaitable[None]]) -> None:
        """Send END behind all messages, once; returns when everything has arrived.

        A peer that has closed in good order has no use for END, so that it may be missing.

        Raises:
            ConnectionLostError: The connection is lost, and not everything has arrived, as far as
                is known.

        Cancellation: END may not be sent yet.
        """
        await drained()
        if self.said is None:
            await self._sender.flush_all()
        if self.said is None and not self._config.raw:
            self.said = self._link.state.sent
            self._sender.control(FrameKind.END)
        try:
            await self._sender.flush_all()
        except ConnectionLostError:
            if not self._outcome.left:
                raise
            await self._sender.flush(self.said)

    async def deliver(self) -> None:
        """Wait until sent messages have arrived: the loop is about to be closed."""
        if self._ending.begun:
            await self._ending.wait()
        else:
            await self.linger()

    async def linger(self) -> None:
        """Wait until posted messages have arrived, for a bounded time."""
        if not await self._arrived(self._config.close_timeout_s, unless=lambda: self._ending.left):
            _log.info("%s: what was sent has not arrived", self._link.peer_name())

    async def _arrived(self, seconds: float, unless: Callable[[], bool] = lambda: False) -> bool:
        """Wait until posted messages have arrived, or never will; False after so many seconds."""
        end = now() + seconds
        while self._link.can_send and not unless():
            arriving = self._sender.arriving()
            if arriving is None:
                break
            arriving.add_done_callback(self._ending.wake)
            if not await self._ending.event(end - now()):
                return False
        return True


#: Memory that the peer reads: registered for a message, or a part of a `Memory`.
Readable: TypeAlias = MemoryRegion | LentPart
#: Opens a part of a `Memory` to the peer.
Opening: TypeAlias = Callable[[], Awaitable[LentPart]]


class _Piece(NamedTuple):
    """A piece of a message, in memory that the peer reads.

    Attributes:
        region: The memory; Readable.
        length: Bytes of the piece, from the start of the memory.
        pooled: Whether the memory is of the pool, and has a copy.
    """

    region: Any
    length: int
    pooled: bool


class _Exposure(NamedTuple):
    pieces: list[_Piece]
    done: asyncio.Future[None]
    turn: Turn


class _Run(NamedTuple):
    """The buffers of which a piece is made.

    Attributes:
        parts: The only buffer, which the peer reads where it lies; or those that are copied.
        length: Their bytes.
        copied: Whether they are copied.
    """

    parts: list[memoryview]
    length: int
    copied: bool

    @property
    def room(self) -> int:
        """Bytes of memory that are registered for it."""
        return room_of(self.length) if self.is_pooled else self.length

    @property
    def is_pooled(self) -> bool:
        """Whether the copy is in memory of the pool."""
        return self.copied and self.length <= COPIED_BYTES


def _runs(parts: list[memoryview]) -> list[_Run]:
    """The buffers of a large message: each large buffer alone, and those between them together."""
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
                await asyncio.sleep(0)  # each copy holds up the loop
                held = 0
            copy_bytes(into[start : start + len(data)], data)
            start += len(data)
            held += len(data)


class Exposer:
    """The sending side of large messages.

    Attributes:
        limit: Bytes of the largest message that the peer takes.
        sums: Whether the peer has asked for checksums.
        most_pieces: Pieces of memory in which a message may lie; 1: the peer knows no pieces.
        places: Exposures that may be open at a time.
        window: Those of them that are free.
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
        """Exposures that are open."""
        return len(self._exposures)

    async def send(
        self, parts: list[memoryview], size: int, imm: int | None, opening: Opening | None = None
    ) -> None:
        """Send a message that does not fit into a slot; returns when the peer has read all of it.

        Args:
            parts: Its bytes, one part behind the other.
            size: Their number.
            imm: The program's number.
            opening: Opens the memory of the only part, which is registered already.

        Raises:
            MessageTooLargeError: The peer takes no message of this size; nothing was sent.
            OSError: The buffer cannot be registered.
            ConnectionLostError, ResourceClosedError: The connection is over.
            TimeoutError: The peer took nothing for `config.stall_timeout_s`.

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
        # The message has arrived, whatever a deregistration says, or how long it takes.
        self._link.state.messages_sent += 1
        self._link.state.bytes_sent += size
        if size > INLINE_BYTES:
            with contextlib.suppress(OSError, MemoryError), Limit(DEREGISTER_S):
                for region in regions:
                    await region.wait_closed()

    def check_size(self, size: int) -> None:
        """Raise MessageTooLargeError if the peer takes no message of this size."""
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
            del error  # its traceback has this frame: a cycle

    async def _exposed(
        self, parts: list[memoryview], size: int, imm: int | None, opening: Opening | None
    ) -> list[Readable]:
        """Wait until the peer has read a message; the memory that is being deregistered."""
        state = self._link.state
        state.large_waiting += 1  # a later message does not go past it in fragments
        try:
            if not self._order.try_acquire():
                await self._order.acquire()
            try:
                exposure = await self._announced(parts, size, imm, opening)
            finally:
                self._order.release()
        finally:
            state.large_waiting -= 1
        own = [each.region for each in exposure.pieces if not each.pooled]
        done = exposure.done
        try:
            await done
        finally:
            del done, exposure  # a cycle: the traceback of its exception has this frame
            # They are deregistered when they are not pinned any more: with DONE, or with the queue
            # pair.
            for region in own:
                region.close()
        return own

    def _plan(self, parts: list[memoryview], size: int) -> list[_Run]:
        """The pieces of a message, as few as the peer can be told."""
        if size <= COPIED_BYTES:
            return [_Run(parts, size, copied=True)]
        runs = _runs(parts) if len(parts) > 1 else [_Run(parts, size, copied=False)]
        return runs if len(runs) <= self.most_pieces else [_Run(parts, size, copied=True)]

    async def _announced(
        self, parts: list[memoryview], size: int, imm: int | None, opening: Opening | None
    ) -> _Exposure:
        """Expose a message, and announce it; a single one at a time, so that they keep their order.

        Memory of more than 1 MiB is registered in a thread: a later message would be ready first.
        """
        if not self.window.try_acquire():
            if self.places < self._most:
                self._widen()
            await self.window.acquire()
        runs = self._plan(parts, size)
        room = 0 if opening else sum(run.room for run in runs)
        try:
            turn = await self._link.buffers.memory.turn(room, self)
        except BaseException:
            self.window.release()
            raise
        pieces: list[_Piece] = []
        try:
            for run in runs:
                await self._add(pieces, run, opening)
            number = self._open(pieces, turn)
        except BaseException:
            for each in pieces:
                if each.pooled:
                    self._link.buffers.outgoing.give(each.region)
                else:
                    each.region.close()
            self._over(turn)
            raise
        exposure = self._exposures[number]
        try:
            await self._sender.rendezvous(await self._head(number, pieces), imm, size)
        except BaseException:
            # Not announced; but the peer may have the key of a buffer from an earlier message.
            self._withdraw(number, keep=False)
            for each in pieces:
                if not each.pooled:
                    each.region.close()
            raise
        return exposure

    async def _add(self, pieces: list[_Piece], run: _Run, opening: Opening | None) -> None:
        """Register a piece of a message, or memory for the copy of it."""
        region: Readable
        copied = run.copied
        if run.is_pooled:
            region = await self._link.buffers.outgoing.take(run.length)
        elif opening is not None:
            region = await opening()
        elif copied:
            region = await self._registered(run.length, run.length)
        else:
            try:
                region = await self._registered(run.length, lent(run.parts[0]))
            except OSError as exc:
                if not is_unpinnable(exc):
                    raise
                self._link.note("copies a large message: %s", exc, log=memory_log)
                copied = True
                region = await self._registered(run.length, run.length)
        pieces.append(_Piece(region, run.length, run.is_pooled))
        if copied:
            await _copy(run.parts, region.view)

    async def _registered(self, size: int, memory: Any) -> MemoryRegion:
        """Register memory that the peer reads: a buffer, or fresh memory of so many bytes."""
        return await self._link.buffers.memory.registered(
            size, lambda: self._link.register(memory, Access.REMOTE_READ)
        )

    def _open(self, pieces: list[_Piece], turn: Turn) -> int:
        """Have the peer read the pieces; returns the number of the exposure.

        Raises:
            BaseException: The connection was closed meanwhile; nothing is open.
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
        self._exposures[number] = _Exposure(pieces, self._link.loop.create_future(), turn)
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
        """Take the peer's numbers; before the first send."""
        self.limit = hello.max_message_kib * 1024
        self.sums = hello.asks_checksums
        if hello.takes_pieces:
            room = self._link.state.eager_size - RENDEZVOUS.size - CHECKSUM.size
            self.most_pieces = min(MOST_PIECES, 1 + max(0, room) // PIECE.size)
        self._most = min(self._config.rendezvous_window, hello.rendezvous_window)
        self.places = min(self._most, self._receives.answers)
        if self.places != self.window.free:
            self.window = Credits(self.places)

    def _widen(self) -> None:
        """Have more exposures at a time, as far as there are receives for their answers."""
        places = min(self._most, self._receives.expect(self._most, self._widen))
        if places > self.places:
            more, self.places = places - self.places, places
            self.window.release(more)

    async def drained(self) -> None:
        """Wait until no exposure is open."""
        while self._exposures:
            await self._drainers.wait()

    def _wake_drainers(self) -> None:
        if self._drainers.places and not self._exposures:
            self._drainers.grant_all(None)

    def _withdraw(self, number: int, *, keep: bool = True) -> None:
        exposure = self._exposures.pop(number, None)
        if exposure is None:
            # The connection broke meanwhile: the link unpins the region when the queue pair is
            # gone, and its pool is closed.
            return
        buffers = self._link.buffers
        for each in exposure.pieces:
            buffers.unpin(each.region)
            if each.pooled:  # any other is closed by the task that sends
                (buffers.outgoing.give if keep else buffers.outgoing.drop)(each.region)
        self._over(exposure.turn)
        self._wake_drainers()

    def _over(self, turn: Turn) -> None:
        """End a message's turn, and its place among the exposures."""
        self._link.buffers.memory.over(turn)
        self.window.release()

    def on_done(self, number: int, flags: int) -> None:
        """Take the peer's DONE: it has read a message."""
        exposure = self._exposures.get(number)
        if exposure is None or flags:
            why = "not open" if exposure is None else f"flags {flags:#x}"
            self._link.fail(protocol_error(f"the peer answered exchange {number}: {why}"))
            return
        self._withdraw(number)
        if not exposure.done.done():
            exposure.done.set_result(None)

    def refuse(self, failure: Callable[[], BaseException]) -> None:
        """Have calls that wait for their turn raise the exception that `failure` makes."""
        self._order.fail(failure)
        self.window.fail(failure)
        self._link.buffers.memory.refuse(self, failure)

    def fail(self, failure: Callable[[], BaseException]) -> None:
        """Have all calls raise the exception that `failure` makes: the connection is over."""
        self.refuse(failure)
        for number in list(self._exposures):
            exposure = self._exposures.pop(number)
            self._link.buffers.memory.over(exposure.turn)
            if not exposure.done.done():
                exposure.done.set_exception(failure())
                exposure.done.exception()
        self._wake_drainers()
