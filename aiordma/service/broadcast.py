"""Broadcast: one message for many connections, and what happens to it if there is no room.

Theory of operation
    A message is posted over all connections in one call of C (`MessageState.send_each`), which
    returns those over which it was not sent.  Only these cost Python anything, so that a slow
    receiver delays no other.

    A message that has to wait is kept once, as bytes, for all connections: each has a reference.

    "latest" depends on what the peer has taken.  A connection whose peer has a `recv_depth` of 1
    has a single credit, which comes back when the program there takes the message.  Here a task
    waits in the connection's line without a message (`Sender.wait_room`), and chooses the newest
    one at the moment when the credit comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from aiordma._core import MessageState, QueuedSend
from aiordma.arguments import Buffer, fitting, parts_of, seconds_left
from aiordma.endpoint.connection import Connection, EndWatcher
from aiordma.endpoint.outcome import reserved_error
from aiordma.endpoint.sending import Sender
from aiordma.endpoint.wire import FrameKind
from aiordma.errors import MessageTooLargeError
from aiordma.loop import fork
from aiordma.loop.lasting import until_done
from aiordma.loop.running import check_loop
from aiordma.loop.uncopied import Uncopied
from aiordma.verbs.wr import SGE

__all__ = ["Broadcast", "Delivery", "Slow", "SubscriberStats"]

Slow = Literal["wait", "drop", "latest"]
_POLICIES = ("wait", "drop", "latest")
#: Exceptions of one connection, which do not concern the others.
_OWN = (OSError, MessageTooLargeError)


@dataclass(slots=True)
class Delivery:
    """What happened to one message of a `Broadcast`.

    Attributes:
        sent: Over how many connections it was sent.
        waiting: With "latest", the connections for which it waits.
        dropped: The connections that miss a message because of this call.  With "drop" it is this
            message, as there was no room.  With "wait" it is this message, as there was no room
            before the timeout, or before the connection was discarded.  With "latest" it is an
            older message, which this one replaces.
        failed: The connections that failed, with their exceptions.
    """

    sent: int
    waiting: Sequence[Connection] = ()
    dropped: Sequence[Connection] = ()
    failed: Mapping[Connection, BaseException] = field(default_factory=dict)


class _Outcomes:
    """A Delivery that is being made."""

    __slots__ = ("dropped", "failed", "sent", "waiting")

    def __init__(self, sent: int) -> None:
        self.sent = sent
        self.waiting: list[Connection] = []
        self.dropped: list[Connection] = []
        self.failed: dict[Connection, BaseException] = {}


@dataclass(frozen=True, slots=True)
class SubscriberStats:
    """What happened to the messages for one connection of a `Broadcast` since it was added.

    Attributes:
        sent: Messages that were sent over it.
        dropped: Messages that it missed, because there was no room.
        failed: Messages that could not be sent, because they are larger than the peer accepts.
        waiting: Messages that are still to be sent, 0 or 1; with "wait" always 0.
    """

    sent: int
    dropped: int
    failed: int
    waiting: int


class _Member:
    """A connection of a Broadcast.

    Attributes:
        since: How many messages there were before it was added.
        task: Sends a large message, or waits for room to send the newest; None: there is none.
        waiting: The newest message, which is to be sent: its bytes, and its immediate.
        sending: Whether the task has taken a message that it has not sent yet.
        unfinished: "wait": the tasks of calls that wait to send over it.
    """

    __slots__ = (
        "connection", "dropped", "failed", "sending", "since", "state", "task", "unfinished",
        "waiting",
    )  # fmt: skip

    def __init__(self, connection: Connection, since: int) -> None:
        self.connection = connection
        self.state: MessageState = connection._state
        self.since = since
        self.dropped = self.failed = 0
        self.unfinished: set[asyncio.Task[None]] = set()
        self.task: asyncio.Task[None] | None = None
        self.waiting: tuple[bytes, int | None] | None = None
        self.sending = False


class _Outgoing:
    """A message that could not be sent over some connections at once.

    Attributes:
        message: The program's object.
        imm: The immediate.
        is_part: Whether the message is part of a `Memory`.
        size: Its bytes; 0 before `look`, and of a part.
    """

    __slots__ = ("_kept", "_parts", "imm", "is_part", "message", "size")

    def __init__(self, message: Any, imm: int | None) -> None:
        self.message = message
        self.imm = imm
        self.is_part = isinstance(message, SGE)
        self.size = 0
        self._parts: list[memoryview] | None = None
        self._kept: bytes | None = message if type(message) is bytes else None

    def look(self) -> None:
        """Find the bytes.

        Raises:
            TypeError, ValueError: As `Connection.send`.
        """
        if self._parts is None and not self.is_part:
            self._parts = parts_of("a message", self.message)
            self.size = sum(map(len, self._parts))

    @property
    def parts(self) -> list[memoryview]:
        """The buffers."""
        self.look()
        return self._parts or []

    @property
    def kept(self) -> bytes:
        """Bytes that the program cannot change; one copy, if any, for all connections."""
        if self._kept is None:
            self._kept = b"".join(self.parts)
        return self._kept

    @property
    def single(self) -> memoryview | bytes:
        """One buffer, for as long as the program does not change its own."""
        return self.parts[0] if len(self.parts) == 1 else self.kept

    def release(self) -> None:
        """Let the program change its buffers again."""
        for part in self._parts or ():
            # A task that was canceled twice may still have it.
            with contextlib.suppress(BufferError):
                part.release()


class Broadcast(Uncopied):
    """Sends each message to all of its connections, in whose event loop it is made.

    A connection leaves by itself when it ends, sends no more (`send_eof`), or begins to carry
    requests.  The connections belong to the program: a broadcast closes none of them, and they go
    on when it is garbage collected.

    Args:
        connections: The first connections; see `add`.
        slow: What happens to a message for a connection without room, which is one whose peer
            holds `recv_depth` messages that its program has not received.

            - "wait": `send` waits until each connection has taken it.
            - "drop": the connection misses the message.
            - "latest": the newest message waits for the connection, and replaces one that waited
              before.  The peer needs a `recv_depth` of 1.  Then, when its program receives a
              message, the newest one at that moment is sent, and is what it receives next.  So no
              message is older than the time that the program spent on the one before, plus the
              time between two messages.
        on_leave: Called in the next iteration of the loop with a connection that has left by
            itself, and the exception that says why.

    Raises:
        ValueError: `slow` is none of these.
        RuntimeError: No event loop is running.
        Others: As `add`.
    """

    __slots__ = (
        "__weakref__", "_loop", "_members", "_messages", "_on_leave", "_ready", "_reference",
        "_slow", "_states", "_tasks",
    )  # fmt: skip

    _reference: weakref.ref[EndWatcher]

    def __init__(
        self,
        connections: Iterable[Connection] = (),
        *,
        slow: Slow = "wait",
        on_leave: Callable[[Connection, BaseException], object] | None = None,
    ) -> None:
        if slow not in _POLICIES:
            msg = f"slow has to be one of {', '.join(map(repr, _POLICIES))}, not {slow!r}"
            raise ValueError(msg)
        self._loop = asyncio.get_running_loop()
        self._slow: Slow = slow
        self._on_leave = on_leave
        self._members: dict[Connection, _Member] = {}
        self._messages = 0
        self._tasks: set[asyncio.Task[None]] = set()
        # Those without a task, and their states in the same order; None: they have changed.
        self._ready: tuple[_Member, ...] | None = ()
        self._states: tuple[MessageState, ...] = ()
        self._reference = weakref.ref(self)
        fork.guard_public(self)
        for connection in connections:
            self.add(connection)

    # Connections

    def add(self, connection: Connection) -> None:
        """Send all further messages over this connection, too.  Idempotent.

        Raises:
            TypeError: It is no `Connection`.
            ValueError: With "latest", the peer accepts more than one message ahead.  It has to
                connect, or listen, with `ConnectionConfig(recv_depth=1)`.
            RuntimeError: The connection carries requests, or belongs to another event loop.
            ResourceClosedError, ConnectionLostError: The connection is over.
        """
        if not isinstance(connection, Connection):
            msg = f"a Broadcast has connections, not {connection!r}"
            raise TypeError(msg)
        check_loop(self._loop, "broadcast")
        connection._check_loop()
        if connection in self._members:
            return
        if connection._carries_requests:
            raise reserved_error("a Broadcast")
        connection._outcome.require_open()
        connection._sender.require_open()
        theirs = connection._theirs
        if self._slow == "latest" and (theirs is None or theirs.recv_depth > 1):
            msg = (
                'slow="latest" needs a peer that takes one message at a time: have it connect, or '
                "listen, with ConnectionConfig(recv_depth=1), and without `raw`"
            )
            raise ValueError(msg)
        connection._add_sender(self._reference)
        self._members[connection] = _Member(connection, self._messages)
        self._ready = None

    def discard(self, connection: Connection) -> None:
        """Send no further message over this connection, if it is in the broadcast.

        A message that waits for it is not sent.  Calls of `send` do not wait for it any more, and
        have it in `Delivery.dropped`.  A large message whose transfer has begun may still arrive.

        Raises:
            RuntimeError: This is not the broadcast's event loop.
        """
        check_loop(self._loop, "broadcast")
        if connection in self._members:
            connection._remove_sender(self._reference)
            for task in self._members[connection].unfinished:
                task.cancel()
            self._remove(connection)

    def _remove(self, connection: Connection) -> None:
        member = self._members.pop(connection)
        self._ready = member.waiting = None
        if member.task is not None:
            member.task.cancel()

    def _on_end(self, connection: Connection, error: BaseException) -> None:
        """Called by a connection over which nothing can be sent any more."""
        if connection in self._members:
            self._remove(connection)
            if self._on_leave is not None and not self._loop.is_closed():
                self._loop.call_soon(self._on_leave, connection, error)

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, connection: object) -> bool:
        return connection in self._members

    def __iter__(self) -> Iterator[Connection]:
        return iter(tuple(self._members))

    @property
    def stats(self) -> dict[Connection, SubscriberStats]:
        """What happened to the messages so far, by connection."""
        return {connection: self._stats_of(m) for connection, m in self._members.items()}

    def _stats_of(self, member: _Member) -> SubscriberStats:
        waiting = int(member.waiting is not None) + member.sending
        sent = self._messages - member.since - member.dropped - member.failed
        return SubscriberStats(
            sent - waiting - len(member.unfinished), member.dropped, member.failed, waiting
        )

    # Messages

    async def send(
        self,
        message: Buffer | SGE | Sequence[Buffer],
        imm: int | None = None,
        *,
        timeout: float | None = None,
    ) -> Delivery:
        """Send one message over all connections that the broadcast has now.

        Args:
            message: As for `Connection.send`.  With "drop" and "latest" a part of a `Memory` is
                refused, as its bytes might change while it waits.
            imm: A 32-bit number that arrives as `Message.imm`.
            timeout: With "wait", the seconds after which the message is dropped for connections
                without room; None: never.

        Returns:
            What happened to it.  An error of one connection is in `Delivery.failed`, and does not
            disturb the others.

        When the call returns, the bytes of `message` may be changed again.  They are kept once, if
        at all, however many connections wait: with "wait" in the program's buffer; with "drop" and
        "latest" as the program's `bytes`, or in a copy of any other buffer.  As with
        `Connection.send`, a message that fits is copied into registered memory of each connection,
        and the peers read a message of more than 256 KiB where it is.

        Only "wait" waits.  With "drop" and "latest" the call never suspends, so a program that does
        nothing else does not let other tasks run.  With "drop" there is room for a message that is
        too large to be copied if no such message is in progress.  With "latest" such a message is
        fetched when the peer's program waits for it, and meanwhile other messages wait.  A
        connection over which the message cannot be sent within its
        `ConnectionConfig.stall_timeout_s` fails with TimeoutError; with "latest" it leaves.

        Raises:
            TypeError: The message is no buffer.
            ValueError: `imm` does not fit into 32 bits; or `timeout` is given without "wait".
            RuntimeError: This is not the broadcast's event loop.

        Cancellation: the message is not sent over the connections that it waits for, which have
        then missed it (`SubscriberStats.dropped`); but a large one may still arrive there.  Over
        the others it was sent.
        """
        check_loop(self._loop, "broadcast")
        if imm is not None:
            imm = fitting("imm", imm, 32)
        if timeout is not None:
            timeout = seconds_left("timeout", timeout)
            if self._slow != "wait":
                msg = f'a timeout is for slow="wait": with {self._slow!r} nothing waits'
                raise ValueError(msg)
        if self._slow != "wait" and isinstance(message, SGE):
            msg = f"with slow={self._slow!r} a message is a buffer, not a part of a Memory"
            raise TypeError(msg)
        ready = self._ready
        if ready is None:
            ready = self._ready = tuple(m for m in self._members.values() if m.task is None)
            self._states = tuple(member.state for member in ready)
        if not ready:  # then nothing else looks at the message
            unsent = _Outgoing(message, imm)
            unsent.look()
            unsent.release()
        refused = MessageState.send_each(self._states, message, imm)
        if refused is None and len(ready) == len(self._members):
            self._messages += 1
            return Delivery(len(ready))
        slow = [(ready[number], code) for number, code in refused or ()]
        found = _Outcomes(len(ready) - len(slow))
        outgoing = _Outgoing(message, imm)
        if self._slow == "wait":
            await self._wait(slow, outgoing, timeout, found)
        else:
            slow += [(m, 0) for m in self._members.values() if m.task is not None]
            self._treat(slow, outgoing, found)
        return Delivery(found.sent, found.waiting, found.dropped, found.failed)

    # "drop" and "latest"

    def _treat(
        self, slow: list[tuple[_Member, int]], outgoing: _Outgoing, delivery: _Outcomes
    ) -> None:
        try:
            outgoing.look()  # raises before anything is counted
            self._messages += 1
            for member, code in slow:
                try:
                    member.connection._sender.check(code)
                    if member.task is None and self._goes_now(member, outgoing):
                        delivery.sent += 1
                    elif self._slow == "drop":
                        member.dropped += 1
                        delivery.dropped.append(member.connection)
                    else:
                        member.connection._require_size(outgoing.size)
                        self._let_wait(member, outgoing, delivery)
                except _OWN as error:
                    member.failed += 1
                    delivery.failed[member.connection] = error
        finally:
            outgoing.release()

    def _goes_now(self, member: _Member, outgoing: _Outgoing) -> bool:
        """Send the message, or begin to, if there is room."""
        connection, size = member.connection, outgoing.size
        if connection._sender.send_now(outgoing.parts, size, outgoing.imm):
            return True
        if size <= member.state.eager_size or member.state.queued or member.state.lacks:
            return False
        connection._require_size(size)
        if self._slow == "drop":
            member.sending = True
            self._begin(member, self._send_large, outgoing.kept, outgoing.imm)
            return True
        return False

    def _let_wait(self, member: _Member, outgoing: _Outgoing, delivery: _Outcomes) -> None:
        """Have the message wait instead of the one that waits now."""
        if member.waiting is not None:
            member.dropped += 1
            delivery.dropped.append(member.connection)
        member.waiting = outgoing.kept, outgoing.imm
        delivery.waiting.append(member.connection)
        if member.task is None:
            self._begin(member, self._send_newest)

    def _begin(
        self, member: _Member, work: Callable[..., Coroutine[Any, Any, None]], *arguments: Any
    ) -> None:
        task = member.task = self._loop.create_task(self._run(member, work, arguments))
        self._ready = None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(
        self,
        member: _Member,
        work: Callable[..., Coroutine[Any, Any, None]],
        arguments: tuple[Any, ...],
    ) -> None:
        try:
            await work(member, *arguments)
        except Exception as error:
            member.failed += 1
            if self._members.get(member.connection) is member:
                # The connection is open, and has accepted nothing for too long.
                member.connection._remove_sender(self._reference)
                self._on_end(member.connection, error)
        finally:
            member.task = None
            member.sending = False
            self._ready = None

    async def _send_large(self, member: _Member, message: bytes, imm: int | None) -> None:
        await member.connection.send(message, imm)

    async def _send_newest(self, member: _Member) -> None:
        """Send what waits, always the newest, until nothing does."""
        sender, state = member.connection._sender, member.state
        while member.waiting is not None:
            await sender.wait_room()
            if member.waiting is None:  # the connection was discarded meanwhile
                return
            message, imm = member.waiting
            code = state.send_first(message, imm)
            sender.check(code)
            if not code:
                member.waiting = None
            elif len(message) > state.eager_size:
                member.waiting, member.sending = None, True
                await member.connection.send(message, imm)
                member.sending = False

    # "wait"

    async def _wait(
        self,
        slow: list[tuple[_Member, int]],
        outgoing: _Outgoing,
        timeout: float | None,
        delivery: _Outcomes,
    ) -> None:
        """Send over connections without room, each in a task of its own."""
        tasks: dict[asyncio.Task[None], _Member] = {}
        try:
            outgoing.look()  # raises before anything is counted
            self._messages += 1
            for member, code in slow:
                try:
                    sending = _begun(member, code, outgoing)
                except _OWN as error:
                    member.failed += 1
                    delivery.failed[member.connection] = error
                    continue
                if sending is None:
                    delivery.sent += 1
                else:
                    task = self._loop.create_task(sending)
                    tasks[task] = member
                    member.unfinished.add(task)
            if tasks:
                await _finish(tasks, timeout)
        finally:
            for task, member in tasks.items():
                member.unfinished.discard(task)
                _count(task, member, delivery)
            outgoing.release()


def _begun(member: _Member, code: int, outgoing: _Outgoing) -> Coroutine[Any, Any, None] | None:
    """Send, or have the message wait in line behind those of earlier calls.

    Returns:
        None if it was sent; else a coroutine to await.
    """
    sender, size = member.connection._sender, outgoing.size
    sender.check(code)
    if outgoing.is_part or size > member.state.eager_size:
        return member.connection.send(outgoing.message, outgoing.imm)
    queued = sender.enqueue(FrameKind.DATA, outgoing.single, size, outgoing.imm)
    return None if queued is None else _sent(sender, queued)


async def _sent(sender: Sender, queued: QueuedSend) -> None:
    sender.check(await queued)


async def _finish(tasks: Iterable[asyncio.Task[None]], timeout: float | None) -> None:
    """Wait for tasks; cancel those that have not ended in time, or all if this is canceled."""
    try:
        await asyncio.wait(tasks, timeout=timeout)
    finally:
        late = [task for task in tasks if not task.done()]
        for task in late:
            task.cancel()
        await until_done(late)  # a send that is canceled ends at once


def _count(task: asyncio.Task[None], member: _Member, delivery: _Outcomes) -> None:
    if not task.done() or task.cancelled():
        member.dropped += 1
        delivery.dropped.append(member.connection)
    elif (error := task.exception()) is not None:
        member.failed += 1
        delivery.failed[member.connection] = error
    else:
        delivery.sent += 1
