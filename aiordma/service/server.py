"""serve(): a Server, whose handler gets each connection in a task of its own.

Theory of operation
    A task accepts, and begins a task for each connection, which closes the connection when the
    handler has returned, and aborts it after an exception, which is logged.

    A handler of requests that is canceled has answered or refused those that it had.  So its
    connection is closed, too, which tells its client that all others may be sent elsewhere.

    The end has three steps.  The listener closes; clients that have just connected get a handler
    all the same.  Each connection receives no more than the messages that have arrived, which ends
    handlers that wait for another message; a handler that works can still answer.  After `grace_s`
    the handlers that are left are canceled, and the server waits for the ends of connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator
from types import CoroutineType
from typing import Any, Self, TypeVar

from aiordma._core import Message
from aiordma.arguments import check_awaitable, check_seconds, name_of
from aiordma.cm.address import Address
from aiordma.endpoint.config import ConnectionConfig
from aiordma.endpoint.connect import Opening
from aiordma.endpoint.connection import Connection
from aiordma.endpoint.listener import Authorize, Listener, opener
from aiordma.errors import ConnectionEndedError, RdmaError, ResourceClosedError
from aiordma.link.limits import ListenerLimits
from aiordma.link.log_share import LogShare
from aiordma.logs import FOR_ALL, log_of
from aiordma.loop import background
from aiordma.loop.lasting import result_of, until_done
from aiordma.loop.running import check_loop, check_thread, is_canceled
from aiordma.loop.signals import heeding
from aiordma.loop.uncopied import Uncopied
from aiordma.memory.shared import Memory

__all__ = ["Handler", "Server", "serve"]

_log = log_of("listener")
_BACKLOG = 256
#: Seconds in which handlers may end before a warning.  One that closes a connection of its own
#: waits a second at most for the peer to disconnect.
_QUIET_S = 1.0
#: The marks of the servers that have called the handler in which the current task was made.
_handled_by: contextvars.ContextVar[frozenset[object]] = contextvars.ContextVar(
    "servers of the handler", default=frozenset()
)

Handler = Callable[[Connection], Awaitable[object]]
Subject = TypeVar("Subject")
Result = TypeVar("Result")


def started(handler: Callable[[Subject], Awaitable[Result]], subject: Subject) -> Awaitable[Result]:
    """Call a handler.

    Raises:
        TypeError: As `checked`.
    """
    return checked(handler(subject))


def checked(handling: Awaitable[Result]) -> Awaitable[Result]:
    """What a handler has returned.

    Raises:
        TypeError: The handler is no coroutine function, and this is nothing that can be awaited.
    """
    if type(handling) is not CoroutineType:
        check_awaitable("the handler", handling)
    return handling


def serve(
    handler: Handler,
    host: str | None,
    port: int,
    *,
    backlog: int = _BACKLOG,
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
    """Serve each connection by a call of `handler`; to be awaited, or used with `async with`.

    Args:
        handler: A coroutine function that is called with each `Connection`, in a task of its own.
            The connection is closed when it returns; a result is dropped, and bytes are logged as a
            mistake.  After an exception only this connection is aborted.  The exception is logged,
            unless the connection was lost before, up to 20 times in 10 seconds for each source.
        host: As for `listen`.
        port: 0 to 65535; 0 lets the kernel choose, see `Server.port`.
        backlog: As for `listen`.
        config: Settings of the connections.
        memory: Registered memory that the connections share, in one protection domain.
        ipv6_only: Whether to accept only IPv6 clients.
        limits: Limits of the connections and memory that clients may hold; see docs/limits.md.
        allow: Networks whose clients may connect, as for `listen`.
        deny: Networks whose clients may not.
        authorize: Decides about each client, as for `listen`.
        grace_s: Seconds that handlers get to finish when the server stops; then they are canceled.
        signals: Whether SIGINT (Ctrl-C) and SIGTERM end `wait_closed` and `serve_forever`, as with
            the `signals` of the latter, but from the opening of the server until `stop` has ended.
            If the block of `async with` waits for anything else, its task is canceled, and once the
            server has stopped, the program goes on behind the block.  A program that waits in none
            of these is ended by the signal as any other, but only once the server has stopped.
            Only in the main thread.

    Raises:
        TypeError, ValueError: An argument is invalid; raised by the call, before it is awaited.
        Others: as `listen`.

    Cancellation: the server is closed.
    """
    if not callable(handler):
        msg = f"the handler has to be a function that takes a Connection, not {handler!r}"
        raise TypeError(msg)
    check_seconds("grace_s", grace_s, zero=True, none=False)
    listen = opener(
        host,
        port,
        backlog=backlog,
        config=config,
        memory=memory,
        ipv6_only=ipv6_only,
        limits=limits,
        allow=allow,
        deny=deny,
        authorize=authorize,
    )

    async def open_() -> Server:
        return Server(await listen(), handler, grace_s, signals)

    return Opening(open_(), "serve")


class Server(Uncopied):
    """Serves connections by a handler; made by `serve`.

    `async with` stops it in good order, even after an exception in the block, or a signal that has
    ended the block, as `signals` of `serve` says.

    Attributes:
        listener: Where clients connect.
        grace_s: Seconds that handlers get to finish when the server stops.
    """

    def __init__(
        self, listener: Listener, handler: Handler, grace_s: float, signals: bool = False
    ) -> None:
        self.listener = listener
        self.grace_s = grace_s
        self._handler = handler
        self._mark = object()  # in `_handled_by`, which keeps no server alive
        self._loop = asyncio.get_running_loop()
        self._connections: dict[asyncio.Task[None], Connection] = {}
        self._closing: set[asyncio.Task[None] | None] = set()  # of these: the handler has returned
        self._begins = True  # whether handlers begin with connections
        self._stopping: asyncio.Task[None] | None = None
        self._tracebacks = LogShare("errors of handlers")
        self._asked = asyncio.Event()  # to stop, by a signal or by close()
        self._signals = signals
        self._signaled = False
        self._waiting: list[asyncio.Task[Any] | None] = []  # tasks until the server is to end
        # The task in the block of `async with`, how often it was canceled before, and how often by
        # signals since.
        self._inside: asyncio.Task[Any] | None = None
        self._cancelling = self._canceled = 0
        self._until_stopped = contextlib.ExitStack()
        if signals:
            self._until_stopped.enter_context(heeding(self._loop, self._on_signal))
        listener._left_over = self._begin  # clients that have just connected when it is closed
        self._accepting = self._loop.create_task(self._accept())
        self._accepting.add_done_callback(self._ended)

    @property
    def sockname(self) -> Address:
        """Local (address, port); the first, if there are several."""
        return self.listener.sockname

    @property
    def socknames(self) -> list[Address]:
        """All local (address, port) pairs; the port is the same."""
        return self.listener.socknames

    @property
    def port(self) -> int:
        """Local port."""
        return self.listener.port

    @property
    def connections(self) -> frozenset[Connection]:
        """The connections whose handlers have not ended."""
        return frozenset(self._connections.values())

    # Connections

    async def _accept(self) -> None:
        async for connection in self.listener:
            self._begin(connection)

    def _begin(self, connection: Connection) -> None:
        if not self._begins:
            self._close_unserved(connection)
            return
        task = self._loop.create_task(self._serve(connection))
        self._connections[task] = connection
        task.add_done_callback(self._over)
        if self._stopping is not None:
            connection._stop_receiving()

    def _close_unserved(self, connection: Connection) -> None:
        task = background.start(self._loop, connection.close)
        if task is None:  # the loop is ending
            connection._begin_close()
            return
        self._connections[task] = connection
        self._closing.add(task)
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        connection = self._connections.pop(task)
        if task not in self._closing:  # it was canceled before its first step
            self._close_unserved(connection)
        self._closing.discard(task)

    async def _serve(self, connection: Connection) -> None:
        _handled_by.set(_handled_by.get() | {self._mark})
        try:
            async with connection:
                try:
                    try:
                        result = await started(self._handler, connection)
                    finally:
                        self._closing.add(asyncio.current_task())
                except asyncio.CancelledError:
                    if is_canceled() and connection._owes_no_answer:
                        await connection.close()
                    raise
                except KeyboardInterrupt:
                    # It may be lost, because the signals before it can now cancel this task.
                    name = name_of(self._handler)
                    _log.exception("Ctrl-C has interrupted the handler %s of %r", name, connection)
                    raise
                except ConnectionEndedError:
                    pass  # as where `async for` has ended
                except RdmaError as exc:
                    stopped = self._stopping is not None and isinstance(exc, ResourceClosedError)
                    if not (stopped or connection.is_closing()):
                        raise
                    cause = connection._broke_by
                    if cause is not None and cause.args == exc.args:
                        _log.info("%r", connection)  # which names the cause
                    else:
                        _log.info("%r: %s", connection, exc)
                else:
                    self._look_at(result, connection)
        except (Exception, asyncio.CancelledError) as exc:
            if isinstance(exc, asyncio.CancelledError) and is_canceled():
                raise
            if self._tracebacks.may_log(connection.get_extra_info("peername")):
                name = name_of(self._handler)
                _log.exception("the handler %s of %r has raised", name, connection)

    def _look_at(self, result: object, connection: Connection) -> None:
        """Log a handler that means its result to be an answer."""
        if isinstance(result, (bytes, bytearray, memoryview, str, Message)) and (
            self._tracebacks.may_log(connection.get_extra_info("peername"))
        ):
            _log.error(
                "the handler %s of %r has returned a %s, which is sent to nobody: send it by "
                "`connection.send()`, or serve requests, whose results are answers",
                name_of(self._handler), connection, type(result).__name__,
            )  # fmt: skip

    def _ended(self, accepting: asyncio.Task[None]) -> None:
        self._asked.set()
        if not accepting.cancelled():
            accepting.exception()  # serve_forever() and stop() raise it

    # End

    async def serve_forever(self, *, signals: bool = True) -> None:
        """Wait until the server is to end, then stop it as `stop` does.

        Args:
            signals: Whether SIGINT (Ctrl-C) and SIGTERM end it, too; a second signal cancels the
                handlers at once.  If a handler has kept the loop from running since the first, the
                second ends the program: Ctrl-C raises KeyboardInterrupt where the program is.  If
                another task is in the block of `async with`, that task is canceled, as `signals` of
                `serve` says.  Only in the main thread.  Handlers of these signals that the loop
                already has are replaced.

        Raises:
            DeviceRemovedError: The RDMA devices of all addresses were removed.
            RuntimeError: This is not the server's event loop.

        Cancellation: ends the wait, and stops the server as `stop` does.
        """
        check_loop(self._loop, "server")
        heeds = signals and not self._signals
        with heeding(self._loop, self._on_signal) if heeds else contextlib.nullcontext():
            try:
                with self._waits():
                    await self._asked.wait()
            finally:
                await self.stop()

    @contextlib.contextmanager
    def _waits(self) -> Iterator[None]:
        """In the block the current task ends when the server does."""
        task = asyncio.current_task()
        self._waiting.append(task)
        try:
            yield
        finally:
            self._waiting.remove(task)

    def _on_signal(self) -> bool:
        """Begin to stop, or have a task do so; whether a task of the program ends by that."""
        if self._signaled or self._stopping is not None:
            self._cancel_handlers()
        self._signaled = True
        if self._stopping is not None:
            return True
        inside = self._inside
        if inside is not None and inside not in self._waiting and inside.cancel():
            self._canceled += 1  # the end of the block stops the server
            return True
        self._begin_stop()
        return bool(self._waiting)

    def close(self) -> None:
        """Accept no more clients, and end `serve_forever`; open connections go on.  Idempotent.

        Raises:
            RuntimeError: The server's event loop runs in another thread; nothing was done.
        """
        check_thread(self._loop, "server")
        self._asked.set()
        self.listener.close()

    async def wait_closed(self) -> None:
        """Wait until the server is closed, every handler has ended, and the port is free again.

        Like that of `asyncio.Server`, it ends no handler; `stop` does.

        Raises:
            RuntimeError: This is not the server's event loop.

        Cancellation: ends the wait.
        """
        check_loop(self._loop, "server")
        with self._waits():
            await self._asked.wait()
            await asyncio.wait([self._accepting])
            await self._until_idle()
            await self.listener.wait_closed()

    async def stop(self) -> None:
        """Close, let handlers finish for `grace_s`, then cancel those that are left.  Idempotent.

        A handler that waits for a message, or asks for the next one, sees the end: `async for`
        ends, and `recv` raises ResourceClosedError.  Messages that have arrived are still received,
        and answers are still sent.  Requests that are left are refused; a client that accepts
        nothing delays this by no more than the `close_timeout_s` of its connection.

        Raises:
            DeviceRemovedError: The RDMA devices of all addresses were removed.
            RuntimeError: This is not the server's event loop.

        Cancellation: cancels the handlers, and waits for their end, unless a handler or `authorize`
        has called this.
        """
        check_loop(self._loop, "server")
        stopping = self._begin_stop()
        try:
            await result_of(stopping)
        except asyncio.CancelledError:
            self._cancel_handlers()
            is_authorize = asyncio.current_task() in self.listener._unfinished
            if not is_authorize and self._mark not in _handled_by.get():
                await until_done([stopping])  # else it would wait for this call
            raise

    def _begin_stop(self) -> asyncio.Task[None]:
        """What `stop` waits for."""
        if self._stopping is None:
            self.close()
            self._stopping = self._loop.create_task(self._stop())
        return self._stopping

    async def _stop(self) -> None:
        with self._until_stopped:
            await self._end()

    async def _end(self) -> None:
        await asyncio.wait([self._accepting])
        for connection in self._connections.values():
            connection._stop_receiving()
        over = self._loop.time() + self.grace_s
        await self._until_idle(min(self.grace_s, _QUIET_S))
        left_s = over - self._loop.time()
        if (count := len(self._connections) - len(self._closing)) and left_s > 0:
            text = "the server stops, and waits up to %.3g s for the handlers of %d connection%s"
            if self._signaled:
                text += "; a second Ctrl-C cancels them at once"
            plural = "s" * (count > 1)
            _log.tell(logging.WARNING, text, left_s, count, plural, extra=FOR_ALL)
        await self._until_idle(left_s)
        self._cancel_handlers()
        await self._until_idle()
        await self.listener.wait_closed()
        self._accepting.result()

    def _cancel_handlers(self) -> None:
        """Cancel those that run, and have none begin."""
        self._begins = False
        for task in self._connections:
            if task not in self._closing:
                task.cancel()

    async def _until_idle(self, seconds: float = math.inf) -> None:
        """Wait until all connections are closed, and no other comes; `seconds` at most."""
        over = self._loop.time() + seconds
        while busy := [*self._connections, *self.listener._unfinished]:
            left_s = over - self._loop.time()
            if left_s <= 0:
                return
            await asyncio.wait(busy, timeout=None if left_s == math.inf else left_s)

    async def __aenter__(self) -> Self:
        task = self._inside = asyncio.current_task()
        if task is not None:
            self._cancelling = task.cancelling()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exc_info: object) -> bool | None:
        task, self._inside = self._inside, None
        ended = False  # by a signal, and not by another cancellation, too
        if task is not None:
            for _ in range(self._canceled):
                ended = task.uncancel() <= self._cancelling and kind is asyncio.CancelledError
        await self.stop()
        return ended

    def __repr__(self) -> str:
        state = "closed" if self._asked.is_set() else f"at {self.sockname[0]} port {self.port}"
        return f"<Server {state}, {len(self._connections)} connections>"
