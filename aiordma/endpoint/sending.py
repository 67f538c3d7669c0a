"""Sender: tasks that wait for room to send, and those that wait until all has arrived.

Theory of operation
    A data message needs a free send slot and a credit, that is, a receive that the peer is known
    to have posted.  Where both are there and no task waits, C sends (`MessageState.send`).
    Otherwise tasks stand in line: both are reserved together, first come first served, at the
    moment they become free; a canceled task hands its slot to the next.  Slots of a pool come
    when none is free, and go when others need them.

    The adapter wakes the loop for completed sends only while something here waits for them.

    `Goodbye` sends the last messages, and waits until they have arrived.  If the connection is
    closed in good order, the peer reads the large messages that it was told of, and END follows the
    last message.  After an abort what was sent may arrive, ABORT included, if the peer is there to
    hear it.  Each wait has a bound.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Protocol

from aiordma._core import MessageState
from aiordma.endpoint.config import ConnectionConfig
from aiordma.endpoint.link import Link
from aiordma.endpoint.wire import FrameKind
from aiordma.link.ending import Ending
from aiordma.loop import background
from aiordma.loop.empty import EMPTY
from aiordma.loop.limit import Limit
from aiordma.loop.timers import now
from aiordma.loop.wait_line import WaitLine

__all__ = ["Goodbye", "Sender"]

_log = logging.getLogger("aiordma")


class Sender:
    """The sending side of one connection.

    Args:
        link: The adapter's side.
        config: Times.
    """

    __slots__ = (
        "_config", "_failure", "_flushers", "_granted", "_held", "_link", "_listening", "_state",
        "_waiters",
    )  # fmt: skip

    def __init__(self, link: Link, config: ConnectionConfig) -> None:
        self._link = link
        self._config = config
        self._state: MessageState = link.state
        self._state.eager_size = config.eager_size
        self._waiters = WaitLine[int]()
        self._granted = 0  # tasks that have a slot and have not resumed: others wait behind them
        # Sends complete in the order of the posts, so that counting is enough.
        self._flushers: deque[tuple[int, asyncio.Future[None]]] = EMPTY
        self._failure: Callable[[], BaseException] | None = None
        self._held = False
        self._listening = False

    def attend(self) -> None:
        """Tell C whether it may send, and the adapter whether completed sends matter."""
        state, waiters = self._state, bool(self._waiters.places)
        state.blocked = self._is_queued or self._held or self._failure is not None
        state.flush_at = self._flushers[0][0] if self._flushers else 0
        waiting = bool(self._flushers or (not state.dead and (waiters or state.unsaid)))
        if waiting != self._listening:
            self._listening = waiting
            if waiting:
                self._link.completions.listen()
            else:
                self._link.completions.unlisten()

    # Room

    @property
    def _is_queued(self) -> bool:
        return bool(self._waiters.places or self._granted)

    def _reserved(self) -> int | None:
        return None if self._is_queued or self._held else self._state.reserve()

    async def _slot(self) -> int:
        if self._failure is not None:
            raise self._failure()
        slot = self._reserved()
        if slot is None and not self._is_queued:
            # Completed sends wake no task, so that some may be there.
            self._link.completions.sweep()
            slot = self._reserved()
            if slot is None and not self._state.n_free and self._more():
                slot = self._reserved()
        if slot is not None:
            return slot
        if self._failure is not None:
            raise self._failure()
        granted = self._waiters.wait(self._give_grant)
        self.attend()
        try:
            async with asyncio.timeout(self._config.stall_timeout_s):
                slot = await granted
        except BaseException:
            self.room()
            raise
        self._granted -= 1
        self.room()
        return slot

    def _give_grant(self, slot: int) -> None:
        self._granted -= 1
        self._give(slot)
        self._state.credits += 1

    def room(self) -> None:
        """Credits or slots have come: hand them to the tasks in line."""
        state, waiters = self._state, self._waiters
        while waiters.next_size and not self._held and state.credits > 0:
            if not (state.n_free or self._more()):
                break
            if (slot := state.reserve()) is not None:
                self._granted += waiters.grant(slot)
        self.attend()

    def _more(self) -> bool:
        """Get more slots, if there are any for this connection."""
        arena = self._link.slots.send
        before = arena.count
        for slot in arena.grow(self.room):
            self._state.give_slot(slot)
        if arena.count != before:
            self._link.fit()
        return bool(self._state.n_free)

    def _give(self, slot: int) -> None:
        """A data slot is free; it, or others, may be wanted elsewhere."""
        arena = self._link.slots.send
        if arena.leaving(slot):
            arena.hand_in(slot)
            self._link.fit()
            return
        self._state.give_slot(slot)
        if arena.spare and not self._waiters.places:
            for leaving in arena.shrink():
                if self._state.withdraw_slot(leaving):
                    arena.hand_in(leaving)
            self._link.fit()

    def on_sent(self, slot: int) -> None:
        """The adapter is done with a data slot, which C has left: some of a pool are leaving."""
        self._give(slot)
        self._state.completed += 1
        self.room()
        self.sent()

    # Sending

    async def data(self, payload: memoryview, imm: int | None) -> None:
        """Send one message that fits into a slot; returns when its bytes are copied."""
        slot = await self._slot()
        state = self._state
        self._link.check(state.send_from(slot, FrameKind.DATA, payload, payload.nbytes, imm))
        state.messages_sent += 1
        state.bytes_sent += payload.nbytes

    async def rendezvous(self, head: bytes, imm: int | None, length: int) -> None:
        """Announce a large message."""
        slot = await self._slot()
        self._link.check(self._state.send_from(slot, FrameKind.RENDEZVOUS, head, length, imm))

    def control(self, kind: FrameKind, argument: int = 0, flags: int = 0) -> None:
        """Send a frame without data as soon as a control slot is free; never waits."""
        self._link.check(self._state.say(kind, argument, flags))
        if self._state.unsaid:
            self.attend()

    # End

    def sent(self) -> None:
        """Sent messages have reached the peer's adapter: end the waits for it."""
        self._end_flush(self._state.completed)

    def _end_flush(self, completed: int) -> None:
        while self._flushers and self._flushers[0][0] <= completed:
            flusher = self._flushers.popleft()[1]
            if not flusher.done():
                flusher.set_result(None)
        self.attend()

    async def flush_all(self) -> None:
        """Like `flush`, with the frames without data that still wait for a slot."""
        await self.flush()
        while self._state.unsaid and not self._state.dead:
            await self.flush()
        await self.flush()

    async def flush(self) -> None:
        """Wait until all that was sent before this call has reached the peer's adapter."""
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
        """Ends when what was posted has reached the peer's adapter; None if it has, or never will.

        As `flush`, of a connection that is over, too.
        """
        if self._held or self._state.completed >= self._state.sent:
            return None
        return self._flusher()

    def hold(self) -> None:
        """The adapter takes nothing any more, and why is not known yet: sends wait for that.

        A message that it flushes has completed, too, but has not reached the peer.
        """
        self._held = True
        self._state.drop()
        self.attend()

    def fail(self, failure: Callable[[], BaseException]) -> None:
        """The connection is over: everything raises what `failure` makes, waiters now."""
        self._state.dead = True
        self._state.drop()
        self.refuse(failure)
        self._end_flush(self._state.sent)

    def refuse(self, failure: Callable[[], BaseException]) -> None:
        """No more data: sends raise the exception that `failure` makes; posted messages go on."""
        self._failure = failure
        self._waiters.fail(failure)
        self.attend()


class Leaving(Protocol):
    """A connection, as its end sees it."""

    @property
    def _alive(self) -> bool:
        """Whether it is neither broken nor aborted."""

    def _end(self) -> None:
        """Nothing more will be sent: fail what still waits."""


class Exposures(Protocol):
    """The large messages that the peer should still read, as the end of a connection sees them."""

    async def drained(self) -> None:
        """Wait until the peer has read all of them."""


class Goodbye:
    """The last messages of one connection.

    Args:
        link: The adapter's side.
        config: Times.
        sender: Says END.
        exposer: Large messages that the peer should still read.
        ending: The end that this is a part of.
    """

    __slots__ = ("_aborted", "_config", "_ending", "_exposer", "_link", "_sender", "_task")

    def __init__(
        self,
        link: Link,
        config: ConnectionConfig,
        sender: Sender,
        exposer: Exposures,
        ending: Ending,
    ) -> None:
        self._link = link
        self._config = config
        self._sender = sender
        self._exposer = exposer
        self._ending = ending
        self._aborted = False
        self._task: asyncio.Task[None] | None = None

    def abort(self) -> bool:
        """Give up END, but let sent messages arrive; return whether END was about to be sent."""
        self._aborted = True
        self._ending.wake()
        return self._task is not None and not self._task.done()

    async def leave(self, connection: Leaving) -> bool:
        """As in `LastSteps`; a disconnection follows in any case."""
        if connection._alive and not self._ending.left:
            await self._say()
        connection._end()
        if self._aborted:
            await self.linger()
        self._link.end()
        return True

    async def _say(self) -> None:
        ending = self._ending
        goodbye = self._task = background.start(self._link.loop, self._say_end)
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

    async def _say_end(self) -> None:
        try:
            with Limit(self._config.close_timeout_s, "the goodbye"):
                await self._exposer.drained()
                await self._sender.flush_all()
                if not self._config.raw:
                    self._sender.control(FrameKind.END)
                    await self._sender.flush_all()
        except Exception as exc:
            _log.debug("closing without the peer's confirmation: %r", exc)

    async def deliver(self) -> None:
        """Let arrive what was sent: the loop has canceled all of its tasks, and will be closed."""
        if self._ending.begun:
            await self._ending.wait()
        else:
            await self.linger()

    async def linger(self) -> None:
        """Let arrive what the adapter has been given."""
        end = now() + self._config.close_timeout_s
        while not self._ending.left and self._link.can_send:
            arriving = self._sender.arriving()
            if arriving is None:
                return
            arriving.add_done_callback(self._ending.wake)
            if not await self._ending.event(end - now()):
                _log.info("%s: what was sent has not arrived", self._link.peer_name())
                return
