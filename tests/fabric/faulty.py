"""What `aiordma.testing.faults` can do over the fabric alone; test_faults.py runs this file."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import aiordma
from aiordma.testing import faults
from aiordma.verbs.comp_channel import CompletionChannel
from tests.device.meeting import paired
from tests.device.shared import *  # noqa: F403  # nothing is left behind
from tests.device.test_faults import messages

HERE, THERE = (os.environ["AIORDMA_FABRIC_ADDR"], os.environ["AIORDMA_FABRIC_ADDR2"])
LIB = Path(faults.__file__).parents[1] / "fabric" / "lib"
LIMIT_S = 60


@pytest.fixture(autouse=True)
def nothing_lost() -> Iterator[None]:
    """What is lost on purpose is no fault."""
    before = CompletionChannel.all_lost_events
    yield
    CompletionChannel.all_lost_events = before


def test_the_calls_are_those_of_the_library() -> None:
    text = "".join(path.read_text() for path in LIB.glob("*.c"))
    named = set(re.findall(r'fabric_fails\(\s*"((?:ibv|rdma)_\w+)"', text))
    named |= set(re.findall(r'region_new\([^"]*"(ibv_\w+)"\)', text))
    assert named == faults.CALLS


async def test_calls_that_a_device_cannot_have_fail() -> None:
    with faults.fail("ibv_get_device_list") as fault:
        assert aiordma.devices() == []
    assert fault.struck == 1
    device = aiordma.devices()[0]
    with device.open() as context:
        with (
            faults.fail("ibv_query_port") as fault,
            pytest.raises(OSError, match="ibv_query_port: ENOMEM"),
        ):
            context.query_port(1)
        assert fault.struck == 1
        context.query_port(1)


@pytest.mark.parametrize("part", [0.01, 0.05])
async def test_packets_are_lost(part: float) -> None:
    """They are sent again; the bytes are right."""
    with faults.packet_loss(0.0), faults.packet_loss(part):
        async with asyncio.timeout(LIMIT_S):
            with contextlib.suppress(aiordma.RdmaError):
                await messages(HERE)
    async with asyncio.timeout(LIMIT_S):
        await messages(HERE)


async def test_all_packets_are_lost() -> None:
    async with paired(HERE) as (client, server):
        receiving = asyncio.create_task(server.recv())
        with faults.packet_loss(1):
            with pytest.raises(aiordma.RdmaError):  # noqa: PT012
                async with asyncio.timeout(LIMIT_S):
                    await client.send(b"x")
                    await client.recv()
            receiving.cancel()
            await asyncio.wait([receiving])
    async with asyncio.timeout(LIMIT_S):
        await messages(HERE)


async def nothing_gets_through() -> None:
    async with aiordma.listen(HERE, 0) as listener:
        with pytest.raises(aiordma.ConnectTimeoutError):
            await aiordma.connect(HERE, listener.port, timeout=0.5)


async def test_a_device_is_cut_off() -> None:
    """From the other one; to itself its packets come."""
    names = [device.name for device in aiordma.devices()]
    with faults.partition(*names):
        async with asyncio.timeout(LIMIT_S):
            await messages(HERE)
            await messages(THERE)
            async with aiordma.listen(HERE, 0) as listener:
                with pytest.raises(aiordma.ConnectTimeoutError):
                    await aiordma.connect(HERE, listener.port, local_addr=(THERE, 0), timeout=1)
    for cut in ((), (names[0],), (names[0], names[0])):
        with faults.partition(*cut):
            await nothing_gets_through()
    async with asyncio.timeout(LIMIT_S):
        await messages(HERE)
    with pytest.raises(ValueError, match=f"one: there is no device x, only {names[0]}"):
        faults.partition("x")


async def test_partitions_that_overlap() -> None:
    one, two = faults.partition(), faults.partition()
    one.clear()
    await nothing_gets_through()
    two.clear()
    async with asyncio.timeout(LIMIT_S):
        await messages(HERE)


async def test_a_connection_that_is_cut_ends() -> None:
    async with paired(HERE) as (client, server):
        receiving = asyncio.create_task(server.recv())
        await asyncio.sleep(0)
        with faults.partition(), pytest.raises(aiordma.ConnectionLostError):  # noqa: PT012
            async with asyncio.timeout(LIMIT_S):
                await client.send(b"x")
                await client.recv()
        with contextlib.suppress(aiordma.RdmaError):
            await receiving
