"""Connections to the same loop: one is asked for all, and each is asked itself in the end."""

from __future__ import annotations

import heapq
import random
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma.endpoint.config import ConnectionConfig, plan_of
from aiordma.endpoint.connection import Connection
from aiordma.endpoint.wire import FrameKind
from aiordma.errors import PeerSilentError
from aiordma.link import keepalive
from aiordma.link.keepalive import Keepalive

from ..endpoint.fabric import new_state
from .test_keepalive import Clock

#: Seconds between two questions of a group, and until a silent peer is given up at the latest.
PERIOD_S, NOTICED_S = 20.0, 40.0


@pytest.fixture(autouse=True)
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each timer is set in the last clock that was made."""
    monkeypatch.setattr(
        keepalive, "call_later", lambda _, delay, tick: Clock.last.later(delay, tick)
    )
    monkeypatch.setattr(keepalive, "now", lambda: Clock.last.time())


class State:
    """Signs of life, as `MessageState` notes them."""

    def __init__(self, clock: Clock) -> None:
        self.alive = self.asking = False
        self.group: bytearray | None = None
        self.clock, self.heard = clock, clock.now

    def show_life_to(self, group: bytearray | None) -> None:
        self.group = group

    def hear(self) -> None:
        self.alive, self.heard = True, self.clock.now
        if self.group is not None:
            self.group[0] = 1


class End:
    """One end of a connection, of which the keepalive is real."""

    _was_alive: Any = Connection._was_alive
    _on_interval: Any = Connection._on_interval
    _give_up: Any = Connection._give_up
    _show_life_to: Any = Connection._show_life_to

    def __init__(self, clock: Any, peer_loop: Any, *, late: bool, **settings: Any) -> None:
        self.clock: Clock = clock
        self.config = ConnectionConfig(**settings)
        self.peer: End | None = None  # None: of another version, which is not looked at
        self.hears = True  # its loop runs, and its host and wire are there
        self.pings: list[float] = []
        self.failures: list[tuple[float, BaseException]] = []
        self._state = State(clock)
        self._sender = SimpleNamespace(control=self.ping)
        self._link = SimpleNamespace(fail=self.fail, note=lambda *_: None)
        interval, limit = plan_of(self.config).silence
        self.keepalive = Keepalive(
            clock,
            interval,
            limit,
            "",
            late=late,
            peer_loop=peer_loop,
        )
        self.keepalive.start(self)

    def fail(self, cause: BaseException) -> None:
        self.failures.append((self.clock.now, cause))

    def ping(self, kind: FrameKind) -> None:
        assert kind == FrameKind.PING
        self.pings.append(self.clock.now)
        peer = self.peer
        if peer is None or not (peer.hears and self.hears):
            return
        if not peer._state.asking:
            peer._state.hear()
        self.answer()

    def answer(self) -> None:
        self._state.asking = False
        self._state.hear()

    def say(self) -> None:
        """Send a message."""
        if self.peer is not None and self.peer.hears and self.hears:
            self.peer._state.hear()


class Both:
    """Connections between two loops, whose ends share a clock."""

    def __init__(
        self, count: int, *, clock: Clock | None = None, named: bool = True, **settings: Any
    ) -> None:
        self.clock = clock or Clock()
        self.clients = [self._end("server" * named, late=False, **settings) for _ in range(count)]
        self.servers = [self._end("client" * named, late=True, **settings) for _ in range(count)]
        for client, server in zip(self.clients, self.servers, strict=True):
            client.peer, server.peer = server, client

    def _end(self, name: str, *, late: bool, **settings: Any) -> End:
        return End(self.clock, ("address", name) if name else None, late=late, **settings)

    @property
    def ends(self) -> list[End]:
        return self.clients + self.servers

    def pings(self) -> int:
        return sum(len(end.pings) for end in self.ends)

    def pings_in(self, seconds: float) -> int:
        """The questions of all in so many seconds from now on."""
        before = self.pings()
        self.clock.run_until(self.clock.now + seconds)
        return self.pings() - before

    def failed(self) -> list[End]:
        return [end for end in self.ends if end.failures]

    def settle(self) -> None:
        """Until all have joined: each is asked itself at the first look, as it proves itself."""
        self.clock.run_until(60)


def test_fifty_idle_connections_cost_one_ping_a_period() -> None:
    both = Both(50)
    both.settle()
    assert both.pings() <= 50 + 3
    # The accepting side asks some of those that the other has not come to yet, in the first round.
    assert both.pings_in(50 * PERIOD_S) <= 50 + 25
    assert 49 <= both.pings_in(50 * PERIOD_S) <= 51
    assert 500 <= both.pings_in(10_000) <= 502
    assert not both.failed()


@pytest.mark.parametrize("count", [1, 2, 50, 64, 65, 200])
def test_each_connection_is_asked_itself_in_64_periods(count: int) -> None:
    both = Both(count)
    both.settle()
    both.clock.run_until(3000)
    begun = both.clock.now
    a_period = -(-count // 64)
    assert both.pings_in(64 * PERIOD_S) <= 65 * a_period
    for client in both.clients:
        assert any(when >= begun for when in client.pings), "it was never asked itself"


@pytest.mark.parametrize("named", [True, False], ids=["named", "an old peer"])
@pytest.mark.parametrize("count", [1, 2, 50, 200])
@pytest.mark.parametrize("apart", [0.0, 3.3, 9.9, 17.1])
def test_a_dead_peer_is_noticed_on_all(count: int, apart: float, *, named: bool) -> None:
    """Its host is dead, or its loop stands still: nothing is heard of any of its connections."""
    both = Both(count, named=named)
    both.clock.run_until(500 + apart)
    for client in both.clients:
        client.hears = False
    both.clock.run_until(1000)
    for end in both.ends:
        ((when, cause),) = end.failures
        assert 10 < when - (500 + apart) <= NOTICED_S
        assert isinstance(cause, PeerSilentError)


def test_an_old_peer_is_asked_on_each_connection() -> None:
    both = Both(50, named=False)
    both.settle()
    assert 49 <= both.pings_in(PERIOD_S) <= 51
    assert not both.failed()


def test_a_peer_that_was_stopped_for_a_while_is_kept() -> None:
    both = Both(50)
    both.clock.run_until(500)
    for end in both.ends:
        end.hears = False
    both.clock.run_until(515)
    for end in both.ends:
        end.hears = True
        if end._state.asking:  # what lay in its queues is answered
            end.answer()
    both.clock.run_until(2000)
    assert not both.failed()
    assert both.pings_in(50 * PERIOD_S) <= 52


@pytest.mark.parametrize("count", [2, 50, 200])
def test_one_broken_connection_is_noticed_and_no_other_ends(count: int) -> None:
    both = Both(count)
    both.clock.run_until(500)
    broken = both.clients[count // 2], both.servers[count // 2]
    for end in broken:
        end.hears = False
    begun = both.clock.now
    both.clock.run_until(begun + 128 * PERIOD_S + NOTICED_S)
    assert set(both.failed()) == set(broken)
    client, server = broken
    assert client.failures[0][0] - begun <= 64 * PERIOD_S + NOTICED_S
    assert server.failures[0][0] - begun <= 128 * PERIOD_S + NOTICED_S


def test_when_one_does_not_answer_all_others_are_asked_at_the_next_look() -> None:
    both = Both(50)
    both.clock.run_until(500)
    for end in both.ends:
        end.hears = False
    asked = both.pings()
    both.clock.run_until(500 + PERIOD_S + 10)
    assert all(client.pings[-1] > 500 for client in both.clients)
    assert both.pings() - asked <= 100


def test_when_one_has_failed_all_others_are_asked_at_once() -> None:
    """A dead host shows as soon as its adapter does not acknowledge the first question."""
    both = Both(50)
    both.clock.run_until(500)
    failed, *others = both.clients
    failed.keepalive.failed()
    failed.keepalive.stop()
    both.clock.run_until(500.1)
    assert all(client.pings[-1] >= 500 for client in others)
    assert failed.pings[-1] < 500
    both.clock.run_until(1000)
    assert not both.failed()
    assert both.pings_in(49 * PERIOD_S) <= 75


def test_a_message_is_a_sign_of_life_for_all_and_each_is_asked_all_the_same() -> None:
    both = Both(10)
    both.clock.run_until(500)
    begun = both.pings()
    for second in range(505, 1505, 5):
        both.servers[0].say()
        both.clients[0].say()
        both.clock.run_until(second)
    assert not both.failed()
    assert both.pings() - begun <= 51 + 5
    for client in both.clients:
        assert client.pings[-1] > 1505 - 11 * PERIOD_S


def test_a_limit_that_leaves_no_time_for_a_second_question_has_no_group() -> None:
    both = Both(10, keepalive_s=10, idle_timeout_s=25)
    both.clock.run_until(500)
    assert all(end._state.group is None for end in both.ends)
    for client in both.clients:
        client.hears = False
    both.clock.run_until(600)
    assert all(end.failures[0][0] - 480 >= 25 and end.failures[0][0] <= 540 for end in both.ends)


# A peer that lies


def test_a_liar_keeps_no_dead_connection_for_long() -> None:
    """It has the number of a loop that is dead, and answers for it."""
    clock = Clock()
    server = [End(clock, ("address", "victim"), late=True) for _ in range(50)]
    liar = server[0]

    def answer(end: End) -> None:
        end.pings.append(clock.now)
        end.answer()

    for end in server:
        end._sender.control = lambda _, end=end: answer(end)
    clock.run_until(500)
    for end in server[1:]:
        end._sender.control = lambda _, end=end: end.pings.append(clock.now)
    for second in range(500, 3000, 5):
        liar._state.hear()
        clock.run_until(second)
    assert not liar.failures
    # Its own turn, those of the dead ones that it was heard before, and the limit.
    assert all(end.failures[0][0] <= 500 + 3 * PERIOD_S + NOTICED_S for end in server[1:])


def test_a_liar_ends_no_connection_and_costs_no_more_than_without_groups() -> None:
    """It has the number of a loop that lives, and never answers; again and again it connects."""
    both = Both(50)
    both.clock.run_until(500)
    begun, liars = both.pings(), []
    for second in range(500, 2500, 10):
        liar = both._end("client", late=True)
        liar._state.hear()  # it has to be heard itself to join
        liars.append(liar)
        both.clock.run_until(second + 10)
    assert not both.failed()
    assert all(liar.failures for liar in liars[:100])
    assert both.pings() - begun <= 2 * 50 * 2000 / 10


def test_a_connection_that_was_never_heard_joins_nothing() -> None:
    """Nothing that is heard on others prolongs the time of a client that says nothing itself."""
    both = Both(5)
    both.clock.run_until(500)
    mute = both._end("client", late=True)
    both.clock.run_until(600)
    assert mute._state.group is None
    ((when, _),) = mute.failures
    assert 30 <= when - 500 <= NOTICED_S


def test_the_same_number_from_another_address_is_another_group() -> None:
    clock = Clock()
    ends = [End(clock, (address, "number"), late=False) for address in ("one", "other")]
    for end in ends:
        end._state.hear()
    clock.run_until(15)
    assert ends[0]._state.group is not None
    assert ends[0]._state.group is not ends[1]._state.group


# Their number, and their end


class Counted(End):
    """An end whose looks are counted, with those of all others."""

    looks = 0

    def _was_alive(self) -> bool:
        Counted.looks += 1
        alive: bool = Connection._was_alive(self)  # type: ignore[arg-type]
        return alive

    def ping(self, kind: FrameKind) -> None:
        self.answer()


def most_looks(clock: Clock, until: float) -> int:
    """The looks of the turn of the loop that has most of them."""
    most = 0
    while clock._timers and clock._timers[0][0] <= until:
        when, _, handle = heapq.heappop(clock._timers)
        clock.now, before = max(clock.now, when), Counted.looks
        if handle.callback is not None:
            handle.callback()
        most = max(most, Counted.looks - before)
    return most


def test_ten_thousand_are_not_looked_at_in_one_turn() -> None:
    clock = Clock()
    ends = []
    for number in range(10_000):
        clock.run_until(number / 1000)
        ends.append(Counted(clock, ("address", "loop"), late=False))
    clock.run_until(60)
    before, a_turn = Counted.looks, 10_000 // 64 + 1
    assert most_looks(clock, 200) <= a_turn, "a turn looks at those that it asks"
    assert Counted.looks - before <= 7 * 2 * a_turn + 1
    # And if they are in doubt, they are asked a few in a turn.
    before = Counted.looks
    ends[0].keepalive.failed()
    assert most_looks(clock, 201) <= 64
    assert Counted.looks - before == 10_000


def test_the_last_that_stops_leaves_no_timer() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    for moment in (5, 15, 59, 61, 500):
        both = Both(20)
        both.clock.run_until(moment)
        if moment == 500:  # the group has just ended, and they are still to be looked at
            both.clients[0].keepalive.failed()
        ends = both.ends
        chance.shuffle(ends)
        for end in ends:
            end.keepalive.stop()
            end.keepalive.stop()
        assert all(handle.callback is None for _, _, handle in both.clock._timers)
        pings = both.pings()
        both.clock.run_until(moment + 100)
        assert both.pings() == pings


@given(st.data())
def test_whatever_happens_the_living_are_kept_and_the_dead_are_noticed(data: st.DataObject) -> None:
    both = Both(data.draw(st.integers(1, 8)))
    numbers = st.integers(0, len(both.clients) - 1)
    broken: set[int] = set()
    for _ in range(data.draw(st.integers(1, 30))):
        both.clock.run_until(both.clock.now + data.draw(st.floats(0, 25)))
        number = data.draw(numbers)
        match data.draw(st.sampled_from(["say", "answer", "break", "fail", "nothing"])):
            case "say":
                both.clients[number].say()
            case "answer":
                both.servers[number].say()
            case "break":
                broken.add(number)
                both.clients[number].hears = both.servers[number].hears = False
            case "fail":
                both.clients[number].keepalive.failed()
    both.clock.run_until(both.clock.now + 2 * 8 * PERIOD_S + NOTICED_S)
    dead = {end for number in broken for end in (both.clients[number], both.servers[number])}
    assert set(both.failed()) == dead
    for end in dead:
        assert end.failures[0][0] - end._state.heard >= 30 - 1e-6, "it was given up too early"
        assert end.pings[-1] <= end.failures[0][0] - 10 + 1e-6, "it had no time to answer"


# The byte that C sets


def test_a_state_takes_a_bytearray_of_one_byte() -> None:
    config = ConnectionConfig(raw=True, recv_depth=4)
    state = new_state(config, None, config.receives, 1)
    for wrong in (b"x", bytearray(2), bytearray(), 1):
        with pytest.raises(TypeError, match="bytearray of one byte"):
            state.show_life_to(wrong)  # type: ignore[arg-type]
    group = bytearray(1)
    before = sys.getrefcount(group)
    state.show_life_to(group)
    state.show_life_to(group)
    assert sys.getrefcount(group) == before + 1
    state.show_life_to(None)
    assert sys.getrefcount(group) == before


def test_an_answer_that_the_group_has_not_looked_at_counts() -> None:
    """The group ends in the moment in which its connection has answered, and is then lost."""
    both = Both(1)
    client = both.clients[0]
    both.servers[0].say()
    both.clock.run_until(20)
    assert client.pings == [20.0]
    assert client._state.heard == 20.0
    client.hears = both.servers[0].hears = False
    client.keepalive.failed()
    both.clock.run_until(100)
    assert client.failures[0][0] - 20.0 >= 30 - 1e-6
