"""Served: the requests of the peer, from their arrival to their answer.

Theory of operation
    `_numbers` has each request that this side has not answered; the peer can count them, too, and
    a peer that has more under way than it was ever granted breaks the rules.

    The program has no more requests at a time than the grant says, and the others wait in
    `_queue`.  A request counts until the program is done with it: one that was canceled, although
    the peer has been told of its end; and one whose answer is being sent, although the peer may
    have the whole answer.  In both cases a peer that keeps to the grant asks anew, and its request
    waits for its turn.  So this side holds up to twice the grant, and refuses only what no such
    peer sends: bytes in the queue beyond all grants, or beyond the budget of the listener.

    An answer that was given up, because its task was canceled or the peer took nothing for too
    long, has left these counts, and an ERROR follows it.  A peer that takes nothing at all, and
    asks on, would make any number of these wait: so there are no more than there are requests.

    A request that waits is the table's.  From then on it is the program's, and the table has a weak
    reference: a request that the program has forgotten is answered by its finalizer.
"""

from __future__ import annotations

import asyncio
import errno
import sys
import weakref
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from aiordma._core import Message
from aiordma.arguments import check_kind
from aiordma.errors import RequestError, ResourceClosedError
from aiordma.loop.running import check_loop, from_finalizer
from aiordma.loop.uncopied import Uncopied
from aiordma.loop.wait_line import WaitLine
from aiordma.requests.budget import FREE_BYTES, Share
from aiordma.requests.outbox import Outbox
from aiordma.requests.wire import (
    ANSWER_BODY,
    ANSWER_HEAD,
    BODY_FOLLOWS,
    GIVEN_UP,
    HEADER_SIZE,
    INITIAL_BYTES,
    INITIAL_REQUESTS,
    Carrier,
    ErrorCode,
    Kind,
    ViolationError,
    body_of,
    code_of,
    error_frame,
    frame,
    pack,
)

if TYPE_CHECKING:
    from aiordma.cm.address import Address
    from aiordma.endpoint.connection import Connection

__all__ = ["STOPPING", "Request", "Requests", "Served"]


class Request(Uncopied):
    """A request of the peer; from `Connection.requests`.

    It is to be answered once, by `reply` or `fail`.  A request that is forgotten without an answer
    fails at the peer.

    Attributes:
        body: The bytes of the peer; a `Message`, which is the program's.
        deadline: Time of the loop's clock at which the peer gives up; None if its program has set
            no limit for this request.
    """

    __slots__ = (
        "__weakref__", "_answered", "_canceled", "_number", "_on_cancel", "_served", "_size",
        "_waiter", "body", "deadline",
    )  # fmt: skip

    def __init__(self, served: Served, number: int, deadline: float | None, body: Message) -> None:
        self.body: Message = body
        self.deadline: float | None = deadline
        self._served = served
        self._number = number
        self._size = len(body)
        self._answered = self._canceled = False
        self._waiter: asyncio.Future[None] | None = None
        self._on_cancel: Callable[[], object] | None = None

    @property
    def connection(self) -> Connection:
        """The connection by which it came.

        Raises:
            ResourceClosedError: It is over, and nobody has it any more.
        """
        connection: Connection | None = self._served.carrier._connection()
        if connection is None:
            text = "the connection of the request is gone"
            raise ResourceClosedError(errno.ECONNABORTED, text)
        return connection

    @property
    def peername(self) -> Address | None:
        """Address and port of the peer, as `Connection.get_extra_info` has it; None if unknown."""
        connection: Connection | None = self._served.carrier._connection()
        return None if connection is None else connection.get_extra_info("peername")

    @property
    def remaining(self) -> float | None:
        """Seconds until the peer gives up, 0 if it has; None if it has set no limit of its own.

        A peer that waits for the time of its configuration does not say so.  When it gives up, the
        request is canceled.
        """
        if self.deadline is None:
            return None
        return max(0.0, self.deadline - self._served.loop.time())

    @property
    def canceled(self) -> bool:
        """Whether the peer waits for no answer any more, because it canceled or is gone."""
        return self._canceled

    @property
    def answered(self) -> bool:
        """Whether the program has answered it."""
        return self._answered

    async def wait_canceled(self) -> None:
        """Wait until the peer waits for no answer any more; for ever, if it gets one.

        Raises:
            RuntimeError: Not in the connection's event loop.

        Cancellation: ends the wait.
        """
        check_loop(self._served.loop, "request")
        if self._canceled:
            return
        if self._waiter is None:
            self._waiter = self._served.loop.create_future()
        await asyncio.shield(self._waiter)

    async def reply(self, buf: Any = b"") -> None:
        """Answer.

        Args:
            buf: The answer: any contiguous object with the buffer protocol.

        Returns when the bytes of `buf` may be changed again, as `Connection.send` does.  If the
        request was canceled, nothing is sent.

        Raises:
            TypeError: No buffer; the request can still be answered.
            MessageTooLargeError: More than the peer takes; the request can still be answered.
            RuntimeError: The request was answered before, or this is not the connection's loop.
            ResourceClosedError, ConnectionLostError, TimeoutError: As `Connection.send`.

        Cancellation: the request fails at the peer, unless the whole answer was sent.
        """
        served = self._served
        check_loop(served.loop, "request")
        buf, size = body_of("an answer", buf, served.room)
        self._require_open()
        if (rest := self._send(buf, size)) is not None:
            await rest

    def _send(self, buf: Any, size: int) -> Coroutine[Any, Any, None] | None:
        """Answer; None if there was room for all of it at once, else the rest, to be awaited."""
        served, number = self._served, self._number
        if size > served.room:
            served.carrier._require_size(size)
        rest = None
        if not self._canceled:
            if size > served.room:
                rest = served.answer(number, buf, number | ANSWER_BODY, self._size)
            else:
                whole = pack(ANSWER_HEAD, number, 0) + buf
                code = served.sender(whole, None)
                if code > 0:
                    served.carrier._frame_failed(code)
                elif code:
                    rest = served.answer(number, whole, None, self._size)
            # Not after the rest: with its last byte the peer may send a request of this number.
            served._numbers.pop(number, None)
        self._answered = True  # not before: out of memory, the request is still open
        if rest is None:
            served._taken -= 1  # as `done`, without its call: it is the most frequent case
            served._held_bytes -= self._size
            if served._held_bytes < served._narrow_below:
                served._narrow()
            if served._queue and served._line.places:
                served._line.grant(None)
        return rest

    def fail(self, exc: BaseException) -> None:
        """Answer with an error.

        The peer's `request` raises `RequestError` with the name of the class and the text of `exc`;
        if that is a RequestRefusedError or another special RequestError, it raises the same class.

        Args:
            exc: An exception.  Its text goes to the peer, up to 1 KiB of it.

        Raises:
            TypeError: No exception.
            RuntimeError: The request was answered before, or this is not the connection's loop.
        """
        check_loop(self._served.loop, "request")
        check_kind("exc", exc, BaseException, none=False)
        self._require_open()
        self._answered = True
        self._served.done(self._size)
        if not self._canceled:
            self._served.final(self._number, code_of(exc), *_words_of(exc))

    def _require_open(self) -> None:
        if self._answered:
            msg = "the request was answered before"
            raise RuntimeError(msg)

    def _cancel(self) -> None:
        """The peer waits for no answer any more."""
        self._canceled = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if self._on_cancel is not None:
            self._on_cancel()

    def _forgotten(self) -> Callable[[], None]:
        served, number, size, tell = self._served, self._number, self._size, not self._canceled

        def end() -> None:
            served.done(size)
            if tell:
                text = "the peer's program did not answer the request"
                served.final(number, ErrorCode.RAISED, "", text)

        return end

    def _end(self) -> None:
        """The program is done with it, and answers no more."""
        self._on_cancel = None
        if not self._answered:
            self._answered = True
            self._forgotten()()

    def __del__(self) -> None:
        if not getattr(self, "_answered", True):
            self._answered = True
            from_finalizer(self._served.loop, self._forgotten())

    def __repr__(self) -> str:
        state = "canceled" if self._canceled else "answered" if self._answered else "open"
        peer = self.peername
        whose = f" of {peer[0]} port {peer[1]}" if peer else ""
        return f"<Request {self._number}{whose} {state}, {self._size} bytes>"


def _words_of(exc: BaseException) -> tuple[str, str]:
    """Name of the class, and text; of an error of another peer, those of that peer."""
    if isinstance(exc, RequestError) and exc.remote_type:
        return exc.remote_type, exc.remote_text or str(exc)
    try:
        return type(exc).__name__, str(exc)
    except Exception:
        return type(exc).__name__, "(its text cannot be had)"


class _Coming:
    """A request whose body has not arrived."""

    __slots__ = ("deadline",)

    def __init__(self, deadline: float | None) -> None:
        self.deadline = deadline


#: Why a request is refused that no handler has begun with.
STOPPING = "the server is stopping"
#: In `Served._numbers`: the final frame waits for room.
_REFUSED = None
_Entry = _Coming | Request | weakref.ref[Request] | None


class Served:
    """The requests of the peer of one connection.

    Attributes:
        loop: The connection's loop.
        carrier: The connection, as it carries frames.
        sender: Sends a frame if there is room.
        room: Bytes of a body that fits into a slot beside its header.
    """

    __slots__ = (
        "_asked", "_ended", "_given_up", "_hard_bytes", "_hard_limit", "_held_bytes", "_limit",
        "_limit_bytes", "_line", "_may_hold", "_narrow_below", "_numbers", "_outbox", "_queue",
        "_queued_bytes", "_share", "_taken", "_untold", "carrier", "loop", "room", "sender",
    )  # fmt: skip

    def __init__(self, loop: asyncio.AbstractEventLoop, carrier: Carrier, outbox: Outbox) -> None:
        self.loop: asyncio.AbstractEventLoop = loop
        self.carrier: Carrier = carrier
        self.sender: Callable[[bytes, None], int] = carrier._frame_sender
        self.room: int = carrier._frame_room - HEADER_SIZE
        self._outbox = outbox
        self._limit, self._limit_bytes = INITIAL_REQUESTS, INITIAL_BYTES
        self._hard_limit, self._hard_bytes = INITIAL_REQUESTS, INITIAL_BYTES  # the largest grants
        self._asked = self._untold = False  # the first request has come; the grant has changed
        self._numbers: dict[int, _Entry] = {}
        self._given_up = 0  # answers that were given up, and whose ERROR waits for room
        self._queue: dict[Request, None] = {}  # requests that wait for the program
        self._queued_bytes = 0
        self._taken = 0  # requests that the program has, and is not done with
        self._held_bytes = 0  # of these and of the queue
        self._share: Share | None = carrier._request_share
        self._see_share()
        self._line: WaitLine[None] = WaitLine()
        self._ended: Callable[[], BaseException | None] | None = None

    def grant(self, count: int, size: int) -> None:
        """Let the peer have so many requests, and bytes of them, under way.

        A GRANT that raises the limits follows the first request: before, the peer's program may be
        receiving messages.
        """
        if (count, size) != (self._limit, self._limit_bytes):
            self._limit, self._limit_bytes = count, size
            self._hard_limit = max(self._hard_limit, count)
            self._hard_bytes = max(self._hard_bytes, size)
            self._untold = True
            if self._asked or count < INITIAL_REQUESTS or size < INITIAL_BYTES:
                self._tell_grant()
            self._line.grant(None)

    def _tell_grant(self) -> None:
        self._untold = False
        self._outbox.post(frame(Kind.GRANT, self._limit, self._limit_bytes))

    # From the peer

    def on_request(self, number: int, flags: int, left: int, message: Message) -> None:
        """Take a request, or the announcement of its body."""
        if number in self._numbers:
            msg = f"request {number} twice"
            raise ViolationError(msg)
        if len(self._numbers) >= self._hard_limit:
            msg = f"more than {self._hard_limit} requests at a time"
            raise ViolationError(msg)
        if self._given_up > self._hard_limit:
            msg = f"a request of a peer that has not taken {self._given_up} answers"
            raise ViolationError(msg)
        if not self._asked:
            self._asked = True
            if self._untold:
                self._tell_grant()
        deadline = self.loop.time() + left * 1e-6 if left else None
        if flags & BODY_FOLLOWS:
            self._numbers[number] = _Coming(deadline)
        else:
            self._admit(number, deadline, Message(message[HEADER_SIZE:]))

    def on_body(self, number: int, message: Message) -> None:
        """Take the body of a request."""
        coming = self._numbers.get(number)
        if not isinstance(coming, _Coming):
            msg = f"the body of request {number}, which waits for none"
            # Without any request before it, it is a message of the program, with its immediate.
            raise ViolationError(msg, foreign=not self._asked)
        self._admit(number, coming.deadline, message)

    def _admit(self, number: int, deadline: float | None, body: Message) -> None:
        size, code = len(body), ErrorCode.OVERLOADED
        if self._ended is not None:
            text, code = STOPPING, ErrorCode.REFUSED
        elif self._queue and self._queued_bytes + size > self._hard_bytes:
            text = f"{self._queued_bytes} bytes of requests wait"
        elif (held := self._held_bytes + size) > self._may_hold and not self._widen(held):
            text = "the requests of all clients, or of those of this machine, take all the memory"
        else:
            self._held_bytes = held
            request = Request(self, number, deadline, body)
            self._numbers[number] = request
            self._queue[request] = None
            self._queued_bytes += size
            if self._line.places:
                self._line.grant(None)
            return
        body.release()
        self.final(number, code, "", text)

    def on_cancel(self, number: int) -> None:
        """Cancel a request; of a number that was answered, the answer is on its way."""
        entry = self._numbers.get(number)
        if entry is _REFUSED:
            return
        request = entry() if isinstance(entry, weakref.ref) else entry
        self.final(number, ErrorCode.CANCELED, "", "")
        if not isinstance(request, Request):
            return
        if request in self._queue:
            self._drop(request)
        else:
            request._cancel()

    def _drop(self, request: Request) -> None:
        """End a request that the program has not got."""
        del self._queue[request]
        self._queued_bytes -= request._size
        request._answered = request._canceled = True
        self._taken += 1
        self.done(request._size)

    # To the program

    async def take(self) -> Request:
        """The next request; waits for it.

        Raises:
            StopAsyncIteration: The connection is closed, and there is no more.
            ConnectionLostError: It broke.
        """
        while (request := self.take_now()) is None:
            if self._ended is not None and not self._queue:
                raise self._ended() or StopAsyncIteration
            await self._line.wait()
        if self._queue and self._line.places:
            self._line.grant(None)  # there may be room for another, too
        return request

    def take_now(self) -> Request | None:
        """The next request that is here and not too late, if there is one, and room for it."""
        while self._queue:
            request = next(iter(self._queue))
            if request.deadline is None or request.deadline > self.loop.time():
                queued_bytes = self._queued_bytes - request._size
                if self._taken and (
                    self._taken >= self._limit
                    or self._held_bytes - queued_bytes > self._limit_bytes
                ):
                    return None
                del self._queue[request]
                self._queued_bytes = queued_bytes
                self._taken += 1
                self._numbers[request._number] = weakref.ref(request)
                return request
            self._drop(request)
            text = "the time was over before the request was served"
            self.final(request._number, ErrorCode.DEADLINE, "", text)
        return None

    # Answers

    async def answer(self, number: int, data: Any, imm: int | None, size: int) -> None:
        """Send the answer to a request of this size, in turn."""
        try:
            await self.carrier._send_frame(data, imm)
        except BaseException:
            text = "the peer gave up its answer"
            self._given_up += 1
            self._outbox.post(
                error_frame(number, ErrorCode.RAISED, "", text, GIVEN_UP), self._told_given_up
            )
            raise
        finally:
            self.done(size)

    def _told_given_up(self) -> None:
        self._given_up -= 1

    def final(self, number: int, code: int, name: str, text: str) -> None:
        """Answer a request with an error, as soon as there is room."""
        if not self.carrier.is_closing():
            self._numbers[number] = _REFUSED
            self._outbox.post(
                error_frame(number, code, name, text), lambda: self._numbers.pop(number, None)
            )

    def done(self, size: int) -> None:
        """The program is done with a request of this size."""
        self._taken -= 1
        self._held_bytes -= size
        if self._held_bytes < self._narrow_below:
            self._narrow()
        if self._queue and self._line.places:
            self._line.grant(None)

    def _widen(self, held: int) -> bool:
        """Make room for so many bytes; return whether there is."""
        share = self._share
        if share is None or share.widen(held):
            self._see_share()
            return True
        return False

    def _narrow(self) -> None:
        """Give back the room that the requests do not need any more."""
        if self._share is not None:
            self._share.narrow(self._held_bytes)
            self._see_share()

    def _see_share(self) -> None:
        share = self._share
        if share is None:
            self._may_hold, self._narrow_below = sys.maxsize, 0
        else:
            self._may_hold = share.size
            # Half, so that a client that asks again and again does not have it taken and given.
            self._narrow_below = share.size >> 1 if share.size > FREE_BYTES else 0

    # End

    def stop(self) -> None:
        """Refuse the requests that arrive from now on: `take` ends behind those that are here."""
        if self._ended is None:
            self._ended = lambda: None
            self._line.grant_all(None)

    async def told(self, limit_s: float) -> None:
        """Wait until the peer has been told of each end, and after `stop` of those that wait, too.

        Args:
            limit_s: Seconds that the answers may wait for room.

        Cancellation: ends the wait.
        """
        if self._ended is not None:
            for request in list(self._queue):
                self._drop(request)
                self.final(request._number, ErrorCode.REFUSED, "", STOPPING)
        await self._outbox.sent(limit_s)

    def end(self, failure: Callable[[], BaseException | None], *, over: bool) -> None:
        """No request arrives any more.

        Args:
            failure: Makes the exception of `take` when there is no more; None for an end in order.
            over: Whether no answer can be sent any more either.
        """
        self._ended = failure
        if over:
            for request in list(self._queue):
                self._drop(request)
            entries, self._numbers = self._numbers, {}
            for entry in entries.values():
                request_or_none = entry() if isinstance(entry, weakref.ref) else None
                if request_or_none is not None:
                    request_or_none._cancel()
        self._line.grant_all(None)


class Requests(Uncopied):
    """Async iterator over the requests of the peer, from `Connection.requests`.

    Several tasks may share an iterator, or have one each: each request goes to one of them.
    """

    __slots__ = ("_served",)

    def __init__(self, served: Served) -> None:
        self._served = served

    def __aiter__(self) -> Requests:
        return self

    async def __anext__(self) -> Request:
        """The next request; the end when the connection is closed by either side.

        Raises:
            ConnectionLostError: The connection broke.
            RuntimeError: Not in the connection's event loop.

        Cancellation: no request is lost.
        """
        check_loop(self._served.loop, "iterator")
        return await self._served.take()
