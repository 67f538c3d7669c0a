"""AdapterSide: a queue pair, from its first completion to its last.

Theory of operation
    Each connection, stream and datagram endpoint has one.  How its completions come is in
    `link.completions`; the 16-bit sub-index of a wr_id is the subclass's, and names the request.

    A failure is reported once, with its first cause: the completions behind it are flushes, and a
    flush is not a reason.  If the flush is seen first, the reason follows by another descriptor.
    If no reason has come after a bounded time, the connection ends without a reason.

    The end is bounded: requests that the adapter does not flush in time end with the queue pair,
    which the reaper destroys.  Then nothing leads to the owner any more, so that a closed
    connection goes with its last reference.
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
from aiordma.logs import Log, log_of
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
_FLUSH_GRACE_S = 0.5
_REASON_S = 2.0  # on a busy machine it can take long to come
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
    """A connection, stream or endpoint, as its adapter's side sees it; called until the end."""

    def _on_failed(self) -> None:
        """`AdapterSide.failure` is set; once."""


class AdapterSide:
    """The queue pair of a connection or endpoint; a subclass posts and takes completions.

    Attributes:
        completions: How they come.
        posted: Work requests whose completion has not arrived.
        failure: First cause of the connection's end, or None.
    """

    __slots__ = (
        "__weakref__", "_at_close", "_idle", "_owner", "_parts", "_qp_handle", "_thread",
        "_unexplained", "closed", "cm_id", "completions", "context", "failure", "loop", "pd",
        "posted", "qp",
    )  # fmt: skip

    _owner: Owner | None
    #: The log that has the life of such a connection.
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
        """In a forked child: the rings are shared with the parent, so nothing may be posted."""
        self.closed = self.completions.over = True
        self._qp_handle = None

    @property
    def own_pd(self) -> bool:
        """Whether the protection domain ends with the connection."""
        return True

    def _begin(self) -> None:
        """Have completions delivered; the owner is there."""
        self.qp._on_first_failure = self.fail
        self.completions.begin(self)

    # Completions

    def listen(self) -> None:
        """Have own requests wake the loop; the connection ends if the queue cannot be armed."""
        try:
            self.completions.listen()
        except OSError as exc:
            self.fail(exc)

    def __call__(self, record: WCRecord) -> None:
        """Take a completion of this queue pair; the subclass counts it off `posted`."""
        raise NotImplementedError

    @property
    def under_way(self) -> int:
        """Work requests that have not completed.

        It may be below 0: software iWARP flushes some requests twice.
        """
        return self.posted

    def _operation(self, sub: int) -> str:
        """Name of the operation that a sub-index stands for, for the text of an error."""
        raise NotImplementedError

    def _failed(self, record: WCRecord) -> None:
        if record[1] == _FLUSHED:
            # The reason has come before, or comes by another descriptor.  If Soft-RoCE cannot send
            # a packet, it never comes.
            if self._unexplained is None and self.failure is None and not self.closed:
                self._unexplained = self.loop.call_later(_REASON_S, self._without_reason)
                self._unexplained_end()
            return
        operation = self._operation(sub_index(record[0]))
        self.fail(
            completion_error(record[1], operation=operation, vendor_err=record[3], qp_num=record[6])
        )

    def _unexplained_end(self) -> None:
        """Called once if the adapter has ended the connection and the reason is not known yet."""

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
        """Record the cause that breaks the connection, and report it; a second cause is ignored."""
        if self.failure is not None:
            return
        self.note("fails: %r", cause)
        if isinstance(cause, ProtocolError) and VIOLATIONS.may_log(self._peer()):
            # The peer may not get the reason, and its program may not show it.
            _log.warning(
                "this side ends the connection with %s: %s", self.peer_name(), cause.args[1]
            )
        # The frames of its traceback refer to this object: a cycle.
        self.failure = cause.with_traceback(None)
        if not self._last_word(cause):
            self.to_error()
        if self._owner is not None:
            self._owner._on_failed()

    def peer_name(self) -> str:
        """Address and port of the peer, for a line in the log."""
        address = self._peer()
        return "the peer" if address is None else f"{address[0]} port {address[1]}"

    def _peer(self) -> Address | None:
        with contextlib.suppress(OSError, ResourceClosedError):
            return self.cm_id.destination
        return None

    # Log

    def note(self, text: str, *args: object, log: Log | None = None) -> None:
        """Log a step of this connection's life at DEBUG, with the number of its connection id.

        Args:
            text: The line behind the number, with places for `args`.
            args: Facts, formatted only if the line is wanted.
            log: The log of the line; by default the log that has the life of such a connection.
        """
        log = log or self.log
        if log.tells(logging.DEBUG):
            log.tell(logging.DEBUG, "#%d " + text, self.number, *args, extra=self._facts(), above=1)

    def note_opened(self, peer_qpn: int) -> None:
        """Log that the handshake is done; `peer_qpn` is 0 where the peer does not tell it."""
        if self.log.tells(logging.DEBUG):
            there = peer_qpn or "unknown"
            here = self.qp.num
            self.note("is open with %s: queue pair %d, there %s", self.peer_name(), here, there)

    @property
    def number(self) -> int:
        """Number of the connection in the log; the same in all of its lines."""
        return self.cm_id.number

    def _facts(self) -> dict[str, object]:
        """Fields of the records of the log."""
        peer = peer_text(self._peer())
        return {"connection": self.number, "peer": peer, "qpn": self.qp.num}

    def _sums(self) -> str:
        """The work that was done, for the last line of the log."""
        return ""

    def _last_word(self, cause: BaseException) -> bool:
        """Post a message with the cause to the peer, if the subclass has such messages.

        Returns:
            Whether it was posted; the queue pair then stays in RTS until the connection is closed.
        """
        return False

    def to_error(self) -> None:
        """Move the queue pair to the error state: the posted requests are flushed."""
        try:
            self.qp.to_error()
        except OSError as exc:
            # The device is gone, or an iWARP connection has moved the queue pair before.
            self.note("queue pair to the error state: %s", exc)

    @property
    def can_send(self) -> bool:
        """Whether posted sends may still arrive."""
        return not self.closed and not self.qp._in_error

    def in_loop(self, function: Callable[[], None]) -> None:
        """Run `function` in the connection's loop: now in the loop's thread, else soon.

        A message may be released, or collected, in any thread.
        """
        if threading.get_ident() == self._thread:
            function()
        elif not self.loop.is_closed():
            self.loop.call_soon_threadsafe(function)

    # End

    async def quiesce(self) -> None:
        """Wait until each posted request has completed, for a bounded time, after the error state.

        Soft-RoCE may never flush some receives; destroying the queue pair ends them, too.
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
        """End the wait of `quiesce` with the last request that was under way."""
        if self._idle is not None and self.under_way <= 0:
            self._idle.set()

    def close(self) -> None:
        """Close all resources, in the order that C needs; worker threads make the C calls."""
        if self.closed:
            return
        self.closed = True
        told = self._facts() if self.log.tells(logging.DEBUG) else None  # while the peer is known
        if self._unexplained is not None:
            self._unexplained.cancel()
            self._unexplained = None
        self.completions.end()
        self.qp._on_first_failure = None
        self.qp.close()
        self._parts = self._give_back()
        if self.own_pd:
            self.pd.close()
        self.cm_id.close()
        functions, self._at_close = self._at_close, []
        for function in functions:
            function()
        self._owner = None
        if told is not None:
            text = f"#{self.number} is closed{self._sums()}"
            self.log.tell(logging.DEBUG, "%s", text, extra=told)

    def _give_back(self) -> Sequence[Closing]:
        """Close the subclass's resources beside the queue pair; return those to wait for."""
        raise NotImplementedError

    def at_close(self, function: Callable[[], None]) -> None:
        """Have `function` called by `close()`; now if the connection is closed already."""
        if self.closed:
            function()
        else:
            self._at_close.append(function)

    def wait_for(self, parts: Iterable[Closing]) -> None:
        """Have `wait_closed` wait for these, too; in a function of `at_close`."""
        self._parts = (*self._parts, *parts)

    def when_gone(self, function: Callable[[], None]) -> None:
        """Have `function` called in the loop's thread when the queue pair is gone."""
        self.qp._gone.add_done_callback(lambda _: self.in_loop(function))

    async def wait_closed(self) -> None:
        """Wait until the adapter holds nothing of this connection any more, for a bounded time.

        Soft-RoCE can take 50 seconds for a destroy; after the bound it goes on in its thread.
        """
        try:
            with Limit(_DESTROY_S):
                # Mostly only the first wait takes time: the others end with the queue pair.
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
        """Index of this side's GID in the port's table, asked of the adapter; None on iWARP.

        Raises:
            OSError: The device is gone.
            ResourceClosedError: The queue pair is closed.
        """
        return None if self.context.is_iwarp else self.qp.query().ah_attr.sgid_index

    def describe(self) -> dict[str, Any]:
        """Device, port, GID and so on, as `Connection.get_extra_info` returns them."""
        return describe(self.cm_id, self.context, self.qp)
