"""Two rsockets machines and a slow wire: whatever the order, every byte is right and nobody waits.

Hypothesis chooses sizes, what both programs do, and when each message lands, is handled and
completes.  The sides of joined.py check each write against what the owner of the memory
allows; here the rest: no more messages than credits, no more than two buffers that are not full,
work requests within their budgets, and at the end all bytes and a clean end.
"""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .joined import Side, join, run_wire

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("form")]

# (what, side, number)
PROGRAM = st.lists(
    st.tuples(
        st.sampled_from([
            "write", "write", "write", "control", "control", "land", "land", "land", "handle",
            "handle", "handle", "complete", "complete", "read", "read", "read all", "all",
            "turn", "publish", "withdraw", "shutdown", "disconnect",
        ]),
        st.integers(0, 1),
        st.sampled_from([1, 2, 3, 7, 8, 15, 16, 31, 64, 1000]),
    ),
    min_size=10,
    max_size=150,
)  # fmt: skip
OPTIONS = st.fixed_dictionaries({
    "ring": st.sampled_from([2, 4, 16, 62, 64, 256]),
    "credit": st.sampled_from([1, 2, 3, 4, 9, 100]),
    "send_depth": st.integers(6, 12),
    "slots": st.sampled_from([0, 3]),
})  # fmt: skip


def check(*sides: Side) -> None:
    for side in sides:
        side.check()
        data, control = side.wrs_out
        assert control <= 4
        assert data <= side.send_depth - 4
        assert side.machine.idle == (not data and not control)


def turn(side: Side, size: int) -> None:
    """What a port does when something has happened: everything."""
    while side.handle() or side.complete():
        pass
    while side.read(1 << 20):
        pass
    side.write(size)
    side.control_all()


def step(side: Side, what: str, number: int) -> None:
    match what:
        case "write":
            side.write(number)
        case "control":
            side.control_all()
        case "land":
            side.land()
        case "handle":
            side.handle()
        case "complete":
            side.complete()
        case "read":
            side.read(number)
        case "read all":
            while side.read(1 << 20):
                pass
        case "all":
            run_wire(side)
        case "turn":
            turn(side, number)
        case "publish":
            side.publish(number)
        case "withdraw":
            side.withdraw()
        case "shutdown":
            side.machine.shutdown()
        case "disconnect":
            side.machine.disconnect()
            side.gave_up = True


def settle(a: Side, b: Side) -> None:
    """Deliver and read until nothing happens any more."""
    while run_wire(a, b) + a.read(1 << 20) + b.read(1 << 20):
        check(a, b)


@given(OPTIONS, OPTIONS, st.booleans(), st.integers(0, 20), PROGRAM)
@settings(max_examples=400)
def test_every_order_of_events(
    first: dict[str, int],
    second: dict[str, int],
    iwarp: bool,
    meet_at: int,
    program: list[tuple[str, int, int]],
) -> None:
    a = Side(iwarp=iwarp, **first)
    b = Side(iwarp=iwarp, base=0x7F11_0000_2002, **second)
    a.peer, b.peer = b, a
    b.machine.meet(a.machine.hello())
    # The passive side may send as soon as the active side's adapter has answered, which may look
    # at completions before it looks at the reply.
    b.machine.open()
    met = False
    for number, (what, which, size) in enumerate(program):
        if number >= meet_at and not met:
            a.machine.meet(b.machine.hello())
            a.machine.open()
            met = True
        step((a, b)[which], what, size)
        check(a, b)
    if not met:
        a.machine.meet(b.machine.hello())
        a.machine.open()
    settle(a, b)
    for side in (a, b):
        if not side.gave_up and side.peer.machine.writable:
            shown = side.machine.iomap.mappings()
            assert set(side.peer.published.values()) <= set(shown), "a mapping got lost"
        ended = side.gave_up or side.peer.gave_up or not side.machine.writable
        assert ended or side.write(3), "nobody has anything under way, and no room"
        settle(a, b)
        side.machine.shutdown()
    settle(a, b)
    for side in (a, b):
        machine = side.machine
        # Who gives up reads no more; the other one gets everything that was sent before.
        if not side.gave_up:
            assert side.received == side.peer.sent
        assert machine.eof
        assert machine.disconnected
        assert machine.idle
        assert not machine.writable
        assert machine.next_control() is None
        ends = [word for word in side.control if word >= 0xE0000000]
        assert len(ends) == len(set(ends)) <= 2
        assert sorted(ends, reverse=True) == ends, "SHUTDOWN after DISCONNECT"


@given(OPTIONS, st.booleans(), st.integers(0, 1 << 32))
@settings(max_examples=100)
def test_long_transfers_both_ways(options: dict[str, int], iwarp: bool, seed: int) -> None:
    """Far around the ring and the table, with readers of any speed."""
    a = Side(iwarp=iwarp, **options)
    b = Side(iwarp=iwarp, base=0x7F11_0000_2002, **options)
    join(a, b)
    random = Random(seed)
    total = 5 * options["ring"]
    while len(a.received) < total or len(b.received) < total:
        moved = 0
        for side in random.sample((a, b), 2):
            moved += side.write(random.choice((1, 5, options["ring"])))
            moved += side.control_all()
            for act in (side.land, side.handle, side.complete):
                for _ in range(random.randrange(4)):
                    moved += act()
            moved += side.read(random.choice((1, 3, 1 << 20)))
        check(a, b)
        if not moved:
            assert run_wire(a, b), "both wait for ever"
    settle(a, b)
    assert a.received == b.sent
    assert b.received == a.sent
