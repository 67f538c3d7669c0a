"""SharedQueues: a new connection finds a queue with room, and does not ask all that are full."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from aiordma.link import shared_queues
from aiordma.link.shared_queues import SharedQueues

ROOM = 10


class Queue:
    """A queue that cannot grow."""

    asked = 0
    swept: ClassVar[list[Queue]] = []

    def __init__(self, context: Any, cqe: int, channel: Any, shared: Any) -> None:
        self.promised = 0
        self.closed = False
        self.shared = shared

    def _make_room(self, depth: int, expected: int) -> bool:
        Queue.asked += 1
        return self.promised + depth <= ROOM

    def gone(self, depth: int) -> None:
        self.shared.left.add(self)
        self.promised -= depth
        self.shared.has_room(self)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def queues(monkeypatch: pytest.MonkeyPatch) -> SharedQueues:
    monkeypatch.setattr(shared_queues, "SharedQueue", Queue)
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
