"""Liveness: a silent peer is asked, then given up; a quiet but living one never is."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma.endpoint.config import ConnectionConfig
from aiordma.endpoint.link import Link
from aiordma.endpoint.liveness import Liveness
from aiordma.endpoint.receiver import Receiver
from aiordma.errors import ConnectTimeoutError


class Clock:
    """A loop's timers, without the loop."""

    last: Clock

    def __init__(self) -> None:
        Clock.last = self
        self.now = 0.0
        self._timers: list[tuple[float, int, Callable[[], None], SimpleNamespace]] = []
        self._order = itertools.count()

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, callback: Callable[[], None]) -> Any:
        handle = SimpleNamespace(cancelled=False)
        handle.cancel = lambda: setattr(handle, "cancelled", True)
        heapq.heappush(self._timers, (self.now + delay, next(self._order), callback, handle))
        return handle

    def run_until(self, end: float) -> None:
        while self._timers and self._timers[0][0] <= end:
            when, _, callback, handle = heapq.heappop(self._timers)
            self.now = when
            if not handle.cancelled:
                callback()
        self.now = end


@pytest.fixture(autouse=True)
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sets a timer has it in the last clock that was made."""
    monkeypatch.setattr(
        "aiordma.endpoint.liveness.call_later",
        lambda loop, delay, tick: Clock.last.call_later(delay, tick),
    )
    monkeypatch.setattr("aiordma.endpoint.liveness.now", lambda: Clock.last.time())


class Side:
    """A Liveness whose link, receiver and peer are the test."""

    def __init__(self, *, answers: bool, **settings: Any) -> None:
        self.clock = Clock()
        self.config = ConnectionConfig(**settings)
        self.failures: list[tuple[float, BaseException]] = []
        self.pings: list[float] = []
        self.answers = answers
        self.receiver = SimpleNamespace(heard=False)
        self.link = SimpleNamespace(loop=self.clock, closed=False, failure=None, fail=self.fail)
        self.liveness = Liveness(
            cast("Link", self.link), cast("Receiver", self.receiver), self.config, self.ping
        )

    def fail(self, cause: BaseException) -> None:
        self.link.failure = cause
        self.failures.append((self.clock.now, cause))

    def ping(self) -> None:
        self.pings.append(self.clock.now)
        if self.answers:
            self.receiver.heard = True
            self.liveness.ponged()


def test_a_dead_peer_is_asked_once_and_given_up_in_time() -> None:
    side = Side(answers=False, keepalive_s=10, idle_timeout_s=30)
    side.clock.run_until(100)
    assert len(side.pings) == 1
    ((when, cause),) = side.failures
    assert 30 <= when <= 40
    assert isinstance(cause, ConnectTimeoutError)
    assert "nothing heard from the peer for" in str(cause)
    assert "event loop blocked" in cause.hint
    assert " idle_timeout_s of this side's" in cause.hint
    assert cause.hint in str(cause)


def test_a_quiet_peer_that_answers_is_kept() -> None:
    side = Side(answers=True, keepalive_s=10, idle_timeout_s=30)
    side.clock.run_until(3600)
    assert side.failures == []
    assert len(side.pings) >= 100


def test_g09_a_silent_raw_peer_is_given_up_when_there_is_a_bound_for_it() -> None:
    patient = Side(answers=False, raw=True)
    patient.clock.run_until(1e6)
    assert not patient.failures

    side = Side(answers=False, raw=True, raw_idle_timeout_s=100)
    for at in range(60, 600, 60):
        side.receiver.heard = True
        side.clock.run_until(at)
    assert not side.failures
    side.clock.run_until(1000)
    ((when, cause),) = side.failures
    assert 480 + 100 <= when <= 480 + 25 + 125
    assert isinstance(cause, ConnectTimeoutError)
    assert not side.pings


@pytest.mark.parametrize(
    ("keepalive", "idle"),
    [
        (10, 5),
        (10, 10),
        (10, 11),
        (0.5, 1000),
    ],
)
def test_whatever_the_times_are_a_living_peer_is_kept(keepalive: float, idle: float) -> None:
    try:
        side = Side(answers=True, keepalive_s=keepalive, idle_timeout_s=idle)
    except ValueError:
        assert idle <= keepalive, "refusing is an answer where nobody could be asked in time"
        return
    side.clock.run_until(10 * (keepalive + idle))
    assert side.failures == []


@pytest.mark.parametrize(("keepalive", "idle"), [(60, 5), (10, 5), (10, 10), (5, 7)])
def test_i05_patience_below_keepalive_counts_for_a_dead_peer(keepalive: float, idle: float) -> None:
    """It is asked in time to be given up in time, however seldom it is asked otherwise."""
    side = Side(answers=False, keepalive_s=keepalive, idle_timeout_s=idle)
    side.clock.run_until(10 * keepalive)
    assert len(side.pings) == 1
    assert side.pings[0] <= idle / 2
    ((when, _),) = side.failures
    assert idle <= when <= 1.5 * idle


@given(st.integers(1, 50), st.integers(1, 50), st.booleans())
def test_any_times(keepalive: int, more: int, answers: bool) -> None:
    side = Side(answers=answers, keepalive_s=keepalive, idle_timeout_s=keepalive + more)
    side.clock.run_until(500)
    assert bool(side.failures) != answers
    for when, _ in side.failures:
        assert keepalive + more <= when <= 2 * keepalive + more


def test_other_messages_are_a_sign_of_life() -> None:
    side = Side(answers=False, keepalive_s=10, idle_timeout_s=30)
    for second in range(5, 500, 5):
        side.clock.run_until(second)
        side.receiver.heard = True
    assert side.failures == []
    assert side.pings == []


def test_the_timer_ends_with_the_connection() -> None:
    for end in ("stop", "closed", "failure"):
        side = Side(answers=False, keepalive_s=1, idle_timeout_s=2)
        if end == "stop":
            side.liveness.stop()
            side.liveness.stop()
        else:
            setattr(side.link, end, True)
        side.clock.run_until(100)
        assert side.pings == []
        assert side.failures == []


def test_a_raw_connection_asks_nobody() -> None:
    side = Side(answers=False, raw=True, keepalive_s=1, idle_timeout_s=2)
    side.clock.run_until(100)
    assert side.pings == []
    assert side.failures == []
