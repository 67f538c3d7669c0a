"""QueuePair: the two work queues of one end of a connection."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
from collections.abc import Callable
from typing import Any

from aiordma._ffi import ffi, lib
from aiordma._ffi.check import check_errno, check_pointer
from aiordma.errors import (
    ResourceClosedError,
    completion_error,
    device_error,
    os_error,
    queue_error,
)
from aiordma.loop.running import running_loop
from aiordma.verbs.ah import AHAttributes
from aiordma.verbs.async_event import AsyncEvent, enroll, next_token
from aiordma.verbs.context import Context
from aiordma.verbs.cq import CompletionQueue
from aiordma.verbs.enums import MTU, Access, AsyncEventType, QPAttrMask, QPState, QPType, WCStatus
from aiordma.verbs.groups import Groups
from aiordma.verbs.pd import ProtectionDomain
from aiordma.verbs.qp_attr import QPAttributes, QPInitAttr, QPLimits, check_init
from aiordma.verbs.qp_requests import Requests
from aiordma.verbs.resource import Resource
from aiordma.verbs.rnr_timer import rnr_timer_code
from aiordma.verbs.wc import WCRecord
from aiordma.verbs.work_queue import Posted, WorkQueue
from aiordma.verbs.wr_check import WRRules

__all__ = ["QPAttributes", "QPInitAttr", "QPLimits", "QueuePair"]

_FLUSH_GRACE_S = 1.0
_LAST_RECEIVE_S = 0.25
_NAMES = tuple(QPLimits.__dataclass_fields__)
# As plain numbers: an operation on flags makes a new member, which takes as long as the call.
_STATE = int(QPAttrMask.STATE)
_READ_DEPTH = int(QPAttrMask.MAX_QP_RD_ATOMIC)
_ERR = int(QPState.ERR)
_FATAL = frozenset(
    {AsyncEventType.QP_FATAL, AsyncEventType.QP_REQ_ERR, AsyncEventType.QP_ACCESS_ERR}
)


def _closed_error() -> BaseException:
    return ResourceClosedError("the queue pair was closed")


class QueuePair(Requests, Groups):
    """A queue pair (`ibv_create_qp(3)`).

    Each request is either awaited (`send`, `recv`, `read`, ...) or posted raw with the caller's
    own number (`post_send`, `post_recv`), whose completion then comes out of the CQ.

    Args:
        pd: Protection domain of everything that it touches.
        attr: Sizes and completion queues.
        uses: Further resources that must outlive it, such as the memory that it will be given.
        cq: Where all of it completes, if `attr` does not say: attributes that are shared.
        checked: `check_init` was called for these.

    Raises:
        ValueError: A size is out of range, or a completion queue would be too small.
        OSError: Beyond the device's limits (EINVAL), or out of resources.
    """

    __slots__ = (
        "_cqs", "_drains", "_first_failure", "_groups", "_init", "_last_receive",
        "_on_first_failure", "pd",
    )  # fmt: skip

    def __init__(
        self,
        pd: ProtectionDomain,
        attr: QPInitAttr,
        uses: tuple[Resource, ...] = (),
        cq: CompletionQueue | None = None,
        *,
        checked: bool = False,
    ) -> None:
        if not checked:
            check_init(pd, attr, cq)
        send_cq = cq or attr.send_cq
        recv_cq = attr.recv_cq or send_cq
        token = next_token()
        sizes = (
            attr.max_send_wr, attr.max_recv_wr, attr.max_send_sge, attr.max_recv_sge,
            attr.max_inline_data,
        )  # fmt: skip
        if not 0 <= min(sizes) <= max(sizes) < 1 << 31:
            for name, size in zip(_NAMES, sizes, strict=True):
                if not 0 <= size < 1 << 31:
                    msg = f"{name} is out of range: {size}"
                    raise ValueError(msg)
        numbers = ffi.new("uint32_t[6]", sizes)
        srq = ffi.NULL if attr.srq is None else attr.srq._require()
        # Room for what was asked, before the queue pair exists: refusing costs nothing then.
        send_cq._promise(attr.max_send_wr)
        try:
            self._promise_receives(attr, recv_cq)
            try:
                handle = lib.aio_create_qp(
                    pd._require(), send_cq._require(), recv_cq._require(), srq, int(attr.qp_type),
                    attr.sq_sig_all, token, numbers,
                )  # fmt: skip
                check_pointer(handle, "ibv_create_qp")
            except BaseException:
                self._unpromise_receives(attr, recv_cq)
                raise
        except BaseException:
            send_cq._unpromise(attr.max_send_wr)
            raise
        *given, self.num = ffi.unpack(numbers, 6)
        self.limits = QPLimits.of(pd.context, tuple(given))
        self.pd = pd
        self._init = attr
        self._groups: list[tuple[bytes, int]] = []
        self._first_failure: BaseException | None = None
        #: Called once with the first cause, whether or not anybody awaits the request.
        self._on_first_failure: Callable[[BaseException], None] | None = None
        self._in_error = False
        # Only as many requests as the CQs have room for, even where the device gave more.
        self._prepared = {}
        self._rules = WRRules.of(
            pd.context, self.limits, attr.qp_type, all_signaled=attr.sq_sig_all
        )
        self._queues = None
        self._cqs = send_cq, recv_cq
        self.srq = attr.srq
        self._last_receive: threading.Event | None = None
        self._drains = False
        parents = (*uses, pd, send_cq, recv_cq)
        super().__init__(handle, parents if attr.srq is None else (*parents, attr.srq))
        send_cq._enter(self)
        if recv_cq is not send_cq:
            recv_cq._enter(self)
        if attr.srq is not None:
            self._last_receive = threading.Event()
            attr.srq._takers[self.num] = self
        enroll(token, self)

    def _make_queues(self) -> tuple[WorkQueue, WorkQueue]:
        attr = self._init
        receives = attr.max_recv_wr if attr.srq is None else 0
        self._queues = queues = (
            WorkQueue(self._cqs[0], attr.max_send_wr, self._on_failure, self._cause),
            WorkQueue(self._cqs[1], receives, self._on_failure, self._cause),
        )
        if self.closed:
            for queue in queues:
                queue.room.fail(_closed_error)
                queue.abandon(self.num)
        return queues

    @staticmethod
    def _promise_receives(attr: QPInitAttr, cq: CompletionQueue) -> None:
        if attr.srq is None:
            cq._promise(attr.max_recv_wr)
        else:
            attr.srq._admit(cq)

    @staticmethod
    def _unpromise_receives(attr: QPInitAttr, cq: CompletionQueue) -> None:
        if attr.srq is None:
            cq._unpromise(attr.max_recv_wr)
        else:
            attr.srq._dismiss(cq)

    # State

    def modify(self, mask: QPAttrMask, **attributes: int) -> None:
        """Change attributes (`ibv_modify_qp(3)`), by their C names.

        Args:
            mask: Which attributes are meant.
            attributes: Their values, such as `qp_state=QPState.ERR`.

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
        if mask & _READ_DEPTH:
            self._limit_reads(int(attr.max_rd_atomic))
        if mask & _STATE and attr.qp_state == _ERR:
            self._enter_error()

    def _limit_reads(self, depth: int) -> None:
        """So many own reads and atomics may be under way from now on."""
        if self._init.qp_type != QPType.UD:
            self._rules = WRRules.of(
                self.pd.context,
                self.limits,
                self._init.qp_type,
                all_signaled=self._init.sq_sig_all,
                read_depth=depth,
            )

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
            | QPAttrMask.MIN_RNR_TIMER | QPAttrMask.AV
        )  # fmt: skip
        check_errno(lib.ibv_query_qp(self._require(), attr, mask, init), "ibv_query_qp")
        kinds: dict[str, Any] = {
            "qp_state": QPState, "path_mtu": MTU, "qp_access_flags": Access,
            "ah_attr": AHAttributes._from_c,
        }  # fmt: skip
        return QPAttributes(
            *(kinds.get(n, int)(getattr(attr, n)) for n in QPAttributes.__dataclass_fields__)
        )

    @property
    def state(self) -> QPState:
        """Current state, asked from the device."""
        return self.query().qp_state

    def set_min_rnr_timer(self, milliseconds: float) -> None:
        """Set how long a sender waits when it found no receive posted here (`ibv_modify_qp(3)`).

        Of a connected queue pair; before, `QPPolicy.min_rnr_timer` says it.

        Args:
            milliseconds: 0.01 to 655.36; rounded up to one of the 32 delays that InfiniBand has.

        Raises:
            TypeError, ValueError: Not such a number.
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
        """Move to the error state: what is posted completes as flushed.  Idempotent.

        Software adapters do not flush everything.  What is not flushed within a second ends here,
        awaited or raw; its memory stays registered until the queue pair is destroyed.  What
        is posted from now on is flushed without the adapter, which might keep it for ever.
        """
        if self.closed:
            return
        self._enter_error()
        self.modify(QPAttrMask.STATE, qp_state=QPState.ERR)

    def _fail_waiters(self) -> None:
        for queue in self._queues or ():
            queue.give_up(self.num)

    @property
    def send_cq(self) -> CompletionQueue:
        """Where sends complete."""
        return self._cqs[0]

    @property
    def recv_cq(self) -> CompletionQueue:
        """Where receives complete."""
        return self._cqs[1]

    @property
    def outstanding(self) -> int:
        """Posted requests whose completion has not been seen."""
        return 0 if self._queues is None else len(self._queues[0]) + len(self._queues[1])

    def _on_failure(self, posted: Posted, record: WCRecord) -> None:
        self._failed(posted.operation, record)

    def _receive_failed(self, record: WCRecord) -> None:
        """A receive of the shared queue that this queue pair had taken has failed."""
        self._failed("recv", record)

    def _failed(self, operation: str, record: WCRecord) -> None:
        if record[1] != WCStatus.WR_FLUSH_ERR:
            details = {"vendor_err": record[3], "qp_num": record[6]}
            self._note(completion_error(record[1], operation=operation, **details))
        # The adapter is in the error state already; now this side knows it, too.
        if not self._in_error:
            with contextlib.suppress(OSError):
                self.to_error()

    def _note(self, cause: BaseException) -> None:
        """The first cause counts: what follows it is flushed and is not a reason."""
        if self._first_failure is None:
            self._first_failure = cause
            if self._on_first_failure is not None:
                self._on_first_failure(cause)

    def _broken(self, cause: BaseException) -> None:
        """The device has given it up, or a CQ in which it completes; what is awaited ends."""
        self._note(cause)
        if not self._in_error:
            with contextlib.suppress(OSError):
                self.to_error()

    @property
    def _device(self) -> Context:
        return self.pd.context

    def _on_async_event(self, event: AsyncEvent) -> None:
        channel = self.recv_cq.channel
        if channel is None:
            self._handle_event(event.type)
        else:
            channel._in_loop(lambda: self._handle_event(event.type))

    def _handle_event(self, kind: AsyncEventType) -> None:
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

    def _cause(self) -> BaseException | None:
        return self._first_failure

    # Life

    @property
    def _home(self) -> asyncio.AbstractEventLoop | None:
        return self._cqs[0]._home

    def _on_close(self) -> None:
        for queue in self._queues or ():
            queue.room.fail(_closed_error)
        if self.srq is not None:
            self._drain_shared()
        loop = running_loop()
        # The adapter forgets the memory only when the queue pair is destroyed: so the queue pair
        # keeps it from now on, in place of the requests.
        # Not so a window that is bound to it: that one has to go first.
        for queue in self._queues or ():
            self._hold(region for region in queue.regions() if id(region) not in self._made)
            queue.release_regions()
        self._free_prepared()
        if not self.outstanding:
            self._abandon_all()
            return

        # Flushes that arrive before that are seen; the rest is failed then.
        def abandon(_: object) -> None:
            if loop is None or loop.is_closed():
                self._abandon_all()
            else:
                loop.call_soon_threadsafe(self._abandon_all)

        self._gone.add_done_callback(abandon)

    def _drain_shared(self) -> None:
        """Before the destruction, see every completion of a receive that it took.

        Adapters forget those that are still in the CQ when the queue pair is destroyed, and with
        them the places in the shared queue.  So it goes to the error state, and the destruction
        waits, for a bounded time, for the event that it takes no more receives.
        """
        channel = self.recv_cq.channel
        loop = self._home
        if channel is None or loop is None or not loop.is_running():
            return
        attr = ffi.new("struct ibv_qp_attr *")
        attr.qp_state = int(QPState.ERR)
        refused = not self._in_error and lib.ibv_modify_qp(
            self._handle, attr, int(QPAttrMask.STATE)
        )
        self._drains = not refused

    def _abandon_all(self) -> None:
        for queue in self._queues or ():
            queue.abandon(self.num)

    def _destroy(self, handle: Any) -> None:
        if self._drains and self._last_receive is not None:
            self._last_receive.wait(_LAST_RECEIVE_S)
        self._detach_all(handle)
        try:
            check_errno(lib.ibv_destroy_qp(handle), "ibv_destroy_qp")
        finally:
            send_cq, recv_cq = self._cqs
            for cq in {send_cq, recv_cq}:
                cq._leave(self)
            send_cq._unpromise(self._init.max_send_wr)
            self._unpromise_receives(self._init, recv_cq)

    def __repr__(self) -> str:
        return f"<QueuePair {self._state.value} num={self.num} outstanding={self.outstanding}>"
