"""Rows D, Q3, E1 and E3 of the matrix: what becomes of an adapter, and what it says.

test_matrix.py runs this file, over the fabric.  A device that is taken away does not come back:
each such test has one of its own.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Iterator

import pytest

import aiordma
from aiordma import ConnectionConfig
from aiordma.cm import EventChannel, EventType
from aiordma.errors import DeviceRemovedError
from aiordma.testing import faults
from aiordma.verbs import SGE, AsyncEventType, SendWR
from aiordma.verbs.comp_channel import CompletionChannel
from tests.device.meeting import Pair, are_alive, meet, paired, part, qp_of, still_accepts
from tests.device.oracle import settle
from tests.device.shared import *  # noqa: F403  # nothing is left behind
from tests.device.streaming import noted
from tests.device.test_faults import Program, ends_well, messages, streams
from tests.fabric.knobs import raised, raised_by_manager, taken_away
from tests.native_ends import End, close_all, joined, listening, resolved

HERE = os.environ["AIORDMA_FABRIC_ADDR"]
LIMIT_S = 30
QUICK = ConnectionConfig(ack_timeout=12, close_timeout_s=1)


@pytest.fixture(autouse=True)
def nothing_lost() -> Iterator[None]:
    """What a queue that cannot be armed did not tell of is no fault."""
    before = CompletionChannel.all_lost_events
    yield
    CompletionChannel.all_lost_events = before


@pytest.fixture(scope="session", autouse=True)
def all_warm(warm: None) -> None:
    """The connection manager keeps each device open."""

    async def once() -> None:
        for number in (3, 4):
            async with aiordma.listen(f"127.0.0.{number}", 0):
                pass
        await settle()

    asyncio.run(once())


# D1, D2


async def test_d01_a_device_is_taken_away() -> None:
    host = "127.0.0.3"
    async with asyncio.timeout(LIMIT_S):
        listener = await aiordma.listen(host, 0, config=QUICK)
        client, server = await meet(listener, host, config=QUICK)
        waits = [
            asyncio.create_task(each) for each in (client.recv(), server.recv(), listener.accept())
        ]
        await asyncio.sleep(0)
        before = {device.name for device in aiordma.devices()}
        taken_away(2)
        for result in await asyncio.gather(*waits, return_exceptions=True):
            assert isinstance(result, DeviceRemovedError), repr(result)
        assert len(before - {device.name for device in aiordma.devices()}) == 1
        with pytest.raises(DeviceRemovedError):
            await client.send(b"late")
        with pytest.raises(aiordma.RdmaError):
            await aiordma.connect(host, listener.port, config=QUICK, timeout=1)
        await part(client, server)
        listener.close()
        await listener.wait_closed()
        async with paired(HERE) as ends:
            await are_alive(ends)


async def test_d02_the_peer_of_a_device_that_is_taken_away_notices() -> None:
    """Its own adapter goes on, and repeats for nothing; the streams of the device end at once."""
    host = "127.0.0.4"
    async with asyncio.timeout(LIMIT_S), aiordma.listen(HERE, 0, config=QUICK) as listener:
        client = await aiordma.connect(HERE, listener.port, config=QUICK, local_addr=(host, 0))
        server = await listener.accept()
        await are_alive((client, server))
        async with noted(host) as both:
            taken_away(3)
            for end in (both.client, both.server):
                assert isinstance(await end.ended(), DeviceRemovedError)
        with pytest.raises(aiordma.ConnectionLostError):  # noqa: PT012
            await server.send(b"x")
            await server.recv()
        await part(client, server)
        await still_accepts(listener, HERE)


# Q3


async def test_q03_a_completion_queue_is_never_too_small() -> None:
    """It grows with its queue pairs, to all that they can post; E3 has what an overrun does."""
    with (
        EventChannel() as at_server,
        EventChannel() as at_client,
        listening(at_server, HERE) as listener,
    ):
        cm_id = await resolved(at_client, HERE, listener.source_port)
        client = End(cm_id).build(room=2, max_send_wr=16)
        server = await joined(client.cm_id, listener, lambda each: End(each).build())
        source, target = client.region(64), server.region(64)
        receiving = [asyncio.create_task(server.qp.recv(SGE(target, 0, 8))) for _ in range(16)]
        await asyncio.sleep(0)
        async with asyncio.timeout(LIMIT_S):
            assert client.cq.cqe >= 16
            for number in range(16):
                client.qp.post_send(SendWR(wr_id=number, sg_list=[SGE(source, 0, 8)]))
            for number in range(16):
                completion = await anext(client.cq)
                assert (completion.ok, completion.wr_id) == (True, number)
            await asyncio.gather(*receiving)
        await close_all(client, server)


# E1


@pytest.mark.parametrize("program", [messages, streams])
async def test_e01_every_call_fails_once(program: Program) -> None:
    """Each call of verbs and of the manager that the program makes, one by one."""
    struck = 0
    for call in sorted(faults.CALLS - {"ibv_poll_cq", "ibv_req_notify_cq"}):
        for after in range(6):
            # ENOMEM for memory is a wait: test_faults.py has it.
            with faults.fail(call, after=after, errno=errno.EIO) as fault:
                await ends_well(program, HERE)
            assert await ends_well(program, HERE) == ""
            struck += fault.struck
            if not fault.struck:
                break
    assert struck > 40


# E3


ENDING = (AsyncEventType.QP_FATAL, AsyncEventType.QP_REQ_ERR, AsyncEventType.QP_ACCESS_ERR)
HARMLESS = (
    AsyncEventType.COMM_EST, AsyncEventType.SQ_DRAINED, AsyncEventType.PATH_MIG,
    AsyncEventType.PATH_MIG_ERR, AsyncEventType.QP_LAST_WQE_REACHED,
)  # fmt: skip
OF_DEVICES = (
    AsyncEventType.LID_CHANGE, AsyncEventType.PKEY_CHANGE, AsyncEventType.SM_CHANGE,
    AsyncEventType.CLIENT_REREGISTER, AsyncEventType.GID_CHANGE, AsyncEventType.PORT_ERR,
    AsyncEventType.PORT_ACTIVE,
)  # fmt: skip


@pytest.fixture
async def ends() -> AsyncIterator[Pair]:
    async with paired(HERE, QUICK) as ends:
        yield ends


@pytest.mark.parametrize("event", ENDING, ids=lambda each: each.name)
async def test_e03_events_that_end_a_queue_pair(ends: Pair, event: AsyncEventType) -> None:
    client, _ = ends
    waiting = [asyncio.create_task(end.recv()) for end in ends]
    await asyncio.sleep(0)
    raised(event, qp_of(client).num)
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(aiordma.ConnectionLostError, match=event.name):
            await waiting[0]
        await client.close()
        with pytest.raises(aiordma.RdmaError):
            await waiting[1]


@pytest.mark.parametrize("event", HARMLESS, ids=lambda each: each.name)
async def test_e03_events_that_change_nothing(ends: Pair, event: AsyncEventType) -> None:
    for end in ends:
        raised(event, qp_of(end).num)
    async with asyncio.timeout(LIMIT_S):
        await are_alive(ends)


@pytest.mark.parametrize("event", OF_DEVICES, ids=lambda each: each.name)
async def test_e03_events_of_a_device_are_told(ends: Pair, event: AsyncEventType) -> None:
    async with asyncio.timeout(LIMIT_S):
        with ends[0].events() as events:
            raised(event, 0)
            assert (await anext(events)).type == event
        await are_alive(ends)


async def test_e03_a_completion_queue_fails() -> None:
    async with asyncio.timeout(LIMIT_S), aiordma.listen(HERE, 0, config=QUICK) as listener:
        client, server = await meet(listener, HERE, config=QUICK)
        waiting = [asyncio.create_task(end.recv()) for end in (client, server)]
        await asyncio.sleep(0)
        raised(AsyncEventType.CQ_ERR, qp_of(client).num)
        with pytest.raises(aiordma.ConnectionLostError, match="CQ_ERR"):
            await waiting[0]
        await part(client, server)
        await asyncio.wait(waiting)
        assert isinstance(waiting[1].exception(), aiordma.RdmaError)
        await still_accepts(listener, HERE)


@pytest.mark.parametrize("event", [EventType.ADDR_CHANGE, EventType.TIMEWAIT_EXIT])
async def test_e03_events_of_the_manager_that_change_nothing(ends: Pair, event: EventType) -> None:
    raised_by_manager(event, 0)
    async with asyncio.timeout(LIMIT_S):
        await are_alive(ends)


@pytest.mark.parametrize("event", [EventType.CONNECT_ERROR, EventType.UNREACHABLE])
async def test_e03_events_of_the_manager_that_end_a_connection(
    ends: Pair, event: EventType
) -> None:
    waiting = [asyncio.create_task(end.recv()) for end in ends]
    await asyncio.sleep(0)
    raised_by_manager(event, 0, -110)
    async with asyncio.timeout(LIMIT_S):
        for task in waiting:
            with pytest.raises(aiordma.ConnectionLostError):
                await task
