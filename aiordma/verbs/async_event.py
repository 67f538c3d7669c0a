"""Asynchronous events of a device: port up and down, GID changes, errors of queues.

All users of a device in one loop share a reader of its descriptor (`DeviceEvents`).  librdmacm's
context belongs to the whole process: with two event loops, the loop that reads an event passes it
on to the subscribers of both.

An event about a queue goes to the object of that queue as well, in the queue's own loop, so that a
task that waits for its completions gets an error.  The object is found by a number that the C
object carries (`next_token`, `enroll`), never by its address, which another queue may have by then.

A device ends with DEVICE_FATAL, which all its queues get.  Where the kernel takes a device away
from programs that use it, its descriptor cannot be read any more, which counts as the same.
Software devices are not taken away: there the kernel waits for the programs.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

from aiordma._ffi import ffi, lib
from aiordma.errors import device_error, os_error
from aiordma.logs import log_of
from aiordma.loop import fork, registry
from aiordma.loop.pump import FdPump
from aiordma.loop.raised import ENDS_THE_LOOP, throw
from aiordma.loop.uncopied import Uncopied
from aiordma.loop.weak import living
from aiordma.verbs.context import Context, copy_of
from aiordma.verbs.enums import AsyncEventType

__all__ = [
    "AsyncEvent", "DeviceEvents", "Queue", "dismiss", "enroll", "next_token", "subscribe", "watch",
]  # fmt: skip

_log = log_of()


@dataclass(frozen=True, slots=True)
class AsyncEvent:
    """One device event (`ibv_get_async_event(3)`), acknowledged already.

    Attributes:
        type: Kind of the event.
        port: Port number for port events, else 0.
        element: Address of the queue pair, CQ or SRQ that it concerns, else 0.
        context: The device.
    """

    type: AsyncEventType
    port: int
    element: int
    context: Context


class Queue(Protocol):
    """A completion queue, queue pair or shared receive queue, as the reader sees it."""

    @property
    def _device(self) -> Context:
        """The device of the queue."""

    @property
    def _home(self) -> asyncio.AbstractEventLoop | None:
        """The loop that has to call `_on_async_event`; None for any."""

    def _on_async_event(self, event: AsyncEvent) -> None:
        """Take an event of the queue, or of its device (DEVICE_FATAL)."""


_tokens = itertools.count(1)
# Not `weakref.WeakValueDictionary`, in which a reference needs a callback: each connection has one.
_queues: dict[int, weakref.ref[Queue]] = {}


def next_token() -> int:
    """A number for a C object that is about to be made, for its context field."""
    return next(_tokens)


def enroll(token: int, queue: Queue) -> None:
    """Have the events of the C object with this number go to `queue`, while it lives."""
    _queues[token] = weakref.ref(queue)


def dismiss(token: int) -> None:
    """Undo `enroll`, as the C object is destroyed.  In any thread."""
    _queues.pop(token, None)


class _Subscription(NamedTuple):
    context: Context
    callback: Callable[[AsyncEvent], None]
    gone: Callable[[], None] | None
    loop: asyncio.AbstractEventLoop


_subscriptions: list[_Subscription] = []


class _Reader:
    """The reader of one device's descriptor in one loop."""

    def __init__(self, context: Context) -> None:
        self.gone = False
        self._context = context
        self._event = ffi.new("struct aio_async_event *")
        loop = asyncio.get_running_loop()
        self._pump = FdPump(loop, context.async_fd, self._drain, self._failed)
        context._retain()  # its descriptor stays open as long as the loop watches it

    def _drain(self) -> bool:
        for _ in range(64):
            code = lib.aio_async_next(self._context._handle, self._event)
            if code == -errno.EAGAIN:
                return False
            if code == -errno.EINTR:
                continue
            if code:
                raise os_error(-code, "ibv_get_async_event")
            event = copy_of(AsyncEvent, self._event, context=self._context)
            # Published first: a queue that fails may end its connection, and the connection's
            # iterators, before anything else gets a turn.
            _publish(event)
            _tell_queue(self._event.token, event)
            if event.type == AsyncEventType.DEVICE_FATAL:
                _tell_all_queues(event)
        return True

    def _failed(self, exc: Exception) -> None:
        # By EIO on the descriptor the kernel reports that the device was unplugged.
        _log.warning("device %s: no more events: %s", self._context, exc)
        self.gone = True
        event = AsyncEvent(AsyncEventType.DEVICE_FATAL, 0, 0, self._context)
        _publish(event)
        _tell_all_queues(event)
        for subscription in _subscribers(self._context):
            if subscription.gone is not None:
                subscription.loop.call_soon_threadsafe(subscription.gone)

    def close(self) -> None:
        self._pump.close()
        self._context._let_go()


def _tell(queue: Queue, event: AsyncEvent) -> None:
    home = queue._home
    try:
        if home is None or home is asyncio.get_running_loop():
            queue._on_async_event(event)
        elif not home.is_closed():
            home.call_soon_threadsafe(queue._on_async_event, event)
    except BaseException as exc:
        # An exception must not end the reader, which serves all other queues of the device.
        if isinstance(exc, ENDS_THE_LOOP):
            throw(asyncio.get_running_loop(), exc)
            return
        _log.exception("device %s: handling %s failed", event.context, event.type.name)


def _tell_queue(token: int, event: AsyncEvent) -> None:
    reference = _queues.get(token)
    queue = None if reference is None else reference()
    if queue is not None:
        _tell(queue, event)


def _tell_all_queues(event: AsyncEvent) -> None:
    for queue in living(_queues.copy().values()):
        if queue._device is event.context:
            _tell(queue, event)


def watch(context: Context) -> Callable[[], None]:
    """Have the running loop read the device's events, for its queues.

    Returns:
        A function that ends it.

    Raises:
        DeviceRemovedError: The device is gone.
    """
    reader, release = registry.acquire(("async_events", id(context)), lambda: _Reader(context))
    if reader.gone:
        release()
        raise device_error()
    return release


def _subscribers(context: Context) -> list[_Subscription]:
    return [s for s in _subscriptions if s.context is context and not s.loop.is_closed()]


def _publish(event: AsyncEvent) -> None:
    for subscription in _subscribers(event.context):
        subscription.loop.call_soon_threadsafe(subscription.callback, event)


def subscribe(
    context: Context,
    callback: Callable[[AsyncEvent], None],
    gone: Callable[[], None] | None = None,
) -> Callable[[], None]:
    """Have `callback` called in the running loop for each event of the device.

    Args:
        context: The device.
        callback: Takes the event.
        gone: Called when no event will follow any more, because the device is gone.

    Returns:
        A function that ends the subscription.

    Raises:
        DeviceRemovedError: The device is gone.
    """
    loop = asyncio.get_running_loop()
    release = watch(context)
    subscription = _Subscription(context, callback, gone, loop)
    _subscriptions.append(subscription)

    def end() -> None:
        if subscription in _subscriptions:
            _subscriptions.remove(subscription)
        release()

    return end


class DeviceEvents(Uncopied):
    """Async iterator over a device's events, from its creation on.

    The events report ports that go up and down (PORT_ACTIVE, PORT_ERR), changes of their addresses
    (GID_CHANGE, which software iWARP does not report), queues that fail, and the end of the device
    (DEVICE_FATAL).  The iteration ends when the device is gone, or with `close()`.

    Args:
        context: The device.

    Raises:
        DeviceRemovedError: The device is gone already.
    """

    def __init__(self, context: Context) -> None:
        self._queue: deque[AsyncEvent] = deque()
        self._ready = asyncio.Event()
        self._closed = False
        self._end = subscribe(context, self._on_event, self.close)
        fork.guard_public(self)

    def _on_event(self, event: AsyncEvent) -> None:
        self._queue.append(event)
        self._ready.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> AsyncEvent:
        """The next event.  Cancellation: safe; no event is lost."""
        while not self._queue:
            if self._closed:
                raise StopAsyncIteration
            self._ready.clear()
            await self._ready.wait()
        return self._queue.popleft()

    def close(self) -> None:
        """End the iterator.  Idempotent."""
        if not self._closed:
            self._closed = True
            self._end()
            self._ready.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
