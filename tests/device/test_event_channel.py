"""An EventChannel gives each event to one reader, once, and never stops for what is not read."""

from __future__ import annotations

import asyncio
import functools
import logging
import weakref

import pytest

import aiordma
from aiordma.cm import ConnectionEvent, ConnectionId, EventChannel, EventType, Stage
from tests.device.oracle import collect, until
from tests.inside.cm import kept_of, publish
from tests.native_ends import End, begun, close_all, joined, listening, parameters, resolved

pytestmark = pytest.mark.device

LIMIT_S = 20.0


async def asked(address: str, listener: ConnectionId, count: int) -> list[asyncio.Task[None]]:
    """So many clients that ask to be connected, each with its number as private data."""
    tasks = []
    for number in range(count):
        events = EventChannel()
        client = End(await resolved(events, address, listener.source_port))
        client.parts.append(events)
        client.build()

        async def connect(client: End = client, number: int = number) -> None:
            try:
                await client.cm_id.connect(parameters(), private_data=bytes([number]))
            except aiordma.ConnectionRejectedError:
                pass
            finally:
                client.close()

        tasks.append(await begun(connect()))
    return tasks


def _served(cm_id: ConnectionId) -> End:
    return End(cm_id).build()


def _is_left(cm_id: ConnectionId) -> bool:
    return cm_id.stage is Stage.DISCONNECTED


def number_of(event: ConnectionEvent | None) -> int:
    assert event is not None
    assert event.connection_id is not None
    assert event.type == EventType.CONNECT_REQUEST
    return event.private_data[0]


async def refused_all(requests: list[ConnectionEvent], clients: list[asyncio.Task[None]]) -> None:
    """Each client's request was read once; refuse them all, which ends the clients."""
    assert sorted(number_of(event) for event in requests) == list(range(len(clients)))
    for event in requests:
        assert event.connection_id is not None
        event.connection_id.close()
    await asyncio.gather(*clients)


@pytest.mark.parametrize("how", ["iterator", "get_event"])
async def test_a03_what_an_iterator_has_not_read_is_for_the_next_reader(
    events: EventChannel, address: str, how: str
) -> None:
    listener = listening(events, address)
    requests = []

    async def first() -> ConnectionEvent:
        async for event in events:
            return event
        raise AssertionError

    waiting = await begun(first())
    clients = await asked(address, listener, 4)
    async with asyncio.timeout(LIMIT_S):
        requests.append(await waiting)
        for _ in range(3):
            if how == "iterator":
                requests.append(await first())
            else:
                event = await events.get_event(LIMIT_S)
                assert event is not None
                event.ack()
                requests.append(event)
    await refused_all(requests, clients)
    listener.close()


async def test_a03_two_readers_share_the_events(address: str) -> None:
    events = EventChannel()
    listener = listening(events, address)
    seen: list[ConnectionEvent] = []

    async def read() -> None:
        async for event in events:
            seen.append(event)  # noqa: PERF401  # each as it comes

    readers = [await begun(read()) for _ in range(2)]
    clients = await asked(address, listener, 4)
    await until(lambda: len(seen) >= 4, LIMIT_S)
    await refused_all(seen, clients)
    listener.close()
    events.close()
    await asyncio.gather(*readers)
    await events.wait_closed()


async def test_a04_a_program_that_reads_no_event_is_never_stopped(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Peers that hang up first leave an event each; what a program awaits comes all the same."""
    events, others = EventChannel(max_unread=8), EventChannel()
    listener = listening(others, address)
    clients: list[End] = []
    caplog.set_level(logging.WARNING)
    async with asyncio.timeout(60):
        for _ in range(12):
            client = End(await resolved(events, address, listener.source_port)).build()
            clients.append(client)
            server = await joined(client.cm_id, listener, _served)
            server.close()
            await until(functools.partial(_is_left, client.cm_id), LIMIT_S)
    assert len(kept_of(events)) == 8
    assert events.dropped_events >= 4  # some peers leave a TIMEWAIT_EXIT, too
    assert caplog.records
    for client in clients:
        client.close()
    assert not kept_of(events)
    await close_all(*clients)
    listener.close()
    for channel in (events, others):
        channel.close()
        await channel.wait_closed()


async def test_a04_too_many_unread_events_are_dropped_and_counted(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    events = EventChannel(max_unread=4)
    listener = listening(events, address)
    ids = [ConnectionId(events) for _ in range(7)]
    caplog.set_level(logging.WARNING)
    # What a step waits for is no event of the line; so have them come as a peer's would.
    for cm_id in ids:
        publish(events, ConnectionEvent(events, EventType.DISCONNECTED, 0, cm_id))
    assert events.dropped_events == 3
    assert len(caplog.records) == 2  # at 1 and 2
    step = ConnectionId(events)
    await step.resolve_addr((address, listener.source_port), timeout=LIMIT_S)
    ids[3].close()  # with its event
    for expected in ids[4:]:
        event = await events.get_event(0)
        assert event is not None
        assert event.connection_id is expected
        event.ack()
    assert await events.get_event(0) is None
    for cm_id in (*ids, step, listener):
        cm_id.close()
    events.close()
    await events.wait_closed()


async def test_a04_an_unread_event_does_not_keep_a_closed_id(events: EventChannel) -> None:
    cm_id = ConnectionId(events)
    reference = weakref.ref(cm_id)
    publish(events, ConnectionEvent(events, EventType.DISCONNECTED, 0, cm_id))
    cm_id.close()
    await cm_id.wait_closed()
    del cm_id
    collect()
    # The thread that has destroyed it may have it for a moment longer.
    await until(lambda: reference() is None)
    assert await events.get_event(0) is None


@pytest.mark.parametrize("wrong", [0, -1])
async def test_a04_the_limit_is_checked(wrong: int) -> None:
    with pytest.raises(ValueError, match="max_unread"):
        EventChannel(max_unread=wrong)


async def test_i02_requests_of_a_closed_listener_are_refused(
    events: EventChannel, address: str
) -> None:
    listener = listening(events, address)
    assert await events.get_event(0) is None  # the loop reads it from now on
    clients = await asked(address, listener, 3)
    await until(lambda: len(kept_of(events)) == 3, LIMIT_S)
    listener.close()
    async with asyncio.timeout(LIMIT_S):
        await asyncio.gather(*clients)
    assert not kept_of(events)
