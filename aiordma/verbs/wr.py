"""Work requests as values, and their translation into the linked lists that C posts.

Every number is checked against the width of its C field here, before anything is posted.  Whether
a queue pair supports the request is another question: `WRRules` (verbs.wr_check) answers it.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from aiordma._ffi import ffi, lib
from aiordma.arguments import fitting
from aiordma.verbs.ah import AddressHandle
from aiordma.verbs.enums import Access, MWType, Opcode, SendFlags
from aiordma.verbs.mr import SGE, MemoryRegion, check_inside
from aiordma.verbs.mw import MemoryWindow
from aiordma.verbs.resource import Resource

if TYPE_CHECKING:
    from aiordma.verbs.work_queue import Posted

__all__ = [
    "ATOMICS", "INVALIDATING", "SGE", "WITH_IMM", "WITH_REMOTE", "Buffers", "Built", "Planned",
    "RecvWR", "SendWR", "Transfer", "build_recv", "build_send", "check_count", "check_inside",
    "check_requests", "flags_of", "pinned", "sge_list",
]  # fmt: skip

ATOMICS = frozenset({Opcode.ATOMIC_CMP_AND_SWP, Opcode.ATOMIC_FETCH_AND_ADD})
WITH_IMM = frozenset({Opcode.SEND_WITH_IMM, Opcode.RDMA_WRITE_WITH_IMM})
WITH_REMOTE = frozenset({Opcode.RDMA_WRITE, Opcode.RDMA_WRITE_WITH_IMM, Opcode.RDMA_READ})
INVALIDATING = frozenset({Opcode.SEND_WITH_INV, Opcode.LOCAL_INV})
_NO_ACCESS = Access(0)


Buffers = MemoryRegion | SGE | Sequence[MemoryRegion | SGE]


@dataclass(slots=True)
class SendWR:
    """A request for the send queue (`ibv_post_send(3)`, same names).

    Attributes:
        wr_id: The caller's own number, 64 bits, returned by the completion untouched.
        sg_list: Memory to send, or for the result of a read or atomic.
        opcode: Kind of request.
        send_flags: SIGNALED: success makes a completion, too (failure always does).  SOLICITED:
            wakes a receiver that waits for solicited completions only.  FENCE: starts when all
            reads and atomics before it are done.  INLINE: the post copies the bytes.
        imm_data: 32-bit immediate for the opcodes that carry one.
        remote_addr: Remote address of a one-sided operation, 64 bits.
        rkey: Its key, 32 bits; for BIND_MW the key that the window is to have.
        compare_add: Compare value, or the value to add, 64 bits.
        swap: The value that a compare-and-swap stores, 64 bits.
        invalidate_rkey: Key that SEND_WITH_INV ends at the peer, or LOCAL_INV here, 32 bits.
        mw: The memory window of a BIND_MW.
        bind: The memory that the window is to open; a piece of no bytes closes a window of type 1.
        bind_access: Accesses that the window allows the peer.
        ah: The way to the receiver of a datagram.
        remote_qpn: The receiver's queue pair, 24 bits; 0xFFFFFF for a multicast group.
        remote_qkey: The key that the receiver expects, 32 bits.
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
    mw: MemoryWindow | None = None
    bind: SGE | None = None
    bind_access: Access = _NO_ACCESS
    ah: AddressHandle | None = None
    remote_qpn: int = 0
    remote_qkey: int = 0


@dataclass(slots=True)
class RecvWR:
    """A request for the receive queue (`ibv_post_recv(3)`, same names)."""

    wr_id: int = 0
    sg_list: Sequence[SGE] = field(default_factory=tuple)


def flags_of(*, solicited: bool = False, inline: bool = False, fence: bool = False) -> SendFlags:
    """The flags of an awaited request."""
    flags = SendFlags.SIGNALED
    if solicited:
        flags |= SendFlags.SOLICITED
    if inline:
        flags |= SendFlags.INLINE
    if fence:
        flags |= SendFlags.FENCE
    return flags


def sge_list(pieces: Buffers) -> tuple[SGE, ...]:
    """One region, one piece or several, as pieces."""
    if isinstance(pieces, (MemoryRegion, SGE)):
        pieces = (pieces,)
    elif isinstance(pieces, (bytes, bytearray, memoryview, str)):
        msg = f"a {type(pieces).__name__} is not registered: post a MemoryRegion(pd, buffer) of it"
        raise TypeError(msg)
    found = tuple(SGE(p) if isinstance(p, MemoryRegion) else p for p in pieces)
    for piece in found:
        if not isinstance(piece, SGE):
            msg = f"no MemoryRegion and no SGE: {piece!r}"
            raise TypeError(msg)
    return found


def check_count(count: int, name: str, most: int) -> None:
    """Raise ValueError if a request has more pieces than `most`, the limit called `name`."""
    if count > most:
        msg = f"{count} pieces are too many: {name} is {most}"
        raise ValueError(msg)


def check_requests(chain: Sequence[Any], kind: type[SendWR] | type[RecvWR]) -> None:
    """Refuse an argument that is not a list of requests; called if a request lacks an attribute.

    Raises:
        TypeError: A request is of another class, or has pieces of another class.
    """
    for request in chain:
        if not isinstance(request, kind):
            msg = f"not a {kind.__name__}: {request!r}"
            raise TypeError(msg)
        sge_list([piece for piece in request.sg_list if not isinstance(piece, MemoryRegion)])
        if any(isinstance(piece, MemoryRegion) for piece in request.sg_list):
            msg = "sg_list is made of SGE: SGE(region) names a whole region"
            raise TypeError(msg)


def pinned(request: SendWR | RecvWR) -> tuple[Resource, ...]:
    """The objects that must not be destroyed before the request has completed."""
    resources: tuple[Resource, ...] = tuple(piece.mr for piece in request.sg_list)
    if isinstance(request, SendWR):
        if request.mw is not None:
            resources += (request.mw,)
        if request.bind is not None:
            resources += (request.bind.mr,)
        if request.ah is not None:
            resources += (request.ah,)
    return resources


def _fill_sges(target: Any, pieces: Sequence[SGE], keep: list[Any]) -> None:
    if pieces:
        sges = ffi.new("struct ibv_sge[]", len(pieces))
        for sge, piece in zip(sges, pieces, strict=True):
            piece.mr._require()
            sge.addr = piece.mr.addr + piece.offset
            sge.length = fitting("the length of a piece,", len(piece), 32)
            sge.lkey = piece.mr.lkey
        keep.append(sges)
        target.sg_list = sges
    target.num_sge = len(pieces)


def _fill_opcode(wr: Any, request: SendWR) -> None:
    """Fill in the fields that the opcode uses: they share unions in C."""
    opcode = request.opcode
    if opcode in WITH_IMM:
        wr.imm_data = socket.htonl(fitting("imm_data", request.imm_data, 32))
    elif opcode in INVALIDATING:
        wr.invalidate_rkey = fitting("invalidate_rkey", request.invalidate_rkey, 32)
    if request.ah is not None:
        wr.wr.ud.ah = request.ah._require()
        wr.wr.ud.remote_qpn = fitting("remote_qpn", request.remote_qpn, 24)
        wr.wr.ud.remote_qkey = fitting("remote_qkey", request.remote_qkey, 32)
    elif opcode in ATOMICS:
        wr.wr.atomic.remote_addr = fitting("remote_addr", request.remote_addr, 64)
        wr.wr.atomic.rkey = fitting("rkey", request.rkey, 32)
        wr.wr.atomic.compare_add = fitting("compare_add", request.compare_add, 64)
        wr.wr.atomic.swap = fitting("swap", request.swap, 64)
    elif opcode == Opcode.SEND_WITH_INV:
        wr.wr.rdma.rkey = wr.invalidate_rkey  # where software iWARP's library looks for it
    elif opcode in WITH_REMOTE:
        wr.wr.rdma.remote_addr = fitting("remote_addr", request.remote_addr, 64)
        wr.wr.rdma.rkey = fitting("rkey", request.rkey, 32)
    elif opcode == Opcode.BIND_MW and request.mw is not None:
        wr.bind_mw.mw = request.mw._require()
        wr.bind_mw.rkey = fitting("rkey", request.rkey, 32)
        wr.bind_mw.bind_info.mw_access_flags = int(request.bind_access)
        if request.bind is not None:
            wr.bind_mw.bind_info.mr = request.bind.mr._require()
            wr.bind_mw.bind_info.addr = request.bind.mr.addr + request.bind.offset
            wr.bind_mw.bind_info.length = len(request.bind)


def build_send(requests: Sequence[SendWR]) -> tuple[Any, list[Any]]:
    """A C list of send requests, and the objects that keep it alive during the call.

    Raises:
        ValueError: A number does not fit into its field.
        TypeError: A number is not an integer.
        ResourceClosedError: A region, window or address handle is closed.
    """
    chain = ffi.new("struct ibv_send_wr[]", len(requests))
    keep: list[Any] = [chain]
    for i, request in enumerate(requests):
        wr = chain[i]
        wr.wr_id = fitting("wr_id", request.wr_id, 64)
        wr.next = chain + i + 1 if i + 1 < len(requests) else ffi.NULL
        wr.opcode = int(request.opcode)
        wr.send_flags = int(request.send_flags)
        _fill_sges(wr, request.sg_list, keep)
        _fill_opcode(wr, request)
    return chain, keep


def build_recv(requests: Sequence[RecvWR]) -> tuple[Any, list[Any]]:
    """A C list of receive requests, and the objects that keep it alive; raises as `build_send`."""
    chain = ffi.new("struct ibv_recv_wr[]", len(requests))
    keep: list[Any] = [chain]
    for i, request in enumerate(requests):
        wr = chain[i]
        wr.wr_id = fitting("wr_id", request.wr_id, 64)
        wr.next = chain + i + 1 if i + 1 < len(requests) else ffi.NULL
        _fill_sges(wr, request.sg_list, keep)
    return chain, keep


class Planned(NamedTuple):
    """A request that is about to be posted; see `Posted` (verbs.work_queue)."""

    operation: str
    regions: tuple[Resource, ...]
    signaled: bool = True
    silent: bool = False


class Built(NamedTuple):
    """Requests, checked and translated.

    Attributes:
        verb: The function of C that posts them.
        first: The C list.
        keep: The objects that keep it alive.
        plan: For the account of the queue.
    """

    verb: str
    first: Any
    keep: list[Any]
    plan: list[Planned]

    def post(self, handle: Any, entries: Sequence[Posted]) -> int:
        """Post the list with the numbers of these entries; return 0 or an errno.

        After a failure the list may have been queued all the same: Soft-RoCE writes its ring
        first and rings the doorbell by a system call that can fail.
        """
        for i, entry in enumerate(entries):
            self.first[i].wr_id = entry.wr_id
        if self.verb == "ibv_post_recv":
            return int(lib.ibv_post_recv(handle, self.first, ffi.new("struct ibv_recv_wr **")))
        wr = self.first[0]
        if wr.opcode == Opcode.BIND_MW and wr.bind_mw.mw.type == MWType.TYPE_1:
            # A call of its own, in which the device's library chooses the key.
            bind = ffi.new("struct ibv_mw_bind *")
            bind.wr_id = wr.wr_id
            bind.send_flags = wr.send_flags
            bind.bind_info = wr.bind_mw.bind_info
            return int(lib.ibv_bind_mw(handle, wr.bind_mw.mw, bind))
        return int(lib.ibv_post_send(handle, self.first, ffi.new("struct ibv_send_wr **")))


class Transfer(NamedTuple):
    """A READ or WRITE of one piece, checked: as `Built`, with no C list to be made."""

    function: Callable[..., int]
    addr: int
    length: int
    lkey: int
    remote_addr: int
    rkey: int
    plan: list[Planned]
    verb: str = "ibv_post_send"

    def post(self, handle: Any, entries: Sequence[Posted]) -> int:
        """As `Built.post`."""
        number = entries[0].wr_id
        return self.function(
            handle, number, self.addr, self.length, self.lkey, self.remote_addr, self.rkey
        )
