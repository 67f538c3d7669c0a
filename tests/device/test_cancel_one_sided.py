"""Cancel at every await of READ, WRITE, atomics and leases: see test_cancel."""

from __future__ import annotations

import array
import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator

import pytest

import aiordma
from aiordma import ConnectionConfig
from aiordma.verbs import SGE
from tests.device.meeting import Pair, paired
from tests.device.oracle import settle
from tests.device.stepping import Steps, for_every_step, run_canceled
from tests.inside.endpoint import link_of

pytestmark = [pytest.mark.device, pytest.mark.virtual_time]

CONFIG = ConnectionConfig(recv_depth=4, slot_size=4096, one_sided_depth=2)
# Copied, from the second time on by C; registered, in four requests, two at a time.
SIZES = (1000, 3_500_000)


@pytest.fixture(params=["C", "Python"])
async def small_pair(request: pytest.FixtureRequest, address: str) -> AsyncIterator[Pair]:
    """Python copies every time if no buffer may be kept."""
    config = CONFIG
    if request.param == "Python":
        config = dataclasses.replace(CONFIG, receive_buffer_size=1)
    async with paired(address, config) as pair:
        yield pair


@pytest.mark.parametrize("size", SIZES)
async def test_read(small_pair: Pair, late: bool, size: int) -> None:
    client, server = small_pair
    theirs = bytes(range(250)) * (size // 250)
    async with server.expose(theirs, read=True) as region:

        async def scenario(steps: Steps) -> None:
            into = bytearray(len(theirs))
            if await run_canceled(client.read(region, into), steps) is not None:
                assert into == theirs
            again = bytearray(len(theirs))
            await client.read(region, again)
            assert again == theirs
            await settle()
            into.append(0)  # a canceled read lets go of the buffer when the adapter has

        assert await for_every_step(scenario, late=late, complete=False) >= 1


@pytest.mark.parametrize("size", SIZES)
async def test_write(small_pair: Pair, late: bool, size: int) -> None:
    client, server = small_pair
    theirs = bytearray(size)
    number = 0
    async with server.expose(theirs, write=True) as region:

        async def scenario(steps: Steps) -> None:
            nonlocal number
            number += 1
            await run_canceled(client.write(region, bytes([number]) * size), steps)
            await client.write(region, bytes([number + 100]) * size)
            assert theirs == bytes([number + 100]) * size

        assert await for_every_step(scenario, late=late, complete=False) >= 1


async def test_a_batch(small_pair: Pair, late: bool) -> None:
    """Copied and registered; what was canceled may take place, and lets go of its memory."""
    client, server = small_pair
    theirs = bytearray(4000)
    async with server.expose(theirs, read=True, write=True) as region:

        async def scenario(steps: Steps) -> None:
            into, mine = bytearray(100), await client.register(4096)
            batch = client.batch()
            for number in range(20):
                batch.write(region, bytes([number]) * 100, offset=100 * number)
                batch.read(region, SGE(mine, 100 * number, 100), offset=100 * number)
            batch.read(region, into, offset=1900)
            if await run_canceled(batch.submit(), steps) is not None:
                assert into == bytes([19]) * 100 == mine.view[1900:2000]
            again = client.batch()
            again.read(region, size=100, offset=100)
            assert len((await again.submit())[0]) == 100
            mine.close()
            await mine.wait_closed()
            await settle()
            into.append(0)  # a canceled batch lets go of the buffer when the adapter has

        assert await for_every_step(scenario, late=late, complete=False) >= 1


async def test_fetch_add(small_pair: Pair, late: bool, is_siw: bool) -> None:
    if is_siw:
        pytest.skip("iWARP has no atomics")
    client, server = small_pair
    counter = array.array("Q", [0])
    async with server.expose(counter, atomic=True) as region:

        async def scenario(steps: Steps) -> None:
            before = counter[0]
            old = await run_canceled(client.fetch_add(region, 1), steps)
            assert old in (before, None)
            assert await client.fetch_add(region, 1) - before in (0, 1)
            if old is not None:
                assert counter[0] == before + 2

        assert await for_every_step(scenario, late=late, complete=False) >= 1


@pytest.mark.parametrize("size", SIZES)
async def test_a_lease(address: str, late: bool, size: int) -> None:
    """Wherever it is canceled, nothing stays exposed.

    A lease that ends under a read which is still on its way ends the connection too, as the
    adapter sees an access that nobody allows; so each run has a connection of its own.
    """

    async def scenario(steps: Steps) -> None:
        theirs = bytearray(size)
        into = bytearray(8)
        async with paired(address, CONFIG) as (client, server):

            async def use() -> None:
                async with server.expose(theirs, read=True) as region:
                    await client.read(region, into)

            await run_canceled(use(), steps)
            await settle()
            theirs.append(0)
            assert link_of(server).allowed == 0

    assert await for_every_step(scenario, late=late) >= 2


async def test_register(small_pair: Pair, late: bool) -> None:
    client, _ = small_pair

    async def scenario(steps: Steps) -> None:
        mine = bytearray(3_000_000)
        region = await run_canceled(client.register(mine), steps)
        if region is not None:
            region.close()
        await settle()
        mine.append(0)

    assert await for_every_step(scenario, late=late) >= 1


async def test_memory_of_a_canceled_read_is_free_after_abort(address: str) -> None:
    async with aiordma.listen(address, 0, config=CONFIG) as listener:
        client = await aiordma.connect(address, listener.port, config=CONFIG)
        server = await listener.accept()
        theirs, into = bytearray(8_000_000), bytearray(8_000_000)
        async with server.expose(theirs, read=True) as region:
            reading = asyncio.create_task(client.read(region, into))
            for _ in range(3):
                await asyncio.sleep(0)
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reading
            client.abort()
            await client.wait_closed()
        await server.close()
        await settle()
        into.append(0)
        theirs.append(0)


@pytest.mark.parametrize("notes", [True, False])
@pytest.mark.parametrize("size", SIZES)
async def test_noted_write(small_pair: Pair, late: bool, size: int, notes: bool) -> None:
    """A canceled write may still tell of itself; those behind it arrive in order."""
    client, server = small_pair
    theirs = bytearray(size)
    number = 0
    lease = server.expose(theirs, write=True, notes=notes)
    async with lease as region:

        async def told() -> int | None:
            if notes:
                return (await anext(lease.notes())).imm
            with await server.recv() as message:
                return message.imm

        async def scenario(steps: Steps) -> None:
            nonlocal number
            number += 1
            first = client.write(region, bytes([number]) * size, imm=number)
            done = await run_canceled(first, steps)
            await client.write(region, bytes([number + 100]) * size, imm=number + 100)
            found = await told()
            if found == number:
                found = await told()
            else:
                assert done is None
            assert found == number + 100
            assert theirs == bytes([number + 100]) * size

        assert await for_every_step(scenario, late=late, complete=False) >= 1


async def test_notes(small_pair: Pair, late: bool) -> None:
    client, server = small_pair
    lease = server.expose(bytearray(8), write=True, notes=True)
    async with lease as region:

        async def scenario(steps: Steps) -> None:
            waiting = asyncio.create_task(run_canceled(anext(lease.notes()), steps))
            await asyncio.sleep(0)
            await client.write(region, b"x", imm=7)
            note = await waiting
            if note is None:
                note = await anext(lease.notes())
            assert note.imm == 7

        assert await for_every_step(scenario, late=late, complete=False) >= 1
