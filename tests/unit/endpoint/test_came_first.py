"""What came before the end of a connection counts, although the program hears of it later."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from aiordma.endpoint.config import ConnectionConfig
from aiordma.endpoint.wire import FRAME, FrameKind
from aiordma.errors import ConnectionEndedError, ConnectionLostError, ResourceClosedError
from tests.inside.endpoint import exposer_of

from ..conftest import LIMIT_S, settle
from ..memory.fake_memory import FakeRegion
from .fabric import FakeLink, Wire
from .test_flow_model import SLOT, fake_regions

__all__ = ["fake_regions"]


async def opened(**settings: Any) -> Wire:
    config = ConnectionConfig(
        slot_size=SLOT, rendezvous_threshold=0, recv_depth=8, send_depth=8, **settings
    )
    wire = Wire(config, config)
    await wire.open()
    await wire.run()
    return wire


def land_all(link: FakeLink) -> None:
    """What is on its way to this side arrives, and nobody has looked yet."""
    while link.inbound:
        link.land()


def kinds(frames: list[bytes]) -> list[int]:
    return [FRAME.unpack_from(frame)[0] for frame in frames]


def disconnect(link: FakeLink) -> None:
    """The peer's disconnection is read; the sweep before it takes what has completed."""
    link.cm_id.start_disconnect()


def fail(link: FakeLink) -> None:
    """A failure is the last completion of the drain that brings the others."""
    link.acknowledge_and_fail()


ENDS = pytest.mark.parametrize("end", [disconnect, fail])


@ENDS
async def test_a_flush_that_waits_ends_well(end: Callable[[FakeLink], None]) -> None:
    wire = await opened()
    client, link = wire.ends[0], wire.links[0]
    await client.send(b"message")
    flushing = asyncio.create_task(client.flush())
    await settle()
    land_all(wire.links[1])
    end(link)
    await flushing
    assert client.is_closing(), "the connection has ended first"
    await client.flush()
    with pytest.raises(ConnectionLostError):
        await client.send(b"more")
    await wire.lose()


@pytest.mark.parametrize("begins", ["before the end", "behind it"])
async def test_a_disconnection_that_overtakes_an_acknowledgement(begins: str) -> None:
    """As on Soft-RoCE: the peer's adapter has the message, and this side's tells of it later."""
    wire = await opened()
    client, link = wire.ends[0], wire.links[0]
    await client.send(b"message")
    flushing = asyncio.create_task(client.flush()) if begins == "before the end" else None
    await settle()
    disconnect(link)
    await settle()
    assert client.is_closing()
    flushing = flushing or asyncio.create_task(client.flush())
    await settle()
    assert not flushing.done()
    assert not link.closed
    land_all(wire.links[1])
    link.acknowledge()
    await flushing
    await wire.lose()


@ENDS
async def test_a_flush_raises_for_what_has_not_arrived(end: Callable[[FakeLink], None]) -> None:
    wire = await opened()
    client, link = wire.ends[0], wire.links[0]
    await client.send(b"message")
    flushing = asyncio.create_task(client.flush())
    await settle()
    end(link)
    for call in (flushing, client.flush()):
        with pytest.raises(ConnectionLostError):
            await call
    await wire.lose()


@ENDS
async def test_a_flush_does_not_wait_for_credits(end: Callable[[FakeLink], None]) -> None:
    """This side has sent frames of the library alone, and they have not arrived."""
    wire = await opened()
    (client, server), link = wire.ends, wire.links[0]
    for _ in range(8):
        await server.send(b"message")
        await wire.run()
    said = len(link.sent)
    for _ in range(8):
        assert bytes(await client.recv()) == b"message"
    await settle()
    assert kinds(link.sent[said:]) != [], "no credits are under way"
    async with asyncio.timeout(LIMIT_S):
        await client.flush()
    end(link)
    await client.flush()
    await wire.lose()


@ENDS
async def test_the_end_of_the_messages_is_said_well(end: Callable[[FakeLink], None]) -> None:
    wire = await opened()
    client, link = wire.ends[0], wire.links[0]
    await client.send(b"message")
    saying = asyncio.create_task(client.send_eof())
    while kinds(link.sent)[-1] != FrameKind.END:
        land_all(wire.links[1])
        while link.unacked:
            link.acknowledge()
        await settle()
    land_all(wire.links[1])
    assert not saying.done()
    end(link)
    await saying
    assert client.is_closing(), "the connection has ended first"
    await client.send_eof()
    await client.close()
    with pytest.raises((ResourceClosedError, ConnectionLostError)):
        await client.send(b"more")
    await wire.lose()


async def test_the_end_of_the_messages_cannot_be_said_after_the_end() -> None:
    wire = await opened()
    disconnect(wire.links[0])
    await settle()
    with pytest.raises(ConnectionLostError):
        await wire.ends[0].send_eof()
    await wire.lose()


@pytest.mark.parametrize("arrives", [True, False])
async def test_a_peer_that_has_closed_needs_no_end_of_the_messages(arrives: bool) -> None:
    """But it gets all messages, or the call raises."""
    wire = await opened()
    client, link = wire.ends[0], wire.links[0]
    closing = asyncio.create_task(wire.ends[1].close())
    while FrameKind.END not in kinds(wire.links[1].sent):
        await settle()
    await client.send(b"message")
    if arrives:
        land_all(wire.links[1])
    land_all(link)
    disconnect(link)
    await settle()
    assert client.is_closing()
    for _ in range(2):
        if arrives:
            await client.send_eof()
        else:
            with pytest.raises(ConnectionLostError):
                await client.send_eof()
    closing.cancel()
    await wire.lose()


async def test_a_flush_of_a_closed_connection_is_refused() -> None:
    """All has arrived; but to call it is a mistake of the program."""
    wire = await opened()
    await wire.ends[0].send(b"message")
    await wire.close()
    for call in (wire.ends[0].flush(), wire.ends[0].send_eof()):
        with pytest.raises(ResourceClosedError):
            await call


async def with_a_large_message() -> tuple[Wire, asyncio.Task[None]]:
    """The peer has read it, and its answer has landed, but was not looked at."""
    wire = await opened()
    sending = asyncio.create_task(wire.ends[0].send(bytes(10 * SLOT)))
    receiving = asyncio.create_task(wire.ends[1].recv())
    while not receiving.done():
        for name, side in wire.steps():
            if (name, side) != ("process", 0):
                wire.step((name, side))
        await settle()
    (await receiving).release()
    land_all(wire.links[0])
    assert len(exposer_of(wire.ends[0])) == 1
    return wire, sending


async def test_a_large_message_that_was_read_is_sent() -> None:
    wire, sending = await with_a_large_message()
    wire.links[0].acknowledge_and_fail(process=True)
    await sending
    assert wire.ends[0].is_closing()
    await wire.lose()


async def test_the_end_of_the_peers_messages_comes_before_a_failure() -> None:
    wire = await opened()
    await wire.ends[1].send(b"last")
    saying = asyncio.create_task(wire.ends[1].send_eof())
    while kinds(wire.links[1].sent)[-1] != FrameKind.END:
        land_all(wire.links[0])
        while wire.links[1].unacked:
            wire.links[1].acknowledge()
        await settle()
    land_all(wire.links[0])
    wire.links[0].acknowledge_and_fail(process=True)
    with await wire.ends[0].recv() as message:
        assert bytes(message) == b"last"
    with pytest.raises(ConnectionEndedError):
        await wire.ends[0].recv()
    saying.cancel()
    await wire.lose()


async def test_a_slow_deregistration_is_no_stall_of_the_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The peer has taken everything within its time; the memory takes longer."""
    gone = asyncio.Event()

    async def never(region: FakeRegion, timeout: float = LIMIT_S) -> None:
        await gone.wait()

    wire = await opened(stall_timeout_s=0.05)
    monkeypatch.setattr(FakeRegion, "wait_closed", never)
    monkeypatch.setattr("aiordma.endpoint.large.exposure.INLINE_BYTES", 0)
    sending = asyncio.create_task(wire.ends[0].send(bytes(10 * SLOT)))
    receiving = asyncio.create_task(wire.ends[1].recv())
    await wire.run()
    (await receiving).release()
    late = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(0.1, late.set_result, None)
    await late  # time has to pass
    gone.set()
    await sending
    await wire.lose()
