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

    Most calls have a deadline, and few reach it.  So all calls share one timer, the alarm, which is
    set again only when it has rung: a call costs two comparisons.  At a deadline the answers that
    have arrived count: a loop that was busy has their events together with the alarm's, and the
    tasks are to get them.

    The peer is told of a limit that the program has set for the call.  That of the configuration
    only bounds the wait, and its end is told by CANCEL, as any other.
"""

from __future__ import annotations

import asyncio
import errno
import math
from collections.abc import Awaitable, Callable, Coroutine
from types import EllipsisType
from typing import Any, TypeVar, overload

from aiordma._core import Message
from aiordma.arguments import bytes_of, seconds_left
from aiordma.errors import ConnectionLostError, ProtocolError, RequestDeadlineError
from aiordma.loop.timers import Timer, call_later
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
#: Turns of the loop that what has arrived at a deadline has, to reach its task.
_TURNS = 4


T = TypeVar("T")
#: The answer and the bytes of a request without its final frame; its deadline and time limit.
_Call = tuple[asyncio.Future[Message], int, float, float]


class Calls:
    """The unanswered requests of one side of a connection."""

    __slots__ = (
        "_abandoned", "_alarm", "_bytes", "_calls", "_carrier", "_due", "_failure", "_granted",
        "_granted_bytes", "_held", "_limit_s", "_line", "_loop", "_number", "_outbox", "_places",
        "_room", "_sender", "_steps", "_timer", "_told", "_waits",
    )  # fmt: skip

    def __init__(self, loop: asyncio.AbstractEventLoop, carrier: Carrier, outbox: Outbox) -> None:
        self._loop = loop
        self._carrier = carrier
        self._outbox = outbox
        self._sender = carrier._frame_sender
        self._room = carrier._frame_room - HEADER_SIZE
        self._limit_s = carrier._request_timeout_s
        self._calls: dict[int, _Call] = {}
        self._number = 0
        self._granted, self._granted_bytes = INITIAL_REQUESTS, INITIAL_BYTES
        self._held = self._bytes = 0  # of the calls under way, and of those that are let in
        self._places: dict[int, Place] = {}  # memory for the answers to calls
        self._told = False  # the peer has granted requests
        self._abandoned: set[int] = set()  # calls under way whose tasks have left
        self._steps = 0  # since the last final frame
        self._timer: asyncio.TimerHandle | None = None  # while there are abandoned calls
        self._due = math.inf  # when the alarm rings: at the first deadline, or before
        self._alarm: Timer | asyncio.Handle | None = None
        self._waits: dict[asyncio.Task[Any], float] = {}  # deadlines of `_until`
        self._line: WaitLine[None] = WaitLine()
        self._failure: Callable[[], BaseException] | None = None

    def __len__(self) -> int:
        """Requests that are sent, or wait to be, and are not answered."""
        return len(self._calls) + len(self._line)

    @overload
    def request(
        self, buf: Any, timeout: float | EllipsisType | None, into: None = None
    ) -> Coroutine[Any, Any, Message]: ...

    @overload
    def request(
        self, buf: Any, timeout: float | EllipsisType | None, into: Any
    ) -> Coroutine[Any, Any, Message | int]: ...

    def request(
        self, buf: Any, timeout: float | EllipsisType | None, into: Any = None
    ) -> Coroutine[Any, Any, Message | int]:
        """As `Connection.request`."""
        tell = False
        if timeout is ...:
            timeout = self._limit_s
        elif timeout is not None:
            timeout = seconds_left("timeout", timeout)
            tell = timeout != math.inf
        if into is not None:
            return self._request_into(buf, timeout, tell, into)
        return self._request(buf, timeout, tell)

    async def _request_into(self, buf: Any, timeout: float | None, tell: bool, into: Any) -> int:
        with bytes_of("into", into, writable=True) as view:
            if not view:
                msg = "into is empty: an empty answer needs room for a byte, too"
                raise ValueError(msg)
            place = Place(self._loop, view)
            return await place.take(await self._request(buf, timeout, tell, place))

    async def _request(
        self, buf: Any, timeout: float | None, tell: bool, place: Place | None = None
    ) -> Message:
        carrier = self._carrier
        buf, size = body_of("a request", buf, self._room)
        if size > self._room:
            carrier._require_size(size)
        if timeout is None:
            timeout = deadline = math.inf
        elif timeout:
            deadline = self._loop.time() + timeout
            if deadline < self._due:
                self._ring_at(deadline)
        else:
            text = "the deadline of the request had passed before: nothing was sent"
            raise RequestDeadlineError(errno.ETIMEDOUT, text)
        held = self._held
        left_s = timeout  # when the request is sent: all of it, without a wait in line
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
            await self._stand_in_line(size, deadline, timeout)
            left_s = deadline - self._loop.time()
        number = (self._number + 1) % ANSWER_BODY
        while number in self._calls:
            number = (number + 1) % ANSWER_BODY
        self._number = number
        answer: asyncio.Future[Message] = self._loop.create_future()
        call = self._calls[number] = (answer, size, deadline, timeout)
        if place is not None:
            self._places[number] = place
        begun = whole = False
        try:
            left = microseconds(left_s) if tell else 0
            if size <= self._room:
                request = pack(REQUEST_HEAD, number, left) + buf
                code = self._sender(request, None)
                if code > 0:
                    carrier._frame_failed(code)  # and with the connection this call
                elif code:
                    await self._until(deadline, timeout, carrier._send_frame(request, None))
                begun = whole = True
            else:
                head = frame(Kind.REQUEST, number, left, BODY_FOLLOWS)
                await self._until(deadline, timeout, carrier._send_frame(head, None))
                begun = whole = True  # of the body each byte may have arrived, whatever follows
                await self._until(deadline, timeout, carrier._send_frame(buf, number))
            if place is not None:
                return await self._until(deadline, timeout, place.answered(answer))
            return await answer
        except BaseException as exc:
            dropped = place is not None and place.left  # in the middle of its bytes
            if isinstance(exc, RequestDeadlineError) and _is_here(answer) and not dropped:
                return answer.result()
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

    # Deadlines

    async def _until(self, deadline: float, timeout: float, step: Awaitable[T]) -> T:
        """Await a step of a call that ends by a cancellation alone."""
        task = asyncio.current_task(self._loop)
        assert task is not None
        canceling = task.cancelling()
        self._waits[task] = deadline
        try:
            return await step
        except asyncio.CancelledError:
            if task in self._waits or task.cancelling() > canceling + 1:
                raise  # another call has canceled the task
            raise self._late(timeout) from None
        finally:
            if self._waits.pop(task, None) is None:
                task.uncancel()  # `_expire` has canceled it
            del task  # it keeps its error, whose traceback has this frame: a cycle

    def _ring_at(self, deadline: float) -> None:
        # Not a timer of the loop, which would make each of its turns dearer.
        alarm = call_later(self._loop, deadline - self._loop.time(), self._on_alarm)
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm, self._due = alarm, deadline

    def _on_alarm(self, turns: int = _TURNS) -> None:
        # Not at once: of a loop that was late, the reader may be next, and then the tasks.
        if turns:
            self._alarm = self._loop.call_soon(self._on_alarm, turns - 1)
        else:
            self._expire()

    def _expire(self) -> None:
        """End the waits whose deadlines have passed."""
        self._alarm, self._due = None, math.inf
        now, due = self._loop.time(), math.inf
        for place, _, (deadline, timeout) in self._line.places:
            if deadline > now:
                due = min(due, deadline)
            elif not place.done():
                place.set_exception(self._late(timeout))
        late = []
        for task, deadline in self._waits.items():
            if deadline > now:
                due = min(due, deadline)
            else:
                late.append(task)
        for task in late:
            del self._waits[task]
            task.cancel()
        for answer, _, deadline, timeout in self._calls.values():
            if deadline > now:
                due = min(due, deadline)
            elif not answer.done():
                answer.set_exception(self._late(timeout))
        if due < math.inf:
            # A look costs some 100 ns for each call: at most a tenth of the time.
            self._ring_at(max(due, now + 1e-6 * (len(self) + len(self._waits))))

    def _late(self, timeout: float) -> RequestDeadlineError:
        text = f"no answer to the request within {timeout:.3g} s"
        if not self._told:
            text += ", and the peer has not said that it takes requests: does it serve them?"
        return RequestDeadlineError(errno.ETIMEDOUT, text)

    # The grant

    async def _stand_in_line(self, size: int, deadline: float, timeout: float) -> None:
        """Wait until the peer's grant has room, and take it."""
        if self._failure is not None:
            raise self._failure()
        if self._fits(size) and self._line.next_size is None:
            self._held += 1
            self._bytes += size
        else:
            # A task that was let in, and canceled in the same moment, leaves its room to others.
            await self._line.wait(lambda _: self._leave(size), size, (deadline, timeout))
            if self._failure is not None:
                raise self._failure()
            if deadline < self._due:  # the alarm may have rung meanwhile
                self._ring_at(deadline)

    def _fits(self, size: int) -> bool:
        return (
            self._held < self._granted
            and len(self._abandoned) < MOST_ABANDONED
            and (not self._held or self._bytes + size <= self._granted_bytes)
        )

    def _leave(self, size: int) -> None:
        self._held -= 1
        self._bytes -= size
        if self._line.places:
            self._let_in()

    def _let_in(self) -> None:
        while (
            self._held < self._granted  # as `_fits`, before the look at the line
            and (size := self._line.next_size) is not None
            and self._fits(size)
        ):
            self._held += 1
            self._bytes += size
            self._line.grant(None)

    def place_of(self, number: int) -> Place | None:
        """The memory for the answer to a call, if its task has some."""
        return self._places.get(number)

    def is_abandoned(self, number: int) -> bool:
        """Whether the task of a call has left, and the call has not ended."""
        return number in self._abandoned

    def _abandon(self, number: int, call: _Call, begun: bool) -> None:
        """The task of a call leaves with an exception."""
        answer, size, _, _ = call
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
        # A peer that does not read a CANCEL in time may still answer the other calls.
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
            # Without any request before it, it is a message of the program, with its immediate.
            raise ViolationError(msg, foreign=not self._number)
        if self._abandoned:
            self._owed(number)
        answer, size, _, _ = call
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
            answer, size, _, _ = call
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
        if self._alarm is not None:
            self._alarm.cancel()
        self._due = -math.inf  # what still waits ends with the connection
        self._line.fail(failure)
        calls, self._calls = self._calls, {}
        for answer, *_ in calls.values():
            if not answer.done():
                answer.set_exception(failure())


def _is_here(answer: asyncio.Future[Message]) -> bool:
    """Whether an answer has arrived, and is a message."""
    return answer.done() and not answer.cancelled() and answer.exception() is None


# The name that a warning has of a coroutine that was never awaited.
for _call in (Calls._request, Calls._request_into):
    _call.__qualname__ = "Connection.request"
