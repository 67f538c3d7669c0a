"""Receiver: messages on their way to the program, and tasks that wait for them.

Theory of operation
    Every message of the peer lands in a slot, and waits in a ring in the order of arrival; both are
    C's (`MessageState`).  It becomes an object when the program asks for it.  A data slot is given
    back when the program has released the message; it is posted again, and only then is its credit
    owed to the peer, so that the peer never sends into nothing.

    A large message has a place in the ring from its announcement on; the message itself is made
    when it was fetched (`endpoint.large`), and waits here.

    A program may keep messages as long as it likes: once it holds half of the window, further
    messages are copied on delivery and their slots go back at once.  Messages that it has not
    taken stay where they are, and the peer feels that it is slow.

    No message is ever bound to a task that waits, so that a canceled `recv()` loses nothing.  The
    first task that waits is resumed by the drain that brought the message (`Parked`); others stand
    in line behind it, and as many are resumed at once as there are messages for.

    Credits, and when the peer is told of them, are the protocol's (`_core/message.c`).  `Window` is
    the policy of a connection that shares slots with others: the window grows when the peer has
    used up its credits, and shrinks when connections of the pool wait for slots and this connection
    has more than its share.

    A slot may leave, instead of being posted again, only if the adapter still has a receive for
    each credit without it.  That is always the case for the slot of a data message: with the
    message a credit has gone, too.  The window shrinks by credits that are not given back, never by
    taking any away.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

from aiordma._core import FRAME_SIZE, Message, MessageState
from aiordma.endpoint.config import MIN_WINDOW, ConnectionConfig
from aiordma.endpoint.link import Link
from aiordma.loop.empty import EMPTY
from aiordma.loop.wait_line import WaitLine
from aiordma.memory.arena import Arena

__all__ = ["Large", "Receiver", "Window"]


class Window:
    """The receive slots of one connection.

    Args:
        link: Has them.
    """

    __slots__ = ("_link", "_recv", "_state")

    def __init__(self, link: Link) -> None:
        self._link = link
        self._recv = link.slots.recv
        self._state: MessageState = link.state

    @property
    def size(self) -> int:
        """Data messages for which there are slots; those that are leaving do not count."""
        return self._recv.count - self._state.control

    def back(self, slot: int) -> None:
        """A slot is free, and C has left it: to the adapter again, or out of service."""
        state = self._state
        if self._recv.leaving(slot) and state.posted >= state.unused + state.control:
            self._recv.hand_in(slot)
            self._link.fit()
        else:
            self._post((slot,))

    def adapt(self) -> None:
        """A message was released: fit the window to the needs of the peer and of the others.

        Messages that the program keeps take at most half of the window.
        """
        arena, state = self._recv, self._state
        if not state.unused:
            self._grow()
        elif (spare := arena.spare) and self.size - spare >= max(MIN_WINDOW, 2 * state.held):
            # Then all slots are posted, or hold messages: none is to be handed in yet.
            self._post(state.take_unposted())
            arena.shrink()
            self._fit()

    def _post(self, slots: Iterable[int]) -> None:
        slots = list(slots)
        if slots:
            self._link.post_recv(slots)
            self._state.posted += len(slots)
            self._link.check(self._state.credit())

    def _grow(self) -> None:
        if self._state.unused:
            return
        arena = self._recv
        before = arena.count
        slots = list(arena.grow(self._grow))
        if arena.count != before:
            self._fit()
        self._post(slots)

    def _fit(self) -> None:
        """The number of slots has changed."""
        self._state.size(self.size)
        self._link.fit()


class Large:
    """A large message of the peer, from its announcement on.

    Attributes:
        message: None while it is being fetched.
    """

    __slots__ = ("message",)

    def __init__(self) -> None:
        self.message: Message | None = None


class Fetches(Protocol):
    """The fetcher of large messages, as the receiver sees it."""

    def taken(self) -> None:
        """The program has taken a large message."""

    def wanted(self) -> None:
        """The program waits for a large message that is not there yet."""


class _Kept:
    """The rest of a receiver: the memory of messages that the program has kept."""

    __slots__ = ("_view",)

    def __init__(self, view: Callable[[int, int], memoryview]) -> None:
        self._view = view

    def slot_view(self, slot: int, length: int) -> memoryview:
        """The bytes of a message."""
        return self._view(slot, length)

    def slot_back(self, slot: int, exported: Message | None, kept: bool) -> None:
        """The slot of a message is free, and is not used any more."""

    def _posted_again(self, slot: int, code: int) -> None:
        """It is not posted again."""


def _view_of(arena: Arena, head: int, slot: int, length: int) -> memoryview:
    start = slot * arena.slot_size + head
    return arena.view[start : start + length]


class Receiver:
    """Gives messages to the program.

    Args:
        link: The adapter's side.
        config: Sizes.

    Attributes:
        window: Receive slots.
        large: Large messages that were announced and not taken, in order.
        fetcher: Fetches them; None before the first.
    """

    __slots__ = (
        "_ended", "_failure", "_lingering", "_link", "_resumed", "_state", "_view", "_waiters",
        "fetcher", "large", "window",
    )  # fmt: skip

    def __init__(self, link: Link, config: ConnectionConfig) -> None:
        self._link = link
        self._state: MessageState = link.state
        self._waiters = WaitLine[int]()
        self._resumed = 0  # tasks of the line that have not looked yet: a message for each is there
        head = 0 if config.raw else FRAME_SIZE
        self._view = functools.partial(_view_of, link.slots.recv, head)
        self._failure: Callable[[], BaseException] | None = None
        self._ended: Callable[[], BaseException] | None = None
        self._lingering: list[tuple[Message, int, bool]] = []
        self.large: deque[Large] = EMPTY
        self.fetcher: Fetches | None = None
        self.window = Window(link)
        self._state.receiver = self

    # From the adapter

    def on_arrival(self) -> None:
        """Messages have arrived, and no task was parked that C could resume."""
        if self._waiters.places:
            self.wake()
            self._link.loop.call_soon(self._give_credit)
        else:
            self._state.waiting = False

    def _give_credit(self) -> None:
        """The program had its chance to answer, and so to take a credit along."""
        if not self._link.closed:
            self._link.check(self._state.error or self._state.credit())

    def announced(self, large: Large) -> None:
        """A large message has its place in the ring."""
        if self.large is EMPTY:
            self.large = deque()
        self.large.append(large)

    def wake(self) -> None:
        """Messages may be there: have tasks look, as many as there is something for."""
        if not self._ready or self._state.parked.wake_soon():
            return
        # Behind a large message nothing may be taken before it.
        count = 1 if self._state.large else self._state.arrived
        while self._resumed < count and self._waiters.grant(1):
            self._resumed += 1

    @property
    def _ready(self) -> bool:
        """Whether there is a message for the program."""
        first = self._state.peek()
        return first is not None and (first[0] is not None or self._is_here())

    def _is_here(self) -> bool:
        return bool(self.large) and self.large[0].message is not None

    def is_next(self, large: Large) -> bool:
        """Whether this is the message that the program gets next."""
        first = self._state.peek()
        return (
            bool(self.large) and self.large[0] is large and first is not None and first[0] is None
        )

    @property
    def is_awaited(self) -> bool:
        """Whether a task waits for a message."""
        return bool(self._waiters.places or self._state.parked.waiting)

    # Slots

    def slot_view(self, slot: int, length: int) -> memoryview:
        """The bytes of a message."""
        return self._view(slot, length)

    def slot_back(self, slot: int, exported: Message | None, kept: bool) -> None:
        """A message was released, or its last reference went, in whatever thread.

        Args:
            slot: Where it lay.
            exported: The message, if its buffer is still exported; its slot is free when the last
                export has ended.
            kept: Whether it was one of those that the program has.
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
        if code < 0:
            self.window.adapt()
            self.window.back(slot)
        else:
            self._link.check(code)

    def _retry_lingering(self) -> None:
        lingering, self._lingering = self._lingering, []
        for exported, slot, kept in lingering:
            self._slot_free(exported, slot, kept)

    # To the program

    def take(self) -> Message | None:
        """The next message, in order; None if there is none yet.

        Raises:
            BaseException: There will be none; the function that `end` or `fail` got makes it.
        """
        if self._lingering:
            self._retry_lingering()
        state = self._state
        first = state.peek()
        message: Message | None = None
        if first is not None:
            slot, length, imm = first
            message = self._take_large() if slot is None else self._take_small(slot, length, imm)
        if message is not None:
            state.messages_received += 1
            state.bytes_received += len(message)
            if self._waiters.places:
                self.wake()
                if self.is_awaited and not self._ready:
                    self._want()  # it was not the first when the next task began to wait
        state.python = bool(self._over or self._lingering or self._waiters.places)
        if message is None:
            if self._ended is not None and first is None:
                raise self._ended()
            if self._failure is not None:
                raise self._failure()
            state.waiting = True
            self._give_credit()  # which may have been put off
            if self._failure is not None:  # since
                raise self._failure()
            self._want()
        return message

    def _take_small(self, slot: int, length: int, imm: int | None) -> Message:
        state = self._state
        message = state.message(slot, length, imm)
        state.skip()
        if state.held < self.window.size // 2:
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
        message = self.large[0].message if self.large else None
        if message is not None:
            self.large.popleft()
            self._state.skip()
            if self.fetcher is not None:
                self.fetcher.taken()
        return message

    def _want(self) -> None:
        """The program waits; for a large message, perhaps, that has to be fetched first."""
        if self.large and self.fetcher is not None:
            self.fetcher.wanted()

    def wait(self) -> Awaitable[None]:
        """Wait for `take` to be worth a try; `left` after an exception."""
        if self._waiters.places or self._state.parked.waiting:
            self._state.python = True
            return self._stand_in_line()
        return self._state.parked

    async def _stand_in_line(self) -> None:
        self._looked(await self._waiters.wait(self._looked))

    def _looked(self, resumed: int) -> None:
        """A task was resumed, by `wake` or at the end, and looks, or was thrown out before."""
        self._resumed -= resumed

    def left(self) -> None:
        """A task was thrown out of its wait: perhaps it was its turn."""
        self.wake()

    async def recv(self) -> Message:
        """The next message, in order.  Cancellation: nothing is lost."""
        while (message := self.take()) is None:
            try:
                await self.wait()
            except BaseException:
                self.left()
                raise
        return message

    # End

    @property
    def _over(self) -> bool:
        """There will be no further messages."""
        return self._ended is not None or self._failure is not None

    @property
    def ended(self) -> bool:
        """Whether the peer has ended its stream, and all of it is here."""
        return self._ended is not None and all(large.message is not None for large in self.large)

    def end(self, ended: Callable[[], BaseException]) -> None:
        """The peer has ended its stream: after the messages in the ring `recv` raises `ended()`."""
        self._ended = ended
        self._state.python = True
        self._wake_all()

    def fail(self, failure: Callable[[], BaseException]) -> None:
        """Broken or closed: after the messages that are there `recv` raises `failure()`."""
        self._failure = failure
        self._state.python = self._state.discarding = True
        here = 0
        while here < len(self.large) and self.large[here].message is not None:
            here += 1
        if here < len(self.large):
            while len(self.large) > here:
                self.large.pop()
            self._ended = None
        # In front of a large message that will not come, the order would have a gap.
        self._state.cut(here)
        self._wake_all()

    def part(self) -> None:
        """No message will come any more; drop the references to the connection.

        A message that the program has kept leads to the memory that it is in, and not here.
        """
        self._state.receiver = _Kept(self._view)
        self.fetcher = None

    def _wake_all(self) -> None:
        self._state.parked.wake_soon()
        self._waiters.grant_all(0)

    def drop_all(self) -> None:
        """Closed by the program: forget what it did not take; the peer may go on sending."""
        while (first := self._state.peek()) is not None:
            self._state.skip()
            if first[0] is not None:
                self._slot_free(None, first[0], kept=False)
        self.large = EMPTY
        self._ended = None
