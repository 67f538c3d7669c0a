"""Context: an open device, with its limits and ports."""

from __future__ import annotations

import errno
import functools
import socket
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar, get_type_hints

from aiordma._ffi import ffi, lib
from aiordma._ffi.check import check_errno, check_minus_one, check_negative
from aiordma._ffi.newer import newer
from aiordma.arguments import fitting
from aiordma.errors import os_error
from aiordma.loop.bounded_cache import BoundedCache
from aiordma.verbs.enums import (
    MTU,
    AtomicCap,
    DeviceCapFlags,
    GIDType,
    LinkLayer,
    ODPGeneralCaps,
    ODPTransportCaps,
    PortState,
    TransportType,
)
from aiordma.verbs.resource import Resource, ResourceState

__all__ = [
    "SOFTWARE_DRIVERS",
    "Context",
    "DeviceAttributes",
    "GidEntry",
    "DeviceClock",
    "ODPCaps",
    "PortAttributes",
    "check_limit",
    "copy_of",
]

T = TypeVar("T")
# Annotations are strings; to evaluate them takes longer than most of the C calls.
_types_of: Callable[..., dict[str, Any]] = functools.cache(get_type_hints)


@dataclass(frozen=True, slots=True)
class DeviceAttributes:
    """Limits and capabilities of a device (`ibv_query_device(3)`, same names)."""

    fw_ver: str
    node_guid: int
    vendor_id: int
    vendor_part_id: int
    hw_ver: int
    phys_port_cnt: int
    max_mr_size: int
    max_qp: int
    max_qp_wr: int
    max_sge: int
    max_sge_rd: int
    max_cq: int
    max_cqe: int
    max_mr: int
    max_pd: int
    max_qp_rd_atom: int
    max_qp_init_rd_atom: int
    max_mw: int
    max_ah: int
    max_srq: int
    max_srq_wr: int
    max_srq_sge: int
    max_mcast_grp: int
    atomic_cap: AtomicCap
    device_cap_flags: DeviceCapFlags


@dataclass(frozen=True, slots=True)
class PortAttributes:
    """State of a port (`ibv_query_port(3)`, same names)."""

    state: PortState
    max_mtu: MTU
    active_mtu: MTU
    gid_tbl_len: int
    max_msg_sz: int
    lid: int
    sm_lid: int
    active_width: int
    active_speed: int
    phys_state: int
    link_layer: LinkLayer


@dataclass(frozen=True, slots=True)
class GidEntry:
    """One entry of a port's GID table (`ibv_query_gid_ex(3)`).

    Attributes:
        gid: The GID, 16 bytes.
        index: Its place in the table.
        port: The port, from 1.
        type: Kind of address.
        interface: Index of the network interface that it belongs to; 0 for none.
    """

    gid: bytes
    index: int
    port: int
    type: GIDType
    interface: int = 0

    def __str__(self) -> str:
        return socket.inet_ntop(socket.AF_INET6, self.gid)


@dataclass(frozen=True, slots=True)
class ODPCaps:
    """The capabilities of a device for on-demand memory (`ibv_odp_caps`, same names)."""

    general_caps: ODPGeneralCaps
    rc_odp_caps: ODPTransportCaps
    uc_odp_caps: ODPTransportCaps
    ud_odp_caps: ODPTransportCaps
    xrc_odp_caps: ODPTransportCaps


@dataclass(frozen=True, slots=True)
class DeviceClock:
    """The clock of a device, in whose ticks it gives timestamps (`ibv_query_device_ex(3)`).

    Attributes:
        timestamp_mask: The valid bits of a timestamp, from the lowest on; 0: the device has none.
        frequency_khz: Ticks a millisecond; 0: not known.
    """

    timestamp_mask: int
    frequency_khz: int


_borrowed_contexts: dict[int, weakref.ref[Context]] = {}


# Names of the drivers, by vendor.
_IWARP = int(TransportType.IWARP)
SOFTWARE_DRIVERS = {0xFFFFFF: "rdma_rxe", 0x626D74: "siw"}


class Context(Resource):
    """An open device.

    Returned by `Device.open()` (the caller closes it), or by `ConnectionId.context`: that one
    belongs to librdmacm, lives as long as the process and need not be closed.

    Attributes:
        is_iwarp: Whether this is iWARP, where the connecting side has to send first and immediates
            do not exist.
    """

    __slots__ = ("_attributes", "_borrowed", "_cache", "_name", "_transport", "is_iwarp")

    def __init__(self, handle: Any, *, borrowed: bool = False) -> None:
        self._borrowed = borrowed
        self._attributes: DeviceAttributes | None = None
        self._name = ""
        self._transport: TransportType | None = None
        self.is_iwarp: bool = handle.device.transport_type == _IWARP
        #: Values that follow from the device, which each new connection would ask for again.
        self._cache: BoundedCache[Hashable, Any] = BoundedCache()
        super().__init__(handle)

    @classmethod
    def borrow(cls, handle: Any) -> Context:
        """The one Context object for `handle`, a `struct ibv_context` that librdmacm owns."""
        address = int(ffi.cast("uintptr_t", handle))
        reference = _borrowed_contexts.get(address)
        context = None if reference is None else reference()
        if context is None or context.closed:
            context = cls(handle, borrowed=True)
            _borrowed_contexts[address] = weakref.ref(context)
        return context

    def _destroy(self, handle: Any) -> None:
        check_minus_one(lib.ibv_close_device(handle), "ibv_close_device")

    @property
    def name(self) -> str:
        """The device's name (`ibv_get_device_name(3)`)."""
        handle = self._require()
        if not self._name:
            self._name = str(ffi.string(lib.ibv_get_device_name(handle.device)).decode())
        return self._name

    @property
    def transport(self) -> TransportType:
        """InfiniBand (RoCE too) or iWARP."""
        if self._transport is None or self._state is not ResourceState.OPEN:
            self._transport = TransportType(self._require().device.transport_type)
        return self._transport

    @property
    def is_software(self) -> bool:
        """Whether the adapter is software in the kernel, as Soft-RoCE and software iWARP are."""
        return (self._attributes or self.attributes).vendor_id in SOFTWARE_DRIVERS

    @property
    def num_comp_vectors(self) -> int:
        """How many completion vectors (interrupts) there are for a CQ to choose from."""
        return int(self._require().num_comp_vectors)

    @property
    def async_fd(self) -> int:
        """Descriptor of the device's asynchronous events."""
        return int(self._require().async_fd)

    @property
    def attributes(self) -> DeviceAttributes:
        """`query_device()`, asked once."""
        if self._attributes is None:
            self._attributes = self.query_device()
        return self._attributes

    def query_device(self) -> DeviceAttributes:
        """Ask the device for its limits (`ibv_query_device(3)`).

        Raises:
            OSError: The device is gone.
        """
        attr = ffi.new("struct ibv_device_attr *")
        check_errno(lib.ibv_query_device(self._require(), attr), "ibv_query_device")
        return copy_of(
            DeviceAttributes,
            attr,
            fw_ver=bytes(ffi.string(attr.fw_ver)).decode(errors="replace"),
            node_guid=int.from_bytes(attr.node_guid.to_bytes(8, "little"), "big"),
        )

    def query_odp(self) -> ODPCaps:
        """Ask whether memory can be registered without pinning it (`ibv_query_device_ex(3)`).

        Raises:
            OSError: The device is gone.
        """
        attr = self._query_device_ex()
        return copy_of(
            ODPCaps,
            attr.odp_caps.per_transport_caps,
            general_caps=ODPGeneralCaps(attr.odp_caps.general_caps),
            xrc_odp_caps=ODPTransportCaps(attr.xrc_odp_caps),
        )

    def query_clock(self) -> DeviceClock:
        """Ask whether the device has timestamps, and in which ticks (`ibv_query_device_ex(3)`).

        Raises:
            OSError: The device is gone.
        """
        attr = self._query_device_ex()
        return DeviceClock(int(attr.completion_timestamp_mask), int(attr.hca_core_clock))

    def read_clock(self) -> int:
        """The device's clock now, in its ticks (`ibv_query_rt_values_ex(3)`).

        The age of a completion is this clock minus its timestamp.

        Raises:
            NotSupportedError: The device has no clock to read; the software devices have none.
            OSError: The device is gone.
        """
        ticks = ffi.new("uint64_t *")
        check_errno(lib.aio_query_clock(self._require(), ticks), "ibv_query_rt_values_ex")
        return int(ticks[0])

    def _query_device_ex(self) -> Any:
        attr = ffi.new("struct ibv_device_attr_ex *")
        result = lib.ibv_query_device_ex(self._require(), ffi.NULL, attr)
        check_errno(result, "ibv_query_device_ex")
        return attr

    def query_port(self, port: int = 1) -> PortAttributes:
        """Ask for the state of a port, counted from 1 (`ibv_query_port(3)`).

        Raises:
            OSError: No such port (EINVAL), or the device is gone.
        """
        attr = ffi.new("struct ibv_port_attr *")
        port = fitting("port", port, 8)
        check_errno(lib.ibv_query_port(self._require(), port, attr), "ibv_query_port")
        return copy_of(PortAttributes, attr)

    def query_port_speed(self, port: int = 1) -> int:
        """The speed of a port, counted from 1, with all its lanes (`ibv_query_port_speed(3)`).

        `PortAttributes` has the standard's codes for the lanes and their speed; this is the
        effective speed, also of a port that several physical ports form together.

        Returns:
            Megabits a second.

        Raises:
            NotSupportedError: The installed libibverbs does not have the call, which is new in
                rdma-core 62, or the kernel or its driver does not report the speed, as
                Soft-RoCE's does not.
            OSError: No such port (EINVAL), or the device is gone.
        """
        port = fitting("port", port, 32)
        query = newer("ibv_query_port_speed")
        hundreds = ffi.new("uint64_t *")
        check_errno(query(self._require(), port, hundreds), "ibv_query_port_speed")
        return int(hundreds[0]) * 100

    def query_gid(self, port: int = 1, index: int = 0) -> GidEntry:
        """The GID number `index` of a `port`, with its type (`ibv_query_gid_ex(3)`).

        Raises:
            OSError: The entry is empty (ENODATA) or does not exist (EINVAL).
        """
        entry = ffi.new("struct ibv_gid_entry *")
        port, index = fitting("port", port, 32), fitting("index", index, 32)
        result = lib.ibv_query_gid_ex(self._require(), port, index, entry, 0)
        check_errno(result, "ibv_query_gid_ex")
        return _gid_entry(entry[0])

    def gid_table(self) -> list[GidEntry]:
        """All GIDs of all ports (`ibv_query_gid_table(3)`).

        Raises:
            OSError: The device is gone.
        """
        ports = range(1, self.attributes.phys_port_cnt + 1)
        room = max(1, sum(self.query_port(port).gid_tbl_len for port in ports))
        entries = ffi.new("struct ibv_gid_entry[]", room)
        count = lib.ibv_query_gid_table(self._require(), entries, room, 0)
        check_negative(count, "ibv_query_gid_table")
        return [_gid_entry(entries[i]) for i in range(count)]

    def query_pkey(self, port: int = 1, index: int = 0) -> int:
        """The partition key number `index` of a `port`; 16 bits (`ibv_query_pkey(3)`).

        Raises:
            OSError: No such port or index, or the device is gone.
        """
        pkey = ffi.new("uint16_t *")
        port, index = fitting("port", port, 8), fitting("index", index, 31)
        ffi.errno = 0  # not every failure gives a reason
        result = lib.ibv_query_pkey(self._require(), port, index, pkey)
        check_minus_one(result, "ibv_query_pkey")
        return socket.ntohs(pkey[0])

    def pkey_index(self, pkey: int, port: int = 1) -> int:
        """The index of a partition key in the table of a `port` (`ibv_get_pkey_index(3)`).

        Args:
            pkey: 16 bits; the highest bit marks a full member.
            port: Port of the device, from 1.

        Raises:
            OSError: The table does not have it.
        """
        pkey, port = fitting("pkey", pkey, 16), fitting("port", port, 8)
        ffi.errno = 0
        result = lib.ibv_get_pkey_index(self._require(), port, socket.htons(pkey))
        return check_minus_one(result, "ibv_get_pkey_index")

    @property
    def index(self) -> int:
        """The kernel's number of the device; -1 if it has none (`ibv_get_device_index(3)`)."""
        return int(lib.ibv_get_device_index(self._require().device))

    def __repr__(self) -> str:
        name = f" {self.name}" if not self.closed else ""
        return f"<Context{name} {self._state.value}>"


def copy_of(kind: type[T], struct: Any, **others: Any) -> T:
    """A dataclass made from the C members that its fields are named after.

    Args:
        kind: The dataclass; the type of a field converts the value of the C member.
        struct: The C struct.
        others: The fields that are not such members.
    """
    types = _types_of(kind)
    members = (name for name in types if name not in others)
    return kind(**{name: types[name](getattr(struct, name)) for name in members}, **others)


def check_limit(verb: str, name: str, size: int, most: int) -> None:
    """Refuse a size that the device would refuse; the error names it, which C does not do.

    Raises:
        OSError: EINVAL, it is above `most`.
    """
    if size > most:
        detail = f"({name} {size} is above the device's limit of {most})"
        raise os_error(errno.EINVAL, verb, detail=detail)


def _gid_entry(entry: Any) -> GidEntry:
    return GidEntry(
        gid=bytes(ffi.buffer(entry.gid.raw)),
        index=entry.gid_index,
        port=entry.port_num,
        type=GIDType(entry.gid_type),
        interface=entry.ndev_ifindex,
    )
