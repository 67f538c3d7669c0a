"""Messages that go through several slots, on the model of the adapter."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aiordma._core import FRAME_MORE
from aiordma.endpoint.config import ConnectionConfig
from aiordma.endpoint.wire import FRAME, FRAME_SIZE, FrameKind
from aiordma.errors import ProtocolError
from tests.inside.endpoint import receiver_of, set_terms, state_of

from ..conftest import settle
from .fabric import FakeLink, LeftConnection, Wire

SLOT = 64
EAGER = SLOT - FRAME_SIZE
KIB = 1024


def config_of(**settings: Any) -> ConnectionConfig:
    values: dict[str, Any] = {"slot_size": SLOT, "recv_depth": 16, "send_depth": 16}
    return ConnectionConfig(**values | settings)


async def opened(one: ConnectionConfig, other: ConnectionConfig | None = None) -> Wire:
    wire = Wire(one, other or one)
    await wire.open()
    await wire.run()
    return wire


def kinds(wire: Wire, side: int = 0) -> list[int]:
    return [FRAME.unpack_from(frame)[0] for frame in wire.links[side].sent]


def text_of(length: int) -> bytes:
    return bytes(index * 7 % 251 for index in range(length))


@pytest.mark.parametrize("loan", [bytes, bytearray, memoryview])
@pytest.mark.parametrize("length", [EAGER + 1, 2 * EAGER, 2 * EAGER + 1, 16 * EAGER])
async def test_it_arrives_whole_and_send_returns_at_once(length: int, loan: Any) -> None:
    wire = await opened(config_of())
    before = len(kinds(wire))
    coroutine = wire.ends[0].send(loan(text_of(length)))
    with pytest.raises(StopIteration):
        coroutine.send(None)
    await settle()
    frames = -(-length // EAGER)
    assert kinds(wire)[before:] == [FrameKind.DATA] * frames
    await wire.run()
    message = await wire.ends[1].recv()
    assert message == text_of(length)
    assert message.imm is None
    for stats in wire.ends[0].stats, wire.ends[1].stats:
        assert stats.messages_sent + stats.messages_received == 1
        assert stats.bytes_sent + stats.bytes_received == length
    await wire.close()


async def test_its_header_tells_what_is_to_come() -> None:
    wire = await opened(config_of())
    before = len(wire.links[0].sent)
    await wire.ends[0].send(text_of(100), imm=7)
    await settle()
    heads = [FRAME.unpack_from(frame) for frame in wire.links[0].sent[before:]]
    assert [(flags, imm, argument) for _, flags, _, imm, argument in heads] == [
        (3, 7, 100), (2, 0, 52), (0, 0, 4),
    ]  # fmt: skip
    await wire.run()
    message = await wire.ends[1].recv()
    assert (bytes(message), message.imm) == (text_of(100), 7)
    await wire.close()


#: Why a message of four fragments is fetched: settings of the sender, and of the peer.
FETCHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "the threshold": ({"rendezvous_threshold": 4 * EAGER - 1}, {}),
    "no credits": ({}, {"recv_depth": 3}),
    "no slots": ({"send_depth": 3}, {}),
    "an old peer": ({}, {}),
}


@pytest.mark.parametrize("why", FETCHED)
async def test_the_receiver_fetches_what_does_not_fit(why: str) -> None:
    wire = await opened(*(config_of(**settings) for settings in FETCHED[why]))
    if why == "an old peer":
        set_terms(state_of(wire.ends[0]), fragmented_size=0)
    before = len(kinds(wire))
    send = asyncio.create_task(wire.ends[0].send(text_of(4 * EAGER)))
    await settle()
    assert kinds(wire)[before:] == [FrameKind.RENDEZVOUS]
    receive = asyncio.create_task(wire.ends[1].recv())
    await wire.run()
    assert await receive == text_of(4 * EAGER)
    await wire.run()
    await send
    await wire.close()


async def test_it_goes_not_past_a_message_that_waits_to_be_announced() -> None:
    """Whatever is free for it: both are large to the program."""
    config = config_of(rendezvous_threshold=3 * SLOT, rendezvous_window=1)
    wire = await opened(config)
    sizes = (4 * SLOT, 5 * SLOT, 2 * SLOT)
    sends = [asyncio.create_task(wire.ends[0].send(text_of(size))) for size in sizes]
    await settle()
    assert kinds(wire).count(FrameKind.RENDEZVOUS) == 1, "there is a single exchange"
    taking = asyncio.gather(*(wire.ends[1].recv() for _ in sizes))
    await wire.run()
    assert [len(message) for message in await taking] == list(sizes)
    await asyncio.gather(*sends)
    # With the exchange free, messages of this size go in fragments.
    announced = kinds(wire).count(FrameKind.RENDEZVOUS)
    await wire.ends[0].send(text_of(2 * SLOT))
    assert kinds(wire).count(FrameKind.RENDEZVOUS) == announced
    await wire.run()
    await wire.close()


async def test_tasks_that_wait_get_their_messages_in_the_order_of_their_waits() -> None:
    wire = await opened(config_of())
    order: list[tuple[int, int]] = []

    async def receive(number: int) -> None:
        order.append((number, len(await wire.ends[1].recv())))

    tasks = []
    for number in range(4):
        tasks.append(asyncio.create_task(receive(number)))
        await settle()
    for size in (3 * EAGER, 4 * EAGER):  # seven frames, two messages
        await wire.ends[0].send(text_of(size))
    await wire.run()
    assert order == [(0, 3 * EAGER), (1, 4 * EAGER)]
    for size in (5, 6):
        await wire.ends[0].send(text_of(size))
    await wire.run()
    assert order[2:] == [(2, 5), (3, 6)]
    await asyncio.gather(*tasks)
    await wire.close()


async def test_a_message_that_the_program_keeps_holds_no_slots() -> None:
    wire = await opened(config_of())
    kept = []
    for number in range(20):
        await wire.ends[0].send(bytes([number]) * (5 * EAGER))
        await wire.run()
        kept.append(await wire.ends[1].recv())
        await wire.run()
    assert state_of(wire.ends[1]).kept == 0
    assert [message[0] for message in kept] == list(range(20))
    assert FrameKind.RENDEZVOUS not in kinds(wire)
    await wire.close()
    assert [bytes(message) for message in kept] == [bytes([n]) * (5 * EAGER) for n in range(20)]


class Side:
    """A connection whose peer is the test."""

    def __init__(self, **settings: Any) -> None:
        self.config = config_of(**settings)
        self.link = FakeLink(self.config)
        self.core = LeftConnection(self.link, self.config)

    def arrives(self, missing: int, length: int, *, more: bool, kind: int = FrameKind.DATA) -> None:
        flags = FRAME_MORE * more
        self.link.inject(FRAME.pack(kind, flags, 0, 0, missing) + text_of(length))


async def test_nothing_of_it_is_there_before_all_of_it_is() -> None:
    side = Side()
    receiver = receiver_of(side.core)
    side.arrives(100, 48, more=True)
    side.link.inject(FRAME.pack(FrameKind.PING, 0, 0, 0, 0))
    side.arrives(52, 48, more=True)
    assert receiver.take() is None
    assert (side.link.state.arrived, side.link.state.peek()) == (0, None)
    side.arrives(4, 4, more=False)
    message = receiver.take()
    assert message is not None
    assert bytes(message) == text_of(48) + text_of(48) + text_of(4)
    assert receiver.take() is None


#: Words of the error, and the frames: bytes to come, bytes in the frame, whether more follow, kind.
WRONG: dict[str, tuple[str, list[tuple[int, int, bool, int]]]] = {
    "another message": ("52 bytes that are missing", [(100, 48, True, 1), (4, 4, False, 1)]),
    "a large message": ("52 bytes that are missing", [(100, 48, True, 1), (100, 20, False, 2)]),
    "END": ("52 bytes that are missing", [(100, 48, True, 1), (0, 0, False, 6)]),
    "too many bytes": ("length 4 announced", [(52, 48, True, 1), (4, 5, False, 1)]),
    "too few": ("length 52 announced", [(100, 48, True, 1), (52, 48, False, 1)]),
    "none": ("length 100 announced, 0 bytes", [(100, 0, True, 1)]),
    "no more to come": ("length 48 announced", [(48, 48, True, 1)]),
    "above the limit": ("1025 bytes, of at most 1024", [(KIB + 1, 48, True, 1)]),
}


@pytest.mark.parametrize("what", WRONG)
async def test_a_peer_that_breaks_the_rules_loses_the_connection(what: str) -> None:
    side = Side(max_message_size=KIB)
    words, frames = WRONG[what]
    for missing, length, more, kind in frames:
        assert side.link.failure is None
        side.arrives(missing, length, more=more, kind=kind)
        side.link.tell()
    with pytest.raises(ProtocolError, match=words):
        receiver_of(side.core).take()


@pytest.mark.parametrize("arrived", [1, 2, 3])
async def test_the_end_in_the_middle_of_it_gives_the_slots_back(arrived: int) -> None:
    """The peer may go on sending, and what arrives is discarded."""
    side = Side()
    state = side.link.state
    frames = [(100, 48, True), (52, 48, True), (4, 4, False)]
    posted = state.facts()["posted"]
    for missing, length, more in frames[:arrived]:
        side.arrives(missing, length, more=more)
    receiver = receiver_of(side.core)
    receiver.drop_all()
    receiver.fail(lambda: ConnectionResetError("over"))
    for missing, length, more in frames[arrived:]:
        side.arrives(missing, length, more=more)
    side.arrives(3, 3, more=False)
    assert (state.arrived, state.peek(), state.take()) == (0, None, None)
    assert state.facts()["posted"] + state.facts()["n_back"] == posted
