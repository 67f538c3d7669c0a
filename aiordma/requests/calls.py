"""Calls: the requests of this side that the peer has not answered.

Theory of operation
    Each request has a number, and exactly one final frame of the peer ends it: ANSWER with its
    body, or ERROR.  A call whose task has left, by a cancellation or its time limit, keeps its
    number until then; the peer has been told by CANCEL, and answers that, unless its answer is
    on the way.  So a number never means two requests, and the calls that this side has under way
    are those that the peer counts.

    The peer grants a number of calls, and bytes of them; further calls wait in line.  They also
    wait while the peer owes the end of `MOST_ABANDONED` calls whose tasks have left, whatever it
    has granted.  If all calls under way are such, and the peer ends none for `UNANSWERED_S`, it
    breaks the rules: its library answers a CANCEL by itself.

    A frame that fits into a slot was sent, or was not: a call whose send was canceled then leaves
    nothing behind.  A body of its own may have been sent in part; its frame was, so CANCEL follows.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Coroutine
from typing import Any, overload

from aiordma._core import Message
from aiordma.arguments import bytes_of, seconds_left
from aiordma.errors import ConnectionLostError, ProtocolError, RequestDeadlineError
from aiordma.loop.wait_line import WaitLine
from aiordma.requests.outbox import Outbox
from aiordma.requests.place import Place
from aiordma.requests.wire import (
    ANSWER_BODY,
    BODY_FOLLOWS,
    GIVEN_UP,
    HEADER_SIZE,
    INITIAL_BYTES,
    INITIAL_REQUESTS,
    REQUEST_HEAD,
    Carrier,
    Kind,
    ViolationError,
    body_of,
    error_of,
    frame,
    microseconds,
    pack,
)

__all__ = ["MOST_ABANDONED", "UNANSWERED_S", "Calls"]

#: Calls of which the tasks have left, without their final frames.
MOST_ABANDONED = 4096
#: Seconds for a final frame, of any call, while a CANCEL is not answered.
UNANSWERED_S = 120.0
#: A loop that was held up for all of the time has had one of these steps only.
_STEPS = 4


#: The answer, and the bytes, of a request without its final frame.
_Call = tuple[asyncio.Future[Message], int]


class Calls:
    """The unanswered requests of one side of a connection."""

    __slots__ = (
        "_abandoned", "_bytes", "_calls", "_carrier", "_failure", "_granted", "_granted_bytes",
        "_held", "_line", "_loop", "_number", "_outbox", "_places", "_room", "_sender", "_steps",
        "_timer", "_told",
    )  # fmt: skip

    def __init__(self, loop: asyncio.AbstractEventLoop, carrier: Carrier, outbox: Outbox) -> None:
        self._loop = loop
        self._carrier = carrier
        self._outbox = outbox
        self._sender = carrier._frame_sender
        self._room = carrier._frame_room - HEADER_SIZE
        self._calls: dict[int, _Call] = {}
        self._number = 0
        self._granted, self._granted_bytes = INITIAL_REQUESTS, INITIAL_BYTES
        self._held = self._bytes = 0  # of the calls under way, and of those that are let in
        self._places: dict[int, Place] = {}  # memory for the answers to calls
        self._told = False  # the peer has granted requests
        self._abandoned: set[int] = set()  # calls under way whose tasks have left
        self._steps = 0  # since the last final frame
        self._timer: asyncio.TimerHandle | None = None  # while there are abandoned calls
        self._line: WaitLine[None] = WaitLine()
        self._failure: Callable[[], BaseException] | None = None

    def __len__(self) -> int:
        """Requests that are sent, or wait to be, and are not answered."""
        return len(self._calls) + len(self._line)

    @overload
    def request(
        self, buf: Any, timeout: float | None, into: None = None
    ) -> Coroutine[Any, Any, Message]: ...

    @overload
    def request(
        self, buf: Any, timeout: float | None, into: Any
    ) -> Coroutine[Any, Any, Message | int]: ...

    def request(
        self, buf: Any, timeout: float | None, into: Any = None
    ) -> Coroutine[Any, Any, Message | int]:
        """As `Connection.request`."""
        if into is not None:
            return self._request_into(buf, timeout, into)
        if timeout is None:
            return self._request(buf, None)
        return self._request_within(buf, seconds_left("timeout", timeout))

    async def _request_into(self, buf: Any, timeout: float | None, into: Any) -> int:
        with bytes_of("into", into, writable=True) as view:
            if not view:
                msg = "into is empty: an empty answer needs room for a byte, too"
                raise ValueError(msg)
            place = Place(self._loop, view)
            if timeout is None:
                answer = await self._request(buf, None, place)
            else:
                seconds = seconds_left("timeout", timeout)
                answer = await self._request_within(buf, seconds, place)
            return await place.take(answer)

    async def _request_within(
        self, buf: Any, timeout: float, place: Place | None = None
    ) -> Message:
        if not timeout:
            text = "the deadline of the request had passed before: nothing was sent"
            raise RequestDeadlineError(errno.ETIMEDOUT, text)
        deadline = self._loop.time() + timeout
        scope = asyncio.timeout_at(deadline)
        try:
            async with scope:
                return await self._request(buf, deadline, place)
        except TimeoutError:
            if not scope.expired():
                raise
            text = f"no answer to the request within {timeout:.3g} s"
            if not self._told:
                text += ", and the peer has not said that it takes requests: does it serve them?"
            raise RequestDeadlineError(errno.ETIMEDOUT, text) from None

    async def _request(
        self, buf: Any, deadline: float | None, place: Place | None = None
    ) -> Message:
        carrier = self._carrier
        buf, size = body_of("a request", buf, self._room)
        if size > self._room:
            carrier._require_size(size)
        held = self._held
        if (
            held < self._granted
            and not self._line.places
            and not self._abandoned
            and (not held or self._bytes + size <= self._granted_bytes)
            and self._failure is None
        ):
            self._held = held + 1
            self._bytes += size
        else:
            await self._stand_in_line(size)
        number = (self._number + 1) % ANSWER_BODY
        while number in self._calls:
            number = (number + 1) % ANSWER_BODY
        self._number = number
        answer: asyncio.Future[Message] = self._loop.create_future()
        call = self._calls[number] = (answer, size)
        if place is not None:
            self._places[number] = place
        begun = whole = False
        try:
            left = 0 if deadline is None else microseconds(deadline - self._loop.time())
            if size <= self._room:
                request = pack(REQUEST_HEAD, number, left) + buf
                if self._sender(request, None):
                    await carrier._send_frame(request, None)
                begun = whole = True
            else:
                await carrier._send_frame(frame(Kind.REQUEST, number, left, BODY_FOLLOWS), None)
                begun = whole = True  # of the body each byte may have arrived, whatever follows
                await carrier._send_frame(buf, number)
            return await (answer if place is None else place.answered(answer))
        except BaseException as exc:
            self._abandon(number, call, begun)
            if isinstance(exc, ConnectionLostError):
                exc.request_sent = whole
            raise
        finally:
            if place is not None:
                place.leave()
                if self._places.get(number) is place:
                    del self._places[number]
            del answer, call  # its exception has this frame: a cycle

    async def _stand_in_line(self, size: int) -> None:
        """Wait until the peer's grant has room, and take it."""
        if self._failure is not None:
            raise self._failure()
        if self._line.next_size is None and self._fits(size):
            self._take(size)
        else:
            # A task that was let in, and canceled in the same moment, leaves its room to others.
            await self._line.wait(lambda _: self._leave(size), size)
            if self._failure is not None:
                raise self._failure()

    def _fits(self, size: int) -> bool:
        return (
            self._held < self._granted
            and len(self._abandoned) < MOST_ABANDONED
            and (not self._held or self._bytes + size <= self._granted_bytes)
        )

    def _take(self, size: int) -> None:
        self._held += 1
        self._bytes += size

    def _leave(self, size: int) -> None:
        self._held -= 1
        self._bytes -= size
        if self._line.places:
            self._let_in()

    def _let_in(self) -> None:
        while (size := self._line.next_size) is not None and self._fits(size):
            self._take(size)
            self._line.grant(None)

    def place_of(self, number: int) -> Place | None:
        """The memory for the answer to a call, if its task has some."""
        return self._places.get(number)

    def is_abandoned(self, number: int) -> bool:
        """Whether the task of a call has left, and the call has not ended."""
        return number in self._abandoned

    def _abandon(self, number: int, call: _Call, begun: bool) -> None:
        """The task of a call leaves with an exception."""
        answer, size = call
        if answer.done():
            if not answer.cancelled():
                answer.exception()  # asyncio would log it as never retrieved
        else:
            answer.cancel()
        if self._calls.get(number) is not call:
            return
        if begun:
            self._abandoned.add(number)
            self._outbox.post(frame(Kind.CANCEL, number))
            if self._timer is None:
                self._steps = 0
                self._timer = self._loop.call_later(UNANSWERED_S / _STEPS, self._step)
        else:
            del self._calls[number]
            self._leave(size)

    def _owed(self, number: int) -> None:
        """A final frame has come while the peer owed some of abandoned calls."""
        self._steps = 0
        self._abandoned.discard(number)
        if not self._abandoned:
            self._stop_timer()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _step(self) -> None:
        """A part of the time is over in which the peer has to end an abandoned call."""
        self._timer = None
        # A server that is stopping reads no CANCEL, and may still answer the other calls.
        self._steps = self._steps + 1 if len(self._abandoned) == len(self._calls) else 0
        if self._steps < _STEPS:
            self._timer = self._loop.call_later(UNANSWERED_S / _STEPS, self._step)
        else:
            text = f"the peer answered no cancellation of a request within {UNANSWERED_S:g} s"
            self._carrier._break_requests(ProtocolError(errno.EPROTO, text))

    # From the peer

    def on_grant(self, count: int, size: int) -> None:
        """The peer takes so many requests, and bytes of them, at a time."""
        if not count:
            msg = "a grant of no request"
            raise ViolationError(msg)
        self._told = True
        self._granted, self._granted_bytes = count, size
        self._let_in()

    def on_answer(self, number: int, message: Message) -> None:
        """Take the answer to a call."""
        call = self._calls.pop(number, None)
        if call is None:
            msg = f"an answer to request {number}, which waits for none"
            raise ViolationError(msg)
        if self._abandoned:
            self._owed(number)
        answer, size = call
        if answer.done():
            message.release()
        else:
            answer.set_result(message)
        self._held -= 1
        self._bytes -= size
        if self._line.places:
            self._let_in()

    def on_error(self, number: int, flags: int, code: int, words: bytes) -> None:
        """Take the error that ends a call."""
        call = self._calls.pop(number, None)
        if call is not None:
            if self._abandoned:
                self._owed(number)
            answer, size = call
            if not answer.done():
                answer.set_exception(error_of(code, words))
            self._leave(size)
        elif not flags & GIVEN_UP:
            msg = f"an error for request {number}, which waits for none"
            raise ViolationError(msg)

    def fail(self, failure: Callable[[], BaseException]) -> None:
        """The connection is over: all calls raise the exception that `failure` makes."""
        self._failure = failure
        self._stop_timer()
        self._line.fail(failure)
        calls, self._calls = self._calls, {}
        for answer, _ in calls.values():
            if not answer.done():
                answer.set_exception(failure())
