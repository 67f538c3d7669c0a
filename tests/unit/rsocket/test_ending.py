"""How a stream ends: every order of what both sides may do, and what is said about it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from aiordma.errors import ProtocolError
from aiordma.rsocket import Descriptor

from .lone import DISCONNECT, KEEPALIVE, SHUTDOWN, Lone
from .whole import Post

pytestmark = pytest.mark.usefixtures("form")

OPEN, NO_WRITE, EOF, OVER = "open", "no write", "eof", "over"
# Steps: shutdown, disconnect and lost are calls; what is written in capitals, and data, is heard;
# post and complete let the machine's own messages go and complete.
ENDS: list[tuple[str, list[int], str]] = [
    # what we do
    ("shutdown post", [SHUTDOWN], NO_WRITE),
    ("shutdown post complete", [SHUTDOWN], NO_WRITE),
    ("shutdown shutdown post shutdown post", [SHUTDOWN], NO_WRITE),
    ("SHUTDOWN shutdown post", [DISCONNECT], "no write eof"),
    ("SHUTDOWN shutdown post complete", [DISCONNECT], OVER),
    ("disconnect post", [DISCONNECT], NO_WRITE),
    ("disconnect post complete", [DISCONNECT], OVER),
    ("disconnect disconnect post disconnect post complete", [DISCONNECT], OVER),
    ("disconnect shutdown post complete", [DISCONNECT], OVER),
    ("SHUTDOWN disconnect post complete", [DISCONNECT], OVER),
    ("shutdown disconnect post complete", [DISCONNECT], OVER),
    ("shutdown post disconnect post", [SHUTDOWN, DISCONNECT], NO_WRITE),
    ("shutdown post complete disconnect post complete", [SHUTDOWN, DISCONNECT], OVER),
    ("shutdown post disconnect post complete", [SHUTDOWN, DISCONNECT], OVER),
    # what the peer does
    ("SHUTDOWN", [], EOF),
    ("SHUTDOWN SHUTDOWN", [], EOF),  # shutdown(2) called twice there
    ("SHUTDOWN DISCONNECT", [], OVER),
    ("DISCONNECT", [], OVER),
    ("DISCONNECT DISCONNECT SHUTDOWN data KEEPALIVE", [], OVER),
    ("DISCONNECT shutdown post disconnect post", [], OVER),
    ("shutdown post complete DISCONNECT post", [SHUTDOWN], OVER),
    ("shutdown post DISCONNECT complete", [SHUTDOWN], OVER),
    ("shutdown DISCONNECT post", [], OVER),
    # both at once
    ("shutdown post complete SHUTDOWN", [SHUTDOWN], OVER),
    ("shutdown post SHUTDOWN", [SHUTDOWN], "no write eof"),  # data may be under way before it
    ("shutdown post SHUTDOWN complete", [SHUTDOWN], OVER),
    ("shutdown post SHUTDOWN disconnect post", [SHUTDOWN], "no write eof"),
    ("shutdown post SHUTDOWN disconnect post complete", [SHUTDOWN], OVER),
    ("shutdown post disconnect SHUTDOWN post complete", [SHUTDOWN], OVER),
    ("shutdown SHUTDOWN post", [DISCONNECT], "no write eof"),
    ("shutdown SHUTDOWN post complete", [DISCONNECT], OVER),
    ("disconnect post SHUTDOWN", [DISCONNECT], "no write eof"),
    ("disconnect post SHUTDOWN complete", [DISCONNECT], OVER),
    ("disconnect SHUTDOWN post complete", [DISCONNECT], OVER),
    ("disconnect post DISCONNECT", [DISCONNECT], OVER),
    ("disconnect post DISCONNECT complete", [DISCONNECT], OVER),
    ("SHUTDOWN shutdown post SHUTDOWN", [DISCONNECT], "no write eof"),
    ("SHUTDOWN shutdown post DISCONNECT", [DISCONNECT], OVER),
    # nobody does
    ("KEEPALIVE", [], OPEN),
    ("lost", [], OVER),
    ("lost shutdown disconnect post DISCONNECT", [], OVER),
    ("shutdown lost post", [], OVER),
    ("disconnect post lost complete", [DISCONNECT], OVER),
]


@pytest.mark.parametrize("before", ["post complete", "post", ""], ids=["told", "delivering", "new"])
@pytest.mark.parametrize(("steps", "said", "state"), ENDS, ids=[end[0] for end in ENDS])
def test_how_it_ends(steps: str, said: list[int], state: str, before: str) -> None:
    lone = Lone()
    machine = lone.machine
    out: list[Post] = []
    words: list[int] = []

    def post() -> None:
        posts = lone.control()
        out.extend(posts)
        words.extend(post.word for post in posts if post.word >= 0xE0000000)

    def complete() -> None:
        while out:
            machine.on_sent(out.pop(0))

    calls: dict[str, Callable[[], None]] = {
        "post": post,
        "complete": complete,
        "shutdown": machine.shutdown,
        "disconnect": machine.disconnect,
        "lost": machine.lost,
        "data": lambda: machine.on_word(1),
        "SHUTDOWN": lambda: machine.on_word(SHUTDOWN),
        "DISCONNECT": lambda: machine.on_word(DISCONNECT),
        "KEEPALIVE": lambda: machine.on_word(KEEPALIVE),
    }
    machine.on_word(7)
    for step in f"{before} {steps}".split():
        calls[step]()
    assert words == said
    assert machine.disconnected == ("over" in state)
    assert machine.eof == (machine.disconnected or "eof" in state)
    assert machine.writable == (state in (OPEN, EOF))
    assert (machine.room > 0) == machine.writable
    if machine.disconnected:
        assert machine.next_control() is None
    # What arrived before can be read in any case.
    assert machine.readable == 7
    machine.consume(7)
    post()
    complete()
    assert machine.idle


def test_credits_go_on_after_our_shutdown() -> None:
    lone = Lone()
    lone.machine.shutdown()
    assert lone.settle() == [0x80000008, SHUTDOWN]
    lone.machine.on_word(32)
    lone.machine.consume(32)
    assert lone.settle() == [0x80000009]


@pytest.mark.parametrize("end", ["eof", "disconnect"])
def test_credits_end_when_nobody_needs_them(end: str) -> None:
    lone = Lone()
    lone.settle()
    lone.machine.on_word(32)
    if end == "eof":
        lone.machine.on_word(SHUTDOWN)
    else:
        lone.machine.disconnect()
    lone.machine.consume(32)
    assert lone.settle() == ([] if end == "eof" else [DISCONNECT])


def test_sending_goes_on_after_the_end_of_the_other_direction() -> None:
    lone = Lone()
    machine = lone.machine
    machine.on_word(SHUTDOWN)
    for _ in range(4):
        machine.write(1)
    lone.advertise(1, Descriptor(0x30000, 0x99, 30))
    machine.on_word(0x80000008)
    machine.write(96)
    assert machine.write(30).addr == 0x30000


def test_data_that_comes_after_our_disconnect_is_held_against_the_rules() -> None:
    """The peer does not know yet; what it sends is taken, and bounded as before."""
    lone = Lone()
    lone.settle()
    lone.machine.disconnect()
    (end,) = lone.control()
    lone.machine.on_word(32)
    lone.machine.on_word(32)
    with pytest.raises(ProtocolError, match="for 0 bytes"):
        lone.machine.on_word(1)
    lone.machine.on_sent(end)
    lone.machine.on_word(1)
    assert lone.machine.readable == 64
