"""RdmaStreamReader: bytes that a task gets without the protocol, as asyncio's reader gives them."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
from collections.abc import Iterator
from random import Random
from typing import Any

import numpy
import pytest

from aiordma._ffi import load_error
from aiordma.rsocket.wire import Control, Kind, pack_word
from aiordma.streams.stream_reader import RdmaStreamReader, RdmaStreamWriter
from aiordma.streams.transport import RdmaTransport

from .receiving import Stream

if load_error() is not None:
    pytest.skip(f"no compiled module: {load_error()}", allow_module_level=True)

SEED = os.environ.get("AIORDMA_TEST_SEED", "20241121")
LIMIT = 20


class Transport(RdmaTransport):
    """A transport of which there is the receiving half only."""

    _over = True

    def __init__(self, stream: Stream) -> None:
        self._in = stream.incoming

    def pause_reading(self) -> None:
        """As the transport's."""
        self._in.pause(True)

    def resume_reading(self) -> None:
        """As the transport's."""
        self._in.pause(False)


class Scene:
    """A reader over a stream, whose peer is the test, in a loop that runs when the test says."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.loop = asyncio.new_event_loop()
        self.stream = Stream("by C", self.loop)
        self.stream.open()
        self.reader = RdmaStreamReader(limit=limit, loop=self.loop)
        self.reader.set_transport(Transport(self.stream))
        self.stream.incoming.set_protocol(asyncio.StreamReaderProtocol(self.reader, loop=self.loop))

    def turn(self) -> None:
        """One turn of the loop, and what the stream has left for it."""
        self.loop.run_until_complete(asyncio.sleep(0))
        self.stream.incoming.deliver()

    def start(self, coroutine: Any) -> asyncio.Task[bytes]:
        """Run a task until it waits."""
        task: asyncio.Task[bytes] = self.loop.create_task(coroutine)
        self.turn()
        return task

    def result(self, task: asyncio.Task[bytes]) -> bytes:
        """The end of a task that does not wait any more."""

        async def end() -> bytes:
            async with asyncio.timeout(5):
                return await task

        return self.loop.run_until_complete(end())

    def read(self, coroutine: Any) -> bytes:
        """The result of a read that does not have to wait."""
        return self.result(self.start(coroutine))

    def close(self) -> None:
        """Give everything back."""
        self.loop.close()
        self.stream.free()


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.close()


def test_a_line_ends_the_wait_in_the_drain(scene: Scene) -> None:
    task = scene.start(scene.reader.readline())
    assert scene.stream.state.waiting
    scene.stream.send(b"one\ntwo")
    assert scene.result(task) == b"one\n"
    task = scene.start(scene.reader.readline())
    assert not task.done()
    scene.stream.send(b"\n")
    assert scene.result(task) == b"two\n"
    assert not scene.stream.told, "Python had to deliver"


def test_a_line_in_pieces(scene: Scene) -> None:
    task = scene.start(scene.reader.readline())
    for piece in (b"on", b"e ", b"li", b"ne\nt"):
        assert not task.done()
        scene.stream.send(piece)
        scene.turn()
    assert scene.result(task) == b"one line\n"
    scene.stream.send(b"wo\n")
    assert scene.read(scene.reader.readline()) == b"two\n"


def test_a_separator_lies_at_both_ends_of_the_ring(scene: Scene) -> None:
    scene.stream.send(b"x" * 30)
    scene.stream.send(b"y" * 30)
    assert scene.read(scene.reader.readexactly(60)) == b"x" * 30 + b"y" * 30
    task = scene.start(scene.reader.readuntil(b"<end>"))
    scene.stream.send(b"a<e<")  # up to the end of the ring
    scene.turn()
    assert not task.done()
    scene.stream.send(b"end>more")
    assert scene.result(task) == b"a<e<end>"


@pytest.mark.parametrize("length", [LIMIT, LIMIT + 1])
def test_the_limit_of_a_line(scene: Scene, length: int) -> None:
    task = scene.start(scene.reader.readline())
    line = b"x" * length + b"\n"
    scene.stream.send(line + b"next\n")
    if length > LIMIT:
        with pytest.raises(ValueError, match="longer than limit"):
            scene.result(task)
    else:
        assert scene.result(task) == line
    assert scene.read(scene.reader.readline()) == b"next\n"


def test_a_line_without_end(scene: Scene) -> None:
    task = scene.start(scene.reader.readuntil(b"\n"))
    scene.stream.send(b"x" * (LIMIT + 1))
    with pytest.raises(asyncio.LimitOverrunError, match="not found"):
        scene.result(task)
    assert scene.read(scene.reader.read(99)) == b"x" * (LIMIT + 1)


@pytest.mark.parametrize("separator", [b"", b"\n", b"ab"])
def test_the_end_of_the_stream(scene: Scene, separator: bytes) -> None:
    if not separator:
        with pytest.raises(ValueError, match="at least one-byte"):
            scene.read(scene.reader.readuntil(separator))
        return
    task = scene.start(scene.reader.readuntil(separator))
    scene.stream.send(b"rest")
    scene.reader.feed_eof()
    with pytest.raises(asyncio.IncompleteReadError) as caught:
        scene.result(task)
    assert caught.value.partial == b"rest"
    assert scene.reader.at_eof()
    assert scene.read(scene.reader.readline()) == b""


@pytest.mark.parametrize("arrived", [b"rest", b"0123456789012345rest"])
@pytest.mark.parametrize("method", ["readline", "readuntil", "readexactly", "read"])
def test_the_peer_ends_in_the_middle_of_what_is_awaited(
    scene: Scene, method: str, arrived: bytes
) -> None:
    """By the peer's word, not by `feed_eof`, with bytes in the ring that do not suffice."""
    reader = scene.reader
    calls = {
        "readline": lambda: reader.readline(),
        "readuntil": lambda: reader.readuntil(b"\n"),
        "readexactly": lambda: reader.readexactly(30),
        "read": lambda: reader.read(),
    }
    task = scene.start(calls[method]())
    scene.stream.send(arrived)
    scene.turn()
    scene.turn()
    scene.stream.machine.on_word(pack_word(Kind.CTRL, Control.SHUTDOWN))
    for _ in range(8):
        scene.turn()
    assert task.done()
    if method in {"readuntil", "readexactly"}:
        with pytest.raises(asyncio.IncompleteReadError) as caught:
            scene.result(task)
        assert caught.value.partial == arrived
    else:
        assert scene.result(task) == arrived
    assert scene.read(reader.readline()) == b""
    assert reader.at_eof()


def test_iteration(scene: Scene) -> None:
    async def lines() -> bytes:
        return b"|".join([line async for line in scene.reader])

    task = scene.start(lines())
    scene.stream.send(b"one\ntwo\nth")
    scene.turn()
    scene.stream.send(b"ree")
    scene.reader.feed_eof()
    assert scene.result(task) == b"one\n|two\n|three"


def test_bytes_of_another_source_come_behind_those_of_the_ring(scene: Scene) -> None:
    task = scene.start(scene.reader.readexactly(9))
    scene.stream.send(b"ring")
    assert not task.done()
    scene.reader.feed_data(b"other")
    assert scene.result(task) == b"ringother"


def test_an_exception_of_the_program_ends_the_wait(scene: Scene) -> None:
    task = scene.start(scene.reader.readline())
    error = ValueError("of the program")
    scene.reader.set_exception(error)
    with pytest.raises(ValueError, match="of the program"):
        scene.result(task)
    with pytest.raises(ValueError, match="of the program"):
        scene.read(scene.reader.read(1))
    assert scene.reader.exception() is error


def test_two_tasks_may_not_read(scene: Scene) -> None:
    first = scene.start(scene.reader.readline())
    for read in (
        scene.reader.readline(), scene.reader.readuntil(b"x"), scene.reader.read(1),
        scene.reader.readexactly(1), scene.reader.readinto(bytearray(1)),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match="another coroutine"):
            scene.read(read)
    scene.stream.send(b"one\n")
    assert scene.result(first) == b"one\n"


def test_references_to_objects_are_not_read_into(scene: Scene) -> None:
    scene.stream.send(b"x" * 16)
    with pytest.raises(TypeError, match="references to Python objects"):
        scene.read(scene.reader.readinto(numpy.array([object()] * 2)))
    assert scene.read(scene.reader.read(20)) == b"x" * 16


@pytest.mark.parametrize("how", ["cancel", "close"])
@pytest.mark.parametrize("before", [b"", b"two\n"])
def test_a_wait_that_is_broken_off_loses_nothing(scene: Scene, how: str, before: bytes) -> None:
    """Bytes that no task waits for go to the protocol."""
    scene.stream.send(b"one")
    if how == "cancel":
        task = scene.start(scene.reader.readexactly(20))
        scene.stream.send(before or b"2")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            scene.result(task)
    else:
        coroutine: Any = scene.reader.readexactly(20)
        coroutine.send(None)
        scene.stream.send(before or b"2")
        coroutine.close()
        del coroutine
        gc.collect()
    assert not scene.stream.state.waiting
    assert scene.stream.soon, "the bytes are left where they are"
    scene.turn()
    scene.stream.send(b"three\n")
    lines = [scene.read(scene.reader.readline()) for _ in range(2 if before else 1)]
    assert b"".join(lines) == b"one" + (before or b"2") + b"three\n"


@pytest.mark.parametrize("case", range(30))
def test_random_reads(case: int) -> None:
    """Whatever the pieces, the bytes that are read are those of the stream, in its order."""
    rng = Random(f"{SEED} {case}")
    scene = Scene(limit=1000)
    try:
        written = bytearray()
        while len(written) < 600:
            written += rng.choice((b"\n", b"ab", b"a", b"b", b"xyz" * rng.randrange(1, 9)))
        written += b"ab\n"
        sent = read = 0
        while read < len(written) - 70:
            kind = rng.choice(("line", "until", "exactly", "some"))
            n = rng.randrange(1, 40)
            if kind == "line":
                expected = bytes(written[read : written.index(b"\n", read) + 1])
                task = scene.start(scene.reader.readline())
            elif kind == "until":
                expected = bytes(written[read : written.index(b"ab", read) + 2])
                task = scene.start(scene.reader.readuntil(b"ab"))
            elif kind == "exactly":
                expected = bytes(written[read : read + n])
                task = scene.start(scene.reader.readexactly(n))
            else:
                expected = b""
                task = scene.start(scene.reader.read(n))
            while not task.done():
                length = rng.randrange(1, 12)
                scene.stream.send(bytes(written[sent : sent + length]))
                sent += length
                scene.turn()
            found = scene.result(task)
            if kind == "some":
                expected = bytes(written[read : read + len(found)])
                assert 0 < len(found) <= n
            assert found == expected
            read += len(found)
            scene.turn()
    finally:
        scene.close()


# The writer


class Closed(asyncio.Transport):
    """A transport that is done."""

    def is_closing(self) -> bool:
        return True


async def test_a_writer_of_asyncio_becomes_one_of_ours() -> None:
    """`start_server` has it become one: asyncio makes it, and knows its own class alone."""
    loop = asyncio.get_running_loop()
    protocol = asyncio.StreamReaderProtocol(asyncio.StreamReader(loop=loop), loop=loop)
    writer = asyncio.StreamWriter(Closed(), protocol, None, loop)
    writer.__class__ = RdmaStreamWriter
    with pytest.raises(TypeError, match="cannot copy or pickle a RdmaStreamWriter"):
        copy.copy(writer)
