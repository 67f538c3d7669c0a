"""Every kind of memory, in every call that takes memory; docs/buffers.md has the table."""

from __future__ import annotations

import array
import asyncio
import ctypes
import errno
import mmap
import os
from collections.abc import Callable
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest

import aiordma
from aiordma import ConnectionConfig
from aiordma.arguments import Buffer
from aiordma.verbs import Access, MemoryRegion
from tests.device.meeting import Pair, are_alive, paired
from tests.device.request_server import answer_to, handler, question
from tests.device.test_recv_into import note_reads
from tests.unit.tensors import CudaArray, Refusing, Tensor

pytestmark = [pytest.mark.device, pytest.mark.one_loop]

MIB = 1 << 20
FETCHED = ConnectionConfig(rendezvous_threshold=0)
#: A kind of memory: the object, and a function that shows its bytes.
Made = tuple[Any, Callable[[], bytes]]


def _bytearray(size: int) -> Made:
    made = bytearray(size)
    return made, lambda: bytes(made)


def _array(size: int) -> Made:
    made = array.array("d", bytes(size))
    return made, made.tobytes


def _ctypes(size: int) -> Made:
    made = (ctypes.c_double * (size // 8))()
    return made, lambda: bytes(made)


def _numpy(size: int) -> Made:
    made = np.zeros((size // 32, 4))
    return made, made.tobytes


def _tensor(size: int) -> Made:
    made = np.zeros((size // 32, 8), "f4")
    return Tensor(made), made.tobytes


def _old_tensor(size: int) -> Made:
    made = np.zeros(size // 2, "i2")
    return Tensor(made, old=True), made.tobytes


def _refusing(size: int) -> Made:
    made = np.zeros(size // 2, "i2")
    return Refusing(made, old=False), made.tobytes


def _times(size: int) -> Made:
    made = np.zeros((size // 32, 4), "M8[us]")
    return made, made.tobytes


def _mmap(size: int) -> Made:
    made = mmap.mmap(-1, size)
    return made, lambda: made[:]


def _shared(size: int) -> Made:
    memory = shared_memory.SharedMemory(create=True, size=size)
    memory.unlink()
    assert memory.buf is not None
    return memory.buf, lambda kept=memory: bytes(kept.buf[:size])


def _arrow(size: int) -> Made:
    made = pyarrow.allocate_buffer(size)
    return made, made.to_pybytes


KINDS = [
    _bytearray, _array, _ctypes, _numpy, _tensor, _old_tensor, _refusing, _times, _mmap, _shared,
    _arrow,
]  # fmt: skip


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("size", [960, 3 * MIB])
async def test_messages(
    address: str, monkeypatch: pytest.MonkeyPatch, make: Any, size: int, *, is_siw: bool
) -> None:
    """`recv_into`, and `send` alone and among others; large messages are read right into it."""
    async with paired(address, FETCHED) as (client, server):
        (memory, bytes_in), data = make(size), os.urandom(size)
        await asyncio.gather(client.send(b"first"), server.recv_into(memory))
        reads = note_reads(server, monkeypatch)
        await asyncio.gather(client.send(data), server.recv_into(memory))
        assert bytes_in() == data
        if size > MIB and not is_siw:
            assert max(at + n for at, n in reads) - min(at for at, _ in reads) == size
        for sent in (memory, [b"", memory], (memory, b"")):
            sending = asyncio.create_task(server.send(sent))
            with await client.recv() as message:
                assert message == data
            await sending
        await are_alive((client, server))
        del memory, bytes_in


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("size", [960, 3 * MIB])
async def test_requests(address: str, make: Any, size: int) -> None:
    """`request(into=)`, and as the answer of a handler."""
    answers: list[Any] = []

    async def serve(request: aiordma.Request) -> Any:
        return answers.pop() if answers else await handler(request)

    memory, bytes_in = make(size)
    async with (
        aiordma.serve_requests(serve, address, 0, config=FETCHED) as server,
        aiordma.connect(address, server.port, config=FETCHED) as client,
    ):
        assert await client.request(question(1, size, 0, 0), into=memory) == size
        assert bytes_in() == answer_to(1, size)
        answers.append(memory)
        with await client.request(b"?") as answer:
            assert answer == bytes_in()
    del memory, bytes_in


@pytest.mark.parametrize("make", KINDS)
async def test_one_sided(pair: Pair, make: Any) -> None:
    """`expose`, `read` and `write`, and `register`."""
    client, server = pair
    size = 4096
    (theirs, theirs_now), (ours, ours_now) = make(size), make(size)
    data = os.urandom(size)
    async with server.expose(theirs, read=True, write=True) as lease:
        remote = aiordma.RemoteRegion.from_bytes(lease.to_bytes())
        await client.write(remote, data)
        await client.read(remote, ours)
        assert ours_now() == data
        await client.write(remote, bytes(size))
        region = await client.register(ours)
        await client.write(remote, region)
        await client.read(remote, region)
        region.close()
        with MemoryRegion(region.pd, ours) as native:
            assert bytes(native.view) == ours_now()
        await region.wait_closed()  # a thread may deregister it: the memory is exported until then
    assert theirs_now() == data
    del theirs, theirs_now, ours, ours_now


@pytest.mark.parametrize("make", KINDS)
async def test_shared_memory(address: str, make: Any) -> None:
    """`Memory` of a program's buffer: the peer writes to a part of it."""
    size = 4096
    memory, now = make(size)
    before, data = now()[:1024], os.urandom(size - 1024)
    right = Access.REMOTE_WRITE
    async with (
        aiordma.Memory(memory, trusted=right) as arena,
        aiordma.listen(address, 0, memory=arena) as listener,
        aiordma.connect(address, listener.port) as client,
        await listener.accept() as server,
    ):
        async with server.expose(arena[1024:], write=True) as remote:
            await client.write(remote, data)
        assert now() == before + data
    del memory, now


async def test_a_masked_array_is_refused(pair: Pair) -> None:
    """By every call: its buffer has no mask."""
    client, server = pair
    masked: Any = np.ma.masked_array([1, 2, 3], [False, True, False])
    refused = pytest.raises(TypeError, match=r"a masked array.*`filled\(\)`")
    async with server.expose(bytearray(64), read=True, write=True) as lease:
        remote = aiordma.RemoteRegion.from_bytes(lease.to_bytes())
        await client.read(remote, bytearray(8))  # from the second on, C has memory to copy through
        for call in (
            lambda: client.send(masked), lambda: client.send(masked, 7),
            lambda: client.send([b"", masked]), lambda: client.send((masked,)),
            lambda: client.recv_into(masked), lambda: client.register(masked),
            lambda: client.write(remote, masked), lambda: client.read(remote, masked),
        ):  # fmt: skip
            with refused:
                await call()
    with refused:
        client.expose(masked, read=True)
    with refused:
        aiordma.Memory(masked)
    assert masked.mask.tolist() == [False, True, False]
    await are_alive(pair)


@pytest.mark.parametrize("size", [24, 200_000, MIB])
async def test_a_message_as_a_tensor(pair: Pair, size: int) -> None:
    """No later message shows in it, and it keeps the memory behind the end of the connection."""
    client, server = pair
    data = os.urandom(size)
    sending = asyncio.create_task(client.send(data))
    message = await server.recv()
    await sending
    tensor = np.from_dlpack(message)
    assert not tensor.flags.writeable
    with pytest.raises(BufferError, match="exported"):
        message.release()
    del message
    for _ in range(3 * server.config.recv_depth if size == 24 else 3):
        sending = asyncio.create_task(client.send(bytes(size)))
        with await server.recv():
            await sending
    assert tensor.tobytes() == data
    await asyncio.gather(client.close(), server.close())
    assert tensor.tobytes() == data


@pytest.mark.parametrize("access", [mmap.ACCESS_READ, mmap.ACCESS_COPY])
async def test_a_file_that_is_read(pair: Pair, tmp_path: Path, access: int) -> None:
    """Linux 6.1 does not pin a shared mapping that is read-only: it is copied."""
    client, server = pair
    data = os.urandom(3 * MIB)
    path = tmp_path / "file"
    path.write_bytes(data)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=access) as memory:
        pieces: list[Buffer] = [b"", memory]
        for sent in (memory, pieces):
            sending = asyncio.create_task(client.send(sent))
            with await server.recv() as message:
                assert message == data
            await sending
        theirs = bytearray(len(data))
        async with server.expose(theirs, write=True) as lease:
            remote = aiordma.RemoteRegion.from_bytes(lease.to_bytes())
            await client.write(remote, memory)
        assert theirs == data


@pytest.mark.parametrize("size", [65_536, 65_537, 3 * MIB])
async def test_a_file_that_is_read_into(pair: Pair, tmp_path: Path, size: int) -> None:
    """Linux 6.12 does not pin a shared mapping of a file for writing: it is copied."""
    client, server = pair
    data = os.urandom(size)
    path = tmp_path / "file"
    path.write_bytes(bytes(size))
    async with server.expose(data, read=True) as lease:
        remote = aiordma.RemoteRegion.from_bytes(lease.to_bytes())
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            assert await client.read(remote, memory) == size
    assert path.read_bytes() == data


async def test_a_file_that_cannot_be_registered(pair: Pair, tmp_path: Path) -> None:
    """Linux 6.12 refuses it, Linux 6.1 does not."""
    client, _ = pair
    path = tmp_path / "file"
    path.write_bytes(bytes(MIB))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        if os.uname().release.startswith("6.1."):
            region = await client.register(memory)
            region.close()
            await region.wait_closed()
        else:
            with pytest.raises(OSError, match="no shared mapping of a file on disk for") as caught:
                await client.register(memory)
            assert caught.value.errno == errno.EFAULT
            with pytest.raises(OSError, match="no shared mapping of a file on disk for"):
                async with client.expose(memory, write=True):
                    pass
    await are_alive(pair)


async def test_a_table_of_arrow(pair: Pair) -> None:
    """The buffers of a column go as one message, and come back as a column without a copy."""
    client, server = pair
    column = pyarrow.array([1.5, None, 2.5, -1.0])
    target = pyarrow.allocate_buffer(1024)
    bits, values = column.buffers()
    size, _ = await asyncio.gather(server.recv_into(target), client.send([values, bits]))
    assert size == values.size + bits.size
    got = pyarrow.Array.from_buffers(
        column.type,
        len(column),
        [target.slice(values.size, bits.size), target.slice(0, values.size)],
    )
    assert got.equals(column)


async def test_read_only_memory_of_arrow(pair: Pair) -> None:
    client, server = pair
    await client.send(pyarrow.py_buffer(b"fixed"))
    with pytest.raises(BufferError):
        await server.recv_into(pyarrow.py_buffer(b"fixed"))
    assert await server.recv() == b"fixed"


async def test_memory_of_a_gpu(pair: Pair) -> None:
    """The call says what is missing; no message is taken, and the connection goes on."""
    client, server = pair
    gpu = CudaArray(0x7F0000001000, (1000,))
    await client.send(b"next")
    for call in (
        server.recv_into(gpu), server.send(gpu), server.send([b"head", gpu]),
    ):  # fmt: skip
        with pytest.raises(aiordma.NotSupportedError, match=r"memory of CUDA device.*register"):
            await call
    with pytest.raises(aiordma.NotSupportedError, match=r"registers no dmabufs|driver of CUDA"):
        await server.register(gpu)
    with pytest.raises(aiordma.NotSupportedError, match="register"):
        server.expose(gpu, read=True)
    with pytest.raises(aiordma.NotSupportedError, match="register"):
        aiordma.Memory(gpu)
    assert await server.recv() == b"next"
    await are_alive(pair)
