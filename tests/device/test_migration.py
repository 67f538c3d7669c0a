"""Moving an id to another event channel."""

from __future__ import annotations

import asyncio
import errno

import pytest

from aiordma.cm import (
    ConnectionId,
    EventChannel,
    EventType,
    PortSpace,
    Stage,
)
from aiordma.errors import RdmaOSError, ResourceClosedError
from tests.device.closing import Hall

pytestmark = pytest.mark.device

NOBODY = "10.80.0.77"


# Migrating an id to another channel


async def kinds(channel: EventChannel, count: int) -> list[EventType]:
    """The next events, acknowledged."""
    found = []
    for _ in range(count):
        event = await channel.get_event(5)
        assert event is not None
        event.ack()
        found.append(event.type)
    assert await channel.get_event(0.05) is None
    return found


async def test_events_before_and_after_a_migration(address: str) -> None:
    async with EventChannel() as old, EventChannel() as new, ConnectionId(old) as cm_id:
        await cm_id.resolve_addr((address, 7471), timeout=5)
        cm_id.migrate(new)
        assert cm_id.event_channel is new
        cm_id.migrate(new)  # where it is already
        await cm_id.resolve_route(timeout=5)
        # A step's answer is taken by the step; who waits for events beside it sees it too.
        assert await kinds(old, 0) == []
        assert await kinds(new, 0) == []
        cm_id.migrate(old)
        old.unacked  # noqa: B018
        cm_id.close()
        new.destroy()
        old.destroy()


async def test_a_step_under_way_goes_on(address: str) -> None:
    async with EventChannel() as old, EventChannel() as new, ConnectionId(old) as cm_id:
        seen = aiter(new)
        resolving = asyncio.create_task(cm_id.resolve_addr((address, 7471), timeout=5))
        await asyncio.sleep(0)  # the call is made, its answer not read
        cm_id.migrate(new)
        await resolving
        assert cm_id.stage is Stage.ADDRESS_RESOLVED
        assert (await anext(seen)).type == EventType.ADDR_RESOLVED
        assert await kinds(old, 0) == []


async def test_a_way_that_is_being_found_goes_on(address: str) -> None:
    async with EventChannel() as old, EventChannel() as new, ConnectionId(old) as cm_id:
        number = cm_id.number
        finding = asyncio.create_task(cm_id.find((address, 7471), timeout=5))
        await asyncio.sleep(0)  # the address is asked for, and the id goes on by itself
        cm_id.migrate(new)
        await finding
        assert cm_id.stage is Stage.ROUTE_RESOLVED
        assert cm_id.number == number


async def test_unacknowledged_events_refuse_a_migration(hall: Hall) -> None:
    client, server = await hall.connected(await_=False)
    old, other = client.cm_id.event_channel, EventChannel()
    await server.cm_id.disconnect()
    event = await old.get_event(5)
    assert event is not None
    assert event.type == EventType.DISCONNECTED
    with pytest.raises(RdmaOSError, match="1 events of the connection id"):
        client.cm_id.migrate(other)
    assert client.cm_id.event_channel is old
    event.ack()
    client.cm_id.migrate(other)
    assert client.cm_id.event_channel is other
    old.destroy()
    for end in (client, server):
        end.close()
        await end.ended()
    other.destroy()


async def test_what_cannot_be_migrated(hall: Hall) -> None:
    other = EventChannel()
    with pytest.raises(OSError, match="the id is listening") as caught:
        hall.listener.migrate(other)
    assert caught.value.errno == errno.EINVAL
    cm_id = ConnectionId(other, PortSpace.TCP)
    with pytest.raises(TypeError, match="not an event channel"):
        cm_id.migrate(None)  # type: ignore[arg-type]
    closed = EventChannel()
    closed.close()
    with pytest.raises(ResourceClosedError):
        cm_id.migrate(closed)
    assert cm_id.event_channel is other
    cm_id.close()
    with pytest.raises(ResourceClosedError):
        cm_id.migrate(hall.events)
    other.close()


async def test_no_event_is_lost_in_a_migration(hall: Hall) -> None:
    """The peer disconnects in the very moment; the event is on one of the channels, once."""
    old_ones = 0
    for number in range(40):
        client, server = await hall.connected(await_=False)
        old = client["event channel"]
        assert isinstance(old, EventChannel)
        new = EventChannel()
        seen = [aiter(old), aiter(new)]
        server.cm_id.start_disconnect()
        for _ in range(number % 8):
            await asyncio.sleep(0)
        client.cm_id.migrate(new)
        await client.disconnected()
        old.close()
        new.close()
        found = [[e.type async for e in channel] for channel in seen]
        assert sum(part_.count(EventType.DISCONNECTED) for part_ in found) == 1, found
        old_ones += found[0].count(EventType.DISCONNECTED)
        for end in (client, server):
            end.close()
            await end.ended()
        await new.wait_closed()
    print(f"{old_ones} of 40 on the old channel")
