"""Bytes to a protocol, by C and by Python: protocols that raise, call back, close and forget.

C gives a plain protocol its bytes at the end of a drain (`aio_stream_events`), and Python whatever
C leaves (`Incoming.deliver`).  Each test runs with both; the protocols do what a program may do to
what is calling it.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from aiordma._core import STREAM_RECV, SUB_SHIFT, Readable, StreamState
from aiordma._ffi import ffi, load_error
from aiordma.rsocket import Hello, Machine, Place
from aiordma.streams.incoming import Incoming

from ..core.completing import QueuePair
from ..core.fake_verbs import Adapter

if load_error() is not None:
    pytest.skip(f"no compiled module: {load_error()}", allow_module_level=True)

RING, SLOTS = 64, 8
PEER = Hello(40, 0x10000, 0x77, 2, 0x20000, 0x88, 40)


def _address(memory: Any) -> int:
    return int(ffi.cast("uintptr_t", memory))


class Stream:
    """The receiving half of a stream, whose peer and adapter are the test.

    Attributes:
        form: How the protocol gets its bytes.
        raised: What the protocol raised, as the transport is told of it.
        ended: What came out of the drain, to the loop.
        soon: How often another turn was asked for.
        told: How often Python had to deliver.
        report: What hears of an exception of the protocol.
    """

    def __init__(self, form: str, loop: asyncio.AbstractEventLoop) -> None:
        self.form = form
        self.raised: list[BaseException] = []
        self.ended: list[BaseException] = []
        self.soon = self.told = 0
        self.report: Callable[[BaseException], None] = self.raised.append
        self._ring = ffi.new("uint8_t[]", RING)
        self._table = ffi.new("uint8_t[]", 32)
        self._words = ffi.new("uint32_t[]", SLOTS)
        self._qp = QueuePair(lambda _: None, lambda _: None)
        ring = (_address(self._ring), 0x11, RING)
        self.state = StreamState(
            ring=ring, table=_address(self._table), send=(0, 64, 0), credits=SLOTS, send_depth=10,
            iwarp=True, inline_size=0, memory=None,
        )  # fmt: skip
        self.state.bind(self._qp.address, 0, _address(self._words), 0)
        machine = Machine(
            ring=Place(*ring), table=Place(_address(self._table), 0x22, 32),
            memory=memoryview(ffi.buffer(self._table)), send_depth=10, iwarp=True, state=self.state,
        )  # fmt: skip
        machine.meet(PEER.pack())
        machine.begin()
        self.loop = loop
        self.incoming = Incoming(self, machine, self)
        self.adapter = Adapter()
        self._queue = self.adapter.queue()
        self._said = 0
        if form == "by C":
            self.state.run = lambda function, data: function(data)
        # Without `run` C gives the protocol nothing.
        self.state.handler = self
        self.adapter.drain.add(0, self.state, cast("Any", self.state))
        self.readable = Readable(self.adapter.drain, self._slow)

    def check(self, code: int) -> None:
        pytest.fail("the stream has no reason to end")

    # What C and the receiving half tell a stream

    def _on_events(self, events: int) -> None:
        self.told += 1
        self.incoming.deliver()

    def _on_attention(self) -> None:
        self._soon()

    def _on_raised(self, exc: BaseException) -> None:
        self.report(exc)

    def _soon(self) -> None:
        self.soon += 1

    def _fatal_error(self, exc: BaseException, message: str) -> None:
        self.report(exc)

    def close(self) -> None:
        self.check(0)

    def _slow(self) -> None:
        """What the channel does with an exception: it is the loop's."""
        try:
            self.adapter.drain.drain()
        except BaseException as exc:
            self.ended.append(exc)

    def lay(self, data: bytes) -> None:
        """The bytes of one message land, and the word that follows completes a receive."""
        at = self._said % RING
        assert at + len(data) <= RING
        ffi.memmove(self._ring + at, data, len(data))
        slot = self._said % SLOTS
        self._words[slot] = len(data)
        self._said += len(data)
        self._queue.complete((STREAM_RECV | slot) << SUB_SHIFT, length=4)

    def say(self, data: bytes) -> None:
        """The same, and the loop calls the drain."""
        self.lay(data)
        self.readable.run()

    def forget(self) -> None:
        """As at the end: nothing leads to the state any more but its caller."""
        self.adapter.drain.remove(0)
        self.incoming.part()
        self.report = lambda _: None
        self.state.protocol = self.state.run = self.state.wakeup = None
        del self.incoming, self.state, self.readable


class Protocol(asyncio.Protocol):
    """Does as it was told, with the first bytes."""

    def __init__(self, evil: Callable[[bytes], object] = bool) -> None:
        self.got: list[bytes] = []
        self.evil: Callable[[bytes], object] = evil

    def data_received(self, data: bytes) -> None:
        self.got.append(data)
        evil, self.evil = self.evil, bool
        evil(data)


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(params=["by C", "by Python"])
def stream(request: pytest.FixtureRequest, loop: asyncio.AbstractEventLoop) -> Iterator[Stream]:
    stream = Stream(request.param, loop)
    yield stream
    adapter = stream.adapter
    os.close(adapter.read_fd)
    os.close(adapter.write_fd)


def _raising(exc: BaseException) -> Callable[[bytes], object]:
    def evil(_: bytes) -> None:
        raise exc

    return evil


def test_a_good_one(stream: Stream) -> None:
    protocol = Protocol()
    stream.incoming.set_protocol(protocol)
    for data in (b"one", b"two", b"x" * 20):
        stream.say(data)
    assert protocol.got == [b"one", b"two", b"x" * 20]
    assert stream.told == (0 if stream.form == "by C" else 3)
    assert (stream.raised, stream.ended) == ([], [])


def test_one_that_raises_is_reported_once_and_the_rest_is_its_too(stream: Stream) -> None:
    error = ValueError("of the program")
    protocol = Protocol(_raising(error))
    stream.incoming.set_protocol(protocol)
    stream.say(b"one")
    assert (stream.raised, stream.ended) == ([error], [])
    stream.say(b"two")
    assert protocol.got == [b"one", b"two"]


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_what_ends_the_loop_reaches_it(stream: Stream, error: BaseException) -> None:
    protocol = Protocol(_raising(error))
    stream.incoming.set_protocol(protocol)
    stream.say(b"one")
    assert (stream.raised, stream.ended) == ([], [error])
    stream.say(b"two")
    assert protocol.got == [b"one", b"two"], "the drain goes on"


def test_a_report_that_raises_reaches_the_loop(stream: Stream) -> None:
    error = ValueError("of the report")

    def report(exc: BaseException) -> None:
        raise error from exc

    stream.report = report
    stream.incoming.set_protocol(Protocol(_raising(ValueError("of the program"))))
    stream.say(b"one")
    assert stream.ended == [error]


def test_one_without_the_method(stream: Stream) -> None:
    stream.incoming.set_protocol(object())
    stream.say(b"one")
    assert [type(exc) for exc in stream.raised] == [AttributeError]
    assert not stream.state.readable


def test_more_comes_while_it_is_called(stream: Stream) -> None:
    def evil(_: bytes) -> None:
        stream.lay(b"two")
        stream.readable.run()  # as a nested loop would
        stream.lay(b"three")

    protocol = Protocol(evil)
    stream.incoming.set_protocol(protocol)
    stream.say(b"one")
    stream.readable.run()
    stream.say(b"four")
    assert b"".join(protocol.got) == b"onetwothreefour"
    assert (stream.raised, stream.ended) == ([], [])


def test_it_takes_the_rest_by_itself(stream: Stream) -> None:
    taken = []

    def evil(_: bytes) -> None:
        stream.lay(b"two")
        stream.readable.run()
        stream.incoming.deliver()
        taken.append(stream.incoming.some(10))

    protocol = Protocol(evil)
    stream.incoming.set_protocol(protocol)
    stream.say(b"one")
    stream.readable.run()
    assert b"".join([*protocol.got, *taken]) == b"onetwo"


def test_it_stops_the_stream(stream: Stream) -> None:
    def evil(_: bytes) -> None:
        stream.incoming.stop()

    protocol = Protocol(evil)
    stream.incoming.set_protocol(protocol)
    stream.lay(b"one")
    stream.readable.run()
    stream.say(b"two")
    assert protocol.got == [b"one"]


def test_it_pauses_and_goes_on(stream: Stream) -> None:
    def evil(_: bytes) -> None:
        stream.incoming.pause(True)

    protocol = Protocol(evil)
    stream.incoming.set_protocol(protocol)
    stream.say(b"one")
    stream.say(b"two")
    assert protocol.got == [b"one"]
    stream.incoming.pause(False)
    stream.incoming.deliver()
    assert protocol.got == [b"one", b"two"]


def test_another_protocol_takes_over(stream: Stream) -> None:
    second = Protocol()
    first = Protocol(lambda _: stream.incoming.set_protocol(second))
    stream.incoming.set_protocol(first)
    stream.say(b"one")
    stream.say(b"two")
    assert (first.got, second.got) == ([b"one"], [b"two"])


def test_looking_for_the_method_changes_everything(stream: Stream) -> None:
    """It is looked up at each call, and what the look-up does has happened by then."""
    second = Protocol()

    class Shy:
        @property
        def data_received(self) -> Callable[[bytes], None]:
            stream.incoming.set_protocol(second)
            stream.lay(b"two")
            return got.append

    got: list[bytes] = []
    stream.incoming.set_protocol(Shy())
    stream.say(b"one")
    stream.readable.run()
    assert (got, b"".join(second.got)) == ([b"one"], b"two")


def test_it_forgets_everything(stream: Stream) -> None:
    """The last references go while C is in the call: the state, its callbacks, the protocol."""

    class Owner:
        pass

    owner = Owner()
    gone: list[weakref.ref[object]] = [weakref.ref(owner)]

    def evil(_: bytes) -> None:
        stream.forget()
        gc.collect()

    def hold(owner: object, data: bytes) -> None:
        evil(data)

    protocol = Protocol(functools.partial(hold, owner))
    got = protocol.got
    gone.append(weakref.ref(protocol))
    readable = stream.readable
    stream.incoming.set_protocol(protocol)
    del protocol, owner
    stream.lay(b"one")
    readable.run()
    gc.collect()
    assert got == [b"one"]
    assert [reference() for reference in gone] == [None, None]


def test_it_forgets_everything_and_raises(stream: Stream) -> None:
    """What tells of the exception is gone by then, with the state."""

    def evil(_: bytes) -> None:
        stream.forget()
        gc.collect()
        raise ValueError("too late")

    readable, raised = stream.readable, stream.raised
    stream.incoming.set_protocol(Protocol(evil))
    stream.lay(b"one")
    readable.run()
    assert (raised, stream.ended) == ([], [])
