"""Work requests as values, and their translation into the linked lists that C posts."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from aiordma._ffi import ffi
from aiordma.verbs.enums import Opcode, SendFlags
from aiordma.verbs.mr import MemoryRegion

__all__ = ["SGE", "RecvWR", "SendWR", "build_recv", "build_send", "sge_list"]

_ATOMIC = (Opcode.ATOMIC_CMP_AND_SWP, Opcode.ATOMIC_FETCH_AND_ADD)
_WITH_IMM = (Opcode.SEND_WITH_IMM, Opcode.RDMA_WRITE_WITH_IMM)


@dataclass(frozen=True, slots=True)
class SGE:
    """A piece of a registered buffer.

    Args:
        mr: The region; it cannot be destroyed while a request that names it is under way.
        offset: First byte, from the region's start.
        length: Bytes; None for all from `offset` on.

    Raises:
        ValueError: The piece is not inside the region.
    """

    mr: MemoryRegion
    offset: int = 0
    length: int | None = None

    def __post_init__(self) -> None:
        length = self.mr.length - self.offset if self.length is None else self.length
        if self.offset < 0 or length < 0 or self.offset + length > self.mr.length:
            msg = (
                f"bytes {self.offset} to {self.offset + length} are not inside a region of "
                f"{self.mr.length} bytes"
            )
            raise ValueError(msg)
        object.__setattr__(self, "length", length)

    def __len__(self) -> int:
        assert self.length is not None
        return self.length


@dataclass(slots=True)
class SendWR:
    """A request for the send queue (`ibv_post_send(3)`, same names).

    Attributes:
        wr_id: The caller's own number, 64 bits, returned by the completion untouched.
        sg_list: What to send, or where the result of a read or atomic goes.
        opcode: Kind of request.
        send_flags: SIGNALED, SOLICITED, FENCE, INLINE.
        imm_data: 32-bit immediate for the opcodes that carry one.
        remote_addr: Remote address of a one-sided operation.
        rkey: Its key.
        compare_add: Compare value, or the value to add.
        swap: The value that a compare-and-swap stores.
        invalidate_rkey: Key for SEND_WITH_INV and LOCAL_INV.
    """

    wr_id: int = 0
    sg_list: Sequence[SGE] = field(default_factory=tuple)
    opcode: Opcode = Opcode.SEND
    send_flags: SendFlags = SendFlags.SIGNALED
    imm_data: int = 0
    remote_addr: int = 0
    rkey: int = 0
    compare_add: int = 0
    swap: int = 0
    invalidate_rkey: int = 0


@dataclass(slots=True)
class RecvWR:
    """A request for the receive queue (`ibv_post_recv(3)`, same names)."""

    wr_id: int = 0
    sg_list: Sequence[SGE] = field(default_factory=tuple)


def sge_list(pieces: MemoryRegion | SGE | Sequence[MemoryRegion | SGE]) -> tuple[SGE, ...]:
    """One region, one piece or several, as pieces."""
    if isinstance(pieces, (MemoryRegion, SGE)):
        pieces = (pieces,)
    return tuple(SGE(p) if isinstance(p, MemoryRegion) else p for p in pieces)


def _fill_sges(target: Any, pieces: Sequence[SGE], keep: list[Any]) -> None:
    if pieces:
        sges = ffi.new("struct ibv_sge[]", len(pieces))
        for sge, piece in zip(sges, pieces, strict=True):
            piece.mr._require()
            sge.addr = piece.mr.addr + piece.offset
            sge.length = len(piece)
            sge.lkey = piece.mr.lkey
        keep.append(sges)
        target.sg_list = sges
    target.num_sge = len(pieces)


def _check_wr_id(wr_id: int) -> None:
    if not 0 <= wr_id < 1 << 64:
        msg = f"wr_id {wr_id} does not fit into 64 bits"
        raise ValueError(msg)


def build_send(requests: Sequence[SendWR]) -> tuple[Any, list[Any]]:
    """A C list of send requests, and the objects that keep it alive during the call.

    Raises:
        ValueError: A number is out of range.
        ResourceClosedError: A region is closed.
    """
    chain = ffi.new("struct ibv_send_wr[]", len(requests))
    keep: list[Any] = [chain]
    for i, request in enumerate(requests):
        wr = chain[i]
        _check_wr_id(request.wr_id)
        wr.wr_id = request.wr_id
        wr.next = chain + i + 1 if i + 1 < len(requests) else ffi.NULL
        wr.opcode = int(request.opcode)
        wr.send_flags = int(request.send_flags)
        _fill_sges(wr, request.sg_list, keep)
        if request.opcode in _WITH_IMM:
            wr.imm_data = socket.htonl(request.imm_data)
        elif request.opcode in (Opcode.SEND_WITH_INV, Opcode.LOCAL_INV):
            wr.invalidate_rkey = request.invalidate_rkey
        if request.opcode in _ATOMIC:
            wr.wr.atomic.remote_addr = request.remote_addr
            wr.wr.atomic.rkey = request.rkey
            wr.wr.atomic.compare_add = request.compare_add
            wr.wr.atomic.swap = request.swap
        else:
            wr.wr.rdma.remote_addr = request.remote_addr
            wr.wr.rdma.rkey = request.rkey
    return chain, keep


def build_recv(requests: Sequence[RecvWR]) -> tuple[Any, list[Any]]:
    """A C list of receive requests, and the objects that keep it alive during the call."""
    chain = ffi.new("struct ibv_recv_wr[]", len(requests))
    keep: list[Any] = [chain]
    for i, request in enumerate(requests):
        wr = chain[i]
        _check_wr_id(request.wr_id)
        wr.wr_id = request.wr_id
        wr.next = chain + i + 1 if i + 1 < len(requests) else ffi.NULL
        _fill_sges(wr, request.sg_list, keep)
    return chain, keep
