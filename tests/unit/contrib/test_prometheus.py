"""The collector, by prometheus_client's own registry and text format."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families

from aiordma.contrib.prometheus import RdmaCollector, register
from aiordma.link.tally import BOUNDS_S
from tests.pages import DOCS

from ..metrics.seen import TOTALS, seen

if TYPE_CHECKING:
    import pytest


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scraped(
    *, each_connection: bool = False
) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    registry = CollectorRegistry()
    registry.register(RdmaCollector(each_connection=each_connection, take=seen))
    return samples(generate_latest(registry).decode())


def test_totals_are_counters() -> None:
    found = scraped()
    sent, received = (("direction", "sent"),), (("direction", "received"),)
    assert found["aiordma_messages_total", sent] == TOTALS.messages_sent
    assert found["aiordma_messages_total", received] == TOTALS.messages_received
    assert found["aiordma_message_bytes_total", sent] == TOTALS.bytes_sent
    assert found["aiordma_message_bytes_total", received] == TOTALS.bytes_received
    assert found["aiordma_stream_bytes_total", sent] == TOTALS.stream_bytes_sent
    assert found["aiordma_stream_bytes_total", received] == TOTALS.stream_bytes_received
    assert found["aiordma_datagrams_total", sent] == TOTALS.datagrams_sent
    assert found["aiordma_datagrams_total", received] == TOTALS.datagrams_received
    assert found["aiordma_datagram_bytes_total", sent] == TOTALS.datagram_bytes_sent
    assert found["aiordma_datagram_bytes_total", received] == TOTALS.datagram_bytes_received
    for name, value in (
        ("one_sided_read_bytes", TOTALS.bytes_read),
        ("one_sided_written_bytes", TOTALS.bytes_written),
        ("atomics", TOTALS.atomics),
        ("connect_retries", TOTALS.connect_retries),
        ("refused", TOTALS.refused),
        ("dropped", TOTALS.dropped),
        ("connections_lost", TOTALS.connections_lost),
        ("streams_lost", TOTALS.streams_lost),
        ("datagrams_dropped", TOTALS.datagrams_dropped),
        ("datagrams_ignored", TOTALS.datagrams_ignored),
    ):
        assert found[f"aiordma_{name}_total", ()] == value, name


def test_the_page_names_metrics_that_there_are() -> None:
    named = set(re.findall(r"\baiordma_[a-z_]+\b", (DOCS / "observing.md").read_text()))
    exported = {name for name, _ in scraped(each_connection=True)}
    shown = exported | {name.removesuffix("_bucket") for name in exported}
    assert len(named) > 20
    assert named - shown == set()


def test_durations_are_histograms_whose_buckets_are_summed_up() -> None:
    found = scraped()
    name = "aiordma_connect_seconds"
    assert found[f"{name}_bucket", (("le", "1e-05"),)] == 1
    assert found[f"{name}_bucket", (("le", "2.5e-05"),)] == 3
    assert found[f"{name}_bucket", (("le", repr(BOUNDS_S[-1])),)] == 3
    assert found[f"{name}_bucket", (("le", "+Inf"),)] == 7
    assert (found[f"{name}_count", ()], found[f"{name}_sum", ()]) == (7, 42.5)
    assert found["aiordma_connect_failures_total", ()] == 3
    assert found["aiordma_request_seconds_count", ()] == 7
    assert found["aiordma_reply_seconds_count", ()] == 0


def test_what_is_open_are_gauges() -> None:
    found = scraped()
    assert found["aiordma_open", (("kind", "connections"),)] == 2
    assert found["aiordma_open", (("kind", "streams"),)] == 1
    assert found["aiordma_open", (("kind", "listeners"),)] == 1
    assert found["aiordma_open", (("kind", "datagrams"),)] == 1
    assert found["aiordma_pinned_bytes", (("kind", "connections"),)] == 65536
    assert found["aiordma_pinned_bytes", (("kind", "datagrams"),)] == 8192
    assert found["aiordma_budget_used_bytes", (("budget", "growth"),)] == 3
    assert found["aiordma_budget_bytes", (("budget", "growth"),)] == 200
    assert found["aiordma_budget_used_bytes", (("budget", "listeners"),)] == 12
    assert ("aiordma_budget_bytes", (("budget", "listeners"),)) not in found
    where = (("address", "0.0.0.0 port 18515"),)
    assert found["aiordma_listener_half_open", where] == 1
    assert found["aiordma_listener_waiting", where] == 4
    assert found["aiordma_listener_unaccepted", where] == 5


def test_connections_have_series_of_their_own_only_if_asked() -> None:
    assert not any("connection_" in name for name, _ in scraped())
    found = scraped(each_connection=True)
    labels = (("number", "5"), ("peer", "192.0.2.7 port 18515"))
    assert found["aiordma_connection_waiting_messages", labels] == 3
    assert found["aiordma_connection_waiting_senders", labels] == 2
    assert found["aiordma_connection_pinned_bytes", labels] == 65536
    assert found["aiordma_connection_pinned_bytes", (("number", "9"), ("peer", ""))] == 0


def test_a_registry_scrapes_this_process() -> None:
    registry = CollectorRegistry()
    collector = register(registry)
    gc.collect()  # connections of other tests, without an adapter
    assert samples(generate_latest(registry).decode())["aiordma_open", (("kind", "streams"),)] == 0
    registry.unregister(collector)
    assert generate_latest(registry) == b""


def test_multiprocess_mode_is_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    register(CollectorRegistry())
    assert not caplog.records
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    register(CollectorRegistry())
    [line] = caplog.records
    assert (line.name, line.levelname) == ("aiordma.metrics", "WARNING")
    # Why: a scrape there asks no collector of the process.
    registry = CollectorRegistry()
    collector: Any = MultiProcessCollector  # has no types
    collector(registry, str(tmp_path))
    assert b"aiordma" not in generate_latest(registry)
