"""AdapterSide: a queue pair and what belongs to it, from its first completion to its last.

Theory of operation
    Each connection, stream and datagram endpoint has one.  `link.completions` delivers its
    completions; the subclass assigns the 16-bit sub-index of each wr_id, which names the request.

    A failure is reported once, with its first cause.  The completions after it are flushes, and a
    flush says nothing about the cause.  If a flush is seen first, the cause usually follows through
    another descriptor.  If it does not within a few seconds, the connection ends without one.

    The end takes a bounded time: requests that the adapter does not flush in time end with the
    queue pair, which a worker thread destroys.  After `close` nothing refers to the owner any more,
    so a closed connection is freed with its last reference.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Protocol

from aiordma.cm.address import Address
from aiordma.cm.connection_id import ConnectionId
from aiordma.cm.description import describe
from aiordma.errors import (
    ConnectionLostError,
    ProtocolError,
    ResourceClosedError,
    completion_error,
)
from aiordma.link.completions import Completions
from aiordma.link.log_share import VIOLATIONS
from aiordma.link.source import peer_text
from aiordma.logs import FOR_ALL, Log, log_of
from aiordma.loop import fork
from aiordma.loop.limit import Limit
from aiordma.loop.slots import sub_index
from aiordma.verbs.context import Context
from aiordma.verbs.enums import PortState, WCStatus
from aiordma.verbs.pd import ProtectionDomain
from aiordma.verbs.qp import QueuePair
from aiordma.verbs.wc import WCRecord

__all__ = ["AdapterSide", "Closing", "Owner", "reason_of"]

_log = log_of("connection")
#: How long to wait for the flushed requests after the error state, in seconds.
_FLUSH_GRACE_S = 0.5
#: How long to wait for the cause of a flush; on a busy machine it can be late.
_REASON_S = 2.0
#: How long to wait for the worker threads that destroy the objects.
_DESTROY_S = 5.0
_FLUSHED = int(WCStatus.WR_FLUSH_ERR)


def reason_of(error: BaseException) -> str:
    """The text of an error without its number, for logs and metrics."""
    text = error.strerror if isinstance(error, OSError) else None
    return text or str(error) or type(error).__name__


class Closing(Protocol):
    """A resource whose end a connection waits for."""

    async def wait_closed(self) -> None:
        """Wait until the resource is destroyed.

        Raises:
            OSError: The C library refused.
        """


class Owner(Protocol):
    """What an AdapterSide needs of its connection, stream or endpoint; not called after `close`."""

    def _on_failed(self) -> None:
        """Called once, when `AdapterSide.failure` has been set."""


class AdapterSide:
    """The queue pair of a connection or endpoint; a subclass posts and handles completions.

    Attributes:
        completions: What delivers the completions.
        posted: How many work requests, posted in Python, have not completed.
        failure: The first cause that broke the connection, or None.
    """

    __slots__ = (
        "__weakref__", "_at_close", "_idle", "_owner", "_parts", "_qp_handle", "_thread",
        "_unexplained", "closed", "cm_id", "completions", "context", "failure", "loop", "pd",
        "posted", "qp",
    )  # fmt: skip

    _owner: Owner | None
    #: The log for the steps in the life of such a connection.
    log: ClassVar[Log] = _log

    def __init__(
        self,
        cm_id: ConnectionId,
        context: Context,
        completions: Completions,
        pd: ProtectionDomain,
        qp: QueuePair,
    ) -> None:
        self.cm_id: ConnectionId = cm_id
        self.context: Context = context
        self.completions: Completions = completions
        self.pd: ProtectionDomain = pd
        self.qp: QueuePair = qp
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self.posted: int = 0
        self.failure: BaseException | None = None
        self.closed: bool = False
        self._owner = None
        self._qp_handle = qp._require()
        self._thread = threading.get_ident()
        self._idle: asyncio.Event | None = None
        self._parts: Sequence[Closing] = ()
        self._at_close: list[Callable[[], None]] = []
        self._unexplained: asyncio.TimerHandle | None = None
        fork.guard(self)

    @property
    def forked(self) -> bool:
        """Whether this process is a forked child of the connection's process."""
        return self._qp_handle is None

    def poison_after_fork(self) -> None:
        """Post nothing in a forked child, which shares the adapter's queues with its parent."""
        self.closed = self.completions.over = True
        self._qp_handle = None

    @property
    def own_pd(self) -> bool:
        """Whether the protection domain belongs to this connection alone."""
        return True

    def _begin(self) -> None:
        """Begin to receive completions; `_owner` has to be set."""
        self.qp._on_first_failure = self.fail
        self.completions.begin(self)

    # Completions

    def listen(self) -> None:
        """Have completions of own requests wake the loop; end the connection if that fails."""
        try:
            self.completions.listen()
        except OSError as exc:
            self.fail(exc)

    def __call__(self, record: WCRecord) -> None:
        """Handle a completion of this queue pair, and count it off `posted`."""
        raise NotImplementedError

    @property
    def under_way(self) -> int:
        """How many work requests have not completed.

        It can become negative, because software iWARP flushes some requests twice.
        """
        return self.posted

    def _operation(self, sub: int) -> str:
        """The name of the operation that a sub-index stands for, for the text of an error."""
        raise NotImplementedError

    def _failed(self, record: WCRecord) -> None:
        if record[1] == _FLUSHED:
            # The cause was reported before, or will be through another descriptor.  If Soft-RoCE
            # cannot send a packet, it is never reported.
            if self._unexplained is None and self.failure is None and not self.closed:
                self._unexplained = self.loop.call_later(_REASON_S, self._without_reason)
                self._unexplained_end()
            return
        operation = self._operation(sub_index(record[0]))
        self.fail(
            completion_error(record[1], operation=operation, vendor_err=record[3], qp_num=record[6])
        )

    def _unexplained_end(self) -> None:
        """Called once, if the adapter has ended the connection and the cause is not known yet."""

    def _without_reason(self) -> None:
        self._unexplained = None
        if self.failure is not None or self.closed:
            return
        text = "the adapter ended the connection and gave no reason"
        with contextlib.suppress(OSError):
            port = self.cm_id.port_num
            state = self.context.query_port(port).state
            if state != PortState.ACTIVE:
                text += f" (port {port} of {self.context.name} is {state.name})"
        self.fail(ConnectionLostError(errno.ECONNRESET, text))

    def fail(self, cause: BaseException) -> None:
        """Record the cause that breaks the connection, and report it; later ones are ignored."""
        if self.failure is not None:
            return
        self.note("fails: %r", cause)
        if isinstance(cause, ProtocolError) and VIOLATIONS.may_log(self.peer_address()):
            # The peer may not get the reason, and its program may not show it.
            _log.warning(
                "this side ends the connection with %s: %s", self.peer_name(), cause.args[1]
            )
        # Without the traceback, whose frames refer to this object, which would make a cycle.
        self.failure = cause.with_traceback(None)
        if not self._last_word(cause):
            self.to_error()
        if self._owner is not None:
            self._owner._on_failed()

    def peer_name(self) -> str:
        """The address and port of the peer, for a line in the log."""
        address = self.peer_address()
        return "the peer" if address is None else f"{address[0]} port {address[1]}"

    def peer_address(self) -> Address | None:
        """The address and port of the peer, if they are known."""
        with contextlib.suppress(OSError, ResourceClosedError):
            return self.cm_id.destination
        return None

    # Log

    def note(self, text: str, *args: object, log: Log | None = None) -> None:
        """Log a step of this connection's life at DEBUG, with the number of its connection id.

        Args:
            text: The line after the number, a format string for `args`.
            args: Values, which are formatted only if the line is logged.
            log: The log to use; by default `AdapterSide.log`.
        """
        log = log or self.log
        if log.tells(logging.DEBUG):
            log.tell(logging.DEBUG, "#%d " + text, self.number, *args, extra=self._facts(), above=1)

    def inform(self, text: str, *args: object) -> None:
        """Log at INFO; as `note`."""
        extra = self._facts()
        self.log.tell(logging.INFO, "#%d " + text, self.number, *args, extra=extra, above=1)

    def warn(self, text: str, *args: object) -> None:
        """Log what the person at the terminal has to know of this connection; as `note`."""
        extra = self._facts() | FOR_ALL
        self.log.tell(logging.WARNING, "#%d " + text, self.number, *args, extra=extra, above=1)

    def note_opened(self, peer_qpn: int) -> None:
        """Log that the handshake is complete; `peer_qpn` is 0 if it is unknown."""
        if self.log.tells(logging.DEBUG):
            there = peer_qpn or "unknown"
            here = self.qp.num
            self.note("is open with %s: queue pair %d, there %s", self.peer_name(), here, there)

    @property
    def number(self) -> int:
        """The number of the connection in the log, the same in all of its lines."""
        return self.cm_id.number

    def _facts(self) -> dict[str, object]:
        """The extra fields of the connection's log records."""
        peer = peer_text(self.peer_address())
        return {"connection": self.number, "peer": peer, "qpn": self.qp.num}

    def _sums(self) -> str:
        """A summary of what was sent and received, for the last line in the log."""
        return ""

    def _last_word(self, cause: BaseException) -> bool:
        """Post a message that tells the peer the cause, if the protocol has such messages.

        Returns:
            Whether it was posted.  The queue pair then stays in RTS until the connection is closed.
        """
        return False

    def to_error(self) -> None:
        """Move the queue pair to the error state, in which all posted requests are flushed."""
        try:
            self.qp.to_error()
        except OSError as exc:
            # The device is gone, or on iWARP the kernel has moved the queue pair already.
            self.note("queue pair to the error state: %s", exc)

    @property
    def can_send(self) -> bool:
        """Whether posted sends may still arrive."""
        return not self.closed and not self.qp._in_error

    def in_loop(self, function: Callable[[], None]) -> None:
        """Run `function` in the thread of the connection's loop: now if this is it, else soon.

        This is needed because a message can be released, or garbage collected, in any thread.
        """
        if threading.get_ident() == self._thread:
            function()
        elif not self.loop.is_closed():
            self.loop.call_soon_threadsafe(function)

    # End

    async def quiesce(self) -> None:
        """Wait a bounded time until all posted requests have been flushed.

        Soft-RoCE may never flush some receives.  These end when the queue pair is destroyed.
        """
        if self.under_way <= 0:
            return
        self._idle = asyncio.Event()
        try:
            with Limit(_FLUSH_GRACE_S):
                await self._idle.wait()
        except TimeoutError:
            self.note("%d requests never flushed", self.under_way)

    def came_back(self) -> None:
        """End the wait of `quiesce` if no request is in flight any more."""
        if self._idle is not None and self.under_way <= 0:
            self._idle.set()

    def close(self) -> None:
        """Close all resources, in the order that C requires; worker threads make the C calls."""
        if self.closed:
            return
        self.closed = True
        # Collected now, because the address of the peer is unknown once the id is closed.
        extra = self._facts() if self.log.tells(logging.DEBUG) else None
        if self._unexplained is not None:
            self._unexplained.cancel()
            self._unexplained = None
        self.completions.end()
        self.qp._on_first_failure = None
        # First the memory, which stays registered until the queue pair is gone: the thread that
        # destroys that deregisters it, too, before anybody is told of the end.
        self._parts = self._give_back()
        self.qp.close()
        if self.own_pd:
            self.pd.close()
        self.cm_id.close()
        functions, self._at_close = self._at_close, []
        for function in functions:
            function()
        self._owner = None
        if extra is not None:
            text = f"#{self.number} is closed{self._sums()}"
            self.log.tell(logging.DEBUG, "%s", text, extra=extra)

    def _give_back(self) -> Sequence[Closing]:
        """Close the other resources of the subclass, and return those to wait for."""
        raise NotImplementedError

    def at_close(self, function: Callable[[], None]) -> None:
        """Have `function` called by `close()`; call it now if the connection is closed already."""
        if self.closed:
            function()
        else:
            self._at_close.append(function)

    def wait_for(self, parts: Iterable[Closing]) -> None:
        """Have `wait_closed` wait for these, too.  To be called by a function of `at_close`."""
        self._parts = (*self._parts, *parts)

    def when_gone(self, function: Callable[[], None]) -> None:
        """Have `function` called in the loop's thread when the queue pair is destroyed."""
        self.qp._when_gone(lambda: self.in_loop(function))

    async def wait_closed(self) -> None:
        """Wait a bounded time until all resources of the connection are destroyed.

        Soft-RoCE can take 50 seconds to destroy a queue pair; that then goes on in its thread.
        """
        try:
            with Limit(_DESTROY_S):
                # Usually only the wait for the queue pair takes time.
                domain = (self.pd,) if self.own_pd else ()
                ending: tuple[Closing, ...] = (self.qp, *self._parts, *domain, self.cm_id)
                for resource in ending:
                    try:
                        await resource.wait_closed()
                    except OSError as exc:
                        _log.warning("%r: %s", resource, exc)
        except TimeoutError:
            _log.info("queue pair %d: destroying it takes long", self.qp.num)

    def gid_index(self) -> int | None:
        """The index of this side's GID in the port's table, from the adapter; None on iWARP.

        Raises:
            OSError: The device is gone.
            ResourceClosedError: The queue pair is closed.
        """
        return None if self.context.is_iwarp else self.qp.query().ah_attr.sgid_index

    def describe(self) -> dict[str, Any]:
        """The device, port, GID and so on, for `get_extra_info`."""
        return describe(self.cm_id, self.context, self.qp)
