"""Sends of one turn of the loop are posted with one doorbell, in their order."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from aiordma._core import EVENT_FAILED, EVENT_FRAMES, NO_ROOM, SUB_RECV
from aiordma._ffi import ffi
from aiordma.endpoint.config import CONTROL_SLOTS, ConnectionConfig
from aiordma.endpoint.wire import FRAME, FRAME_SIZE, FrameKind
from aiordma.verbs.enums import Opcode, WCOpcode
from tests.inside.core import have_timer
from tests.inside.endpoint import set_terms

from ..endpoint.fabric import LeftToPython, new_state
from .completing import Completing, QueuePair, completion

SENDS, RECEIVES, SIZE, CHAIN = 64, 96, 96, 16


class Side:
    """A state, its slots, and an adapter that notes each doorbell.

    Attributes:
        doorbells: The first byte of each message of a doorbell, or the name of another request.
        calls: Events with which the loop is to call the state; 0 at the end of the turn.
        taken: Requests that the adapter takes before it refuses the next; None: all.
    """

    def __init__(self, loop: Any = None) -> None:
        self.doorbells: list[list[Any]] = []
        self.calls: list[int] = []
        self.taken: int | None = None
        config = ConnectionConfig(
            slot_size=SIZE - FRAME_SIZE, recv_depth=RECEIVES, send_depth=SENDS
        )
        loop = loop or SimpleNamespace(is_running=lambda: True, call_soon=self._call_soon)
        self.state = new_state(config, loop, config.receives, SENDS)
        self._slots = [ffi.new("char[]", n * SIZE) for n in (SENDS, config.receives, CONTROL_SLOTS)]
        at = [int(ffi.cast("uintptr_t", memory)) for memory in self._slots]
        self.qp = QueuePair(self._send, lambda wr: None)
        self.state.bind(
            self.qp.address, 0, 0, 0, (at[0], SIZE, 1, SENDS), (at[1], SIZE, 2, config.receives),
            (at[2], SIZE, 3), 0,
        )  # fmt: skip
        set_terms(self.state, credits=SENDS, eager_size=SIZE - FRAME_SIZE)
        self.state.set_handler(self._told)
        self.events = 0
        self.resumed: Callable[[], object] = lambda: None

    def _call_soon(self, state: Any, events: int) -> None:
        assert state is self.state
        self.calls.append(events)

    def _told(self, events: int) -> None:
        self.events |= events
        self.resumed()

    def _send(self, wr: Any) -> int:
        rung: list[Any] = []
        self.doorbells.append(rung)
        while wr:
            if self.taken == 0:
                self.qp.bad[0] = wr
                return errno.ENOMEM
            self.taken = None if self.taken is None else self.taken - 1
            if wr.opcode == Opcode.RDMA_READ:
                rung.append("read")
            else:
                data = ffi.cast("uint8_t *", wr.sg_list[0].addr)
                rung.append(data[FRAME_SIZE] if data[0] == FrameKind.DATA else FrameKind(data[0]))
            wr = wr.next
        return 0

    def send(self, *numbers: int) -> None:
        for number in numbers:
            assert self.state.send(bytes([number]), None) == 0

    def end_turn(self) -> None:
        assert self.calls == [0]
        self.state(self.calls.pop())


def test_a_lone_send_is_posted_at_once_and_asks_for_nothing() -> None:
    side = Side()
    side.send(1)
    assert (side.doorbells, side.calls) == ([[1]], [])
    side.state(EVENT_FRAMES)
    side.send(2)
    assert (side.doorbells, side.calls) == ([[1], [2]], [])


def test_the_sends_of_a_turn_are_posted_together() -> None:
    side = Side()
    side.send(*range(2 + CHAIN + 3))
    full = [[0], [1], list(range(2, 2 + CHAIN))]
    assert side.doorbells == full
    assert side.state.facts()["n_unposted"] == 3
    side.end_turn()
    assert side.doorbells == [*full, list(range(2 + CHAIN, 2 + CHAIN + 3))]
    side.send(50)
    assert side.doorbells[-1] == [50], "another turn"


def test_the_loop_ends_the_turn() -> None:
    async def main() -> None:
        side = Side(asyncio.get_running_loop())
        side.send(1, 2, 3, 4)
        assert side.doorbells == [[1], [2]]
        await asyncio.sleep(0)
        assert side.doorbells == [[1], [2], [3, 4]]

    asyncio.run(main())


@pytest.mark.parametrize("error", [RuntimeError("Event loop is closed"), MemoryError()])
def test_without_a_call_of_the_loop_all_are_posted_at_once(error: Exception) -> None:
    side = Side(SimpleNamespace(is_running=lambda: True, call_soon=raising(error)))
    side.send(1, 2, 3, 4)
    assert side.doorbells == [[1], [2], [3], [4]]


def test_a_resumed_task_answers_what_has_arrived_together() -> None:
    side = Side()
    completing = Completing(side.state)
    for slot in range(3):
        frame = FRAME.pack(FrameKind.DATA, 0, 0, 0, 0)
        ffi.buffer(side._slots[1])[slot * SIZE : slot * SIZE + FRAME_SIZE] = frame
        assert completing.take(completion(SUB_RECV | slot, WCOpcode.RECV, FRAME_SIZE))

    def answer() -> None:
        for number in range(3):
            side.state.skip()
            side.send(number)
            assert side.doorbells == ([] if number < 2 else [[0, 1, 2]]), "the last waits for none"

    side.resumed = answer
    side.state(EVENT_FRAMES)
    assert (side.doorbells, side.calls) == ([[0, 1, 2]], [])


def test_a_burst_of_a_resumed_task_is_posted_together() -> None:
    side = Side()
    side.resumed = lambda: side.send(*range(2 + CHAIN + 3))
    side.state(EVENT_FRAMES)
    first, last = list(range(2, 2 + CHAIN)), list(range(2 + CHAIN, 2 + CHAIN + 3))
    assert (side.doorbells, side.calls) == ([[0], [1], first, last], [])
    side.resumed = lambda: side.send(50)
    side.state(EVENT_FRAMES)
    assert side.doorbells[-1] == [50], "another turn"


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, SystemExit])
def test_the_chain_is_posted_when_the_events_are_told(error: type[BaseException] | None) -> None:
    side = Side()
    completing = Completing(side.state)
    assert completing.take(completion(SUB_RECV, WCOpcode.RECV, FRAME_SIZE)) is True
    side.state.skip()
    frame = FRAME.pack(FrameKind.DATA, 0, 0, 0, 0)
    ffi.buffer(side._slots[1])[SIZE : SIZE + FRAME_SIZE] = frame
    assert completing.take(completion(SUB_RECV | 1, WCOpcode.RECV, FRAME_SIZE))

    def answer() -> None:
        side.send(1, 2)
        assert side.doorbells == []
        if error is not None:
            raise error

    side.resumed = answer
    if error is None:
        side.state(EVENT_FRAMES)
    else:
        with pytest.raises(error):
            side.state(EVENT_FRAMES)
    assert side.doorbells == [[1, 2]]


def test_other_requests_come_behind_the_chain() -> None:
    side = Side()
    side.send(1, 2, 3)
    assert side.state.send_control(int(FrameKind.PING)) == 0
    assert side.doorbells == [[1], [2], [3, FrameKind.PING]]
    side.send(4)
    assert side.state.post_read(0, 0, 8, 0, 0, 0) == 0
    assert side.doorbells[3:] == [[4], ["read"]]


def test_a_send_that_has_to_wait_has_the_chain_posted() -> None:
    side = Side()
    have_timer(side.state)
    set_terms(side.state, credits=3)
    side.send(1, 2, 3)
    assert side.doorbells == [[1], [2]]
    assert side.state.send(b"4", None) == NO_ROOM
    assert side.doorbells == [[1], [2], [3]]


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_a_refused_chain_ends_the_connection(taken: int) -> None:
    side = Side()
    side.send(1, 2, 3, 4, 5)
    side.taken = taken
    side.end_turn()
    assert side.events == (EVENT_FAILED if taken < 3 else 0)
    assert side.state.facts()["error"] == (errno.ENOMEM if taken < 3 else 0)
    assert side.state.facts()["n_unposted"] == 3 - taken
    side.state.advance("HOLD")
    assert (side.state.sent, side.state.flushed) == (5, 3 - taken), "what is under way is posted"
    assert side.state.completed == 0, "none of them has reached the peer"


def test_a_refused_chain_is_told_behind_an_exception() -> None:
    side = Side()
    side.send(1, 2, 3)
    side.taken = 0
    side.calls.clear()

    def interrupt() -> None:
        raise KeyboardInterrupt

    side.resumed = interrupt
    with pytest.raises(KeyboardInterrupt):
        side.state(EVENT_FRAMES)
    side.resumed = lambda: None
    assert side.calls == [0, EVENT_FAILED], "the handler is not called for ever"
    side.events = 0
    side.state(EVENT_FAILED)
    assert (side.events, side.state.facts()["error"]) == (EVENT_FAILED, errno.ENOMEM)


def test_nothing_is_posted_in_place_of_a_refused_send() -> None:
    side = Side()
    side.send(1, 2, 3)
    side.taken = 0
    assert side.state.post_read(0, 0, 8, 0, 0, 0) == errno.ENOMEM
    assert side.state.send(b"4", None) == 0, "it waits behind the others"
    side.end_turn()
    assert side.events == EVENT_FAILED
    assert side.doorbells == [[1], [2], [], []]


def test_a_closed_connection_posts_nothing() -> None:
    side = Side()
    side.send(1, 2, 3)
    side.state.close()
    side.end_turn()
    assert side.doorbells == [[1], [2]]
    assert side.state.sent - side.state.flushed == 2


def raising(error: BaseException, times: int = 1) -> Callable[..., Any]:
    """A function of a loop, in which a signal's handler raises so many times."""
    left = [error] * times

    def call(*args: object) -> bool:
        if left:
            raise left.pop()
        return True

    return call


def test_an_exception_of_a_signal_handler_goes_on() -> None:
    """Python runs these handlers in Python code, and `is_running` and `call_soon` are such code."""
    side = Side(SimpleNamespace(is_running=raising(KeyboardInterrupt()), call_soon=None))
    with pytest.raises(KeyboardInterrupt):
        side.state.send(b"\1", None)
    assert side.doorbells == [], "nothing was sent"
    assert side.state.send(b"\1", None) == 0

    side = Side(SimpleNamespace(is_running=lambda: True, call_soon=raising(KeyboardInterrupt())))
    side.send(1)
    with pytest.raises(KeyboardInterrupt):
        side.send(2)
    side.send(3, 4)
    assert side.doorbells == [[1], [2], [3], [4]], "none waits for a call that is not to come"


def test_a_message_is_taken_after_an_exception_of_a_signal_handler() -> None:
    side = Side(SimpleNamespace(is_running=raising(KeyboardInterrupt())))
    waiter = side.state.receiving(LeftToPython())
    with pytest.raises(KeyboardInterrupt):
        next(waiter)


def test_the_chain_is_posted_before_an_abort() -> None:
    side = Side()
    side.send(1, 2, 3, 4)
    assert side.state.post_chain() == 0
    assert side.doorbells == [[1], [2], [3, 4]]
    side.send(5)
    side.taken = 0
    assert side.state.post_chain() == errno.ENOMEM
