"""Two programs that send and do not receive wait for each other: the log says so."""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Callable
from typing import Any

import pytest

from aiordma import Connection
from aiordma.endpoint.config import ConnectionConfig
from aiordma.errors import RdmaTimeoutError
from aiordma.loop.timers import Timer
from tests.inside.endpoint import (
    has_timer,
    note_slow_peers_after,
    sends_are_looked_at_by,
    tell_of_sends_after,
)

from ..conftest import fake_regions
from .fabric import Wire

__all__ = ["fake_regions"]

SLOT = 128
LINE = (
    r"#\d+ send\(\) to .+ has waited (\d+) s for room, and (\d+) messages? ha\w+ arrived here that "
    r"nobody receives: if the peer waits in send\(\), too, both wait forever; receive in a task "
    r"of its own"
)


class Looks:
    """The timers of sends that wait, which are due when the test says so.

    Attributes:
        seconds: When the last one that was set would be due.
    """

    def __init__(self) -> None:
        self.seconds = math.nan
        self._timers: list[Timer] = []

    def later(self, _: object, seconds: float, function: Callable[[], None]) -> Timer:
        self.seconds = seconds
        self._timers.append(Timer(function, lambda: None))
        return self._timers[-1]

    def __call__(self) -> None:
        """All are due."""
        timers, self._timers = self._timers, []
        for timer in timers:
            timer.run()


@pytest.fixture
def look(monkeypatch: pytest.MonkeyPatch) -> Looks:
    """Looks at the waits, each of which takes long."""
    made = Looks()
    sends_are_looked_at_by(monkeypatch, made.later)
    tell_of_sends_after(monkeypatch, 1e-9)
    return made


async def opened(**settings: Any) -> Wire:
    base = {"slot_size": SLOT, "recv_depth": 4, "send_depth": 8, "rendezvous_threshold": 0}
    config = ConnectionConfig(**base | settings)
    wire = Wire(config, config)
    await wire.open()
    await wire.run()
    return wire


def counts(caplog: pytest.LogCaptureFixture) -> list[int]:
    """The numbers of messages in the lines that tell."""
    return [int(found[2]) for line in caplog.messages if (found := re.fullmatch(LINE, line))]


async def ends(wire: Wire, *tasks: asyncio.Task[Any]) -> None:
    """Nothing is left, and no timer."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await wire.lose()
    assert not any(has_timer(end) for end in wire.ends)


async def send_many(end: Connection, count: int = 20, size: int = 8) -> None:
    for _ in range(count):
        await end.send(bytes(size))


async def sending(wire: Wire, side: int, count: int = 20, size: int = 8) -> asyncio.Task[None]:
    task = asyncio.create_task(send_many(wire.ends[side], count, size))
    await wire.run()
    return task


async def receive(wire: Wire, side: int) -> None:
    receiving = asyncio.create_task(wire.ends[side].recv())
    await wire.run()
    (await receiving).release()


@pytest.mark.parametrize("size", [8, 2 * SLOT], ids=["small", "large"])
@pytest.mark.usefixtures("fake_regions")
async def test_both_sides_tell_once(
    size: int, look: Looks, caplog: pytest.LogCaptureFixture
) -> None:
    # Large messages of a peer are not fetched before the program receives.
    wire = await opened(receive_buffer_size=1)
    tasks = [await sending(wire, side, 8, size) for side in (0, 1)]
    assert not counts(caplog)
    look()
    assert counts(caplog) == ([4, 4] if size == 8 else [1, 1])
    for side in 8 * [0, 1]:  # all goes on
        await receive(wire, side)
    await asyncio.gather(*tasks)
    tasks = [await sending(wire, side, 20, size) for side in (0, 1)]
    look()
    assert len(counts(caplog)) == 2, "once a connection"
    await ends(wire, *tasks)


async def test_it_is_told_where_nobody_has_set_up_logging(
    look: Looks, caplog: pytest.LogCaptureFixture
) -> None:
    """As the text is for the person who waits at the terminal."""
    wire = await opened()
    tasks = [await sending(wire, side) for side in (0, 1)]
    look()
    assert {(record.levelname, hasattr(record, "for_all")) for record in caplog.records} == {
        ("WARNING", True)
    }
    await ends(wire, *tasks)


async def test_a_send_to_a_peer_that_sends_nothing_is_no_mistake_of_this_side(
    look: Looks, caplog: pytest.LogCaptureFixture
) -> None:
    wire = await opened()
    task = await sending(wire, 0)
    look()
    look()
    assert not task.done()
    assert not counts(caplog)
    await ends(wire, task)


@pytest.mark.parametrize("size", [8, 2 * SLOT], ids=["small", "large"])
@pytest.mark.usefixtures("fake_regions")
async def test_a_peer_that_does_not_receive_is_noted_once(
    size: int, look: Looks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At INFO, as it may have its reasons; and both sides may wait for each other later."""
    caplog.set_level(logging.INFO, "aiordma")
    wire = await opened(receive_buffer_size=1)
    tasks = [await sending(wire, 0, 20, size)]
    look()
    assert not caplog.messages
    note_slow_peers_after(monkeypatch, 1e-9)
    for _ in range(3):
        look()
    (line,) = caplog.records
    assert line.levelname == "INFO"
    assert re.fullmatch(
        r"#\d+ a message to .+ has waited \d+ s for room: the program there receives slowly, or "
        r"not at all", line.message,
    )  # fmt: skip
    tasks.append(await sending(wire, 1, 20, size))
    look()
    look()
    assert counts(caplog), "nor does this side"
    await ends(wire, *tasks)


async def test_a_side_that_receives_is_not_told_of(
    look: Looks, caplog: pytest.LogCaptureFixture
) -> None:
    """By a task of its own, which takes longer for a message than the peer."""
    wire = await opened()
    tasks = [await sending(wire, 0), await sending(wire, 1, 4)]
    for _ in range(3):
        await receive(wire, 0)
        look()
    receiving = asyncio.create_task(wire.ends[0].recv())
    await wire.run()
    (await receiving).release()
    receiving = asyncio.create_task(wire.ends[0].recv())
    await wire.run()
    look()
    look()
    assert not counts(caplog)
    receiving.cancel()
    tasks.append(await sending(wire, 1, 3))
    look()
    assert counts(caplog) == [3], "from now on it does not"
    await ends(wire, *tasks)


async def test_requests_have_nothing_to_receive(
    look: Looks, caplog: pytest.LogCaptureFixture
) -> None:
    wire = await opened(slot_size=512)
    asking = [asyncio.create_task(end.request(b"?")) for end in wire.ends for _ in range(30)]
    await wire.run()
    look()
    look()
    assert not any(task.done() for task in asking)
    assert not counts(caplog)
    await ends(wire, *asking)


@pytest.mark.parametrize("long_s", [0.05, 60.0])
async def test_beside_a_limit_of_the_wait(
    long_s: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tell_of_sends_after(monkeypatch, long_s)
    wire = await opened(stall_timeout_s=0.2)
    for _ in range(2):
        tasks = [await sending(wire, side) for side in (0, 1)]
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(error, RdmaTimeoutError)
            assert error.strerror == "the peer took nothing for 0.2 s"
        assert len(counts(caplog)) == (2 if long_s < 1 else 0)
    await ends(wire)


@pytest.mark.usefixtures("fake_regions")
async def test_the_timer_is_due_within_the_limit_of_a_wait_that_begins_next(
    look: Looks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although only a large message waits now, whose own limit is another."""
    tell_of_sends_after(monkeypatch, 100)
    wire = await opened(receive_buffer_size=1, stall_timeout_s=30)
    task = await sending(wire, 0, 1, 2 * SLOT)
    for _ in range(2):
        assert look.seconds == 30
        look()
        assert has_timer(wire.ends[0])
    await ends(wire, task)


async def test_the_timer_goes_on_while_a_send_waits(
    look: Looks, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell_of_sends_after(monkeypatch, 100)
    wire = await opened()
    task = await sending(wire, 0, 6)
    assert look.seconds == 100
    look()
    assert 99 < look.seconds < 100, "what is left of the first wait"
    for _ in range(6):
        await receive(wire, 1)
    await task
    assert has_timer(wire.ends[0])
    look()
    assert not has_timer(wire.ends[0])
    task = await sending(wire, 0)
    assert has_timer(wire.ends[0])
    assert look.seconds == 100
    await ends(wire, task)
