"""Exchange: the requests of a connection in both directions, and the task that reads them.

Theory of operation
    A connection gets an Exchange with its first `request()` or `requests()`.  From then on its
    messages are frames of requests, which the reader takes; it waits for nothing else.  The reader
    ends with the connection: also while a server stops, the peer cancels, and is refused.  A peer
    that breaks the format ends the connection, and no more.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable

from aiordma._core import Message
from aiordma.errors import (
    ConnectionEndedError,
    ConnectionLostError,
    ProtocolError,
    ResourceClosedError,
)
from aiordma.loop import background
from aiordma.requests.calls import Calls
from aiordma.requests.outbox import Outbox
from aiordma.requests.place import Place
from aiordma.requests.served import Served
from aiordma.requests.wire import (
    ANSWER_BODY,
    HEADER_SIZE,
    Carrier,
    Kind,
    ViolationError,
    again,
    parse,
)

__all__ = ["Exchange"]

#: A peer that sends without a header of data has so many bytes more in a slot than this side may.
_BARE = 16
#: As numbers: to look up a member of an Enum takes longer.
_ANSWER, _REQUEST = int(Kind.ANSWER), int(Kind.REQUEST)


class Exchange:
    """The requests of one connection.

    Attributes:
        calls: Requests of this side.
        served: Requests of the peer.
    """

    __slots__ = ("_carrier", "_loop", "_most", "calls", "served")

    def __init__(self, loop: asyncio.AbstractEventLoop, carrier: Carrier) -> None:
        self._loop = loop
        self._carrier = carrier
        self._most = carrier._frame_room + _BARE  # bytes of a frame that has a body in it
        outbox = Outbox(loop, carrier)
        self.calls: Calls = Calls(loop, carrier, outbox)
        self.served: Served = Served(loop, carrier, outbox)

    def start(self) -> None:
        """Begin to read."""
        if background.start(self._loop, self._read) is None:
            self._end(_closed("the event loop ends"))

    async def _read(self) -> None:
        carrier = self._carrier
        try:
            receive = carrier._frame_reader
            while True:
                self._take(await receive())
        except ViolationError as exc:
            cause = ProtocolError(errno.EPROTO, f"the peer broke the protocol of requests: {exc}")
            cause._foreign = exc.foreign
            self._end(cause)
            carrier._break_requests(cause)
        except (ConnectionEndedError, ConnectionLostError, ResourceClosedError) as exc:
            self._end(exc)
        except asyncio.CancelledError:
            self._end(_closed("the task that reads the requests was canceled"))
            raise
        except BaseException as exc:  # as MemoryError: a message may be lost
            lost = ConnectionLostError(errno.ECONNRESET, f"the requests cannot be read: {exc!r}")
            lost.__cause__ = exc
            self._end(lost)
            carrier._break_requests(lost)

    def _take(self, message: Message) -> None:
        """Take a message of the peer."""
        if (imm := message.imm) is not None:
            if imm & ANSWER_BODY:
                self.calls.on_answer(imm ^ ANSWER_BODY, message)
            else:
                self.served.on_body(imm, message)
            return
        kind, flags, number, argument = parse(message)
        if len(message) > self._most and kind in (_REQUEST, _ANSWER):
            msg = f"{len(message)} bytes in a frame, whose body belongs into a message of its own"
            raise ViolationError(msg)
        if kind == _ANSWER:
            self.calls.on_answer(number, Message(message[HEADER_SIZE:]))
        elif kind == _REQUEST:
            self.served.on_request(number, flags, argument, message)
        elif kind == Kind.ERROR:
            self.calls.on_error(number, flags, argument, message[HEADER_SIZE:])
        elif kind == Kind.CANCEL:
            self.served.on_cancel(number)
        else:
            self.calls.on_grant(number, argument)
        message.release()

    def place_of(self, imm: int) -> Place | None:
        """The memory for the answer with this immediate, if there is some."""
        return self.calls.place_of(imm ^ ANSWER_BODY) if imm & ANSWER_BODY else None

    def is_unwanted(self, imm: int) -> bool:
        """Whether the message with this immediate is an answer whose task has left."""
        return bool(imm & ANSWER_BODY) and self.calls.is_abandoned(imm ^ ANSWER_BODY)

    def _end(self, exc: Exception) -> None:
        """No frame follows, for this reason."""
        make: Callable[[], BaseException] = again(exc)
        over = self._carrier.is_closing() or not isinstance(exc, ResourceClosedError)
        in_order = isinstance(exc, (ConnectionEndedError, ResourceClosedError))
        self.served.end((lambda: None) if in_order else make, over=over)
        if isinstance(exc, ConnectionEndedError):
            make = again(ConnectionLostError(errno.ECONNRESET, "the peer closed the connection"))
        self.calls.fail(make)


def _closed(text: str) -> ResourceClosedError:
    return ResourceClosedError(errno.ECONNABORTED, text)
