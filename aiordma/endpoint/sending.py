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

    `Goodbye` sends the last messages, and waits until they have arrived.  If the connection is
    closed in good order, the peer reads the large messages that were announced, and END follows the
    last message.  After an abort sent messages, and ABORT behind them, may arrive until the peer
    has disconnected.  Each wait has a bound.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Awaitable, Callable

from aiordma._core import EVENT_ROOM, MessageState, Waiting
from aiordma.endpoint.config import ConnectionConfig
from aiordma.endpoint.link import Link, memory_log
from aiordma.endpoint.outcome import Outcome, stalled_error
from aiordma.endpoint.wire import FrameKind
from aiordma.link.ending import Ending
from aiordma.logs import log_of
from aiordma.loop import background
from aiordma.loop.empty import EMPTY
from aiordma.loop.limit import Limit
from aiordma.loop.timers import Timer, call_later, now

__all__ = ["Goodbye", "Sender"]

_log = log_of("connection")


class Sender:
    """The sending side of one connection."""

    __slots__ = (
        "_config", "_failure", "_flushers", "_held", "_link", "_listening", "_state", "_timer",
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
                self._link.completions.listen()
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
        self._link.check(sent)

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

    async def data(self, payload: memoryview, imm: int | None) -> None:
        """Send one message that fits into a slot; returns when its bytes are copied."""
        await self._send(FrameKind.DATA, payload, payload.nbytes, imm)

    def in_fragments(self, payload: memoryview, imm: int | None) -> bool:
        """Send a message in fragments, if more slots are all that it lacks; whether it was sent."""
        state = self._state
        frames = -(-payload.nbytes // state.eager_size)
        if (
            not state.grows
            or state.blocked
            or state.queued
            or state.large_waiting
            or payload.nbytes > state.fragmented_size
            or state.credits < frames
        ):
            return False
        while (free := state.n_free) < frames:
            if not self._more() or state.n_free == free:
                return False
        code = state.send_buffer(payload, imm)
        if code > 0:
            self._link.check(code)
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
        await self.flush()

    async def flush(self) -> None:
        """Wait until all messages sent before this call have reached the peer's adapter."""
        if (self._state.completed < self._state.sent or self._held) and not self._state.dead:
            await self._flusher()
        if self._state.dead and self._failure is not None:
            raise self._failure()

    def _flusher(self) -> asyncio.Future[None]:
        flusher: asyncio.Future[None] = self._link.loop.create_future()
        if self._flushers is EMPTY:
            self._flushers = deque()
        self._flushers.append((self._state.sent, flusher))
        self.attend()
        return flusher

    def arriving(self) -> asyncio.Future[None] | None:
        """A future that ends when all posted messages have reached the peer's adapter.

        None if they have, or never will.  As `flush`, of a connection that is over, too.
        """
        if self._held or self._state.completed >= self._state.sent:
            return None
        return self._flusher()

    def hold(self) -> None:
        """Have sends and flushes wait: the adapter has failed, and the reason is not known yet.

        A flushed message has completed, too, but has not reached the peer.
        """
        self._held = True
        self._state.drop()
        self.attend()

    def fail(self, failure: Callable[[], BaseException]) -> None:
        """The connection is over: every call raises the exception that `failure` makes."""
        self._state.dead = True
        self._state.drop()
        self.refuse(failure)
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
    """

    __slots__ = ("_aborted", "_config", "_ending", "_link", "_outcome", "_said", "_sender", "_task")

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
        self._said = False  # END
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

        Raises:
            ConnectionLostError: The connection is lost.

        Cancellation: END may not be sent yet.
        """
        await drained()
        await self._sender.flush_all()
        if not (self._said or self._config.raw):
            self._said = True
            self._sender.control(FrameKind.END)
            await self._sender.flush_all()

    async def deliver(self) -> None:
        """Wait until sent messages have arrived: the loop is about to be closed."""
        if self._ending.begun:
            await self._ending.wait()
        else:
            await self.linger()

    async def linger(self) -> None:
        """Wait until posted messages have arrived, for a bounded time."""
        end = now() + self._config.close_timeout_s
        while not self._ending.left and self._link.can_send:
            arriving = self._sender.arriving()
            if arriving is None:
                return
            arriving.add_done_callback(self._ending.wake)
            if not await self._ending.event(end - now()):
                _log.info("%s: what was sent has not arrived", self._link.peer_name())
                return
