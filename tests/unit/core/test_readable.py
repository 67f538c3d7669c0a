"""Readable and Drain: the quick way and the Python way do the same, and keep nobody alive.

`Channel` stands for verbs/comp_channel.py, over the adapter of fake_verbs.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import random
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import ClassVar

import pytest

from aiordma._core import (
    EVENT_ARRIVED,
    EVENT_OPERATED,
    SUB_OPERATE,
    SUB_RECV,
    SUB_SHIFT,
    Drain,
    Readable,
)
from aiordma.endpoint.config import ConnectionConfig
from aiordma.loop.pump import FdPump

from ..conftest import Run
from ..endpoint.fabric import new_state
from .fake_verbs import Adapter

BITS = (EVENT_ARRIVED, EVENT_OPERATED, EVENT_ARRIVED | EVENT_OPERATED)
#: Of an entry that has no state.
_STRANGER = 100
Item = tuple[int, int]


def quick_of(drain: Drain, slow: Callable[[], None]) -> Callable[[], None]:
    """What the loop calls, as the channel makes it."""
    return Readable(drain, slow).run


class Channel:
    """Drains what the test lays down: completions for Python, or for three states.

    Attributes:
        told: Indices of states, and the events of which their owners were told.
        lengths: Of the messages that each has brought.
        python: Ids of the completions that Python was given.
    """

    opened: ClassVar[list[int]] = []

    def __init__(self, *, late: bool = False) -> None:
        self.told: list[Item] = []
        self.lengths: dict[int, list[int]] = {0: [], 1: [], 2: []}
        self.python: list[int] = []
        self.raised: list[BaseException] = []
        self.laid: Counter[int] = Counter()  # messages, by state
        self.slow_calls = 0
        self.in_drain = True
        self.raises: BaseException | None = None
        self.adapter = Adapter()
        self.opened.extend((self.adapter.read_fd, self.adapter.write_fd))
        self.queue = self.adapter.queue(late=late)
        self.drain = self.adapter.drain
        config = ConnectionConfig(raw=True, recv_depth=1024)
        self.states = [new_state(config, None, config.receives, 1) for _ in range(3)]
        for index, state in enumerate(self.states):
            state.allow_operations(4, True)
            state.await_arrival(True)
            self.drain.add(index, state, functools.partial(self.hear, index))

    def lay(self, *items: Item, length: int = 1) -> None:
        """Completions that bring states these events: index and bits."""
        for index, bits in items:
            for bit, sub in ((EVENT_ARRIVED, SUB_RECV), (EVENT_OPERATED, SUB_OPERATE)):
                if bits & bit:
                    slot = self.laid[index] if bit == EVENT_ARRIVED else 0
                    self.laid[index] += bit == EVENT_ARRIVED
                    self.queue.complete(sub + slot << SUB_SHIFT | index, length=length)

    def lay_for_python(self, count: int) -> None:
        for _ in range(count):
            self.queue.complete(_STRANGER)

    def sweep(self) -> None:
        """What was laid down comes without an event."""
        assert self.drain.sweep(self.queue.address) is not None

    def hear(self, index: int, bits: int) -> None:
        assert self.drain.draining == self.in_drain
        self.told.append((index, bits))
        state = self.states[index]
        state.forget_done()
        while (first := state.peek()) is not None:
            self.lengths[index].append(first[1])
            state.skip()
        error, self.raises = self.raises, None
        if error is not None:
            raise error

    def on_readable(self) -> bool:
        """What the channel does with the rest."""
        self.slow_calls += 1
        try:
            done = self.drain.drain()
        except BaseException as exc:
            self.raised.append(exc)
            done = True
        if not done:
            for _, records in self.adapter.note():
                self.python += [record[0] for record in records]
            self.drain.deliver()
        self.drain.finish()
        return False

    def failed(self, exc: BaseException) -> None:
        raise AssertionError from exc


@pytest.fixture(autouse=True)
def closed_descriptors() -> Iterator[None]:
    yield
    while Channel.opened:
        os.close(Channel.opened.pop())


def simple() -> None:
    pytest.fail("it was simple")


@pytest.mark.parametrize("seed", range(30))
def test_both_ways_tell_the_same(seed: int) -> None:
    print("seed", seed)
    rng = random.Random(seed)
    quick, slow = Channel(), Channel()

    def rest() -> None:
        quick.on_readable()

    readable = Readable(quick.drain, rest)
    handled = 0
    for _ in range(60):
        items = [(rng.randrange(3), rng.choice(BITS)) for _ in range(rng.randrange(5))]
        count = rng.randrange(1, 3) if rng.random() < 0.2 else 0
        for channel in (quick, slow):
            if count:
                channel.lay_for_python(count)
            else:
                channel.lay(*items)
        error = rng.choice((None, None, None, ValueError("seen")))
        if rng.random() < 0.1:
            quick.drain.defer()
        before = quick.slow_calls
        if not count and len(items) == 1:
            quick.raises = slow.raises = error
        readable.run()
        slow.on_readable()
        handled += quick.slow_calls == before
        assert quick.told == slow.told
        assert quick.lengths == slow.lengths
        assert quick.python == slow.python
        assert [type(exc) for exc in quick.raised] == [type(exc) for exc in slow.raised]
        assert not quick.drain.draining
        assert not quick.queue.waiting
        quick.raises = slow.raises = None
    assert handled, "the quick way was never gone"
    assert quick.slow_calls, "and neither the other"


def test_news_of_one_that_is_gone_are_not_for_who_has_its_place() -> None:
    channel, told = Channel(), list[int]()
    channel.lay((1, 3), (2, 2))
    channel.sweep()
    channel.drain.remove(1)
    channel.drain.add(1, channel.states[1], told.append)
    channel.in_drain = False
    channel.drain.deliver()
    assert told == [], "a stranger heard of them"
    assert channel.told == [(2, 2)]


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), ValueError("x")])
def test_what_a_task_raises_is_raised_by_drain(error: BaseException) -> None:
    channel = Channel()
    channel.lay((1, 3))
    channel.raises = error
    calls = []

    def slow() -> None:
        calls.append(channel.drain.draining)
        with pytest.raises(type(error)) as caught:
            channel.drain.drain()
        assert caught.value is error
        assert any(entry.name == "hear" for entry in caught.traceback), "where it came from"

    Readable(channel.drain, slow).run()
    assert calls == [True]
    assert channel.told == [(1, 3)]
    assert channel.drain.drain(), "it is raised once"


def left_of(channel: Channel) -> list[int]:
    """How many completions each queue has for Python."""
    return [len(records or ()) for _, records in channel.drain.result()[0]]


def test_what_is_not_simple_is_left_to_drain() -> None:
    channel, done = Channel(), list[bool]()
    readable = Readable(channel.drain, lambda: done.append(channel.drain.drain()))
    channel.lay_for_python(3)
    readable.run()
    assert done == [False]
    assert left_of(channel) == [3]
    channel.lay((0, 1), (1, 1))
    readable.run()
    assert len(done) == 1
    assert channel.told == [(0, 1), (1, 1)]
    readable.run()
    assert len(done) == 1, "nothing came, and all is done"
    channel.lay_for_python(7)
    assert not channel.drain.drain(), "without what the loop calls"
    assert left_of(channel) == [7]


def test_what_was_deferred_calls_python_also_after_a_simple_drain() -> None:
    channel, seen = Channel(), list[tuple[bool, bool]]()

    def slow() -> None:
        seen.append((channel.drain.draining, channel.drain.drain()))

    def hear(bits: int) -> None:
        channel.drain.defer()

    channel.drain.add(0, channel.states[0], hear)
    channel.lay((0, 1))
    Readable(channel.drain, slow).run()
    assert seen == [(True, True)], "it goes on draining, for what was deferred"


def test_one_that_is_stopped_is_not_touched() -> None:
    channel, calls = Channel(), list[int]()
    channel.lay((0, 1))
    channel.drain.stop()
    Readable(channel.drain, lambda: calls.append(1)).run()
    assert calls == [1]
    assert channel.told == []
    assert channel.queue.waiting
    assert channel.adapter.readable


def test_a_state_that_was_removed_hears_nothing() -> None:
    channel = Channel()
    channel.lay((0, 1), (1, 1), (2, 1))
    channel.sweep()
    for index in range(3):
        channel.drain.remove(index)
    channel.in_drain = False
    channel.drain.deliver()
    assert (channel.told, channel.drain.undelivered, channel.drain.n_states) == ([], 0, 0)
    channel.lay((0, 1))
    channel.on_readable()
    assert channel.told == []
    assert channel.python == [(SUB_RECV | 1) << SUB_SHIFT], "it is Python's from now on"


def test_one_that_is_removed_by_another_hears_nothing() -> None:
    channel = Channel()
    channel.drain.add(0, channel.states[0], lambda bits: channel.drain.remove(1))
    channel.lay((0, 1), (1, 1), (2, 1))
    Readable(channel.drain, simple).run()
    assert channel.told == [(2, 1)]


def test_who_takes_a_state_over_hears_its_news() -> None:
    channel, told = Channel(), list[tuple[str, int]]()
    drain, state = channel.drain, channel.states[1]
    drain.add(1, state, lambda bits: told.append(("before", bits)))
    drain.add(
        0, channel.states[0],
        lambda bits: drain.add(1, state, lambda bits: told.append(("after", bits))),
    )  # fmt: skip
    channel.lay((0, 1), (1, 2))
    Readable(drain, simple).run()
    assert told == [("after", 2)]


def test_one_may_remove_itself() -> None:
    channel = Channel()
    told = []

    def hear(bits: int) -> None:
        channel.drain.remove(0)
        gc.collect()
        told.append(bits)

    channel.drain.add(0, channel.states[0], hear)
    del hear
    channel.lay((0, 3))
    Readable(channel.drain, simple).run()
    assert told == [3]


def test_a_dead_drain_leaves_it_to_python() -> None:
    channel, calls = Channel(), list[int]()
    readable = Readable(channel.drain, lambda: calls.append(1))
    gone = weakref.ref(channel.drain)
    del channel
    gc.collect()
    assert gone() is None, "it was kept alive"
    readable.run()
    assert calls == [1]


def test_on_the_loop_nothing_keeps_the_channel_alive(run: Run) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        channel, heard = Channel(), asyncio.Event()
        channel.drain.add(0, channel.states[0], lambda bits: heard.set())
        channel.lay((0, 1))
        pump = FdPump(
            loop, channel.adapter.read_fd, channel.on_readable, channel.failed,
            functools.partial(quick_of, channel.drain),
        )  # fmt: skip
        await heard.wait()
        assert channel.slow_calls == 0, "the quick way"
        gone = weakref.ref(channel), weakref.ref(channel.drain)
        del channel
        gc.collect()
        assert [reference() for reference in gone] == [None, None]
        pump.close()

    run(main())


def test_closing_the_pump_breaks_the_cycle(run: Run) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        channel = Channel()
        drain = channel.drain
        made: list[Readable] = []

        def quick(slow: Callable[[], None]) -> Callable[[], None]:
            made.append(Readable(drain, slow))
            return made[-1].run

        pump = FdPump(loop, channel.adapter.read_fd, channel.on_readable, channel.failed, quick)
        gone = weakref.ref(pump)
        made.clear()
        pump.close()
        gc.disable()
        try:
            del pump, quick
            for _ in range(3):
                await asyncio.sleep(0)
            assert gone() is None, "only the collector would have found it"
        finally:
            gc.enable()

    run(main())


def test_several_are_told_from_c_in_their_order() -> None:
    channel = Channel()
    channel.lay((2, 1), (0, 2), (1, 1))
    Readable(channel.drain, simple).run()
    assert channel.told == [(2, 1), (0, 2), (1, 1)]
    assert channel.drain.undelivered == 0
    assert not channel.drain.draining


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("x")])
def test_what_one_raises_does_not_cost_the_others_their_news(error: BaseException) -> None:
    channel = Channel()
    channel.lay((0, 1), (1, 1), (2, 1))
    channel.raises = error
    raised: list[BaseException] = []

    def slow() -> None:
        with pytest.raises(type(error)) as caught:
            channel.drain.drain()
        raised.append(caught.value)

    readable = Readable(channel.drain, slow)
    readable.run()
    assert raised == [error]
    assert (channel.told, channel.drain.undelivered) == ([(0, 1)], 2)
    channel.lay((0, 2))
    readable.run()
    assert channel.told == [(0, 1), (1, 1), (2, 1), (0, 2)], "older news come first"
    assert len(raised) == 1


def test_news_that_come_while_others_are_told_wait_for_the_next_turn() -> None:
    """A task that was resumed polls, and finds news for whoever was told already."""
    channel, slow_calls = Channel(), list[int]()
    found = 0

    def hear(bits: int) -> None:
        nonlocal found
        channel.hear(0, bits)
        if found < 60:
            found += 1
            channel.lay((0, 1), (1, 1), length=found)
            channel.sweep()
            channel.lay((0, 1))
            channel.sweep()

    channel.drain.add(0, channel.states[0], hear)
    channel.lay((0, 1))
    Readable(channel.drain, lambda: slow_calls.append(channel.drain.undelivered)).run()
    assert channel.told == [(0, 1)]
    assert slow_calls == [3], "it is for Python to have them told later"
    channel.drain.deliver()
    assert channel.told == [(0, 1), (0, 1), (1, 1), (0, 1)]
    assert channel.drain.undelivered == 6, "of the line, which grows"
    while channel.drain.undelivered:
        channel.drain.deliver()
    assert channel.lengths[1] == list(range(1, 61))
    assert len(channel.told) == 1 + 3 * 60


def test_who_is_told_is_drained_again_but_not_for_ever() -> None:
    channel = Channel(late=True)
    rounds = 0

    def hear(bits: int) -> None:
        nonlocal rounds
        rounds += 1
        if rounds < 40:
            channel.lay((0, 1))  # the queue is not armed: no event
        channel.hear(0, bits)

    channel.drain.add(0, channel.states[0], hear)
    channel.lay((0, 1))
    left: list[bool] = []
    readable = Readable(channel.drain, lambda: left.append(channel.drain.drain()))
    readable.run()
    # The turn was over; what is left is for the next, by way of Python.
    assert (rounds, left) == (32, [False])
    assert channel.drain.result() == ([], True, 0, "")
    assert not channel.adapter.readable
    readable.run()
    assert (rounds, len(channel.told), left) == (40, 40, [False])
    assert not channel.drain.draining
    assert channel.queue.armed is False
    assert channel.queue.events == 1


def test_each_turn_begins_with_what_else_has_happened() -> None:
    """A queue that never ends holds up no other for longer than a turn."""
    channel = Channel(late=True)
    other = channel.adapter.queue()

    def hear(bits: int) -> None:
        if len(channel.told) == 4:
            other.complete(SUB_RECV << SUB_SHIFT | 1, length=1)
        channel.lay((0, 1))
        channel.hear(0, bits)

    channel.drain.add(0, channel.states[0], hear)
    channel.lay((0, 1))
    readable = Readable(channel.drain, channel.on_readable)
    readable.run()
    assert channel.told == [(0, 1)] * 32, "it goes on where it was"
    readable.run()
    assert channel.told[32:34] == [(0, 1), (1, 1)]
