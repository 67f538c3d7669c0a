"""AddressHandle: the way to a remote port, named by each datagram; and GRH, to answer a datagram.

A received datagram begins with 40 bytes that the adapter fills in: the global route header.  RoCE
v2 has IP headers instead: IPv6 fills all 40 bytes, IPv4 the last 20, and the first 20 may then hold
anything, which makes the two hard to distinguish.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import struct
from dataclasses import dataclass
from typing import Any, Self

from aiordma._ffi import ffi, lib
from aiordma._ffi.check import check_errno, check_minus_one, check_pointer
from aiordma.arguments import check_kind
from aiordma.errors import ConnectTimeoutError, os_error
from aiordma.loop.limit import Limit
from aiordma.loop.workers import call_blocking
from aiordma.verbs.context import Context, copy_of
from aiordma.verbs.enums import GIDType
from aiordma.verbs.pd import ProtectionDomain
from aiordma.verbs.resource import Resource
from aiordma.verbs.wc import WorkCompletion

__all__ = ["GRH", "AHAttributes", "AddressHandle", "c_gid", "gid_of", "host_of"]

_MAPPED = bytes(10) + b"\xff\xff"
_IPV4_AT = 20
_HALVES = struct.Struct("!10H")
# Members of C structs: `ibv_global_route` and `ibv_ah_attr` of an AHAttributes, `ibv_wc`.
_OF_GRH = ("sgid_index", "flow_label", "hop_limit", "traffic_class")
_OF_ATTR = ("dlid", "sl", "src_path_bits", "static_rate", "port_num")
_OF_WC = ("src_qp", "slid", "sl", "dlid_path_bits")


def gid_of(host: str) -> bytes:
    """The GID that RoCE v2 makes of an IP address; 16 bytes.

    Raises:
        ValueError: Not a numeric address.
    """
    ip = ipaddress.ip_address(host.partition("%")[0])
    return ip.packed if ip.version == 6 else _MAPPED + ip.packed


def host_of(gid: bytes) -> str:
    """A GID as an IP address: dotted where it holds an IPv4 address."""
    if gid[:12] == _MAPPED:
        return socket.inet_ntop(socket.AF_INET, gid[12:])
    return socket.inet_ntop(socket.AF_INET6, gid)


def c_gid(gid: bytes) -> Any:
    """A GID as C takes it.

    Raises:
        ValueError: Not 16 bytes.
    """
    if len(gid) != 16:
        msg = f"a GID has 16 bytes, not {len(gid)}"
        raise ValueError(msg)
    union = ffi.new("union ibv_gid *")
    ffi.memmove(union.raw, gid, 16)
    return union


@dataclass(frozen=True, slots=True)
class GRH:
    """The global route header in front of a received datagram (`struct ibv_grh`).

    Attributes:
        sgid: GID of the sender's port; 16 bytes.
        dgid: GID that it was sent to: this port's, or a multicast group's.
        hop_limit: Hops that were left.
        traffic_class: Traffic class, or type of service.
        raw: All 40 bytes.
    """

    sgid: bytes
    dgid: bytes
    hop_limit: int
    traffic_class: int
    raw: bytes

    #: Bytes that a receive buffer needs in front of the payload.
    SIZE = 40

    @classmethod
    def parse(cls, buffer: Any) -> GRH:
        """The header at the beginning of a receive buffer.

        Meaningful if the completion's `flags` contain `WCFlags.GRH`; on RoCE they always do.

        Raises:
            ValueError: Fewer than 40 bytes.
        """
        raw = bytes(memoryview(buffer).cast("B")[: cls.SIZE])
        if len(raw) < cls.SIZE:
            msg = f"a global route header has {cls.SIZE} bytes, not {len(raw)}"
            raise ValueError(msg)
        if _holds_ipv4(raw):
            sgid, dgid = _MAPPED + raw[32:36], _MAPPED + raw[36:40]
            return cls(sgid, dgid, raw[28], raw[21], raw)
        traffic_class = (raw[0] << 4 | raw[1] >> 4) & 0xFF
        return cls(raw[8:24], raw[24:40], raw[7], traffic_class, raw)

    @staticmethod
    def payload(buffer: Any, wc: WorkCompletion) -> memoryview:
        """The datagram itself, which follows the header in the buffer of a completed receive.

        Raises:
            ValueError: `wc` does not report a received datagram.
        """
        if wc.byte_len is None or wc.byte_len < GRH.SIZE:
            msg = f"not the completion of a received datagram: {wc}"
            raise ValueError(msg)
        return memoryview(buffer).cast("B")[GRH.SIZE : wc.byte_len]

    @property
    def is_multicast(self) -> bool:
        """Whether the datagram was sent to a multicast group."""
        return _is_multicast(self.dgid)

    def __str__(self) -> str:
        return f"{host_of(self.sgid)} -> {host_of(self.dgid)}"


def _holds_ipv4(raw: bytes) -> bool:
    """Whether the last 20 bytes are an IPv4 header.

    The checksum counts only where the first bytes look like IPv6: Soft-RoCE leaves it out when a
    device talks to itself.
    """
    if raw[_IPV4_AT] >> 4 != 4:
        return False
    if raw[0] >> 4 != 6:
        return True
    if raw[_IPV4_AT] != 0x45:  # options are not allowed here
        return False
    total: int = sum(_HALVES.unpack_from(raw, _IPV4_AT))
    # The checksum is of ones' complement: a sound header sums up to all ones.
    return (total & 0xFFFF) + (total >> 16) == 0xFFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class AHAttributes:
    """The way to a remote port (`struct ibv_ah_attr`, same names).

    Attributes:
        dgid: GID of the remote port or group, 16 bytes; empty for a local way without a header,
            which exists on InfiniBand but not on RoCE.
        sgid_index: Index of this side's GID in the port's table.
        flow_label: 20 bits, for routers that spread flows.
        hop_limit: Routers that a packet may pass.
        traffic_class: Priority, or type of service.
        dlid: Local id of the remote port, on InfiniBand.
        sl: Service level.
        src_path_bits: Offset in the range of this port's local ids.
        static_rate: Rate limit, as C's `enum ibv_rate`; 0 for the port's rate.
        port_num: This side's port, from 1.
    """

    dgid: bytes = b""
    sgid_index: int = 0
    flow_label: int = 0
    hop_limit: int = 64
    traffic_class: int = 0
    dlid: int = 0
    sl: int = 0
    src_path_bits: int = 0
    static_rate: int = 0
    port_num: int = 1

    def __post_init__(self) -> None:
        check_kind("dgid", self.dgid, bytes, none=False)
        if len(self.dgid) not in (0, 16):
            msg = f"a GID has 16 bytes, not {len(self.dgid)}"
            raise ValueError(msg)

    @classmethod
    def to(
        cls,
        context: Context,
        host: str,
        *,
        port_num: int = 1,
        sgid_index: int | None = None,
        hop_limit: int = 64,
        traffic_class: int = 0,
    ) -> Self:
        """The way to a numeric IP address, or to a GID written like one.

        Args:
            context: The device.
            host: Address of the remote port or multicast group.
            port_num: Port of the device, from 1.
            sgid_index: Which of the port's GIDs to send from; None for the first RoCE v2 GID of
                the same IP version that is link-local exactly if `host` is.
            hop_limit: Routers that a packet may pass.
            traffic_class: Priority.

        Raises:
            ValueError: Not a numeric address.
            OSError: The port has no fitting GID (EADDRNOTAVAIL).
        """
        dgid = gid_of(host)
        if sgid_index is None:
            sgid_index = _fitting_gid(context, port_num, dgid)
        return cls(
            dgid=dgid, sgid_index=sgid_index, port_num=port_num, hop_limit=hop_limit,
            traffic_class=traffic_class,
        )  # fmt: skip

    @classmethod
    def from_wc(cls, context: Context, wc: WorkCompletion, grh: GRH, port_num: int = 1) -> Self:
        """The way back to the sender of a received datagram (`ibv_init_ah_from_wc(3)`).

        Args:
            context: The device.
            wc: The completion of the receive.
            grh: Its header.
            port_num: The port at which it arrived, which is the queue pair's.

        Raises:
            OSError: The header matches none of the port's GIDs.
        """
        if grh.is_multicast:
            # The C function looks for the group's GID among the port's own, and fails.
            return cls.to(context, host_of(grh.sgid), port_num=port_num)
        c_wc = ffi.new("struct ibv_wc *", {name: getattr(wc, name) for name in _OF_WC})
        c_wc.wc_flags = int(wc.flags)
        c_grh = ffi.new("struct ibv_grh *")
        ffi.memmove(c_grh, grh.raw, GRH.SIZE)
        attr = ffi.new("struct ibv_ah_attr *")
        code = lib.ibv_init_ah_from_wc(context._require(), port_num, c_wc, c_grh, attr)
        check_minus_one(code, "ibv_init_ah_from_wc")
        return cls._from_c(attr)

    @classmethod
    def _from_c(cls, attr: Any) -> Self:
        dgid = bytes(ffi.buffer(attr.grh.dgid.raw)) if attr.is_global else b""
        of_grh = {name: getattr(attr.grh, name) for name in _OF_GRH}
        return copy_of(cls, attr, dgid=dgid, **of_grh)

    def _to_c(self) -> Any:
        attr = ffi.new("struct ibv_ah_attr *")
        if self.dgid:
            attr.is_global = 1
            ffi.memmove(attr.grh.dgid.raw, self.dgid, 16)
        for part, names in ((attr.grh, _OF_GRH), (attr, _OF_ATTR)):
            for name in names:
                setattr(part, name, getattr(self, name))
        return attr


def _is_multicast(gid: bytes) -> bool:
    return gid[0] == 0xFF or (gid[:12] == _MAPPED and gid[12] & 0xF0 == 0xE0)


def _fitting_gid(context: Context, port_num: int, dgid: bytes) -> int:
    """The first RoCE v2 GID of the port that can speak to `dgid`."""
    mapped = dgid[:12] == _MAPPED
    for entry in context.gid_table():
        if entry.port != port_num or entry.type != GIDType.ROCE_V2:
            continue
        same_version = (entry.gid[:12] == _MAPPED) == mapped
        if same_version and (entry.gid[0] == 0xFE) == (dgid[0] == 0xFE):
            return entry.index
    detail = f"(port {port_num} of {context.name} has no GID that fits {host_of(dgid)})"
    raise os_error(errno.EADDRNOTAVAIL, "ibv_create_ah", detail=detail)


class AddressHandle(Resource):
    """The way to a remote port, as the adapter knows it (`ibv_create_ah(3)`).

    A send that names the handle keeps it from being destroyed until the send has completed.

    The kernel may have to ask the network for the neighbor first, and blocks for up to a second if
    no host answers: so use `create` on an event loop.

    Args:
        pd: Protection domain; only its queue pairs can send with the handle.
        attr: The way, from an event (`ConnectionEvent.ah_attr`), a received datagram
            (`AHAttributes.from_wc`) or an address (`AHAttributes.to`).

    Raises:
        OSError: There is no such GID index (ENODATA) or port (EINVAL), the neighbor does not
            answer, or resources ran out; `NotSupportedError` on iWARP, which has no datagrams.
    """

    __slots__ = ("attr", "pd")

    def __init__(self, pd: ProtectionDomain, attr: AHAttributes) -> None:
        if not isinstance(attr, AHAttributes):
            msg = f"not address handle attributes: {attr!r}"
            raise TypeError(msg)
        if pd.context.is_iwarp:
            raise os_error(errno.EOPNOTSUPP, "ibv_create_ah", detail="(iWARP has no datagrams)")
        self.pd: ProtectionDomain = pd
        self.attr: AHAttributes = attr
        # May run in a worker thread while the loop gives up and closes the domain.
        pd._retain()
        try:
            handle = check_pointer(lib.ibv_create_ah(pd._handle, attr._to_c()), "ibv_create_ah")
            super().__init__(handle, (pd,))
        finally:
            pd._let_go()

    @classmethod
    async def create(
        cls, pd: ProtectionDomain, attr: AHAttributes, timeout: float = 5.0
    ) -> AddressHandle:
        """Make a handle in a thread, so that the loop goes on while the neighbor is asked.

        Args:
            pd: Protection domain.
            attr: The way.
            timeout: Seconds.

        Raises:
            ConnectTimeoutError: The neighbor did not answer in time.
            OSError: As the class raises it.

        Cancellation: the resources are destroyed.
        """
        limit = Limit(timeout)
        try:
            with limit:
                return await call_blocking(lambda: cls(pd, attr), undo=cls.close)
        except TimeoutError as exc:
            if not limit.expired:
                raise
            msg = f"no answer from the neighbor within {timeout} s"
            raise ConnectTimeoutError(errno.ETIMEDOUT, msg) from exc

    @classmethod
    def from_wc(
        cls, pd: ProtectionDomain, wc: WorkCompletion, grh: GRH, port_num: int = 1
    ) -> AddressHandle:
        """The way back to the sender of a received datagram (`ibv_create_ah_from_wc(3)`).

        Takes `wc`, `grh` and `port_num` as `AHAttributes.from_wc` does, and raises the same; blocks
        as the class does.
        """
        return cls(pd, AHAttributes.from_wc(pd.context, wc, grh, port_num))

    def _destroy(self, handle: Any) -> None:
        check_errno(lib.ibv_destroy_ah(handle), "ibv_destroy_ah")

    def __repr__(self) -> str:
        way = host_of(self.attr.dgid) if self.attr.dgid else f"lid {self.attr.dlid}"
        return f"<AddressHandle {self._state.value} to {way}>"
