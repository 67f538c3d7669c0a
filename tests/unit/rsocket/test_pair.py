"""Two machines of the rsockets protocol, joined: traces, long runs and unusual sizes."""

from __future__ import annotations

import pytest

from .joined import Side, join, pair, run_wire
from .lone import DISCONNECT

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("form")]


def test_the_trace_of_two_sides() -> None:
    """The messages in the order that two rsockets programs exchange them."""
    a, b = pair(ring=131072, credit=384, send_depth=384)
    assert a.write(5) == 5
    run_wire(a, b)
    assert a.control == b.control == [0x80000180]
    assert b.read(100) == 5
    run_wire(a, b)
    assert b.control == [0x80000180]
    for _ in range(191):
        a.write(1)
        run_wire(a, b)
        b.read(1)
    run_wire(a, b)
    assert b.control == [0x80000180, 0x80000240]
    assert a.advertised == b.advertised == 2
    while len(a.sent) < 65536:
        a.write(2048)
        run_wire(a, b)
        b.read(2048)
        run_wire(a, b)
    assert b.advertised == 3
    b.machine.disconnect()
    run_wire(a, b)
    assert b.control[-1] == DISCONNECT
    assert a.machine.disconnected
    assert b.machine.disconnected
    a.check()
    b.check()


@pytest.mark.parametrize(("credit", "iwarp"), [(384, False), (100, True)])
def test_70000_messages_of_one_byte_each_way(credit: int, iwarp: bool) -> None:
    """Both counts of messages wrap around; 65536 is no multiple of 100, so at different places."""
    a, b = pair(ring=1024, credit=credit, send_depth=64, iwarp=iwarp)
    total = 70_000
    while len(a.received) < total or len(b.received) < total:
        moved = 0
        for side in (a, b):
            while len(side.sent) < total and side.write(1):
                moved += 1
        moved += run_wire(a, b)
        for side in (a, b):
            moved += side.read(1024)
        assert moved, "both wait for ever"
        a.check()
        b.check()
    assert a.received == b.sent
    assert b.received == a.sent
    run_wire(a, b)
    assert 0x80000000 + 65000 < max(a.control) <= 0x8000FFFF
    assert a.control[-1] < 0x80000000 + 5000


def test_the_smallest_ring_and_a_single_credit() -> None:
    a, b = pair(ring=2, credit=1, send_depth=6)
    for number in range(1, 100):
        run_wire(a, b)
        assert a.write(100) == 1
        run_wire(a, b)
        assert b.read(100) == 1
        b.check()
        assert len(b.received) == number


def test_sides_of_different_sizes() -> None:
    a = Side(ring=64, credit=3, send_depth=6)
    b = Side(ring=1 << 16, credit=500, send_depth=300, base=0x7F11_0000_2002, slots=4)
    join(a, b)
    while len(a.received) < 5000 or len(b.received) < 5000:
        moved = a.write(999) + b.write(999) + run_wire(a, b)
        moved += a.read(17) + b.read(1024)
        assert moved
        a.check()
        b.check()
