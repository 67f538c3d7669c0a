"""Receiver: receive slots, the queue of arrived messages, and the credits that are owed.

Theory of operation
    Every message of the peer lands in a slot.  A data slot is given back when the program has
    released the message; it is posted again, and only then is its credit owed to the peer, so
    that the peer never sends into nothing.

    A program may keep messages as long as it likes: once it holds half of the window, further
    messages are copied on delivery and their slots go back at once.  Messages that it has not
    taken stay where they are, and the peer feels that it is slow.

    Messages wait in a queue and coroutines wait beside it; no message is ever bound to a
    coroutine, so that a canceled `recv()` loses nothing.

    Plain messages are taken in C, into a ring (`MessageState`), and become objects when the
    program asks for them.  What Python has queued is older than what is in the ring: before it
    queues anything it takes the ring's messages along.

    The first coroutine that waits is resumed by the drain that brought the message (`Wakeup`);
    others stand in line behind it.

    The credits are also the measure of the peer's honesty: a data message without credit is
    a protocol error.
"""

from __future__ import annotations

import errno
import functools
import socket
from collections import deque
from collections.abc import Awaitable, Callable

from aiordma._core import EVENT_ARRIVED
from aiordma.endpoint.config import ConnectionConfig
from aiordma.endpoint.link import Link
from aiordma.endpoint.message import Message
from aiordma.endpoint.window import Window
from aiordma.endpoint.wire import FRAME, FRAME_SIZE, HAS_IMM, FrameKind
from aiordma.errors import ProtocolError, os_error
from aiordma.loop.empty import EMPTY, nobody
from aiordma.loop.wait_line import WaitLine
from aiordma.memory.arena import Arena
from aiordma.verbs.enums import WCFlags, WCOpcode
from aiordma.verbs.wc import WCRecord

__all__ = ["Arrival", "Receiver"]

# Not CREDIT, which tells nothing of whether this side is heard; PING and PONG: endpoint/core.py.
_LIFE = frozenset({FrameKind.DATA, FrameKind.RENDEZVOUS, FrameKind.DONE})


class Arrival:
    """A place in the queue.

    Attributes:
        message: None while a large message is being fetched.
        slot: The slot that it lies in, None for a large message.
        fetched: Bytes of the buffer of a large message, 0 for others.
    """

    __slots__ = ("fetched", "message", "slot")

    def __init__(self, message: Message | None, slot: int | None = None, fetched: int = 0) -> None:
        self.message = message
        self.slot = slot
        self.fetched = fetched


class _Kept:
    """What is left of a receiver: the memory of messages that the program has kept."""

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
    """Takes frames from the link and gives messages to the program.

    Args:
        link: The adapter's side.
        config: Sizes.
        on_control: Called with kind, flags, argument and body of each frame that is not DATA.
        on_credit: Called with the credits that a frame returns.
        send_credit: Called when enough is owed for a CREDIT frame.
        on_taken: Called with the size of each large message that the program took.

    Attributes:
        on_wanted: Called when `take` has found nothing but a large message that is not there yet.
        window: Posted receives and credits.
        queue: Messages that Python has queued; older than those in the state's ring.
        over: There will be no further messages.
    """

    __slots__ = (
        "_c", "_config", "_ended", "_failure", "_head", "_lingering", "_link",
        "_on_control", "_on_credit", "_on_taken", "_parked", "_waiters", "on_wanted",
        "over", "queue", "window",
    )  # fmt: skip

    def __init__(
        self,
        link: Link,
        config: ConnectionConfig,
        on_control: Callable[[FrameKind, int, int, memoryview, int | None], None],
        on_credit: Callable[[int], None],
        send_credit: Callable[[], None],
        on_taken: Callable[[int], None],
    ) -> None:
        self._link = link
        self._config = config
        self._on_control = on_control
        self._on_credit = on_credit
        self._on_taken = on_taken
        self.on_wanted: Callable[[], object] = nobody
        self.queue: deque[Arrival] = EMPTY
        self.over = False
        self._waiters = WaitLine[None]()
        #: The plain way, in C.
        self._c = link.state
        self._parked = link.state.parked
        self._head = 0 if config.raw else FRAME_SIZE
        self._failure: Callable[[], BaseException] | None = None
        self._ended: Callable[[], BaseException] | None = None
        self._lingering: list[tuple[Message, int, bool]] = []
        self.window = Window(link, config.control_depth, send_credit)
        self._c.receiver = self

    @property
    def heard(self) -> bool:
        """A frame has arrived since the flag was cleared."""
        return bool(self._c.heard)

    @heard.setter
    def heard(self, value: bool) -> None:
        self._c.heard = value

    # From the adapter

    def on_news(self) -> None:
        """Messages have arrived, and no task was parked that C could resume."""
        if self._waiters.places:
            self._waiters.grant(None)
            self._due_soon()
        else:
            self._c.want &= ~EVENT_ARRIVED

    def _due_soon(self) -> None:
        """As `on_due`, once the tasks that were woken have had their turn."""
        if self.window.due:
            self._link.loop.call_soon(self.on_due)

    def on_due(self) -> None:
        """A credit that was put off is due, if the program has sent nothing meanwhile."""
        self.window.credit()

    def _collect(self) -> None:
        """Take the ring's messages into the queue, in front of what comes next."""
        while (first := self._c.peek()) is not None:
            # Made before it is taken, and the place before the message, which gives its slot back
            # when it goes: without memory for it all stays as it is.
            slot, length, imm = first
            arrival = Arrival(None, slot)
            self._queued(arrival)
            try:
                arrival.message = self._message(slot, length, imm)
            except BaseException:
                self.queue.pop()
                raise
            self._c.skip()

    def _message(self, slot: int, length: int, imm: int | None) -> Message:
        return self._c.message(slot, length, imm)

    def _queued(self, arrival: Arrival) -> None:
        if self.queue is EMPTY:
            self.queue = deque()
        self.queue.append(arrival)
        self._c.rare = True  # what comes into the ring from now on is younger

    def on_frame(self, slot: int, record: WCRecord) -> None:
        """A receive completed, and was not plain."""
        self._collect()
        arena = self._link.recv
        start = slot * arena.slot_size
        length = record[4]
        self.window.posted -= 1
        if record[2] == WCOpcode.RECV_RDMA_WITH_IMM:
            # The bytes were written elsewhere: the length is theirs, and the slot is empty.
            if not self._config.raw:
                self._violation("a write with an immediate")
                return
            length = 0
        if self._config.raw:
            self.heard = True
            imm = socket.ntohl(record[5]) if record[8] & WCFlags.WITH_IMM else None
            self._deliver(slot, length, imm)
            return
        if length < FRAME_SIZE:
            self._violation(f"a message of {length} bytes is shorter than its header")
            return
        kind, flags, returned, imm, argument = FRAME.unpack_from(arena.view, start)
        if returned:
            self._on_credit(returned)
        if kind in _LIFE:
            self.heard = True
        if kind == FrameKind.DATA:
            if not self._spend_credit():
                return
            if argument != length - FRAME_SIZE:
                self._violation(f"length {argument} announced, {length - FRAME_SIZE} bytes came")
                return
            self._deliver(slot, argument, imm if flags & HAS_IMM else None)
            return
        if kind == FrameKind.RENDEZVOUS and not self._spend_credit():
            return
        body = arena.view[start + FRAME_SIZE : start + length]
        try:
            self._on_control(kind, flags, argument, body, imm if flags & HAS_IMM else None)
        finally:
            body.release()
            code = -1 if self._link.failure else self._c.back_now(slot)
            if code < 0:
                self.window.back(slot)
            elif code:
                self._posted_again(slot, code)

    def _spend_credit(self) -> bool:
        if not self.window.spend():
            self._violation("a message came without credit")
            return False
        return True

    def _violation(self, text: str) -> None:
        self._link.fail(ProtocolError(errno.EPROTO, f"the peer broke the protocol: {text}"))

    def _deliver(self, slot: int, length: int, imm: int | None) -> None:
        if self._lingering:
            self._retry_lingering()
        arrival = Arrival(None, slot)
        try:
            arrival.message = self._message(slot, length, imm)
        except MemoryError as exc:
            self._link.fail(exc)  # without it the order would have a gap
            return
        self.arrived(arrival)
        self._due_soon()

    def arrived(self, arrival: Arrival) -> None:
        """Queue a place for a message, in the order of arrival."""
        if self._failure is not None:
            return  # what was in front of it may be missing
        self._collect()
        self._queued(arrival)
        if arrival.message is not None:
            self.wake()

    def wake(self) -> None:
        """The first message may be ready: wake the first coroutine that waits."""
        if self._ready and not self._parked.wake_soon():
            self._waiters.grant(None)

    @property
    def _ready(self) -> bool:
        """Whether there is a message for the program."""
        if self.queue:
            return self.queue[0].message is not None
        return bool(self._c.arrived)

    @property
    def waiting(self) -> bool:
        """Whether a coroutine waits for a message."""
        return bool(self._waiters.places or self._parked.waiting)

    # Slots

    def slot_view(self, slot: int, length: int) -> memoryview:
        """The bytes of a message."""
        return _view_of(self._link.recv, self._head, slot, length)

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
            self._c.rare = True
            return
        self._c.held -= kept
        if self._link.closed:
            return
        if code := self._c.back(slot):
            self._posted_again(slot, code)

    def _posted_again(self, slot: int, code: int) -> None:
        """What `MessageState.back` leaves to Python."""
        if code == 1:
            self.window.credit()
        elif code < 0:
            self.window.adapt(self._c.held)
            self.window.back(slot)
        else:
            self._link.fail(os_error(code - 2, "ibv_post_recv"))

    def _retry_lingering(self) -> None:
        lingering, self._lingering = self._lingering, []
        for exported, slot, kept in lingering:
            self._slot_free(exported, slot, kept)

    # To the program

    def take(self) -> Message | None:
        """The next message, in order; None if there is none yet.

        Raises:
            BaseException: There will be none; what `end` or `fail` was given makes it.
        """
        if self._lingering:
            self._retry_lingering()
        self._collect()
        queue = self.queue
        message = queue[0].message if queue else None
        if message is not None:
            arrival = queue.popleft()
            self._c.messages_received += 1
            self._c.bytes_received += len(message)
            if self._waiters.places:
                self.wake()
            if arrival.fetched:
                self._on_taken(arrival.fetched)
            elif arrival.slot is not None:
                self._keep(message)
            if queue and queue[0].message is None and self.waiting:
                # It was not the first when the next coroutine began to wait.
                self.on_wanted()
        self._c.rare = bool(queue or self.over or self._lingering or self._waiters.places)
        if message is None:
            if self._ended is not None and not queue:
                raise self._ended()
            if self._failure is not None:
                raise self._failure()
            self._c.want |= EVENT_ARRIVED
            self.window.credit()  # which may have been put off
            if queue:
                self.on_wanted()
        return message

    def _keep(self, message: Message) -> None:
        if self._c.held >= self.window.size // 2:
            message._detach()
        else:
            message._kept = True
            self._c.held += 1

    def wait(self) -> Awaitable[None]:
        """Wait for `take` to be worth a try; `left` after an exception."""
        if self._waiters.places or self._parked.waiting:
            self._c.rare = True
            return self._waiters.wait()
        return self._parked

    def left(self) -> None:
        """A coroutine was thrown out of its wait: perhaps it was its turn."""
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

    @property
    def ended(self) -> bool:
        """Whether the peer has ended its stream, and all of it is here."""
        whole = all(arrival.message is not None for arrival in self.queue)
        return self._ended is not None and whole

    def end(self, ended: Callable[[], BaseException]) -> None:
        """The peer has ended its stream: after the queued messages `recv` raises `ended()`."""
        self._ended = ended
        self.over = self._c.rare = True
        self._wake_all()

    def fail(self, failure: Callable[[], BaseException]) -> None:
        """Broken or closed: after the messages that are there `recv` raises `failure()`."""
        self._failure = failure
        self.over = self._c.rare = True
        self._collect()
        arrived = len(self.queue)
        while any(arrival.message is None for arrival in self.queue):
            # In front of a large message that will not come, the order would have a gap.
            self.queue.pop()
        if len(self.queue) < arrived:
            self._ended = None
        self._wake_all()

    def part(self) -> None:
        """No frame will come any more; let nothing lead back to what was told of them.

        A message that the program has kept leads to the memory that it is in, and not here.
        """
        self._collect()
        self._c.receiver = _Kept(functools.partial(_view_of, self._link.recv, self._head))
        self._on_control = self._on_credit = self._on_taken = self.on_wanted = nobody
        self.window.part()

    def _wake_all(self) -> None:
        self._parked.wake_soon()
        self._waiters.grant_all(None)

    def drop_all(self) -> None:
        """Closed by the program: forget what it did not take."""
        self._collect()
        self.queue = EMPTY
        self._ended = None
