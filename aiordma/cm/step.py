"""Steps of a connection id: the stages that it passes, and the step that is under way.

A step is a C call that returns at once, and an event that reports its end.  An id has at most
one step under way.  The first event that can end the step does so, with success or failure, so that
no wait lasts for ever.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from enum import Enum

from aiordma.cm.connection_event import ConnectionEvent
from aiordma.cm.enums import EventType
from aiordma.errors import ConnectTimeoutError, busy_error, cm_error, os_error
from aiordma.loop.limit import Limit
from aiordma.loop.workers import call_blocking, connecting
from aiordma.verbs.resource import Resource

__all__ = ["Stage", "Step"]

# Events that never end a step, because they do not concern it.
_ASIDE = frozenset({
    EventType.TIMEWAIT_EXIT, EventType.ADDR_CHANGE, EventType.CONNECT_REQUEST,
    EventType.MULTICAST_JOIN, EventType.MULTICAST_ERROR,
})  # fmt: skip
_ADDR_ERROR = EventType.ADDR_ERROR  # up to Python 3.11 a look at a member takes as long as a call


class Stage(Enum):
    """How far an id has come."""

    IDLE = "idle"
    BOUND = "bound"
    LISTENING = "listening"
    ADDRESS_RESOLVED = "address resolved"
    ROUTE_RESOLVED = "route resolved"
    CONNECTING = "connecting"
    REQUESTED = "requested"
    RESPONDED = "accepted by the peer"
    ACCEPTED = "accepted"
    CONNECTED = "connected"
    SERVICE_RESOLVED = "service resolved"
    ANSWERED = "answered"
    DISCONNECTED = "disconnected"
    FAILED = "failed"


class Step:
    """The step of a connection id that is under way, if any.

    Attributes:
        retries: Whether another try follows a time-out; the event of the time-out is then hidden.
    """

    __slots__ = ("_answers", "_future", "retries")

    def __init__(self) -> None:
        self._answers: frozenset[EventType] = frozenset()
        self._future: asyncio.Future[ConnectionEvent] | None = None
        self.retries: bool = False

    async def run(
        self,
        loop: asyncio.AbstractEventLoop,
        call: Callable[[], None],
        answers: frozenset[EventType],
        timeout: float | None,
        *,
        blocks: Resource | None = None,
    ) -> ConnectionEvent:
        """Make the call and await its answer.

        Args:
            loop: The running loop.
            call: The C call.
            answers: Events that mean success.
            timeout: Seconds; None for no limit.
            blocks: For a call that can block, and goes to a thread: the id, which outlives it.

        Raises:
            RdmaOSError: Another step is under way (EBUSY).
            ConnectTimeoutError: `timeout` has passed.
            OSError: The call has failed, or another event has come.

        Cancellation: ends the wait.
        """
        if self._future is not None:
            msg = "another step of this connection id is under way"
            raise busy_error(msg)
        future: asyncio.Future[ConnectionEvent] = loop.create_future()
        self._answers, self._future = answers, future
        timer: asyncio.TimerHandle | None = None
        try:
            if blocks is not None:
                return await _in_thread(blocks, call, future, answers, timeout)
            call()
            if timeout is not None:
                # Lighter than asyncio.timeout(), and only the future is awaited.
                timer = loop.call_later(timeout, _expire, future, answers, timeout)
            return await future
        finally:
            if timer is not None:
                timer.cancel()
            self._future = None
            future.cancel()
            del future  # its exception has this frame in its traceback

    def answer(self, event: ConnectionEvent) -> bool:
        """End the step if the event does that; True if it did."""
        kind = event.type
        if self.retries and kind is _ADDR_ERROR:
            event.hidden = event.status == -errno.ETIMEDOUT
        future = self._future
        if future is None or future.done():
            return False
        if kind in self._answers:
            future.set_result(event)
        elif kind in _ASIDE:
            return False
        elif kind is EventType.ADDR_RESOLVED and event.status:
            # _core/cm.c went on to the route by itself, and its call failed.
            future.set_exception(os_error(-event.status, "rdma_resolve_route"))
        else:
            future.set_exception(cm_error(kind.name, event.status, event.private_data))
        return True

    def fail(self, exc: BaseException) -> None:
        """End the step without an event."""
        if self._future is not None and not self._future.done():
            self._future.set_exception(exc)


def _late(answers: frozenset[EventType], timeout: float | None) -> ConnectTimeoutError:
    text = f"no {' or '.join(sorted(kind.name for kind in answers))} within {timeout} s"
    return ConnectTimeoutError(errno.ETIMEDOUT, text)


def _expire(
    future: asyncio.Future[ConnectionEvent], answers: frozenset[EventType], timeout: float
) -> None:
    if not future.done():
        future.set_exception(_late(answers, timeout))


async def _in_thread(
    cm_id: Resource,
    call: Callable[[], None],
    future: asyncio.Future[ConnectionEvent],
    answers: frozenset[EventType],
    timeout: float | None,
) -> ConnectionEvent:
    def run() -> None:
        cm_id._retain()  # the C id outlives the call, whatever happens to its caller
        try:
            call()
        finally:
            cm_id._let_go()

    limit = Limit(timeout)
    try:
        with limit:
            await call_blocking(run, undo=lambda _: None, pool=connecting)
            return await future
    except TimeoutError as exc:
        if not limit.expired or isinstance(exc, ConnectTimeoutError):
            raise
        raise _late(answers, timeout) from exc
    finally:
        del future
