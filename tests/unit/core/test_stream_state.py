"""The data path of streams in C against the protocol in Python, on random conversations.

Two victims hear the same peer, hostile or not.  One is the protocol in Python alone.  The other has
its numbers in a `StreamState` and lets C take every completion that it will; what C does
not take goes to Python, as a port does it.  After each step both say the same, and in the end both
have posted the same messages.
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
    STREAM_RECV,
    SUB_SHIFT,
    StreamState,
)
from aiordma._ffi import ffi, lib, load_error
from aiordma.errors import ProtocolError
from aiordma.rsocket import Descriptor, Hello, Place, Post
from aiordma.verbs.enums import SendFlags, WCStatus
from tests.rsocket_hostile import right_word, word

from ..rsocket.whole import Whole
from .completing import Completing, QueuePair, fields

if load_error() is not None:
    pytest.skip(f"no compiled module: {load_error()}", allow_module_level=True)

SEED = os.environ.get("AIORDMA_TEST_SEED", "20241121")
CASES = 1500
RING, WIDER, SEND = 64, 160, 128
SHUTDOWN = 0xE0000002
#: What C and the protocol in Python both count.
NUMBERS = (
    "readable", "offset", "ring_left", "ring_buffers", "ring_allowed", "ring_free", "ring_next",
    "credits", "consumed", "due", "waiting_count", "addr", "key", "left", "spare_left", "allowed",
    "limit", "sequence", "data_out", "data_limit", "data_wrs", "control_out", "entry", "peer_entry",
    "table_addr", "table_key", "table_length", "swapped", "sending", "crediting", "owing",
    "ring_addr", "ring_rkey", "ring_size", "wider_size", "moved",
)  # fmt: skip


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
        self.iwarp = iwarp
        self.posted: list[tuple[int, int, int, bytes, bool]] = []
        self.receives = 0
        self.qp = QueuePair(self._send, self._receive)
        self.state.bind(self.qp.address, 0, _address(self.words) if iwarp else 0, 6)
        self.state.largest = 1 << 30
        self.state.held = False
        self.completing = Completing(self.state)
        self.machine = Whole(
            ring=self.place,
            table=table,
            memory=memoryview(ffi.buffer(self.table)),
            credits=credit,
            send_depth=depth,
            iwarp=iwarp,
            state=self.state,
        )
        self.machine.begin()
        self.taken = self.passed = 0
        self.rng = rng

    def _send(self, wr: Any) -> None:
        data = wr
        if wr.opcode == lib.IBV_WR_RDMA_WRITE:  # iWARP: the word follows
            wr = wr.next
        assert wr.wr_id == (STREAM_MESSAGE | len(self.posted)) << SUB_SHIFT
        value = socket.ntohl(wr.imm_data)
        if self.iwarp:
            value = int(ffi.cast("uint32_t *", wr.sg_list.addr)[0])
        payload = b""
        if data.opcode != lib.IBV_WR_SEND and data.num_sge:
            piece = data.sg_list
            payload = bytes(ffi.buffer(ffi.cast("char *", piece.addr), piece.length))
        rdma = data.wr.rdma
        addr, key = (rdma.remote_addr, rdma.rkey) if payload else (0, 0)
        signaled = bool(wr.send_flags & SendFlags.SIGNALED)
        self.posted.append((addr, key, value, payload, signaled))

    def _receive(self, wr: Any) -> None:
        while wr:
            self.receives += 1
            wr = wr.next

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
            self.state.used(slot)
            self.machine.on_word(value)

    def complete(self, number: int) -> None:
        """The completion of message `number`, which stands for all before it."""
        sub = STREAM_MESSAGE | number & 0x3FFF
        if not self._take(sub):
            for _ in range(self.state.reach(sub)):
                self.machine.completed(self.state.retire())

    def write(self, data: bytes) -> int:
        return self.state.send(data)

    def control(self) -> None:
        while (post := self.machine.next_control()) is not None:
            self.state.control(post.word, post.wrs, post.payload, post.addr, post.key, True)


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
        self.posted: list[tuple[int, int, int, bytes]] = []
        self.under_way: list[Post] = []  # in Python
        self.completed = 0
        self.ring_left = 0  # bytes of the ring for sending, as Python would count them
        self.given = 0
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
        while (post := self.py.next_control()) is not None:
            self.posted.append((post.addr, post.key, post.word, post.payload))
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
                        self.control()
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
            state.wider_addr, state.wider_rkey = _address(self.c.wider), 0x12
            state.wider_size = WIDER
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
        unfilled = bool(numbers.left) + bool(numbers.spare_left) + any(self.memory)
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
        for addr, key, value, payload, _ in self.c.posted[before:]:
            post = self.py.write(value)
            assert (post.addr, post.key, post.word) == (addr, key, value)
            assert payload == data[done : done + value]
            done += value
            self.posted.append((addr, key, value, payload))
            self.under_way.append(post)
        assert done == sent
        if sent < len(data):  # the protocol has no room, or the ring
            assert not self.py.room or not self.c.state.send_free

    def complete(self) -> None:
        """One of the messages that asked for it completes."""
        told = [
            index for index in range(self.completed, len(self.c.posted)) if self.c.posted[index][4]
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
        assert [one[:4] for one in c.posted] == self.posted
        assert c.machine.readable == py.readable
        assert c.machine.peek() == py.peek()
        assert c.machine.room == py.room
        for name in NUMBERS:
            assert getattr(c.state, name) == getattr(py.numbers, name), name
        if py.numbers.waiting_count:
            assert c.state.first_waiting == py.numbers.first_waiting
        if py.numbers.spare_left:
            for name in ("spare_addr", "spare_key"):
                assert getattr(c.state, name) == getattr(py.numbers, name), name
        for name in ("writable", "eof", "disconnected", "idle", "unsent_control"):
            assert getattr(c.machine, name) == getattr(py, name), name
        assert bytes(c.table) == bytes(self.memory)
        # Whoever waits for room is told of it.
        way = c.posted[self.completed :]
        if way and not c.state.room() and c.state.sending and c.state.allowed:
            assert not c.state.left or any(one[4] for one in way), "nobody will tell"


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
        seen["moved"] += case.c.state.ring_size == WIDER
        seen["untold"] += sum(not one[4] for one in case.c.posted)
    print(seen)
    # A generator that never gets anywhere would show nothing.
    for what in ("broken", "over", "alive", "taken", "passed", "moved", "untold"):
        assert seen[what] > CASES / 50, seen


def _grown(handler: Any = None) -> tuple[StreamState, Completing, Any]:
    """A state whose ring has 64 bytes, and that asks for more after 64 that were taken."""
    memory = ffi.new("uint8_t[]", 1024)
    at = _address(memory)
    state = StreamState(
        ring=(at, 1, RING), table=at + 256, send=(at + 512, SEND, 5), credits=20,
        send_depth=8, iwarp=False, inline_size=0, memory=memory,
    )  # fmt: skip
    Whole(
        ring=Place(at, 1, RING), table=Place(at + 256, 2, 32),
        memory=memoryview(ffi.buffer(memory))[256:288], credits=20, send_depth=8, state=state,
    ).begin()  # fmt: skip
    state.receiving = state.dead = True
    state.grow_at = 64
    return state, Completing(state), memory


def _data(length: int) -> Any:
    wc = ffi.new("struct ibv_wc *")
    wc.wr_id, wc.imm_data, wc.wc_flags = STREAM_RECV << SUB_SHIFT, socket.htonl(length), 2
    return wc


@pytest.mark.parametrize(
    ("lengths", "asks"),
    [
        pytest.param((15, 1), False, id="little"),
        pytest.param((16,), True, id="much at once"),
        pytest.param((8, 8, 8, 8), True, id="no room is left"),
    ],
)
def test_a_larger_ring_is_asked_for_when_there_is_more_than_fits(
    lengths: tuple[int, ...], asks: bool
) -> None:
    state, completing, _memory = _grown()
    for length in lengths:
        completing.take(_data(length))
    assert not completing.events & STREAM_GROW, "the program has taken nothing yet"
    state.cut(state.readable)
    state.ring_left, state.grow_at = 32, sum(lengths)
    for length in lengths:
        completing.take(_data(length))
    assert bool(completing.events & STREAM_GROW) is asks


def test_bytes_go_on_in_the_larger_ring() -> None:
    state, completing, memory = _grown()
    ring, wider = ffi.buffer(memory, RING), ffi.new("uint8_t[]", WIDER)
    state.wider_addr, state.wider_rkey, state.wider_size = _address(wider), 3, WIDER
    state.moved, state.ring_free, state.ring_next = True, 0, 0
    state.ring_left, state.ring_buffers = 10, 1
    state.offset = RING - 10
    ring[RING - 10 : RING] = b"0123456789"
    ffi.memmove(wider, b"abc\ndef", 7)
    completing.take(_data(10))
    assert state.ring_left == WIDER // 2
    completing.take(_data(7))
    assert state.cut(4) == b"0123"
    assert state.cut(8) == b"456789ab"
    assert (state.moved, state.ring_size, state.ring_addr) == (False, WIDER, _address(wider))
    assert (state.offset, state.ring_free, state.ring_next) == (2, WIDER // 2 + 2, WIDER // 2)
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
    state.posted = 3
    assert not completing.take(_completed(STREAM_RECV | 1)), "it has not ended"
    state.flushing = True
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
