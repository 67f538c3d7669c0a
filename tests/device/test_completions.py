"""Completion queues: notification, sharing, room, and what happens when they fail."""

from __future__ import annotations

import asyncio
import platform

import pytest

import aiordma
from aiordma.cm import ConnectionId, EventChannel
from aiordma.verbs import (
    SGE,
    AsyncEventType,
    CompletionChannel,
    CompletionQueue,
    MemoryRegion,
    ProtectionDomain,
    QPInitAttr,
    QPState,
    QueuePair,
    RecvWR,
    SendWR,
    WCOpcode,
    WCStatus,
)
from aiordma.verbs.async_event import AsyncEvent, DeviceEvents
from tests.device.ends import Ends, connected
from tests.device.oracle import polled, until
from tests.device.shared import OVER_FABRIC
from tests.inside.verbs import (
    drain_once,
    end_flush_grace,
    known_queues,
    on_first_failure,
    poll_for_safety,
    poll_for_safety_every,
    promise_nothing,
    promised,
    pump_of,
    state_of_queue,
    tell,
    token_of,
    untaken,
)

pytestmark = pytest.mark.device

KERNEL = tuple(int(part) for part in platform.release().split(".")[:2])
FATAL = [AsyncEventType.QP_FATAL, AsyncEventType.QP_REQ_ERR, AsyncEventType.QP_ACCESS_ERR]


def post_receives(ends: Ends, count: int) -> MemoryRegion:
    region = ends.server.region(64 * count)
    ends.server.qp.post_recv(
        [RecvWR(wr_id=n, sg_list=[SGE(region, 64 * n, 64)]) for n in range(count)]
    )
    return region


async def solicit(ends: Ends, payload: bytes, *, solicited: bool) -> None:
    with MemoryRegion(ends.client.pd, bytearray(payload)) as region:
        await ends.client.qp.send(region, solicited=solicited)


# By hand


async def test_solicited_only_by_hand(ends: Ends, is_siw: bool) -> None:
    cq, channel = ends.server.cq, ends.server.channel
    post_receives(ends, 4)
    cq.req_notify(solicited_only=True)
    await solicit(ends, b"quiet", solicited=False)
    assert await channel.get_cq_event(0.1) is None
    await solicit(ends, b"loud", solicited=True)
    if is_siw:  # software iWARP forgets that the sender asked
        assert await channel.get_cq_event(0.2) is None
    else:
        assert await channel.get_cq_event(10) is cq
    assert [wc.byte_len for wc in await polled(cq, 2)] == [5, 4]
    if not is_siw:
        cq.ack_events()
    # The standard wants a failure to wake, too; software adapters let it lie there.
    cq.req_notify(solicited_only=True)
    ends.server.qp.to_error()
    woken = await channel.get_cq_event(0.2)
    if woken is not None:
        assert OVER_FABRIC or KERNEL < (6, 12), "the standard's way, as on Linux 6.1"
        assert woken is cq
        cq.ack_events()
    flushed = await polled(cq, 1) + cq.poll()
    assert {wc.status for wc in flushed} == {WCStatus.WR_FLUSH_ERR}


async def test_b08_an_awaited_queue_refuses_events_by_hand(ends: Ends) -> None:
    """They would never come: the loop takes them."""
    cq, channel = ends.server.cq, ends.server.channel
    post_receives(ends, 1)
    waiting = asyncio.create_task(channel.get_cq_event())
    await asyncio.sleep(0)  # it waits already, as a second task of a program would
    await solicit(ends, b"a", solicited=False)
    async with asyncio.timeout(10):
        assert (await anext(cq)).byte_len == 1
        with pytest.raises(RuntimeError, match="the event loop takes its events"):
            await waiting
        with pytest.raises(RuntimeError, match="the event loop takes its events"):
            cq.req_notify()
        with pytest.raises(RuntimeError, match="the event loop takes its events"):
            await channel.get_cq_event()


async def test_b08_another_queue_of_the_channel_is_used_by_hand(ends: Ends) -> None:
    channel = ends.server.channel
    ends.server.cq.manage()
    with CompletionQueue(channel.context, 4, channel) as other:
        other.req_notify()
        assert await channel.get_cq_event(0.05) is None


# In the loop


async def test_solicited_only_in_the_loop(
    ends: Ends, is_siw: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The poll that nobody asks for is all that finds anything on software iWARP; elsewhere it
    # comes too late to have a part in it.
    poll_for_safety_every(monkeypatch, 1.0 if is_siw else 30.0)
    cq, channel = ends.server.cq, ends.server.channel
    post_receives(ends, 4)
    cq.manage(solicited_only=True)
    waiting = asyncio.ensure_future(anext(cq))
    await solicit(ends, b"quiet", solicited=False)
    await asyncio.sleep(0.1)
    assert is_siw or not waiting.done()
    await solicit(ends, b"loud", solicited=True)
    async with asyncio.timeout(10):
        assert (await waiting).byte_len == 5
        assert (await anext(cq)).byte_len == 4
    # And this one by the poll everywhere, after its usual second.
    monkeypatch.undo()
    poll_for_safety(channel)
    await solicit(ends, b"quiet again", solicited=False)
    async with asyncio.timeout(10):
        assert (await anext(cq)).byte_len == 11
    assert channel.lost_events == 0


async def test_iterating(ends: Ends) -> None:
    post_receives(ends, 8)
    region = ends.client.region(bytearray(b"x" * 8))
    for n in range(8):
        request = SendWR(wr_id=100 + n, sg_list=[SGE(region, 0, n + 1)])
        ends.client.qp.post_send(request)
    received = []
    async with asyncio.timeout(10):
        async for completion in ends.server.cq:
            received.append((completion.wr_id, completion.byte_len, completion.opcode))
            if len(received) == 8:
                ends.server.cq.close()
    assert received == [(n, n + 1, WCOpcode.RECV) for n in range(8)]


async def test_a_canceled_iteration_loses_nothing(ends: Ends) -> None:
    post_receives(ends, 4)
    for n in range(4):
        waiting = asyncio.ensure_future(anext(ends.server.cq))
        await asyncio.sleep(0)
        waiting.cancel()
        await solicit(ends, bytes(n + 1), solicited=False)
        async with asyncio.timeout(10):
            assert (await anext(ends.server.cq)).byte_len == n + 1


async def test_a_full_queue_delays_the_others_by_one_turn(address: str) -> None:
    """Two CQs of one channel: a deep one does not hold up the other."""
    with EventChannel() as events, ConnectionId(events) as probe:
        probe.bind_addr((address, 0))
        assert probe.context is not None
        channel = CompletionChannel(probe.context)
        deep, shallow = (CompletionQueue(probe.context, 800, channel) for _ in range(2))
    async with (
        connected(address, recv_cq=deep, max_recv_wr=400) as busy,
        connected(address, recv_cq=shallow) as calm,
    ):
        # As the loop does it, but one drain at a time.
        for cq in (deep, shallow):
            cq.req_notify()
            state_of_queue(cq).manage(False)
        pump_of(channel).pause()
        post_receives(busy, 400)
        for n in range(400):
            await solicit(busy, bytes(n % 64 + 1), solicited=False)
        region = post_receives(calm, 1)
        await solicit(calm, b"calm", solicited=False)
        await until(lambda: bytes(region.view[:4]) == b"calm")
        assert drain_once(channel)  # there is more
        assert untaken(shallow) == 1
        assert 0 < untaken(deep) < 256
        while drain_once(channel):
            pass
        assert [wc.wr_id for wc in deep.poll(500)] == list(range(400))
    for part in (deep, shallow, channel):
        part.close()
        await part.wait_closed()


# Room


async def test_completion_vectors(ends: Ends) -> None:
    context = ends.server.context
    vectors = context.num_comp_vectors
    assert vectors >= 1
    for vector in range(vectors):
        with CompletionQueue(context, 8, ends.server.channel, vector) as cq:
            assert cq.cqe >= 8
    for wrong in (-1, vectors):
        with pytest.raises(ValueError, match="completion vector"):
            CompletionQueue(context, 8, ends.server.channel, wrong)
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="at least one"):
            CompletionQueue(context, wrong)
    with pytest.raises(OSError, match="above the device's limit"):
        CompletionQueue(context, context.attributes.max_cqe + 1)
    with pytest.raises(OSError, match="above the device's limit"):
        CompletionQueue(context, 1 << 40)


async def test_growing_while_completions_wait(ends: Ends, is_siw: bool) -> None:
    cq = ends.server.cq
    post_receives(ends, 8)
    for n in range(6):
        await solicit(ends, bytes(n + 1), solicited=False)
    if is_siw:
        with pytest.raises(aiordma.NotSupportedError, match="ibv_resize_cq"):
            cq.resize(500)
    else:
        cq.resize(500)
        assert cq.cqe >= 500
    with pytest.raises(ValueError, match="32 completions could arrive; 31 is too small"):
        cq.resize(31)
    for n in range(6, 8):
        await solicit(ends, bytes(n + 1), solicited=False)
    assert [wc.byte_len for wc in await polled(cq, 8)] == list(range(1, 9))


async def test_promises_of_a_shared_queue(ends: Ends, is_siw: bool) -> None:
    context, pd = ends.server.context, ends.server.pd
    with CompletionQueue(context, 20, ends.server.channel) as cq:
        attr = QPInitAttr(send_cq=cq, max_send_wr=4, max_recv_wr=5)
        qps = [QueuePair(pd, attr) for _ in range(2)]
        assert promised(cq) == 18
        if is_siw:  # rounds up to a power of two, and cannot grow
            assert cq.cqe == 32
            qps.append(QueuePair(pd, attr))
            with pytest.raises(ValueError, match="room for 32 completions, 36 could arrive"):
                QueuePair(pd, attr)
        else:
            qps += [QueuePair(pd, attr) for _ in range(10)]
            assert cq.cqe >= promised(cq) == 12 * 9
        with pytest.raises((ValueError, OSError)):
            QueuePair(pd, QPInitAttr(send_cq=cq, max_send_wr=context.attributes.max_cqe))
        assert promised(cq) == len(qps) * 9
        for qp in qps:
            qp.close()
        for qp in qps:
            await qp.wait_closed()
        assert promised(cq) == 0


# Failures


async def test_the_first_cause_comes_before_the_flushes(ends: Ends, is_siw: bool) -> None:
    client = ends.client
    region = client.region(4096)
    post_receives(ends, 4)
    requests = [SendWR(wr_id=n, sg_list=[SGE(region, 0, 8)]) for n in range(4)]
    requests[1].sg_list = [SGE(region, 0, 4096)]  # longer than what is posted for it
    if is_siw:  # a SEND completes once TCP has it; the peer's TERMINATE ends the queue pair later
        client.qp.post_send(requests[:2])
        await until(lambda: client.qp.state != QPState.RTS)
        client.qp.post_send(requests[2:])
    else:
        client.qp.post_send(requests)
    async with asyncio.timeout(10):
        outcomes = [await anext(client.cq) for _ in requests]
    statuses = [wc.status for wc in outcomes]
    assert statuses[0] == WCStatus.SUCCESS
    assert [wc.wr_id for wc in outcomes] == [0, 1, 2, 3]
    assert statuses[2:] == [WCStatus.WR_FLUSH_ERR] * 2
    with pytest.raises(aiordma.FlushedError) as caught:
        await client.qp.send(region)
    if not is_siw:  # there the connection just ends
        cause = caught.value.__cause__
        assert isinstance(cause, aiordma.CompletionError)
        assert cause.status_name not in ("SUCCESS", "WR_FLUSH_ERR")


async def failed_behind_a_success(ends: Ends) -> MemoryRegion:
    """Send with wr_id 1, and fail the queue pair when it has completed and was not polled."""
    post_receives(ends, 4)
    client = ends.client
    region = client.region(64)
    client.cq.req_notify()
    client.qp.post_send([SendWR(wr_id=1, sg_list=[SGE(region, 0, 8)])])
    assert await client.channel.get_cq_event(10) is client.cq
    client.cq.ack_events()
    client.qp.to_error()
    return region


async def test_a_flush_without_the_adapter_comes_behind_what_has_completed(ends: Ends) -> None:
    """The adapter gets none of what is posted to a failed queue pair; the order stays."""
    region, client = await failed_behind_a_success(ends), ends.client
    client.qp.post_send([SendWR(wr_id=n, sg_list=[SGE(region, 0, 8)]) for n in (2, 3)])
    outcomes = client.cq.poll()
    assert [wc.wr_id for wc in outcomes] == [1, 2, 3]
    assert outcomes[0].status == WCStatus.SUCCESS
    assert [wc.status for wc in outcomes[1:]] == [WCStatus.WR_FLUSH_ERR] * 2


async def test_a_success_that_is_polled_late_stays_one(ends: Ends) -> None:
    """What the adapter does not flush within its time is given up; this it had completed."""
    await failed_behind_a_success(ends)
    client = ends.client
    end_flush_grace(client.qp)  # as the timer of to_error() does
    (outcome,) = client.cq.poll()
    assert (outcome.wr_id, outcome.status) == (1, WCStatus.SUCCESS)


async def test_an_overrun_fails_the_queue_and_its_queue_pairs(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The room is counted, so that the count has to be cheated to get there."""
    with EventChannel() as cm_events, ConnectionId(cm_events) as probe:
        probe.bind_addr((address, 0))
        assert probe.context is not None
        channel = CompletionChannel(probe.context)
        small = CompletionQueue(probe.context, 1, channel)
    with monkeypatch.context() as cheat:
        promise_nothing(cheat)
        async with connected(address, recv_cq=small) as ends:
            events = DeviceEvents(channel.context)
            server = ends.server.qp
            post_receives(ends, 16)
            small.req_notify()
            region = ends.client.region(64)
            ends.client.qp.post_send(
                [SendWR(wr_id=n, sg_list=[SGE(region, 0, n + 1)]) for n in range(16)]
            )
            async with asyncio.timeout(10):
                assert await channel.get_cq_event() is small
                while (await anext(events)).type != AsyncEventType.CQ_ERR:
                    pass
                # What it had room for is there, and then it says what has happened.
                assert 1 <= len(small.poll(16)) < 16
                with pytest.raises(aiordma.RdmaOSError, match="overrun") as caught:
                    small.poll()
                assert caught.value.event == "CQ_ERR"
                with pytest.raises(aiordma.FlushedError) as flushed:
                    await server.send(region)
            assert isinstance(flushed.value.__cause__, aiordma.RdmaOSError)
            events.close()
            small.ack_events(1)
    with pytest.raises(aiordma.RdmaOSError):
        await anext(small)
    with ProtectionDomain(channel.context) as pd, pytest.raises(aiordma.RdmaOSError):
        QueuePair(pd, QPInitAttr(send_cq=small))
    for part in (small, channel):
        part.close()
        await part.wait_closed()


async def test_who_iterates_over_a_queue_that_fails(ends: Ends) -> None:
    cq = ends.server.cq
    post_receives(ends, 1)
    waiting = [asyncio.ensure_future(anext(cq)) for _ in range(2)]
    await asyncio.sleep(0)
    event = AsyncEvent(AsyncEventType.CQ_ERR, 0, 0, ends.server.context)
    tell(token_of(cq), event)
    async with asyncio.timeout(5):
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    # Flushed by the end of the queue pair, or told by the queue: nobody hangs.
    assert any(isinstance(outcome, aiordma.RdmaOSError) for outcome in outcomes)
    assert ends.server.qp.state == QPState.ERR
    tell(1 << 60, event)  # of a queue that is no more


@pytest.mark.parametrize("kind", FATAL)
async def test_a_fatal_event_ends_every_wait(ends: Ends, kind: AsyncEventType) -> None:
    """Soft-RoCE raises none of them, so that the event is made up here."""
    qp = ends.server.qp
    region = ends.server.region(64)
    waiting = [asyncio.create_task(qp.recv(region)) for _ in range(3)]
    await asyncio.sleep(0)
    causes: list[BaseException] = []
    on_first_failure(qp, causes.append)
    tell(token_of(qp), AsyncEvent(kind, 0, 0, ends.server.context))
    async with asyncio.timeout(5):
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    for outcome in outcomes:
        assert isinstance(outcome, aiordma.FlushedError)
        assert isinstance(outcome.__cause__, aiordma.RdmaOSError)
        assert outcome.__cause__.event == kind.name
        assert str(qp.num) in str(outcome.__cause__)
    assert [type(cause) for cause in causes] == [aiordma.RdmaOSError]


async def test_an_event_of_the_device_finds_its_queue_pair(ends: Ends, is_siw: bool) -> None:
    """Software iWARP raises QP_FATAL where a request of its own cannot be carried out."""
    if not is_siw:
        # Soft-RoCE has no such event; the number that leads to the queue pair is there.
        queues = known_queues()
        assert sum(queue is ends.client.qp for queue in queues) == 1
        return
    region = ends.client.region(4096)
    post_receives(ends, 2)
    key, region.lkey = region.lkey, 0xDEAD00
    with DeviceEvents(ends.client.context) as events:
        with pytest.raises(aiordma.CompletionError):
            await ends.client.qp.send(region)
        async with asyncio.timeout(10):
            while (await anext(events)).type != AsyncEventType.QP_FATAL:
                pass
    region.lkey = key
    with pytest.raises(aiordma.FlushedError) as flushed:
        await ends.client.qp.send(region)
    assert isinstance(flushed.value.__cause__, (aiordma.RdmaOSError, aiordma.CompletionError))
