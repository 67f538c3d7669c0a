"""WorkQueue: exact accounting of what is under way, against a model of an adapter."""

from __future__ import annotations

import asyncio
import weakref
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma.errors import (
    CompletionError,
    FlushedError,
    RdmaOSError,
)
from aiordma.verbs import prepared
from aiordma.verbs.enums import WCStatus
from aiordma.verbs.wr import Planned
from tests.inside.verbs import last_number_of

from ..conftest import run_on, settle
from .queue_model import DEPTH, Adapter, Caller, Kinds, Memory

KINDS = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=4)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["raw", "awaited", "prepare"]), KINDS),
        st.tuples(st.just("execute"), st.integers(0, 3)),
        st.tuples(st.just("execute"), st.integers(0, 3)),
        st.tuples(st.just("free"), st.integers(0, 3)),
        st.tuples(st.just("end"), st.booleans()),
        st.tuples(st.just("end"), st.booleans()),
    ),
    max_size=60,
)


async def _simulate(
    lists: list[Kinds],
    steps: list[tuple[str, Any]],
    overtaking: bool,
    failure: bool | None,
    counting: bool,
) -> None:
    adapter = Adapter(overtaking=overtaking, counting=counting)
    caller = Caller(adapter)
    for kinds in lists:
        caller.prepare(kinds)
    queue, memory = adapter.queue, caller.memory
    with mock.patch.object(prepared, "lib", adapter):
        for name, argument in steps:
            if name == "end":
                adapter.step(late=argument, fails=False)
            else:
                getattr(caller, name)(argument)
            assert len(queue) + queue.room.free == DEPTH
            assert len(adapter.under_way) <= len(queue) <= DEPTH
            assert queue.unsignaled < DEPTH
    if failure is not None:
        adapter.step(late=failure, fails=True)
    while adapter.under_way:
        adapter.step(late=False, fails=False)
    told = dict(adapter.cq.told)
    assert len(told) == len(adapter.cq.told), "told twice"
    # Each number that was asked for comes back, and of the others only what failed.
    for number, asked in caller.posted:
        assert told.pop(number, None) is not None or not asked, number
    assert not told, "told of what nobody posted"
    for future, count in caller.lists:
        assert future.done()
        error = future.exception()
        if error is not None:
            assert isinstance(error, CompletionError)
            assert error.index is not None
            assert 0 <= error.index < count
    # What is left is unsignaled, and a signaled request behind it ends it all.
    if adapter.cause is None:
        assert len(queue) == queue.unsignaled
        caller.raw([(False, True)])
        adapter.under_way.clear()
        adapter.tell(last_number_of(queue), WCStatus.SUCCESS)
    elif overtaking:  # an unsignaled message that overtook a read is known to be done at the end
        told_before = len(adapter.cq.told)
        queue.give_up()
        assert len(adapter.cq.told) == told_before
        queue.abandon()
    assert len(queue) == 0
    assert queue.room.free == DEPTH
    assert memory.users == sum(len(post) for post, _ in caller.prepared)
    for post, _ in caller.prepared:
        post.free()
    assert memory.users == 0
    assert len(adapter.cq.table) == 0


@given(
    st.lists(KINDS, min_size=1, max_size=3),
    STEPS,
    st.booleans(),
    st.sampled_from([None, False, True]),
    st.booleans(),
)
def test_nothing_is_lost_told_twice_or_kept(
    lists: list[Kinds],
    steps: list[tuple[str, Any]],
    overtaking: bool,
    failure: bool | None,
    counting: bool,
) -> None:
    run_on("asyncio", _simulate(lists, steps, overtaking, failure, counting))


async def test_one_of_many_equal_executions_fails() -> None:
    adapter = Adapter(overtaking=False)
    caller = Caller(adapter)
    caller.prepare([(False, False)])
    with mock.patch.object(prepared, "lib", adapter):
        for _ in range(4):
            caller.execute(0)
    adapter.step(late=False, fails=False)
    adapter.step(late=True, fails=True)  # each is flushed twice, and told once
    numbers = [number for number, _ in caller.posted]
    failed = WCStatus.REM_ACCESS_ERR, WCStatus.WR_FLUSH_ERR, WCStatus.WR_FLUSH_ERR
    assert adapter.cq.told == list(zip(numbers[1:], failed, strict=True))
    assert len(adapter.queue) == 0
    caller.free(0)
    assert caller.memory.users == 0


async def test_an_overtaken_read_waits_for_its_own_completion() -> None:
    adapter = Adapter(overtaking=True)
    caller = Caller(adapter)
    caller.awaited([(True, False)])
    caller.awaited([(False, False)])
    adapter.step(late=True, fails=False)
    (read, _), (send, _) = caller.lists
    assert send.done()
    assert not read.done()
    assert len(adapter.queue) == 1
    assert caller.memory.users == 1
    adapter.step(late=True, fails=False)
    assert read.done()
    assert caller.memory.users == 0


async def test_what_is_never_flushed_is_given_up() -> None:
    adapter = Adapter(overtaking=False)
    caller = Caller(adapter)
    with mock.patch.object(prepared, "lib", adapter):
        caller.raw([(False, True)])
        caller.prepare([(False, True)])
        caller.execute(0)
        caller.awaited([(False, False)])
        caller.execute(0)
    lost = list(adapter.under_way)
    adapter.queue.give_up()
    numbers = [number for number, _ in caller.posted]
    assert adapter.cq.told == [(number, WCStatus.WR_FLUSH_ERR) for number in numbers]
    assert isinstance(caller.lists[0][0].exception(), FlushedError)
    # The memory stays, and a flush that comes late is not told again.
    assert caller.memory.users == 3
    adapter.queue.give_up()
    for request in lost:
        adapter.tell(request.wr_id, WCStatus.WR_FLUSH_ERR)
    assert len(adapter.cq.told) == len(numbers)
    assert len(adapter.queue) == 0
    caller.free(0)
    assert caller.memory.users == 0


@pytest.mark.usefixtures("without_collector")
def test_one_that_was_given_up_goes_with_its_last_reference() -> None:
    adapter = Adapter(overtaking=False)
    adapter.queue.give_up()
    with pytest.raises(FlushedError, match="waited for a place"):
        adapter.queue.room.try_acquire()
    gone = weakref.ref(adapter.queue)
    del adapter
    assert gone() is None


async def test_entering_is_all_or_nothing() -> None:
    class Closed(Memory):
        def _retain(self) -> None:
            raise ConnectionAbortedError

    adapter = Adapter(overtaking=False)
    queue, good, bad = adapter.queue, Memory(), Closed()
    parts: Any = [(good,), (good, bad), (good,)]
    plan = [Planned("send", part) for part in parts]
    queue.take(3, 0)
    with pytest.raises(ConnectionAbortedError):
        queue.enter(plan, 0)
    assert queue.room.free == DEPTH
    assert len(queue) == 0
    assert good.users == 0
    assert len(adapter.cq.table) == 0


async def test_the_last_place_is_kept_for_a_signaled_request() -> None:
    adapter = Adapter(overtaking=False)
    queue, caller = adapter.queue, Caller(adapter)
    quiet, loud = (False, False), (False, True)
    for chain, taken in (
        ([quiet] * DEPTH, 0),
        ([quiet] * (DEPTH - 2), DEPTH - 2),
        ([quiet] * 2, DEPTH - 2),
        ([quiet], DEPTH - 1),
        ([quiet], DEPTH - 1),
        ([loud], DEPTH),
        ([loud], DEPTH),
    ):
        caller.raw(chain)
        assert len(queue) == taken
    while adapter.under_way:
        adapter.step(late=False, fails=False)
    assert len(queue) == 0


async def test_who_waits_for_places_comes_first() -> None:
    queue = Adapter(overtaking=False).queue
    queue.take(DEPTH - 1, 0)
    waiting = asyncio.ensure_future(queue.room.acquire(2))
    await settle()
    with pytest.raises(RdmaOSError, match="1 wait for places already"):
        queue.take(1, 0)
    queue.room.release()
    await waiting
    assert queue.room.free == 0
