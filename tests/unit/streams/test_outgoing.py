"""Outgoing: what waits to be sent costs little more than its bytes, and keeps its order."""

from __future__ import annotations

import random
import sys
from types import SimpleNamespace
from typing import Any

from aiordma.streams.outgoing import Outgoing
from tests.inside.streams import backlog_of

RING = 1000


class State:
    """The ring, and what C does with it."""

    def __init__(self) -> None:
        self.head = 0
        self.ring = bytearray(RING)
        self.sent = bytearray()
        self.credits = 1 << 20

    def next_place(self) -> tuple[int, int]:
        return self.head, RING - self.head if self.credits else 0

    def send_from_ring(self, length: int) -> int:
        assert length, "a message of data that brings none breaks the protocol"
        self.credits -= 1
        self.sent += self.ring[self.head : self.head + length]
        self.head = (self.head + length) % RING
        return 0


def sending(state: State, *larger: bool) -> Outgoing:
    """What sends; `larger` says, each time there is no room, whether there is a larger ring now."""
    asked = iter(larger)
    memory = SimpleNamespace(send=memoryview(state.ring), widen_send=lambda _: next(asked, False))
    machine: Any = None
    port: Any = SimpleNamespace(state=state, memory=memory, check=lambda _: None)
    return Outgoing(port, machine)


def test_g01_small_writes_that_wait_cost_their_bytes() -> None:
    """A client that reads no answers had 12 MB of memory for 64 KiB of them, two bytes each."""
    out = sending(State())
    for _ in range(100_000):
        assert out.keep(b"x\n", 0)
    assert out.size == 200_000
    assert len(backlog_of(out)) < 10
    assert sum(map(sys.getsizeof, backlog_of(out))) < 2 * out.size


def test_what_waits_keeps_its_order_and_its_bytes() -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    state, expected = State(), bytearray()
    out = sending(state)
    for _ in range(400):
        size = rng.choice((1, 2, 100, 4095, 4096, 70_000))
        kind: Any = rng.choice((bytes, bytearray, memoryview))
        content = rng.randbytes(size)
        data = kind(content)
        sent = rng.choice((0, 0, rng.randrange(size + 1)))
        assert out.keep(data, sent) == (sent < size)
        expected += content[sent:]
        if kind is bytearray:
            data[:] = bytes(size)  # it is the caller's again
            data.clear()
        if rng.random() < 0.5:
            for _ in range(rng.randrange(300)):
                out.flush()
    while out.size:
        assert out.flush()
    assert not backlog_of(out)
    assert state.sent == expected


def test_a_larger_ring_without_a_credit_sends_nothing() -> None:
    state = State()
    state.credits = 1
    out = sending(state, True, False, True)
    assert out.keep(b"x" * (RING + 5), 0)
    assert out.flush()
    assert (len(state.sent), out.size) == (RING, 5)
    assert not out.flush(), "no credit has come"
    state.credits = 1
    assert out.flush()
    assert (len(state.sent), out.size) == (RING + 5, 0)
