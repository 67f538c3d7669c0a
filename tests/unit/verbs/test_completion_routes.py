"""Completions find who posted the request, and stale ones find nobody."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from aiordma.loop.slots import SUB_SHIFT, TAG, TAG_SHIFT, SlotTable
from aiordma.verbs import async_event
from aiordma.verbs.async_event import AsyncEvent
from aiordma.verbs.comp_channel import SHARED_TAG, Sink, route, shared_queues
from aiordma.verbs.enums import AsyncEventType
from aiordma.verbs.wc import WCRecord
from tests.inside.verbs import tell


def record(wr_id: int) -> WCRecord:
    return (wr_id, 0, 0, 0, 0, 0, 17, 0, 0, 0, 0, 0, 0)


class Target:
    """A waiter, a completion queue and a shared receive queue."""

    _home = None

    def __init__(self) -> None:
        self.got: list[Any] = []

    def __call__(self, record: WCRecord) -> None:
        self.got.append(record[0])

    def fail(self, cause: BaseException) -> None:
        raise AssertionError(cause)

    def _deliver(self, record: WCRecord) -> None:
        self.got.append(("queue", record[0]))

    def _complete(self, record: WCRecord, cq: object) -> None:
        self.got.append((cq, record[0]))

    def _on_async_event(self, event: AsyncEvent) -> None:
        self.got.append(event.type)


def test_a_waiter_is_found_with_its_own_bits() -> None:
    table: SlotTable[Sink] = SlotTable()
    waiter = Target()
    queue: Any = Target()
    wr_id = table.add(waiter)
    for sub in (0, 1, 0xFFFF):
        route(record(wr_id + (sub << SUB_SHIFT)), table, queue)
    assert waiter.got == [wr_id + (sub << SUB_SHIFT) for sub in (0, 1, 0xFFFF)]
    table.remove(wr_id)
    again = Target()
    assert table.add(again) != wr_id
    route(record(wr_id), table, queue)
    assert (again.got, queue.got) == ([], [])


def test_a_shared_receive_is_found_by_the_number_of_its_queue() -> None:
    table: SlotTable[Sink] = SlotTable()
    shared = Target()
    queue: Any = Target()
    shared_queues[60_000] = shared
    wr_id = SHARED_TAG << TAG_SHIFT | 60_000 << SUB_SHIFT | 5
    route(record(wr_id), table, queue)
    assert shared.got == [(queue, wr_id)]
    del shared
    assert 60_000 not in shared_queues
    route(record(wr_id), table, queue)
    assert queue.got == []


@given(st.integers(0, (1 << 64) - 1).filter(lambda n: n >> TAG_SHIFT not in (TAG, SHARED_TAG)))
def test_what_nobody_here_made_goes_to_the_queue(wr_id: int) -> None:
    queue: Any = Target()
    route(record(wr_id), SlotTable(), queue)
    assert queue.got == [("queue", wr_id)]
    route(record(wr_id), SlotTable(), None)


def test_an_event_finds_its_queue_until_that_is_destroyed() -> None:
    first: Any = Target()
    second: Any = Target()
    tokens = [async_event.next_token() for _ in range(2)]
    for token, target in zip(tokens, (first, second), strict=True):
        async_event.enroll(token, target)
    context: Any = None
    event = AsyncEvent(AsyncEventType.CQ_ERR, 0, 0, context)
    tell(tokens[1], event)
    assert (first.got, second.got) == ([], [AsyncEventType.CQ_ERR])
    del second
    tell(tokens[1], event)
    tell(0, event)
    assert first.got == []
    tell(tokens[0], event)
    async_event.dismiss(tokens[0])
    tell(tokens[0], event)
    assert first.got == [AsyncEventType.CQ_ERR]
