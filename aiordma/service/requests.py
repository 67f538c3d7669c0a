"""serve_requests() and handle_requests(): a handler for each request, in a task of its own.

The task of a request is canceled when its peer cancels, or is gone.  At most `max_concurrent` tasks
of a connection run at a time; further requests wait in the library, where they can expire.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
from collections.abc import Awaitable, Callable, Iterable
from types import CoroutineType
from typing import Any

from aiordma._core import FOR_PYTHON
from aiordma.arguments import check_kind, name_of, whole
from aiordma.endpoint.config import ConnectionConfig
from aiordma.endpoint.connect import Opening
from aiordma.endpoint.connection import Connection
from aiordma.endpoint.listener import Authorize
from aiordma.errors import RdmaError, RequestError
from aiordma.link import tally
from aiordma.link.limits import ListenerLimits
from aiordma.link.log_share import LogShare
from aiordma.loop.lasting import until_done
from aiordma.loop.running import is_canceled
from aiordma.memory.shared import Memory
from aiordma.requests.served import Request, Served
from aiordma.requests.wire import STOPPED
from aiordma.service.server import Server, checked, serve, started

__all__ = ["RequestHandler", "handle_requests", "serve_requests"]

_log = logging.getLogger("aiordma")

#: Its result is the answer: a buffer; or None, for an empty answer or if it has called `reply`.
RequestHandler = Callable[[Request], Awaitable[Any]]


def _check_handler(handler: Any, max_concurrent: int) -> None:
    if not callable(handler):
        msg = f"the handler has to be a function that takes a Request, not {handler!r}"
        raise TypeError(msg)
    whole("max_concurrent", max_concurrent, 1, 1_000_000)


def serve_requests(
    handler: RequestHandler,
    host: str | None,
    port: int,
    *,
    max_concurrent: int = 100,
    limit: int = 256,
    limit_bytes: int = 64 << 20,
    backlog: int = 256,
    config: ConnectionConfig | None = None,
    memory: Memory | None = None,
    ipv6_only: bool = False,
    limits: ListenerLimits | None = None,
    allow: Iterable[str] | None = None,
    deny: Iterable[str] = (),
    authorize: Authorize | None = None,
    grace_s: float = 10.0,
    signals: bool = False,
) -> Opening[Server]:
    """Serve each request by a call of `handler`; to be awaited, or used with `async with`.

    Args:
        handler: As for `handle_requests`.
        host: As for `listen`.
        port: 0 to 65535; 0 lets the kernel choose, see `Server.port`.
        max_concurrent: How many handlers of a connection may run at a time.
        limit: Requests of a connection at a time, as for `Connection.requests`.
        limit_bytes: Bytes of these requests.
        backlog: As for `listen`.
        config: Settings of the connections.
        memory: Registered memory that the connections share, in one protection domain.
        ipv6_only: Whether to accept only IPv6 clients.
        limits: Limits of the connections and memory that clients may hold; see docs/limits.md.
        allow: Networks whose clients may connect, as for `listen`.
        deny: Networks whose clients may not.
        authorize: Decides about each client, as for `listen`.
        grace_s: Seconds that handlers get to finish when the server stops; then they are canceled,
            and their requests refused.
        signals: As for `serve`.

    Raises:
        TypeError, ValueError: An argument is invalid; raised by the call, before it is awaited.
        Others: as `listen`.

    Cancellation: the server is closed.
    """
    _check_handler(handler, max_concurrent)
    whole("limit", limit, 1, 1_000_000)
    whole("limit_bytes", limit_bytes, 1, 1 << 50)
    each = functools.partial(
        _handle_all, handler=handler, max_concurrent=max_concurrent, limit=limit,
        limit_bytes=limit_bytes, tracebacks=LogShare("errors of handlers"),
    )  # fmt: skip
    each.__qualname__ = name_of(handler)  # type: ignore[attr-defined]  # for the server's log
    return serve(
        each, host, port, backlog=backlog, config=config, memory=memory, ipv6_only=ipv6_only,
        limits=limits, allow=allow, deny=deny, authorize=authorize, grace_s=grace_s,
        signals=signals,
    )  # fmt: skip


async def handle_requests(
    connection: Connection,
    handler: RequestHandler,
    *,
    max_concurrent: int = 100,
    limit: int = 256,
    limit_bytes: int = 64 << 20,
) -> None:
    """Serve the requests of one connection by calls of `handler`, until it is closed.

    Args:
        connection: The connection, of a server or of a client.
        handler: A coroutine function that is called with each `Request`, in a task of its own.  Its
            result is the answer; None is an empty answer, unless it has called `reply`.  An
            exception fails the request at the peer, and is logged unless it is a RequestError, up
            to 20 times in 10 seconds.  The task is canceled when the peer cancels the request, or
            is gone.
        max_concurrent: How many handlers may run at a time; further requests wait.
        limit: As for `Connection.requests`.
        limit_bytes: Likewise.

    Raises:
        TypeError, ValueError: An argument is invalid.
        ConnectionLostError: The connection broke.
        Others: as `Connection.requests`.

    Cancellation: cancels the handlers, refuses their requests, and waits for their end.
    """
    check_kind("connection", connection, Connection, none=False)
    _check_handler(handler, max_concurrent)
    await _handle_all(
        connection, handler=handler, max_concurrent=max_concurrent, limit=limit,
        limit_bytes=limit_bytes, tracebacks=LogShare("errors of handlers"),
    )  # fmt: skip


async def _handle_all(
    connection: Connection,
    *,
    handler: RequestHandler,
    max_concurrent: int,
    limit: int,
    limit_bytes: int,
    tracebacks: LogShare,
) -> None:
    served = connection.requests(limit=limit, limit_bytes=limit_bytes)._served
    handlers = _Handlers(connection, served, handler, max_concurrent, tracebacks)
    served.starters.append(handlers)
    try:
        handlers.begin_with_queued()
        await served.ended()
        await handlers.end()  # the end of one lets in the next that is queued
        await served.ended()
    finally:
        served.starters.remove(handlers)
        try:
            await handlers.cancel_all()
        finally:
            await served.told(connection.config.close_timeout_s)


class _Handlers:
    """The handlers that run for the requests of one connection, each in a task of its own.

    Each task gets a copy of the context in which this object was made, wherever it is begun: no
    handler sees variables that the handler of another request has set.
    """

    __slots__ = (
        "_connection", "_context", "_handler", "_most", "_served", "_tasks", "_tracebacks",
    )  # fmt: skip

    def __init__(
        self,
        connection: Connection,
        served: Served,
        handler: RequestHandler,
        most: int,
        tracebacks: LogShare,
    ) -> None:
        self._connection = connection
        self._context = contextvars.copy_context()
        self._served = served
        self._handler = handler
        self._most = most
        self._tracebacks = tracebacks
        self._tasks: dict[Request, asyncio.Task[None]] = {}

    def begin(self, request: Request) -> bool:
        """Begin with a request; False if as many handlers run as may."""
        if len(self._tasks) >= self._most:
            return False
        running = self._run(request)
        try:
            task = self._served.loop.create_task(running, context=self._context.copy())
        except BaseException:
            running.close()  # nobody awaits it any more
            raise
        if not task.done():  # a factory of the loop may have begun it at once
            self._tasks[request] = task
        return True

    def begin_with_queued(self) -> None:
        """Begin with requests that had to wait, unless the handlers are being canceled."""
        while self in self._served.starters and len(self._tasks) < self._most:
            if (request := self._served.take_now()) is None:
                return
            if self.begin(request) and not request._answered:
                request._set_starter(self)

    async def cancel_all(self) -> None:
        """Cancel all handlers, and wait for their end, which a cancellation does not cut short."""
        for request in self._tasks:
            self.cancel(request)
        try:
            await until_done(self._tasks.values())
        finally:
            self._forget_done()

    async def end(self) -> None:
        """Wait until no handler runs, and no request is queued."""
        while self._tasks:
            await asyncio.wait(list(self._tasks.values()))
            self._forget_done()

    def _forget_done(self) -> None:
        for request, task in list(self._tasks.items()):
            if task.done():  # it was canceled before it began, and not by `cancel`
                self._never_begun(request)

    def cancel(self, request: Request) -> None:
        """Cancel the handler of a request: the peer waits no more, or the server stops."""
        task = self._tasks[request]
        task.cancel()
        # A task that is canceled before it begins runs no line of `_run`.
        task.add_done_callback(lambda _: self._never_begun(request))

    def _never_begun(self, request: Request) -> None:
        if request in self._tasks:
            request._refuse()
            self._ended(request)

    def _ended(self, request: Request) -> None:
        self._tasks.pop(request, None)
        if request._end():
            self.begin_with_queued()

    async def _run(self, request: Request) -> None:
        connection, handler, tracebacks = self._connection, self._handler, self._tracebacks
        try:
            if request._canceled or (request.deadline is not None and request._refuse_late()):
                return
            if tally.observed:
                with tally.Operation("reply", connection._peer_attributes):
                    answer = await started(handler, request)
                    await _reply(connection, request, handler, answer, tracebacks)
                return
            handling = handler(request)
            answer = await (handling if type(handling) is CoroutineType else checked(handling))
            if sent := request._answer(answer):  # not 0, which is the most frequent case
                if sent == FOR_PYTHON:
                    await _reply(connection, request, handler, answer, tracebacks)
                elif (rest := request._rest_of(sent)) is not None:
                    await rest
        except RequestError as exc:
            _fail(request, exc)
        except (Exception, asyncio.CancelledError) as exc:
            if isinstance(exc, asyncio.CancelledError) and is_canceled():
                if not request.canceled:
                    kind = "CancelledError"
                    _fail(request, RequestError(STOPPED, remote_type=kind, remote_text=STOPPED))
                raise
            if isinstance(exc, RdmaError) and connection.is_closing():
                _log.debug("%r of %r: %s", request, connection, exc)  # of each request that it had
            elif tracebacks.may_log(connection.get_extra_info("peername")):
                words = "the handler %s of %r of %r has raised"
                _log.exception(words, name_of(handler), request, connection)
            _fail(request, exc)
        finally:
            self._tasks.pop(request, None)  # as `_ended` does, which would be one more call
            if request._end():
                self.begin_with_queued()


async def _reply(
    connection: Connection,
    request: Request,
    handler: RequestHandler,
    answer: Any,
    tracebacks: LogShare,
) -> None:
    if not request.answered:
        await request.reply(b"" if answer is None else answer)
    elif answer is not None and tracebacks.may_log(connection.get_extra_info("peername")):
        words = "%r: the handler %s has answered it, and returned another answer"
        _log.error(words, request, name_of(handler))


def _fail(request: Request, exc: BaseException) -> None:
    if not request.answered:
        request.fail(exc)
