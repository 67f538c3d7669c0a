"""Events of a connection and of its device, as an async iterator.

A connection subscribes to the events of its device when the first iterator is made, and stays
subscribed until it is closed.  Its iterators get the events of its port, of its queue pair and
completion queue, and of the device as a whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections import deque
from collections.abc import Callable
from typing import Self

from aiordma._ffi import ffi
from aiordma.cm.connection_event import ConnectionEvent
from aiordma.endpoint.link import Link
from aiordma.errors import DeviceRemovedError
from aiordma.loop import fork
from aiordma.loop.running import check_loop, check_thread
from aiordma.loop.uncopied import Uncopied
from aiordma.verbs.async_event import AsyncEvent, subscribe
from aiordma.verbs.enums import AsyncEventType

__all__ = ["ConnectionEvents", "EventHub"]

# Events that concern one queue pair or queue; all others concern a port or the whole device.
_OF_A_QUEUE = frozenset({
    AsyncEventType.CQ_ERR, AsyncEventType.QP_FATAL, AsyncEventType.QP_REQ_ERR,
    AsyncEventType.QP_ACCESS_ERR, AsyncEventType.COMM_EST, AsyncEventType.SQ_DRAINED,
    AsyncEventType.PATH_MIG, AsyncEventType.PATH_MIG_ERR, AsyncEventType.SRQ_ERR,
    AsyncEventType.SRQ_LIMIT_REACHED, AsyncEventType.QP_LAST_WQE_REACHED,
    AsyncEventType.WQ_FATAL,
})  # fmt: skip


class EventHub:
    """The open iterators of one connection; made together with the first of them."""

    __slots__ = ("_elements", "_ended", "_iterators", "_loop", "_port", "_unsubscribe")

    def __init__(self, link: Link) -> None:
        self._iterators: weakref.WeakSet[ConnectionEvents] = weakref.WeakSet()
        self._unsubscribe: Callable[[], None] | None = None
        self._ended = link.closed
        # Keep what is needed of the link, and not the link itself: the device's reader refers to
        # this object, and would keep alive a connection that nothing else refers to.
        self._loop = link.loop
        if self._ended:
            return
        self._port = link.cm_id.port_num
        queues = (link.qp, link.qp.send_cq)
        self._elements = {int(ffi.cast("uintptr_t", queue._handle)) for queue in queues}
        # If the device is gone, only the events of the connection manager are left.
        with contextlib.suppress(DeviceRemovedError):
            self._unsubscribe = subscribe(link.context, self._on_device_event)
        link.at_close(self.end)

    def open(self) -> ConnectionEvents:
        """Make an iterator over the events from now on."""
        iterator = ConnectionEvents(self._loop)
        if self._ended:
            iterator._end()
        else:
            self._iterators.add(iterator)
        return iterator

    def _on_device_event(self, event: AsyncEvent) -> None:
        if event.type in _OF_A_QUEUE:
            concerns = event.element in self._elements
        else:
            concerns = event.port in (0, self._port)
        if concerns:
            self.publish(event)

    def publish(self, event: ConnectionEvent | AsyncEvent) -> None:
        """Pass an event to every iterator."""
        for iterator in self._iterators:
            iterator._put(event)

    def end(self) -> None:
        """End all iterators, because the connection is closed."""
        self._ended = True
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None
        for iterator in self._iterators:
            iterator._end()


class ConnectionEvents(Uncopied):
    """Async iterator over the events of a connection, from `Connection.events()`.

    Yields a `cm.ConnectionEvent` for each event of the connection manager (DISCONNECTED,
    DEVICE_REMOVAL, ADDR_CHANGE, ...) and an event of `verbs.DeviceEvents` for each event of the
    device (PORT_ERR, PORT_ACTIVE, GID_CHANGE, DEVICE_FATAL, ...).  They need neither an
    acknowledgement nor a reaction: the library handles the end of a connection by itself.
    """

    __slots__ = ("__weakref__", "_closed", "_loop", "_queue", "_ready")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queue: deque[ConnectionEvent | AsyncEvent] = deque()
        self._ready = asyncio.Event()
        self._closed = False
        fork.guard_public(self)

    def _put(self, event: ConnectionEvent | AsyncEvent) -> None:
        if not self._closed:
            self._queue.append(event)
            self._ready.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ConnectionEvent | AsyncEvent:
        """The next event; the iteration ends when the connection is closed and none is left.

        Raises:
            RuntimeError: This is not the connection's event loop.

        Cancellation: safe; no event is lost.
        """
        check_loop(self._loop, "iterator")
        while not self._queue:
            if self._closed:
                raise StopAsyncIteration
            self._ready.clear()
            await self._ready.wait()
        return self._queue.popleft()

    def close(self) -> None:
        """End the iterator; events that have arrived are still returned.  Idempotent.

        Raises:
            RuntimeError: The connection's event loop runs in another thread; nothing was done.
        """
        check_thread(self._loop, "iterator")
        self._end()

    def _end(self) -> None:
        self._closed = True
        self._ready.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
