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

    The credits are also the measure of the peer's honesty: a data message without credit is
    a protocol error.
"""

from __future__ import annotations

import errno
import socket
from collections import deque
from collections.abc import Callable

from aiordma.endpoint.config import ConnectionConfig
from aiordma.endpoint.link import Link
from aiordma.endpoint.message import Message
from aiordma.endpoint.window import Window
from aiordma.endpoint.wire import FRAME, FRAME_SIZE, HAS_IMM, FrameKind
from aiordma.errors import ProtocolError
from aiordma.loop.waiters import Waiters
from aiordma.verbs.enums import WCFlags, WCOpcode
from aiordma.verbs.wc import WCRecord

__all__ = ["Arrival", "Receiver"]


class Arrival:
    """A place in the queue.

    Attributes:
        message: None while a large message is being fetched.
        slot: The slot that it lies in, None for a large message.
        fetched: Bytes of a large message, 0 for others.
    """

    __slots__ = ("fetched", "message", "slot")

    def __init__(self, message: Message | None, slot: int | None = None, fetched: int = 0) -> None:
        self.message = message
        self.slot = slot
        self.fetched = fetched


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
        window: Posted receives and credits.
        heard: A frame has arrived since the flag was cleared.
    """

    __slots__ = (
        "_config", "_ended", "_failure", "_held", "_lingering", "_link", "_on_control",
        "_on_credit", "_on_taken", "_queue", "_waiters", "heard", "window",
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
        self._queue: deque[Arrival] = deque()
        self._waiters = Waiters()
        self._failure: Callable[[], BaseException] | None = None
        self._ended: Callable[[], BaseException] | None = None
        self._lingering: list[tuple[memoryview, int]] = []
        self._held: set[int] = set()  # slots whose message the program has
        self.window = Window(link, config.control_depth, send_credit)
        self.heard = False

    # From the adapter

    def on_frame(self, slot: int, record: WCRecord) -> None:
        """A receive completed."""
        arena = self._link.recv
        start = slot * arena.slot_size
        length = record[4]
        self.heard = True
        self.window.posted -= 1
        if record[2] == WCOpcode.RECV_RDMA_WITH_IMM:
            # The bytes were written elsewhere: the length is theirs, and the slot is empty.
            if not self._config.raw:
                self._violation("a write with an immediate")
                return
            length = 0
        if self._config.raw:
            imm = socket.ntohl(record[5]) if record[8] & WCFlags.WITH_IMM else None
            self._deliver(slot, arena.view[start : start + length], imm)
            return
        if length < FRAME_SIZE:
            self._violation(f"a message of {length} bytes is shorter than its header")
            return
        kind, flags, returned, imm, argument = FRAME.unpack_from(arena.view, start)
        if returned:
            self._on_credit(returned)
        body = arena.view[start + FRAME_SIZE : start + length]
        if kind == FrameKind.DATA:
            if not self._spend_credit():
                return
            if argument != length - FRAME_SIZE:
                self._violation(f"length {argument} announced, {length - FRAME_SIZE} bytes came")
                return
            self._deliver(slot, body, imm if flags & HAS_IMM else None)
            return
        if kind == FrameKind.RENDEZVOUS and not self._spend_credit():
            return
        try:
            self._on_control(kind, flags, argument, body, imm if flags & HAS_IMM else None)
        finally:
            body.release()
            self.window.back(slot)

    def _spend_credit(self) -> bool:
        if not self.window.spend():
            self._violation("a message came without credit")
            return False
        return True

    def _violation(self, text: str) -> None:
        self._link.fail(ProtocolError(errno.EPROTO, f"the peer broke the protocol: {text}"))

    def _deliver(self, slot: int, view: memoryview, imm: int | None) -> None:
        if self._lingering:
            self._retry_lingering()
        message = Message(view, imm, lambda v: self._slot_back(v, slot))
        self.arrived(Arrival(message, slot))

    def arrived(self, arrival: Arrival) -> None:
        """Queue a place for a message, in the order of arrival."""
        if self._failure is not None:
            return  # what was in front of it may be missing
        self._queue.append(arrival)
        if arrival.message is not None:
            self.wake()

    def wake(self) -> None:
        """The first message may be ready: wake the first coroutine that waits."""
        if self._queue and self._queue[0].message is not None:
            self._waiters.wake()

    # Slots

    def _slot_back(self, view: memoryview, slot: int) -> None:
        """A message was released, or its last reference went, in whatever thread."""
        self._link.in_loop(lambda: self._slot_free(view, slot))

    def _slot_free(self, view: memoryview, slot: int) -> None:
        try:
            view.release()
        except BufferError:
            self._lingering.append((view, slot))
            return
        self._held.discard(slot)
        self.window.adapt(len(self._held))
        self.window.back(slot)

    def _retry_lingering(self) -> None:
        lingering, self._lingering = self._lingering, []
        for view, slot in lingering:
            self._slot_free(view, slot)

    # To the program

    async def recv(self) -> Message:
        """The next message, in order.  Cancellation: nothing is lost."""
        while True:
            if self._queue and self._queue[0].message is not None:
                arrival = self._queue.popleft()
                message = arrival.message
                assert message is not None
                if self._queue:
                    self.wake()
                if arrival.fetched:
                    self._on_taken(arrival.fetched)
                elif arrival.slot is not None:
                    if len(self._held) >= self.window.size // 2:
                        message._detach()
                    else:
                        self._held.add(arrival.slot)
                return message
            if self._ended is not None and not self._queue:
                raise self._ended()
            if self._failure is not None:
                raise self._failure()
            await self._waiters.wait()

    def end(self, ended: Callable[[], BaseException]) -> None:
        """The peer has ended its stream: after the queued messages `recv` raises `ended()`."""
        self._ended = ended
        self._waiters.wake_all()

    def fail(self, failure: Callable[[], BaseException]) -> None:
        """Broken or closed: after the messages that are there `recv` raises `failure()`."""
        self._failure = failure
        arrived = len(self._queue)
        while any(arrival.message is None for arrival in self._queue):
            # In front of a large message that will not come, the order would have a gap.
            self._queue.pop()
        if len(self._queue) < arrived:
            self._ended = None
        self._waiters.wake_all()

    def drop_all(self) -> None:
        """Closed by the program: forget what it did not take."""
        self._queue.clear()
        self._ended = None
