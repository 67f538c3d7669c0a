"""`recv_into`: kinds of memory, no copy of large messages, cancellation, peers that do harm."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import itertools
import mmap
import os
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiordma
from aiordma import Connection, ConnectionConfig
from aiordma.verbs import Access
from tests.device.forking import in_child, outcome
from tests.device.meeting import Pair, are_alive, paired
from tests.device.oracle import until
from tests.device.stepping import Steps, for_every_step, run_canceled
from tests.inside.endpoint import fetches_of, link_of
from tests.inside.verbs import note_regions

pytestmark = pytest.mark.device

FETCHED = ConnectionConfig(rendezvous_threshold=0)
KIB, MIB = 1 << 10, 1 << 20
#: Of a frame; in fragments, or a landing; announced, and copied; announced, and read into place.
SIZES = (0, 1, 4080, 4096, 5000, 65_536, 200 * KIB, MIB, 5 * MIB + 3)
Read = tuple[int, int]  # address and bytes


@pytest.fixture
async def fetching(address: str) -> AsyncIterator[Pair]:
    """Two connected ends, which announce every message that exceeds a slot."""
    async with paired(address, FETCHED) as ends:
        yield ends


def note_reads(connection: Connection, monkeypatch: pytest.MonkeyPatch) -> list[Read]:
    """The pieces of memory that READs of large messages go to, from now on."""
    link, reads = link_of(connection), list[Read]()
    real = type(link).post_read

    def post(self: Any, number: int, region: Any, offset: int, length: int, remote: Any) -> None:
        if self is link:
            reads.append((region.addr + offset, length))
        real(self, number, region, offset, length, remote)

    monkeypatch.setattr(type(link), "post_read", post)
    return reads


@pytest.mark.smoke
@pytest.mark.parametrize("config", [ConnectionConfig(), FETCHED], ids=["defaults", "fetched"])
async def test_sizes(address: str, config: ConnectionConfig) -> None:
    array = np.zeros(max(SIZES) + 8, "u1")
    async with paired(address, config) as (client, server):
        for size in (*SIZES, *SIZES):
            data = random.Random(size).randbytes(size)
            array[:] = 0xEE
            sending = asyncio.create_task(client.send(data))
            assert await server.recv_into(array) == size
            await sending
            assert array[:size].tobytes() == data
            assert (array[size:] == 0xEE).all()
        assert server.stats.messages_received == 2 * len(SIZES)
        assert server.stats.bytes_received == 2 * sum(SIZES)
        await are_alive((client, server))


@pytest.mark.smoke
async def test_a_large_message_lands_in_the_array(
    fetching: Pair, monkeypatch: pytest.MonkeyPatch, *, is_siw: bool
) -> None:
    """Every byte is read into it, none into other memory; on iWARP the bytes are copied."""
    client, server = fetching
    data = random.Random(1).randbytes(20 * MIB + 5)
    array = np.zeros(len(data), "u1")
    await asyncio.gather(client.send(b"first"), server.recv_into(array))
    local = note_regions(monkeypatch, Access.LOCAL_WRITE)
    reads = note_reads(server, monkeypatch)
    for _ in range(2):
        array[:] = 0
        await asyncio.gather(client.send(data), server.recv_into(array))
        assert array.tobytes() == data
        assert sum(length for _, length in reads) == len(data)
        start = array.ctypes.data
        inside = [start <= at and at + n <= start + len(data) for at, n in reads]
        assert all(inside) != is_siw
        assert any(inside) != is_siw
        reads.clear()
    # The slots of the connection, which are of less than a megabyte, may grow meanwhile.
    large = [region for region in local if region.length >= MIB]
    assert is_siw or [region.length for region in large] == [len(data)] * 2
    assert is_siw or all(region.closed for region in large)


def _bytearray(size: int) -> Any:
    return bytearray(size)


def _anonymous(size: int) -> Any:
    return mmap.mmap(-1, size)


def _ctypes(size: int) -> Any:
    return (ctypes.c_char * size)()


def _structured(size: int) -> Any:
    return np.zeros(size // 12, [("at", "M8[us]"), ("n", ">i4")]).view("V12")


def _two_dimensions(size: int) -> Any:
    return np.zeros((size // 32, 4))


@pytest.mark.parametrize("make", [_bytearray, _anonymous, _ctypes, _structured, _two_dimensions])
@pytest.mark.parametrize("size", [960, 6 * MIB])
async def test_kinds_of_memory(fetching: Pair, make: Callable[[int], Any], size: int) -> None:
    client, server = fetching
    buffer, data = make(size), os.urandom(size)
    receiving = asyncio.create_task(server.recv_into(buffer))
    await client.send(data)
    assert await receiving == size
    assert bytes(buffer) == data


async def test_shared_memory(fetching: Pair) -> None:
    client, server = fetching
    memory = shared_memory.SharedMemory(create=True, size=3 * MIB)
    try:
        data = os.urandom(3 * MIB)
        assert memory.buf is not None
        receiving = asyncio.create_task(server.recv_into(memory.buf))
        await client.send(data)
        assert await receiving == len(data)
        assert bytes(memory.buf[: len(data)]) == data
    finally:
        memory.close()  # BufferError if it is exported still
        memory.unlink()


@pytest.mark.parametrize("flags", [mmap.MAP_SHARED, mmap.MAP_PRIVATE])
async def test_a_file(fetching: Pair, tmp_path: Path, flags: int) -> None:
    """Read in place, or copied: not every kernel registers the pages of a file."""
    client, server = fetching
    path, data = tmp_path / "file", os.urandom(3 * MIB)
    path.write_bytes(bytes(len(data)))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0, flags) as memory:
        receiving = asyncio.create_task(server.recv_into(memory))
        await client.send(data)
        assert await receiving == len(data)
        assert memory[:] == data
    assert (path.read_bytes() == data) == (flags == mmap.MAP_SHARED)


@pytest.mark.parametrize("refused", [True, False])
async def test_memory_that_the_kernel_does_not_register(
    fetching: Pair, monkeypatch: pytest.MonkeyPatch, refused: bool, *, is_siw: bool
) -> None:
    """The message is read into memory of the library, and copied."""
    client, server = fetching
    array, data = np.zeros(4 * MIB, "u1"), os.urandom(4 * MIB)
    await asyncio.gather(client.send(b"first"), server.recv_into(array))
    reads, link = note_reads(server, monkeypatch), link_of(server)
    real = type(link).register

    async def register(self: Any, buffer: Any, access: Access) -> Any:
        if self is link and refused:
            raise OSError(errno.EFAULT, "ibv_reg_mr: Bad address")
        return await real(self, buffer, access)

    monkeypatch.setattr(type(link), "register", register)
    await asyncio.gather(client.send(data), server.recv_into(array))
    assert array.tobytes() == data
    inside = [array.ctypes.data <= at < array.ctypes.data + len(data) for at, _ in reads]
    assert len(inside) == 4
    assert set(inside) == {not refused and not is_siw}


async def test_a_buffer_is_locked_while_it_is_received_into(fetching: Pair) -> None:
    client, server = fetching
    buffer = bytearray(2 * MIB)
    receiving = asyncio.create_task(server.recv_into(buffer))
    await asyncio.sleep(0)
    sending = asyncio.create_task(client.send(bytes(len(buffer))))
    while not receiving.done():
        with pytest.raises(BufferError):
            buffer.append(0)
        with pytest.raises(BufferError):
            buffer.clear()
        await asyncio.sleep(0)
    assert await receiving == len(buffer)
    buffer.clear()
    await sending


@pytest.mark.parametrize("size", [100, 60 * KIB, 3 * MIB])
async def test_too_small(fetching: Pair, size: int) -> None:
    client, server = fetching
    data = os.urandom(size)
    sending = asyncio.create_task(client.send(data))
    for _ in range(2):
        with pytest.raises(aiordma.MessageTooLargeError, match=f"has {size} bytes"):
            await server.recv_into(bytearray(size - 1))
    buffer = bytearray(size)
    assert await server.recv_into(buffer) == size
    assert buffer == data
    await sending
    sending = asyncio.create_task(client.send(data))
    with pytest.raises(aiordma.MessageTooLargeError):
        await server.recv_into(bytearray(size - 1))
    assert await server.recv() == data
    await sending


@pytest.mark.parametrize("size", [10, 60 * KIB, 3 * MIB])
async def test_cancel_at_every_step(fetching: Pair, late: bool, size: int) -> None:
    """No message is lost, and nothing is written to the buffer of a canceled call."""
    client, server = fetching
    numbers = itertools.count(1)

    async def scenario(steps: Steps) -> None:
        number = next(numbers)
        data = number.to_bytes(4, "big") * (size // 4 + 1)
        buffer = bytearray(len(data))
        sending = asyncio.create_task(client.send(data))
        got = await run_canceled(server.recv_into(buffer), steps)
        if got is None:
            buffer[:] = b"\xee" * len(buffer)
            buffer.append(0)  # it is not exported
            other = bytearray(len(data))
            assert await server.recv_into(other) == len(data)
            assert other == data
            await sending
            assert buffer == b"\xee" * len(data) + b"\0"
        else:
            assert buffer == data
            await sending

    assert await for_every_step(scenario, late=late, complete=False) >= 1


async def test_many_tasks_of_both_kinds(fetching: Pair) -> None:
    """Messages come in their order, whatever kind of task waits for the next."""
    client, server = fetching
    rng = random.Random(7)
    sizes = [rng.choice((3, 5000, 100 * KIB, 300 * KIB, 2 * MIB)) for _ in range(40)]
    got: list[tuple[int, int]] = []

    async def receive(into: bool) -> None:
        buffer = bytearray(max(sizes))
        while len(got) < len(sizes):
            if into:
                size = await server.recv_into(buffer)
                got.append((buffer[0], size))
            else:
                with await server.recv() as message:
                    got.append((message[0], len(message)))

    async def send() -> None:
        for number, size in enumerate(sizes):
            await client.send(bytes([number]) * size)

    tasks = [asyncio.create_task(receive(number % 3 > 0)) for number in range(6)]
    await send()
    await until(lambda: len(got) == len(sizes))
    assert got == list(enumerate(sizes))
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def test_both_ends_at_once(fetching: Pair) -> None:
    """Each receives while it sends."""

    async def one_way(sender: Connection, receiver: Connection, seed: int) -> None:
        data = random.Random(seed).randbytes(3 * MIB)
        array = np.zeros(len(data), "u1")
        for _ in range(4):
            array[:] = 0
            await asyncio.gather(sender.send(data), receiver.recv_into(array))
            assert array.tobytes() == data

    client, server = fetching
    await asyncio.gather(one_way(client, server, 1), one_way(server, client, 2))


@pytest.mark.parametrize("size", [300_000, 3 * MIB])
async def test_a_peer_that_changes_the_bytes_meanwhile(address: str, size: int) -> None:
    """The checksum of the sender is of other bytes; what came stays in the buffer, unheeded."""
    config = ConnectionConfig(
        rendezvous_threshold=0,
        receive_buffer_size=1,  # none comes ahead
        check_large=True,
    )
    async with paired(address, config) as (client, server):
        array, data = np.zeros(size, "u1"), bytearray(size)
        await asyncio.gather(client.send(b"first"), server.recv_into(array))
        sending = asyncio.create_task(client.send(data))
        await until(lambda: fetches_of(server) == 1)  # it is announced
        data[size // 2] ^= 1
        with pytest.raises(aiordma.MessageDamagedError, match=f"{size} bytes does not match"):
            await server.recv_into(array)
        with pytest.raises(aiordma.ConnectionLostError):
            await sending


async def receive_all(first: Awaitable[int], server: Connection, buffer: bytearray) -> None:
    await first
    while True:
        await server.recv_into(buffer)


@pytest.mark.one_loop
async def test_a_peer_that_is_killed_in_the_middle(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call ends when the adapter has let go of the buffer."""
    size = 48 * MIB
    async with aiordma.listen(address, 0, config=FETCHED) as listener:
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(Path(__file__).with_name("large_sender.py")),
            address, str(listener.port), str(size),
        )  # fmt: skip
        try:
            async with await listener.accept() as server:
                reads = note_reads(server, monkeypatch)
                buffer = bytearray(size)
                receiving = asyncio.create_task(server.recv_into(buffer))
                await until(lambda: len(reads) > 10 or receiving.done(), 60)
                process.kill()
                with pytest.raises(aiordma.ConnectionLostError):
                    await receive_all(receiving, server, buffer)
                buffer.append(0)
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


@pytest.mark.parametrize("how", ["abort", "close"])
@pytest.mark.parametrize("side", [0, 1])
async def test_an_end_in_the_middle(
    address: str, monkeypatch: pytest.MonkeyPatch, how: str, side: int
) -> None:
    config = ConnectionConfig(rendezvous_threshold=0, close_timeout_s=0.5)
    async with paired(address, config) as ends:
        client, server = ends
        reads = note_reads(server, monkeypatch)
        buffer = bytearray(12 * MIB)
        receiving = asyncio.create_task(server.recv_into(buffer))
        sending = asyncio.create_task(client.send(bytes(len(buffer))))
        await until(lambda: len(reads) > 3, 30)
        if how == "abort":
            ends[side].abort()
        else:
            await ends[side].close()
        results = await asyncio.gather(receiving, sending, return_exceptions=True)
        kinds = (aiordma.ConnectionLostError, aiordma.ResourceClosedError, aiordma.PeerGoneError)
        if results[0] != len(buffer):  # an end in good order may wait for it
            assert isinstance(results[0], kinds)
        buffer.append(0)


@pytest.mark.one_loop
async def test_fork_in_the_middle(fetching: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child is refused, and the parent gets all of its message."""
    client, server = fetching
    reads = note_reads(server, monkeypatch)
    data = random.Random(3).randbytes(24 * MIB)
    buffer = bytearray(len(data))
    receiving = asyncio.create_task(server.recv_into(buffer))
    sending = asyncio.create_task(client.send(data))
    await until(lambda: len(reads) > 2, 30)

    def child() -> Iterable[str]:
        if (said := outcome(lambda: server.recv_into(bytearray(8)))) != "ForkedError":
            yield f"recv_into: {said}"

    await in_child(child)
    assert await receiving == len(data)
    await sending
    assert buffer == data


async def test_a_message_after_the_connection_was_lost(pair: Pair) -> None:
    """What had arrived is received first, as by `recv`."""
    client, server = pair
    buffer = bytearray(8)
    await client.send(b"one")
    await client.send(b"two")
    assert await server.recv_into(buffer) == 3
    await client.close()
    await until(server.is_closing)
    assert await server.recv_into(buffer) == 3
    assert buffer[:3] == b"two"
    with pytest.raises(aiordma.ConnectionEndedError):
        await server.recv_into(buffer)


async def test_raw(address: str) -> None:
    config = ConnectionConfig(raw=True, slot_size=4096)
    async with paired(address, config) as (client, server):
        buffer = bytearray(4096)
        for size in (0, 1, 4096):
            data = os.urandom(size)
            await client.send(data)
            assert await server.recv_into(buffer) == size
            assert buffer[:size] == data
