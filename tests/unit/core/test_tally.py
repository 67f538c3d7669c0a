"""The sums of the process: of states that live, of states that have ended, and of none twice."""

from __future__ import annotations

import asyncio
import gc

from aiordma._core import MessageState, totals


def made(loop: asyncio.AbstractEventLoop) -> MessageState:
    return MessageState(
        loop, sends=1, receives=4, send_depth=1, arrivals=4, controls=1, exchanges=1, answers=1,
        reads=1, raw=False, grows=False,
    )  # fmt: skip


def gained(before: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(now - then for now, then in zip(totals(), before, strict=True))


def count(state: MessageState, first: int) -> None:
    state.messages_sent, state.bytes_sent = first, first + 1
    state.messages_received, state.bytes_received = first + 2, first + 3
    state.bytes_read, state.bytes_written, state.atomics = first + 4, first + 5, first + 6


def test_no_sum_falls_when_states_end_in_any_order() -> None:
    loop = asyncio.new_event_loop()
    gc.collect()
    before = totals()
    states = [made(loop) for _ in range(4)]
    assert not any(gained(before))
    for state in states:
        count(state, 10)
    del state
    expected = (*(4 * each for each in range(10, 17)), 0, 0)
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
    state.handler = lambda _, own=state: own  # a cycle
    count(state, 1)
    state.close()
    del state
    assert gained(before) == (1, 2, 3, 4, 5, 6, 7, 0, 0)
    gc.collect()
    assert gained(before) == (1, 2, 3, 4, 5, 6, 7, 0, 0)
    loop.close()


def test_a_state_that_was_not_made_counts_nothing() -> None:
    loop = asyncio.new_event_loop()
    before = totals()
    for _ in range(3):
        try:
            MessageState(loop, 1, 0, 1, 3, 1, 1, 1, 1, False, False)
        except ValueError:
            continue
        raise AssertionError
    gc.collect()
    assert not any(gained(before))
    loop.close()
