"""A completion event that the kernel drops: the safety poll finds the completion, and counts it."""

from __future__ import annotations

import asyncio
import contextlib
import select
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import aiordma
from aiordma._ffi import ffi, lib
from aiordma.verbs.comp_channel import CompletionChannel
from tests.device.ends import Ends
from tests.device.meeting import paired
from tests.device.oracle import until
from tests.inside.link import channel_of, count_processors, poller_of
from tests.inside.streams import port_of
from tests.inside.verbs import (
    handle_of,
    poll_an_idle_channel_every,
    poll_for_safety,
    poll_for_safety_every,
    pump_of,
    safety_of,
    watch_again,
)

pytestmark = pytest.mark.device


@pytest.fixture(autouse=True)
async def counted() -> AsyncIterator[None]:
    """What these tests lose on purpose is no fault."""
    before = CompletionChannel.all_lost_events
    yield
    CompletionChannel.all_lost_events = before


@contextmanager
def deaf(channel: CompletionChannel) -> Iterator[None]:
    """Events that come in this block are lost."""
    pump = pump_of(channel)
    pump.kick()  # what was there before is not
    pump.pause()
    try:
        yield
        found = select.select([channel.fileno()], [], [], 10)[0]
        assert found, "no event has come"
        cq, context = ffi.new("struct ibv_cq **"), ffi.new("void **")
        while not lib.ibv_get_cq_event(handle_of(channel), cq, context):
            lib.ibv_ack_cq_events(cq[0], 1)
    finally:
        pump.resume()


async def until_judged(channel: CompletionChannel, before: int) -> int:
    """How many have been lost since; the safety poll looks once a second."""
    with contextlib.suppress(TimeoutError):
        await until(lambda: channel.lost_events > before, 5)
    assert channel.lost_events > before, "polling has found it, and it does not count"
    return channel.lost_events - before


async def test_i03_of_a_connection(pair: tuple[aiordma.Connection, aiordma.Connection]) -> None:
    """Its queue is armed for what the peer sends alone, on Soft-RoCE."""
    client, server = pair
    channel = channel_of(server)
    before = channel.lost_events
    receiving = asyncio.create_task(server.recv())
    await asyncio.sleep(0)
    with deaf(channel):
        await client.send(b"unheard")
    async with asyncio.timeout(10):
        with await receiving as message:
            assert bytes(message) == b"unheard"
    assert await until_judged(channel, before) >= 1
    # And the queue is armed again: the next comes without the poll.
    with pytest.MonkeyPatch.context() as patch:
        poll_for_safety_every(patch, 60.0)
        watch_again(channel)
        lost = channel.lost_events
        receiving = asyncio.create_task(server.recv())
        await asyncio.sleep(0)
        await client.send(b"heard")
        done, _ = await asyncio.wait([receiving], timeout=5)
        receiving.cancel()
        assert done, "no event has come: the queue is not armed"
        with receiving.result() as message:
            assert bytes(message) == b"heard"
        assert channel.lost_events == lost
    watch_again(channel)


async def test_i03_of_a_connection_that_is_idle(
    pair: tuple[aiordma.Connection, aiordma.Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """C finds it, where Python is not called for empty queues."""
    client, server = pair
    channel = channel_of(server)
    before = channel.lost_events
    poll_an_idle_channel_every(monkeypatch, 0.5)
    watch_again(channel)
    receiving = asyncio.create_task(server.recv())
    await asyncio.sleep(1.2)  # the events of the handshake are seen
    with deaf(channel):
        await client.send(b"unheard")
    async with asyncio.timeout(10):
        with await receiving as message:
            assert bytes(message) == b"unheard"
    assert await until_judged(channel, before) >= 1
    receiving = asyncio.create_task(server.recv())
    await asyncio.sleep(0)
    await client.send(b"heard")
    async with asyncio.timeout(10):
        with await receiving as message:
            assert bytes(message) == b"heard"


async def lose_event_of_stream(address: str) -> CompletionChannel:
    """The channel of the stream, which has found the bytes without their event."""
    served: asyncio.Queue[Any] = asyncio.Queue()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await served.put((reader, writer))

    async with await aiordma.start_server(serve, address, 0) as server:
        _, writer = await aiordma.open_connection(address, server.port)
        its_reader, its_writer = await served.get()
        channel = channel_of(port_of(its_writer.transport))
        before = channel.lost_events
        reading = asyncio.create_task(its_reader.readexactly(7))
        await asyncio.sleep(0)
        with deaf(channel):
            writer.write(b"unheard")
        async with asyncio.timeout(10):
            assert await reading == b"unheard"
        assert await until_judged(channel, before) >= 1
        for each in (writer, its_writer):
            each.close()
            await each.wait_closed()
    return channel


async def test_i03_of_a_stream(address: str) -> None:
    await lose_event_of_stream(address)


async def test_i03_of_a_stream_beside_a_connection_that_spins(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its queue is polled all the time; the queue of the stream is not."""
    count_processors(monkeypatch, 2, 2)
    # On software iWARP a connection and a stream would share a queue.
    config = aiordma.ConnectionConfig(wait="spin", spin_us=1_000_000, shared_queues=False)
    async with paired(address, config) as (client, _):

        async def wait_on() -> None:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.2):
                        await client.recv()

        waiting = asyncio.create_task(wait_on())
        assert await lose_event_of_stream(address) is channel_of(client)
        poller = poller_of(client)
        assert poller is not None
        # Not at once: the task may be between two waits.
        async with asyncio.timeout(10):
            await until(lambda: poller.asked)
        waiting.cancel()
        await asyncio.wait([waiting])


async def test_i03_of_a_native_queue(ends: Ends) -> None:
    cq, channel = ends.server.cq, ends.server.channel
    region = ends.server.region(bytearray(64))
    receiving = asyncio.create_task(ends.server.qp.recv(region))
    await asyncio.sleep(0)
    assert cq.managed
    with deaf(channel):
        await ends.client.qp.send(ends.client.region(bytearray(b"unheard")))
    async with asyncio.timeout(10):
        await receiving
    assert await until_judged(channel, 0) == 1


async def test_i03_an_event_that_is_only_late_is_not_counted(ends: Ends) -> None:
    """What is polled before its event has come was not lost."""
    channel = ends.server.channel
    region = ends.server.region(bytearray(64))
    receiving = asyncio.create_task(ends.server.qp.recv(region))
    await asyncio.sleep(0)
    pump = pump_of(channel)
    pump.pause()
    await ends.client.qp.send(ends.client.region(bytearray(b"late")))
    poll_for_safety(channel)
    await receiving
    pump.resume()
    judging = safety_of(channel)
    await until(lambda: safety_of(channel) is not judging)
    assert channel.lost_events == 0
