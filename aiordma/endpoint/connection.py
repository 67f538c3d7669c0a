"""Connection: messages to and from one peer, and its memory; `core` wires the parts."""

from __future__ import annotations

import asyncio
import errno
import sys
import warnings
from collections.abc import Callable
from typing import Any, Self

from aiordma.endpoint.core import ConnectionCore, ConnectionStats, closed_error
from aiordma.endpoint.message import Message
from aiordma.errors import ConnectionEndedError, MessageTooLargeError, ResourceClosedError

__all__ = ["Connection", "ConnectionStats"]


class Connection(ConnectionCore):
    """A connection to one peer; made by `connect`, `Listener.accept` or `ConnectRequest.accept`.

    Belongs to the event loop that made it.  `async with` closes it; after an exception in the
    block it is aborted instead, so that the peer does not take half a conversation for a whole.

    Attributes:
        config: Its settings.
        private_data: What the peer's program sent with the handshake.
        stats: Counters.
    """

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
            self._over(closed_error())
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
