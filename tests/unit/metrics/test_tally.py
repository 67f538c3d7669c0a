"""Counts, durations and tracers of operations."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from aiordma import metrics
from aiordma.link import tally
from aiordma.link.tally import Operation
from aiordma.metrics.snapshot import Totals
from tests.forks import fork_quietly


class Tracer:
    def __init__(self, *, fails: str = "") -> None:
        self.told: list[tuple[Any, ...]] = []
        self._fails = fails

    def begin(self, operation: str, attributes: Mapping[str, Any]) -> int:
        if self._fails == "begin":
            raise ZeroDivisionError
        self.told.append((operation, dict(attributes)))
        return len(self.told)

    def end(self, begun: int, error: BaseException | None) -> None:
        if self._fails == "end":
            raise ZeroDivisionError
        self.told.append((begun, error))


@pytest.fixture
def tracer() -> Iterator[Tracer]:
    made = Tracer()
    tally.add_tracer(made)
    yield made
    tally.remove_tracer(made)


def test_an_operation_is_counted_timed_and_traced(tracer: Tracer) -> None:
    before = metrics.snapshot().request_s
    with Operation("request", {"rpc.method": "get"}):
        pass
    with pytest.raises(KeyError), Operation("request", lambda: {"a": 1}):
        raise KeyError("k")
    with pytest.raises(asyncio.CancelledError), Operation("request"):
        raise asyncio.CancelledError
    after = metrics.snapshot().request_s
    assert after.count - before.count == 1
    assert after.failed - before.failed == 1
    assert after.total_s > before.total_s
    kinds = [type(each[1]).__name__ for each in tracer.told]
    assert kinds == ["dict", "NoneType", "dict", "KeyError", "dict", "CancelledError"]
    assert tracer.told[0] == ("request", {"rpc.method": "get"})
    assert tracer.told[2] == ("request", {"a": 1})


def test_attributes_are_not_made_without_a_tracer() -> None:
    def attributes() -> dict[str, Any]:
        raise AssertionError

    with Operation("reply", attributes):
        pass


@pytest.mark.parametrize("fails", ["begin", "end"])
def test_a_tracer_that_raises_does_no_harm(fails: str, caplog: pytest.LogCaptureFixture) -> None:
    tracer = Tracer(fails=fails)
    tally.add_tracer(tracer)
    before = metrics.snapshot().request_s.count
    try:
        with Operation("request"):
            pass
    finally:
        tally.remove_tracer(tracer)
    assert metrics.snapshot().request_s.count == before + 1
    assert [each.levelno for each in caplog.records] == [logging.ERROR]
    with Operation("request"):
        pass
    assert not tracer.told[1:]


def test_durations_lie_in_their_buckets() -> None:
    durations = tally.Durations()
    for seconds in (0, 1e-5, 1.1e-5, 0.3, 10, 11, 1e9):
        durations.add(seconds)
    buckets, total_s = durations.read()
    assert len(buckets) == len(tally.BOUNDS_S) + 1
    assert (buckets[0], buckets[1], buckets[-1], sum(buckets)) == (2, 1, 2, 7)
    assert buckets[tally.BOUNDS_S.index(0.5)] == 1
    assert total_s == pytest.approx(1e9 + 21.3, abs=1)
    assert list(tally.BOUNDS_S) == sorted(tally.BOUNDS_S)


def test_counts_of_several_threads_are_exact() -> None:
    before = tally.counts()["refused"], sum(tally.durations["reply"].read()[0])

    def work() -> None:
        for _ in range(2000):
            tally.count("refused")
            with Operation("reply"):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    after = tally.counts()["refused"], sum(tally.durations["reply"].read()[0])
    assert (after[0] - before[0], after[1] - before[1]) == (8000, 8000)


def test_an_event_that_is_not_known_is_an_error() -> None:
    with pytest.raises(KeyError):
        tally.count("no such event")


def test_datagram_totals_keep_what_has_ended() -> None:
    before = tally.datagram_totals()
    one, other = tally.DatagramCounts(), tally.DatagramCounts()
    one.sent, one.bytes_sent, other.sent = 3, 100, 4
    assert tally.datagram_totals()["sent"] - before["sent"] == 7
    one.end()
    one.end()
    one.sent += 50  # an endpoint that has ended sends nothing
    after = tally.datagram_totals()
    assert (after["sent"] - before["sent"], after["bytes_sent"] - before["bytes_sent"]) == (7, 100)
    other.end()
    assert tally.datagram_totals() == after


def test_datagram_totals_never_fall_while_endpoints_end() -> None:
    over = threading.Event()
    last = tally.datagram_totals()["sent"]
    begun = last

    def work() -> None:
        for _ in range(2000):
            each = tally.DatagramCounts()
            each.sent += 1
            each.end()
        over.set()

    thread = threading.Thread(target=work)
    thread.start()
    while not over.is_set():
        now = tally.datagram_totals()["sent"]
        assert last <= now <= begun + 2000
        last = now
    thread.join(60)
    assert tally.datagram_totals()["sent"] == begun + 2000


def test_a_forked_child_begins_at_zero() -> None:
    with Operation("connect"):
        tally.count("dropped")
    counts = tally.DatagramCounts()
    counts.sent += 1
    child = fork_quietly()
    if child == 0:  # pragma: no cover
        seen = metrics.snapshot()
        good = seen.totals == Totals() and seen.pid == os.getpid()
        os._exit(0 if good and seen.connect_s.count == 0 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert metrics.snapshot().totals.connects > 0
    assert metrics.snapshot().totals.datagrams_sent > 0
    counts.end()
