"""The data path of streams in C against the protocol in Python, on random conversations.

Two victims hear the same peer, hostile or not.  One is the protocol in Python alone.  The other is
a `StreamState` and lets C take every completion that it will; what C does not take goes to Python,
as a port does it.  After each step both have posted the same, and they take and refuse the same.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from random import Random
from typing import Any

import pytest

from aiordma._core import (
    STREAM_GROW,
    STREAM_IDLE,
    STREAM_MESSAGE,
    STREAM_NO_SPACE,
    STREAM_RECV,
    SUB_SHIFT,
    StreamState,
)
from aiordma._ffi import ffi, load_error
from aiordma.errors import ProtocolError
from aiordma.rsocket import Descriptor, Hello, Machine, Place
from aiordma.verbs.enums import SendFlags, WCStatus
from tests.rsocket_hostile import right_word, word

from ..rsocket.forms import post_of
from ..rsocket.whole import Post, Whole
from .completing import Completing, QueuePair, completion, fields

pytestmark = pytest.mark.slow

if load_error() is not None:
    pytest.skip(f"no compiled module: {load_error()}", allow_module_level=True)

SEED = os.environ.get("AIORDMA_TEST_SEED", "20241121")
CASES = 1500
RING, WIDER, SEND = 64, 160, 128
SHUTDOWN = 0xE0000002


def _address(memory: Any) -> int:
    return int(ffi.cast("uintptr_t", memory))


class InC:
    """A machine whose numbers are in C, and what a port does for it."""

    def __init__(self, rng: Random, credit: int, depth: int, iwarp: bool, inline: int) -> None:
        self.ring = ffi.new("uint8_t[]", RING)
        self.wider = ffi.new("uint8_t[]", WIDER)
        self.table = ffi.new("uint8_t[]", 32)
        self.source = ffi.new("uint8_t[]", SEND + 96)
        self.words = ffi.new("uint32_t[]", 64)
        self.place = Place(_address(self.ring), 0x11, RING)
        table = Place(_address(self.table), 0x22, 32)
        self.state = StreamState(
            ring=(self.place.addr, self.place.key, RING),
            table=table.addr,
            send=(_address(self.source), SEND, 5),
            credits=credit,
            send_depth=depth,
            iwarp=iwarp,
            inline_size=inline,
            memory=None,
        )
        self.iwarp, self.inline = iwarp, inline
        self.posted: list[Post] = []
        self.signaled: list[bool] = []
        self.sent: list[bytes] = []  # the bytes of each message
        self.qp = QueuePair(self._send, lambda _: None)
        words = _address(self.words) if iwarp else 0
        assert self.state.bind(self.qp.address, 0, words, 6, 0) == 0
        self.state.hold(False)
        self.completing = Completing(self.state)
        self.machine = Machine(
            ring=self.place,
            table=table,
            memory=memoryview(ffi.buffer(self.table)),
            credits=credit,
            iwarp=iwarp,
            state=self.state,
        )
        self.taken = self.passed = 0
        self.rng = rng

    def _send(self, wr: Any) -> None:
        data, last = wr, wr.next or wr  # on iWARP the word may follow
        assert last.wr_id == (STREAM_MESSAGE | len(self.posted)) << SUB_SHIFT
        post = post_of(wr, self.iwarp)
        piece = data.sg_list if post.length else None
        here = piece and ffi.buffer(ffi.cast("char *", piece.addr), piece.length)
        self.posted.append(post)
        self.sent.append(bytes(here or b""))
        self.signaled.append(bool(last.send_flags & SendFlags.SIGNALED))

    def _take(self, sub: int, **values: int) -> bool:
        wc = ffi.new("struct ibv_wc *")
        wc.wr_id = sub << SUB_SHIFT
        for name, value in values.items():
            setattr(wc, name, value)
        before = fields(self.state), bytes(self.table)
        taken = self.completing.take(wc)
        if not taken:
            assert (fields(self.state), bytes(self.table)) == before, "changed anyway"
        self.taken += taken
        self.passed += not taken
        return taken

    def hear(self, value: int) -> None:
        slot = self.rng.randrange(64) if self.iwarp else 0
        self.words[slot] = value
        values = {"byte_len": 4, "imm_data": socket.htonl(value), "wc_flags": 2}
        if not self._take(STREAM_RECV | slot, **values):
            assert self.state.complete_receive(slot, False) == 0
            self.machine.on_word(value)

    def complete(self, number: int) -> None:
        """The completion of message `number`, which stands for all before it."""
        sub = STREAM_MESSAGE | number & 0x3FFF
        if not self._take(sub):
            for word in self.state.complete_send(sub, False):
                self.machine.completed(word)

    def write(self, data: bytes) -> int:
        return self.state.send(data)

    def control(self) -> None:
        assert self.machine.post_control() == 0

    @property
    def room(self) -> int:
        return self.state.next_place()[1]


class Case:
    """One peer, and the two who hear it."""

    def __init__(self, name: str) -> None:
        rng = self.rng = Random(name)
        credit, depth = rng.choice((1, 2, 5, 20)), rng.choice((6, 12, 40))
        iwarp = bool(rng.randrange(2))
        self.c = InC(rng, credit, depth, iwarp, rng.choice((0, 16, 64)))
        self.memory = bytearray(32)
        self.py = Whole(
            ring=self.c.place,
            table=Place(_address(self.c.table), 0x22, 32),
            memory=memoryview(self.memory),
            credits=credit,
            send_depth=depth,
            iwarp=iwarp,
        )
        hello = Hello(
            rng.choice((1, 6, 300)), 0x10000, 0x77, rng.choice((2, 3)), 0x20000, 0x88,
            rng.choice((3, 40)), big_endian=not iwarp and not rng.randrange(3),
        ).pack()  # fmt: skip
        for machine in (self.c.machine, self.py):
            machine.meet(hello)
            machine.open()
        self.malice = rng.choice((0.0, 0.02, 0.3))
        self.posted: list[Post] = []
        self.under_way: list[Post] = []  # in Python
        self.completed = 0
        self.grew = False

    def both(self, step: Any) -> None:
        """Do the same with both; they raise alike."""
        errors = []
        for side in (self.c, self):
            try:
                step(side)
            except ProtocolError as exc:
                errors.append(str(exc))
        if errors:
            assert len(errors) == 2, f"only one refused: {errors}"
            assert errors[0] == errors[1]
            raise ProtocolError(71, errors[0])

    # What the Python side does in the place of a port

    def hear(self, value: int) -> None:
        self.py.on_word(value)

    def control(self) -> None:
        assert self.py.post_control() == 0
        self.collect()

    def collect(self) -> None:
        while self.py.posted:
            post = self.py.posted.popleft()
            self.posted.append(post)
            self.under_way.append(post)

    def run(self) -> None:
        rng, c, py = self.rng, self.c, self.py
        self.both(lambda side: side.control())
        for _ in range(rng.randint(10, 120)):
            match rng.randrange(9):
                case 0 | 1 | 2:
                    self.say()
                case 3:
                    self.advertise()
                case 4:
                    self.write(rng.randbytes(rng.randint(1, 60)))
                case 5:
                    if py.readable:
                        count = rng.randint(1, py.readable)
                        assert len(c.state.cut(count) or b"") == count
                        py.consume(count)
                        self.collect()
                case 6:
                    self.complete()
                case 7:
                    self.widen()
                case 8:
                    if not rng.randrange(20):
                        end = rng.choice(("shutdown", "disconnect"))
                        getattr(c.machine, end)()
                        getattr(py, end)()
            self.both(lambda side: side.control())
            self.check()

    def widen(self) -> None:
        """A larger ring for both."""
        numbers = self.py.numbers
        if numbers.wider_size or numbers.ring_size > RING:
            return
        for state in (self.c.state, numbers):
            state.widen(_address(self.c.wider), 0x12, WIDER)
        self.grew = True

    def say(self) -> None:
        rng, py = self.rng, self.py
        numbers = py.numbers
        left = numbers.ring_left if numbers.ring_allowed else 0
        limit = numbers.sequence + numbers.allowed
        if rng.random() < self.malice:
            value = word(rng, limit=limit, left=left)
        else:
            most = numbers.sequence + numbers.limit
            value = right_word(rng, limit=rng.randint(limit, most), left=left)
            if value == SHUTDOWN and rng.randrange(10):
                return
        self.both(lambda side: side.hear(value))

    def advertise(self) -> None:
        rng, numbers = self.rng, self.py.numbers
        unfilled = bool(numbers.left) + bool(numbers.spare[2]) + any(self.memory)
        if unfilled >= 2 and rng.random() >= self.malice:
            return
        good = Descriptor(0x30000, 0x99, rng.randint(1, 50)).pack(False)
        if rng.random() < self.malice:
            good = rng.randbytes(16)
        entry = numbers.entry if rng.random() >= self.malice else rng.randrange(2)
        self.memory[16 * entry : 16 * entry + 16] = good
        ffi.memmove(self.c.table + 16 * entry, good, 16)

    def write(self, data: bytes) -> None:
        """As much as C says has gone; Python sends the same in the same pieces."""
        before = len(self.c.posted)
        sent = self.c.write(data)
        done = 0
        for got, payload in zip(self.c.posted[before:], self.c.sent[before:], strict=True):
            post = self.py.write(got.length)
            assert post == got
            assert payload == data[done : done + got.length]
            done += got.length
            self.posted.append(post)
            self.under_way.append(post)
        assert done == sent
        if sent < len(data) and self.py.room:  # the protocol has room, the ring has not
            assert self.in_ring() == SEND

    def in_ring(self) -> int:
        """Bytes of the ring for sending that messages under way have."""
        lengths = [post.length for post in self.under_way if post.word < 1 << 29]
        return sum(length for length in lengths if length > self.c.inline)

    def complete(self) -> None:
        """One of the messages that asked for it completes."""
        told = [
            index for index in range(self.completed, len(self.c.posted)) if self.c.signaled[index]
        ]
        if not told:
            return
        upto = self.rng.choice(told)
        self.c.complete(upto)
        while self.completed <= upto:
            self.completed += 1
            self.py.on_sent(self.under_way.pop(0))
        self.control()

    def check(self) -> None:
        c, py = self.c, self.py
        if c.qp.wrong is not None:
            raise c.qp.wrong
        assert c.posted == self.posted
        assert c.state.readable == py.readable
        assert c.room <= py.room
        for name in ("writable", "eof", "disconnected"):
            assert getattr(c.machine, name) == getattr(py, name), name
        assert bytes(c.table) == bytes(self.memory)
        # Whoever waits for room is told of it.
        numbers = py.numbers
        way = c.signaled[self.completed :]
        if way and not c.room and py.writable and numbers.allowed:
            assert not numbers.left or any(way), "nobody will tell"


def test_c_and_python_agree() -> None:
    print(f"seed {SEED}; AIORDMA_TEST_SEED changes it")
    seen: Counter[str] = Counter()
    for index in range(CASES):
        case = Case(name := f"{SEED}/{index}")
        try:
            case.run()
        except ProtocolError:
            assert case.malice, "a peer that keeps the rules"
            case.check()
            seen["broken"] += 1
        except BaseException as exc:
            exc.add_note(f"case {name}")
            raise
        else:
            seen["over" if case.py.disconnected else "alive"] += 1
        seen["taken"] += case.c.taken
        seen["passed"] += case.c.passed
        seen["moved"] += case.py.numbers.ring_size == WIDER
        seen["untold"] += case.c.signaled.count(False)
    print(seen)
    # A generator that never gets anywhere would show nothing.
    for what in ("broken", "over", "alive", "taken", "passed", "moved", "untold"):
        assert seen[what] > CASES / 50, seen


class Grown:
    """An open stream whose ring has 64 bytes, and that asks for more after 64 that were taken.

    Attributes:
        posted: Its messages.
    """

    def __init__(self) -> None:
        self.memory = ffi.new("uint8_t[]", 1024)
        at = _address(self.memory)
        self.posted: list[Post] = []
        self.state = StreamState(
            ring=(at, 1, RING), table=at + 256, send=(at + 512, SEND, 5), credits=20,
            send_depth=8, iwarp=False, inline_size=0, memory=self.memory,
        )  # fmt: skip
        self.qp = QueuePair(lambda wr: self.posted.append(post_of(wr, False)), lambda _: None)
        assert self.state.bind(self.qp.address, 0, 0, 0, 0) == 0
        self.state.meet(1, (0x20000, 0x88, 100), (0x10000, 0x77, 2), False)
        self.state.open()
        self.state.grow_after(64)
        self._completing = Completing(self.state)

    def hear(self, *lengths: int) -> int:
        """So many bytes arrive in each message; the events."""
        self._completing.events = 0
        for length in lengths:
            assert self._completing.take(completion(STREAM_RECV, length=0, imm=length))
        return self._completing.events

    def announced(self) -> list[Descriptor]:
        """The buffers that the peer was told of, whose messages complete."""
        posts, self.posted[:] = self.posted[:], []
        return [Descriptor.unpack(post.payload, False) for post in posts if post.payload]


@pytest.mark.parametrize(
    ("before", "then", "asks"),
    [
        pytest.param((15, 1), (15, 1), False, id="little"),
        pytest.param((16,), (16,), True, id="much at once"),
        pytest.param((8,) * 4, (8,) * 7, False, id="room is left"),
        pytest.param((8,) * 4, (8,) * 8, True, id="no room is left"),
    ],
)
def test_a_larger_ring_is_asked_for_when_there_is_more_than_fits(
    before: tuple[int, ...], then: tuple[int, ...], asks: bool
) -> None:
    grown = Grown()
    assert not grown.hear(*before) & STREAM_GROW, "the program has taken nothing yet"
    grown.state.cut(sum(before))
    grown.state.grow_after(sum(before))
    assert bool(grown.hear(*then) & STREAM_GROW) is asks


def test_bytes_go_on_in_the_larger_ring() -> None:
    grown = Grown()
    state, at = grown.state, _address(grown.memory)
    ring, wider = ffi.buffer(grown.memory, RING), ffi.new("uint8_t[]", WIDER)
    assert state.announce(False) == 0
    grown.hear(32)
    state.widen(_address(wider), 3, WIDER)
    assert grown.announced() == [Descriptor(at + 32, 1, 32)]
    assert len(state.cut(32) or b"") == 32
    # In the place of the first half comes that of the larger ring.
    assert grown.announced() == [Descriptor(_address(wider), 3, WIDER // 2)]
    grown.hear(22)
    assert len(state.cut(22) or b"") == 22
    assert state.take_word(11) == (STREAM_NO_SPACE, 11, 10)
    ring[RING - 10 : RING] = b"0123456789"
    ffi.memmove(wider, b"abc\ndef", 7)
    grown.hear(10)
    assert state.take_word(WIDER) == (STREAM_NO_SPACE, WIDER, WIDER // 2)
    grown.hear(7)
    assert state.cut(4) == b"0123"
    assert grown.announced() == []
    assert state.cut(8) == b"456789ab"
    # The bytes of the first ring are read: the larger ring goes on by itself.
    assert grown.announced() == [Descriptor(_address(wider) + WIDER // 2, 3, WIDER // 2)]
    assert state.cut(5) == b"c\ndef"


def _completed(sub: int, status: WCStatus = WCStatus.WR_FLUSH_ERR) -> Any:
    wc = ffi.new("struct ibv_wc *")
    wc.wr_id, wc.status = sub << SUB_SHIFT, int(status)
    return wc


def test_at_the_end_the_receives_that_come_back_are_counted() -> None:
    memory = ffi.new("uint8_t[]", 1024)
    at = _address(memory)
    state = StreamState(
        ring=(at, 1, RING), table=at + 256, send=(at + 512, SEND, 5), credits=8,
        send_depth=8, iwarp=False, inline_size=0, memory=None,
    )  # fmt: skip
    completing = Completing(state)
    qp = QueuePair(lambda _: None, lambda _: None)
    assert state.bind(qp.address, 0, 0, 0, 3) == 0
    assert not completing.take(_completed(STREAM_RECV | 1)), "it has not ended"
    assert state.flush()
    assert not state.flush(), "it is flushing already"
    assert completing.take(_completed(STREAM_RECV | 1))
    for other, why in (
        (_completed(STREAM_MESSAGE | 0), "Python knows what it was"),
        (_completed(STREAM_RECV | 2, WCStatus.SUCCESS), "a word"),
        (_completed(STREAM_RECV | 2, WCStatus.LOC_PROT_ERR), "a reason"),
    ):
        assert not completing.take(other), why
    assert (state.posted, completing.events) == (2, 0)
    assert completing.take(_completed(STREAM_RECV | 2))
    assert completing.take(_completed(STREAM_RECV | 3))
    assert (state.posted, completing.events) == (0, STREAM_IDLE)
    assert not completing.take(_completed(STREAM_RECV | 3)), "one too many"
