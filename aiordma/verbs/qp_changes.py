"""Changes of a queue pair's attributes: by their C names, checked, and translated for C.

C takes a struct and a mask that says which of its members count, and silently accepts a member
without its bit, and a bit without its member.  Here each change has a name and a value, and the
mask follows from the names, so neither can be written down.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict, cast

from aiordma._ffi import ffi
from aiordma.arguments import check_kind, fitting
from aiordma.verbs.ah import AHAttributes
from aiordma.verbs.enums import MTU, Access, MigrationState, QPAttrMask, QPState

__all__ = ["WAYS", "QPChanges", "changes_of", "check_changes", "to_c"]


class QPChanges(TypedDict, total=False):
    """Attributes of a queue pair that are to change (`ibv_modify_qp(3)`, same names).

    Keyword arguments of `QueuePair.modify`, and the proposal of `ConnectionId.init_qp_attr`.
    The man page lists which of them each transition needs and allows.

    Attributes:
        qp_state: State to move to.
        cur_qp_state: State that it is in, if the adapter cannot know that.
        path_mtu: MTU of the path; both ends need the same.
        path_mig_state: Whether the alternate path is armed.
        qkey: Key that a datagram has to carry, 32 bits.
        rq_psn: Number of the first packet that arrives, 24 bits: the peer's `sq_psn`.
        sq_psn: Number of the first packet that is sent, 24 bits.
        dest_qp_num: Number of the peer's queue pair, 24 bits.
        qp_access_flags: Accesses that the peer has.
        ah_attr: The way to the peer.
        alt_ah_attr: The alternate way.
        alt_pkey_index: Partition key of the alternate way, as `pkey_index`.
        alt_port_num: Port of the alternate way.
        alt_timeout: As `timeout`, for the alternate way.
        pkey_index: Index in the port's table of partition keys.
        en_sqd_async_notify: 1 for an event when the send queue has drained (SQD).
        max_rd_atomic: Reads and atomics of this side under way at a time.
        max_dest_rd_atomic: Reads and atomics of the peer that are served at a time.
        min_rnr_timer: Code of the delay that a sender is asked for when no receive is posted, 5
            bits.
        port_num: Port of the device, from 1.
        timeout: Exponent e of the acknowledgement timeout, 4.096 us * 2**e, 5 bits; 0 for none.
        retry_cnt: Retries after a timeout, 0 to 7.
        rnr_retry: Retries after receiver-not-ready, 0 to 6; 7 for ever.
        rate_limit: Rate limit in kbit/s; 0 for none.
    """

    qp_state: QPState
    cur_qp_state: QPState
    path_mtu: MTU
    path_mig_state: MigrationState
    qkey: int
    rq_psn: int
    sq_psn: int
    dest_qp_num: int
    qp_access_flags: Access
    ah_attr: AHAttributes
    alt_ah_attr: AHAttributes
    alt_pkey_index: int
    alt_port_num: int
    alt_timeout: int
    pkey_index: int
    en_sqd_async_notify: int
    max_rd_atomic: int
    max_dest_rd_atomic: int
    min_rnr_timer: int
    port_num: int
    timeout: int
    retry_cnt: int
    rnr_retry: int
    rate_limit: int


#: The members that are address vectors.
WAYS = ("ah_attr", "alt_ah_attr")
#: The bit of each change, and the bits that its value may have.
_NUMBERS = {
    "qp_state": (QPAttrMask.STATE, 3),
    "cur_qp_state": (QPAttrMask.CUR_STATE, 3),
    "path_mtu": (QPAttrMask.PATH_MTU, 3),
    "path_mig_state": (QPAttrMask.PATH_MIG_STATE, 2),
    "qkey": (QPAttrMask.QKEY, 32),
    "rq_psn": (QPAttrMask.RQ_PSN, 24),
    "sq_psn": (QPAttrMask.SQ_PSN, 24),
    "dest_qp_num": (QPAttrMask.DEST_QPN, 24),
    "qp_access_flags": (QPAttrMask.ACCESS_FLAGS, 32),
    "alt_pkey_index": (QPAttrMask.ALT_PATH, 16),
    "alt_port_num": (QPAttrMask.ALT_PATH, 8),
    "alt_timeout": (QPAttrMask.ALT_PATH, 5),
    "pkey_index": (QPAttrMask.PKEY_INDEX, 16),
    "en_sqd_async_notify": (QPAttrMask.EN_SQD_ASYNC_NOTIFY, 1),
    "max_rd_atomic": (QPAttrMask.MAX_QP_RD_ATOMIC, 8),
    "max_dest_rd_atomic": (QPAttrMask.MAX_DEST_RD_ATOMIC, 8),
    "min_rnr_timer": (QPAttrMask.MIN_RNR_TIMER, 5),
    "port_num": (QPAttrMask.PORT, 8),
    "timeout": (QPAttrMask.TIMEOUT, 5),
    "retry_cnt": (QPAttrMask.RETRY_CNT, 3),
    "rnr_retry": (QPAttrMask.RNR_RETRY, 3),
    "rate_limit": (QPAttrMask.RATE_LIMIT, 32),
}
_KINDS: dict[str, type[int]] = {
    "qp_state": QPState, "cur_qp_state": QPState, "path_mtu": MTU,
    "path_mig_state": MigrationState, "qp_access_flags": Access,
}  # fmt: skip
_BITS = {
    **{name: int(mask) for name, (mask, _) in _NUMBERS.items()},
    "ah_attr": int(QPAttrMask.AV),
    "alt_ah_attr": int(QPAttrMask.ALT_PATH),
}


def check_changes(changes: Mapping[str, Any]) -> None:
    """Check names and values.

    Raises:
        ValueError: A name is unknown, a value is out of range, or there are parts of an alternate
            path without `alt_ah_attr`.
        TypeError: A value has the wrong type.
    """
    for name, value in changes.items():
        if name in WAYS:
            check_kind(name, value, AHAttributes, none=False)
        elif name in _NUMBERS:
            fitting(name, value, _NUMBERS[name][1])
        else:
            msg = f"a queue pair has no attribute {name} that can be changed"
            raise ValueError(msg)
    if "alt_ah_attr" not in changes and any(name.startswith("alt_") for name in changes):
        msg = "an alternate path needs alt_ah_attr, in addition to the parts that are given"
        raise ValueError(msg)


def to_c(changes: Mapping[str, Any]) -> tuple[Any, int]:
    """The C struct with the changes, and their mask; they were checked."""
    attr, mask = ffi.new("struct ibv_qp_attr *"), 0
    for name, value in changes.items():
        mask |= _BITS[name]
        setattr(attr, name, value._to_c()[0] if name in WAYS else int(value))
    return attr, mask


def changes_of(attr: Any, mask: int) -> QPChanges:
    """The members of a C struct that its mask selects."""
    found: dict[str, Any] = {}
    for name, bit in _BITS.items():
        if not mask & bit:
            continue
        value = getattr(attr, name)
        if name in WAYS:
            found[name] = AHAttributes._from_c(value)
        else:
            found[name] = _KINDS.get(name, int)(value)
    return cast("QPChanges", found)
