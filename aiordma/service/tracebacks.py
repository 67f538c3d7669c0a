"""Tracebacks: decides which errors of handlers are logged, so many of each source.

A client can make a handler raise with each request, and a traceback is larger than a request: a
client that does so on purpose would fill the disk, and hide the exceptions that others cause.
"""

from __future__ import annotations

import time
from collections import OrderedDict

from aiordma.endpoint.connection import Connection
from aiordma.link.source import source_of
from aiordma.logs import log_of

__all__ = ["Tracebacks"]

_log = log_of()
_MOST = 20
_PERIOD_S = 10.0
_MOST_SOURCES = 1024


class Tracebacks:
    """The errors of the handlers of one server."""

    def __init__(self) -> None:
        # When the period of a source began, and the errors since; the oldest first.
        self._periods: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def may_log(self, connection: Connection) -> bool:
        """Whether to log an error of a handler; warns when the source has caused too many.

        Args:
            connection: To the client that has caused it.
        """
        peer = connection.get_extra_info("peername")
        source = source_of(peer[0] if peer else None)
        began, count = self._periods.get(source, (0.0, 0))
        now = time.monotonic()
        if not count or now - began >= _PERIOD_S:
            began, count = now, 0
            self._periods.pop(source, None)
        self._periods[source] = began, count + 1
        if len(self._periods) > _MOST_SOURCES:
            self._periods.popitem(last=False)
        if count == _MOST:
            words = "further errors of handlers for %s are not logged for %.0f s"
            _log.warning(words, source, began + _PERIOD_S - now)
        return count < _MOST
