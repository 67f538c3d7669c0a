"""Memory regions: every kind of buffer, every way to register, and what a device cannot do."""

from __future__ import annotations

import array
import asyncio
import ctypes
import errno
import mmap
import os
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest

import aiordma
from aiordma.verbs import (
    SGE,
    Access,
    MemoryRegion,
    ProtectionDomain,
)
from tests.device.ends import ALL, Ends, connected
from tests.device.oracle import collect, until
from tests.inside.verbs import trust_iova

pytestmark = [pytest.mark.device, pytest.mark.one_loop]

RO = Access.REMOTE_READ
GIB = 1 << 30


class Point(ctypes.Structure):
    _fields_ = (("x", ctypes.c_int16), ("y", ctypes.c_double))


def mapping() -> mmap.mmap:
    return mmap.mmap(-1, 5000)


WRITABLE: dict[str, Callable[[], Any]] = {
    "bytearray": lambda: bytearray(999),
    "slice": lambda: memoryview(bytearray(999))[7:100],
    "two dimensions": lambda: memoryview(bytearray(240)).cast("B", (4, 60)),
    "other format": lambda: memoryview(bytearray(240)).cast("q", (5, 6)),
    "array": lambda: array.array("d", range(50)),
    "mmap": mapping,
    "ctypes array": lambda: (ctypes.c_int32 * 100)(),
    "ctypes structure": Point,
    "numpy": lambda: numpy.zeros((3, 5, 7), dtype="float64"),
    "numpy structure": lambda: numpy.zeros(9, dtype=[("a", "<u2"), ("b", ">f8")]),
    "numpy scalar": lambda: numpy.zeros((), dtype="u8"),
    "numpy rows": lambda: numpy.zeros((10, 8), dtype="u4")[2:5],
}


@pytest.mark.parametrize("kind", WRITABLE)
async def test_every_kind_of_buffer(ends: Ends, kind: str) -> None:
    buffer = WRITABLE[kind]()
    region = ends.server.region(buffer)
    size = memoryview(buffer).nbytes
    assert len(region) == size == region.view.nbytes
    assert (region.view.ndim, region.view.format, region.view.readonly) == (1, "B", False)
    data = random.Random(size).randbytes(size)
    await ends.write(region.addr, region.rkey, data)
    # The caller's own object has the bytes, and the peer reads them back.
    assert memoryview(buffer).tobytes() == data
    assert bytes(region.view) == data
    assert await ends.read(region.addr, region.rkey, size) == data


READ_ONLY: dict[str, Callable[[], Any]] = {
    "bytes": lambda: b"only to be read",
    "view": lambda: memoryview(bytearray(b"writable below")).toreadonly(),
    "numpy": lambda: numpy.frombuffer(b"only to be read", dtype="u1"),
}


@pytest.mark.parametrize("kind", READ_ONLY)
async def test_read_only_buffers(ends: Ends, kind: str) -> None:
    buffer = READ_ONLY[kind]()
    for access in (Access.LOCAL_WRITE, ALL):
        with pytest.raises(BufferError, match="read-only"):
            MemoryRegion(ends.server.pd, buffer, access)
    region = ends.server.region(buffer, RO)
    assert await ends.read(region.addr, region.rkey, len(region)) == bytes(buffer)
    with pytest.raises(TypeError, match="read-only"):
        region.view[0] = 1


async def test_a_part_of_an_object_leaves_the_rest_alone(ends: Ends) -> None:
    whole = numpy.full(4096, 0xEE, dtype="u1")
    region = ends.server.region(whole[1000:1100])
    await ends.write(region.addr, region.rkey, bytes(100))
    assert whole[1000:1100].sum() == 0
    assert (whole[:1000] == 0xEE).all()
    assert (whole[1100:] == 0xEE).all()


async def test_what_is_no_buffer(pd: ProtectionDomain) -> None:
    square = numpy.zeros((8, 8))
    for buffer in (square[::2], square.T, square[:, :3], memoryview(bytearray(9))[::3]):
        with pytest.raises(ValueError, match="contiguous"):
            MemoryRegion(pd, buffer)
    for empty in (b"", bytearray(), numpy.zeros(0), 0, -1):
        with pytest.raises(ValueError, match=r"at least one byte|number of bytes is"):
            MemoryRegion(pd, empty, RO)
    for thing in ("text", None, [1, 2], 1.5, object()):
        with pytest.raises(TypeError):
            MemoryRegion(pd, thing)
        with pytest.raises(TypeError):
            await MemoryRegion.register(pd, thing)


async def test_a_number_of_bytes_is_fresh_memory(pd: ProtectionDomain) -> None:
    for number in (10000, numpy.int32(10000)):
        region = MemoryRegion(pd, number)
        assert len(region) == 10000
        assert region.addr % mmap.PAGESIZE == 0
        assert bytes(region.view) == bytes(10000)
        region.close()


async def test_flags_that_do_not_fit(pd: ProtectionDomain) -> None:
    for access in (Access.REMOTE_WRITE, Access.REMOTE_ATOMIC | RO):
        with pytest.raises(ValueError, match="need LOCAL_WRITE"):
            MemoryRegion(pd, 100, access)
    with pytest.raises(ValueError, match="iova=0 instead"):
        MemoryRegion(pd, 100, ALL | Access.ZERO_BASED)
    with pytest.raises(ValueError, match="HUGETLB promises huge pages"):
        MemoryRegion(pd, 100, ALL | Access.HUGETLB)


async def test_the_buffer_is_held_until_it_is_deregistered(pd: ProtectionDomain) -> None:
    data, numbers, mapped = bytearray(100), array.array("i", [1, 2]), mapping()
    regions = [MemoryRegion(pd, buffer) for buffer in (data, numbers, mapped)]
    changes: list[Callable[[], None]] = [
        lambda: data.append(1), lambda: numbers.append(1), mapped.close
    ]  # fmt: skip
    for change in changes:
        with pytest.raises(BufferError):
            change()
    for region in regions:
        region.close()
        with pytest.raises(aiordma.ResourceClosedError):
            _ = region.view
        await region.wait_closed()
    data.append(1)
    numbers.append(1)
    mapped.close()


async def test_memory_outlives_its_owner(ends: Ends) -> None:
    """Nobody but the region knows the buffer; the adapter still reads its bytes."""
    data = random.Random(7).randbytes(100_000)
    region = ends.server.region(bytearray(data))
    collect()
    litter = [bytearray(100_000) for _ in range(20)]
    assert await ends.read(region.addr, region.rkey, 100_000) == data
    del litter


async def test_a_refusal_lets_the_buffer_go(pd: ProtectionDomain) -> None:
    small, large = bytearray(100), bytearray(2 << 20)
    pd.close()
    errors = []
    with pytest.raises(aiordma.ResourceClosedError) as refused:
        MemoryRegion(pd, small)
    errors.append(refused.value)
    with pytest.raises(aiordma.ResourceClosedError) as refused:
        await MemoryRegion.register(pd, large)
    errors.append(refused.value)
    small.append(1)
    large.append(1)


# ---- off the loop --------------------------------------------------------------------------


async def test_large_memory_is_registered_in_a_thread(pd: ProtectionDomain) -> None:
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    turning = asyncio.create_task(turn())
    region = await MemoryRegion.register(pd, 8 << 20, ALL)
    turning.cancel()
    assert turns, "the loop went on"
    assert len(region) == 8 << 20
    region.close()
    # A small one is not worth a thread: it is done without giving up control.
    coroutine = MemoryRegion.register(pd, bytearray(100), ALL)
    with pytest.raises(StopIteration) as done:
        coroutine.send(None)
    done.value.value.close()


async def test_a_canceled_registration_is_undone(pd: ProtectionDomain) -> None:
    data = bytearray(4 << 20)
    registering = asyncio.create_task(MemoryRegion.register(pd, data))
    await asyncio.sleep(0)
    registering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await registering
    pd.close()
    await pd.wait_closed(20)

    def is_free() -> bool:
        try:
            data.append(1)
        except BufferError:
            return False
        return True

    # The thread may have found the domain closed, and not have given the buffer back yet.
    await until(is_free)


# ---- addresses -----------------------------------------------------------------------------


def address_of(buffer: Any) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


async def test_an_address_of_ones_own(
    ends: Ends, is_siw: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = random.Random(3).randbytes(9000)
    buffer = mmap.mmap(-1, 12288)
    iova = 0xABCD_0123_4567_8000
    if is_siw:
        # It would take the number, and go on using the buffer's address.
        with pytest.raises(aiordma.NotSupportedError, match=r"siw\d+ does not support addresses"):
            MemoryRegion(ends.server.pd, buffer, ALL, iova=iova)
        trust_iova(monkeypatch)
        region = ends.server.region(buffer, iova=iova)
        assert await ends.read(address_of(buffer), region.rkey, 100) == bytes(100)
        with pytest.raises(aiordma.CompletionError):
            await ends.read(iova, region.rkey, 100)
        return
    region = ends.server.region(buffer, iova=iova)
    assert region.addr == iova
    await ends.write(iova + 100, region.rkey, data)
    assert buffer[:] == bytes(100) + data + bytes(12288 - 9100)
    assert await ends.read(iova + 100, region.rkey, 9000) == data
    # Local requests use it as well.
    into = ends.client.region(12288, iova=0)
    await ends.client.qp.read(SGE(into, 4096, 1000), iova + 100, region.rkey)
    assert bytes(into.view) == bytes(4096) + data[:1000] + bytes(12288 - 5096)
    # The buffer's own address is none of the region's.
    own = address_of(buffer)
    with pytest.raises(aiordma.RemoteAccessError):
        await ends.read(own, region.rkey, 1)


async def test_addresses_that_cannot_be(pd: ProtectionDomain) -> None:
    for iova in (-4096, (1 << 64) - 4096, 1 << 64):
        with pytest.raises(ValueError, match=r"64.bit"):
            MemoryRegion(pd, 8192, iova=iova)
    with pytest.raises(ValueError, match="offset within its page"):
        MemoryRegion(pd, 8192, iova=1)


class Libc:
    """Maps a small file again and again, so that few pages fill many addresses.

    A User-Mode Linux guest spends one of the host's 65,530 mappings on every run of pages that
    follow one another in its memory.  So the piece is the end of a file that has used up what
    lay scattered before.
    """

    def __init__(self, size: int, piece: int) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        # address, length, protection, flags, descriptor, offset
        self._libc.mmap.argtypes = (
            ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long
        )  # fmt: skip
        self._libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        self.size = size
        self.piece = piece
        self.fd = os.memfd_create("piece")
        os.posix_fallocate(self.fd, 0, SCATTERED + piece)
        no_reserve, anonymous, private, shared, fixed = 0x4000, 0x20, 2, 1, 0x10
        self.base = self._map(None, size, 0, no_reserve | anonymous | private, -1)
        for offset in range(0, size, piece):
            self._map(self.base + offset, piece, 3, shared | fixed, self.fd)

    def _map(self, address: int | None, size: int, protection: int, flags: int, fd: int) -> int:
        mapped = self._libc.mmap(address, size, protection, flags, fd, SCATTERED if fd >= 0 else 0)
        assert mapped not in (None, ctypes.c_void_p(-1).value), os.strerror(ctypes.get_errno())
        assert address in (None, mapped)
        return int(mapped)

    @property
    def content(self) -> bytes:
        """The bytes that every piece of the range shows."""
        return os.pread(self.fd, self.piece, SCATTERED)

    def buffer(self, start: int = 0, stop: int | None = None) -> ctypes.Array[ctypes.c_char]:
        stop = self.size if stop is None else stop
        return (ctypes.c_char * (stop - start)).from_address(self.base + start)

    def close(self) -> None:
        assert self._libc.munmap(self.base, self.size) == 0
        os.close(self.fd)


PIECE = 16 << 20
SCATTERED = 256 << 20
SIZE = 5 * GIB


async def test_more_than_4_gib(ends: Ends, is_siw: bool) -> None:
    """READ and WRITE beyond offset 2**32, byte by byte, by a 5 GiB range of addresses.

    Its 16 MiB of pages show up 320 times, so that a write at 32-bit offset `n` instead of
    `2**32 + n` would hit the same page; each place is at an offset of its own within the piece,
    and the whole piece is compared.
    """
    memory = Libc(SIZE, PIECE)
    server = ends.server
    expected = bytearray(PIECE)
    places = [
        (0, 100),
        (GIB - 4096, 3000),
        ((1 << 32) - 4096 - 5, 4096),
        ((1 << 32) + 8192, 5000),
        ((1 << 32) + GIB // 2 + 16384, 70_000),
        (SIZE - 777, 777),
    ]
    try:
        if is_siw:
            regions = [server.region(memory.buffer())]
            assert len(regions[0]) == SIZE
            for piece in (SGE(regions[0]), SGE(regions[0], 5, 1 << 32)):
                with pytest.raises(aiordma.MessageTooLargeError, match="max_msg_sz is 4294967295"):
                    await server.qp.send(piece)
                with pytest.raises(ValueError, match="32 bits"):
                    await server.qp.recv(piece)
        else:
            # Soft-RoCE says that it takes 2**64 - 1 bytes, and takes 1 GiB.
            with pytest.raises(OSError, match="1 GiB") as refused:
                server.region(memory.buffer())
            assert refused.value.errno == errno.ENOMEM
            # So the range becomes five regions, side by side in the peer's eyes.
            base = 0x7000_0000_0000
            regions = [
                server.region(memory.buffer(n * GIB, (n + 1) * GIB), iova=base + n * GIB)
                for n in range(SIZE // GIB)
            ]
        for offset, length in places:
            region = regions[offset // GIB] if len(regions) > 1 else regions[0]
            addr = regions[0].addr + offset
            data = random.Random(offset).randbytes(length)
            await ends.write(addr, region.rkey, data)
            expected[offset % PIECE : offset % PIECE + length] = data
            assert await ends.read(addr, region.rkey, length) == data
        assert (memory.content == expected) is True  # no diff of 16 MiB, please
        # iWARP ends the connection without telling the reader why.
        with pytest.raises(aiordma.FlushedError if is_siw else aiordma.RemoteAccessError):
            await ends.read(regions[0].addr + SIZE - 10, regions[-1].rkey, 11)
    finally:
        for part in server.parts:
            if isinstance(part, MemoryRegion):
                part.close()
                await part.wait_closed(20)
        memory.close()


# ---- what a device may not have ------------------------------------------------------------


async def test_a_message_beyond_what_the_port_carries(address: str, is_siw: bool) -> None:
    """It is refused before it is posted: the devices would not."""
    memory = Libc(GIB, PIECE)
    try:
        async with connected(address, max_send_sge=5) as ends:
            limit = ends.client.context.query_port().max_msg_sz
            assert limit == ((1 << 32) - 1 if is_siw else 1 << 31)
            large = ends.client.region(memory.buffer())
            inbox = ends.server.region(4096)
            for pieces in ([SGE(large)] * 4 + [SGE(large, 0, 100)], [SGE(large)] * 4):
                with pytest.raises(aiordma.MessageTooLargeError, match=f"max_msg_sz is {limit}"):
                    await ends.client.qp.write(pieces, inbox.addr, inbox.rkey)
            # Nothing was posted.
            await ends.write(inbox.addr, inbox.rkey, b"fine")
            assert bytes(inbox.view[:4]) == b"fine"
    finally:
        memory.close()
