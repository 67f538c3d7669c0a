"""The state transitions of a queue pair that a connection id drives.

librdmacm can do them itself when the queue pair is attached to the id, inside
`rdma_get_cm_event`.  It is not attached here: that call would race with the destruction of the
queue pair in another thread, and the timers and access rights that the remote peer chose would be
applied unseen.  Instead `rdma_init_qp_attr` says what the connection manager proposes, and what
is applied is decided here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from aiordma._ffi import ffi, lib
from aiordma._ffi.check import check_minus_one
from aiordma.verbs.enums import Access, QPAttrMask, QPState
from aiordma.verbs.qp import QueuePair

__all__ = ["QPPolicy", "advance"]

# As plain numbers: an operation on flags makes a new member, which takes as long as the call.
_ACCESS = int(QPAttrMask.ACCESS_FLAGS)
_TIMEOUT = int(QPAttrMask.TIMEOUT)
_RETRY_CNT = int(QPAttrMask.RETRY_CNT)
_RNR_RETRY = int(QPAttrMask.RNR_RETRY)
_MIN_RNR_TIMER = int(QPAttrMask.MIN_RNR_TIMER)
_MAX_DEST_RD_ATOMIC = int(QPAttrMask.MAX_DEST_RD_ATOMIC)
_MAX_QP_RD_ATOMIC = int(QPAttrMask.MAX_QP_RD_ATOMIC)


@dataclass(frozen=True, slots=True, kw_only=True)
class QPPolicy:
    """What overrides the connection manager's proposal; None leaves a value as proposed.

    Attributes:
        access: Remote access rights.
        ack_timeout: Exponent e of the acknowledgement timeout, 4.096 us * 2**e.
        max_retry_count: Upper bound for the retries, whatever the peer asked for.
        max_rnr_retry_count: Likewise for receiver-not-ready.
        min_rnr_timer: Code of the delay asked from a sender when no receive is posted; the
            connection manager's own 0 means 655 ms.
        max_dest_rd_atomic: Upper bound for the peer's reads served at a time.
        max_rd_atomic: Upper bound for own reads under way at a time.
    """

    access: Access | None = None
    ack_timeout: int | None = None
    max_retry_count: int | None = None
    max_rnr_retry_count: int | None = None
    min_rnr_timer: int | None = 12
    max_dest_rd_atomic: int | None = None
    max_rd_atomic: int | None = None

    def granting(self, responder_resources: int, initiator_depth: int) -> QPPolicy:
        """The policy of an end that accepts with these depths.

        `responder_resources` and `initiator_depth` are what the answer to the request grants.

        The connection manager proposes what the request asked for.  An end that started more
        reads than it announced would break its connection: the peer serves no more than that.
        """
        return replace(
            self,
            max_dest_rd_atomic=_lower(self.max_dest_rd_atomic, responder_resources),
            max_rd_atomic=_lower(self.max_rd_atomic, initiator_depth),
        )


def _lower(bound: int | None, value: int) -> int:
    return value if bound is None else min(bound, value)


def advance(id_handle: Any, qp: QueuePair, state: QPState, policy: QPPolicy) -> None:
    """Move `qp` to `state` with the connection's attributes.

    Raises:
        OSError: The connection manager or the device refused.
    """
    attr = ffi.new("struct ibv_qp_attr *")
    mask = ffi.new("int *")
    attr.qp_state = int(state)
    check_minus_one(lib.rdma_init_qp_attr(id_handle, attr, mask), "rdma_init_qp_attr")
    wanted: int = mask[0]
    if wanted & _ACCESS and policy.access is not None:
        attr.qp_access_flags = int(policy.access)
    if wanted & _TIMEOUT and policy.ack_timeout is not None:
        attr.timeout = policy.ack_timeout
    if wanted & _RETRY_CNT and policy.max_retry_count is not None:
        attr.retry_cnt = min(attr.retry_cnt, policy.max_retry_count)
    if wanted & _RNR_RETRY and policy.max_rnr_retry_count is not None:
        attr.rnr_retry = min(attr.rnr_retry, policy.max_rnr_retry_count)
    if wanted & _MIN_RNR_TIMER and policy.min_rnr_timer is not None:
        attr.min_rnr_timer = policy.min_rnr_timer
    if wanted & _MAX_DEST_RD_ATOMIC and policy.max_dest_rd_atomic is not None:
        attr.max_dest_rd_atomic = min(attr.max_dest_rd_atomic, policy.max_dest_rd_atomic)
    if wanted & _MAX_QP_RD_ATOMIC and policy.max_rd_atomic is not None:
        attr.max_rd_atomic = min(attr.max_rd_atomic, policy.max_rd_atomic)
    qp._modify(attr, wanted)
