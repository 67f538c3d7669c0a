"""Large messages: checked where the adapter is a program, and closed to the peer once delivered."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

import aiordma
from aiordma import Connection, ConnectionConfig, RemoteRegion
from aiordma._core import crc32c
from aiordma.link import buffers
from aiordma.verbs import Access, MemoryRegion
from tests.device.meeting import Pair, are_alive, meet, paired
from tests.inside.endpoint import link_of
from tests.inside.verbs import note_regions

pytestmark = [pytest.mark.device, pytest.mark.one_loop]

SIZES = (20_000, 300_000, 3 << 20)
FETCHED = ConnectionConfig(rendezvous_threshold=0)


@pytest.fixture
async def pair(address: str) -> AsyncIterator[Pair]:
    """Two connected ends, which fetch every message that exceeds a slot."""
    async with paired(address, FETCHED) as ends:
        yield ends


async def test_g04_a_software_adapter_checks_by_default(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides make the sum of the same bytes, in whatever way they travel."""
    sums: list[int] = []
    real = crc32c

    def noted(*args: Any) -> int:
        sums.append(real(*args))
        return sums[-1]

    monkeypatch.setattr(buffers, "crc32c", noted)
    client, server = pair
    assert [end.get_extra_info("large_messages_checked") for end in pair] == [True, True]
    for size in SIZES:
        data = random.Random(size).randbytes(size)
        sending = asyncio.create_task(client.send(data))
        with await server.recv() as message:
            assert bytes(message) == data
        await sending
        assert len(sums) == 2
        assert sums[0] == sums[1]
        sums.clear()


@pytest.mark.parametrize("config", [ConnectionConfig(), FETCHED], ids=["defaults", "fetched"])
async def test_large_messages_of_many_tasks_keep_the_order_of_the_calls(
    address: str, config: ConnectionConfig
) -> None:
    """Memory of more than 1 MiB is registered in a thread, and may be ready behind other memory."""
    rng = random.Random(5)
    sizes = [rng.choice((10_000, 20_000, 300_000, 1_100_000, 3 << 20)) for _ in range(40)]
    async with paired(address, config) as (client, server), asyncio.TaskGroup() as group:
        for number, size in enumerate(sizes):
            group.create_task(client.send([bytes([number]), bytes(size)]))
        received = []
        for _ in sizes:
            with await server.recv() as message:
                received.append((message[0], len(message) - 1))
        assert received == list(enumerate(sizes))


@pytest.fixture
def open_memory(monkeypatch: pytest.MonkeyPatch) -> list[MemoryRegion]:
    """All memory that was ever registered for a peer's writes."""
    return note_regions(monkeypatch, Access.REMOTE_WRITE)


def keys_of(victim: Connection, found: list[MemoryRegion]) -> list[RemoteRegion]:
    """What its peer may know: iWARP tells the key with each read."""
    return [
        RemoteRegion(region.addr, region.length, region.rkey, Access.REMOTE_WRITE)
        for region in found
        if region.pd is link_of(victim).pd
    ]


async def overwrite(attacker: Connection, victim: Connection, keys: list[RemoteRegion]) -> None:
    """Write with each key; a key that is dead ends the connection."""
    for remote in keys:
        try:
            await asyncio.wait_for(attacker.write(remote, b"\xee" * min(len(remote), 4096)), 20)
            await asyncio.wait_for(attacker.send(b"behind the write"), 20)
            with await asyncio.wait_for(victim.recv(), 20) as message:
                assert message == b"behind the write"
        except aiordma.RdmaError:
            break


@pytest.mark.parametrize("size", SIZES)
async def test_g03_a_delivered_message_cannot_be_changed(
    pair: Pair, size: int, open_memory: list[MemoryRegion], *, is_siw: bool
) -> None:
    client, server = pair
    data = random.Random(size).randbytes(size)
    sending = asyncio.create_task(client.send(data))
    message = await server.recv()
    await sending
    keys = keys_of(server, open_memory)
    assert len(keys) == is_siw
    await overwrite(client, server, keys)
    assert bytes(message) == data
    message.release()


async def test_g03_the_next_message_is_right_whatever_the_peer_wrote(
    pair: Pair, open_memory: list[MemoryRegion]
) -> None:
    """The buffer where it lands is used again; what is in it before does not matter."""
    client, server = pair
    for number in range(3):
        data = random.Random(number).randbytes(100_000)
        sending = asyncio.create_task(client.send(data))
        with await server.recv() as message:
            assert bytes(message) == data
        await sending
        await overwrite(client, server, keys_of(server, open_memory))
    await are_alive(pair)


@pytest.mark.parametrize("size", [5_000, 300_000])
@pytest.mark.parametrize("cache", [0, 1 << 20])
async def test_g03_what_was_read_cannot_be_changed(
    address: str, size: int, cache: int, open_memory: list[MemoryRegion]
) -> None:
    """As a large message, for the program's own reads into a plain buffer."""
    config = ConnectionConfig(registration_cache_size=cache)
    async with aiordma.listen(address, 0, config=config) as listener:
        client, server = await meet(listener, address, config=config)
        data = random.Random(size).randbytes(size)
        into = bytearray(size)
        async with server.expose(data, read=True) as remote:
            assert await client.read(remote, into) == size
            assert into == data
            await overwrite(server, client, keys_of(client, open_memory))
            assert into == data
        await asyncio.gather(client.close(), server.close())
