"""Rows 93 to 109: notifications, polling, and what a completion tells."""

from __future__ import annotations

import asyncio
import errno
import time

import pytest

import aiordma
from aiordma.cm import EventChannel
from aiordma.verbs import (
    SGE,
    AsyncEventType,
    CompletionQueue,
    DeviceEvents,
    QPInitAttr,
    QueuePair,
    SendFlags,
    WCOpcode,
    WCStatus,
    WorkCompletion,
)
from tests.inside.verbs import promise_nothing
from tests.seeds.ends import (
    DEPTH,
    LIMIT_S,
    MOMENT_S,
    End,
    Pair,
    begun,
    connected,
    listening,
    parameters,
    record_calls,
    requested,
    resolved,
)

pytestmark = pytest.mark.device


async def event_of(end: End, limit_s: float = LIMIT_S) -> bool:
    """Whether an event arrives; it is acknowledged."""
    cq = await end.channel.get_cq_event(limit_s)
    if cq is None:
        return False
    assert cq is end.cq
    cq.ack_events(1)
    return True


async def send(pair: Pair, **more: object) -> None:
    """A message from the client, whose own completion is awaited."""
    await pair.client.qp.send(SGE(pair.client.mr, 0, 16), **more)  # type: ignore[arg-type]


async def test_j093_event_poll_process_acknowledge_ask_again(pair: Pair) -> None:
    client, server = pair.client, pair.server
    processed: list[int] = []

    async def process() -> None:
        while len(processed) < 5:
            cq = await server.channel.get_cq_event(LIMIT_S)
            assert cq is not None
            for completion in cq.poll():
                processed.append(completion.wr_id)
                server.post_recv(completion.wr_id + 1)
            cq.ack_events(1)
            cq.req_notify()
            answered.set()

    answered = asyncio.Event()
    server.post_recv(0)
    processing = await begun(process())
    for _ in range(5):
        answered.clear()
        await client.qp.send(SGE(client.mr, 0, 16))
        # One after the other: what arrives between the poll and the request raises no event.
        async with asyncio.timeout(LIMIT_S):
            await answered.wait()
    await processing
    assert processed == list(range(5))


async def test_j094_get_cq_event_waits_for_an_event(pair: Pair) -> None:
    pair.server.post_recv(1)
    waiting = await begun(pair.server.channel.get_cq_event())
    await asyncio.sleep(MOMENT_S)
    assert not waiting.done()
    await send(pair)
    async with asyncio.timeout(LIMIT_S):
        assert await waiting is pair.server.cq
    pair.server.cq.ack_events(1)


async def test_j095_polling_needs_no_event(pair: Pair) -> None:
    server = pair.server
    assert server.cq.poll() == []
    server.post_recv(1, 2, 3)
    assert server.cq.poll() == []
    for _ in range(3):
        await send(pair)
    found = await server.completions(3)
    assert [wc.wr_id for wc in found] == [1, 2, 3]
    assert server.cq.poll() == []
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="poll"):
            server.cq.poll(wrong)


async def test_j096_waiting_costs_no_processor(pair: Pair) -> None:
    server = pair.server
    loop = asyncio.get_running_loop()
    server.post_recv(1)
    waits: list[float] = []
    # A guest that stands still may charge that to whoever was about to wait.
    while not waits or (waits[-1] >= 0.2 and len(waits) < 3):
        used = time.process_time()
        assert await server.channel.get_cq_event(1.0) is None
        waits.append(time.process_time() - used)
    assert waits[-1] < 0.2, waits
    used, until = time.process_time(), loop.time() + 1.0
    while loop.time() < until:
        assert not server.cq.poll()
    assert time.process_time() - used > 0.4


async def test_j097_completions_without_a_notification(address: str) -> None:
    async with connected(address) as pair:
        server = pair.server
        server.post_recv(1, 2)
        await send(pair)
        assert await event_of(server)  # the one that was asked for at the beginning
        await send(pair)
        assert not await event_of(server, MOMENT_S)
        assert [wc.wr_id for wc in await server.completions(2)] == [1, 2]


async def test_j098_each_notification_is_asked_for(pair: Pair) -> None:
    server = pair.server
    server.post_recv(*range(4))
    for _ in range(2):
        await send(pair)
        assert await event_of(server)
        await send(pair)
        assert not await event_of(server, MOMENT_S)
        server.cq.req_notify()


async def test_j099_requests_do_not_add_up(pair: Pair) -> None:
    server = pair.server
    server.post_recv(1, 2)
    for _ in range(3):
        server.cq.req_notify()
    await send(pair)
    assert await event_of(server)
    await send(pair)
    assert not await event_of(server, MOMENT_S)
    assert len(await server.completions(2)) == 2


@pytest.mark.parametrize("solicited_only", [False, True])
async def test_j100_all_or_solicited_only(
    pair: Pair, solicited_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = pair.server
    server.post_recv(1, 2)
    await send(pair)
    assert await event_of(server)
    assert len(await server.completions(1)) == 1
    calls = record_calls(monkeypatch, "ibv_req_notify_cq")
    server.cq.req_notify(solicited_only=solicited_only)
    assert [arguments[1] for _, arguments in calls] == [int(solicited_only)]
    await send(pair)
    if solicited_only:
        assert not await event_of(server, MOMENT_S)
    else:
        assert await event_of(server)
    assert len(await server.completions(1)) == 1


@pytest.mark.parametrize("raw", [False, True], ids=["awaited", "raw"])
async def test_j101_a_solicited_message(pair: Pair, raw: bool, is_siw: bool) -> None:
    server = pair.server
    server.post_recv(1, 2, 3)
    await send(pair)
    assert await event_of(server)
    server.cq.req_notify(solicited_only=True)
    await send(pair)
    assert not await event_of(server, MOMENT_S)
    if raw:
        pair.client.post_send(send_flags=SendFlags.SIGNALED | SendFlags.SOLICITED)
    else:
        await send(pair, solicited=True)
    if is_siw:  # its requests for solicited completions are never answered
        assert not await event_of(server, MOMENT_S)
    else:
        assert await event_of(server)
    assert len(await server.completions(3)) == 3


async def test_j102_every_event_is_acknowledged(pair: Pair) -> None:
    server = pair.server
    for number in range(2):
        server.post_recv(number)
        await send(pair)
        assert await server.channel.get_cq_event(LIMIT_S) is server.cq
        server.cq.req_notify()
    for end in (server.cq.close, server.cq.destroy, server.channel.close):
        with pytest.raises(aiordma.RdmaOSError, match="not acknowledged"):
            end()
    with pytest.raises(ValueError, match="unacknowledged"):
        server.cq.ack_events(3)
    server.cq.ack_events(2)
    with pytest.raises(ValueError, match="unacknowledged"):
        server.cq.ack_events(1)


async def test_j103_room_for_all_that_shares_it(pair: Pair, is_siw: bool) -> None:
    server = pair.server
    attr = QPInitAttr(send_cq=server.cq, max_send_wr=20, max_recv_wr=20)
    if is_siw:  # cannot change a completion queue, so that the queue pair is refused
        with pytest.raises(ValueError, match="could arrive"):
            QueuePair(server.pd, attr)
        assert server.cq.cqe < 36
    else:
        assert server.cq.cqe < 56
        with QueuePair(server.pd, attr):
            assert server.cq.cqe >= 56
        with pytest.raises(ValueError, match="too small"):
            server.cq.resize(8)


async def test_j104_the_room_is_an_argument(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = record_calls(monkeypatch, "ibv_create_cq")
    for room in (1, 100, 1000):
        with CompletionQueue(pair.server.pd.context, room) as cq:
            assert cq.cqe >= room
    assert [arguments[1] for _, arguments in calls] == [1, 100, 1000]
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="at least one"):
            CompletionQueue(pair.server.pd.context, wrong)


async def test_j105_a_queue_beyond_the_devices_limit(pair: Pair) -> None:
    context = pair.server.pd.context
    with pytest.raises(OSError, match="ibv_create_cq: EINVAL") as refused:
        CompletionQueue(context, context.attributes.max_cqe + 1)
    assert refused.value.errno == errno.EINVAL


async def test_j105_a_queue_that_overruns_says_so(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The accounting makes it impossible: it has to be switched off.
    promise_nothing(monkeypatch)
    with EventChannel() as at_client, EventChannel() as at_server:
        listener = listening(at_server, address)
        client = End(at_client, await resolved(at_client, address, listener.source_port))
        client.allocate(room=256, max_send_wr=128)
        connecting = await begun(client.cm_id.connect(parameters()))
        server, _ = await requested(at_server)
        server.allocate(room=16, max_recv_wr=128)
        too_many = server.cq.cqe + 8
        server.post_recv(*range(too_many))
        await server.cm_id.accept(parameters())
        await connecting
        with DeviceEvents(server.pd.context) as events:
            for number in range(too_many):
                client.post_send(number)
            # Who polls meanwhile makes room.
            async with asyncio.timeout(LIMIT_S):
                while (await anext(events)).type != AsyncEventType.CQ_ERR:
                    pass
        assert await event_of(server), "silence"
        found: list[WorkCompletion] = []

        def poll_on() -> None:
            while completions := server.cq.poll():
                found.extend(completions)

        with pytest.raises(aiordma.RdmaOSError, match="CQ_ERR"):
            poll_on()
        assert len(found) < too_many
        server.close()
        client.close()
        listener.close()


async def test_j106_the_queue_pair_of_a_completion(address: str) -> None:
    count = 10
    with EventChannel() as at_client, EventChannel() as at_server:
        listener = listening(at_server, address)
        ends: list[tuple[End, End]] = []
        for number in range(count):
            first = ends[0] if ends else None
            client = End(at_client, await resolved(at_client, address, listener.source_port))
            client.allocate(first[0].cq if first else None, room=count * 2 * DEPTH)
            connecting = await begun(client.cm_id.connect(parameters()))
            server, _ = await requested(at_server)
            server.allocate(first[1].cq if first else None, room=count * 2 * DEPTH)
            server.post_recv(number)
            await server.cm_id.accept(parameters())
            await connecting
            ends.append((client, server))
        by_number = {server.qp.num: server for _, server in ends}
        assert len(by_number) == count
        for client, _ in reversed(ends):
            client.post_send()
        for completion in await ends[0][1].completions(count):
            # The number that the id's own receive was posted with.
            assert ends[completion.wr_id][1] is by_number[completion.qp_num]
        for client, server in ends:
            client.close()
            server.close()
        listener.close()


async def test_j107_success_or_failure(pair: Pair) -> None:
    server = pair.server
    server.post_recv(1, 2)
    await send(pair)
    (good,) = await server.completions(1)
    assert (good.status, good.status_name, good.ok) == (WCStatus.SUCCESS, "SUCCESS", True)
    server.qp.to_error()
    (bad,) = await server.completions(1)
    assert (bad.status, bad.status_name, bad.ok) == (WCStatus.WR_FLUSH_ERR, "WR_FLUSH_ERR", False)
    assert bad.wr_id == 2
    assert "WR_FLUSH_ERR" in str(bad.error("recv"))


async def test_j108_the_kind_of_request(pair: Pair) -> None:
    client, server = pair.client, pair.server
    server.post_recv(1, 2)
    sent = await client.qp.send(SGE(client.mr, 0, 16))
    read = await client.qp.read(SGE(client.mr, 0, 16), server.mr.addr, server.mr.rkey)
    written = await client.qp.write(SGE(client.mr, 0, 16), server.mr.addr, server.mr.rkey)
    (received,) = await server.completions(1)
    assert [wc.opcode for wc in (sent, read, written, received)] == [
        WCOpcode.SEND, WCOpcode.RDMA_READ, WCOpcode.RDMA_WRITE, WCOpcode.RECV,
    ]  # fmt: skip
    server.qp.to_error()
    (flushed,) = await server.completions(1)
    # C leaves the field undefined then.
    assert flushed.opcode is None


async def test_j109_the_number_of_bytes(pair: Pair) -> None:
    client, server = pair.client, pair.server
    server.post_recv(1, 2)
    sent = await client.qp.send(SGE(client.mr, 0, 37))
    (received,) = await server.completions(1)
    assert received.byte_len == sent.byte_len == 37
    server.qp.to_error()
    (flushed,) = await server.completions(1)
    assert flushed.byte_len is None
