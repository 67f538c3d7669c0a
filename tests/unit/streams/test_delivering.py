"""Bytes to a protocol, by C and by Python: protocols that raise, call back, close and forget.

C gives a plain protocol its bytes at the end of a drain (`stream_state_deliver`), and Python
whatever C leaves (`Incoming.deliver`).  Each test runs with both; the protocols do what a program
may do to what is calling it.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest

from aiordma._ffi import load_error

from .receiving import Stream

if load_error() is not None:
    pytest.skip(f"no compiled module: {load_error()}", allow_module_level=True)


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
    stream.free()


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


def test_a_buffer_of_references_to_objects_is_not_written_to(stream: Stream) -> None:
    thing = object()
    objects = numpy.array([thing] * 3)

    class Buffered(asyncio.BufferedProtocol):
        def get_buffer(self, sizehint: int) -> Any:
            return objects

    def stop(exc: BaseException) -> None:  # as a transport does
        stream.raised.append(exc)
        stream.state.stop()

    stream.report = stop
    stream.incoming.set_protocol(Buffered())
    stream.say(b"x" * 16)
    assert [type(exc) for exc in stream.raised] == [TypeError]
    assert all(one is thing for one in objects)
