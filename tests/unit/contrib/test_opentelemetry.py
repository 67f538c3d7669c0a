"""Instruments and spans, by OpenTelemetry's own SDK."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

import aiordma
from aiordma.contrib import opentelemetry
from aiordma.contrib.opentelemetry import instrument
from aiordma.metrics import Operation
from tests.inside.metrics import show_the_same_for

from ..metrics.seen import TOTALS, seen


class Telemetry:
    """A program's providers, which keep all in memory."""

    def __init__(self) -> None:
        self._reader = InMemoryMetricReader()
        self._spans = InMemorySpanExporter()
        self.meter_provider = MeterProvider([self._reader])
        self.tracer_provider = TracerProvider()
        self.tracer_provider.add_span_processor(SimpleSpanProcessor(self._spans))
        self.instrumentation = instrument(
            meter_provider=self.meter_provider, tracer_provider=self.tracer_provider
        )

    def points(self) -> dict[tuple[str, str], Any]:
        data = self._reader.get_metrics_data()
        if data is None:
            return {}
        return {
            (metric.name, "".join(map(str, (point.attributes or {}).values()))): point.value
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            for point in metric.data.data_points
            if not hasattr(point, "bucket_counts") and hasattr(point, "value")
        }

    def spans(self) -> tuple[ReadableSpan, ...]:
        return self._spans.get_finished_spans()

    def close(self) -> None:
        self.instrumentation.close()
        self.meter_provider.shutdown()
        self.tracer_provider.shutdown()


@pytest.fixture
def telemetry() -> Iterator[Telemetry]:
    made = Telemetry()
    yield made
    made.close()


def test_instruments_show_a_snapshot(telemetry: Telemetry, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []

    def take() -> Any:
        taken.append(1)
        return seen()

    monkeypatch.setattr(opentelemetry, "snapshot", take)
    show_the_same_for(monkeypatch, 60)  # a collection may take long on a busy machine
    found = telemetry.points()
    assert len(taken) == 1, "one snapshot serves all instruments"
    assert found["aiordma.messages", "sent"] == TOTALS.messages_sent
    assert found["aiordma.message.bytes", "received"] == TOTALS.bytes_received
    assert found["aiordma.stream.bytes", "sent"] == TOTALS.stream_bytes_sent
    assert found["aiordma.datagrams", "received"] == TOTALS.datagrams_received
    assert found["aiordma.datagram.bytes", "sent"] == TOTALS.datagram_bytes_sent
    for name, value in (
        ("one_sided.read", TOTALS.bytes_read),
        ("one_sided.written", TOTALS.bytes_written),
        ("atomics", TOTALS.atomics),
        ("connects", TOTALS.connects),
        ("connects.failed", TOTALS.connects_failed),
        ("connects.retried", TOTALS.connect_retries),
        ("accepts", TOTALS.accepts),
        ("refused", TOTALS.refused),
        ("dropped", TOTALS.dropped),
        ("connections.lost", TOTALS.connections_lost),
        ("streams.lost", TOTALS.streams_lost),
        ("datagrams.dropped", TOTALS.datagrams_dropped),
        ("datagrams.ignored", TOTALS.datagrams_ignored),
    ):
        assert found[f"aiordma.{name}", ""] == value, name
    assert found["aiordma.open", "connections"] == 2
    assert found["aiordma.open", "datagrams"] == 1
    assert found["aiordma.pinned", "streams"] == 4096
    assert found["aiordma.pinned", "datagrams"] == 8192
    assert found["aiordma.budget.used", "growth"] == 3
    assert found["aiordma.budget", "growth"] == 200
    assert ("aiordma.budget", "listeners") not in found


def test_operations_are_spans(telemetry: Telemetry) -> None:
    tracer = telemetry.tracer_provider.get_tracer("program")
    with tracer.start_as_current_span("work"), Operation("request", {"rpc.method": "get"}):
        pass
    with pytest.raises(aiordma.ConnectionLostError), Operation("reply"):
        raise aiordma.ConnectionLostError(104, "gone")
    request, work, reply = telemetry.spans()
    assert (request.name, request.kind) == ("aiordma request", SpanKind.CLIENT)
    assert dict(request.attributes or {}) == {"rpc.method": "get"}
    assert request.parent is not None
    assert work.context is not None
    assert request.parent.span_id == work.context.span_id
    assert request.status.status_code is StatusCode.UNSET
    assert (reply.name, reply.kind) == ("aiordma reply", SpanKind.SERVER)
    assert reply.status.status_code is StatusCode.ERROR
    assert (reply.attributes or {})["error.type"] == "ConnectionLostError"
    assert [event.name for event in reply.events] == ["exception"]


async def test_a_connect_that_fails_is_a_span(telemetry: Telemetry) -> None:
    with pytest.raises(OSError, match=r".+"):
        await aiordma.connect("127.0.0.1", 9, timeout=5)
    (span,) = telemetry.spans()
    assert (span.name, span.kind) == ("aiordma connect", SpanKind.CLIENT)
    attributes = dict(span.attributes or {})
    assert (attributes["server.address"], attributes["server.port"]) == ("127.0.0.1", 9)
    assert span.status.status_code is StatusCode.ERROR


def test_after_the_end_nothing_is_observed(telemetry: Telemetry) -> None:
    telemetry.instrumentation.close()
    telemetry.instrumentation.close()
    with Operation("request"):
        pass
    assert not telemetry.spans()
    assert not telemetry.points()
