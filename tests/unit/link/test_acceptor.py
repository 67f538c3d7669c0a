"""Clients that are dropped in the middle of a handshake."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from aiordma.cm.connection_id import Stage
from tests.inside.link import acceptor_without_listener, ended_by_close


@pytest.mark.parametrize("closed", [False, True])
def test_a_handshake_that_has_ended_is_not_dropped_again(closed: bool) -> None:
    """Its place becomes free with its memory; its completion channel may be closed by then."""
    calls: list[str] = []
    completions = SimpleNamespace(sweep=lambda: calls.append("sweep"))
    side: Any = SimpleNamespace(closed=closed, completions=completions, peer_name=lambda: "peer")
    acceptor = acceptor_without_listener(lambda: None)
    assert acceptor.drop(side, lambda: calls.append("end"), lambda: False)
    assert calls == ([] if closed else ["sweep", "end"])
    assert acceptor.dropped == (not closed)


def test_a_client_that_was_told_of_its_connection_gets_it() -> None:
    """Also one that has acted: its handshake may be about to end."""
    stages = [Stage.REQUESTED, Stage.ACCEPTED, Stage.CONNECTED, Stage.DISCONNECTED]
    assert ended_by_close(stages) == [Stage.REQUESTED, Stage.DISCONNECTED]
