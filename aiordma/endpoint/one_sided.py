"""One-sided operations of a connection: READ, WRITE and atomics on memory that the peer has opened.

Theory of operation
    An access that the peer's adapter refuses costs both sides the connection.  So a wrong access is
    refused here, before it is posted, by an exception.

    The adapter needs registered memory on this side.  Memory that the program has registered
    (`register`) is used as it is.  Of other memory up to 64 KiB are copied through memory that is
    registered already, because a copy is cheaper than a registration; more is registered for the
    operation, or copied in parts where the kernel does not pin it, as some mappings of files.

    A call gets its turn first, and then memory.  A transfer that is copied has the number of its
    operation before; of the others as many at a time have their memory registered as there are
    operations.  So calls that wait hold nothing, however many there are.

    A completion of a READ or an atomic does not prove that all of its data are there: C looks
    (`_core/operation.c`), and an operation without them ends with 0 bytes.

    C checks and posts the frequent cases in one request before Python is asked: registered memory,
    and buffers that are copied, once they have a buffer of the pool to go through
    (`_core/operation.c`).  The transfers that C does not take come here, to be done or refused.

    Long transfers are posted in pieces of 1 MiB, a few at a time, so that they do not hold up the
    messages of the connection, and no adapter's limit of a request matters.

    C takes the completions, too (`_core/message.c`), and the drain resumes the task that awaits the
    operation, without a future.  Operations that fail come to Python.

    There are `one_sided_depth` operations.  A task that finds none free waits in line, and gets the
    number of the next that ends; while there is a line no other task gets a number.

    A connection wakes the loop for solicited messages of the peer, and for its own completions only
    while a task waits for them (`Completions.listen`).  The connection listens from the first
    operation until a while after the last: each change costs a system call.

    An operation that is flushed before the connection's end is known ends with the connection, so
    that its error has the cause, and the program's next call finds the connection lost, too.

    Parts of a `Memory` are lent here, because to bind the window that opens a part is a request,
    too, and takes the place of an operation in the send queue.

    Cancelling ends the wait, not the transfer.  The local memory is retained until the completion,
    or until the queue pair is gone; a buffer under a canceled operation never returns to the
    pool: it is deregistered, which waits for the completion.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import weakref
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from aiordma._core import LARGEST_REQUEST, MessageState, Operation
from aiordma.arguments import bytes_of, fitting
from aiordma.endpoint.config import COPIED_BYTES, ConnectionConfig
from aiordma.endpoint.lease import Lease, rights_of
from aiordma.endpoint.link import Link, lent
from aiordma.endpoint.outcome import Outcome
from aiordma.errors import (
    ConnectionLostError,
    FlushedError,
    NotSupportedError,
    ResourceClosedError,
    completion_error,
    read_incomplete_error,
    result_lost_error,
)
from aiordma.loop.credits import Credits
from aiordma.loop.timers import Timer, call_later
from aiordma.loop.wait_line import WaitLine
from aiordma.loop.workers import call_blocking
from aiordma.memory.cache import RegistrationCache
from aiordma.memory.large_memory import DEREGISTER_S
from aiordma.memory.lent import LentPart
from aiordma.memory.remote import RemoteRegion
from aiordma.memory.shared import Memory
from aiordma.tensors import buffer_of, device_memory_of
from aiordma.verbs.context import Context
from aiordma.verbs.device_memory import register_device_memory
from aiordma.verbs.enums import Access, AtomicCap, Opcode, WCStatus
from aiordma.verbs.mr import INLINE_BYTES, MemoryRegion, check_memory, is_unpinnable
from aiordma.verbs.mw import MemoryWindow
from aiordma.verbs.wc import WCRecord
from aiordma.verbs.wr import ATOMICS, SGE

__all__ = ["OneSided", "Operations"]

_COPY = 64 * 1024
_GROUP = 4  # requests of a transfer that are posted at a time
_LOCAL_WRITE = int(Access.LOCAL_WRITE)  # a number: `&` of flags is slow
_REMOTE = int(Access.REMOTE_READ | Access.REMOTE_WRITE | Access.REMOTE_ATOMIC)
_LINGER_S = 0.5
_FLUSHED = int(WCStatus.WR_FLUSH_ERR)
_NAMES = {Opcode.ATOMIC_FETCH_AND_ADD: "fetch_add", Opcode.ATOMIC_CMP_AND_SWP: "compare_swap"}
_IWARP_HINT = "iWARP does not say why; an access that the peer's adapter refuses ends like this"


def _transferred(region: MemoryRegion, _: object) -> None:
    region._transferred()


def _rest(reference: weakref.ref[Operations]) -> None:
    operations = reference()
    if operations is not None:
        operations._rest()


def _lost(outcome: Outcome, context: Context) -> BaseException:
    """The exception of `Operations.lost`."""
    if outcome.decided:
        failure = outcome.failure()
    else:
        failure = ConnectionLostError(errno.ECONNRESET, "the connection is lost")
    if isinstance(failure, ConnectionLostError) and context.is_iwarp:
        failure.hint = _IWARP_HINT
    return failure


class Operations:
    """The requests of one connection, from the post to the end, beside those that C posts alone.

    Attributes:
        registering: Places for transfers that register memory of the program.
    """

    __slots__ = (
        "__weakref__", "_c", "_depth", "_line", "_link", "_outcome", "_resting",
        "_unexplained", "registering",
    )  # fmt: skip

    def __init__(self, link: Link, config: ConnectionConfig, outcome: Outcome) -> None:
        self._link = link
        self._c: MessageState = link.state
        self._depth = config.one_sided_depth
        self._outcome = outcome
        self.registering: Credits = Credits(config.one_sided_depth)
        self._line: WaitLine[int] | None = None  # made for the first task that waits
        self._unexplained: list[int] = []  # flushed; these end with the connection
        self._resting: Timer | None = None  # set while the link listens

    async def number(self) -> int:
        """Wait in line for the number of an operation: the caller posts with it, or gives it back.

        Raises:
            ConnectionLostError, ResourceClosedError: The connection is over.
            OSError: The completion queue cannot grow: out of memory.

        Cancellation: leaves the line.
        """
        self._attend()
        if self._line or not self._c.n_operations_free:
            return await self._wait()
        return self._c.take_number()

    def post(
        self,
        number: int,
        opcode: int,
        region: MemoryRegion,
        addr: int,
        size: int,
        where: int,
        rkey: int,
        compare_add: int = 0,
        swap: int = 0,
    ) -> Operation:
        """Post one request.

        Args:
            number: Of `number`; given back if nothing was posted.
            opcode: A number of `Opcode`.
            region: The local memory; it stays registered until the operation has ended.
            addr: Address of the first local byte, inside of `region`.
            size: Bytes; 0 for a WRITE of nothing.
            where: The peer's address.
            rkey: The peer's key.
            compare_add: Operand of an atomic; the immediate of a WRITE with immediate.
            swap: Operand of an atomic.

        Raises:
            ConnectionLostError, ResourceClosedError: The connection is over.
        """
        operation: Operation | int | None = None
        try:
            operation = self._c.operate(
                number, opcode, addr, size, where, rkey, compare_add, swap, region
            )
        finally:
            if not isinstance(operation, Operation):
                self.give(number)
        if operation is None:
            region._require()  # the connection has ended since
        return self._taken(operation)

    def post_copied(
        self,
        number: int,
        opcode: int,
        local: memoryview,
        where: int,
        rkey: int,
        compare_add: int,
        swap: int,
    ) -> Operation | None:
        """As `post`, of bytes that C copies; None if C has no room for them.

        The number is then still the caller's.
        """
        try:
            operation = self._c.operate_copied(
                number, opcode, local, where, rkey, compare_add, swap
            )
        except BaseException:
            self.give(number)
            raise
        if operation is None:
            return None
        if not isinstance(operation, Operation):
            self.give(number)
        return self._taken(operation)

    def _taken(self, operation: Operation | int | None) -> Operation:
        """The operation, if C has posted one; it says why not by None, or the errno of the post."""
        if isinstance(operation, Operation):
            return operation
        if operation is not None:
            self._link.check(operation)  # the adapter took no request: the connection cannot go on
        raise self.lost()

    async def bind(self, window: MemoryWindow, part: SGE, rights: Access) -> None:
        """Open a part of a region to the peer by a window.

        Raises:
            ConnectionLostError, ResourceClosedError: The connection is over.
            CompletionError: The adapter refused; the connection cannot go on.

        Cancellation: ends the wait; the window may be bound.
        """
        number = await self.number()
        try:
            await window._bind(self._link.qp, part.mr, part.offset, len(part), rights)
        except (FlushedError, ResourceClosedError) as exc:
            raise self.lost() from exc
        finally:
            if window._task is None:
                self.give(number)
            else:  # the request is under way
                window._task.add_done_callback(lambda _: self.give(number))

    async def _wait(self) -> int:
        if self._line is None:
            self._line = WaitLine()
            self._c.room = self._room
        number = self._line.wait(self.give)
        self._c.operations_wanted = True
        try:
            return await number
        except BaseException:
            self._room()
            raise

    def give(self, number: int) -> None:
        """Note that a number is free again."""
        self._c.give_number(number)
        self._room()

    def _room(self) -> None:
        """Grant free numbers to the tasks that wait."""
        c = self._c
        line = self._line
        while line and line.next_size and c.n_operations_free:
            line.grant(c.take_number())
        c.operations_wanted = bool(line)

    def on_ended(self, number: int, record: WCRecord) -> None:
        """Take a completion that C has left to Python: the operation, or one before it, failed."""
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
        """End the flushed operations: the cause of the connection's end is known."""
        flushed, self._unexplained = self._unexplained, []
        for number in flushed:
            self._end(number, completion_error(WCStatus.WR_FLUSH_ERR))

    def _drop(self) -> None:
        """End the operations that the adapter has not flushed: the queue pair is being destroyed.

        Their memory stays registered until the queue pair is gone.
        """
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
        # Not `self.lost`, which the credits would keep: a cycle.
        self.registering.fail(functools.partial(_lost, self._outcome, self._link.context))
        if self._resting is not None:
            self._resting.cancel()
            self._link.completions.expect(answers=False)

    def lost(self) -> BaseException:
        """The exception for an operation that failed because the connection had ended."""
        return _lost(self._outcome, self._link.context)

    # Attention

    def _attend(self) -> None:
        """Have the link listen; with the first operation, make room for all.

        Raises:
            OSError: The completion queue cannot grow: out of memory.
        """
        if not self._c.n_operations:
            self._link.qp._expect(self._depth)
            self._c.allow_operations(self._depth)
            self._link.at_close(self._drop)
            self._c.may_read = self._link.qp._read_depth != 0
        self._c.attended = True
        if self._resting is None and not self._link.closed:
            self._link.listen()
            self._link.completions.expect(answers=True)
            self._set_timer()

    def _set_timer(self) -> None:
        # Weak: a connection that its program forgets is collected at once.
        self._resting = call_later(
            self._link.loop, _LINGER_S, functools.partial(_rest, weakref.ref(self))
        )

    def _rest(self) -> None:
        """Have the link listen no more, if there was no operation since the last call."""
        if self._link.closed:
            return
        # A task that waits in line, or has its number and not posted, has attended long ago.
        if self._c.attended or self._line or self._c.n_operations_free < self._c.n_operations:
            self._c.attended = False
            self._set_timer()
        else:
            self._resting = None
            self._link.completions.expect(answers=False)
            self._link.completions.unlisten()


def _check_remote(remote: Any) -> None:
    if not isinstance(remote, RemoteRegion):
        # Its bytes are not shown: they hold the key.
        made = "; RemoteRegion.from_bytes() makes one of the bytes that the peer has sent"
        msg = f"remote has to be a RemoteRegion, not {type(remote).__name__}{made}"
        raise TypeError(msg)


def _release(local: memoryview | SGE) -> None:
    """Release the buffer after a failure: the exception keeps the frames that refer to it."""
    if isinstance(local, memoryview):
        local.release()


class OneSided:
    """The requester's side of a connection: READs, WRITEs and atomics.

    Attributes:
        operations: The requests.
        memory: What the peer may have a name of until the connection's end, which closes it: the
            memory of leases, and regions of the program with remote rights.
    """

    __slots__ = ("_cache", "_link", "_local_regions", "_outcome", "_raw", "memory", "operations")

    def __init__(self, link: Link, config: ConnectionConfig, outcome: Outcome) -> None:
        self._link = link
        self.operations: Operations = Operations(link, config, outcome)
        self._outcome = outcome
        self._raw = config.raw
        self.memory: set[MemoryRegion | LentPart] = set()
        # Without a use for anyone once the program has dropped them, so weak.
        self._local_regions: weakref.WeakSet[MemoryRegion] = weakref.WeakSet()
        link.at_close(self._close_memory)
        self._cache: RegistrationCache | None = None
        if config.registration_cache_size:
            self._cache = RegistrationCache(link.pd, max_bytes=config.registration_cache_size)
            link.at_close(self._cache.close)

    async def transfer(
        self, opcode: Opcode, remote: RemoteRegion, buffer: Any, offset: int, imm: int | None = None
    ) -> int:
        """READ into, or WRITE out of, memory of the program; the number of bytes.

        Args:
            opcode: RDMA_READ or RDMA_WRITE.
            remote: The peer's memory.
            buffer: Memory of the program, as `Connection.read` and `write` take it.
            offset: First byte in `remote`.
            imm: The adapter's immediate; of a WRITE to a raw peer.
        """
        with self._outcome.explaining():  # the end of the connection closes the program's regions
            return await self._transfer(opcode, remote, buffer, offset, imm)

    async def _transfer(
        self, opcode: Opcode, remote: RemoteRegion, buffer: Any, offset: int, imm: int | None
    ) -> int:
        reads = opcode == Opcode.RDMA_READ
        _check_remote(remote)
        local = self._local(buffer, writable=reads)
        try:
            size = len(local)
            where = remote.check(offset, size, Access.REMOTE_READ if reads else Access.REMOTE_WRITE)
            self._outcome.require_open()
            if imm is not None and self._link.context.is_iwarp:
                text = f"{self._link.context.name} is iWARP, which has no immediates"
                raise NotSupportedError(errno.EOPNOTSUPP, text)
            if size and reads:
                self._require_reads(opcode)
            if size or imm is not None:
                await self._move(opcode, local, where, remote.rkey, imm)
            return size
        except BaseException:
            _release(local)
            raise

    async def _move(
        self, opcode: Opcode, local: memoryview | SGE, where: int, rkey: int, imm: int | None
    ) -> None:
        """Do the requests of a transfer, and wait for their end."""
        size = len(local)
        if isinstance(local, SGE):
            await self._post(opcode, local.mr, local.offset, size, where, rkey, imm)
            return
        if size > _COPY:
            try:
                async with self._registered(local, reads=opcode == Opcode.RDMA_READ) as region:
                    await self._post(opcode, region, 0, size, where, rkey, imm)
                return
            except OSError as exc:
                if not is_unpinnable(exc):
                    raise
        # Nothing to register, or memory that the kernel does not pin.
        last = max(0, size - 1) // _COPY * _COPY
        for start in range(0, max(1, size), _COPY):
            number = imm if start == last else None
            kind = opcode if number is None else Opcode.RDMA_WRITE_WITH_IMM
            with local[start : start + _COPY] as part:
                await self._copied(kind, part, where + start, rkey, number or 0)

    async def atomic(
        self, opcode: Opcode, remote: RemoteRegion, offset: int, compare_add: int, swap: int
    ) -> int:
        """Do an atomic operation on 8 bytes; their value before it."""
        compare_add, swap = fitting("the value", compare_add, 64), fitting("the value", swap, 64)
        _check_remote(remote)
        where = remote.check(offset, 8, Access.REMOTE_ATOMIC)
        self._outcome.require_open()
        context = self._link.context
        if context.is_iwarp or context.attributes.atomic_cap == AtomicCap.NONE:
            text = f"{context.name} has no atomic operations"
            raise NotSupportedError(errno.EOPNOTSUPP, text)
        self._require_reads(opcode)
        result = bytearray(8)
        with self._outcome.explaining():
            await self._copied(opcode, memoryview(result), where, remote.rkey, compare_add, swap)
        return int.from_bytes(result, "little")

    def _require_reads(self, opcode: Opcode) -> None:
        if self._link.qp._read_depth == 0:
            msg = f"{opcode.name} is not possible: the connection has initiator_depth 0"
            raise NotSupportedError(errno.EOPNOTSUPP, msg)

    # Local memory

    async def register(self, buf: Any, access: Access) -> MemoryRegion:
        """Register memory of the program, as `Connection.register` says."""
        access = Access(fitting("access", access, 31))
        device = device_memory_of("memory to register", buf)
        if device is None:
            buf = buffer_of("memory to register", buf)
            check_memory(buf, access)
        self._outcome.require_open()
        named = bool(int(access) & _REMOTE)
        if access & Access.LOCAL_WRITE:
            access |= self._landing()
        with self._outcome.explaining():
            if device is None:
                region = await self._link.register(buf, access)
            else:
                pd = self._link.pd
                region = await call_blocking(
                    lambda: register_device_memory(pd, device, access), undo=MemoryRegion.close
                )
        if named:
            self.memory.difference_update([known for known in self.memory if known.closed])
            self.memory.add(region)
        else:
            self._local_regions.add(region)
        return region

    def require_shared(self, part: SGE, rights: Access | None = None) -> Memory:
        """The memory that the connection shares, if `part` is of it.

        Args:
            part: A part.
            rights: Of a lease.

        Raises:
            ValueError: It is of other memory.
            Others: as `Memory._check`, for a lease.
        """
        memory = self._link.shared
        if memory is None or not memory._has(part):
            msg = (
                "the part is not of the memory that this connection shares: make the connection "
                "with memory="
            )
            raise ValueError(msg)
        if rights is not None:
            memory._check(part, rights)
        part.mr._require()
        return memory

    def lease(
        self, buf: Any, timeout_s: float | None, *, read: bool, write: bool, atomic: bool
    ) -> Lease:
        """A lease of memory, as `Connection.expose` says."""
        buf = buffer_of("memory to expose", buf)
        rights = rights_of(
            self._link.context, buf, read=read, write=write, atomic=atomic, timeout_s=timeout_s
        )
        lend = None
        if isinstance(buf, SGE):
            self.require_shared(buf, rights)
            lend = self.lend
        return Lease(self._link, self._outcome, self.memory, buf, rights, timeout_s, lend)

    async def lend(self, part: SGE, rights: Access, *, message: bool = False) -> LentPart:
        """Open a part of the shared memory to the peer.

        Raises:
            ResourceBusyError: It overlaps a part that is lent to another connection.
            OSError: Out of windows.
            ConnectionLostError, ResourceClosedError: The connection is over.

        Cancellation: it is closed.
        """
        memory = self.require_shared(part)
        self._outcome.require_open()
        lent_part = memory._lend(part, rights, self, message=message)
        try:
            if lent_part.window is not None:
                await self.operations.bind(lent_part.window, part, rights)
            if self._link.closed:
                raise self.operations.lost()
        except BaseException:
            lent_part.close()
            raise
        return lent_part

    def message_of(self, part: SGE) -> tuple[memoryview, Callable[[], Awaitable[LentPart]] | None]:
        """The bytes of a part that is sent, and a function that opens it to the peer.

        None in place of the function if the message goes as any other: it is copied, or the adapter
        would open more than the peers are trusted with.

        Raises:
            ValueError: The part is of other memory.
        """
        memory = self.require_shared(part)
        view = part.mr.view[part.offset : part.offset + len(part)]
        if self._raw or len(part) <= COPIED_BYTES or not memory._gives(Access.REMOTE_READ):
            return view, None
        return view, functools.partial(self.lend, part, Access.REMOTE_READ, message=True)

    def _close_memory(self) -> None:
        memory = {*self.memory, *self._local_regions}
        for region in memory:
            region.close()
        if not self._link.own_pd:  # the domain, for which a connection waits, has no other memory
            self._link.wait_for(memory)
        self.memory.clear()

    def _local(self, buffer: Any, *, writable: bool) -> memoryview | SGE:
        if isinstance(buffer, MemoryRegion):
            buffer = SGE(buffer)
        if not isinstance(buffer, SGE):
            return bytes_of("the memory of a one-sided operation", buffer, writable=writable)
        if buffer.mr.pd is not self._link.pd:
            msg = (
                "the region is not registered with this connection: use Connection.register(), or "
                "make the connection with memory= for parts of a Memory"
            )
            raise ValueError(msg)
        if writable and not int(buffer.mr.access) & _LOCAL_WRITE:
            msg = "the region is registered without LOCAL_WRITE; nothing can be read into it"
            raise BufferError(msg)
        buffer.mr._require()
        return buffer

    def _landing(self) -> Access:
        """Rights of memory for the data of a READ, which on iWARP arrive as a WRITE of the peer."""
        access = Access.LOCAL_WRITE
        return access | Access.REMOTE_WRITE if self._link.context.is_iwarp else access

    @contextlib.asynccontextmanager
    async def _registered(self, local: memoryview, *, reads: bool) -> AsyncIterator[MemoryRegion]:
        """Memory of the program, registered for a transfer in its turn."""
        # No data land in memory that is written from; every region allows local reads.
        access = self._landing() if reads else Access(0)
        # The peer learns the key of such memory, and could use it as long as that is registered.
        exposed = bool(access & Access.REMOTE_WRITE)
        memory = lent(local)
        registering = self.operations.registering
        await registering.acquire()
        try:
            # A message is released soon, and a cache would keep its memory.
            if self._cache is not None and not exposed and memory is local:
                async with self._cache.get(local, access) as region:
                    yield region
                return
            with self._outcome.explaining():
                region = await self._link.buffers.memory.registered(
                    len(local), lambda: self._link.register(memory, access)
                )
            try:
                yield region
            finally:
                region.close()
            if exposed or registering.waiting:  # the next registers memory of its own
                await region.wait_closed()
            elif (
                len(local) > INLINE_BYTES
            ):  # a thread deregisters; until then the buffer is exported
                with contextlib.suppress(TimeoutError):
                    await region.wait_closed(DEREGISTER_S)
        finally:
            registering.release()

    async def _copied(
        self,
        opcode: Opcode,
        local: memoryview,
        where: int,
        rkey: int,
        compare_add: int,
        swap: int = 0,
    ) -> None:
        """Do one request with up to 64 KiB of the program, by way of other memory.

        C copies through the memory that was lent, if there is room, else they go through a buffer
        of the pool.  The first of these is lent when it is free.
        """
        operations, kind, size = self.operations, int(opcode), len(local)
        number = await operations.number()
        operation = operations.post_copied(number, kind, local, where, rkey, compare_add, swap)
        if operation is not None:
            self._require_all(opcode, await self._ended(operation))
            return
        pool = self._link.buffers.pool
        try:
            region = await pool.take(max(size, 1))
        except BaseException:
            operations.give(number)
            raise
        try:
            if opcode != Opcode.RDMA_READ:
                region.view[:size] = local
            operation = operations.post(
                number, kind, region, region.addr, size, where, rkey, compare_add, swap
            )
            self._require_all(opcode, await self._ended(operation))
            if opcode == Opcode.RDMA_READ or opcode in ATOMICS:
                local[:] = region.view[:size]
        except BaseException:
            pool.drop(region)  # the adapter may still use the region
            raise
        pool.give(region)
        if self._link.state.lent is None and pool.lend(region):
            self._link.state.lend(region)

    # Requests

    async def _post(
        self,
        opcode: Opcode,
        region: MemoryRegion,
        start: int,
        size: int,
        where: int,
        rkey: int,
        imm: int | None = None,
    ) -> None:
        """Post the requests of a transfer, and wait for all; the last has the immediate."""
        under_way: deque[Operation] = deque()
        operations, done, came = self.operations, 0, 0
        while True:
            part = min(LARGEST_REQUEST, size - done)
            last = done + part == size
            kind = Opcode.RDMA_WRITE_WITH_IMM if last and imm is not None else opcode
            addr = region.addr + start + done
            if part or imm is not None:
                if len(under_way) == _GROUP:
                    came += await self._ended(under_way.popleft())
                number = await operations.number()
                under_way.append(
                    operations.post(
                        number, int(kind), region, addr, part, where + done, rkey, imm or 0
                    )
                )
            done += part
            if last:
                break
        for operation in under_way:
            came += await self._ended(operation)
        self._require_all(opcode, came == size)  # not before all have ended: they use the memory

    @staticmethod
    def _require_all(opcode: Opcode, complete: object) -> None:
        """Raise if the adapter has completed a READ or an atomic without all of its data."""
        if not complete and opcode == Opcode.RDMA_READ:
            raise read_incomplete_error()
        if not complete and opcode in ATOMICS:
            raise result_lost_error(_NAMES[opcode])

    async def _ended(self, operation: Operation) -> int:
        """Wait for an operation; the bytes that it has moved."""
        try:
            return await operation
        except FlushedError as exc:
            raise self.operations.lost() from exc
