"""What a queue pair is made with, what the device gave, and what it is now."""

from __future__ import annotations

from dataclasses import dataclass

from aiordma.verbs.cq import CompletionQueue
from aiordma.verbs.enums import MTU, Access, QPState, QPType

__all__ = ["QPAttributes", "QPInitAttr", "QPLimits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class QPInitAttr:
    """What a queue pair is made with (`ibv_create_qp(3)`, same names).

    Attributes:
        send_cq: Completion queue of the send queue.
        recv_cq: Completion queue of the receive queue; None for the same.
        max_send_wr: Depth of the send queue, requests.
        max_recv_wr: Depth of the receive queue, requests.
        max_send_sge: Pieces per send request.
        max_recv_sge: Pieces per receive request.
        max_inline_data: Bytes that a send may carry in the request itself.
        sq_sig_all: Every send completes visibly, whatever its flags.
        qp_type: RC, or UD.
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


@dataclass(frozen=True, slots=True)
class QPLimits:
    """What the device really gave, at least what was asked for."""

    max_send_wr: int
    max_recv_wr: int
    max_send_sge: int
    max_recv_sge: int
    max_inline_data: int


@dataclass(frozen=True, slots=True)
class QPAttributes:
    """Attributes of a queue pair as `ibv_query_qp(3)` tells them, same names."""

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
