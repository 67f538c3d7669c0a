"""Sender: what a flush waits for, and a send that the end of the connection overtakes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from aiordma.endpoint.config import CONTROL_SLOTS, ConnectionConfig
from aiordma.endpoint.wire import FRAME, FRAME_SIZE, FrameKind
from aiordma.errors import ConnectionEndedError
from aiordma.verbs.enums import WCStatus
from tests.inside.endpoint import sender_of, set_terms

from ..conftest import LIMIT_S, settle
from .fabric import FakeLink, LeftConnection


class Side:
    """The parts of a connection whose peer is the test."""

    def __init__(self, **settings: Any) -> None:
        values: dict[str, Any] = {"slot_size": 64, "send_depth": 2, "recv_depth": 4} | settings
        self.config = ConnectionConfig(**values)
        self.link = FakeLink(self.config)
        self.core = LeftConnection(self.link, self.config)
        self.sender, self.state = sender_of(self.core), self.link.state

    def grant(self, credits: int) -> None:
        """The peer has posted this many receives."""
        set_terms(self.state, credits=self.state.credits + credits)
        self.sender.room()

    def acknowledge(self) -> None:
        """The oldest send has reached the peer's adapter."""
        self.link.unacked.append(next(iter(self.link.busy)))
        self.link.acknowledge()

    def send(self, data: bytes = b"x", imm: int | None = None) -> asyncio.Task[None]:
        return asyncio.create_task(self.sender.data(memoryview(data), imm))

    @property
    def bodies(self) -> list[bytes]:
        return [frame[FRAME_SIZE:] for frame in self.link.sent]

    @property
    def kinds(self) -> list[int]:
        return [FRAME.unpack_from(frame)[0] for frame in self.link.sent]


def lost() -> BaseException:
    return ConnectionResetError("lost")


def ended() -> BaseException:
    return ConnectionEndedError("ended")


async def test_a_flush_waits_while_the_reason_of_the_end_is_not_known() -> None:
    """What the adapter flushed has come back, too, and has not arrived."""
    side = Side(send_depth=3)
    side.grant(3)
    for data in (b"x", b"y", b"z"):
        await side.send(data)
    side.sender.hold()
    flushing = asyncio.create_task(side.sender.flush())
    await settle()
    side.acknowledge()
    for _ in range(2):
        side.link.send_back(WCStatus.WR_FLUSH_ERR)
    side.sender.sent()  # it looks once more
    await settle()
    assert side.state.under_way == side.state.facts()["receives"], "all sends have come back"
    assert not flushing.done(), "it says that the messages have arrived"
    side.sender.fail(lost)
    side.sender.settle()
    with pytest.raises(ConnectionResetError):
        await flushing


async def test_a_frame_that_was_never_sent_is_not_flushed() -> None:
    """All that was posted has arrived, and END waits for a slot that never comes."""
    side = Side()
    for _ in range(CONTROL_SLOTS):
        side.sender.control(FrameKind.DONE)
    side.sender.control(FrameKind.END)
    flushing = asyncio.create_task(side.sender.flush_all())
    await settle()
    side.state.advance("END")  # before the slots are free, which would be given to END
    while side.link.busy:
        side.acknowledge()
    side.sender.fail(lost)
    side.sender.settle()
    with pytest.raises(ConnectionResetError):
        await flushing
    assert FrameKind.END not in side.kinds


async def test_a_flush_does_not_wait_for_what_was_sent_after_it() -> None:
    """And a later one waits for it, though the adapter tells of the first."""
    side = Side()
    side.grant(2)
    flushes = []
    for _ in range(2):
        await side.send()
        flushes.append(asyncio.create_task(side.sender.flush()))
        await settle()
    side.acknowledge()
    await settle()
    assert [flush.done() for flush in flushes] == [True, False]
    side.acknowledge()
    await flushes[1]


async def test_flushes_end_in_the_order_of_what_they_wait_for() -> None:
    side = Side()
    side.grant(1)
    await side.send()
    side.sender.control(FrameKind.PING)
    of_all = asyncio.create_task(side.sender.flush_all())
    await settle()
    of_messages = asyncio.create_task(side.sender.flush(side.state.to_flush))
    await settle()
    assert not of_messages.done()
    side.acknowledge()
    await of_messages
    assert not of_all.done()
    side.acknowledge()
    await of_all


async def test_a_connection_that_is_aborted_while_a_send_asks_for_a_slot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The collector has run a function that aborts it; the send would stand in line for ever."""
    side = Side(send_depth=1)
    side.grant(2)
    await side.send()

    def grow(again: Callable[[], None]) -> Iterable[int]:
        side.sender.refuse(lost)
        return ()

    with monkeypatch.context() as patch:
        patch.setattr(side.link.slots.send, "grow", grow)
        data = memoryview(bytearray(b"y"))
        with pytest.raises(ConnectionResetError, match="lost"):
            async with asyncio.timeout(LIMIT_S):
                await side.sender.data(data, None)
        data.release()
    assert side.state.queued == 0
