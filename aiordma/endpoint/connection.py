"""Connection: messages to and from one peer.

Theory of operation
    A connection is put together from parts that each do one thing: `Link` (the adapter),
    `Sender` and `Receiver` (slots and credits), `Exposer` and `Fetcher` (large messages),
    `Liveness` (silence).  What is here is the wiring between them, and the end.

    The end has one cause and one path.  `_over` notes the cause once and makes every part raise
    it; `Shutdown` does the rest.  `close()`, `abort()`, the peer's disconnection and a failed
    request all lead there.
"""

from __future__ import annotations

import asyncio
import errno
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from aiordma.cm.connection_event import ConnectionEvent
from aiordma.cm.enums import EventType
from aiordma.endpoint.config import ConnectionConfig
from aiordma.endpoint.link import Link
from aiordma.endpoint.liveness import Liveness
from aiordma.endpoint.message import Message
from aiordma.endpoint.receiver import Receiver
from aiordma.endpoint.rendezvous import Exposer, Fetcher
from aiordma.endpoint.sender import Sender
from aiordma.endpoint.shutdown import Shutdown
from aiordma.endpoint.wire import FRAME_SIZE, FrameKind, Hello
from aiordma.errors import (
    ConnectionEndedError,
    ConnectionLostError,
    MessageTooLargeError,
    ProtocolError,
    ResourceClosedError,
    cm_error,
)

__all__ = ["Connection", "ConnectionStats"]

_UNLIMITED = 1 << 60


def _closed_error() -> ResourceClosedError:
    return ResourceClosedError(errno.ECONNABORTED, "the connection is closed")


@dataclass(slots=True)
class ConnectionStats:
    """Counters of a connection."""

    messages_sent: int = 0
    messages_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0


class Connection:
    """A connection to one peer; made by `connect`, `Listener.accept` or `ConnectRequest.accept`.

    Belongs to the event loop that made it.  `async with` closes it; after an exception in the
    block it is aborted instead, so that the peer does not take half a conversation for a whole.

    Attributes:
        config: Its settings.
        private_data: What the peer's program sent with the handshake.
        stats: Counters.
    """

    def __init__(self, link: Link, config: ConnectionConfig) -> None:
        self.config = config
        self.private_data = b""
        self.stats = ConnectionStats()
        self._link = link
        self._receiver = Receiver(
            link, config, self._on_control, self._on_credit, self._send_credit, self._on_taken
        )
        self._sender = Sender(link, config, self._receiver.take_owed, self._receiver.credit_is_due)
        self._exposer = Exposer(link, self._sender, config.rendezvous_window)
        self._fetcher: Fetcher | None = None
        self._liveness: Liveness | None = None
        self._peer_max = config.slot_size if config.raw else 0
        self._established: asyncio.Future[None] | None = None
        self._closing = False
        self._cause: BaseException | None = None
        self._shutdown = Shutdown(
            link,
            config,
            self._sender,
            self._exposer,
            alive=lambda: self._cause is None,
            over=lambda: self._over(_closed_error()),
            stop=self._stop_parts,
        )
        self._names: dict[str, Any] = {}
        link.cm_id._sink = self._on_cm_event
        link.start(
            self._receiver.on_frame, self._sender.on_sent, self._on_read, self._on_link_failed
        )

    # Handshake: called by connect and accept

    def _meet(self, hello: Hello | None, reads: int) -> None:
        """The peer's numbers are known; from now on messages may be sent."""
        link, config = self._link, self.config
        self._names = link.describe()
        self._names["peername"] = link.cm_id.destination
        self._names["sockname"] = link.cm_id.source
        if hello is None:
            self._sender.credits = _UNLIMITED
            return
        self.private_data = hello.user_data
        self._peer_max = hello.max_message_kib * 1024
        self._sender.eager_size = min(config.slot_size, hello.slot_size) - FRAME_SIZE
        window = min(config.rendezvous_window, hello.rendezvous_window)
        self._exposer.resize(window)
        depth = max(1, min(config.initiator_depth, reads))
        self._fetcher = Fetcher(link, self._sender, self._receiver, config, depth)
        self._sender.grant(hello.recv_depth)

    def _greet(self) -> None:
        """The connecting side sends first, as iWARP demands; the other waits for it."""
        self._sender.control(FrameKind.CREDIT)
        self._watch()

    def _watch(self) -> None:
        """From now on silence is noticed; not before the first message may be sent."""
        if self._liveness is None and self._cause is None:
            self._liveness = Liveness(
                self._link,
                self._receiver,
                self.config,
                lambda: self._sender.control(FrameKind.PING),
            )

    def _await_greeting(self) -> asyncio.Future[None]:
        """Before accepting: a future for the client's first message."""
        self._established = self._link.loop.create_future()
        self._established.add_done_callback(self._greeted)
        return self._established

    def _greeted(self, future: asyncio.Future[None]) -> None:
        self._established = None
        if not future.cancelled():
            future.exception()  # seen here in case that nobody waits any more

    # Messages

    async def send(self, buf: Any, *, imm: int | None = None) -> None:
        """Send one message.

        Args:
            buf: Any contiguous object with the buffer protocol; may be empty.
            imm: A 32-bit number that arrives as `Message.imm`.

        Returns when the bytes of `buf` may be changed again: a message up to
        `config.slot_size` is copied, a larger one has then been read by the peer.  `flush()`
        waits until all messages have reached the peer's adapter.

        Raises:
            TypeError: No buffer; ValueError: `imm` does not fit.
            MessageTooLargeError: More than the peer takes; nothing was sent.
            ResourceClosedError: The connection was closed by this side.
            ConnectionLostError: It broke; `__cause__` tells how.
            TimeoutError: The peer lives but took nothing for `config.stall_timeout_s`.

        Cancellation: the message was not sent, or, if it was large, may still be received; the
        buffer stays exported until the adapter is done with it.
        """
        self._check_loop()
        payload = memoryview(buf)
        if not payload.c_contiguous:
            msg = "a message has to be contiguous"
            raise ValueError(msg)
        if not payload.nbytes:
            payload = memoryview(b"")  # of whatever format; an empty one cannot be cast
        elif payload.ndim != 1 or payload.format != "B":
            payload = payload.cast("B")
        if imm is not None and not 0 <= imm <= 0xFFFFFFFF:
            msg = f"imm {imm} does not fit into 32 bits"
            raise ValueError(msg)
        size = payload.nbytes
        if size <= self._sender.eager_size:
            try:
                await self._sender.data(payload, imm)
            except TimeoutError as exc:
                raise self._stalled() from exc
        else:
            if self._cause is None and not self._closing and size > self._peer_max:
                msg = f"the peer takes messages up to {self._peer_max} bytes, this has {size}"
                raise MessageTooLargeError(msg)
            if self._cause is not None or self._closing:
                raise self._failure()
            try:
                async with asyncio.timeout(self.config.stall_timeout_s):
                    await self._exposer.send(payload, imm)
            except TimeoutError as exc:
                raise self._stalled() from exc
        self.stats.messages_sent += 1
        self.stats.bytes_sent += size

    def _stalled(self) -> TimeoutError:
        seconds = self.config.stall_timeout_s
        return TimeoutError(errno.ETIMEDOUT, f"the peer took nothing for {seconds} s")

    async def recv(self) -> Message:
        """The next message, in the order in which the peer sent them.

        Raises:
            ConnectionEndedError: The peer closed in good order; all its messages were received.
            ResourceClosedError: The connection was closed by this side.
            ConnectionLostError: It broke; `__cause__` tells how.  Messages that had arrived are
                returned first.

        Cancellation: no message is lost.
        """
        self._check_loop()
        message = await self._receiver.recv()
        self.stats.messages_received += 1
        self.stats.bytes_received += len(message)
        return message

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        """Messages until the peer, or this side, closes; a broken connection raises."""
        try:
            return await self.recv()
        except (ConnectionEndedError, ResourceClosedError):
            raise StopAsyncIteration from None

    async def flush(self) -> None:
        """Wait until every message sent so far has reached the peer's adapter.

        Raises:
            ConnectionLostError: It broke first.

        Cancellation: ends the wait.
        """
        self._check_loop()
        await self._sender.flush()

    def _check_loop(self) -> None:
        if asyncio.get_running_loop() is not self._link.loop:
            msg = "the connection belongs to another event loop"
            raise RuntimeError(msg)

    # From the parts

    def _on_control(
        self, kind: int, flags: int, argument: int, body: memoryview, imm: int | None
    ) -> None:
        if kind == FrameKind.RENDEZVOUS and self._fetcher is not None:
            self._fetcher.announce(argument, body, imm)
        elif kind == FrameKind.DONE:
            self._exposer.on_done(argument, flags)
        elif kind == FrameKind.PING:
            self._sender.pong()
        elif kind == FrameKind.PONG and self._liveness is not None:
            self._liveness.ponged()
        elif kind == FrameKind.END:
            self._receiver.end(self._ended)
        elif kind != FrameKind.CREDIT:
            self._link.fail(
                ProtocolError(errno.EPROTO, f"the peer broke the protocol: message kind {kind}")
            )
        if self._established is not None:
            self._link.cm_id.notify_established()
            self._watch()
            if not self._established.done():
                self._established.set_result(None)

    def _on_credit(self, credits: int) -> None:
        self._sender.grant(credits)

    def _send_credit(self) -> None:
        self._sender.credit()

    def _on_taken(self, size: int) -> None:
        if self._fetcher is not None:
            self._fetcher.taken(size)

    def _on_read(self, number: int) -> None:
        if self._fetcher is not None:
            self._fetcher.on_read(number)

    def _on_cm_event(self, event: ConnectionEvent) -> bool:
        if event.type == EventType.ESTABLISHED:
            return True
        if event.type in (EventType.TIMEWAIT_EXIT, EventType.ADDR_CHANGE):
            return True
        # What arrived before the disconnection is delivered before it.
        self._link.sweep()
        self._shutdown.peer_left()
        if not self._closing:
            self._over(cm_error(event.type.name, event.status, event.private_data))
        # Taken: what nobody takes is kept in the channel, which all connections share.  A step of
        # the handshake that waits for the event gets it all the same.
        return True

    def _on_link_failed(self) -> None:
        assert self._link.failure is not None
        self._over(self._link.failure)

    # End

    def _ended(self) -> BaseException:
        return ConnectionEndedError("the peer closed the connection")

    def _failure(self) -> BaseException:
        """The exception for the next call; a new one each time, with the first cause."""
        cause = self._cause
        if cause is None or isinstance(cause, ResourceClosedError):
            return _closed_error()
        if isinstance(cause, ConnectionLostError):
            return type(cause)(*cause.args)
        error = ConnectionLostError(errno.ECONNRESET, f"the connection is lost: {cause}")
        error.__cause__ = cause
        return error

    def _over(self, cause: BaseException) -> None:
        """No more messages in either direction; the first cause counts."""
        if self._cause is not None:
            return
        self._cause = cause
        if self._established is not None and not self._established.done():
            self._established.set_exception(self._failure())
        self._sender.fail(self._failure)
        self._exposer.fail(self._failure)
        self._receiver.fail(self._failure)
        self._shutdown.begin()

    async def _stop_parts(self) -> None:
        if self._liveness is not None:
            self._liveness.stop()
        if self._fetcher is not None:
            self._fetcher.stop()
            await self._fetcher.stopped()

    async def close(self) -> None:
        """Close in good order: what was sent arrives, the peer sees the end, all is given back.

        Returns within `config.close_timeout_s` plus a few seconds, whatever the peer does.
        Idempotent; a second call waits for the first.

        Cancellation: becomes `abort()`; what had to be given back still is.
        """
        self._check_loop()
        if not self._closing and self._cause is None:
            self._closing = True
            self._sender.refuse(self._failure)
            self._exposer.window.fail(self._failure)
            self._receiver.fail(self._failure)
            self._receiver.drop_all()
        self._shutdown.begin()
        try:
            await self.wait_closed()
        except asyncio.CancelledError:
            self.abort()
            raise

    def abort(self) -> None:
        """End the connection at once; the peer sees it as lost.  `wait_closed()` waits for it."""
        self._closing = True
        if not self._shutdown.hurry() and self._cause is None:
            self._over(_closed_error())
            self._receiver.drop_all()

    async def wait_closed(self) -> None:
        """Wait until the connection is over and the adapter holds nothing of it.

        Cancellation: ends the wait.
        """
        await self._shutdown.wait()

    @property
    def is_closing(self) -> bool:
        """Whether the connection is closed, closing or lost."""
        return self._closing or self._cause is not None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        if kind is not None:
            self.abort()
        await self.close()

    # What it is

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """What the connection runs on.

        Names: `device`, `port`, `gid` (16 bytes), `link_layer`, `transport`, `mtu` (bytes),
        `qpn`, `peername`, `sockname`, `backend` (always "rdma": there is no fallback).
        """
        return self._names.get(name, default)

    def __repr__(self) -> str:
        state = "open"
        if self.is_closing:
            state = "closed" if self._shutdown.done else "closing"
        peer = self._names.get("peername")
        return f"<Connection {state} peer={peer} device={self._names.get('device')}>"

    def __del__(
        self, _warn: Callable[..., None] = warnings.warn, _gone: Any = sys.is_finalizing
    ) -> None:
        link = getattr(self, "_link", None)
        if link is not None and not link.closed and not _gone():
            _warn(f"unclosed {self!r}", ResourceWarning, source=self, stacklevel=1)
            link.close()
