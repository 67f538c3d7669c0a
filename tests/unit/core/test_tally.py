"""The sums of the process: of states that live, of states that have ended, and of none twice."""

from __future__ import annotations

import asyncio
import gc
from types import SimpleNamespace
from typing import Any

from aiordma._core import MessageState, Registration, totals
from aiordma.verbs.enums import Opcode

from .completing import SIZES, QueuePair


def made(loop: Any, **sizes: int) -> MessageState:
    return MessageState(loop, **(SIZES | sizes))


def gained(before: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(now - then for now, then in zip(totals(), before, strict=True))


def count(state: MessageState, first: int) -> None:
    """Have it send and receive messages, `first` of them and one more, in so many bytes."""
    for number in range(first):
        state.count_large_sent(number)
    for number in range(first + 1):
        state.take_large(number)


def test_no_sum_falls_when_states_end_in_any_order() -> None:
    loop = asyncio.new_event_loop()
    gc.collect()
    before = totals()
    states = [made(loop) for _ in range(4)]
    assert not any(gained(before))
    for state in states:
        count(state, 10)
    del state
    expected = (40, 180, 44, 220, 0, 0, 0, 0, 0)
    assert gained(before) == expected
    for place in (1, 0, 1, 0):  # the middle, the last made, the first made, the only state
        del states[place]
        assert gained(before) == expected
    loop.close()


def test_a_state_counts_until_the_collector_takes_it() -> None:
    loop = asyncio.new_event_loop()
    gc.collect()
    before = totals()
    state = made(loop)
    handler: Any = lambda _, own=state: own  # noqa: E731 - a cycle
    state.set_handler(handler)
    count(state, 1)
    state.close()
    del state
    assert gained(before) == (1, 0, 2, 1, 0, 0, 0, 0, 0)
    gc.collect()
    assert gained(before) == (1, 0, 2, 1, 0, 0, 0, 0, 0)
    loop.close()


def test_operations_are_counted_by_what_they_do() -> None:
    before = totals()
    state = made(SimpleNamespace(is_running=lambda: True))
    adapter = QueuePair(lambda wr: None)
    state.bind(adapter.address, 0, 0, 0, (0,) * 4, (0,) * 4, (0,) * 3, 0)
    state.allow_operations(1, True)
    region = SimpleNamespace(_registration=Registration(4096, 64, 1, 7, None))
    for opcode, length in (
        (Opcode.RDMA_READ, 40),
        (Opcode.RDMA_WRITE, 5),
        (Opcode.RDMA_WRITE_WITH_IMM, 6),
        (Opcode.ATOMIC_FETCH_AND_ADD, 8),
        (Opcode.ATOMIC_CMP_AND_SWP, 8),
    ):
        for error in (None, ValueError("not done")):
            number = state.take_number()
            assert number is not None
            assert state.operate(number, int(opcode), 4096, length, 0, 7, 0, 0, region)
            assert state.ended(number, error) is region
    assert gained(before) == (0, 0, 0, 0, 40, 11, 2, 0, 0)
    del state
    assert gained(before) == (0, 0, 0, 0, 40, 11, 2, 0, 0)


def test_a_state_that_was_not_made_counts_nothing() -> None:
    loop = asyncio.new_event_loop()
    before = totals()
    for _ in range(3):
        try:
            made(loop, arrivals=3)
        except ValueError:
            continue
        raise AssertionError
    gc.collect()
    assert not any(gained(before))
    loop.close()
