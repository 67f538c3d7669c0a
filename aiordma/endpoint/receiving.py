"""Messages that have arrived, and the tasks that wait for them.

Theory of operation
    Every message of the peer arrives in a receive slot, and is entered in a ring in the order of
    arrival; both belong to C (`MessageState`).  A `Message` object is made when the program
    receives the message, and the slot is free when the program has released it.  Then the slot is
    posted again, and only after that the peer gets a credit for it, because every credit has to
    have a posted receive.

    A large message is entered in the ring when it is announced.  Its `Message` is made when it has
    been fetched (`endpoint.large`), and is kept here until it is received.

    A program may keep messages as long as it likes.  Once it keeps half of the window, further
    messages are copied when they are received, and their slots are free at once.  Messages that
    have not been received stay in their slots, so that a slow program slows its peer down.

    A message is never assigned to a waiting task, so that a canceled `recv()` loses nothing.  The
    first waiting task is resumed by the drain that brought the message (`ReceiveWakeup`).  The
    others wait in a line behind it, of which as many are resumed as there are messages.

    A task in `recv_into` waits in the same way.  C copies a message directly out of its slots or
    its landing.  A large message that nobody has begun to fetch is read into the program's buffer
    (`Fetches.read_into`), and meanwhile no other task gets a message.  It stays in the ring until
    all of it is there, so that the next task gets it if this one is canceled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from aiordma._core import Message, MessageState
from aiordma.endpoint.announced import Fetches, Large
from aiordma.endpoint.config import (
    ConnectionConfig,
)
from aiordma.endpoint.link import Link
from aiordma.endpoint.outcome import closed_error, unserved_error
from aiordma.endpoint.window import Window
from aiordma.errors import MessageTooLargeError
from aiordma.loop.wait_line import WaitLine
from aiordma.requests.exchange import Exchange
from aiordma.requests.place import COPY_STEP

__all__ = ["Receiver"]

#: The size of an entry in the line marks tasks in `recv_into`, which bring memory of their own.
_INTO = 0
#: In place of a line and a list, until a task waits behind another one, and until a large message
#: comes: most connections need neither.  Nothing is added to these.
_NOBODY: WaitLine[int] = WaitLine()
_NONE_LARGE: list[Large] = []


class _ClosedReceiver:
    """Replaces the receiver of a closed connection, for messages that the program still keeps.

    It keeps the memory of their slots alive.  When a message is released, nothing is to be done.
    """

    __slots__ = ("more_slots", "slots")

    def __init__(self, slots: Any, more_slots: memoryview) -> None:
        self.slots = slots
        self.more_slots = more_slots

    def on_arrival(self, starved: bool) -> None:
        """Do nothing: nobody receives it."""

    def slot_back(self, slot: int, exported: Message | None, kept: bool) -> None:
        """Do nothing: the slot is not used any more."""

    def _posted_again(self, slot: int, code: int) -> None:
        """Do nothing, as `slot_back`."""


def _too_large(size: int, room: int) -> MessageTooLargeError:
    hint = "receive it with a larger buffer, or by recv()"
    text = f"the next message has {size} bytes, the buffer {room} ({hint})"
    error = MessageTooLargeError(text)
    error.hint, error.size = hint, size
    return error


class Receiver:
    """The receiving side of one connection.

    Attributes:
        large: The large messages that were announced and not received yet, in order.
        fetcher: What fetches large messages; None before the first.
        slots: All bytes of the first slots, an object with the buffer protocol; a message has a
            view of its own.
        exchange: The requests, if the connection carries requests.  A task of the library then
            receives all messages.  C leaves each receive of the program to Python, which refuses
            it.
    """

    __slots__ = (
        "_config", "_ended", "_failure", "_lingering", "_link", "_resumed", "_state", "_waiters",
        "_window", "exchange", "fetcher", "large", "slots",
    )  # fmt: skip

    _failure: Callable[[], BaseException] | None
    _ended: Callable[[], BaseException] | None
    fetcher: Fetches | None
    exchange: Exchange | None

    def __init__(self, link: Link, config: ConnectionConfig) -> None:
        self._link = link
        self._state: MessageState = link.state
        self._waiters: WaitLine[int] = _NOBODY
        self._resumed = 0  # tasks of the line that were resumed for a message, and have not run yet
        self.slots: Any = link.slots.received
        self._lingering: list[tuple[Message, int, bool]] | None = None
        self.large: list[Large] = _NONE_LARGE
        self._failure = self._ended = self.fetcher = self.exchange = None
        self._window: Window | None = None
        self._config = config
        self._state.set_receiver(self)

    @property
    def window(self) -> Window:
        """The receive slots."""
        if self._window is None:
            self._window = Window(self._link, self._config)
        return self._window

    @property
    def more_slots(self) -> memoryview:
        """All bytes of the receive slots that were added since."""
        return self._link.slots.more_received

    # Called for the adapter

    def on_arrival(self, starved: bool) -> None:
        """Resume tasks in line for messages that have arrived, when none waits in C.

        Args:
            starved: Whether the peer may have no credit left, and be owed one.
        """
        if self._waiters.places:
            self.wake()
            self._link.loop.call_soon(self._send_credits)
            return
        self._state.await_arrival(False)
        # The program may be busy for a long time, for instance with a send that waits, and receive
        # nothing.  A peer that has no credit left must still be able to fill the free slots.
        if starved:
            self._link.loop.call_soon(self._send_credits)

    def _send_credits(self) -> None:
        """Send credits that are due, unless a message of the program has taken them along."""
        if not self._link.closed:
            self._link.check(self._state.credit())

    def announced(self, large: Large) -> None:
        """Note a large message, which has just been entered in the ring."""
        if self.large is _NONE_LARGE:
            self.large = []
        self.large.append(large)

    def wake(self) -> None:
        """Resume as many tasks as there are messages that can be received."""
        if self.exchange is not None:
            self._read_soon(self.exchange)
            return
        first = self._state.receive_wakeup
        if not self._ready or first.wake_soon():
            return
        # A message behind a large one cannot be received before it.  And if a task was resumed in
        # C and has not run yet, the first message is for that one.
        count = (1 if self._state.large else self._state.arrived) - first.waiting
        while self._resumed < count and self._waiters.grant(1):
            self._resumed += 1

    @property
    def _ready(self) -> bool:
        """Whether there is a message that a task can receive."""
        first = self._state.peek()
        return first is not None and (first[0] is not None or self._large_is_available())

    def _large_is_available(self) -> bool:
        """Whether a task can receive the first large message, or read it into its own memory."""
        if not self.large or self.large[0].taken:
            return False
        large = self.large[0]
        return large.message is not None or (large.waits and large.lands and self.has_memory_next)

    @property
    def has_memory_next(self) -> bool:
        """Whether the task whose turn it is, or the first in line, is in `recv_into`."""
        if self._state.receive_wakeup.waiting:
            return self._state.awaited_into
        return self._waiters.next_size == _INTO

    @property
    def has_memory(self) -> bool:
        """Whether large messages are not fetched ahead, because the program uses `recv_into`.

        False again after it has received a large message with `recv`.
        """
        return self._state.has_memory

    @property
    def asks_memory(self) -> bool:
        """Whether to leave a large message alone, because the next task may be in `recv_into`."""
        return self.has_memory and (self._resumed > 0 or self.has_memory_next)

    def is_next(self, large: Large) -> bool:
        """Whether this is the message that the program receives next."""
        first = self._state.peek()
        is_large = first is not None and first[0] is None
        return is_large and bool(self.large) and self.large[0] is large

    @property
    def is_awaited(self) -> bool:
        """Whether a task waits for a message, or the requests do."""
        if self.exchange is not None:
            return True
        return bool(self._waiters.places or self._state.receive_wakeup.waiting)

    # Slots

    def slot_back(self, slot: int, exported: Message | None, kept: bool) -> None:
        """Free the slot of a message that was released or garbage collected.  In any thread.

        Args:
            slot: The number of the slot.
            exported: The message, if its buffer is still exported.  The slot is then free when the
                last export has ended.
            kept: Whether the message was counted in `MessageState.kept`.
        """
        self._link.in_loop(lambda: self._free_slot(exported, slot, kept))

    def free_slot(self, slot: int, kept: bool = False) -> None:
        """Free the slot of a frame that took a credit, whose bytes nobody uses any more."""
        code = self._state.release_slot(slot, kept)
        if code and not self._link.closed:
            self._posted_again(slot, code)

    def _free_slot(self, exported: Message | None, slot: int, kept: bool) -> None:
        if exported is not None and exported._exports:
            if self._lingering is None:
                self._lingering = []
            self._lingering.append((exported, slot, kept))
            self._state.delegate(True)
            return
        self.free_slot(slot, kept)

    def _posted_again(self, slot: int, code: int) -> None:
        """Do what `MessageState.release_slot` leaves to Python, or handle the errno of a post."""
        if code > 0:
            self._link.check(code)
        elif not self._link.closed:  # as it is in a forked child, whose parent owns the slots
            self.window.adapt()
            self.window.back(slot)

    def _retry_lingering(self) -> None:
        lingering, self._lingering = self._lingering or (), None
        for exported, slot, kept in lingering:
            self._free_slot(exported, slot, kept)

    # For the program

    def take(self) -> Message | None:
        """Receive the next message, in order; None if there is none yet.

        Raises:
            BaseException: No message will arrive; the function given to `end` or `fail` makes the
                exception.
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
            self._resume_others()
        state.delegate(self._needs_python)
        if message is None:
            self._prepare_to_wait(ring_is_empty=first is None)
            self._fetch_first()
        return message

    @property
    def _needs_python(self) -> bool:
        """Whether the next message has to be received in Python, too."""
        if self._state.requested or self.exchange is not None:
            return True
        return bool(self._over or self._lingering or self._waiters.places or self._resumed)

    def _require_requests(self) -> None:
        """End the connection, and raise, if the program receives plain messages.

        To be called for the first message of a peer that uses the connection for requests.

        Raises:
            ConnectionLostError, ResourceClosedError: The program receives plain messages.
        """
        if self.exchange is not None:
            return
        error: BaseException = unserved_error()
        if self._failure is None:
            self._link.fail(error)
        raise error if self._failure is None else self._failure()

    def _resume_others(self) -> None:
        """Resume tasks for the messages behind the one that was just received."""
        if self._waiters.places:
            self.resume_next()

    def _prepare_to_wait(self, *, ring_is_empty: bool) -> None:
        """Have the next arrival noted, as the task is going to wait for it.

        Raises:
            BaseException: As `take`.
        """
        if self._ended is not None and ring_is_empty:
            raise self._ended()
        if self._failure is not None:
            raise self._failure()
        self._state.await_arrival(True)
        self._send_credits()  # those that were put off: the peer may need them to send
        if self._failure is not None:  # the credits could not be posted
            raise self._failure()

    def _take_small(self) -> Message | None:
        message = self._state.take()
        # It can be None: the collector may have run a function of the program, which received the
        # message or aborted the connection.
        if message is None or not message._in_slot or message._kept:
            return message
        try:
            message._detach()
        except MemoryError as exc:
            self._link.fail(exc)  # otherwise a message would be missing in the sequence
            raise
        return message

    def _take_large(self) -> Message | None:
        message = self.large[0].message if self.large and not self.large[0].taken else None
        if message is not None:
            self._state.keep_memory(False)
            large = self.large.pop(0)
            # Not `len(message)`: an answer that was read into other memory leaves an empty message.
            self._state.take_large(large.length)
            if self.fetcher is not None:
                self.fetcher.taken(large)
            self._resume_others()
        return message

    def _fetch_first(self) -> None:
        """Have the first large message fetched, because a task waits for it."""
        if self.large and self.fetcher is not None:
            self.fetcher.wanted()

    def _wait(self, size: int = 1, *, again: bool) -> Coroutine[Any, Any, int]:
        """Enter the line; see `WaitLine.wait`."""
        if self._waiters is _NOBODY:
            self._waiters = WaitLine()
        return self._waiters.wait(self._count_off, size, again=again)

    def _count_off(self, resumed: int) -> None:
        """Count a resumed task of the line off, because it runs now, or was canceled."""
        self._resumed -= resumed

    def resume_next(self) -> None:
        """Pass the turn on to the next task in line, if there is a message for it.

        To be called when a task stops waiting because of an exception, as it may have been its
        turn; and when a task has received a message, as the next one may be large and is to be
        fetched then.
        """
        self.wake()
        if self.is_awaited and not self._resumed and not self._ready:
            self._fetch_first()

    def reserve(self, make: Callable[[], Exchange]) -> Exchange:
        """Have all further messages go to the exchange that `make` makes: they are requests.

        Raises:
            RuntimeError: A task waits for a message.
        """
        if self.is_awaited or (self.large and self.large[0].taken):
            msg = "a task waits in recv(): a connection carries messages or requests, not both"
            raise RuntimeError(msg)
        exchange = self.exchange = make()
        if self._ended is closed_error:  # the program is to receive nothing more
            self._ended = None
            exchange.served.stop()
        self._state.delegate(True)
        self._read_soon(exchange)
        return exchange

    def _read_soon(self, exchange: Exchange) -> None:
        """Have the requests read what has arrived, or hear that nothing will."""
        if not self._link.loop.is_closed():  # on a closed loop no task waits
            self._link.loop.call_soon(exchange.read)

    @property
    def _has_line(self) -> bool:
        """Whether tasks wait, or were resumed and have not run yet."""
        return self.is_awaited or self._resumed > 0

    @property
    def _has_to_queue(self) -> bool:
        """Whether a new task has to wait behind others, even if there is a message.

        Not if no further message will arrive: then all tasks in line have been resumed already,
        and nobody would resume the new one.
        """
        return self._has_line and not self._over

    async def recv(self, waited: bool = False) -> Message:
        """Receive the next message, in order.  Cancellation: nothing is lost.

        Args:
            waited: Whether the task has already waited in C, so that it is its turn.
        """
        state = self._state
        has_to_queue = not waited and self._has_to_queue
        while has_to_queue or (message := self.take()) is None:
            has_to_queue = False
            try:
                if self._has_line:
                    state.delegate(True)
                    state.await_arrival(True)
                    self._count_off(await self._wait(again=waited))
                else:
                    await state.receive_wakeup
                waited = True
            except BaseException:
                self.resume_next()
                raise
        return message

    async def recv_into(self, view: memoryview, waited: bool = False) -> int:
        """Receive the next message into a buffer of the program, and return its size.

        Args:
            view: All of the buffer.
            waited: As for `recv`.

        Raises:
            MessageTooLargeError: The message is larger than the buffer; it remains the next one.

        Cancellation: nothing is lost, and nothing is written to the buffer afterwards.
        """
        self._state.keep_memory(True)
        has_to_queue = not waited and self._has_to_queue
        while True:
            try:
                found = None if has_to_queue else self._take_into(view)
                has_to_queue = False
                if isinstance(found, int):
                    return found
                if found is None:
                    self._state.delegate(True)
                    self._state.await_arrival(True)
                    self._count_off(await self._wait(_INTO, again=waited))
                    waited = True
                elif await self._fill(found, view):
                    return found.length
            except BaseException:
                self.resume_next()
                raise

    def _take_into(self, view: memoryview) -> int | Large | None:
        """Copy the next message into a buffer of the program.

        Returns:
            The size of the message; or a large message, which is still to be read into the buffer;
            or None, if there is no message yet.

        Raises:
            MessageTooLargeError: The message is larger than the buffer.
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
            self._resume_others()
        state.delegate(self._needs_python)
        if large is None and size is not None:
            return size
        if large is not None and self._can_fill(large):
            return large
        self._prepare_to_wait(ring_is_empty=first is None)
        self._fetch_first()
        return None

    def _can_fill(self, large: Large) -> bool:
        return not large.taken and (large.message is not None or (large.waits and large.lands))

    async def _fill(self, large: Large, view: memoryview) -> bool:
        """Fill a buffer of the program with a large message, if it is still the next one."""
        message = large.message
        if message is None:
            return self.fetcher is not None and await self.fetcher.read_into(large, view)
        large.taken = True
        try:
            with memoryview(message) as data:
                for start in range(0, large.length, COPY_STEP):
                    if start:
                        await asyncio.sleep(0)  # let other tasks run: a copy blocks the loop
                    if not self.is_next(large):
                        return False
                    end = min(start + COPY_STEP, large.length)
                    view[start:end] = data[start:end]
        finally:
            large.taken = False
        self.received_into(large)
        if self.fetcher is not None:
            self.fetcher.taken(large)
        message.release()
        return True

    def received_into(self, large: Large) -> None:
        """Note that the next message, a large one, is now in memory of the program."""
        assert self.large[0] is large
        self.large.pop(0)
        self._state.take_large(large.length)
        self._resume_others()
        self.resume_next()  # a task that came meanwhile may wait in C, and not in line

    # End

    @property
    def _over(self) -> bool:
        """Whether no further message will arrive."""
        return self._ended is not None or self._failure is not None

    @property
    def ended(self) -> bool:
        """Whether the peer has sent END, and all of its messages have arrived."""
        return self._ended is not None and all(large.message is not None for large in self.large)

    def end(self, ended: Callable[[], BaseException]) -> None:
        """Have `recv` raise `ended()` after the messages in the ring, as the peer has sent END."""
        # If this side has closed before, it has dropped messages.  Then `recv` must not raise the
        # exception which says that all were received.
        self._ended = ended if self._failure is None else self._failure
        self._state.delegate(True)
        self._wake_all()

    def fail(self, failure: Callable[[], BaseException]) -> None:
        """Have `recv` raise `failure()` after the messages that have arrived completely."""
        self._failure = failure
        self._state.delegate(True)
        self._state.advance("SHUT")  # messages that still arrive are dropped
        here = 0
        while here < len(self.large) and self.large[here].message is not None:
            here += 1
        if here < len(self.large):
            while len(self.large) > here:
                self.large.pop()
            self._ended = None
        # Messages behind a large message that will not arrive are lost with it, because `recv`
        # returns messages in order.
        self._state.cut(here)
        self._wake_all()

    def drop_references(self) -> None:
        """Remove the references to the connection, because no message will arrive any more.

        Messages that the program still keeps then refer to the memory of the slots only.
        """
        self._state.set_receiver(_ClosedReceiver(self.slots, self.more_slots))
        self.fetcher = self.exchange = None

    def _wake_all(self) -> None:
        if self.exchange is not None:
            self._read_soon(self.exchange)
        self._state.receive_wakeup.wake_soon()
        self._waiters.grant_all(0)

    def drop_all(self) -> None:
        """Discard all messages, and free their slots, so that the peer can go on sending."""
        while (first := self._state.peek()) is not None:
            self._state.skip()
            if first[0] is not None:
                self._free_slot(None, first[0], kept=False)
        self.large = _NONE_LARGE
        self._ended = None
