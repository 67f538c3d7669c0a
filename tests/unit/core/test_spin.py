"""Waits that begin with polling: `poller.c`, and their part of the drain.

The adapter of fake_verbs completes between any two calls.  The test is the loop: it calls for the
turns that the Poller asks for.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma._core import (
    SUB_RECV,
    SUB_SHIFT,
    MessageState,
    Poller,
    QueueState,
    Readable,
    Spin,
)
from aiordma.endpoint.config import ConnectionConfig

from ..conftest import LIMIT_S
from ..endpoint.fabric import LeftToPython, new_state
from .fake_verbs import Adapter, Queue

LONG_NS, SHORT_NS = 1 << 50, 1
_RECEIVED = SUB_RECV << SUB_SHIFT
_RAW = ConnectionConfig(raw=True, recv_depth=1024)
#: Of an entry that has no state.
_STRANGER = 100


class Running:
    """As much of a loop as a state asks for."""

    def is_running(self) -> bool:
        return True


class Waiter:
    """A task that waits for messages of a state, which it throws away.

    Attributes:
        resumed: How often it was resumed.
        more: How often it waits again.
    """

    def __init__(self, state: MessageState, more: int = 0) -> None:
        self.state = state
        self.more = more
        self.resumed = 0
        self._wait: Generator[Any, None, Any] | None = None
        receiver: Any = self
        state.set_receiver(receiver)

    def on_arrival(self, starved: bool) -> None:
        """A message has come while no task waits."""
        while self.state.peek() is not None:
            self.state.skip()

    def wait(self) -> None:
        wait = self.state.receiving(LeftToPython())
        parked: Any = next(iter(wait))
        self._wait = wait
        parked._asyncio_future_blocking = False
        parked.add_done_callback(self._resume)

    def cancel(self) -> None:
        assert self._wait is not None
        with pytest.raises(asyncio.CancelledError):
            self._wait.throw(asyncio.CancelledError())

    def _resume(self, _: object) -> None:
        assert self._wait is not None
        self._wait.close()
        self.resumed += 1
        self.on_arrival(False)
        if self.more:
            self.more -= 1
            self.wait()


class Scene:
    """A channel whose queues are polled.

    Attributes:
        asked: Turns that the loop was asked for.
        python: Ids that were left to Python.
    """

    def __init__(self, moment: Callable[[str, Queue], None] = lambda name, queue: None) -> None:
        self.log: list[str] = []
        self._moment = moment
        self.adapter = Adapter(self._note)
        self.drain = self.adapter.drain
        self.asked = 0
        self.python: list[int] = []
        self.raises: list[BaseException] = []
        self.poller = Poller(self._ask)
        self.drain.poll_with(self.poller)
        self._readable = Readable(self.drain, self._slow)
        self.states: list[MessageState] = []
        self._arrived: Counter[int] = Counter()

    def _note(self, name: str, queue: Queue) -> None:
        self.log.append(name)
        self._moment(name, queue)

    def _ask(self) -> None:
        if self.raises:
            raise self.raises.pop(0)
        self.asked += 1

    def _slow(self) -> None:
        if not self.drain.drain():
            for _, records in self.adapter.note():
                self.python += [record[0] for record in records]
            self.drain.deliver()
        self.drain.finish()

    def queue(self) -> Queue:
        return self.adapter.queue()

    def spin(self, queue: Queue, bound_ns: int = LONG_NS, *, adaptive: bool = False) -> Spin:
        return Spin(self.poller, queue.own, queue.address, bound_ns, adaptive, False)

    def state(self, spin: Spin) -> MessageState:
        """A connection with this Spin."""
        loop: Any = Running()
        state = new_state(_RAW, loop, _RAW.receives, 1)
        state.spin_with(spin, spin)
        self.drain.add(len(self.states), state, state)
        self.states.append(state)
        return state

    def arrive(self, queue: Queue, index: int = 0) -> None:
        """A message has arrived."""
        slot = self._arrived[index]
        self._arrived[index] += 1
        queue.complete(_RECEIVED + (slot << SUB_SHIFT) | index, length=1)

    def turn(self) -> None:
        """The loop calls for a turn that was asked for."""
        assert self.asked
        self.asked -= 1
        self._readable.spin()

    def step(self) -> bool:
        """Do what a loop does in a turn; False if it would sleep."""
        if self.asked:
            self.turn()
        elif self.adapter.readable or self.adapter.more:
            self.read()
        else:
            return False
        return True

    def serve(self) -> None:
        """Do what a loop does, until it would sleep."""
        for _ in range(1000):
            if not self.step():
                return
        raise AssertionError("the spin does not come to an end")

    def read(self) -> None:
        """The loop finds the descriptor readable, or goes on with the last drain, or neither."""
        if self.adapter.readable or self.adapter.more:
            self.adapter.more = False
            self._readable.run()

    @property
    def arms(self) -> int:
        return self.log.count("before arm")


@contextmanager
def scene(moment: Callable[[str, Queue], None] = lambda name, queue: None) -> Iterator[Scene]:
    made = Scene(moment)
    with made.adapter:
        yield made


def test_a_wait_is_polled_for_without_event_and_arming() -> None:
    with scene() as at:
        queue = at.queue()
        spin = at.spin(queue)
        waiter = Waiter(at.state(spin), more=20)
        waiter.wait()
        at.arrive(queue)
        for _ in range(20):
            at.step()
            at.arrive(queue)
        assert waiter.resumed == 20
        assert at.poller.asked
        assert queue.events <= 1, "only the queue that was armed before raised an event"
        assert not at.arms
        assert spin.waiting == at.poller.waiting == 1


@pytest.mark.parametrize("bound_ns", [1, 1000, 200_000])
def test_a_silent_peer_is_polled_for_until_the_bound_and_then_by_event(bound_ns: int) -> None:
    with scene() as at:
        queue = at.queue()
        waiter = Waiter(at.state(at.spin(queue, bound_ns)), more=1)
        waiter.wait()
        at.serve()
        assert not at.poller.asked
        assert queue.armed is False
        at.arrive(queue)
        assert at.adapter.readable
        at.serve()
        assert waiter.resumed == 1
        assert queue.armed is False, "the second wait has ended in the same way"


def test_a_turn_ends_long_before_a_long_bound() -> None:
    """Timers and descriptors have their turn."""
    with scene() as at:
        queue = at.queue()
        Waiter(at.state(at.spin(queue))).wait()
        begun = time.monotonic()
        at.turn()
        assert time.monotonic() - begun < LIMIT_S
        assert at.asked == 1
        assert queue.polls


@given(
    st.lists(st.integers(0, 2), max_size=30),
    st.integers(0, 6),
    st.sampled_from([1, 1000, LONG_NS]),
    st.booleans(),
    st.booleans(),
)
def test_nothing_is_lost_whenever_it_completes(
    counts: list[int], waits: int, bound_ns: int, adaptive: bool, strangers: bool
) -> None:
    """As for the drain (test_drain.py): at the end the queue is empty and armed."""
    made = itertools.count()
    left = list(counts)

    def moment(name: str, queue: Queue) -> None:
        for _ in range(left.pop(0) if left else 0):
            if strangers and next(made) % 3 == 0:
                queue.complete(_STRANGER)
            else:
                at.arrive(queue)

    with scene(moment) as at:
        queue = at.queue()
        spin = at.spin(queue, bound_ns, adaptive=adaptive)
        waiter = Waiter(at.state(spin), more=waits)
        waiter.wait()
        at.arrive(queue)
        for _ in range(200):
            at.step()
            at.read()
        if spin.waiting:
            waiter.cancel()
        at.serve()
        assert not queue.waiting, "the safety poll would find them"
        assert queue.armed is False, "nothing would wake the loop again"
        assert queue.acknowledged + queue.own.unacknowledged == queue.events
        assert spin.waiting == at.poller.waiting == 0


def test_no_queue_holds_up_another() -> None:
    """A queue that always has completions is not the only one that is polled."""
    with scene() as at:
        busy, other = at.queue(), at.queue()
        first = Waiter(at.state(at.spin(busy)), more=50)
        second = Waiter(at.state(at.spin(other)))
        first.wait()
        second.wait()
        at.arrive(other, 1)
        for _ in range(4):
            at.arrive(busy, 0)
            at.turn()
        assert second.resumed == 1


def test_the_wait_of_a_canceled_task_is_not_polled_for() -> None:
    with scene() as at:
        queue = at.queue()
        waiter = Waiter(at.state(at.spin(queue)))
        waiter.wait()
        waiter.cancel()
        assert at.poller.waiting == 0
        at.turn()
        assert not at.asked
        assert queue.armed is False


def test_the_end_of_a_connection_has_its_queue_armed() -> None:
    """Its last turn does so, and forgets the queue."""
    with scene() as at:
        queue, kept = at.queue(), at.queue()
        spin = at.spin(queue)
        waiter = Waiter(at.state(spin), more=1)
        at.spin(kept)
        waiter.wait()
        at.arrive(queue)
        at.turn()
        at.read()  # the event of the first arming
        assert queue.armed is None
        spin.close()
        spin.close()
        assert (at.poller.waiting, queue.own.spins) == (0, 0)
        at.serve()
        assert queue.armed is False
        waiter.cancel()
        assert at.poller.waiting == 0
        del spin
        at.arrive(queue)
        at.serve()
        assert queue.armed is False, "by event, as other queues"


def test_queues_without_a_spin_are_forgotten() -> None:
    with scene() as at:
        queues = [at.queue() for _ in range(3)]
        spins = [at.spin(queue) for queue in queues for _ in range(2)]
        assert at.poller.n_queues == 3
        spins[0].close()
        assert at.poller.n_queues == 3
        spins[1].close()
        assert at.poller.n_queues == 2
        spins.clear()
        assert at.poller.n_queues == 0
        assert [queue.own.spins for queue in queues] == [0, 0, 0]


def test_waits_on_too_many_queues_are_by_event() -> None:
    with scene() as at:
        queues = [at.queue() for _ in range(17)]
        spins = [at.spin(queue) for queue in queues]
        assert at.poller.n_queues == 16
        waiter = Waiter(at.state(spins[-1]))
        waiter.wait()
        assert not at.asked
        at.arrive(queues[-1])
        at.serve()
        assert waiter.resumed == 1


def test_adaptive_learns_from_answers() -> None:
    with scene() as at:
        queue = at.queue()
        spin = at.spin(queue, LONG_NS, adaptive=True)
        waiter = Waiter(at.state(spin), more=2)
        waiter.wait()
        assert not at.asked, "nothing is known yet"
        at.arrive(queue)
        at.read()
        assert waiter.resumed == 1
        assert spin.recent_ns < LONG_NS
        assert at.asked, "the next wait is polled for"
        assert not at.arms, "the queue was not armed in between"
        assert queue.armed is None


def test_adaptive_learns_from_silence() -> None:
    """After some waits that were longer than the bound, there is no polling any more."""
    with scene() as at:
        queue = at.queue()
        spin = at.spin(queue, SHORT_NS, adaptive=True)
        waiter = Waiter(at.state(spin), more=40)
        waiter.wait()
        for _ in range(30):
            at.arrive(queue)
            at.serve()
        assert waiter.resumed == 30
        assert spin.recent_ns >= SHORT_NS
        asked = at.asked
        at.arrive(queue)
        at.read()
        assert at.asked == asked == 0


def test_a_canceled_wait_teaches_nothing() -> None:
    with scene() as at:
        spin = at.spin(at.queue(), LONG_NS, adaptive=True)
        waiter = Waiter(at.state(spin))
        waiter.wait()
        waiter.cancel()
        assert spin.recent_ns == LONG_NS


def test_other_threads_run_while_a_turn_polls() -> None:
    interval = sys.getswitchinterval()
    ready, go, ran = threading.Event(), threading.Event(), []

    def other() -> None:
        ready.set()
        go.wait()
        ran.append(True)

    thread = threading.Thread(target=other)
    with scene() as at:
        Waiter(at.state(at.spin(at.queue()))).wait()
        thread.start()
        ready.wait()
        try:
            sys.setswitchinterval(1000)
            go.set()
            for _ in range(100_000):
                at.turn()
                if ran:
                    break
        finally:
            sys.setswitchinterval(interval)
        thread.join()
        assert ran


def test_a_queue_is_not_destroyed_while_it_is_polled() -> None:
    """`ibv_destroy_cq` comes when `retire` has returned, in another thread."""
    retired = threading.Event()
    seen: list[bool] = []

    def retire() -> None:
        queue.retire()
        retired.set()

    def moment(name: str, _: Queue) -> None:
        if name == "before poll" and not seen:
            thread.start()
            seen.append(retired.wait(0.05))

    thread = threading.Thread(target=retire)
    with scene(moment) as at:
        queue = at.queue()
        Waiter(at.state(at.spin(queue, SHORT_NS))).wait()
        at.turn()
        thread.join(LIMIT_S)
        assert seen == [False]
        assert retired.is_set()
        polls = queue.polls
        at.serve()
        assert queue.polls == polls


def test_a_queue_that_cannot_be_polled_is_reported() -> None:
    with scene() as at:
        queue = at.queue()
        Waiter(at.state(at.spin(queue))).wait()
        queue.broken = True
        at.asked -= 1
        with pytest.raises(AssertionError, match="Input/output"):
            at._readable.spin()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError()])
def test_an_exception_of_a_signal_handler_ends_the_wait(error: BaseException) -> None:
    """The loop was asked all the same: the queue may have to be armed."""
    with scene() as at:
        queue = at.queue()
        waiter = Waiter(at.state(at.spin(queue)))
        at.raises = [error]
        with pytest.raises(type(error)):
            waiter.wait()
        assert at.poller.waiting == 0
        assert at.asked == 1
        at.serve()
        waiter.wait()
        at.arrive(queue)
        at.turn()
        assert waiter.resumed == 1


def test_an_exception_between_two_turns_reaches_the_loop() -> None:
    with scene() as at:
        queue = at.queue()
        waiter = Waiter(at.state(at.spin(queue)))
        waiter.wait()
        at.raises = [KeyboardInterrupt()]
        with pytest.raises(KeyboardInterrupt):
            at.turn()
        at.drain.finish()
        at.arrive(queue)
        at.step()
        assert waiter.resumed == 1


def test_an_event_while_a_turn_is_to_come_is_left_to_the_turn() -> None:
    """The drain neither polls nor arms; the events are acknowledged, though a few at a time."""
    with scene() as at:
        queue = at.queue()
        waiter = Waiter(at.state(at.spin(queue)))
        waiter.wait()
        at.arrive(queue)
        at.read()
        assert not at.log
        assert waiter.resumed == 0
        at.serve()
        assert waiter.resumed == 1
        assert queue.armed is False
        queue.retire()
        assert queue.acknowledged == queue.events == 1


def test_a_closed_loop_is_not_asked() -> None:
    with scene() as at:
        waiter = Waiter(at.state(at.spin(at.queue())))
        at.raises = [RuntimeError("Event loop is closed")]
        waiter.wait()
        assert not at.poller.asked


def test_a_closed_channel_and_a_forked_child_poll_nothing() -> None:
    for end in ("ask", "stopped"):
        with scene() as at:
            queue = at.queue()
            Waiter(at.state(at.spin(queue))).wait()
            if end == "ask":
                at.poller.stop()
            else:
                at.drain.stop()
            at.turn()
            assert not queue.polls
            assert not at.asked


def test_values_that_make_no_sense() -> None:
    queue = QueueState(1)
    poller = Poller(print)
    with pytest.raises(ValueError, match="bound"):
        Spin(poller, queue, 1, 0, adaptive=False, yields=False)
    with pytest.raises(TypeError):
        Spin(queue, queue, 1, 1, adaptive=False, yields=False)  # type: ignore[arg-type]
    state = new_state(_RAW, None, _RAW.receives, 1)
    with pytest.raises(TypeError):
        state.spin_with(poller, poller)  # type: ignore[arg-type]
