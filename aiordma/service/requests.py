"""serve_requests() and handle_requests(): a handler for each request, in a task of its own.

The task of a request is canceled when its peer cancels, or is gone.  At most `max_concurrent` tasks
of a connection run at a time; further requests wait in the library, where they can expire.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from aiordma.arguments import check_kind, whole
from aiordma.endpoint.config import ConnectionConfig
from aiordma.endpoint.connect import Opening
from aiordma.endpoint.connection import Connection
from aiordma.errors import RdmaError, RequestError, RequestRefusedError
from aiordma.link import tally
from aiordma.link.limits import ListenerLimits
from aiordma.link.log_share import LogShare
from aiordma.memory.shared import Memory
from aiordma.requests.served import STOPPING, Request
from aiordma.service.server import Server, serve, started

__all__ = ["RequestHandler", "handle_requests", "serve_requests"]

_log = logging.getLogger("aiordma")

#: Its result is the answer: a buffer; or None, for an empty answer or where it has called `reply`.
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
    grace_s: float = 10.0,
    signals: bool = False,
) -> Opening[Server]:
    """Serve each request by a call of `handler`; awaited, or used with `async with`.

    Args:
        handler: As of `handle_requests`.
        host: As of `listen`.
        port: 0 to 65535; 0 lets the kernel choose, see `Server.port`.
        max_concurrent: Handlers of a connection that run at a time.
        limit: Requests of a connection at a time, as of `Connection.requests`.
        limit_bytes: Bytes of these requests.
        backlog: As of `listen`.
        config: Settings of the connections.
        memory: Registered memory that the connections share, in one protection domain.
        ipv6_only: Take IPv6 clients alone.
        limits: Limits of the connections and memory that clients may hold; see docs/limits.md.
        grace_s: Seconds that handlers have at the end to finish; then they are canceled, and their
            requests refused.
        signals: As of `serve`.

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
    return serve(
        each, host, port, backlog=backlog, config=config, memory=memory, ipv6_only=ipv6_only,
        limits=limits, grace_s=grace_s, signals=signals,
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
        handler: A function that is called with each `Request`, in a task of its own, and awaited.
            Its result is the answer; None is an empty answer, unless it has called `reply`.  An
            exception fails the request at the peer, and is logged unless it is a RequestError, up
            to 20 times in 10 seconds.  The
            task is canceled when the peer cancels the request, or is gone.
        max_concurrent: Handlers that run at a time; further requests wait.
        limit: As of `Connection.requests`.
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
    loop = served.loop
    tasks: dict[asyncio.Task[None], Request] = {}
    room = asyncio.Event()

    def ended(task: asyncio.Task[None]) -> None:
        # Not in the task: it may have been canceled before it began.
        request = tasks.pop(task)
        if task.cancelled() and not request.canceled:
            _fail(request, RequestRefusedError(STOPPING))
        request._end()
        room.set()

    try:
        while True:
            while len(tasks) >= max_concurrent:
                room.clear()
                await room.wait()
            try:
                request = served.take_now() or await served.take()
            except StopAsyncIteration:
                break
            task = loop.create_task(_handle(connection, handler, request, tracebacks))
            request._on_cancel = task.cancel
            tasks[task] = request
            del request  # of the last there would be a body otherwise
            task.add_done_callback(ended)
        if tasks:
            await asyncio.wait(tasks)
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await served.told(connection.config.close_timeout_s)


async def _handle(
    connection: Connection, handler: RequestHandler, request: Request, tracebacks: LogShare
) -> None:
    try:
        if request._canceled:
            return
        if tally.observed:
            with tally.Operation("reply", connection._peer_attributes):
                answer = await started(handler, request)
                await _reply(connection, request, answer, tracebacks)
            return
        answer = await started(handler, request)
        # The most frequent case, and quick.
        if type(answer) is bytes and not request._answered:
            if (rest := request._send(answer, len(answer))) is not None:
                await rest
        else:
            await _reply(connection, request, answer, tracebacks)
    except asyncio.CancelledError:
        if not request.canceled:
            text = "the server stopped while it served the request"
            _fail(request, RequestError(text, remote_type="CancelledError", remote_text=text))
        raise
    except RequestError as exc:
        _fail(request, exc)
    except Exception as exc:
        if isinstance(exc, RdmaError) and connection.is_closing():
            _log.debug("%r of %r: %s", request, connection, exc)  # of each request that it had
        elif tracebacks.may_log(connection.get_extra_info("peername")):
            _log.exception("the handler of %r of %r has raised", request, connection)
        _fail(request, exc)


async def _reply(
    connection: Connection, request: Request, answer: Any, tracebacks: LogShare
) -> None:
    if not request.answered:
        await request.reply(b"" if answer is None else answer)
    elif answer is not None and tracebacks.may_log(connection.get_extra_info("peername")):
        _log.error("%r: the handler has answered it, and returned another answer", request)


def _fail(request: Request, exc: BaseException) -> None:
    if not request.answered:
        request.fail(exc)
