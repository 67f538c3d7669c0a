"""SharedQueues: a new connection finds a queue with room, and does not ask all that are full."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest

from aiordma.link import shared_queues
from aiordma.link.shared_queues import SharedQueues
from tests.inside.verbs import RingOnly, expected, promised

ROOM = 10


class Queue:
    """A queue that cannot grow."""

    asked = 0
    swept: ClassVar[list[Queue]] = []

    def __init__(self, context: Any, cqe: int, channel: Any, shared: Any) -> None:
        self.promised = self.left = 0
        self.closed = False
        self.shared = shared

    def _make_room(self, depth: int, expected: int) -> bool:
        Queue.asked += 1
        return self.promised + depth <= ROOM

    def gone(self, depth: int) -> None:
        self.left += depth
        self.promised -= depth
        self.shared.has_room(self)

    def _unpromise(self, depth: int, expected: int) -> None:
        assert depth == 0

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def queues(monkeypatch: pytest.MonkeyPatch) -> SharedQueues:
    monkeypatch.setattr(shared_queues, "SharedQueue", Queue)
    monkeypatch.setattr(shared_queues, "CompletionQueue", Queue)
    monkeypatch.setattr(Queue, "asked", 0)
    attributes = SimpleNamespace(max_cqe=ROOM)
    context = SimpleNamespace(is_iwarp=False, attributes=attributes)
    monkeypatch.setattr(Queue, "swept", [])
    channel: Any = SimpleNamespace(context=context, _sweep=Queue.swept.append)
    return SharedQueues(channel)


def take(queues: SharedQueues, depth: int) -> Queue:
    cq: Any = queues.take(depth)
    assert isinstance(cq, Queue)
    cq.promised += depth
    assert cq.promised <= ROOM
    return cq


def test_each_asks_few_however_many_are_full(queues: SharedQueues) -> None:
    taken = [take(queues, 5) for _ in range(2000)]
    assert len(queues.queues) == 1000
    assert Queue.asked <= 2 * len(taken), "asked all that were full"


def test_room_that_came_back_is_found(queues: SharedQueues) -> None:
    taken = [take(queues, 5) for _ in range(20)]
    taken[6].gone(5)
    taken[15].gone(5)
    assert {take(queues, 5) for _ in range(2)} == {taken[6], taken[15]}
    assert len(queues.queues) == 10
    take(queues, 5)
    assert len(queues.queues) == 11


def test_what_others_have_left_is_taken_out_before_room_is_promised(queues: SharedQueues) -> None:
    swept = Queue.swept
    first = take(queues, 5)
    take(queues, 5)
    assert not swept
    first.gone(5)
    assert take(queues, 5) is first
    assert swept == [first]
    first.gone(10)
    take(queues, 3)
    take(queues, 3)
    assert swept == [first, first]


def test_one_that_is_not_full_is_filled_before_others(queues: SharedQueues) -> None:
    first = take(queues, 3)
    assert [take(queues, 3) for _ in range(2)] == [first, first]
    assert take(queues, 3) is not first
    taken = list(queues.queues)
    assert len(taken) == 2
    queues.close()
    assert all(isinstance(cq, Queue) and cq.closed for cq in taken)
    assert not queues.queues


@pytest.mark.parametrize("seed", range(10))
def test_connections_that_come_and_go_need_no_more_queues_than_full_ones(
    queues: SharedQueues, seed: int
) -> None:
    print("seed", seed)
    rng = random.Random(seed)
    taken: list[Queue] = []
    takes = most = 0
    for _ in range(3000):
        if taken and rng.random() < 0.49:
            taken.pop(rng.randrange(len(taken))).gone(5)
        else:
            taken.append(take(queues, 5))
            takes += 1
        most = max(most, len(taken))
    assert len(queues.queues) == (most + 1) // 2
    assert Queue.asked < 4 * takes


def rings(
    size: int, most: int, late: Sequence[int] = ()
) -> tuple[SharedQueues, RingOnly, list[int]]:
    """A queue, and the completions that each sweep has taken out.

    `late`: those of queue pairs that go at the end of a sweep each.
    """
    swept: list[int] = []
    later = list(late)

    def sweep(cq: RingOnly) -> None:
        swept.append(cq.held)
        cq.held = later.pop() if later else 0
        if cq.held:
            cq.gone(cq.held, cq.held)

    shared = SharedQueues(cast("Any", SimpleNamespace(_sweep=sweep)))
    return shared, RingOnly(shared, size, most), swept


@pytest.mark.parametrize("most", [130, 1000])
def test_slots_that_come_find_room_beside_what_others_have_left(most: int) -> None:
    """The completions of a queue pair that has gone stay in the ring until the next poll."""
    _, cq, swept = rings(100, most)
    cq.promise(60, 40)
    cq.promise(60, 40)
    cq.held = 40
    cq.gone(60, 40)
    cq.expect(20)
    assert (swept, cq.size) == ([], 100), "there was room"
    cq.expect(40)
    assert (expected(cq), promised(cq)) == (100, 60)
    assert cq.held + expected(cq) <= cq.size
    assert swept == ([40] if most == 130 else []), "the ring can grow"


def test_what_is_left_while_a_queue_is_swept_counts_until_the_next_sweep() -> None:
    """A queue pair is destroyed in a thread, perhaps in the midst of a sweep."""
    shared, cq, swept = rings(100, 1000, late=[40])
    cq.promise(40, 40)
    cq.promise(40, 40)
    cq.gone(40, 40)
    shared.sweep(cq)
    assert cq.left == 40
    cq.promise(70, 70)
    assert cq.size >= cq.held + 70
    shared.sweep(cq)
    assert (swept, cq.left, expected(cq)) == ([0, 40], 0, 70)
