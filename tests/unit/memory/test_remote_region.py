"""RemoteRegion: the bytes that travel, what the peer may send, slices, and the check."""

from __future__ import annotations

import copy
import errno
import pickle
import sys
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import aiordma
from aiordma import RemoteRegion
from aiordma.verbs import Access

RIGHTS = (Access.REMOTE_READ, Access.REMOTE_WRITE, Access.REMOTE_ATOMIC)
ALL = Access.REMOTE_READ | Access.REMOTE_WRITE | Access.REMOTE_ATOMIC
SIZE, OLD_SIZE = 36, 24


@st.composite
def regions(draw: st.DrawFn, max_length: int = (1 << 64) - 1) -> RemoteRegion:
    length = draw(st.integers(0, max_length))
    addr = draw(st.integers(0, min((1 << 64) - length, (1 << 64) - 1)))
    rights = Access(0)
    for right in draw(st.sets(st.sampled_from(RIGHTS))):
        rights |= right
    key, generation = draw(st.tuples(*[st.integers(0, (1 << 32) - 1)] * 2))
    owner = draw(st.integers(0, (1 << 64) - 1))
    return RemoteRegion(addr, length, key, rights, owner, generation, draw(st.booleans()))


def test_the_documented_bytes() -> None:
    place = (0x0102030405060708, 0x1112131415161718, 0xA1A2A3A4, ALL)
    region = RemoteRegion(*place, 0x2122232425262728, 0xB1B2B3B4)
    common = (
        "a1a2a3a4"  # key
        "0102030405060708"  # address
        "1112131415161718"  # length
    )
    assert (
        region.to_bytes()
        == bytes.fromhex(
            "6152"  # magic "aR"
            "0207" + common + "2122232425262728"  # version, rights  # owner
            "b1b2b3b4"  # generation
        )
    )
    assert region.to_bytes(version=1) == bytes.fromhex("6152" + "0107" + common)
    assert RemoteRegion.from_bytes(region.to_bytes(1)) == RemoteRegion(*place)
    with pytest.raises(ValueError, match="version 1 or 2, not 3"):
        region.to_bytes(3)
    noted = RemoteRegion(*place, notes=True)
    assert (noted.to_bytes()[3], noted.to_bytes(1)[3]) == (0x0F, 0x07)
    assert [RemoteRegion(0, 0, 0, right).to_bytes()[3] for right in RIGHTS] == [1, 2, 4]


@given(regions())
@example(RemoteRegion(0, (1 << 64) - 1, 0, ALL))
@example(RemoteRegion((1 << 64) - 1, 1, (1 << 32) - 1))
def test_a_region_survives_the_journey(region: RemoteRegion) -> None:
    for data in (region.to_bytes(), bytearray(region.to_bytes()), memoryview(region.to_bytes())):
        again = RemoteRegion.from_bytes(data)
        assert again == region
        assert hash(again) == hash(region)
        assert isinstance(again.rights, Access)
    assert copy.copy(region) == pickle.loads(pickle.dumps(region)) == region


@given(
    st.binary(max_size=2 * SIZE)
    | st.builds(
        lambda version, rest: b"aR" + version + rest,
        st.sampled_from([b"\1", b"\2"]),
        st.binary(min_size=OLD_SIZE - 3, max_size=OLD_SIZE - 3)
        | st.binary(min_size=SIZE - 3, max_size=SIZE - 3),
    )
)
def test_parsing_is_total(data: bytes) -> None:
    try:
        region = RemoteRegion.from_bytes(data)
    except ValueError:
        return
    assert region.to_bytes(data[2]) == data


@pytest.mark.parametrize("data", ["text", None, 24])
def test_what_is_no_bytes_is_refused_by_its_name(data: Any) -> None:
    with pytest.raises(TypeError, match="data "):
        RemoteRegion.from_bytes(data)


@given(regions(), st.integers(0, SIZE * 8 - 1))
def test_one_wrong_bit_is_another_region_or_none(region: RemoteRegion, bit: int) -> None:
    data = bytearray(region.to_bytes())
    data[bit // 8] ^= 1 << bit % 8
    try:
        other = RemoteRegion.from_bytes(data)
    except ValueError:
        return
    assert other != region
    assert other.addr + other.length <= 1 << 64
    assert bit >= 24, "magic and version are strict"


def test_what_is_refused() -> None:
    good = RemoteRegion(4096, 100, 7, ALL).to_bytes()
    old = RemoteRegion(4096, 100, 7, ALL).to_bytes(1)
    for length in (*range(SIZE), SIZE + 1):
        with pytest.raises(ValueError, match="36 bytes"):
            RemoteRegion.from_bytes((good + b"x")[:length])
    for length in (OLD_SIZE + 1, SIZE):
        with pytest.raises(ValueError, match=f"version 1 travels as 24 bytes, not {length}"):
            RemoteRegion.from_bytes((old + bytes(SIZE))[:length])
    with pytest.raises(ValueError, match="not a remote region"):
        RemoteRegion.from_bytes(b"Ra" + good[2:])
    with pytest.raises(ValueError, match="version 3"):
        RemoteRegion.from_bytes(good[:2] + b"\3" + good[3:])
    with pytest.raises(ValueError, match="unknown rights: 0x10"):
        RemoteRegion.from_bytes(good[:3] + b"\x1f" + good[4:])
    with pytest.raises(ValueError, match="unknown rights: 0x8"):
        RemoteRegion.from_bytes(old[:3] + b"\x0f" + old[4:])
    with pytest.raises(ValueError, match=r"end below 2\*\*64"):
        RemoteRegion.from_bytes(good[:8] + b"\xff" * 7 + b"\x9d" + good[16:])
    with pytest.raises(TypeError):
        RemoteRegion.from_bytes("a" * SIZE)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("addr", "length", "rkey", "rights"),
    [
        (-1, 1, 0, ALL),
        (1 << 64, 0, 0, ALL),
        (0, -1, 0, ALL),
        (0, 1 << 64, 0, ALL),
        ((1 << 64) - 1, 2, 0, ALL),
        (0, 1, -1, ALL),
        (0, 1, 1 << 32, ALL),
        (0, 1, 0, Access.LOCAL_WRITE),
        (0, 1, 0, ALL | Access.MW_BIND),
    ],
)
def test_numbers_out_of_range(addr: int, length: int, rkey: int, rights: Access) -> None:
    with pytest.raises(ValueError, match=r"remote|below"):
        RemoteRegion(addr, length, rkey, rights)


@given(
    st.integers(0, 40),
    st.one_of(st.none(), st.integers(-50, 50)),
    st.one_of(st.none(), st.integers(-50, 50)),
)
def test_slices_are_those_of_a_list(length: int, start: int | None, stop: int | None) -> None:
    region = RemoteRegion(1000, length, 7, Access.REMOTE_READ, 8, 9, notes=True)
    part = region[start:stop]
    addresses = list(range(1000, 1000 + length))
    assert list(range(part.addr, part.addr + len(part))) == addresses[start:stop]
    assert (part.rkey, part.rights) == (7, Access.REMOTE_READ)
    assert (part.owner, part.generation, part.notes) == (8, 9, True)


@given(regions(), st.integers(-(1 << 70), 1 << 70), st.integers(-(1 << 70), 1 << 70))
def test_a_slice_is_inside(region: RemoteRegion, start: int, stop: int) -> None:
    part = region[start:stop]
    assert region.addr <= part.addr
    assert part.addr + part.length <= region.addr + region.length


def test_what_a_slice_refuses() -> None:
    region = RemoteRegion(0, 100, 7)
    assert region[::1] == region
    for step in (0, 2, -1):
        with pytest.raises(ValueError, match="step"):
            region[::step]
    for index in (0, -1, "a", (1, 2)):
        with pytest.raises(TypeError, match="no single bytes"):
            region[index]  # type: ignore[index]
    with pytest.raises(TypeError):
        list(region)  # type: ignore[call-overload]


def test_length_and_truth() -> None:
    huge = RemoteRegion(0, sys.maxsize + 1, 7)
    assert huge
    assert huge.length == sys.maxsize + 1
    with pytest.raises(OverflowError):
        len(huge)
    assert len(huge[:-1]) == sys.maxsize
    assert not RemoteRegion(0, 0, 7)
    assert len(RemoteRegion(0, 12, 7)) == 12


@given(regions(max_length=1 << 40), st.integers(-9, 1 << 41), st.integers(-9, 1 << 41))
def test_check_allows_exactly_what_is_inside(region: RemoteRegion, offset: int, n: int) -> None:
    for right in (Access.REMOTE_READ, Access.REMOTE_WRITE):
        inside = offset >= 0 and n >= 0 and offset + n <= region.length
        if inside and right & region.rights:
            assert region.check(offset, n, right) == region.addr + offset
        else:
            with pytest.raises(PermissionError if inside else ValueError):
                region.check(offset, n, right)


def test_check_says_what_is_wrong() -> None:
    region = RemoteRegion(0x1000, 64, 7, Access.REMOTE_READ)
    with pytest.raises(ValueError, match="bytes 60 to 68 are not inside a remote region of 64"):
        region.check(60, 8, Access.REMOTE_READ)
    with pytest.raises(PermissionError, match="no right to write: <RemoteRegion 64 bytes, read>"):
        region.check(0, 1, Access.REMOTE_WRITE)
    with pytest.raises(PermissionError, match="no right to atomic operations: <") as refused:
        region.check(0, 8, Access.REMOTE_ATOMIC)
    assert refused.value.errno == errno.EACCES
    both = Access.REMOTE_READ | Access.REMOTE_WRITE
    with pytest.raises(PermissionError, match="to write:"):
        region.check(0, 1, both)
    assert region.check(64, 0, Access.REMOTE_READ) == 0x1040


def test_check_of_atomic_operations() -> None:
    region = RemoteRegion(0x1004, 64, 7, Access.REMOTE_ATOMIC)
    assert region.check(4, 8, Access.REMOTE_ATOMIC) == 0x1008
    for offset, length in ((0, 8), (4, 4), (4, 16)):
        with pytest.raises(ValueError, match="multiple of 8"):
            region.check(offset, length, Access.REMOTE_ATOMIC)


def test_nothing_secret_in_the_repr() -> None:
    region = RemoteRegion(0xDEAD0000, 64, 0xBEEF, Access.REMOTE_READ | Access.REMOTE_WRITE)
    assert repr(region) == "<RemoteRegion 64 bytes, read+write>"
    assert repr(region[:0]) == "<RemoteRegion 0 bytes, read+write>"
    assert "no rights" in repr(RemoteRegion(0, 1, 0))


def test_it_is_a_public_name() -> None:
    assert aiordma.RemoteRegion is RemoteRegion
