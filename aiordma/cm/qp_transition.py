"""The state transitions of a queue pair that a connection id drives.

librdmacm can do them itself when the queue pair is attached to the id, inside
`rdma_get_cm_event`.  It is not attached here: that call would race with the destruction of the
queue pair in another thread, and the timers and access rights that the remote peer chose would be
applied unseen.  Instead `rdma_init_qp_attr` returns the values that the connection manager
proposes, and this file decides which values are applied.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass, field, fields, replace
from typing import Any

from aiordma._ffi import ffi, lib
from aiordma.cm.step import Stage
from aiordma.errors import os_error
from aiordma.verbs.enums import Access, QPState
from aiordma.verbs.qp import QueuePair
from aiordma.verbs.qp_changes import QPChanges, changes_of

__all__ = ["CLIENT_LEFT", "QPPolicy", "advance", "make_ready", "proposal"]

#: The reason of an answer that comes too late.
CLIENT_LEFT = "(the client has left: close the connection id of its request)"


@dataclass(frozen=True, slots=True, kw_only=True)
class QPPolicy:
    """Values that override the connection manager's proposal; None leaves a value as proposed.

    Attributes:
        access: Remote access rights.
        ack_timeout: Exponent e of the acknowledgement timeout, 4.096 us * 2**e.
        max_retry_count: Upper bound for the retries, whatever the peer asked for.
        max_rnr_retry_count: Likewise for receiver-not-ready.
        min_rnr_timer: Code of the delay that a sender is asked for when no receive is posted
            (`verbs.rnr_timer.RNR_TIMERS_MS`). The default is 0.64 ms; None leaves the connection
            manager's 0, which is 655 ms. Together with the peer's `rnr_retry_count` it decides how
            late a receive may be; see docs/posting.md.
        max_dest_rd_atomic: Upper bound for the peer's reads served at a time.
        max_rd_atomic: Upper bound for this side's reads under way at a time.
    """

    access: Access | None = None
    ack_timeout: int | None = None
    max_retry_count: int | None = None
    max_rnr_retry_count: int | None = None
    min_rnr_timer: int | None = 12
    max_dest_rd_atomic: int | None = None
    max_rd_atomic: int | None = None
    # Made once: connections have few policies, and hashing a policy takes longer than its use.
    _numbers: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _granting: dict[tuple[int, int], QPPolicy] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        values = [getattr(self, each.name) for each in fields(self) if each.init]
        numbers = tuple(-1 if value is None else int(value) for value in values)
        object.__setattr__(self, "_numbers", numbers)  # as C takes them
        object.__setattr__(self, "_granting", {})

    def granting(self, responder_resources: int, initiator_depth: int) -> QPPolicy:
        """The policy of an end whose answer grants these depths.

        `responder_resources` bounds the reads of the peer, `initiator_depth` those of this end.

        The connection manager proposes the depths of the request.  But an end that started more
        reads than it announced would break its connection: the peer serves no more.
        """
        depths = responder_resources, initiator_depth
        policy = self._granting.get(depths)
        if policy is None:
            policy = self._granting[depths] = replace(
                self,
                max_dest_rd_atomic=_lower(self.max_dest_rd_atomic, responder_resources),
                max_rd_atomic=_lower(self.max_rd_atomic, initiator_depth),
            )
        return policy


def _lower(bound: int | None, value: int) -> int:
    return value if bound is None else min(bound, value)


def advance(
    id_handle: Any, qp: QueuePair, first: int, last: int, policy: QPPolicy, *, requested: bool
) -> None:
    """Move `qp` through the states `first` to `last` with the connection's attributes.

    `requested` says whether the id stands for a request that is not answered yet.

    Raises:
        ConnectionAbortedError: The client has left: there is nothing to propose for its request.
        OSError: The connection manager or the device refused.
    """
    code = lib.aio_qp_advance(id_handle, qp._require(), first, last, *policy._numbers)
    if code > 0:
        qp._limit_reads(code - 1)
    elif code < 0:
        refused = -code - lib.AIO_NOT_PROPOSED
        if requested and refused == errno.EINVAL:
            raise os_error(errno.ECONNABORTED, "rdma_init_qp_attr", detail=CLIENT_LEFT)
        if refused > 0:
            raise os_error(refused, "rdma_init_qp_attr")
        raise os_error(-code, "ibv_modify_qp")


def proposal(id_handle: Any, state: QPState, stage: Stage) -> QPChanges:
    """The proposal of the connection manager for a queue pair that is not the id's own.

    Raises:
        ConnectionAbortedError: The client has left: there is nothing to propose for its request.
        OSError: The connection manager refused.
    """
    attr = ffi.new("struct ibv_qp_attr *")
    mask = ffi.new("int *")
    attr.qp_state = int(state)
    if lib.rdma_init_qp_attr(id_handle, attr, mask):
        refused = ffi.errno or errno.EIO
        if stage is Stage.REQUESTED and refused == errno.EINVAL:
            raise os_error(errno.ECONNABORTED, "rdma_init_qp_attr", detail=CLIENT_LEFT)
        detail = f"({state.name}; the connection id is {stage.value})"
        raise os_error(refused, "rdma_init_qp_attr", detail=detail)
    return changes_of(attr, mask[0])


def make_ready(qp: QueuePair, port: int) -> None:
    """Take a datagram queue pair on from INIT: it needs no peer to receive and to send."""
    qp.modify(qp_state=QPState.RTR)
    qp.modify(qp_state=QPState.RTS, sq_psn=0)
    mtu = qp.pd.context.query_port(port).active_mtu.in_bytes
    qp._rules = replace(qp._rules or qp._choose_rules(), max_datagram=mtu)
