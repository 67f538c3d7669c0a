"""Sender: slots and credits of the sending side, in order of arrival.

Theory of operation
    A data message needs a free send slot and a credit, that is, a receive that the peer is known
    to have posted.  Both are granted together, first come first served, at the moment they become
    free; a canceled waiter hands its grant to the next.  Slots of a pool come when none is free,
    and go when others need them.

    Control messages (CREDIT, DONE, PING, PONG, END) need neither: they have slots of their own on
    both sides, enough for all that can be under way (docs/wire.md).  Every message carries the
    credits that are owed to the peer, so a CREDIT of its own is rare.

    The numbers are in `MessageState`, and so is the plain case, which C does: nobody
    waits, there is room, and the message has no immediate.  This file is for the others.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

from aiordma._core import WANT_SENT
from aiordma.endpoint.config import ConnectionConfig
from aiordma.endpoint.link import Link
from aiordma.endpoint.wire import FRAME, FRAME_SIZE, HAS_IMM, FrameKind
from aiordma.loop.empty import EMPTY
from aiordma.loop.wait_line import WaitLine

__all__ = ["Sender"]

_MAX_CREDITS = 0xFFFF


class Owed(Protocol):
    """What the sender needs of the receiving side's window."""

    @property
    def due(self) -> bool:
        """Whether enough is owed for a CREDIT frame."""

    def take(self, most: int, *, alone: bool) -> int:
        """Credits for a frame that is about to be sent; `alone` for a CREDIT frame."""


class Sender:
    """Posts messages and waits for room.

    Args:
        link: The adapter's side.
        config: Sizes.
        window: Knows the credits that are owed to the peer.
    """

    __slots__ = (
        "_c",
        "_config",
        "_control",
        "_control_free",
        "_dead",
        "_failure",
        "_flushers",
        "_held",
        "_link",
        "_listening",
        "_waiters",
        "_window",
    )  # fmt: skip

    def __init__(
        self,
        link: Link,
        config: ConnectionConfig,
        window: Owed,
    ) -> None:
        self._link = link
        self._config = config
        self._window = window
        self._c = link.state
        controls = 0 if link.control is None else link.control.count
        self._control_free = list(range(config.send_depth, config.send_depth + controls))
        self._control: deque[tuple[FrameKind, int, int]] = EMPTY
        self._waiters = WaitLine[int]()
        # Sends complete in the order of the posts, so that counting is enough.
        self._flushers: deque[tuple[int, asyncio.Future[None]]] = EMPTY
        self._failure: Callable[[], BaseException] | None = None
        self._dead = False
        self._held = False
        self._listening = False
        # Until the peer's depth is known nothing may be sent.
        self.credits = 0
        self.eager_size = config.eager_size

    @property
    def credits(self) -> int:
        """Messages for which the peer has posted receives."""
        return int(self._c.credits)

    @credits.setter
    def credits(self, value: int) -> None:
        self._c.credits = value

    @property
    def eager_size(self) -> int:
        """Bytes of the largest message that goes through slots."""
        return int(self._c.eager_size)

    @eager_size.setter
    def eager_size(self, value: int) -> None:
        self._c.eager_size = value

    def _plain(self) -> None:
        """Tell C whether it may send, and the adapter whether completed sends matter."""
        c = self._c
        c.blocked = bool(self._waiters.places) or self._held or self._failure is not None
        wanted = bool(self._flushers) or (
            not self._dead and bool(self._waiters.places or self._control)
        )
        if wanted:
            c.want |= WANT_SENT
        else:
            c.want &= ~WANT_SENT
        if wanted != self._listening:
            self._listening = wanted
            if wanted:
                self._link.listen()
            else:
                self._link.unlisten()

    # Room

    def _try_slot(self, *, more: bool = False) -> int | None:
        if self._waiters.places or self._held or self.credits <= 0:
            return None
        if not (self._c.n_free or (more and self._more())):
            return None
        self.credits -= 1
        return self._c.take_slot()

    async def _slot(self) -> int:
        if self._failure is not None:
            raise self._failure()
        slot = self._try_slot()
        if slot is None and not self._waiters.places:
            # Completed sends wake nobody, so that some may be there.
            self._link.sweep()
            slot = self._try_slot(more=True)
        if slot is not None:
            return slot
        if self._failure is not None:
            raise self._failure()
        granted = self._waiters.wait(self._give_grant)
        self._plain()
        try:
            async with asyncio.timeout(self._config.stall_timeout_s):
                return await granted
        except BaseException:
            self._wake()
            raise

    def _give_grant(self, slot: int) -> None:
        self._give(slot)
        self.credits += 1

    def _wake(self) -> None:
        waiters = self._waiters
        while waiters.next_size and not self._held and self.credits > 0:
            if not (self._c.n_free or self._more()):
                break
            self.credits -= 1
            waiters.grant(self._c.take_slot())
        self._plain()

    def _more(self) -> bool:
        """Get more slots, if there are any for this connection."""
        arena = self._link.send
        before = arena.count
        for slot in arena.grow(self._wake):
            self._c.give_slot(slot)
        if arena.count != before:
            self._link.fit()
        return bool(self._c.n_free)

    def _give(self, slot: int) -> None:
        """A data slot is free; it, or others, may be wanted elsewhere."""
        arena = self._link.send
        if arena.leaving(slot):
            arena.hand_in(slot)
            self._link.fit()
            return
        self._c.give_slot(slot)
        if arena.spare and not self._waiters.places:
            for leaving in arena.shrink():
                if self._c.withdraw_slot(leaving):
                    arena.hand_in(leaving)
            self._link.fit()

    def grant(self, credits: int) -> None:
        """The peer has posted this many receives again."""
        self.credits += credits
        if self._waiters.places:
            self._wake()

    # Sending

    async def data(self, payload: memoryview, imm: int | None) -> None:
        """Send one message that fits into a slot; returns when its bytes are copied."""
        if self._failure is not None:
            raise self._failure()
        slot = self._try_slot()
        if slot is None:
            slot = await self._slot()
        self._post(slot, FrameKind.DATA, payload, imm, payload.nbytes)

    async def rendezvous(self, head: bytes, imm: int | None, length: int) -> None:
        """Announce a large message."""
        slot = await self._slot()
        self._post(slot, FrameKind.RENDEZVOUS, memoryview(head), imm, length)

    def _post(
        self, slot: int, kind: FrameKind, payload: memoryview, imm: int | None, argument: int
    ) -> None:
        arena = self._link.send
        start = slot * arena.slot_size
        size = payload.nbytes
        if not self._config.raw:
            flags = 0 if imm is None else HAS_IMM
            owed = self._window.take(_MAX_CREDITS, alone=False)
            FRAME.pack_into(arena.view, start, kind, flags, owed, imm or 0, argument)
            start += FRAME_SIZE
            arena.view[start : start + size] = payload
            size += FRAME_SIZE
        else:
            arena.view[start : start + size] = payload
        self._c.sent += 1
        self._link.post_send(slot, size, imm if self._config.raw else None)

    def control(self, kind: FrameKind, argument: int = 0, flags: int = 0) -> None:
        """Send a message without data as soon as a control slot is free; never waits.

        The queue is bounded by what the protocol lets be under way: DONE by the window, PING and
        END by one each; PONG and CREDIT have calls of their own.
        """
        if self._control is EMPTY:
            self._control = deque()
        self._control.append((kind, flags, argument))
        self._pump_control()

    def pong(self) -> None:
        """Answer a PING; a flood of them is answered as fast as the peer takes the answers."""
        if all(kind != FrameKind.PONG for kind, _, _ in self._control):
            self.control(FrameKind.PONG)

    def credit(self) -> None:
        """Enough is owed: send a CREDIT, unless another message takes it along before.

        Never queued, as it would find its credits gone.
        """
        self._pump_control()

    def _pump_control(self) -> None:
        while self._control_free and not self._dead:
            if self._control:
                frame = self._control.popleft()
                if not self._control:
                    self._control = EMPTY  # few frames ever wait
                self._post_control(*frame)
            elif self._window.due:
                self._post_control(FrameKind.CREDIT, 0, 0)
            else:
                break
        if bool(self._control) != self._listening:
            self._plain()

    def _post_control(self, kind: FrameKind, flags: int, argument: int) -> None:
        arena = self._link.control
        assert arena is not None
        slot = self._control_free.pop()
        owed = self._window.take(_MAX_CREDITS, alone=kind == FrameKind.CREDIT)
        start = (slot - self._config.send_depth) * arena.slot_size
        FRAME.pack_into(arena.view, start, kind, flags, owed, 0, argument)
        self._c.sent += 1
        self._link.post_send(slot, FRAME_SIZE)

    def on_sent(self, slot: int) -> None:
        """The adapter is done with a slot: the peer's adapter has the message."""
        if slot < self._config.send_depth:
            self._give(slot)
            if self._waiters.places:
                self._wake()
        else:
            self._control_free.append(slot)
            self._pump_control()
        self._c.completed += 1
        if self._flushers:
            self._end_flush(self._c.completed)

    # End

    def _end_flush(self, completed: int) -> None:
        while self._flushers and self._flushers[0][0] <= completed:
            flusher = self._flushers.popleft()[1]
            if not flusher.done():
                flusher.set_result(None)
        if not self._flushers:
            self._plain()

    async def flush_all(self) -> None:
        """Like `flush`, with the messages without data that still wait for a slot."""
        await self.flush()
        while self._control and not self._dead:
            await self.flush()
        await self.flush()

    async def flush(self) -> None:
        """Wait until all that was sent before this call has reached the peer's adapter."""
        if (self._c.completed < self._c.sent or self._held) and not self._dead:
            await self._flusher()
        if self._dead and self._failure is not None:
            raise self._failure()

    def _flusher(self) -> asyncio.Future[None]:
        flusher: asyncio.Future[None] = self._link.loop.create_future()
        if self._flushers is EMPTY:
            self._flushers = deque()
        self._flushers.append((self._c.sent, flusher))
        self._plain()
        return flusher

    def arriving(self) -> asyncio.Future[None] | None:
        """Ends when what was posted has reached the peer's adapter; None if it has, or never will.

        As `flush`, of a connection that is over, too.
        """
        if self._held or self._c.completed >= self._c.sent:
            return None
        return self._flusher()

    def hold(self) -> None:
        """The adapter takes nothing any more, and why is not known yet: who sends waits for it.

        A message that it flushes has completed, too, but has not reached the peer.
        """
        self._held = True
        self._plain()

    def fail(self, failure: Callable[[], BaseException]) -> None:
        """The connection is over: everything raises what `failure` makes, waiters now."""
        self._dead = True
        self._control.clear()
        self.refuse(failure)
        self._end_flush(self._c.sent)

    def refuse(self, failure: Callable[[], BaseException]) -> None:
        """No more data: sends raise what `failure` makes; what is posted goes on."""
        self._failure = failure
        self._waiters.fail(failure)
        self._plain()
