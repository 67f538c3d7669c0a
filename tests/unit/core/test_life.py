"""The life of a connection: each event in each state, and what each state allows.

What has to come out is said here once more, by one rule and a list.  It is looked at from outside,
by what a connection posts, keeps and refuses; `MessageState.life_table` has to say the same.
"""

from __future__ import annotations

import errno
from types import SimpleNamespace
from typing import Any, cast

import pytest

from aiordma._core import FOR_PYTHON, SUB_RECV, SUB_SHIFT, MessageState, Registration
from aiordma._ffi import ffi
from aiordma.endpoint.config import ConnectionConfig
from aiordma.endpoint.wire import FRAME, FrameKind
from aiordma.verbs.enums import Opcode, WCOpcode, WCStatus

from ..endpoint.fabric import new_state
from .completing import Completing, QueuePair, completion

#: The states in the order of a life, with the events by which one that is not bound gets there.
WAYS = {
    "NEW": (),
    "OPEN": ("BIND",),
    "HALF_CLOSED": ("BIND", "REFUSE_SENDS"),
    "HELD": ("BIND", "HOLD"),
    "CLOSING": ("BIND", "SHUT"),
    "OVER": ("BIND", "END"),
    "FLUSHING": ("BIND", "FLUSH"),
    "CLOSED": ("BIND", "CLOSE"),
}
ORDER = tuple(WAYS)
#: Each event leads to a state of its own, unless the life has got further already.
EVENTS = {events[-1]: state for state, events in WAYS.items() if events}
STEPS = {
    state: {event: max(state, to, key=ORDER.index) for event, to in EVENTS.items()}
    for state in ORDER
}
ALL = ("sends", "operates", "keeps", "says", "takes")
ALLOWED = {
    "NEW": set(ALL),
    "OPEN": set(ALL),
    "HALF_CLOSED": {"operates", "keeps", "says", "takes"},
    "HELD": {"operates", "keeps", "says", "takes"},
    "CLOSING": {"says", "takes"},
    "OVER": {"takes"},
    "FLUSHING": {"takes"},
    "CLOSED": set[str](),
}
RIGHTS = {state: {right: right in allowed for right in ALL} for state, allowed in ALLOWED.items()}
SENDS, SIZE = 4, 64


class Life:
    """A connection with an adapter that takes everything.

    Attributes:
        sent: The kinds of the frames that were posted.
        operations: How many READs were posted.
        posted: The receive slots that were posted again.
    """

    def __init__(self, *events: str) -> None:
        config = ConnectionConfig(slot_size=SIZE, recv_depth=8, send_depth=SENDS)
        loop: Any = SimpleNamespace(is_running=lambda: True, call_soon=lambda *args: None)
        self.state = new_state(config, loop, config.receives, SENDS)
        self.state.allow_operations(1, True)
        self.state.agree(100, SIZE)
        self.sent: list[int] = []
        self.operations = 0
        self.posted: list[int] = []
        self._slots = {
            kind: ffi.new("char[]", count * SIZE)
            for kind, count in {"send": SENDS, "receive": config.receives, "frames": 6}.items()
        }
        self._adapter = QueuePair(self._send, self._receive)
        self._completing = Completing(self.state)
        self.do(*events)

    def do(self, *events: str) -> None:
        """Give the command of each event."""
        for event in events:
            if event == "BIND":
                self._bind()
            else:
                self.state.close() if event == "CLOSE" else self.state.advance(cast("Any", event))

    def _bind(self) -> None:
        send, receive, frames = (int(ffi.cast("uintptr_t", at)) for at in self._slots.values())
        count = len(self._slots["receive"]) // SIZE
        self.state.bind(
            self._adapter.address, 0, 0, 0,
            (send, SIZE, 7, SENDS), (receive, SIZE, 7, count), (frames, SIZE, 7), 0,
        )  # fmt: skip

    def _send(self, wr: Any) -> None:
        while wr:
            if wr.opcode == int(Opcode.RDMA_READ):
                self.operations += 1
            else:
                self.sent.append(ffi.cast("uint8_t *", wr.sg_list[0].addr)[0])
            wr = wr.next

    def _receive(self, wr: Any) -> None:
        while wr:
            self.posted.append((wr.wr_id >> SUB_SHIFT) & ~SUB_RECV)
            wr = wr.next

    def arrives(self, kind: FrameKind, credits: int = 0) -> bool:
        """A frame comes, the first; whether its completion is dealt with, and not Python's."""
        header = FRAME.pack(kind, 0, credits, 0, 0)
        ffi.buffer(self._slots["receive"])[: len(header)] = header
        return self.completes(completion(SUB_RECV, WCOpcode.RECV, len(header)))

    def completes(self, wc: Any) -> bool:
        return self._completing.take(wc)

    def rights(self) -> dict[str, bool]:
        """What it does, by the names of the table."""
        state = self.state
        takes = self.arrives(FrameKind.DATA)
        keeps = state.arrived == 1
        assert self.posted == ([0] if takes and not keeps else []), (
            "the slot is lost, or used twice"
        )
        self.sent.clear()
        code = state.send(b"x", None)
        sends = self.sent == [FrameKind.DATA]
        assert code == (0 if sends else FOR_PYTHON)
        region = SimpleNamespace(_registration=Registration(4096, SIZE, 1, 7, None))
        operation = state.operate(-1, int(Opcode.RDMA_READ), 4096, 8, 1 << 40, 77, 0, 0, region)
        assert (
            (operation is not None) == (self.operations == 1) == (state.facts()["operating"] == 1)
        )
        self.sent.clear()
        assert state.send_control(FrameKind.PING) == 0
        says = FrameKind.PING in self.sent
        assert says or not self.sent
        return {
            "sends": sends,
            "operates": operation is not None,
            "keeps": keeps,
            "says": says,
            "takes": takes,
        }


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("state", STEPS)
def test_an_event_leads_to_the_state_of_the_table_and_its_rights(state: str, event: str) -> None:
    life = Life(*WAYS[state], event)
    after = STEPS[state][event]
    assert life.state.facts()["life"] == after
    if state == "NEW" and after not in ("OPEN", "CLOSED"):
        life.do("BIND")  # the queue pair comes too late to change what is allowed
        assert life.state.facts()["life"] == after
    assert life.rights() == RIGHTS[after]


def test_nothing_is_posted_before_there_is_a_queue_pair() -> None:
    life = Life()
    life.state.credit()
    assert life.state.send(b"x", None) == FOR_PYTHON
    assert life.state.send_control(FrameKind.CREDIT) == 0
    assert (life.sent, life.posted, life.operations) == ([], [], 0)
    life.do("BIND")
    assert life.rights() == RIGHTS["OPEN"]


@pytest.mark.parametrize("event", ["HOLD", "END"])
@pytest.mark.parametrize("state", ["OPEN", "CLOSING"])
def test_sends_that_are_not_posted_end_with_the_adapter(state: str, event: str) -> None:
    """Else a close would wait for their completions, which never come."""
    life = Life("BIND")
    for _ in range(SENDS):
        assert life.state.send(b"x", None) == 0
    assert (len(life.sent), life.state.facts()["n_unposted"]) == (2, 2)
    if state == "CLOSING":
        life.do("SHUT")
        assert life.state.facts()["n_unposted"] == 2, "what was sent goes on"
    life.do(event)
    assert (life.state.facts()["n_unposted"], life.state.flushed) == (0, 2)
    assert life.state.post_chain() == 0
    assert len(life.sent) == 2


@pytest.mark.parametrize("event", ["END", "FLUSH", "SHUT"])
def test_flushed_requests_are_counted_only_where_all_are_flushed(event: str) -> None:
    """Before, a failed request is the first news of the end, which Python explains."""
    life, wc = Life("BIND"), completion(SUB_RECV, status=int(WCStatus.WR_FLUSH_ERR))
    assert life.state.post_receives(8) == 0
    life.do(event)
    assert life.completes(wc) == (event == "FLUSH")
    life.do("FLUSH", "END")
    assert life.completes(wc)
    assert life.state.facts()["receives"] == 8 - 1 - (event == "FLUSH")


def test_a_closed_connection_posts_nothing() -> None:
    life = Life("BIND")
    for _ in range(SENDS):
        assert life.state.send(b"x", None) == 0
    life.do("CLOSE")
    assert life.state.post_chain() == 0
    assert life.state.post_receives([0]) == errno.ENOTCONN
    assert (life.state.release_slot(0), life.state.repost_slot(0)) == (FOR_PYTHON, FOR_PYTHON)
    assert (len(life.sent), life.posted) == (2, [])


def test_the_terms_of_the_handshake_add_to_the_credits_that_have_come() -> None:
    """The peer may grant credits before this side has read its greeting."""
    life = Life("BIND")
    before = life.state.credits
    assert life.arrives(FrameKind.CREDIT, credits=3)
    terms: dict[str, Any] = {
        "eager_size": 40, "bare_size": 5, "fragmented_size": 400, "written_size": 7000,
        "landed_size": 9000, "numbered": True,
    }  # fmt: skip
    life.state.agree(4, **terms)
    assert life.state.credits == before + 3 + 4
    assert terms.items() <= life.state.facts().items()


def test_the_table_says_the_same() -> None:
    assert MessageState.life_table() == (STEPS, RIGHTS)
