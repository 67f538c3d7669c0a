"""Batches of operations on memory that is not the peer's, or that it withdraws meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import aiordma
from aiordma import BatchError, BatchLostError, ConnectionConfig, RemoteRegion, StaleRegionError
from aiordma._core import REFUSED_REVOKED
from aiordma.endpoint.wire import FrameKind
from aiordma.verbs import Access
from tests.device.meeting import Pair, are_alive, meet, paired
from tests.device.oracle import until
from tests.device.test_stale_regions import REVOKED, SIZE, Spy, admission, exposing, give, spying
from tests.exports import exported
from tests.inside.endpoint import limit_identity, operations_of, state_of

pytestmark = pytest.mark.device


async def test_a_wrong_name_is_refused_at_the_call(address: str) -> None:
    async with aiordma.listen(address, 0) as listener:
        first, second = await meet(listener, address), await meet(listener, address)
        async with (
            exposing(first[1], bytearray(SIZE)) as named,
            exposing(second[1], bytearray(b"x" * SIZE)) as own,
        ):
            region = await give(first[1], first[0], named)
            own = await give(second[1], second[0], own)
            await second[0].read(own, bytearray(8))  # so that it knows its peer
            batch = second[0].batch()
            batch.read(own, size=1)
            with pytest.raises(StaleRegionError, match="of another connection"):
                batch.read(region, size=8)
            with pytest.raises(StaleRegionError, match="of another connection"):
                batch.write(region, b"")
            assert await batch.submit() == [b"x"]
        for each in (*first, *second):
            await each.close()


@pytest.mark.parametrize("depth", [1, 2, 5])
async def test_what_is_withdrawn_before_its_post_is_left_out(address: str, depth: int) -> None:
    """The others take place, and the connection goes on."""
    async with paired(address, ConnectionConfig(one_sided_depth=depth)) as pair:
        client, server = pair
        lease = exposing(server, bytearray(SIZE))
        region = await give(server, client, await lease.__aenter__())
        async with exposing(server, bytearray(b"b" * SIZE)) as other:
            stays = await give(server, client, other)
            into = bytearray(8)
            await client.read(region, into)
            operations = operations_of(client)
            numbers = [await operations.number() for _ in range(depth)]
            mine = await client.register(64)
            batch = client.batch()
            batch.read(stays, size=1)
            batch.read(region, size=1)
            batch.read(region[8:16], into)
            batch.write(region, b"")  # which needs no request
            batch.write(region, mine)
            batch.read(stays, size=2)
            task = asyncio.create_task(batch.submit())
            await asyncio.sleep(0)
            await lease.revoke()
            await until(lambda: admission(client, region) == REFUSED_REVOKED)
            for number in numbers:
                operations.release_number(number)
            with pytest.raises(BatchError) as refused:
                await task
            error = refused.value
            assert not isinstance(error, BatchLostError)
            assert isinstance(error.__cause__, StaleRegionError)
            assert "ended the exposure" in str(error)
            assert (error.done, error.failed) == ([0, 3, 5], [1, 2, 4])
            assert (error.unknown, error.unposted) == ([], [])
            assert error.results == [b"b", None, None, 0, None, b"bb"]
            assert not exported(into)
            with pytest.raises(StaleRegionError):
                client.batch().read(region, size=1)
            only = client.batch()
            only.read(stays, size=3)
            assert await only.submit() == [b"bbb"]
        await are_alive(pair)


async def test_chains_that_follow_one_another_look_again(pair: Pair) -> None:
    """Without the task."""
    client, server = pair
    lease = exposing(server, bytearray(SIZE))
    region = await give(server, client, await lease.__aenter__())
    async with exposing(server, bytearray(b"b" * SIZE)) as other:
        stays = await give(server, client, other)
        batch = client.batch()
        for _ in range(20_000):
            batch.read(stays, size=8)
        batch.read(region, size=8)
        task = asyncio.create_task(batch.submit())
        await until(lambda: state_of(client).facts()["operating"] > 0)
        await lease.revoke()
        with pytest.raises(BatchError) as refused:
            await task
        assert (len(refused.value.done), refused.value.failed) == (20_000, [20_000])
        assert isinstance(refused.value.__cause__, StaleRegionError)
    await are_alive(pair)


# ---- a peer that has not said which memory is its own -----------------------------------------


def named(region: RemoteRegion, owner: int = 7, generation: int = 0) -> RemoteRegion:
    return RemoteRegion(region.addr, region.length, region.rkey, region.rights, owner, generation)


async def test_the_answer_of_the_peer_is_waited_for(address: str) -> None:
    memory = bytearray(b"memory")
    async with spying(address) as spy, spy.raw.expose(memory, read=True, write=True) as region:
        into, batch = bytearray(2), spy.victim.batch()
        assert batch.read(named(region), size=6) == 0
        assert batch.read(named(region)[2:4], into) == 1
        assert batch.write(named(region), b"M") == 2
        task = asyncio.create_task(batch.submit())
        await spy.heard(FrameKind.PING)
        with pytest.raises(RuntimeError, match="was submitted"):
            batch.read(named(region), size=1)
        with pytest.raises(RuntimeError, match="was submitted"):
            batch.read(region, size=1)
        assert spy.victim.stats.bytes_read == 0
        await spy.say(FrameKind.PONG, 7)
        assert await task == [b"memory", 2, 1]
        assert bytes(into) == b"mo"
        assert bytes(memory) == b"Memory"
        batch = spy.victim.batch()
        batch.read(named(region), size=6)  # now it is known
        assert await batch.submit() == [b"Memory"]


@pytest.mark.parametrize("owner", [0, 8])
async def test_a_peer_whose_memory_it_is_not(address: str, owner: int) -> None:
    async with spying(address) as spy, spy.raw.expose(bytearray(8), read=True) as region:
        into, batch = bytearray(8), spy.victim.batch()
        batch.read(region, size=8)
        batch.read(named(region), into)
        task = asyncio.create_task(batch.submit())
        await spy.heard(FrameKind.PING)
        await spy.say(FrameKind.PONG, owner)
        with pytest.raises(StaleRegionError, match="another connection; nothing was posted"):
            await task
        assert spy.victim.stats.bytes_read == 0
        assert not exported(into)
        assert await spy.victim.read(region, into) == 8


async def test_what_the_peer_withdraws_before_it_has_said_who_it_is(address: str) -> None:
    async with spying(address) as spy, spy.raw.expose(bytearray(8), read=True) as region:
        batch = spy.victim.batch()
        for generation in (5, 0, 6):
            batch.read(named(region, 7, generation), size=8)
        batch.read(region, size=8)
        await spy.say(FrameKind.PING, 7)
        await spy.say(FrameKind.PING, 5 << 32 | 5, REVOKED)
        await until(lambda: state_of(spy.victim).admission(7, 5) == REFUSED_REVOKED)
        async with asyncio.timeout(5):  # there is nothing to ask any more
            with pytest.raises(BatchError) as refused:
                await batch.submit()
        assert (refused.value.done, refused.value.failed) == ([1, 2, 3], [0])
        assert isinstance(refused.value.__cause__, StaleRegionError)
        assert await spy.victim.read(region, bytearray(8)) == 8


async def test_a_wait_for_the_answer_ends(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its bound, by a cancellation, and with the connection."""

    def begun(spy: Spy, into: Any) -> asyncio.Task[list[Any]]:
        batch = spy.victim.batch()
        batch.read(RemoteRegion(4096, 8, 1, Access.REMOTE_READ, 7), into)
        return asyncio.create_task(batch.submit())

    limit_identity(monkeypatch, 0.05)
    into = bytearray(8)
    async with spying(address) as spy:
        with pytest.raises(TimeoutError, match="which memory is its own"):
            await begun(spy, into)
        limit_identity(monkeypatch, 30)
        canceled = begun(spy, into)
        await asyncio.sleep(0)
        canceled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await canceled
        assert not exported(into)
        batch = spy.victim.batch()
        batch.read(RemoteRegion(4096, 8, 1, Access.REMOTE_READ, 7), into)
        waiting = begun(spy, into)
        await asyncio.sleep(0)
        spy.raw.abort()
        with pytest.raises(aiordma.ConnectionLostError):
            await waiting
        async with asyncio.timeout(5):  # the connection is over before it begins to wait
            with pytest.raises(aiordma.ConnectionLostError):
                await batch.submit()
        assert not exported(into)
        with pytest.raises(aiordma.ConnectionLostError):
            spy.victim.batch()


async def test_nothing_is_added_once_the_connection_is_over(pair: Pair) -> None:
    client, server = pair
    async with exposing(server, bytearray(SIZE)) as named:
        region = await give(server, client, named)
        batch = client.batch()
        batch.read(region, size=1)
        client.abort()
        with pytest.raises(aiordma.ResourceClosedError):
            batch.read(region, size=1)
        assert len(batch) == 1
        with pytest.raises(aiordma.ResourceClosedError):
            await batch.submit()
