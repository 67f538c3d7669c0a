"""A request to connect, without a device: what a refusal may carry, and that it is given once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from aiordma.endpoint.config import ConnectionConfig
from aiordma.endpoint.listener import ConnectRequest
from aiordma.errors import RdmaOSError
from aiordma.link.acceptor import Request

#: Private data of a refusal on every transport.
MOST = 148


class Asked:
    """A request, and what its client is answered."""

    def __init__(self, *, raw: bool) -> None:
        self.sent: list[bytes] = []
        self.closed = 0
        cm_id: Any = SimpleNamespace(_ends=lambda: (None, None), reject=self.sent.append)
        cm_id.close = self._close
        loop: Any = None
        limit: Any = None
        asked = Request(loop, cm_id, limit)
        asked.greeting = None if raw else SimpleNamespace(user_data=b"")
        listener: Any = SimpleNamespace(
            config=ConnectionConfig(raw=raw), _pending=[],
            _loop=SimpleNamespace(is_running=lambda: False),
        )  # fmt: skip
        self.request = ConnectRequest(listener, asked)

    def _close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("raw", [False, True])
def test_i05_a_refusal_that_is_too_long_leaves_the_request_open(raw: bool) -> None:
    """The connection manager would cut it off, or refuse to refuse."""
    for size in (MOST + 1, MOST + 2, 300):
        asked = Asked(raw=raw)
        with pytest.raises(ValueError, match="at most 148 bytes"):
            asked.request.reject(b"x" * size)
        assert (asked.sent, asked.closed) == ([], 0)
        asked.request.reject(b"x" * MOST)
        assert asked.sent == [b"x" * MOST]
        assert asked.closed == 1
        with pytest.raises(RdmaOSError):
            asked.request.reject()
