"""Large messages: the sender exposes its bytes, the receiver reads them and says when it is done.

Theory of operation
    The sender has the bytes in memory registered for remote reading, allows reads on the queue
    pair while at least one exposure is open, and announces address, key and length.  The receiver
    takes a registered buffer from its pool, reads in pieces, several at a time, and answers
    DONE.  So the memory that is pinned follows the messages that are under way, not their
    largest size.

    An announcement costs the peer 32 bytes.  So nothing is allocated for it before the message is
    next for `recv()`, or messages that are fetched ahead leave room; and in both cases only with a
    share of the budgets (`memory.byte_budget`).  Once it is being read bytes have to arrive every
    so often, or the connection is given up: requests behind a read that hangs would wait, too.
    While another source waits for the memory, it has to arrive at a minimum rate.

    The peer reads the caller's buffer itself, registered for this one message, and no byte is
    copied on either side.  Of messages up to `_COPIED` bytes it is a copy, in a buffer that stays
    registered: to register memory and to take that back takes longer than to copy so many bytes.
    Such a buffer only ever held messages to this peer.

    Cancelling a send ends the wait.  The exposure, and with it the caller's buffer, stays until
    DONE arrives or the queue pair is gone: the peer may be reading.

    Soft-RoCE completes a read whose tail has not arrived, if the wire reorders (docs/surprises.md).
    So the receiver may have asked for a checksum, which the sender makes of the registered bytes.
    A message that does not match ends the connection.  To read it again is of no use: after the
    fault the queue pair gets no answer to anything.

    iWARP tells the peer the key of the memory where a read lands, and the peer may use it for as
    long as that is registered: to deregister it, or a queue pair without remote rights, does not
    reliably end reads under way.  So there the bytes are copied before they are looked at, and
    the message is the copy.  So it is where the program keeps many messages without a release: the
    bytes that they pin are bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import weakref
from collections import deque
from typing import Any

from aiordma._core import Message, crc32c
from aiordma._core import copy as copy_bytes
from aiordma.endpoint.config import ConnectionConfig
from aiordma.endpoint.link import COPIED_BYTES, Link, lent
from aiordma.endpoint.outcome import Outcome
from aiordma.endpoint.receiving import Large, Receiver
from aiordma.endpoint.sending import Sender
from aiordma.endpoint.wire import CHECKSUM, RENDEZVOUS, FrameKind, Hello
from aiordma.errors import (
    MessageDamagedError,
    MessageTooLargeError,
    ProtocolError,
    RdmaTimeoutError,
)
from aiordma.loop import background
from aiordma.loop.credits import Credits
from aiordma.loop.empty import EMPTY
from aiordma.loop.limit import Limit
from aiordma.loop.timers import Timer, call_later, now
from aiordma.loop.wait_line import WaitLine
from aiordma.loop.workers import call_blocking
from aiordma.memory.byte_budget import AHEAD, HELD
from aiordma.memory.pool import room_of
from aiordma.verbs.enums import Access
from aiordma.verbs.mr import INLINE_BYTES, MemoryRegion

__all__ = ["Exposer", "Fetcher", "LargeMessages"]

_COPIED = COPIED_BYTES
_READ_CHUNK = 1 << 20
_DEREGISTER_S = 5.0
# Looks at the rate, each this many seconds after the one before, before it counts: a loop that is
# late looks seldom, and takes what has arrived in between.
_LOOK_S = 1.0
_LOOKS = 3


async def _settled(view: memoryview, *, check: bool, copy: bool) -> tuple[memoryview, int]:
    """The bytes of a registered buffer, or a copy of them, and the CRC32C of the returned bytes.

    In a thread if there are many.  The sum is 0 if `check` is not set.
    """

    def run() -> tuple[memoryview, int]:
        settled = view
        if copy:
            settled = memoryview(bytearray(len(view)))
            copy_bytes(settled, view)
        return settled, crc32c(0, settled) if check else 0

    if len(view) <= INLINE_BYTES or not (check or copy):
        return run()
    return await call_blocking(run, undo=lambda _: None)


class _Exposure:
    __slots__ = ("copied", "done", "region")

    def __init__(self, region: MemoryRegion, done: asyncio.Future[None], *, copied: bool) -> None:
        self.region = region
        self.done = done
        self.copied = copied


class Exposer:
    """The sending side.

    Args:
        link: The adapter's side.
        sender: Sends the announcements.
        window: Exposures that the peer admits at a time.

    Attributes:
        sums: Whether the peer has asked for checksums.
    """

    __slots__ = ("_drainers", "_exposures", "_link", "_next", "_sender", "sums", "window")

    def __init__(self, link: Link, sender: Sender, window: int) -> None:
        self._link = link
        self._sender = sender
        self._exposures: dict[int, _Exposure] = {}
        self._next = 1
        self._drainers = WaitLine[None]()
        self.sums = False
        self.window = Credits(window)

    def __len__(self) -> int:
        """Exposures that are open."""
        return len(self._exposures)

    async def send(self, payload: memoryview, imm: int | None) -> None:
        """Send a large message; returns when the peer has read all of it.

        Raises:
            OSError: The buffer cannot be registered.
            ConnectionLostError: The connection ended first.

        Cancellation: the peer may still receive the message; a buffer that was not copied stays
        exported until it has read it or the connection is gone.
        """
        if not self.window.try_acquire():
            await self.window.acquire()
        copied = payload.nbytes <= _COPIED
        try:
            region = await (self._copy(payload) if copied else self._register(payload))
        except BaseException:
            self.window.release()
            raise
        try:
            await self._announced(payload.nbytes, imm, region, copied=copied)
        finally:
            if not copied:
                # Pinned while the exposure is open, so this waits for DONE or for the queue pair.
                region.close()
        if not copied:
            # The message has arrived; a deregistration that takes long goes on without the caller.
            with contextlib.suppress(TimeoutError):
                await region.wait_closed(_DEREGISTER_S)

    async def _announced(
        self, length: int, imm: int | None, region: MemoryRegion, *, copied: bool
    ) -> None:
        """Have the peer read a region."""
        try:
            self._link.buffers.pin(region)
        except BaseException:  # closed meanwhile
            if copied:
                self._link.buffers.outgoing.give(region)
            self.window.release()
            raise
        number = self._next
        self._next = number % 0xFFFFFFFF + 1
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._link.open_access(Access.REMOTE_READ)
        self._exposures[number] = _Exposure(region, done, copied=copied)
        try:
            head = RENDEZVOUS.pack(region.addr, region.rkey, number)
            if self.sums:
                head += CHECKSUM.pack(
                    (await _settled(region.view[:length], check=True, copy=False))[1]
                )
            await self._sender.rendezvous(head, imm, length)
        except BaseException:
            # Never announced.  The peer may know the key of the buffer from another message.
            self._withdraw(number, keep=False)
            raise
        try:
            await done
        finally:
            del done  # its exception has this frame

    def resize(self, window: int) -> None:
        """The peer admits this many at a time; before the first send."""
        if window != self.window.free:
            self.window = Credits(window)

    async def drained(self) -> None:
        """Wait until no exposure is open."""
        while self._exposures:
            await self._drainers.wait()

    def _wake_drainers(self) -> None:
        if not self._exposures:
            self._drainers.grant_all(None)

    async def _copy(self, payload: memoryview) -> MemoryRegion:
        region = await self._link.buffers.outgoing.take(payload.nbytes)
        region.view[: payload.nbytes] = payload
        return region

    async def _register(self, payload: memoryview) -> MemoryRegion:
        pd, memory = self._link.pd, lent(payload)
        if payload.nbytes <= INLINE_BYTES:
            return MemoryRegion(pd, memory, Access.REMOTE_READ)
        return await call_blocking(
            lambda: MemoryRegion(pd, memory, Access.REMOTE_READ), undo=MemoryRegion.close
        )

    def _withdraw(self, number: int, *, keep: bool = True) -> None:
        exposure = self._exposures.pop(number, None)
        if exposure is None:
            # The connection broke meanwhile; the link unpins when the queue pair is gone, and its
            # pool forgets what is out.
            return
        self._link.close_access(Access.REMOTE_READ)
        self._link.buffers.unpin(exposure.region)
        if exposure.copied:
            pool = self._link.buffers.outgoing
            (pool.give if keep else pool.drop)(exposure.region)
        self.window.release()
        self._wake_drainers()

    def on_done(self, number: int, flags: int) -> None:
        """The peer has read a message."""
        exposure = self._exposures.get(number)
        if exposure is None or flags:
            why = "not open" if exposure is None else f"flags {flags:#x}"
            self._link.fail(
                ProtocolError(errno.EPROTO, f"the peer answered exchange {number}: {why}")
            )
            return
        self._withdraw(number)
        if not exposure.done.done():
            exposure.done.set_result(None)

    def fail(self, failure: Any) -> None:
        """The connection is over."""
        self.window.fail(failure)
        for number in list(self._exposures):
            exposure = self._exposures.pop(number)
            if not exposure.done.done():
                exposure.done.set_exception(failure())
                exposure.done.exception()
        self._wake_drainers()


def _check_progress(fetcher: weakref.ref[Fetcher]) -> None:
    if (alive := fetcher()) is not None:
        alive._check_progress()


class _Share:
    """A message's share of the budgets."""

    __slots__ = ("part", "room")

    def __init__(self, room: int) -> None:
        self.room = room
        self.part = AHEAD


class _Fetch:
    """One large message that is being read."""

    __slots__ = (
        "checksum", "imm", "large", "length", "number", "pending", "read", "remote", "room",
        "share", "wanted",
    )  # fmt: skip

    def __init__(
        self,
        length: int,
        imm: int | None,
        remote: tuple[int, int],
        number: int,
        checksum: int | None,
    ) -> None:
        self.room = room_of(length)
        self.large = Large()
        self.length = length
        self.imm = imm
        self.remote = remote
        self.number = number
        self.checksum = checksum
        self.pending = 0
        self.wanted = False  # whether `recv()` waited for it when it was begun
        self.share = _Share(self.room)
        self.read: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Fetcher:
    """The receiving side.

    Args:
        link: The adapter's side.
        sender: Sends DONE.
        receiver: Gets the messages, in the order of their announcements.
        config: Sizes.
        depth: RDMA reads that the peer serves at a time.
        checked: Whether the peer sends checksums along.
    """

    __slots__ = (
        "__weakref__", "_arrived", "_checked", "_config", "_fetches", "_held", "_link", "_looks",
        "_numbers", "_progress", "_reading", "_reads", "_receiver", "_sender", "_slots", "_stopped",
        "_tasks", "_timer", "_untaken", "_waiting",
    )  # fmt: skip

    def __init__(
        self,
        link: Link,
        sender: Sender,
        receiver: Receiver,
        config: ConnectionConfig,
        depth: int,
        *,
        checked: bool,
    ) -> None:
        self._checked = checked
        self._link = link
        self._sender = sender
        self._receiver = receiver
        self._config = config
        self._reads = Credits(depth)
        self._slots: list[_Fetch | None] = [None] * depth
        self._numbers = list(range(depth))
        self._fetches: list[int] = []  # at most the window
        self._tasks: list[asyncio.Task[None]] = []
        self._waiting: deque[_Fetch] = EMPTY
        # Of those before them, which are fetched or being fetched and not taken by the program.  A
        # message would lead back to this.
        self._untaken: deque[_Share] = deque()
        self._held = 0  # bytes of their buffers
        self._reading = 0  # pieces that are being read
        self._progress = 0.0  # when a piece was last complete, or the first began
        self._looks = 0  # at the rate, while another source has waited
        self._arrived = 0  # bytes since the first of these
        self._timer: Timer | None = None
        self._stopped = False

    def announce(self, length: int, body: bytes, imm: int | None) -> None:
        """The peer wants to send a large message."""
        size = RENDEZVOUS.size + self._checked * CHECKSUM.size
        if len(body) != size or not 0 < length <= self._config.max_message_size:
            self._violation(f"announced a message of {length} bytes")
            return
        addr, rkey, number = RENDEZVOUS.unpack_from(body)
        checksum = None
        if self._checked:
            (checksum,) = CHECKSUM.unpack_from(body, RENDEZVOUS.size)
        if addr + length > 1 << 64:
            self._violation("announced a message beyond the end of memory")
            return
        if self._stopped:
            return
        if number in self._fetches or len(self._fetches) >= self._config.rendezvous_window:
            self._violation("announced more large messages than it may")
            return
        self._fetches.append(number)
        fetch = _Fetch(length, imm, (addr, rkey), number, checksum)
        self._receiver.announced(fetch.large)
        if self._waiting is EMPTY:
            self._waiting = deque()
        self._waiting.append(fetch)
        self._admit()

    def wanted(self) -> None:
        """The program waits for a message that is not there yet."""
        self._admit(wanted=True)

    def _admit(self, *, wanted: bool = False) -> None:
        """Start the reads that there is room for, or that the program waits for, strictly in order.

        The program takes messages in that order: a later message that slipped into the room would
        keep it until an earlier message has been read, which waits for room.
        """
        while self._waiting:
            fetch = self._waiting[0]
            ahead = self._held + fetch.room <= self._config.receive_buffer_size
            if not (ahead and self._link.buffers.account.try_take(AHEAD, fetch.room)):
                if not self._receiver.is_next(fetch.large):
                    return  # and never again, once the connection is over
                if not (wanted or self._receiver.is_awaited):
                    return
                fetch.wanted = True
            self._waiting.popleft()
            self._untaken.append(fetch.share)
            self._held += fetch.room
            task = background.start(self._link.loop, functools.partial(self._run, fetch))
            if task is not None:
                self._tasks.append(task)
                task.add_done_callback(self._tasks.remove)

    def _violation(self, text: str) -> None:
        self._link.fail(ProtocolError(errno.EPROTO, f"the peer broke the protocol: it {text}"))

    async def _run(self, fetch: _Fetch) -> None:
        try:
            await self._fetch(fetch)
        except asyncio.CancelledError:
            raise
        except Exception as exc:
            # A fetch that dies in silence would leave recv() waiting for its message.
            self._link.fail(exc)

    async def _fetch(self, fetch: _Fetch) -> None:
        if fetch.wanted:
            fetch.share.part = await self._link.buffers.account.take(fetch.room)
        region = await self._link.buffers.pool.take(fetch.length)
        self._link.buffers.pin(region)
        copy = self._link.buffers.in_the_open
        await self._read(fetch, region)
        copy = copy or not self._link.buffers.account.try_take(HELD, fetch.room)
        view, checksum = await _settled(
            region.view[: fetch.length], check=fetch.checksum is not None, copy=copy
        )
        if fetch.checksum is not None and fetch.checksum != checksum:
            text = f"a message of {fetch.length} bytes does not match its checksum"
            raise MessageDamagedError(errno.EBADMSG, text)
        self._link.buffers.unpin(region)
        self._fetches.remove(fetch.number)
        self._sender.control(FrameKind.DONE, fetch.number)
        if copy:
            self._link.buffers.pool.give(region)
            message = Message(view, fetch.imm)
        else:
            room = fetch.room
            message = Message(
                view, fetch.imm, lambda exported: self._region_back(exported, region, room)
            )
        fetch.large.message = message
        self._receiver.wake()

    async def _read(self, fetch: _Fetch, region: MemoryRegion) -> None:
        """Read a whole message, piece by piece."""
        # One piece is held back by itself, so that `pending` cannot reach zero in between.
        fetch.pending = 1
        offset = 0
        while offset < fetch.length:
            await self._reads.acquire()
            size = min(_READ_CHUNK, fetch.length - offset)
            number = self._numbers.pop()
            self._slots[number] = fetch
            fetch.pending += 1
            remote = (fetch.remote[0] + offset, fetch.remote[1])
            self._begin_piece()
            self._link.post_read(number, region, offset, size, remote)
            offset += size
        self._piece_done(fetch)
        await fetch.read
        self._looks = 0  # it held its share for long enough to be read

    def on_read(self, number: int) -> None:
        """One RDMA read has completed."""
        fetch = self._slots[number]
        self._slots[number] = None
        self._numbers.append(number)
        self._reading -= 1
        self._progress = now()
        self._reads.release()
        if fetch is not None:
            self._arrived += min(_READ_CHUNK, fetch.length)
            self._piece_done(fetch)

    def _piece_done(self, fetch: _Fetch) -> None:
        fetch.pending -= 1
        if not fetch.pending and not fetch.read.done():
            fetch.read.set_result(None)

    def taken(self) -> None:
        """The program took a large message out of the queue: room to fetch another ahead."""
        share = self._untaken.popleft()
        self._held -= share.room
        self._link.buffers.account.give(share.room, share.part)
        self._admit()

    # Progress

    def _begin_piece(self) -> None:
        if not self._reading:
            self._progress = now()
        self._reading += 1
        if self._timer is None:
            self._set_timer(min(_LOOK_S, self._config.fetch_timeout_s))

    def _set_timer(self, seconds: float) -> None:
        # Weak: a connection that its program forgets is collected at once.
        check = functools.partial(_check_progress, weakref.ref(self))
        self._timer = call_later(self._link.loop, seconds, check)

    def _check_progress(self) -> None:
        self._timer = None
        if not self._reading or self._stopped or self._link.failure is not None:
            self._looks = 0
            return
        seconds = self._config.fetch_timeout_s
        left = self._progress + seconds - now()
        if left <= 0:
            self._give_up(f"nothing of a large message has arrived for {seconds} s")
        elif self._is_too_slow():
            rate = self._config.pressed_fetch_rate
            self._give_up(f"a large message arrives at less than {rate} bytes per second")
        else:
            self._set_timer(min(_LOOK_S, left))

    def _is_too_slow(self) -> bool:
        """Whether it takes too long for other sources, which wait for the memory."""
        if not self._link.buffers.account.is_pressed():
            self._looks = 0
            return False
        self._looks += 1
        if self._looks > _LOOKS:
            # A piece may have arrived all but its end.
            least = _LOOKS * _LOOK_S * self._config.pressed_fetch_rate - _READ_CHUNK
            if self._arrived < max(least, 1):
                return True
            self._looks = 1
        if self._looks == 1:
            self._arrived = 0
        return False

    def _give_up(self, text: str) -> None:
        self._link.fail(RdmaTimeoutError(errno.ETIMEDOUT, text))

    # End

    def _region_back(self, exported: bool, region: MemoryRegion, room: int) -> None:
        """A large message was released, in whatever thread."""
        pool = self._link.buffers.pool

        # Memory that is still exported leaves the pool, and lives as long as the message.
        def back() -> None:
            self._link.buffers.account.give(room, HELD)
            (pool.drop if exported else pool.give)(region)

        self._link.in_loop(back)

    def stop(self) -> None:
        """The connection is over: end the reading tasks.  Regions stay pinned by the link."""
        self._stopped = True
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for task in list(self._tasks):
            task.cancel()

    async def stopped(self) -> None:
        """Wait for the tasks to end."""
        if self._tasks:
            await asyncio.wait(list(self._tasks))


class LargeMessages:
    """The large messages of one connection in both directions, as both sides have agreed on them.

    Args:
        link: The adapter's side.
        sender: Sends announcements and DONE.
        receiver: Gets the messages of the peer.
        config: Sizes.

    Attributes:
        exposer: Messages to the peer.
        fetcher: Messages of the peer; None before the first.
        limit: Bytes of the largest message that the peer takes.
        checked: Whether the peer's large messages have checksums.
    """

    __slots__ = (
        "_config", "_link", "_reads", "_receiver", "_sender", "checked", "exposer", "fetcher",
        "limit",
    )  # fmt: skip

    def __init__(
        self, link: Link, sender: Sender, receiver: Receiver, config: ConnectionConfig
    ) -> None:
        self._link = link
        self._sender = sender
        self._receiver = receiver
        self._config = config
        self._reads = 0  # that the peer serves at a time
        self.checked = False
        self.limit = config.slot_size if config.raw else 0
        self.exposer = Exposer(link, sender, config.rendezvous_window)
        self.fetcher: Fetcher | None = None

    @property
    def checks(self) -> bool:
        """Whether this side asks the peer for checksums."""
        asked = self._config.check_large
        return self._link.context.is_software if asked is None else asked

    def agree(self, hello: Hello, reads: int) -> None:
        """The peer's numbers are known; `reads` is how many RDMA READs it serves at a time."""
        config = self._config
        self.limit = hello.max_message_kib * 1024
        self.exposer.resize(min(config.rendezvous_window, hello.rendezvous_window))
        self.exposer.sums = hello.asks_checksums
        self.checked = hello.knows_checksums and self.checks
        self._reads = min(config.initiator_depth, reads)

    async def send(self, payload: memoryview, imm: int | None, outcome: Outcome) -> None:
        """Send a message that does not fit into a slot; returns when the peer has read all of it.

        Raises:
            MessageTooLargeError: The peer takes no message of this size; nothing was sent.
            ConnectionLostError, ResourceClosedError: The connection is over.
            TimeoutError: The peer took nothing for `config.stall_timeout_s`.

        Cancellation: as `Exposer.send`.
        """
        outcome.require_open()
        size = payload.nbytes
        if size > self.limit:
            raise self._too_large(size)
        with Limit(self._config.stall_timeout_s), outcome.explaining():
            await self.exposer.send(payload, imm)
        self._link.state.messages_sent += 1
        self._link.state.bytes_sent += size

    def _too_large(self, size: int) -> MessageTooLargeError:
        if self._config.raw:
            text, hint = "a raw connection", "send it in pieces, or raise slot_size on both sides"
        else:
            text, hint = "the peer", MessageTooLargeError.hint
        text = f"{text} takes messages up to {self.limit} bytes, this has {size} ({hint})"
        error = MessageTooLargeError(text)
        error.hint = hint
        return error

    def announce(self, length: int, body: bytes, imm: int | None) -> None:
        """The peer wants to send a large message."""
        if not self._reads:
            # It would never begin, and all that is posted behind it would wait.
            text = "the peer announced a large message and serves no RDMA reads"
            self._link.fail(ProtocolError(errno.EPROTO, text))
            return
        if self._config.check_large and not self.checked:
            text = "the peer's library knows no checksums of large messages, check_large is True"
            self._link.fail(ProtocolError(errno.EPROTO, text))
            return
        if self.fetcher is None:
            self.fetcher = self._receiver.fetcher = Fetcher(
                self._link, self._sender, self._receiver, self._config, self._reads,
                checked=self.checked,
            )  # fmt: skip
        self.fetcher.announce(length, body, imm)

    def stop(self) -> None:
        """The connection is over: nothing is read any more."""
        if self.fetcher is not None:
            self.fetcher.stop()

    async def stopped(self) -> None:
        """Wait for the tasks that read to end."""
        if self.fetcher is not None:
            await self.fetcher.stopped()
