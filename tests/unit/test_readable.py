"""Readable and Reader: the quick way and the Python way do the same, and keep nobody alive.

`Channel` stands for verbs/comp_channel.py, and its `run` for aio_drain.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import gc
import os
import random
import weakref
from collections.abc import Callable, Iterator

import pytest

from aiordma._ffi import ffi
from aiordma._ffi.fast import Readable, Reader
from aiordma.loop.pump import FdPump
from aiordma.loop.slots import INDEX_BITS

from .conftest import Run

_RUN = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
_ROOM = 4


def quick_of(reader: Reader, slow: Callable[[], None]) -> Callable[[], None]:
    """What the loop calls, as the channel makes it."""
    return Readable(reader, slow).run


class Channel:
    """Drains what the test lays down: each a number for Python, or the news of sinks."""

    def __init__(self) -> None:
        self.events: list[list[int] | int] = []  # next drains: ready items, or completions
        self.told: list[tuple[int, int]] = []
        self.python: list[int] = []
        self.raised: list[BaseException] = []
        self.slow_calls = 0
        self.raises: BaseException | None = None
        self.ready = ffi.new("uint32_t[]", _ROOM)
        self.drain = ffi.new("struct aio_drain *")
        self.drain.ready = self.ready
        self.wcs = ffi.new("struct ibv_wc[]", _ROOM)
        weak = weakref.ref(self)

        def run(drain: int, completions: int, room: int) -> int:
            channel = weak()
            assert channel is not None
            return channel.run(room)

        self.call = _RUN(run)
        address = ctypes.cast(self.call, ctypes.c_void_p).value
        assert address
        self.reader = Reader(
            int(ffi.cast("uintptr_t", self.drain)), int(ffi.cast("uintptr_t", self.wcs)), _ROOM,
            address, 0, (self.drain, self.wcs, self.ready),
        )  # fmt: skip
        for index in range(3):
            self.reader.own(index, functools.partial(self.hear, index))

    def run(self, room: int) -> int:
        assert room == _ROOM
        if not self.events:
            return 0
        event = self.events.pop(0)
        if isinstance(event, int):
            return event
        self.ready[0 : len(event)] = event
        self.drain.n_ready = len(event)
        return len(event) << 16

    def hear(self, index: int, bits: int) -> None:
        assert self.reader.draining
        self.told.append((index, bits))
        error, self.raises = self.raises, None
        if error is not None:
            raise error

    def on_readable(self) -> bool:
        """What the channel does with the rest."""
        self.slow_calls += 1
        self.reader.draining = True
        try:
            took = self.reader.drain()
        except BaseException as exc:
            self.raised.append(exc)
            took = None
        if took is not None:
            if took & 0xFFFF:
                self.python.append(took & 0xFFFF)
            self.reader.tell()
        self.reader.draining = self.reader.deferred = False
        return False

    def failed(self, exc: BaseException) -> None:
        raise AssertionError from exc


def item(index: int, bits: int) -> int:
    return bits << INDEX_BITS | index


@pytest.mark.parametrize("seed", range(30))
def test_both_ways_tell_the_same(seed: int) -> None:
    print("seed", seed)
    rng = random.Random(seed)
    quick, slow = Channel(), Channel()

    def rest() -> None:
        quick.on_readable()

    readable = Readable(quick.reader, rest)
    handled = 0
    for _ in range(60):
        count = rng.randrange(5)
        event: list[int] | int = [item(rng.randrange(4), rng.randrange(1, 8)) for _ in range(count)]
        if rng.random() < 0.2:
            event = rng.randrange(1, 5)
        for channel in (quick, slow):
            channel.events.append(event)
        error = rng.choice((None, None, None, ValueError("seen")))
        if rng.random() < 0.1:
            quick.reader.deferred = True
        before = quick.slow_calls
        if isinstance(event, list) and len(event) == 1:
            quick.raises = slow.raises = error
        readable.run()
        slow.on_readable()
        handled += quick.slow_calls == before
        assert quick.told == slow.told
        assert quick.python == slow.python
        assert [type(exc) for exc in quick.raised] == [type(exc) for exc in slow.raised]
        assert not quick.reader.draining
        assert not quick.events
        quick.raises = slow.raises = None
    assert handled, "the quick way was never gone"
    assert quick.slow_calls, "and neither the other"


def test_news_of_one_that_is_gone_are_not_for_who_has_its_place() -> None:
    channel, told = Channel(), list[int]()
    channel.ready[0:2] = [item(1, 5), item(2, 6)]
    channel.drain.n_ready = 2
    channel.reader.keep()
    channel.reader.own(1, None)
    channel.reader.own(1, told.append)
    channel.reader.draining = True
    channel.reader.tell()
    assert told == [], "a stranger heard of them"
    assert channel.told == [(2, 6)]


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), ValueError("x")])
def test_what_a_task_raises_is_raised_by_drain(error: BaseException) -> None:
    channel = Channel()
    channel.events.append([item(1, 5)])
    channel.raises = error
    calls = []

    def slow() -> None:
        calls.append(channel.reader.draining)
        with pytest.raises(type(error)) as caught:
            channel.reader.drain()
        assert caught.value is error
        assert any(entry.name == "hear" for entry in caught.traceback), "where it came from"

    Readable(channel.reader, slow).run()
    assert calls == [True]
    assert channel.told == [(1, 5)]
    assert channel.reader.drain() is None, "it is raised once"


def test_what_is_not_simple_is_left_to_drain() -> None:
    channel, took = Channel(), list[int | None]()
    readable = Readable(channel.reader, lambda: took.append(channel.reader.drain()))
    channel.events += [3, [item(0, 1), item(1, 1)]]
    readable.run()
    readable.run()
    assert took == [3]
    assert channel.told == [(0, 1), (1, 1)]
    readable.run()
    assert len(took) == 1, "nothing came, and all is done"
    channel.events.append(7)
    assert channel.reader.drain() == 7, "without what the loop calls"


def test_what_was_deferred_calls_python_also_after_a_simple_drain() -> None:
    channel, seen = Channel(), list[tuple[bool, int | None]]()

    def slow() -> None:
        seen.append((channel.reader.draining, channel.reader.drain()))

    def hear(bits: int) -> None:
        channel.reader.deferred = True

    channel.reader.own(0, hear)
    channel.events.append([item(0, 1)])
    Readable(channel.reader, slow).run()
    assert seen == [(True, None)], "it goes on draining, for what was deferred"


def test_one_that_is_stopped_is_not_touched() -> None:
    channel, calls = Channel(), list[int]()
    channel.events.append([item(0, 1)])
    channel.reader.stopped = True
    Readable(channel.reader, lambda: calls.append(1)).run()
    assert calls == [1]
    assert channel.told == []
    assert channel.events


def test_a_sink_that_was_removed_hears_nothing() -> None:
    channel = Channel()
    for index in range(3):
        channel.reader.own(index, None)
    channel.events.append([item(0, 1)])
    Readable(channel.reader, lambda: pytest.fail("it was simple")).run()
    assert channel.told == []
    assert not channel.reader.draining


def test_who_takes_a_sink_over_hears_its_news() -> None:
    channel, told = Channel(), list[tuple[str, int]]()
    channel.reader.own(1, lambda bits: told.append(("before", bits)))
    channel.reader.own(
        0, lambda bits: channel.reader.own(1, lambda bits: told.append(("after", bits)))
    )
    channel.events.append([item(0, 1), item(1, 4)])
    Readable(channel.reader, lambda: pytest.fail("it was simple")).run()
    assert told == [("after", 4)]


def test_one_may_remove_itself() -> None:
    channel = Channel()
    told = []

    def hear(bits: int) -> None:
        channel.reader.own(0, None)
        gc.collect()
        told.append(bits)

    channel.reader.own(0, hear)
    del hear
    channel.events.append([item(0, 6)])
    Readable(channel.reader, lambda: pytest.fail("it was simple")).run()
    assert told == [6]


def test_a_dead_reader_leaves_it_to_python() -> None:
    channel, calls = Channel(), list[int]()
    readable = Readable(channel.reader, lambda: calls.append(1))
    gone = weakref.ref(channel.reader)
    del channel
    gc.collect()
    assert gone() is None, "it was kept alive"
    readable.run()
    assert calls == [1]


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.eventfd(1, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    yield fd
    os.close(fd)


def test_on_the_loop_nothing_keeps_the_channel_alive(run: Run, fd: int) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        channel, heard = Channel(), asyncio.Event()

        def hear(bits: int) -> None:
            os.eventfd_read(fd)
            heard.set()

        channel.reader.own(0, hear)
        channel.events.append([item(0, 1)])
        pump = FdPump(
            loop, fd, channel.on_readable, channel.failed,
            functools.partial(quick_of, channel.reader),
        )  # fmt: skip
        await heard.wait()
        assert channel.slow_calls == 0, "the quick way"
        gone = weakref.ref(channel), weakref.ref(channel.reader)
        del channel
        gc.collect()
        assert [reference() for reference in gone] == [None, None]
        pump.close()

    run(main())


def test_closing_the_pump_breaks_the_cycle(run: Run, fd: int) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        channel = Channel()
        reader = channel.reader
        made: list[Readable] = []

        def quick(slow: Callable[[], None]) -> Callable[[], None]:
            made.append(Readable(reader, slow))
            return made[-1].run

        pump = FdPump(loop, fd, channel.on_readable, channel.failed, quick)
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
    channel.events.append([item(2, 1), item(0, 4), item(1, 1)])
    Readable(channel.reader, lambda: pytest.fail("it was simple")).run()
    assert channel.told == [(2, 1), (0, 4), (1, 1)]
    assert channel.reader.untold == 0
    assert not channel.reader.draining


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("x")])
def test_what_one_raises_does_not_cost_the_others_their_news(error: BaseException) -> None:
    channel = Channel()
    channel.events += [[item(0, 1), item(1, 1), item(2, 1)], [item(0, 2)]]
    channel.raises = error
    raised: list[BaseException] = []

    def slow() -> None:
        with pytest.raises(type(error)) as caught:
            channel.reader.drain()
        raised.append(caught.value)

    readable = Readable(channel.reader, slow)
    readable.run()
    assert raised == [error]
    assert (channel.told, channel.reader.untold) == ([(0, 1)], 2)
    readable.run()
    assert channel.told == [(0, 1), (1, 1), (2, 1), (0, 2)], "older news come first"
    assert len(raised) == 1


def test_news_that_come_while_others_are_told_wait_for_the_next_turn() -> None:
    """A task that was resumed polls, and finds news for whoever was told already."""
    channel, slow_calls = Channel(), list[int]()
    found = 0

    def hear(bits: int) -> None:
        nonlocal found
        channel.told.append((0, bits))
        if found < 60:
            found += 1
            channel.ready[0:3] = [item(0, 1), item(1, found), item(0, 1)]
            channel.drain.n_ready = 3
            channel.reader.keep()

    channel.reader.own(0, hear)
    channel.events.append([item(0, 1)])
    Readable(channel.reader, lambda: slow_calls.append(channel.reader.untold)).run()
    assert channel.told == [(0, 1)]
    assert slow_calls == [3], "it is for Python to have them told later"
    channel.reader.draining = True
    channel.reader.tell()
    assert channel.told == [(0, 1), (0, 1), (1, 1), (0, 1)]
    assert channel.reader.untold == 6, "of the line, which grows"
    while channel.reader.untold:
        channel.reader.tell()
    assert [bits for index, bits in channel.told if index == 1] == list(range(1, 61))
    assert len(channel.told) == 1 + 3 * 60


_AGAIN = 1 << 29


def test_who_is_told_is_drained_again_but_not_for_ever() -> None:
    channel = Channel()
    rounds: list[int] = []
    going_on: list[int] = []

    def run_again(room: int) -> int:
        rounds.append(room)
        going_on.append(channel.drain.again)
        channel.drain.again = 0
        channel.ready[0], channel.drain.n_ready = item(0, 1), 1
        return 1 << 16 | (_AGAIN if len(rounds) % 40 else 0)

    channel.run = run_again  # type: ignore[method-assign]
    left: list[int | None] = []
    readable = Readable(channel.reader, lambda: left.append(channel.reader.drain()))
    readable.run()
    # The turn was over; what is left is for the next, by way of Python.
    assert (len(rounds), len(channel.told), left) == (32, 32, [_AGAIN])
    readable.run()
    assert (len(rounds), len(channel.told), left) == (40, 40, [_AGAIN])
    # Each turn begins with what else has happened: a queue that never ends holds up no other.
    assert going_on == [0, *[1] * 31, 0, *[1] * 7]
    assert not channel.reader.draining
