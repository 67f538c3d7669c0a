"""MessageState: C does what Python does, or nothing at all.

Two receivers are given the same frames: one the way that all frames went once, one by way of C, and
only what that refuses by Python.  Then both must have the same numbers and the same messages; and
where it refused, nothing may have changed.
"""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from aiordma._core import (
    EVENT_ARRIVED,
    EVENT_IDLE,
    SUB_OPERATE,
    SUB_RECV,
    SUB_SHIFT,
    WANT_SENT,
    MessageState,
    Registration,
)
from aiordma._ffi import ffi
from aiordma.endpoint.config import ConnectionConfig
from aiordma.endpoint.message import Message
from aiordma.endpoint.receiver import Receiver
from aiordma.endpoint.wire import FRAME, FRAME_SIZE, HAS_IMM, FrameKind
from aiordma.verbs.enums import Opcode, WCFlags, WCOpcode, WCStatus

from ..conftest import Run, settle
from ..endpoint.fabric import FakeLink, as_link, new_state, record
from .completing import Completing, QueuePair, fields

NUMBERS = (
    "credits", "posted", "unused", "granted", "heard", "messages_received", "bytes_received",
    "completed", "n_free",
)  # fmt: skip
NOWHERE = (0, 0, 0, 0)


class End:
    """A receiver with its lane, and what it told the other parts."""

    def __init__(self, config: ConnectionConfig) -> None:
        self.link = FakeLink(config)
        self.told: list[object] = []
        self.receiver = Receiver(
            as_link(self.link), config,
            lambda kind, flags, argument, body, imm: self.told.append(
                (kind, flags, argument, bytes(body), imm)
            ),
            self.grant,
            lambda: self.told.append("credit"),
            lambda size: self.told.append(size),
        )  # fmt: skip
        self.state = self.link.state
        # What the adapter's side would fill in; the slots' bytes are the fake arena's own.
        self.slots = ffi.new("char[]", self.link.recv.count * config.slot_size)
        place = int(ffi.cast("uintptr_t", self.slots))
        recv = (place, config.slot_size, 7, self.link.recv.count)
        self.state.bind(0, 0, 0, NOWHERE, recv, 0)
        self.completing = Completing(self.state)
        self.link.post_recv(range(self.link.recv.count))
        self.messages: list[Any] = []

    def grant(self, credits: int) -> None:
        self.state.credits += credits

    def lay(self, slot: int, frame: bytes) -> None:
        self.link.recv.slot(slot, len(frame))[:] = frame
        start = slot * self.link.recv.slot_size
        ffi.buffer(self.slots)[start : start + len(frame)] = frame

    def by_c(self, wc: Any) -> bool:
        """Whether C takes it; if not, it has changed nothing."""
        before = fields(self.state), len(self.receiver.queue)
        taken = self.completing.take(wc)
        if not taken:
            after = fields(self.state), len(self.receiver.queue)
            assert after == before, "refused, and yet something has changed"
        return taken

    def numbers(self) -> dict[str, int]:
        return {name: getattr(self.state, name) for name in NUMBERS}

    def take(self) -> None:
        while (message := self.receiver.take()) is not None:
            self.messages.append(message)


def completion(slot: int, length: int, imm: int | None = None) -> Any:
    wc = ffi.new("struct ibv_wc *")
    wc.wr_id = (SUB_RECV | slot) << SUB_SHIFT
    wc.opcode = int(WCOpcode.RECV)
    wc.byte_len = length
    if imm is not None:
        wc.wc_flags = int(WCFlags.WITH_IMM)
        wc.imm_data = int.from_bytes(imm.to_bytes(4, "big"), "little")
    return wc


def frames(rng: random.Random, count: int) -> list[bytes]:
    """Mostly data as it should be; the rest is anything."""
    made = []
    for number in range(count):
        body = rng.randbytes(rng.choice((0, 1, 7, 48)))
        kind: int = FrameKind.DATA
        flags, argument = rng.choice((0, HAS_IMM)), len(body)
        odd = rng.random() if number > 2 else 1.0 / 2
        if odd < 0.08:
            kind = rng.choice((FrameKind.CREDIT, FrameKind.DONE, FrameKind.PING, 9))
        elif odd < 0.09:
            argument = rng.choice((0, len(body) + 1, 1 << 40))
        elif odd < 0.12:
            flags = rng.randrange(256)
        frame = FRAME.pack(kind, flags, rng.choice((0, 0, 1, 3)), rng.getrandbits(32), argument)
        made.append((frame + body)[: rng.choice((FRAME_SIZE - 1, 64)) if odd > 0.99 else 64])
    return made


def test_credits_that_a_task_waits_for_are_for_python(run: Run) -> None:
    """Which resumes the task; C has no way to."""

    async def main() -> None:
        end = End(ConnectionConfig(slot_size=64, recv_depth=8))
        for blocked, returned, plain in ((False, 1, True), (True, 0, True), (True, 1, False)):
            slot = end.link.posted.popleft()
            end.lay(slot, FRAME.pack(FrameKind.DATA, 0, returned, 0, 0))
            end.state.blocked, before = blocked, end.state.credits
            assert end.by_c(completion(slot, FRAME_SIZE)) is plain
            assert end.state.credits == before + (returned if plain else 0)

    run(main())


@pytest.mark.parametrize("seed", range(60))
def test_frames_leave_the_same_behind_in_both_ways(run: Run, seed: int) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        print("seed", seed)
        config = ConnectionConfig(slot_size=64 + FRAME_SIZE, recv_depth=rng.choice((2, 5, 16)))
        by_python, by_c = End(config), End(config)
        taken = 0
        for frame in frames(rng, 120):
            if by_python.link.failure is not None:
                break
            if not by_python.link.posted:
                for end in (by_python, by_c):
                    end.take()
                    for message in end.messages:
                        message.release()
            if not by_python.link.posted:
                break
            slot = by_python.link.posted.popleft()
            assert by_c.link.posted.popleft() == slot
            for end in (by_python, by_c):
                end.lay(slot, frame)
            by_python.receiver.on_frame(slot, record(len(frame)))
            if by_c.by_c(completion(slot, len(frame))):
                taken += 1
            else:
                by_c.receiver.on_frame(slot, record(len(frame)))
            if rng.random() < 0.5:
                by_python.take()
                by_c.take()
        if by_python.link.failure is None:
            by_python.take()
            by_c.take()
        assert taken, "the plain way was never gone"
        assert (by_c.link.failure is None) == (by_python.link.failure is None)
        assert by_c.numbers() == by_python.numbers()
        assert by_c.told == by_python.told
        assert [(len(m), m.imm) for m in by_c.messages] == [
            (len(m), m.imm) for m in by_python.messages
        ]

    run(main())


class One:
    """A state by itself, with four send slots that are free; its loop always runs."""

    def __init__(self, loop: Any = None, **settings: Any) -> None:
        config = ConnectionConfig(**settings)
        loop = loop or SimpleNamespace(is_running=lambda: True)
        self.state = new_state(config, loop, config.receives, 4)
        self.completing = Completing(self.state)

    def take(self, wc: Any) -> bool:
        before = fields(self.state)
        taken = self.completing.take(wc)
        assert taken or fields(self.state) == before, "refused, and yet something has changed"
        return taken

    @property
    def events(self) -> int:
        return self.completing.events


def sent(slot: int, status: int = 0) -> Any:
    wc = ffi.new("struct ibv_wc *")
    wc.wr_id, wc.status, wc.opcode = slot << SUB_SHIFT, status, int(WCOpcode.SEND)
    return wc


def test_a_send_that_has_succeeded_gives_its_slot_back() -> None:
    one = One(send_depth=4)
    slot = one.state.take_slot()
    assert one.take(sent(slot))
    assert sorted(one.state.free_slots) == [0, 1, 2, 3]
    assert one.state.completed == 1


@pytest.mark.parametrize("why", ["failed", "somebody waits", "no data", "closed"])
def test_other_sends_are_for_python(why: str) -> None:
    one = One(send_depth=4)
    slot = one.state.take_slot()
    wc = sent(slot)
    if why == "failed":
        wc.status = int(WCStatus.WR_FLUSH_ERR)
    elif why == "somebody waits":
        one.state.want |= WANT_SENT
    elif why == "no data":
        wc = sent(4)
    else:
        one.state.closed = True
    assert not one.take(wc)
    assert len(one.state.free_slots) == 3
    assert one.state.completed == 0


def test_a_raw_message_is_taken_with_its_immediate() -> None:
    one = One(raw=True)
    assert one.take(completion(3, 17, imm=0x01020304))
    assert one.state.arrived == 1
    assert one.state.peek() == (3, 17, 0x01020304)
    one.state.skip()
    assert one.state.arrived == 0
    assert one.state.peek() is None


def test_an_arrival_is_news_only_if_somebody_waits(run: Run) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        one = One(loop, raw=True)
        one.state.receiver = SimpleNamespace(
            on_due=lambda: None, _posted_again=lambda slot, code: None
        )

        async def length() -> int:
            return len(cast("Message", await one.state))

        assert one.take(completion(0, 1))
        assert one.events == 0
        assert await length() == 1
        task = asyncio.create_task(length())
        await settle()  # and now somebody waits
        assert one.take(completion(1, 2))
        assert one.events == EVENT_ARRIVED
        loop.call_soon(one.state, one.events)
        assert await task == 2

    run(main())


def test_without_an_adapter_nothing_is_sent_and_nothing_posted() -> None:
    one = One()
    one.state.credits = one.state.eager_size = 100
    assert one.state.send(b"x") == -1
    assert one.state.send_buffer(b"x") == -1
    assert one.state.back(0) == -1
    assert one.state.back_now(0) == -1


def test_a_ring_of_arrivals_that_is_full_refuses() -> None:
    one = One(raw=True, recv_depth=4)
    for slot in range(4):
        assert one.take(completion(slot, 1))
    assert not one.take(completion(0, 1)), "more than there are slots"
    assert slots_of(one.state) == [0, 1, 2, 3]


def slots_of(state: MessageState) -> list[int]:
    """Those of the messages in the ring, which are taken out."""
    slots = []
    while (first := state.peek()) is not None:
        slots.append(first[0])
        state.skip()
    return slots


def flushed(sub: int) -> Any:
    wc = ffi.new("struct ibv_wc *")
    wc.wr_id, wc.status = sub << SUB_SHIFT, int(WCStatus.WR_FLUSH_ERR)
    return wc


def test_at_the_end_what_comes_back_unused_is_counted() -> None:
    one = One(recv_depth=4)
    state = one.state
    state.receives, state.sent, state.completed = 3, 2, 1
    state.flushing = True
    for wc in (flushed(SUB_RECV | 1), flushed(2), flushed(SUB_RECV | 0)):
        assert one.take(wc)
        assert one.events == 0
    assert one.take(flushed(SUB_RECV | 2))
    assert one.events == EVENT_IDLE
    assert state.under_way == 0
    assert state.arrived == 0, "that is no message"


class _Region:
    def __init__(self) -> None:
        self._registration = Registration(4096, 1, 7, None, self)


def test_the_adapter_is_not_idle_while_an_operation_is_under_way() -> None:
    one = One(recv_depth=4)
    state, region = one.state, _Region()
    adapter = QueuePair(lambda wr: None)
    state.bind(adapter.address, 0, 0, NOWHERE, NOWHERE, 0)
    state.allow_operations(1)
    assert state.operate(-1, int(Opcode.RDMA_READ), 4096, 64, 1 << 40, 77, 0, 0, region)
    assert state.operating == 1
    state.receives = 1
    state.flushing = True
    assert one.take(flushed(SUB_RECV | 1))
    assert one.events == 0
    assert not one.take(flushed(SUB_OPERATE | 0)), "somebody waits for it"
    assert state.under_way == 1


@pytest.mark.parametrize("status", [WCStatus.RETRY_EXC_ERR, WCStatus.LOC_PROT_ERR])
def test_at_the_end_too_a_failure_is_for_python(status: WCStatus) -> None:
    one = One(recv_depth=4)
    one.state.receives = 1
    one.state.flushing = True
    wc = flushed(SUB_RECV | 1)
    wc.status = int(status)
    assert not one.take(wc)
    assert one.state.under_way == 1


def test_at_the_end_a_message_is_a_message() -> None:
    one = One(raw=True, recv_depth=4)
    one.state.receives = 1
    one.state.flushing = True
    assert one.take(completion(0, 5))
    assert slots_of(one.state) == [0]
