"""Asynchronous events of a device: port up and down, GID changes, errors of queues.

All users of a device in one loop share one reader of its descriptor (`DeviceEvents`).  librdmacm's
context belongs to the whole process: with two event loops, whichever reads an event hands it to
the subscribers of both.

An event about a queue goes to the object of that queue as well, so that whoever waits for its
completions learns that they will not come.  It is found by a number that the C object carries
(`next_token`, `enroll`), never by its address, which may be another queue's by then.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self

from aiordma._ffi import ffi, lib
from aiordma.errors import os_error
from aiordma.loop import registry
from aiordma.loop.pump import FdPump
from aiordma.verbs.context import Context
from aiordma.verbs.enums import AsyncEventType

__all__ = ["AsyncEvent", "DeviceEvents", "Queue", "enroll", "next_token", "subscribe", "watch"]

_log = logging.getLogger("aiordma")


@dataclass(frozen=True, slots=True)
class AsyncEvent:
    """One device event (`ibv_get_async_event(3)`), acknowledged already.

    Attributes:
        type: What happened.
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

    def _on_async_event(self, event: AsyncEvent) -> None:
        """The device says something about it; called in any loop that reads the device."""


_tokens = itertools.count(1)
_queues: weakref.WeakValueDictionary[int, Queue] = weakref.WeakValueDictionary()


def next_token() -> int:
    """A number for a C object that is about to be made, for its context field."""
    return next(_tokens)


def enroll(token: int, queue: Queue) -> None:
    """Have the events of the C object with this number go to `queue`, as long as it lives."""
    _queues[token] = queue


class _Subscription:
    __slots__ = ("callback", "context", "loop")

    def __init__(
        self,
        context: Context,
        callback: Callable[[AsyncEvent], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.context = context
        self.callback = callback
        self.loop = loop


_subscriptions: list[_Subscription] = []


class _Reader:
    """The reader of one device's descriptor in one loop."""

    def __init__(self, context: Context) -> None:
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
            event = AsyncEvent(
                AsyncEventType(self._event.type),
                self._event.port,
                self._event.element,
                self._context,
            )
            _tell_queue(self._event.token, event)
            _publish(event)
        return True

    def _failed(self, exc: BaseException) -> None:
        # EIO on the descriptor is how the kernel says that the device was unplugged.
        _log.warning("device %s: no more events: %s", self._context, exc)
        _publish(AsyncEvent(AsyncEventType.DEVICE_FATAL, 0, 0, self._context))

    def close(self) -> None:
        self._pump.close()
        self._context._let_go()


def _tell_queue(token: int, event: AsyncEvent) -> None:
    queue = _queues.get(token) if token else None
    if queue is not None:
        try:
            queue._on_async_event(event)
        except Exception:
            # The reader serves everybody else on the device.
            _log.exception("device %s: handling %s failed", event.context, event.type.name)


def watch(context: Context) -> Callable[[], None]:
    """Have the running loop read the device's events for the sake of its queues.

    Returns:
        A function that ends it.
    """
    return registry.acquire(("async_events", id(context)), lambda: _Reader(context))[1]


def _publish(event: AsyncEvent) -> None:
    for subscription in _subscriptions:
        if subscription.context is event.context and not subscription.loop.is_closed():
            subscription.loop.call_soon_threadsafe(subscription.callback, event)


def subscribe(context: Context, callback: Callable[[AsyncEvent], None]) -> Callable[[], None]:
    """Have `callback` called in the running loop for each event of the device.

    Returns:
        A function that ends the subscription.
    """
    loop = asyncio.get_running_loop()
    _, release = registry.acquire(("async_events", id(context)), lambda: _Reader(context))
    subscription = _Subscription(context, callback, loop)
    _subscriptions.append(subscription)

    def end() -> None:
        if subscription in _subscriptions:
            _subscriptions.remove(subscription)
        release()

    return end


class DeviceEvents:
    """Async iterator over a device's events, from its creation on; `close()` ends it.

    Args:
        context: The device.
    """

    def __init__(self, context: Context) -> None:
        self._queue: deque[AsyncEvent] = deque()
        self._ready = asyncio.Event()
        self._closed = False
        self._end = subscribe(context, self._on_event)

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
