"""The requests of the peer, from their arrival to their answer.

Theory of operation
    `numbers` contains every request that this side has not answered.  The peer can count these,
    too: a peer with more requests in progress than it was ever granted breaks the protocol.

    The program has no more requests at a time than the grant says; further ones wait in `queue`.
    A request counts until the program is done with it.  This can be later than the peer knows: a
    canceled request counts until its handler ends, although the peer has been told that it is over;
    and a request whose answer is being sent counts until the send returns, although the peer may
    have the answer already.  In both cases a peer that respects the grant may send its next
    request, which then has to wait.  So this side may hold up to twice the grant.  It refuses only
    what such a peer never sends: more queued bytes than were ever granted; and what exceeds the
    budget of the listener.

    An answer may be abandoned, because its task was canceled or the peer has accepted nothing for
    too long.  Then it no longer counts, and an ERROR frame follows it as soon as there is room.  A
    peer that accepts nothing but goes on asking could make any number of those wait, so they are
    limited to the number of requests that was granted.

    C admits and answers what is plain (`_core/served.c`): a request with its body, while no answer
    was given up; and an answer that fits into a slot.  The same rules stand here for
    everything else, over the same counts.

    While a request waits, or its handler has begun at once, the table owns it.  Once the program
    has taken it from the queue, the table only has a weak reference; if the program drops a request
    without answering it, its finalizer does.
"""

from __future__ import annotations

import asyncio
import errno
import sys
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol

from aiordma._core import FOR_PYTHON, Message, PeerRequest, QueuedSend, RequestTable
from aiordma.arguments import check_kind
from aiordma.errors import RequestError, ResourceClosedError
from aiordma.loop.running import check_loop, from_finalizer
from aiordma.loop.uncopied import Uncopied
from aiordma.loop.wait_line import WaitLine
from aiordma.memory.governor import Lease
from aiordma.requests.outbox import Outbox
from aiordma.requests.wire import (
    ANSWER_BODY,
    ANSWER_HEAD,
    GIVEN_UP,
    HEADER_SIZE,
    INITIAL_BYTES,
    INITIAL_REQUESTS,
    STOPPED,
    STOPPING,
    STOPPING_NAME,
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

__all__ = ["Request", "Requests", "Served"]


class Request(Uncopied, PeerRequest):
    """A request of the peer, from `Connection.requests`.

    Answer it once, by `reply` or `fail`.  A request that is garbage collected without an answer
    fails at the peer.

    Attributes:
        body: What the peer sent: a `Message`, which belongs to the program.
        deadline: When the peer gives up, as a time of the loop's clock; None if its program has
            set no limit for this request.
    """

    __slots__ = ("__weakref__", "_waiter")

    _served: Served
    _starter: Starter | None
    _waiter: asyncio.Future[None]  # of `wait_canceled`; not there before the first call

    @property
    def connection(self) -> Connection:
        """The connection over which the request came.

        Raises:
            ResourceClosedError: The connection is closed, and has been garbage collected.
        """
        connection: Connection | None = self._served.carrier._connection()
        if connection is None:
            text = "the connection of the request is gone"
            raise ResourceClosedError(errno.ECONNABORTED, text)
        return connection

    @property
    def peername(self) -> Address | None:
        """The peer's address, as from `Connection.get_extra_info("peername")`; None if unknown."""
        connection: Connection | None = self._served.carrier._connection()
        return None if connection is None else connection.get_extra_info("peername")

    @property
    def remaining(self) -> float | None:
        """Seconds until the peer gives up, 0 if it has; None if its program has set no limit.

        A peer whose limit comes from its configuration does not transmit it.  When such a peer
        gives up, the request is canceled.
        """
        if self.deadline is None:
            return None
        return max(0.0, self.deadline - self._served.loop.time())

    @property
    def canceled(self) -> bool:
        """Whether the peer no longer waits for an answer, because it has canceled or is gone."""
        return self._canceled

    @property
    def answered(self) -> bool:
        """Whether the program has answered the request."""
        return self._answered

    async def wait_canceled(self) -> None:
        """Wait until the peer no longer waits for an answer; forever, if it gets one.

        Raises:
            RuntimeError: This is not the connection's event loop.

        Cancellation: ends the wait.
        """
        check_loop(self._served.loop, "request")
        if self._canceled:
            return
        if not hasattr(self, "_waiter"):
            self._waiter = self._served.loop.create_future()
        await asyncio.shield(self._waiter)

    async def reply(self, buf: Any = b"") -> None:
        """Send the answer.

        Args:
            buf: The answer, any contiguous object with the buffer protocol.

        As with `Connection.send`, the bytes of `buf` may be changed again when the call returns.
        If the request was canceled, nothing is sent.

        Raises:
            TypeError: `buf` is no buffer; the request can still be answered.
            MessageTooLargeError: The answer is larger than the peer accepts; the request can still
                be answered.
            RuntimeError: The request was answered before, or this is not the connection's loop.
            ResourceClosedError, ConnectionLostError, TimeoutError: As `Connection.send`.

        Cancellation: the request fails at the peer, unless the whole answer was sent.
        """
        sent = self._answer(buf)
        if sent == FOR_PYTHON:
            check_loop(self._served.loop, "request")
            buf, size = body_of("an answer", buf, self._served.room)
            self._require_open()
            rest = self._send(buf, size)
        else:
            rest = self._rest_of(sent)
        if rest is not None:
            await rest

    def _rest_of(self, sent: int | QueuedSend) -> Coroutine[Any, Any, None] | None:
        """Go on with an answer that C has sent, or has put into the line; as `_send`."""
        served = self._served
        if isinstance(sent, QueuedSend):
            return served.answer(self._number, sent, self._size)
        if sent:
            served.carrier._frame_failed(sent)
        return None

    def _send(self, buf: Any, size: int) -> Coroutine[Any, Any, None] | None:
        """Send the answer; if there is not enough room now, return a coroutine that does so."""
        served, number = self._served, self._number
        if size > served.room:
            served.carrier._require_size(size)
        rest = None
        if not self._canceled:
            if size > served.room:
                sending = served.carrier._send_frame(buf, number | ANSWER_BODY)
                rest = served.answer(number, sending, self._size)
            else:
                whole = pack(ANSWER_HEAD, number, 0) + buf
                code = served.sender(whole, None)
                if code > 0:
                    served.carrier._frame_failed(code)
                elif code:
                    sending = served.carrier._send_frame(whole, None)
                    rest = served.answer(number, sending, self._size)
            # Not when the rest is sent: as soon as the peer has the last byte, it may use the
            # number for another request.
            served.numbers.pop(number, None)
        self._note_answered()  # not earlier: after a MemoryError the request is still open
        if rest is None:
            served.done(self._size)
        return rest

    def fail(self, exc: BaseException) -> None:
        """Answer the request with an error.

        The peer's `request` raises `RequestError`, with the name of the class of `exc` and its
        text.  If `exc` is a subclass of RequestError of the library, such as RequestRefusedError,
        the peer raises the same class.

        Args:
            exc: An exception.  At most 1 KiB of its text is sent.

        Raises:
            TypeError: `exc` is no exception.
            RuntimeError: The request was answered before, or this is not the connection's loop.
        """
        check_loop(self._served.loop, "request")
        check_kind("exc", exc, BaseException, none=False)
        self._require_open()
        self._note_answered()
        self._served.done(self._size)
        if not self._canceled:
            self._served.final(self._number, code_of(exc), *_words_of(exc), served=True)

    def _refuse_late(self) -> bool:
        """Answer that the time is over, if it is, instead of the handler, which has not begun."""
        if self.deadline is None or self.deadline > self._served.loop.time():
            return False
        self._note_answered()
        self._served.done(self._size)
        self._served.final(self._number, ErrorCode.DEADLINE, "", _LATE)
        return True

    def _refuse(self) -> None:
        """Answer that the server is stopping, instead of the handler, which has not begun."""
        if not self._answered:
            self._note_answered()
            self._served.done(self._size)
            if not self._canceled:
                self._served.refuse(self._number)

    def _require_open(self) -> None:
        if self._answered:
            msg = "the request was answered before"
            raise RuntimeError(msg)

    def _cancel(self) -> None:
        """Note that the peer no longer waits for an answer."""
        self._note_canceled()
        if hasattr(self, "_waiter") and not self._waiter.done():
            self._waiter.set_result(None)
        if self._starter is not None:
            self._starter.cancel(self)

    def _answer_for_the_program(self) -> None:
        """Answer instead of the handler, which has returned; called by C."""
        self._last_words()()

    def _last_words(self) -> Callable[[], None]:
        """Return a function that answers, without a reference to this object."""
        self._note_answered()
        served, number, size, tell = self._served, self._number, self._size, not self._canceled

        def end() -> None:
            served.done(size)
            if tell:
                text = "the peer's program did not answer the request"
                served.final(number, ErrorCode.RAISED, "", text, served=True)

        return end

    def _dropped(self) -> None:
        """Called by C, in any thread, when a request without an answer is deallocated."""
        from_finalizer(self._served.loop, self._last_words())

    def __repr__(self) -> str:
        state = "canceled" if self._canceled else "answered" if self._answered else "open"
        peer = self.peername
        whose = f" of {peer[0]} port {peer[1]}" if peer else ""
        return f"<Request {self._number}{whose} {state}, {self._size} bytes>"


def _words_of(exc: BaseException) -> tuple[str, str]:
    """The name of the class, and the text; for an error of another peer, those of that peer."""
    if isinstance(exc, RequestError) and exc.remote_type:
        return exc.remote_type, exc.remote_text or str(exc)
    try:
        return type(exc).__name__, str(exc)
    except Exception:
        return type(exc).__name__, "(its text is not available)"


class Starter(Protocol):
    """Handlers of requests, which get them while no task is running."""

    def begin(self, request: Request, /) -> bool:
        """Begin with a request that has just arrived; False if it is to be queued."""

    def cancel(self, request: Request) -> None:
        """The peer has canceled a request with which this has begun."""

    def begin_with_queued(self) -> None:
        """Begin with requests that are queued, as many as may be taken."""


class _Announced:
    """A request whose body has not arrived yet."""

    __slots__ = ("deadline",)

    def __init__(self, deadline: float | None) -> None:
        self.deadline = deadline


_LATE = "the time was over before the request was served"
#: The entry in `Served.numbers` of a request whose ERROR frame waits for room: no handler has it.
_REFUSED = None
#: The same of a request that was served, and has failed.
_FAILED = False
#: How many bytes of requests a connection may have without a lease of the listener's budget.
_UNCOUNTED = 64 << 10
#: Leases are resized in steps of so many bytes.
_STEP = 64 << 10
_Entry = _Announced | Request | weakref.ref[Request] | bool | None


class Served(RequestTable):
    """The requests of the peer of one connection.

    Attributes:
        loop: The loop of the connection.
        carrier: What sends and receives frames for it: the connection.
        sender: A function that sends a frame if there is room for it now.
        room: The largest body in bytes that fits into a slot behind its header.
        starters: Handlers, which may begin with a request at once; if none does, it is queued.
    """

    __slots__ = (
        "_asked", "_ended", "_given_up", "_lease", "_line", "_outbox", "_starting",
        "_untold", "_waiter", "carrier", "loop", "room", "sender",
    )  # fmt: skip

    numbers: dict[int, _Entry]
    queue: dict[Request, None]
    starters: list[Starter]

    def __new__(cls, loop: asyncio.AbstractEventLoop, carrier: Carrier, outbox: Outbox) -> Served:
        """Make the part that C has; `Request` is the class of the requests that it makes."""
        return super().__new__(
            cls, Request, INITIAL_REQUESTS, INITIAL_BYTES, _UNCOUNTED, carrier._message_state
        )

    def __init__(self, loop: asyncio.AbstractEventLoop, carrier: Carrier, outbox: Outbox) -> None:
        self.loop: asyncio.AbstractEventLoop = loop
        self.carrier: Carrier = carrier
        self.sender: Callable[[bytes, None], int] = carrier._frame_sender
        self.room: int = carrier._frame_room - HEADER_SIZE
        self._starting = False  # the loop is going to have them begin with what is queued
        self._waiter: asyncio.Future[None] | None = None  # of `ended`
        self._outbox = outbox
        self._asked = False  # whether the peer has ever sent a request
        self._untold = False  # whether the grant was changed, and the peer does not know yet
        self._given_up = 0  # abandoned answers whose ERROR frame waits for room
        self._lease: Lease | None = carrier._request_lease
        if self._lease is None:
            self.set_lease(sys.maxsize, 0)
        self._line: WaitLine[None] = WaitLine()
        self._ended: Callable[[], BaseException | None] | None = None

    def grant(self, count: int, size: int) -> None:
        """Allow the peer to have `count` requests of `size` bytes together in progress.

        A GRANT frame that raises the limits is not sent before the first request of the peer, whose
        program may be receiving messages until then.
        """
        if (count, size) != (self.limit, self.limit_bytes):
            self.set_grant(count, size)
            self._untold = True
            if self._asked or count < INITIAL_REQUESTS or size < INITIAL_BYTES:
                self._tell_grant()
            self._let_next()

    def _tell_grant(self) -> None:
        self._untold = False
        self._outbox.post(frame(Kind.GRANT, self.limit, self.limit_bytes))

    # From the peer

    def on_request(self, number: int, left: int, body: Message | None) -> None:
        """Process a REQUEST frame.

        Args:
            number: The number of the request.
            left: Its limit in microseconds; 0 for none.
            body: Its body; None: it follows as a message of its own.
        """
        if number in self.numbers:
            msg = f"request {number} twice"
            raise ViolationError(msg)
        if len(self.numbers) >= self.hard_limit:
            msg = f"more than {self.hard_limit} requests at a time"
            raise ViolationError(msg)
        if self._given_up > self.hard_limit:
            msg = f"a request of a peer that has not taken {self._given_up} answers"
            raise ViolationError(msg)
        if not self._asked:
            self._asked = True
            if self._untold:
                self._tell_grant()
            self._let_c_admit()
        deadline = self.loop.time() + left * 1e-6 if left else None
        if body is None:
            self.numbers[number] = _Announced(deadline)
        else:
            self._admit(number, deadline, body)

    def on_body(self, number: int, message: Message) -> None:
        """Process the body of a request, which has arrived as a message of its own."""
        announced = self.numbers.get(number)
        if not isinstance(announced, _Announced):
            msg = f"the body of request {number}, which waits for none"
            # Without any request before, this is probably a plain message with an immediate.
            raise ViolationError(msg, foreign=not self._asked)
        self._admit(number, announced.deadline, message)

    def _admit(self, number: int, deadline: float | None, body: Message) -> None:
        size, name = len(body), ""
        if self._ended is not None:
            name, text = STOPPING_NAME, STOPPING
        elif self.queue and self.queued + size > self.hard_bytes:
            text = f"{self.queued} bytes of requests wait"
        elif (held := self.held + size) > self.may_hold and not self._widen(held):
            text = "the requests of all clients, or of those of this machine, take all the memory"
        else:
            request = self.numbers[number] = Request(self, number, deadline, body)
            self.hold(size)
            if self.queue or not self.begin(request):
                self._enqueue(request)
            return
        body.release()
        self.final(number, ErrorCode.OVERLOADED, name, text)

    def _let_c_admit(self) -> None:
        """Have C admit what is plain, if the next request may be."""
        self.set_admits(self._asked and self._ended is None and not self._given_up)

    def _enqueue(self, request: Request) -> None:
        """Have a request wait for the program; called by C, too."""
        self.queue[request] = None
        self.note_queued(request._size)
        if self._line.places:
            self._line.grant(None)

    def on_cancel(self, number: int) -> None:
        """Process a CANCEL frame.  If the request was answered, the frames have crossed."""
        entry = self.numbers.get(number)
        if entry is _REFUSED or entry is _FAILED:
            return
        request = entry() if isinstance(entry, weakref.ref) else entry
        if request is None and entry is not None:
            return  # dropped in another thread: its last words are under way, and are the answer
        self.final(number, ErrorCode.CANCELED, "", "")
        if not isinstance(request, Request):
            return
        if request in self.queue:
            self._drop(request)
        else:
            request._cancel()

    def _drop(self, request: Request) -> None:
        """End a request that the program has never seen."""
        del self.queue[request]
        self.note_queued(-request._size)
        request._note_answered()
        request._note_canceled()
        self.note_taken()
        self.done(request._size)

    # To the program

    async def take(self) -> Request:
        """Wait for the next request, and return it.

        Raises:
            StopAsyncIteration: The connection is closed, and no request is left.
            ConnectionLostError: It broke.
        """
        while (request := self.take_now()) is None:
            if self._ended is not None and not self.queue:
                raise self._ended() or StopAsyncIteration
            await self._line.wait()
        if self.queue and self._line.places:
            self._line.grant(None)  # the next task in line may take another one
        return request

    def _let_next(self) -> None:
        """A request that is queued may be taken now."""
        if self._line.places:
            self._line.grant(None)
        elif self.starters and not self._starting:
            self._starting = True
            self.loop.call_soon(self._start_queued)

    def _start_queued(self) -> None:
        self._starting = False
        for starter in list(self.starters):
            starter.begin_with_queued()

    def _tell_end(self) -> None:
        """End the waits for the end, and for requests."""
        self._line.grant_all(None)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def ended(self) -> None:
        """Wait until no further request comes.

        Raises:
            ConnectionLostError: The connection broke, and no request is left.
        """
        while self._ended is None:
            if self._waiter is None:
                self._waiter = self.loop.create_future()
            await asyncio.shield(self._waiter)
        if not self.queue and (failure := self._ended()) is not None:
            try:
                raise failure
            finally:
                del failure  # its traceback refers to this frame: a cycle

    def take_now(self) -> Request | None:
        """The next request that is not too late, if there is one and the grant has room for it."""
        while self.queue:
            request = next(iter(self.queue))
            if request.deadline is None or request.deadline > self.loop.time():
                if not self.has_room(self.held - self.queued + request._size):
                    return None
                del self.queue[request]
                self.note_queued(-request._size)
                self.note_taken()
                self.numbers[request._number] = weakref.ref(request)
                return request
            self._drop(request)
            self.final(request._number, ErrorCode.DEADLINE, "", _LATE)
        return None

    # Answers

    async def answer(self, number: int, sending: Awaitable[int | None], size: int) -> None:
        """Wait until the answer to a request of `size` bytes is sent; by C, with an errno or 0."""
        try:
            if code := await sending:
                self.carrier._frame_failed(code)
        except BaseException as exc:
            name, text = "", "the peer gave up its answer"
            if self._ended is not None and isinstance(exc, asyncio.CancelledError):
                name, text = type(exc).__name__, STOPPED
            self._given_up += 1
            self._let_c_admit()
            self._outbox.post(
                error_frame(number, ErrorCode.RAISED, name, text, GIVEN_UP), self._told_given_up
            )
            raise
        finally:
            self.done(size)

    def _told_given_up(self) -> None:
        self._given_up -= 1
        self._let_c_admit()

    def final(self, number: int, code: int, name: str, text: str, *, served: bool = False) -> None:
        """Answer a request with an ERROR frame, as soon as there is room."""
        if not self.carrier.is_closing():
            self.numbers[number] = _FAILED if served else _REFUSED
            self._outbox.post(
                error_frame(number, code, name, text), lambda: self.numbers.pop(number, None)
            )

    def refuse(self, number: int) -> None:
        """Tell the peer that no handler begins with a request, because this side is stopping."""
        self.final(number, ErrorCode.OVERLOADED, STOPPING_NAME, STOPPING)

    @property
    def all_answered(self) -> bool:
        """Whether each request that the program has got has its answer, and this was sent."""
        failed = any(entry is _FAILED for entry in self.numbers.values())
        return not (self.taken or self._given_up or failed)

    def _widen(self, held: int) -> bool:
        """Enlarge the lease to `held` bytes of requests; return whether that was possible."""
        return self._lease is None or self._resize(held)

    def _narrow(self) -> None:
        """Reduce the lease to what the present requests need."""
        if self._lease is not None:
            self._resize(self.held)

    def _resize(self, held: int) -> bool:
        assert self._lease is not None
        # In whole steps, so that not every request changes the lease.
        size = max(0, -(-(held - _UNCOUNTED) // _STEP) * _STEP)
        if not self._lease.resize(size):
            return False
        may_hold = _UNCOUNTED + size
        # Not before it is half empty, so that a client that sends one request after the other does
        # not change the lease each time.
        self.set_lease(may_hold, may_hold >> 1 if size else 0)
        return True

    # End

    def stop(self) -> None:
        """Refuse requests that arrive from now on; `take` still returns those that are queued."""
        if self._ended is None:
            self._ended = lambda: None
            self._let_c_admit()
            self._tell_end()

    async def told(self, limit_s: float) -> None:
        """Wait until all ERROR frames are sent; after `stop`, refuse what is queued first.

        Args:
            limit_s: Seconds that the frames may wait for room.

        Cancellation: ends the wait.
        """
        if self._ended is not None:
            for request in list(self.queue):
                self._drop(request)
                self.refuse(request._number)
        await self._outbox.sent(limit_s)

    def end(self, failure: Callable[[], BaseException | None]) -> None:
        """Note that no request arrives any more, and that no answer can be sent.

        Args:
            failure: Makes the exception of `take` when no request is left; it returns None if the
                connection was closed in good order.
        """
        self._ended = failure
        self._let_c_admit()
        for request in list(self.queue):
            self._drop(request)
        entries = list(self.numbers.values())
        self.numbers.clear()
        for entry in entries:
            request_or_none = entry() if isinstance(entry, weakref.ref) else entry
            if isinstance(request_or_none, Request) and not request_or_none._answered:
                request_or_none._cancel()
        self._tell_end()


class Requests(Uncopied):
    """Async iterator over the requests of the peer, from `Connection.requests`.

    Several tasks may share an iterator, or use one each; a request goes to one of them.
    """

    __slots__ = ("_served",)

    def __init__(self, served: Served) -> None:
        self._served = served

    def __aiter__(self) -> Requests:
        return self

    async def __anext__(self) -> Request:
        """The next request; the iteration ends when either side closes the connection.

        Raises:
            ConnectionLostError: The connection broke.
            RuntimeError: This is not the connection's event loop.

        Cancellation: no request is lost.
        """
        check_loop(self._served.loop, "iterator")
        return await self._served.take()
