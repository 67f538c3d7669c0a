"""A Message behaves as bytes do, wherever its bytes lie."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from aiordma._core import Message, MessageState
from aiordma._ffi import ffi
from tests.inside.core import detach, exports_of, is_released

from .completing import QueuePair
from .test_message_state import NOWHERE, One, arrival
from .test_references import collected

DATA = bytes(range(250, 256)) + b"text of a message" + bytes(5)
SIZE = 64


class Received:
    """A message of DATA that has arrived in slot 2 of a connection, behind two others."""

    def __init__(self) -> None:
        one = One(raw=True)
        self.state: MessageState = one.state
        self.posted: list[int] = []
        self.memory = bytearray(4 * SIZE)
        self.memory[2 * SIZE : 2 * SIZE + len(DATA)] = DATA
        self.back: list[tuple[int, int]] = []
        self.receiver = SimpleNamespace(
            slots=memoryview(self.memory),
            slot_back=lambda slot, exported, kept: None,
            _posted_again=lambda slot, code: self.back.append((slot, code)),
        )
        self.state.set_receiver(self.receiver)
        self.qp = QueuePair(lambda wr: None, lambda wr: self.posted.append(wr.wr_id))
        start = int(ffi.cast("uintptr_t", ffi.from_buffer(self.memory)))
        self.state.bind(
            self.qp.address, 0, 0, 0, NOWHERE, (start, SIZE, 7, 4), (0, 0, 0), 0, self.memory
        )
        for slot in range(3):
            assert one.take(arrival(slot, len(DATA)))
        self.state.skip()
        self.state.skip()
        message = self.state.take()
        assert message is not None
        self.message: Message = message


class Thing:
    """An object that the collector visits, of which no free list has one."""


def own() -> Message:
    return Message(memoryview(bytearray(DATA)))


def in_slot() -> Message:
    return Received().message


def in_slot_and_seen() -> Message:
    message = Received().message
    with memoryview(message) as view:
        assert view == DATA
    return message


def after_the_connection() -> Message:
    received = Received()
    received.state.close()
    return received.message


def detached() -> Message:
    received = Received()
    detach(received.message)
    received.memory[:] = bytes(len(received.memory))
    return received.message


MAKERS: list[Callable[[], Message]] = [
    own,
    in_slot,
    in_slot_and_seen,
    after_the_connection,
    detached,
]


@pytest.fixture(params=MAKERS, ids=lambda make: make.__name__)
def message(request: pytest.FixtureRequest) -> Message:
    return request.param()  # type: ignore[no-any-return]


INDEXES = [0, 1, -1, 5, len(DATA) - 1, -len(DATA)]
SLICES = [
    slice(None), slice(4, None), slice(None, -3), slice(6, 10), slice(10, 6), slice(None, None, 2),
    slice(None, None, -1), slice(20, 3, -4), slice(-1000, 1000), slice(1000, None), slice(0, 0),
]  # fmt: skip


@pytest.mark.parametrize("index", INDEXES)
def test_an_index_is_a_number(message: Message, index: int) -> None:
    assert message[index] == DATA[index]


@pytest.mark.parametrize("index", [len(DATA), -len(DATA) - 1, 1 << 80, -(1 << 80)])
def test_an_index_outside(message: Message, index: int) -> None:
    with pytest.raises(IndexError):
        message[index]


@pytest.mark.parametrize("wrong", ["1", 1.0, None, (1, 2)])
def test_no_index(message: Message, wrong: Any) -> None:
    with pytest.raises(TypeError):
        message[wrong]


@pytest.mark.parametrize("piece", SLICES, ids=str)
def test_a_slice_is_a_copy(message: Message, piece: slice) -> None:
    copy = message[piece]
    message.release()
    assert type(copy) is bytes
    assert copy == DATA[piece]


def test_a_slice_without_a_step(message: Message) -> None:
    with pytest.raises(ValueError, match="zero"):
        message[::0]


def test_its_numbers_in_order(message: Message) -> None:
    assert list(message) == list(DATA)
    assert list(reversed(DATA)) == [message[-1 - n] for n in range(len(DATA))]


def test_the_members_of_it(message: Message) -> None:
    assert 255 in message
    assert 200 not in message
    assert b"text" in message
    assert memoryview(b"of a") in message
    assert b"texts" not in message
    wrong: Any = "text"
    with pytest.raises(TypeError):
        _ = wrong in message
    with pytest.raises(ValueError, match=r"range\(0, 256\)"):
        _ = 256 in message


def test_it_is_equal_to_the_same_bytes(message: Message) -> None:
    for same in DATA, bytearray(DATA), memoryview(DATA), own():
        assert message == same
        assert (message != same) is False
        assert same == message
    for other in DATA[:-1], DATA + b"x", b"y" + DATA[1:], bytearray(1), own()[1:], DATA.hex(), None:
        assert message != other
        assert (message == other) is False


def test_its_text() -> None:
    message = Message(memoryview("Grüße".encode()))
    assert message.decode() == "Grüße"
    assert message.tobytes() == bytes(message) == "Grüße".encode()
    assert Message(memoryview(b"\xe4")).decode("latin-1") == "ä"
    assert Message(memoryview(b"\xe4x")).decode("ascii", errors="ignore") == "x"
    assert Message(memoryview(b"")).decode() == ""
    with pytest.raises(UnicodeDecodeError):
        Message(memoryview(b"\xe4")).decode()
    with pytest.raises(LookupError):
        message.decode("no encoding")


USES: list[Callable[[Message], object]] = [
    bytes, list, lambda m: m[0], lambda m: m[1:], lambda m: m[::2], lambda m: 1 in m,
    lambda m: m.decode("latin-1"), memoryview,
]  # fmt: skip


@pytest.mark.parametrize("use", range(len(USES)))
def test_it_has_no_bytes_when_it_was_released(message: Message, use: int) -> None:
    message.release()
    with pytest.raises(ValueError, match="the message was released"):
        USES[use](message)
    assert len(message) == len(DATA)


def test_nothing_of_it_is_exported_afterwards(message: Message) -> None:
    for use in USES[:-1]:
        use(message)
    _ = message == DATA, message == own()
    message.release()


def test_a_slot_outside_of_the_memory_is_refused() -> None:
    received = Received()
    received.state.close()
    received.receiver.slots = memoryview(bytearray(2 * SIZE))
    with pytest.raises(SystemError, match="outside"):
        bytes(received.message)


def test_a_message_without_a_receiver_is_refused() -> None:
    one = One(raw=True)
    assert one.take(arrival(0, len(DATA)))
    message = one.state.take()
    assert message is not None
    with pytest.raises(SystemError, match="without a receiver"):
        bytes(message)
    one.state.set_receiver(Received().receiver)


@pytest.mark.parametrize("use", range(len(USES)))
def test_it_is_released_by_a_function_that_the_collector_runs(use: int) -> None:
    """While the copy is being made: the use has the bytes, or the message was released."""
    for ahead in range(4):
        message, result = in_slot_and_seen(), None

        class Releaser:
            itself: Any = None

            def __del__(self, message: Message = message) -> None:
                with contextlib.suppress(BufferError):
                    message.release()

        made: list[Any] = [None] * 4
        with collected(Releaser), contextlib.suppress(ValueError):
            for index in range(ahead):
                made[index] = Thing()
            result = USES[use](message)
        assert not isinstance(result, bytes) or result in (DATA, DATA[1:], DATA[::2])
        gc.collect()


@pytest.mark.parametrize("after", range(1, 13))
@pytest.mark.parametrize("how", ["release", "read"])
def test_a_view_is_made_while_the_collector_runs_a_function(how: str, after: int) -> None:
    """Which releases the message, or reads it: its slot, and its connection, may have gone then."""
    received = Received()
    message = received.message
    received.state.close()
    del received

    class Actor:
        itself: Any = None

        def __del__(self, message: Message = message) -> None:
            with contextlib.suppress(BufferError):
                bytes(message) if how == "read" else message.release()

    view: memoryview | None = None
    with collected(Actor, after), contextlib.suppress(ValueError):
        view = memoryview(message)
    if view is not None:
        assert not is_released(message)
        assert view == DATA
        assert exports_of(message) == 1
        view.release()
    gc.collect()
    assert exports_of(message) == 0
