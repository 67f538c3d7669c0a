"""CRC32C in C: known sums, and both ways of summing against a plain one at every alignment."""

from __future__ import annotations

import platform
import random
from collections.abc import Callable

import pytest

from aiordma._core import crc32c, crc32c_hardware, crc32c_table
from aiordma._ffi import load_error

if load_error() is not None:
    pytest.skip(f"no compiled module: {load_error()}", allow_module_level=True)

Sum = Callable[..., int]
KINDS: list[Sum] = [crc32c, crc32c_table]
# RFC 3720, B.4, and the usual check value.
KNOWN = {
    b"": 0,
    b"123456789": 0xE3069283,
    bytes(32): 0x8A9136AA,
    b"\xff" * 32: 0x62A8AB43,
    bytes(range(32)): 0x46DD794E,
    bytes(range(31, -1, -1)): 0x113FDB5C,
}


def plain(data: bytes, crc: int = 0) -> int:
    """Bit by bit, as it is defined."""
    crc ^= 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ 0x82F63B78 if crc & 1 else crc >> 1
    return crc ^ 0xFFFFFFFF


@pytest.fixture(params=KINDS, ids=["default", "table"])
def summed(request: pytest.FixtureRequest) -> Sum:
    kind: Sum = request.param
    return kind


@pytest.mark.parametrize("data", KNOWN, ids=[f"{KNOWN[data]:08x}" for data in KNOWN])
def test_known_sums(summed: Sum, data: bytes) -> None:
    assert summed(0, data) == KNOWN[data]


def test_every_alignment_and_length(summed: Sum) -> None:
    data = random.Random(3720).randbytes(16 + 100)
    buffer = memoryview(data)
    for start in range(16):
        for length in range(100):
            expected = plain(data[start : start + length])
            assert summed(0, buffer[start : start + length]) == expected, (start, length)


# Around one and several times three blocks, short and long.
EDGES = sorted(
    {
        length + more
        for length in (3 * 256, 6 * 256, 3 * 8192, 3 * 8192 + 3 * 256, 6 * 8192)
        for more in (-9, -8, -1, 0, 1, 7, 8, 9)
    }
)


def test_the_lengths_where_blocks_begin() -> None:
    data = random.Random(8192).randbytes(EDGES[-1] + 8)
    buffer = memoryview(data)
    expected = {0: 0}
    crc = 0
    for length in range(1, EDGES[-1] + 1):  # each byte once
        crc = plain(data[length - 1 : length], crc)
        expected[length] = crc
    for length in EDGES:
        for kind in KINDS:
            assert kind(0, buffer[:length]) == expected[length], length
    for start in range(1, 8):  # against one another, as the plain one takes long
        for length in EDGES:
            piece = buffer[start : start + length]
            assert crc32c(0, piece) == crc32c_table(0, piece), (start, length)


def test_a_sum_goes_on_where_it_stopped(summed: Sum) -> None:
    rng = random.Random(4)
    data = rng.randbytes(60_000)
    buffer = memoryview(data)
    whole = crc32c_table(0, data)
    for _ in range(50):
        cut = rng.randrange(len(data))
        first = summed(0, buffer[:cut])
        assert summed(first, buffer[cut:]) == whole, cut


def test_one_wrong_bit_is_seen(summed: Sum) -> None:
    data = bytearray(random.Random(5).randbytes(30_000))
    before = summed(0, data)
    for bit in (0, 7, 100_000, 8 * len(data) - 1):
        data[bit // 8] ^= 1 << bit % 8
        assert summed(0, data) != before
        data[bit // 8] ^= 1 << bit % 8


def test_the_instruction_is_used_where_there_is_one() -> None:
    with open("/proc/cpuinfo") as file:
        words = set(file.read().split())
    if platform.machine() == "x86_64":
        assert crc32c_hardware() == ("sse4_2" in words)
    elif platform.machine() == "aarch64":
        assert crc32c_hardware() == ("crc32" in words)
    else:
        assert crc32c_hardware() is False
