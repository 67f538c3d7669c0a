"""One-sided operations of a connection: READ, WRITE and atomics on memory that the peer has opened.

Theory of operation
    What is wrong is refused before it is posted, where it costs an exception; an access that the
    peer's adapter refuses costs both sides the connection.

    The adapter needs registered memory on this side.  A caller who brings it (`register`) has
    nothing copied.  Otherwise up to 64 KiB go through a buffer of the pool, because a copy is
    cheaper than a registration, and more is registered for the time of the operation.

    Cancelling ends the wait, not the transfer.  A buffer under a canceled operation therefore
    never goes back to the pool: it is deregistered, which waits for the completion.

    A connection wakes the loop for what the peer asks attention for, and for its own completions
    only while somebody waits for them (`Link.listen`).  That is asked for with the first operation
    and given up a while after the last: each change costs a system call.

    Long transfers go out in pieces of 1 MiB, a few at a time, so that they do not hold up the
    messages of the connection, and no adapter's limit of one request matters.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from aiordma.endpoint.config import ConnectionConfig
from aiordma.endpoint.link import Link
from aiordma.errors import ConnectionLostError, FlushedError, NotSupportedError, ResourceClosedError
from aiordma.loop.workers import call_blocking
from aiordma.memory.cache import RegistrationCache
from aiordma.memory.remote import RemoteRegion
from aiordma.verbs.enums import Access, AtomicCap, Opcode, SendFlags
from aiordma.verbs.mr import MemoryRegion
from aiordma.verbs.wr import SGE, SendWR

__all__ = ["OneSided", "register"]

_COPY = 64 * 1024
_INLINE_REGISTRATION = 1 << 20
_PIECE = 1 << 20
_LINGER_S = 0.5
_GROUP = 4
_LOCAL_WRITE = int(Access.LOCAL_WRITE)  # a number: `&` of flags is slow
_IWARP_HINT = "iWARP does not say why; an access that the peer's adapter refuses ends like this"
Local = MemoryRegion | SGE


async def register(link: Link, buffer: Any, access: Access) -> MemoryRegion:
    """Register memory in the connection's protection domain, in a thread if it takes long."""
    size = buffer if isinstance(buffer, int) else memoryview(buffer).nbytes
    if size <= _INLINE_REGISTRATION:
        return MemoryRegion(link.pd, buffer, access)
    return await call_blocking(
        lambda: MemoryRegion(link.pd, buffer, access), undo=MemoryRegion.close
    )


def _as_bytes(buffer: Any, *, writable: bool) -> memoryview:
    view = memoryview(buffer)
    if not view.c_contiguous:
        msg = "the memory of a one-sided operation has to be contiguous"
        raise ValueError(msg)
    if writable and view.readonly:
        msg = "cannot read into a read-only buffer"
        raise BufferError(msg)
    if not view.nbytes:
        return memoryview(b"")  # of whatever format; an empty one cannot be cast
    return view.cast("B")


def _rest(reference: weakref.ref[OneSided]) -> None:
    one_sided = reference()
    if one_sided is not None:
        one_sided._rest()


class OneSided:
    """The requester's side.

    Args:
        link: The adapter's side.
        config: Depth and sizes.
        failure: Makes the exception for a connection that is over, or None while it is not.
    """

    __slots__ = (
        "__weakref__", "_cache", "_failure", "_group", "_link", "_resting", "_under_way", "_used",
    )  # fmt: skip

    def __init__(
        self, link: Link, config: ConnectionConfig, failure: Callable[[], BaseException | None]
    ) -> None:
        self._link = link
        self._group = min(_GROUP, config.one_sided_depth)
        self._failure = failure
        self._under_way = 0
        self._used = False  # since the timer was set
        self._resting: asyncio.TimerHandle | None = None  # set while the link listens
        self._cache: RegistrationCache | None = None
        if config.registration_cache_size:
            self._cache = RegistrationCache(link.pd, max_bytes=config.registration_cache_size)
            link.at_close(self._cache.close)

    async def read(self, remote: RemoteRegion, into: Any, offset: int) -> int:
        """Fill `into`; the number of bytes."""
        local = self._local(into, writable=True)
        size = len(local)
        where = remote.check(offset, size, Access.REMOTE_READ)
        self._require_open()
        if not size:
            return 0
        if isinstance(local, SGE):
            await self._transfer(Opcode.RDMA_READ, local, where, remote.rkey)
        elif size <= _COPY:
            async with self._bounce(size) as region:
                await self._transfer(Opcode.RDMA_READ, SGE(region, 0, size), where, remote.rkey)
                local[:] = region.view[:size]
        else:
            async with self._registered(local, self._landing()) as region:
                await self._transfer(Opcode.RDMA_READ, SGE(region), where, remote.rkey)
        return size

    async def write(
        self, remote: RemoteRegion, data: Any, offset: int, imm: int | None = None
    ) -> int:
        """Write `data`, with the adapter's immediate if given; the number of bytes."""
        local = self._local(data, writable=False)
        size = len(local)
        where = remote.check(offset, size, Access.REMOTE_WRITE)
        self._require_open()
        if imm is not None and self._link.context.is_iwarp:
            text = f"{self._link.context.name} is iWARP, which has no immediates"
            raise NotSupportedError(errno.EOPNOTSUPP, text)
        if not size:
            if imm is not None:
                await self._submit([self._request(Opcode.RDMA_WRITE, (), where, remote.rkey)], imm)
        elif isinstance(local, SGE):
            await self._transfer(Opcode.RDMA_WRITE, local, where, remote.rkey, imm)
        elif size <= _COPY:
            async with self._bounce(size) as region:
                region.view[:size] = local
                piece = SGE(region, 0, size)
                await self._transfer(Opcode.RDMA_WRITE, piece, where, remote.rkey, imm)
        else:
            # Nothing is ever written here; read access is what every region has.
            async with self._registered(local, Access(0)) as region:
                await self._transfer(Opcode.RDMA_WRITE, SGE(region), where, remote.rkey, imm)
        return size

    async def atomic(
        self, opcode: Opcode, remote: RemoteRegion, offset: int, compare_add: int, swap: int
    ) -> int:
        """One atomic operation on 8 bytes; their value before it."""
        for value in (compare_add, swap):
            if not 0 <= value < 1 << 64:
                msg = f"{value} is not an unsigned 64-bit integer"
                raise ValueError(msg)
        where = remote.check(offset, 8, Access.REMOTE_ATOMIC)
        self._require_open()
        context = self._link.context
        if context.is_iwarp or context.attributes.atomic_cap == AtomicCap.NONE:
            text = f"{context.name} has no atomic operations"
            raise NotSupportedError(errno.EOPNOTSUPP, text)
        async with self._bounce(8) as region:
            request = self._request(opcode, (SGE(region, 0, 8),), where, remote.rkey)
            request.compare_add, request.swap = compare_add, swap
            await self._submit([request])
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
        pool = self._link.pool
        region = await pool.take(size)
        try:
            yield region
        except BaseException:
            pool.drop(region)  # the adapter may still use it
            raise
        pool.give(region)

    @contextlib.asynccontextmanager
    async def _registered(self, view: memoryview, access: Access) -> AsyncIterator[MemoryRegion]:
        if self._cache is not None:
            async with self._cache.get(view, access) as cached:
                yield cached
            return
        region = await register(self._link, view, access)
        try:
            yield region
        finally:
            region.close()

    # Requests

    def _request(self, opcode: Opcode, pieces: tuple[SGE, ...], where: int, rkey: int) -> SendWR:
        return SendWR(
            sg_list=pieces, opcode=opcode, send_flags=SendFlags(0), remote_addr=where, rkey=rkey
        )

    async def _transfer(
        self, opcode: Opcode, piece: SGE, where: int, rkey: int, imm: int | None = None
    ) -> None:
        """Move one piece of local memory; an immediate goes with the last request."""
        size = len(piece)
        if size <= _PIECE and imm is None:
            name = "rdma_read" if opcode is Opcode.RDMA_READ else "rdma_write"
            plain = self._link.qp._plain(opcode, piece, where, rkey, name)
            if plain is not None:
                await self._finish(plain)
                return
        requests = []
        for start in range(0, size, _PIECE):
            part = SGE(piece.mr, piece.offset + start, min(_PIECE, size - start))
            requests.append(self._request(opcode, (part,), where + start, rkey))
        for first in range(0, len(requests), self._group):
            group = requests[first : first + self._group]
            await self._submit(group, imm if first + self._group >= len(requests) else None)

    async def _submit(self, group: list[SendWR], imm: int | None = None) -> None:
        if imm is not None:
            group[-1].opcode, group[-1].imm_data = Opcode.RDMA_WRITE_WITH_IMM, imm
        await self._finish(self._link.qp.submit(group))

    def _attend(self) -> None:
        """Have the link listen."""
        self._used = True
        if self._resting is None:
            self._link.listen()
            self._set_timer()

    def _set_timer(self) -> None:
        # Weak: a connection that its program forgets is collected at once.
        self._resting = self._link.loop.call_later(_LINGER_S, _rest, weakref.ref(self))

    def _rest(self) -> None:
        """Have it listen no more, if nothing has happened in the meantime."""
        if self._link.closed:
            return
        if self._used or self._under_way:
            self._used = False
            self._set_timer()
        else:
            self._resting = None
            self._link.unlisten()

    async def _finish(self, posting: Awaitable[object]) -> None:
        if not self._used:
            self._attend()
        self._under_way += 1
        try:
            await posting
        except (FlushedError, ResourceClosedError) as exc:
            # Not this operation failed, but the connection before it.
            failure = self._failure()
            if failure is None:
                failure = ConnectionLostError(errno.ECONNRESET, f"the connection is lost: {exc}")
            if isinstance(failure, ConnectionLostError) and self._link.context.is_iwarp:
                failure.hint = _IWARP_HINT
            raise failure from exc
        finally:
            self._under_way -= 1

    def _require_open(self) -> None:
        failure = self._failure()
        if failure is not None:
            raise failure
