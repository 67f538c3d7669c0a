"""`recv_into`: kinds of memory, no copy of large messages, cancellation, peers that do harm."""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import os
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Iterable
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
from tests.inside.endpoint import link_of
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


def _ctypes(size: int) -> Any:
    return (ctypes.c_char * size)()


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


@pytest.mark.parametrize("how", ["close", "abort", "peer closes", "peer aborts"])
async def test_the_end_reaches_a_task_that_waits(fetching: Pair, how: str) -> None:
    client, server = fetching
    buffer = bytearray(8)
    receiving = asyncio.create_task(server.recv_into(buffer))
    await client.send(b"first")
    assert await receiving == 5
    receiving = asyncio.create_task(server.recv_into(buffer))
    await asyncio.sleep(0)
    with pytest.raises(BufferError):
        buffer.append(0)
    end = client if how.startswith("peer") else server
    if "close" in how:
        await end.close()
    else:
        end.abort()
    errors = {
        "close": aiordma.ResourceClosedError, "abort": aiordma.ResourceClosedError,
        "peer closes": aiordma.ConnectionEndedError, "peer aborts": aiordma.ConnectionLostError,
    }  # fmt: skip
    with pytest.raises(errors[how]):
        await receiving
    buffer.append(0)
    assert buffer == b"first" + bytes(4)


async def test_all_ways_to_receive_by_turns(fetching: Pair) -> None:
    """Small and large messages, some of which are there before the call, and some of which not."""
    client, server = fetching
    rng = random.Random(7)
    sizes = [rng.choice((*SIZES[:7], 2 * MIB)) for _ in range(60)]

    def body(number: int) -> bytes:
        return random.Random(number).randbytes(sizes[number])

    async def send() -> None:
        for number in range(len(sizes)):
            await client.send(body(number))
            if rng.random() < 0.3:
                await client.flush()

    sending = asyncio.create_task(send())
    buffer = bytearray(2 * MIB)
    for number in range(len(sizes)):
        way, got = rng.choice(("recv", "into", "into", "iterate", "canceled")), b""
        if way == "canceled":
            canceled = asyncio.create_task(server.recv_into(bytearray(2 * MIB)))
            await asyncio.sleep(0)
            if not canceled.done():
                canceled.cancel()
                await asyncio.wait([canceled])
            if not canceled.cancelled():
                assert canceled.result() == sizes[number]
                continue
            way = "into"
        if way == "into":
            got = bytes(buffer[: await server.recv_into(buffer)])
        elif way == "recv":
            with await server.recv() as message:
                got = bytes(message)
        else:
            async for message in server:
                got = bytes(message)
                message.release()
                break
        assert got == body(number), (number, way)
    await sending
    await are_alive((client, server))


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


async def test_raw(address: str) -> None:
    config = ConnectionConfig(raw=True, slot_size=4096)
    async with paired(address, config) as (client, server):
        buffer = bytearray(4096)
        for size in (0, 1, 4096):
            data = os.urandom(size)
            await client.send(data)
            assert await server.recv_into(buffer) == size
            assert buffer[:size] == data
