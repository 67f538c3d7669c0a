"""Keepalive: a silent peer is asked, then given up; a quiet but living one never is."""

from __future__ import annotations

import errno
import functools
import heapq
import itertools
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma.endpoint.config import ConnectionConfig, plan_of
from aiordma.endpoint.connection import Connection
from aiordma.errors import ConnectionLostError
from aiordma.link.keepalive import Keepalive
from aiordma.streams.plan import plan_of as plan_of_stream
from aiordma.streams.stream_config import StreamConfig
from aiordma.streams.transport import RdmaTransport


class Clock:
    """A loop's timers, without the loop."""

    last: Clock

    def __init__(self) -> None:
        Clock.last = self
        self.now = 0.0
        self._timers: list[tuple[float, int, SimpleNamespace]] = []
        self._order = itertools.count()

    def time(self) -> float:
        return self.now

    def later(self, delay: float, callback: Callable[[], None]) -> Any:
        handle = SimpleNamespace(callback=callback)
        handle.cancel = functools.partial(setattr, handle, "callback", None)
        heapq.heappush(self._timers, (self.now + delay, next(self._order), handle))
        return handle

    def run_until(self, end: float, *, late: bool = False) -> None:
        """Let time go on; `late`, all at once, as for a loop that stood still."""
        while self._timers and self._timers[0][0] <= end:
            when, _, handle = heapq.heappop(self._timers)
            self.now = end if late else when
            if handle.callback is not None:
                handle.callback()
        self.now = end


@pytest.fixture(autouse=True)
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each timer is set in the last clock that was made."""
    monkeypatch.setattr(
        "aiordma.link.keepalive.call_later",
        lambda loop, delay, tick: Clock.last.later(delay, tick),
    )
    monkeypatch.setattr("aiordma.link.keepalive.now", lambda: Clock.last.time())
    monkeypatch.setattr("aiordma.streams.transport.now", lambda: Clock.last.time())


def timed(
    clock: Any, interval: float | None, limit: float | None, setting: str, *, late: bool = False
) -> Keepalive:
    """A keepalive whose timers, by the fixture above, are those of a clock."""
    return Keepalive(clock, interval, limit, setting, late=late)


class Life:
    """Signs of life, as a `MessageState` has them.

    Args:
        ask: Sends the question.
    """

    def __init__(self, ask: Callable[[], None]) -> None:
        self.alive = self.asking = False
        self.ask = ask

    def was_alive(self) -> bool:
        alive, self.alive = self.alive, False
        return alive

    def ask_life(self) -> int | None:
        if self.asking:
            return None
        self.asking = True
        self.ask()
        return 0


class Side:
    """A connection whose link, state and peer are the test; of its own it has the keepalive."""

    _was_alive: Any = Connection._was_alive
    _on_interval: Any = Connection._on_interval
    _give_up: Any = Connection._give_up

    def __init__(
        self, *, answers: bool, late: bool = False, clock: Clock | None = None, **settings: Any
    ) -> None:
        self.clock = Clock() if clock is None else clock
        self.config = ConnectionConfig(**settings)
        self.failures: list[tuple[float, BaseException]] = []
        self.pings: list[float] = []
        self.answers = answers
        self._state = Life(self.ping)
        self._sender = SimpleNamespace(posted=lambda code: None)
        self.notes: list[str] = []
        self._link = SimpleNamespace(fail=self.fail, note=self.notes.append)
        name = f"{'raw_' * self.config.raw}idle_timeout_s of this side's ConnectionConfig"
        interval, limit = plan_of(self.config).silence
        self.keepalive = timed(self.clock, interval, limit, name, late=late)
        self.keepalive.start(self)

    def fail(self, cause: BaseException) -> None:
        self.failures.append((self.clock.now, cause))

    def ping(self) -> None:
        self.pings.append(self.clock.now)
        if self.answers:
            self._state.alive, self._state.asking = True, False
            self.heard()

    def heard(self) -> None:
        """A PING of this side is answered, so that the other side has heard it."""


class Stream:
    """A stream whose port and peer are the test; of its own it has the keepalive."""

    _was_alive: Any = RdmaTransport._was_alive
    _on_interval: Any = RdmaTransport._on_interval

    def __init__(self, **settings: Any) -> None:
        self.clock = Clock()
        self._config = StreamConfig(**settings)
        self.probes: list[float] = []
        self.words: list[float] = []
        self.failures: list[tuple[float, BaseException]] = []
        self.alive = False
        state = SimpleNamespace(was_alive=self._take_alive)
        self._port = SimpleNamespace(state=state, probe=self._probe, posted=0, check=bool)
        self._machine = SimpleNamespace(show_life=lambda: self.words.append(self.clock.now))
        self._shown = 0.0
        interval = plan_of_stream(self._config, iwarp=False).silence
        self.keepalive = timed(self.clock, interval, self._config.idle_timeout_s, "idle_timeout_s")
        self.keepalive.start(self)

    def _probe(self) -> None:
        self.probes.append(self.clock.now)

    def _take_alive(self) -> bool:
        alive, self.alive = self.alive, False
        return alive

    def _give_up(self, cause: BaseException) -> None:
        self.failures.append((self.clock.now, cause))


def test_a_dead_peer_is_asked_once_and_given_up_in_time() -> None:
    side = Side(answers=False, keepalive_s=10, idle_timeout_s=30)
    side.clock.run_until(100)
    assert len(side.pings) == 1
    assert side.notes, "the log tells of the silence before the end"
    assert set(side.notes) == {"hears nothing from the peer, which was asked"}
    ((when, cause),) = side.failures
    assert 30 <= when <= 40
    assert isinstance(cause, ConnectionLostError)
    assert cause.errno == errno.ETIMEDOUT
    assert "nothing heard from the peer for" in str(cause)
    assert "event loop blocked" in cause.hint
    assert " idle_timeout_s of this side's" in cause.hint
    assert cause.hint in str(cause)


def test_a_quiet_peer_that_answers_is_kept() -> None:
    side = Side(answers=True, keepalive_s=10, idle_timeout_s=30)
    side.clock.run_until(3600)
    assert side.failures == []
    assert side.notes == []
    assert len(side.pings) >= 100


def test_g09_a_silent_raw_peer_is_given_up_when_there_is_a_bound_for_it() -> None:
    patient = Side(answers=False, raw=True)
    patient.clock.run_until(1e6)
    assert not patient.failures

    side = Side(answers=False, raw=True, raw_idle_timeout_s=100)
    for at in range(60, 600, 60):
        side._state.alive = True
        side.clock.run_until(at)
    assert not side.failures
    side.clock.run_until(1000)
    ((when, cause),) = side.failures
    assert 480 + 100 <= when <= 480 + 25 + 125
    assert isinstance(cause, ConnectionLostError)
    assert cause.errno == errno.ETIMEDOUT
    assert not side.pings


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
        side._state.alive = True
    assert side.failures == []
    assert side.pings == []


def test_what_is_stopped_leads_nowhere() -> None:
    class Peer:
        def _was_alive(self) -> bool:
            return True

        def _on_interval(self, *, silent: bool) -> None:
            pass

        def _give_up(self, cause: BaseException) -> None:
            pass

    peer = Peer()
    gone = weakref.ref(peer)
    keepalive = timed(Clock(), 1, 2, "")
    keepalive.start(peer)
    del peer
    assert gone() is not None
    keepalive.stop()
    assert gone() is None


@pytest.mark.parametrize("kind", ["messages", "a stream"])
def test_a_loop_that_stood_still_asks_before_it_gives_up(kind: str) -> None:
    """What the peer has said meanwhile may not be read yet."""
    side: Side | Stream
    if kind == "messages":
        side = Side(answers=False, keepalive_s=10, idle_timeout_s=30)
    else:
        side = Stream(keepalive_s=10, idle_timeout_s=30)
    side.clock.run_until(1000, late=True)
    assert side.failures == []
    side.clock.run_until(1100)
    assert len(side.failures) == 1


def test_a_silent_stream_is_given_up_and_its_adapter_was_asked() -> None:
    stream = Stream(keepalive_s=5, idle_timeout_s=30)
    stream.clock.run_until(100)
    ((when, cause),) = stream.failures
    assert when == 30
    assert isinstance(cause, ConnectionLostError)
    assert cause.errno == errno.ETIMEDOUT
    assert stream.probes == [5, 10, 15, 20, 25]


def test_a_stream_says_a_word_whatever_it_hears() -> None:
    stream = Stream(keepalive_s=5, idle_timeout_s=40)
    for second in range(1, 101):
        stream.alive = True
        stream.clock.run_until(second)
    assert stream.failures == []
    assert stream.probes == []
    assert stream.words == list(range(10, 101, 10))


def test_a_stream_without_a_limit_is_asked_for_ever() -> None:
    stream = Stream(keepalive_s=5, idle_timeout_s=None)
    stream.clock.run_until(1000)
    assert stream.failures == []
    assert len(stream.probes) == 200
    assert stream.words == []


def test_a_close_that_does_not_get_on_is_given_up() -> None:
    stream = Stream(keepalive_s=5, idle_timeout_s=None)
    moved = [0]
    stream.keepalive.expect_progress(lambda: moved[0], 7, stream._give_up)
    for second in range(1, 50):
        moved[0] += 1
        stream.clock.run_until(second)
    assert stream.failures == []
    assert stream.probes == [], "the close has taken the place of the silence"
    stream.clock.run_until(100)
    ((when, cause),) = stream.failures
    assert 49 + 7 <= when <= 49 + 14
    assert "nothing has moved for 7 s" in str(cause)


# Two sides


@pytest.mark.parametrize("apart", [0.0, 0.001, 3.0, 9.9])
def test_the_connecting_side_asks_for_both(apart: float) -> None:
    """A PONG tells one side, and a PING the other, that the peer lives."""
    clock = Clock()
    client = Side(answers=True, clock=clock)
    clock.run_until(apart)
    server = Side(answers=True, late=True, clock=clock)

    def heard() -> None:
        server._state.alive = True

    client.heard = heard  # type: ignore[method-assign]
    clock.run_until(3600)
    assert client.failures == server.failures == []
    assert len(server.pings) <= 1, "one at the beginning, when the client has not asked yet"
    assert 3600 / 20 - 2 <= len(client.pings) <= 3600 / 20 + 2


@pytest.mark.parametrize("answers", [True, False])
@pytest.mark.parametrize(("keepalive", "idle"), [(10, 30), (10, 20), (10, 5), (1, 100)])
def test_the_accepting_side_asks_when_its_peer_does_not(
    keepalive: float, idle: float, answers: bool
) -> None:
    side = Side(answers=answers, late=True, keepalive_s=keepalive, idle_timeout_s=idle)
    side.clock.run_until(10 * idle)
    assert side.pings
    assert side.pings[0] <= (2 * keepalive if 3 * keepalive <= idle else idle / 2)
    assert bool(side.failures) != answers
    for when, _ in side.failures:
        assert idle <= when <= idle + keepalive


# Many of a loop


class Noted:
    """A peer whose looks are noted."""

    def __init__(self, clock: Clock, *, interval: float = 8.0) -> None:
        self.clock = clock
        self.looks: list[float] = []
        self.keepalive = timed(clock, interval, None, "")
        self.keepalive.start(self)

    def _was_alive(self) -> bool:
        return True

    def _on_interval(self, *, silent: bool) -> None:
        assert not silent
        self.looks.append(self.clock.now)

    def _give_up(self, cause: BaseException) -> None:
        raise AssertionError(cause)


def test_connections_of_a_loop_share_its_wake_ups() -> None:
    clock = Clock()
    peers = []
    for number in range(50):
        clock.run_until(number / 100)
        peers.append(Noted(clock))
    clock.run_until(80.5)
    assert {when for peer in peers for when in peer.looks} == set(range(8, 81, 8)) | {
        when + 1 for when in range(8, 80, 8)
    }
    assert all(len(peer.looks) in (9, 10) for peer in peers)


def test_looks_are_spread_as_the_connections_began() -> None:
    clock = Clock()
    peers = []
    for number in range(80):
        clock.run_until(number / 10)
        peers.append(Noted(clock))
    clock.run_until(100)
    times = [peer.looks[-1] for peer in peers]
    assert max(times.count(when) for when in times) <= 11


def test_a_turn_of_the_loop_takes_some_of_many() -> None:
    """Each callback ends soon, and all are looked at."""
    clock = Clock()
    peers = [Noted(clock) for _ in range(1000)]
    most, before = 0, 0
    inner = clock.run_until

    def looked() -> int:
        return sum(len(peer.looks) for peer in peers)

    while clock._timers and clock._timers[0][0] <= 8.0:
        when, _, handle = heapq.heappop(clock._timers)
        clock.now = max(clock.now, when)
        if handle.callback is not None:
            handle.callback()
        most, before = max(most, looked() - before), looked()
    assert before == 1000
    assert most <= 100
    inner(17)
    assert all(len(peer.looks) == 2 for peer in peers)


def test_a_connection_that_ends_in_the_look_at_another_is_not_looked_at() -> None:
    clock = Clock()
    first, second = Noted(clock), Noted(clock)

    def end_both() -> bool:
        first.keepalive.stop()
        second.keepalive.stop()
        return True

    first._was_alive = second._was_alive = end_both  # type: ignore[method-assign]
    clock.run_until(100)
    assert len(first.looks) + len(second.looks) == 1
    assert all(handle.callback is None for _, _, handle in clock._timers), "a timer is left"


def test_a_look_that_fails_harms_no_other() -> None:
    clock = Clock()
    peers = [Noted(clock) for _ in range(3)]

    def fail() -> bool:
        raise ZeroDivisionError

    peers[1]._was_alive = fail  # type: ignore[method-assign]
    failed = 0
    for _ in range(3):
        try:
            clock.run_until(9)
        except ZeroDivisionError:
            failed += 1
    assert failed == 1
    assert [len(peer.looks) for peer in peers] == [1, 0, 1]


@given(
    st.floats(0, 1000),
    st.floats(0.1, 100),
    st.floats(1, 10),
    st.lists(st.floats(0, 0.05), min_size=40, max_size=40),
)
def test_a_loop_that_is_a_little_late_keeps_the_limits(
    start: float, keepalive: float, more: float, late: list[float]
) -> None:
    clock = Clock()
    clock.run_until(start)
    idle = keepalive * more
    side = Side(answers=False, clock=clock, keepalive_s=keepalive, idle_timeout_s=idle)
    interval = min(keepalive, idle / 2)
    for delay in late:
        if not clock._timers or side.failures:
            break
        when, _, handle = heapq.heappop(clock._timers)
        clock.now = max(clock.now, when) + delay * interval
        if handle.callback is not None:
            handle.callback()
    ((when, _),) = side.failures
    assert start + idle * 0.99 <= when <= start + idle + 1.25 * interval
    assert start + interval * 0.99 <= side.pings[0] <= start + 1.25 * interval
