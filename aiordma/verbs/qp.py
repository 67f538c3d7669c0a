"""QueuePair: the two work queues of one end of a connection."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

from aiordma._ffi import ffi, lib
from aiordma._ffi.check import check_errno, check_pointer
from aiordma.errors import ResourceBusyError, ResourceClosedError, completion_error, os_error
from aiordma.verbs.cq import CompletionQueue
from aiordma.verbs.enums import MTU, Access, Opcode, QPAttrMask, QPState, SendFlags, WCStatus
from aiordma.verbs.mr import MemoryRegion
from aiordma.verbs.pd import ProtectionDomain
from aiordma.verbs.qp_attr import QPAttributes, QPInitAttr, QPLimits
from aiordma.verbs.resource import Resource
from aiordma.verbs.wc import WCRecord, WorkCompletion, flush_record
from aiordma.verbs.work_queue import Posted, WorkQueue
from aiordma.verbs.wr import SGE, RecvWR, SendWR, build_recv, build_send, sge_list

__all__ = ["QPAttributes", "QPInitAttr", "QPLimits", "QueuePair"]

_FLUSH_GRACE_S = 1.0
Buffers = MemoryRegion | SGE | Sequence[MemoryRegion | SGE]


def _closed_error() -> BaseException:
    return ResourceClosedError("the queue pair was closed")


class QueuePair(Resource):
    """A queue pair (`ibv_create_qp(3)`).

    Each request is either awaited (`send`, `recv`, `read`, ...) or posted raw with the caller's
    own number (`post_send`, `post_recv`), whose completion then comes out of the CQ.

    Args:
        pd: Protection domain of everything that it touches.
        attr: Sizes and completion queues.
        uses: Further resources that must outlive it, such as the memory that it will be given.

    Raises:
        ValueError: A size is out of range, or a completion queue would be too small.
        OSError: Beyond the device's limits (EINVAL), or out of resources.
    """

    __slots__ = ("_first_failure", "_in_error", "_init", "_rq", "_sq", "limits", "num", "pd")

    def __init__(
        self, pd: ProtectionDomain, attr: QPInitAttr, uses: tuple[Resource, ...] = ()
    ) -> None:
        send_cq, recv_cq = attr.send_cq, attr.recv_cq or attr.send_cq
        c_attr = ffi.new("struct ibv_qp_init_attr *")
        c_attr.send_cq = send_cq._require()
        c_attr.recv_cq = recv_cq._require()
        c_attr.qp_type = int(attr.qp_type)
        c_attr.sq_sig_all = int(attr.sq_sig_all)
        for name in QPLimits.__dataclass_fields__:
            value = getattr(attr, name)
            if not 0 <= value < 1 << 31:
                msg = f"{name} is out of range: {value}"
                raise ValueError(msg)
            setattr(c_attr.cap, name, value)
        # Room for what was asked, before the queue pair exists: refusing costs nothing then.
        send_cq._promise(attr.max_send_wr)
        try:
            recv_cq._promise(attr.max_recv_wr)
            try:
                handle = check_pointer(lib.ibv_create_qp(pd._require(), c_attr), "ibv_create_qp")
            except BaseException:
                recv_cq._unpromise(attr.max_recv_wr)
                raise
        except BaseException:
            send_cq._unpromise(attr.max_send_wr)
            raise
        self.limits = QPLimits(*(getattr(c_attr.cap, n) for n in QPLimits.__dataclass_fields__))
        self.pd = pd
        self.num = int(handle.qp_num)
        self._init = attr
        self._first_failure: BaseException | None = None
        self._in_error = False
        # Only as many requests as the CQs have room for, even where the device gave more.
        self._sq = WorkQueue(send_cq, attr.max_send_wr, self._on_failure, self._cause)
        self._rq = WorkQueue(recv_cq, attr.max_recv_wr, self._on_failure, self._cause)
        super().__init__(handle, (*uses, pd, send_cq, recv_cq))

    # State

    def modify(self, mask: QPAttrMask, **attributes: int) -> None:
        """Change attributes (`ibv_modify_qp(3)`), by their C names.

        Raises:
            ValueError: An unknown name.
            OSError: The transition is not allowed (EINVAL).
        """
        attr = ffi.new("struct ibv_qp_attr *")
        for name, value in attributes.items():
            try:
                setattr(attr, name, int(value))
            except AttributeError:
                msg = f"a queue pair has no attribute {name}"
                raise ValueError(msg) from None
        self._modify(attr, int(mask))

    def _modify(self, attr: Any, mask: int) -> None:
        check_errno(lib.ibv_modify_qp(self._require(), attr, mask), "ibv_modify_qp")
        if mask & QPAttrMask.STATE and attr.qp_state == QPState.ERR:
            self._enter_error()

    def _enter_error(self) -> None:
        self._in_error = True
        if self.outstanding:
            with contextlib.suppress(RuntimeError):
                asyncio.get_running_loop().call_later(_FLUSH_GRACE_S, self._fail_waiters)

    def query(self) -> QPAttributes:
        """Ask the device for the current attributes (`ibv_query_qp(3)`)."""
        attr = ffi.new("struct ibv_qp_attr *")
        init = ffi.new("struct ibv_qp_init_attr *")
        mask = int(
            QPAttrMask.STATE | QPAttrMask.CAP | QPAttrMask.ACCESS_FLAGS | QPAttrMask.PATH_MTU
            | QPAttrMask.TIMEOUT | QPAttrMask.RETRY_CNT | QPAttrMask.RNR_RETRY
        )  # fmt: skip
        check_errno(lib.ibv_query_qp(self._require(), attr, mask, init), "ibv_query_qp")
        kinds: dict[str, Any] = {"qp_state": QPState, "path_mtu": MTU, "qp_access_flags": Access}
        return QPAttributes(
            *(kinds.get(n, int)(getattr(attr, n)) for n in QPAttributes.__dataclass_fields__)
        )

    @property
    def state(self) -> QPState:
        """Current state, asked from the device."""
        return self.query().qp_state

    def to_error(self) -> None:
        """Move to the error state: what is posted completes as flushed.  Idempotent.

        Software adapters do not flush everything.  What is awaited and not flushed within a
        second fails here; its memory stays registered until the queue pair is destroyed.  What
        is posted from now on is flushed without the adapter, which might keep it for ever.
        """
        if self.closed:
            return
        self._enter_error()
        self.modify(QPAttrMask.STATE, qp_state=QPState.ERR)

    def _fail_waiters(self) -> None:
        self._sq.fail_waiters(self.num)
        self._rq.fail_waiters(self.num)

    @property
    def send_cq(self) -> CompletionQueue:
        """Where sends complete."""
        return self._sq.cq

    @property
    def recv_cq(self) -> CompletionQueue:
        """Where receives complete."""
        return self._rq.cq

    @property
    def outstanding(self) -> int:
        """Posted requests whose completion has not been seen."""
        return len(self._sq) + len(self._rq)

    def _on_failure(self, posted: Posted, record: WCRecord) -> None:
        if self._first_failure is None and record[1] != WCStatus.WR_FLUSH_ERR:
            self._first_failure = completion_error(
                record[1], operation=posted.operation, vendor_err=record[3], qp_num=record[6]
            )
        # The adapter is in the error state already; now this side knows it, too.
        if not self._in_error:
            with contextlib.suppress(OSError):
                self.to_error()

    def _cause(self) -> BaseException | None:
        return self._first_failure

    # Raw posting

    def post_send(self, requests: SendWR | Sequence[SendWR]) -> None:
        """Post one send request or a list, with one doorbell (`ibv_post_send(3)`).

        The completions of signaled requests, and of failed ones, come out of the CQ with the
        caller's `wr_id`.  The regions stay registered until then, even if they are closed.

        Raises:
            ResourceBusyError: The queue has not enough free places; nothing was posted.
            ValueError: A number is out of range.
            OSError: The post failed; the queue pair is in the error state.
        """
        chain = [requests] if isinstance(requests, SendWR) else list(requests)
        first, keep = build_send(chain)
        names = [request.opcode.name.lower() for request in chain]
        self._post_raw(self._sq, chain, names, first, keep)

    def post_recv(self, requests: RecvWR | Sequence[RecvWR]) -> None:
        """Post one receive request or a list (`ibv_post_recv(3)`); see `post_send`."""
        chain = [requests] if isinstance(requests, RecvWR) else list(requests)
        first, keep = build_recv(chain)
        self._post_raw(self._rq, chain, ["recv"] * len(chain), first, keep)

    def _post_raw(
        self,
        queue: WorkQueue,
        chain: Sequence[SendWR] | Sequence[RecvWR],
        names: list[str],
        first: Any,
        keep: list[Any],
    ) -> None:
        self._require()
        if not chain:
            return
        if self._in_error:
            for request in chain:
                queue.cq._deliver(flush_record(self.num), request.wr_id)
            return
        if queue.room.free < len(chain):
            msg = f"the queue has {queue.room.free} free places, {len(chain)} are needed"
            raise ResourceBusyError(11, msg)
        for i, name in enumerate(names):
            queue.room.try_acquire()
            posted = queue.enter(name, [piece.mr for piece in chain[i].sg_list])
            posted.caller_id = chain[i].wr_id
            first[i].wr_id = posted.wr_id
        self._ring(queue, first)
        del keep

    def _ring(self, queue: WorkQueue, first: Any) -> None:
        """Hand a list to the adapter.

        After a failure the list may have been queued all the same: Soft-RoCE writes its ring
        first and rings the doorbell by a system call that can fail.  So nothing is taken back; the
        queue pair goes to the error state and the memory stays until its destruction.
        """
        handle = self._require()
        if queue is self._sq:
            bad = ffi.new("struct ibv_send_wr **")
            code, verb = lib.ibv_post_send(handle, first, bad), "ibv_post_send"
        else:
            bad = ffi.new("struct ibv_recv_wr **")
            code, verb = lib.ibv_post_recv(handle, first, bad), "ibv_post_recv"
        if code:
            with contextlib.suppress(OSError):
                self.to_error()
            raise os_error(code, verb)

    # Awaited requests

    async def _run(self, queue: WorkQueue, request: SendWR | RecvWR, name: str) -> WorkCompletion:
        self._require()
        queue.cq.manage()
        await queue.room.acquire()
        if self.closed or self._in_error:
            queue.room.release()
            self._require()
            raise queue.flushed(name, self.num)
        try:
            if isinstance(request, SendWR):
                chain, keep = build_send([request])
            else:
                chain, keep = build_recv([request])
            posted = queue.enter(name, [piece.mr for piece in request.sg_list])
        except BaseException:
            queue.room.release()
            raise
        future = posted.future = asyncio.get_running_loop().create_future()
        chain[0].wr_id = posted.wr_id
        try:
            self._ring(queue, chain)
        except BaseException:
            future.cancel()
            raise
        del keep
        completion: WorkCompletion = await future
        return completion

    async def send(
        self, buffers: Buffers, *, imm: int | None = None, solicited: bool = False
    ) -> WorkCompletion:
        """Send the buffers as one message; returns its completion.

        Args:
            buffers: Regions or pieces of regions, gathered in order.
            imm: 32-bit immediate that the receiver finds in its completion.
            solicited: Wake a receiver that waits for solicited completions only.

        Raises:
            CompletionError: The request failed; the subclass names the reason.
            ResourceClosedError: The queue pair or a region is closed.

        Cancellation: ends the wait; the message may still be sent, and the regions stay
        registered until it is done.
        """
        flags = SendFlags.SIGNALED | (SendFlags.SOLICITED if solicited else SendFlags(0))
        opcode = Opcode.SEND if imm is None else Opcode.SEND_WITH_IMM
        request = SendWR(
            sg_list=sge_list(buffers), opcode=opcode, send_flags=flags, imm_data=imm or 0
        )
        return await self._run(self._sq, request, "send")

    async def recv(self, buffers: Buffers) -> WorkCompletion:
        """Post a receive and await its message; `byte_len` of the completion tells its length.

        Raises and cancellation: as `send`.  A message that arrives for a canceled receive is
        consumed.
        """
        return await self._run(self._rq, RecvWR(sg_list=sge_list(buffers)), "recv")

    async def write(
        self, buffers: Buffers, remote_addr: int, rkey: int, *, imm: int | None = None
    ) -> WorkCompletion:
        """RDMA WRITE the buffers to the peer's memory; with `imm` it consumes a peer's receive.

        Raises and cancellation: as `send`; a canceled write may have written.
        """
        opcode = Opcode.RDMA_WRITE if imm is None else Opcode.RDMA_WRITE_WITH_IMM
        request = SendWR(
            sg_list=sge_list(buffers), opcode=opcode, imm_data=imm or 0,
            remote_addr=remote_addr, rkey=rkey,
        )  # fmt: skip
        return await self._run(self._sq, request, "write")

    async def read(self, buffers: Buffers, remote_addr: int, rkey: int) -> WorkCompletion:
        """RDMA READ the peer's memory into the buffers.

        Raises and cancellation: as `send`; the buffers belong to the adapter until it is done.
        """
        request = SendWR(
            sg_list=sge_list(buffers), opcode=Opcode.RDMA_READ,
            remote_addr=remote_addr, rkey=rkey,
        )  # fmt: skip
        return await self._run(self._sq, request, "read")

    async def fetch_add(
        self, buffers: Buffers, remote_addr: int, rkey: int, value: int
    ) -> WorkCompletion:
        """Add to the peer's 64-bit integer; its old value lands in the 8 bytes of `buffers`.

        `remote_addr` is a multiple of 8.  Raises and cancellation: as `send`; a canceled
        operation may have taken place.
        """
        request = SendWR(
            sg_list=sge_list(buffers), opcode=Opcode.ATOMIC_FETCH_AND_ADD,
            remote_addr=remote_addr, rkey=rkey, compare_add=value,
        )  # fmt: skip
        return await self._run(self._sq, request, "fetch_add")

    async def compare_swap(
        self, buffers: Buffers, remote_addr: int, rkey: int, expected: int, desired: int
    ) -> WorkCompletion:
        """Store `desired` in the peer's 64-bit integer if it is `expected`; see `fetch_add`."""
        request = SendWR(
            sg_list=sge_list(buffers), opcode=Opcode.ATOMIC_CMP_AND_SWP,
            remote_addr=remote_addr, rkey=rkey, compare_add=expected, swap=desired,
        )  # fmt: skip
        return await self._run(self._sq, request, "compare_swap")

    # Life

    def _on_close(self) -> None:
        self._sq.room.fail(_closed_error)
        self._rq.room.fail(_closed_error)
        try:
            loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        if not self.outstanding:
            return

        # The adapter forgets the memory only when the queue pair is destroyed.  Flushes that
        # arrive before that are seen; the rest is failed then.
        def abandon(_: object) -> None:
            if loop is None or loop.is_closed():
                self._abandon_all()
            else:
                loop.call_soon_threadsafe(self._abandon_all)

        self._gone.add_done_callback(abandon)

    def _abandon_all(self) -> None:
        self._sq.abandon(self.num)
        self._rq.abandon(self.num)

    def _destroy(self, handle: Any) -> None:
        try:
            check_errno(lib.ibv_destroy_qp(handle), "ibv_destroy_qp")
        finally:
            self._sq.cq._unpromise(self._init.max_send_wr)
            self._rq.cq._unpromise(self._init.max_recv_wr)

    def __repr__(self) -> str:
        return f"<QueuePair {self._state.value} num={self.num} outstanding={self.outstanding}>"
