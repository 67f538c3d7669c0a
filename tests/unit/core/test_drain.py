"""The drain in C, over an adapter that completes between any two of its calls.

What would show a lost wake-up nowhere else: the safety poll finds the completion within a second,
and a program is only slow.  Here nothing is polled without an event.
"""

from __future__ import annotations

import errno
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma._core import EVENT_ARRIVED, STREAM_MESSAGE, SUB_RECV, SUB_SHIFT, StreamState
from aiordma.endpoint.config import ConnectionConfig
from aiordma.verbs.enums import WCStatus

from ..endpoint.fabric import new_state
from .completing import QueuePair
from .fake_verbs import BATCH, Adapter, Queue


class Plan:
    """Completes `counts[i]` requests in the i-th moment."""

    def __init__(self, counts: list[int]) -> None:
        self.counts = counts
        self.made: list[int] = []
        self.log: list[str] = []
        self._ids = itertools.count(1)

    def __call__(self, name: str, queue: Queue) -> None:
        at = len(self.log)
        self.log.append(name)
        for _ in range(self.counts[at] if at < len(self.counts) else 0):
            self.complete(queue)

    def complete(self, queue: Queue) -> None:
        self.made.append(next(self._ids))
        queue.complete(self.made[-1])


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("solicited", [False, True])
@pytest.mark.parametrize("place", range(10))
def test_i03_what_completes_between_any_two_calls_is_found(
    late: bool, solicited: bool, place: int
) -> None:
    """One that lands after the poll and before the arming raises no event."""
    plan = Plan([0] * place + [1])
    with Adapter(plan) as adapter:
        queue = adapter.queue(late=late, solicited=solicited)
        plan.complete(queue)
        adapter.serve()
        assert len(plan.made) == (2 if place < len(plan.log) else 1)
        assert [wr_id for _, wr_id in adapter.got] == plan.made, (
            f"after {plan.log[: place + 1]} one lies in the queue, and the loop sleeps"
        )
        assert queue.armed is solicited, "nothing would wake the loop again"


@given(
    st.lists(st.integers(0, 3), max_size=24),
    st.booleans(),
    st.integers(1, BATCH),
)
def test_i03_nothing_is_lost_whenever_it_completes(
    counts: list[int], late: bool, most: int
) -> None:
    plan = Plan(counts)
    with Adapter(plan, most) as adapter:
        queue = adapter.queue(late=late)
        plan.complete(queue)
        adapter.serve()
        assert [wr_id for _, wr_id in adapter.got] == plan.made
        assert queue.armed is False
        assert not queue.waiting, "the safety poll would find them"


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=40),
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
    st.integers(1, 8),
)
def test_i03_nor_with_several_queues(
    steps: list[tuple[int, int]], late: tuple[bool, ...], most: int
) -> None:
    made: dict[int, list[int]] = {1: [], 2: [], 3: []}
    ids, left = itertools.count(1), list(steps)

    def complete(queue: Queue) -> None:
        made[queue.own.token].append(next(ids))
        queue.complete(made[queue.own.token][-1])

    def moment(name: str, queue: Queue) -> None:
        if left:
            which, count = left.pop(0)
            for _ in range(count):
                complete(queues[which])

    with Adapter(moment, most) as adapter:
        queues = [adapter.queue(late=each) for each in late]
        for queue in queues:
            complete(queue)
        adapter.serve()
        for queue in queues:
            token = queue.own.token
            assert [wr_id for owner, wr_id in adapter.got if owner == token] == made[token]
            assert queue.armed is False


def test_i03_a_queue_is_armed_before_it_is_polled() -> None:
    plan = Plan([])
    with Adapter(plan) as adapter:
        queue = adapter.queue()
        plan.complete(queue)
        adapter.serve()
        assert plan.log == ["before arm", "after arm", "before poll", "after poll"]


def test_i03_a_queue_that_is_armed_late_is_polled_once_more() -> None:
    plan = Plan([])
    with Adapter(plan) as adapter:
        queue = adapter.queue(late=True)
        plan.complete(queue)
        adapter.run()
        assert adapter.more
        assert [name for name in plan.log if name.startswith("before")] == ["before poll"]
        adapter.run()
        assert not adapter.more
        polled_and_armed = [name for name in plan.log if name.startswith("before")]
        assert polled_and_armed == ["before poll", "before poll", "before arm", "before poll"]


def test_i03_an_event_of_a_queue_that_is_being_destroyed_is_acknowledged_at_once() -> None:
    """`ibv_destroy_cq` waits for it, and nothing else would acknowledge it: a worker lost."""
    with Adapter() as adapter:
        queue = adapter.queue()
        queue.complete(1)
        queue.retire()
        assert queue.acknowledged == 0
        adapter.serve()
        assert queue.polls == 0, "it is unmapped by now, perhaps"
        assert queue.acknowledged == queue.events == 1


def test_i03_what_is_owed_is_acknowledged_where_the_queue_retires() -> None:
    with Adapter() as adapter:
        queue = adapter.queue()
        for wr_id in range(5):
            queue.complete(wr_id)
            adapter.serve()
        assert (queue.events, queue.acknowledged) == (5, 0)
        queue.retire()
        assert queue.acknowledged == 5


def test_i03_events_are_acknowledged_in_time() -> None:
    """The count that C keeps of them, and what a destroy waits for, stay near each other."""
    with Adapter() as adapter:
        queue = adapter.queue()
        for wr_id in range(100):
            queue.complete(wr_id)
            adapter.serve()
            assert queue.events - queue.acknowledged < 32
            assert queue.own.events == queue.events
            assert queue.own.unacknowledged == queue.events - queue.acknowledged
        assert queue.acknowledged >= 69


def test_i03_an_event_is_acknowledged_after_the_last_poll() -> None:
    """Before that, another thread could free the queue that is being polled."""
    seen: list[tuple[int, int]] = []

    def moment(name: str, queue: Queue) -> None:
        seen.append((queue.acknowledged + queue.own.unacknowledged, queue.events))

    with Adapter(moment) as adapter:
        queue = adapter.queue()
        for wr_id in range(40):
            queue.complete(wr_id)
            adapter.serve()
        assert all(settled == events - 1 for settled, events in seen), seen


def test_i03_an_unfinished_drain_gives_its_events_back() -> None:
    with Adapter(most=2) as adapter:
        queues = [adapter.queue() for _ in range(3)]
        for queue in queues:
            for wr_id in range(5):
                queue.complete(wr_id)
        adapter.run()
        before = adapter.drain.n_pending
        assert before
        adapter.drain.forget(queues[2].address)
        assert adapter.drain.n_pending == before - 1
        assert queues[2].acknowledged == queues[2].events
        for queue in queues:
            queue.retire()
        adapter.drain.forget(queues[0].address)
        adapter.serve()
        assert [queue.acknowledged for queue in queues] == [queue.events for queue in queues]


def test_i03_a_drain_that_nobody_finishes_gives_all_its_events_back() -> None:
    with Adapter(most=2) as adapter:
        queues = [adapter.queue() for _ in range(3)]
        for queue in queues:
            for wr_id in range(5):
                queue.complete(wr_id)
        adapter.run()
        adapter.drain.forget(0)
        assert adapter.drain.n_pending == 0
        for queue in queues:
            queue.retire()
            assert queue.acknowledged == queue.events


def test_i03_a_full_queue_does_not_delay_the_others() -> None:
    """Turns of 64 completions: the second comes before the hundredth of the first."""
    with Adapter() as adapter:
        busy, other = adapter.queue(), adapter.queue()
        for wr_id in range(300):
            busy.complete(wr_id)
        other.complete(1000)
        adapter.serve()
        assert adapter.got.index((other.own.token, 1000)) <= 64
        assert len(adapter.got) == 301


def test_i03_behind_a_completion_for_python_all_are_for_python() -> None:
    """Until it has seen them: otherwise bytes of a stream would overtake those before them."""
    state = StreamState(
        ring=(1 << 20, 1, 64), table=1 << 21, send=(1 << 22, 64, 2), credits=3, send_depth=16,
        iwarp=False, inline_size=8, memory=None,
    )  # fmt: skip
    qp = QueuePair(lambda wr: None)
    state.bind(qp.address, 0, 0, 0, 0)
    state.meet(5, (0x20000, 0x88, 100), (0x10000, 0x77, 2), False)
    state.open()
    state.hold(False)
    for _ in range(5):
        assert state.send(b"x") == 1

    def sent(number: int) -> int:
        return (STREAM_MESSAGE | number) << SUB_SHIFT

    with Adapter() as adapter:
        adapter.drain.add(0, state, lambda events: None)
        queue = adapter.queue()
        for_python = 1 << SUB_SHIFT
        for wr_id in (sent(0), sent(1), for_python, sent(2), sent(3)):
            queue.complete(wr_id)
        adapter.serve()
        assert state.progress == 2
        assert [wr_id for _, wr_id in adapter.got] == [for_python, sent(2), sent(3)], (
            "they have overtaken it"
        )
        for _ in range(3):
            state.seen()
        with pytest.raises(RuntimeError):
            state.seen()
        queue.complete(sent(4))
        adapter.serve()
        assert state.progress == 5


def test_i03_behind_a_completion_for_python_messages_are_not() -> None:
    """What is for Python is no part of their order."""
    config = ConnectionConfig(raw=True, recv_depth=8)
    state = new_state(config, None, config.receives, 1)

    with Adapter() as adapter:
        adapter.drain.add(0, state, lambda events: None)
        queue = adapter.queue()
        for_python = 0  # a send that has failed
        queue.complete(SUB_RECV << SUB_SHIFT)
        queue.complete(for_python, status=int(WCStatus.RETRY_EXC_ERR))
        queue.complete((SUB_RECV | 1) << SUB_SHIFT)
        adapter.serve()
        assert state.arrived == 2
        assert [wr_id for _, wr_id in adapter.got] == [for_python]


def test_i03_a_queue_that_is_polled_by_hand_is_reported_and_left_alone() -> None:
    with Adapter() as adapter:
        queue = adapter.queue(managed=False)
        queue.complete(1)
        adapter.serve()
        assert (queue.polls, queue.armed) == (0, None)
        assert queue.acknowledged == 1
        assert adapter.told == [queue.own.token]


def test_i03_a_queue_that_cannot_be_polled_is_an_error() -> None:
    with Adapter() as adapter:
        queue, other = adapter.queue(), adapter.queue()
        queue.broken = True
        for each in (queue, other):
            each.complete(1)
        assert not adapter.drain.drain()
        segments, more, *failed = adapter.drain.result()
        assert (len(segments), more, failed) == (1, False, [errno.EIO, "ibv_poll_cq"])
        assert segments[0][0] == other.own.token, "it holds up no other"
        assert adapter.drain.sweep(queue.address) is None


def test_a_sweep_tells_what_it_has_found() -> None:
    config = ConnectionConfig(raw=True, recv_depth=8)
    state, told = new_state(config, None, config.receives, 1), list[int]()
    state.await_arrival(True)
    received = [(SUB_RECV | slot) << SUB_SHIFT for slot in range(3)]
    failed = int(WCStatus.RETRY_EXC_ERR)
    other = 1 << SUB_SHIFT
    with Adapter(most=4) as adapter:
        adapter.drain.add(0, state, told.append)
        queue = adapter.queue()
        for wr_id in (*received[:2], other, received[2], 77 << SUB_SHIFT):
            queue.complete(wr_id, status=0 if wr_id in received else failed)
        first = adapter.drain.sweep(queue.address)
        assert first is not None
        polled, arrived, records, more = first
        assert (polled, arrived, more) == (4, 1, True)
        assert [record[0] for record in records] == [other]
        second = adapter.drain.sweep(queue.address)
        assert second is not None
        polled, arrived, records, more = second
        assert (polled, arrived, more) == (1, 0, False)
        assert [record[0] for record in records] == [77 << SUB_SHIFT]
        assert (adapter.drain.undelivered, told) == (1, [])
        adapter.drain.deliver()
        assert (adapter.drain.undelivered, told) == (0, [EVENT_ARRIVED])
