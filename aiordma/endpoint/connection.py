"""Connection: messages to and from one peer, and access to the peer's memory.

Theory of operation
    A connection is made of parts.  `Link` owns the queue pair and what belongs to it.  `Sender` and
    `Receiver` have the tasks that wait to send and to receive, `LargeMessages` has the messages
    that the peer fetches itself, `OneSided` does READs, WRITEs and atomics, and `Keepalive` detects
    a silent peer.  This class passes the calls of the program to the parts, and distributes the
    events of the link among them.

    Whatever ends a connection (`close()`, `abort()`, a disconnection, a failed work request), the
    path is the same: `_over` records the first cause and has all parts raise it from then on, and
    `Ending` does the rest.
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
from typing import Any, Protocol, Self, overload

from aiordma._core import (
    EVENT_FAILED,
    EVENT_FRAMES,
    EVENT_IDLE,
    EVENT_NOTED,
    EVENT_ROOM,
    EVENT_SENT,
    FOR_PYTHON,
    Message,
    Messages,
)
from aiordma.arguments import Buffer, bytes_of, fitting, parts_of, whole
from aiordma.cm.address import Address
from aiordma.cm.connection_event import ConnectionEvent
from aiordma.cm.connection_id import ConnectionId
from aiordma.cm.enums import EventType
from aiordma.endpoint import facts
from aiordma.endpoint.batch import Batch
from aiordma.endpoint.carrier import FrameCarrier
from aiordma.endpoint.config import ConnectionConfig
from aiordma.endpoint.events import ConnectionEvents, EventHub
from aiordma.endpoint.goodbye import Goodbye
from aiordma.endpoint.large.messages import LargeMessages
from aiordma.endpoint.lease import Lease
from aiordma.endpoint.link import Link
from aiordma.endpoint.notes import NoteBook
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
from aiordma.endpoint.sending import Sender
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
    result_lost_error,
)
from aiordma.link import tally
from aiordma.link.adapter_side import reason_of
from aiordma.link.ending import Ending, LastSteps
from aiordma.link.keepalive import Keepalive
from aiordma.link.log_share import VIOLATIONS
from aiordma.link.tally import ConnectionStats
from aiordma.link.transport_socket import shown
from aiordma.logs import log_of
from aiordma.loop import background, fork
from aiordma.loop.coroutines import markcoroutinefunction
from aiordma.loop.running import check_loop, check_thread, from_finalizer
from aiordma.loop.turns import Turns
from aiordma.loop.uncopied import Uncopied
from aiordma.memory.governor import Budget
from aiordma.memory.remote import RemoteRegion
from aiordma.requests.calls import Calls
from aiordma.requests.exchange import Exchange
from aiordma.requests.served import Requests
from aiordma.verbs.enums import Access, Opcode
from aiordma.verbs.mr import MemoryRegion
from aiordma.verbs.pd import ProtectionDomain
from aiordma.verbs.qp import QueuePair
from aiordma.verbs.wc import WCRecord
from aiordma.verbs.wr import SGE

__all__ = ["Connection", "EndWatcher"]

_log = log_of("connection")
#: The setting that limits silence, as the error of a connection that was given up names it.
_SILENCE = "idle_timeout_s of this side's ConnectionConfig"
_RAW_SILENCE = f"raw_{_SILENCE}"
# Events of the connection manager that do not mean the end of the connection.
_NO_END = (EventType.ESTABLISHED, EventType.TIMEWAIT_EXIT, EventType.ADDR_CHANGE)


async def _no_send(buf: Any, imm: int | None = None) -> None:
    """Replaces `send` once the connection carries requests."""
    raise reserved_error("send()")


class EndWatcher(Protocol):
    """What sends over a connection and is told when nothing can be sent over it any more."""

    def _on_end(self, connection: Connection, error: BaseException) -> None: ...


class Connection(Uncopied):
    """A connection to one peer; made by `connect`, `Listener.accept` or `ConnectRequest.accept`.

    It belongs to the event loop in which it was made.  `async with` closes it.  If the block ends
    with an exception, the connection is aborted instead, so that the peer does not mistake half of
    a conversation for all of it.  The peer's error then names the class of the exception; its text,
    which may be a secret, stays here.  A connection that is not closed stays open, without a
    `ResourceWarning`, until it breaks or its event loop ends, even if nothing refers to it.

    Attributes:
        config: The settings of the connection.
        private_data: Bytes that the peer's program sent with the handshake.
    """

    _request_budget: Budget | None  # a listener sets its own
    # Addresses of the peer and of this side.  Empty: not asked for yet.  None: no handshake yet.
    _ends: tuple[Address | None, Address | None] | tuple[()] | None
    _theirs: Hello | None  # the peer's half of the handshake
    _established: asyncio.Future[None] | None  # ends with the first frame of the client
    _keepalive: Keepalive | None  # None until the end of the handshake
    _own_ending: Ending | None
    _own_goodbye: Goodbye | None
    _own_large: LargeMessages | None
    _own_one_sided: OneSided | None
    _own_notes: NoteBook | None  # None until memory is exposed with notes
    _events: EventHub | None
    _senders: set[weakref.ref[EndWatcher]] | None  # to be told when nothing can be sent any more

    def __init__(self, link: Link, config: ConnectionConfig) -> None:
        self.config = config
        self.private_data: bytes = b""
        self._link = link  # it is started at the end of this method
        self._state = link.state
        self._receiver = Receiver(link, config)
        self._sender = Sender(link, config, self._receiver)
        self._outcome = Outcome()
        self._facts: dict[str, Any] = {}
        # Set here, and not as attributes of the class: an attribute that an instance gets later can
        # cost it a dict of its own.
        self._request_budget = self._ends = self._theirs = None
        self._established = self._keepalive = self._events = self._senders = None
        self._own_ending = self._own_goodbye = self._own_large = self._own_one_sided = None
        self._own_notes = None
        self._reads = 0  # how many RDMA READs the peer serves at a time
        # Of writes with an immediate that are not a single post of C; made for the first.
        self._telling: Turns | None = None
        fork.guard_public(self)
        link.cm_id._sink = self._on_cm_event
        link.state.set_handler(self._on_events)
        link.start(self)

    @property
    def _one_sided(self) -> OneSided:
        if self._own_one_sided is None:
            self._own_one_sided = OneSided(self._link, self.config, self._outcome)
        return self._own_one_sided

    @property
    def _notes(self) -> NoteBook:
        if self._own_notes is None:
            self._own_notes = NoteBook(self._link, self._receiver, self._outcome)
        return self._own_notes

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

    @property
    def _ending(self) -> Ending:
        if self._own_ending is None:
            self._own_ending = Ending(self._link)
        return self._own_ending

    # Messages

    # `imm` is not keyword-only: its default would then cost 250 instructions in Python 3.11.
    @markcoroutinefunction
    def send(
        self, buf: Buffer | SGE | Sequence[Buffer], imm: int | None = None
    ) -> Coroutine[Any, Any, None]:
        """Send one message.

        Args:
            buf: Any contiguous object with the buffer protocol; may be empty.  Or a list or tuple
                of such objects, for instance a header and a body, which arrive as one message
                without being joined first.  Or a part of the `Memory` that the connection shares;
                a part of more than 256 KiB is neither copied nor registered.
            imm: A 32-bit number that arrives as `Message.imm`.

        When the call returns, the bytes of `buf` may be changed again.  A message of up to
        `config.eager_size` bytes is copied.  So is one of up to `config.rendezvous_threshold`, if
        there is room for all of it.  Any other message has been read by the peer when the call
        returns.  Use `flush()` to wait until all messages have reached the peer's adapter.

        A send waits while the peer holds `config.recv_depth` messages, or
        `config.receive_buffer_size` bytes of large ones, that its program has not received.  So two
        programs that both send without receiving wait for each other forever, unless
        `config.stall_timeout_s` is set: receive in a separate task.  After five seconds of such a
        wait a warning says so, once for each connection.

        The first two messages of an iteration of the event loop are posted at once.  Further ones
        are posted together, at the end of the iteration or when there are 16 of them.  So a task
        that blocks the loop after sending delays them, and one that stops the loop loses them.

        Messages arrive in the order of the calls, even if several tasks send.  There is one
        exception: a message of up to `config.eager_size` bytes may overtake a larger one of another
        task that is still waiting.

        Raises:
            TypeError: `buf` is no buffer.
            ValueError: `imm` does not fit into 32 bits, or the part belongs to other memory.
            MessageTooLargeError: The message is larger than the peer accepts; nothing was sent.
            ResourceClosedError: The connection was closed by this side, or `send_eof` was called.
            ConnectionLostError: It broke, or the peer closed it.  ProtocolError, which is one: the
                peer broke the protocol; of all others `__cause__` has the reason.
            TimeoutError: The peer is alive, but has accepted nothing for `config.stall_timeout_s`.

        Cancellation: the message is not sent; but a large one may still be received.  A message of
        more than 256 KiB is not copied, and its buffer stays exported until the adapter is done
        with it.  If `buf` belongs to a `Message`, that may be released before; its memory is freed
        when the adapter is done.
        """
        return self._state.sending(self, buf, imm)

    async def _send_in_python(
        self, buf: Buffer | SGE | Sequence[Buffer], imm: int | None, code: int
    ) -> None:
        """Send a message that C has left to Python, or raise for the errno `code` of a post."""
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
            code = FOR_PYTHON if opening else self._state.send(parts, imm)
            if code > 0:
                self._sender.check(code)
            elif code and size <= self._state.eager_size:  # it may have to wait for room
                if isinstance(buf, (list, tuple)):  # it waits with a copy
                    joined = memoryview(b"".join(parts))
                    for part in parts:
                        part.release()
                    parts = [joined]
                await self._sender.data(parts[0], imm)
            elif code and (opening or not self._sender.in_fragments(parts, size, imm)):
                self._sender.require_open()
                await self._large.exposer.send(parts, size, imm, opening)
        except BaseException:
            # The traceback keeps this frame, which would keep the caller's buffers exported.
            for part in parts:
                part.release()
            raise

    @markcoroutinefunction
    def recv(self) -> Coroutine[Any, Any, Message]:
        """Receive the next message, in the order in which the peer sent them.

        Several tasks may wait; they are served first come, first served.

        Raises:
            ConnectionEndedError: The peer closed in good order; all its messages were received.
            ResourceClosedError: The connection was closed by this side.
            ConnectionLostError: It broke, as for `send`.  Messages that had arrived are returned
                first.

        Cancellation: no message is lost.
        """
        return self._state.receiving(self)

    async def _recv_in_python(self, waited: bool) -> Message:
        """Receive a message that C has left to Python; `waited`: the task has waited in C first."""
        self._check_loop()
        if self._carries_requests:
            raise reserved_error("recv() and `async for`")
        return await self._receiver.recv(waited)

    @markcoroutinefunction
    def recv_into(self, buffer: Buffer) -> Coroutine[Any, Any, int]:
        """Receive the next message into memory of the program, as `recv_into` of a socket.

        Args:
            buffer: Any writable, contiguous object with the buffer protocol, such as a bytearray, a
                numpy array, an mmap or shared memory.  It has to be at least as large as the
                message.  It stays exported until the call ends, so a bytearray cannot be resized.

        Returns:
            The size of the message in bytes.  The message begins at the start of the buffer, and
            the bytes behind it keep their value.  There is no way to learn its immediate.

        A message of more than 256 KiB that was not fetched before is read directly into the buffer
        by the adapter, without a copy.  Any other message is copied once, and so is one for memory
        that cannot be registered, which may be the case for a mapped file.  On iWARP messages are
        copied twice.  To make direct reads possible, the library stops fetching messages of more
        than 256 KiB ahead with the first call of `recv_into`, until `recv` receives one: the peer's
        `send` then waits for this call.

        Several tasks may wait in `recv` and `recv_into`; they are served first come, first served.
        While one of them waits for the rest of a large message, the others wait for it.

        Raises:
            TypeError: `buffer` is no buffer, or holds Python objects.
            ValueError: The buffer is empty or not contiguous.
            BufferError: It is read-only.
            MessageTooLargeError: The message is larger than the buffer; its `size` says how large.
                It remains the next message, for a call with a larger buffer, or for `recv`.
            OSError: The buffer cannot be registered.  ENOMEM usually means that RLIMIT_MEMLOCK is
                too low.  The message remains the next one.
            ConnectionEndedError, ResourceClosedError, ConnectionLostError: As `recv`.

        After an exception the content of the buffer is undefined, but nothing more is written.

        Cancellation: no message is lost; a large message is read again by the next call.  The call
        first waits until no READ writes to the buffer any more.  If that takes more than 30
        seconds, the connection is aborted, and the call waits for its end, at most a minute.  If
        the kernel has still not ended it then, the buffer stays exported.
        """
        return self._state.receiving_into(self, buffer)

    async def _recv_into_in_python(self, buffer: Buffer, waited: bool) -> int:
        """Do what C has left to Python: all but small messages, and to refuse; as `_recv_...`."""
        self._check_loop()
        if self._carries_requests:
            raise reserved_error("recv_into()")
        view = bytes_of("the buffer", buffer, writable=True)
        with view:
            if not view:
                msg = "the buffer is empty: an empty message needs room for a byte, too"
                raise ValueError(msg)
            return await self._receiver.recv_into(view, waited)

    def __aiter__(self) -> Messages:
        return self._state.messages(self)

    @markcoroutinefunction
    def __anext__(self) -> Coroutine[Any, Any, Message]:
        """Receive messages until the peer or this side closes; a broken connection raises."""
        return self._state.messages(self).__anext__()

    async def _next_in_python(self, waited: bool) -> Message:
        try:
            return await self._recv_in_python(waited)
        except (ConnectionEndedError, ResourceClosedError):
            raise StopAsyncIteration from None

    def _receive_abandoned(self) -> None:
        """Called by C when the wait of a task for a message was ended by an exception."""
        self._receiver.resume_next()

    # Requests.  The first call of `request` or `requests` reserves the connection for requests.

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

        Many requests may be in progress at the same time, in both directions.  The peer receives
        them with `requests()` and answers in any order.  While it has as many as it accepts, a
        further request waits in line on this side.

        Args:
            buf: Any contiguous object with the buffer protocol; may be empty.  It must not be
                changed before the answer has arrived.
            timeout: Seconds until the answer has to be here; the peer sees the rest of them as
                `Request.remaining`.  Zero or less means that the deadline has already passed, and
                nothing is sent.  None means no limit.  The default is `config.request_timeout_s`,
                which is not sent to the peer.
            into: A writable buffer for the answer, as for `recv_into`, which stays exported until
                the call ends.  None: the answer is returned as a message.

        Returns:
            The answer, which belongs to the program; its `imm` has no meaning.  With `into`, the
            size of the answer in bytes; it begins at the start of the buffer.

        An answer of more than 256 KiB is read directly into `into` by the adapter, without a copy.
        A smaller one is copied once, as by `recv_into`.

        Raises:
            TypeError: `buf` or `into` is no buffer, or `timeout` is no number.
            ValueError: `into` is empty or not contiguous.
            BufferError: `into` is read-only.
            MessageTooLargeError: The request is larger than the peer accepts, and nothing was sent.
                Or the answer is larger than `into`; then the exception has its `size`, and the
                message as `answer`.
            RequestDeadlineError: There was no answer in time; this is a TimeoutError, too.
            RequestRefusedError: The peer has not served the request; a subclass says why.
            RequestError: The peer's handler raised an exception.
            NotSupportedError: The connection is raw.
            RuntimeError: A task waits in `recv()`, or this is not the connection's event loop.
            ResourceClosedError, ConnectionLostError, TimeoutError: As `send` and `recv`.  The
                attribute `request_sent` of a ConnectionLostError says whether the peer may have
                received the request.

        Cancellation: the peer is notified, and can see it as `Request.canceled`.  With `into`, the
        call only ends when nothing writes to the buffer any more: it waits for READs in progress,
        as `recv_into` does.  The same holds at the deadline.
        """
        exchange = self._receiver.exchange
        if exchange is None or asyncio._get_running_loop() is not exchange.loop:
            exchange = self._exchange  # makes it, or says what is wrong
        calls = exchange.calls
        if tally.observed:
            return self._request_observed(calls, buf, timeout, into)
        return calls.request(buf, timeout, into)

    async def _request_observed(
        self, calls: Calls, buf: Any, timeout: float | EllipsisType | None, into: Any
    ) -> Message | int:
        # The coroutine of the request is made in here.  If it were made by the caller, a task that
        # is canceled before its first step would leave it unawaited.
        with tally.Operation("request", self._peer_attributes):
            answer: Message | int = await calls.request(buf, timeout, into)
            return answer

    # A warning about a coroutine that was never awaited names it by this.
    _request_observed.__qualname__ = "Connection.request"

    def _peer_attributes(self) -> dict[str, Any]:
        return tally.peer_attributes(self._facts["peername"])

    def requests(self, *, limit: int = 256, limit_bytes: int = 64 << 20) -> Requests:
        """Serve requests: an async iterator over the peer's, until the connection is closed.

        Args:
            limit: How many requests the program may have at a time, 1 to 1,000,000.  The peer's
                library holds further requests back.  It may send a request as soon as it has an
                answer, before this side knows that the answer has arrived; so up to `limit` more
                requests may wait here.  A peer that sends more than that breaks the protocol.
            limit_bytes: How many bytes the bodies of these requests may have in total.  A single
                request may have more; a request beyond the limit is refused.

        Raises:
            TypeError, ValueError: A limit is invalid.
            NotSupportedError: The connection is raw.
            RuntimeError: A task waits in `recv()`, or this is not the connection's event loop.
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
            send = functools.partial(Connection.send, self)  # `self.send` is replaced below
            carrier = FrameCarrier(
                self._link, self._receiver, self._outcome, send, self._require_size,
                self._request_budget, weakref.ref(self), self.config.request_timeout_s,
            )  # fmt: skip
            exchange = self._receiver.reserve(functools.partial(Exchange, self._link.loop, carrier))
            # Replaced, so that the sends of connections without requests need no check.
            vars(self)["send"] = _no_send
            self._state.begin_requests()
            self._tell_senders(functools.partial(reserved_error, "a Broadcast"))
        return exchange

    @property
    def _carries_requests(self) -> bool:
        return self._receiver.exchange is not None

    @property
    def _owes_no_answer(self) -> bool:
        """Whether it carries requests, and each that the program has got has its answer."""
        exchange = self._receiver.exchange
        return exchange is not None and exchange.served.all_answered

    def _require_size(self, size: int) -> None:
        if size > self._state.eager_size:
            self._large.exposer.check_size(size)

    # Memory of the peer, and of this side

    async def read(
        self, remote: RemoteRegion, into: Buffer | MemoryRegion | SGE, *, offset: int = 0
    ) -> int:
        """RDMA READ: fill `into` with memory that the peer has exposed; its program does nothing.

        Args:
            remote: The peer's memory, as the peer has named it.
            into: A writable buffer, which is filled completely.  Or a region, or an `SGE`, of
                memory that was registered with `register`; the adapter then writes directly into
                it.  Nothing else may use this memory until the call has returned: on a software
                adapter its last 8 bytes are random until the data arrive, and a `write` from there
                would send them.
            offset: The first byte to read, counted from the start of `remote`.

        Returns:
            The number of bytes read.

        Raises:
            ValueError: The bytes are not all inside `remote`.
            PermissionError: `remote` is not exposed for reading.
            BufferError: `into` is read-only.
            ResultLostError: The adapter reported completion before the last bytes had arrived, as
                Soft-RoCE may if packets are lost or late.  The connection breaks soon after: read
                again over another connection.
            StaleRegionError: `remote` is memory of an earlier life of the peer's program, or of
                another connection, or its exposure has ended.  Nothing was posted, and the
                connection goes on: ask the peer for the region again.
            RemoteAccessError: The peer's adapter refused the access, because the lease has ended or
                the key is wrong.  This ends the connection.
            TimeoutError: The peer has not said for 30 seconds which memory is its own.
            CompletionError: The peer's adapter did not answer, because its host or the link is
                down.  This ends the connection.  It is no ConnectionError; other calls raise a
                ConnectionLostError with this as its cause.
            ConnectionLostError, ResourceClosedError: The connection was over before, or ended for
                another reason.  Also if the peer's software iWARP adapter refused the access, which
                it does without giving a reason.

        Cancellation: ends the wait; the buffer stays exported, and may be written to, until the
        adapter is done with it.
        """
        # C handles the common case; it returns None for anything else, and in a wrong thread.
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
            remote: The peer's memory, as the peer has named it.
            data: A buffer; or a region, or an `SGE`, of memory registered with `register`.
            offset: Where to put the first byte, counted from the start of `remote`.
            imm: A 32-bit number.  The peer's program gets it after the data have arrived: as a note
                if it has exposed the memory with `notes=True` (`Lease.notes`), and otherwise as
                an empty message with this number.  The number cannot overtake the data.  Without
                `imm`, the program is not notified.

        Returns:
            The number of bytes written.  They have reached the peer's adapter; but software iWARP
            reports success before the peer has checked the access.

        Writes with `imm` that are under way at the same time are reported in the order of the
        calls; on a raw connection, await each before the next.  A message that is sent before this
        call returns, for instance by another task, may arrive before the data.  So await the write
        before sending a message about it, or use `imm`.

        A write with `imm` takes the place of a message at the peer, and waits for it as `send`
        does.  On a connection that carries requests there are no messages, but notes.

        Raises and cancellation: as `read`; with `imm` also as `send`.  A canceled write may still
        take place, and so may its note.
        """
        # C reports a write in the same post, which must not overtake one that is reported here.
        if imm is None or (
            not self._telling
            and (self._receiver.exchange is None or getattr(remote, "notes", False))
        ):
            operation = self._state.write(remote, data, offset, imm)
            if operation is not None:
                try:
                    return await operation
                except FlushedError as exc:
                    raise self._one_sided.operations.lost() from exc
        noted = False
        if imm is not None:
            imm = fitting("imm", imm, 32)
            noted = isinstance(remote, RemoteRegion) and remote.notes
            if self._carries_requests and not noted:
                raise reserved_error("write() with an immediate to memory without notes")
            self._sender.require_open()
        self._check_loop()
        write = Opcode.RDMA_WRITE
        if imm is None or self.config.raw:
            return await self._one_sided.transfer(write, remote, data, offset, imm)
        if self._telling is None:
            self._telling = Turns()
        turn = self._telling.take()
        try:
            size = await self._one_sided.transfer(write, remote, data, offset)
            await turn
            if noted:
                await self._sender.note(remote.rkey, remote.addr + offset, size, imm)
            else:
                await self.send(b"", imm=imm)
        finally:
            self._telling.give_back(turn)
        return size

    def batch(self) -> Batch:
        """Begin a batch: many READs and WRITEs, which are posted together and awaited once.

        Returns:
            The batch, to add operations to, and to submit.

        Raises:
            ConnectionLostError, ResourceClosedError: The connection is over.
            OSError: The completion queue cannot grow, because there is no memory.
        """
        self._check_loop()
        return Batch(self._link, self._outcome, self._one_sided, self.config, self._check_loop)

    async def fetch_add(self, remote: RemoteRegion, value: int, *, offset: int = 0) -> int:
        """Add to an unsigned 64-bit integer in memory of the peer, atomically.

        The operation is atomic with respect to other remote atomics on the same adapter of the
        peer, and to nothing else: neither to a `write` of any connection, nor to the peer's own
        program.

        Args:
            remote: The peer's memory, exposed with `atomic=True`.
            value: The number to add, modulo 2**64, so that -1 subtracts one.
            offset: Where the integer is; its address has to be a multiple of 8.

        Returns:
            The integer before the addition.  The peer is assumed to be little-endian.

        Raises:
            TypeError: `value` is no integer.
            ValueError: The integer is not aligned, or not inside `remote`.
            NotSupportedError: The device has no atomics, as no iWARP device has.
            ResultLostError: The adapter reported completion without the result, as Soft-RoCE may if
                packets are lost.  The addition took place at most once, and the old value is
                unknown; the connection stays open.
            Others: as `read`.

        Cancellation: ends the wait; the addition may take place.
        """
        # As in `read`.
        operation = self._state.fetch_add(remote, value, offset)
        if operation is not None:
            try:
                before = await operation
            except FlushedError as exc:
                raise self._one_sided.operations.lost() from exc
            if before is None:
                raise result_lost_error("fetch_add")
            return before
        self._check_loop()
        value = whole("value", value) % (1 << 64)
        add = Opcode.ATOMIC_FETCH_AND_ADD
        return await self._one_sided.atomic(add, remote, offset, value, 0)

    async def compare_swap(
        self, remote: RemoteRegion, expected: int, desired: int, *, offset: int = 0
    ) -> int:
        """Store `desired` in an integer of the peer if its value is `expected`, atomically.

        It is atomic in the same sense as `fetch_add`.  After a ResultLostError only the integer
        itself can tell whether the swap took place, so store values that identify the writer.

        Returns:
            The integer before the operation; the swap took place if it equals `expected`.

        `remote`, `offset` and cancellation are as for `fetch_add`.  It raises the same exceptions,
        and ValueError for a number that is not in 0..2**64-1.
        """
        operation = self._state.compare_swap(remote, expected, desired, offset)
        if operation is not None:
            try:
                before = await operation
            except FlushedError as exc:
                raise self._one_sided.operations.lost() from exc
            if before is None:
                raise result_lost_error("compare_swap")
            return before
        self._check_loop()
        swap = Opcode.ATOMIC_CMP_AND_SWP
        return await self._one_sided.atomic(swap, remote, offset, expected, desired)

    async def register(
        self, buf: Buffer | int, access: Access = Access.LOCAL_WRITE
    ) -> MemoryRegion:
        """Register memory for transfers of this connection, so that their bytes are not copied.

        Args:
            buf: A buffer, which stays exported until the region is destroyed; or a number of
                bytes, for new page-aligned memory; or GPU memory, as an object with
                `__cuda_array_interface__` or DLPack, which is kept until the region is destroyed.
            access: The access flags of the region.  To give rights to the peer, use `expose`.

        Returns:
            The region.  Use `async with`, or call `close()` at any time; otherwise it is closed
            with the connection.  A region that is garbage collected before is closed with a
            ResourceWarning, and its memory is freed when the last transfer has ended.  If `access`
            has a remote right, the peer may know the key, so such a region stays registered until
            it is closed, even if nothing refers to it.  On iWARP the peer learns the key with the
            first `read` into the region, and can write there until the region is closed.

        Raises:
            NotSupportedError: The driver of the adapter, or of the GPU, does not support dmabuf.
            OSError: The memory cannot be registered.  ENOMEM usually means that RLIMIT_MEMLOCK is
                too low.
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
        notes: bool = False,
        timeout: float | None = None,
    ) -> Lease:
        """Expose memory to the peer for as long as an `async with` block lasts.

        `async with` returns the `RemoteRegion` that names the memory; send its `to_bytes()` to the
        peer.  `Lease.view` gives access to the bytes.  When the block has ended, no access is
        possible any more.  A later access of the peer is refused: by its own library with a
        StaleRegionError, if it has heard of the end in time; otherwise by the adapter, which ends
        the connection.  So let the peer say when it is done.

        Args:
            buf: A buffer, or a number of bytes for new memory.  A buffer has to be writable, unless
                the peer may only read.  Or a part of the `Memory` that the connection shares,
                which is not registered again; `Memory` explains how well each adapter enforces
                such a lease.
            read: The peer may read.
            write: The peer may write.
            atomic: The peer may use atomics; NotSupportedError on iWARP.
            notes: The peer's writes with `imm` arrive as notes (`Lease.notes`), and not as
                messages.  For memory that the peer may write to.
            timeout: Seconds after which the lease ends even if the block has not; None: never.

        Raises:
            TypeError, ValueError: `buf` is no buffer, no right is given, `timeout` is no number,
                the part belongs to memory that the connection does not share, or there are to be
                notes of memory that the peer may not write to.
            BufferError: The buffer is read-only, and the peer may not only read.
            NotSupportedError: The adapter does not confine a lease to its part, and a right is not
                in `trusted` of the `Memory`.  Or the connection is raw, and has no notes.
            RdmaOSError: On entering the block: the part overlaps one that is lent to another
                connection, and one of them is for writing.
            TimeoutError: On entering the block: `timeout` is zero or less.  Nothing is exposed.
            OSError: On entering the block: the memory cannot be registered.
            ResourceClosedError, ConnectionLostError: The connection is over.

        Cancellation: on entering the block, nothing is exposed; on leaving it, the lease ends all
        the same.
        """
        self._check_loop()
        self._outcome.require_open()
        if notes and not write:
            msg = "notes tell what the peer has written: they need write=True"
            raise ValueError(msg)
        if notes and self.config.raw:
            text = "a raw connection has no notes: its peer's writes with imm arrive as messages"
            raise NotSupportedError(errno.EOPNOTSUPP, text)
        return self._one_sided.lease(
            buf,
            timeout,
            read=read,
            write=write,
            atomic=atomic,
            notes=self._notes if notes else None,
        )

    async def flush(self) -> None:
        """Wait until every message sent so far has reached the peer's adapter.

        It succeeds even if the connection has ended since, as long as all messages had arrived
        before.  If the connection ends while a large message is in progress, the messages behind
        that one are lost with it.

        Raises:
            ConnectionLostError: The connection broke, or the peer closed it, before this side's
                adapter was told that all messages have arrived.
            ResourceClosedError: This side has closed the connection.

        Cancellation: ends the wait.
        """
        self._check_loop()
        if isinstance(self._outcome.cause, ResourceClosedError):
            raise self._outcome.failure()
        await self._sender.flush(self._state.to_flush)

    async def send_eof(self) -> None:
        """Tell the peer that no more messages follow; this side can still receive.

        After the last message, the peer's `recv` raises ConnectionEndedError, and its `async for`
        ends.  The peer can go on sending; `close` ends the connection.  The call returns when
        everything has reached the peer's adapter and the peer has read the large messages, even if
        the connection has ended since.  Idempotent.

        Raises:
            NotSupportedError: The connection is raw, and such a connection has no end of messages.
            ConnectionLostError: The connection broke before that.  If the peer has closed it in
                good order, perhaps even before this call, this is raised only if messages were
                lost, and not because the peer no longer gets the end of messages.
            ResourceClosedError: This side has closed the connection.

        A later `send` raises ResourceClosedError, and so does a `send` that waits in another task.

        Cancellation: ends the wait.  This side sends no more messages, but the peer may not be told
        before `close`.
        """
        self._check_loop()
        if self.config.raw:
            text = "a raw connection has no end of messages: close it"
            raise NotSupportedError(errno.EOPNOTSUPP, text)
        outcome = self._outcome
        if outcome.closing or (self._goodbye.sends_before_end is None and not outcome.left):
            outcome.require_open()
        if outcome.cause is None:
            self._refuse_sends(eof_error)
        await self._goodbye.say_end(self._drained)

    def _refuse_sends(self, failure: Callable[[], BaseException]) -> None:
        self._sender.refuse(failure)
        if self._own_large is not None:
            self._own_large.refuse(failure)
        self._tell_senders(failure)

    async def close(self) -> None:
        """Close in good order: sent messages arrive, the peer sees the end, resources are freed.

        It returns within `config.close_timeout_s` plus a few seconds, whatever the peer does.
        Idempotent; a second call waits for the first.  The only exception it raises is
        RuntimeError, if it is called in another event loop.

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
            outcome.closing = True
            self._goodbye.answered = not self._carries_requests or self._owes_no_answer
            self._state.advance("SHUT")
            self._refuse_sends(outcome.failure)
            self._receiver.drop_all()
            self._receiver.fail(outcome.failure)
            self._end_notes(drop=True)
        self._begin_end()

    def _end_notes(self, *, drop: bool = False) -> None:
        if self._own_notes is not None:
            self._own_notes.end(drop=drop)

    def _stop_receiving(self) -> None:
        """Let the program receive what has arrived, but nothing more; refuse later requests."""
        if (exchange := self._receiver.exchange) is not None:
            exchange.served.stop()
        elif not self._outcome.decided:
            self._receiver.end(closed_error)

    def abort(self) -> None:
        """End the connection at once; the peer sees it as lost.  `wait_closed()` waits for the end.

        Messages that were posted to the adapter may still arrive, within `config.close_timeout_s`.
        A large message that the peer has not read yet is lost.

        Raises:
            RuntimeError: The connection's event loop runs in another thread; nothing was done.
        """
        self._abort(None)

    def _abort(self, kind: type[BaseException] | None) -> None:
        """As `abort`; `kind` is the class of an exception that the program has raised."""
        check_thread(self._link.loop, "connection")
        self._outcome.closing = True
        self._state.advance("SHUT")
        self._end_notes(drop=True)
        if not self._goodbye.abort() and self._outcome.cause is None:
            self._state.post_chain()  # an error makes no difference: the connection ends anyway
            if kind is not None:
                self._state.leave_words(kind.__name__.encode(errors="replace"))
            self._say_aborted()
            self._over(closed_error())
            self._receiver.drop_all()

    async def wait_closing(self) -> None:
        """Wait until the connection is lost, or is being closed by either side.

        It returns as soon as `is_closing` is true: for a program that has to take back what the
        peer held.  `wait_closed` returns later, by seconds if the peer does not answer.

        Cancellation: ends the wait.
        """
        await self._ending.wait_begun()

    async def wait_closed(self) -> None:
        """Wait until the connection is over and all its resources are freed.

        Cancellation: ends the wait.
        """
        await self._ending.wait()

    def is_closing(self) -> bool:
        """Whether the connection is being closed, or is closed or lost."""
        outcome = self._outcome
        return outcome.closing or outcome.cause is not None  # without a call: for each request

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        if kind is not None:
            self._abort(kind)
        await self.close()

    # Objects that send over this connection among others (service/broadcast.py).

    def _add_sender(self, sender: weakref.ref[EndWatcher]) -> None:
        if self._senders is None:
            self._senders = set()
        self._senders.add(sender)

    def _remove_sender(self, sender: weakref.ref[EndWatcher]) -> None:
        if self._senders is not None:
            self._senders.discard(sender)

    def _tell_senders(self, failure: Callable[[], BaseException]) -> None:
        senders, self._senders = self._senders, None
        for reference in senders or ():
            if (sender := reference()) is not None:
                sender._on_end(self, failure())

    # Facts

    def events(self) -> ConnectionEvents:
        """Iterate over what happens around the connection from now on, until it is closed.

        The async iterator yields events of the connection manager (`cm.ConnectionEvent`) and of the
        device (`verbs.DeviceEvents`): a port that goes down or up, a changed address, the removal
        of the device (`rdma_get_cm_event(3)`, `ibv_get_async_event(3)`).  They are for information:
        the library handles the end of the connection by itself.

        Raises:
            RuntimeError: This is not the connection's event loop.
        """
        self._check_loop()
        if self._events is None:
            self._events = EventHub(self._link)
        return self._events.open()

    @property
    def stats(self) -> ConnectionStats:
        """Counters of the connection, as they are now."""
        return ConnectionStats(**self._state.counters)

    @property
    def cm_id(self) -> ConnectionId:
        """The connection id of the native layer.

        The connection owns `cm_id`, `qp` and `pd`, and closes them.  They give access to what the
        connection has no method for, such as `qp.query()`, the RNR timer, or further memory and
        queue pairs in its protection domain.  After the end of the connection they are still there,
        but closed.
        """
        return self._link.cm_id

    @property
    def qp(self) -> QueuePair:
        """The queue pair of the native layer; see `cm_id`.

        The connection posts to it in C, and counts the free entries of its queues.  So a program
        cannot post work requests: `post_send`, `send` and the like raise RdmaOSError.
        """
        return self._link.qp

    @property
    def pd(self) -> ProtectionDomain:
        """The protection domain of the native layer; see `cm_id`.

        The program can register memory and make queue pairs in it.  To expose memory to the peer,
        use `expose`.
        """
        return self._link.pd

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return information about the connection; `default` if `name` is unknown.

        The names are:

        - `device`, `port`, `link_layer`, `transport`, `mtu` (bytes), and `provider` (the driver of
          the kernel);
        - `gid` (16 bytes) and `gid_index` (its index in the table of the port, which the adapter is
          asked for while the connection is open; None on iWARP);
        - `qpn` and `peer_qpn`: the numbers of the two queue pairs; the peer's is None on iWARP,
          which does not transmit it;
        - `peername` and `sockname`: host and port, and for IPv6 also flow and scope, as in asyncio;
        - `key_id`: the name of the key by which both sides have proved themselves; None without
          `config.keys`;
        - `number`: the number of the connection in the log and in `aiordma.metrics`;
        - `opened_at`: when the handshake ended, in seconds since 1970;
        - `backend`: always "rdma", as there is no fallback;
        - `large_messages_checked`: whether large messages that this side receives are compared with
          a checksum of the peer, see `ConnectionConfig.check_large`.
        """
        if name == "gid_index" and "gid_index" not in self._facts:
            with contextlib.suppress(OSError, ResourceClosedError, ForkedError):
                self._facts[name] = self._link.gid_index()
        fact = self._known.get(name, default)
        return fact if fact is default else shown(name, fact)

    @property
    def _known(self) -> dict[str, Any]:
        """All information by name.  Asks the device, at the first use or before it is closed."""
        if "device" not in self._facts:
            # A device that was removed cannot be asked, nor can any device in a forked child.
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
            ending = self._own_ending  # in any thread, so it is not made here
            ended = self._link.closed if ending is None else ending.done
            return "closed" if ended else "closing"
        return "open" if "opened_at" in self._facts else "connecting"

    @property
    def _broke_by(self) -> BaseException | None:
        """The cause of the end, unless this side or the peer has closed it in good order."""
        cause = self._outcome.cause
        ended = self._receiver.ended and not isinstance(cause, ProtocolError)
        return None if ended or isinstance(cause, ResourceClosedError) else cause

    def _seen(self) -> dict[str, Any]:
        """The connection as `aiordma.metrics` shows it.  In any thread, so without asking C."""
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
            receiver.drop_all()  # no task can receive these messages any more

        try:
            if not link.closed:
                _warn(f"unclosed {self!r}", ResourceWarning, source=self, stacklevel=1)
        finally:
            from_finalizer(link.loop, end)

    # Handshake: called by connect and accept

    def _meet(
        self,
        hello: Hello | None,
        reads: int,
        peer: Address | None = None,
        ends: tuple[Address | None, Address | None] | None = None,
    ) -> None:
        """Process the peer's half of the handshake; messages may be sent from now on.

        Args:
            hello: The peer's credits and sizes; None on a raw connection.
            reads: How many RDMA READs the peer serves at a time.
            peer: The peer's address.
            ends: The addresses of the peer and of this side, if both are known.
        """
        self._ends = ends or ()
        # `_seen` needs them, in any thread, and must not ask C.
        self._facts["peername"], self._facts["sockname"] = ends or (peer, None)
        self._link.agree(hello)
        if hello is None:
            return
        self.private_data = hello.user_data
        self._theirs, self._reads = hello, reads
        if self._state.queued or self._state.has_pending:
            self._sender.room()

    def _opened(self, peer_qpn: int) -> None:
        """Record that the handshake is complete; `peer_qpn` is 0 if it is unknown."""
        link, known = self._link, self._facts
        known["number"], known["opened_at"] = link.cm_id.number, time.time()
        known["peer_qpn"] = peer_qpn or None
        link.note_opened(peer_qpn)

    def _greet(self) -> None:
        """Send the first frame.  On iWARP the client has to send before the server may."""
        self._sender.control(FrameKind.CREDIT)
        self._watch(late=False)

    def _watch(self, *, late: bool = True) -> None:
        """Start the keepalive, once the first message may be sent.

        Args:
            late: Whether to leave the first PING to the peer.  True for the listener's side, so
                that only one of the two sides asks.
        """
        if self._keepalive is None and self._outcome.cause is None:
            link, name = self._link, _RAW_SILENCE if self.config.raw else _SILENCE
            common = link.common
            self._keepalive = Keepalive(link.loop, *common.plan.silence, name, late=late)
            self._keepalive.start(self, common.wheel)
            background.deliver_at_end(link.loop, self)

    def _was_alive(self) -> bool:
        return self._state.was_alive()

    def _on_interval(self, *, silent: bool) -> None:
        if not silent or self.config.raw:
            return
        code = self._state.ask_life()
        if code is None:
            self._link.note("hears nothing from the peer, which was asked")
        else:
            self._sender.posted(code)

    def _give_up(self, cause: BaseException) -> None:
        self._link.fail(cause)

    def _await_greeting(self) -> asyncio.Future[None]:
        """A future that ends with the client's first frame.  To be made before accepting."""
        self._established = self._link.loop.create_future()
        return self._established

    def _check_loop(self) -> None:
        if self._link.forked:
            raise fork.forked_error("connection")
        check_loop(self._link.loop, "connection")

    # Called by the parts

    def _on_events(self, events: int) -> None:
        """Handle the events that C leaves to Python, at the end of a drain."""
        if events == EVENT_NOTED and self._own_notes is not None:  # the frequent one, mostly alone
            self._own_notes.distribute(resume=True)
            return
        if events & EVENT_FRAMES:
            self._on_frames()
        if events & EVENT_ROOM:
            self._sender.room()
        if events & EVENT_SENT:
            self._sender.sent()
        if events & EVENT_FAILED:
            code, _, wrong = self._state.failure
            self._link.check(code)
            # Once this side has sent ABORT, a violation no longer counts: the peer may be answering
            # a message that was given up.
            if wrong is not None and self._outcome.cause is None:
                self._link.fail(violation(*wrong))
        if events & EVENT_IDLE:
            self._link.came_back()
        if self._state.has_pending:
            self._sender.fit_listening()
        if events & EVENT_NOTED and self._own_notes is not None:
            self._own_notes.distribute(resume=True)  # last, because it may resume tasks

    def _on_frames(self) -> None:
        state, receiver = self._state, self._receiver
        if (greeting := self._established) is not None and state.said:
            # The first frame of the client is here.
            self._link.cm_id.notify_established()
            self._watch()
            self._established = None  # now: C tells again what an exception has cut short
            if not greeting.done():
                greeting.set_result(None)
        if (one_sided := self._own_one_sided) is not None and state.knows_peer:
            one_sided.identified()
        reads, freed, landing, stage = state.take_news()
        for number in reads:
            self._link.read_completed()
            if receiver.fetcher is not None:
                receiver.fetcher.on_read(number)
        if state.grows and not state.unused:
            receiver.window.grow()
        for slot in freed:
            receiver.window.back(slot)
        if (landing or stage) and self._outcome.cause is None:
            self._large.landings.provide(landing, stage)
        if state.large:
            receiver.window.take_announcements(self._announce)
        while (done := state.next_done()) is not None:
            if self._outcome.cause is None:
                self._large.exposer.on_done(*done)
        if self._outcome.cause is None and state.said & 1 << FrameKind.END:
            if not (self._receiver.ended or self._outcome.closing):
                self._link.note("the peer has closed")
            answered = state.argument(FrameKind.END)
            self._receiver.end(functools.partial(ended_error, answered))
            self._end_notes()
        if self._outcome.cause is None and state.said & 1 << FrameKind.ABORT:
            reason = state.argument(FrameKind.ABORT)
            error = aborted_error(reason, state.words())
            if reason and VIOLATIONS.may_log(self._facts["peername"]):
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
        self._process_earlier_frames()
        self._on_events(EVENT_ROOM | EVENT_FAILED)
        self._ending.peer_left()
        if not self._outcome.closing:
            if event.type == EventType.DISCONNECTED and not self.config.raw:
                # END or ABORT would have arrived before the disconnection.
                self._lost(vanished_error())
            else:
                self._lost(cm_error(event.type.name, event.status, event.private_data))
        # True: do not queue the event for a reader of the channel, which all connections share.  A
        # step of the handshake that waits for this event gets it all the same.
        return True

    def _on_failed(self) -> None:
        failure = self._link.failure
        assert failure is not None
        self._ending.wake()
        if not isinstance(failure, ProtocolError):
            self._process_earlier_frames()
        self._lost(failure)

    def _process_earlier_frames(self) -> None:
        """Handle frames that arrived before a failure, but are reported only after it."""
        self._on_events(EVENT_FRAMES | EVENT_SENT)
        if self._own_notes is not None:
            self._own_notes.distribute(resume=False)

    def _lost(self, error: BaseException) -> None:
        """End the connection for a disconnection or failure; after END, the peer has closed it."""
        if self._receiver.ended and not isinstance(error, (ProtocolError, DeviceRemovedError)):
            error = left_error()
        self._over(error)

    def _say_aborted(self, reason: int = AbortReason.PROGRAM) -> bool:
        """Send ABORT as soon as a slot is free; False if the connection is raw, or not open."""
        if self.config.raw or self._keepalive is None or self._outcome.cause is not None:
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
        """Wait until posted messages have arrived, as the loop is ending; sends no END or ABORT."""
        await self._goodbye.deliver()

    # End

    def _end(self) -> None:
        if self._ends is not None:
            _ = self._known  # ask the device while it is still open
        self._over(closed_error())
        self._sender.settle()

    def _over(self, cause: BaseException) -> None:
        """Record the first cause of the end, and have all calls raise it from now on."""
        outcome = self._outcome
        if outcome.cause is not None:
            return
        outcome.cause = cause
        if "opened_at" in self._facts and self._broke_by is not None:
            tally.count("connections_lost")
        self._link.note("ends: %s", reason_of(cause))
        self._state.advance("SHUT")
        greeting, self._established = self._established, None
        if greeting is not None and not greeting.done():
            greeting.set_exception(outcome.failure())
            greeting.exception()  # otherwise asyncio logs it, if no task waits any more
            # The client has never sent a frame: do not wait for its answer to the disconnection.
            self._ending.met = False
        self._sender.fail(outcome.failure)
        if self._link.failure is not None or isinstance(cause, ResourceClosedError):
            self._sender.settle()
        if self._own_large is not None:
            self._own_large.fail(outcome.failure)
        self._receiver.fail(outcome.failure)
        self._end_notes()
        if self._own_one_sided is not None:
            self._own_one_sided.operations.explained()
            self._own_one_sided.identified()
        self._tell_senders(outcome.failure)
        self._begin_end()

    def _begin_end(self) -> None:
        say_goodbye = functools.partial(self._goodbye.say, self._drained, self._end)
        self._ending.begin(LastSteps(say_goodbye, self._stop_parts, self._end))

    async def _drained(self) -> None:
        if self._own_large is not None:
            await self._own_large.drained()

    async def _stop_parts(self) -> None:
        if tasks := self._stop():
            await asyncio.wait(tasks)

    def _stop(self) -> list[asyncio.Task[None]]:
        if self._keepalive is not None:
            self._keepalive.stop()
        return [] if self._own_large is None else self._own_large.stop()

    def _drop_references(self) -> None:
        """Remove the references of the parts to this object, because everything is closed."""
        self._state.set_handler(None)
        self._receiver.drop_references()
        vars(self).pop("send", None)
        self._stop()
