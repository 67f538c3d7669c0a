"""Memory that cannot be had, at each allocation of the calls that a program makes all the time.

`_testcapi` has CPython's own means of refusing one allocation.  A call may then raise MemoryError,
or do without; but what it was about to send is sent whole or not at all, what has arrived is not
lost, and the connection goes on.
"""

from __future__ import annotations

import _testcapi
import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from aiordma import Connection, ConnectionConfig
from aiordma.verbs import SGE
from tests.device.meeting import Pair, paired
from tests.device.oracle import until
from tests.device.streaming import stream_pair
from tests.inside.endpoint import state_of

pytestmark = pytest.mark.device

#: Allocations of one call, at most: those refused one after the other.
ALLOCATIONS = 48


@pytest.fixture
async def pair(address: str) -> AsyncIterator[Pair]:
    """All of its slots are there: to get more is work of many lines of Python."""
    async with paired(
        address, ConnectionConfig(recv_depth=16, send_depth=8, slot_size=1024)
    ) as ends:
        yield ends


@pytest.fixture(autouse=True)
async def no_threads(pair: Pair) -> None:
    """Until those that have connected the pair have ended: memory is refused to all threads."""
    await until(lambda: threading.active_count() == 1)


@contextmanager
def refused(number: int) -> Iterator[None]:
    """The allocation of this number, from here on, is refused; the block must not wait."""
    turns: list[None] = []
    handle = asyncio.get_running_loop().call_soon(turns.append, None)
    # What is tested is our memory: Python's own notes of where a coroutine was made are left out.
    depth = sys.get_coroutine_origin_tracking_depth()
    sys.set_coroutine_origin_tracking_depth(0)
    _testcapi.set_nomemory(number, number + 1)
    try:
        yield
    finally:
        _testcapi.remove_mem_hooks()
        sys.set_coroutine_origin_tracking_depth(depth)
        handle.cancel()
        assert not turns, "the event loop ran, and asyncio's own allocations were refused"


@pytest.mark.parametrize("kind", ["bytes", "bytearray", "immediate"])
async def test_a_send_is_whole_or_was_not(pair: Pair, kind: str) -> None:
    client, server = pair
    failures = 0
    # So that no coroutine that has ended is there for the next.
    held = [client.send(b"") for _ in range(100)]
    async with asyncio.timeout(60):
        for number in range(ALLOCATIONS):
            held.append(client.send(b""))
            data: Any = b"%d" % number if kind != "bytearray" else bytearray(b"%d" % number)
            imm = number if kind == "immediate" else None
            try:
                with refused(number):
                    await client.send(data, imm=imm)
            except MemoryError:
                failures += 1
            else:
                with await server.recv() as message:
                    assert message == data
                    assert message.imm == imm
        for never_sent in held:
            never_sent.close()
        assert failures, "it has to allocate something"
        await goes_on(client, server)


async def test_a_message_that_has_arrived_is_not_lost(pair: Pair) -> None:
    client, server = pair
    failures = 0
    # So that no coroutine that has ended and no message is there for the next.
    never_awaited = [server.recv() for _ in range(100)]
    taken = []
    async with asyncio.timeout(60):
        for number in range(ALLOCATIONS):
            await client.send(b"first %d" % number)
            await client.send(b"one %d" % number)
            await client.send(b"two %d" % number, imm=1000 + number)
            # Of one batch, or the others are already there when the last is.
            await client.flush()
            with await server.recv() as message:
                assert message == b"first %d" % number
            await until(lambda: waiting(server) == 2)
            for expected, imm in ((b"one %d", None), (b"two %d", 1000 + number)):
                never_awaited.append(server.recv())
                try:
                    with refused(number):
                        message = await server.recv()
                except MemoryError:
                    failures += 1
                    message = await server.recv()
                assert message == expected % number
                assert message.imm == imm
                message.release()
                taken.append(message)
        for coro in never_awaited:
            coro.close()
        assert failures, "it has to allocate something"
        await goes_on(client, server)


@pytest.mark.parametrize("size", [100, 100_000, 300_000])
async def test_what_a_program_does_with_a_message(pair: Pair, size: int) -> None:
    client, server = pair
    steps: tuple[Callable[[Any], Any], ...] = (
        bytes, memoryview, repr, len, lambda message: message == b"",
    )  # fmt: skip
    failures = 0
    async with asyncio.timeout(100):
        sending = asyncio.create_task(client.send(bytes(size)))
        with await server.recv() as message:
            await sending
            for number in range(ALLOCATIONS):
                for step in steps:
                    try:
                        with refused(number):
                            done = step(message)
                    except MemoryError:
                        failures += 1
                        done = step(message)
                    del done
            assert bytes(message) == bytes(size)
        assert failures, "it has to allocate something"
        await goes_on(client, server)


async def test_a_slot_comes_back_although_memory_cannot_be_had(pair: Pair) -> None:
    client, server = pair
    async with asyncio.timeout(100):
        for number in range(ALLOCATIONS):
            await client.send(b"%d" % number)
            message = await server.recv()
            try:
                with refused(number):
                    message.release()
            except MemoryError:
                message.release()
        await goes_on(client, server)


async def test_an_operation_is_done_or_was_not(pair: Pair) -> None:
    client, server = pair
    local, failures = bytearray(4096), 0
    async with asyncio.timeout(60), server.expose(bytearray(4096), write=True) as remote:
        region = await client.register(local)
        for number in range(ALLOCATIONS):
            local[:8] = number.to_bytes(8, "big")
            await client.write(remote, SGE(region, 0, 8))  # from here on they are posted by C
            piece = SGE(region, 0, 8)
            try:
                with refused(number):
                    operation = state_of(client).write(remote, piece, 0, None)
            except MemoryError:
                failures += 1
            else:
                if operation is not None:
                    await operation
        region.close()
        await goes_on(client, server)


async def test_a_stream_writes_a_line_whole_or_not_at_all(address: str) -> None:
    failures, sent = 0, bytearray()
    async with asyncio.timeout(60), stream_pair(address) as ((_, writer), (theirs, _)):
        for number in range(ALLOCATIONS):
            line = b"line %d\n" % number
            try:
                with refused(number):
                    writer.write(line)
            except MemoryError:
                failures += 1
            else:
                sent += line
            await writer.drain()
        assert await theirs.readexactly(len(sent)) == sent
        assert not writer.is_closing()


def waiting(end: Connection) -> int:
    """Messages that have arrived and were not taken."""
    return int(state_of(end).arrived)


async def goes_on(client: Connection, server: Connection) -> None:
    """More messages than there are slots and credits go both ways."""
    for number in range(3 * client.config.recv_depth):
        await client.send(b"%d" % number)
        with await server.recv() as message:
            await server.send(message)
        with await client.recv() as message:
            assert message == b"%d" % number
