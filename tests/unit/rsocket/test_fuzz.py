"""10,000 hostile peers against one machine each, and an oracle of what the protocol allows.

The victim takes what is right, raises ProtocolError for what is not, and nothing else happens:
no other exception, no post outside of what the peer advertised, no bytes or messages waiting
beyond what was announced.  The oracle is written from the rules, not from the machine: it counts
in totals, where the machine counts what is left.
"""

from __future__ import annotations

import os
from collections import Counter
from random import Random

import pytest

from aiordma.errors import ProtocolError
from aiordma.rsocket import Descriptor, Hello, Place
from tests.rsocket_hostile import descriptor, number, private_data, right_word, word

from . import forms
from .whole import Post

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("form")]

SEED = os.environ.get("AIORDMA_TEST_SEED", "20241121")
CASES = 10_000
PARTS = 4
RING, MEMORY = forms.memory_of(64, 0x11)  # whose bytes mean nothing
TABLE = Place(0x7100_0000, 0x22, 32 + 2 * 24)
HALF = RING.size // 2
GOOD = Hello(6, 0x10000, 0x77, 2, 0x20000, 0x88, 40)


class Case:
    """One victim, what it was told, and what it may therefore do."""

    def __init__(self, name: str) -> None:
        self.rng = Random(name)
        self.table = bytearray(TABLE.size)
        self.credit = self.rng.choice((1, 2, 5, 20))
        self.machine = forms.new(
            ring=RING,
            table=TABLE,
            memory=memoryview(self.table),
            credits=self.credit,
            send_depth=self.rng.choice((6, 12)),
            iwarp=bool(self.rng.randrange(2)),
        )
        self.out: list[Post] = []
        self.buffers: list[Descriptor] = []  # all that the peer ever advertised
        self.hello: Hello | None = None
        self.early = 0
        # How often this peer breaks the rules: the one that rarely does gets further.
        self.malice = self.rng.choice((0.0, 0.01, 0.05, 0.5))
        self.is_open = False
        # Sending: messages posted, and the number up to which they were allowed.
        self.sent = 0
        self.sent_bytes = 0
        self.limit = 0
        self.given: list[int] = []  # where in the stream each buffer of a good peer ends
        # Receiving: buffers advertised, bytes, messages; ends of messages not consumed.
        self.advertised = 1
        self.arrived = 0
        self.consumed = 0
        self.repaid = 0
        self.stated = self.credit
        self.messages = 0
        self.ends: list[int] = []
        self.ended = False

    def run(self) -> str:
        """The whole life of the victim; how it ended."""
        rng = self.rng
        try:
            if not rng.randrange(8):
                for _ in range(rng.choice((1, 3, 100))):
                    self.hear_early()
            self.meet()
            if self.early:
                return "early"  # what was said then is not followed here
            for _ in range(rng.randint(5, 80)):
                self.act()
                self.check()
        except ProtocolError:
            assert self.malice or not self.hello, "a peer that keeps the rules"
            how = "broken"
        else:
            how = "over" if self.machine.disconnected else "alive"
        finally:
            self.end()
        return how if self.hello else "refused"

    def meet(self) -> None:
        data = private_data(self.rng, GOOD) if self.rng.randrange(2) else GOOD.pack()
        early = self.early
        try:
            self.machine.meet(data)
        except ProtocolError:
            # What comes early is random, the oracle knows only handshakes without it.
            if not early:
                self.judge_hello(data, taken=False)
            raise
        self.hello = Hello.parse(data)
        self.judge_hello(data, taken=True)
        self.limit = self.hello.credits
        self.given = [self.hello.buffer_length]
        self.buffers.append(
            Descriptor(self.hello.buffer_addr, self.hello.buffer_key, self.hello.buffer_length)
        )
        if self.rng.randrange(8):
            self.machine.open()
            self.is_open = True

    def judge_hello(self, data: bytes, *, taken: bool) -> None:
        def field(start: int, size: int) -> int:
            return int.from_bytes(data[start : start + size], "big")

        slots = data[7] if len(data) > 7 and data[1] & 2 else 0
        slots = slots if slots <= 128 else (slots & 0x7F) * 256
        right = (
            len(data) >= 40
            and data[0] == 1
            and field(2, 2) > 0
            and 2 <= field(20, 4) <= 1024
            and field(8, 8) + 16 * field(20, 4) + 24 * slots <= 1 << 64
            and field(36, 4) > 0
            and field(24, 8) + field(36, 4) <= 1 << 64
        )
        foreign = len(data) > 1 and data[1] & 1
        # iWARP does not take the other byte order.
        assert taken == right or (right and foreign), data.hex()

    def hear_early(self) -> None:
        self.machine.on_word(word(self.rng, limit=6, left=HALF))
        self.early += 1
        assert self.early <= self.credit + 64

    # -- what happens

    def act(self) -> None:
        rng = self.rng
        match rng.randrange(12):
            case 0 | 1 | 2 | 3:
                self.hear(self.choose())
            case 4:
                if rng.random() < self.malice:
                    start = rng.choice((0, 16))
                    good = Descriptor(0x40000, 0x99, rng.randint(1, 50))
                    self.table[start : start + 16] = descriptor(rng, good)
                else:
                    self.advertise()
                if rng.randrange(3):
                    self.hear(0x80000000 | self.limit & 0xFFFF)
            case 5 if rng.random() < self.malice:
                start = rng.randrange(len(self.table))
                noise = rng.randbytes(rng.randint(1, len(self.table) - start))
                self.table[start : start + len(noise)] = noise
            case 6 | 7:
                self.write()
            case 8:
                if self.machine.readable:
                    self.consume(rng.randint(1, self.machine.readable))
            case 9:
                while (post := self.machine.next_control()) is not None:
                    self.posted_control(post)
            case 10:
                for _ in range(rng.randint(1, 4)):
                    if self.out:
                        self.machine.on_sent(self.out.pop(0))
            case 11:
                if not rng.randrange(15):
                    rng.choice((self.machine.shutdown, self.machine.disconnect))()

    def choose(self) -> int:
        left = 0 if self.ended or self.messages >= self.stated else self.left()
        if self.rng.random() < self.malice:
            return word(self.rng, limit=self.limit, left=left)
        assert self.hello
        most = self.sent + self.hello.credits
        unused = (self.limit - self.sent) & 0xFFFF
        return right_word(self.rng, limit=self.rng.randint(self.sent + unused, most), left=left)

    def advertise(self) -> None:
        """Advertise a buffer as a peer does that keeps the rules, if it may."""
        if len([end for end in self.given if end > self.sent_bytes]) == 2:
            return
        addr = 0x30000 + 0x1000 * self.rng.randrange(8)
        good = Descriptor(addr, 0x99, self.rng.randint(1, 50))
        start = 16 * (len(self.given) % 2)
        self.table[start : start + 16] = good.pack(False)
        self.given.append(self.given[-1] + good.length)

    def left(self) -> int:
        return min(self.advertised * HALF, (self.arrived // HALF + 1) * HALF) - self.arrived

    def hear(self, value: int) -> None:
        if self.machine.disconnected:
            self.machine.on_word(value)
            return
        kind, rest = value >> 29, value & 0x1FFFFFFF
        data = kind == 0
        if data:
            right = not self.ended and 0 < rest <= self.left() and self.messages < self.stated
        elif kind == 4:
            assert self.hello
            before = (self.limit - self.sent) & 0xFFFF
            right = before <= (rest - self.sent) & 0xFFFF <= self.hello.credits
            shown = [Descriptor(*_entry(self.table, entry)) for entry in (0, 1)]
            self.buffers += [one for one in shown if one.length]
        elif kind == 6:
            right = not self.ended and rest & 0xFFFF < 2 and self.messages < self.stated
        else:
            right = kind == 7
        try:
            self.machine.on_word(value)
        except ProtocolError:
            bad_entry = kind == 4 and any(self.table[:32])
            assert not right or bad_entry, f"{value:#x} was right"
            raise
        assert right, f"{value:#x} was taken"
        if data:
            self.messages += 1
            self.arrived += rest
            self.ends.append(self.arrived)
        elif kind == 6:
            self.messages += 1
            self.repaid += 1
        elif kind == 4:
            self.limit = rest
        elif kind == 7 and rest in (0, 2):
            self.ended = True

    def write(self) -> None:
        machine = self.machine
        allowed = (self.limit - self.sent) & 0xFFFF
        if not machine.room:
            with pytest.raises(ValueError, match="room for 0"):
                machine.write(1)
            return
        assert allowed, "a message without a credit"
        assert self.is_open
        wanted = number(self.rng, 30) or 1
        post = machine.write(wanted)
        assert 0 < post.length <= wanted
        assert post.word == post.length
        assert post.payload == b""
        assert any(
            one.key == post.key
            and one.addr <= post.addr
            and post.addr + post.length <= one.addr + one.length
            for one in self.buffers
        ), f"{post} is outside of {self.buffers}"
        self.sent += 1
        self.sent_bytes += post.length
        self.out.append(post)

    def consume(self, size: int) -> None:
        self.machine.consume(size)
        self.consumed += size
        while self.ends and self.ends[0] <= self.consumed:
            del self.ends[0]
            self.repaid += 1
        while self.machine.posted:
            self.posted_control(self.machine.posted.popleft())

    def posted_control(self, post: Post) -> None:
        assert self.hello
        assert self.is_open
        assert len(post.payload) == post.length
        if post.word >> 29 == 4:
            self.stated = self.repaid + self.credit
            assert post.word & 0x1FFFFFFF == self.stated & 0xFFFF
        else:
            assert post.word in (0xE0000000, 0xE0000002)
        if post.length:
            offset = post.addr - self.hello.table_addr
            assert post.key == self.hello.table_key
            assert offset in range(0, 16 * self.hello.table_length, 16)
            half = Descriptor.unpack(post.payload, self.hello.big_endian)
            assert half == (RING.addr + self.advertised % 2 * HALF, RING.key, HALF)
            # The half was read to its end before it is given away again.
            assert (self.advertised - 1) * HALF <= self.consumed
            self.advertised += 1
        self.out.append(post)

    def check(self) -> None:
        machine = self.machine
        assert machine.readable == self.arrived - self.consumed <= RING.size
        assert len(self.ends) <= self.credit
        assert sum(post.wrs for post in self.out if post.word >> 29) <= 4

    def end(self) -> None:
        """Whatever happened: it ends, and what arrived can be read."""
        machine = self.machine
        machine.lost()
        assert machine.eof
        assert machine.disconnected
        assert machine.room == 0
        assert machine.next_control() is None
        for post in self.out:
            machine.on_sent(post)
        assert machine.idle
        machine.on_word(self.rng.getrandbits(32))
        self.out.clear()
        if not self.early:
            self.check()
        machine.consume(machine.readable)


def _entry(table: bytearray, entry: int) -> tuple[int, int, int]:
    data = table[16 * entry : 16 * entry + 16]
    return tuple(int.from_bytes(data[a:b], "little") for a, b in ((0, 8), (8, 12), (12, 16)))  # type: ignore[return-value]


@pytest.mark.parametrize("part", range(PARTS))
def test_hostile_peers(part: int) -> None:
    print(f"seed {SEED}; AIORDMA_TEST_SEED changes it")
    ends: Counter[str] = Counter()
    for index in range(part, CASES, PARTS):
        name = f"{SEED}/{index}"
        try:
            ends[Case(name).run()] += 1
        except BaseException as exc:
            exc.add_note(f"case {name}")
            raise
    # A generator that never gets anywhere, or always, would show nothing.
    print(ends)
    for how in ("refused", "broken", "over", "alive"):
        assert ends[how] >= CASES / PARTS / 50, ends
