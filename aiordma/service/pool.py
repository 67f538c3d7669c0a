"""Pool: connections to one server, kept open, lent or shared, and replaced when they break.

Theory of operation
    `connection()` lends a connection to one task; `request()` shares connections, of which each has
    many requests under way.  Tasks for which there is no connection wait in line, first come, first
    served; while tasks wait for a connection of their own, as many connections get no further
    requests.

    `_fill` compares the connections that there are, or are being opened, with the number wanted:
    `min_size`, and another connection for each task in line, up to `max_size`.  An opener goes on,
    with growing pauses, as long as its connection is wanted.  A watcher for each connection notices
    its end.  A connection that breaks as soon as it is open counts as an attempt that failed: the
    next attempt waits, or a server that accepts and fails would be connected to without a pause.

    All of these tasks belong to `_Core`, and none of them has the Pool, so that a Pool
    that is forgotten is collected, and says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import random
import sys
import warnings
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, Self, overload

from aiordma._core import Message
from aiordma.arguments import Buffer, bytes_of, check_kind, check_seconds, seconds_left, whole
from aiordma.cm.address import check_port
from aiordma.endpoint.config import ConnectionConfig
from aiordma.endpoint.connect import connect
from aiordma.endpoint.connection import Connection
from aiordma.errors import ConnectionLostError, PoolTimeoutError, ResourceClosedError
from aiordma.loop import fork
from aiordma.loop.limit import Limit
from aiordma.loop.running import check_loop, from_finalizer
from aiordma.loop.uncopied import Uncopied
from aiordma.memory.shared import Memory

__all__ = ["Pool", "PoolStats"]

_log = logging.getLogger("aiordma")
#: Requests of each connection from which on `request()` has another one opened.
_CROWDED = 32
#: Times that a request is sent at most.
_TRIES = 3
#: Seconds of the first pause between two attempts to connect.
_FIRST_PAUSE_S = 0.1
#: Seconds from which on a connection has shown that the server works.
_PROVEN_S = 1.0
Check = Callable[[Connection], Awaitable[object]]


@dataclass(slots=True)
class PoolStats:
    """The state and the counters of a pool, as they were when `Pool.stats` was read.

    Attributes:
        size: Connections that are open.
        available: Connections among them that no task uses.
        connecting: Connections that are being opened.
        waiting: Tasks that wait for a connection.
        requests: Requests by `Pool.request`.
        retries: Times that a request was sent again.
        leases: Connections that `Pool.connection` has lent.
        timeouts: Waits for a connection that ended with PoolTimeoutError.
        lost: Connections that broke, or failed the check.
        reconnects: Connections that were opened in place of these.
        errors: Attempts to connect that failed.
    """

    size: int = 0
    available: int = 0
    connecting: int = 0
    waiting: int = 0
    requests: int = 0
    retries: int = 0
    leases: int = 0
    timeouts: int = 0
    lost: int = 0
    reconnects: int = 0
    errors: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    host: str
    port: int
    min_size: int
    max_size: int
    timeout: float
    max_idle: float | None
    max_lifetime: float | None
    max_pause: float
    check: Check | None
    config: ConnectionConfig | None
    memory: Memory | None


class _Member:
    """A connection of the pool."""

    __slots__ = (
        "broken", "connection", "counted", "due", "idle_since", "lent", "noted", "opened_at",
        "users",
    )  # fmt: skip

    def __init__(self, connection: Connection, now: float, lifetime: float | None) -> None:
        self.connection = connection
        self.opened_at = now
        self.noted = False  # by `_note_end`
        self.counted = False  # as lost
        # Not all at the same time, if they were opened together.
        self.due = None if lifetime is None else now + lifetime * random.uniform(0.9, 1.0)
        self.idle_since = now
        self.lent = self.broken = False
        self.users = 0


class _Core:
    """The pool, without the object that the program has."""

    def __init__(self, settings: _Settings) -> None:
        self.settings = settings
        self.loop = asyncio.get_running_loop()
        self.counts = PoolStats()
        self.closing = False
        self._members: list[_Member] = []
        self._line: deque[tuple[asyncio.Future[_Member], bool]] = deque()
        self._opening = 0
        self._failures = 0  # attempts to connect that failed in a row
        self._not_before = 0.0  # time of the next attempt
        self._last_error: BaseException | None = None
        self._to_replace = 0
        self._tasks: dict[asyncio.Task[None], None] = {}  # the oldest first
        self._openers: dict[asyncio.Task[None] | None, None] = {}  # of these
        self._changed = asyncio.Event()  # a connection was opened, or is free
        self._sweeper: asyncio.TimerHandle | None = None
        self._fill()
        self._sweep()

    # Facts

    def stats(self) -> PoolStats:
        """The state and the counters."""
        live = self._live()
        counts = {name: getattr(self.counts, name) for name in PoolStats.__slots__}
        counts |= {
            "size": len(live),
            "available": sum(not (member.lent or member.users) for member in live),
            "connecting": self._opening,
            "waiting": sum(not future.done() for future, _ in self._line),
        }
        return PoolStats(**counts)

    def _live(self) -> list[_Member]:
        return [m for m in self._members if not (m.broken or m.connection.is_closing())]

    def require_open(self) -> None:
        """Raise ResourceClosedError if the pool is closed."""
        if self.closing:
            raise _closed()

    # Tasks that use a connection

    async def acquire(self, timeout: float, *, lend: bool) -> _Member:
        """Get a connection, alone or with others."""
        self.require_open()
        member = self._find(lend=lend, ahead=self._lenders)
        if member is not None:
            self._take(member, lend=lend)
            return member
        future: asyncio.Future[_Member] = self.loop.create_future()
        place = future, lend
        self._line.append(place)
        try:
            self._fill()
            with Limit(timeout):
                return await future
        except TimeoutError:
            self._leave_line(place)
            self.counts.timeouts += 1
            text = f"no connection of the pool was free within {timeout:.3g} s"
            if self._last_error is not None:
                text += f"; the last attempt to connect failed: {self._last_error}"
            raise PoolTimeoutError(errno.ETIMEDOUT, text) from self._last_error
        except BaseException:
            self._leave_line(place)
            raise
        finally:
            del future, place  # its exception has this frame: a cycle

    def _leave_line(self, place: tuple[asyncio.Future[_Member], bool]) -> None:
        """A task leaves the line by an exception, perhaps in the moment of its grant."""
        future = place[0]
        if future.done() and not future.cancelled() and future.exception() is None:
            self.release(future.result())
        elif place in self._line:
            self._line.remove(place)
        self._let_in()  # connections may have been kept for this task

    @property
    def _lenders(self) -> int:
        """Tasks in line for a connection of their own."""
        return sum(lends and not future.done() for future, lends in self._line)

    def _find(self, *, lend: bool, ahead: int) -> _Member | None:
        """A connection for a task that has so many in line before it that want one of their own."""
        now = self.loop.time()
        free = [
            member
            for member in self._live()
            if not member.lent and (member.due is None or member.due > now)
        ]
        if lend:
            unused = [member for member in free if not member.users]
            # The connection that was used last, so that others can become old.
            return max(unused, key=lambda member: member.idle_since, default=None)
        free.sort(key=lambda member: member.users)
        free = free[ahead:]
        if not free:
            return None
        if free[0].users >= _CROWDED:
            self._fill(1)
        return free[0]

    def _take(self, member: _Member, *, lend: bool) -> None:
        member.users += 1
        member.lent = lend

    def release(self, member: _Member, *, broken: bool = False, by_user: bool = False) -> None:
        """Take a connection back.

        Args:
            member: The connection.
            broken: Whether to drop it.
            by_user: Whether that is for an exception of the task that used it.
        """
        if by_user and not member.connection.is_closing():
            member.noted = True  # no failure of the server
        member.users -= 1
        member.lent = False
        member.broken |= broken
        if member.broken and not member.users:
            # Not before: the other users would get the error of a connection that was closed here.
            member.connection.abort()
        now = self.loop.time()
        if not member.users:
            member.idle_since = now
            old = member.due is not None and member.due <= now
            if old and not (self.closing or member.broken):
                self._retire(member)
        self._let_in()
        self._changed.set()

    def _let_in(self) -> None:
        while self._line:
            future, lend = self._line[0]
            if not future.done():
                # What is kept for those behind it is not kept from the first, whom they wait for.
                member = self._find(lend=lend, ahead=0)
                if member is None:
                    break
                self._line.popleft()
                self._take(member, lend=lend)
                future.set_result(member)
            else:
                self._line.popleft()
        self._fill()

    # Connections

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self.loop.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task

    @property
    def _wanted(self) -> int:
        settings, waiting = self.settings, sum(not future.done() for future, _ in self._line)
        return min(settings.max_size, max(settings.min_size, len(self._live()) + waiting))

    def _fill(self, more: int = 0) -> None:
        if self.closing:
            return
        for member in self._members:
            if member.broken or member.connection.is_closing():
                self._note_end(member)
                self._count_lost(member)  # before another connection can be there in its place
        there = len(self._live()) + self._opening
        wanted = min(self.settings.max_size, max(self._wanted, len(self._live()) + more))
        for _ in range(wanted - there):
            self._opening += 1
            self._openers[self._start(self._open())] = None

    async def _open(self) -> None:
        settings = self.settings
        try:
            if (pause := self._not_before - self.loop.time()) > 0:
                await asyncio.sleep(pause)
                if self._is_too_many:
                    return
            while not self.closing:
                try:
                    connection = await connect(
                        settings.host, settings.port, config=settings.config, memory=settings.memory
                    )
                except Exception as exc:
                    self.counts.errors += 1
                    # Its traceback has this frame, and the frame this object: a cycle.
                    self._last_error = exc.with_traceback(None)
                    self._failures += 1
                    _log.info("pool to %s port %d: %s", settings.host, settings.port, exc)
                else:
                    if self.closing:
                        await connection.close()
                    else:
                        self._add(connection)
                    return
                await asyncio.sleep(self._pause())
                if self._is_too_many:
                    return
        finally:
            self._opening -= 1
            self._openers.pop(asyncio.current_task(), None)

    @property
    def _is_too_many(self) -> bool:
        """Whether a connection that is being opened is not wanted any more."""
        return len(self._live()) + self._opening > self._wanted

    def _pause(self) -> float:
        """Seconds from a failed attempt to the next."""
        pause: float = _FIRST_PAUSE_S * 2 ** min(self._failures - 1, 20)
        pause = min(self.settings.max_pause, pause)
        return pause * random.uniform(0.5, 1.0)

    def _note_end(self, member: _Member) -> None:
        """A connection is over: the next attempt may have to wait.  Idempotent."""
        if member.noted:
            return
        member.noted = True
        now = self.loop.time()
        if now - member.opened_at >= _PROVEN_S:
            self._failures = 0
            return
        self._failures += 1
        self._not_before = now + self._pause()
        text = "a connection broke, or failed the check, as soon as it was open"
        self._last_error = ConnectionLostError(errno.ECONNRESET, text)

    def _add(self, connection: Connection) -> None:
        self._last_error = None
        if self._to_replace:
            self._to_replace -= 1
            self.counts.reconnects += 1
        member = _Member(connection, self.loop.time(), self.settings.max_lifetime)
        self._members.append(member)
        self._start(self._watch(member))
        # The opener counts until its task ends, and this connection would count twice.
        self._opening -= 1
        try:
            self._let_in()
        finally:
            self._opening += 1
        self._changed.set()

    async def _watch(self, member: _Member) -> None:
        await member.connection.wait_closed()
        if member in self._members:  # it broke: after `_retire` it is not there any more
            self._members.remove(member)
            if not self.closing:
                self._count_lost(member)
                self._note_end(member)
                self._let_in()

    def _count_lost(self, member: _Member) -> None:
        """Count a connection that broke.  Idempotent."""
        if not member.counted:
            member.counted = True
            self.counts.lost += 1
            self._to_replace += 1

    def _retire(self, member: _Member) -> None:
        if member not in self._members:
            return  # it has broken, and `_watch` has taken it out
        self._members.remove(member)
        self._start(member.connection.close())

    def _sweep(self) -> None:
        """Close connections that are old, or idle and more than `min_size`; again and again."""
        settings, now = self.settings, self.loop.time()
        idle = [m for m in self._live() if not m.users]
        for member in sorted(idle, key=lambda member: member.idle_since):
            old = member.due is not None and member.due <= now
            unused = settings.max_idle is not None and now - member.idle_since >= settings.max_idle
            if old or (unused and len(self._live()) > settings.min_size):
                self._retire(member)
        self._fill()
        bounds = [b for b in (settings.max_idle, settings.max_lifetime) if b is not None]
        if bounds and not self.closing:
            every = min(60.0, max(0.01, min(bounds) / 4))
            self._sweeper = self.loop.call_later(every, self._sweep)

    async def filled(self) -> None:
        """Wait until `min_size` connections are open."""
        while len(self._live()) < self.settings.min_size:
            self.require_open()
            self._changed.clear()
            await self._changed.wait()

    @property
    def last_error(self) -> BaseException | None:
        """The last failure to connect, unless a connect has succeeded since."""
        return self._last_error

    # End

    def refuse(self) -> None:
        """Let no task in any more, and open no connection."""
        self.closing = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        line, self._line = self._line, deque()
        for future, _ in line:
            if not future.done():
                future.set_exception(_closed())
        self._changed.set()

    def abandon(self) -> None:
        """End at once."""
        self.refuse()
        for member in self._members:
            if not self.loop.is_closed():
                member.connection.abort()
        for task in self._tasks:
            if not self.loop.is_closed():
                task.cancel()

    async def close(self, timeout: float) -> None:
        """Let users finish, then close all connections."""
        self.refuse()
        try:
            with Limit(timeout):
                while any(member.users for member in self._live()):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            _log.info("the pool is closed while tasks use its connections")
        for member in self._members:
            if member.users:
                member.connection.abort()
        members = list(self._members)
        await asyncio.gather(*(member.connection.close() for member in members))
        for task in self._openers:
            if task is not None:
                task.cancel()  # perhaps in a pause
        if self._tasks:
            await asyncio.wait(self._tasks)


def _closed() -> ResourceClosedError:
    return ResourceClosedError(errno.ECONNABORTED, "the pool is closed")


class Pool(Uncopied):
    """Connections to one server, kept open, and replaced when they break.

    ``async with`` opens it, and closes it in good order; after an exception in the block without
    time for tasks that still use it.  It belongs to the event loop in which it
    was opened.  A pool that is forgotten while it is open warns, and aborts its connections.

    Args:
        host: Name or address of the server, as of `connect`.
        port: Its port, 1 to 65535.
        min_size: Connections that are kept open, 0 to `max_size`.
        max_size: Connections at most, 1 to 65,536.
        timeout: Seconds that a task waits for a connection, unless it says otherwise.
        max_idle: Seconds after which an unused connection is closed, if there are more than
            `min_size`; None for never.
        max_lifetime: Seconds after which a connection is closed as soon as it is unused, up to a
            tenth less; None for never.
        max_pause: Seconds of the longest pause between two attempts to connect.  The pauses begin
            at 0.1 s and double; each is shortened at random, by up to a half.
        check: A function that is called with a connection before it is lent, and awaited; if it
            raises an exception, the connection is dropped, and another connection is lent.
        config: Settings of the connections.
        memory: Registered memory that the connections share, in one protection domain.

    Raises:
        TypeError, ValueError: An argument is invalid.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        min_size: int = 1,
        max_size: int = 8,
        timeout: float = 30.0,
        max_idle: float | None = 600.0,
        max_lifetime: float | None = 3600.0,
        max_pause: float = 10.0,
        check: Check | None = None,
        config: ConnectionConfig | None = None,
        memory: Memory | None = None,
    ) -> None:
        self._core: _Core | None = None
        check_kind("host", host, str, none=False)
        if not host:
            msg = "host is empty: give the name or the address of the peer"
            raise ValueError(msg)
        check_port(port, lowest=1)
        max_size = whole("max_size", max_size, 1, 65_536)
        min_size = whole("min_size", min_size, 0, max_size)
        check_seconds("timeout", timeout, none=False)
        check_seconds("max_idle", max_idle)
        check_seconds("max_lifetime", max_lifetime)
        check_seconds("max_pause", max_pause, none=False)
        if check is not None and not callable(check):
            msg = f"check has to be a function that takes a Connection, not {check!r}"
            raise TypeError(msg)
        check_kind("config", config, ConnectionConfig)
        check_kind("memory", memory, Memory)
        self._settings = _Settings(
            host=host, port=port, min_size=min_size, max_size=max_size, timeout=timeout,
            max_idle=max_idle, max_lifetime=max_lifetime, max_pause=max_pause, check=check,
            config=config, memory=memory,
        )  # fmt: skip
        fork.guard_public(self)

    def _opened(self) -> _Core:
        if self._core is None:
            msg = "the pool is not open: use `async with pool`, or `await pool.open()`"
            raise RuntimeError(msg)
        check_loop(self._core.loop, "pool")
        self._core.require_open()
        return self._core

    async def open(self) -> None:
        """Begin to open `min_size` connections, and return; `wait` waits for them.  Idempotent.

        Raises:
            ResourceClosedError: The pool was closed.
            RuntimeError: The pool was opened in another event loop.

        Cancellation: has no effect; nothing is waited for.
        """
        if self._core is None:
            self._core = _Core(self._settings)
        self._opened()

    async def wait(self, timeout: float | None = None) -> None:
        """Wait until `min_size` connections are open.

        Args:
            timeout: Seconds; None for the pool's, 0 or less for no wait.

        Raises:
            PoolTimeoutError: They are not; the pool goes on trying.
            ResourceClosedError: The pool is closed, perhaps meanwhile.
            TypeError: The time-out is no number.
            RuntimeError: The pool is not open, or belongs to another event loop.

        Cancellation: ends the wait.
        """
        core = self._opened()
        seconds = self._seconds(timeout)
        try:
            with Limit(seconds):
                await core.filled()
        except TimeoutError:
            text = f"the pool has opened {core.stats().size} of {self._settings.min_size} "
            text += f"connections within {seconds} s"
            if core.last_error is not None:
                text += f"; the last attempt failed: {core.last_error}"
            raise PoolTimeoutError(errno.ETIMEDOUT, text) from core.last_error

    def connection(
        self, timeout: float | None = None
    ) -> contextlib.AbstractAsyncContextManager[Connection]:
        """Lend a connection to one task: ``async with pool.connection() as conn``.

        After an exception in the block the connection is aborted and replaced, because the peer may
        be in the middle of a conversation; unless it carries requests, which do not depend on one
        another.  The block must not close it.

        Args:
            timeout: Seconds to wait for a connection; None for the pool's, 0 or less to take a
                connection that is free at once.

        Raises:
            PoolTimeoutError: None was free in time (when the block is entered).
            ResourceClosedError: The pool is closed, perhaps meanwhile.
            TypeError: The time-out is no number.
            RuntimeError: The pool is not open, or belongs to another event loop.

        Cancellation: of the entry, no connection is taken.
        """
        return self._lend(self._opened(), self._seconds(timeout))

    def _seconds(self, timeout: float | None) -> float:
        return self._settings.timeout if timeout is None else seconds_left("timeout", timeout)

    @contextlib.asynccontextmanager
    async def _lend(self, core: _Core, seconds: float) -> AsyncIterator[Connection]:
        end = core.loop.time() + seconds
        while True:
            member = await core.acquire(max(0.0, end - core.loop.time()), lend=True)
            if await self._is_healthy(core, member, end):
                break
            core.release(member, broken=True)
        core.counts.leases += 1
        connection = member.connection
        broken = True
        try:
            yield connection
            broken = False
        finally:
            broken = broken and not connection._carries_requests
            core.release(member, broken=broken, by_user=broken)

    async def _is_healthy(self, core: _Core, member: _Member, end: float) -> bool:
        check = self._settings.check
        if check is None:
            return True
        try:
            with Limit(end - core.loop.time(), "the check of the pool"):
                await check(member.connection)
        except Exception as exc:
            _log.info("%r failed the check of the pool: %r", member.connection, exc)
            return False
        except BaseException:
            core.release(member, broken=True, by_user=True)
            raise
        return True

    @overload
    async def request(
        self,
        buf: Any,
        *,
        timeout: float | EllipsisType | None = ...,
        idempotent: bool = False,
        into: None = None,
    ) -> Message: ...

    @overload
    async def request(
        self,
        buf: Any,
        *,
        timeout: float | EllipsisType | None = ...,
        idempotent: bool = False,
        into: Buffer,
    ) -> int: ...

    async def request(
        self,
        buf: Any,
        *,
        timeout: float | EllipsisType | None = ...,
        idempotent: bool = False,
        into: Any = None,
    ) -> Message | int:
        """Send a request by one of the connections, and wait for its answer.

        A connection carries many requests at a time.  A request whose connection broke is sent
        again, at most twice, if the server cannot have got it, or if it is `idempotent`.

        Args:
            buf: As of `Connection.request`.
            timeout: Seconds for all of it, the waits for connections included; zero or less means
                that the deadline has already passed.  By default the pool's `timeout` for each
                wait for a connection, and `ConnectionConfig.request_timeout_s` for the answer;
                None: the former, and no limit for the answer.
            idempotent: Whether the server may get the request twice.
            into: Memory for the answer, as of `Connection.request`.

        Returns:
            The answer; with `into`, its bytes.

        Raises:
            PoolTimeoutError: No connection in time.
            ResourceClosedError: The pool is closed, perhaps meanwhile.
            ConnectionLostError: The connection broke, and the request was not to be sent again.
            Others: as `Connection.request`.

        Cancellation: the connection tells the server.
        """
        core = self._opened()
        end = None
        if timeout is not None and timeout is not ...:
            end = core.loop.time() + seconds_left("timeout", timeout)
        if type(buf) is not bytes:
            with bytes_of("a request", buf):
                pass  # a wrong argument needs no connection to be told
        core.counts.requests += 1
        tries = 0
        while True:
            wait_s = self._settings.timeout
            if end is not None:
                wait_s = min(wait_s, max(0.0, end - core.loop.time()))
            member = await core.acquire(wait_s, lend=False)
            tries += 1
            broken = False
            try:
                left = timeout if end is None else end - core.loop.time()
                answer: Message | int = await member.connection.request(
                    buf, timeout=left, into=into
                )
                return answer
            except ConnectionLostError as exc:
                broken = True
                if tries == _TRIES or core.closing or (exc.request_sent and not idempotent):
                    raise
            finally:
                core.release(member, broken=broken)
            core.counts.retries += 1

    @property
    def stats(self) -> PoolStats:
        """The state and the counters of the pool, as they are now."""
        return PoolStats() if self._core is None else self._core.stats()

    async def close(self, timeout: float = 10.0) -> None:
        """Close in good order: tasks in line fail, users may finish, connections are closed.

        Args:
            timeout: Seconds that tasks have to give their connections back, and requests to be
                answered; then the connections are aborted.

        Raises:
            TypeError: The time-out is no number.
            RuntimeError: The pool belongs to another event loop.

        Idempotent.  Cancellation: the connections are aborted.
        """
        timeout = seconds_left("timeout", timeout)
        core = self._core
        if core is None:
            return
        check_loop(core.loop, "pool")
        try:
            await core.close(timeout)
        except BaseException:
            core.abandon()
            raise

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        if kind is None:
            await self.close()
        else:
            await self.close(0)

    def __repr__(self) -> str:
        core, settings = self._core, self._settings
        state = "not open" if core is None else "closed" if core.closing else "open"
        size = self.stats.size
        return f"<Pool {state} to {settings.host} port {settings.port}, {size} connections>"

    def __del__(
        self, _warn: Callable[..., None] = warnings.warn, _gone: Any = sys.is_finalizing
    ) -> None:
        core = getattr(self, "_core", None)
        if core is None or core.closing or _gone():
            return
        try:
            _warn(f"unclosed {self!r}", ResourceWarning, source=self, stacklevel=1)
        finally:
            from_finalizer(core.loop, core.abandon)
