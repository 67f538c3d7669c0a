"""Large messages: the sender exposes its bytes, the receiver reads them, and answers DONE.

Theory of operation
    The sender has the bytes in memory registered for remote reading, and announces address, key
    and length.  The receiver takes a registered buffer from its pool, reads in pieces, several at
    a time, and answers DONE.  So the memory that is pinned follows the messages that are under
    way, not their largest size.  From the first such message on the queue pair allows reads: the
    peer reaches what is registered for it, and DONE ends the registration.

    An exchange goes on in the drain that brings an announcement, the end of a READ, or DONE.  A
    task of its own runs only where it has to wait: for the budgets, or for a thread that registers,
    sums or copies more than 1 MiB.

    An announcement costs the peer 32 bytes.  So nothing is allocated for it before the message is
    next for `recv()`, or messages that are fetched ahead leave room; and in both cases only with a
    share of the budgets (`memory.byte_budget`).  From then on bytes have to arrive every so often,
    or the connection is given up: requests behind a read that hangs would wait, too.  While another
    source waits for the memory, the message has to arrive at a minimum rate.

    The peer reads the caller's buffer itself, registered for this message alone, and no byte is
    copied on either side.  A message of up to `COPIED_BYTES` is copied into a buffer that stays
    registered: to register memory and to deregister it takes longer than to copy so many bytes.
    Such a buffer only ever held messages to this peer.

    The program may name the memory of a message of more than `COPIED_BYTES` (`recv_into`), which
    is registered for this message alone, and without a right of the peer.  Then the READs go there,
    and no byte is copied.  From the first `recv_into` on the library fetches no such message ahead.
    Before the call ends, also by a cancellation, the memory is deregistered, which waits for the
    READs under way.  DONE follows as the last step; so until then the message can be read anew.

    The answer to a request goes to the memory that its task has named (`request(into=)`) in the
    same way.  An announcement tells the immediate, which is the number of the request, so that the
    memory is known before a byte is read.  The answer is offered to that task, which has it read;
    several are read at a time, and the message that the reader of the requests gets in its turn is
    empty.  An answer whose task has left is not read: DONE follows at once.

    Cancelling a send ends the wait.  The exposure, and with it the caller's buffer, stays until
    DONE arrives or the queue pair is gone: the peer may be reading.

    A message of up to 1 MiB goes without an exchange, where the peer has a landing for it:
    registered memory, to which this side writes the message with one RDMA WRITE with immediate.
    The write uses up a receive, so that credits count it as any message.  `recv()` copies the
    message out of the landing, and the next frame to the sender says that the landing is free.  A
    message that finds the landing taken, or too small, goes as without it.

    Landings are made when a message of the peer would have used one; a larger message gets a larger
    landing, and the smaller ones stay, because the peer may be writing there.  The sender copies a
    message to memory of its own, the stage, before it is written: the program may change its bytes
    as soon as `send()` returns.  The peer may write to a landing at any time, as it may to the ring
    of a stream.  So a message is what was copied, and nothing else lies in that memory.

    Soft-RoCE completes a read whose tail has not arrived, if the wire reorders (docs/surprises.md).
    So the receiver may have asked for a checksum, which the sender makes of the registered bytes.
    A message that does not match ends the connection.  To read it again is of no use: after the
    fault the queue pair gets no answer to anything.

    On iWARP the peer gets the key of the memory for the data of a READ, and may write there for as
    long as that is registered: to deregister it, or a queue pair without remote rights, does not
    reliably end accesses under way.  So on iWARP the bytes are copied before they are looked at,
    and the message is the copy.  The message is a copy, too, where the program keeps many messages
    without a release: the bytes that they pin are bounded.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import errno
import functools
import weakref
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from aiordma._core import Message
from aiordma.endpoint.config import COPIED_BYTES, ConnectionConfig
from aiordma.endpoint.link import Landings, Link, memory_log
from aiordma.endpoint.outcome import Outcome
from aiordma.endpoint.receiving import Large, MemoryShare, Receiver
from aiordma.endpoint.sending import Exposer, Sender
from aiordma.endpoint.wire import (
    CHECKSUM,
    MOST_PIECES,
    PIECE,
    RENDEZVOUS,
    FrameKind,
    Hello,
    protocol_error,
)
from aiordma.errors import (
    MessageDamagedError,
    RdmaTimeoutError,
    ResourceClosedError,
)
from aiordma.link.buffers import settled, sum_of
from aiordma.loop import background
from aiordma.loop.empty import EMPTY
from aiordma.loop.timers import Timer, call_later, now
from aiordma.loop.workers import call_blocking
from aiordma.memory.byte_budget import AHEAD, HELD
from aiordma.memory.large_memory import DEREGISTER_S
from aiordma.memory.pool import room_of
from aiordma.requests.place import Place
from aiordma.verbs.enums import Access
from aiordma.verbs.mr import INLINE_BYTES, MemoryRegion

__all__ = ["Fetcher", "LargeMessages"]

_T = TypeVar("_T")
_READ_CHUNK = 1 << 20
# Seconds for the end of a connection whose adapter writes to memory of the program.
_REVOKE_S = 60.0
# The rate is an average over `_LOOKS` looks, however much time they take: if the loop is late, its
# looks are far apart, and each finds all bytes that have arrived since the look before.
_LOOK_S = 1.0
_LOOKS = 3


def _turn(fetch: _Fetch) -> int:
    return fetch.turn


def _check_progress(fetcher: weakref.ref[Fetcher]) -> None:
    if (alive := fetcher()) is not None:
        alive._check_progress()


#: Memory of the peer: address, bytes, key.
_Remote = tuple[int, int, int]


def _pieces_of(length: int, body: bytes, size: int) -> list[_Remote] | None:
    """The pieces of memory in an announcement, whose body has `size` bytes before them.

    None if they do not fit the length, or are no memory.
    """
    addr, rkey, _ = RENDEZVOUS.unpack_from(body)
    if (len(body) - size) % PIECE.size or len(body) - size > (MOST_PIECES - 1) * PIECE.size:
        return None
    more: list[_Remote] = list(PIECE.iter_unpack(body[size:]))
    pieces = [(addr, length - sum(each[1] for each in more), rkey), *more]
    return pieces if all(n > 0 and at + n <= 1 << 64 for at, n, _ in pieces) else None


class _Fetch:
    """A large message that is announced, or is being read."""

    __slots__ = (
        "asked", "checksum", "copy", "filled", "imm", "large", "left", "length", "number",
        "pending", "place", "region", "remote", "share", "turn",
    )  # fmt: skip

    region: MemoryRegion  # set when it is begun

    def __init__(
        self,
        length: int,
        imm: int | None,
        remote: list[_Remote],
        number: int,
        checksum: int | None,
        *,
        lands: bool,
        turn: int,
    ) -> None:
        self.large: Large = Large(length, lands=lands)
        self.turn: int = turn  # in the order of the announcements
        self.length: int = length
        self.imm: int | None = imm
        self.remote: list[_Remote] = remote
        self.number: int = number
        self.checksum: int | None = checksum
        self.asked: int = 0  # bytes for which READs were posted
        self.pending: int = 0  # of these READs
        self.copy: bool = False  # whether the message has to be a copy
        self.share: MemoryShare = MemoryShare(room_of(length))
        self.place: Place | None = None  # of the request whose answer it is
        self.filled: asyncio.Future[None] | None = None  # of a task whose memory is being filled
        self.left: bool = False  # that task has left


class _Filling:
    """The answer to a request, offered to the task that has memory for it."""

    __slots__ = ("_fetch", "_fetcher")

    def __init__(self, fetcher: Fetcher, fetch: _Fetch) -> None:
        self._fetcher = fetcher
        self._fetch = fetch

    async def fill(self, view: memoryview) -> bool:
        """Read it into the memory; False: it comes as a message."""
        return await self._fetcher.fill_place(self._fetch, view)

    def leave(self) -> None:
        """Drop it: the task has left before it began to read."""
        self._fetcher.drop(self._fetch)


def _next_of(fetch: _Fetch) -> _Remote:
    """The memory of the peer that the next READ of a message asks for."""
    start = fetch.asked
    for addr, length, rkey in fetch.remote:
        if start < length:
            return addr + start, min(_READ_CHUNK, length - start), rkey
        start -= length
    raise AssertionError(fetch.asked)


def _damaged(fetch: _Fetch) -> MessageDamagedError:
    text = f"a message of {fetch.length} bytes does not match its checksum"
    return MessageDamagedError(errno.EBADMSG, text)


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
        "__weakref__", "_announced", "_arrived", "_checked", "_config", "_fetches", "_filling",
        "_held", "_link", "_looks", "_numbers", "_pieces", "_progress", "_reading", "_receiver",
        "_sender", "_stopped", "_tasks", "_timer", "_waiting",
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
        self._numbers = list(range(depth))  # of READs; free
        self._pieces: dict[int, tuple[_Fetch, int]] = {}  # READs under way, and their bytes
        self._reading: deque[_Fetch] = deque()  # have a buffer, and READs to be posted
        self._fetches: list[int] = []  # exchanges without DONE; at most the window
        self._tasks: list[asyncio.Task[None]] = []
        self._waiting: deque[_Fetch] = EMPTY
        self._announced = 0
        self._filling: list[_Fetch] = []  # they go to memory of the program
        # Bytes of the buffers of messages that are being fetched, or that the program has not
        # taken.
        self._held = 0
        self._progress = 0.0  # when a piece was last complete, or the first began
        self._looks = 0  # at the rate, while another source has waited
        self._arrived = 0  # bytes since the first of these looks
        self._timer: Timer | None = None
        self._stopped = False

    def announce(self, length: int, body: bytes, imm: int | None) -> None:
        """Take an announcement of the peer."""
        size = RENDEZVOUS.size + self._checked * CHECKSUM.size
        if len(body) < size or not 0 < length <= self._config.max_message_size:
            self._violation(f"announced a message of {length} bytes")
            return
        _, _, number = RENDEZVOUS.unpack_from(body)
        checksum = None
        if self._checked:
            (checksum,) = CHECKSUM.unpack_from(body, RENDEZVOUS.size)
        remote = _pieces_of(length, body, size)
        if remote is None:
            self._violation(f"announced a message of {length} bytes in pieces that are no memory")
            return
        if self._stopped:
            return
        if number in self._fetches or len(self._fetches) >= self._config.rendezvous_window:
            self._violation("announced more large messages than it may")
            return
        self._fetches.append(number)
        lands = length > COPIED_BYTES and not self._link.buffers.in_the_open
        self._announced += 1
        fetch = _Fetch(length, imm, remote, number, checksum, lands=lands, turn=self._announced)
        self._receiver.announced(fetch.large)
        if self._waiting is EMPTY:
            self._waiting = deque()
        self._waiting.append(fetch)
        self._admit()

    def wanted(self) -> None:
        """Fetch the first message, with room or without: the program waits for it."""
        self._admit(wanted=True)

    def _admit(self, *, wanted: bool = False) -> None:
        """Start the reads that there is room for, or that the program waits for, strictly in order.

        The program takes messages in that order: a later message that slipped into the room would
        keep it until an earlier message has been read, which waits for room.
        """
        while self._waiting and not (self._filling and self._receiver.exchange is None):
            fetch = self._waiting[0]
            if self._is_answered_for(fetch):
                continue
            room = fetch.share.room
            buffers = self._link.buffers
            region = None
            is_next = self._receiver.is_next(fetch.large)
            if fetch.large.lands and self._receiver.has_memory:
                if is_next and self._receiver.asks_memory:
                    self._receiver.wake()
                    return
                ahead = False
            elif self._held + room <= self._config.receive_buffer_size:
                region = buffers.pool.take_kept(fetch.length)  # with its share
                ahead = region is not None or buffers.account.try_take(AHEAD, room)
            else:
                ahead = False
            if not ahead:
                if not is_next:
                    return  # nor is any read started after the end of the connection
                if not (wanted or self._receiver.is_awaited):
                    return
            self._waiting.popleft()
            fetch.large.waits = False
            fetch.large.share = fetch.share
            self._held += room
            if region is not None:
                self._read(fetch, region)
            else:
                self._start(functools.partial(self._prepare, fetch, wait=not ahead))

    def _is_answered_for(self, fetch: _Fetch) -> bool:
        """Offer an answer to the task that has memory for it; or drop it, if no task wants it."""
        exchange = self._receiver.exchange
        if exchange is None or fetch.imm is None:
            return False
        if exchange.is_unwanted(fetch.imm):
            self._waiting.popleft()
            self.drop(fetch)
            return True
        place = exchange.place_of(fetch.imm) if fetch.large.lands else None
        if place is None or not place.takes(fetch.length):
            return False
        self._waiting.popleft()
        fetch.large.waits = False
        fetch.place = place
        place.offer(_Filling(self, fetch), fetch.length)
        return True

    def drop(self, fetch: _Fetch) -> None:
        """Have an answer taken without its bytes: no task wants them."""
        if not self._over:
            fetch.large.waits = False
            self._done(fetch)
            self._deliver_empty(fetch)

    @property
    def _over(self) -> bool:
        return self._stopped or self._link.failure is not None

    def _done(self, fetch: _Fetch) -> None:
        """Tell the peer that its memory is not read any more."""
        self._fetches.remove(fetch.number)
        self._sender.control(FrameKind.DONE, fetch.number)

    def _deliver_empty(self, fetch: _Fetch) -> None:
        """Deliver a message whose bytes are in memory of the program, or dropped."""
        fetch.large.message = Message(b"", fetch.imm)
        self._receiver.wake()

    def _violation(self, text: str) -> None:
        self._link.fail(protocol_error(f"the peer broke the protocol: it {text}"))

    def _start(self, function: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a step of a fetch that has to wait as a task."""
        task = background.start(self._link.loop, functools.partial(self._reported, function))
        if task is not None:
            self._tasks.append(task)
            task.add_done_callback(self._tasks.remove)

    async def _reported(self, function: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await function()
        except Exception as exc:
            # If a fetch ended without a report, recv() would wait for its message for ever.
            self._link.fail(exc)

    async def _prepare(self, fetch: _Fetch, *, wait: bool) -> None:
        """Get the share of a message, if it has none, and a buffer."""
        buffers = self._link.buffers
        if wait:
            fetch.share.part = await buffers.account.take(fetch.share.room)
        self._read(fetch, await buffers.pool.take(fetch.length))

    def _read(self, fetch: _Fetch, region: MemoryRegion) -> None:
        """Read a whole message, piece by piece."""
        self._link.buffers.pin(region)
        fetch.region = region
        fetch.copy = self._link.buffers.in_the_open
        self._reading.append(fetch)
        self._post()

    def _post(self) -> None:
        """Post as many READs as the peer serves at a time."""
        while self._reading and self._numbers:
            fetch = self._reading[0]
            offset = fetch.asked
            addr, size, rkey = _next_of(fetch)
            fetch.asked += size
            fetch.pending += 1
            if fetch.asked == fetch.length:
                self._reading.popleft()
            number = self._numbers.pop()
            if not self._pieces:
                self._progress = now()
            self._pieces[number] = fetch, size
            if self._timer is None:
                self._set_timer(min(_LOOK_S, self._config.fetch_timeout_s))
            self._link.post_read(number, fetch.region, offset, size, (addr, rkey))

    def on_read(self, number: int) -> None:
        """Take the completion of a READ."""
        fetch, size = self._pieces.pop(number)
        self._numbers.append(number)
        if self._stopped:
            return
        self._progress = now()
        self._arrived += size
        fetch.pending -= 1
        if self._reading:
            self._post()  # before the work for this message: the adapter goes on meanwhile
        if fetch.left:
            if not fetch.pending:
                self._let_go(fetch)
            return
        if not fetch.pending and fetch.asked == fetch.length and not self._stopped:
            self._looks = 0  # the rate counts anew: this message has used its share of the memory
            if fetch.filled is None:
                self._settle(fetch)
            elif not fetch.filled.done():
                fetch.filled.set_result(None)

    def _settle(self, fetch: _Fetch) -> None:
        """Check and copy a message that has arrived, as far as it needs that, and deliver it."""
        if not fetch.copy:
            fetch.copy = not self._link.buffers.account.try_take(HELD, fetch.share.room)
        check = fetch.checksum is not None
        if fetch.length > INLINE_BYTES and (check or fetch.copy):
            self._start(functools.partial(self._settle_slowly, fetch, check=check))
            return
        try:
            view = fetch.region.view[: fetch.length]
            self._deliver(fetch, *settled(view, check=check, copy=fetch.copy))
        except Exception as exc:
            self._link.fail(exc)

    async def _settle_slowly(self, fetch: _Fetch, *, check: bool) -> None:
        view = fetch.region.view[: fetch.length]
        settle = functools.partial(settled, view, check=check, copy=fetch.copy)
        self._deliver(fetch, *await call_blocking(settle, undo=lambda _: None))

    def _deliver(self, fetch: _Fetch, view: memoryview, checksum: int) -> None:
        if fetch.checksum is not None and fetch.checksum != checksum:
            raise _damaged(fetch)
        buffers, region, room = self._link.buffers, fetch.region, fetch.share.room
        buffers.unpin(region)
        self._done(fetch)
        if fetch.copy:
            buffers.pool.give(region)
            message = Message(view, fetch.imm)
        else:
            message = Message(
                view, fetch.imm, lambda exported: self._region_back(exported, region, room)
            )
        fetch.large.message = message
        self._receiver.wake()

    def taken(self, large: Large) -> None:
        """Note that the program took a large message: there is room to fetch another ahead."""
        share, large.share = large.share, None
        if share is not None:
            self._held -= share.room
            self._link.buffers.account.give(share.room, share.part)
        if self._waiting:
            self._admit()

    # Into memory of the program

    async def read_into(self, large: Large, view: memoryview) -> bool:
        """Read the next message into memory of the program.

        Args:
            large: The message, which was not begun.
            view: The memory; it has room.

        Returns:
            Whether it is there, and taken.  If not, the connection is over, or the memory cannot
            be registered, and the message is to be copied: look again.

        Raises:
            OSError: ENOMEM, too much memory is registered; the message stays the next.

        Cancellation: the message stays the next, and is read anew.  The call ends when the memory
        is deregistered: READs under way have `fetch_timeout_s`, and end with the connection then.
        """
        fetch = self._waiting.popleft()
        assert fetch.large is large
        large.waits, large.taken = False, True
        if not await self._fill(fetch, view):
            return False
        self._receiver.took(large)
        self._admit()
        return True

    async def fill_place(self, fetch: _Fetch, view: memoryview) -> bool:
        """Read an answer, which was offered, into memory of the program.

        Returns:
            Whether it is there.  If not, the connection is over, or the answer comes as a message.

        Cancellation: the answer is dropped.  The call ends as that of `read_into`.
        """
        if self._over or not await self._fill(fetch, view):
            return False
        self._deliver_empty(fetch)
        return True

    async def _fill(self, fetch: _Fetch, view: memoryview) -> bool:
        """As `read_into`; the message is not taken yet."""
        self._filling.append(fetch)
        region: MemoryRegion | None = None
        whole = False
        try:
            region = await self._registered(fetch, view)
            if region is not None:
                whole = await self._filled(fetch, region)
        except BaseException as exc:
            if fetch.place is not None:
                fetch.place.left = True
            self._leave(fetch)
            if region is not None and not isinstance(exc, GeneratorExit):
                await self._revoked(region)
            raise
        if not whole or not self._is_wanted(fetch):
            self._leave(fetch)
            if region is not None:
                await self._revoked(region)
            return False
        # No wait from here on: the message is taken, or it is not.
        self._filling.remove(fetch)
        self._done(fetch)
        return True

    def _is_wanted(self, fetch: _Fetch) -> bool:
        """Whether a message that goes to memory of the program is delivered still."""
        if fetch.place is not None:
            return not self._over
        return not self._stopped and self._receiver.is_next(fetch.large)

    async def _registered(self, fetch: _Fetch, view: memoryview) -> MemoryRegion | None:
        """Register memory of the program, pin it and begin to read; None if it does not go."""
        link, size = self._link, fetch.length
        try:
            with view[:size] as memory:
                region = await link.buffers.memory.registered(
                    size, lambda: self._completed(size, link.register(memory, Access.LOCAL_WRITE))
                )
        except ResourceClosedError:
            return None
        except OSError as exc:
            if exc.errno == errno.ENOMEM and fetch.place is None:
                raise
            # Memory of a file, or of another device: `ibv_reg_mr(3)` does not take all.
            link.note("copies a large message: %s", exc, log=memory_log)
            fetch.large.lands = False
            return None
        if link.closed or not self._is_wanted(fetch):
            region.close()
            await self._revoked(region)
            return None
        link.buffers.pin(region)
        fetch.region = region
        fetch.filled = link.loop.create_future()
        self._reading.append(fetch)
        self._post()
        return region

    async def _filled(self, fetch: _Fetch, region: MemoryRegion) -> bool:
        """Wait for all of a message, check it, and deregister the memory; False if it is over."""
        assert fetch.filled is not None
        await fetch.filled
        if fetch.pending:
            return False  # the connection is over
        if fetch.checksum is not None:
            checksum = await self._completed(fetch.length, sum_of(region.view))
            if checksum != fetch.checksum:
                self._link.fail(_damaged(fetch))
                return False
        self._link.buffers.unpin(region)
        region.close()
        with contextlib.suppress(TimeoutError):
            await region.wait_closed(DEREGISTER_S)
        return True

    async def _completed(self, size: int, step: Coroutine[Any, Any, _T]) -> _T:
        """The result of a step; a cancellation waits for it, as a thread may use the memory."""
        if size <= INLINE_BYTES:
            return await step
        task = self._link.loop.create_task(step)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            while not task.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait((task,))
            if not task.cancelled() and task.exception() is None:
                region = task.result()
                if isinstance(region, MemoryRegion):
                    region.close()
                    await self._revoked(region)
            raise
        finally:
            task.cancel()  # of a coroutine that is closed: no task takes the result
            del task  # its exception has this frame: a cycle

    def _leave(self, fetch: _Fetch) -> None:
        """The task whose memory a message goes to leaves without it."""
        fetch.left = True
        if fetch in self._reading:
            self._reading.remove(fetch)
        if fetch.filled is not None:
            fetch.region.close()  # when it is not pinned any more
        if not fetch.pending:
            self._let_go(fetch)

    def _let_go(self, fetch: _Fetch) -> None:
        """No READ writes to the memory of the task that has left: have the message read anew."""
        if fetch.filled is not None:
            self._link.buffers.unpin(fetch.region)
        if self._over:
            return  # it is not delivered
        fetch.filled, fetch.left, fetch.asked = None, False, 0
        self._filling.remove(fetch)
        if fetch.place is not None and fetch.place.left:
            self.drop(fetch)
            return
        fetch.large.waits, fetch.large.taken = True, False
        bisect.insort(self._waiting, fetch, key=_turn)  # behind those that were announced before
        self._receiver.left()
        self._admit()

    async def _revoked(self, region: MemoryRegion) -> None:
        """Wait until no adapter can write to memory of the program, whatever cancels the task."""
        seconds = self._config.fetch_timeout_s
        for last in (False, True):
            end = now() + seconds
            while True:
                try:
                    await region.wait_closed(max(end - now(), 0.001))
                except asyncio.CancelledError:
                    continue  # it is on its way out already
                except TimeoutError:
                    break
                except (OSError, MemoryError):
                    return  # logged, and the memory is kept for good
                return
            if not last:
                self._give_up("READs into the buffer of a call that was left do not end")
                seconds = _REVOKE_S

    # Progress

    def _set_timer(self, seconds: float) -> None:
        # Weak: a connection that its program forgets is collected at once.
        check = functools.partial(_check_progress, weakref.ref(self))
        self._timer = call_later(self._link.loop, seconds, check)

    def _check_progress(self) -> None:
        self._timer = None
        if not self._pieces or self._stopped or self._link.failure is not None:
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
        """Whether messages arrive below the minimum rate while another source waits for memory."""
        if not self._held or not self._link.buffers.account.is_pressed():
            self._looks = 0
            return False
        self._looks += 1
        if self._looks > _LOOKS:
            # Of a piece that has not completed, all but the end may have arrived.
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
        """Free the buffer of a message that was released or collected; in any thread."""
        pool = self._link.buffers.pool

        # A buffer that is still exported leaves the pool, and lives as long as the export.
        def back() -> None:
            self._link.buffers.account.give(room, HELD)
            (pool.drop if exported else pool.give)(region)

        self._link.in_loop(back)

    def stop(self) -> list[asyncio.Task[None]]:
        """Cancel the tasks that read, and return them.  Regions stay pinned by the link."""
        self._stopped = True
        self._waiting.clear()
        self._reading.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for filling in self._filling:
            if filling.filled is not None and not filling.filled.done():
                filling.filled.set_result(None)
        tasks = self._tasks[:]
        for task in tasks:
            task.cancel()
        return tasks


class LargeMessages:
    """The large messages of one connection in both directions, as the handshake allows them.

    Each direction is made for its first message: most connections have none.

    Attributes:
        fetcher: Messages of the peer; None before the first.
        landings: Messages that are written, in both directions.
    """

    __slots__ = (
        "_config", "_exposer", "_hello", "_link", "_outcome", "_reads", "_receiver", "_sender",
        "fetcher", "landings",
    )  # fmt: skip

    def __init__(
        self,
        link: Link,
        sender: Sender,
        receiver: Receiver,
        outcome: Outcome,
        config: ConnectionConfig,
    ) -> None:
        self._link = link
        self._sender = sender
        self._receiver = receiver
        self._outcome = outcome
        self._config = config
        self._reads = 0  # READs that the peer serves at a time
        self._hello: Hello | None = None  # the peer's
        self._exposer: Exposer | None = None
        self.fetcher: Fetcher | None = None
        self.landings: Landings = Landings(link)

    @property
    def exposer(self) -> Exposer:
        """Messages to the peer."""
        if self._exposer is None:
            self._link.note("has its first large message to send", log=memory_log)
            self._exposer = Exposer(
                self._link, self._sender, self._outcome, self._config, self._receiver.window
            )
            if self._hello is not None:
                self._exposer.agree(self._hello)
        return self._exposer

    @property
    def checked(self) -> bool:
        """Whether the peer's large messages have checksums."""
        return self._hello is not None and self._hello.knows_checksums and self._link.common.checks

    def agree(self, hello: Hello, reads: int) -> None:
        """Take the peer's numbers; `reads` is how many RDMA READs it serves at a time."""
        self._hello = hello
        self._reads = min(self._config.initiator_depth, reads)

    def announce(self, length: int, body: bytes, imm: int | None) -> None:
        """Take an announcement of the peer."""
        if not self._reads:
            # A READ would never begin, and the requests behind it would wait.
            text = "the peer announced a large message and serves no RDMA reads"
            self._link.fail(protocol_error(text))
            return
        if self._config.check_large and not self.checked:
            text = "the peer's library knows no checksums of large messages, check_large is True"
            self._link.fail(protocol_error(text))
            return
        if self.fetcher is None:
            try:
                self._link.qp._expect(self._config.initiator_depth)
            except OSError as exc:
                self._link.fail(exc)
                return
            self._link.note("has its first large message to receive", log=memory_log)
            self.fetcher = self._receiver.fetcher = Fetcher(
                self._link, self._sender, self._receiver, self._config, self._reads,
                checked=self.checked,
            )  # fmt: skip
        self.fetcher.announce(length, body, imm)

    async def drained(self) -> None:
        """Wait until the peer has read all messages that were announced."""
        if self._exposer is not None:
            await self._exposer.drained()

    def refuse(self, failure: Callable[[], BaseException]) -> None:
        """Have sends that wait for their turn raise the exception that `failure` makes."""
        if self._exposer is not None:
            self._exposer.refuse(failure)

    def fail(self, failure: Callable[[], BaseException]) -> None:
        """Have all sends raise the exception that `failure` makes: the connection is over."""
        if self._exposer is not None:
            self._exposer.fail(failure)

    def stop(self) -> list[asyncio.Task[None]]:
        """Cancel the tasks that read, and return them: the connection is over."""
        return [] if self.fetcher is None else self.fetcher.stop()
