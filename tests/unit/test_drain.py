"""The drain in C, over an adapter that completes between any two of its calls.

What would show a lost wake-up nowhere else: the safety poll finds the completion within a second,
and a program is only slow.  Here nothing is polled without an event.
"""

from __future__ import annotations

import ctypes
import itertools
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma._ffi import ffi, lib
from aiordma.loop.slots import SUB_SHIFT

from .fake_verbs import AGAIN, BATCH, Adapter, Queue

FOR_PYTHON = 3 << SUB_SHIFT


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


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("solicited", [False, True])
@pytest.mark.parametrize("place", range(10))
def test_i03_what_completes_between_any_two_calls_is_found(
    eager: bool, solicited: bool, place: int
) -> None:
    """One that lands after the poll and before the arming raises no event."""
    plan = Plan([0] * place + [1])
    with Adapter(plan) as adapter:
        queue = adapter.queue(eager=eager, solicited=solicited)
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
    counts: list[int], eager: bool, cap: int
) -> None:
    plan = Plan(counts)
    with Adapter(plan) as adapter:
        queue = adapter.queue(eager=eager)
        plan.complete(queue)
        adapter.serve(cap)
        assert [wr_id for _, wr_id in adapter.got] == plan.made
        assert queue.armed is False
        assert not queue.waiting, "the safety poll would find them"


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=40),
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
    st.integers(1, 8),
)
def test_i03_nor_with_several_queues(
    steps: list[tuple[int, int]], eager: tuple[bool, ...], cap: int
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

    with Adapter(moment) as adapter:
        queues = [adapter.queue(eager=each) for each in eager]
        for queue in queues:
            complete(queue)
        adapter.serve(cap)
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


def test_i03_an_eager_queue_is_armed_last_and_polled_once_more() -> None:
    plan = Plan([])
    with Adapter(plan) as adapter:
        queue = adapter.queue(eager=True)
        plan.complete(queue)
        took = adapter.run()
        assert took & AGAIN
        assert [name for name in plan.log if name.startswith("before")] == ["before poll"]
        adapter.drain.again = 1
        assert not adapter.run() & AGAIN
        polled_and_armed = [name for name in plan.log if name.startswith("before")]
        assert polled_and_armed == ["before poll", "before poll", "before arm", "before poll"]


def test_i03_an_event_of_a_queue_that_is_being_destroyed_is_acknowledged_at_once() -> None:
    """`ibv_destroy_cq` waits for it, and nothing else would acknowledge it: a worker lost."""
    with Adapter() as adapter:
        queue = adapter.queue()
        queue.complete(1)
        lib.aio_cq_retire(queue.cq, queue.own)
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
        lib.aio_cq_retire(queue.cq, queue.own)
        assert queue.acknowledged == 5


def test_i03_events_are_acknowledged_in_time() -> None:
    """The count that C keeps of them, and what a destroy waits for, stay near each other."""
    with Adapter() as adapter:
        queue = adapter.queue()
        for wr_id in range(100):
            queue.complete(wr_id)
            adapter.serve()
            assert queue.events - queue.acknowledged < 32
        assert queue.acknowledged >= 69


def test_i03_an_event_is_acknowledged_after_the_last_poll() -> None:
    """Before that, another thread could free the queue that is being polled."""
    seen: list[tuple[int, int]] = []

    def moment(name: str, queue: Queue) -> None:
        seen.append((queue.acknowledged + queue.own.owed, queue.events))

    with Adapter(moment) as adapter:
        queue = adapter.queue()
        for wr_id in range(40):
            queue.complete(wr_id)
            adapter.serve()
        assert all(settled == events - 1 for settled, events in seen), seen


def test_i03_a_queue_that_retires_waits_for_the_poll() -> None:
    threads: list[threading.Thread] = []
    order: list[str] = []

    def retire(queue: Queue) -> None:
        lib.aio_cq_retire(queue.cq, queue.own)
        order.append("retired")

    def moment(name: str, queue: Queue) -> None:
        if name == "before poll" and not threads:
            threads.append(threading.Thread(target=retire, args=(queue,)))
            threads[0].start()
            threads[0].join(0.05)  # time in which it must not come back
        order.append(name)

    with Adapter(moment) as adapter:
        queue = adapter.queue()
        queue.complete(1)
        adapter.serve()
        threads[0].join(20)
        assert order[-1] == "retired"
        assert order.index("after poll") < order.index("retired")
        assert queue.acknowledged == queue.events == 1


def test_i03_an_unfinished_drain_gives_its_events_back() -> None:
    with Adapter() as adapter:
        queues = [adapter.queue() for _ in range(3)]
        for queue in queues:
            for wr_id in range(5):
                queue.complete(wr_id)
        adapter.run(2)
        assert adapter.drain.n_pending
        lib.aio_drain_forget(adapter.drain, queues[2].cq)
        assert queues[2].own.pending == 0
        for queue in queues:
            lib.aio_cq_retire(queue.cq, queue.own)
        lib.aio_drain_forget(adapter.drain, queues[0].cq)
        adapter.serve()
        assert [queue.acknowledged for queue in queues] == [queue.events for queue in queues]


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
    """Until it has seen them: otherwise a message would overtake the one before it."""
    taken: list[int] = []

    def take(sink: int, wc: int) -> int:
        wr_id = ffi.cast("struct ibv_wc *", wc).wr_id
        if wr_id == FOR_PYTHON:
            return 0
        taken.append(wr_id)
        return 1

    call = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(take)
    sink = ffi.new("struct aio_sink *")
    address = ctypes.cast(call, ctypes.c_void_p).value
    sink.take = ffi.cast("int(*)(struct aio_sink *, const struct ibv_wc *)", address)
    sinks, ready = ffi.new("struct aio_sink *[]", [sink]), ffi.new("uint32_t[]", BATCH)
    sub = 1 << SUB_SHIFT
    with Adapter() as adapter:
        adapter.drain.sinks, adapter.drain.n_sinks, adapter.drain.ready = sinks, 1, ready
        queue = adapter.queue()
        for number in (1, 2, FOR_PYTHON >> SUB_SHIFT, 4, 5):
            queue.complete(number * sub)
        adapter.serve()
        assert taken == [1 * sub, 2 * sub]
        assert [wr_id // sub for _, wr_id in adapter.got] == [3, 4, 5], "they have overtaken it"
        assert sink.spilled == 3
        sink.spilled = 0  # Python has seen them
        queue.complete(6 * sub)
        adapter.serve()
        assert taken == [1 * sub, 2 * sub, 6 * sub]


def test_i03_a_queue_that_is_polled_by_hand_is_reported_and_left_alone() -> None:
    with Adapter() as adapter:
        queue = adapter.queue()
        queue.own.managed = 0
        queue.complete(1)
        adapter.serve()
        assert (queue.polls, queue.armed) == (0, None)
        assert queue.acknowledged == 1
        assert adapter.drain.segments[0].count == -1
