"""Connection: messages to and from one peer, and its memory; `core` wires the parts."""

from __future__ import annotations

import asyncio
import errno
import sys
import warnings
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Self

from aiordma.arguments import check_seconds, fitting, no_buffer
from aiordma.endpoint.core import ConnectionCore, ConnectionStats
from aiordma.endpoint.events import ConnectionEvents
from aiordma.endpoint.lease import Lease
from aiordma.endpoint.message import Message
from aiordma.endpoint.one_sided import register
from aiordma.endpoint.outcome import closed_error
from aiordma.errors import (
    ConnectionEndedError,
    FlushedError,
    MessageTooLargeError,
    NotSupportedError,
    ResourceClosedError,
    plain_error,
)
from aiordma.loop.limit import Limit
from aiordma.loop.running import check_thread, from_finalizer
from aiordma.memory.remote import RemoteRegion
from aiordma.verbs.enums import Access, Opcode
from aiordma.verbs.mr import MemoryRegion, check_memory

__all__ = ["Connection", "ConnectionStats"]

_COUNTERS = tuple(field.name for field in fields(ConnectionStats))


class Connection(ConnectionCore):
    """A connection to one peer; made by `connect`, `Listener.accept` or `ConnectRequest.accept`.

    Belongs to the event loop that made it.  `async with` closes it; after an exception in the
    block it is aborted instead, so that the peer does not take half a conversation for a whole.
    A forgotten connection lives on, without a `ResourceWarning`, until its loop ends or it breaks.

    Attributes:
        config: Its settings.
        private_data: Bytes that the peer's program sent with the handshake.
    """

    # Messages

    async def send(self, buf: Any, *, imm: int | None = None) -> None:
        """Send one message.

        Args:
            buf: Any contiguous object with the buffer protocol; may be empty.
            imm: A 32-bit number that arrives as `Message.imm`.

        Returns when the bytes of `buf` may be changed again: a message up to
        `config.slot_size` is copied, the peer has then read a larger message.  `flush()`
        waits until all messages have reached the peer's adapter.

        Raises:
            TypeError: No buffer.
            ValueError: `imm` does not fit.
            MessageTooLargeError: More than the peer takes; nothing was sent.
            ResourceClosedError: The connection was closed by this side.
            ConnectionLostError: It broke, or the peer closed it; `__cause__` tells how it broke.
            TimeoutError: The peer lives but took nothing for `config.stall_timeout_s`.

        Cancellation: the message was not sent, or, if it was large, may still be received; one of
        more than 256 KiB, which is not copied, stays exported until the adapter is done with it.
        A `Message` can be released before: its memory goes back when the adapter is done.
        """
        # C refuses in another loop or thread, and then the check says so.
        if imm is None:
            code = self._state.send(buf)
            if not code:
                return
            if code > 0:
                self._link.check(code)
                return
        else:
            imm = fitting("imm", imm, 32)
        self._check_loop()
        try:
            payload = memoryview(buf)
        except TypeError:
            raise no_buffer("a message", buf) from None
        try:
            if not payload.c_contiguous:
                msg = "a message has to be contiguous"
                raise ValueError(msg)
            if not payload.nbytes:
                payload = memoryview(b"")  # of whatever format; an empty view cannot be cast
            elif payload.ndim != 1 or payload.format != "B":
                payload = payload.cast("B")
            size = payload.nbytes
            if size <= self._state.eager_size:
                code = self._state.send_buffer(payload, imm)
                if code >= 0:
                    if code:
                        self._link.check(code)
                    return
                try:
                    await self._sender.data(payload, imm)
                except TimeoutError as exc:
                    raise self._stalled() from exc
                return
            self._outcome.require_open()
            if size > self._peer_max:
                raise self._too_large(size)
            try:
                with Limit(self.config.stall_timeout_s), self._outcome.explaining():
                    await self._exposer.send(payload, imm)
            except TimeoutError as exc:
                raise self._stalled() from exc
        except BaseException:
            # The exception keeps this frame, and is not to keep the caller's buffer exported.
            payload.release()
            raise
        self._state.messages_sent += 1
        self._state.bytes_sent += size

    def _too_large(self, size: int) -> MessageTooLargeError:
        if self.config.raw:
            text, hint = "a raw connection", "send it in pieces, or raise slot_size on both sides"
        else:
            text, hint = "the peer", MessageTooLargeError.hint
        text = f"{text} takes messages up to {self._peer_max} bytes, this has {size} ({hint})"
        error = MessageTooLargeError(text)
        error.hint = hint
        return error

    def _stalled(self) -> OSError:
        seconds = self.config.stall_timeout_s
        return plain_error(errno.ETIMEDOUT, f"the peer took nothing for {seconds} s")

    async def recv(self) -> Message:
        """The next message, in the order in which the peer sent them.

        Several tasks may wait; they are served in the order in which they began to.

        Raises:
            ConnectionEndedError: The peer closed in good order; all its messages were received.
            ResourceClosedError: The connection was closed by this side.
            ConnectionLostError: It broke; `__cause__` tells how.  Messages that had arrived are
                returned first.

        Cancellation: no message is lost.
        """
        try:
            message: Message | None = await self._state
        except BaseException:
            self._receiver.left()
            raise
        if message is None:
            self._check_loop()
            message = await self._receiver.recv()
        return message

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        """Messages until the peer, or this side, closes; a broken connection raises."""
        try:
            return await self.recv()
        except (ConnectionEndedError, ResourceClosedError):
            raise StopAsyncIteration from None

    # Memory of the peer, and of this side

    async def read(self, remote: RemoteRegion, into: Any, *, offset: int = 0) -> int:
        """RDMA READ: fill `into` with memory that the peer has exposed; its program does nothing.

        Args:
            remote: The memory, as the peer named it.
            into: A writable buffer, filled completely; or a region, or an `SGE`, of memory that
                was registered with `register`, into which the adapter then writes directly.
            offset: First byte to read, from the start of `remote`.

        Returns:
            Bytes read.  They are not checked as large messages are; over a wire that reorders,
            Soft-RoCE may return before the last of them are there (docs/surprises.md).

        Raises:
            ValueError: Not inside `remote`.
            PermissionError: `remote` is not for reading.
            BufferError: `into` is read-only.
            RemoteAccessError: The peer's adapter refused: the lease has ended, or the key is wrong.
                This ends the connection.
            ConnectionLostError, ResourceClosedError: The connection was over before.

        Cancellation: ends the wait; the buffer stays exported, and may be written to, until the
        adapter is done with it.
        """
        # C does the plain case; see `send` for threads and loops.
        operation = self._state.read(remote, into, offset)
        if operation is None:
            self._check_loop()
            return await self._one_sided.read(remote, into, offset)
        try:
            return await operation
        except FlushedError as exc:
            raise self._one_sided.lost() from exc

    async def write(
        self, remote: RemoteRegion, data: Any, *, offset: int = 0, imm: int | None = None
    ) -> int:
        """RDMA WRITE: put `data` into memory that the peer has exposed.

        Args:
            remote: The memory, as the peer named it.
            data: A buffer; or a region, or an `SGE`, of memory registered with `register`.
            offset: Where to put the first byte, from the start of `remote`.
            imm: A 32-bit number.  The peer's program receives an empty message with it, after the
                data have arrived; without it, it learns nothing.

        Returns:
            Bytes written.  They have reached the peer's adapter; software iWARP says so before the
            peer has checked the access.

        Raises and cancellation: as `read`; with `imm` also as `send`.  A canceled write may have
        written.
        """
        if imm is None:
            operation = self._state.write(remote, data, offset)
            if operation is not None:
                try:
                    return await operation
                except FlushedError as exc:
                    raise self._one_sided.lost() from exc
        else:
            imm = fitting("imm", imm, 32)
        self._check_loop()
        if imm is None or self.config.raw:
            return await self._one_sided.write(remote, data, offset, imm)
        size = await self._one_sided.write(remote, data, offset)
        await self.send(b"", imm=imm)
        return size

    async def fetch_add(self, remote: RemoteRegion, value: int, *, offset: int = 0) -> int:
        """Add to an unsigned 64-bit integer in memory of the peer, atomically.

        Args:
            remote: The memory, exposed with `atomic=True`.
            value: The number to add, modulo 2**64.
            offset: Where the integer is; its address has to be a multiple of 8.

        Returns:
            The integer before the addition, in the peer's byte order, which is taken to be little.

        Raises:
            ValueError: Not aligned, not inside `remote`, or `value` is not in 0..2**64-1.
            NotSupportedError: iWARP has no atomics.
            Others: as `read`.

        Cancellation: ends the wait; the addition may take place.
        """
        return await self._atomic(Opcode.ATOMIC_FETCH_AND_ADD, remote, offset, value, 0)

    async def compare_swap(
        self, remote: RemoteRegion, expected: int, desired: int, *, offset: int = 0
    ) -> int:
        """Store `desired` in an integer of the peer if it is `expected`, atomically.

        Returns:
            The integer before; the swap took place if it equals `expected`.

        `remote`, `offset`, exceptions and cancellation: as `fetch_add`.  Raises nothing else.
        """
        return await self._atomic(Opcode.ATOMIC_CMP_AND_SWP, remote, offset, expected, desired)

    async def _atomic(
        self, opcode: Opcode, remote: RemoteRegion, offset: int, compare_add: int, swap: int
    ) -> int:
        self._check_loop()
        return await self._one_sided.atomic(opcode, remote, offset, compare_add, swap)

    async def register(self, buf: Any, access: Access = Access.LOCAL_WRITE) -> MemoryRegion:
        """Register memory for this connection's own transfers, so that nothing is copied.

        Args:
            buf: A buffer, which stays exported until the region is destroyed; or a number of
                bytes, for page-aligned memory of the region's own.
            access: Rights of this side; `expose` gives rights to the peer.

        Returns:
            The region.  It may be closed any time, and is closed with the connection.  On iWARP the
            peer learns its key with the first read into it, and can write there until then.

        Raises:
            OSError: ENOMEM mostly means that RLIMIT_MEMLOCK is too low.
            ResourceClosedError, ConnectionLostError: The connection is over.

        Cancellation: the region is destroyed.
        """
        self._check_loop()
        access = Access(fitting("access", access, 31))
        check_memory(buf, access)
        self._outcome.require_open()
        if self._link.context.is_iwarp and access & Access.LOCAL_WRITE:
            access |= Access.REMOTE_WRITE  # a read's data comes in as a write there
        region = await register(self._link, self._outcome, buf, access)
        self._memory.difference_update([known for known in self._memory if known.closed])
        self._memory.add(region)
        return region

    def expose(
        self,
        buf: Any,
        *,
        read: bool = False,
        write: bool = False,
        atomic: bool = False,
        timeout_s: float | None = None,
    ) -> Lease:
        """Open memory to the peer for as long as an `async with` block lasts.

        The block gets the `RemoteRegion` that names the memory; send its `to_bytes()` to the peer.
        When the block has ended no access is possible any more: the peer's next access is refused,
        which ends the connection.  So have the peer say when it is done.

        Args:
            buf: A buffer, or a number of bytes for fresh memory; writable unless only for reading.
            read: The peer may read.
            write: The peer may write.
            atomic: The peer may use atomics; NotSupportedError on iWARP.
            timeout_s: Seconds after which the lease ends even if the block has not; None: never.

        Raises:
            TypeError, ValueError: No buffer, no right at all, or a time-out that is not positive.
            BufferError: The buffer is read-only, and not only for reading.
            OSError: The memory cannot be registered (when the block is entered).
            ResourceClosedError, ConnectionLostError: The connection is over.

        Cancellation: of the entry, nothing is exposed; of the exit, the lease ends all the same.
        """
        self._check_loop()
        self._outcome.require_open()
        rights = Access(0)
        for wanted, right in (
            (read, Access.REMOTE_READ),
            (write, Access.REMOTE_WRITE),
            (atomic, Access.REMOTE_ATOMIC),
        ):
            if wanted:
                rights |= right
        if not rights:
            msg = "say what the peer may do: read, write or atomic"
            raise ValueError(msg)
        check_seconds("timeout_s", timeout_s)
        check_memory(buf, rights)
        if atomic and self._link.context.is_iwarp:
            text = f"{self._link.context.name} is iWARP, which has no atomic operations"
            raise NotSupportedError(errno.EOPNOTSUPP, text)
        return Lease(self._link, self._outcome, self._memory, buf, rights, timeout_s)

    async def flush(self) -> None:
        """Wait until every message sent so far has reached the peer's adapter.

        Raises:
            ConnectionLostError: It broke first, or the peer closed it.

        Cancellation: ends the wait.
        """
        self._check_loop()
        await self._sender.flush()

    async def close(self) -> None:
        """Close in good order: sent messages arrive, the peer sees the end, all is given back.

        Returns within `config.close_timeout_s` plus a few seconds, whatever the peer does.
        Idempotent; a second call waits for the first.  Raises only RuntimeError, in a foreign loop.

        Cancellation: becomes `abort()`; all resources are still given back.
        """
        self._check_loop()
        outcome = self._outcome
        if not outcome.decided:
            outcome.closing = self._state.over = True
            self._sender.refuse(outcome.failure)
            self._exposer.window.fail(outcome.failure)
            self._receiver.drop_all()
            self._receiver.fail(outcome.failure)
        self._begin_end()
        try:
            await self.wait_closed()
        except asyncio.CancelledError:
            self.abort()
            raise

    def abort(self) -> None:
        """End the connection at once; the peer sees it as lost.  `wait_closed()` waits for it.

        Messages that the adapter has been given still arrive, for `config.close_timeout_s` at most;
        a large message that the peer has not read does not.

        Raises:
            RuntimeError: The connection's event loop runs in another thread; nothing was done.
        """
        check_thread(self._link.loop, "connection")
        self._outcome.closing = self._state.over = True
        if not self._goodbye.abort() and self._outcome.cause is None:
            self._say_aborted()
            self._over(closed_error())
            self._receiver.drop_all()

    async def wait_closed(self) -> None:
        """Wait until the connection is over and the adapter holds nothing of it.

        Cancellation: ends the wait.
        """
        await self._ending.wait()

    @property
    def is_closing(self) -> bool:
        """Whether the connection is closed, closing or lost."""
        return self._outcome.decided

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        if kind is not None:
            self.abort()
        await self.close()

    # Facts

    def events(self) -> ConnectionEvents:
        """The events around the connection from now on, until it is closed.

        An async iterator over events of the connection manager (`cm.ConnectionEvent`) and of the
        device (`verbs.AsyncEvent`): a port that goes down or up, a changed address, the removal of
        the device (`rdma_get_cm_event(3)`, `ibv_get_async_event(3)`).  They are for the program to
        know; the end of the connection is handled without it.

        Raises:
            RuntimeError: Not in the connection's event loop.
        """
        self._check_loop()
        return self._events.open(self._link)

    @property
    def stats(self) -> ConnectionStats:
        """Counters of the connection, as they are now."""
        state = self._state
        return ConnectionStats(**{name: getattr(state, name) for name in _COUNTERS})

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """A fact about the connection, by `name`; `default` for a name that is unknown.

        Names: `device`, `port`, `gid` (16 bytes), `link_layer`, `transport`, `mtu` (bytes),
        `qpn`, `provider` (the kernel's driver), `peername`, `sockname`, `backend` (always "rdma":
        there is no fallback), `large_messages_checked` (whether those that this side receives
        are compared with a checksum of the peer's, see `ConnectionConfig.check_large`).
        """
        return self._names.get(name, default)

    def __repr__(self) -> str:
        state = "open"
        if self.is_closing:
            state = "closed" if self._ending.done else "closing"
        peer = self._names.get("peername")
        return f"<Connection {state} peer={peer} device={self._names.get('device')}>"

    def __del__(
        self, _warn: Callable[..., None] = warnings.warn, _gone: Any = sys.is_finalizing
    ) -> None:
        link = getattr(self, "_link", None)
        if link is None or _gone():
            return
        receiver = self._receiver

        def end() -> None:
            link.close()
            receiver.drop_all()  # no task can take these messages any more

        try:
            if not link.closed:
                _warn(f"unclosed {self!r}", ResourceWarning, source=self, stacklevel=1)
        finally:
            from_finalizer(link.loop, end)
