"""Places, ledgers and the pace of connects, on a loop without a device."""

from __future__ import annotations

import asyncio
import errno
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from aiordma.errors import ConnectionRejectedError, RdmaError
from aiordma.link import admission, pacing
from aiordma.link.admission import Ledger, Place, Places
from aiordma.link.limits import ListenerLimits
from aiordma.link.listening import Shortages
from aiordma.link.pacing import Course, paced
from aiordma.link.source import source_of
from aiordma.loop.limit import Limit
from tests.inside.link import limit_half_open, sources_of
from tests.inside.streams import begin_tls

pytestmark = pytest.mark.one_loop  # its time is the test's

ADDRESS = ("192.0.2.1", 7)


class Clock:
    """The loop's time, which stands still unless told to go on; timers run when they are due."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.timers: list[tuple[float, asyncio.Handle, Callable[[], None]]] = []
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "time", lambda: self.now)
        monkeypatch.setattr(loop, "call_at", self.call_at)
        monkeypatch.setattr(loop, "call_later", lambda s, f, *a: self.call_at(self.now + s, f, *a))

    def call_at(self, when: float, function: Callable[..., None], *args: Any) -> Any:
        run = functools.partial(function, *args)
        handle = asyncio.Handle(run, (), asyncio.get_running_loop())
        self.timers.append((when, handle, run))
        return handle

    def pass_by(self, seconds: float) -> None:
        """Let time go on, timer by timer."""
        until = self.now + seconds
        while True:
            self.timers = [entry for entry in self.timers if not entry[1].cancelled()]
            due = [entry for entry in self.timers if entry[0] <= until]
            if not due:
                break
            first = min(due, key=lambda entry: entry[0])
            self.timers.remove(first)
            self.now = max(self.now, first[0])
            first[2]()
        self.now = until


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


class Client:
    """A client that asks for a place; its server begins, and it is the client's turn."""

    def __init__(self, places: Places, source: str, *, memory_goes: bool = True) -> None:
        self.place: Place | None = None
        self.refused = self.dropped = False
        self.acted = False
        self.memory_goes = memory_goes
        places.arrive(source, self.begin, self.refuse)

    def begin(self, place: Place) -> None:
        self.place = place
        place.turn(self.drop)

    def refuse(self) -> None:
        self.refused = True

    def drop(self) -> bool:
        if self.acted:
            return False
        self.dropped = True
        if self.memory_goes:
            assert self.place is not None
            self.place.leave()
        return True

    def leave(self) -> None:
        assert self.place is not None
        self.place.leave()


def places(most: int = 4, most_of_one: int = 3) -> Places:
    return Places(most, most_of_one, pressed_s=1.0, patience_s=3.0)


def count(clients: list[Client], what: str) -> int:
    return sum(bool(getattr(client, what)) for client in clients)


async def test_g02_without_pressure_a_slow_client_keeps_its_place(clock: Clock) -> None:
    here = places()
    clients = [Client(here, "a") for _ in range(3)]
    clock.pass_by(100)
    assert count(clients, "dropped") == 0
    assert (here.open, here.waiting) == (3, 0)
    for client in clients:
        client.leave()
        client.leave()  # idempotent
    assert (here.open, here.waiting) == (0, 0)
    assert not sources_of(here)


async def test_g02_a_source_has_no_more_places_than_its_limit(clock: Clock) -> None:
    here = places()
    greedy = [Client(here, "a") for _ in range(10)]
    assert count(greedy, "place") == 3
    other = Client(here, "b")
    assert other.place
    assert here.open == 4


async def test_g02_the_oldest_of_the_source_that_holds_most_goes_first(clock: Clock) -> None:
    here = places()
    first = Client(here, "b")
    clock.pass_by(0.1)
    greedy = []
    for _ in range(3):
        greedy.append(Client(here, "a"))
        clock.pass_by(0.1)
    late = Client(here, "c")
    clock.pass_by(0.65)  # the first is older than a second, but not of the fullest source
    assert not first.dropped
    assert not greedy[0].dropped
    clock.pass_by(0.06)
    assert [client.dropped for client in greedy] == [True, False, False]
    assert late.place
    assert not first.dropped
    clock.pass_by(50)  # nothing waits any more
    assert count([first, late, *greedy[1:]], "dropped") == 0


async def test_g02_time_in_which_the_loop_is_late_counts_for_no_client(clock: Clock) -> None:
    here = places(most=2)
    slow = [Client(here, "a") for _ in range(2)]
    late = Client(here, "b")
    for _ in range(4):
        clock.now += 5.0  # and then the loop comes to its timers, or to an event
        Client(here, "c")
        clock.pass_by(0.1)
    assert count(slow, "dropped") == 0
    assert not late.refused
    clock.pass_by(0.35)
    assert slow[0].dropped
    assert late.place


async def test_g02_a_client_that_has_acted_is_not_dropped(clock: Clock) -> None:
    here = places(most=2)
    slow, quick = Client(here, "a"), Client(here, "a")
    quick.acted = True
    late = Client(here, "b")
    clock.pass_by(1.5)
    assert (slow.dropped, quick.dropped) == (True, False)
    assert late.place


async def test_g02_the_servers_own_work_counts_for_no_client(clock: Clock) -> None:
    here = places(most=1)
    begun: list[Place] = []
    here.arrive("a", begun.append, lambda: None)
    late = Client(here, "b")
    clock.pass_by(2.5)
    assert late.place is None
    mine = Client.__new__(Client)
    mine.place, mine.acted, mine.dropped, mine.memory_goes = begun[0], False, False, True
    begun[0].turn(mine.drop)
    clock.pass_by(0.45)
    assert not mine.dropped
    clock.pass_by(0.1)  # it has waited for three seconds
    assert late.refused


async def test_g02_a_place_is_free_when_its_memory_is(clock: Clock) -> None:
    here = places(most=2)
    clients = [Client(here, "a", memory_goes=False) for _ in range(2)]
    late = Client(here, "b")
    clock.pass_by(2)
    assert [client.dropped for client in clients] == [True, False]  # as many as wait
    assert late.place is None
    clients[0].leave()
    assert late.place


async def test_g02_what_waits_too_long_is_refused(clock: Clock) -> None:
    here = places(most=1)
    client = Client(here, "a")
    client.acted = True
    late = Client(here, "a")
    clock.pass_by(2.9)
    assert not late.refused
    clock.pass_by(0.2)
    assert late.refused
    assert (here.open, here.waiting) == (1, 0)


async def test_g02_sources_take_turns(clock: Clock) -> None:
    here = places(most=1)
    first = Client(here, "a")
    crowd = [Client(here, "a") for _ in range(5)]
    other = Client(here, "b")
    first.leave()
    assert other.place or crowd[0].place
    (crowd[0] if crowd[0].place else other).leave()
    assert crowd[0].place
    assert other.place


async def test_g02_room_in_the_line_is_made_by_the_source_that_holds_most(clock: Clock) -> None:
    here = places(most=1)
    first = Client(here, "a")
    crowd = [Client(here, "a") for _ in range(5)]
    assert not here.make_room("a")
    assert here.make_room("b")
    assert crowd[0].refused
    assert not first.refused
    assert count(crowd, "refused") == 1
    here.close()
    assert count(crowd, "refused") == 5
    assert here.open == 1


def test_g09_a_ledger_refuses_beyond_each_limit() -> None:
    limits = ListenerLimits(
        max_connections=5, max_connections_per_source=3, max_pinned_bytes=499,
        max_process_pinned_bytes=100_000,
    )  # fmt: skip
    ledger = Ledger(limits, 100)
    assert not ledger.why_full("a")
    undo = [ledger.take("a") for _ in range(3)]
    assert "max_connections_per_source" in ledger.why_full("a")
    assert not ledger.why_full("b")
    undo.append(ledger.take("b"))
    assert "max_pinned_bytes" in ledger.why_full("c")
    small = Ledger(limits, 1)
    undo += [small.take(str(number)) for number in range(5)]
    assert "max_connections)" in small.why_full("b")
    for each in undo:
        each()
        each()  # once is enough
    assert ledger.connections == small.connections == 0
    assert not sources_of(ledger)


def test_g09_a_full_ledger_counts_nothing_more() -> None:
    limits = ListenerLimits(max_connections=2)
    ledger = Ledger(limits, 100)
    before = admission.PINNED.held
    undo = [ledger.take("a"), ledger.take("b")]
    with pytest.raises(RdmaError, match="max_connections") as full:
        ledger.take("c")
    assert isinstance(full.value, OSError)
    assert full.value.errno == errno.ENOBUFS
    assert ledger.connections == 2
    for each in undo:
        each()
    assert (ledger.connections, admission.PINNED.held) == (0, before)


def test_g02_of_refusals_by_a_limit_few_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    shortages = Shortages()
    for _ in range(100):
        shortages.full(("192.0.2.1", 5), "there are 7 connections (max_connections)")
    shortages.tell(None, MemoryError("none"))
    lines = [record.getMessage() for record in caplog.records]
    assert [int(line.split("(")[-1].split()[0]) for line in lines] == [1, 2, 4, 8, 16, 32, 64, 1]


def test_g09_the_process_has_a_budget_of_all_listeners() -> None:
    limits = ListenerLimits(max_process_pinned_bytes=admission.PINNED.held + 250)
    one, other = Ledger(limits, 100), Ledger(limits, 100)
    undo = [one.take("a"), other.take("b")]
    assert "max_process_pinned_bytes" in one.why_full("a")
    assert "max_process_pinned_bytes" in other.why_full("c")
    undo.pop()()
    assert not one.why_full("b")
    undo.pop()()


@pytest.mark.parametrize(
    "limit", ["max_connections", "max_pinned_bytes", "max_process_pinned_bytes"]
)
def test_g09_a_source_leaves_room_for_others(limit: str) -> None:
    """One source after the other takes what it gets, and the next one gets in all the same."""
    of_process = limit == "max_process_pinned_bytes"
    before = admission.PINNED.held if of_process else 0
    limits = ListenerLimits(**{limit: before + 640})
    ledgers = [Ledger(limits, 1) for _ in range(1 + of_process)]
    undo = []
    for source, share in (("a", 480), ("b", 120), ("c", 30), ("d", 7)):
        count = 0
        while not (full := ledgers[count % len(ledgers)].why_full(source)):
            undo.append(ledgers[count % len(ledgers)].take(source))
            count += 1
        assert count == share
        assert source in full
        assert f"its share is {share} ({limit})" in full
    for give_back in undo:
        give_back()
    assert not any(ledger.why_full("a") for ledger in ledgers)
    assert not admission.PINNED.sources


def test_g09_five_sources_do_not_take_all_connections() -> None:
    """With the default settings, where four of them would have had a quarter each."""
    ledger = Ledger(ListenerLimits(), 1)
    undo = []
    for source in "abcde":
        while not ledger.why_full(source):
            undo.append(ledger.take(source))
    assert not ledger.why_full("another")
    for give_back in undo:
        give_back()
    assert not ledger.connections


def test_g09_a_client_of_unknown_address_is_counted_out_again() -> None:
    ledger = Ledger(ListenerLimits(), 100)
    before = admission.PINNED.held
    give_back = ledger.take(source_of(None))
    assert (ledger.connections, ledger.pinned) == (1, 100)
    give_back()
    give_back()
    assert (ledger.connections, ledger.pinned, admission.PINNED.held) == (0, 0, before)


def test_g09_a_connection_of_other_settings_counts_what_it_pins() -> None:
    ledger = Ledger(ListenerLimits(max_pinned_bytes=1000), 100)
    before = admission.PINNED.held
    undo = [ledger.take("a", 700), ledger.take("b", 200)]
    assert (ledger.pinned, admission.PINNED.held) == (900, before + 900)
    assert not ledger.why_full("c")
    assert "max_pinned_bytes" in ledger.why_full("c", 101)
    with pytest.raises(OSError, match="max_pinned_bytes"):
        ledger.take("c", 101)
    for give_back in undo:
        give_back()
    assert (ledger.pinned, ledger.connections, admission.PINNED.held) == (0, 0, before)


@pytest.mark.parametrize(
    ("address", "source"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::1", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64%eth0"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        (None, ""),
    ],
)
def test_g09_a_source_of_ipv6_is_its_network(address: str | None, source: str) -> None:
    assert source_of(address) == source


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("max_connections", 0, ValueError),
        ("max_half_open", 1.5, TypeError),
        ("max_half_open", True, TypeError),
        ("max_pinned_bytes", -1, ValueError),
        ("handshake_timeout_s", 0, ValueError),
        ("handshake_timeout_s", float("inf"), ValueError),
    ],
)
def test_g09_limits_are_checked_early(name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=name):
        ListenerLimits(**{name: value})


def test_g09_half_open_clients_fit_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_half_open(monkeypatch, size=1000)
    limits = ListenerLimits(max_half_open=10)
    assert limits.half_open(10) == 10
    assert limits.half_open(300) == 3
    assert limits.half_open(5000) == 1


# -- the pace of connects


class Server:
    """Answers connects when it is told to."""

    def __init__(self) -> None:
        self.waiting: list[asyncio.Future[str]] = []
        self.most = 0
        self.courses: list[Course] = []

    async def attempt(self) -> str:
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.waiting.append(answer)
        self.most = max(self.most, len(self.waiting))
        try:
            return await answer
        finally:
            self.waiting.remove(answer)

    def connect(self, limit: Limit | None = None) -> asyncio.Task[str]:
        course = Course(limit or Limit(None))
        self.courses.append(course)

        async def attempt() -> str:
            course.asked = True
            return await self.attempt()

        async def connect() -> str:
            with course.limit:
                return await paced(ADDRESS, attempt, course)

        return asyncio.create_task(connect())


async def turns(number: int = 10) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def test_c01_connects_to_one_address_take_turns() -> None:
    server = Server()
    tasks = [server.connect() for _ in range(100)]
    await turns()
    served = 0
    while served < 100:
        assert len(server.waiting) == min(pacing.AT_A_TIME, 100 - served)
        server.waiting[0].set_result("here")
        served += 1
        await turns()
    assert await asyncio.gather(*tasks) == ["here"] * 100
    assert server.most == pacing.AT_A_TIME


async def test_c01_a_connect_that_is_canceled_gives_its_turn_away() -> None:
    server = Server()
    tasks = [server.connect() for _ in range(pacing.AT_A_TIME + 3)]
    await turns()
    tasks[-3].cancel()  # waits
    tasks[0].cancel()
    tasks[1].cancel()
    await turns()
    assert len(server.waiting) == pacing.AT_A_TIME
    tasks[2].cancel()
    tasks[-2].cancel()  # has just been given a turn, or is under way
    await turns()
    for answer in server.waiting:
        answer.set_result("here")
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert done.count("here") == pacing.AT_A_TIME + 3 - 5


async def test_c01_connects_that_do_not_end_hold_up_others_for_a_moment_only(
    clock: Clock,
) -> None:
    server = Server()
    tasks = [server.connect() for _ in range(4 * pacing.AT_A_TIME)]
    await turns()
    assert len(server.waiting) == pacing.AT_A_TIME
    clock.pass_by(pacing.STALLED_S)
    await turns()
    assert len(server.waiting) == 2 * pacing.AT_A_TIME
    clock.pass_by(pacing.STALLED_S)
    await turns()
    assert len(server.waiting) == 4 * pacing.AT_A_TIME
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_c01_the_first_in_line_waits_for_a_time_of_its_own(clock: Clock) -> None:
    server = Server()
    tasks = [server.connect() for _ in range(pacing.AT_A_TIME + 1)]
    await turns()
    server.waiting[0].set_result("here")  # and nobody is in line
    await turns()
    clock.pass_by(0.9 * pacing.STALLED_S)
    tasks.append(server.connect())
    for part in (0.9, 0.05):
        await turns()
        clock.pass_by(part * pacing.STALLED_S)
        await turns()
        assert len(server.waiting) == pacing.AT_A_TIME
    clock.pass_by(0.1 * pacing.STALLED_S)
    await turns()
    assert len(server.waiting) == pacing.AT_A_TIME + 1
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_c01_the_wait_for_a_turn_is_not_taken_from_a_limit(clock: Clock) -> None:
    server = Server()
    count = 3 * pacing.AT_A_TIME
    patient = [server.connect(Limit(10.0, patient=True)) for _ in range(count)]
    strict = server.connect(Limit(10.0))
    await turns()
    while server.waiting:
        assert len(server.waiting) <= pacing.AT_A_TIME
        clock.pass_by(1.9)
        for answer in server.waiting[:2]:
            answer.set_result("here")
        await turns()
    assert clock.now > 1010
    assert await asyncio.gather(*patient) == ["here"] * count
    with pytest.raises(TimeoutError):
        await strict


async def test_c01_a_peer_that_never_answers_is_given_up_in_bounded_time(clock: Clock) -> None:
    server = Server()
    tasks = [server.connect(Limit(10.0, patient=True)) for _ in range(200)]
    for _ in range(24):
        await turns()
        clock.pass_by(1.0)
    await turns()
    assert all(task.done() for task in tasks)
    for task in tasks:
        with pytest.raises(TimeoutError):
            await task


async def test_c01_a_loop_that_is_late_takes_little_from_a_limit(clock: Clock) -> None:
    limit = Limit(10.0, patient=True)
    server = Server()
    task = server.connect(limit)
    await turns()
    for _ in range(5):
        clock.now += 60.0  # and then the loop comes to its timers
        clock.pass_by(0.0)
    clock.pass_by(7.0)
    await turns()
    assert not task.done()
    server.waiting[0].set_result("here")
    assert await task == "here"
    assert not limit.expired


async def test_c01_a_limit_that_is_held_runs_on_where_it_stood(clock: Clock) -> None:
    limit = Limit(10.0, patient=True)
    task = Server().connect(limit)
    await turns()
    clock.pass_by(3.3)
    limit.pause()
    limit.pause()
    clock.pass_by(100.0)
    limit.resume()
    clock.pass_by(100.0)
    limit.resume()
    clock.pass_by(6.6)
    await turns()
    assert not task.done()
    clock.pass_by(0.2)
    with pytest.raises(TimeoutError):
        await task
    limit.pause()
    limit.resume()  # what ends late changes nothing
    assert not clock.timers or all(handle.cancelled() for _, handle, _ in clock.timers)


async def test_b06_a_listener_that_asks_for_it_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pacing, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(pacing, "LONGEST_PAUSE_S", 0.002)
    course, tries = Course(Limit(None)), 0

    async def attempt() -> str:
        nonlocal tries
        tries += 1
        error = ConnectionRejectedError(111, "busy")
        error.try_again = tries < 5
        if tries < 7:
            raise error
        return "never"

    with pytest.raises(ConnectionRejectedError):
        await paced(ADDRESS, attempt, course)
    assert tries == 5
    assert course.refusals == 4
    assert course.refusal is not None


async def test_a_client_that_turns_to_tls_counts_with_its_network() -> None:
    """As at the handshake of the connection: a host of IPv6 has as many addresses as it likes."""
    asked: list[str] = []

    async def tls_place(transport: Any, source: str, end: Any) -> None:
        asked.append(source)

    server: Any = SimpleNamespace(_tls_place=tls_place)
    for host in ("2001:db8::1", "2001:db8::2", "192.0.2.1"):
        transport: Any = SimpleNamespace(_extra={"peername": (host, 7)}, abort=None)
        await begin_tls(server, transport)
    assert asked == [source_of("2001:db8::1")] * 2 + ["192.0.2.1"]
