"""The header in front of a datagram, and the attributes of an address handle."""

from __future__ import annotations

import ipaddress
import random
import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma.verbs.ah import GRH, AHAttributes, gid_of, host_of
from aiordma.verbs.enums import WCFlags, WCOpcode, WCStatus
from aiordma.verbs.wc import WorkCompletion, flush_record


def checksum(header: bytes) -> int:
    total: int = sum(struct.unpack("!10H", header))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def ipv4(source: str, to: str, *, ttl: int = 64, tos: int = 0, length: int = 60) -> bytes:
    addresses = socket.inet_aton(source), socket.inet_aton(to)
    header = struct.pack("!BBHHHBBH4s4s", 0x45, tos, length, 1, 0x4000, ttl, 17, 0, *addresses)
    return header[:10] + struct.pack("!H", checksum(header)) + header[12:]


def ipv6(source: str, to: str, *, hops: int = 64, traffic_class: int = 0) -> bytes:
    first = 6 << 28 | traffic_class << 20 | 0xABCDE
    ends = ipaddress.ip_address(source).packed + ipaddress.ip_address(to).packed
    return struct.pack("!IHBB", first, 100, 17, hops) + ends


addresses_v4 = st.ip_addresses(v=4).map(str)
addresses_v6 = st.ip_addresses(v=6).map(str)


@given(
    addresses_v4,
    addresses_v4,
    st.integers(0, 255),
    st.integers(0, 255),
    st.binary(min_size=20, max_size=20),
)
def test_ipv4_behind_anything(source: str, to: str, ttl: int, tos: int, before: bytes) -> None:
    """The checksum decides, whatever the adapter has left in the first 20 bytes."""
    grh = GRH.parse(before + ipv4(source, to, ttl=ttl, tos=tos))
    assert (host_of(grh.sgid), host_of(grh.dgid)) == (source, to)
    assert (grh.hop_limit, grh.traffic_class) == (ttl, tos)
    assert grh.is_multicast == ipaddress.ip_address(to).is_multicast


@given(addresses_v6, addresses_v6, st.integers(0, 255), st.integers(0, 255))
def test_ipv6(source: str, to: str, hops: int, traffic_class: int) -> None:
    grh = GRH.parse(ipv6(source, to, hops=hops, traffic_class=traffic_class))
    if grh.raw[20] == 0x45 and checksum(grh.raw[20:]) == 0:
        return  # looks like IPv4 to the bit: nobody can tell
    assert grh.sgid == ipaddress.ip_address(source).packed
    assert grh.dgid == ipaddress.ip_address(to).packed
    assert (grh.hop_limit, grh.traffic_class) == (hops, traffic_class)


def test_ipv4_without_a_checksum() -> None:
    """As Soft-RoCE writes it when a device talks to itself."""
    header = ipv4("10.80.0.1", "10.80.0.2")
    header = header[:10] + b"\0\0" + header[12:]
    assert str(GRH.parse(bytes(20) + header)) == "10.80.0.1 -> 10.80.0.2"


def test_an_ipv6_address_that_looks_like_an_ipv4_header() -> None:
    source = bytes(12) + b"\x45\0\0\1"  # lies where an IPv4 header would begin
    raw = ipv6(str(ipaddress.IPv6Address(source)), "fd80::1")
    assert raw[20] == 0x45
    assert GRH.parse(raw).sgid == source


def test_too_short() -> None:
    with pytest.raises(ValueError, match="40 bytes, not 39"):
        GRH.parse(bytes(39))


def completion(byte_len: int) -> WorkCompletion:
    return WorkCompletion(
        wr_id=1, status=WCStatus.SUCCESS, qp_num=2, vendor_err=0, opcode=WCOpcode.RECV,
        byte_len=byte_len, imm_data=None, invalidated_rkey=None, flags=WCFlags.GRH, src_qp=3,
    )  # fmt: skip


def test_the_payload_follows_the_header() -> None:
    buffer = bytearray(random.Random(1).randbytes(100))
    payload = GRH.payload(buffer, completion(45))
    assert bytes(payload) == buffer[40:45]
    buffer[40] ^= 1
    assert payload[0] == buffer[40], "a view, not a copy"
    assert len(GRH.payload(buffer, completion(40))) == 0
    for wc in (completion(39), WorkCompletion.from_record(flush_record(2))):
        with pytest.raises(ValueError, match="not the completion of a received datagram"):
            GRH.payload(buffer, wc)


def test_a_completion_has_what_an_address_handle_needs() -> None:
    record = (1, 0, 128, 0, 45, 0, 17, 18, int(WCFlags.GRH), 3, 4, 5, 6)
    wc = WorkCompletion.from_record(record)
    assert (wc.src_qp, wc.pkey_index, wc.slid, wc.sl, wc.dlid_path_bits) == (18, 3, 4, 5, 6)


@given(st.ip_addresses().map(str))
def test_gids_and_addresses(host: str) -> None:
    gid = gid_of(host)
    assert len(gid) == 16
    back = ipaddress.ip_address(host_of(gid))
    original = ipaddress.ip_address(host)
    mapped = original.ipv4_mapped if isinstance(original, ipaddress.IPv6Address) else None
    assert back == (mapped or original)


def test_bad_addresses() -> None:
    with pytest.raises(ValueError, match="does not appear to be"):
        gid_of("name")
    with pytest.raises(ValueError, match="16 bytes, not 4"):
        AHAttributes(dgid=b"1234")
    with pytest.raises(TypeError, match="dgid has to be a bytes, not"):
        AHAttributes(dgid=bytearray(16))  # type: ignore[arg-type]
