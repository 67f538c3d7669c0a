"""MessageState: what it takes, what it tells Python of, and what it leaves to Python untouched.

That it keeps the protocol is what test_message_protocol looks at.
"""

from __future__ import annotations

import asyncio
import errno
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
    FOR_PYTHON,
    FRAME_MORE,
    NO_ROOM,
    SUB_OPERATE,
    SUB_RECV,
    SUB_SHIFT,
    Message,
    MessageState,
    QueuedSend,
    Registration,
)
from aiordma._ffi import ffi
from aiordma.endpoint.config import ConnectionConfig
from aiordma.endpoint.outcome import violation
from aiordma.endpoint.wire import FRAME, FrameKind
from aiordma.errors import ConnectionLostError, ProtocolError
from aiordma.verbs.enums import Opcode, WCOpcode, WCStatus
from tests.inside.core import have_timer
from tests.inside.endpoint import set_terms

from ..conftest import Run, settle
from ..endpoint.fabric import new_state
from .completing import Completing, QueuePair, completion, fields

NOWHERE = (0, 0, 0, 0)
#: Of receive slots that are never looked at.
SOMEWHERE = (4096, 64, 7, 100)


class One:
    """A state by itself, with four send slots that are free; its loop always runs."""

    def __init__(self, loop: Any = None, **settings: Any) -> None:
        config = ConnectionConfig(**settings)
        loop = loop or SimpleNamespace(is_running=lambda: True, call_soon=lambda *args: None)
        self.state = new_state(config, loop, config.receives, 4)
        self.completing = Completing(self.state)
        self._adapter = QueuePair(lambda wr: None, lambda wr: None)

    def bind(self, receives: int) -> None:
        """Bind it to an adapter that takes all, and have that so many receives."""
        self.state.bind(self._adapter.address, 0, 0, 0, NOWHERE, SOMEWHERE, (0, 0, 0), 0)
        assert self.state.post_receives(receives) == 0

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
        self.qp = QueuePair(self._take, lambda wr: None)
        start = int(ffi.cast("uintptr_t", self.memory))
        state.bind(
            self.qp.address, 0, 0, 0, (start, size, 7, slots), SOMEWHERE,
            (start + slots * size, size, 7), 0,
        )  # fmt: skip
        set_terms(state, credits=100, eager_size=size)
        self._state = state

    def _take(self, wr: Any) -> None:
        while wr:
            self.slots.append(wr.wr_id >> SUB_SHIFT)
            wr = wr.next

    def post(self) -> int:
        """The slot of a message that is under way."""
        assert self._state.send(b"x", None) == 0
        assert self._state.post_chain() == 0
        return self.slots[-1]


def in_line(state: MessageState) -> QueuedSend:
    """A send that waits, for as long as the object is there."""
    waiting = state.send_in_turn(FrameKind.DATA, b"", 0, None)
    assert isinstance(waiting, QueuedSend)
    return waiting


class Slots:
    """Memory for receives, and an adapter that takes all."""

    def __init__(self, state: MessageState, count: int, size: int = 64) -> None:
        self.size = size
        self.sent: list[int] = []  # kinds of frames
        self.frames: list[bytes] = []
        self.posted: list[int] = []
        self.memory, self.control = ffi.new("char[]", count * size), ffi.new("char[]", 6 * size)
        self.qp = QueuePair(self._send, self._receive)
        places = [int(ffi.cast("uintptr_t", memory)) for memory in (self.memory, self.control)]
        state.bind(
            self.qp.address, 0, 0, 0, NOWHERE, (places[0], size, 7, count), (places[1], size, 8), 0
        )

    def _send(self, wr: Any) -> None:
        piece = wr.sg_list[0]
        self.frames.append(bytes(ffi.buffer(ffi.cast("uint8_t *", piece.addr), piece.length)))
        self.sent.append(self.frames[-1][0])

    def _receive(self, wr: Any) -> None:
        while wr:
            self.posted.append(wr.wr_id >> SUB_SHIFT)
            wr = wr.next

    def lay(
        self, slot: int, kind: FrameKind, credits: int = 0, argument: int = 0, number: int = 0,
        flags: int = 0, body: bytes = b"",
    ) -> Any:  # fmt: skip
        """A frame, and its completion."""
        frame = FRAME.pack(kind | number << 4, flags, credits, 0, argument) + body
        ffi.buffer(self.memory)[slot * self.size : slot * self.size + len(frame)] = frame
        return arrival(slot, len(frame))


def test_credits_that_a_task_waits_for_are_an_event() -> None:
    one = One(slot_size=64, recv_depth=8)
    slots = Slots(one.state, 24)
    given = ((False, 1, 0), (True, 0, 0), (True, 1, EVENT_ROOM))
    one.state.advance("REFUSE_SENDS")  # by itself it makes no event
    for slot, (waits, returned, events) in enumerate(given):
        waiting, before = in_line(one.state) if waits else None, one.state.credits
        assert one.state.queued == waits
        assert one.take(slots.lay(slot, FrameKind.DATA, returned))
        assert one.state.credits == before + returned
        assert one.events == events
        del waiting


@pytest.mark.parametrize("size", [0, 1, 31, 32, 48])
def test_the_words_behind_the_first_abort_are_kept(size: int) -> None:
    """As many as there is room for; other frames have none."""
    one = One(slot_size=64)
    slots = Slots(one.state, 24)
    words = bytes(range(1, 1 + size))
    assert one.take(slots.lay(0, FrameKind.CREDIT, body=b"none"))
    assert one.state.words() == b""
    assert one.take(slots.lay(1, FrameKind.ABORT, body=words))
    assert one.state.words() == words[:31]
    assert one.take(slots.lay(2, FrameKind.ABORT, body=b"other words"))
    assert one.state.words() == words[:31]


@pytest.mark.parametrize("size", [0, 1, 31, 32, 1000])
def test_an_abort_takes_words_along(size: int) -> None:
    one = One(slot_size=64)
    slots = Slots(one.state, 24)
    words = bytes(number % 256 for number in range(size))
    one.state.leave_words(words)
    for kind in (FrameKind.PING, FrameKind.ABORT):
        assert one.state.send_control(kind) == 0
    assert slots.sent == [FrameKind.PING, FrameKind.ABORT]
    assert [len(frame) for frame in slots.frames] == [16, 16 + min(size, 31)]
    assert slots.frames[1][16:] == words[:31]
    with pytest.raises(TypeError):
        one.state.leave_words("a text")  # type: ignore[arg-type]


def test_a_send_that_has_succeeded_gives_its_slot_back() -> None:
    one = One(send_depth=4)
    slot = Sends(one.state).post()
    assert one.take(completion(slot))
    assert sorted(one.state.facts()["free_slots"]) == [0, 1, 2, 3]
    assert one.state.completed == 1
    assert one.events == 0


@pytest.mark.parametrize("why", ["in line", "it was", "flush"])
def test_a_send_that_a_task_waits_for_is_an_event(why: str) -> None:
    one = One(send_depth=4)
    sends = Sends(one.state)
    slot, other = sends.post(), sends.post()
    if why == "in line":
        set_terms(one.state, credits=0)
    waiting = in_line(one.state) if why == "in line" else None
    if why == "it was":  # and Python has to hear that no task does any more
        sends.post(), sends.post()
        lacking = in_line(one.state)
        assert one.state.await_sends(0)
        del lacking
    else:
        one.state.await_sends(2 * (why == "flush"))
    assert one.take(completion(slot))
    assert one.events == (0 if why == "flush" else EVENT_ROOM)
    assert one.take(completion(other))
    assert one.events == (EVENT_SENT if why == "flush" else EVENT_ROOM)
    assert one.state.queued == (waiting is not None)
    assert one.state.completed == 2
    if why == "flush":
        one.completing.events, third = 0, sends.post()
        assert one.take(completion(third))
        assert one.events == 0, "it is told once"


@pytest.mark.parametrize("why", ["failed", "closed"])
def test_other_sends_are_for_python(why: str) -> None:
    one = One(send_depth=4)
    wc = completion(Sends(one.state).post())
    if why == "failed":
        wc.status = int(WCStatus.WR_FLUSH_ERR)
    else:
        one.state.close()
    assert not one.take(wc)
    assert len(one.state.facts()["free_slots"]) == 3
    assert one.state.completed == 0


def ends_the_connection(one: One, what: str) -> None:
    assert one.events == EVENT_FAILED
    error = violation(*one.state.facts()["wrong"])
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
    assert first not in one.state.facts()["free_slots"]
    assert second not in one.state.facts()["free_slots"]


@pytest.mark.parametrize("slot", [0, 3, 4, 4000])
def test_a_send_that_was_not_posted_ends_the_connection(slot: int) -> None:
    one = One(send_depth=4)
    assert one.take(completion(slot))
    ends_the_connection(one, "send")
    assert sorted(one.state.facts()["free_slots"]) == [0, 1, 2, 3]


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
        assert one.state.repost_slot(0) == 0
        assert 0 in [posted & ~SUB_RECV for posted in slots.posted]
    receives, arrived = one.state.facts()["receives"], one.state.arrived
    assert one.take(wc)
    ends_the_connection(one, "receive")
    assert (one.state.facts()["receives"], one.state.arrived) == (receives, arrived)


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
    assert one.state.facts()["wrong"] is None
    assert one.take(arrival(1, 1)), "the adapter has no receive"
    ends_the_connection(one, "receive")


@pytest.mark.parametrize("numbers", [[0], [1, 1], [1, 3], [15], [2]])
def test_a_frame_that_comes_twice_or_is_missing_is_a_violation(numbers: list[int]) -> None:
    one = One(slot_size=64, recv_depth=8)
    slots = Slots(one.state, 24)
    set_terms(one.state, numbered=True)
    assert one.take(slots.lay(0, FrameKind.CREDIT))
    for slot, number in enumerate(numbers, 1):
        assert one.state.facts()["wrong"] is None
        assert one.take(slots.lay(slot, FrameKind.PING, number=number))
    expected = len(numbers)
    assert one.state.facts()["wrong"] == ("NUMBER", numbers[-1], expected)
    with pytest.raises(ProtocolError, match=f"number {numbers[-1]} came instead of {expected}"):
        raise violation(*one.state.facts()["wrong"])


def test_numbers_begin_anew_behind_15() -> None:
    one = One(slot_size=64, recv_depth=64)
    slots = Slots(one.state, 80)
    set_terms(one.state, numbered=True)
    for slot in range(40):
        assert one.take(slots.lay(slot, FrameKind.PING, number=slot % 16))
    assert one.state.facts()["wrong"] is None
    kinds = [kind & 0xF for kind in slots.sent]
    assert set(kinds) >= {FrameKind.PONG}
    assert [kind >> 4 for kind in slots.sent] == [n % 16 for n in range(len(kinds))]


@pytest.mark.parametrize("kind", [FrameKind.PING, FrameKind.DATA, FrameKind.RENDEZVOUS])
@pytest.mark.parametrize("number", [1, 2, 4, 15])
def test_without_numbers_the_upper_bits_are_an_unknown_kind(kind: FrameKind, number: int) -> None:
    one = One(slot_size=64, recv_depth=8)
    slots = Slots(one.state, 24)
    assert one.take(slots.lay(0, kind, number=number))
    assert one.state.facts()["wrong"] == ("KIND", number << 4 | kind, 0)


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
        one.state.set_receiver(SimpleNamespace(_posted_again=lambda slot, code: None))

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
    set_terms(one.state, credits=100, eager_size=100)
    assert one.state.send(b"x", None) == FOR_PYTHON
    assert one.state.release_slot(0) == FOR_PYTHON
    assert one.state.repost_slot(0) == FOR_PYTHON


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
    sends = Sends(state)
    assert one.take(completion(sends.post()))
    slot = sends.post()
    assert state.post_receives(3) == 0
    state.advance("FLUSH")
    for wc in (flushed(SUB_RECV | 1), flushed(slot), flushed(SUB_RECV | 0)):
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
    one.bind(receives=1)
    state.allow_operations(1, True)
    assert state.operate(-1, int(Opcode.RDMA_READ), 4096, 64, 1 << 40, 77, 0, 0, region)
    assert state.facts()["operating"] == 1
    state.advance("FLUSH")
    assert one.take(flushed(SUB_RECV | 1))
    assert one.events == 0
    assert not one.take(flushed(SUB_OPERATE | 0)), "somebody waits for it"
    assert state.under_way == 1


@pytest.mark.parametrize("status", [WCStatus.RETRY_EXC_ERR, WCStatus.LOC_PROT_ERR])
def test_at_the_end_too_a_failure_is_for_python(status: WCStatus) -> None:
    one = One(recv_depth=4)
    one.bind(receives=1)
    one.state.advance("FLUSH")
    wc = flushed(SUB_RECV | 1)
    wc.status = int(status)
    assert not one.take(wc)
    assert one.state.under_way == 1


def test_at_the_end_a_message_is_a_message() -> None:
    one = One(raw=True, recv_depth=4)
    one.bind(receives=1)
    one.state.advance("FLUSH")
    assert one.take(arrival(0, 5))
    assert slots_of(one.state) == [0]


LACKING = {
    "credits": NO_ROOM,
    "others wait": NO_ROOM,
    "slots": FOR_PYTHON,  # which looks for one
    "a timer": FOR_PYTHON,  # which starts one
    "bytes in a slot": FOR_PYTHON,  # which announces it
    "the end is near": FOR_PYTHON,  # which has the words
}


@pytest.mark.parametrize("what", LACKING)
def test_a_message_stands_in_line_only_if_python_has_nothing_to_do_for_it(what: str) -> None:
    one = One(send_depth=4)
    state, sends, waiting = one.state, Sends(one.state), None
    if what != "a timer":
        have_timer(state)
    data = b"x" * (65 if what == "bytes in a slot" else 1)
    if what == "slots":
        for _ in range(4):
            sends.post()
    else:
        set_terms(state, credits=0)
    if what == "others wait":
        waiting = in_line(state)
        set_terms(state, credits=100)
    if what == "the end is near":
        state.advance("REFUSE_SENDS")
    before = len(sends.slots)
    assert state.send(data, None) == LACKING[what]
    assert state.queued == (waiting is not None), "this alone puts nothing in line"
    assert len(sends.slots) == before


@pytest.mark.parametrize("imm", [-1, 1 << 32, 1 << 64, -(1 << 80), True, 1.0, "1"])
def test_an_immediate_that_is_none_is_for_python(imm: Any) -> None:
    one = One(send_depth=4)
    sends = Sends(one.state)
    assert one.state.send(b"x", imm) == FOR_PYTHON
    with pytest.raises(ValueError, match="no immediate"):
        one.state.send_in_turn(FrameKind.DATA, b"x", 1, imm)
    assert sends.slots == []
    for good in (0, (1 << 32) - 1):
        assert one.state.send(b"x", good) == 0


def test_of_a_message_in_fragments_all_is_counted_once() -> None:
    one = One(slot_size=64, recv_depth=8)
    state, slots, into = one.state, Slots(one.state, 24), bytearray(12)
    state.set_receiver(SimpleNamespace(_posted_again=lambda slot, code: None))
    for slot, (left, flags, body) in enumerate(
        [(10, FRAME_MORE, b"one"), (7, FRAME_MORE, b"two"), (4, 0, b"last"), (2, 0, b"xy")]
    ):
        wc = slots.lay(slot, FrameKind.DATA, argument=left, flags=flags, body=body)
        assert one.take(wc)
    assert state.arrived == 2
    assert state.take_into(bytearray(9)) == 10, "it does not fit, and was not taken"
    assert (state.arrived, state.facts()["messages_received"]) == (2, 0)
    assert state.take_into(into) == 10
    assert into == b"onetwolast\0\0"
    assert (state.arrived, state.facts()["messages_received"], state.facts()["bytes_received"]) == (
        1,
        1,
        10,
    )
    assert state.take_into(into) == 2
    assert (state.arrived, state.facts()["messages_received"], state.facts()["bytes_received"]) == (
        0,
        2,
        12,
    )


def test_the_program_keeps_half_of_the_window_in_its_slots() -> None:
    one = One(slot_size=64, recv_depth=8)
    slots, taken, held = Slots(one.state, 24), [], []
    one.state.set_receiver(SimpleNamespace(_posted_again=lambda slot, code: None))
    for slot in range(6):
        assert one.take(slots.lay(slot, FrameKind.DATA, argument=1, body=b"x"))
        message = one.state.take()
        assert message is not None
        taken.append(message)
        held.append(one.state.kept)
    assert one.state.facts()["most_kept"] == 4
    assert held == [1, 2, 3, 4, 4, 4], "the others are to be copied"
    for message in taken[::-1]:
        message.release()
        held.append(one.state.kept)
    assert held[6:] == [4, 4, 3, 2, 1, 0]


def test_slots_of_a_pool_that_come_are_posted_with_their_credits_or_not_at_all() -> None:
    one = One(slot_size=64, recv_depth=8)
    state, slots = one.state, Slots(one.state, 24)
    posted, granted, answers = state.facts()["posted"], state.facts()["granted"], state.control
    state.set_keys(True, 0, 4, [5, 6], False, False)
    state.resize(posted + 8, 2, True)
    assert state.control == answers + 2
    assert state.facts()["most_kept"] == (8 + 6 + 1) // 2
    for no_slot in (32, 33, 0xFFFF):
        assert state.add_receives([24, no_slot]) == errno.EINVAL
    assert (slots.posted, state.facts()["posted"]) == ([], posted)
    assert state.add_receives([*range(24, 32)]) == 0
    assert slots.posted == [SUB_RECV | slot for slot in range(24, 32)]
    assert state.facts()["posted"] == posted + 8
    assert slots.sent == [FrameKind.CREDIT], "the peer hears of the growth at once"
    assert state.facts()["granted"] == granted + 6, "two are for answers, and no credits"


def test_one_question_for_a_sign_of_life_is_open_at_a_time() -> None:
    one = One(slot_size=64, recv_depth=8)
    slots = Slots(one.state, 24)
    assert one.state.ask_life() == 0
    assert one.state.ask_life() is None
    assert slots.sent == [FrameKind.PING]
    assert one.take(slots.lay(0, FrameKind.PONG))
    assert one.state.was_alive()
    assert not one.state.was_alive()
    assert one.state.ask_life() == 0
