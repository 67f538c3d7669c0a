"""QueuePair: the send queue and the receive queue of one side of a connection.

Theory of operation
    A work request can be awaited (`send`, `recv`, `read`, ...), posted raw with the caller's own
    wr_id (`post_send`, `post_recv`), or prepared once and posted many times (verbs.prepared).  In
    each case `WRRules` (verbs.wr_check) refuses a request that the adapter does not support,
    verbs.wr translates it for C, and the `WorkQueue` (verbs.work_queue) posts it and keeps track of
    it.

    The first failure is the cause, and requests that are flushed after it name it in their errors.
    From then on the queue pair is in the error state, no matter whether the adapter, the program
    or the device has moved it there, and new requests are flushed without being posted.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, Self, Unpack

from aiordma._ffi import ffi, lib
from aiordma._ffi.check import check_errno
from aiordma.errors import (
    ResourceClosedError,
    busy_error,
    device_error,
    os_error,
    queue_error,
)
from aiordma.loop.running import running_loop
from aiordma.verbs.ah import AddressHandle, AHAttributes, c_gid
from aiordma.verbs.async_event import AsyncEvent, dismiss, enroll, next_token
from aiordma.verbs.atomic_results import AtomicResults
from aiordma.verbs.context import Context, copy_of
from aiordma.verbs.cq import CompletionQueue
from aiordma.verbs.enums import (
    Access,
    AsyncEventType,
    LinkLayer,
    Opcode,
    QPAttrMask,
    QPState,
    QPType,
    SendFlags,
    WCStatus,
)
from aiordma.verbs.mr import MemoryRegion
from aiordma.verbs.mw import MemoryWindow
from aiordma.verbs.pd import ProtectionDomain
from aiordma.verbs.prepared import PreparedPost
from aiordma.verbs.qp_attr import (
    QUERIED,
    QPAttributes,
    QPInitAttr,
    QPLimits,
    check_init,
    create,
)
from aiordma.verbs.qp_changes import WAYS, QPChanges, check_changes, to_c
from aiordma.verbs.resource import Resource
from aiordma.verbs.rnr_timer import rnr_timer_code
from aiordma.verbs.srq import SharedReceiveQueue
from aiordma.verbs.wc import WCRecord, WorkCompletion, record_error
from aiordma.verbs.work_queue import WorkQueue
from aiordma.verbs.wr import SGE, Buffers, Built, RecvWR, SendWR, flags_of, sge_list
from aiordma.verbs.wr_check import WRRules

__all__ = ["QPAttributes", "QPInitAttr", "QPLimits", "QueuePair"]

_FLUSH_GRACE_S = 1.0
_LAST_RECEIVE_S = 0.25
# As integers, because an operation on enum flags takes as long as the whole call.
_STATE = int(QPAttrMask.STATE)
_READ_DEPTH = int(QPAttrMask.MAX_QP_RD_ATOMIC)
_ERR = int(QPState.ERR)
_FATAL = frozenset(
    {AsyncEventType.QP_FATAL, AsyncEventType.QP_REQ_ERR, AsyncEventType.QP_ACCESS_ERR}
)


def _give_up(queues: Sequence[weakref.ref[WorkQueue]]) -> None:
    for queue in (reference() for reference in queues):
        if queue is not None:
            queue.give_up()


class Moving(Protocol):
    """A change of the state that is made in a thread."""

    @property
    def under_way(self) -> bool:
        """Whether the thread may still change the state."""


class QueuePair(Resource):
    """A queue pair (`ibv_create_qp(3)`).

    `ConnectionId.create_qp` makes one for a connection of the connection manager, which also moves
    it through its states.  A program that makes one directly has to do that itself, by `modify` or
    with `BringUp`.

    Each request is either awaited (`send`, `recv`, `read`, ...), or posted raw with the caller's
    own wr_id (`post_send`, `post_recv`); the completion of a raw request is returned by the CQ.

    Args:
        pd: The protection domain of all memory that it uses.
        attr: The sizes and the completion queues.

    Raises:
        ValueError: A size is out of range, or a completion queue would be too small.
        OSError: EINVAL, a size exceeds the limits of the device; or there are no more resources.
    """

    __slots__ = (
        "_cqs", "_expected", "_first_failure", "_groups", "_in_error", "_init", "_last_receive",
        "_moving", "_on_first_failure", "_posted_in_c", "_queues", "_read_depth", "_rules",
        "_token", "limits", "num", "pd",
    )  # fmt: skip

    num: int
    limits: QPLimits

    def __init__(self, pd: ProtectionDomain, attr: QPInitAttr) -> None:
        check_init(pd, attr, None)
        self._create(pd, attr, (), None, None)

    @classmethod
    def _checked(
        cls,
        pd: ProtectionDomain,
        attr: QPInitAttr,
        uses: tuple[Resource, ...],
        cq: CompletionQueue | None,
        expected: int | None,
    ) -> Self:
        """Make a queue pair of arguments that `check_init` has seen.

        Args:
            pd: As of the class.
            attr: As of the class.
            uses: Further resources that must outlive it, such as the memory that it will use.
            cq: The completion queue of both queues, if `attr` names none, because it is shared.
            expected: How many completions need room at first, if both queues complete in `cq`;
                `_expect` makes room for more.  None: as many as the queues can have.

        Raises:
            OSError: As of the class.
        """
        made = cls.__new__(cls)
        made._create(pd, attr, uses, cq, expected)
        return made

    def _create(
        self,
        pd: ProtectionDomain,
        attr: QPInitAttr,
        uses: tuple[Resource, ...],
        cq: CompletionQueue | None,
        expected: int | None,
    ) -> None:
        self._expected = expected
        send_cq = cq or attr.send_cq
        recv_cq = attr.recv_cq or send_cq
        self._token = next_token()
        self.pd: ProtectionDomain = pd
        self._init = attr
        self._moving: Moving | None = None  # a change of its state that a thread makes
        self._cqs = send_cq, recv_cq
        # Reserve room before the queue pair exists, so that nothing has to be undone if it fails.
        self._promise()
        try:
            handle, self.num, self.limits = create(pd, attr, send_cq, recv_cq, self._token)
        except BaseException:
            self._unpromise()
            raise
        self._groups: tuple[tuple[bytes, int], ...] = ()  # multicast groups: GID, LID
        self._first_failure: BaseException | None = None
        #: Called once, with the cause of the first failure, whether its request is awaited or not.
        self._on_first_failure: Callable[[BaseException], None] | None = None
        self._in_error = False
        self._read_depth: int | None = None  # how many READs may be in flight, once connected
        # Both are made for the first request, because a connection posts in C and needs neither.
        self._rules: WRRules | None = None
        self._queues: tuple[WorkQueue, WorkQueue] | None = None
        #: Whether a connection posts to it in C, and counts the free entries of its queues.
        self._posted_in_c = False
        self._last_receive: threading.Event | None = None
        parents = (*uses, pd, send_cq)
        if recv_cq is not send_cq:
            parents += (recv_cq,)
        if attr.srq is not None:
            parents += (attr.srq,)
        super().__init__(handle, parents)
        if attr.srq is not None:
            self._last_receive = threading.Event()
            attr.srq._takers[self.num] = self
        enroll(self._token, self)

    def _make_queues(self) -> tuple[WorkQueue, WorkQueue]:
        self._require()
        # The depths that were requested, for which the CQs have room, even if the device has
        # granted more.
        attr = self._init
        receives = attr.max_recv_wr if attr.srq is None else 0
        self._queues = queues = (
            WorkQueue(self, self._cqs[0], attr.max_send_wr),
            WorkQueue(self, self._cqs[1], receives),
        )
        return queues

    def _require_places(self) -> None:
        """Refuse a request of the program if a connection posts in C."""
        if self._posted_in_c:
            self._require()
            msg = (
                "a connection posts to this queue pair and counts its places: use the methods of "
                "the connection, or a queue pair of your own in its protection domain"
            )
            raise busy_error(msg)

    @property
    def _sq(self) -> WorkQueue:
        self._require_places()
        return (self._queues or self._make_queues())[0]

    @property
    def _rq(self) -> WorkQueue:
        self._require_places()
        return (self._queues or self._make_queues())[1]

    def _promise(self) -> None:
        """Reserve room in both completion queues or, after an exception, in neither."""
        attr, (send_cq, recv_cq) = self._init, self._cqs
        if send_cq is recv_cq and attr.srq is None:
            send_cq._promise(attr.max_send_wr + attr.max_recv_wr, self._expected)
            return
        send_cq._promise(attr.max_send_wr)
        try:
            if attr.srq is None:
                recv_cq._promise(attr.max_recv_wr)
            else:
                attr.srq._admit(recv_cq)
        except BaseException:
            send_cq._unpromise(attr.max_send_wr)
            raise

    def _expect(self, more: int) -> None:
        """Make room for more of the completions that were reserved.

        Raises:
            OSError: There is not enough memory.
        """
        if self._expected is not None:  # None: there is room for all from the beginning
            self._cqs[0]._expect(more)
            self._expected += more

    def _unpromise(self) -> None:
        attr, (send_cq, recv_cq) = self._init, self._cqs
        if send_cq is recv_cq and attr.srq is None:
            send_cq._unpromise(attr.max_send_wr + attr.max_recv_wr, self._expected)
            return
        send_cq._unpromise(attr.max_send_wr)
        if attr.srq is None:
            recv_cq._unpromise(attr.max_recv_wr)
        else:
            attr.srq._dismiss(recv_cq)

    @property
    def qp_type(self) -> QPType:
        """The type of the queue pair, which is its transport service."""
        return self._init.qp_type

    @property
    def srq(self) -> SharedReceiveQueue | None:
        """The shared receive queue that it uses; None if it has a receive queue of its own."""
        return self._init.srq

    def _choose_rules(self) -> WRRules:
        self._rules = rules = WRRules.of(
            self.pd.context, self.limits, self._init.qp_type,
            all_signaled=self._init.sq_sig_all, read_depth=self._read_depth,
        )  # fmt: skip
        return rules

    # Raw requests

    def post_send(self, requests: SendWR | Sequence[SendWR]) -> None:
        """Post one send request or a list, with one doorbell (`ibv_post_send(3)`).

        The CQ returns the completions of signaled and failed requests, with the caller's `wr_id`.
        A completion also stands for the unsignaled requests before it.  Until then the regions stay
        registered, even if they are closed.  The bytes of an INLINE request may be changed at once.

        Args:
            requests: The requests, in the order of their execution.

        Raises:
            RdmaOSError: EAGAIN, the send queue has too few free entries.
            ValueError: A number does not fit into its field; or a limit of the queue pair
                (`limits`) is exceeded; or unsignaled requests would fill the queue, so that nothing
                would ever complete.
            NotSupportedError: The device, the transport or the type of the queue pair does not
                support a request.
            ResourceClosedError: The queue pair or a region is closed.
            OSError: Posting has failed, and the queue pair is in the error state.

        After any of these but the last, nothing was posted, not even the valid requests of a list.
        """
        chain = [requests] if isinstance(requests, SendWR) else list(requests)
        self._sq.post(self._built_send(chain), chain)

    def post_recv(self, requests: RecvWR | Sequence[RecvWR]) -> None:
        """Post one receive request or a list (`ibv_post_recv(3)`).

        Args:
            requests: The receives, in the order in which messages are to use them.

        Raises and completions: as `post_send`; also ValueError if the queue pair uses a shared
        receive queue.
        """
        chain = [requests] if isinstance(requests, RecvWR) else list(requests)
        self._rq.post(self._built_recv(chain), chain)

    def prepare_send(self, requests: SendWR | Sequence[SendWR]) -> PreparedPost:
        """Build one send request or a list once, to be posted many times.

        Args:
            requests: As for `post_send`; later changes of the objects have no effect.

        Returns:
            The prepared post.  The caller can free it; otherwise it is freed with the queue pair.
            Its regions stay registered until then.  A closed prepared post cannot be posted any
            more.

        Raises:
            ValueError: As `post_send`, or the list is empty or longer than the queue.
            NotSupportedError: The device, the transport or the type of the queue pair does not
                support a request.
            ResourceClosedError: The queue pair or a region is closed.
        """
        chain = [requests] if isinstance(requests, SendWR) else list(requests)
        if any(request.opcode == Opcode.BIND_MW for request in chain):
            msg = "BIND_MW cannot be prepared: every bind makes another key"
            raise ValueError(msg)
        return PreparedPost(self._sq, chain, self._built_send(chain))

    def prepare_recv(self, requests: RecvWR | Sequence[RecvWR]) -> PreparedPost:
        """Build one receive request or a list once, to be posted many times.

        Args:
            requests: As for `post_recv`; later changes of the objects have no effect.

        Returns and raises: as `prepare_send`.
        """
        chain = [requests] if isinstance(requests, RecvWR) else list(requests)
        return PreparedPost(self._rq, chain, self._built_recv(chain))

    def _built_send(self, chain: Sequence[SendWR]) -> Built:
        self._require()
        built = (self._rules or self._choose_rules()).built_send(chain)
        for request in chain:
            piece = request.bind
            if request.mw is not None and piece is not None and len(piece):
                request.mw._binding(self, piece.mr)
        return built

    def _built_recv(self, chain: Sequence[RecvWR]) -> Built:
        self._require()
        if self.srq is not None:
            msg = "the queue pair takes its receives from its SharedReceiveQueue: post them there"
            raise ValueError(msg)
        return (self._rules or self._choose_rules()).built_recv(chain)

    # Awaited requests

    async def submit(self, requests: Sequence[SendWR]) -> WorkCompletion:
        """Post a list of send requests with one doorbell, and wait for the completion of the last.

        The requests of a queue pair complete in order, so the completion of the last one stands for
        all.  Therefore only the last is posted SIGNALED; this flag of the others is ignored.  The
        completion has the `wr_id` of the last request.

        Args:
            requests: At least one request, and at most as many as the send queue has entries.

        Raises:
            CompletionError: A request has failed.  `index` is the position of the first one in the
                list, and the status is its own, not that of the requests flushed after it.  The
                requests before it have succeeded.
            ValueError: The list is empty or longer than the queue, or as `post_send`.
            NotSupportedError: The device, the transport or the type of the queue pair does not
                support a request.
            ResourceClosedError: The queue pair or a region is closed.
            ResultLostError: The list has completed, but the atomic at position `index` has no
                result; see `fetch_add`.

        Cancellation: ends the wait.  Before the requests were posted, nothing is posted; after
        that they are carried out, and their regions stay registered until they have completed.

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
        if (
            reads
            and (self._rules or self._choose_rules()).overtaking
            and group[-1].opcode != Opcode.RDMA_READ
        ):
            group[-1].send_flags |= SendFlags.FENCE  # otherwise it could complete before the READs
        built = self._built_send(group)
        results = AtomicResults(group)
        completion = await self._sq.completed(built, wr_id=chain[-1].wr_id)
        results.require()
        return completion

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
        """Send the buffers as one message, and return the completion.

        Args:
            buffers: Regions or pieces of regions, which are gathered in order; at most
                `limits.max_send_sge`.
            imm: A 32-bit immediate that the receiver finds in its completion.
            invalidate: A key of the receiver's memory that becomes invalid with the message; the
                completion there has it as `invalidated_rkey`.  Not together with `imm`.
            solicited: Whether to wake a receiver that waits for solicited completions only.
            inline: Whether to copy the bytes into the work request, up to
                `limits.max_inline_data`.  The buffers may be changed as soon as it is posted, which
                happens at once if the send queue has a free entry.
            fence: Whether to wait for the READs and atomics before it.
            ah: For datagrams only: the address handle of the receiver.
            remote_qpn: For datagrams: the receiver's queue pair, or 0xFFFFFF for a group.
            remote_qkey: For datagrams: the key that the receiver requires.

        Raises:
            CompletionError: The request has failed; the subclass says why.
            ValueError: There are too many pieces, or too many bytes for `inline`, or a number is
                out of range; `MessageTooLargeError` for a datagram longer than the port's MTU.
            NotSupportedError: The transport has no immediates (iWARP), or no invalidation.
            ResourceClosedError: The queue pair or a region is closed.

        Cancellation: ends the wait; the message may still be sent, and the regions stay registered
        until it has completed.
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
            send_flags=flags_of(solicited=solicited, inline=inline, fence=fence),
            ah=ah, remote_qpn=remote_qpn, remote_qkey=remote_qkey,
        )  # fmt: skip
        return await self._sq.completed(self._built_send([request]), "send")

    async def recv(self, buffers: Buffers) -> WorkCompletion:
        """Post a receive, and wait for its message; `byte_len` of the completion is the length.

        Args:
            buffers: Regions or pieces of regions, which are filled in order; at most
                `limits.max_recv_sge`.

        Raises:
            CompletionError: The receive has failed, or was flushed with the queue pair.
            ValueError: There are too many pieces, or the queue pair uses a shared receive queue.
            NotSupportedError: There is no piece at all, which software iWARP does not support.
            ResourceClosedError: The queue pair or a region is closed.

        Cancellation: ends the wait; the receive stays posted, and will take a message.

        Man page: `ibv_post_recv(3)`.
        """
        built = self._built_recv([RecvWR(sg_list=sge_list(buffers))])
        return await self._rq.completed(built, "recv")

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
        """RDMA WRITE the buffers to the peer's memory; with `imm` this uses up a receive there.

        Args:
            buffers: Regions or pieces of regions, which are gathered in order; at most
                `limits.max_send_sge`.
            remote_addr: The address of the first byte in the peer's memory, 64 bits.
            rkey: The key of the peer's memory, which needs `Access.REMOTE_WRITE`.
            imm: A 32-bit immediate that the receiver finds in its completion.
            solicited: Whether to wake a receiver that waits for solicited completions only.  It has
                an effect with `imm` only, because otherwise the peer gets no completion.
            inline: Whether to copy the bytes into the work request; see `send`.
            fence: Whether to wait for the READs and atomics before it.

        Raises:
            CompletionError: The request has failed; `RemoteAccessError` for a wrong key or range.
            ValueError: There are too many pieces, or too many bytes for `inline`, or a number is
                out of range.
            NotSupportedError: The transport has no immediates (iWARP).
            ResourceClosedError: The queue pair or a region is closed.

        Cancellation: ends the wait; the write may still take place, and the regions stay
        registered until it has completed.

        Man page: `ibv_post_send(3)`.
        """
        if imm is None and not (solicited or inline or fence):
            plain = (self._rules or self._choose_rules()).transfer(
                Opcode.RDMA_WRITE, buffers, remote_addr, rkey, "write"
            )
            if plain is not None:
                return await self._sq.completed(plain)
        opcode = Opcode.RDMA_WRITE if imm is None else Opcode.RDMA_WRITE_WITH_IMM
        request = SendWR(
            sg_list=sge_list(buffers), opcode=opcode, imm_data=imm or 0,
            remote_addr=remote_addr, rkey=rkey,
            send_flags=flags_of(solicited=solicited, inline=inline, fence=fence),
        )  # fmt: skip
        return await self._sq.completed(self._built_send([request]), "write")

    async def read(
        self, buffers: Buffers, remote_addr: int, rkey: int, *, fence: bool = False
    ) -> WorkCompletion:
        """RDMA READ the peer's memory into the buffers.

        Args:
            buffers: Regions or pieces of regions, which are filled in order; at most
                `limits.max_send_sge` and the device's `max_sge_rd`.
            remote_addr: The address of the first byte in the peer's memory, 64 bits.
            rkey: The key of the peer's memory, which needs `Access.REMOTE_READ`.
            fence: Whether to wait for the READs and atomics before it.

        Raises:
            CompletionError: The request has failed; `RemoteAccessError` for a wrong key or range.
            ValueError: There are too many pieces, or a number is out of range.
            ResourceClosedError: The queue pair or a region is closed.

        Cancellation: ends the wait; the adapter may write to the buffers until it has completed.

        Man page: `ibv_post_send(3)`.
        """
        if not fence:
            plain = (self._rules or self._choose_rules()).transfer(
                Opcode.RDMA_READ, buffers, remote_addr, rkey, "read"
            )
            if plain is not None:
                return await self._sq.completed(plain)
        request = SendWR(
            sg_list=sge_list(buffers), opcode=Opcode.RDMA_READ,
            remote_addr=remote_addr, rkey=rkey, send_flags=flags_of(fence=fence),
        )  # fmt: skip
        return await self._sq.completed(self._built_send([request]), "read")

    async def fetch_add(
        self,
        buffers: Buffers,
        remote_addr: int,
        rkey: int,
        value: int,
        *,
        fence: bool = False,
    ) -> WorkCompletion:
        """Add to a 64-bit integer of the peer; its old value is stored in the 8 bytes of `buffers`.

        The operation is atomic with respect to other atomics of the peer's adapter, and to nothing
        else: neither to a WRITE nor to the peer's processor.

        Args:
            buffers: One piece of 8 bytes, for the old value in the byte order of the machine.
                Until it arrives, the piece has random bytes, so that a missing result is detected.
            remote_addr: The address of the integer, a multiple of 8.
            rkey: The key of the peer's memory, which needs `Access.REMOTE_ATOMIC`.
            value: The number to add, 0 to 2**64 - 1; the sum wraps around.
            fence: Whether to wait for the READs and atomics before it.

        Raises:
            NotSupportedError: The device has no atomics; no iWARP device has them.
            ValueError: The address is not a multiple of 8, or a number is out of range.
            ResultLostError: The adapter reported completion without the result.  The operation took
                place at most once, and the queue pair still works.  This is not detected in GPU
                memory.

        Further errors and cancellation: as `send`; a canceled operation may take place.
        """
        request = SendWR(
            sg_list=sge_list(buffers), opcode=Opcode.ATOMIC_FETCH_AND_ADD,
            remote_addr=remote_addr, rkey=rkey, compare_add=value, send_flags=flags_of(fence=fence),
        )  # fmt: skip
        return await self._atomic(request, "fetch_add")

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
        """Store `desired` in a 64-bit integer of the peer if its value is `expected`, atomically.

        It is atomic in the same sense as `fetch_add`.

        Args:
            buffers: As for `fetch_add`.
            remote_addr: The address of the integer, a multiple of 8.
            rkey: The key of the peer's memory, which needs `Access.REMOTE_ATOMIC`.
            expected: The value that the integer has to have, 0 to 2**64 - 1.
            desired: The value to store, 0 to 2**64 - 1.
            fence: Whether to wait for the READs and atomics before it.

        Raises and cancellation: as `fetch_add`.

        Man page: `ibv_post_send(3)`.
        """
        request = SendWR(
            sg_list=sge_list(buffers), opcode=Opcode.ATOMIC_CMP_AND_SWP,
            remote_addr=remote_addr, rkey=rkey, compare_add=expected, swap=desired,
            send_flags=flags_of(fence=fence),
        )  # fmt: skip
        return await self._atomic(request, "compare_swap")

    async def _atomic(self, request: SendWR, operation: str) -> WorkCompletion:
        built = self._built_send([request])
        results = AtomicResults([request])
        completion = await self._sq.completed(built, operation)
        results.require(operation)
        return completion

    async def local_invalidate(self, rkey: int, *, fence: bool = False) -> WorkCompletion:
        """Invalidate a key of this side: that of a window of type 2, or on iWARP of a region.

        Args:
            rkey: The key, 32 bits.
            fence: Whether to wait for the READs and atomics before it.

        Raises and cancellation: as `send`; a canceled invalidation still takes place.
        """
        request = SendWR(
            opcode=Opcode.LOCAL_INV, invalidate_rkey=rkey, send_flags=flags_of(fence=fence)
        )
        return await self._sq.completed(self._built_send([request]), "local_inv")

    async def _bind_mw(
        self,
        window: MemoryWindow,
        mr: MemoryRegion,
        offset: int,
        length: int,
        access: Access,
        rkey: int,
    ) -> WorkCompletion:
        """The request behind `MemoryWindow.bind`."""
        request = SendWR(
            opcode=Opcode.BIND_MW, mw=window, bind=SGE(mr, offset, length), bind_access=access,
            rkey=rkey,
        )  # fmt: skip
        # Not `_sq`, which refuses requests: a connection has already counted this one itself.
        queue, _ = self._queues or self._make_queues()
        return await queue.completed(self._built_send([request]), "bind_mw")

    # Multicast groups

    def attach_mcast(self, gid: bytes, lid: int = 0) -> None:
        """Receive the datagrams to a multicast group (`ibv_attach_mcast(3)`).

        Usually `ConnectionId.join_multicast` does this, and also informs the network.  The
        attachment ends with the queue pair.

        Args:
            gid: The GID of the group, 16 bytes.
            lid: The local id of the group on InfiniBand, 0 on RoCE.

        Raises:
            ValueError: `gid` is not a GID.
            OSError: EINVAL, this is not a UD queue pair; or the device's limit is reached.
        """
        code = lib.ibv_attach_mcast(self._require(), c_gid(gid), lid)
        check_errno(code, "ibv_attach_mcast")
        if (gid, lid) not in self._groups:
            self._groups += ((gid, lid),)

    def detach_mcast(self, gid: bytes, lid: int = 0) -> None:
        """Stop receiving datagrams of a group (`ibv_detach_mcast(3)`).

        `gid` and `lid` are those of `attach_mcast`.  Datagrams that have arrived still complete.

        Raises:
            OSError: EINVAL, the group is not attached.
        """
        code = lib.ibv_detach_mcast(self._require(), c_gid(gid), lid)
        check_errno(code, "ibv_detach_mcast")
        self._groups = tuple(group for group in self._groups if group != (gid, lid))

    # State

    def modify(self, mask: QPAttrMask | None = None, **changes: Unpack[QPChanges]) -> None:
        """Change attributes (`ibv_modify_qp(3)`), by their C names: see `QPChanges`.

        Args:
            mask: For programs that are written like C: which attributes are meant; it has to name
                exactly those in `changes`.  None: those.
            changes: Their values, such as `qp_state=QPState.ERR`, or `ah_attr=AHAttributes(...)`.

        On RoCE a change to RTR asks the network for the neighbor, and blocks for up to several
        seconds if that does not answer: `BringUp.connect` does it in a thread.

        RESET makes the adapter forget all requests without a completion.  So it is refused while
        any is under way: move to ERR first, and let them be flushed.  After it the entries of
        requests that the adapter did not flush are free, and all prepared posts are freed.

        Raises:
            ValueError: A name is unknown, a value is out of range, or `mask` names other
                attributes.
            TypeError: A value has the wrong type.
            RdmaOSError: RESET, while requests are under way, or while a thread still makes the
                change of `BringUp.connect` (EBUSY).
            NotSupportedError: An alternate path, other than on InfiniBand.
            OSError: The transition is not allowed (EINVAL), or the neighbor does not answer
                (ETIMEDOUT, EHOSTUNREACH).
        """
        check_changes(changes)
        attr, found = to_c(changes)
        if mask is not None and int(mask) != found:
            msg = f"the mask {QPAttrMask(mask)!r} does not fit the changes: {QPAttrMask(found)!r}"
            raise ValueError(msg)
        if "alt_ah_attr" in changes:
            self._refuse_alternate_path(changes["alt_ah_attr"].port_num)
        resets = changes.get("qp_state") == QPState.RESET
        if resets:
            self._refuse_reset()
        self._modify(attr, found)
        if resets:
            self._start_again()

    def _modify(self, attr: Any, mask: int) -> None:
        check_errno(lib.ibv_modify_qp(self._require(), attr, mask), "ibv_modify_qp")
        if mask & _READ_DEPTH:
            self._limit_reads(int(attr.max_rd_atomic))
        if mask & _STATE and attr.qp_state == _ERR:
            self._enter_error()

    def _refuse_alternate_path(self, port: int) -> None:
        if self.pd.context.query_port(port).link_layer == LinkLayer.ETHERNET:
            detail = "(the kernel takes alternate paths on InfiniBand only)"
            raise os_error(errno.EOPNOTSUPP, "ibv_modify_qp", detail=detail)

    def _refuse_reset(self) -> None:
        self._refuse_while_moving()
        under_way = sum(queue.unanswered for queue in self._queues or ())
        if under_way:
            msg = (
                f"{under_way} requests are under way, which RESET would lose: move the queue pair "
                "to ERR first, and await their completions"
            )
            raise busy_error(msg)

    def _refuse_while_moving(self) -> None:
        # A late change would connect a queue pair that began anew to the peer that was given up.
        if self._moving is not None and self._moving.under_way:
            msg = (
                "the kernel still looks for the neighbor, for a `BringUp.connect` that is running "
                "or was given up: try again when that has ended, or close the queue pair"
            )
            raise busy_error(msg)

    def _start_again(self) -> None:
        """After RESET: as new."""
        for queue in self._queues or ():
            queue.fail_waiters()
            for post in list(queue.prepared):
                post.free()
        self._abandon_all()
        self._first_failure, self._in_error = None, False
        self._read_depth = self._rules = None

    def _limit_reads(self, depth: int) -> None:
        """Allow so many reads and atomics to be under way from now on."""
        if self._init.qp_type != QPType.UD:
            self._read_depth, self._rules = depth, None

    def _enter_error(self) -> None:
        self._in_error = True
        if self.outstanding:
            # Only these queues: RESET may give it others meanwhile. Weakly: the timer must not keep
            # alive, after a close, what the queue pair refers to.
            queues = [weakref.ref(queue) for queue in self._queues or ()]
            with contextlib.suppress(RuntimeError):
                asyncio.get_running_loop().call_later(_FLUSH_GRACE_S, _give_up, queues)

    def query(self) -> QPAttributes:
        """Ask the device for the current attributes (`ibv_query_qp(3)`)."""
        attr = ffi.new("struct ibv_qp_attr *")
        init = ffi.new("struct ibv_qp_init_attr *")
        code = lib.ibv_query_qp(self._require(), attr, QUERIED, init)
        check_errno(code, "ibv_query_qp")
        ways = {name: AHAttributes._from_c(getattr(attr, name)) for name in WAYS}
        return copy_of(QPAttributes, attr, **ways)

    @property
    def state(self) -> QPState:
        """The current state, as the device reports it."""
        return self.query().qp_state

    def set_min_rnr_timer(self, milliseconds: float) -> None:
        """Set how long a sender waits when it found no receive posted here (`ibv_modify_qp(3)`).

        For a connected queue pair; `QPPolicy.min_rnr_timer` is the value to connect with.

        Args:
            milliseconds: Milliseconds, 0.01 to 655.36; rounded up to one of the 32 delays that
                InfiniBand has.

        Raises:
            TypeError, ValueError: `milliseconds` is not a number, or is out of range.
            NotSupportedError: iWARP has no such timer.
            OSError: EINVAL, the queue pair is not ready to receive.
        """
        code = rnr_timer_code(milliseconds)
        if self.pd.context.is_iwarp:
            raise os_error(errno.EOPNOTSUPP, "ibv_modify_qp", detail="(iWARP has no RNR timer)")
        if (state := self.state) not in (QPState.RTR, QPState.RTS):
            detail = f"(the queue pair is not ready to receive: {state.name})"
            raise os_error(errno.EINVAL, "ibv_modify_qp", detail=detail)
        self.modify(QPAttrMask.MIN_RNR_TIMER, min_rnr_timer=code)

    def to_error(self) -> None:
        """Move to the error state: posted requests complete as flushed.  Idempotent.

        Software adapters do not flush everything.  A request, awaited or raw, that is not flushed
        within a second is ended by the library; its memory stays registered until the queue pair is
        destroyed.  Requests that are posted from now on are flushed without the adapter, which
        might keep them for ever.
        """
        if self.closed:
            return
        self._enter_error()
        self.modify(QPAttrMask.STATE, qp_state=QPState.ERR)

    @property
    def send_cq(self) -> CompletionQueue:
        """The completion queue of sends."""
        return self._cqs[0]

    @property
    def recv_cq(self) -> CompletionQueue:
        """The completion queue of receives."""
        return self._cqs[1]

    @property
    def outstanding(self) -> int:
        """Number of posted requests whose completion has not been seen."""
        return sum(map(len, self._queues or ()))

    def _failed(self, operation: str, record: WCRecord) -> None:
        """A request has failed, or was flushed."""
        if record[1] != WCStatus.WR_FLUSH_ERR:
            self._note(record_error(operation, record))
        # The adapter has moved it to the error state already.
        self._leave_service()

    def _note(self, cause: BaseException) -> None:
        """The first cause counts: later failures are flushes, and no reason."""
        if self._first_failure is None:
            self._first_failure = cause
            if self._on_first_failure is not None:
                self._on_first_failure(cause)

    def _broken(self, cause: BaseException) -> None:
        """The device has given it up, or a CQ in which it completes; awaited requests end."""
        self._note(cause)
        self._leave_service()

    def _leave_service(self) -> None:
        if not self._in_error:
            with contextlib.suppress(OSError):
                self.to_error()

    @property
    def _device(self) -> Context:
        return self.pd.context

    def _on_async_event(self, event: AsyncEvent) -> None:
        kind = event.type
        if kind in _FATAL:
            self._broken(queue_error(kind.name, f"queue pair {self.num}"))
        elif kind == AsyncEventType.DEVICE_FATAL:
            self._broken(device_error())
        elif kind == AsyncEventType.QP_LAST_WQE_REACHED:
            cq = self.recv_cq
            if cq.managed and cq.channel is not None:
                cq.channel._sweep(cq)
            if self._last_receive is not None:
                self._last_receive.set()

    # Life

    @property
    def _home(self) -> asyncio.AbstractEventLoop | None:
        return self._cqs[0]._home or self._cqs[1]._home

    def _on_close(self) -> None:
        if self.srq is not None and not self._drain_shared():
            self._last_receive = None  # there is nothing to wait for
        loop = running_loop()
        # The adapter forgets the memory only when the queue pair is destroyed: so the queue pair
        # keeps it from now on, instead of the requests; but not a window that is bound to it, which
        # has to go first.
        for queue in self._queues or ():
            queue.room.fail(lambda: ResourceClosedError("the queue pair was closed"))
            self._hold(region for region in queue.regions() if id(region) not in self._made)
            queue.release_regions()
            for post in list(queue.prepared):
                post.free()
        if not self.outstanding:
            self._abandon_all()
            return

        # Flushes that arrive before that are seen; the rest is failed then.
        def abandon() -> None:
            if loop is None or loop.is_closed():
                self._abandon_all()
            else:
                loop.call_soon_threadsafe(self._abandon_all)

        self._when_gone(abandon)

    def _drain_shared(self) -> bool:
        """Before the destruction, see every completion of a receive that it took.

        Adapters forget those that are still in the CQ when the queue pair is destroyed, and with
        them the places in the shared queue.  So it goes to the error state, and the destruction
        waits, for a bounded time, for the event that it takes no more receives.
        """
        channel = self.recv_cq.channel
        loop = self._home
        if channel is None or loop is None or not loop.is_running():
            return False
        attr = ffi.new("struct ibv_qp_attr *")
        attr.qp_state = _ERR
        return self._in_error or not lib.ibv_modify_qp(self._handle, attr, _STATE)

    def _abandon_all(self) -> None:
        for queue in self._queues or ():
            queue.abandon()
        self._queues = None  # the queues refer to this object: a cycle

    def _destroy(self, handle: Any) -> None:
        if self._last_receive is not None:
            self._last_receive.wait(_LAST_RECEIVE_S)
        for gid, lid in self._groups:  # the kernel refuses it to an attached queue pair (EBUSY)
            lib.ibv_detach_mcast(handle, c_gid(gid), lid)
        try:
            check_errno(lib.ibv_destroy_qp(handle), "ibv_destroy_qp")
        finally:
            dismiss(self._token)
            self._unpromise()

    def __repr__(self) -> str:
        return f"<QueuePair {self._state.value} num={self.num} outstanding={self.outstanding}>"
