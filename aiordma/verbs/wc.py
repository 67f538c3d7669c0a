"""WorkCompletion: the outcome of one work request; and how successes are only counted."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from aiordma.errors import CompletionError, completion_error, wc_status_name
from aiordma.verbs.enums import WCFlags, WCOpcode, WCStatus

__all__ = [
    "WC_STRUCT", "Countable", "WCRecord", "WorkCompletion", "count_successes", "flush_record",
    "record_error",
]  # fmt: skip

# struct ibv_wc in the machine's own byte order: wr_id, status, opcode, vendor_err, byte_len,
# imm_data (network order) or invalidated_rkey, qp_num, src_qp, wc_flags, pkey_index, slid, sl,
# dlid_path_bits.  tests/unit holds it against the header.
WC_STRUCT = struct.Struct("=QiiIIIIIIHHBB2x")

_SUCCESS = WCStatus.SUCCESS
_IP_CSUM_OK, _WITH_IMM, _WITH_INV = (
    int(flag) for flag in (WCFlags.IP_CSUM_OK, WCFlags.WITH_IMM, WCFlags.WITH_INV)
)
_WORDS = WC_STRUCT.size // 8
_HALVES = WC_STRUCT.size // 4
_STATUS = 2  # which of the halves
K = TypeVar("K")


class _Known(dict[int, K]):
    """Members of an enumeration by number: many times faster than asking the enumeration."""

    def __init__(self, kind: Callable[[int], K]) -> None:
        self._kind = kind

    def __missing__(self, number: int) -> K:
        self[number] = member = self._kind(number)
        return member


_opcodes = _Known(WCOpcode)
_flags = _Known(WCFlags)

WCRecord = tuple[int, int, int, int, int, int, int, int, int, int, int, int, int]


def flush_record(qp_num: int) -> WCRecord:
    """The record of a request that ended without the adapter."""
    return (0, WCStatus.WR_FLUSH_ERR, 0, 0, 0, 0, qp_num, 0, 0, 0, 0, 0, 0)


def record_error(operation: str, record: WCRecord) -> CompletionError:
    """The exception of a request that has failed; `operation` names the request."""
    return completion_error(record[1], operation=operation, vendor_err=record[3], qp_num=record[6])


@dataclass(frozen=True, slots=True)
class WorkCompletion:
    """One completion, copied out of the adapter's queue (`ibv_poll_cq(3)`).

    After a failure only `wr_id`, `status`, `qp_num` and `vendor_err` have a meaning; the other
    properties are None then.

    A datagram's receiver finds the sender in `src_qp` (its queue pair) and, if `flags` contain
    `WCFlags.GRH`, in the first 40 bytes of the buffer, which `byte_len` counts too: see `GRH`.
    `slid`, `sl`, `dlid_path_bits` and `pkey_index` belong to InfiniBand's datagrams.
    """

    wr_id: int
    status: WCStatus
    qp_num: int
    vendor_err: int
    opcode: WCOpcode | None
    byte_len: int | None
    imm_data: int | None
    invalidated_rkey: int | None
    flags: WCFlags
    src_qp: int
    pkey_index: int = 0
    slid: int = 0
    sl: int = 0
    dlid_path_bits: int = 0

    @classmethod
    def from_record(cls, record: WCRecord, wr_id: int | None = None) -> Self:
        """From a `record` (an unpacked `struct ibv_wc`); `wr_id` replaces the record's."""
        good = record[1] == 0
        bits = record[8] if good else 0
        if bits & _IP_CSUM_OK and record[2] == WCOpcode.RECV and not record[7]:
            # Soft-RoCE returns the kernel's own bit for an invalidation, which is this bit here.
            # A checksum is reported for datagrams only, and those have a sender.
            bits = bits & ~_IP_CSUM_OK | _WITH_INV
        return cls(
            wr_id=record[0] if wr_id is None else wr_id,
            status=_SUCCESS if good else WCStatus(record[1]),
            qp_num=record[6],
            vendor_err=record[3],
            opcode=_opcodes[record[2]] if good else None,
            byte_len=record[4] if good else None,
            imm_data=socket.ntohl(record[5]) if bits & _WITH_IMM else None,
            invalidated_rkey=record[5] if bits & _WITH_INV else None,
            flags=_flags[bits],
            src_qp=record[7] if good else 0,
            pkey_index=record[9],
            slid=record[10],
            sl=record[11],
            dlid_path_bits=record[12],
        )

    @property
    def ok(self) -> bool:
        """Whether the request succeeded."""
        return self.status == 0

    @property
    def status_name(self) -> str:
        """The name of the status, such as `WR_FLUSH_ERR`."""
        return wc_status_name(self.status)

    def error(self, operation: str = "") -> CompletionError:
        """The exception for this failure; `operation` names the failed request in its text."""
        return completion_error(
            self.status, operation=operation, qp_num=self.qp_num, vendor_err=self.vendor_err
        )


class Countable:
    """A sink of which a caller may only want the number of completions."""

    __slots__ = ()

    def count(self, wr_id: int) -> bool:
        """Take a success that the caller only counts; False to be called with the completion."""
        return False


def count_successes(completions: memoryview, find: Callable[[int], Any]) -> int:
    """Take successes that are only counted, from the first on; return how many.

    Stops at the first completion that has to go another way, so that the order is kept.

    Args:
        completions: An array of `struct ibv_wc`.
        find: Returns the sink of an id.
    """
    if any(completions.cast("I")[_STATUS::_HALVES].tolist()):
        return 0
    count = 0
    for wr_id in completions.cast("Q")[::_WORDS].tolist():
        sink = find(wr_id)
        if not isinstance(sink, Countable) or not sink.count(wr_id):
            break
        count += 1
    return count
