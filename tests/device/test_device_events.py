"""What a device tells of itself, and what its end does to those who use it.

A port goes down here and comes up again, and nothing is sent in between; what fails while a card is
down is in tests/guests/test_device_removal.py, where each test has a guest of its own.

A kernel that takes a device away from its users says so through the device's descriptor.  Software
devices are not taken away, so that here the descriptor is made to say it; everything else is real.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

import aiordma
from aiordma import ConnectionConfig
from aiordma._ffi import lib
from aiordma.cm import ConnectionEvent, EventType
from aiordma.errors import DeviceRemovedError, FlushedError
from aiordma.verbs import (
    AsyncEventType,
    Context,
    PortState,
    RecvWR,
    SharedReceiveQueue,
    async_event,
)
from aiordma.verbs.async_event import AsyncEvent, DeviceEvents
from aiordma_softroce.network import ADDRESS_V6
from tests.device.closing import Hall
from tests.device.meeting import Pair, talk_both_ways
from tests.device.oracle import until
from tests.device.shared import attributes
from tests.inside.endpoint import iterators_of, link_of
from tests.inside.verbs import read_device_events, subscriptions

pytestmark = pytest.mark.device

CARD = "dummy0"


async def ip(*words: str) -> None:
    await asyncio.to_thread(subprocess.run, ["ip", *words], check=True)


@pytest.fixture
def context() -> Iterator[Context]:
    """The device, opened for this test alone."""
    with aiordma.devices()[0].open() as context:
        yield context


async def kinds(events: AsyncIterator[Any], last: Any) -> list[Any]:
    """Types of the events up to the first of type `last`."""
    found = []
    async with asyncio.timeout(10):
        async for event in events:
            found.append(event.type)
            if event.type == last:
                break
    return found


async def down(context: Context) -> None:
    await ip("link", "set", "dev", CARD, "down")
    await until(lambda: context.query_port(1).state == PortState.DOWN)


async def up(context: Context, *, has_gids: bool) -> None:
    """The card as it was: going down has cost it its IPv6 addresses."""
    await ip("link", "set", "dev", CARD, "up")
    await ip("-6", "address", "replace", f"{ADDRESS_V6}/64", "dev", CARD, "nodad")
    await until(lambda: context.query_port(1).state == PortState.ACTIVE)
    if has_gids:
        await until(lambda: ADDRESS_V6 in {str(entry) for entry in context.gid_table()})


@pytest.mark.kernel
async def test_a_port_goes_down_and_up(context: Context, pair: Pair, is_siw: bool) -> None:
    """Every watcher is told; a connection that is idle meanwhile survives."""
    client, server = pair
    with DeviceEvents(context) as mine, client.events() as theirs, server.events() as others:
        try:
            await down(context)
            for events in (mine, theirs, others):
                assert AsyncEventType.PORT_ERR in await kinds(events, AsyncEventType.PORT_ERR)
        finally:
            await up(context, has_gids=not is_siw)
        for events in (mine, theirs, others):
            assert AsyncEventType.PORT_ACTIVE in await kinds(events, AsyncEventType.PORT_ACTIVE)
    await client.send(b"still here")
    assert bytes(await server.recv()) == b"still here"


@pytest.mark.kernel
async def test_a_gid_comes_and_goes(context: Context, pair: Pair, is_siw: bool) -> None:
    """Software iWARP tells nothing of it."""

    def gids() -> set[str]:
        return {str(entry) for entry in context.gid_table()}

    def here(gid: str) -> bool:
        return gid in gids()

    def not_here(gid: str) -> bool:
        return gid not in gids()

    with DeviceEvents(context) as mine, pair[0].events() as theirs:
        before = gids()
        for action, there in (("add", here), ("del", not_here)):
            await ip("address", action, "10.81.0.1/24", "dev", CARD)
            if is_siw:
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.3):
                        await anext(mine)
                assert gids() == before
                continue
            for events in (mine, theirs):
                assert await kinds(events, AsyncEventType.GID_CHANGE)
            await until(functools.partial(there, "::ffff:10.81.0.1"))
        assert gids() == before


@pytest.mark.kernel
@pytest.mark.one_loop
async def test_the_address_of_a_connection_goes_away(
    context: Context, pair: Pair, is_siw: bool
) -> None:
    """The connection ends or goes on, and nobody waits for ever; those of others go on."""
    host = "10.81.0.2"
    config = ConnectionConfig(
        ack_timeout=14, keepalive_s=0.5, idle_timeout_s=1.5, close_timeout_s=1
    )
    await ip("address", "add", f"{host}/24", "dev", CARD)
    there = True
    try:
        if not is_siw:  # the kernel gives the device the GID a moment later
            await until(lambda: f"::ffff:{host}" in {str(gid) for gid in context.gid_table()})
        async with (
            aiordma.listen(host, 0, config=config) as listener,
            aiordma.connect(host, listener.port, config=config) as client,
        ):
            server = await listener.accept()
            await client.send(b"before")
            assert bytes(await server.recv()) == b"before"
            await ip("address", "del", f"{host}/24", "dev", CARD)
            there = False
            async with asyncio.timeout(20):
                with contextlib.suppress(aiordma.ConnectionLostError):
                    await client.send(b"after")
                    assert bytes(await server.recv()) == b"after"
                    await server.send(b"answer")
                    assert bytes(await client.recv()) == b"answer"
            await server.close()
        await talk_both_ways(pair, 3, lambda rng: rng.choice((1, 5000)))
    finally:
        if there:
            await ip("address", "del", f"{host}/24", "dev", CARD)


@pytest.mark.kernel
async def test_the_mtu_changes_under_a_connection(
    context: Context, pair: Pair, is_siw: bool
) -> None:
    """What is connected goes on with the packets of before."""
    before = context.query_port(1).active_mtu
    await ip("link", "set", "dev", CARD, "mtu", "1500")
    try:
        if not is_siw:
            await until(lambda: context.query_port(1).active_mtu < before)
        await talk_both_ways(pair, 20, lambda rng: rng.choice((1, 5000, 60_000)))
    finally:
        await ip("link", "set", "dev", CARD, "mtu", "9000")
        await until(lambda: context.query_port(1).active_mtu == before)
    await talk_both_ways(pair, 20, lambda rng: rng.choice((1, 5000, 60_000)))


# Connection.events()


async def test_events_of_a_connection_and_their_end(pair: Pair) -> None:
    client, server = pair
    mine, theirs = client.events(), server.events()
    abandoned = client.events()
    waiting = asyncio.create_task(anext(theirs))
    await asyncio.sleep(0)
    await client.close()
    event = await waiting
    assert isinstance(event, ConnectionEvent)
    assert event.type == EventType.DISCONNECTED
    await server.wait_closed()
    assert [event async for event in theirs] == []
    assert [event.type async for event in mine] == [EventType.DISCONNECTED]
    with pytest.raises(StopAsyncIteration):
        await anext(mine)
    # Too late: over at once.
    assert [event async for event in client.events()] == []
    abandoned.close()


async def test_a_canceled_reader_loses_no_event(pair: Pair) -> None:
    client, server = pair
    with server.events() as events:
        waiting = asyncio.create_task(anext(events))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await client.close()
        assert (await anext(events)).type == EventType.DISCONNECTED


async def test_a_forgotten_iterator_is_forgotten(pair: Pair) -> None:
    client, _ = pair
    client.events()
    assert not iterators_of(client)
    assert len(subscriptions()) == 1
    await client.close()
    assert not subscriptions()


# The end of a device


class Unplugged:
    """The library, except that a device's descriptor says what that of an unplugged one does."""

    def __init__(self, lib: Any, answers: list[int]) -> None:
        self._lib = lib
        self._answers = answers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lib, name)

    def aio_async_next(self, context: Any, event: Any) -> int:
        """DEVICE_FATAL, or a negative errno, as the list says."""
        if not self._answers:
            return -errno.EAGAIN
        answer = self._answers.pop(0)
        if answer < 0:
            return answer
        event.type, event.port, event.element, event.token = answer, 0, 0, 0
        return 0


@pytest.fixture
def unplug(monkeypatch: pytest.MonkeyPatch) -> Callable[[Context, list[int]], None]:
    def unplug(context: Context, answers: list[int]) -> None:
        monkeypatch.setattr(async_event, "lib", Unplugged(lib, answers))
        read_device_events(context)

    return unplug


Unplug = Callable[[Context, list[int]], None]
FATAL = int(AsyncEventType.DEVICE_FATAL)


@pytest.mark.parametrize("answers", [[FATAL], [-errno.EIO], [FATAL, -errno.EIO]])
async def test_connections_of_a_device_that_ends(
    address: str, unplug: Unplug, answers: list[int]
) -> None:
    config = ConnectionConfig(slot_size=4096, rendezvous_threshold=0, receive_buffer_size=64 * 1024)
    async with aiordma.listen(address, 0, config=config) as listener:
        client = await aiordma.connect(address, listener.port, config=config)
        server = await listener.accept()
    context = link_of(client).context
    events = client.events()
    await client.send(bytes(10_000))
    waiting = (
        client.recv(),
        client.send(bytes(10_000)),  # until the peer takes the one before
        anext(aiter(client)),
    )
    tasks = [asyncio.create_task(call) for call in waiting]
    await asyncio.sleep(0.1)
    unplug(context, list(answers))
    if answers[-1] == -errno.EIO:
        with pytest.raises(DeviceRemovedError):
            DeviceEvents(context)
    async with asyncio.timeout(5):
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, DeviceRemovedError), repr(result)
            assert result.errno == errno.ENODEV
            assert "device" in str(result)
    assert len(await server.recv()) == 10_000  # what had arrived
    for call in (client.recv(), server.recv(), client.send(b"late"), server.send(b"late")):
        with pytest.raises(DeviceRemovedError):
            await call
    await server.flush()  # it has sent nothing that could be lost
    began = time.monotonic()
    await asyncio.gather(client.close(), server.close())
    assert time.monotonic() - began < 15
    found = [event.type async for event in events]
    # Beside what the connection manager says, in either order; the first may end the iterator.
    assert 1 <= found.count(AsyncEventType.DEVICE_FATAL) <= len(answers)


async def test_native_waits_on_a_device_that_ends(
    address: str, unplug: Unplug, is_siw: bool
) -> None:
    hall = Hall(address)
    client, server = await hall.connected()
    context = client.cm_id.context
    assert context is not None
    watching = asyncio.create_task(_collect(DeviceEvents(context)))
    srq = low = None
    if not is_siw and attributes().max_srq:
        srq = SharedReceiveQueue(client["pd"], max_wr=4)  # type: ignore[arg-type]
        srq.post_recv(RecvWR(wr_id=1))
        low = asyncio.create_task(srq.low_water(1))
    await asyncio.sleep(0.05)
    unplug(context, [FATAL, -errno.EIO])
    async with asyncio.timeout(5):
        for end in (client, server):
            received, completions = await asyncio.gather(*end.waiting[:2], return_exceptions=True)
            assert isinstance(received, FlushedError)
            assert isinstance(received.__cause__, DeviceRemovedError)
            assert isinstance(completions, DeviceRemovedError)
        events = await watching
        if srq is not None and low is not None:
            with pytest.raises(DeviceRemovedError):
                await low
            srq.close()
    assert [event.type for event in events] == [AsyncEventType.DEVICE_FATAL] * 2
    for end in (client, server):
        end.close()
        await end.ended()
    await hall.close()


async def _collect(events: DeviceEvents) -> list[AsyncEvent]:
    with events:
        return [event async for event in events]
