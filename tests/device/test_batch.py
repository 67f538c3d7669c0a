"""Batches of READs and WRITEs: their bytes, and whatever ends them."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import pytest

import aiordma
from aiordma import BatchError, BatchLostError, ConnectionConfig, RemoteRegion
from aiordma.verbs import SGE
from tests.device.meeting import Pair, are_alive, paired, still_accepts
from tests.device.oracle import settle, until
from tests.device.test_two_processes import peer
from tests.exports import exported
from tests.inside.endpoint import link_of

pytestmark = pytest.mark.device

SIZE = 1 << 16


@asynccontextmanager
async def exposed(pair: Pair, buf: Any, **rights: Any) -> AsyncIterator[RemoteRegion]:
    """`buf` of the server, as the client knows it from a message."""
    client, server = pair
    async with server.expose(buf, **rights) as region:
        await server.send(region.to_bytes())
        with await client.recv() as message:
            yield RemoteRegion.from_bytes(bytes(message))


def is_lost(error: BaseException | None) -> bool:
    """Whether it says that the connection was over, before the batch or while it was under way."""
    ended = aiordma.ConnectionLostError | aiordma.ResourceClosedError | aiordma.CompletionError
    if isinstance(error, BatchError):
        assert error.unknown or error.unposted or error.failed
        places = sorted([*error.done, *error.failed, *error.unknown, *error.unposted])
        assert places == [*range(len(error.results))]
        assert isinstance(error, BatchLostError) == isinstance(
            error.__cause__, aiordma.ConnectionLostError
        )
        error = error.__cause__
    return isinstance(error, ended)


@pytest.mark.smoke
@pytest.mark.parametrize("depth", [1, 2, 16])
async def test_bytes_of_every_kind(address: str, depth: int) -> None:
    theirs = bytearray(random.Random(depth).randbytes(SIZE))
    async with paired(address, ConnectionConfig(one_sided_depth=depth)) as pair:
        client, _ = pair
        async with exposed(pair, theirs, read=True, write=True) as remote:
            before, mine, into = bytes(theirs), await client.register(4096), bytearray(100)
            async with client.batch() as batch:
                for number in range(1000):
                    assert batch.read(remote, offset=64 * number, size=64) == number
                piece = batch.read(remote, SGE(mine, 64, 128), offset=5)
                buffer = batch.read(remote, into, offset=7)
                whole = batch.read(remote, size=SIZE)
                short = batch.read(remote, size=3, offset=9)
                empty = batch.read(remote, size=0)
            results = batch.results
            assert results[:1000] == [before[64 * n : 64 * n + 64] for n in range(1000)]
            assert (results[piece], bytes(mine.view[64:192])) == (128, before[5:133])
            assert results[buffer] == 100
            assert bytes(into) == before[7:107]
            assert (results[whole], results[short], results[empty]) == (before, before[9:12], b"")

            batch, want = client.batch(), bytearray(before)
            mine.view[:] = bytes(range(256)) * 16
            for number in range(500):
                offset, data = 100 * number, bytes([number % 256]) * (number % 200)
                batch.write(remote, data, offset=offset)
                want[offset : offset + len(data)] = data
                batch.write(remote, SGE(mine, number, 10), offset=offset + 5)
                want[offset + 5 : offset + 15] = mine.view[number : number + 10]
            await batch.submit()
            assert await read_whole(client, remote) == want == theirs, "in their order"
        await are_alive(pair)


async def read_whole(client: aiordma.Connection, remote: RemoteRegion) -> bytearray:
    """All of the peer's memory: WRITEs before it are there, on iWARP, too."""
    into = bytearray(remote.length)
    await client.read(remote, into)
    return into


async def test_a_read_sees_the_writes_before_it(pair: Pair) -> None:
    client, _ = pair
    async with exposed(pair, bytearray(800), read=True, write=True) as remote:
        batch = client.batch()
        for number in range(100):
            batch.write(remote, number.to_bytes(8), offset=8 * number)
            batch.read(remote, offset=8 * number, size=8)
        results = await batch.submit()
    assert results[1::2] == [number.to_bytes(8) for number in range(100)]


async def test_messages_and_single_operations_go_on_in_between(pair: Pair) -> None:
    client, server = pair
    async with exposed(pair, random.Random(1).randbytes(SIZE), read=True) as remote:
        batch = client.batch()
        for _ in range(20_000):
            batch.read(remote, size=64)
        task = asyncio.create_task(batch.submit())
        rounds = 0
        while not task.done():
            into = bytearray(8)
            await client.read(remote, into, offset=rounds)
            await client.send(into)
            with await server.recv() as message:
                assert message == into
            other = client.batch()
            other.read(remote, size=4)
            assert len((await other.submit())[0]) == 4
            rounds += 1
        assert rounds >= 3, "they waited for the whole batch"
        assert set(await task) == {batch.results[0]}


async def test_a_wrong_access_is_refused_at_the_call(pair: Pair) -> None:
    client, server = pair
    async with exposed(pair, bytearray(64), read=True) as remote:
        foreign = await server.register(64)
        async with client.batch() as batch:
            batch.read(remote, size=64)
            wrong: list[tuple[type[Exception], Callable[[], int]]] = [
                (ValueError, lambda: batch.read(remote, size=64, offset=1)),
                (PermissionError, lambda: batch.write(remote, b"1")),
                (BufferError, lambda: batch.read(remote, b"1")),
                (ValueError, lambda: batch.read(remote, foreign)),
                (TypeError, lambda: batch.read(remote, cast("Any", [1, 2]))),
            ]
            for kind, call in wrong:
                with pytest.raises(kind):
                    call()
        assert batch.results == [bytes(64)]
        foreign.close()
    await are_alive(pair)


async def test_this_side_refuses_what_has_ended(address: str) -> None:
    async with paired(address) as pair:
        client, server = pair
        async with exposed(pair, bytes(range(64)), read=True) as good:
            async with exposed(pair, bytearray(64), read=True) as ended:
                pass
            await server.send(b"")
            await client.recv()  # and before it came what has ended
            async with client.batch() as batch:
                batch.read(good, size=8)
                with pytest.raises(aiordma.StaleRegionError):
                    batch.read(ended, size=8)
            assert batch.results == [bytes(range(8))]
        await are_alive(pair)


@pytest.mark.parametrize("lie", ["ended", "longer", "other key"])
async def test_the_peer_refuses_one(address: str, is_siw: bool, lie: str) -> None:
    """A lease that has ended, or was never given; what was done before is known, but on iWARP."""
    async with paired(address) as pair:
        client, _ = pair
        async with exposed(pair, bytes(range(64)), read=True) as good:
            async with exposed(pair, bytearray(64), read=True) as ended:
                ended = replace(ended, owner=0)  # or this side would refuse it by itself
            if lie == "longer":
                ended = replace(good, addr=good.addr + (1 << 20))
            elif lie == "other key":
                ended = replace(good, rkey=good.rkey ^ 0x5A5A00)
            batch = client.batch()
            for number in range(50):
                batch.read(ended if number == 20 else good, size=8, offset=number % 8)
            with pytest.raises(BatchError) as caught:
                await batch.submit()
        error = caught.value
        assert is_lost(error)
        assert 20 not in error.done
        assert set(error.done) <= {*range(20)}
        assert all(error.results[n] == bytes(range(n % 8, n % 8 + 8)) for n in error.done)
        assert all(result is None for result in error.results[20:])
        if not link_of(client).context.is_iwarp and not is_siw:
            assert error.done == [*range(20)]
            assert error.failed == [20]
            assert isinstance(error.__cause__, aiordma.RemoteAccessError)
        with pytest.raises(aiordma.ConnectionLostError):
            client.batch()


@pytest.mark.parametrize("side", ["client", "server"])
@pytest.mark.parametrize("how", ["close", "abort"])
async def test_an_end_while_it_is_under_way(address: str, side: str, how: str) -> None:
    """Nobody hangs, and no buffer stays exported."""
    async with paired(address) as pair:
        client, server = pair
        ends = client if side == "client" else server
        async with exposed(pair, bytearray(SIZE), read=True, write=True) as remote:
            into, mine = bytearray(64), await client.register(4096)
            batch = client.batch()
            for number in range(3000):
                batch.read(remote, into if number == 5 else SGE(mine, number, 64))
                batch.write(remote, bytes(64), offset=number)
            task = asyncio.create_task(batch.submit())
            single = asyncio.create_task(client.read(remote, bytearray(8)))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            if how == "abort":
                ends.abort()
            else:
                await ends.close()
            await asyncio.wait([task, single])
            await client.wait_closed()
        assert is_lost(task.exception()), task.exception()
        assert single.exception() is None or is_lost(single.exception())
        del batch, task
        await until(lambda: not exported(into))


@pytest.mark.parametrize("raw", [False, True])
async def test_a_raw_connection_has_batches_too(address: str, raw: bool) -> None:
    theirs = bytearray(64)
    async with (
        paired(address, ConnectionConfig(raw=raw)) as (client, server),
        server.expose(theirs, read=True, write=True) as remote,
    ):
        async with client.batch() as batch:
            batch.write(remote, b"x" * 64)
            batch.read(remote, size=64)
        assert batch.results == [64, b"x" * 64]


@pytest.mark.parametrize("turns", range(5))
async def test_a_canceled_batch_lets_go_of_its_memory(pair: Pair, turns: int) -> None:
    """Once the adapter is done with what was posted; the rest is not posted."""
    client, _ = pair
    async with exposed(pair, bytearray(SIZE), read=True, write=True) as remote:
        into, mine = bytearray(64), await client.register(4096)
        batch = client.batch()
        batch.read(remote, into)
        for number in range(4000):
            batch.read(remote, SGE(mine, number % 64, 64))
        task = asyncio.create_task(batch.submit())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        mine.close()
        await mine.wait_closed()
        assert client.stats.bytes_read < 64 * 4000
        del batch, task
        await until(lambda: not exported(into))
        await settle()
    await are_alive(pair)


async def test_a_peer_that_is_killed(address: str, loop_name: str) -> None:
    """The adapter gives up, or the kernel of the peer says goodbye; the batch has its error."""
    async with peer("memory", address, loop_name) as (port, pid):
        client = await aiordma.connect(address, port)
        with await client.recv() as message:
            remote = RemoteRegion.from_bytes(bytes(message))

        async def use() -> None:
            while True:
                async with client.batch() as batch:
                    for number in range(1000):
                        batch.read(remote, size=64, offset=number)

        task = asyncio.create_task(use())
        await until(lambda: client.stats.bytes_read > 100_000)
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            await asyncio.wait([task])
        assert is_lost(task.exception()), task.exception()
        client.abort()
        await client.wait_closed()


#: Reads memory of the peer in batches, for as long as it lives.
READER = """
import asyncio, sys
import aiordma

async def main():
    async with aiordma.connect(sys.argv[1], int(sys.argv[2])) as conn:
        remote = aiordma.RemoteRegion.from_bytes(bytes(await conn.recv()))
        while True:
            async with conn.batch() as batch:
                for number in range(1000):
                    batch.read(remote, size=64, offset=number)
                    batch.write(remote, bytes(64), offset=number)
            await conn.send(b"done")

asyncio.run(main())
"""


async def test_a_killed_reader_does_not_harm_the_owner(address: str) -> None:
    memory = bytearray(SIZE)
    async with aiordma.listen(address, 0) as listener:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", READER, address, str(listener.port)
        )
        server = await listener.accept()
        async with server.expose(memory, read=True, write=True) as region:
            await server.send(region.to_bytes())
            (await server.recv()).release()  # the second batch is under way
            process.kill()
            await process.wait()

            async def take_all() -> None:
                while True:
                    (await server.recv()).release()

            with pytest.raises(aiordma.ConnectionLostError):
                await asyncio.wait_for(take_all(), 60)
        await server.close()
        assert not exported(memory)
        await still_accepts(listener, address)
