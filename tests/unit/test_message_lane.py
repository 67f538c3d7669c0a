"""The message lane: C does what Python does, or nothing at all.

Two receivers are given the same frames: one the way that all frames went once, one by way of
`aio_lane_take`, and only what that refuses by Python.  Then both must have the same numbers and the
same messages; and where it refused, nothing may have changed.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from aiordma._ffi import ffi, lib
from aiordma.endpoint.config import ConnectionConfig
from aiordma.endpoint.lane import WANT_ARRIVAL, WANT_SENT, Lane
from aiordma.endpoint.receiver import Receiver
from aiordma.endpoint.wire import FRAME, FRAME_SIZE, HAS_IMM, FrameKind
from aiordma.verbs.enums import WCFlags, WCOpcode, WCStatus

from .conftest import Run
from .fabric import FakeLink, as_link, record

NUMBERS = (
    "credits", "posted", "unused", "granted", "heard", "messages_received", "bytes_received",
    "completed", "n_free",
)  # fmt: skip
NEWS_IDLE = 8
_RECV = 0x8000
_OPERATE = 0x5000


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
        self.lane = self.link.lane.c
        # What the adapter's side would fill in; the slots' bytes are the fake arena's own.
        self.slots = ffi.new("char[]", self.link.recv.count * config.slot_size)
        self.lane.recv.addr = int(ffi.cast("uintptr_t", self.slots))
        self.lane.recv.stride = config.slot_size
        self.link.post_recv(range(self.link.recv.count))
        self.messages: list[Any] = []

    def grant(self, credits: int) -> None:
        self.lane.credits += credits

    def lay(self, slot: int, frame: bytes) -> None:
        self.link.recv.slot(slot, len(frame))[:] = frame
        start = slot * self.lane.recv.stride
        ffi.buffer(self.slots)[start : start + len(frame)] = frame

    def state(self) -> tuple[Any, ...]:
        numbers = [getattr(self.lane, name) for name in NUMBERS]
        return (*numbers, len(self.receiver.queue), self.lane.head, self.lane.tail, self.lane.want)

    def numbers(self) -> dict[str, int]:
        return {name: getattr(self.lane, name) for name in NUMBERS}

    def take(self) -> None:
        while (message := self.receiver.take()) is not None:
            self.messages.append(message)


def completion(slot: int, length: int, imm: int | None = None) -> Any:
    wc = ffi.new("struct ibv_wc *")
    wc.wr_id = (_RECV | slot) << 24
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
        sink = ffi.cast("struct aio_sink *", end.lane)
        for blocked, returned, plain in ((0, 1, 1), (1, 0, 1), (1, 1, 0)):
            slot = end.link.posted.popleft()
            end.lay(slot, FRAME.pack(FrameKind.DATA, 0, returned, 0, 0))
            end.lane.blocked, before = blocked, end.lane.credits
            assert lib.aio_lane_take(sink, completion(slot, FRAME_SIZE)) == plain
            assert end.lane.credits == before + (returned if plain else 0)

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
            before = by_c.state()
            if lib.aio_lane_take(
                ffi.cast("struct aio_sink *", by_c.lane), completion(slot, len(frame))
            ):
                taken += 1
            else:
                assert by_c.state() == before, "refused, and yet something has changed"
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


def lane(**settings: Any) -> Lane:
    config = ConnectionConfig(**settings)
    return Lane(config, config.receives, 4)


def sent(slot: int, status: int = 0) -> Any:
    wc = ffi.new("struct ibv_wc *")
    wc.wr_id, wc.status, wc.opcode = slot << 24, status, int(WCOpcode.SEND)
    return wc


def take(which: Lane, wc: Any) -> int:
    return int(lib.aio_lane_take(ffi.cast("struct aio_sink *", which.c), wc))


def test_a_send_that_has_succeeded_gives_its_slot_back() -> None:
    one = lane(send_depth=4)
    slot = one.free.pop()
    assert take(one, sent(slot))
    assert sorted(one.free) == [0, 1, 2, 3]
    assert one.c.completed == 1


@pytest.mark.parametrize("why", ["failed", "somebody waits", "no data", "closed"])
def test_other_sends_are_for_python(why: str) -> None:
    one = lane(send_depth=4)
    slot = one.free.pop()
    wc = sent(slot)
    if why == "failed":
        wc.status = int(WCStatus.WR_FLUSH_ERR)
    elif why == "somebody waits":
        one.c.want |= WANT_SENT
    elif why == "no data":
        wc = sent(4)
    else:
        one.c.closed = True
    assert not take(one, wc)
    assert len(one.free) == 3
    assert one.c.completed == 0


def test_a_raw_message_is_taken_with_its_immediate() -> None:
    one = lane(raw=True)
    assert take(one, completion(3, 17, imm=0x01020304))
    at = lib.aio_lane_next(one.c)
    assert (at & 0xFFFF, at >> 16 & 0xFFFFFFFF, at >> 48) == (3, 17, 1)
    assert one.c.imm == 0x01020304
    assert lib.aio_lane_next(one.c) == -1


def test_an_arrival_is_news_only_if_somebody_waits() -> None:
    one = lane(raw=True)
    assert take(one, completion(0, 1))
    assert one.c.sink.news == 0
    assert lib.aio_lane_next(one.c) >= 0
    assert lib.aio_lane_next(one.c) == -1  # and now somebody waits
    assert take(one, completion(1, 1))
    assert one.c.sink.news == WANT_ARRIVAL


def test_without_an_adapter_nothing_is_sent_and_nothing_posted() -> None:
    one = lane()
    one.c.credits = one.c.eager_size = 100
    assert lib.aio_lane_send(one.c, b"x", 1) == -1
    assert lib.aio_lane_back(one.c, 0) == -1


def test_a_ring_of_arrivals_that_is_full_refuses() -> None:
    one = lane(raw=True, recv_depth=4)
    for slot in range(4):
        assert take(one, completion(slot, 1))
    assert not take(one, completion(0, 1)), "more than there are slots"
    assert [lib.aio_lane_next(one.c) & 0xFFFF for _ in range(4)] == [0, 1, 2, 3]


def flushed(sub: int) -> Any:
    wc = ffi.new("struct ibv_wc *")
    wc.wr_id, wc.status = sub << 24, int(WCStatus.WR_FLUSH_ERR)
    return wc


def test_at_the_end_what_comes_back_unused_is_counted() -> None:
    one = lane(recv_depth=4)
    one.c.receives, one.c.sent, one.c.completed = 3, 2, 1
    one.c.flushing = True
    for wc in (flushed(_RECV | 1), flushed(2), flushed(_RECV | 0)):
        assert take(one, wc)
        assert one.c.sink.news == 0
    assert take(one, flushed(_RECV | 2))
    assert one.c.sink.news == NEWS_IDLE
    assert one.under_way == 0
    assert one.c.head == one.c.tail, "that is no message"


def test_the_adapter_is_not_idle_while_an_operation_is_under_way() -> None:
    one = lane(recv_depth=4)
    one.c.receives = one.c.operating = 1
    one.c.flushing = True
    assert take(one, flushed(_RECV | 1))
    assert one.c.sink.news == 0
    assert not take(one, flushed(_OPERATE | 0)), "somebody waits for it"
    assert one.under_way == 1


@pytest.mark.parametrize("status", [WCStatus.RETRY_EXC_ERR, WCStatus.LOC_PROT_ERR])
def test_at_the_end_too_a_failure_is_for_python(status: WCStatus) -> None:
    one = lane(recv_depth=4)
    one.c.receives = 1
    one.c.flushing = True
    wc = flushed(_RECV | 1)
    wc.status = int(status)
    assert not take(one, wc)
    assert one.under_way == 1


def test_at_the_end_a_message_is_a_message() -> None:
    one = lane(raw=True, recv_depth=4)
    one.c.receives = 1
    one.c.flushing = True
    assert take(one, completion(0, 5))
    assert lib.aio_lane_next(one.c) >= 0
