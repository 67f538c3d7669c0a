"""Work requests: every number fits its field, every limit is held, before anything is posted."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from aiordma._ffi import ffi
from aiordma.errors import MessageTooLargeError, NotSupportedError
from aiordma.loop.bounded_cache import BoundedCache
from aiordma.verbs import SGE, Access, MWType, Opcode, QPType, RecvWR, SendFlags, SendWR
from aiordma.verbs.enums import MTU, AtomicCap, DeviceCapFlags, TransportType
from aiordma.verbs.qp_attr import QPLimits
from aiordma.verbs.wr import build_recv, build_send, pinned, sge_list
from aiordma.verbs.wr_check import WRRules

LIMITS = QPLimits(16, 16, 3, 2, 64)
ONE_SIDED = [
    Opcode.RDMA_WRITE, Opcode.RDMA_READ, Opcode.ATOMIC_CMP_AND_SWP, Opcode.ATOMIC_FETCH_AND_ADD,
]  # fmt: skip


class Region:
    """What a request needs of a region."""

    lkey, rkey, addr = 0x1111, 0x2222, 1 << 40

    def __init__(self, length: int = 4096, *, closed: bool = False) -> None:
        self.length = length
        self.closed = closed

    def _require(self) -> Any:
        if self.closed:
            raise ConnectionAbortedError
        return ffi.NULL


class Window(Region):
    """What a request needs of a window."""

    type = MWType.TYPE_2


class Attributes:
    """What the rules look at."""

    max_sge_rd, max_mw, phys_port_cnt, vendor_id = 2, 1, 1, 0
    atomic_cap = AtomicCap.HCA
    device_cap_flags = DeviceCapFlags.MEM_MGT_EXTENSIONS | DeviceCapFlags.MEM_WINDOW_TYPE_2B


class Device:
    """A context that has everything."""

    name = "dev0"
    transport = TransportType.IB
    is_iwarp = False

    def __init__(self, **attributes: Any) -> None:
        self._cache: BoundedCache[Any, Any] = BoundedCache()
        self.attributes = Attributes()
        for name, value in attributes.items():
            setattr(self.attributes, name, value)

    def query_port(self, port: int) -> Any:
        return SimpleNamespace(max_msg_sz=1 << 31, active_mtu=MTU.MTU_4096)


class Iwarp(Device):
    """A context without immediates."""

    transport = TransportType.IWARP
    is_iwarp = True


def rules(device: Any = None, qp_type: QPType = QPType.RC, **options: Any) -> WRRules:
    context: Any = Device() if device is None else device
    return WRRules.of(context, LIMITS, qp_type, **options)


def piece(length: int | None = 8, offset: int = 0, region: Any = None) -> SGE:
    memory: Any = Region() if region is None else region
    return SGE(memory, offset, length)


# Values


def test_a_list_is_chained() -> None:
    requests = [SendWR(n, [piece(n, n)] * n) for n in range(4)]
    chain, keep = build_send(requests)
    assert keep
    wr = chain
    for n in range(4):
        assert (wr[0].wr_id, wr[0].num_sge, wr[0].opcode) == (n, n, Opcode.SEND)
        for i in range(n):
            sge = wr[0].sg_list[i]
            assert (sge.addr, sge.length, sge.lkey) == (Region.addr + n, n, Region.lkey)
        wr = wr[0].next
    assert wr == ffi.NULL
    chain, keep = build_recv([RecvWR(7, [piece()]), RecvWR(8)])
    assert chain[0].next.wr_id == 8
    assert chain[0].next.num_sge == 0


def test_where_the_numbers_go() -> None:
    most, key = (1 << 64) - 1, (1 << 32) - 1
    for opcode in ONE_SIDED:
        request = SendWR(most, [], opcode, remote_addr=most, rkey=key, compare_add=most, swap=most)
        wr = build_send([request])[0][0]
        home = wr.wr.atomic if "ATOMIC" in opcode.name else wr.wr.rdma
        assert (wr.wr_id, home.remote_addr, home.rkey) == (most, most, key)
        if "ATOMIC" in opcode.name:
            assert home.compare_add == home.swap == most
    wr = build_send([SendWR(opcode=Opcode.SEND_WITH_IMM, imm_data=0x01020304)])[0][0]
    assert wr.imm_data == socket.htonl(0x01020304)
    wr = build_send([SendWR(opcode=Opcode.SEND_WITH_INV, invalidate_rkey=key)])[0][0]
    assert wr.invalidate_rkey == wr.wr.rdma.rkey == key
    assert build_send([SendWR(opcode=Opcode.LOCAL_INV, invalidate_rkey=5)])[0][0].invalidate_rkey
    window: Any = Window()
    bind = SendWR(
        opcode=Opcode.BIND_MW, mw=window, rkey=9, bind=piece(16, 4), bind_access=Access.REMOTE_READ
    )
    info = build_send([bind])[0][0].bind_mw
    assert (info.rkey, info.bind_info.addr, info.bind_info.length) == (9, Region.addr + 4, 16)
    assert info.bind_info.mw_access_flags == Access.REMOTE_READ
    assert pinned(bind) == (window, bind.bind.mr if bind.bind else None)


@pytest.mark.parametrize(
    ("opcode", "field", "bits"),
    [
        (Opcode.SEND, "wr_id", 64),
        (Opcode.SEND_WITH_IMM, "imm_data", 32),
        (Opcode.RDMA_WRITE_WITH_IMM, "imm_data", 32),
        (Opcode.SEND_WITH_INV, "invalidate_rkey", 32),
        (Opcode.LOCAL_INV, "invalidate_rkey", 32),
        *((opcode, "remote_addr", 64) for opcode in ONE_SIDED),
        *((opcode, "rkey", 32) for opcode in ONE_SIDED),
        *((opcode, name, 64) for opcode in ONE_SIDED[2:] for name in ("compare_add", "swap")),
    ],
)
def test_what_does_not_fit_is_refused(opcode: Opcode, field: str, bits: int) -> None:
    for wrong in (-1, 1 << bits):
        request = SendWR(opcode=opcode)
        setattr(request, field, wrong)
        with pytest.raises(ValueError, match=rf"{field} {wrong} does not fit into {bits} bits"):
            build_send([SendWR(), request])
    for odd in (1.5, "1", None):
        request = SendWR(opcode=opcode)
        setattr(request, field, odd)
        with pytest.raises(TypeError, match=f"{field} has to be a whole number"):
            build_send([request])
    request = SendWR(opcode=opcode)
    setattr(request, field, (1 << bits) - 1)
    build_send([request])


def test_a_piece_is_at_most_4_gib() -> None:
    huge = Region(1 << 40)
    build_send([SendWR(sg_list=[piece((1 << 32) - 1, 1 << 39, huge)])])
    too_long = [piece(1 << 32, 0, huge)]
    with pytest.raises(ValueError, match=r"length of a piece, 4294967296 .* 32 bits"):
        build_send([SendWR(sg_list=too_long)])
    with pytest.raises(ValueError, match=r"length of a piece, 4294967296 .* 32 bits"):
        build_recv([RecvWR(sg_list=too_long)])


def test_pieces() -> None:
    region: Any = Region(100)
    assert len(SGE(region)) == 100
    assert len(SGE(region, 100)) == 0
    assert sge_list(SGE(region, 1, 2)) == (SGE(region, 1, 2),)
    for offset, length in ((-1, 1), (0, -1), (0, 101), (101, None), (100, 1)):
        with pytest.raises(ValueError, match="not inside a region of 100 bytes"):
            SGE(region, offset, length)


def test_a_closed_region_is_refused() -> None:
    request = SendWR(sg_list=[piece(region=Region(closed=True))])
    with pytest.raises(ConnectionAbortedError):
        build_send([request])


# Rules


def test_number_of_pieces() -> None:
    check = rules().check_send
    check([SendWR(sg_list=[piece()] * 3)])
    with pytest.raises(ValueError, match=r"4 pieces .* limits\.max_send_sge is 3"):
        check([SendWR(), SendWR(sg_list=[piece()] * 4)])
    check([SendWR(sg_list=[piece()] * 2, opcode=Opcode.RDMA_READ)])
    with pytest.raises(ValueError, match=r"3 pieces .* max_sge_rd is 2"):
        check([SendWR(sg_list=[piece()] * 3, opcode=Opcode.RDMA_READ)])
    rules(Device(max_sge_rd=0)).check_send([SendWR(sg_list=[piece()] * 3, opcode=Opcode.RDMA_READ)])
    rules().check_recv([RecvWR(sg_list=[piece()] * 2), RecvWR()])
    with pytest.raises(ValueError, match=r"3 pieces .* limits\.max_recv_sge is 2"):
        rules().check_recv([RecvWR(sg_list=[piece()] * 3)])
    with pytest.raises(ValueError, match="what LOCAL_INV can carry is 0"):
        check([SendWR(sg_list=[piece()], opcode=Opcode.LOCAL_INV)])


def test_inline() -> None:
    check = rules().check_send
    for opcode in (Opcode.SEND, Opcode.SEND_WITH_IMM, Opcode.SEND_WITH_INV, Opcode.RDMA_WRITE):
        check([SendWR(0, [piece(60), piece(4)], opcode, SendFlags.INLINE)])
        with pytest.raises(ValueError, match=r"65 bytes .* limits\.max_inline_data is 64"):
            check([SendWR(0, [piece(60), piece(5)], opcode, SendFlags.INLINE)])
    for opcode in (Opcode.RDMA_READ, Opcode.ATOMIC_FETCH_AND_ADD):
        with pytest.raises(ValueError, match="cannot be inline"):
            check([SendWR(0, [piece()], opcode, SendFlags.INLINE)])


def test_the_largest_message() -> None:
    """Adapters add up the pieces in 32 bits; what is beyond would be sent modulo that."""
    check = rules().check_send
    half = piece(1 << 30, region=Region(1 << 30))
    for opcode in (Opcode.SEND, Opcode.RDMA_WRITE, Opcode.RDMA_READ):
        check([SendWR(0, [half, half], opcode)])
    huge = piece((1 << 31) + 1, region=Region(1 << 40))
    for opcode in (Opcode.SEND, Opcode.RDMA_WRITE, Opcode.RDMA_READ):
        for pieces in ([huge], [half, piece((1 << 30) + 1, region=Region(1 << 40))]):
            with pytest.raises(MessageTooLargeError, match="max_msg_sz is 2147483648"):
                check([SendWR(0, pieces, opcode)])


def test_the_largest_datagram() -> None:
    """The adapter sends nothing of a longer one, and reports success."""
    request, datagrams = SendWR(opcode=Opcode.SEND), rules(qp_type=QPType.UD)
    for sizes in ([4096], [96, 4000], []):
        datagrams.check_sizes(request, sizes)
    for sizes in ([4097], [97, 4000]):
        with pytest.raises(MessageTooLargeError, match="MTU of 4096"):
            datagrams.check_sizes(request, sizes)


def test_atomics_are_aligned_and_have_8_bytes() -> None:
    check = rules().check_send
    for opcode in ONE_SIDED[2:]:
        check([SendWR(0, [piece(8)], opcode, remote_addr=16)])
        for wrong in ([], [piece(4)], [piece(16)], [piece(4), piece(4)]):
            with pytest.raises(ValueError, match="one piece of 8 bytes"):
                check([SendWR(0, wrong, opcode, remote_addr=16)])
        for address in (1, 4, 15, (1 << 64) - 4):
            with pytest.raises(ValueError, match="not a multiple of 8"):
                check([SendWR(0, [piece(8)], opcode, remote_addr=address)])


@pytest.mark.parametrize(
    ("device", "qp_type", "lacks"),
    [
        (Device(), QPType.RC, {"TSO", "DRIVER1", "FLUSH", "ATOMIC_WRITE"}),
        (Iwarp(), QPType.RC, {"SEND_WITH_IMM", "RDMA_WRITE_WITH_IMM"}),
        (
            Device(atomic_cap=AtomicCap.NONE),
            QPType.RC,
            {"ATOMIC_CMP_AND_SWP", "ATOMIC_FETCH_AND_ADD"},
        ),
        (Device(max_mw=0), QPType.RC, {"BIND_MW"}),
        (
            Device(device_cap_flags=DeviceCapFlags.MEM_WINDOW_TYPE_2A),
            QPType.RC,
            {"SEND_WITH_INV", "LOCAL_INV"},
        ),
        (Device(device_cap_flags=DeviceCapFlags.MEM_MGT_EXTENSIONS), QPType.RC, {"LOCAL_INV"}),
    ],
)
def test_what_the_device_cannot_do(device: Any, qp_type: QPType, lacks: set[str]) -> None:
    check = rules(device, qp_type).check_send
    window: Any = Window()
    for opcode in Opcode:
        sizes = [8] if "ATOMIC" in opcode.name else []
        bind = piece() if opcode == Opcode.BIND_MW else None
        request = SendWR(0, [piece(size) for size in sizes], opcode, mw=window, bind=bind)
        if opcode.name in lacks | {"TSO", "DRIVER1", "FLUSH", "ATOMIC_WRITE"}:
            with pytest.raises(NotSupportedError, match=f"{opcode.name} is not possible on dev0"):
                check([SendWR(), request])
        else:
            check([request])
    with pytest.raises(NotSupportedError, match="is not possible"):
        check([SendWR(opcode=Opcode(77))])


def test_lists_that_software_iwarp_does_not_check() -> None:
    fussy = rules(Iwarp(vendor_id=0x626D74))
    full, empty = piece(8), piece(0)
    fussy.check_send([SendWR(sg_list=[full, full, empty]), SendWR(sg_list=[empty]), SendWR()])
    for pieces in ([empty, full], [full, empty, full], [empty, empty]):
        with pytest.raises(NotSupportedError, match="empty piece"):
            fussy.check_send([SendWR(sg_list=pieces)])
        rules().check_send([SendWR(sg_list=pieces)])
    with pytest.raises(NotSupportedError, match="without a piece"):
        fussy.check_recv([RecvWR()])


def test_which_requests_make_a_completion() -> None:
    quiet, loud = SendFlags(0), SendFlags.SIGNALED
    read, send = Opcode.RDMA_READ, Opcode.SEND
    for ruled, opcode, flags, signaled, silent in (
        (rules(), send, quiet, False, False),
        (rules(), read, quiet, False, False),
        (rules(), send, loud, True, False),
        (rules(all_signaled=True), send, quiet, True, False),
        # A message overtakes a read there: only the read's own completion says that it is done.
        (rules(Iwarp()), read, quiet, True, True),
        (rules(Iwarp()), read, loud, True, False),
        (rules(Iwarp()), send, quiet, False, False),
        (rules(Iwarp(), all_signaled=True), read, quiet, True, False),
    ):
        plan = ruled.plan(SendWR(opcode=opcode, send_flags=flags))
        assert (plan.signaled, plan.silent) == (signaled, silent)


@pytest.mark.parametrize("opcode", [Opcode.RDMA_READ, Opcode.RDMA_WRITE])
def test_a_transfer_is_the_request_that_would_be_built(opcode: Opcode) -> None:
    """A READ or WRITE of one piece is posted without a `SendWR`; the same rules hold."""
    ours, part = rules(), piece(8, 16)
    transfer = ours.transfer(opcode, part, 0x1000, 7, "it")
    assert transfer is not None
    wr = ours.built_send([SendWR(0, [part], opcode, remote_addr=0x1000, rkey=7)]).first[0]
    sge, rdma = wr.sg_list[0], wr.wr.rdma
    assert (sge.addr, sge.length, sge.lkey) == (transfer.addr, transfer.length, transfer.lkey)
    assert (rdma.remote_addr, rdma.rkey) == (transfer.remote_addr, transfer.rkey)
    (planned,) = transfer.plan
    assert (planned.operation, planned.signaled, planned.silent) == ("it", True, False)
    for remote_addr, rkey in ((-1, 7), (1 << 64, 7), (0, -1), (0, 1 << 32)):
        with pytest.raises(ValueError, match="bits"):
            ours.transfer(opcode, part, remote_addr, rkey, "it")


def test_what_is_left_to_the_rules_of_all_requests() -> None:
    region: Any = Region(1 << 40)
    huge = SGE(region, 0, 1 << 32)
    assert rules().transfer(Opcode.RDMA_READ, huge, 0, 0, "it") is None
    assert rules().transfer(Opcode.RDMA_READ, [piece()], 0, 0, "it") is None
    assert rules(qp_type=QPType.UD).transfer(Opcode.RDMA_WRITE, piece(), 0, 0, "it") is None
    none = rules(read_depth=0)
    assert none.transfer(Opcode.RDMA_READ, piece(), 0, 0, "it") is None
    assert none.transfer(Opcode.RDMA_WRITE, piece(), 0, 0, "it") is not None
    with pytest.raises(NotSupportedError, match="initiator_depth 0"):
        none.check_send([SendWR(0, [piece()], Opcode.RDMA_READ)])


@pytest.mark.parametrize("buffer", [b"bytes", bytearray(3), memoryview(b"x"), "text"])
def test_bytes_that_are_not_registered(buffer: Any) -> None:
    with pytest.raises(TypeError, match=r"is not registered: post a MemoryRegion\(pd, buffer\)"):
        sge_list(buffer)
