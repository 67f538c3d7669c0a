"""What the tests of pools share."""

from __future__ import annotations

import pytest

from tests.inside.service import pools_connect_by

from .pooled import Serve, Server


@pytest.fixture
def new_server(monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Makes a server, to which pools connect from then on."""

    def make() -> Server:
        server = Server()
        pools_connect_by(monkeypatch, server.connect)
        return server

    return make
