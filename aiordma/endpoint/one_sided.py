"""One-sided operations: READs, WRITEs and atomics on memory that the peer has exposed.

Theory of operation
    An access that the peer's adapter refuses ends the connection for both sides.  So everything
    that can be checked here is checked before the access is posted, and raises an exception.

    One check is whose memory a name stands for.  The peer tells the identity of its protection
    domain (docs/wire.md, "Identity"), and a name of any other owner is refused, as is one whose
    exposure has ended as far as the peer has said.  A peer that has not said so yet is asked, and
    the first operation waits for its answer.  What waits in line is checked again before it is
    posted.

    The adapter needs registered memory on this side.  Memory that the program has registered
    (`register`) is used as it is.  Up to 64 KiB of other memory are copied through a buffer that
    stays registered, because a copy is cheaper than a registration.  Anything larger is registered
    for the operation; or copied in parts, if it is memory that the kernel refuses to pin, as some
    file mappings.

    A call waits for its turn first, and only then gets memory.  A copied transfer needs the number
    of an operation before it gets a buffer, and the number of concurrent registrations is limited,
    too.  So however many calls wait, they use no memory.

    The completion of a READ or an atomic does not guarantee that all of its data have arrived.  C
    checks that (`_core/operation.c`), and such an operation ends with 0 bytes.

    C handles the common cases without Python: an access in one work request, of registered memory,
    or of a small buffer, or an atomic, once there is a registered buffer to copy it through.
    Everything else, and every access that is to be refused, is handled here.

    A long transfer is posted in pieces of 1 MiB, a few at a time, so that it does not delay the
    messages of the connection, and stays below every adapter's limit for a work request.

    C also handles the completions (`_core/connection.c`): the drain directly resumes the task that
    awaits an operation, without a future.  Only failed operations come to Python.

    There are `one_sided_depth` operations.  A task that finds none free waits in line, and gets the
    number of the next one that ends.  Until it has run, no later task gets a number, so that calls
    that have waited are posted in their order.  A batch (endpoint/batch.py) has at most all
    numbers, and takes its turn in the line with each chain.

    The completion queue of a connection usually wakes the loop for messages of the peer only, not
    for completions of this side's own work requests (`Completions.listen`).  So the connection
    listens for those from the first operation until some time after the last.  It does not stop at
    once, because each change costs a system call.

    If an operation is flushed before the cause of the connection's end is known, it ends only when
    that is known.  So its exception names the cause, and the program's next call finds the
    connection lost.

    Parts of a `Memory` are lent here, too, because binding the window of a part is a work request,
    which takes the place of an operation in the send queue.

    A cancellation ends the wait, not the transfer.  The local memory stays registered until the
    completion, or until the queue pair is gone.  The buffer of a canceled operation does not return
    to the pool; it is deregistered, which waits for the completion.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import weakref
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from aiordma._core import (
    LARGEST_REQUEST,
    REFUSED_REVOKED,
    MessageState,
    Operation,
    may_land,
)
from aiordma.arguments import bytes_of, fitting, seconds_left
from aiordma.endpoint.config import COPIED_BYTES, ConnectionConfig
from aiordma.endpoint.lease import Lease, rights_of
from aiordma.endpoint.link import Link, lent
from aiordma.endpoint.notes import NoteBook
from aiordma.endpoint.outcome import Outcome
from aiordma.errors import (
    ConnectionLostError,
    FlushedError,
    NotSupportedError,
    ResourceClosedError,
    StaleRegionError,
    completion_error,
    errno_error,
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

__all__ = ["OneSided", "Operations", "check_remote", "stale_error"]

_COPY = 64 * 1024  # the largest transfer that is copied, in bytes
_GROUP = 4  # how many work requests of one transfer are in flight at a time
_REMOTE = int(Access.REMOTE_READ | Access.REMOTE_WRITE | Access.REMOTE_ATOMIC)
_LINGER_S = 0.5  # how long a connection goes on listening after its last operation, in seconds
_IDENTITY_S = 30.0  # how long an operation waits for the peer to say whose memory is its own
_FLUSHED = int(WCStatus.WR_FLUSH_ERR)
_NAMES = {Opcode.ATOMIC_FETCH_AND_ADD: "fetch_add", Opcode.ATOMIC_CMP_AND_SWP: "compare_swap"}
_IWARP_HINT = "iWARP does not say why; an access that the peer's adapter refuses ends like this"


def _stop_listening(reference: weakref.ref[Operations]) -> None:
    operations = reference()
    if operations is not None:
        operations._stop_listening_if_idle()


def _lost_error(outcome: Outcome, context: Context) -> BaseException:
    """The exception of `Operations.lost`."""
    if outcome.decided:
        failure = outcome.failure()
    else:
        failure = ConnectionLostError(errno.ECONNRESET, "the connection is lost")
    if isinstance(failure, ConnectionLostError) and context.is_iwarp:
        failure.hint = _IWARP_HINT
    return failure


class Operations:
    """The operations of one connection that Python posts, or that fail.

    Attributes:
        registering: Limits how many transfers register memory of the program at a time.
    """

    __slots__ = (
        "__weakref__", "_allowed", "_c", "_depth", "_line", "_link", "_listening", "_outcome",
        "_unexplained", "_waiting", "registering",
    )  # fmt: skip

    def __init__(self, link: Link, config: ConnectionConfig, outcome: Outcome) -> None:
        self._link = link
        self._c: MessageState = link.state
        self._depth = config.one_sided_depth
        self._allowed = False  # before the first operation
        self._outcome = outcome
        self.registering: Credits = Credits(config.one_sided_depth)
        self._line: WaitLine[int] | None = None  # made for the first task that waits
        self._waiting = 0  # tasks in line, and those that were granted a number and have not run
        self._unexplained: list[int] = []  # flushed operations, which end with the connection
        self._listening: Timer | None = None  # runs while the link listens for operations

    async def number(self) -> int:
        """Wait in line for the number of a free operation.

        The caller then has to post with it, or to call `release_number`.

        Raises:
            ConnectionLostError, ResourceClosedError: The connection is over.
            OSError: The completion queue cannot grow, because there is no memory.

        Cancellation: ends the wait.
        """
        self._listen()
        number = self.free_number()
        return await self._wait_for_number() if number is None else number

    def free_number(self) -> int | None:
        """Take the number of a free operation; None if there is none, or others wait for one."""
        return None if self._waiting else self._c.take_number()

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
        """Post one work request.

        Args:
            number: The result of `number`, which is released if the request cannot be posted.
            opcode: A value of `Opcode`.
            region: The local memory, which stays registered until the operation has ended.
            addr: The address of the first local byte, inside `region`.
            size: The number of bytes; 0 for an empty WRITE.
            where: The address on the peer's side.
            rkey: The peer's key.
            compare_add: The operand of an atomic, or the immediate of a WRITE with immediate.
            swap: The second operand of an atomic.

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
                self.release_number(number)
        if operation is None:
            region._require()  # raises if the connection has ended, and has closed the region
        return self._require_posted(operation)

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
        """Post one work request with a copy of `local`; None if C has no room for the copy.

        The arguments are those of `post`.  If the result is None, the caller still owns the number.
        """
        try:
            operation = self._c.operate_copied(
                number, opcode, local, where, rkey, compare_add, swap
            )
        except BaseException:
            self.release_number(number)
            raise
        if operation is None:
            return None
        if not isinstance(operation, Operation):
            self.release_number(number)
        return self._require_posted(operation)

    def _require_posted(self, operation: Operation | int | None) -> Operation:
        """Return the operation; raise if C has not posted it, and returned None or an errno."""
        if isinstance(operation, Operation):
            return operation
        if operation is not None:
            self._link.check(operation)  # the post has failed, and with it the connection
        raise self.lost()

    async def bind(self, window: MemoryWindow, part: SGE, rights: Access) -> None:
        """Bind a memory window, which gives the peer access to a part of a region.

        Raises:
            ConnectionLostError, ResourceClosedError: The connection is over.
            CompletionError: The adapter refused, and the connection breaks.

        Cancellation: ends the wait; the window may be bound.
        """
        number = await self.number()
        try:
            await window._bind(self._link.qp, part.mr, part.offset, len(part), rights)
        except (FlushedError, ResourceClosedError) as exc:
            raise self.lost() from exc
        finally:
            if window._task is None:
                self.release_number(number)
            else:  # the work request is still in flight
                window._task.add_done_callback(lambda _: self.release_number(number))

    async def _wait_for_number(self) -> int:
        if self._line is None:
            self._line = WaitLine()
        number = self._line.wait(self.release_number)
        self._waiting += 1
        self._c.await_number(self._grant_numbers)
        try:
            return await number
        finally:
            self._waiting -= 1
            self._grant_numbers()

    def release_number(self, number: int) -> None:
        """Return a number that was not used, or is not used any more."""
        self._c.release_number(number)
        self._grant_numbers()

    def _grant_numbers(self) -> None:
        """Grant free numbers to tasks in line."""
        line = self._line
        while line and line.next_size and (number := self._c.take_number()) is not None:
            line.grant(number)
        if not self._waiting:
            self._c.await_number(None)

    def on_ended(self, number: int, record: WCRecord) -> None:
        """Handle a completion that C has left to Python, because it or an earlier one failed."""
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
        if self._waiting:
            self._grant_numbers()

    def explained(self) -> None:
        """End the flushed operations, because the cause of the connection's end is known now."""
        flushed, self._unexplained = self._unexplained, []
        for number in flushed:
            self._end(number, completion_error(WCStatus.WR_FLUSH_ERR))

    def _end_all(self) -> None:
        """End all operations that were not flushed, because the queue pair is being destroyed.

        Their memory stays registered until the queue pair is gone.
        """
        qp = self._link.qp
        self._c.forget_done()
        for number in range(self._depth):
            region = self._c.ended(number, completion_error(WCStatus.WR_FLUSH_ERR), False)
            if region is not None:
                qp._when_gone(region._transferred)
        if self._line is not None:
            self._line.fail(self.lost)
            self._line = None
            self._c.await_number(None)  # it refers to this object
        # Not `self.lost`: `registering` would refer to this object, which would make a cycle.
        self.registering.fail(functools.partial(_lost_error, self._outcome, self._link.context))
        if self._listening is not None:
            self._listening.cancel()
            self._link.completions.expect(answers=False)

    def lost(self) -> BaseException:
        """The exception for an operation that has failed because the connection is over."""
        return _lost_error(self._outcome, self._link.context)

    # Listening for completions

    def _listen(self) -> None:
        """Have the link listen for completions; for the first operation, allocate all.

        Raises:
            OSError: The completion queue cannot grow, because there is no memory.
        """
        self.allow()
        self._c.listen_for_operations()
        if self._listening is None and not self._link.closed:
            self._link.listen()
            self._link.completions.expect(answers=True)
            self._set_timer()

    def allow(self) -> None:
        """Allocate all, unless that was done.

        Raises:
            OSError: The completion queue cannot grow, because there is no memory.
        """
        if not self._allowed:
            self._link.qp._expect(self._depth)
            self._c.operate_on(SGE, MemoryRegion, RemoteRegion, self._link.pd)
            self._c.allow_operations(self._depth, self._link.qp._read_depth != 0)
            self._allowed = True
            self._link.at_close(self._end_all)

    def _set_timer(self) -> None:
        # A weak reference, so that the timer does not keep a connection alive.
        self._listening = call_later(
            self._link.loop, _LINGER_S, functools.partial(_stop_listening, weakref.ref(self))
        )

    def _stop_listening_if_idle(self) -> None:
        """Have the link stop listening, if there was no operation since the last call."""
        if self._link.closed:
            return
        # A task may have called `_listen` long ago, and still wait in line, or for its memory.
        if not self._c.rest_operations():
            self._set_timer()
        else:
            self._listening = None
            self._link.completions.expect(answers=False)
            self._link.completions.unlisten()


def check_remote(remote: Any) -> None:
    """Raise TypeError unless it is a RemoteRegion."""
    if not isinstance(remote, RemoteRegion):
        # Do not show the value: it may be the bytes of a region, which contain the key.
        made = "; RemoteRegion.from_bytes() makes one of the bytes that the peer has sent"
        msg = f"remote has to be a RemoteRegion, not {type(remote).__name__}{made}"
        raise TypeError(msg)


def stale_error(
    refused: int, operation: str, posted: str = "nothing was posted"
) -> StaleRegionError:
    """The exception for memory that is refused with this REFUSED_ number."""
    if refused == REFUSED_REVOKED:
        text = "the peer has ended the exposure of this memory"
    else:
        text = (
            "the region is not memory of the peer of this connection: it is of an earlier life of "
            "its program, or of another connection"
        )
    return StaleRegionError(f"{text}; {posted}", operation=operation)


def _release(local: memoryview | SGE) -> None:
    """Release the buffer after an exception, whose traceback keeps the frames that refer to it."""
    if isinstance(local, memoryview):
        local.release()


class OneSided:
    """READs, WRITEs and atomics of one connection, and the memory that it registers or leases.

    Attributes:
        operations: The operations.
        memory: Memory that the peer may know a key of: that of leases, and regions of the program
            with remote rights.  It is closed with the connection, in the order of registration; a
            set would have it in the order of addresses, which is different each time.
    """

    __slots__ = (
        "_cache", "_identified", "_link", "_local_regions", "_outcome", "_raw", "memory",
        "operations",
    )  # fmt: skip

    def __init__(self, link: Link, config: ConnectionConfig, outcome: Outcome) -> None:
        self._link = link
        self.operations: Operations = Operations(link, config, outcome)
        self._outcome = outcome
        self._raw = config.raw
        self._identified: asyncio.Future[None] | None = (
            None  # operations wait for the peer's answer
        )
        self.memory: dict[MemoryRegion | LentPart, None] = {}
        # Weak references, because nobody can use such a region once the program has dropped it.
        self._local_regions: weakref.WeakKeyDictionary[MemoryRegion, None] = (
            weakref.WeakKeyDictionary()
        )
        link.at_close(self._close_memory)
        self._cache: RegistrationCache | None = None
        if config.registration_cache_size:
            self._cache = RegistrationCache(link.pd, max_bytes=config.registration_cache_size)
            link.at_close(self._cache.close)

    async def transfer(
        self, opcode: Opcode, remote: RemoteRegion, buffer: Any, offset: int, imm: int | None = None
    ) -> int:
        """READ into memory of the program, or WRITE from it, and return the number of bytes.

        Args:
            opcode: RDMA_READ or RDMA_WRITE.
            remote: The peer's memory.
            buffer: Memory of the program, as `Connection.read` and `write` accept it.
            offset: The first byte in `remote`.
            imm: The immediate of a WRITE to a raw peer; otherwise None.
        """
        # If the connection ends, the program's regions are closed.  The exception for that is
        # replaced by the one that names the cause.
        with self._outcome.explaining():
            return await self._transfer(opcode, remote, buffer, offset, imm)

    async def _transfer(
        self, opcode: Opcode, remote: RemoteRegion, buffer: Any, offset: int, imm: int | None
    ) -> int:
        reads = opcode == Opcode.RDMA_READ
        check_remote(remote)
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
            await self.require_current(remote, opcode)
            if size or imm is not None:
                await self._move(opcode, local, remote, where, imm)
            return size
        except BaseException:
            _release(local)
            raise

    async def _move(
        self,
        opcode: Opcode,
        local: memoryview | SGE,
        remote: RemoteRegion,
        where: int,
        imm: int | None,
    ) -> None:
        """Post the work requests of a transfer, and wait until they have completed."""
        size = len(local)
        if isinstance(local, SGE):
            await self._post(opcode, local.mr, local.offset, size, remote, where, imm)
            return
        if size > _COPY:
            try:
                async with self._registered(local, reads=opcode == Opcode.RDMA_READ) as region:
                    await self._post(opcode, region, 0, size, remote, where, imm)
                return
            except OSError as exc:
                if not is_unpinnable(exc):
                    raise
        # The transfer is small, or of memory that the kernel refuses to pin.
        last = max(0, size - 1) // _COPY * _COPY
        for start in range(0, max(1, size), _COPY):
            number = imm if start == last else None
            kind = opcode if number is None else Opcode.RDMA_WRITE_WITH_IMM
            with local[start : start + _COPY] as part:
                await self._copied(kind, part, remote, where + start, number or 0)

    async def atomic(
        self, opcode: Opcode, remote: RemoteRegion, offset: int, compare_add: int, swap: int
    ) -> int:
        """Do an atomic operation on 8 bytes, and return their value before the operation."""
        compare_add, swap = fitting("the value", compare_add, 64), fitting("the value", swap, 64)
        check_remote(remote)
        where = remote.check(offset, 8, Access.REMOTE_ATOMIC)
        self._outcome.require_open()
        context = self._link.context
        if context.is_iwarp or context.attributes.atomic_cap == AtomicCap.NONE:
            text = f"{context.name} has no atomic operations"
            raise NotSupportedError(errno.EOPNOTSUPP, text)
        self._require_reads(opcode)
        self._link.state.allow_atomics()
        result = bytearray(8)
        with self._outcome.explaining():
            await self.require_current(remote, opcode)
            await self._copied(opcode, memoryview(result), remote, where, compare_add, swap)
        return int.from_bytes(result, "little")

    def _require_reads(self, opcode: Opcode) -> None:
        if self._link.qp._read_depth == 0:
            msg = f"{opcode.name} is not possible: the connection has initiator_depth 0"
            raise NotSupportedError(errno.EOPNOTSUPP, msg)

    # Whose memory a region is

    async def require_current(self, remote: RemoteRegion, opcode: Opcode) -> None:
        """Refuse memory that is not the peer's; a peer that has not said what is its own is asked.

        Raises:
            StaleRegionError: It is not, or the peer has said that its exposure has ended.
            TimeoutError: The peer has not answered for 30 seconds.
            ConnectionLostError, ResourceClosedError: The connection is over.

        Cancellation: ends the wait.
        """
        if remote.owner and not self._link.state.knows_peer:
            await self.ask_identity()
        self.refuse_stale(remote.owner, remote.generation, opcode)

    async def ask_identity(self) -> None:
        """Ask the peer which memory is its own, and wait for the answer.

        Raises, and cancellation: as `require_current`, but no StaleRegionError.
        """
        self._outcome.require_open()  # else nobody ends the wait
        if self._identified is None:
            self._identified = self._link.loop.create_future()
        self._link.check(self._link.state.ask_identity(True))
        # The waits share the future, so that it is not theirs to cancel.
        await asyncio.wait([self._identified], timeout=_IDENTITY_S)
        self._outcome.require_open()
        if not self._link.state.knows_peer:
            text = f"the peer has not said for {_IDENTITY_S:.0f} seconds which memory is its own"
            raise errno_error(errno.ETIMEDOUT, text)

    def refuse_stale(self, owner: int, generation: int, opcode: Opcode) -> None:
        """Raise StaleRegionError if the memory is not the peer's, or is not exposed any more."""
        refused = self._link.state.admission(owner, generation)
        if refused:
            raise stale_error(refused, opcode.name)

    def identified(self) -> None:
        """The peer has said what memory is its own, or the connection is over."""
        identified, self._identified = self._identified, None
        if identified is not None and not identified.done():
            identified.set_result(None)

    async def _number(self, remote: RemoteRegion, opcode: Opcode) -> int:
        """As `Operations.number`; after the wait, the memory has to be the peer's still."""
        number = await self.operations.number()
        try:
            self.refuse_stale(remote.owner, remote.generation, opcode)
        except StaleRegionError:
            self.operations.release_number(number)
            raise
        return number

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
            access |= self._read_target_access()
        with self._outcome.explaining():
            if device is None:
                region = await self._link.register(buf, access)
            else:
                pd = self._link.pd
                region = await call_blocking(
                    lambda: register_device_memory(pd, device, access), undo=MemoryRegion.close
                )
        if named:
            for known in [known for known in self.memory if known.closed]:
                del self.memory[known]
            self.memory[region] = None
        else:
            self._local_regions[region] = None
        return region

    def require_shared(self, part: SGE, rights: Access | None = None) -> Memory:
        """Return the `Memory` that the connection shares, if `part` belongs to it.

        Args:
            part: The part.
            rights: The rights of a lease, which are then checked; None if there is no lease.

        Raises:
            ValueError: The part belongs to other memory.
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
        self,
        buf: Any,
        timeout: float | None,
        *,
        read: bool,
        write: bool,
        atomic: bool,
        notes: NoteBook | None,
    ) -> Lease:
        """Make a lease, as `Connection.expose` says."""
        buf = buffer_of("memory to expose", buf)
        rights = rights_of(self._link.context, buf, read=read, write=write, atomic=atomic)
        if timeout is not None:
            timeout = seconds_left("timeout", timeout)
        lend = None
        if isinstance(buf, SGE):
            self.require_shared(buf, rights)
            lend = self.lend
        return Lease(self._link, self._outcome, self.memory, buf, rights, timeout, lend, notes)

    async def lend(self, part: SGE, rights: Access, *, message: bool = False) -> LentPart:
        """Lend a part of the shared memory to the peer.

        Raises:
            RdmaOSError: EBUSY, it overlaps a part that is lent to another connection.
            OSError: The adapter has no more windows.
            ConnectionLostError, ResourceClosedError: The connection is over.

        Cancellation: the part is not lent.
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
        """How to send a part of the shared memory as a message.

        Returns:
            The bytes, and a function that lends them to the peer, so that it can read them in
            place.  None instead of the function if the message is sent like any other, because it
            is small enough to be copied, or because the adapter would give the peer access to more
            than it is trusted with.

        Raises:
            ValueError: The part belongs to other memory.
        """
        memory = self.require_shared(part)
        view = part.mr.view[part.offset : part.offset + len(part)]
        if self._raw or len(part) <= COPIED_BYTES or not memory._can_lend(Access.REMOTE_READ):
            return view, None
        return view, functools.partial(self.lend, part, Access.REMOTE_READ, message=True)

    def _close_memory(self) -> None:
        memory = [*self.memory, *self._local_regions]
        for region in memory:
            region.close()
        # The end of a connection waits for its protection domain, and so for all memory in it.  A
        # shared domain stays, so it has to wait for the memory itself.
        if not self._link.own_pd:
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
        if writable and not may_land(int(buffer.mr.access)):
            msg = "the region is registered without LOCAL_WRITE; nothing can be read into it"
            raise BufferError(msg)
        buffer.mr._require()
        return buffer

    def _read_target_access(self) -> Access:
        """The access flags of memory to READ into; on iWARP, its data arrive as remote WRITEs."""
        access = Access.LOCAL_WRITE
        return access | Access.REMOTE_WRITE if self._link.context.is_iwarp else access

    @contextlib.asynccontextmanager
    async def _registered(self, local: memoryview, *, reads: bool) -> AsyncIterator[MemoryRegion]:
        """Register memory of the program for a transfer, when it is its turn."""
        # A WRITE only reads local memory, and every region allows that.
        access = self._read_target_access() if reads else Access(0)
        # On iWARP, the peer learns the key of memory to READ into, and can write there as long as
        # it stays registered.
        exposed = bool(access & Access.REMOTE_WRITE)
        memory = lent(local)
        registering = self.operations.registering
        await registering.acquire()
        try:
            # Do not cache memory of a received message, which is going to be released soon.
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
            if exposed or registering.waiting:  # the next transfer in line needs memory, too
                await region.wait_closed()
            elif len(local) > INLINE_BYTES:
                # A thread deregisters it, and the buffer stays exported until then.
                with contextlib.suppress(TimeoutError):
                    await region.wait_closed(DEREGISTER_S)
        finally:
            registering.release()

    async def _copied(
        self,
        opcode: Opcode,
        local: memoryview,
        remote: RemoteRegion,
        where: int,
        compare_add: int,
        swap: int = 0,
    ) -> None:
        """Do one operation on up to 64 KiB of the program, by copying them.

        C copies through its bounce region if that has room, and otherwise they go through a buffer
        of the pool.  The first buffer that is taken from the pool becomes the bounce region.
        """
        operations, kind, size, rkey = self.operations, int(opcode), len(local), remote.rkey
        number = await self._number(remote, opcode)
        operation = operations.post_copied(number, kind, local, where, rkey, compare_add, swap)
        if operation is not None:
            self._require_all(opcode, await self._ended(operation))
            return
        pool = self._link.buffers.pool
        try:
            region = await pool.take(max(size, 1))
        except BaseException:
            operations.release_number(number)
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
            pool.drop(region)  # not `give`, because the adapter may still use it
            raise
        pool.give(region)
        if self._link.state.bounce_region is None and pool.lend(region):
            self._link.state.set_bounce(region)

    # Requests

    async def _post(
        self,
        opcode: Opcode,
        region: MemoryRegion,
        start: int,
        size: int,
        remote: RemoteRegion,
        where: int,
        imm: int | None = None,
    ) -> None:
        """Post a transfer in pieces, and wait for all of them; the last has the immediate."""
        under_way: deque[Operation] = deque()
        operations, done, moved = self.operations, 0, 0
        while True:
            part = min(LARGEST_REQUEST, size - done)
            last = done + part == size
            kind = Opcode.RDMA_WRITE_WITH_IMM if last and imm is not None else opcode
            addr = region.addr + start + done
            if part or imm is not None:
                if len(under_way) == _GROUP:
                    moved += await self._ended(under_way.popleft())
                try:
                    number = await self._number(remote, opcode)
                except StaleRegionError:
                    for operation in under_way:  # they use the memory of the program
                        await self._ended(operation)
                    raise
                under_way.append(
                    operations.post(
                        number, int(kind), region, addr, part, where + done, remote.rkey, imm or 0
                    )
                )
            done += part
            if last:
                break
        for operation in under_way:
            moved += await self._ended(operation)
        # Checked only now, because the memory is in use until all pieces have completed.
        self._require_all(opcode, moved == size)

    @staticmethod
    def _require_all(opcode: Opcode, complete: object) -> None:
        """Raise if a READ or an atomic has completed before all of its data were there."""
        if not complete and opcode == Opcode.RDMA_READ:
            raise read_incomplete_error()
        if not complete and opcode in ATOMICS:
            raise result_lost_error(_NAMES[opcode])

    async def _ended(self, operation: Operation) -> int:
        """Wait for an operation, and return how many bytes it has moved."""
        try:
            return await operation
        except FlushedError as exc:
            raise self.operations.lost() from exc
