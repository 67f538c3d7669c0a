"""The end of a connection on the model of the adapter: what has to arrive before what."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable

import pytest

from aiordma.endpoint.config import ConnectionConfig
from aiordma.endpoint.wire import FRAME, FrameKind
from aiordma.errors import ConnectionEndedError
from tests.inside.endpoint import ending_of

from ..conftest import settle
from .fabric import FakeLink, Wire
from .test_flow_model import SLOT, fake_regions

__all__ = ["fake_regions"]


def kinds(frames: list[bytes]) -> list[FrameKind]:
    return [FrameKind(FRAME.unpack_from(frame)[0]) for frame in frames]


async def opened() -> Wire:
    config = ConnectionConfig(slot_size=SLOT, rendezvous_threshold=0, recv_depth=8, send_depth=8)
    wire = Wire(config, config)
    await wire.open()
    await wire.run()
    return wire


def note_disconnect(link: FakeLink) -> list[int]:
    """What of the link's sends was still under way at each disconnection."""
    seen: list[int] = []
    disconnect: Callable[[], None] = link.cm_id.start_disconnect

    def noting() -> None:
        seen.append(len(link.busy))
        disconnect()

    link.cm_id.start_disconnect = noting
    return seen


async def test_i06_close_waits_until_the_peers_adapter_has_the_end() -> None:
    """Whoever disconnects before that breaks the queue pair with END in it."""
    wire = await opened()
    link, peer = wire.links
    seen = note_disconnect(link)
    await wire.ends[0].send(b"last words")
    await wire.run()
    closing = asyncio.create_task(wire.ends[0].close())
    for _ in range(10):
        while peer.inbound:
            peer.land()
        while link.unacked and kinds(link.sent)[-1] != FrameKind.END:
            link.acknowledge()
        await settle()
    assert kinds(link.sent)[-1] == FrameKind.END
    assert seen == [], "it has disconnected, and END may not have arrived"
    assert not closing.done()
    link.acknowledge()
    await wire.run()
    assert seen == [0]
    await closing
    with await wire.ends[1].recv() as message:
        assert bytes(message) == b"last words"
    with pytest.raises(ConnectionEndedError):
        await wire.ends[1].recv()
    await wire.close()


async def test_i06_a_large_message_goes_before_the_end() -> None:
    wire = await opened()
    link = wire.links[0]
    seen = note_disconnect(link)
    sending = asyncio.create_task(wire.ends[0].send(bytes(10 * SLOT)))
    await settle()
    closing = asyncio.create_task(wire.ends[0].close())
    # All but the READ.
    for _ in range(20):
        for name, side in wire.steps():
            if name != "read":
                wire.step((name, side))
        await settle()
    assert FrameKind.END not in kinds(link.sent), "the peer has not read the message"
    assert seen == []
    await wire.run()
    await sending
    await closing
    assert kinds(link.sent)[-1] == FrameKind.END
    with await wire.ends[1].recv() as message:
        assert len(message) == 10 * SLOT
    await wire.close()


async def test_an_end_that_is_canceled_before_its_first_step_begins_again() -> None:
    """A loop that ends cancels all tasks: what was sent is lost if the queue pair goes at once."""
    wire = await opened()
    link = wire.links[0]
    await wire.ends[0].send(b"last words")
    wire.ends[0].abort()
    ending_of(wire.ends[0]).cancel()
    await settle()
    assert not link.closed, "what was sent has not arrived"
    await wire.run()
    await wire.ends[0].wait_closed()
    assert link.closed
    with await wire.ends[1].recv() as message:
        assert bytes(message) == b"last words"
    await wire.close()


async def lose(wire: Wire) -> None:
    wire.links[0].fail(ConnectionResetError(errno.ECONNRESET, "lost"))


async def peer_closes(wire: Wire) -> None:
    task = asyncio.create_task(wire.ends[1].close())
    await wire.run()
    await task


async def peer_aborts(wire: Wire) -> None:
    wire.ends[1].abort()
    await wire.run()


async def abort(wire: Wire) -> None:
    wire.ends[0].abort()


async def begin_close(wire: Wire) -> None:
    """END never arrives: the end takes long."""
    asyncio.get_running_loop().call_soon(close_soon, wire)


def close_soon(wire: Wire) -> None:
    task = asyncio.create_task(wire.ends[0].close())
    closing.add(task)
    task.add_done_callback(closing.discard)


closing: set[asyncio.Task[None]] = set()


@pytest.mark.parametrize("end", [lose, peer_closes, peer_aborts, abort, begin_close])
async def test_the_wait_for_the_end_returns_when_it_begins(
    end: Callable[[Wire], Awaitable[None]],
) -> None:
    """For all that wait, at once, and also for those that come later."""
    wire = await opened()
    connection = wire.ends[0]
    waits = [asyncio.create_task(connection.wait_closing()) for _ in range(3)]
    await settle()
    waits.pop().cancel()
    await settle()
    assert not any(wait.done() for wait in waits)
    await end(wire)
    for _ in range(20):
        if connection.is_closing():
            break
        await asyncio.sleep(0)
    assert connection.is_closing()
    await settle(3)
    assert all(wait.done() for wait in waits), "it is late"
    await connection.wait_closing()
    if end is begin_close:
        assert closing, "it waits for the peer"
    await wire.lose()
    await connection.wait_closing()
    await asyncio.gather(*waits, *closing)


async def test_the_end_of_the_peers_messages_is_no_end() -> None:
    wire = await opened()
    waiting = asyncio.create_task(wire.ends[0].wait_closing())
    saying = asyncio.create_task(wire.ends[1].send_eof())
    await wire.run()
    await saying
    assert not waiting.done()
    await peer_closes(wire)
    await waiting
    await wire.lose()
