"""The requests of a connection in both directions, and what reads their frames.

Theory of operation
    A connection gets an Exchange with the first call of `request()` or `requests()`.  From then on
    every message is a frame of this protocol, and is read here: by no task, but by the drain that
    has brought it, while no task is running.  So an answer can resume its task at once, and needs
    no turn of the loop.  All frames that have arrived are processed before the first task is
    resumed.

    This goes on until the connection ends, even when the program serves no more requests: the
    peer's CANCEL frames still have to be read, and further requests refused.  If the peer breaks
    the format, this connection ends and nothing else.
"""

from __future__ import annotations

import asyncio
import errno
import functools
from collections.abc import Callable

from aiordma._core import Message
from aiordma.errors import (
    ConnectionEndedError,
    ConnectionLostError,
    ProtocolError,
    ResourceClosedError,
)
from aiordma.loop.raised import ENDS_THE_LOOP
from aiordma.requests.calls import Calls
from aiordma.requests.outbox import Outbox
from aiordma.requests.place import Place
from aiordma.requests.served import Served
from aiordma.requests.wire import (
    ANSWER_BODY,
    BODY_FOLLOWS,
    HEADER_SIZE,
    Carrier,
    Kind,
    ViolationError,
    again,
    parse,
    stopping_error,
)

__all__ = ["Exchange"]

#: A slot of a peer that sends without a header has room for so many bytes more than one with it.
_BARE = 16
_CLOSED = "the peer closed the connection"
#: As plain integers, because looking up a member of an Enum takes longer.
_ANSWER, _REQUEST = int(Kind.ANSWER), int(Kind.REQUEST)


class Exchange:
    """The requests of one connection.

    Attributes:
        loop: The loop of the connection.
        calls: The requests of this side.
        served: The requests of the peer.
    """

    __slots__ = ("_carrier", "_most", "_over", "calls", "loop", "served")

    def __init__(self, loop: asyncio.AbstractEventLoop, carrier: Carrier) -> None:
        self.loop: asyncio.AbstractEventLoop = loop
        self._carrier = carrier
        self._over = False
        self._most = carrier._frame_room + _BARE  # the largest frame with a body inside, in bytes
        outbox = Outbox(loop, carrier)
        self.calls: Calls = Calls(loop, carrier, outbox, self)
        self.served: Served = Served(loop, carrier, outbox)
        self.calls.serve(self.served)

    def read(self) -> None:
        """Process the frames that have arrived, and resume tasks; while no task is running."""
        try:
            while self.read_next():
                pass
        finally:
            self.calls.resume()

    def read_next(self) -> bool:
        """Process the next frame; return whether there was one, and further ones may follow."""
        if self._over:
            return False
        try:
            message = self._carrier._next_frame()
            if message is not None:
                self._process(message)
        except BaseException as exc:
            self._broken(exc)
            return False
        return message is not None

    def on_request(self, number: int, left: int, body: Message) -> None:
        """Process a REQUEST frame with its body, which C has read; `left`: microseconds, or 0."""
        try:
            self.served.on_request(number, left, body)
        except BaseException as exc:
            self._broken(exc)

    def _broken(self, exc: BaseException) -> None:
        """No further frame is read, for this reason."""
        if isinstance(exc, ViolationError):
            cause = ProtocolError(errno.EPROTO, f"the peer broke the protocol of requests: {exc}")
            cause._foreign = exc.foreign
            self._end(cause)
            self._carrier._break_requests(cause)
        elif isinstance(exc, (ConnectionEndedError, ConnectionLostError, ResourceClosedError)):
            self._end(exc)
        else:  # for instance MemoryError, with which a message may be lost
            lost = ConnectionLostError(errno.ECONNRESET, f"the requests cannot be read: {exc!r}")
            lost.__cause__ = exc
            self._end(lost)
            self._carrier._break_requests(lost)
            if isinstance(exc, ENDS_THE_LOOP):
                raise exc

    def _process(self, message: Message) -> None:
        """Pass a message of the peer to `calls` or `served`."""
        if (imm := message.imm) is not None:
            if imm & ANSWER_BODY:
                self.calls.on_answer(imm ^ ANSWER_BODY, message)
            else:
                self.served.on_body(imm, message)
            return
        kind, flags, number, argument = parse(message)
        if len(message) > self._most and kind in (_REQUEST, _ANSWER):
            msg = f"{len(message)} bytes in a frame, whose body belongs in a message of its own"
            raise ViolationError(msg)
        if kind == _ANSWER:
            self.calls.on_answer(number, Message(message[HEADER_SIZE:]))
        elif kind == _REQUEST:
            body = None if flags & BODY_FOLLOWS else Message(message[HEADER_SIZE:])
            self.served.on_request(number, argument, body)
        elif kind == Kind.ERROR:
            self.calls.on_error(number, flags, argument, message[HEADER_SIZE:])
        elif kind == Kind.CANCEL:
            self.served.on_cancel(number)
        else:
            self.calls.on_grant(number, argument)
        message.release()

    def place_of(self, imm: int) -> Place | None:
        """The memory that the program has given for the answer with this immediate, if any."""
        return self.calls.place_of(imm ^ ANSWER_BODY) if imm & ANSWER_BODY else None

    def is_unwanted(self, imm: int) -> bool:
        """Whether the message with this immediate is the answer to an abandoned call."""
        return bool(imm & ANSWER_BODY) and self.calls.is_abandoned(imm ^ ANSWER_BODY)

    def _end(self, exc: Exception) -> None:
        """Note that no frame follows, and why."""
        self._over = True
        make: Callable[[], BaseException] = again(exc)
        in_order = isinstance(exc, (ConnectionEndedError, ResourceClosedError))
        self.served.end((lambda: None) if in_order else make)
        unanswered = make
        if isinstance(exc, ConnectionEndedError):
            unanswered = make = again(ConnectionLostError(errno.ECONNRESET, _CLOSED))
            if exc._answered:
                unanswered = functools.partial(stopping_error, f"{_CLOSED} before it served this")
            self._carrier._note_stopping()
        self.calls.fail(make, unanswered)
