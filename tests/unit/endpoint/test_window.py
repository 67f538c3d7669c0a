"""Window: what is owed follows from what is posted, also while slots come and go."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from aiordma._core import FRAME_PING, FRAME_SIZE, SUB_SHIFT
from aiordma.endpoint.config import CONTROL_SLOTS, ConnectionConfig
from aiordma.endpoint.receiving import Window
from aiordma.endpoint.wire import FRAME

from ..core.completing import QueuePair
from ..memory.fake_memory import FakeArena
from .fabric import new_state

SENDS = 1
CONTROL = CONTROL_SLOTS + 1


class Slots:
    """A link and its receive slots, as far as a window sees them; the test is the adapter."""

    def __init__(self, size: int, recv_depth: int = 0) -> None:
        self.slots = self.recv = self
        self.count = CONTROL + size
        self.spare = 0
        self.gone: list[int] = []
        self.more: list[int] = []
        self.again: Callable[[], None] | None = None
        self.out: set[int] = set()  # leaving
        self.posts: list[int] = []
        self.sent: list[int] = []  # credits of each frame
        config = ConnectionConfig(
            recv_depth=max(size, recv_depth), send_depth=SENDS, rendezvous_window=1
        )
        self.state = new_state(config, None, self.count, 1)
        self._bytes = FakeArena(self.count, 64)
        self._control = FakeArena(CONTROL_SLOTS, 64)
        self._qp = QueuePair(self._send, lambda wr: None)
        self.state.bind(
            self._qp.address, 0, 0, 0, (0, 0, 0, 0), (self._bytes.addr, 64, 7, self.count),
            (self._control.addr, 64, 8), 0,
        )  # fmt: skip
        link: Any = self
        self.window = Window(link, config)

    @property
    def counts(self) -> tuple[int, int]:
        """Slots to receive and to send."""
        return self.count, SENDS

    def _send(self, wr: Any) -> None:
        """A frame without data."""
        place = wr.wr_id >> SUB_SHIFT
        self.sent.append(FRAME.unpack_from(self._control.slot(place - SENDS, FRAME_SIZE))[2])

    @property
    def credits(self) -> int:
        """CREDIT frames."""
        return len(self.sent)

    @property
    def ungranted(self) -> int:
        return self.state.posted - self.state.control - self.state.unused

    @property
    def unused(self) -> int:
        return self.state.unused

    def check(self, code: int) -> None:
        assert code == 0

    def note(self, *_: object, log: object = None) -> None:
        """As a link with no log."""

    def post_recv(self, slots: Iterable[int]) -> None:
        self.posts += slots

    def fit(self) -> None:
        """There is no adapter."""

    def grow(self, again: Callable[[], None]) -> Iterable[int]:
        self.again = again
        more, self.more = self.more, []
        self.count += len(more)
        return more

    def leaving(self, slot: int) -> bool:
        return slot in self.out

    def hand_in(self, slot: int) -> None:
        self.gone.append(slot)

    def shrink(self) -> Iterable[int]:
        self.count -= self.spare
        self.spare = 0
        return ()

    def data(self, messages: int) -> None:
        """Messages that cost a credit arrive."""
        for _ in range(messages):
            assert self.state.unused > 0
            self.state.posted -= 1
            self.state.unused -= 1

    def control(self, slot: int = 1) -> None:
        """One that costs none arrives and is processed."""
        self.state.posted -= 1
        self.window.back(slot)

    def release(self, slots: Iterable[int], held: int = 0) -> None:
        self.state.held = held
        for slot in slots:
            self.window.adapt()
            self.window.back(slot)


def test_a_message_is_owed_for_once_its_receive_is_posted() -> None:
    slots = Slots(4)
    window = slots.window
    assert (window.size, slots.unused, slots.ungranted) == (4, 4, 0)
    slots.data(3)
    assert (slots.unused, slots.ungranted) == (1, 0)
    slots.release([0])
    assert (slots.ungranted, slots.credits) == (1, 0)
    slots.control()
    assert slots.ungranted == 1
    slots.release([1])
    assert (slots.ungranted, slots.unused, slots.credits) == (0, 3, 1)
    slots.release([2])
    assert slots.state.send_control(FRAME_PING) == 0
    assert (slots.sent[-1], slots.unused) == (1, 4)
    slots.data(4)
    assert slots.state.send_control(FRAME_PING) == 0
    assert (slots.sent[-1], slots.unused) == (0, 0)


def test_of_credit_frames_that_the_peer_may_not_have_processed_there_are_two() -> None:
    slots = Slots(20)
    slots.data(20)
    slots.release(range(10))
    assert (slots.credits, slots.unused) == (1, 10)
    # Others need the slots: the window falls to 4, and half of it is little.
    slots.count = CONTROL + 4
    slots.state.size(4)
    slots.release([10, 11])
    assert (slots.credits, slots.unused) == (2, 12)
    slots.release([12, 13, 14, 15, 16])
    assert (slots.credits, slots.ungranted) == (2, 5)
    # The peer spends one of the first frame's credits: that one is processed, and no other.
    slots.data(1)
    slots.release([17])
    assert (slots.credits, slots.ungranted) == (3, 0)
    slots.release([18, 19])
    assert (slots.credits, slots.ungranted) == (3, 2)
    slots.data(10)
    slots.release([0])
    assert slots.credits == 4


def test_a_slot_leaves_only_if_nothing_that_was_promised_needs_it() -> None:
    slots = Slots(7)
    window = slots.window
    slots.spare = 4
    slots.data(1)
    slots.out = {6, 7, 8, 9}
    slots.release([6])
    assert slots.gone == [6]
    assert (window.size, slots.unused, slots.ungranted) == (3, 6, 0)
    # A message without credit lay in one that is leaving: without it there would be too few.
    slots.control(7)
    assert slots.gone == [6]
    assert slots.posts[-1] == 7
    # A message that cost a credit takes its slot along.
    slots.data(3)
    slots.release([7, 8, 9])
    assert slots.gone == [6, 7, 8, 9]
    assert (slots.unused, slots.ungranted) == (3, 0)
    assert slots.state.posted == CONTROL + 3


def test_a_window_grows_when_the_peer_has_no_credit_left() -> None:
    slots = Slots(2, recv_depth=8)
    window = slots.window
    slots.more = [9, 10]
    slots.data(1)
    slots.release([0])
    assert slots.more, "the peer had a credit"
    slots.data(slots.unused)
    slots.release([0])
    assert (window.size, slots.posts[-3:]) == (4, [9, 10, 0])
    # The window was of two: its one credit waited for the peer to have none left.
    assert (slots.unused, slots.ungranted) == (3, 1)
    # The pool has none now; later it has, and nobody needs them any more.
    slots.data(slots.unused)
    slots.release([1])
    assert slots.again is not None
    assert slots.unused
    slots.more = [11]
    slots.again()
    assert slots.more == [11]
    slots.data(slots.unused)
    slots.again()
    assert slots.posts[-1] == 11


def test_a_window_does_not_shrink_below_what_the_program_may_keep() -> None:
    for held, size in ((0, 3), (1, 3), (2, 7), (3, 7)):
        slots = Slots(7)
        slots.spare = 4
        slots.data(1)
        slots.release([0], held)
        assert slots.window.size == size
    slots = Slots(5)
    slots.spare = 3  # at least three have to be left
    slots.data(1)
    slots.release([0])
    assert slots.window.size == 5
