"""READ, WRITE and atomics of connections, and the leases that allow them."""

from __future__ import annotations

import array
import asyncio
import gc
import hashlib
import mmap
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import numpy
import pytest

import aiordma
from aiordma import RemoteRegion
from aiordma.verbs import SGE, Access
from tests.device.meeting import Pair, are_alive, paired
from tests.device.oracle import until
from tests.device.shared import has_atomics
from tests.exports import exported
from tests.inside.endpoint import link_of, registrations_of, state_of

pytestmark = pytest.mark.device


@asynccontextmanager
async def exposed(pair: Pair, buf: Any, **rights: Any) -> AsyncIterator[RemoteRegion]:
    """`buf` of the server, as the client knows it from a message."""
    client, server = pair
    async with server.expose(buf, **rights) as region:
        await server.send(region.to_bytes())
        with await client.recv() as message:
            yield RemoteRegion.from_bytes(bytes(message))


@pytest.mark.smoke
async def test_read_and_write(pair: Pair) -> None:
    client, server = pair
    theirs = bytearray(b"0123456789")
    async with exposed(pair, theirs, read=True, write=True) as remote:
        into = bytearray(4)
        assert await client.read(remote, into, offset=3) == 4
        assert into == b"3456"
        assert await client.write(remote, b"ab", offset=1) == 2
        assert await client.read(remote[:4], into) == 4
        assert into == b"0ab3"
    assert theirs == b"0ab3456789"
    assert client.stats.bytes_read == 8
    assert client.stats.bytes_written == 2
    assert server.stats.bytes_read == 0
    await are_alive(pair)


@pytest.mark.smoke
@pytest.mark.parametrize("size", [100, 5000, 500_000])
async def test_writes_are_told_of_in_the_order_of_their_calls(pair: Pair, size: int) -> None:
    """The first of a connection goes another way than the later ones, as do some under load."""
    client, server = pair
    count = 100
    mine = await client.register(size)
    async with exposed(pair, bytearray(size), write=True) as remote, asyncio.TaskGroup() as group:
        for number in range(count):
            data: Any = mine if number % 3 else bytes(size)
            group.create_task(client.write(remote, data if size < 64_000 else mine, imm=number))
        assert [(await server.recv()).imm for _ in range(count)] == list(range(count))
    mine.close()
    await are_alive(pair)


@pytest.mark.smoke
async def test_more_operations_than_the_adapter_can_have_under_way(address: str) -> None:
    """Adapters serve and start 16 READs at a time, or 128; the connection asks for no more."""
    theirs = bytes(random.Random(7).randbytes(400))
    async with paired(address, aiordma.ConnectionConfig(one_sided_depth=256)) as pair:
        client, _ = pair
        async with exposed(pair, bytearray(theirs), read=True) as remote:
            into = [bytearray(1) for _ in theirs]
            await asyncio.gather(
                *(client.read(remote, one, offset=at) for at, one in enumerate(into))
            )
            assert b"".join(into) == theirs
        await are_alive(pair)


async def test_references_to_objects_are_no_memory(pair: Pair) -> None:
    """A peer's bytes in their place would be followed as addresses."""
    client, server = pair
    things = [object() for _ in range(8)]
    objects = numpy.array(things)
    refused = pytest.raises(TypeError, match="references to Python objects")
    async with exposed(pair, bytearray(64), read=True, write=True) as remote:
        for call in (
            lambda: client.read(remote, objects), lambda: client.write(remote, objects),
            lambda: client.read(remote, objects[::2]), lambda: client.send(objects),
            lambda: client.register(objects),
        ):  # fmt: skip
            with refused:
                await call()
    with refused:
        async with server.expose(objects, read=True, write=True):
            pass
    assert [*objects] == things
    await are_alive(pair)


@pytest.mark.parametrize("size", [1, 64, 65_536, 65_537, 1 << 20, 5_000_001])
async def test_every_size_by_every_way(pair: Pair, size: int) -> None:
    """Copied, registered for the operation, registered beforehand, and in several requests."""
    client, _ = pair
    source = random.Random(size).randbytes(size)
    theirs = bytearray(size)
    mine = await client.register(bytearray(source))
    async with exposed(pair, theirs, read=True, write=True) as remote:
        into = bytearray(size)
        await client.write(remote, source)
        await client.read(remote, into)
        assert into == source == theirs
        await client.write(remote, bytes(size))
        assert not any(theirs[:64]), "the first bytes"
        await client.write(remote, mine)
        assert hashlib.sha256(theirs).digest() == hashlib.sha256(source).digest()
        mine.view[:] = bytes(size)
        await client.read(remote, mine)
        assert bytes(mine.view) == source
        await client.read(remote, SGE(mine, size // 2), offset=0)
        assert bytes(mine.view[size // 2 :]) == source[: size - size // 2]
    mine.close()


async def test_buffers_of_every_kind(pair: Pair) -> None:
    client, _ = pair
    with mmap.mmap(-1, 4096) as mapped:
        numbers = array.array("Q", range(16))
        async with exposed(pair, mapped, read=True, write=True) as remote:
            assert await client.write(remote, numbers) == 128
            back = array.array("Q", bytes(128))
            await client.read(remote, memoryview(back))
            assert back == numbers
            assert await client.write(remote, b"") == 0
            assert await client.read(remote, bytearray()) == 0
        assert mapped[:8] == bytes(8)


async def lent(conn: aiordma.Connection, remote: RemoteRegion) -> None:
    """Have C copy the bytes of small buffers: Python copies those of the first."""
    assert state_of(conn).bounce_region is None
    await conn.read(remote, bytearray(1))
    assert state_of(conn).bounce_region is not None


@pytest.mark.parametrize("how", ["close", "abort"])
async def test_the_end_by_the_peer_is_no_closed_region(address: str, how: str) -> None:
    """Neither for operations in line for their turn, nor for a later call with that memory."""
    config = aiordma.ConnectionConfig(one_sided_depth=2)
    async with paired(address, config) as pair:
        client, server = pair
        memory = await client.register(4096)
        # Not the same: what a read puts into its memory beforehand is nothing to send.
        source = await client.register(4096)
        async with exposed(pair, bytearray(4096), read=True, write=True) as remote:
            calls = [
                call
                for _ in range(20)
                for call in (client.read(remote, memory), client.write(remote, source))
            ]
            tasks = [asyncio.create_task(call) for call in calls]
            await asyncio.sleep(0)
            if how == "abort":
                server.abort()
            else:
                await server.close()
            await asyncio.wait(tasks)
            await client.wait_closed()
            for task in tasks:
                assert task.exception() is None or isinstance(
                    task.exception(), aiordma.ConnectionLostError
                )
            for call in (client.read, client.write):
                for local in (memory, SGE(memory, 0, 8)):
                    with pytest.raises(aiordma.ConnectionLostError):
                        await call(remote, local)


async def test_a_region_is_read_into_and_written_as_it_is(pair: Pair) -> None:
    """As a whole, by a piece of it, and by its view, which is copied."""
    client, _ = pair
    theirs = bytearray(b"0123456789abcdef")
    async with exposed(pair, theirs, read=True, write=True) as remote:
        await lent(client, remote)
        mine = await client.register(16)
        assert await client.read(remote, mine) == 16
        assert bytes(mine.view) == theirs
        assert await client.write(remote, SGE(mine, 4, 4), offset=0) == 4
        assert await client.write(remote, mine.view[8:10], offset=14) == 2
        assert await client.read(remote, mine.view[:2], offset=14) == 2
        assert theirs == b"4567456789abcd89"
        assert bytes(mine.view[:4]) == b"8923"
        with pytest.raises(ValueError, match="not inside"):
            await client.read(remote, mine, offset=1)
        mine.close()
        with pytest.raises(aiordma.ResourceClosedError):
            await client.read(remote, mine)
    await are_alive(pair)


@pytest.mark.parametrize("size", [4096, 2 << 20])
async def test_a_forgotten_region_is_given_back(pair: Pair, size: int) -> None:
    """With a warning, and not before a canceled read has ended, which goes on to write into it."""
    client, _ = pair
    theirs, mine = random.Random(size).randbytes(size), bytearray(size)
    async with exposed(pair, theirs, read=True) as remote:

        async def forget() -> None:
            canceled = asyncio.create_task(client.read(remote, await client.register(mine)))
            await asyncio.sleep(0)
            canceled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await canceled
            del canceled
            assert exported(mine)
            await until(lambda: not exported(mine))

        with pytest.warns(ResourceWarning, match="unclosed <MemoryRegion open .*async with"):
            await forget()
        assert mine[: 1 << 20] == theirs[: 1 << 20]  # a request, the only one of a canceled read
    await are_alive(pair)


async def test_a_forgotten_region_whose_key_the_peer_may_have_stays(pair: Pair) -> None:
    """To close it would cost the peer its connection, in the middle of a transfer perhaps."""
    client, server = pair
    mine = bytearray(b"here")
    async with server.expose(64, read=True):  # so that the queue pair allows reads
        remote = RemoteRegion.of(await server.register(mine, Access.REMOTE_READ))
        gc.collect()
        assert exported(mine)
        into = bytearray(4)
        await client.read(remote, into)
        assert into == b"here"
    await server.close()
    assert not exported(mine)


async def test_a_write_with_an_immediate_arrives_as_an_empty_message(pair: Pair) -> None:
    client, server = pair
    theirs = bytearray(100_000)
    async with exposed(pair, theirs, write=True) as remote:
        await client.write(remote, bytes([7]) * 100_000, imm=0xDEADBEEF)
        message = await server.recv()
        assert (len(message), message.imm) == (0, 0xDEADBEEF)
        assert theirs == bytes([7]) * 100_000


async def test_atomics(pair: Pair) -> None:
    client, server = pair
    if not has_atomics():
        with pytest.raises(aiordma.NotSupportedError, match="atomic"):
            server.expose(8, atomic=True)
        remote = RemoteRegion(4096, 8, 1, Access.REMOTE_ATOMIC)
        with pytest.raises(aiordma.NotSupportedError, match="atomic"):
            await client.fetch_add(remote, 1)
        await are_alive(pair)
        return
    counter = array.array("Q", [5, (1 << 64) - 1])
    async with exposed(pair, counter, atomic=True, read=True) as remote:
        assert await client.fetch_add(remote, 3) == 5
        assert await client.fetch_add(remote, -1) == 8
        assert await client.fetch_add(remote, (1 << 64) + 1) == 7
        assert await client.fetch_add(remote, 2, offset=8) == (1 << 64) - 1
        assert await client.compare_swap(remote, 8, 100) == 8
        assert await client.compare_swap(remote, 8, 200) == 100
        added = await asyncio.gather(*(client.fetch_add(remote, 1) for _ in range(100)))
        assert sorted(added) == list(range(100, 200))
    assert counter.tolist() == [200, 1]
    assert client.stats.atomics == 106


async def test_what_is_wrong_is_refused_before_it_costs_the_connection(pair: Pair) -> None:
    client, server = pair
    async with exposed(pair, bytearray(64), read=True) as remote:
        with pytest.raises(ValueError, match="not inside"):
            await client.read(remote, bytearray(65))
        with pytest.raises(ValueError, match="not inside"):
            await client.read(remote, bytearray(1), offset=-1)
        with pytest.raises(PermissionError, match="write"):
            await client.write(remote, b"x")
        with pytest.raises(PermissionError, match="atomic"):
            await client.fetch_add(remote, 1)
        with pytest.raises(BufferError, match="read-only"):
            await client.read(remote, b"constant")
        with pytest.raises(ValueError, match="contiguous"):
            await client.read(remote, memoryview(bytearray(8))[::2])
        with pytest.raises(TypeError):
            await client.read(remote, cast("Any", 8))
        async with await server.register(8) as foreign:
            with pytest.raises(ValueError, match="not registered with this connection"):
                await client.read(remote, foreign)
        closed = await client.register(8)
        closed.close()
        with pytest.raises(aiordma.ResourceClosedError):
            await client.read(remote, closed)
        await are_alive(pair)
    with pytest.raises(ValueError, match="what the peer may do"):
        server.expose(bytearray(1))
    for over in (0, -1.5):
        lease = server.expose(bytearray(1), read=True, timeout=over)
        with pytest.raises(TimeoutError, match="the time of the lease is over"):
            await lease.__aenter__()
    with pytest.raises(BufferError, match="read-only"):
        async with server.expose(b"constant", write=True):
            pass
    odd = RemoteRegion(4097, 8, 1, Access.REMOTE_ATOMIC)
    for wrong in (client.fetch_add(odd, 1), client.compare_swap(odd, 0, 1)):
        with pytest.raises(ValueError, match="multiple of 8"):
            await wrong
    with pytest.raises(ValueError, match="64 bits"):
        await client.compare_swap(RemoteRegion(4096, 8, 1, Access.REMOTE_ATOMIC), 1 << 64, 0)
    await are_alive(pair)


async def test_two_leases_of_one_buffer_do_not_disturb_each_other(pair: Pair) -> None:
    client, _ = pair
    theirs = bytearray(b"shared memory")
    async with exposed(pair, theirs, read=True) as first:
        async with exposed(pair, theirs, read=True, write=True) as second:
            await client.write(second, b"S")
        into = bytearray(6)
        await client.read(first, into)
        assert into == b"Shared"
    theirs.extend(b"!")  # not exported any more


async def test_a_lease_is_used_once_and_ends_with_its_connection(pair: Pair) -> None:
    client, server = pair
    theirs = bytearray(64)
    lease = server.expose(theirs, read=True)
    async with lease:
        pass
    with pytest.raises(RuntimeError, match="once"):
        await lease.__aenter__()
    async with server.expose(theirs, read=True):
        await server.close()
        theirs.extend(b"free: the memory is the program's again")
    for operation in (
        client.read(RemoteRegion(0, 1, 1, Access.REMOTE_READ), bytearray(1)),
        server.read(RemoteRegion(0, 1, 1, Access.REMOTE_READ), bytearray(1)),
        server.register(8),
    ):
        with pytest.raises((aiordma.ConnectionLostError, aiordma.ResourceClosedError)):
            await operation
    with pytest.raises(aiordma.ResourceClosedError):
        server.expose(theirs, read=True)


async def test_what_has_ended_before_the_connection_has_succeeded(pair: Pair) -> None:
    """Its end was taken, and not told yet, when the connection is given up."""
    client, server = pair
    async with (
        server.expose(bytearray(64), write=True) as region,
        await client.register(bytearray(b"done" * 16)) as source,
    ):
        await client.write(region, source)
        writing = asyncio.create_task(client.write(region, source))
        await asyncio.sleep(0)
        client.abort()
        state, deadline = state_of(client), time.monotonic() + 10
        while state.facts()["operating"] and not state.facts()["done"]:  # the loop stands still
            assert time.monotonic() < deadline
            link_of(client).completions.sweep()
        assert state.facts()["operating"], "it was told already"
        assert await writing == 64


async def test_one_sided_traffic_beside_messages(pair: Pair) -> None:
    client, server = pair
    seed = 20260
    dice = random.Random(seed)
    print("seed", seed)
    theirs = bytearray(1 << 20)
    async with exposed(pair, theirs, read=True, write=True) as remote:

        async def writer(part: int) -> None:
            start = part * 131_072
            data = dice.randbytes(131_072)
            for _ in range(4):
                await client.write(remote[start : start + 131_072], data)
                back = bytearray(131_072)
                await client.read(remote, back, offset=start)
                assert back == data

        async def chatter() -> None:
            for number in range(100):
                body = dice.randbytes(dice.choice([3, 1000, 40_000]))
                sending = asyncio.create_task(server.send(body, imm=number))
                message = await client.recv()
                assert (bytes(message), message.imm) == (body, number)
                message.release()
                await sending

        async with asyncio.TaskGroup() as group:
            for part in range(8):
                group.create_task(writer(part))
            group.create_task(chatter())


async def test_a_cache_of_registrations(address: str, *, is_siw: bool) -> None:
    config = aiordma.ConnectionConfig(registration_cache_size=1 << 20)
    async with paired(address, config) as (client, server):
        mine = bytearray(200_000)
        async with exposed((client, server), bytearray(200_000), read=True, write=True) as remote:
            for number in range(5):
                mine[:] = bytes([number]) * 200_000
                await client.write(remote, mine)
                await client.read(remote, mine)
                assert mine == bytes([number]) * 200_000
        with pytest.raises(BufferError):
            mine.append(0)  # the price, as documented
        cache = registrations_of(client)
        assert cache is not None
        # Two kinds of access; on iWARP the peer could write to what reads keep registered.
        expected = (1, 4) if is_siw else (2, 8)
        assert (cache.stats.misses, cache.stats.hits) == expected
    mine.append(0)


@pytest.mark.smoke
async def test_a_task_that_reads_on_and_on_holds_up_nobody(pair: Pair, address: str) -> None:
    """Where the adapter answers at once, no READ of its ever waits for the loop."""
    reader = pair[0]
    async with (
        paired(address) as (talker, other),
        exposed(pair, 64, read=True) as remote,
        await reader.register(64) as region,
    ):
        piece = SGE(region)
        talked = asyncio.Event()
        reads = 0

        async def read_on() -> None:
            nonlocal reads
            while not talked.is_set():
                assert await reader.read(remote, piece) == 64
                reads += 1

        async def talk() -> None:
            for number in range(50):
                await talker.send(number.to_bytes(2, "big"))
                (await other.recv()).release()
            talked.set()

        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            group.create_task(read_on())
            group.create_task(talk())
        print("reads", reads)
        # A message takes a few turns of the loop, and a turn 32 READs at most.
        assert 0 < reads < 50 * 320
        assert reader.stats.bytes_read == reads * 64
