"""Names of memory that is not the peer's, or no longer: refused before anything is posted."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import aiordma
from aiordma import Connection, ConnectionConfig, Memory, RemoteRegion, StaleRegionError
from aiordma._core import REFUSED_REVOKED
from aiordma.endpoint.wire import FRAME, KNOWS_CHECKSUMS, TAKES_FRAGMENTS, FrameKind, Hello
from aiordma.verbs import Access
from tests.device.meeting import Pair, are_alive, meet, paired
from tests.device.oracle import until
from tests.device.shared import has_atomics
from tests.inside.endpoint import limit_identity, link_of, operations_of, state_of

pytestmark = pytest.mark.device

IS_SIW = os.environ.get("AIORDMA_SOFTROCE_DEVICE") == "siw"
SIZE = 4096
RAW = ConnectionConfig(raw=True, slot_size=256, recv_depth=64, send_depth=32)
HELLO = Hello(64, 8, 256, 1024, flags=KNOWS_CHECKSUMS | TAKES_FRAGMENTS).pack(56)
REVOKED = 2  # flag of PING


async def give(owner: Connection, user: Connection, region: RemoteRegion) -> RemoteRegion:
    """Have the user know a region by a message."""
    await owner.send(region.to_bytes())
    with await user.recv() as message:
        return RemoteRegion.from_bytes(bytes(message))


async def refuse_each(user: Connection, region: RemoteRegion, words: str) -> None:
    """Each operation refuses the region, and posts nothing."""
    before = user.stats
    mine = await user.register(64)
    calls: list[Any] = [
        lambda: user.read(region, bytearray(64)),
        lambda: user.read(region, bytearray(SIZE)),
        lambda: user.read(region[8:72], mine),
        lambda: user.write(region, b"x"),
        lambda: user.write(region, mine, offset=1),
        lambda: user.write(region, b"", imm=5),
    ]
    if has_atomics():
        calls += [lambda: user.fetch_add(region, 1), lambda: user.compare_swap(region, 0, 1)]
    for call in calls:
        with pytest.raises(StaleRegionError, match=words) as refused:
            await call()
        assert isinstance(refused.value, aiordma.RemoteAccessError)
        assert "ask the peer" in refused.value.hint
    mine.close()
    assert user.stats == before


def exposing(owner: Connection, buf: Any) -> Any:
    return owner.expose(buf, read=True, write=True, atomic=has_atomics())


async def test_a_region_is_of_its_connection_alone(address: str) -> None:
    async with aiordma.listen(address, 0) as listener:
        first, second = await meet(listener, address), await meet(listener, address)
        memory = bytearray(b"mine" * (SIZE // 4))
        async with exposing(first[1], memory) as named:
            region = await give(first[1], first[0], named)
            assert (region.owner, region.generation) == (named.owner, 1)
            into = bytearray(8)
            await first[0].read(region, into)
            assert into == b"minemine"
            await refuse_each(second[0], region, "of another connection")
            async with exposing(second[1], bytearray(SIZE)) as other:
                assert other.owner != region.owner
                await first[0].read(region, into)  # C knows the last region; now another comes
                await second[0].read(await give(second[1], second[0], other), into)
                await refuse_each(second[0], region, "of another connection")
            assert memory == b"mine" * (SIZE // 4)
            await are_alive(first)
            await are_alive(second)
        for each in (*first, *second):
            await each.close()


async def test_a_region_is_of_one_life_of_its_owner(address: str) -> None:
    """The owner comes again, at the same address; the name may fit other memory of it."""
    memory = bytearray(SIZE)
    async with paired(address) as (client, server), exposing(server, memory) as named:
        region = await give(server, client, named)
        await client.read(region, bytearray(8))
    async with paired(address) as again, exposing(again[1], memory) as named:
        await refuse_each(again[0], region, "earlier life")
        await again[0].read(await give(again[1], again[0], named), bytearray(8))
        await are_alive(again)


@pytest.mark.parametrize("owner", [0, 1])
async def test_the_end_of_a_lease_is_told(pair: Pair, owner: int) -> None:
    mine, user = pair[owner], pair[1 - owner]
    async with exposing(mine, bytearray(SIZE)) as named, exposing(mine, bytearray(SIZE)) as other:
        region = await give(mine, user, named)
        async with exposing(mine, bytearray(SIZE)) as short:
            assert short.generation == region.generation + 2
            await user.read(await give(mine, user, short), bytearray(8))
        await until(lambda: admission(user, short) == REFUSED_REVOKED)
        await refuse_each(user, short, "has ended the exposure")
        with pytest.raises(StaleRegionError, match="has ended the exposure"):
            await user.read(short[10:18], bytearray(8))
        await user.read(region, bytearray(8))
        await user.read(other, bytearray(8))
    await are_alive(pair)


async def test_the_end_of_the_time_of_a_lease_is_told(pair: Pair) -> None:
    client, server = pair
    async with server.expose(bytearray(SIZE), read=True, timeout=0.02) as named:
        region = await give(server, client, named)
        await until(lambda: admission(client, region) == REFUSED_REVOKED)
        with pytest.raises(StaleRegionError, match="has ended"):
            await client.read(region, bytearray(8))
    await are_alive(pair)


async def test_many_leases_that_end_at_once(pair: Pair) -> None:
    """What is told of them, and what is kept, is bounded on both sides."""
    client, server = pair
    leases = [server.expose(bytearray(64), read=True) for _ in range(300)]
    regions = [await lease.__aenter__() for lease in leases]
    await give(server, client, regions[0])
    odd = [asyncio.create_task(lease.revoke()) for lease in leases[::2]]
    await asyncio.sleep(0)
    assert state_of(server).facts()["n_revoking"] <= 8
    await asyncio.gather(*odd, *(lease.revoke() for lease in leases[1::2]))
    await until(lambda: state_of(server).facts()["n_revoking"] == 0)
    await until(lambda: admission(client, regions[-1]) == REFUSED_REVOKED)
    with pytest.raises(StaleRegionError):
        await client.read(regions[-1], bytearray(8))
    await are_alive(pair)


async def test_a_lease_that_ends_under_running_reads(pair: Pair) -> None:
    """They end with all bytes, or with an error; a later one with an error."""
    client, server = pair
    size = 4 << 20
    content = bytes(range(256)) * (size // 256)
    lease = server.expose(content, read=True)
    region = await give(server, client, await lease.__aenter__())
    buffers = [bytearray(size) for _ in range(4)]
    reads = [asyncio.create_task(client.read(region, each)) for each in buffers]
    await until(lambda: client.stats.bytes_read > 0 or reads[0].done())
    await lease.revoke()
    results = await asyncio.gather(*reads, return_exceptions=True)
    for result, buffer in zip(results, buffers, strict=True):
        if isinstance(result, int):
            assert buffer == content
        else:
            assert isinstance(result, aiordma.CompletionError | aiordma.ConnectionLostError), result
    with pytest.raises((aiordma.CompletionError, aiordma.ConnectionLostError)):
        await client.read(region, bytearray(8))


async def test_a_read_that_waits_in_line_is_looked_at_again(address: str) -> None:
    async with paired(address, ConnectionConfig(one_sided_depth=1)) as pair:
        client, server = pair
        lease = server.expose(bytearray(SIZE), read=True)
        region = await give(server, client, await lease.__aenter__())
        await client.read(region, bytearray(8))
        operations = operations_of(client)
        number = await operations.number()
        mine = await client.register(64)
        reads = [
            asyncio.create_task(client.read(region, into))
            for into in (bytearray(8), mine, bytearray(100_000)[:SIZE])
        ]
        await asyncio.sleep(0)
        await lease.revoke()
        await until(lambda: admission(client, region) == REFUSED_REVOKED)
        operations.release_number(number)
        for read in reads:
            with pytest.raises(StaleRegionError, match="has ended the exposure"):
                await read
        assert client.stats.bytes_read == 8
        await are_alive(pair)


async def test_memory_that_connections_share_is_one_owner(address: str) -> None:
    """So a name may come another way; the peer asks whose it is at its first use."""
    async with Memory(SIZE, trusted=Access.REMOTE_READ) as memory:
        memory.view[:4] = b"ours"
        async with aiordma.listen(address, 0, memory=memory) as listener:
            first, second = await meet(listener, address), await meet(listener, address)
            async with first[1].expose(memory[:], read=True) as region:
                assert not state_of(second[0]).knows_peer
                if not memory.guarded:  # else the adapter refuses it
                    link_of(second[1]).open_access(Access.REMOTE_READ)
                    into = bytearray(4)
                    readers = [second[0].read(region, into) for _ in range(3)]
                    assert await asyncio.gather(*readers) == [4, 4, 4]
                    assert into == b"ours"
                    assert state_of(second[0]).knows_peer
                    link_of(second[1]).close_access(Access.REMOTE_READ)
                async with second[1].expose(memory[:64], read=True) as other:
                    assert other.owner == region.owner
                    assert other.generation == region.generation + 1
            for each in (*first, *second):
                await each.close()


async def test_a_raw_connection_checks_no_owner(address: str) -> None:
    async with (
        paired(address, ConnectionConfig(raw=True)) as (client, server),
        server.expose(bytearray(b"raw memory"), read=True) as region,
    ):
        assert (region.owner, region.generation) == (0, 0)
        into = bytearray(3)
        named = RemoteRegion(region.addr, 10, region.rkey, region.rights, 5, 6)
        assert await client.read(named, into) == 3
        assert into == b"raw"


# ---- peers that do as they like ------------------------------------------------------------


class Spy:
    """A peer whose every frame is the test's; the victim uses its memory."""

    def __init__(self, raw: Connection, victim: Connection) -> None:
        self.raw = raw
        self.victim = victim

    async def say(self, kind: FrameKind, argument: int = 0, flags: int = 0) -> None:
        await self.raw.send(FRAME.pack(kind, flags, 0, 0, argument))

    async def heard(self, kind: FrameKind) -> int:
        """The argument of the next frame of this kind."""
        while True:
            with await self.raw.recv() as message:
                found, _, _, _, argument = FRAME.unpack_from(bytes(message))
            if found == kind:
                return int(argument)


@asynccontextmanager
async def spying(address: str) -> AsyncIterator[Spy]:
    async with (
        aiordma.listen(address, 0) as listener,
        aiordma.connect(address, listener.port, config=RAW, private_data=HELLO) as raw,
    ):
        await raw.send(FRAME.pack(FrameKind.CREDIT, 0, 0, 0, 0))
        async with await listener.accept() as victim:
            yield Spy(raw, victim)
            victim.abort()


async def test_a_peer_without_identity_has_no_region_with_an_owner(address: str) -> None:
    """As an older library: it answers, and tells nothing.  It is not told of the end of leases."""
    async with spying(address) as spy, spy.raw.expose(bytearray(b"old peer"), read=True) as region:
        into = bytearray(8)
        assert await spy.victim.read(region, into) == 8
        assert into == b"old peer"
        named = RemoteRegion(region.addr, 8, region.rkey, region.rights, 7)
        reading = asyncio.create_task(spy.victim.read(named, into))
        async with spy.victim.expose(bytearray(8), read=True) as mine:
            assert mine.owner != 0
        assert await spy.heard(FrameKind.PING) == mine.owner
        await spy.say(FrameKind.PONG)
        with pytest.raises(StaleRegionError, match="another connection"):
            await reading
        with pytest.raises(StaleRegionError, match="another connection"):
            await spy.victim.read(named, into)
        assert state_of(spy.victim).facts()["n_revoking"] == 0
        assert await spy.victim.read(region, into) == 8


async def test_the_first_identity_of_a_peer_is_its_own(address: str) -> None:
    async with spying(address) as spy, spy.raw.expose(bytearray(8), read=True) as region:
        for kind in (FrameKind.CREDIT, FrameKind.PING, FrameKind.PONG):
            await spy.say(kind, 7 if kind == FrameKind.CREDIT else 8)
        assert await spy.heard(FrameKind.PONG) != 0
        for owner, good in ((7, True), (8, False), (7, True)):
            named = RemoteRegion(region.addr, 8, region.rkey, region.rights, owner)
            if good:
                assert await spy.victim.read(named, bytearray(8)) == 8
            else:
                with pytest.raises(StaleRegionError):
                    await spy.victim.read(named, bytearray(8))


async def test_a_peer_that_ends_all_exposures(address: str) -> None:
    """Whatever it tells, a fixed number is kept, and it concerns its own regions alone."""
    async with spying(address) as spy, spy.raw.expose(bytearray(8), read=True) as region:
        await spy.say(FrameKind.PING, 7)
        for first, last in ((0, (1 << 32) - 1), (5, 4), (1, 1), (1 << 31, 1 << 31)):
            await spy.say(FrameKind.PING, first << 32 | last, REVOKED)

        def named(generation: int) -> RemoteRegion:
            return RemoteRegion(region.addr, 8, region.rkey, region.rights, 7, generation)

        await until(lambda: admission(spy.victim, named(1 << 31)) == REFUSED_REVOKED)
        for generation in (1, 4, 1 << 31):
            with pytest.raises(StaleRegionError, match="has ended"):
                await spy.victim.read(named(generation), bytearray(8))
        for good in (named(0), named(5000), region):
            assert await spy.victim.read(good, bytearray(8)) == 8


async def test_a_peer_that_does_not_say(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait has a bound, may be canceled, and ends with the connection."""
    limit_identity(monkeypatch, 0.05)
    async with spying(address) as spy:
        named = RemoteRegion(4096, 8, 1, Access.REMOTE_READ, 7)
        with pytest.raises(TimeoutError, match="which memory is its own"):
            await spy.victim.read(named, bytearray(8))
        limit_identity(monkeypatch, 30)
        reads = [asyncio.create_task(spy.victim.read(named, bytearray(8))) for _ in range(2)]
        await spy.heard(FrameKind.PING)
        reads[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await reads[0]
        assert not reads[1].done()
        await spy.say(FrameKind.PONG, 9)
        with pytest.raises(StaleRegionError):
            await reads[1]
    async with spying(address) as spy:
        reading = asyncio.create_task(spy.victim.read(named, bytearray(8)))
        await spy.heard(FrameKind.PING)
        spy.raw.abort()
        with pytest.raises(aiordma.ConnectionLostError):
            await reading


def admission(user: Connection, region: RemoteRegion) -> int:
    """0, or why the user refuses the region."""
    return state_of(user).admission(region.owner, region.generation)
