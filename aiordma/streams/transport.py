"""RdmaTransport: asyncio's Transport over a queue pair, by the protocol of rsockets.

Theory of operation
    Completions only set flags and counts; when the drain that brought them is over, `_process`
    acts on all of it at once, in the context that made the transport: new bytes go to the
    protocol, freed room is used, the end is noticed.  So a protocol answers within the same turn of
    the loop, and never closes or writes in the midst of a drain.

    Most wake-ups bring data and nothing else, and most writes fit: C deals with those
    (`_core/stream_state.c`).  All else closes a gate (`_gate`), so the usual case has one check.

    `Incoming` and `Outgoing` are the two directions.  `pause_reading` holds the peer back by doing
    nothing: bytes that are not taken out of the ring leave no room in it.

    The end, whatever its cause, is reached once, in `_finish`; `connection_lost` follows in a
    turn of its own, with None only after an end in the band or an end by this side.

    The queue pair outlives the end, as a kernel's connection outlives its socket: posted bytes
    arrive, and behind them the word of the end, while `StreamEnd` waits for both.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import errno
import functools
import sys
import time
import warnings
import weakref
from asyncio import constants, transports
from collections.abc import Callable
from typing import Any

from aiordma._core import STREAM_FAILED, STREAM_GROW
from aiordma.cm.connection_event import ConnectionEvent
from aiordma.cm.enums import EventType
from aiordma.cm.step import Stage
from aiordma.errors import (
    ConnectionLostError,
    ForkedError,
    ProtocolError,
    ResourceClosedError,
    cm_error,
)
from aiordma.link.adapter_side import reason_of
from aiordma.link.keepalive import Keepalive
from aiordma.link.stream_sockets import stream_socket
from aiordma.link.tally import count
from aiordma.link.transport_socket import shown
from aiordma.logs import log_of
from aiordma.loop import background, fork
from aiordma.loop.running import check_thread, from_finalizer
from aiordma.loop.timers import now
from aiordma.loop.uncopied import Uncopied
from aiordma.streams.incoming import Incoming
from aiordma.streams.iomap import StreamIomap
from aiordma.streams.outgoing import Outgoing
from aiordma.streams.stream_config import StreamConfig
from aiordma.streams.stream_end import StreamEnd, lost, vanished
from aiordma.streams.stream_port import StreamPort

__all__ = ["RdmaTransport"]

_log = log_of("stream")
_memory_log = log_of("memory")
_WARN_AFTER = 5  # calls of write() after the end


def _written_late(stream: weakref.ref[RdmaTransport], data: Any, sent: int) -> None:
    """Called for `write` of a stream that is over: the program may hold only this method."""
    transport = stream()
    if transport is not None:
        transport._write(data, sent)
    elif not isinstance(data, (bytes, bytearray, memoryview)):
        raise _not_bytes(data)


def _written_in_a_child(data: Any, sent: int) -> None:
    raise fork.forked_error("RdmaTransport")


def _not_bytes(data: Any) -> TypeError:
    return TypeError(f"data argument must be a bytes-like object, not {type(data).__name__!r}")


def _not_taken() -> ConnectionLostError:
    text = "the peer closed the connection before it took everything"
    error = ConnectionLostError(errno.ECONNRESET, text)
    error.hint = "the peer closed in good order; bytes that were written to it since are lost"
    return error


# The base class has asyncio's `pause_writing` and water marks, and attributes for `loop.sendfile`.
class RdmaTransport(Uncopied, transports._FlowControlMixin):
    """A stream connection; made by `create_connection`, `open_connection` and the servers.

    All of asyncio's `Transport` works, with the same meaning.  `get_extra_info` knows `peername`,
    `sockname`, `device`, `port` (of the device), `gid`, `gid_index`, `link_layer`, `transport`,
    `mtu`, `qpn`, `peer_qpn`, `provider`, `number`, `opened_at` and `backend`, as `Connection` does,
    and `socket`, which is an `RdmaTransportSocket`.
    """

    # Attributes of the base class that its type stub does not have.
    _extra: dict[str, Any]
    _maybe_pause_protocol: Callable[[], None]
    _maybe_resume_protocol: Callable[[], None]
    _protocol_paused: bool

    _start_tls_compatible = True  # for loop.start_tls
    _sendfile_compatible = constants._SendfileMode.FALLBACK

    def __init__(self, port: StreamPort, config: StreamConfig) -> None:
        loop = port.loop
        super().__init__({}, loop)
        self._loop = loop
        self._context = contextvars.copy_context()
        self._port = port
        self._config = config
        self._machine = port.machine()
        self._out = Outgoing(port, self._machine)
        self._in = Incoming(port, self._machine, self)
        self._end = StreamEnd(port, self._machine, config)
        state = port.state
        elsewhere = functools.partial(check_thread, loop, "stream")
        state.attach(self, self._context.run, self._write, elsewhere)
        if type(self).write is RdmaTransport.write:
            self.write = state.write  # type: ignore[method-assign, assignment]  # a call of Python less
        name = "idle_timeout_s of this side's StreamConfig"
        self._keepalive = Keepalive(loop, port.plan.silence, config.idle_timeout_s, name)
        self._shown = 0.0  # when this side last gave a sign of life by itself
        self._protocol: Any = None
        self._server: Any = None
        self._reading = False  # the protocol has seen connection_made
        self._closing = False
        self._over = False
        self._broke_by: BaseException | None = None
        self._scheduled = False
        port.at_close(self._part)
        port.cm_id._sink = self._on_cm_event
        try:
            port.start(self)
        except BaseException:
            self._over = True  # it never began, and the caller closes the port
            raise
        fork.guard(self)
        fork.guard_public(self)

    # The handshake, by a client and a server

    def _hello(self) -> bytes:
        return self._machine.hello()

    def _meet(self, event: ConnectionEvent) -> None:
        self._machine.meet(event.private_data)
        self._extra["peer_qpn"] = event.qp_num or None

    def _start(
        self, protocol: Any, waiter: asyncio.Future[None] | None = None, server: Any = None
    ) -> None:
        """Begin, with connection_made: both ends are there, though the peer may have gone since."""
        self._extra.update(self._port.describe())
        peername, sockname = self._port.cm_id.destination, self._port.cm_id.source
        self._extra["peername"] = peername
        self._extra["sockname"] = sockname
        self._extra["number"], self._extra["opened_at"] = self._port.number, time.time()
        self._port.note_opened(self._extra.get("peer_qpn") or 0)
        if sockname is not None:
            self._extra["socket"] = stream_socket(sockname, peername, self._config)
        self.set_protocol(protocol)
        self._server = server
        if server is not None:
            server._attach(self)
        self._machine.open()
        self._out.control()
        self._shown = now()
        self._keepalive.start(self)
        self._gate()
        background.deliver_at_end(self._loop, self)
        self._loop.call_soon(protocol.connection_made, self, context=self._context)
        self._loop.call_soon(self._made, waiter, context=self._context)

    def _made(self, waiter: asyncio.Future[None] | None) -> None:
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        # A turn later, as over TCP: callbacks of connection_made run before the first bytes.
        self._loop.call_soon(self._begin, context=self._context)

    def _begin(self) -> None:
        self._reading = True
        self._process()

    # From the port, in the midst of a drain

    def _on_word(self, word: int) -> None:
        if self._protocol is None and not self._over:
            # A word can come before ESTABLISHED is read, or after that event got lost.
            self._port.cm_id.notify_established()
        try:
            self._machine.on_word(word)
        except ProtocolError as exc:
            self._port.fail(exc)
            return
        self._after_drain()

    def _on_sent(self, words: list[int]) -> None:
        for word in words:
            self._machine.completed(word)
        self._after_drain()

    def _on_flushed(self) -> None:
        self._end.arrived()

    def _on_failed(self) -> None:
        self._note(self._port.failure)

    def _on_cm_event(self, event: ConnectionEvent) -> bool:
        if event.type in (EventType.ESTABLISHED, EventType.TIMEWAIT_EXIT, EventType.ADDR_CHANGE):
            return True
        # Bytes that arrived before the disconnection count before it.
        self._port.completions.sweep()
        self._end.peer_left()
        if event.type == EventType.DISCONNECTED:
            self._note(vanished())
        else:
            self._note(cm_error(event.type.name, event.status, event.private_data))
        return True

    def _note(self, cause: BaseException | None) -> None:
        if self._end.cause is None:
            self._end.cause = cause
            self._port.note("breaks: %s", cause and reason_of(cause))
        self._gate()
        self._after_drain()

    # From C, at the end of a drain

    def _on_events(self, events: int) -> None:
        if events & STREAM_FAILED:
            self._port.check(self._port.state.error)
        if events & STREAM_GROW and self.is_reading():
            self._port.memory.widen_ring(self._port.state)
            self._port.note("pins %d bytes", self._port.pinned_bytes, log=_memory_log)
        self._context.run(self._process)

    def _on_attention(self) -> None:
        """Take what C has left, or note that a post has failed."""
        if error := self._port.state.error:
            self._port.check(error)
        # A protocol that does not ask for the rest is given it.
        self._soon()

    def _on_raised(self, exc: BaseException) -> None:
        self._fatal_error(exc, "Fatal error: protocol.data_received() call failed.")

    # From the timer

    def _was_alive(self) -> bool:
        return self._port.state.was_alive()

    def _on_interval(self, *, silent: bool) -> None:
        config = self._config
        if silent and config.keepalive_s is not None:
            if self._port.posted:
                self._port.note("hears nothing from the peer, which was asked")
            self._port.probe()
        # Not a quarter: a look may be late, and the next look in time.
        if config.idle_timeout_s is not None and now() - self._shown >= config.idle_timeout_s / 5:
            self._shown = now()
            self._port.check(self._machine.show_life())

    # The work

    def _after_drain(self) -> None:
        """Process when the polled completions have been dispatched."""
        if not self._scheduled:
            self._scheduled = True
            self._port.completions.after_drain(functools.partial(self._context.run, self._run))

    def _soon(self) -> None:
        """Process in the loop's next turn: no callback runs inside a call of the program."""
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._run, context=self._context)

    def _run(self) -> None:
        self._scheduled = False
        self._process()

    def _process(self) -> None:
        if self._over or self._end.leaving:
            self._linger()
            return
        if not self._reading:
            return
        if self._machine.opened and not self._port.attached:
            self._port.attach()
        try:
            self._out.control()
            if self._in.deliver():
                self._soon()
            if self._over:
                return
            self._send_waiting()
            self._out.control()
            self._settle()
        except BaseException:
            self._soon()  # the protocol has ended the loop, which may run again
            raise

    def _send_waiting(self) -> None:
        # The protocol may write when it is resumed: of a stream that is closing C takes nothing.
        while self._out.size and self._out.flush():
            self._gate()
            self._maybe_resume_protocol()
        if not self._out.size:
            self._say_the_rest()

    def _say_the_rest(self) -> None:
        """All bytes are on their way: now the end may be said."""
        if self._closing:
            self._end.say()
        elif self._out.ended:
            self._machine.shutdown()
        else:
            return
        self._out.control()

    def _linger(self) -> None:
        """Post what is left: the program is done, and the adapter still delivers bytes."""
        if self._out.size:
            self._out.flush()
            if not self._out.size:
                self._end.say()
        self._out.control()
        if self._machine.disconnected or self._end.cause is not None:
            self._end.arrived()

    def _settle(self) -> None:
        """End the stream if nothing more can be delivered."""
        machine = self._machine
        if self._over:
            return
        if machine.disconnected and self._out.size:
            # The peer reads no more, and there are bytes for it.
            if not self._ends_first:
                self._force_close(_not_taken())
        elif self._end.said:
            self._finish(None)
        elif self._end.cause is not None and not machine.disconnected and not self._unread():
            if isinstance(self._end.cause, OSError):
                self._force_close(lost(self._end.cause))
            else:
                self._fatal_error(self._end.cause, "Fatal error on an RDMA stream")

    @property
    def _ends_first(self) -> bool:
        """Whether the program is still being given bytes from before the peer's close."""
        return not (self._in.eof_given or self._in.paused or self._closing)

    def _unread(self) -> bool:
        """Whether the program has still to take bytes from before the connection broke."""
        if not self._port.state.readable or self._closing or self._out.size:
            return False
        if isinstance(self._end.cause, ProtocolError):
            return False
        if self._in.waiting and not self._in.enough():
            return False
        if not self._in.paused:
            self._soon()
        return True

    # Receiving

    def pause_reading(self) -> None:
        """Give the protocol no more bytes until `resume_reading`; the peer has to wait.

        Raises:
            RuntimeError: The stream's event loop runs in another thread; nothing was done.
        """
        check_thread(self._loop, "stream")
        if not self._closing:
            self._in.pause(True)

    def resume_reading(self) -> None:
        """Undo `pause_reading`.

        Raises:
            RuntimeError: The stream's event loop runs in another thread; nothing was done.
        """
        check_thread(self._loop, "stream")
        if self._in.paused and not self._closing:
            self._in.pause(False)
            self._soon()

    # Sending

    def write(self, data: Any) -> None:
        """Send bytes; never blocks.

        Args:
            data: Bytes-like, copied before the call returns if it can change.

        Bytes that cannot be sent at once wait, see `set_write_buffer_limits`.

        Raises:
            TypeError: `data` is not bytes-like.
            RuntimeError: After `write_eof()`; or the stream's event loop runs in another thread.
        """
        if self._over:
            self._write(data, 0)
        else:
            self._port.state.write(data)

    def _write(self, data: Any, sent: int) -> None:
        """Write the rest of `data`, of which C has sent `sent` bytes."""
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise _not_bytes(data)
        if isinstance(data, memoryview) and not data.c_contiguous:
            msg = "data argument must be contiguous"
            raise TypeError(msg)
        if self._out.ended:
            msg = "Cannot call write() after write_eof()"
            raise RuntimeError(msg)
        if not data:
            return
        # While close() still flushes, TLS may have `close_notify` to write when it is resumed.
        if self._over or self._end.said or (self._closing and not self._out.lasts):
            if self._out.late >= _WARN_AFTER:
                _log.warning("write() on a closed transport")
            self._out.late += 1
            return
        if self._machine.disconnected:
            # As over TCP: the protocol gets the end first, and a program that goes on writing gets
            # an error after it.
            if self._out.in_vain:
                self._fatal_error(_not_taken(), "Fatal write error on an RDMA stream")
            self._out.in_vain = not self._ends_first
            return
        if self._end.cause is not None:
            self._fatal_error(lost(self._end.cause), "Fatal write error on an RDMA stream")
            return
        if type(data) is not bytes:
            sent = self._port.state.send(data)
        if self._port.state.error:
            self._port.check(self._port.state.error)
        if self._out.keep(data, sent):
            if self._port.memory.widen_send(self._port.state):
                self._out.flush()
            self._gate()
            self._maybe_pause_protocol()

    def _gate(self) -> None:
        """Say whether `write` may leave everything to C."""
        self._port.state.hold(
            bool(
                self._out.size or self._closing or self._out.ended or self._over or self._end.cause
            )
        )

    def write_eof(self) -> None:
        """End this side's direction once the waiting bytes are sent; receiving goes on.

        Raises:
            RuntimeError: The stream's event loop runs in another thread; nothing was done.
        """
        check_thread(self._loop, "stream")
        if self._closing or self._out.ended:
            return
        self._out.ended = True
        self._gate()
        if not self._out.size and self._reading:
            self._say_the_rest()
            self._soon()

    # End

    def close(self) -> None:
        """Read no more, send the waiting bytes, then end; idempotent.

        `connection_lost` follows when the adapter has everything; or, with an error, when nothing
        has moved for `close_timeout_s`.  The adapter has as long again to deliver it.

        If the stream's event loop runs in another thread, that thread closes the stream soon after
        this call: finalizers, such as asyncio's, call this in whatever thread collects them.
        """
        from_finalizer(self._loop, self._close)

    def _close(self) -> None:
        if self._closing:
            return
        self._closing = True
        self._in.stop()
        self._out.lasts = bool(self._out.size)
        self._gate()
        if self._reading:
            self._send_waiting()
            self._settle()
        if not self._over:
            self._keepalive.expect_progress(
                lambda: self._port.state.progress, self._config.close_timeout_s, self._give_up
            )
            self._soon()

    def abort(self) -> None:
        """End at once; `connection_lost(None)` follows.

        Bytes that the adapter has still arrive, within `linger_s`.  Waiting bytes do, too, if
        `drain()` would not wait for them and they are at most `send_buffer_size`; otherwise all
        that wait are lost.  Then the peer sees the end of the stream or, if something was lost,
        that the connection is broken.

        Raises:
            RuntimeError: The stream's event loop runs in another thread; nothing was done.
        """
        check_thread(self._loop, "stream")
        self._force_close(None)

    async def wait_closed(self) -> None:
        """Wait until the adapter has released all that the connection used; bounded after the end.

        asyncio's transports have no such method: their descriptors are closed at once.

        Cancellation: ends the wait.
        """
        await self._end.wait()

    def _fatal_error(
        self, exc: BaseException, message: str = "Fatal error on an RDMA stream"
    ) -> None:
        if isinstance(exc, OSError):
            if self._loop.get_debug():
                _log.debug("%r: %s", self, message, exc_info=exc)
        else:
            self._loop.call_exception_handler({
                "message": message,
                "exception": exc,
                "transport": self,
                "protocol": self._protocol,
            })  # fmt: skip
        self._force_close(exc)

    # asyncio's TLS calls it, too.
    def _force_close(self, exc: BaseException | None) -> None:
        if self._over:
            self._finish(exc)
            return
        self._closing = True
        self._in.stop()
        self._take_leave()
        self._finish(exc)

    def _give_up(self, exc: BaseException | None) -> None:
        """End at once: the peer makes no progress, so there is nothing to wait for or to send."""
        self._end.hurry(0)
        self._force_close(exc)

    def _take_leave(self) -> None:
        """Announce the end behind all bytes; or drop those that wait, if `drain()` holds them back.

        If they are few, the kernel would have them in a TCP connection: so they are sent while the
        peer makes room, as long as posted bytes have to arrive.
        """
        lingers = self._end.hurry()
        waiting = self._out.size
        whole = not self._protocol_paused and waiting <= self._config.send_buffer_size
        if not lingers or not whole:
            self._out.clear()
        if not lingers:
            self._end.arrived()
        elif not whole:
            self._port.flush()
        elif not self._out.size:
            self._end.say()
            self._out.control()

    def _finish(self, exc: BaseException | None) -> None:
        # A server waits for the report, and a KeyboardInterrupt comes between any two steps.
        if self._over and self._server is None:
            return
        if not self._over:
            self._broke_by = exc
            if exc is not None:
                count("streams_lost")
            self._port.note("ends: %s", "in good order" if exc is None else reason_of(exc))
        self._over = True
        self._gate()
        self._keepalive.stop()
        self._loop.call_soon(self._report_end, exc, context=self._context)

    def _report_end(self, exc: BaseException | None) -> None:
        try:
            if self._protocol is not None:
                self._protocol.connection_lost(exc)
        finally:
            # As asyncio's: a kept transport keeps no protocol, nor the TLS behind it.
            self._protocol = None
            self._in.set_protocol(None)
            self._in.wake()
            self._end.begin()
            if self._server is not None:
                self._server._detach(self)
                self._server = None

    def _discard(self, *, reset: bool = False) -> None:
        """Give everything back: the stream never began, or came too late.

        With `reset` the connection breaks, as over TCP: an end of the stream would tell the peer
        that what it may have sent was read.
        """
        if not self._over:
            self._over = self._closing = True
            self._in.stop()
            self._keepalive.stop()
            connected = self._machine.met and self._port.cm_id.stage is Stage.CONNECTED
            if connected and not reset:
                self._machine.open()
                self._take_leave()
            else:
                self._end.arrived()
            self._end.begin()

    async def _deliver(self) -> None:
        """Wait for the posted requests; the end is one of them if no bytes wait for room."""
        if self._port.closed:
            return
        if not self._over:
            self._end.leaving = True
            self._take_leave()
        self._end.hurry()
        self._end.begin()
        await self._end.wait()

    def _part(self) -> None:
        """Drop the parts: everything was given back, and no callback follows."""
        vars(self).pop("write", None)
        self._in.part()
        self._port.state.refuse_writes(functools.partial(_written_late, weakref.ref(self)))

    # Others

    def writelines(self, list_of_data: Any) -> None:
        """Send all of `list_of_data`, an iterable of bytes-like objects, joined."""
        self.write(b"".join(list_of_data))

    def can_write_eof(self) -> bool:
        """True."""
        return True

    def get_write_buffer_size(self) -> int:
        """Bytes that wait; those that the adapter has do not count."""
        return 0 if self._over else self._out.size

    def is_closing(self) -> bool:
        """Whether the transport is closing or closed."""
        return self._closing

    def is_reading(self) -> bool:
        """Whether the protocol is given bytes as they come."""
        return not self._closing and not self._in.paused

    def get_protocol(self) -> Any:
        """The protocol that is called."""
        return self._protocol

    @property
    def iomap(self) -> StreamIomap:
        """Memory that each end names for the other to write to, outside of the stream."""
        return StreamIomap(self._port, self._machine, self._out.control)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """A fact about the stream, by `name`; `default` for a name that is unknown."""
        if name == "gid_index" and "gid_index" not in self._extra:
            with contextlib.suppress(OSError, ResourceClosedError, ForkedError):
                self._extra[name] = self._port.gid_index()
        fact = super().get_extra_info(name, default)
        return fact if fact is default else shown(name, fact)

    @property
    def _stage(self) -> str:
        if self._over or self._closing:
            return "closed" if self._over else "closing"
        return "open" if "opened_at" in self._extra else "connecting"

    def _seen(self) -> dict[str, Any]:
        """The stream as `aiordma.metrics` shows it; in any thread, without a C call."""
        port, cause = self._port, self._broke_by
        return {
            **self._extra,
            "number": port.number,
            "state": self._stage,
            "device": port.context.name,
            "qpn": port.qp.num,
            "cause": None if cause is None else reason_of(cause),
            "bytes_sent": port.state.bytes_sent,
            "bytes_received": port.state.bytes_received,
            "waiting_to_be_received": port.state.readable,
            "waiting_to_be_sent": self._out.size,
            "under_way": max(0, port.under_way),
            "pinned_bytes": 0 if port.closed else port.pinned_bytes,
        }

    def __repr__(self) -> str:
        peer, cause = self._extra.get("peername"), self._broke_by
        why = "" if cause is None else f" cause={type(cause).__name__}: {reason_of(cause)}"
        return (
            f"<RdmaTransport #{self._port.number} {self._stage} peer={peer} "
            f"device={self._port.context.name}{why}>"
        )

    def poison_after_fork(self) -> None:
        """In a forked child: make a bound `write` that was kept refuse, as the others do."""
        self._port.state.refuse_writes(_written_in_a_child)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Call another protocol from now on; `pause_writing` at once if too many bytes wait.

        Raises:
            RuntimeError: The stream's event loop runs in another thread; nothing was done.
        """
        check_thread(self._loop, "stream")
        self._protocol = protocol
        if self._protocol_paused:  # asyncio's TLS fails if it is resumed and was not paused
            self._protocol_paused = False
            self._maybe_pause_protocol()
        self._in.set_protocol(protocol)
        if self._port.state.readable:
            self._soon()

    def __del__(
        self, _warn: Callable[..., None] = warnings.warn, _gone: Any = sys.is_finalizing
    ) -> None:
        if getattr(self, "_over", True) or _gone():
            return
        try:
            _warn(f"unclosed transport {self!r}", ResourceWarning, source=self, stacklevel=1)
        finally:
            from_finalizer(self._loop, self._port.close)
