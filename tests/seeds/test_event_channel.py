"""Rows 36 to 49: event channels, their events and acknowledgements."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import stat
from collections.abc import Iterator

import pytest

import aiordma
from aiordma.cm import ConnectionId, EventChannel, EventType
from aiordma.verbs import CompletionQueue
from tests.device.oracle import until
from tests.seeds.ends import (
    LIMIT_S,
    MOMENT_S,
    End,
    Pair,
    acked,
    begun,
    listening,
    next_event,
    parameters,
)

pytestmark = pytest.mark.device

MANY = 50


async def test_j036_known_by_a_descriptor() -> None:
    with EventChannel() as one, EventChannel() as two:
        assert one.fileno() != two.fileno()
        for channel in (one, two):
            assert stat.S_ISCHR(os.fstat(channel.fileno()).st_mode)
            assert "rdma_cm" in os.readlink(f"/proc/self/fd/{channel.fileno()}")


async def test_j037_all_events_arrive_on_the_channel(address: str) -> None:
    kinds: dict[EventChannel, list[EventType]] = {}

    async def collect(events: EventChannel) -> None:
        kinds[events] = []
        async for event in events:
            kinds[events].append(event.type)
            if event.type == EventType.CONNECT_REQUEST:
                assert event.connection_id is not None
                requests.put_nowait(event.connection_id)

    requests: asyncio.Queue[ConnectionId] = asyncio.Queue()
    at_client, at_server = EventChannel(), EventChannel()
    collectors = [await begun(collect(events)) for events in (at_client, at_server)]
    listener = listening(at_server, address)
    client = End(at_client, ConnectionId(at_client))
    await client.cm_id.resolve_addr((address, listener.source_port), timeout=5)
    await client.cm_id.resolve_route(timeout=5)
    client.allocate()
    connecting = await begun(client.cm_id.connect(parameters()))
    server = End(at_server, await requests.get())
    server.allocate()
    await server.cm_id.accept(parameters())
    await connecting
    await client.cm_id.disconnect()
    # On iWARP the client's end may come before the server has heard of it.
    await until(lambda: EventType.DISCONNECTED in kinds[at_server])
    for end in (client, server):
        end.close()
    listener.close()
    for events in (at_client, at_server):
        events.close()
    await asyncio.gather(*collectors)
    for seen in kinds.values():
        # A while after the end, on InfiniBand and RoCE.
        seen[:] = [kind for kind in seen if kind is not EventType.TIMEWAIT_EXIT]
    ends = [EventType.ESTABLISHED, EventType.DISCONNECTED]
    resolving = [EventType.ADDR_RESOLVED, EventType.ROUTE_RESOLVED]
    assert kinds[at_client] == [*resolving, *ends]
    assert kinds[at_server] == [EventType.CONNECT_REQUEST, *ends]


async def test_j038_many_ids_on_one_channel(address: str) -> None:
    with EventChannel() as events:
        ids = [ConnectionId(events) for _ in range(MANY)]
        await asyncio.gather(*(one.resolve_addr((address, 7471), timeout=LIMIT_S) for one in ids))
        assert all(one.context is ids[0].context for one in ids)
        for one in ids:
            one.close()


async def test_j039_an_id_belongs_to_its_channel_from_the_start() -> None:
    with EventChannel() as events, EventChannel() as other, ConnectionId(events) as cm_id:
        assert cm_id.event_channel is events
        with pytest.raises(AttributeError):
            cm_id.event_channel = other  # type: ignore[misc]
        assert cm_id.event_channel is events


async def test_j040_asking_for_an_event_ends_in_time() -> None:
    loop = asyncio.get_running_loop()
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0.01)
            turns += 1

    counting = await begun(count())
    with EventChannel() as events:
        found: list[tuple[float, int]] = []
        for _ in range(3):
            begin, before = loop.time(), turns
            assert await events.get_event(MOMENT_S) is None
            took, turned = loop.time() - begin, turns - before
            assert took >= MOMENT_S * 0.9
            found.append((took, turned))
            if took < MOMENT_S + 1 and turned >= 2:
                break  # else it was this process that stood still, or the loop
        else:
            pytest.fail(f"the loop stood still: seconds and turns {found}")
        assert await events.get_event(0) is None
    counting.cancel()


@pytest.mark.parametrize("unlimited", [-1, -0.5, None])
async def test_j041_a_negative_limit_is_none(address: str, unlimited: float | None) -> None:
    with EventChannel() as events, ConnectionId(events) as cm_id:
        waiting = await begun(events.get_event(unlimited))
        await asyncio.sleep(MOMENT_S)
        assert not waiting.done()
        await cm_id.resolve_addr((address, 7471), timeout=5)
        event = await waiting
        assert event is not None
        event.ack()


async def test_j042_every_event_has_to_be_acknowledged(address: str) -> None:
    events = EventChannel()
    taken = []
    ids = [ConnectionId(events) for _ in range(3)]
    for cm_id in ids:
        waiting = await begun(events.get_event(LIMIT_S))
        await cm_id.resolve_addr((address, 7471), timeout=5)
        taken.append(await waiting)
    for left in (3, 2, 1):
        assert events.unacked == left
        with pytest.raises(aiordma.RdmaOSError, match="not acknowledged"):
            events.close()
        event = taken.pop()
        assert event is not None
        event.ack()
    for cm_id in ids:
        cm_id.close()
    events.close()


async def test_j043_an_event_is_acknowledged_once(address: str) -> None:
    with EventChannel() as events, ConnectionId(events) as cm_id:
        waiting = await begun(events.get_event(LIMIT_S))
        await cm_id.resolve_addr((address, 7471), timeout=5)
        event = await waiting
        assert event is not None
        assert events.unacked == 1
        events.ack_event(event)
        assert events.unacked == 0
        for again in (event.ack, lambda: events.ack_event(event)):
            with pytest.raises(ValueError, match="acknowledged already"):
                again()
        assert events.unacked == 0


async def test_j044_only_an_event_of_the_channel_is_acknowledged(address: str) -> None:
    with EventChannel() as events, EventChannel() as other, ConnectionId(events) as cm_id:
        waiting = await begun(events.get_event(LIMIT_S))
        await cm_id.resolve_addr((address, 7471), timeout=5)
        event = await waiting
        assert event is not None
        for wrong in (None, cm_id, 7, "event"):
            with pytest.raises(TypeError, match="not a connection event"):
                events.ack_event(wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="not handed out"):
            other.ack_event(event)
        iterator = aiter(events)
        await cm_id.resolve_route(timeout=5)
        # Iterators keep the account by themselves.
        with pytest.raises(ValueError, match="not handed out"):
            events.ack_event(await anext(iterator))
        assert events.unacked == 1
        events.ack_event(event)


async def test_j045_channel_cannot_go_with_unacknowledged_events(address: str) -> None:
    events = EventChannel()
    cm_id = ConnectionId(events)
    waiting = await begun(events.get_event(LIMIT_S))
    await cm_id.resolve_addr((address, 7471), timeout=5)
    event = await waiting
    assert event is not None
    for end in (events.close, events.destroy):
        with pytest.raises(aiordma.RdmaOSError) as refused:
            end()
        assert refused.value.errno == errno.EBUSY
    await cm_id.resolve_route(timeout=5)  # the channel still works
    event.ack()
    cm_id.destroy()
    events.destroy()
    await events.wait_closed()


async def test_j046_channel_goes_after_its_ids() -> None:
    events = EventChannel()
    ids = [ConnectionId(events) for _ in range(2)]
    for cm_id in ids:
        with pytest.raises(aiordma.RdmaOSError, match="ConnectionId") as refused:
            events.destroy()
        assert refused.value.errno == errno.EBUSY
        cm_id.destroy()
    events.destroy()
    await events.wait_closed()


@contextlib.contextmanager
def room_for_many(listener: ConnectionId) -> Iterator[None]:
    """Let the process have more queues than software iWARP otherwise allows (surprises.md)."""
    assert listener.context is not None
    if listener.context.is_iwarp:
        with CompletionQueue(listener.context, 32_768):
            yield
    else:
        yield


async def test_j047_each_id_gets_its_own_events(address: str) -> None:
    # One channel for the listener and both ends of every connection.
    with (
        EventChannel() as events,
        listening(events, address) as listener,
        room_for_many(listener),
    ):
        clients = [End(events, ConnectionId(events)) for _ in range(MANY)]
        servers: dict[int, End] = {}

        async def connect(number: int, client: End) -> None:
            await client.cm_id.resolve_addr((address, listener.source_port), timeout=LIMIT_S)
            await client.cm_id.resolve_route(timeout=LIMIT_S)
            client.allocate()
            name = number.to_bytes(2, "big")
            event = await client.cm_id.connect(parameters(), private_data=name, timeout=LIMIT_S)
            assert event.connection_id is client.cm_id
            # The server gives each client its name back.
            assert event.private_data[:2] == name

        async def accept(number: int, cm_id: ConnectionId) -> None:
            server = servers[number] = End(events, cm_id)
            server.allocate()
            data = number.to_bytes(2, "big")
            event = await cm_id.accept(parameters(), private_data=data, timeout=LIMIT_S)
            assert event.connection_id is cm_id

        async def serve() -> None:
            async with asyncio.TaskGroup() as group:
                async for event in events:
                    if event.type != EventType.CONNECT_REQUEST:
                        continue
                    assert event.connection_id is not None
                    number = int.from_bytes(event.private_data[:2], "big")
                    group.create_task(accept(number, event.connection_id))
                    numbers.append(number)
                    if len(numbers) == MANY:
                        return

        numbers: list[int] = []
        async with asyncio.TaskGroup() as group:
            group.create_task(serve())
            await asyncio.sleep(0)
            for number, client in enumerate(clients):
                group.create_task(connect(number, client))
        assert sorted(numbers) == list(range(MANY))
        for number, client in enumerate(clients):
            server = servers[number]
            assert server.cm_id.destination_port == client.cm_id.source_port
            client.close()
            server.close()


async def test_j048_an_event_names_its_id(pair: Pair) -> None:
    assert pair.established.connection_id is pair.client.cm_id
    assert pair.request.connection_id is pair.server.cm_id
    disconnecting = await begun(pair.client.cm_id.disconnect())
    for end in (pair.client, pair.server):
        event = await acked(end.events, EventType.DISCONNECTED)
        assert event.connection_id is end.cm_id
    await disconnecting


async def test_j049_a_request_names_the_listener(pair: Pair) -> None:
    assert pair.request.listen_id is pair.listener
    assert pair.established.listen_id is None
    disconnecting = await begun(pair.client.cm_id.disconnect())
    event = await next_event(pair.server.events, EventType.DISCONNECTED)
    assert event.listen_id is None
    event.ack()
    await disconnecting
