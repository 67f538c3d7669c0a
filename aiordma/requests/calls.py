"""The requests of this side that the peer has not answered.  Here they are named calls.

Theory of operation
    Each call has a number, and ends with exactly one frame of the peer: an ANSWER with its body, or
    an ERROR.  If the task of a call is canceled, or its time is over, the call is *abandoned*: this
    side sends CANCEL, and the number stays in use until the final frame arrives.  The peer's
    library answers a CANCEL by itself, unless the answer is already on its way.  So a number never
    stands for two requests, and both sides agree on how many calls are in progress.

    The peer grants a number of calls and a number of bytes; further calls wait in line.  They also
    wait, whatever was granted, while `MOST_ABANDONED` calls are abandoned.  If all calls in
    progress are abandoned, and the peer ends none of them within `UNANSWERED_S` seconds, it breaks
    the protocol.

    A frame that fits into a slot is sent completely or not at all.  So nothing has to be canceled
    if the task of a call is canceled before the frame is sent.  A longer body is a message of its
    own, which may have been sent in part; its REQUEST frame was sent before, so CANCEL follows.

    Most calls have a deadline that they never reach.  So all calls share one timer, which is set
    again only after it has fired or for an earlier deadline; a call then costs two comparisons.  An
    answer that has arrived before the deadline is processed counts, even if its event comes after
    the timer's, because the loop was busy.

    A limit that the program has set for a call is sent to the peer.  The limit of the configuration
    is not: it only ends the wait of this side, with a CANCEL like any other.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import math
from collections.abc import Awaitable, Callable, Coroutine
from types import EllipsisType
from typing import Any, TypeVar, overload

from aiordma._core import NO_ROOM, Call, CallTable, Message, RequestTable
from aiordma._core import Coroutine as CallCoroutine
from aiordma.arguments import bytes_of, seconds_left
from aiordma.errors import (
    ConnectionLostError,
    ProtocolError,
    RequestDeadlineError,
    RequestRefusedError,
)
from aiordma.loop.running import from_finalizer
from aiordma.loop.timers import Timer, call_later
from aiordma.loop.wait_line import WaitLine
from aiordma.requests.outbox import Outbox
from aiordma.requests.place import Place
from aiordma.requests.wire import (
    BODY_FOLLOWS,
    GIVEN_UP,
    HEADER_SIZE,
    INITIAL_BYTES,
    INITIAL_REQUESTS,
    Carrier,
    Kind,
    ViolationError,
    body_of,
    error_of,
    frame,
)

__all__ = ["MOST_ABANDONED", "UNANSWERED_S", "Calls"]

#: How many abandoned calls may wait for their final frame.
MOST_ABANDONED = 4096
#: How long the peer has, in seconds, to end one of the abandoned calls.
UNANSWERED_S = 120.0
#: This time is measured in so many steps, because a loop that was blocked for all of it fires only
#: one timer, and the frames of the peer are read before the next.
_STEPS = 4
#: At a deadline, answers that have arrived get so many iterations of the loop to reach their task.
_TURNS = 4


T = TypeVar("T")
#: A global is found faster than an attribute; None if the compiled module is not there.
_requesting: Callable[..., Coroutine[Any, Any, Message]] = getattr(
    CallCoroutine, "requesting", None
)  # type: ignore[assignment]


class Calls:
    """The unanswered requests of one side of a connection."""

    __slots__ = (
        "_alarm", "_carrier", "_failure", "_limit_s", "_line", "_loop", "_outbox", "_places",
        "_refusal", "_room", "_sender", "_table", "_timer", "_told", "_waits",
    )  # fmt: skip

    def __init__(
        self, loop: asyncio.AbstractEventLoop, carrier: Carrier, outbox: Outbox, exchange: Any
    ) -> None:
        self._loop = loop
        self._carrier = carrier
        self._outbox = outbox
        self._sender = carrier._frame_sender
        self._room = carrier._frame_room - HEADER_SIZE
        self._limit_s = carrier._request_timeout_s
        # The calls, and those that are about to be sent, count against the grant.
        self._table = CallTable(
            self, exchange, INITIAL_REQUESTS, INITIAL_BYTES, MOST_ABANDONED, carrier._message_state
        )
        self._places: dict[int, Place] = {}  # memory of the program for answers, by number
        self._told = False  # whether the peer has ever sent a GRANT
        self._timer: asyncio.TimerHandle | None = None  # runs while there are abandoned calls
        self._alarm: Timer | asyncio.Handle | None = None  # rings at `CallTable.due`
        self._waits: dict[asyncio.Task[Any], float] = {}  # the deadlines of tasks in `_until`
        self._line: WaitLine[None] = WaitLine()
        self._failure: Callable[[], BaseException] | None = None
        self._refusal: Callable[[], BaseException] | None = None  # of all that had no answer

    def serve(self, served: RequestTable) -> None:
        """Have C pass the requests of the peer to a table."""
        self._table.serve(served)

    def __len__(self) -> int:
        """The number of calls that are in progress, or wait in line."""
        return len(self._table) + len(self._line)

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
        return _requesting(self._table, self, buf, timeout, tell)

    async def _request_into(self, buf: Any, timeout: float | None, tell: bool, into: Any) -> int:
        with bytes_of("into", into, writable=True) as view:
            if not view:
                msg = "into is empty: an empty answer needs room for a byte, too"
                raise ValueError(msg)
            place = Place(self._loop, view)
            return await place.take(await self._request(buf, timeout, tell, place))

    def _request_in_python(
        self, buf: Any, timeout: float | None, tell: bool, code: int
    ) -> Coroutine[Any, Any, Message]:
        """Go on with a request that C cannot make.

        Args:
            buf: As for `Connection.request`.
            timeout: The seconds that are left, or None.
            tell: Whether to send them to the peer.
            code: If positive, the errno of its post.  NO_ROOM: it is the first in line.
        """
        if code > 0:
            self._carrier._frame_failed(code)  # ends the connection, and so this call
        return self._request(buf, timeout, tell, first=code == NO_ROOM)

    async def _request(
        self,
        buf: Any,
        timeout: float | None,
        tell: bool,
        place: Place | None = None,
        *,
        first: bool = False,
    ) -> Message:
        carrier, table = self._carrier, self._table
        buf, size = body_of("a request", buf, self._room)
        if size > self._room:
            carrier._require_size(size)
        if timeout is None:
            timeout = deadline = math.inf
        elif timeout:
            deadline = self._loop.time() + timeout
            if deadline < table.due:
                self._ring_at(deadline)
        else:
            text = "the deadline of the request had passed before: nothing was sent"
            raise RequestDeadlineError(errno.ETIMEDOUT, text)
        left_s = timeout  # the time that is left when the request is sent
        if self._failure is None and (first or not self._line.places) and table.fits(size):
            table.take(size)
        else:
            await self._stand_in_line(size, deadline, timeout)
            left_s = deadline - self._loop.time()
        call = table.enter(self._loop, size, deadline, timeout)
        if place is not None:
            self._places[call.number] = place
        begun = whole = False
        try:
            left = left_s if tell else None
            if size <= self._room:
                request = call.header(left, 0) + buf
                code = self._sender(request, None)
                if code > 0:
                    carrier._frame_failed(code)  # ends the connection, and so this call
                elif code:
                    await self._until(deadline, timeout, carrier._send_frame(request, None))
                begun = whole = True
            else:
                head = call.header(left, BODY_FOLLOWS)
                await self._until(deadline, timeout, carrier._send_frame(head, None))
                # From here on the peer may have the whole request, even if the next send fails.
                begun = whole = True
                await self._until(deadline, timeout, carrier._send_frame(buf, call.number))
            if place is not None:
                return await self._until(deadline, timeout, place.answered(call))
            return await call
        except BaseException as exc:
            dropped = place is not None and place.left  # its answer was only read in part
            if isinstance(exc, RequestDeadlineError) and not dropped and (here := call.answer):
                return here
            self._abandon(call, begun)
            if isinstance(exc, ConnectionLostError):
                await self._note_lost(exc, whole)
            raise
        finally:
            if place is not None:
                place.leave()
                if self._places.get(call.number) is place:
                    del self._places[call.number]
            del call  # the traceback of its exception refers to this frame: a cycle

    async def _note_lost(self, exc: ConnectionLostError, sent: bool) -> None:
        """Note what has become of a request whose send has failed.

        The send of a body only hears of the disconnection.

        Raises:
            RequestRefusedError: The peer has said that it serves none that has no answer.
        """
        if self._failure is None:
            await asyncio.sleep(0)  # its last frames are about to be read
        if self._refusal is not None:
            raise self._refusal() from None
        exc.request_sent = sent

    # Deadlines

    async def _until(self, deadline: float, timeout: float, step: Awaitable[T]) -> T:
        """Await something that can only be ended by canceling the task; raise at the deadline."""
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
            # The task keeps its exception, whose traceback refers to this frame: a cycle.
            del task

    def _ring_at(self, deadline: float) -> None:
        # Not a timer of the event loop, which would make each of its iterations more expensive.
        alarm = call_later(self._loop, deadline - self._loop.time(), self._on_alarm)
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = alarm
        self._table.set_due(deadline)

    def _on_alarm(self, turns: int = _TURNS) -> None:
        # Not at once: if the loop was late, the answer may be read in the next iteration, and its
        # task run in the one after that.
        if turns:
            self._alarm = self._loop.call_soon(self._on_alarm, turns - 1)
        else:
            self._expire()

    def _expire(self) -> None:
        """End the waits whose deadlines have passed."""
        self._alarm = None
        self._table.set_due(math.inf)
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
        for call in self._table.calls():
            if call.deadline > now:
                due = min(due, call.deadline)
            elif not call.ended:
                self._table.end(call, self._late(call.timeout))
        if due < math.inf:
            # This method takes some 100 ns for each call.  A pause of 1 us for each call keeps that
            # below a tenth of the time.
            self._ring_at(max(due, now + 1e-6 * (len(self) + len(self._waits))))
        self._table.resume()

    def _late(self, timeout: float) -> RequestDeadlineError:
        text = f"no answer to the request within {timeout:.3g} s"
        if not self._told:
            text += ", and the peer has not said that it takes requests: does it serve them?"
        return RequestDeadlineError(errno.ETIMEDOUT, text)

    # The grant

    def _line_up(self, call: Call) -> None:
        """Have a call wait for the grant that C has made, and sends when it is let in."""
        place: asyncio.Future[None] = call  # type: ignore[assignment]  # it has what is asked of it
        self._line.places.append((place, call.size, (call.deadline, call.timeout)))
        self._table.set_line(True)
        self._let_in()  # those before it may have left the line, or given back their part

    async def _stand_in_line(self, size: int, deadline: float, timeout: float) -> None:
        """Wait until the peer's grant has room for a call of `size` bytes, and count the call."""
        if self._failure is not None:
            raise self._failure()
        if self._table.fits(size) and self._line.next_size is None:
            self._table.take(size)
        else:
            # If the task is canceled after it was granted its turn, `_leave` lets in the next.
            turn = self._line.wait(lambda _: self._leave(size), size, (deadline, timeout))
            self._table.set_line(True)
            self._let_in()  # as in `_line_up`
            await turn
            if self._failure is not None:
                raise self._failure()
            if deadline < self._table.due:  # the timer may have fired meanwhile
                self._ring_at(deadline)

    def _leave(self, size: int) -> None:
        self._table.give_back(size)
        self._let_in()

    def _let_in(self) -> None:
        table, line = self._table, self._line
        while (size := line.next_size) is not None and table.fits(size):
            table.take(size)
            line.grant(None)
        if not line.places:
            table.set_line(False)

    def place_of(self, number: int) -> Place | None:
        """The memory that the program has given for the answer to a call, if any."""
        return self._places.get(number)

    def is_abandoned(self, number: int) -> bool:
        """Whether a call was abandoned, and its final frame has not arrived yet."""
        call = self._table.find(number)
        return call is not None and call.abandoned

    def _call_abandoned(self, call: Call) -> None:
        """Note that an exception ends the task of a call that C has sent.

        In any thread, as the collector may close the coroutine of such a task.
        """
        from_finalizer(self._loop, functools.partial(self._abandon, call, True))

    def _abandon(self, call: Call, begun: bool) -> None:
        """Note that an exception ends the task of a call; `begun`: if its frame was sent."""
        if self._loop.is_closed():
            return  # nobody hears of it: the collector has found the coroutine
        if not self._table.abandoned:
            self._stop_timer()  # of calls whose final frames have come
        if self._table.abandon(call, begun):
            self._outbox.post(frame(Kind.CANCEL, call.number))
            if self._timer is None:
                self._table.begin_steps()
                self._timer = self._loop.call_later(UNANSWERED_S / _STEPS, self._step)
        elif self._line.places:
            self._let_in()

    def _step(self) -> None:
        """Count a step of the time that the peer has to end an abandoned call."""
        self._timer = None
        if not self._table.abandoned:
            return
        if self._table.step() < _STEPS:
            self._timer = self._loop.call_later(UNANSWERED_S / _STEPS, self._step)
        else:
            text = f"the peer answered no cancellation of a request within {UNANSWERED_S:g} s"
            self._carrier._break_requests(ProtocolError(errno.EPROTO, text))

    # From the peer

    def on_grant(self, count: int, size: int) -> None:
        """Process a GRANT frame: how many calls, and bytes of calls, the peer accepts."""
        if not count:
            msg = "a grant of no request"
            raise ViolationError(msg)
        self._told = True
        self._table.set_grant(count, size)
        self._let_in()

    def on_answer(self, number: int, message: Message) -> None:
        """Process the answer to a call."""
        table = self._table
        call = table.find(number)
        if call is None:
            msg = f"an answer to request {number}, which waits for none"
            # Without any call before, this is probably a plain message with an immediate.
            raise ViolationError(msg, foreign=not table.number)
        if call.ended:
            message.release()
        table.finish(call, message, None)
        self._ended_one()

    def on_error(self, number: int, flags: int, code: int, words: bytes) -> None:
        """Process the ERROR frame that ends a call."""
        call = self._table.find(number)
        if call is not None:
            error = error_of(code, words)
            if isinstance(error, RequestRefusedError) and error._stopping:
                self._carrier._note_stopping()
            self._table.finish(call, None, error)
            self._ended_one()
        elif not flags & GIVEN_UP:
            msg = f"an error for request {number}, which waits for none"
            raise ViolationError(msg)

    def _ended_one(self) -> None:
        if self._line.places:
            self._let_in()
        if not self._table.abandoned:
            self._stop_timer()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def resume(self) -> None:
        """Resume the tasks whose calls have ended; while no task is running."""
        self._table.resume()

    def fail(
        self, failure: Callable[[], BaseException], unanswered: Callable[[], BaseException]
    ) -> None:
        """End all calls, because the connection is over.

        Args:
            failure: Makes the exception of calls that come later.
            unanswered: Makes that of those under way, and in line.
        """
        self._failure = failure
        if isinstance(unanswered(), RequestRefusedError):
            self._refusal = unanswered
        self._stop_timer()
        if self._alarm is not None:
            self._alarm.cancel()
        # No timer any more: what still waits ends with the connection.
        self._table.set_due(-math.inf)
        self._line.fail(unanswered)
        for call in self._table.close():
            if not call.ended:
                error = unanswered()
                if isinstance(error, ConnectionLostError):
                    error.request_sent = call.sent
                self._table.end(call, error)
        self._loop.call_soon(self.resume)


# A warning about a coroutine that was never awaited names it by this.
Calls._request_into.__qualname__ = "Connection.request"
