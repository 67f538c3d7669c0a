"""The lines in the log that a source may cause: so many in a period, others' unharmed."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from aiordma.link.log_share import LogShare

if TYPE_CHECKING:
    import pytest


def test_a_source_has_its_share_and_others_have_theirs(caplog: pytest.LogCaptureFixture) -> None:
    share = LogShare("broken rules")
    assert sum(share.may_log(("192.0.2.1", port)) for port in range(10_000)) == 20
    # A host has all addresses of its IPv6 network.
    assert sum(share.may_log((f"2001:db8::{n:x}", 1)) for n in range(1, 1000)) == 20
    assert sum(share.may_log(None) for _ in range(100)) == 20
    assert share.may_log(("192.0.2.2", 1))
    words = [record.getMessage().partition(" are ")[0] for record in caplog.records]
    sources = ("192.0.2.1", "2001:db8::/64", "")
    assert words == [f"further broken rules for {source}" for source in sources]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
