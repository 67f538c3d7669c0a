"""Step: the one step of a connection id that is under way, and which events end it."""

from __future__ import annotations

import asyncio
import errno
from types import SimpleNamespace
from typing import Any

import pytest

from aiordma.cm.connection_event import ConnectionEvent
from aiordma.cm.enums import EventType
from aiordma.cm.step import Step
from aiordma.errors import ConnectTimeoutError, RdmaError, RdmaOSError

from ..conftest import settle

ESTABLISHED = frozenset({EventType.ESTABLISHED})


def event(kind: EventType, status: int = 0) -> ConnectionEvent:
    channel: Any = None
    return ConnectionEvent(channel, kind, status, None)


def begin(step: Step, timeout: float | None = None) -> asyncio.Task[ConnectionEvent]:
    loop = asyncio.get_running_loop()
    return loop.create_task(step.run(loop, lambda: None, ESTABLISHED, timeout))


async def test_the_first_event_that_can_end_it_does() -> None:
    step = Step()
    assert not step.answer(event(EventType.ESTABLISHED)), "none is under way"
    running = begin(step)
    await settle()
    for kind in (EventType.TIMEWAIT_EXIT, EventType.ADDR_CHANGE, EventType.MULTICAST_JOIN):
        assert not step.answer(event(kind))
    with pytest.raises(RdmaOSError):
        await begin(step)
    answer = event(EventType.ESTABLISHED)
    assert step.answer(answer)
    assert not step.answer(event(EventType.DISCONNECTED)), "it has ended"
    assert await running is answer


@pytest.mark.parametrize("kind", [EventType.REJECTED, EventType.DISCONNECTED, EventType.INTERNAL])
async def test_any_other_event_is_its_failure(kind: EventType) -> None:
    step = Step()
    running = begin(step)
    await settle()
    assert step.answer(event(kind, -errno.EIO))
    with pytest.raises(RdmaError):
        await running
    begun = begin(step)  # and the next can begin
    await settle()
    step.fail(ValueError("closed"))
    with pytest.raises(ValueError, match="closed"):
        await begun


async def test_it_ends_with_its_time() -> None:
    with pytest.raises(ConnectTimeoutError, match=r"no ESTABLISHED within 0\.01 s"):
        await begin(Step(), 0.01)


async def test_a_time_out_that_is_retried_is_not_told() -> None:
    step = Step()
    step.retries = True
    late, other = (event(EventType.ADDR_ERROR, -code) for code in (110, errno.EHOSTUNREACH))
    step.answer(late)
    step.answer(other)
    assert (late.hidden, other.hidden) == (True, False)


async def test_a_call_that_can_block_keeps_the_id() -> None:
    users: list[int] = []
    cm_id: Any = SimpleNamespace(_retain=lambda: users.append(1), _let_go=lambda: users.append(-1))
    step, loop = Step(), asyncio.get_running_loop()

    def call() -> None:
        assert sum(users) == 1
        loop.call_soon_threadsafe(step.answer, event(EventType.ESTABLISHED))

    done = await step.run(loop, call, ESTABLISHED, 5.0, blocks=cm_id)
    assert done.type is EventType.ESTABLISHED
    await settle()
    assert sum(users) == 0
