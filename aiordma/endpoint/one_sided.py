"""One-sided operations of a connection: READ, WRITE and atomics on memory that the peer has opened.

Theory of operation
    What is wrong is refused before it is posted, where it costs an exception; an access that the
    peer's adapter refuses costs both sides the connection.

    The adapter needs registered memory on this side.  If the caller brings it (`register`), no byte
    is copied.  Otherwise up to 64 KiB go through a buffer of the pool, because a copy is cheaper
    than a registration, and more is registered for the time of the operation.

    Registered memory that goes in one request, which is fast, C has checked and posted before this
    is asked (`_core/operation.c`); transfers that C does not take come here, to be done or refused.

    Cancelling ends the wait, not the transfer.  A buffer under a canceled operation therefore
    never goes back to the pool: it is deregistered, which waits for the completion.

    Long transfers go out in pieces of 1 MiB, a few at a time, so that they do not hold up the
    messages of the connection, and no adapter's limit of one request matters.
"""

from __future__ import annotations

import contextlib
import errno
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

from aiordma._core import LARGEST_REQUEST, Operation
from aiordma.arguments import fitting, no_buffer
from aiordma.endpoint.config import ConnectionConfig
from aiordma.endpoint.link import Link
from aiordma.endpoint.message import lent
from aiordma.endpoint.operations import Operations
from aiordma.endpoint.outcome import Outcome
from aiordma.errors import FlushedError, NotSupportedError
from aiordma.loop.workers import call_blocking
from aiordma.memory.cache import RegistrationCache
from aiordma.memory.remote import RemoteRegion
from aiordma.verbs.enums import Access, AtomicCap, Opcode
from aiordma.verbs.mr import INLINE_BYTES, MemoryRegion
from aiordma.verbs.wr import SGE

__all__ = ["OneSided", "register"]

_COPY = 64 * 1024
_GROUP = 4
_LOCAL_WRITE = int(Access.LOCAL_WRITE)  # a number: `&` of flags is slow
_READ = int(Opcode.RDMA_READ)
_WRITE = int(Opcode.RDMA_WRITE)
Local = MemoryRegion | SGE


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


def _as_bytes(buffer: Any, *, writable: bool) -> memoryview:
    try:
        view = memoryview(buffer)
    except TypeError:
        raise no_buffer("the memory of a one-sided operation", buffer) from None
    with view:
        if not view.c_contiguous:
            msg = "the memory of a one-sided operation has to be contiguous"
            raise ValueError(msg)
        if writable and view.readonly:
            msg = "cannot read into a read-only buffer"
            raise BufferError(msg)
        if not view.nbytes:
            return memoryview(b"")  # of whatever format; an empty view cannot be cast
        return view.cast("B")


def _release(local: memoryview | SGE) -> None:
    """After a failure: the exception keeps frames, and is not to keep the buffer exported."""
    if isinstance(local, memoryview):
        local.release()


class OneSided:
    """The requester's side.

    Args:
        link: The adapter's side.
        config: Sizes.
        operations: Posts the requests.
        outcome: Makes the exception for a connection that is over.
    """

    __slots__ = ("_cache", "_link", "_operations", "_outcome")

    def __init__(
        self,
        link: Link,
        config: ConnectionConfig,
        operations: Operations,
        outcome: Outcome,
    ) -> None:
        self._link = link
        self._operations = operations
        self._outcome = outcome
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
            operation = await self._operations.posted(
                int(opcode), region, region.addr, 8, where, remote.rkey, compare_add, swap
            )
            await self._ended(operation)
            return int.from_bytes(region.view[:8], "little")

    # Local memory

    def _local(self, buffer: Any, *, writable: bool) -> memoryview | SGE:
        if isinstance(buffer, MemoryRegion):
            buffer = SGE(buffer)
        if not isinstance(buffer, SGE):
            return _as_bytes(buffer, writable=writable)
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
        posted = self._operations.posted
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
            raise self.lost() from exc

    def lost(self) -> BaseException:
        """The exception of a flushed operation."""
        return self._operations.lost()
