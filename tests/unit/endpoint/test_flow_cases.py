"""Flow control: the cases that the proof in docs/wire.md names, on the model of test_flow_model."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aiordma.endpoint.config import CONTROL_SLOTS, ConnectionConfig
from aiordma.endpoint.wire import FRAME, FrameKind
from aiordma.errors import ConnectionLostError
from tests.inside.endpoint import end_with, sender_of, set_terms
from tests.inside.link import listeners_of

from ..conftest import run_on, settle
from .fabric import Wire
from .test_flow_model import EAGER, SLOT, Program, fake_regions, finish

__all__ = ["fake_regions"]


def kinds(frames: list[bytes]) -> list[FrameKind]:
    return [FrameKind(FRAME.unpack_from(frame)[0] & 0xF) for frame in frames]  # without the number


@pytest.mark.parametrize("depth", [2, 3, 4, 5, 64])
async def test_two_credit_frames_at_most_are_unprocessed(
    monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    config = ConnectionConfig(
        slot_size=SLOT, rendezvous_threshold=0, recv_depth=depth, send_depth=depth
    )
    wire = Wire(config, config)
    await wire.open()
    sender, receiver = (Program(end, name) for name, end in enumerate(wire.ends))
    await wire.run()
    monkeypatch.setattr(wire.links[0], "sweep", lambda: None)  # a send without room looks
    before = len(wire.links[1].sent)
    for _ in range(3):
        for _ in range(depth):
            sender.send(10)
            receiver.recv()
        # Everything but the sending side's own processing: it hears of nothing.
        for _ in range(50 * depth):
            await asyncio.sleep(0)
            link = wire.links[1]
            if link.inbound:
                link.land()
            elif link.landed:
                link.process()
            elif link.unacked:
                link.acknowledge()
            elif wire.links[0].inbound:
                wire.links[0].land()
        receiver.release()
        await settle()
    credits = kinds(wire.links[1].sent[before:])
    assert set(credits) == {FrameKind.CREDIT}
    assert 1 <= len(credits) <= 2
    monkeypatch.undo()
    await finish(wire, [sender, receiver])


async def test_credits_that_have_gone_with_a_message_do_not_go_again() -> None:
    config = ConnectionConfig(slot_size=SLOT, rendezvous_threshold=0, recv_depth=8, send_depth=8)
    wire = Wire(config, config)
    await wire.open()
    await wire.run()
    for _ in range(2):
        await wire.ends[0].send(b"x")
    await wire.run()
    for _ in range(2):
        (await wire.ends[1].recv()).release()
    before = len(wire.links[1].sent)
    for _ in range(3):
        await wire.ends[1].send(b"y")
    await asyncio.sleep(0)  # the third is posted at the end of the turn
    returned = [FRAME.unpack_from(frame)[2] for frame in wire.links[1].sent[before:]]
    assert returned == [2, 0, 0]
    await wire.run()
    await wire.close()


@pytest.mark.parametrize("between", range(4))
@pytest.mark.parametrize("depth", [16, 17, 24, 32, 64])
async def test_receives_that_wait_to_be_posted_together_hold_up_nobody(
    depth: int, between: int
) -> None:
    """Half of the window is kept by the program; a PING has changed what is posted when."""
    config = ConnectionConfig(
        slot_size=SLOT, rendezvous_threshold=0, recv_depth=depth, send_depth=depth
    )
    wire = Wire(config, config)
    await wire.open()
    sender, receiver = (Program(end, name) for name, end in enumerate(wire.ends))
    await wire.run()
    for _ in range(between):
        sender.send(10)
        receiver.recv()
        await wire.run()
    receiver.release()
    sender.ping()
    await wire.run()
    for n in range(2 * depth):
        sender.send(10)
        await wire.run()
        assert all(task.done() for _, _, task in sender.sends), f"message {n} waits for ever"
        receiver.recv()
        await wire.run()
    receiver.release()
    await finish(wire, [sender, receiver])


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_large_message_that_comes_to_be_the_first_is_fetched_for_a_task_that_waits(
    loop: str, together: bool
) -> None:
    """Two tasks wait before anything is there; the second's message is beyond the read-ahead."""

    async def main() -> None:
        config = ConnectionConfig(slot_size=SLOT, rendezvous_threshold=0, receive_buffer_size=100)
        wire = Wire(config, config)
        await wire.open()
        sender, receiver = (Program(end, name) for name, end in enumerate(wire.ends))
        for _ in range(2):
            receiver.recv()
        await settle()
        sender.send(2)
        sender.send(1000)
        await settle()
        if together:
            wire.links[1].land()
            wire.links[1].land()
            wire.links[1].sweep()
        await wire.run()
        assert receiver.got == [(0, 2), (1, 1000)]
        await finish(wire, [sender, receiver])

    run_on(loop, main())


async def test_the_worst_case_fits_to_the_last_receive() -> None:
    """All that can be under way at once is, and the peer processes nothing of it."""
    window = 8
    config = ConnectionConfig(
        slot_size=SLOT,
        rendezvous_threshold=0,
        recv_depth=4,
        send_depth=4,
        rendezvous_window=window,
    )
    wire = Wire(config, config)
    await wire.open()
    greeted = 1  # the connecting side's first CREDIT was processed long ago
    one, other = (Program(end, name) for name, end in enumerate(wire.ends))
    # The peer announces as many large messages as it may; they are fetched, DONE is due.
    for _ in range(window):
        other.send(EAGER + 1)
        one.recv()
        await wire.run()
    one.release()
    await wire.run()
    for _ in range(4):
        other.send(EAGER + 1)
    await settle()
    links = wire.links
    while links[0].inbound:
        links[0].land()
    while links[0].landed:
        links[0].process()
    for _ in range(4):
        other_read = links[0].reads
        await settle()
        while other_read:
            links[0].read()
    # Now data, a ping, an answer to a ping; nothing is processed on the other side.
    other.ping()
    for _ in range(4):
        one.send(10)
    one.ping()
    await settle()
    while links[0].inbound:
        links[0].land()
    while links[0].landed:
        links[0].process()
    await settle()
    for _ in range(200):
        if links[1].inbound:
            links[1].land()
        if links[0].unacked:
            links[0].acknowledge()
        await asyncio.sleep(0)
    found = kinds([bytes(links[1].slots.recv.slot(s, n)) for s, n, _ in links[1].landed])
    assert found.count(FrameKind.DATA) == 4
    assert found.count(FrameKind.PING) == 1
    assert found.count(FrameKind.PONG) == 1
    assert found.count(FrameKind.DONE) == 4
    assert found.count(FrameKind.CREDIT) + greeted <= 3
    assert links[1].max_unposted <= links[1].slots.recv.count
    await finish(wire, [one, other])


def test_control_slots_are_what_the_proof_counts() -> None:
    greeting, credit, ping, pong, end = 1, 2, 1, 1, 1
    assert greeting + credit + ping + pong + end == CONTROL_SLOTS
    config = ConnectionConfig(rendezvous_window=5)
    assert config.control_depth == CONTROL_SLOTS + 5


@pytest.mark.parametrize("kind", [FrameKind.PING, FrameKind.CREDIT])
async def test_a_flood_of_control_frames_costs_no_memory(kind: FrameKind) -> None:
    config = ConnectionConfig(slot_size=SLOT, rendezvous_threshold=0, recv_depth=2, send_depth=1)
    wire = Wire(config, config)
    await wire.open()
    hostile, victim = wire.links
    frame = FRAME.pack(kind, 0, 0, 0, 0)
    for _ in range(1000):  # sent by hand; the hostile side takes none of the answers
        victim.inject(frame)
    assert victim.state.has_pending <= 1
    assert len(victim.sent) <= CONTROL_SLOTS
    hostile.inbound.clear()
    victim.failure = hostile.failure = ConnectionResetError()
    for end in wire.ends:
        end_with(end, ConnectionResetError("enough"))
        await end.wait_closed()


@pytest.mark.parametrize("frame", [FrameKind.PONG, FrameKind.DONE])
async def test_frames_that_wait_for_a_slot_have_completed_sends_wake_the_loop(
    frame: FrameKind,
) -> None:
    """And no longer: mostly the loop is woken for what the peer sends alone."""
    config = ConnectionConfig(slot_size=SLOT, rendezvous_threshold=0, recv_depth=2, send_depth=1)
    wire = Wire(config, config)
    await wire.open()
    await wire.run()
    link, end = wire.links[1], wire.ends[1]
    for number in range(CONTROL_SLOTS):
        sender_of(end).control(FrameKind.DONE, number)
    assert listeners_of(link) == 0
    if frame == FrameKind.PONG:
        link.inject(FRAME.pack(FrameKind.PING, 0, 0, 0, 0))
        await settle()
    else:
        sender_of(end).control(FrameKind.DONE, CONTROL_SLOTS)
    assert (link.state.has_pending, listeners_of(link)) == (1, 1)
    wire.links[0].land()
    link.acknowledge()
    await settle()
    assert kinds(link.sent)[-1] == frame
    assert (link.state.has_pending, listeners_of(link)) == (0, 0)
    await wire.lose()


async def test_the_model_finds_an_overrun() -> None:
    """The model itself: a side that spends credits it does not have is caught."""
    config = ConnectionConfig(
        slot_size=SLOT, rendezvous_threshold=0, recv_depth=2, send_depth=64, rendezvous_window=1
    )
    wire = Wire(config, config)
    await wire.open()
    set_terms(wire.links[0].state, credits=1000)
    sends: list[asyncio.Task[Any]] = [
        asyncio.create_task(wire.ends[0].send(b"x")) for _ in range(20)
    ]
    results = await asyncio.gather(*sends, return_exceptions=True)
    assert any(isinstance(result, ConnectionLostError) for result in results)
    assert "receives posted" in str(wire.links[0].failure)
    for end in wire.ends:
        end_with(end, ConnectionResetError("enough"))
        await end.wait_closed()
