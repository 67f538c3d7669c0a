"""The check of a queue pair's requests: its limits, and what its transport supports.

A list is checked before the adapter sees it, because an adapter reports a fault late and at the
cost of the whole queue pair: by a failed completion that flushes everything behind it, or by a
refused post, half of which was queued.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from aiordma._ffi import lib
from aiordma.arguments import fitting
from aiordma.errors import MessageTooLargeError, NotSupportedError
from aiordma.verbs.context import Context
from aiordma.verbs.enums import AtomicCap, DeviceCapFlags, MWType, Opcode, QPType, SendFlags
from aiordma.verbs.mr import MemoryRegion
from aiordma.verbs.qp_attr import QPLimits
from aiordma.verbs.wr import (
    ATOMICS,
    INVALIDATING,
    SGE,
    WITH_IMM,
    Built,
    Planned,
    RecvWR,
    SendWR,
    Transfer,
    build_recv,
    build_send,
    check_count,
    check_requests,
    pinned,
)

__all__ = ["WRRules", "check_atomic", "check_inline"]

_SENDS = frozenset({Opcode.SEND, Opcode.SEND_WITH_IMM})
_WRITES = frozenset({Opcode.RDMA_WRITE, Opcode.RDMA_WRITE_WITH_IMM})
_READS = frozenset({Opcode.RDMA_READ})
_WINDOWS = frozenset({Opcode.BIND_MW})
_CAN_BE_INLINE = _SENDS | _WRITES | {Opcode.SEND_WITH_INV}
_WITHOUT_DATA = frozenset({Opcode.LOCAL_INV, Opcode.BIND_MW})
_SOFTWARE_IWARP = 0x626D74  # its vendor_id
_TYPE_2 = DeviceCapFlags.MEM_WINDOW_TYPE_2A | DeviceCapFlags.MEM_WINDOW_TYPE_2B
# RC.  Opcodes missing everywhere, such as TSO or FLUSH, cannot be passed to ibv_post_send by value.
_ALL = _SENDS | _WRITES | _READS | ATOMICS | INVALIDATING | _WINDOWS


def _possible(context: Context, qp_type: QPType) -> frozenset[Opcode]:
    if qp_type == QPType.UD:
        return _SENDS
    possible = _ALL if qp_type == QPType.RC else _SENDS | _WRITES | INVALIDATING | _WINDOWS
    attributes = context.attributes
    if context.is_iwarp:
        possible -= WITH_IMM
    if attributes.atomic_cap == AtomicCap.NONE:
        possible -= ATOMICS
    if not attributes.device_cap_flags & DeviceCapFlags.MEM_MGT_EXTENSIONS:
        possible -= INVALIDATING
    if not attributes.max_mw:
        possible -= _WINDOWS
    # LOCAL_INV needs windows of type 2: the keys of ibv_reg_mr cannot be invalidated.
    if not attributes.device_cap_flags & _TYPE_2:
        possible -= {Opcode.LOCAL_INV}
    return possible


@dataclass(frozen=True, slots=True)
class WRRules:
    """The requests that a queue pair accepts.

    Attributes:
        limits: The device's actual limits for the queue pair.
        opcodes: Send requests that the device, the transport and the type of queue pair support.
        max_read_sge: Pieces that a read may be scattered into.
        where: Device and type, for texts.
        all_signaled: Whether every send makes a completion, whatever its flags.
        overtaking: Whether a message may complete before a read that was posted before it, as on
            iWARP.
        fussy: Whether this is software iWARP, which accepts fewer lists of pieces, and refuses a
            receive without a piece only after the post.
        max_datagram: Bytes that a message of a UD queue pair may have: the port's MTU; 0 for
            other types.
        max_message: Bytes that any message may have.
        read_depth: Reads and atomics that may be under way, once the queue pair is connected; if it
            is 0 they are refused here, as Soft-RoCE does not refuse them.
    """

    limits: QPLimits
    opcodes: frozenset[Opcode]
    max_read_sge: int
    where: str
    all_signaled: bool = False
    overtaking: bool = False
    fussy: bool = False
    max_datagram: int = 0
    max_message: int = 1 << 31
    read_depth: int | None = None

    @classmethod
    def of(
        cls,
        context: Context,
        limits: QPLimits,
        qp_type: QPType,
        *,
        all_signaled: bool = False,
        read_depth: int | None = None,
    ) -> WRRules:
        """The rules of a queue pair of this type and size on this device.

        Equal queue pairs share them.
        """
        # By identity: hashing the fields of a dataclass takes long.  A device keeps its limits.
        key = (WRRules, id(limits), qp_type, all_signaled, read_depth)
        rules: WRRules | None = context._cache.get(key)
        if rules is not None:
            return rules
        is_datagram = qp_type == QPType.UD
        most = context.attributes.max_sge_rd
        numbers = range(1, context.attributes.phys_port_cnt + 1)
        ports = [context.query_port(number) for number in numbers]
        rules = cls(
            limits=limits,
            opcodes=_possible(context, qp_type),
            max_read_sge=min(most, limits.max_send_sge) if most > 0 else limits.max_send_sge,
            where=f"{context.name} ({context.transport.name}, {qp_type.name})",
            all_signaled=all_signaled,
            overtaking=context.is_iwarp,
            fussy=context.attributes.vendor_id == _SOFTWARE_IWARP,
            max_datagram=max(port.active_mtu.in_bytes for port in ports) if is_datagram else 0,
            max_message=max(port.max_msg_sz for port in ports),
            read_depth=read_depth,
        )
        if not is_datagram:  # theirs depend on the port's MTU, which may change
            context._cache.store(key, rules)
        return rules

    def built_send(self, chain: Sequence[SendWR]) -> Built:
        """Requests for the send queue, checked and translated.

        Raises:
            NotSupportedError, ValueError: See `check_send`.
            ValueError, ResourceClosedError: See `build_send`.
            TypeError: A request is not a `SendWR`.
        """
        try:
            self.check_send(chain)
            first, keep = build_send(chain)
            plan = [self.plan(request) for request in chain]
        except AttributeError:
            check_requests(chain, SendWR)
            raise
        for i, planned in enumerate(plan):
            if planned.signaled:
                first[i].send_flags |= SendFlags.SIGNALED
        return Built("ibv_post_send", first, keep, plan)

    def built_recv(self, chain: Sequence[RecvWR]) -> Built:
        """Requests for the receive queue, checked and translated; raises as `built_send`."""
        try:
            self.check_recv(chain)
            plan = [Planned("recv", pinned(request)) for request in chain]
            return Built("ibv_post_recv", *build_recv(chain), plan)
        except AttributeError:
            check_requests(chain, RecvWR)
            raise

    def transfer(
        self,
        opcode: Opcode,
        piece: object,
        remote_addr: int,
        rkey: int,
        name: str,
    ) -> Transfer | None:
        """A signaled READ or WRITE of one region or piece, without making a `SendWR`.

        Returns:
            None for several pieces, and for a request that `check_send` refuses.

        Raises:
            ValueError, ResourceClosedError: As `built_send`.
        """
        if isinstance(piece, SGE):
            mr, offset, length = piece.mr, piece.offset, len(piece)
        elif isinstance(piece, MemoryRegion):
            mr, offset, length = piece, 0, piece.length
        else:
            return None
        if length > self.max_message or not self._can(opcode):
            return None
        mr._require()
        return Transfer(
            lib.aio_post_read if opcode is Opcode.RDMA_READ else lib.aio_post_write,
            mr.addr + offset,
            length,  # not above max_msg_sz, which itself has 32 bits
            mr.lkey,
            fitting("remote_addr", remote_addr, 64),
            fitting("rkey", rkey, 32),
            [Planned(name, (mr,))],
        )

    def plan(self, request: SendWR) -> Planned:
        """What the send queue has to note about the request."""
        asked = self.all_signaled or bool(request.send_flags & SendFlags.SIGNALED)
        signaled = asked or (self.overtaking and request.opcode in _READS)
        name = Opcode(request.opcode).name.lower()
        return Planned(name, pinned(request), signaled, silent=signaled and not asked)

    def check_send(self, requests: Sequence[SendWR]) -> None:
        """Check requests for the send queue.

        Raises:
            NotSupportedError: The device, the transport or the type of queue pair does not support
                it.
            ValueError: A limit of the queue pair is exceeded, or the request contradicts itself.
        """
        for request in requests:
            self._check_opcode(request)
            if request.opcode == Opcode.BIND_MW:
                _check_bind(request, alone=len(requests) == 1)
            if self.max_datagram or request.ah is not None:
                self.check_datagram(request)
            self.check_pieces(request)
            if request.opcode in ATOMICS:
                check_atomic([len(piece) for piece in request.sg_list], request.remote_addr)

    def _check_opcode(self, request: SendWR) -> None:
        opcode = request.opcode
        if self._can(opcode):
            return
        msg = f"{Opcode(opcode).name} is not possible: the connection has initiator_depth 0"
        if opcode not in self.opcodes:
            msg = f"{Opcode(opcode).name} is not possible on {self.where}: no {_kind(opcode)} there"
        raise NotSupportedError(errno.EOPNOTSUPP, msg)

    def _can(self, opcode: Opcode) -> bool:
        if self.read_depth == 0 and (opcode in _READS or opcode in ATOMICS):
            return False
        return opcode in self.opcodes

    def check_datagram(self, request: SendWR) -> None:
        """Check the fields that only datagrams have; see `check_send`.

        The size matters most: an adapter sends nothing of a message that is longer than the MTU,
        and completes it with success.
        """
        if not self.max_datagram:
            msg = f"an address handle is for datagrams; this is {self.where}"
            raise ValueError(msg)
        if request.ah is None:
            msg = "a datagram needs ah, remote_qpn and remote_qkey, which name its receiver"
            raise ValueError(msg)

    def check_pieces(self, request: SendWR) -> None:
        """Check the number and the size of the pieces; see `check_send`."""
        opcode, count = request.opcode, len(request.sg_list)
        if opcode == Opcode.RDMA_READ:
            check_count(count, "the least of limits.max_send_sge and max_sge_rd", self.max_read_sge)
        elif opcode in _WITHOUT_DATA:
            check_count(count, f"what {opcode.name} can carry", 0)
        else:
            check_count(count, "limits.max_send_sge", self.limits.max_send_sge)
        check_inline(request)
        self.check_sizes(request, [len(piece) for piece in request.sg_list])

    def check_sizes(self, request: SendWR, sizes: Sequence[int]) -> None:
        """Check the pieces that a request has, or is to have; see `check_send`.

        Raises:
            MessageTooLargeError: A datagram is longer than the MTU, or a message than the port's
                maximum.
        """
        size = sum(sizes)
        if self.fussy and 0 in sizes[:-1]:
            msg = f"an empty piece in front of another is not possible on {self.where}"
            raise NotSupportedError(errno.EOPNOTSUPP, msg)
        if self.max_datagram and size > self.max_datagram:
            msg = f"a datagram of {size} bytes is longer than the port's MTU of {self.max_datagram}"
            raise MessageTooLargeError(msg)
        if size > self.max_message:
            # The software devices would report success for what they cannot send.
            msg = f"a message of {size} bytes: the port's max_msg_sz is {self.max_message}"
            raise MessageTooLargeError(msg)
        if request.send_flags & SendFlags.INLINE and size > self.limits.max_inline_data:
            msg = (
                f"{size} bytes cannot be inline: limits.max_inline_data is "
                f"{self.limits.max_inline_data} (ask for more with QPInitAttr.max_inline_data)"
            )
            raise ValueError(msg)

    def check_recv(self, requests: Iterable[RecvWR]) -> None:
        """Check requests for the receive queue.

        Raises:
            ValueError: More pieces than the queue pair takes.
            NotSupportedError: No piece, on software iWARP.
        """
        for request in requests:
            if self.fussy and not request.sg_list:
                msg = f"a receive without a piece is not possible on {self.where}"
                raise NotSupportedError(errno.EOPNOTSUPP, msg)
            check_count(len(request.sg_list), "limits.max_recv_sge", self.limits.max_recv_sge)


def _check_bind(request: SendWR, *, alone: bool) -> None:
    if request.mw is None or request.bind is None:
        msg = "BIND_MW needs a memory window and a piece to bind it to"
        raise ValueError(msg)
    if request.mw.type == MWType.TYPE_1 and not alone:
        msg = "a window of type 1 is bound by a call of its own, not in a list"
        raise ValueError(msg)


def check_inline(request: SendWR) -> None:
    """Raise ValueError if the request is INLINE and has no bytes to send."""
    if request.send_flags & SendFlags.INLINE and request.opcode not in _CAN_BE_INLINE:
        msg = f"{request.opcode.name} cannot be inline: it sends no bytes"
        raise ValueError(msg)


def check_atomic(sizes: Sequence[int], remote_addr: int) -> None:
    """Raise ValueError unless an atomic operation can have these sizes and this address."""
    sizes = list(sizes)
    if sizes != [8]:
        msg = f"the result of an atomic operation takes one piece of 8 bytes, not {sizes}"
        raise ValueError(msg)
    if remote_addr % 8:
        msg = f"remote_addr {remote_addr:#x} of an atomic operation is not a multiple of 8"
        raise ValueError(msg)


def _kind(opcode: Opcode) -> str:
    """The name of the capability that the request needs."""
    kinds = {
        WITH_IMM: "immediate data",
        ATOMICS: "atomic operations",
        INVALIDATING: "invalidation",
        _WINDOWS: "memory windows",
    }
    return next(
        (name for opcodes, name in kinds.items() if opcode in opcodes), "such work requests"
    )
