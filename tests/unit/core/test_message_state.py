"""MessageState: what it takes, what it tells Python of, and what it leaves to Python untouched.

That it keeps the protocol is what test_message_protocol looks at.
"""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from aiordma._core import (
    EVENT_ARRIVED,
    EVENT_FAILED,
    EVENT_FRAMES,
    EVENT_IDLE,
    EVENT_ROOM,
    EVENT_SENT,
    SUB_OPERATE,
    SUB_RECV,
    SUB_SHIFT,
    WRONG_KIND,
    WRONG_NUMBER,
    Message,
    MessageState,
    Registration,
    Waiting,
)
from aiordma._ffi import ffi
from aiordma.endpoint.config import ConnectionConfig
from aiordma.endpoint.outcome import violation
from aiordma.endpoint.wire import FRAME, FrameKind
from aiordma.errors import ConnectionLostError, ProtocolError
from aiordma.verbs.enums import Opcode, WCOpcode, WCStatus

from ..conftest import Run, settle
from ..endpoint.fabric import new_state
from .completing import Completing, QueuePair, completion, fields

NOWHERE = (0, 0, 0, 0)


class One:
    """A state by itself, with four send slots that are free; its loop always runs."""

    def __init__(self, loop: Any = None, **settings: Any) -> None:
        config = ConnectionConfig(**settings)
        loop = loop or SimpleNamespace(is_running=lambda: True, call_soon=lambda *args: None)
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


def arrival(slot: int, length: int, imm: int | None = None) -> Any:
    return completion(SUB_RECV | slot, WCOpcode.RECV, length, imm)


def flushed(sub: int) -> Any:
    return completion(sub, status=int(WCStatus.WR_FLUSH_ERR))


class Sends:
    """Memory for sends, and an adapter that takes all.

    Attributes:
        slots: Those that were posted, in their order.
    """

    def __init__(self, state: MessageState, slots: int = 4, size: int = 64) -> None:
        self.slots: list[int] = []
        self.memory = ffi.new("char[]", (slots + 6) * size)
        self.qp = QueuePair(self._take)
        start = int(ffi.cast("uintptr_t", self.memory))
        state.bind(
            self.qp.address, 0, 0, 0, (start, size, 7, slots), NOWHERE,
            (start + slots * size, size, 7), 0,
        )  # fmt: skip
        state.eager_size, state.credits = size, 100
        self._state = state

    def _take(self, wr: Any) -> None:
        while wr:
            self.slots.append(wr.wr_id >> SUB_SHIFT)
            wr = wr.next

    def post(self) -> int:
        """The slot of a message that is under way."""
        assert self._state.send_buffer(b"x", None) == 0
        assert self._state.post_chain() == 0
        return self.slots[-1]


def in_line(state: MessageState) -> Waiting:
    """A send that waits, for as long as the object is there."""
    waiting = state.stand_in_line(FrameKind.DATA, b"", 0, None)
    assert isinstance(waiting, Waiting)
    return waiting


class Slots:
    """Memory for receives, and an adapter that takes all."""

    def __init__(self, state: MessageState, count: int, size: int = 64) -> None:
        self.size = size
        self.sent: list[int] = []  # kinds of frames
        self.posted: list[int] = []
        self.memory, self.control = ffi.new("char[]", count * size), ffi.new("char[]", 6 * size)
        self.qp = QueuePair(self._send, self._receive)
        places = [int(ffi.cast("uintptr_t", memory)) for memory in (self.memory, self.control)]
        state.bind(
            self.qp.address, 0, 0, 0, NOWHERE, (places[0], size, 7, count), (places[1], size, 8), 0
        )

    def _send(self, wr: Any) -> None:
        self.sent.append(ffi.cast("uint8_t *", wr.sg_list[0].addr)[0])

    def _receive(self, wr: Any) -> None:
        while wr:
            self.posted.append(wr.wr_id >> SUB_SHIFT)
            wr = wr.next

    def lay(
        self, slot: int, kind: FrameKind, credits: int = 0, argument: int = 0, number: int = 0
    ) -> Any:
        """A frame without body, and its completion."""
        frame = FRAME.pack(kind | number << 4, 0, credits, 0, argument)
        ffi.buffer(self.memory)[slot * self.size : slot * self.size + len(frame)] = frame
        return arrival(slot, len(frame))


def test_credits_that_a_task_waits_for_are_an_event() -> None:
    one = One(slot_size=64, recv_depth=8)
    slots = Slots(one.state, 24)
    given = ((False, 1, 0), (True, 0, 0), (True, 1, EVENT_ROOM))
    one.state.blocked = True  # by itself it makes no event
    for slot, (waits, returned, events) in enumerate(given):
        waiting, before = in_line(one.state) if waits else None, one.state.credits
        assert one.state.queued == waits
        assert one.take(slots.lay(slot, FrameKind.DATA, returned))
        assert one.state.credits == before + returned
        assert one.events == events
        del waiting


def test_a_send_that_has_succeeded_gives_its_slot_back() -> None:
    one = One(send_depth=4)
    slot = Sends(one.state).post()
    assert one.take(completion(slot))
    assert sorted(one.state.free_slots) == [0, 1, 2, 3]
    assert one.state.completed == 1
    assert one.events == 0


@pytest.mark.parametrize("why", ["in line", "it was", "flush"])
def test_a_send_that_a_task_waits_for_is_an_event(why: str) -> None:
    one = One(send_depth=4)
    sends = Sends(one.state)
    slot, other = sends.post(), sends.post()
    if why == "in line":
        one.state.credits = 0
    waiting = in_line(one.state) if why == "in line" else None
    one.state.slot_awaited = why == "it was"  # and Python has to hear that no task does any more
    one.state.flush_at = 2 * (why == "flush")
    assert one.take(completion(slot))
    assert one.events == (0 if why == "flush" else EVENT_ROOM)
    assert one.take(completion(other))
    assert one.events == (EVENT_SENT if why == "flush" else EVENT_ROOM)
    assert one.state.queued == (waiting is not None)
    assert one.state.flush_at == 0
    assert one.state.completed == 2


@pytest.mark.parametrize("why", ["failed", "closed"])
def test_other_sends_are_for_python(why: str) -> None:
    one = One(send_depth=4)
    wc = completion(Sends(one.state).post())
    if why == "failed":
        wc.status = int(WCStatus.WR_FLUSH_ERR)
    else:
        one.state.close()
    assert not one.take(wc)
    assert len(one.state.free_slots) == 3
    assert one.state.completed == 0


def ends_the_connection(one: One, what: str) -> None:
    assert one.events == EVENT_FAILED
    error = violation(*one.state.wrong)
    assert f"the adapter completed a {what} twice, or out of order" in str(error)
    assert type(error) is ConnectionLostError


def test_a_send_that_completes_twice_ends_the_connection() -> None:
    """Its slot may have another message by then, which is not to be overwritten."""
    one = One(send_depth=4)
    sends = Sends(one.state)
    first, second = sends.post(), sends.post()
    assert one.take(completion(first))
    assert sends.post() == first, "the slot is used again"
    assert one.take(completion(first))
    ends_the_connection(one, "send")
    assert first not in one.state.free_slots
    assert second not in one.state.free_slots


@pytest.mark.parametrize("slot", [0, 3, 4, 4000])
def test_a_send_that_was_not_posted_ends_the_connection(slot: int) -> None:
    one = One(send_depth=4)
    assert one.take(completion(slot))
    ends_the_connection(one, "send")
    assert sorted(one.state.free_slots) == [0, 1, 2, 3]


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_a_receive_that_completes_twice_ends_the_connection(raw: bool, again: bool) -> None:
    """Whether or not its slot was posted again meanwhile: no message is delivered twice."""
    one = One(slot_size=64, recv_depth=8, raw=raw)
    slots = Slots(one.state, 24)
    wc = slots.lay(0, FrameKind.DATA)
    assert one.take(wc)
    if again:
        one.state.skip()
        assert one.state.back_now(0) == 0
        assert 0 in [posted & ~SUB_RECV for posted in slots.posted]
    receives, arrived = one.state.receives, one.state.arrived
    assert one.take(wc)
    ends_the_connection(one, "receive")
    assert (one.state.receives, one.state.arrived) == (receives, arrived)


@pytest.mark.parametrize("slot", [1, 23, 24, 0x7FFF])
def test_a_receive_out_of_order_ends_the_connection(slot: int) -> None:
    one = One(slot_size=64, recv_depth=8, raw=True)
    assert one.take(arrival(slot, 1))
    ends_the_connection(one, "receive")
    assert one.state.arrived == 0


def test_the_slots_of_a_window_that_grows_come_behind_the_others() -> None:
    one = One(slot_size=64, recv_depth=4, raw=True)
    slots = Slots(one.state, 4)
    assert one.state.post_receives(4) == 0
    for slot in range(4):
        assert one.take(arrival(slot, 1))
        one.state.skip()
    assert one.state.post_receives([2, 0]) == 0
    assert slots.posted[-2:] == [SUB_RECV | 2, SUB_RECV]
    for slot in (2, 0):
        assert one.take(arrival(slot, 1))
    assert one.state.wrong[0] == 0
    assert one.take(arrival(1, 1)), "the adapter has no receive"
    ends_the_connection(one, "receive")


@pytest.mark.parametrize("numbers", [[0], [1, 1], [1, 3], [15], [2]])
def test_a_frame_that_comes_twice_or_is_missing_is_a_violation(numbers: list[int]) -> None:
    one = One(slot_size=64, recv_depth=8)
    slots = Slots(one.state, 24)
    one.state.numbered = True
    assert one.take(slots.lay(0, FrameKind.CREDIT))
    for slot, number in enumerate(numbers, 1):
        assert one.state.wrong[0] == 0
        assert one.take(slots.lay(slot, FrameKind.PING, number=number))
    expected = len(numbers)
    assert one.state.wrong == (WRONG_NUMBER, numbers[-1], expected)
    with pytest.raises(ProtocolError, match=f"number {numbers[-1]} came in place of {expected}"):
        raise violation(*one.state.wrong)


def test_numbers_begin_anew_behind_15() -> None:
    one = One(slot_size=64, recv_depth=64)
    slots = Slots(one.state, 80)
    one.state.numbered = True
    for slot in range(40):
        assert one.take(slots.lay(slot, FrameKind.PING, number=slot % 16))
    assert one.state.wrong[0] == 0
    kinds = [kind & 0xF for kind in slots.sent]
    assert set(kinds) >= {FrameKind.PONG}
    assert [kind >> 4 for kind in slots.sent] == [n % 16 for n in range(len(kinds))]


def test_without_numbers_the_upper_bits_are_an_unknown_kind() -> None:
    one = One(slot_size=64, recv_depth=8)
    slots = Slots(one.state, 24)
    assert one.take(slots.lay(0, FrameKind.PING, number=1))
    assert one.state.wrong == (WRONG_KIND, 1 << 4 | FrameKind.PING, 0)


def test_an_announcement_is_python_s_once_and_has_gone_when_the_ring_is_cut() -> None:
    one = One(slot_size=64, recv_depth=8)
    state, slots = one.state, Slots(one.state, 24)
    for slot in range(2):
        assert one.take(slots.lay(slot, FrameKind.RENDEZVOUS, argument=100 + slot))
    assert one.events == EVENT_FRAMES
    assert state.next_large(24) == (100, None, b"", 0)
    assert state.next_large(24) == (101, None, b"", 1)
    assert state.next_large(24) is None
    assert state.large == 2
    state.cut(0)
    assert (state.arrived, state.large) == (0, 0)
    assert one.take(slots.lay(2, FrameKind.DATA))
    begun = time.thread_time()
    assert state.next_large(24) is None
    assert time.thread_time() - begun < 1, "it looks for it all around 32 bits"
    assert one.take(slots.lay(3, FrameKind.RENDEZVOUS, argument=103))
    assert state.next_large(24) == (103, None, b"", 3)


def test_a_raw_message_is_taken_with_its_immediate() -> None:
    one = One(raw=True)
    assert one.take(arrival(0, 17, imm=0x01020304))
    assert one.state.arrived == 1
    assert one.state.peek() == (0, 17, 0x01020304, False)
    one.state.skip()
    assert one.state.arrived == 0
    assert one.state.peek() is None


def test_an_arrival_is_news_only_if_somebody_waits(run: Run) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        one = One(loop, raw=True)
        one.state.receiver = SimpleNamespace(_posted_again=lambda slot, code: None)

        async def length() -> int:
            message: Message = await one.state.receiving(None)
            return len(message)

        assert one.take(arrival(0, 1))
        assert one.events == 0
        assert await length() == 1
        task = asyncio.create_task(length())
        await settle()  # and now somebody waits
        assert one.take(arrival(1, 2))
        assert one.events == EVENT_ARRIVED
        loop.call_soon(one.state, one.events)
        assert await task == 2

    run(main())


def test_without_an_adapter_nothing_is_sent_and_nothing_posted() -> None:
    one = One()
    one.state.credits = one.state.eager_size = 100
    assert one.state.send(b"x") == -1
    assert one.state.send_buffer(b"x", None) == -1
    assert one.state.back(0) == -1
    assert one.state.back_now(0) == -1


def test_more_messages_than_there_are_slots_end_the_connection() -> None:
    one = One(raw=True, recv_depth=4)
    for slot in range(4):
        assert one.take(arrival(slot, 1))
    assert one.events == 0
    assert one.take(arrival(0, 1))
    ends_the_connection(one, "receive")
    assert slots_of(one.state) == [0, 1, 2, 3]


def slots_of(state: MessageState) -> list[int]:
    """Those of the messages in the ring, which are taken out."""
    slots = []
    while (first := state.peek()) is not None:
        assert first[0] is not None
        slots.append(first[0])
        state.skip()
    return slots


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
    assert (state.completed, state.flushed) == (1, 1), "that send has not reached the peer"
    assert state.arrived == 0, "that is no message"


class _Region:
    def __init__(self) -> None:
        self._registration = Registration(4096, 64, 1, 7, None)


def test_the_adapter_is_not_idle_while_an_operation_is_under_way() -> None:
    one = One(recv_depth=4)
    state, region = one.state, _Region()
    adapter = QueuePair(lambda wr: None)
    state.bind(adapter.address, 0, 0, 0, NOWHERE, NOWHERE, (0, 0, 0), 0)
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
    assert one.take(arrival(0, 5))
    assert slots_of(one.state) == [0]
