"""Timers beside the loop: in order, in time, and nothing of them in the loop or left behind."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import os
import random
import threading
import time
from typing import Any

import pytest

from aiordma.loop import registry
from aiordma.loop.timers import Timer, call_later, timeout
from tests.forks import fork_quietly
from tests.inside.loop import entries_of

from ..conftest import LIMIT_S, LOOPS, run_on

SOON_S = 0.002
NEVER_S = 3600.0


def later(delay: float, function: Any) -> Timer:
    """In the running loop."""
    return call_later(asyncio.get_running_loop(), delay, function)


async def fired(over: asyncio.Event) -> None:
    """Wait for a timer that sets the event."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LIMIT_S / 2):
            await over.wait()
    assert over.is_set(), "the timer has not fired"


def open_alarms() -> int:
    """Descriptors of timers that this process has."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += "timerfd" in os.readlink(f"/proc/self/fd/{name}")
    return found


@pytest.fixture(autouse=True)
def nothing_left() -> Any:
    before = open_alarms()
    yield
    assert open_alarms() == before


async def test_they_come_in_the_order_of_their_times() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    came: list[tuple[float, float]] = []
    over = asyncio.Event()

    def note(due: list[float]) -> None:
        # As exactly as can be told from here: after the first, and before the second.
        came.append((due[0], due[1]))
        assert time.monotonic() >= due[0]

    for _ in range(300):
        delay, due = chance.uniform(0, 20 * SOON_S), [time.monotonic()]
        later(delay, functools.partial(note, due))
        due[:] = due[0] + delay, time.monotonic() + delay
    later(25 * SOON_S, over.set)
    await fired(over)
    assert len(came) == 300
    latest = 0.0
    for first, last in came:
        assert last >= latest, "another that was due later has come before"
        latest = max(latest, first)


async def test_one_that_is_due_earlier_is_not_held_up_by_those_before_it() -> None:
    over = asyncio.Event()
    far = later(NEVER_S, lambda: None)
    near = later(SOON_S, over.set)
    await fired(over)
    far.cancel()
    near.cancel()


async def test_a_cancelled_one_is_not_called_and_not_kept() -> None:
    came: list[int] = []
    over = asyncio.Event()
    timers = [later(SOON_S, lambda: came.append(1)) for _ in range(10)]
    later(2 * SOON_S, over.set)
    for timer in timers:
        timer.cancel()
        timer.cancel()
    await fired(over)
    assert came == []
    assert all(timer.function is None for timer in timers)


async def test_thousands_that_are_cancelled_do_not_pile_up() -> None:
    stays = later(NEVER_S, lambda: None)
    timers: tuple[Any, Any] = registry.acquire("timers", pytest.fail)
    for _ in range(5000):
        later(NEVER_S, lambda: None).cancel()
    assert entries_of(timers[0]) < 200
    timers[1]()
    stays.cancel()


@pytest.mark.parametrize("seed", range(3))
async def test_i04_they_come_in_order_after_the_cancelled_were_swept(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To take some out of the heap leaves a list, in which the first is not first any more."""
    chance = random.Random(seed)
    came: list[int] = []
    over = asyncio.Event()
    begun = time.monotonic()
    with monkeypatch.context() as patch:
        # All are set in one instant, so that their order is that of their delays.
        patch.setattr("aiordma.loop.timers.now", lambda: begun)
        order = chance.sample(range(300), 300)
        for number in order:
            later(number * SOON_S / 20, functools.partial(came.append, number))
            for _ in range(3):
                later(chance.uniform(0, 20 * SOON_S), lambda: came.append(-1)).cancel()
        later(300 * SOON_S / 20, over.set)
    await fired(over)
    assert came == sorted(came)
    assert came == list(range(300))


async def test_one_may_set_the_next_and_cancel_another() -> None:
    over = asyncio.Event()
    left = 20
    fell_due: list[str] = []
    other: Timer | None = None

    def tick() -> None:
        nonlocal left, other
        left -= 1
        if other is not None:
            other.cancel()  # it is due after this one, however late the loop is
            other = None
        if left:
            later(SOON_S / 4, tick)
        else:
            over.set()
        if left == 17:
            other = later(SOON_S / 2, lambda: fell_due.append("was cancelled"))

    before = open_alarms()
    tick()
    await fired(over)
    # With the last one the descriptor goes, and not before its function has returned.
    await asyncio.sleep(0)
    assert open_alarms() == before
    assert fell_due == []


async def test_a_function_that_fails_is_reported_and_the_others_come() -> None:
    reported: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: reported.append(context))
    over = asyncio.Event()
    later(SOON_S, functools.partial(divmod, 1, 0))
    later(SOON_S, over.set)
    await fired(over)
    (context,) = reported
    assert isinstance(context["exception"], ZeroDivisionError)


@pytest.mark.one_loop  # of uvloop it cannot be told
async def test_asyncio_has_no_timer_of_its_own() -> None:
    timer = later(NEVER_S, lambda: None)
    loop: Any = asyncio.get_running_loop()
    async with timeout(NEVER_S):
        await asyncio.sleep(0)
        assert not [handle for handle in loop._scheduled if not handle.cancelled()]
    timer.cancel()


async def test_timeout() -> None:
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        async with timeout(SOON_S):
            await asyncio.get_running_loop().create_future()
    assert time.monotonic() - begun >= SOON_S
    async with timeout(NEVER_S):
        pass
    task = asyncio.current_task()
    assert task is not None

    async def cancelled() -> None:
        async with timeout(NEVER_S):
            task.cancel()
            await asyncio.sleep(0)

    with pytest.raises(asyncio.CancelledError):
        await cancelled()
    task.uncancel()


async def test_a_timer_may_be_cancelled_in_another_thread() -> None:
    before = open_alarms()
    timer = later(NEVER_S, lambda: None)
    thread = threading.Thread(target=timer.cancel)
    thread.start()
    thread.join()
    closed = asyncio.Event()
    asyncio.get_running_loop().call_soon(closed.set)
    await closed.wait()
    assert open_alarms() == before
    # And the next one has a new descriptor.
    over = asyncio.Event()
    later(SOON_S, over.set)
    await fired(over)


@pytest.mark.parametrize("name", list(LOOPS))
def test_a_loop_that_ends_takes_its_timers_along(name: str) -> None:
    before = open_alarms()

    async def main() -> Timer:
        return later(NEVER_S, lambda: None)

    timer = run_on(name, main())
    gc.collect()
    timer.cancel()
    gc.collect()
    assert open_alarms() == before


async def test_a_forked_child_has_none() -> None:
    over = asyncio.Event()
    later(20 * SOON_S, over.set)
    child = fork_quietly()
    if child == 0:
        os._exit(open_alarms())
    _, status = os.waitpid(child, 0)  # noqa: ASYNC222 (it ends at once)
    assert os.waitstatus_to_exitcode(status) == 0
    await fired(over)


async def test_the_limit_of_open_files_is_an_error_of_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> int:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("aiordma.loop.timers.alarm_open", refuse)
        with pytest.raises(OSError, match="Too many open files"):
            later(SOON_S, lambda: None)
    over = asyncio.Event()
    later(SOON_S, over.set)
    await fired(over)


@pytest.mark.parametrize("name", list(LOOPS))
def test_they_can_be_set_and_cancelled_while_the_loop_stands(name: str) -> None:
    """Programs call close() between two runs of their loop."""
    loop, came = LOOPS[name](), list[int]()
    before = open_alarms()
    call_later(loop, SOON_S, lambda: came.append(1))
    call_later(loop, NEVER_S, lambda: None).cancel()
    over = loop.create_future()
    call_later(loop, 2 * SOON_S, lambda: over.set_result(None))
    loop.run_until_complete(asyncio.wait_for(over, 10))
    assert came == [1]
    timer = call_later(loop, NEVER_S, lambda: None)
    thread = threading.Thread(target=timer.cancel)
    thread.start()
    thread.join()
    loop.close()
    assert open_alarms() == before


@pytest.mark.parametrize("name", list(LOOPS))
def test_one_that_ends_the_loop_does_not_end_the_others(name: str) -> None:
    def end() -> None:
        raise KeyboardInterrupt

    loop = LOOPS[name]()
    over = loop.create_future()
    call_later(loop, SOON_S, end)
    call_later(loop, SOON_S, lambda: over.set_result(None))
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(loop.create_future())
    loop.run_until_complete(asyncio.wait_for(over, 10))
    loop.close()
