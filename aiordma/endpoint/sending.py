"""Tasks that wait for room to send, and tasks that wait until everything has arrived.

Theory of operation
    A data message needs a free send slot and a credit, which stands for a receive that the peer has
    posted.  If both are available and no task waits, C sends the message (`MessageState.send`).
    Otherwise the task waits in a line in C (`_core/line.c`), first come, first served.  The drain
    that brings slots or credits resumes as many tasks as there is room for.  A task takes its slot
    and its credit only when it runs, so nothing has to be undone if it is canceled.  If no slot is
    free, more are requested from the pool; they are returned when other connections need them.

    Completed sends wake the loop only while a task waits for them: in `flush`, or in line for a
    slot while there are credits.  Credits arrive with messages, which wake the loop in any case.

    A send that has completed successfully has reached the peer's adapter, whatever happens to the
    connection later.  So `flush` compares the number of completed sends with that of the last one
    that carries something of the program's, and raises only if some up to that one have failed or
    will never complete.  The peer's disconnection can overtake the completion of a send that the
    peer's adapter has already acknowledged; on Soft-RoCE this happened once in a few hundred times.
    So the queue pair gets a moment for it (`Goodbye`).
"""

from __future__ import annotations

import asyncio
import math
from bisect import insort
from collections.abc import Callable, Mapping
from itertools import islice
from operator import itemgetter
from typing import Protocol

from aiordma._core import EVENT_ROOM, LACKS_SLOT, MessageState, QueuedSend
from aiordma.endpoint.config import ConnectionConfig
from aiordma.endpoint.link import Link, memory_log
from aiordma.endpoint.outcome import stalled_error
from aiordma.endpoint.receiving import Receiver
from aiordma.endpoint.wire import NOTE, FrameKind
from aiordma.link.log_share import LogShare
from aiordma.loop.timers import Timer, call_later, now

__all__ = ["Sender"]

#: After so many seconds the wait of a send is worth a warning.
_LONG_S = 5.0
#: And after so many it is worth a line if the peer alone holds it up: back-pressure is no mistake.
_VERY_LONG_S = 30.0
_TOLD = LogShare("sends that wait")


class Exposed(Protocol):
    """A large message that the peer may read; `since` is when it could, in seconds of `now()`."""

    @property
    def since(self) -> float: ...


_NONE_EXPOSED: Mapping[int, Exposed] = {}


class Sender:
    """The sending side of one connection.

    Attributes:
        exposures: The large messages that the peer has not read, the oldest first; the `Exposer`
            sets this.
    """

    __slots__ = (
        "_failure", "_flushers", "_held", "_limit", "_link", "_listening", "_noted", "_received",
        "_receiver", "_settled", "_state", "_timer", "_told", "exposures",
    )  # fmt: skip

    def __init__(self, link: Link, config: ConnectionConfig, receiver: Receiver) -> None:
        self._link = link
        self._receiver = receiver
        self._state: MessageState = link.state
        self.exposures: Mapping[int, Exposed] = _NONE_EXPOSED
        limit = config.stall_timeout_s
        self._limit = math.inf if limit is None else limit
        self._told = config.raw  # it has no window that the peer's program holds up
        self._noted = False  # of the peer alone; of both sides it may be told later
        self._received = 0  # messages, when the waits were looked at last
        self._timer: Timer | None = None
        # How many sends have to complete, and the future that ends then.  Sends complete in order.
        # None before the first flush.
        self._flushers: list[tuple[int, asyncio.Future[None]]] | None = None
        self._failure: Callable[[], BaseException] | None = None
        self._held = False  # the adapter has failed, for a reason that is not known yet
        self._settled = False  # no further send will complete successfully
        self._listening = False

    def fit_listening(self) -> None:
        """Listen for completed sends if a task waits for them, and stop listening if none does."""
        waiting = self._state.await_sends(self._flushers[0][0] if self._flushers else 0)
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
        """Send one frame, waiting in line if necessary; return when its bytes are copied."""
        queued = self.enqueue(kind, data, argument, imm)
        if queued is not None:
            self.check(await queued)

    def enqueue(
        self, kind: FrameKind, data: memoryview | bytes, argument: int, imm: int | None
    ) -> QueuedSend | None:
        """Send one frame, or have it wait in line.

        Returns:
            None, or the wait in line, whose result is for `check`.
        """
        self._look_for_slot()
        self._watch()
        sent = self._state.send_in_turn(kind, data, argument, imm)
        if isinstance(sent, QueuedSend):
            return self._queued(sent)
        self.check(sent)
        return None

    def _look_for_slot(self) -> None:
        """Get a slot to send from, if the next frame lacks nothing else and there is one."""
        self.require_open()
        state = self._state
        lacks_slot = not state.queued and state.lacks == LACKS_SLOT
        if lacks_slot and not (state.grows and self._add_slots()):
            # Completions of sends do not wake the loop, so there may be some in the queue.
            self._link.completions.sweep()
            self.require_open()
            if state.lacks == LACKS_SLOT:
                self._add_slots()

    def _queued(self, waiting: QueuedSend) -> QueuedSend:
        """Note that there is one more in line."""
        if self._failure is not None:  # the connection has ended while slots were added
            waiting.close()
            raise self._failure()
        self.fit_listening()
        return waiting

    async def wait_room(self) -> None:
        """Wait in line until a frame can be sent; the next step of the task then sends it.

        It does so by `MessageState.send_first`, as other tasks may wait behind it.
        """
        self._look_for_slot()
        self._watch()
        await self._queued(self._state.wait_room())

    def send_now(self, parts: list[memoryview], size: int, imm: int | None) -> bool:
        """Send a message now or not at all, in slots that may be added for it.

        Returns:
            Whether it was sent.
        """
        self._look_for_slot()
        code = self._state.send(parts, imm)
        self.check(code)
        if code and size > self._state.eager_size:
            return self.in_fragments(parts, size, imm)
        return not code

    def room(self) -> None:
        """Have tasks in line resumed in the next iteration of the loop, if there is room."""
        state = self._state
        if state.queued and state.lacks == LACKS_SLOT:
            self._add_slots()
        if state.queued and not state.lacks:
            self._link.loop.call_soon(state, EVENT_ROOM)
        self.fit_listening()

    def _watch(self) -> None:
        """Have a timer look at the sends that wait, a single one for all of them."""
        if self._timer is None and not (self._told and self._limit == math.inf):
            self._look_in(self._limit if self._told else min(self._limit, _LONG_S))

    def _look_in(self, seconds: float) -> None:
        self._received = self._state.counters["messages_received"]
        self._timer = call_later(self._link.loop, seconds, self._look)

    def _look(self) -> None:
        """End waits of `stall_timeout_s`, and warn if this program is the one that holds them up.

        A program that sends and does not receive waits forever for a peer that does the same.  A
        peer that holds them up alone is noted.
        """
        self._timer = None
        limit = self._limit
        in_line = self._state.expire_sends(lambda: stalled_error(limit), limit)
        waits = [now() - each.since for each in islice(self.exposures.values(), 1)]
        left = math.inf
        if in_line is not None:
            waits.append(in_line)
            left = limit - in_line
        if waits and not self._told:
            longest = max(waits)
            if longest >= _LONG_S and self._nobody_receives:
                self._told = True
                self._tell(longest)
            else:  # and not later than the limit of a wait that begins now
                if longest >= _VERY_LONG_S and not self._noted:
                    self._noted = True
                    self._note(longest)
                left = min(left, limit, _LONG_S - longest if longest < _LONG_S else _LONG_S)
        if left < math.inf:
            self._look_in(left)

    @property
    def _nobody_receives(self) -> bool:
        """Whether messages of the peer have waited since the last look, and no task for them."""
        state, receiver = self._state, self._receiver
        is_same = state.counters["messages_received"] == self._received
        return bool(state.arrived) and is_same and not receiver.is_awaited

    def _tell(self, seconds: float) -> None:
        if _TOLD.may_log(self._link.peer_address()):
            count = self._state.arrived
            self._link.warn(
                "send() to %s has waited %.0f s for room, and %d message%s arrived here that "
                "nobody receives: if the peer waits in send(), too, both wait forever; receive in "
                "a task of its own",
                self._link.peer_name(), seconds, count, " has" if count == 1 else "s have",
            )  # fmt: skip

    def _note(self, seconds: float) -> None:
        if _TOLD.may_log(self._link.peer_address()):
            self._link.inform(
                "a message to %s has waited %.0f s for room: the program there receives slowly, or "
                "not at all",
                self._link.peer_name(), seconds,
            )  # fmt: skip

    def _add_slots(self) -> bool:
        """Add send slots if possible; return whether any have come."""
        arena = self._link.slots.send
        before = arena.count
        slots = list(arena.grow(self.room))
        if arena.count != before:
            self._link.fit()  # C has to know the keys before it can use the slots
            self._link.note("has %d slots to send", arena.count, log=memory_log)
        for slot in slots:
            self._state.add_send_slot(slot)
        return bool(slots)

    def _free_slot(self, slot: int) -> None:
        """Free a send slot, and return slots to the pool if other connections need them."""
        arena = self._link.slots.send
        if arena.leaving(slot):
            arena.hand_in(slot)
            self._link.fit()
            return
        self._state.add_send_slot(slot)
        if arena.spare and not self._state.queued:
            for leaving in arena.shrink():
                if self._state.remove_send_slot(leaving):
                    arena.hand_in(leaving)
            self._link.fit()

    def on_sent(self, slot: int) -> None:
        """Handle a completed send that C has left to Python, as its slot may have to leave."""
        self._free_slot(slot)
        self._state.count_returned(False, False)
        self.room()
        self.sent()

    # Sending

    def require_open(self) -> None:
        """Raise the exception of the connection's end if no more messages can be sent."""
        if self._failure is not None:
            raise self._failure()

    def check(self, code: int) -> None:
        """End the connection, and raise, if `code` is the errno of a failed post."""
        if code > 0:
            self._link.check(code)
            self.require_open()

    async def data(self, payload: memoryview, imm: int | None) -> None:
        """Send one message that fits into a slot; return when its bytes are copied."""
        await self._send(FrameKind.DATA, payload, payload.nbytes, imm)

    def in_fragments(self, parts: list[memoryview], size: int, imm: int | None) -> bool:
        """Send a message in fragments, if adding slots makes that possible.

        Returns:
            Whether it was sent.
        """
        state = self._state
        if not (state.grows and state.slots_lacking(size)):
            return False
        while state.slots_lacking(size):
            if not self._add_slots():
                return False
        code = state.send(parts, imm)
        self.check(code)
        return code >= 0

    async def rendezvous(self, head: bytes, imm: int | None, length: int) -> None:
        """Announce a large message."""
        await self._send(FrameKind.RENDEZVOUS, head, length, imm)

    async def note(self, key: int, addr: int, length: int, imm: int) -> None:
        """Tell the peer that `length` bytes were written to its memory; return as `data` does."""
        await self._send(FrameKind.NOTE, NOTE.pack(key, length), addr, imm)

    def control(self, kind: FrameKind, argument: int = 0, flags: int = 0) -> None:
        """Send a frame without data as soon as a slot for it is free, without waiting."""
        self.posted(self._state.send_control(kind, argument, flags))

    def posted(self, code: int) -> None:
        """Handle the result of posting a frame without data: an errno or 0."""
        self._link.check(code)
        if self._state.has_pending:
            self.fit_listening()

    # End

    def sent(self) -> None:
        """End the waits for messages that have reached the peer's adapter."""
        self._end_flush(self._state.completed)

    def _end_flush(self, completed: int) -> None:
        while self._flushers and self._flushers[0][0] <= completed:
            flusher = self._flushers.pop(0)[1]
            if not flusher.done():
                flusher.set_result(None)
        self.fit_listening()

    async def flush_all(self) -> None:
        """As `flush`, but also wait for frames without data that have no slot yet."""
        while self._state.has_pending and self._state.may_say:
            await self.flush()
        if self._state.has_pending:  # those will never be sent
            self.require_open()
        await self.flush()

    async def flush(self, number: int | None = None) -> None:
        """Wait until all that was sent before this call has reached the peer's adapter.

        Args:
            number: Wait only for so many sends, counted from the first of the connection.

        Raises:
            BaseException: The connection is over, and this side's adapter was not told that all of
                them have arrived; the function given to `fail` makes the exception.
        """
        state = self._state
        if number is None:
            number = state.sent
        if state.completed < number and not self._settled:
            await self._flusher(number)
        if state.completed < number:
            self.require_open()

    def _flusher(self, number: int) -> asyncio.Future[None]:
        """A future that ends when `number` sends have reached the peer's adapter, or never will."""
        flusher: asyncio.Future[None] = self._link.loop.create_future()
        if self._flushers is None:
            self._flushers = []
        insort(self._flushers, (number, flusher), key=itemgetter(0))
        self.fit_listening()
        return flusher

    def arriving(self) -> asyncio.Future[None] | None:
        """A future that ends when all posted messages have reached the peer's adapter.

        None if they have already, or never will.  Unlike `flush`, this can be used when the
        connection is over.
        """
        number = self._state.sent - self._state.flushed
        if self._held or self._state.completed >= number:
            return None
        return self._flusher(number)

    def hold(self) -> None:
        """Have sends wait, because the adapter has failed and the reason is not known yet."""
        self._held = True
        self._state.advance("HOLD")
        if not self._state.may_say:
            self.settle()
        self.fit_listening()

    def fail(self, failure: Callable[[], BaseException]) -> None:
        """Have sends raise the exception that `failure` makes, because the connection is over.

        From `settle` on, flushes raise it, too, if something has not arrived.
        """
        self._state.advance("END")
        self.refuse(failure)
        if self._held:
            self.settle()

    def settle(self) -> None:
        """End all flushes, because no further send is expected to complete successfully."""
        self._settled = True
        self._end_flush(self._state.sent)

    def refuse(self, failure: Callable[[], BaseException]) -> None:
        """Have sends raise the exception that `failure` makes; posted messages still arrive."""
        self._failure = failure
        self._state.advance("REFUSE_SENDS")
        if self._timer is not None:
            self._timer.cancel()
        self._state.expire_sends(failure, 0)
        self.fit_listening()
