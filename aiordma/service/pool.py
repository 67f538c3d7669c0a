"""Pool: connections to one service, kept open, lent or shared, and replaced when they break.

Theory of operation
    `connection()` lends a connection to one task; `request()` shares connections, each of which has
    many requests under way (way.py).  Tasks for which there is no connection wait in line, first
    come, first served.  While tasks wait for a connection of their own, as many connections are
    kept for them, and get no further requests.

    `_fill` compares the number of connections, including those that are being opened, with the
    number wanted: `min_size`, and one more for each task in line, up to `max_size`.  An opener goes
    on, with growing pauses, as long as its connection is wanted; ways.py says to which address.  A
    watcher for each connection notices its end.  A connection that is about to end is noticed only
    when it would be used, so the cost of a request does not grow with the number of connections.

    With several addresses a mover brings connections back to one that works again, one after
    another.

    All of these tasks belong to `_Core`, and none of them refers to the Pool, so that a Pool to
    which nothing refers is garbage collected, and warns.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import random
import sys
import warnings
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, Literal, Self, overload

from aiordma._core import Message
from aiordma.arguments import Buffer, bytes_of, check_kind, check_seconds, seconds_left, whole
from aiordma.cm.address import Address
from aiordma.endpoint.config import ConnectionConfig
from aiordma.endpoint.connect import connect
from aiordma.endpoint.connection import Connection
from aiordma.error_words import CASE_HINTS
from aiordma.errors import (
    ConnectionLostError,
    RdmaOSError,
    RequestError,
    RequestRefusedError,
    ResourceClosedError,
    errno_error,
)
from aiordma.loop import fork
from aiordma.loop.limit import Limit
from aiordma.loop.running import check_loop, from_finalizer
from aiordma.loop.uncopied import Uncopied
from aiordma.memory.shared import Memory
from aiordma.requests.wire import STOPPED
from aiordma.service.way import CROWDED, AddressStats, Member, Way
from aiordma.service.ways import Naming, Ways, addresses_of, rails_of

__all__ = ["Pool", "PoolStats"]

_log = logging.getLogger("aiordma")
#: How often a request is sent at most.
_TRIES = 3
#: Seconds before the last of them, if it goes to the address where the others were lost: a server
#: that dies breaks its connections one after the other.
_LAST_PAUSE_S = 0.1
#: Seconds of an attempt to connect, unless the program has a limit of its own: to the only address,
#: and to one of several, where a silent one holds up the others.
_ATTEMPT_S, _ATTEMPT_OF_SEVERAL_S = 10.0, 3.0
Check = Callable[[Connection], Awaitable[object]]


@dataclass(slots=True)
class PoolStats:
    """The state and the counters of a pool, as they were when `Pool.stats` was read.

    Attributes:
        size: Connections that are open.
        available: Those of them that no task uses.
        connecting: Connections that are being opened.
        waiting: Tasks that wait for a connection.
        requests: Requests by `Pool.request`.
        retries: Times that a request was sent again.
        leases: Connections that `Pool.connection` has lent.
        timeouts: Waits for a connection that ended with TimeoutError.
        lost: Connections that broke, or failed the check.
        reconnects: Connections that were opened to replace these.
        errors: Attempts to connect that failed.
        moves: Connections that were opened to replace others to a worse address.
        addresses: The state and the counters of each address.
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
    moves: int = 0
    addresses: tuple[AddressStats, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    addresses: tuple[Address, ...] | Naming
    rails: tuple[str, ...]
    policy: str
    min_size: int
    max_size: int
    timeout: float
    max_idle: float | None
    max_lifetime: float | None
    max_pause: float
    connect_timeout: float
    check: Check | None
    config: ConnectionConfig | None
    memory: Memory | None


def _without_frames(exc: Exception) -> Exception:
    """The exception, without the tracebacks of itself and its causes.

    A pool keeps its last failures, and their frames, or the callers of these, refer to the pool.
    """
    cause: BaseException | None = exc
    found: list[BaseException] = []  # those of a program may be causes of each other
    while cause is not None and cause not in found:
        cause.__traceback__ = None
        found.append(cause)
        cause = cause.__cause__ or cause.__context__
    return exc


class _Core:
    """The pool, without the object that the program has."""

    def __init__(self, settings: _Settings) -> None:
        self.settings = settings
        self.loop = asyncio.get_running_loop()
        self.time = self.loop.time
        self.counts = PoolStats()
        self.requests = 0
        self.closing = False
        self.ways = Ways(
            settings.addresses, settings.rails, settings.max_pause,
            failover=settings.policy == "failover",
        )  # fmt: skip
        self.single = self.ways.only  # the only way, until the end
        self._members: dict[Member, None] = {}  # the oldest first, until their ends are complete
        self._live = 0  # of these
        self.line: OrderedDict[asyncio.Future[Member], bool] = OrderedDict()
        self._lenders = 0  # of these
        self._kept: dict[Member, None] = {}  # for the lenders: they get no further requests
        self._opening = 0
        self._to_replace = 0
        self._tasks: dict[asyncio.Task[None], None] = {}  # the oldest first
        self._openers: dict[asyncio.Task[None] | None, None] = {}  # of these
        self._mover: asyncio.Task[None] | None = None  # of these, too
        # A connection was opened or is gone, a task is in line; at the end: a connection is free.
        self._changed = asyncio.Event()
        self._sweeper: asyncio.TimerHandle | None = None
        self._next_sweep = math.inf
        self._fill()
        self._sweep()

    # Facts

    def stats(self) -> PoolStats:
        """The state and the counters."""
        self._look()
        counts = {name: getattr(self.counts, name) for name in PoolStats.__slots__}
        counts |= {
            "size": self._live,
            "requests": self.requests,
            "available": sum(len(way.members.idle) for way in self.ways),
            "connecting": self._opening,
            "waiting": sum(not future.done() for future in self.line),
            "addresses": tuple(way.stats() for way in self.ways),
        }
        return PoolStats(**counts)

    def require_open(self) -> None:
        """Raise ResourceClosedError if the pool is closed."""
        if self.closing:
            raise _closed()

    # Tasks that use a connection

    def share(self) -> Member | None:
        """Take a connection for a request; None if there is none at once."""
        while True:
            way = self.single or self._least_used_way()
            if way is None:
                return None
            member = way.members.take()
            if member is None:
                return None
            if not member.over:
                way.requests += 1
                if member.users > CROWDED:
                    self._fill(1)
                return member
            way.members.give(member)
            self._lose(member)
            self._fill()

    def _least_used_way(self) -> Way | None:
        """Of the ways of the lowest tier that has a connection for a request."""
        found = None
        for way in self.ways:
            if way.members.standing and (
                found is None or (way.tier, way.members.users) < (found.tier, found.members.users)
            ):
                found = way
        return found

    def share_elsewhere(self, than: Way) -> Member | None:
        """Take a connection to another address, after one to this address has broken."""
        for member in self._members:
            way = member.way
            if (
                member.place is not None
                and (way.host, way.port) != (than.host, than.port)
                and not member.over
            ):
                way.members.drop(member)
                way.members.add_user(member)
                way.members.put(member)
                way.requests += 1
                return member
        return None

    def _lend(self) -> Member | None:
        """Take a connection for a task alone; None if there is none at once."""
        while True:
            idle = [way for way in self.ways if way.members.idle]
            if not idle:
                return None
            way = min(idle, key=lambda way: (way.tier, way.members.users))
            member = way.members.lend()
            assert member is not None
            if not member.over:
                member.lent = True
                return member
            way.members.give(member)
            self._lose(member)
            self._fill()

    async def acquire(self, timeout: float, *, lend: bool) -> Member:
        """Get a connection, alone or with others."""
        self.require_open()
        member = self._lend() if lend else self.share()
        if member is not None:
            return member
        future: asyncio.Future[Member] = self.loop.create_future()
        self.line[future] = lend
        self._lenders += lend
        self._changed.set()
        try:
            self._keep()
            self._fill()
            with Limit(timeout):
                return await future
        except TimeoutError:
            self._leave_line(future)
            self.counts.timeouts += 1
            why, cause = self.ways.why()
            if self._live:
                text = f"no connection of the pool was free within {timeout:.3g} s"
            else:
                text = f"the pool had no connection within {timeout:.3g} s"
                text += ", and is connecting" if self._opening else ""
            raise _too_late(text + why) from cause
        except BaseException:
            self._leave_line(future)
            raise
        finally:
            del future  # its exception has this frame: a cycle

    def _leave_line(self, future: asyncio.Future[Member]) -> None:
        """A task leaves the line by an exception, perhaps in the moment of its grant."""
        if future.done() and not future.cancelled() and future.exception() is None:
            self.release(future.result())
        else:
            self._lenders -= self.line.pop(future, False)
        self._let_in()  # connections may have been kept for this task

    def _let_in(self) -> None:
        """Serve those in line for whom there is a connection."""
        while self.line:
            future = next(iter(self.line))
            lend = self.line[future]
            if not future.done():
                member = self._lend() if lend else self.share() or self._share_kept()
                if member is None:
                    break
                future.set_result(member)
            del self.line[future]
            self._lenders -= lend
        self._keep()
        self._fill()

    def _keep(self) -> None:
        """Keep a connection free of further requests for each task that waits for its own."""
        kept = self._kept
        while len(kept) > self._lenders:
            member, _ = kept.popitem()
            member.way.members.put(member)
        while len(kept) < self._lenders:
            least = (way.members.least_used() for way in self.ways)
            standing = (member for member in least if member is not None)
            found = min(standing, key=lambda member: member.users, default=None)
            if found is None:
                break
            found.way.members.drop(found)
            kept[found] = None

    def _share_kept(self) -> Member | None:
        """A connection that is kept for others in line, for the first, who goes before them."""
        for member in self._kept:
            if not member.over:
                member.way.members.add_user(member)
                member.way.requests += 1
                return member
        return None

    def _stand_down(self, member: Member) -> None:
        """Have a connection get no further users."""
        self._kept.pop(member, None)
        member.way.members.drop(member)

    def release(self, member: Member, *, broken: bool = False, by_user: bool = False) -> None:
        """Take a connection back.

        Args:
            member: The connection.
            broken: Whether to drop it.
            by_user: Whether that is for an exception of the task that used it.
        """
        if by_user and not member.connection.is_closing():
            member.noted = True  # no failure of the server
        member.way.members.give(member)
        broken = broken or (member.outcome.stopping and member.live)
        if broken:
            self._lose(member)
        if not member.users:
            self._unused(member)
        if broken or self.line:
            self._let_in()
        if self.closing:
            self._changed.set()

    def _unused(self, member: Member) -> None:
        """The last user has left a connection."""
        member.idle_since = self.time()
        if not member.live:
            # Not before: the other users would get the error of a connection that was closed here.
            if member.outcome.stopping:
                self._start(member.connection.close())
            else:
                member.connection.abort()
        elif not self.closing:
            if member.lent or self._kept.pop(member, False) is None:
                member.way.members.put(member)
            if member.over:
                self._lose(member)
                self._fill()
            elif member.due <= member.idle_since:
                self._retire(member)
                self._fill()
        member.lent = False

    # Connections

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self.loop.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task

    @property
    def _wanted(self) -> int:
        settings = self.settings
        return min(settings.max_size, max(settings.min_size, self._live + len(self.line)))

    def _fill(self, more: int = 0) -> None:
        """Open as many connections as are wanted, and `more`."""
        if self.closing:
            return
        wanted = min(self.settings.max_size, max(self._wanted, self._live + more))
        for _ in range(wanted - self._live - self._opening):
            self._opening += 1
            self._openers[self._start(self._open())] = None

    async def _open(self) -> None:
        """Open a connection, by whichever way works, as long as it is wanted."""
        try:
            while not self.closing:
                try:
                    way = await self.ways.next(self.time())
                except Exception as exc:
                    self.counts.errors += 1
                    _log.info("the function that names the address of the pool: %r", exc)
                    _without_frames(exc)
                    continue
                if (pause := way.not_before - self.time()) > 0:
                    await asyncio.sleep(pause)
                elif (connection := await self._connect(way)) is not None:
                    # A connection that was moved may have taken the place meanwhile.
                    if self.closing or self._live >= self.settings.max_size:
                        await connection.close()
                    else:
                        self._add(connection, way)
                    return
                if self._is_too_many:
                    return
        finally:
            self._opening -= 1
            self._openers.pop(asyncio.current_task(), None)

    async def _connect(self, way: Way) -> Connection | None:
        """Try a way; None if it has failed, which is noted."""
        settings, began = self.settings, self.time()
        way.connecting += 1
        try:
            connection = await connect(
                way.host, way.port, config=settings.config, memory=settings.memory,
                timeout=settings.connect_timeout, **way.options,
            )  # fmt: skip
        except Exception as exc:
            self.counts.errors += 1
            way.errors += 1
            way.failed(_without_frames(exc), began, self.time())
            _log.info("pool to %s: %s", way, exc)
            return None
        finally:
            way.connecting -= 1
        way.worked()
        return connection

    @property
    def _is_too_many(self) -> bool:
        """Whether a connection that is being opened is not wanted any more."""
        return self._live + self._opening > self._wanted

    def _add(self, connection: Connection, way: Way) -> None:
        if self._to_replace:
            self._to_replace -= 1
            self.counts.reconnects += 1
        member = Member(connection, way, self.time(), self.settings.max_lifetime)
        self._members[member] = None
        self._live += 1
        way.size += 1
        way.members.put(member)
        if member.due < self._next_sweep:
            self._sweep_at(member.due)
        self._start(self._watch(member))
        # The opener counts until its task ends, and this connection would count twice.
        self._opening -= 1
        try:
            self._let_in()
            self._improve()
        finally:
            self._opening += 1
        self._changed.set()

    async def _watch(self, member: Member) -> None:
        await member.connection.wait_closed()
        if member in self._members:  # it broke: after `_retire` it is not there any more
            del self._members[member]
            self._lose(member)
            if not self.closing:
                self._let_in()
        self._changed.set()

    def _look(self) -> None:
        """Notice the connections that are over, and whose ends are not complete."""
        found = [m for m in self._members if m.live and m.over]
        for member in found:
            self._lose(member)
        if found:
            self._fill()

    def _lose(self, member: Member) -> None:
        """Have a connection that broke not count any more, before another takes its place."""
        if not member.live:
            return
        self._end(member)
        if self.closing:
            return
        way = member.way
        self.counts.lost += 1
        way.lost += 1
        self._to_replace += 1
        if not member.noted:
            text = "a connection broke, or failed the check, as soon as it was open"
            if member.outcome.stopping:
                text = "the server was stopping as soon as the connection was open"
            error = ConnectionLostError(errno.ECONNRESET, text)
            way.ended(member.opened_at, self.time(), error)
        self._improve()

    def _end(self, member: Member) -> None:
        member.live = False
        self._live -= 1
        member.way.size -= 1
        self._stand_down(member)
        self._changed.set()

    def _retire(self, member: Member) -> None:
        """Close a connection that is live, and that nobody uses."""
        del self._members[member]
        self._end(member)
        self._start(member.connection.close())

    def _sweep(self) -> None:
        """Close connections that are old, or idle and more than `min_size`; again and again."""
        settings, now = self.settings, self.time()
        self._look()
        for member in [member for member in self._members if member.due <= now and member.live]:
            if member.users:
                self._stand_down(member)
            else:
                self._retire(member)
        idle = [member for way in self.ways for member in way.members.idle]
        idle.sort(key=lambda member: member.idle_since)
        if settings.max_idle is not None:
            for member in idle:
                if self._live <= settings.min_size or now - member.idle_since < settings.max_idle:
                    break
                self._retire(member)
        self._keep()
        self._fill()
        self._improve()
        every = min(60.0, max(0.01, (settings.max_idle or math.inf) / 4))
        dues = (member.due for member in self._members if member.due > now)
        self._sweep_at(min(now + every, min(dues, default=math.inf)))

    def _sweep_at(self, when: float) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
        if not self.closing:
            self._next_sweep = when
            self._sweeper = self.loop.call_at(when, self._sweep)

    async def filled(self) -> None:
        """Wait until `min_size` connections are open."""
        self._look()
        while self._live < self.settings.min_size:
            self.require_open()
            self._changed.clear()
            await self._changed.wait()

    # Connections that would be better elsewhere

    def _improve(self) -> None:
        """Move connections to ways that work again, one after the other."""
        if self.single or self._mover or self.closing or self.ways.better() is None:
            return
        self._mover = self._start(self._move())
        self._openers[self._mover] = None

    async def _move(self) -> None:
        try:
            while not self.closing and (found := self.ways.better()) is not None:
                way, worse = found
                if (pause := way.not_before - self.time()) > 0:
                    await asyncio.sleep(pause)
                elif (connection := await self._connect(way)) is not None:
                    await self._exchange(connection, way, worse)
        finally:
            self._mover = None
            self._openers.pop(asyncio.current_task(), None)

    async def _exchange(self, connection: Connection, way: Way, worse: Way) -> None:
        """Replace a connection that was made by a worse way."""
        self._opening += 1  # nobody else is to be opened in its place
        try:
            members = (m for m in self._members if m.live and m.way is worse)
            other = min(members, key=lambda member: (member.lent, member.users), default=None)
            if other is not None and other.users:
                await self._used_up(other)
            elif other is not None:
                self._retire(other)
            if not self.closing and self._live < self.settings.max_size:
                self.counts.moves += other is not None
                self._add(connection, way)
                return
            way.not_before = self.time() + self.settings.max_pause
        except BaseException:
            connection.abort()
            raise
        finally:
            self._opening -= 1
        self._start(connection.close())

    async def _used_up(self, member: Member) -> None:
        """Have a connection get no further users, and wait for a while until it has none.

        Or until a task waits for a connection, and there may be one more.
        """
        member.due = -math.inf
        self._stand_down(member)
        self._keep()
        with contextlib.suppress(TimeoutError), Limit(self.settings.timeout):
            while member.live and not self.closing:
                if self.line and self._live < self.settings.max_size:
                    break
                self._changed.clear()
                await self._changed.wait()

    # End

    def refuse(self) -> None:
        """Let in no more tasks, and open no more connections."""
        self.closing = True
        self.single = None
        if self._sweeper is not None:
            self._sweeper.cancel()
        line, self.line = self.line, OrderedDict()
        self._lenders = 0
        for future in line:
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
                # Also those of servers that are stopping, which still answer.
                while any(m.users for m in self._members if not m.connection.is_closing()):
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


class _Attempts:
    """The attempts of a request that may have to be sent again.

    Args:
        idempotent: Whether the server may get it twice.
        limit_s: Seconds for which servers that stop may refuse it, from the first refusal on.

    Attributes:
        lost: How often it was sent, and a server may have received it, or the connection broke.
    """

    __slots__ = ("_idempotent", "_limit_s", "_until", "lost")

    def __init__(self, idempotent: bool, limit_s: float) -> None:
        self._idempotent = idempotent
        self._limit_s = limit_s
        self._until = math.inf
        self.lost = 0

    def may_repeat(self, exc: ConnectionLostError | RequestError, now: float) -> bool:
        """Whether to send it again, after this exception."""
        if isinstance(exc, RequestRefusedError) and exc._stopping:
            # However often: each connection says so once, and none is opened there without a pause.
            self._until = min(self._until, now + self._limit_s)
            return now < self._until
        self.lost += 1
        if isinstance(exc, ConnectionLostError):
            safe = self._idempotent or not exc.request_sent
        else:  # a server that is stopping may have canceled the handler
            safe = self._idempotent and exc.remote_text == STOPPED
        return safe and self.lost < _TRIES


def _too_late(text: str) -> RdmaOSError:
    error = errno_error(errno.ETIMEDOUT, text)
    error.hint = CASE_HINTS["pool"]
    return error


def _named(addresses: tuple[Address, ...] | Naming) -> str:
    if callable(addresses):
        return f"what {getattr(addresses, '__qualname__', addresses)!s} names"
    if len(addresses) > 1:
        return f"{len(addresses)} addresses"
    return "{} port {}".format(*addresses[0])


def _closed() -> ResourceClosedError:
    return ResourceClosedError(errno.ECONNABORTED, "the pool is closed")


class Pool(Uncopied):
    """Connections to one service, kept open, and replaced when they break.

    ``async with`` opens it, and closes it in good order.  After an exception in the block, tasks
    that still use its connections get no time to finish.  It belongs to the event loop in which it
    was opened.  A pool that is garbage collected while it is open warns, and aborts its
    connections.

    Args:
        host: Name or address of the server, as for `connect`; or a list of 1 to 64 addresses, each
            a pair of host and port; or a function or coroutine function without arguments, which
            returns the address for the next connection within 10 seconds: if it raises an exception
            or returns no address, the attempt has failed.
        port: Its port, 1 to 65535; only with a single host.
        policy: Which of several addresses get the connections.  "failover": the first that works.
            "spread": all that work, in equal parts.  When an address works again, connections are
            moved to it, one after another.
        local_addrs: Addresses of this machine to connect from, 1 to 16, in equal parts; by default
            the routing table decides.
        min_size: Connections that are kept open, 0 to `max_size`.  By default 1; with "spread" one
            to each address, and with `local_addrs` one from each of these, up to `max_size`.
        max_size: Largest number of connections, 1 to 65,536.
        timeout: Seconds that a task waits for a connection, unless the call has a limit of its own.
        max_idle: Seconds after which an unused connection is closed, if there are more than
            `min_size`; None for never.
        max_lifetime: Seconds after which a connection is closed as soon as it is unused, shortened
            at random by up to a tenth; None for never.
        max_pause: Seconds of the longest pause between two attempts to connect.  The pauses begin
            at 0.1 s and double; each is shortened at random by up to a half.
        connect_timeout: Seconds of one attempt to connect, after which the next address has its
            turn; by default 10, or 3 if the pool has several addresses or a function.
        check: A coroutine function that is called with a connection before it is lent; if it raises
            an exception, the connection is dropped, and another one is lent.
        config: Settings of the connections.
        memory: Registered memory that the connections share, in one protection domain.

    Raises:
        TypeError, ValueError: An argument is invalid.
    """

    def __init__(
        self,
        host: str | Sequence[Address] | Naming,
        port: int | None = None,
        *,
        policy: Literal["failover", "spread"] = "failover",
        local_addrs: Sequence[str] | None = None,
        min_size: int | None = None,
        max_size: int = 8,
        timeout: float = 30.0,
        max_idle: float | None = 600.0,
        max_lifetime: float | None = 3600.0,
        max_pause: float = 10.0,
        connect_timeout: float | None = None,
        check: Check | None = None,
        config: ConnectionConfig | None = None,
        memory: Memory | None = None,
    ) -> None:
        self._core: _Core | None = None
        addresses, rails = addresses_of(host, port), rails_of(local_addrs)
        if policy not in ("failover", "spread"):
            msg = f"policy has to be 'failover' or 'spread', not {policy!r}"
            raise ValueError(msg)
        max_size = whole("max_size", max_size, 1, 65_536)
        if min_size is None:
            to = len(addresses) if policy == "spread" and not callable(addresses) else 1
            min_size = min(max_size, to * max(1, len(rails)))
        min_size = whole("min_size", min_size, 0, max_size)
        check_seconds("timeout", timeout, none=False)
        check_seconds("max_idle", max_idle)
        check_seconds("max_lifetime", max_lifetime)
        check_seconds("max_pause", max_pause, none=False)
        if connect_timeout is None:
            one = not callable(addresses) and len(addresses) == 1
            connect_timeout = _ATTEMPT_S if one else _ATTEMPT_OF_SEVERAL_S
        check_seconds("connect_timeout", connect_timeout, none=False)
        if check is not None and not callable(check):
            msg = f"check has to be a function that takes a Connection, not {check!r}"
            raise TypeError(msg)
        check_kind("config", config, ConnectionConfig)
        check_kind("memory", memory, Memory)
        self._settings = _Settings(
            addresses=addresses, rails=rails, policy=policy, min_size=min_size, max_size=max_size,
            timeout=timeout, max_idle=max_idle, max_lifetime=max_lifetime, max_pause=max_pause,
            connect_timeout=connect_timeout, check=check, config=config, memory=memory,
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

        Cancellation: has no effect, as the call does not wait.
        """
        if self._core is None:
            self._core = _Core(self._settings)
        self._opened()

    async def wait(self, timeout: float | None = None) -> None:
        """Wait until `min_size` connections are open.

        Args:
            timeout: Seconds; None for the pool's `timeout`, 0 or less for no wait.

        Raises:
            TimeoutError: They are not open in time; the pool goes on trying.
            ResourceClosedError: The pool is closed, perhaps meanwhile.
            TypeError: `timeout` is no number.
            RuntimeError: The pool is not open, or belongs to another event loop.

        Cancellation: ends the wait.
        """
        core = self._opened()
        seconds = self._seconds(timeout)
        try:
            with Limit(seconds):
                await core.filled()
        except TimeoutError:
            why, cause = core.ways.why()
            text = f"the pool has opened {core.stats().size} of {self._settings.min_size} "
            text += f"connections within {seconds} s{why}"
            raise _too_late(text) from cause

    def connection(
        self, timeout: float | None = None
    ) -> contextlib.AbstractAsyncContextManager[Connection]:
        """Lend a connection to one task: ``async with pool.connection() as conn``.

        After an exception in the block the connection is aborted and replaced, because the peer may
        be in the middle of a conversation, unless it carries requests, which do not depend on one
        another.  The block must not close it.

        Args:
            timeout: Seconds to wait for a connection; None for the pool's `timeout`, 0 or less for
                no wait.

        Raises:
            TimeoutError: On entering the block: no connection was free in time.
            ResourceClosedError: The pool is closed, perhaps meanwhile.
            TypeError: `timeout` is no number.
            RuntimeError: The pool is not open, or belongs to another event loop.

        Cancellation: on entering the block, no connection is taken.
        """
        return self._lend(self._opened(), self._seconds(timeout))

    def _seconds(self, timeout: float | None) -> float:
        return self._settings.timeout if timeout is None else seconds_left("timeout", timeout)

    @contextlib.asynccontextmanager
    async def _lend(self, core: _Core, seconds: float) -> AsyncIterator[Connection]:
        end = core.loop.time() + seconds
        checked = False
        while True:
            try:
                member = await core.acquire(max(0.0, end - core.loop.time()), lend=True)
            except TimeoutError as exc:
                if not checked:
                    raise
                text = f"no connection of the pool passed its check within {seconds:.3g} s"
                raise _too_late(text) from exc
            if await self._is_healthy(core, member, end):
                break
            checked = True
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

    async def _is_healthy(self, core: _Core, member: Member, end: float) -> bool:
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
        """Send a request over one of the connections, and wait for its answer.

        A connection carries many requests at a time.  A request whose connection broke is sent
        again, at most twice, if the server cannot have received it, or if it is `idempotent`.  One
        that a server refuses because it is stopping was not served, and is sent to another server,
        or to the same one when it is back.

        Args:
            buf: As for `Connection.request`.
            timeout: Seconds for the whole call, including waits for connections; zero or less means
                that the deadline has already passed.  By default each wait for a connection has
                the pool's `timeout`, and the answer `ConnectionConfig.request_timeout_s`.  With
                None, there is no limit for the answer.
            idempotent: Whether the server may get the request twice.
            into: Memory for the answer, as for `Connection.request`.

        Returns:
            The answer; with `into`, its size in bytes.

        Raises:
            TimeoutError: No connection was free in time.
            ResourceClosedError: The pool is closed, perhaps meanwhile.
            ConnectionLostError: The connection broke, and the request is not sent again.
            RequestRefusedError: A server refused it for another reason than that it is stopping;
                or, without `timeout`, all were stopping for as long as the pool's `timeout`.
            Others: as `Connection.request`.

        Cancellation: the server is notified.
        """
        core = self._core
        way = None if core is None else core.single
        member = None if way is None else way.members.current
        if (
            core is None
            or way is None
            or member is None
            or member.users >= CROWDED - 1
            or (outcome := member.outcome).cause is not None
            or outcome.closing
            or outcome.stopping
        ):
            return await self._request(buf, timeout, idempotent, into)
        # For most requests this is all: the pool costs some counting, and no call but these.
        asking = member.connection.request(buf, timeout=timeout, into=into)  # refuses other loops
        begun = core.time() if timeout is not ... else 0.0
        core.requests += 1
        way.requests += 1
        way.members.users += 1
        member.users += 1
        try:
            answer: Message | int = await asking
        except (ConnectionLostError, RequestError) as exc:
            core.release(member, broken=isinstance(exc, ConnectionLostError))
            attempts = _Attempts(idempotent, self._patience(timeout))
            if core.closing or not attempts.may_repeat(exc, core.time()):
                raise
        except BaseException:
            core.release(member)
            raise
        else:
            if 1 < member.users < CROWDED and core.single is not None and not core.line:
                member.users -= 1
                way.members.users -= 1
            else:
                core.release(member)
            return answer
        return await self._request(buf, timeout, idempotent, into, begun, way, attempts)

    async def _request(
        self,
        buf: Any,
        timeout: float | EllipsisType | None,
        idempotent: bool,
        into: Any,
        begun: float = 0.0,
        lost: Way | None = None,
        attempts: _Attempts | None = None,
    ) -> Message | int:
        """The rest of `request`, or all of it; `lost`: where it was sent first, at `begun`."""
        core = self._opened()
        end = None
        if timeout is not None and timeout is not ...:
            end = (core.time() if lost is None else begun) + seconds_left("timeout", timeout)
        if lost is None or attempts is None:
            core.requests += 1
            member = core.share()
            attempts = _Attempts(idempotent, self._patience(timeout))
        else:
            member = await self._share_again(core, lost, attempts, end)
        while True:
            if member is None:
                member = await self._wait_for_member(core, buf, end)
            try:
                left = timeout if end is None else end - core.time()
                answer: Message | int = await member.connection.request(
                    buf, timeout=left, into=into
                )
            except (ConnectionLostError, RequestError) as exc:
                core.release(member, broken=isinstance(exc, ConnectionLostError))
                if core.closing or not attempts.may_repeat(exc, core.time()):
                    raise
            except BaseException:
                core.release(member)
                raise
            else:
                core.release(member)
                return answer
            member = await self._share_again(core, member.way, attempts, end)

    async def _share_again(
        self, core: _Core, lost: Way, attempts: _Attempts, end: float | None
    ) -> Member | None:
        """A connection to another address than the one where a request was lost, if there is one.

        Otherwise there is a pause before the last attempt.
        """
        core.counts.retries += 1
        member = core.share_elsewhere(lost)
        if member is None and attempts.lost == _TRIES - 1:
            pause = _LAST_PAUSE_S * random.uniform(0.5, 1.0)
            await asyncio.sleep(pause if end is None else min(pause, end - core.time()))
        return member

    async def _wait_for_member(self, core: _Core, buf: Any, end: float | None) -> Member:
        """A connection for a request, until the time `end`; perhaps one that is there."""
        if type(buf) is not bytes:
            with bytes_of("a request", buf):
                pass  # a wrong argument is refused without a connection
        wait_s = self._settings.timeout if end is None else max(0.0, end - core.time())
        return await core.acquire(wait_s, lend=False)

    def _patience(self, timeout: float | EllipsisType | None) -> float:
        """Seconds for which servers that stop may refuse a request; its own limit ends it, too."""
        return self._settings.timeout if timeout is None or timeout is ... else math.inf

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
            TypeError: `timeout` is no number.
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
        return f"<Pool {state} to {_named(settings.addresses)}, {size} connections>"

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
