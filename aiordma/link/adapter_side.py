"""AdapterSide: a queue pair, from its first completion to its last.

Theory of operation
    Connections, streams and datagram endpoints have one each.  How its completions come is in
    `link.completions`; the 16-bit sub-index of a wr_id is the subclass's, and tells what completed.

    A failure is reported once, with its first cause: whatever follows it is flushed and is not a
    reason.  Where the flush is seen first, the reason follows by another descriptor, or is taken
    to be none after a bounded time.

    The end is bounded: what the adapter does not flush in time is ended by the destruction of the
    queue pair, which the reaper does.  From then on nothing leads to the owner any more, so that
    what is closed goes with its last reference.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from aiordma.cm.connection_id import ConnectionId
from aiordma.cm.description import describe
from aiordma.errors import (
    ConnectionLostError,
    ProtocolError,
    ResourceClosedError,
    completion_error,
)
from aiordma.link.completions import Completions
from aiordma.loop import fork
from aiordma.loop.limit import Limit
from aiordma.loop.slots import sub_index
from aiordma.verbs.context import Context
from aiordma.verbs.enums import PortState, WCStatus
from aiordma.verbs.pd import ProtectionDomain
from aiordma.verbs.qp import QueuePair
from aiordma.verbs.wc import WCRecord

__all__ = ["AdapterSide", "Closing", "Owner"]

_log = logging.getLogger("aiordma")
_FLUSH_GRACE_S = 0.5
_REASON_S = 2.0  # on a busy machine it can take long to come
_DESTROY_S = 5.0
_FLUSHED = int(WCStatus.WR_FLUSH_ERR)


class Closing(Protocol):
    """What a connection waits for at its end."""

    async def wait_closed(self) -> None:
        """Wait for its end.

        Raises:
            OSError: The C library refused.
        """


class Owner(Protocol):
    """A connection, stream or endpoint, as its adapter's side sees it; it is told until the end."""

    def _on_failed(self) -> None:
        """`AdapterSide.failure` is set; once."""


class AdapterSide:
    """What the adapter holds for one connection or endpoint; subclasses post, and take completions.

    Attributes:
        completions: How they come.
        posted: Work requests whose completion has not arrived.
        failure: First cause of its end, or None.
        closed: Whether everything was given back.
    """

    __slots__ = (
        "__weakref__", "_at_close", "_idle", "_owner", "_parts", "_qp_handle", "_thread",
        "_unexplained", "closed", "cm_id", "completions", "context", "failure", "loop", "pd",
        "posted", "qp",
    )  # fmt: skip

    _owner: Owner | None

    def __init__(
        self,
        cm_id: ConnectionId,
        context: Context,
        completions: Completions,
        pd: ProtectionDomain,
        qp: QueuePair,
    ) -> None:
        self.cm_id = cm_id
        self.context = context
        self.completions = completions
        self.pd = pd
        self.qp = qp
        self.loop = asyncio.get_running_loop()
        self.posted = 0
        self.failure: BaseException | None = None
        self.closed = False
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
        """Whether it was made by a process that this one was forked from."""
        return self._qp_handle is None

    def poison_after_fork(self) -> None:
        """In a forked child: the rings are shared with the parent, so nothing may be posted."""
        self.closed = self.completions.over = True
        self._qp_handle = None

    def _begin(self) -> None:
        """Have completions delivered; the owner is there."""
        self.qp._on_first_failure = self.fail
        self.completions.begin(self)

    # Completions

    def __call__(self, record: WCRecord) -> None:
        """One of its requests has completed; the subclass counts it off `posted`."""
        raise NotImplementedError

    @property
    def under_way(self) -> int:
        """Work requests that the adapter has not given back.

        It may be below 0: software iWARP flushes some of them twice.
        """
        return self.posted

    def _operation(self, sub: int) -> str:
        """What a sub-index means, for the text of an error."""
        raise NotImplementedError

    def _failed(self, record: WCRecord) -> None:
        if record[1] == _FLUSHED:
            # The reason has come before, or comes by another descriptor; or, where Soft-RoCE has
            # no way to send a packet, never.
            if self._unexplained is None and self.failure is None and not self.closed:
                self._unexplained = self.loop.call_later(_REASON_S, self._without_reason)
                self._unexplained_end()
            return
        operation = self._operation(sub_index(record[0]))
        self.fail(
            completion_error(record[1], operation=operation, vendor_err=record[3], qp_num=record[6])
        )

    def _unexplained_end(self) -> None:
        """The adapter has ended the connection, and the reason is not known yet; called once."""

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
        """The connection is broken; the first cause counts, and is reported once."""
        if self.failure is not None:
            return
        _log.debug("queue pair %d: %r", self.qp.num, cause)
        if isinstance(cause, ProtocolError):
            # The other side may not be told, or its program not say it.
            _log.warning(
                "this side ends the connection with %s: %s", self.peer_name(), cause.args[1]
            )
        # Its frames would lead back here.
        self.failure = cause.with_traceback(None)
        if not self._last_word(cause):
            self.to_error()
        if self._owner is not None:
            self._owner._on_failed()

    def peer_name(self) -> str:
        """Address and port of the peer, for a line in the log."""
        with contextlib.suppress(OSError, ResourceClosedError):
            if (address := self.cm_id.destination) is not None:
                return f"{address[0]} port {address[1]}"
        return "the peer"

    def _last_word(self, cause: BaseException) -> bool:
        """Post what tells the peer why; True: the queue pair is left to send it until the end."""
        return False

    def to_error(self) -> None:
        """Queue pair to the error state: what is posted gets flushed."""
        try:
            self.qp.to_error()
        except OSError as exc:
            # The device is gone, or an iWARP connection has ended it before us.
            _log.debug("queue pair %d to error: %s", self.qp.num, exc)

    @property
    def can_send(self) -> bool:
        """Whether what was posted may still arrive."""
        return not self.closed and not self.qp._in_error

    def in_loop(self, function: Callable[[], None]) -> None:
        """Run `function` in the connection's loop: now if that is this thread, else soon.

        A message may be released, or collected, in any thread.
        """
        if threading.get_ident() == self._thread:
            function()
        elif not self.loop.is_closed():
            self.loop.call_soon_threadsafe(function)

    # End

    async def quiesce(self) -> None:
        """After the error state: wait until everything posted came back, for a bounded time.

        Soft-RoCE may never flush some receives; destroying the queue pair ends them too.
        """
        if self.under_way <= 0:
            return
        self._idle = asyncio.Event()
        try:
            with Limit(_FLUSH_GRACE_S):
                await self._idle.wait()
        except TimeoutError:
            _log.debug("queue pair %d: %d requests never flushed", self.qp.num, self.under_way)

    def _came_back(self) -> None:
        """End the wait of `quiesce` with the last request that was under way."""
        if self._idle is not None and self.under_way <= 0:
            self._idle.set()

    def close(self) -> None:
        """Give everything back, in the order that C needs; the C calls run in the reaper."""
        if self.closed:
            return
        self.closed = True
        if self._unexplained is not None:
            self._unexplained.cancel()
            self._unexplained = None
        self.completions.end()
        self.qp._on_first_failure = None
        self.qp.close()
        self._parts = self._give_back()
        self.pd.close()
        self.cm_id.close()
        functions, self._at_close = self._at_close, []
        for function in functions:
            function()
        self._owner = None

    def _give_back(self) -> Sequence[Closing]:
        """Close what the subclass has beside the queue pair; what there is to wait for."""
        raise NotImplementedError

    def at_close(self, function: Callable[[], None]) -> None:
        """Have `function` called by `close()`; now if that was before."""
        if self.closed:
            function()
        else:
            self._at_close.append(function)

    async def wait_closed(self) -> None:
        """Wait until the adapter holds nothing of this connection any more, for a bounded time.

        Soft-RoCE can take 50 seconds for a destroy.  That goes on in the reaper.
        """
        try:
            with Limit(_DESTROY_S):
                # Mostly one wait: with the queue pair goes what was waiting for it.
                ending: tuple[Closing, ...] = (self.qp, *self._parts, self.pd, self.cm_id)
                for resource in ending:
                    try:
                        await resource.wait_closed()
                    except OSError as exc:
                        _log.warning("%r: %s", resource, exc)
        except TimeoutError:
            _log.info("queue pair %d: destroying it takes long", self.qp.num)

    def describe(self) -> dict[str, Any]:
        """Device, port, GID and so on, as `Connection.get_extra_info` tells them."""
        return describe(self.cm_id, self.context, self.qp)
