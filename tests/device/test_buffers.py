"""Every kind of memory, in every call that takes memory; docs/buffers.md has the table."""

from __future__ import annotations

import array
import asyncio
import ctypes
import mmap
import os
from collections.abc import Callable
from multiprocessing import shared_memory
from typing import Any

import numpy as np
import pyarrow
import pytest

import aiordma
from aiordma import ConnectionConfig
from aiordma.verbs import Access
from tests.device.meeting import Pair, are_alive, paired
from tests.device.request_server import answer_to, handler, question
from tests.device.test_recv_into import note_reads
from tests.unit.tensors import CudaArray, Tensor

pytestmark = pytest.mark.device

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
    _bytearray, _array, _ctypes, _numpy, _tensor, _old_tensor, _mmap, _shared, _arrow,
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
        with pytest.raises(aiordma.DeviceMemoryError, match=r"memory of CUDA device.*register"):
            await call
    with pytest.raises(aiordma.DeviceMemoryError, match=r"registers no dmabufs|driver of CUDA"):
        await server.register(gpu)
    with pytest.raises(aiordma.DeviceMemoryError, match="register"):
        server.expose(gpu, read=True)
    with pytest.raises(aiordma.DeviceMemoryError, match="register"):
        aiordma.Memory(gpu)
    assert await server.recv() == b"next"
    await are_alive(pair)
