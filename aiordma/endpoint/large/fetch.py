"""Fetcher: reads large messages from the memory of the peer."""

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
from aiordma.endpoint.announced import Large
from aiordma.endpoint.config import COPIED_BYTES, ConnectionConfig
from aiordma.endpoint.link import Link, memory_log
from aiordma.endpoint.receiving import Receiver
from aiordma.endpoint.sending import Sender
from aiordma.endpoint.wire import (
    CHECKSUM,
    MOST_PIECES,
    PIECE,
    RENDEZVOUS,
    FrameKind,
    protocol_error,
)
from aiordma.errors import (
    ConnectionLostError,
    RdmaTimeoutError,
    ResourceClosedError,
    damaged_error,
)
from aiordma.link.buffers import settled, sum_of
from aiordma.loop import background
from aiordma.loop.lasting import result_of, until_done
from aiordma.loop.timers import Timer, call_later, now
from aiordma.loop.workers import call_blocking
from aiordma.memory.governor import AHEAD, HELD, Lease
from aiordma.memory.large_memory import DEREGISTER_S
from aiordma.memory.pool import room_of
from aiordma.requests.place import Place
from aiordma.verbs.enums import Access
from aiordma.verbs.mr import INLINE_BYTES, MemoryRegion

__all__ = ["FETCH_TIMEOUT_S", "Fetcher"]


_T = TypeVar("_T")
_READ_CHUNK = 1 << 20  # the size of a READ, in bytes
# How long to wait, in seconds, for the end of a connection that may write to memory of the program.
_REVOKE_S = 60.0
# Progress is checked every `_LOOK_S` seconds, and the rate is an average over `_LOOKS` checks.  It
# counts checks and not time: if the loop is late, the checks are far apart, but each of them finds
# all bytes that have arrived since the one before.
_LOOK_S = 1.0
_LOOKS = 3
#: Within so many seconds a READ, of up to 1 MiB, has to complete.
FETCH_TIMEOUT_S = 30.0
#: The minimum rate, in bytes per second, while messages of another source wait for the memory.
_PRESSED_RATE = 1 << 20


def _turn(fetch: _Fetch) -> int:
    return fetch.turn


def _check_progress(fetcher: weakref.ref[Fetcher]) -> None:
    if (alive := fetcher()) is not None:
        alive._check_progress()


#: Memory of the peer: its address, its size in bytes, and its key.
_Remote = tuple[int, int, int]


def _pieces_of(length: int, body: bytes, size: int) -> list[_Remote] | None:
    """The pieces of memory of an announced message.

    Args:
        length: The size of the message.
        body: The body of the announcement.
        size: How many bytes of the body come before the further pieces.

    Returns:
        The pieces; None if they do not match the length, or are no valid memory.
    """
    addr, rkey, _ = RENDEZVOUS.unpack_from(body)
    if (len(body) - size) % PIECE.size or len(body) - size > (MOST_PIECES - 1) * PIECE.size:
        return None
    more: list[_Remote] = list(PIECE.iter_unpack(body[size:]))
    pieces = [(addr, length - sum(each[1] for each in more), rkey), *more]
    return pieces if all(n > 0 and at + n <= 1 << 64 for at, n, _ in pieces) else None


class _Fetch:
    """A large message that was announced, or is being read."""

    __slots__ = (
        "asked", "checksum", "copy", "filled", "held", "imm", "large", "left", "length", "number",
        "pending", "place", "region", "remote", "room", "turn",
    )  # fmt: skip

    region: MemoryRegion  # what it is read into; set when that begins

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
        self.turn: int = turn  # its number in the order of the announcements
        self.length: int = length
        self.imm: int | None = imm
        self.remote: list[_Remote] = remote
        self.number: int = number  # of the exchange
        self.checksum: int | None = checksum
        self.asked: int = 0  # how many bytes READs were posted for
        self.pending: int = 0  # how many of these READs are in flight
        self.copy: bool = False  # whether the program has to get a copy
        self.room: int = room_of(length)  # the size of its buffer
        self.held: Lease | None = None  # the lease of the buffer while the program has the message
        self.place: Place | None = None  # the memory for the answer, if it is one
        # If it is read into memory of the program: ends when the last READ has completed.
        self.filled: asyncio.Future[None] | None = None
        self.left: bool = False  # whether the task with that memory no longer waits


class _Filling:
    """The answer to a request, which is offered to the task that has memory for it."""

    __slots__ = ("_fetch", "_fetcher")

    def __init__(self, fetcher: Fetcher, fetch: _Fetch) -> None:
        self._fetcher = fetcher
        self._fetch = fetch

    async def fill(self, view: memoryview) -> bool:
        """Read the answer into the memory; False if it comes as a message."""
        return await self._fetcher.fill_place(self._fetch, view)

    def leave(self) -> None:
        """Discard the answer, because the task no longer waits."""
        self._fetcher.drop(self._fetch)


def _next_of(fetch: _Fetch) -> _Remote:
    """The memory of the peer for the next READ of a message."""
    start = fetch.asked
    for addr, length, rkey in fetch.remote:
        if start < length:
            return addr + start, min(_READ_CHUNK, length - start), rkey
        start -= length
    raise AssertionError(fetch.asked)


def _damaged(fetch: _Fetch) -> ConnectionLostError:
    text = f"a message of {fetch.length} bytes does not match its checksum"
    return damaged_error(text)


class Fetcher:
    """The receiving side of large messages.

    Args:
        link: The adapter's side of the connection.
        sender: What sends DONE.
        receiver: What gets the messages, in the order of their announcements.
        config: The settings, which have the limits.
        depth: How many RDMA READs the peer serves at a time.
        checked: Whether the announcements have checksums.
    """

    __slots__ = (
        "__weakref__", "_ahead", "_announced", "_arrived", "_checked", "_config", "_fetches",
        "_filling", "_held", "_link", "_looks", "_numbers", "_pieces", "_progress", "_reading",
        "_receiver", "_sender", "_stopped", "_tasks", "_timer", "_waiting",
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
        # With a depth of 1 nothing is ahead of the message that the program waits for.
        self._ahead = config.receive_buffer_size if config.recv_depth > 1 else 0
        self._numbers = list(range(depth))  # the numbers of READs that are free
        self._pieces: dict[int, tuple[_Fetch, int]] = {}  # READs in flight, with their bytes
        self._reading: deque[_Fetch] = deque()  # have a buffer, and READs that are to be posted
        self._fetches: list[int] = []  # exchanges that were not answered; at most the window
        self._tasks: list[asyncio.Task[None]] = []
        self._waiting: list[_Fetch] = []  # announced, and nothing is allocated for them yet
        self._announced = 0
        self._filling: list[_Fetch] = []  # are read into memory of the program
        # The bytes of buffers of messages that are being fetched, or were not received yet.
        self._held = 0
        self._progress = 0.0  # when the last READ completed, or the first was posted
        self._looks = 0  # checks of the rate, while another source has been waiting
        self._arrived = 0  # bytes since the first of these checks
        self._timer: Timer | None = None
        self._stopped = False

    def announce(self, length: int, body: bytes, imm: int | None) -> None:
        """Handle an announcement of the peer."""
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
        lands = length > COPIED_BYTES and not self._link.buffers.reads_expose
        self._announced += 1
        fetch = _Fetch(length, imm, remote, number, checksum, lands=lands, turn=self._announced)
        self._receiver.announced(fetch.large)
        self._waiting.append(fetch)
        self._admit()

    def wanted(self) -> None:
        """Fetch the first message even if it exceeds the room, because the program waits for it."""
        self._admit(wanted=True)

    def _admit(self, *, wanted: bool = False) -> None:
        """Begin to read messages, as long as there is room, or the program waits for the first.

        This is done strictly in order, which is the order in which the program receives.  A smaller
        message that overtook a larger one would occupy its room until that had been received, and
        that one waits for room.
        """
        while self._waiting and not (self._filling and self._receiver.exchange is None):
            fetch = self._waiting[0]
            if self._offer_or_drop(fetch):
                continue
            room = fetch.room
            buffers = self._link.buffers
            kept = lease = None
            is_next = self._receiver.is_next(fetch.large)
            if fetch.large.lands and self._receiver.has_memory:
                if is_next and self._receiver.asks_memory:
                    self._receiver.wake()
                    return
            elif self._held + room <= self._ahead:
                kept = buffers.pool.take_kept(fetch.length)
                lease = kept[1] if kept else buffers.account.lease(AHEAD, room)
            if lease is None:
                if not is_next:
                    return  # this is also the case when the connection is over
                if not (wanted or self._receiver.is_awaited):
                    return
            self._waiting.pop(0)
            fetch.large.waits = False
            fetch.large.lease = lease
            self._held += room
            if kept:
                self._read(fetch, kept[0])
            else:
                self._start(functools.partial(self._prepare, fetch))

    def _offer_or_drop(self, fetch: _Fetch) -> bool:
        """Offer an answer to the task that has memory for it, or drop that of an abandoned call.

        Returns:
            Whether one of both was done.
        """
        exchange = self._receiver.exchange
        if exchange is None or fetch.imm is None:
            return False
        if exchange.is_unwanted(fetch.imm):
            self._waiting.pop(0)
            self.drop(fetch)
            return True
        place = exchange.place_of(fetch.imm) if fetch.large.lands else None
        if place is None or not place.takes(fetch.length):
            return False
        self._waiting.pop(0)
        fetch.large.waits = False
        fetch.place = place
        place.offer(_Filling(self, fetch), fetch.length)
        return True

    def drop(self, fetch: _Fetch) -> None:
        """Answer with DONE without reading the message, and deliver an empty one in its place."""
        if not self._over:
            fetch.large.waits = False
            self._done(fetch)
            self._deliver_empty(fetch)

    @property
    def _over(self) -> bool:
        return self._stopped or self._link.failure is not None

    def _done(self, fetch: _Fetch) -> None:
        """Tell the peer that its memory is not needed any more."""
        self._fetches.remove(fetch.number)
        self._sender.control(FrameKind.DONE, fetch.number)

    def _deliver_empty(self, fetch: _Fetch) -> None:
        """Deliver an empty message instead of one that was read elsewhere, or dropped."""
        fetch.large.message = Message(b"", fetch.imm)
        self._receiver.wake()

    def _violation(self, text: str) -> None:
        self._link.fail(protocol_error(f"the peer broke the protocol: it {text}"))

    def _start(self, function: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a step that has to wait, as a task."""
        task = background.start(self._link.loop, functools.partial(self._reported, function))
        if task is not None:
            self._tasks.append(task)
            task.add_done_callback(self._tasks.remove)

    async def _reported(self, function: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await function()
        except Exception as exc:
            # If the failure were not reported, recv() would wait for the message forever.
            self._link.fail(exc)

    async def _prepare(self, fetch: _Fetch) -> None:
        """Get a lease, if the message has none yet, and a buffer, and begin to read."""
        buffers = self._link.buffers
        lease = fetch.large.lease
        if lease is None:
            lease = fetch.large.lease = await buffers.account.wait(fetch.room)
        self._read(fetch, await buffers.pool.take(fetch.length, lease))

    def _read(self, fetch: _Fetch, region: MemoryRegion) -> None:
        """Begin to read a message into a buffer of the pool."""
        self._link.buffers.pin(region)
        fetch.region = region
        fetch.copy = self._link.buffers.reads_expose
        self._reading.append(fetch)
        self._post()

    def _post(self) -> None:
        """Post READs, as many as the peer serves at a time."""
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
                self._set_timer(min(_LOOK_S, FETCH_TIMEOUT_S))
            self._link.post_read(number, fetch.region, offset, size, (addr, rkey))

    def on_read(self, number: int) -> None:
        """Handle the completion of a READ."""
        fetch, size = self._pieces.pop(number)
        self._numbers.append(number)
        if self._stopped:
            return
        self._progress = now()
        self._arrived += size
        fetch.pending -= 1
        if self._reading:
            self._post()  # first, so that the adapter works while this message is processed
        if fetch.left:
            if not fetch.pending:
                self._requeue_or_drop(fetch)
            return
        if not fetch.pending and fetch.asked == fetch.length and not self._stopped:
            self._looks = 0  # measure the rate anew for the next message
            if fetch.filled is None:
                self._settle(fetch)
            elif not fetch.filled.done():
                fetch.filled.set_result(None)

    def _settle(self, fetch: _Fetch) -> None:
        """Check and copy a message that was read, as far as it is necessary, and deliver it."""
        if not fetch.copy:
            fetch.held = self._link.buffers.account.lease(HELD, fetch.room)
            fetch.copy = fetch.held is None
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
        buffers, region, held = self._link.buffers, fetch.region, fetch.held
        buffers.unpin(region)
        self._done(fetch)
        if held is None:
            buffers.pool.give(region)
            message = Message(view, fetch.imm)
        else:
            held.cover(region)
            message = Message(
                view, fetch.imm, lambda exported: self._region_back(exported, region, held)
            )
        fetch.large.message = message
        self._receiver.wake()

    def taken(self, large: Large) -> None:
        """Note that the program has received a message, which may leave room for another."""
        lease, large.lease = large.lease, None
        if lease is not None:
            self._held -= lease.size
            lease.release()
        if self._waiting:
            self._admit()

    # Into memory of the program

    async def read_into(self, large: Large, view: memoryview) -> bool:
        """Read the next message into memory of the program.

        Args:
            large: The message, which nobody has begun to fetch.
            view: The memory, which is large enough.

        Returns:
            Whether the message was received.  If not, either the connection is over, or the memory
            cannot be registered and the message has to be copied; the caller has to look again.

        Raises:
            OSError: ENOMEM, too much memory is registered; the message remains the next one.

        Cancellation: the message remains the next one, and is read again.  The call ends when the
        memory is deregistered.  If READs do not complete within `FETCH_TIMEOUT_S`, the connection
        is ended to stop them.
        """
        fetch = self._waiting.pop(0)
        assert fetch.large is large
        large.waits, large.taken = False, True
        if not await self._fill(fetch, view):
            return False
        self._receiver.received_into(large)
        self._admit()
        return True

    async def fill_place(self, fetch: _Fetch, view: memoryview) -> bool:
        """Read an answer that was offered into memory of the program.

        Returns:
            Whether that was done.  If not, the connection is over, or the answer comes as a
            message.

        Cancellation: the answer is lost.  The call ends when `read_into` would.
        """
        if self._over or not await self._fill(fetch, view):
            return False
        self._deliver_empty(fetch)
        return True

    async def _fill(self, fetch: _Fetch, view: memoryview) -> bool:
        """Read a message into memory of the program, without delivering it."""
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
            self._stop_filling(fetch)
            if region is not None and not isinstance(exc, GeneratorExit):
                await self._revoked(region)
            raise
        if not whole or not self._is_wanted(fetch):
            self._stop_filling(fetch)
            if region is not None:
                await self._revoked(region)
            return False
        # From here on there is no await, so that a cancellation cannot lose the message.
        self._filling.remove(fetch)
        self._done(fetch)
        return True

    def _is_wanted(self, fetch: _Fetch) -> bool:
        """Whether a message that was read into memory of the program may still be delivered."""
        if fetch.place is not None:
            return not self._over
        return not self._stopped and self._receiver.is_next(fetch.large)

    async def _registered(self, fetch: _Fetch, view: memoryview) -> MemoryRegion | None:
        """Register memory of the program, and begin to read; None if that is not possible."""
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
            # `ibv_reg_mr(3)` does not support all memory, for instance that of some mapped files.
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
        """Wait until all of a message was read, check it, and deregister the memory.

        Returns:
            False if the connection is over.
        """
        assert fetch.filled is not None
        await fetch.filled
        if fetch.pending:
            return False
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
        """Await a step that may use a thread; a cancellation waits until the thread is done."""
        if size <= INLINE_BYTES:
            return await step
        task = self._link.loop.create_task(step)
        try:
            return await result_of(task)
        except asyncio.CancelledError:
            with contextlib.suppress(asyncio.CancelledError):  # the first is raised below
                await until_done((task,))
            if not task.cancelled() and task.exception() is None:
                region = task.result()
                if isinstance(region, MemoryRegion):
                    region.close()
                    await self._revoked(region)
            raise
        finally:
            task.cancel()  # has an effect if this coroutine is closed, so that nobody waits for it
            del task  # the traceback of its exception refers to this frame: a cycle

    def _stop_filling(self, fetch: _Fetch) -> None:
        """Post no more READs into the memory of a task, because it no longer waits."""
        fetch.left = True
        if fetch in self._reading:
            self._reading.remove(fetch)
        if fetch.filled is not None:
            fetch.region.close()  # has an effect when it is no longer pinned
        if not fetch.pending:
            self._requeue_or_drop(fetch)

    def _requeue_or_drop(self, fetch: _Fetch) -> None:
        """Have a message read again, now that no READ writes to the memory of the former task.

        An answer whose task no longer waits is dropped instead.
        """
        if fetch.filled is not None:
            self._link.buffers.unpin(fetch.region)
        if self._over:
            return  # nothing is delivered any more
        fetch.filled, fetch.left, fetch.asked = None, False, 0
        self._filling.remove(fetch)
        if fetch.place is not None and fetch.place.left:
            self.drop(fetch)
            return
        fetch.large.waits, fetch.large.taken = True, False
        bisect.insort(self._waiting, fetch, key=_turn)  # in the order of the announcements
        self._receiver.resume_next()
        self._admit()

    async def _revoked(self, region: MemoryRegion) -> None:
        """Wait until the adapter cannot write to memory of the program.

        Cancellation: is raised when the memory is safe, or when everything was tried.
        """
        gone = region._until_gone()
        try:
            await until_done((gone,), FETCH_TIMEOUT_S)
        except asyncio.CancelledError:
            await self._end_reads(gone)
            raise
        await self._end_reads(gone)

    async def _end_reads(self, gone: asyncio.Future[None]) -> None:
        """End the connection, if the region of READs that were left is still not gone."""
        if not gone.done():
            self._give_up("READs into the buffer of a call that was left do not end")
            await until_done((gone,), _REVOKE_S)

    # Progress

    def _set_timer(self, seconds: float) -> None:
        # A weak reference, so that the timer does not keep a connection alive.
        check = functools.partial(_check_progress, weakref.ref(self))
        self._timer = call_later(self._link.loop, seconds, check)

    def _check_progress(self) -> None:
        self._timer = None
        if not self._pieces or self._stopped or self._link.failure is not None:
            self._looks = 0
            return
        seconds = FETCH_TIMEOUT_S
        left = self._progress + seconds - now()
        if left <= 0:
            self._give_up(f"nothing of a large message has arrived for {seconds} s")
        elif self._is_too_slow():
            rate = _PRESSED_RATE
            self._give_up(f"a large message arrives at less than {rate} bytes per second")
        else:
            self._set_timer(min(_LOOK_S, left))

    def _is_too_slow(self) -> bool:
        """Whether messages arrive too slowly while another source waits for their memory."""
        if not self._held or not self._link.buffers.account.is_pressed():
            self._looks = 0
            return False
        self._looks += 1
        if self._looks > _LOOKS:
            # Most of a READ may have arrived although it has not completed.
            least = _LOOKS * _LOOK_S * _PRESSED_RATE - _READ_CHUNK
            if self._arrived < max(least, 1):
                return True
            self._looks = 1
        if self._looks == 1:
            self._arrived = 0
        return False

    def _give_up(self, text: str) -> None:
        self._link.fail(RdmaTimeoutError(errno.ETIMEDOUT, text))

    # End

    def _region_back(self, exported: bool, region: MemoryRegion, held: Lease) -> None:
        """Free the buffer of a message that was released or garbage collected.  In any thread."""
        pool = self._link.buffers.pool

        # A buffer that is still exported is removed from the pool, and lives as long as the export.
        def back() -> None:
            (pool.drop if exported else pool.give)(region)
            held.release()

        self._link.in_loop(back)

    def stop(self) -> list[asyncio.Task[None]]:
        """Cancel the tasks that fetch messages, and return them.  Regions stay pinned."""
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
