"""The registration cache on a real device: what it saves, and that it never names stale memory."""

from __future__ import annotations

import asyncio
import random

import numpy
import pytest

import aiordma
from aiordma.memory import RegistrationCache
from aiordma.verbs import SGE, Access
from tests.device.ends import ALL, Ends
from tests.device.oracle import adapter_objects, settle

pytestmark = pytest.mark.device


async def transfer(ends: Ends, cache: RegistrationCache, buffer: object) -> bytes:
    """Send a cached buffer; what arrived."""
    with ends.server.region(memoryview(buffer).nbytes) as inbox:  # type: ignore[arg-type]
        receiving = asyncio.create_task(ends.server.qp.recv(inbox))
        await asyncio.sleep(0)
        async with cache.get(buffer, Access(0)) as region:
            await ends.client.qp.send(region)
        await receiving
        return bytes(inbox.view)


async def test_one_registration_for_many_transfers(ends: Ends) -> None:
    data = numpy.arange(3000, dtype="u4")
    async with RegistrationCache(ends.client.pd) as cache:
        assert await transfer(ends, cache, data) == data.tobytes()
        await settle()
        registered = adapter_objects()["mr"]
        for n in range(20):
            data += n + 1
            assert await transfer(ends, cache, data) == data.tobytes()
        await settle()
        assert (cache.stats.hits, cache.stats.misses) == (20, 1)
        assert adapter_objects()["mr"] == registered
        assert cache.stats.bytes == 12000


async def test_memory_that_was_freed_is_not_taken_for_the_next(ends: Ends) -> None:
    """Without the held export the second buffer would get the address of the first."""
    rng = random.Random(5)
    async with RegistrationCache(ends.client.pd, max_entries=8) as cache:
        for _ in range(50):
            data = bytearray(rng.randbytes(50_000))
            assert await transfer(ends, cache, data) == data
            del data
        assert cache.stats.hits == 0
        assert cache.stats.entries == 8
        # What was evicted may come again, with other bytes at an address that was known once.
        assert cache.stats.evictions == 42


async def test_the_peer_reaches_a_cached_buffer(ends: Ends) -> None:
    data = bytearray(random.Random(6).randbytes(9000))
    async with RegistrationCache(ends.server.pd) as cache:
        async with cache.get(data, ALL) as region:
            addr, rkey = region.addr, region.rkey
            assert await ends.read(addr, rkey, 9000) == data
            await ends.write(addr + 5, rkey, b"changed")
        assert data[5:12] == b"changed"
        with pytest.raises(BufferError):
            data.append(1)
        assert await cache.drop(data) == 1
        data.append(1)
        # The adapter has forgotten it.  iWARP ends the connection without a reason.
        refusal = aiordma.CompletionError if ends.client.context.is_iwarp else (
            aiordma.RemoteAccessError
        )  # fmt: skip
        with pytest.raises(refusal):
            await ends.read(addr, rkey, 10)


async def test_what_is_evicted_under_a_request_stays_registered(ends: Ends) -> None:
    inbox = bytearray(100)
    async with RegistrationCache(ends.server.pd, max_entries=0) as cache:
        async with cache.get(inbox) as region:
            receiving = asyncio.create_task(ends.server.qp.recv(SGE(region, 0, 64)))
            await asyncio.sleep(0)
        assert region.closed
        assert cache.stats.evictions == 1
        with pytest.raises(BufferError):
            inbox.append(1)
        await ends.client.qp.send(ends.client.region(b"late", Access(0)))
        await receiving
        assert inbox[:4] == b"late"
        await region.wait_closed(10)
        inbox.append(1)


async def test_the_domain_is_closed_under_the_cache(ends: Ends) -> None:
    data, large = bytearray(100), bytearray(2 << 20)
    cache = RegistrationCache(ends.client.pd)
    region = await cache.take(data)
    ends.client.qp.close()
    ends.client.pd.close()
    for buffer in (bytearray(10), large):
        with pytest.raises(aiordma.ResourceClosedError):
            await cache.take(buffer)
    assert cache.stats.entries == 1
    large.append(1)
    cache.give(region)
    cache.close()
    await cache.wait_closed()
    await ends.client.pd.wait_closed(10)
    data.append(1)
