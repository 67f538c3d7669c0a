"""Awaited requests: one coroutine for each kind, ending with the completion of that request."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any, cast

from aiordma._ffi import lib
from aiordma.verbs.ah import AddressHandle
from aiordma.verbs.enums import Access, Opcode, SendFlags
from aiordma.verbs.mr import MemoryRegion
from aiordma.verbs.mw import MemoryWindow
from aiordma.verbs.prepared import Preparing
from aiordma.verbs.wc import WCRecord, WorkCompletion
from aiordma.verbs.work_queue import Planned, WorkQueue
from aiordma.verbs.wr import SGE, RecvWR, SendWR, sge_list

__all__ = ["Buffers", "Requests"]

_MAX_PIECE = (1 << 32) - 1  # `length` of struct ibv_sge

Buffers = MemoryRegion | SGE | Sequence[MemoryRegion | SGE]


class Requests(Preparing):
    """What a queue pair can do with requests that are awaited.  Part of `QueuePair`."""

    __slots__ = ()

    async def _run(
        self, queue: WorkQueue, chain: Sequence[SendWR] | Sequence[RecvWR], name: str | None = None
    ) -> WorkCompletion:
        """Post a list and wait for its last request; see `_completed`."""
        return WorkCompletion.from_record(await self._completed(queue, chain, name))

    async def _completed(
        self, queue: WorkQueue, chain: Sequence[SendWR] | Sequence[RecvWR], name: str | None = None
    ) -> WCRecord:
        """Post a list and wait for its last request.

        The C list is built before the wait for places, so that bad input is refused at once.
        `name` is what errors call it instead of its opcode.
        """
        if isinstance(chain[0], SendWR):
            built = self._build_send(cast("Sequence[SendWR]", chain))
        else:
            built = self._build_recv(cast("Sequence[RecvWR]", chain))
        queue.cq.manage()
        await queue.room.acquire(len(chain))
        if self.closed or self._in_error:
            queue.room.release(len(chain))
            self._require()
            name = name or built.plan[0].operation
            raise queue.flushed(name, self.num, 0 if len(chain) > 1 else None)
        entered = queue.enter(built.plan, 0)
        future: asyncio.Future[WCRecord] = asyncio.get_running_loop().create_future()
        for i, posted in enumerate(entered):
            built.first[i].wr_id = posted.wr_id
            posted.operation = name or posted.operation
            posted.future = future
            posted.last = i + 1 == len(chain)
            posted.index = i if len(chain) > 1 else None
        try:
            self._ring(queue, built.first)
        except BaseException:
            future.cancel()
            raise
        return await future

    async def _transfer(
        self,
        opcode: Opcode,
        mr: MemoryRegion,
        addr: int,
        length: int,
        remote_addr: int,
        rkey: int,
        name: str,
    ) -> WCRecord:
        """READ or WRITE one piece of registered memory: as `_completed`, with nothing built.

        The numbers are inside their C fields, and the piece inside its region; see `_plain`.
        """
        handle, lkey, queue = self._require(), mr.lkey, self._sq
        is_read = opcode is Opcode.RDMA_READ
        if not queue.cq.managed:
            queue.cq.manage()
        if not queue.room.try_acquire():
            await queue.room.acquire()
        if self.closed or self._in_error:
            queue.room.release()
            self._require()
            raise queue.flushed(name, self.num)
        (posted,) = queue.enter((Planned(name, (mr,)),), 0)
        future: asyncio.Future[WCRecord] = asyncio.get_running_loop().create_future()
        posted.future = future
        post = lib.aio_post_read if is_read else lib.aio_post_write
        code = post(handle, posted.wr_id, addr, length, lkey, remote_addr, rkey)
        if code:
            future.cancel()
            raise self._post_failed(queue, code)
        return await future

    def _plain(
        self, opcode: Opcode, piece: Buffers, remote_addr: int, rkey: int, name: str
    ) -> Coroutine[Any, Any, WCRecord] | None:
        """`_transfer` of one region or piece; None if it cannot be, or if `_run` has to refuse it.

        What is asked here is what `WRRules.check_send` and `build_send` ask about such a request.
        `name` is what errors call it.
        """
        if isinstance(piece, SGE):
            mr, offset, length = piece.mr, piece.offset, len(piece)
        elif isinstance(piece, MemoryRegion):
            mr, offset, length = piece, 0, piece.length
        else:
            return None
        rules = self._rules
        if (
            length > min(rules.max_message, _MAX_PIECE)
            or opcode not in rules.opcodes
            or (rules.read_depth == 0 and opcode is Opcode.RDMA_READ)
            or not (type(remote_addr) is int and 0 <= remote_addr < 1 << 64)
            or not (type(rkey) is int and 0 <= rkey < 1 << 32)
        ):
            return None
        mr._require()
        return self._transfer(opcode, mr, mr.addr + offset, length, remote_addr, rkey, name)

    async def submit(self, requests: Sequence[SendWR]) -> WorkCompletion:
        """Post a list of send requests with one doorbell; returns the completion of the last.

        Requests of one queue pair complete in order, so the last one stands for all: the list
        waits for one completion, whatever its length.  Only the last is posted SIGNALED; the
        flag of the others is left out.  The completion carries the last request's `wr_id`.

        Args:
            requests: At least one, at most as many as the send queue has places.

        Raises:
            CompletionError: The first request that failed, with its place in the list as `index`
                and its own status, not the flush of those behind it.  Those before it succeeded.
            ValueError: The list is empty or longer than the queue, or see `post_send`.
            NotSupportedError: Device, transport or type of queue pair cannot do it.
            ResourceClosedError: The queue pair or a region is closed.

        Cancellation: ends the wait; while it waits for places nothing is posted, after that the
        requests run on and their regions stay registered until they are done.

        Man page: `ibv_post_send(3)`.
        """
        chain = list(requests)
        depth = self._sq.depth
        if not 0 < len(chain) <= depth:
            msg = f"a list needs 1 to {depth} requests, as many as the queue holds: {len(chain)}"
            raise ValueError(msg)
        group = [replace(wr, send_flags=wr.send_flags & ~SendFlags.SIGNALED) for wr in chain]
        group[-1].send_flags |= SendFlags.SIGNALED
        reads = any(request.opcode == Opcode.RDMA_READ for request in group[:-1])
        if reads and self._rules.overtaking and group[-1].opcode != Opcode.RDMA_READ:
            group[-1].send_flags |= SendFlags.FENCE  # else it would complete before them
        return WorkCompletion.from_record(await self._completed(self._sq, group), chain[-1].wr_id)

    async def send(
        self,
        buffers: Buffers,
        *,
        imm: int | None = None,
        invalidate: int | None = None,
        solicited: bool = False,
        inline: bool = False,
        fence: bool = False,
        ah: AddressHandle | None = None,
        remote_qpn: int = 0,
        remote_qkey: int = 0,
    ) -> WorkCompletion:
        """Send the buffers as one message; returns its completion.

        Args:
            buffers: Regions or pieces of regions, gathered in order; at most
                `limits.max_send_sge`.
            imm: 32-bit immediate that the receiver finds in its completion.
            invalidate: Key of the receiver's memory that ends with the message; his completion
                tells it as `invalidated_rkey`.  Not together with `imm`.
            solicited: Wake a receiver that waits for solicited completions only.
            inline: Copy the bytes at the post, up to `limits.max_inline_data`.  The buffers may
                be changed as soon as it is posted, which is at once if a place is free.
            fence: Begin only when the reads and atomics before it are done.
            ah: For datagrams, and only for them: the way to the receiver.
            remote_qpn: For datagrams: the receiver's queue pair, or 0xFFFFFF for a group.
            remote_qkey: For datagrams: the key that the receiver expects.

        Raises:
            CompletionError: The request failed; the subclass names the reason.
            ValueError: Too many pieces, too many bytes for inline, or a number out of range;
                `MessageTooLargeError` for a datagram that is longer than the port's MTU.
            NotSupportedError: The transport has no immediates (iWARP), or no invalidation.
            ResourceClosedError: The queue pair or a region is closed.

        Cancellation: ends the wait; the message may still be sent, and the regions stay
        registered until it is done.
        """
        if imm is not None and invalidate is not None:
            msg = "a message carries an immediate or invalidates a key, not both"
            raise ValueError(msg)
        opcode = Opcode.SEND
        if imm is not None:
            opcode = Opcode.SEND_WITH_IMM
        elif invalidate is not None:
            opcode = Opcode.SEND_WITH_INV
        request = SendWR(
            sg_list=sge_list(buffers), opcode=opcode, imm_data=imm or 0,
            invalidate_rkey=invalidate or 0,
            send_flags=_flags(solicited=solicited, inline=inline, fence=fence),
            ah=ah, remote_qpn=remote_qpn, remote_qkey=remote_qkey,
        )  # fmt: skip
        return await self._run(self._sq, [request], "send")

    async def recv(self, buffers: Buffers) -> WorkCompletion:
        """Post a receive and await its message; `byte_len` of the completion tells its length.

        Args:
            buffers: Regions or pieces of regions, filled in order; at most
                `limits.max_recv_sge`.

        Raises:
            CompletionError: The receive failed, or was flushed with the queue pair.
            ValueError: Too many pieces, or the queue pair uses a shared receive queue.
            NotSupportedError: No piece at all, on software iWARP.
            ResourceClosedError: The queue pair or a region is closed.

        Cancellation: ends the wait; the receive stays posted, and the message that arrives for it
        is consumed.

        Man page: `ibv_post_recv(3)`.
        """
        return await self._run(self._rq, [RecvWR(sg_list=sge_list(buffers))], "recv")

    async def write(
        self,
        buffers: Buffers,
        remote_addr: int,
        rkey: int,
        *,
        imm: int | None = None,
        solicited: bool = False,
        inline: bool = False,
        fence: bool = False,
    ) -> WorkCompletion:
        """RDMA WRITE the buffers to the peer's memory; with `imm` it consumes a peer's receive.

        Args:
            buffers: Regions or pieces of regions, gathered in order; at most
                `limits.max_send_sge`.
            remote_addr: Address of the first byte in the peer's memory, 64 bits.
            rkey: Key of the peer's memory, which needs `Access.REMOTE_WRITE`.
            imm: 32-bit immediate that the receiver finds in its completion.
            solicited: Wake a receiver that waits for solicited completions only; counts with `imm`
                alone, because the peer notices nothing else of a write.
            inline: Copy the bytes at the post; see `send`.
            fence: Begin only when the reads and atomics before it are done.

        Raises:
            CompletionError: The request failed; `RemoteAccessError` for a wrong key or range.
            ValueError: Too many pieces, too many bytes for inline, or a number out of range.
            NotSupportedError: The transport has no immediates (iWARP).
            ResourceClosedError: The queue pair or a region is closed.

        Cancellation: ends the wait; the write may still take place, and the regions stay
        registered until it is done.

        Man page: `ibv_post_send(3)`.
        """
        if imm is None and not (solicited or inline or fence):
            plain = self._plain(Opcode.RDMA_WRITE, buffers, remote_addr, rkey, "write")
            if plain is not None:
                return WorkCompletion.from_record(await plain)
        opcode = Opcode.RDMA_WRITE if imm is None else Opcode.RDMA_WRITE_WITH_IMM
        request = SendWR(
            sg_list=sge_list(buffers), opcode=opcode, imm_data=imm or 0,
            remote_addr=remote_addr, rkey=rkey,
            send_flags=_flags(solicited=solicited, inline=inline, fence=fence),
        )  # fmt: skip
        return await self._run(self._sq, [request], "write")

    async def read(
        self, buffers: Buffers, remote_addr: int, rkey: int, *, fence: bool = False
    ) -> WorkCompletion:
        """RDMA READ the peer's memory into the buffers.

        Args:
            buffers: Regions or pieces of regions, filled in order; at most
                `limits.max_send_sge` and the device's `max_sge_rd`.
            remote_addr: Address of the first byte in the peer's memory, 64 bits.
            rkey: Key of the peer's memory, which needs `Access.REMOTE_READ`.
            fence: Begin only when the reads and atomics before it are done.

        Raises:
            CompletionError: The request failed; `RemoteAccessError` for a wrong key or range.
            ValueError: Too many pieces, or a number out of range.
            ResourceClosedError: The queue pair or a region is closed.

        Cancellation: ends the wait; the buffers belong to the adapter until the read is done.

        Man page: `ibv_post_send(3)`.
        """
        if not fence:
            plain = self._plain(Opcode.RDMA_READ, buffers, remote_addr, rkey, "read")
            if plain is not None:
                return WorkCompletion.from_record(await plain)
        request = SendWR(
            sg_list=sge_list(buffers), opcode=Opcode.RDMA_READ,
            remote_addr=remote_addr, rkey=rkey, send_flags=_flags(fence=fence),
        )  # fmt: skip
        return await self._run(self._sq, [request], "read")

    async def fetch_add(
        self,
        buffers: Buffers,
        remote_addr: int,
        rkey: int,
        value: int,
        *,
        fence: bool = False,
    ) -> WorkCompletion:
        """Add to the peer's 64-bit integer; its old value lands in the 8 bytes of `buffers`.

        Args:
            buffers: One piece of 8 bytes, for the old value in the machine's byte order.
            remote_addr: Address of the integer, a multiple of 8.
            rkey: Key of the peer's memory, which needs `Access.REMOTE_ATOMIC`.
            value: What to add, 0 to 2**64 - 1; the sum wraps around.
            fence: Begin only when the reads and atomics before it are done.

        Raises:
            NotSupportedError: The device has no atomic operations, as all of iWARP.
            ValueError: The address is no multiple of 8, or a number is out of range.

        Further errors and cancellation: as `send`; a canceled operation may have taken place.
        """
        request = SendWR(
            sg_list=sge_list(buffers), opcode=Opcode.ATOMIC_FETCH_AND_ADD,
            remote_addr=remote_addr, rkey=rkey, compare_add=value, send_flags=_flags(fence=fence),
        )  # fmt: skip
        return await self._run(self._sq, [request], "fetch_add")

    async def compare_swap(
        self,
        buffers: Buffers,
        remote_addr: int,
        rkey: int,
        expected: int,
        desired: int,
        *,
        fence: bool = False,
    ) -> WorkCompletion:
        """Store a value in the peer's 64-bit integer if that has another, all in one step.

        Args:
            buffers: One piece of 8 bytes, for the old value in the machine's byte order.
            remote_addr: Address of the integer, a multiple of 8.
            rkey: Key of the peer's memory, which needs `Access.REMOTE_ATOMIC`.
            expected: The value that it has to have, 0 to 2**64 - 1.
            desired: The value that it then gets, 0 to 2**64 - 1.
            fence: Begin only when the reads and atomics before it are done.

        Raises and cancellation: as `fetch_add`.

        Man page: `ibv_post_send(3)`.
        """
        request = SendWR(
            sg_list=sge_list(buffers), opcode=Opcode.ATOMIC_CMP_AND_SWP,
            remote_addr=remote_addr, rkey=rkey, compare_add=expected, swap=desired,
            send_flags=_flags(fence=fence),
        )  # fmt: skip
        return await self._run(self._sq, [request], "compare_swap")

    async def local_invalidate(self, rkey: int, *, fence: bool = False) -> WorkCompletion:
        """End remote access by a key of this side: a window of type 2, or on iWARP a region.

        Args:
            rkey: The key, 32 bits.
            fence: Begin only when the reads and atomics before it are done.

        Raises and cancellation: as `send`; a canceled invalidation still takes place.
        """
        request = SendWR(
            opcode=Opcode.LOCAL_INV, invalidate_rkey=rkey, send_flags=_flags(fence=fence)
        )
        return await self._run(self._sq, [request], "local_inv")

    async def _bind_mw(
        self,
        window: MemoryWindow,
        mr: MemoryRegion,
        offset: int,
        length: int,
        access: Access,
        rkey: int,
    ) -> WorkCompletion:
        """The request behind `MemoryWindow.bind`, which knows what it means for the window."""
        request = SendWR(
            opcode=Opcode.BIND_MW, mw=window, bind=SGE(mr, offset, length), bind_access=access,
            rkey=rkey,
        )  # fmt: skip
        return await self._run(self._sq, [request], "bind_mw")


def _flags(*, solicited: bool = False, inline: bool = False, fence: bool = False) -> SendFlags:
    flags = SendFlags.SIGNALED
    if solicited:
        flags |= SendFlags.SOLICITED
    if inline:
        flags |= SendFlags.INLINE
    if fence:
        flags |= SendFlags.FENCE
    return flags
