"""Connection: messages to and from one peer, and its memory.

Theory of operation
    `Link` has the adapter's side, `Sender` and `Receiver` have slots and credits, `LargeMessages`
    has an `Exposer` and a `Fetcher`, `OneSided` does reads and writes, `Keepalive` notices silence.
    The calls of the program go to the parts, and the connection divides the events of the link
    among them.

    The end has one cause and one path.  `close()`, `abort()`, a disconnection and a failed request
    lead to `_over`, which notes the first cause and has all parts raise it; `Ending` does the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Coroutine, Sequence
from types import EllipsisType
from typing import Any, Self, overload

from aiordma._core import (
    EVENT_FAILED,
    EVENT_FRAMES,
    EVENT_IDLE,
    EVENT_ROOM,
    EVENT_SENT,
    Message,
    Messages,
)
from aiordma.arguments import Buffer, bytes_of, fitting, parts_of, whole
from aiordma.cm.address import Address
from aiordma.cm.connection_event import ConnectionEvent
from aiordma.cm.connection_id import ConnectionId
from aiordma.cm.enums import EventType
from aiordma.endpoint import facts
from aiordma.endpoint.carrier import FrameCarrier
from aiordma.endpoint.config import ConnectionConfig
from aiordma.endpoint.events import ConnectionEvents, EventHub
from aiordma.endpoint.large import LargeMessages
from aiordma.endpoint.lease import Lease
from aiordma.endpoint.link import Link
from aiordma.endpoint.one_sided import OneSided
from aiordma.endpoint.outcome import (
    Outcome,
    abort_reason,
    aborted_error,
    closed_error,
    ended_error,
    eof_error,
    left_error,
    reserved_error,
    vanished_error,
    violation,
)
from aiordma.endpoint.receiving import Receiver
from aiordma.endpoint.sending import Goodbye, Sender
from aiordma.endpoint.wire import AbortReason, FrameKind, Hello
from aiordma.errors import (
    ConnectionEndedError,
    DeviceRemovedError,
    FlushedError,
    ForkedError,
    NotSupportedError,
    ProtocolError,
    ResourceClosedError,
    cm_error,
    os_error,
    read_incomplete_error,
)
from aiordma.link import tally
from aiordma.link.adapter_side import reason_of
from aiordma.link.ending import Ending, LastSteps
from aiordma.link.keepalive import Keepalive
from aiordma.link.log_share import VIOLATIONS
from aiordma.link.tally import COUNTERS, ConnectionStats
from aiordma.link.transport_socket import shown
from aiordma.logs import log_of
from aiordma.loop import background, fork
from aiordma.loop.coroutines import markcoroutinefunction
from aiordma.loop.running import check_loop, check_thread, from_finalizer
from aiordma.loop.uncopied import Uncopied
from aiordma.memory.remote import RemoteRegion
from aiordma.requests.budget import RequestBudget
from aiordma.requests.calls import Calls
from aiordma.requests.exchange import Exchange
from aiordma.requests.served import Requests
from aiordma.verbs.enums import Access, Opcode
from aiordma.verbs.mr import MemoryRegion
from aiordma.verbs.pd import ProtectionDomain
from aiordma.verbs.qp import QueuePair
from aiordma.verbs.wc import WCRecord
from aiordma.verbs.wr import SGE

__all__ = ["Connection"]

_log = log_of("connection")
#: Names of the limit of silence, for the error of a connection that is given up.
_SILENCE = "idle_timeout_s of this side's ConnectionConfig"
_RAW_SILENCE = f"raw_{_SILENCE}"
# Events after which the connection goes on.
_NO_END = (EventType.ESTABLISHED, EventType.TIMEWAIT_EXIT, EventType.ADDR_CHANGE)


async def _no_send(buf: Any, imm: int | None = None) -> None:
    """In place of `send`, once the connection carries requests."""
    raise reserved_error("send()")


class Connection(Uncopied):
    """A connection to one peer; made by `connect`, `Listener.accept` or `ConnectRequest.accept`.

    Belongs to the event loop that made it.  `async with` closes it; after an exception in the
    block it is aborted instead, so that the peer does not take half a conversation for a whole.
    A forgotten connection lives on, without a `ResourceWarning`, until its loop ends or it breaks.

    Attributes:
        config: Its settings.
        private_data: Bytes that the peer's program sent with the handshake.
    """

    _request_budget: RequestBudget | None  # a listener sets its own
    # Addresses of peer and this side; empty: not asked for yet; None: before the handshake.
    _ends: tuple[Address | None, Address | None] | tuple[()] | None
    _peer_loop: tuple[str, bytes] | None
    _theirs: Hello | None  # the peer's half of the handshake
    _established: asyncio.Future[None] | None  # by the first frame of the client
    _keepalive: Keepalive | None  # from the first look on
    _own_goodbye: Goodbye | None
    _own_large: LargeMessages | None
    _own_one_sided: OneSided | None
    _events: EventHub | None

    def __init__(self, link: Link, config: ConnectionConfig) -> None:
        self.config = config
        self.private_data: bytes = b""
        self._link = link  # not yet started
        self._state = state = link.state
        self._receiver = Receiver(link, config)
        state.sge, state.region = SGE, MemoryRegion
        state.remote, state.pd, state.largest = RemoteRegion, link.pd, config.max_message_size
        self._sender = Sender(link, config)
        self._outcome = Outcome()
        self._ending = Ending(link)
        self._facts: dict[str, Any] = {}
        # Not of the class: an attribute that comes later can cost a dict of its own.
        self._request_budget = self._ends = self._peer_loop = self._theirs = None
        self._established = self._keepalive = self._events = None
        self._own_goodbye = self._own_large = self._own_one_sided = None
        self._reads = 0  # RDMA READs that the peer serves at a time
        # Tick of the wheel for which it stands there itself; 0: for none; None: not yet.
        self._first_look: int | None = None
        self._late = False  # whether the peer asks for signs of life first
        link.at_close(self._part)
        fork.guard_public(self)
        link.cm_id._sink = self._on_cm_event
        state.handler = self._on_events
        link.start(self)

    @property
    def _one_sided(self) -> OneSided:
        if self._own_one_sided is None:
            self._own_one_sided = OneSided(self._link, self.config, self._outcome)
        return self._own_one_sided

    @property
    def _large(self) -> LargeMessages:
        if self._own_large is None:
            self._own_large = LargeMessages(
                self._link, self._sender, self._receiver, self._outcome, self.config
            )
            if self._theirs is not None:
                self._own_large.agree(self._theirs, self._reads)
        return self._own_large

    @property
    def _goodbye(self) -> Goodbye:
        if self._own_goodbye is None:
            self._own_goodbye = Goodbye(
                self._link, self.config, self._outcome, self._sender, self._ending
            )
        return self._own_goodbye

    # Messages

    # A default of an argument that is for keywords alone costs 250 instructions in Python 3.11.
    @markcoroutinefunction
    def send(
        self, buf: Buffer | SGE | Sequence[Buffer], imm: int | None = None
    ) -> Coroutine[Any, Any, None]:
        """Send one message.

        Args:
            buf: Any contiguous object with the buffer protocol; may be empty.  Or a list or tuple
                of them, a header and a body for instance, which arrive as one message; they are
                not joined before.  Or a part of the `Memory` that the connection shares, of which
                more than 256 KiB are neither copied nor registered.
            imm: A 32-bit number that arrives as `Message.imm`.

        Returns when the bytes of `buf` may be changed again: a message up to
        `config.eager_size` is copied, and one up to `config.rendezvous_threshold`, if a landing or
        slots for all of it are free; any other message has been read by the peer by then.
        `flush()` waits until all messages have reached the peer's adapter.

        A send waits while the peer has `config.recv_depth` messages, or
        `config.receive_buffer_size` bytes of large ones, that its program has not received.  Two
        programs that both send, and do not receive meanwhile, wait for each other for ever, unless
        `config.stall_timeout_s` is set: receive in a task of its own.  The first two messages of a
        turn of the event loop are posted at once, the others together when the turn ends, or 16
        are there, so that a task that then blocks the loop, or stops it, delays or loses them.

        Messages arrive in the order of the calls, those of several tasks, too; but one of up to
        `config.eager_size` bytes may arrive before a larger one of another task that waits.

        Raises:
            TypeError: No buffer.
            ValueError: `imm` does not fit, or the part is of other memory.
            MessageTooLargeError: More than the peer takes; nothing was sent.
            ResourceClosedError: The connection was closed by this side, or `send_eof` was called.
            ConnectionLostError: It broke, for the reason in `__cause__`, or the peer closed it.
            TimeoutError: The peer lives but took nothing for `config.stall_timeout_s`.

        Cancellation: the message was not sent, or, if it was large, may still be received; one of
        more than 256 KiB, which is not copied, stays exported until the adapter is done with it.
        A `Message` can be released before: its memory is free when the adapter is done.
        """
        if imm is None:
            return self._state.sending(self, buf)
        return self._send_in_python(buf, -1, imm)

    async def _send_in_python(
        self, buf: Buffer | SGE | Sequence[Buffer], code: int, imm: int | None = None
    ) -> None:
        """Go on with a send that C has not done: in another loop or thread, or with an errno."""
        if code > 0:
            self._sender.check(code)
            return
        if imm is not None:
            imm = fitting("imm", imm, 32)
        self._check_loop()
        opening = None
        if isinstance(buf, SGE):
            buf, opening = self._one_sided.message_of(buf)
        parts = parts_of("a message", buf)
        try:
            size = sum(map(len, parts))
            code = -1 if opening else self._state.send_pieces(parts, imm)
            if code > 0:
                self._sender.check(code)
            elif code and size <= self._state.eager_size:  # it may have to wait for room
                payload = parts[0] if len(parts) == 1 else memoryview(b"".join(parts))
                await self._sender.data(payload, imm)
            elif code and (opening or not self._sender.in_fragments(parts, size, imm)):
                self._sender.require_open()
                await self._large.exposer.send(parts, size, imm, opening)
        except BaseException:
            # The exception keeps this frame, and would keep the caller's buffers exported.
            for part in parts:
                part.release()
            raise

    @markcoroutinefunction
    def recv(self) -> Coroutine[Any, Any, Message]:
        """The next message, in the order in which the peer sent them.

        Several tasks may wait; they are served in the order in which they began to.

        Raises:
            ConnectionEndedError: The peer closed in good order; all its messages were received.
            ResourceClosedError: The connection was closed by this side.
            ConnectionLostError: It broke, for the reason in `__cause__`.  Messages that had arrived
                are returned first.

        Cancellation: no message is lost.
        """
        return self._state.receiving(self)

    async def _recv_in_python(self) -> Message:
        """Go on with a `recv` that is none of the frequent cases."""
        self._check_loop()
        if self._carries_requests:
            raise reserved_error("recv() and `async for`")
        return await self._receiver.recv()

    async def recv_into(self, buffer: Buffer) -> int:
        """Receive the next message into memory of the program, as `recv_into` of a socket.

        Args:
            buffer: Any writable, contiguous object with the buffer protocol, such as a bytearray, a
                numpy array, an mmap or shared memory.  It has at least the bytes of the message,
                and stays exported until the call ends: a bytearray cannot be resized.

        Returns:
            The bytes of the message, which begin at the start of the buffer; those behind keep
            their value.  An immediate is not told.

        A message of more than 256 KiB that was not fetched before is read by the adapter, right
        into the buffer: nothing is copied.  Of other messages the bytes are copied once, and so are
        all on iWARP (twice), and those for memory that cannot be registered, as that of a file may
        be.  So from the first call on, the library does not fetch messages of more than 256 KiB
        ahead, until `recv` takes one: the peer's `send` then waits for this call.

        Several tasks may wait in `recv` and `recv_into`; they are served in the order in which they
        began to.  While a task waits for the rest of a large message the others wait for the task.

        Raises:
            TypeError: No buffer, or one of Python objects.
            ValueError: The buffer is empty or not contiguous.
            BufferError: It is read-only.
            MessageTooLargeError: The message has more bytes, `size`, than the buffer.  It stays the
                next message, for a call with a larger buffer, or `recv`.
            OSError: ENOMEM mostly means that RLIMIT_MEMLOCK is too low.  It stays the next, too.
            ConnectionEndedError, ResourceClosedError, ConnectionLostError: As `recv`.

        After an exception anything may be in the buffer, but nothing is written to it any more.

        Cancellation: no message is lost; a large message is read anew for the next call.  READs
        that write to the buffer are waited for.  If they have not ended after
        `config.fetch_timeout_s`, the connection is given up, and its end is waited for, a minute at
        most; should the kernel not have ended it then, the buffer stays exported.
        """
        self._check_loop()
        if self._carries_requests:
            raise reserved_error("recv_into()")
        view = bytes_of("the buffer", buffer, writable=True)
        with view:
            if not view:
                msg = "the buffer is empty: an empty message needs room for a byte, too"
                raise ValueError(msg)
            return await self._receiver.recv_into(view)

    def __aiter__(self) -> Messages:
        return self._state.messages(self)

    @markcoroutinefunction
    def __anext__(self) -> Coroutine[Any, Any, Message]:
        """Messages until the peer, or this side, closes; a broken connection raises."""
        return self._state.iterating(self)

    async def _next_in_python(self) -> Message:
        try:
            return await self._recv_in_python()
        except (ConnectionEndedError, ResourceClosedError):
            raise StopAsyncIteration from None

    def _left(self) -> None:
        """Called by C when a task has left its wait for a message by an exception."""
        self._receiver.left()

    # Requests; with the first, the connection carries requests instead of messages

    @overload
    def request(
        self, buf: Any, *, timeout: float | EllipsisType | None = ..., into: None = None
    ) -> Coroutine[Any, Any, Message]: ...

    @overload
    def request(
        self, buf: Any, *, timeout: float | EllipsisType | None = ..., into: Buffer
    ) -> Coroutine[Any, Any, int]: ...

    @markcoroutinefunction
    def request(
        self, buf: Any, *, timeout: float | EllipsisType | None = ..., into: Any = None
    ) -> Coroutine[Any, Any, Message | int]:
        """Send a request, and wait for its answer.

        Many requests may be under way, in both directions; the peer takes them with `requests()`
        and answers in any order.  While it has as many as it takes, a request waits in line.

        Args:
            buf: Any contiguous object with the buffer protocol; may be empty.  It is not to be
                changed before the answer is here.
            timeout: Seconds for all of it; the peer's `Request.remaining` shows them.  Zero or
                less means that the deadline has already passed: nothing is sent.  None for
                no limit; by default `config.request_timeout_s`, of which the peer is not told.
            into: Memory for the answer: a writable buffer, as of `recv_into`, which stays exported
                until the call ends.  None: the answer is a message.

        Returns:
            The answer, which is the program's; its `imm` has no meaning.  With `into`, the bytes of
            the answer, which begin at the start of the buffer.

        The adapter reads an answer of more than 256 KiB right into `into`: nothing is copied.  Of
        others the bytes are copied once, as by `recv_into`.

        Raises:
            TypeError: No buffer, or no number of seconds.
            ValueError: `into` is empty or not contiguous.
            BufferError: `into` is read-only.
            MessageTooLargeError: More than the peer takes; nothing was sent.  Or the answer has
                more bytes, `size`, than `into`: then it is the `answer` of the exception.
            RequestDeadlineError: No answer in time; it is a TimeoutError, too.
            RequestRefusedError: The peer has not served it; a subclass tells why.
            RequestError: The peer's handler raised an exception.
            NotSupportedError: The connection is raw.
            RuntimeError: A task waits in `recv()`; or not in the connection's event loop.
            ResourceClosedError, ConnectionLostError, TimeoutError: As `send` and `recv`;
                `request_sent` of a ConnectionLostError tells whether the peer may have got it.

        Cancellation: this side tells the peer, whose `Request.canceled` shows it.  With `into` the
        call ends, as it does at its deadline, when nothing writes to the buffer any more: READs
        under way are waited for, as by `recv_into`.
        """
        calls = self._exchange.calls
        if tally.observed:
            return self._request_observed(calls, buf, timeout, into)
        return calls.request(buf, timeout, into)

    async def _request_observed(
        self, calls: Calls, buf: Any, timeout: float | EllipsisType | None, into: Any
    ) -> Message | int:
        # Made in here: a task that is canceled before its first step would leave it unawaited.
        with tally.Operation("request", self._peer_attributes):
            answer: Message | int = await calls.request(buf, timeout, into)
            return answer

    # The name that a warning has of a coroutine that was never awaited.
    _request_observed.__qualname__ = "Connection.request"

    def _peer_attributes(self) -> dict[str, Any]:
        return tally.peer_attributes(self._facts["peername"])

    def requests(self, *, limit: int = 256, limit_bytes: int = 64 << 20) -> Requests:
        """Requests of the peer: an async iterator over `Request`, until the connection is closed.

        Args:
            limit: Requests that the program has at a time, 1 to 1,000,000.  The peer's library has
                others wait.  Up to as many wait here: of a peer that has its answer before this
                side knows that it does.  A peer that sends more breaks the rules.
            limit_bytes: Likewise, bytes of their bodies; a single request may have more.  More than
                these are refused.

        Raises:
            TypeError, ValueError: A limit is invalid.
            NotSupportedError: The connection is raw.
            RuntimeError: A task waits in `recv()`; or not in the connection's event loop.
            ResourceClosedError, ConnectionLostError: The connection is over.
        """
        limit = whole("limit", limit, 1, 1_000_000)
        limit_bytes = whole("limit_bytes", limit_bytes, 1, 1 << 50)
        served = self._exchange.served
        served.grant(limit, limit_bytes)
        return Requests(served)

    @property
    def _exchange(self) -> Exchange:
        self._check_loop()
        exchange = self._receiver.exchange
        if exchange is None:
            if self.config.raw:
                raise os_error(errno.EOPNOTSUPP, "requests", detail="on a raw connection")
            self._outcome.require_open()
            send = functools.partial(Connection.send, self)  # of the class: `send` is replaced
            carrier = FrameCarrier(
                self._link, self._receiver, self._outcome, send, self._require_size,
                self._request_budget, weakref.ref(self), self.config.request_timeout_s,
            )  # fmt: skip
            exchange = self._receiver.reserve(Exchange(self._link.loop, carrier))
            vars(self)["send"] = _no_send  # so that a send without requests pays nothing
            # Behind messages that wait for room another frame would be the next: it is not marked.
            self._state.requesting = not self._state.queued
            exchange.start()
        return exchange

    @property
    def _carries_requests(self) -> bool:
        return self._receiver.exchange is not None

    def _require_size(self, size: int) -> None:
        if size > self._state.eager_size:
            self._large.exposer.check_size(size)

    # Memory of the peer, and of this side

    async def read(
        self, remote: RemoteRegion, into: Buffer | MemoryRegion | SGE, *, offset: int = 0
    ) -> int:
        """RDMA READ: fill `into` with memory that the peer has exposed; its program does nothing.

        Args:
            remote: The memory, as the peer named it.
            into: A writable buffer, filled completely; or a region, or an `SGE`, of memory that
                was registered with `register`, into which the adapter then writes directly.  Until
                the call has returned, nothing else may use this memory: on a software adapter its
                last 8 bytes are random until the data arrive, and a `write` from there sends them.
            offset: First byte to read, from the start of `remote`.

        Returns:
            Bytes read.

        Raises:
            ValueError: Not inside `remote`.
            PermissionError: `remote` is not for reading.
            BufferError: `into` is read-only.
            ReadIncompleteError: The adapter has completed the read before its last bytes were
                there, as Soft-RoCE may where packets are lost or come late.  The connection breaks
                soon after: read again over another connection.
            RemoteAccessError: The peer's adapter refused: the lease has ended, or the key is wrong.
                This ends the connection.
            RemoteInvalidRequestError: The same, where the peer has no lease left for such accesses.
            TransportRetryError: The peer's adapter did not answer: its host or the link is gone.
                This ends the connection, and is no ConnectionError; other calls get the
                ConnectionLostError, with this as its cause.
            ConnectionLostError, ResourceClosedError: The connection was over before, or ended for
                another reason; or software iWARP refused, which gives no reason.

        Cancellation: ends the wait; the buffer stays exported, and may be written to, until the
        adapter is done with it.
        """
        # C does the frequent case, in this loop and thread; see `send`.
        operation = self._state.read(remote, into, offset)
        if operation is None:
            self._check_loop()
            return await self._one_sided.transfer(Opcode.RDMA_READ, remote, into, offset)
        try:
            size = await operation
        except FlushedError as exc:
            raise self._one_sided.operations.lost() from exc
        if not size:
            raise read_incomplete_error()
        return size

    async def write(
        self,
        remote: RemoteRegion,
        data: Buffer | MemoryRegion | SGE,
        *,
        offset: int = 0,
        imm: int | None = None,
    ) -> int:
        """RDMA WRITE: put `data` into memory that the peer has exposed.

        Args:
            remote: The memory, as the peer named it.
            data: A buffer; or a region, or an `SGE`, of memory registered with `register`.
            offset: Where to put the first byte, from the start of `remote`.
            imm: A 32-bit number.  The peer's program receives an empty message with it, after the
                data have arrived; without `imm` the program learns nothing.

        Returns:
            Bytes written.  They have reached the peer's adapter; software iWARP reports this before
            the peer has checked the access.

        A message that is sent before this returns, by another task for instance, may arrive before
        the data.  So await the write before the message that tells of it, or use `imm`.

        Raises and cancellation: as `read`; with `imm` also as `send`.  A canceled write may have
        written.
        """
        if imm is None:
            operation = self._state.write(remote, data, offset)
            if operation is not None:
                try:
                    return await operation
                except FlushedError as exc:
                    raise self._one_sided.operations.lost() from exc
        else:
            imm = fitting("imm", imm, 32)
            if self._carries_requests:
                raise reserved_error("write() with an immediate")
            self._sender.require_open()
        self._check_loop()
        write = Opcode.RDMA_WRITE
        if imm is None or self.config.raw:
            return await self._one_sided.transfer(write, remote, data, offset, imm)
        size = await self._one_sided.transfer(write, remote, data, offset)
        await self.send(b"", imm=imm)
        return size

    async def fetch_add(self, remote: RemoteRegion, value: int, *, offset: int = 0) -> int:
        """Add to an unsigned 64-bit integer in memory of the peer, atomically.

        It is atomic against other remote atomics on the same adapter of the peer, and against
        nothing else: not against a `write` of any connection, and not against the peer's own
        program.

        Args:
            remote: The memory, exposed with `atomic=True`.
            value: The number to add, modulo 2**64: -1 subtracts.
            offset: Where the integer is; its address has to be a multiple of 8.

        Returns:
            The integer before the addition, in the peer's byte order, which is taken to be little.

        Raises:
            TypeError: `value` is no whole number.
            ValueError: Not aligned, or not inside `remote`.
            NotSupportedError: The device has no atomics, as all of iWARP.
            AtomicResultLostError: The adapter has completed the operation without its result, as
                Soft-RoCE may where packets are lost.  It took place at most once, and the old value
                is unknown; the connection goes on.
            Others: as `read`.

        Cancellation: ends the wait; the addition may take place.
        """
        self._check_loop()
        value = whole("value", value) % (1 << 64)
        add = Opcode.ATOMIC_FETCH_AND_ADD
        return await self._one_sided.atomic(add, remote, offset, value, 0)

    async def compare_swap(
        self, remote: RemoteRegion, expected: int, desired: int, *, offset: int = 0
    ) -> int:
        """Store `desired` in an integer of the peer if it is `expected`, atomically.

        It is atomic as `fetch_add` is.  After AtomicResultLostError only the integer itself can
        tell whether the swap took place: store values that tell who has stored them.

        Returns:
            The integer before; the swap took place if it equals `expected`.

        `remote`, `offset` and cancellation: as `fetch_add`.  Raises what that raises, and
        ValueError for a number that is not in 0..2**64-1.
        """
        self._check_loop()
        swap = Opcode.ATOMIC_CMP_AND_SWP
        return await self._one_sided.atomic(swap, remote, offset, expected, desired)

    async def register(
        self, buf: Buffer | int, access: Access = Access.LOCAL_WRITE
    ) -> MemoryRegion:
        """Register memory for this connection's own transfers, so that nothing is copied.

        Args:
            buf: A buffer, which stays exported until the region is destroyed; or a number of
                bytes, for page-aligned memory of the region's own; or memory of a GPU: an object
                with `__cuda_array_interface__`, or with DLPack, which is kept as long.
            access: Rights of this side; `expose` gives rights to the peer.

        Returns:
            The region, for `async with`, or for `close()`, at any time; it is closed with the
            connection.  A region that is forgotten before is a ResourceWarning, and is closed: its
            memory is free when the last transfer has ended.  If `access` has a remote right, the
            peer may have its key, so that it lasts until it is closed, forgotten or not.  On iWARP
            the peer learns the key with the first read into the region, and can write there until
            it is closed.

        Raises:
            DeviceMemoryError: The adapter's driver, or that of the GPU, knows no dmabufs.
            OSError: ENOMEM mostly means that RLIMIT_MEMLOCK is too low.
            ResourceClosedError, ConnectionLostError: The connection is over.

        Cancellation: the region is destroyed.
        """
        self._check_loop()
        return await self._one_sided.register(buf, access)

    def expose(
        self,
        buf: Buffer | int | SGE,
        *,
        read: bool = False,
        write: bool = False,
        atomic: bool = False,
        timeout_s: float | None = None,
    ) -> Lease:
        """Open memory to the peer for as long as an `async with` block lasts.

        The block gets the `RemoteRegion` that names the memory; send its `to_bytes()` to the peer.
        `Lease.view` has the bytes of the memory.
        When the block has ended no access is possible any more: the peer's next access is refused,
        which ends the connection.  So have the peer say when it is done.

        Args:
            buf: A buffer, or a number of bytes for fresh memory; writable unless only for reading.
                Or a part of the `Memory` that the connection shares, which is not registered anew;
                `Memory` says what its leases are worth with which adapter.
            read: The peer may read.
            write: The peer may write.
            atomic: The peer may use atomics; NotSupportedError on iWARP.
            timeout_s: Seconds after which the lease ends even if the block has not; None: never.

        Raises:
            TypeError, ValueError: No buffer, no right at all, a time-out that is not positive, or a
                part of other memory than that which the connection shares.
            BufferError: The buffer is read-only, and not only for reading.
            NotSupportedError: The adapter does not hold leases to their parts, and the peers are
                not trusted with the rights.
            ResourceBusyError: The part overlaps a part that is lent to another connection, and one
                of both is for writing (when the block is entered).
            OSError: The memory cannot be registered (when the block is entered).
            ResourceClosedError, ConnectionLostError: The connection is over.

        Cancellation: of the entry, nothing is exposed; of the exit, the lease ends all the same.
        """
        self._check_loop()
        self._outcome.require_open()
        return self._one_sided.lease(buf, timeout_s, read=read, write=write, atomic=atomic)

    async def flush(self) -> None:
        """Wait until every message sent so far has reached the peer's adapter.

        Messages that have reached it count, although the connection has ended since.  If it ends
        while a large message is under way, those behind that one are lost with it all the same.

        Raises:
            ConnectionLostError: It broke, or the peer closed it, before all of them had, as far as
                this side's adapter was told.
            ResourceClosedError: This side has closed it.

        Cancellation: ends the wait.
        """
        self._check_loop()
        if isinstance(self._outcome.cause, ResourceClosedError):
            raise self._outcome.failure()
        await self._sender.flush()

    async def send_eof(self) -> None:
        """Send the end of this side's messages; messages of the peer are still received.

        The peer's `recv` raises ConnectionEndedError, and its `async for` ends, behind the messages
        of this side; it can go on to send.  `close` ends the connection.  Returns when everything
        has reached the peer's adapter, and the peer has read the large messages; the connection may
        have ended since.  Idempotent.

        Raises:
            NotSupportedError: The connection is raw, and has no end of messages.
            ConnectionLostError: The connection broke before that.  If the peer has closed it in
                good order, which may be before this call, only if messages had not arrived: the
                peer has no use for their end.
            ResourceClosedError: This side has closed it.

        A later `send` raises ResourceClosedError, and so does a `send` that waits in another task.

        Cancellation: ends the wait; this side sends no more messages, and the end may be missing
        until `close` sends it.
        """
        self._check_loop()
        if self.config.raw:
            text = "a raw connection has no end of messages: close it"
            raise NotSupportedError(errno.EOPNOTSUPP, text)
        outcome = self._outcome
        if outcome.closing or (self._goodbye.said is None and not outcome.left):
            outcome.require_open()
        if outcome.cause is None:
            self._refuse_sends(eof_error)
        await self._goodbye.say_end(self._drained)

    def _refuse_sends(self, failure: Callable[[], BaseException]) -> None:
        self._sender.refuse(failure)
        if self._own_large is not None:
            self._own_large.refuse(failure)

    async def close(self) -> None:
        """Close in good order: sent messages arrive, the peer sees the end, resources are freed.

        Returns within `config.close_timeout_s` plus a few seconds, whatever the peer does.
        Idempotent; a second call waits for the first.  Raises only RuntimeError, in a foreign loop.

        Cancellation: becomes `abort()`; all resources are freed in any case.
        """
        self._check_loop()
        self._begin_close()
        try:
            await self.wait_closed()
        except asyncio.CancelledError:
            self.abort()
            raise

    def _begin_close(self) -> None:
        outcome = self._outcome
        if not outcome.decided:
            outcome.closing = self._state.over = True
            self._refuse_sends(outcome.failure)
            self._receiver.drop_all()
            self._receiver.fail(outcome.failure)
        self._begin_end()

    def _stop_receiving(self) -> None:
        """End the messages, or requests, behind those that have arrived; refuse later requests."""
        if (exchange := self._receiver.exchange) is not None:
            exchange.served.stop()
        elif not self._outcome.decided:
            self._receiver.end(closed_error)

    def abort(self) -> None:
        """End the connection at once; the peer sees it as lost.  `wait_closed()` waits for the end.

        Messages that the adapter has been given still arrive, for `config.close_timeout_s` at most;
        a large message that the peer has not read does not.

        Raises:
            RuntimeError: The connection's event loop runs in another thread; nothing was done.
        """
        check_thread(self._link.loop, "connection")
        self._outcome.closing = self._state.over = True
        if not self._goodbye.abort() and self._outcome.cause is None:
            self._state.post_chain()  # after an error the connection ends as well
            self._say_aborted()
            self._over(closed_error())
            self._receiver.drop_all()

    async def wait_closed(self) -> None:
        """Wait until the connection is over and the adapter holds nothing of it.

        Cancellation: ends the wait.
        """
        await self._ending.wait()

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
        if self._events is None:
            self._events = EventHub(self._link)
        return self._events.open()

    @property
    def stats(self) -> ConnectionStats:
        """Counters of the connection, as they are now."""
        state = self._state
        return ConnectionStats(**{name: getattr(state, name) for name in COUNTERS})

    @property
    def cm_id(self) -> ConnectionId:
        """The connection id of the native layer.

        It, `qp` and `pd` belong to the connection, which closes them: they are there to ask and to
        change what the connection does not have a name for, such as `qp.query()`, the RNR timer, or
        more memory and queue pairs in its protection domain.  They stay after its end, closed.
        """
        return self._link.cm_id

    @property
    def qp(self) -> QueuePair:
        """The queue pair of the native layer; see `cm_id`.

        Its places are counted by the connection, which posts in C: it takes no requests of the
        program (`post_send`, `send` and the like raise ResourceBusyError).
        """
        return self._link.qp

    @property
    def pd(self) -> ProtectionDomain:
        """The protection domain of the native layer; see `cm_id`.

        Memory and further queue pairs of the program can be made in it; `expose` opens memory to
        the peer.
        """
        return self._link.pd

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """A fact about the connection, by `name`; `default` for a name that is unknown.

        Names: `device`, `port`, `gid` (16 bytes), `gid_index` (in the port's table; asked of the
        adapter, while the connection is open; None on iWARP), `link_layer`, `transport`, `mtu`
        (bytes), `qpn`, `peer_qpn` (of the peer's queue pair; None on iWARP, which does not tell
        it), `provider` (the kernel's driver), `peername` and `sockname` (host and port; of IPv6
        also flow and scope, as with asyncio's sockets), `number` (of the connection, in the log and
        in `aiordma.metrics`), `opened_at` (seconds since 1970, at the end of the handshake),
        `backend` (always "rdma": there is no fallback), `large_messages_checked` (whether those
        that this side receives are compared with a checksum of the peer's, see
        `ConnectionConfig.check_large`).
        """
        if name == "gid_index" and "gid_index" not in self._facts:
            with contextlib.suppress(OSError, ResourceClosedError, ForkedError):
                self._facts[name] = self._link.gid_index()
        fact = self._known.get(name, default)
        return fact if fact is default else shown(name, fact)

    @property
    def _known(self) -> dict[str, Any]:
        """The facts by name, found at the first use, or at the end, while there is a device."""
        if "device" not in self._facts:
            # A device that is gone has no names, and a forked child has no device.
            with contextlib.suppress(OSError, ResourceClosedError, ForkedError):
                found = self._link.describe()
                found["peername"], found["sockname"] = self._ends or self._link.cm_id._ends()
                found["large_messages_checked"] = self._large.checked
                self._facts |= found
        return self._facts

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:
        return self._link.loop

    @property
    def _stage(self) -> str:
        if self.is_closing():
            return "closed" if self._ending.done else "closing"
        return "open" if "opened_at" in self._facts else "connecting"

    @property
    def _broke_by(self) -> BaseException | None:
        """The cause of its end, unless this side or the peer has closed it in good order."""
        cause = self._outcome.cause
        ended = self._receiver.ended and not isinstance(cause, ProtocolError)
        return None if ended or isinstance(cause, ResourceClosedError) else cause

    def _seen(self) -> dict[str, Any]:
        """The connection as `aiordma.metrics` shows it; in any thread, without a call of C."""
        return facts.seen(self._link, self._facts, self._stage, self._broke_by)

    def __repr__(self) -> str:
        return facts.line(self._link.number, self._known, self._stage, self._broke_by)

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

    # Handshake: called by connect and accept

    def _hello(self, private_data: bytes, room: int) -> bytes:
        """This side's half of the handshake, as private data of at most `room` bytes."""
        return self._link.common.hello(private_data, room)

    def _meet(
        self,
        hello: Hello | None,
        reads: int,
        peer: Address | None = None,
        ends: tuple[Address | None, Address | None] | None = None,
    ) -> None:
        """Take the peer's half of the handshake: messages may be sent from now on.

        Args:
            hello: The peer's numbers; None of a raw connection.
            reads: RDMA READs that the peer serves at a time.
            peer: The peer's address.
            ends: Addresses of peer and this side, if both are known.
        """
        self._ends = ends or ()
        # For `_seen` in another thread, which cannot ask C.
        self._facts["peername"], self._facts["sockname"] = ends or (peer, None)
        if hello is not None and hello.loop_id and peer is not None:
            # With the address: a program of another host may have learned the number.
            self._peer_loop = peer[0], hello.loop_id
        self._link.agree(hello)
        if hello is None:
            return
        self.private_data = hello.user_data
        self._theirs, self._reads = hello, reads
        if self._state.queued or self._state.has_pending:
            self._sender.room()

    def _opened(self, peer_qpn: int) -> None:
        """Note that the handshake is done; `peer_qpn` is 0 where the peer does not tell it."""
        link, known = self._link, self._facts
        known["number"], known["opened_at"] = link.number, time.time()
        known["peer_qpn"] = peer_qpn or None
        link.note_opened(peer_qpn)

    def _greet(self) -> None:
        """Send the first message, which iWARP demands of the connecting side."""
        self._sender.control(FrameKind.CREDIT)
        self._watch(late=False)

    def _watch(self, *, late: bool = True) -> None:
        """Begin to notice silence; not before the first message may be sent.

        Args:
            late: Whether the peer, which has connected, asks for signs of life first.
        """
        if self._first_look is None and self._outcome.cause is None:
            wheel, self._late = self._link.common.wheel, late
            self._first_look = 0 if wheel is None else wheel.begin(self)
            background.deliver_at_end(self._link.loop, self)

    def _look(self, tick: int) -> None:
        """Make the keepalive, which has the later looks: many connections live for less."""
        link, late, first = self._link, self._late, self._first_look
        if first and link.common.wheel is not None:
            name = _RAW_SILENCE if self.config.raw else _SILENCE
            silence, peer, self._first_look = link.plan.silence, self._peer_loop, 0
            self._keepalive = Keepalive(link.loop, *silence, name, late=late, peer_loop=peer)
            self._keepalive.take_over(self, link.common.wheel, first, tick)

    def _was_alive(self) -> bool:
        alive, self._state.alive = self._state.alive, False
        return alive

    def _show_life_to(self, group: bytearray | None) -> None:
        self._state.show_life_to(group)

    def _on_interval(self, *, silent: bool) -> None:
        if not silent or self.config.raw:
            return
        if self._state.asking:
            self._link.note("hears nothing from the peer, which was asked")
        else:
            self._state.asking = True
            self._sender.control(FrameKind.PING)

    def _give_up(self, cause: BaseException) -> None:
        self._link.fail(cause)

    def _await_greeting(self) -> asyncio.Future[None]:
        """A future that ends with the client's first message; made before the answer."""
        self._established = self._link.loop.create_future()
        self._established.add_done_callback(self._greeted)
        return self._established

    def _greeted(self, future: asyncio.Future[None]) -> None:
        self._established = None
        if not future.cancelled():
            future.exception()  # no task may wait any more, and asyncio would log it

    def _check_loop(self) -> None:
        if self._link.forked:
            raise fork.forked_error("connection")
        check_loop(self._link.loop, "connection")

    # From the parts

    def _on_events(self, events: int) -> None:
        """Act on the events that C leaves to Python, at the end of a drain."""
        if events & EVENT_FRAMES:
            self._on_frames()
        if events & EVENT_ROOM:
            self._sender.room()
        if events & EVENT_SENT:
            self._sender.sent()
        if events & EVENT_FAILED:
            self._link.check(self._state.error)
            # No violation while ABORT is on its way: an answer to a message that was given up.
            if (wrong := self._state.wrong)[0] and self._outcome.cause is None:
                self._link.fail(violation(*wrong))
        if events & EVENT_IDLE:
            self._link.came_back()
        if self._state.has_pending:
            self._sender.attend()

    def _on_frames(self) -> None:
        state, receiver = self._state, self._receiver
        if self._established is not None and state.said:  # by the first frame of the client
            self._link.cm_id.notify_established()
            self._watch()
            if not self._established.done():
                self._established.set_result(None)
        if (fetcher := receiver.fetcher) is not None:
            for number in self._link.take_reads():
                fetcher.on_read(number)
        if state.grows and not state.unused:
            receiver.window.grow()
        for slot in state.take_freed():
            receiver.window.back(slot)
        if (state.landing_wanted or state.peer_landing) and self._outcome.cause is None:
            self._large.landings.look()
        if state.large:
            receiver.window.take_announcements(self._announce)
        while (done := state.next_done()) is not None:
            if self._outcome.cause is None:
                self._large.exposer.on_done(*done)
        if self._outcome.cause is None and state.said & 1 << FrameKind.END:
            if not (self._receiver.ended or self._outcome.closing):
                self._link.note("the peer has closed")
            self._receiver.end(ended_error)
        if self._outcome.cause is None and state.said & 1 << FrameKind.ABORT:
            error = aborted_error(state.peer_reason)
            if state.peer_reason and VIOLATIONS.may_log(self._facts["peername"]):
                _log.warning("connection with %s: %s", self._link.peer_name(), error.args[1])
            self._over(error)

    def _announce(self, length: int, body: bytes, imm: int | None) -> None:
        if self._outcome.cause is None:
            self._receiver.window.fit_fragments(length)
            self._large.announce(length, body, imm)

    def _on_sent(self, slot: int) -> None:
        self._sender.on_sent(slot)

    def _on_unexplained(self) -> None:
        self._sender.hold()

    def _on_ended(self, number: int, record: WCRecord) -> None:
        self._one_sided.operations.on_ended(number, record)

    def _on_cm_event(self, event: ConnectionEvent) -> bool:
        if self._events is not None:
            self._events.publish(event)
        if event.type in _NO_END:
            return True
        self._link.completions.sweep()
        self._take_first()
        self._on_events(EVENT_ROOM | EVENT_FAILED)
        self._ending.peer_left()
        if not self._outcome.closing:
            if event.type == EventType.DISCONNECTED and not self.config.raw:
                self._gone(vanished_error())  # END or ABORT would have arrived before it
            else:
                self._gone(cm_error(event.type.name, event.status, event.private_data))
        # True takes the event: the channel, which all connections share, would keep it otherwise.
        # A step of the handshake that waits for the event gets it all the same.
        return True

    def _on_failed(self) -> None:
        failure = self._link.failure
        assert failure is not None
        if self._keepalive is not None:
            self._keepalive.failed()
        self._ending.wake()
        if not isinstance(failure, ProtocolError):
            self._take_first()
        self._gone(failure)

    def _take_first(self) -> None:
        """Act on what came before the end, which a drain or a sweep tells only after failures."""
        self._on_events(EVENT_FRAMES | EVENT_SENT)

    def _gone(self, error: BaseException) -> None:
        """End the connection, which the adapter has lost; after END the peer has closed it."""
        if self._receiver.ended and not isinstance(error, (ProtocolError, DeviceRemovedError)):
            error = left_error()
        self._over(error)

    def _say_aborted(self, reason: int = AbortReason.PROGRAM) -> bool:
        """Send ABORT, when a slot is free; False if the connection is raw, or not open."""
        if self.config.raw or self._first_look is None or self._outcome.cause is not None:
            return False
        self._sender.control(FrameKind.ABORT, reason)
        return True

    def _last_word(self, cause: BaseException) -> bool:
        reason = abort_reason(cause)
        if reason is None or not self._say_aborted(reason):
            return False
        self._goodbye.abort()
        return True

    async def _deliver(self) -> None:
        """Wait until posted messages have arrived; the loop ends, and no END or ABORT is sent."""
        await self._goodbye.deliver()

    # End

    def _end(self) -> None:
        if self._ends is not None:
            _ = self._known  # while there is a device to ask
        self._over(closed_error())
        self._sender.settle()

    def _over(self, cause: BaseException) -> None:
        """Note the first cause of the end, and have all calls raise it."""
        outcome = self._outcome
        if outcome.cause is not None:
            return
        outcome.cause = cause
        if "opened_at" in self._facts and self._broke_by is not None:
            tally.count("connections_lost")
        self._link.note("ends: %s", reason_of(cause))
        self._state.over = True
        if self._established is not None and not self._established.done():
            self._established.set_exception(outcome.failure())
            self._ending.met = False  # the end waits for no answer of this client
        self._sender.fail(outcome.failure)
        if self._link.failure is not None or isinstance(cause, ResourceClosedError):
            self._sender.settle()
        if self._own_large is not None:
            self._own_large.fail(outcome.failure)
        self._receiver.fail(outcome.failure)
        if self._own_one_sided is not None:
            self._own_one_sided.operations.explained()
        self._begin_end()

    def _begin_end(self) -> None:
        leave = functools.partial(self._goodbye.leave, self._drained, self._end)
        self._ending.begin(LastSteps(leave, self._stop_parts, self._end))

    async def _drained(self) -> None:
        if self._own_large is not None:
            await self._own_large.drained()

    async def _stop_parts(self) -> None:
        if tasks := self._stop():
            await asyncio.wait(tasks)

    def _stop(self) -> list[asyncio.Task[None]]:
        if self._keepalive is not None:
            self._keepalive.stop()
        elif self._first_look and (wheel := self._link.common.wheel) is not None:
            wheel.discard(self, self._first_look)
        return [] if self._own_large is None else self._own_large.stop()

    def _part(self) -> None:
        """Drop the references to this: everything was closed."""
        self._state.handler = None
        self._receiver.part()
        vars(self).pop("send", None)
        self._stop()
