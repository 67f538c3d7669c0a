"""Receiver: messages on their way to the program, and tasks that wait for them.

Theory of operation
    Every message of the peer arrives in a slot, and waits in a ring in the order of arrival; both
    are C's (`MessageState`).  The message becomes an object when the program asks for it, and its
    slot is free when the program has released it.  The slot is then posted again, and only after
    that the peer gets a credit for it: a receive is posted for each credit.

    A large message has a place in the ring from its announcement on; the message itself is made
    when it was fetched (`endpoint.large`), and waits here.

    A program may keep messages as long as it likes.  Once it holds half of the window, further
    messages are copied on delivery, and their slots are free at once.  Messages that the program
    has not taken stay in their slots, so that a slow program slows its peer down.

    No message is ever bound to a task that waits, so that a canceled `recv()` loses nothing.  The
    first task that waits is resumed by the drain that brought the message (`Parked`); others stand
    in line behind it, and as many are resumed at once as there are messages for.

    A task in `recv_into` stands in the same line.  It copies a message out of the slots or the
    landing, without an object.  A large message that was not begun it takes for itself: the READs
    go to the program's buffer (`Fetches.read_into`), and meanwhile no other task gets a message.
    The message stays in the ring until all of it is there, so that a canceled task leaves it to the
    next.

    Credits, and the frames that carry them to the peer, are the protocol's (`_core/message.c`).
    `Window` is the policy: the window begins small, grows when the peer has used up its credits,
    and shrinks when other connections wait for slots and this connection has more than its share.
    A connection with slots of its own grows at once, so that the peer can send `recv_depth`
    messages ahead; the member of a pool grows when its program has released a message.

    A slot may leave, instead of being posted again, only if the adapter still has a receive for
    each credit without it.  That is always the case for the slot of a data message: with the
    message a credit has gone, too.  The window shrinks by credits that are not given to the peer
    again, never by a credit that the peer has.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from aiordma._core import Message, MessageState
from aiordma.endpoint.config import (
    CONTROL_SLOTS,
    COPIED_BYTES,
    MIN_WINDOW,
    ConnectionConfig,
)
from aiordma.endpoint.link import Link, memory_log
from aiordma.endpoint.outcome import unserved_error
from aiordma.errors import MessageTooLargeError
from aiordma.loop.empty import EMPTY
from aiordma.loop.wait_line import WaitLine
from aiordma.memory.arena import Arena
from aiordma.memory.byte_budget import AHEAD
from aiordma.requests.exchange import Exchange
from aiordma.requests.place import COPY_STEP

__all__ = ["Large", "MemoryShare", "Receiver", "Window"]

#: Size of the place in line of a task that has memory for the message.
_INTO = 0


class Window:
    """The receive slots of one connection."""

    __slots__ = ("_config", "_link", "_state")

    def __init__(self, link: Link, config: ConnectionConfig) -> None:
        self._link = link
        self._config = config
        self._state: MessageState = link.state

    @property
    def _recv(self) -> Arena:
        return self._link.slots.recv

    @property
    def size(self) -> int:
        """Data messages for which there are slots; those that are leaving do not count."""
        return self._link.slots.counts[0] - self._state.control

    def back(self, slot: int) -> None:
        """Post a free slot that C has left to Python, or return it to the pool."""
        state = self._state
        if self._recv.leaving(slot) and state.posted >= state.unused + state.control:
            self._recv.hand_in(slot)
            self._link.fit()
        else:
            self._post((slot,))

    def take_announcements(self, announce: Callable[[int, bytes, int | None], None]) -> None:
        """Call `announce` for each large message that the peer has announced, and post its slot."""
        state = self._state
        while state.large and (large := state.next_large(self._config.receives)) is not None:
            length, imm, body, slot = large
            try:
                announce(length, body, imm)
            finally:
                code = state.back_now(slot)
                if code < 0:
                    self.back(slot)
                else:
                    self._link.check(code)

    def adapt(self) -> None:
        """Fit the window to the needs of the peer and of the pool; a message was released.

        Messages that the program keeps take at most half of the window.
        """
        arena, state = self._recv, self._state
        if not state.unused:
            self.grow()
        elif (spare := arena.spare) and self.size - spare >= max(MIN_WINDOW, 2 * state.held):
            # Then all slots are posted, or hold messages, and `shrink` finds none that is free.
            self._post(state.take_unposted())
            arena.shrink()
            self._fit()

    def _post(self, slots: Iterable[int]) -> None:
        slots = list(slots)
        if slots:
            self._link.post_recv(slots)
            self._state.posted += len(slots)
            self._link.check(self._state.credit())

    def grow(self) -> None:
        """Get more slots, if the peer has used up its credits."""
        if not self._state.unused and self.size < self._config.recv_depth:
            self._step(self.grow)

    def fit_fragments(self, size: int) -> None:
        """Get slots for messages of so many bytes, of which the peer has had to announce one."""
        if self._state.grows and size <= min(self._config.rendezvous_threshold, COPIED_BYTES):
            frames = -(-size // self._config.eager_size)
            while self.size < min(2 * frames, self._config.recv_depth) and self._step(self.grow):
                pass

    def expect(self, answers: int, again: Callable[[], None]) -> int:
        """Get receives for answers to large messages.

        Args:
            answers: Number of them.
            again: Called when another call may get more.

        Returns:
            For how many answers there are receives.
        """
        lacking = answers - self.answers
        if lacking > 0:
            self._step(again, lacking)
        return self.answers

    @property
    def answers(self) -> int:
        """Answers to large messages for which there are receives."""
        return self._state.control - CONTROL_SLOTS

    def _step(self, again: Callable[[], None], answers: int = 0) -> int:
        """Post some more slots, up to `answers` of them for such; return how many."""
        arena, state = self._recv, self._state
        before = arena.count
        slots = list(arena.grow(again))
        if arena.count != before:
            # Beyond the window there are only receives for answers.
            answers = max(answers, self.size - self._config.recv_depth)
            state.control += min(answers, len(slots))
            state.grown = True
            self._fit()
            self._link.note("has %d slots to receive", arena.count, log=memory_log)
        self._post(slots)
        return len(slots)

    def _fit(self) -> None:
        """Set the new number of slots, and their keys, in the state."""
        self._recv.enough = min(
            self._config.receives, self._config.recv_depth + self._state.control
        )
        self._state.size(self.size)
        self._link.fit()


class MemoryShare:
    """A large message's share of the budgets.

    Args:
        room: Its bytes.

    Attributes:
        part: The part of the budgets that it is of.
    """

    __slots__ = ("part", "room")

    def __init__(self, room: int) -> None:
        self.room: int = room
        self.part: int = AHEAD


class Large:
    """The place of a large message of the peer, from its announcement on.

    Args:
        length: Its bytes.
        lands: Whether it may be read into memory of the program.

    Attributes:
        message: None while it is being fetched.
        waits: Whether its memory has not been chosen yet.
        taken: Whether a task of `recv_into` is filling a buffer of the program with it.
        share: Its share of the budgets, until the program has it; None: it has none.
    """

    __slots__ = ("lands", "length", "message", "share", "taken", "waits")

    def __init__(self, length: int, *, lands: bool = False) -> None:
        self.length: int = length
        self.lands: bool = lands
        self.message: Message | None = None
        self.share: MemoryShare | None = None
        self.waits: bool = True
        self.taken: bool = False


class Fetches(Protocol):
    """The fetcher of large messages, as the receiver sees it."""

    def on_read(self, number: int) -> None:
        """A READ of a large message has completed."""

    def taken(self, large: Large) -> None:
        """The program has taken a large message."""

    def wanted(self) -> None:
        """The program waits for a large message that is not there yet."""

    async def read_into(self, large: Large, view: memoryview) -> bool:
        """Read the next message into memory of the program; False: look again."""


class _Kept:
    """The rest of a receiver, for messages that the program has kept: the memory of the slots."""

    __slots__ = ("more_slots", "slots")

    def __init__(self, slots: memoryview, more_slots: memoryview) -> None:
        self.slots = slots
        self.more_slots = more_slots

    def slot_back(self, slot: int, exported: Message | None, kept: bool) -> None:
        """Leave the slot: it is not used any more."""

    def _posted_again(self, slot: int, code: int) -> None:
        """As `slot_back`."""


def _too_large(size: int, room: int) -> MessageTooLargeError:
    hint = "receive it with a larger buffer, or by recv()"
    text = f"the next message has {size} bytes, the buffer {room} ({hint})"
    error = MessageTooLargeError(text)
    error.hint, error.size = hint, size
    return error


class Receiver:
    """The receiving side of one connection.

    Attributes:
        window: Receive slots.
        large: Large messages that were announced and not taken, in order.
        fetcher: Fetches large messages; None before the first.
        slots: All bytes of the first slots, of which a message has its own.
        exchange: The requests, if the messages are requests.  A task of the library receives them,
            so that C leaves each receive of the program to Python, which refuses it.
        has_memory: Whether the program has memory for large messages (`recv_into`), so that they
            are not fetched ahead; until it takes a large message without.
    """

    __slots__ = (
        "_ended", "_failure", "_lingering", "_link", "_resumed", "_state", "_waiters", "exchange",
        "fetcher", "has_memory", "large", "slots", "window",
    )  # fmt: skip

    _failure: Callable[[], BaseException] | None
    _ended: Callable[[], BaseException] | None
    fetcher: Fetches | None
    exchange: Exchange | None

    def __init__(self, link: Link, config: ConnectionConfig) -> None:
        self._link = link
        self._state: MessageState = link.state
        self._waiters: WaitLine[int] = WaitLine()
        self._resumed = 0  # tasks of the line that have not looked yet: a message for each is there
        self.slots: memoryview[int] = link.slots.received
        self._lingering: list[tuple[Message, int, bool]] = []
        self.large: deque[Large] = EMPTY
        self._failure = self._ended = self.fetcher = self.exchange = None
        self.has_memory: bool = False
        self.window: Window = Window(link, config)
        self._state.receiver = self

    @property
    def more_slots(self) -> memoryview:
        """All bytes of the slots that have come since."""
        return self._link.slots.more_received

    # From the adapter

    def on_arrival(self) -> None:
        """Resume tasks in line for messages that have arrived; C had no task to resume."""
        if self._waiters.places:
            self.wake()
            self._link.loop.call_soon(self._give_credit)
            return
        self._state.waiting = False
        # The program may be busy for long, with a send that waits, for instance, and take nothing:
        # the peer, which has no credit left, must be able to send what there is room for.
        if self._state.due <= 1:
            self._link.loop.call_soon(self._give_credit)

    def _give_credit(self) -> None:
        """Give credits to the peer that no answer of the program has taken along."""
        if not self._link.closed:
            self._link.check(self._state.error or self._state.credit())

    def announced(self, large: Large) -> None:
        """Note a large message that has got its place in the ring."""
        if self.large is EMPTY:
            self.large = deque()
        self.large.append(large)

    def wake(self) -> None:
        """Resume as many tasks as there are messages that can be taken."""
        if not self._ready or self._state.parked.wake_soon():
            return
        # No message behind a large message is taken before it.
        count = 1 if self._state.large else self._state.arrived
        while self._resumed < count and self._waiters.grant(1):
            self._resumed += 1

    @property
    def _ready(self) -> bool:
        """Whether there is a message for the program."""
        first = self._state.peek()
        return first is not None and (first[0] is not None or self._is_here())

    def _is_here(self) -> bool:
        """Whether a task can take the first large message, or have it read."""
        if not self.large or self.large[0].taken:
            return False
        large = self.large[0]
        return large.message is not None or (large.waits and large.lands and self.has_memory_next)

    @property
    def has_memory_next(self) -> bool:
        """Whether the first task in line has memory for a large message."""
        return not self._state.parked.waiting and self._waiters.next_size == _INTO

    @property
    def asks_memory(self) -> bool:
        """Whether the task that looks next is to tell whether it has memory."""
        return self.has_memory and (self._resumed > 0 or self.has_memory_next)

    def is_next(self, large: Large) -> bool:
        """Whether the program gets this message next."""
        first = self._state.peek()
        is_large = first is not None and first[0] is None
        return is_large and bool(self.large) and self.large[0] is large

    @property
    def is_awaited(self) -> bool:
        """Whether a task waits for a message."""
        return bool(self._waiters.places or self._state.parked.waiting)

    # Slots

    def slot_back(self, slot: int, exported: Message | None, kept: bool) -> None:
        """Free the slot of a message that was released or collected; in any thread.

        Args:
            slot: Its number.
            exported: The message, if its buffer is still exported; the slot is free when the last
                export has ended.
            kept: Whether the message was counted in `MessageState.held`.
        """
        self._link.in_loop(lambda: self._slot_free(exported, slot, kept))

    def _slot_free(self, exported: Message | None, slot: int, kept: bool) -> None:
        if exported is not None and exported._exports:
            self._lingering.append((exported, slot, kept))
            self._state.python = True
            return
        self._state.held -= kept
        if not self._link.closed and (code := self._state.back(slot)):
            self._posted_again(slot, code)

    def _posted_again(self, slot: int, code: int) -> None:
        """Do the work that `MessageState.back` leaves to Python."""
        if code > 0:
            self._link.check(code)
        elif not self._link.closed:  # nor in a forked child: the slots are its parent's
            self.window.adapt()
            self.window.back(slot)

    def _retry_lingering(self) -> None:
        lingering, self._lingering = self._lingering, []
        for exported, slot, kept in lingering:
            self._slot_free(exported, slot, kept)

    # To the program

    def take(self) -> Message | None:
        """The next message, in order; None if there is none yet.

        Raises:
            BaseException: There will be none; the function of `end` or `fail` makes the exception.
        """
        if self._lingering:
            self._retry_lingering()
        state = self._state
        first = state.peek()
        if first is not None and first[3]:
            self._require_requests()
        message: Message | None = None
        if first is not None and first[0] is None:
            message = self._take_large()
        elif first is not None and (message := self._take_small()) is not None:
            self._taken(len(message))
        state.python = self._looks_closer
        if message is None:
            self._none(is_last=first is None)
            self._want()
        return message

    @property
    def _looks_closer(self) -> bool:
        """Whether Python is to look at the next message, too."""
        if self._state.requested and self.exchange is None:
            return True
        return bool(self._over or self._lingering or self._waiters.places)

    def _require_requests(self) -> None:
        """Raise unless the program takes requests: the next message is the first of them.

        Raises:
            ConnectionLostError, ResourceClosedError: It receives messages; the connection ends.
        """
        if self.exchange is not None:
            return
        error: BaseException = unserved_error()
        if self._failure is None:
            self._link.fail(error)
        raise error if self._failure is None else self._failure()

    def _taken(self, size: int) -> None:
        """Count a message, and resume the tasks for those behind it."""
        self._state.messages_received += 1
        self._state.bytes_received += size
        if self._waiters.places:
            self.left()

    def _none(self, *, is_last: bool) -> None:
        """There is no message to take yet.

        Raises:
            BaseException: As `take`.
        """
        if self._ended is not None and is_last:
            raise self._ended()
        if self._failure is not None:
            raise self._failure()
        self._state.waiting = True
        self._give_credit()  # a credit may have been put off
        if self._failure is not None:  # the post of the credit has failed
            raise self._failure()

    def _take_small(self) -> Message | None:
        state = self._state
        message = state.take()
        # None: the collector has run a function that took it, or aborted the connection.
        if message is None or not message._in_slot:
            return message
        if state.held < state.half:
            message._kept = True
            state.held += 1
            return message
        try:
            message._detach()
        except MemoryError as exc:
            self._link.fail(exc)  # without it the order would have a gap
            raise
        return message

    def _take_large(self) -> Message | None:
        message = self.large[0].message if self.large and not self.large[0].taken else None
        if message is not None:
            self.has_memory = False
            large = self.large.popleft()
            self._state.skip()
            if self.fetcher is not None:
                self.fetcher.taken(large)
            self._taken(large.length)  # not of the message: an answer in its place is empty
        return message

    def _want(self) -> None:
        """Have a large message fetched if it is the first that the program waits for."""
        if self.large and self.fetcher is not None:
            self.fetcher.wanted()

    def _looked(self, resumed: int) -> None:
        """Count off a task of the line that looks now, or was canceled before."""
        self._resumed -= resumed

    def left(self) -> None:
        """Resume the next task: a task has left its wait by an exception, perhaps in its turn.

        Or it has taken a message, and a large message is the first only since.
        """
        self.wake()
        if self.is_awaited and not self._resumed and not self._ready:
            self._want()

    def reserve(self, exchange: Exchange) -> Exchange:
        """Reserve the messages for requests.

        Raises:
            RuntimeError: A task waits for a message.
        """
        if self.is_awaited or (self.large and self.large[0].taken):
            msg = "a task waits in recv(): a connection carries messages or requests, not both"
            raise RuntimeError(msg)
        self.exchange = exchange
        self._state.python = True
        return exchange

    async def recv(self) -> Message:
        """The next message, in order.  Cancellation: nothing is lost."""
        state, waiters = self._state, self._waiters
        while (message := self.take()) is None:
            try:
                if waiters.places or state.parked.waiting:
                    state.python = True
                    self._looked(await waiters.wait(self._looked))
                else:
                    await state.parked
            except BaseException:
                self.left()
                raise
        return message

    async def recv_into(self, view: memoryview) -> int:
        """Take the next message into a buffer of the program; returns its bytes.

        Raises:
            MessageTooLargeError: It has more bytes than the buffer; it stays the next.

        Cancellation: nothing is lost, and nothing is written to the buffer afterwards.
        """
        self.has_memory = True
        stands_behind = self.is_awaited or self._resumed > 0
        while True:
            try:
                found = None if stands_behind else self._take_into(view)
                stands_behind = False
                if isinstance(found, int):
                    return found
                if found is None:
                    self._state.python = True
                    self._looked(await self._waiters.wait(self._looked, _INTO))
                elif await self._fill(found, view):
                    return found.length
            except BaseException:
                self.left()
                raise

    def _take_into(self, view: memoryview) -> int | Large | None:
        """The bytes of the message that was copied; a large message to fill the buffer with; None.

        Raises:
            MessageTooLargeError: The message has more.
            BaseException: As `take`.
        """
        if self._lingering:
            self._retry_lingering()
        state = self._state
        first = state.peek()
        if first is not None and first[3]:
            self._require_requests()
        large = self.large[0] if first is not None and first[0] is None and self.large else None
        size = state.take_into(view) if large is None else large.length
        if size is not None and size > len(view):
            raise _too_large(size, len(view))
        if large is None and size is not None:
            self._taken(size)
        state.python = self._looks_closer
        if large is None and size is not None:
            return size
        if large is not None and self._can_fill(large):
            return large
        self._none(is_last=first is None)
        self._want()
        return None

    def _can_fill(self, large: Large) -> bool:
        return not large.taken and (large.message is not None or (large.waits and large.lands))

    async def _fill(self, large: Large, view: memoryview) -> bool:
        """Fill a buffer of the program with a large message, which is next; False: look again."""
        message = large.message
        if message is None:
            return self.fetcher is not None and await self.fetcher.read_into(large, view)
        large.taken = True
        try:
            with memoryview(message) as data:
                for start in range(0, large.length, COPY_STEP):
                    if start:
                        await asyncio.sleep(0)  # each copy holds up the loop
                    if not self.is_next(large):
                        return False
                    end = min(start + COPY_STEP, large.length)
                    view[start:end] = data[start:end]
        finally:
            large.taken = False
        self.took(large)
        if self.fetcher is not None:
            self.fetcher.taken(large)
        message.release()
        return True

    def took(self, large: Large) -> None:
        """The program has got this message, which was next, in its own memory."""
        assert self.large[0] is large
        self.large.popleft()
        self._state.skip()
        self._taken(large.length)
        self.left()  # also of a task that came meanwhile, and is not in line

    # Called by C for the task that reads requests, as for others it calls the connection.
    _recv_in_python = recv
    _left = left

    # End

    @property
    def _over(self) -> bool:
        """Whether no further message will arrive."""
        return self._ended is not None or self._failure is not None

    @property
    def ended(self) -> bool:
        """Whether the peer has sent END, and all of its messages are here."""
        return self._ended is not None and all(large.message is not None for large in self.large)

    def end(self, ended: Callable[[], BaseException]) -> None:
        """Have `recv` raise `ended()` after the messages in the ring: the peer has sent END."""
        # After a close of this side, which has dropped messages, `recv` does not promise that all
        # were received.
        self._ended = ended if self._failure is None else self._failure
        self._state.python = True
        self._wake_all()

    def fail(self, failure: Callable[[], BaseException]) -> None:
        """Have `recv` raise `failure()` after the messages that are here: there is no more."""
        self._failure = failure
        self._state.python = self._state.discarding = True
        here = 0
        while here < len(self.large) and self.large[here].message is not None:
            here += 1
        if here < len(self.large):
            while len(self.large) > here:
                self.large.pop()
            self._ended = None
        # The messages behind a large message that will not come are lost with it, for the order.
        self._state.cut(here)
        self._wake_all()

    def part(self) -> None:
        """Drop the references to the connection: no message will arrive any more.

        A message that the program has kept refers to the memory of the slots, and not to this.
        """
        self._state.receiver = _Kept(self.slots, self.more_slots)
        self.fetcher = self.exchange = None

    def _wake_all(self) -> None:
        self._state.parked.wake_soon()
        self._waiters.grant_all(0)

    def drop_all(self) -> None:
        """Free the slots of messages that the program will not take; the peer may go on sending."""
        while (first := self._state.peek()) is not None:
            self._state.skip()
            if first[0] is not None:
                self._slot_free(None, first[0], kept=False)
        self.large = EMPTY
        self._ended = None
