"""The states of a stream: each event in each state, and what each state allows.

What has to come out is said here once more, and looked at from outside: by what a stream posts,
takes and leaves to Python.
"""

from __future__ import annotations

from typing import Any

import pytest

from aiordma._core import (
    OWES_MAPPING,
    OWES_NOTHING,
    OWES_WORD,
    STREAM_DATA,
    STREAM_MESSAGE,
    STREAM_RECV,
    STREAM_ROOM,
    StreamState,
)
from aiordma._ffi import ffi
from aiordma.verbs.enums import WCStatus

from .completing import Completing, QueuePair, completion

RING = 64


class Stream:
    """A stream with an adapter that takes everything.

    Attributes:
        sent: How many messages were posted.
        calls: What the protocol was given, and the events that Python was told of.
    """

    def __init__(self, *events: str) -> None:
        self._memory = ffi.new("uint8_t[]", 4 * RING + 96)
        at = int(ffi.cast("uintptr_t", self._memory))
        self.sent = self._heard = 0
        self.calls: list[object] = []
        self.state = StreamState(
            ring=(at, 1, RING), table=at + RING, send=(at + 2 * RING, RING, 5), credits=4,
            send_depth=16, iwarp=False, inline_size=RING, memory=self._memory,
        )  # fmt: skip
        self._qp = QueuePair(self._send, lambda _: None)
        assert self.state.bind(self._qp.address, 0, 0, 0, 3) == 0
        self.state.meet(9, (0x20000, 0x88, 100), (0x10000, 0x77, 2), False)
        self.state.attach(self, lambda function, data: function(data), None, None)
        self._completing = Completing(self.state)
        self.do(*events)

    def _send(self, wr: Any) -> None:
        self.sent += 1

    def data_received(self, data: bytes) -> None:
        self.calls.append(data)

    def _on_events(self, events: int) -> None:
        self.calls.append(events)

    def _on_attention(self) -> None:
        """More is there than was given."""

    def _on_raised(self, exc: BaseException) -> None:
        pytest.fail(f"the protocol of these tests raises nothing: {exc}")

    def do(self, *events: str) -> None:
        """Give the command of each event."""
        state = self.state
        commands: dict[str, Any] = {
            "OPEN": state.open,
            "HOLD": lambda: state.hold(True),
            "RELEASE": lambda: state.hold(False),
            "SHUT": lambda: state.permit(False, True, False, OWES_NOTHING),
            "REFUSE": lambda: state.permit(True, False, False, OWES_NOTHING),
            "PEER ENDS": lambda: state.permit(True, True, True, OWES_NOTHING),
            "KEEP": lambda: state.deliver_to(None, False),
            "PAUSE": lambda: state.deliver_to(self, True),
            "DELIVER": lambda: state.deliver_to(self, False),
            "STOP": state.stop,
            "END": state.end,
            "FLUSH": state.flush,
            "CLOSE": state.close,
        }
        for event in events:
            commands[event]()

    def hears(self, length: int = 1) -> bool:
        """A message of data comes; whether C takes it."""
        return self._takes(length)

    def _takes(self, word: int) -> bool:
        slot, self._heard = self._heard, self._heard + 1
        return self._completing.take(completion(STREAM_RECV | slot, imm=word))

    def flushed(self) -> bool:
        """A receive comes back unused; whether C counts it."""
        status = int(WCStatus.WR_FLUSH_ERR)
        return self._completing.take(completion(STREAM_RECV, status=status))

    def sends(self) -> bool:
        return self.state.next_place()[1] > 0

    def writes(self) -> bool:
        return self.state.send(b"x") == 1

    def announces(self) -> bool:
        before = self.sent
        assert self.state.announce(True) == 0
        return self.sent > before

    def told_of_room(self) -> bool:
        """Whether Python is told that the peer allows further messages."""
        self._completing.events = 0
        assert self._takes(4 << 29 | 9)
        return self._completing.events == STREAM_ROOM


OUTPUT = {
    "EARLY HELD": (),
    "EARLY": ("RELEASE",),
    "HELD": ("OPEN",),
    "OPEN": ("RELEASE", "OPEN"),
    "SHUT": ("OPEN", "SHUT"),
}
OUTPUT_STEPS = {
    "EARLY HELD": {"OPEN": "HELD", "RELEASE": "EARLY"},
    "EARLY": {"OPEN": "OPEN", "HOLD": "EARLY HELD"},
    "HELD": {"RELEASE": "OPEN"},
    "OPEN": {"HOLD": "HELD"},
    "SHUT": dict[str, str](),
}


@pytest.mark.parametrize("event", ["OPEN", "HOLD", "RELEASE", "SHUT"])
@pytest.mark.parametrize("state", OUTPUT)
def test_what_may_be_sent(state: str, event: str) -> None:
    stream = Stream(*OUTPUT[state], event)
    after = "SHUT" if event == "SHUT" else OUTPUT_STEPS[state].get(event, state)
    assert stream.sends() == (after in ("HELD", "OPEN"))
    assert stream.writes() == (after == "OPEN")
    # What it does when the connection opens tells the states before that apart.
    stream.do("OPEN")
    opened = {"EARLY HELD": "HELD", "EARLY": "OPEN"}.get(after, after)
    assert stream.sends() == (opened in ("HELD", "OPEN"))
    assert stream.told_of_room() == (opened != "OPEN")
    assert stream.writes() == (opened == "OPEN")


INPUT = {
    "EARLY": (),
    "OPEN": ("OPEN",),
    "UNWANTED": ("OPEN", "REFUSE"),
    "ENDED": ("OPEN", "PEER ENDS"),
}
INPUT_STEPS = {
    "EARLY": {"OPEN": "OPEN", "REFUSE": "ENDED", "PEER ENDS": "ENDED"},
    "OPEN": {"REFUSE": "UNWANTED", "PEER ENDS": "ENDED"},
    "UNWANTED": {"PEER ENDS": "ENDED"},
    "ENDED": dict[str, str](),
}


@pytest.mark.parametrize("event", ["OPEN", "REFUSE", "PEER ENDS"])
@pytest.mark.parametrize("state", INPUT)
def test_what_is_taken(state: str, event: str) -> None:
    stream = Stream(*INPUT[state], event)
    after = INPUT_STEPS[state].get(event, state)
    assert stream.announces() == (after == "OPEN")
    assert stream.hears() == (after in ("OPEN", "UNWANTED"))
    stream.do("OPEN")
    assert stream.announces() == (after in ("EARLY", "OPEN"))


READER = {"PYTHON": ("KEEP",), "PROTOCOL": ("DELIVER",), "NOBODY": ("DELIVER", "STOP")}
READER_STEPS = {"KEEP": "PYTHON", "PAUSE": "PYTHON", "DELIVER": "PROTOCOL", "STOP": "NOBODY"}


@pytest.mark.parametrize("event", READER_STEPS)
@pytest.mark.parametrize("state", READER)
def test_who_gets_the_bytes(state: str, event: str) -> None:
    stream = Stream("OPEN", *READER[state], event)
    after = "NOBODY" if state == "NOBODY" else READER_STEPS[event]
    assert stream.state.stopped == (after == "NOBODY")
    assert stream.hears(3)
    stream.state(STREAM_DATA)
    assert stream.calls == [bytes(3) if after == "PROTOCOL" else STREAM_DATA]
    assert stream.state.cut(3) == (bytes(3) if after == "PYTHON" else None)


LIFE = {
    "POSTS": (),
    "OVER": ("END",),
    "FLUSHING": ("FLUSH",),
    "CLOSED": ("CLOSE",),
}
LIFE_STEPS = {"END": "OVER", "FLUSH": "FLUSHING", "CLOSE": "CLOSED"}


@pytest.mark.parametrize("event", LIFE_STEPS)
@pytest.mark.parametrize("state", LIFE)
def test_the_life_of_the_queue_pair(state: str, event: str) -> None:
    stream = Stream("RELEASE", "OPEN", *LIFE[state], event)
    order = list(LIFE)
    after = max(state, LIFE_STEPS[event], key=order.index)
    assert stream.state.is_over
    assert stream.state.say(7 << 29) == 0
    assert (stream.announces(), stream.writes(), stream.sent) == (False, False, 0)
    assert stream.flushed() == (after == "FLUSHING")
    assert (stream.state.probe() == 0) == (after != "CLOSED")
    # Only what is new is told.
    assert stream.state.flush() == (after == "OVER")
    assert stream.state.close() == (after != "CLOSED")
    assert not stream.state.end()


def test_data_wait_behind_a_mapping() -> None:
    stream = Stream("RELEASE", "OPEN")
    stream.state.permit(True, True, False, OWES_MAPPING)
    assert not stream.sends()
    assert not stream.writes()
    assert stream.told_of_room()
    stream.state.permit(True, True, False, OWES_WORD)
    assert stream.sends()
    assert stream.told_of_room()
    stream.state.permit(True, True, False, OWES_NOTHING)
    assert not stream.told_of_room()
    assert stream.writes()


def test_a_post_that_fails_ends_the_life() -> None:
    stream = Stream("RELEASE", "OPEN")
    stream._qp = QueuePair(lambda _: 12)
    assert stream.state.bind(stream._qp.address, 0, 0, 0, 0) == 0
    assert stream.state.send(b"x") == 1
    assert (stream.state.error, stream.state.recv_failed, stream.state.is_over) == (12, False, True)
    assert not stream._completing.take(completion(STREAM_MESSAGE | 1))
