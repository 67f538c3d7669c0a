"""One-sided operations of a connection: READ, WRITE and atomics on memory that the peer has opened.

Theory of operation
    What is wrong is refused before it is posted, where it costs an exception; an access that the
    peer's adapter refuses costs both sides the connection.

    The adapter needs registered memory on this side.  If the caller brings it (`register`), no byte
    is copied.  Otherwise up to 64 KiB go through a buffer of the pool, because a copy is cheaper
    than a registration, and more is registered for the time of the operation.

    Registered memory that goes in one request, which is fast, C has checked and posted before this
    is asked (`_core/operation.c`); transfers that C does not take come here, to be done or refused.

    Long transfers go out in pieces of 1 MiB, a few at a time, so that they do not hold up the
    messages of the connection, and no adapter's limit of one request matters.

    An operation is posted, and its completion taken, in C (`_core/operation.c`, `_core/message.c`);
    the task that awaits it is resumed by the drain, without a future.  Operations that fail come to
    Python.

    There are `one_sided_depth` of them.  A task that finds none free waits in line, and gets the
    number of the next that ends; while there is a line no other task gets a number.

    A connection wakes the loop for solicited messages of the peer, and for its own completions only
    while a task waits for them (`Completions.listen`).  That is asked for with the first operation
    and given up a while after the last: each change costs a system call.

    An operation that is flushed before the connection's end is known ends with the connection, so
    that its error has the cause, and the program's next call finds the connection lost, too.

    Cancelling ends the wait, not the transfer.  The local memory is retained until the completion,
    or until the queue pair is gone; a buffer under a canceled operation never goes back to the
    pool: it is deregistered, which waits for the completion.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import weakref
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

from aiordma._core import LARGEST_REQUEST, MessageState, Operation
from aiordma.arguments import bytes_of, fitting
from aiordma.endpoint.config import ConnectionConfig
from aiordma.endpoint.link import Link, lent
from aiordma.endpoint.outcome import Outcome
from aiordma.errors import (
    ConnectionLostError,
    FlushedError,
    NotSupportedError,
    completion_error,
    os_error,
)
from aiordma.loop.timers import Timer, call_later
from aiordma.loop.wait_line import WaitLine
from aiordma.loop.workers import call_blocking
from aiordma.memory.cache import RegistrationCache
from aiordma.memory.remote import RemoteRegion
from aiordma.verbs.enums import Access, AtomicCap, Opcode, WCStatus
from aiordma.verbs.mr import INLINE_BYTES, MemoryRegion, check_memory
from aiordma.verbs.wc import WCRecord
from aiordma.verbs.wr import SGE

__all__ = ["OneSided", "Operations", "register"]

_COPY = 64 * 1024
_GROUP = 4
_LOCAL_WRITE = int(Access.LOCAL_WRITE)  # a number: `&` of flags is slow
_READ = int(Opcode.RDMA_READ)
_WRITE = int(Opcode.RDMA_WRITE)
_LINGER_S = 0.5
_FLUSHED = int(WCStatus.WR_FLUSH_ERR)
_IWARP_HINT = "iWARP does not say why; an access that the peer's adapter refuses ends like this"


def _transferred(region: MemoryRegion, _: object) -> None:
    region._transferred()


def _rest(reference: weakref.ref[Operations]) -> None:
    operations = reference()
    if operations is not None:
        operations._rest()


class Operations:
    """The requests of one connection, from the post to the end, beside those that C posts alone.

    Args:
        link: The adapter's side.
        config: Depth.
        outcome: Makes the exception for a connection that is over.
    """

    __slots__ = (
        "__weakref__", "_c", "_depth", "_line", "_link", "_outcome", "_resting",
        "_unexplained",
    )  # fmt: skip

    def __init__(
        self,
        link: Link,
        config: ConnectionConfig,
        outcome: Outcome,
    ) -> None:
        self._link = link
        self._c: MessageState = link.state
        self._depth = config.one_sided_depth
        self._outcome = outcome
        self._line: WaitLine[int] | None = None  # made for the first task that waits
        self._unexplained: list[int] = []  # flushed; these end with the connection
        self._resting: Timer | None = None  # set while the link listens

    async def posted(
        self,
        opcode: int,
        region: MemoryRegion,
        addr: int,
        size: int,
        where: int,
        rkey: int,
        compare_add: int = 0,
        swap: int = 0,
    ) -> Operation:
        """Post one request, when there is room.

        Args:
            opcode: A number of `Opcode`.
            region: The local memory; it stays registered until the operation has ended.
            addr: Where it begins in there, an address.
            size: Bytes; 0 for a WRITE of nothing.
            where: The peer's address.
            rkey: The peer's key.
            compare_add: Of an atomic; of a WRITE with immediate that.
            swap: Of an atomic.

        Raises:
            ConnectionLostError, ResourceClosedError: The connection is over.

        Cancellation: nothing is posted.
        """
        self._attend()
        number = await self._number() if self._line or not self._c.n_operations_free else -1
        operation = self._c.operate(
            number, opcode, addr, size, where, rkey, compare_add, swap, region
        )
        if isinstance(operation, Operation):
            return operation
        if number >= 0:
            self._give(number)
        if operation is None:
            region._require()
            raise self.lost()  # it is over since
        raise self._refused(operation)

    async def _number(self) -> int:
        """Wait in line for the number of an operation."""
        if self._line is None:
            self._line = WaitLine()
            self._c.room = self._room
        number = self._line.wait(self._give)
        self._c.operations_wanted = True
        try:
            return await number
        except BaseException:
            self._room()
            raise

    def _give(self, number: int) -> None:
        """A number is free again."""
        self._c.give_number(number)
        self._room()

    def _room(self) -> None:
        """Hand out free numbers to the tasks that wait."""
        c = self._c
        line = self._line
        while line and line.next_size and c.n_operations_free:
            line.grant(c.take_number())
        c.operations_wanted = bool(line)

    def _refused(self, code: int) -> BaseException:
        """The adapter took no request: the connection cannot go on."""
        self._link.fail(os_error(code, "ibv_post_send"))
        return self.lost()

    def on_ended(self, number: int, record: WCRecord) -> None:
        """The completion of an operation that C has left to Python: it failed, or one before it."""
        error = None
        if record[1] == _FLUSHED and not self._outcome.decided:
            self._unexplained.append(number)
            return
        if record[1]:
            error = completion_error(
                record[1], operation="one-sided operation", vendor_err=record[3], qp_num=record[6]
            )
        self._end(number, error)

    def _end(self, number: int, error: BaseException | None) -> None:
        region = self._c.ended(number, error)
        if region is not None:
            region._transferred()
        if self._line:
            self._room()

    def explained(self) -> None:
        """The connection is over, and why is known."""
        flushed, self._unexplained = self._unexplained, []
        for number in flushed:
            self._end(number, completion_error(WCStatus.WR_FLUSH_ERR))

    def _drop(self) -> None:
        """The queue pair is being destroyed: end what the adapter has not flushed.

        The memory stays registered until it is gone.
        """
        if self._resting is not None:
            self._resting.cancel()
        qp = self._link.qp
        self._c.forget_done()
        for number in range(self._depth):
            region = self._c.ended(number, completion_error(WCStatus.WR_FLUSH_ERR))
            if region is not None:
                qp._gone.add_done_callback(functools.partial(_transferred, region))
        if self._line is not None:
            self._line.fail(self.lost)
            self._line = None
            del self._c.room  # which leads here
        if self._resting is not None:
            self._link.completions.expect(answers=False)

    def lost(self) -> BaseException:
        """Not the operation failed, but the connection before it."""
        failure = self._outcome.reason()
        if failure is None:
            failure = ConnectionLostError(errno.ECONNRESET, "the connection is lost")
        if isinstance(failure, ConnectionLostError) and self._link.context.is_iwarp:
            failure.hint = _IWARP_HINT
        return failure

    # Attention

    def _attend(self) -> None:
        """Have the link listen."""
        if not self._c.n_operations:
            self._c.allow_operations(self._depth)
            self._link.at_close(self._drop)
            self._c.may_read = self._link.qp._rules.read_depth != 0
        self._c.attended = True
        if self._resting is None and not self._link.closed:
            self._link.completions.listen()
            self._link.completions.expect(answers=True)
            self._set_timer()

    def _set_timer(self) -> None:
        # Weak: a connection that its program forgets is collected at once.
        self._resting = call_later(
            self._link.loop, _LINGER_S, functools.partial(_rest, weakref.ref(self))
        )

    def _rest(self) -> None:
        """Have it listen no more, if nothing has happened in the meantime."""
        if self._link.closed:
            return
        if self._c.attended or self._c.operating:
            self._c.attended = False
            self._set_timer()
        else:
            self._resting = None
            self._link.completions.expect(answers=False)
            self._link.completions.unlisten()


async def register(link: Link, outcome: Outcome, buffer: Any, access: Access) -> MemoryRegion:
    """Register memory in the connection's protection domain, in a thread if it takes long.

    Raises:
        OSError: It cannot be registered.
        ResourceClosedError, ConnectionLostError: The connection is over, perhaps meanwhile.
    """
    size = buffer if isinstance(buffer, int) else memoryview(buffer).nbytes
    with outcome.explaining():
        if size <= INLINE_BYTES:
            return MemoryRegion(link.pd, buffer, access)
        region = await call_blocking(
            lambda: MemoryRegion(link.pd, buffer, access), undo=MemoryRegion.close
        )
    if link.closed:
        region.close()
        outcome.require_open()
    return region


def _check_remote(remote: Any) -> None:
    if not isinstance(remote, RemoteRegion):
        # Its bytes are not shown: they hold the key.
        made = "; RemoteRegion.from_bytes() makes one of the bytes that the peer has sent"
        msg = f"remote has to be a RemoteRegion, not {type(remote).__name__}{made}"
        raise TypeError(msg)


def _release(local: memoryview | SGE) -> None:
    """After a failure: the exception keeps frames, and is not to keep the buffer exported."""
    if isinstance(local, memoryview):
        local.release()


class OneSided:
    """The requester's side.

    Args:
        link: The adapter's side.
        config: Sizes.
        outcome: Makes the exception for a connection that is over.

    Attributes:
        operations: Posts the requests.
        memory: Regions that the connection closes at its end: the program's, and those of leases.
    """

    __slots__ = ("_cache", "_link", "_outcome", "memory", "operations")

    def __init__(
        self,
        link: Link,
        config: ConnectionConfig,
        outcome: Outcome,
    ) -> None:
        self._link = link
        self.operations = Operations(link, config, outcome)
        self._outcome = outcome
        self.memory: set[MemoryRegion] = set()
        link.at_close(self._close_memory)
        self._cache: RegistrationCache | None = None
        if config.registration_cache_size:
            self._cache = RegistrationCache(link.pd, max_bytes=config.registration_cache_size)
            link.at_close(self._cache.close)

    async def read(self, remote: RemoteRegion, into: Any, offset: int) -> int:
        """Fill `into`; the number of bytes."""
        _check_remote(remote)
        local = self._local(into, writable=True)
        try:
            size = len(local)
            where = remote.check(offset, size, Access.REMOTE_READ)
            self._outcome.require_open()
            if not size:
                return 0
            if self._link.qp._rules.read_depth == 0:
                msg = "RDMA_READ is not possible: the connection has initiator_depth 0"
                raise NotSupportedError(errno.EOPNOTSUPP, msg)
            if isinstance(local, SGE):
                await self._transfer(_READ, local.mr, local.offset, size, where, remote.rkey)
            elif size <= _COPY:
                async with self._bounce(size) as region:
                    await self._transfer(_READ, region, 0, size, where, remote.rkey)
                    local[:] = region.view[:size]
            else:
                async with self._registered(local, self._landing()) as region:
                    await self._transfer(_READ, region, 0, size, where, remote.rkey)
            return size
        except BaseException:
            _release(local)
            raise

    async def write(
        self, remote: RemoteRegion, data: Any, offset: int, imm: int | None = None
    ) -> int:
        """Write `data`, with the adapter's immediate if given; the number of bytes."""
        _check_remote(remote)
        local = self._local(data, writable=False)
        try:
            size = len(local)
            where = remote.check(offset, size, Access.REMOTE_WRITE)
            self._outcome.require_open()
            if imm is not None and self._link.context.is_iwarp:
                text = f"{self._link.context.name} is iWARP, which has no immediates"
                raise NotSupportedError(errno.EOPNOTSUPP, text)
            if isinstance(local, SGE):
                await self._transfer(_WRITE, local.mr, local.offset, size, where, remote.rkey, imm)
            elif not size:
                if imm is not None:
                    async with self._bounce(1) as region:
                        await self._transfer(_WRITE, region, 0, 0, where, remote.rkey, imm)
            elif size <= _COPY:
                async with self._bounce(size) as region:
                    region.view[:size] = local
                    await self._transfer(_WRITE, region, 0, size, where, remote.rkey, imm)
            else:
                # Nothing is ever written here; read access is what every region has.
                async with self._registered(local, Access(0)) as region:
                    await self._transfer(_WRITE, region, 0, size, where, remote.rkey, imm)
            return size
        except BaseException:
            _release(local)
            raise

    async def atomic(
        self, opcode: Opcode, remote: RemoteRegion, offset: int, compare_add: int, swap: int
    ) -> int:
        """One atomic operation on 8 bytes; their value before it."""
        compare_add, swap = fitting("the value", compare_add, 64), fitting("the value", swap, 64)
        _check_remote(remote)
        where = remote.check(offset, 8, Access.REMOTE_ATOMIC)
        self._outcome.require_open()
        context = self._link.context
        if context.is_iwarp or context.attributes.atomic_cap == AtomicCap.NONE:
            text = f"{context.name} has no atomic operations"
            raise NotSupportedError(errno.EOPNOTSUPP, text)
        if self._link.qp._rules.read_depth == 0:
            msg = f"{opcode.name} is not possible: the connection has initiator_depth 0"
            raise NotSupportedError(errno.EOPNOTSUPP, msg)
        async with self._bounce(8) as region:
            operation = await self.operations.posted(
                int(opcode), region, region.addr, 8, where, remote.rkey, compare_add, swap
            )
            await self._ended(operation)
            return int.from_bytes(region.view[:8], "little")

    # Local memory

    async def register(self, buf: Any, access: Access) -> MemoryRegion:
        """Register memory of the program; `Connection.register` says how."""
        access = Access(fitting("access", access, 31))
        check_memory(buf, access)
        self._outcome.require_open()
        if access & Access.LOCAL_WRITE:
            access |= self._landing()
        region = await register(self._link, self._outcome, buf, access)
        self.memory.difference_update([known for known in self.memory if known.closed])
        self.memory.add(region)
        return region

    def _close_memory(self) -> None:
        for region in self.memory:
            region.close()
        self.memory.clear()

    def _local(self, buffer: Any, *, writable: bool) -> memoryview | SGE:
        if isinstance(buffer, MemoryRegion):
            buffer = SGE(buffer)
        if not isinstance(buffer, SGE):
            return bytes_of("the memory of a one-sided operation", buffer, writable=writable)
        if buffer.mr.pd is not self._link.pd:
            msg = "the region is not registered with this connection: use Connection.register()"
            raise ValueError(msg)
        if writable and not int(buffer.mr.access) & _LOCAL_WRITE:
            msg = "the region is registered without LOCAL_WRITE; nothing can be read into it"
            raise BufferError(msg)
        buffer.mr._require()
        return buffer

    def _landing(self) -> Access:
        """Rights of memory where a read's data lands: on iWARP it comes in as a write."""
        access = Access.LOCAL_WRITE
        return access | Access.REMOTE_WRITE if self._link.context.is_iwarp else access

    @contextlib.asynccontextmanager
    async def _bounce(self, size: int) -> AsyncIterator[MemoryRegion]:
        pool = self._link.buffers.pool
        region = await pool.take(size)
        try:
            yield region
        except BaseException:
            pool.drop(region)  # the adapter may still use it
            raise
        pool.give(region)

    @contextlib.asynccontextmanager
    async def _registered(self, view: memoryview, access: Access) -> AsyncIterator[MemoryRegion]:
        # The peer learns the key of such memory, and could use it as long as that is registered.
        writable = bool(access & Access.REMOTE_WRITE)
        memory = lent(view)
        # A message is released soon, and a cache would keep its memory.
        if self._cache is not None and not writable and memory is view:
            async with self._cache.get(view, access) as cached:
                yield cached
            return
        region = await register(self._link, self._outcome, memory, access)
        try:
            yield region
        finally:
            region.close()
        if writable:
            await region.wait_closed()

    # Requests

    async def _transfer(
        self,
        opcode: int,
        region: MemoryRegion,
        start: int,
        size: int,
        where: int,
        rkey: int,
        imm: int | None = None,
    ) -> None:
        """Move a piece of local memory; an immediate goes with the last request."""
        under_way: deque[Operation] = deque()
        posted = self.operations.posted
        done = 0
        while True:
            part = min(LARGEST_REQUEST, size - done)
            last = done + part == size
            kind = Opcode.RDMA_WRITE_WITH_IMM if last and imm is not None else opcode
            addr = region.addr + start + done
            if part or imm is not None:
                if len(under_way) == _GROUP:
                    await self._ended(under_way.popleft())
                under_way.append(
                    await posted(int(kind), region, addr, part, where + done, rkey, imm or 0)
                )
            done += part
            if last:
                break
        for operation in under_way:
            await self._ended(operation)

    async def _ended(self, operation: Operation) -> None:
        try:
            await operation
        except FlushedError as exc:
            raise self.operations.lost() from exc
