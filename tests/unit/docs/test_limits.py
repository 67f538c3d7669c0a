"""docs/limits.md has the settings and their defaults, and each test of a limit exists."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

from aiordma import ConnectionConfig, DatagramConfig, ListenerLimits, StreamConfig
from aiordma.link import limits
from tests.pages import DOCS, ROOT

PAGE = " ".join((DOCS / "limits.md").read_text().split())
TESTS = (DOCS / "contributing/limits.md").read_text()


@pytest.mark.parametrize("setting", [field.name for field in fields(ListenerLimits)])
def test_every_limit_of_a_listener_is_on_the_page(setting: str) -> None:
    assert f"`ListenerLimits.{setting}`" in PAGE + (DOCS / "requests.md").read_text()


def test_the_defaults_are_those_of_the_settings() -> None:
    of_listener, messages = ListenerLimits(), ConnectionConfig()
    streams, datagrams = StreamConfig(), DatagramConfig()
    tls = limits.MOST_TLS_HANDSHAKES
    for said in (
        f"{of_listener.max_connections:,} of a listener",
        f"{of_listener.max_connections_per_source:,} of one source",
        f"{of_listener.max_half_open} of them, and of one source {of_listener.max_half_open // 2}",
        f"{of_listener.handshake_timeout_s:.0f} seconds each",
        f"{of_listener.max_large_message_bytes >> 20} MiB of a listener",
        f"Each is refused after {limits.PATIENCE_S:.0f} seconds",
        f"{tls} of them, and of one source {tls // 2}",
        f"{limits.PRESSED_TLS_S:.0f} seconds while others wait",
        f"{messages.idle_timeout_s:.0f} seconds without an answer",
        f"{messages.rendezvous_window} of a connection",
        f"{messages.max_message_size >> 20} MiB each",
        f"{messages.receive_buffer_size >> 20} MiB of a connection",
        f"{streams.keepalive_s:.0f} seconds without an acknowledgement",
        f"{streams.idle_timeout_s:,.0f} seconds without a word",
        f"{(streams.receive_buffer_size + streams.send_buffer_size) / 1e6:.1f} MB in all",
        f"{datagrams.recv_depth}, `DatagramConfig.recv_depth`",
        f"{datagrams.max_buffer_size >> 20} MiB, `DatagramConfig.max_buffer_size`",
        f"{datagrams.resolve_timeout_s:.0f} seconds from the moment",
    ):
        assert said in PAGE, said
    assert messages.raw_idle_timeout_s is messages.stall_timeout_s is None


def test_the_page_for_users_names_no_test() -> None:
    assert not re.search(r"\btest_\w+|\btests/", PAGE)


def test_the_tests_of_the_limits_exist() -> None:
    sources = "".join(path.read_text() for path in sorted((ROOT / "tests").rglob("test_*.py")))
    named = re.findall(r"`(test_\w+)`", TESTS)
    assert len(named) > 45
    assert [name for name in named if not re.search(rf"def {name}\b", sources)] == []
