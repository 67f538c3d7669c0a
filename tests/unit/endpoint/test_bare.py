"""Messages whose header is the adapter's immediate, over the fake adapter."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from aiordma.endpoint.config import ConnectionConfig, hello_of
from aiordma.endpoint.wire import FRAME_SIZE, FrameKind
from aiordma.errors import ConnectionLostError, ProtocolError
from tests.inside.endpoint import meet, set_terms, state_of

from ..conftest import settle
from .fabric import Wire

SLOT = 64
CONFIG = ConnectionConfig(slot_size=SLOT, recv_depth=4, send_depth=4, rendezvous_window=2)

pytestmark = pytest.mark.usefixtures("fake_regions")


async def opened() -> Wire:
    wire = Wire(CONFIG, CONFIG)
    await wire.open()
    for end in wire.ends:
        set_terms(state_of(end), bare_size=SLOT)
    return wire


@pytest.mark.parametrize("imm", [None, 5])
@pytest.mark.parametrize("size", [0, 1, SLOT - FRAME_SIZE, SLOT - FRAME_SIZE + 1, SLOT, SLOT + 1])
async def test_a_message_without_a_header(size: int, imm: int | None) -> None:
    """All that fit into a slot, but for those with an immediate, and the empty one."""
    wire = await opened()
    data = bytes(range(1, size + 1))
    before = len(wire.links[0].sent)
    send = asyncio.create_task(wire.ends[0].send(data, imm=imm))
    receive = asyncio.create_task(wire.ends[1].recv())
    await wire.run()
    message = await receive
    assert (bytes(message), message.imm) == (data, imm)
    assert (data in wire.links[0].sent[before:]) == (imm is None and 0 < size <= SLOT)
    message.release()
    await send
    await wire.close()


async def test_credits_go_with_it() -> None:
    """In an exchange of questions and answers nothing else is sent."""
    wire = await opened()
    before = [len(link.sent) for link in wire.links]
    for number in range(1, 30):
        for one, other in (wire.ends, reversed(wire.ends)):
            await one.send(bytes([number]) * SLOT)
            receive = asyncio.create_task(other.recv())
            await wire.run()
            with await receive as message:
                assert bytes(message) == bytes([number]) * SLOT
    assert [len(link.sent) - count for link, count in zip(wire.links, before, strict=True)] == [
        29, 29,
    ]  # fmt: skip
    await wire.close()


@pytest.mark.parametrize(
    "word", [FrameKind.DATA << 24 | 1 << 16, FrameKind.DATA << 24 | 2 << 16, FrameKind.END << 24, 0]
)
async def test_an_immediate_that_is_no_header_of_a_message(word: int) -> None:
    wire = await opened()
    wire.links[1].inject(b"abc", word)
    await settle()
    assert isinstance(wire.links[1].failure, ProtocolError)
    with pytest.raises(ConnectionLostError, match="an immediate that announces kind"):
        await wire.ends[1].recv()
    await wire.lose()


@pytest.mark.parametrize("takes", [False, True])
async def test_a_peer_gets_such_messages_if_it_takes_them(takes: bool) -> None:
    wire = Wire(CONFIG, dataclasses.replace(CONFIG, slot_size=SLOT + 8))
    meet(wire.ends[0], hello_of(wire.configs[1], b"", bare=takes), 8)
    assert state_of(wire.ends[0]).facts()["bare_size"] == (SLOT if takes else 0)
    await wire.lose()
