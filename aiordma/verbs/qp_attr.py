"""The attributes of a queue pair: requested, granted by the device, and current."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from aiordma._ffi import ffi, lib
from aiordma._ffi.check import check_pointer
from aiordma.arguments import fitting
from aiordma.verbs.ah import AHAttributes
from aiordma.verbs.context import Context, check_limit
from aiordma.verbs.cq import CompletionQueue
from aiordma.verbs.enums import MTU, Access, MigrationState, QPAttrMask, QPState, QPType
from aiordma.verbs.pd import ProtectionDomain
from aiordma.verbs.srq import SharedReceiveQueue

__all__ = ["QUERIED", "QPAttributes", "QPInitAttr", "QPLimits", "check_init", "create"]


@dataclass(frozen=True, slots=True, kw_only=True)
class QPInitAttr:
    """The attributes with which a queue pair is made (`ibv_create_qp(3)`, same names).

    Attributes:
        send_cq: Completion queue of the send queue.
        recv_cq: Completion queue of the receive queue; None for the same.
        max_send_wr: Depth of the send queue, requests.
        max_recv_wr: Depth of the receive queue, requests.
        max_send_sge: Pieces per send request.
        max_recv_sge: Pieces per receive request.
        max_inline_data: Bytes that a send may carry in the request itself.
        srq: Shared receive queue, instead of a receive queue of its own; `max_recv_wr` and
            `max_recv_sge` then have no meaning.
        sq_sig_all: Whether every send makes a completion, whatever its flags.
        qp_type: RC; or UC or UD where the device has them.
    """

    send_cq: CompletionQueue
    recv_cq: CompletionQueue | None = None
    max_send_wr: int = 16
    max_recv_wr: int = 16
    max_send_sge: int = 1
    max_recv_sge: int = 1
    max_inline_data: int = 0
    sq_sig_all: bool = False
    qp_type: QPType = QPType.RC
    srq: SharedReceiveQueue | None = None


#: The attributes that `ibv_query_qp` is asked for.
QUERIED = int(
    QPAttrMask.STATE | QPAttrMask.CAP | QPAttrMask.ACCESS_FLAGS | QPAttrMask.PATH_MTU
    | QPAttrMask.TIMEOUT | QPAttrMask.RETRY_CNT | QPAttrMask.RNR_RETRY
    | QPAttrMask.MIN_RNR_TIMER | QPAttrMask.AV | QPAttrMask.ALT_PATH | QPAttrMask.PKEY_INDEX
    | QPAttrMask.PATH_MIG_STATE
)  # fmt: skip
_sizes = attrgetter("max_send_wr", "max_recv_wr", "max_send_sge", "max_recv_sge", "max_inline_data")
_LIMITS = {
    "max_send_wr": "max_qp_wr", "max_recv_wr": "max_qp_wr",
    "max_send_sge": "max_sge", "max_recv_sge": "max_sge",
}  # fmt: skip


def check_init(pd: object, attr: object, cq: CompletionQueue | None = None) -> None:
    """Check the attributes of a queue pair, and the device's limits for them.

    `cq` stands in for queues that `attr` does not name.  To be called before the completion queues
    grow for the queue pair.

    Raises:
        TypeError: Not a protection domain, or not a `QPInitAttr`.
        ValueError: The shared receive queue belongs to another protection domain.
        OSError: EINVAL, a size is above the device's limit.
    """
    if not isinstance(pd, ProtectionDomain):
        msg = f"not a protection domain: {pd!r}"
        raise TypeError(msg)
    if isinstance(cq, CompletionQueue) and pd.context._cache.get("shared attributes") is attr:
        return  # as those of the connection before
    if not isinstance(attr, QPInitAttr):
        msg = f"not a QPInitAttr: {attr!r}"
        raise TypeError(msg)
    send_cq = cq or attr.send_cq
    for queue in (send_cq,) if attr.recv_cq is None else (send_cq, attr.recv_cq):
        if not isinstance(queue, CompletionQueue):
            msg = f"not a completion queue: {queue!r}"
            raise TypeError(msg)
    if attr.srq is not None and attr.srq.pd is not pd:
        msg = "the shared receive queue belongs to another protection domain"
        raise ValueError(msg)
    fitting("max_inline_data", attr.max_inline_data, 31)
    for name, limit in _LIMITS.items():
        size = fitting(name, getattr(attr, name), 32)
        check_limit("ibv_create_qp", name, size, getattr(pd.context.attributes, limit))
    if cq is not None:
        pd.context._cache.store("shared attributes", attr)


@dataclass(frozen=True, slots=True)
class QPLimits:
    """The depths that the device has granted, at least as large as requested."""

    max_send_wr: int
    max_recv_wr: int
    max_send_sge: int
    max_recv_sge: int
    max_inline_data: int

    @classmethod
    def of(cls, context: Context, given: tuple[int, ...]) -> QPLimits:
        """The limits of a queue pair; equal limits of a device are the same object.

        Args:
            context: The device.
            given: The depths that it gave, in the order of the attributes.
        """
        limits: QPLimits | None = context._cache.get((QPLimits, given))
        if limits is None:
            limits = context._cache.store((QPLimits, given), cls(*given))
        return limits


@dataclass(frozen=True, slots=True)
class QPAttributes:
    """Attributes of a queue pair as `ibv_query_qp(3)` returns them, same names.

    `timeout` is the exponent e of 4.096 us * 2**e, `min_rnr_timer` a code of the table
    `aiordma.verbs.rnr_timer.RNR_TIMERS_MS`, `ah_attr` the way to the peer and `alt_ah_attr` the
    alternate way, which is all zeros on an adapter without alternate paths.
    """

    qp_state: QPState
    path_mtu: MTU
    qkey: int
    rq_psn: int
    sq_psn: int
    dest_qp_num: int
    qp_access_flags: Access
    max_rd_atomic: int
    max_dest_rd_atomic: int
    min_rnr_timer: int
    port_num: int
    timeout: int
    retry_cnt: int
    rnr_retry: int
    ah_attr: AHAttributes
    pkey_index: int
    path_mig_state: MigrationState
    alt_ah_attr: AHAttributes
    alt_pkey_index: int
    alt_port_num: int
    alt_timeout: int


def create(
    pd: ProtectionDomain,
    attr: QPInitAttr,
    send_cq: CompletionQueue,
    recv_cq: CompletionQueue,
    token: int,
) -> tuple[Any, int, QPLimits]:
    """Make a C queue pair, whose events carry `token`; return it, its number and its depths.

    Raises:
        ValueError: A size is out of range.
        OSError: Beyond the device's limits (EINVAL), or out of resources.
    """
    numbers = ffi.new("uint32_t[6]", _sizes(attr))
    srq = ffi.NULL if attr.srq is None else attr.srq._require()
    handle = lib.aio_create_qp(
        pd._require(), send_cq._require(), recv_cq._require(), srq, attr.qp_type,
        attr.sq_sig_all, token, numbers,
    )  # fmt: skip
    if not handle:
        check_pointer(handle, "ibv_create_qp")
    *given, number = ffi.unpack(numbers, 6)
    return handle, number, QPLimits.of(pd.context, tuple(given))
