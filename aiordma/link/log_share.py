"""LogShare: limits how many log lines each source of peers can cause.

A client can make a handler raise with each request, and break the rules with each connection.  A
line is as large as that, and a traceback is larger, so a client that does so on purpose would fill
the disk, and hide the lines that others cause.
"""

from __future__ import annotations

import time
from collections import OrderedDict

from aiordma.cm.address import Address
from aiordma.link.source import source_of
from aiordma.logs import log_of

__all__ = ["DENIED", "VIOLATIONS", "LogShare"]

_log = log_of()
_MOST = 20
_PERIOD_S = 10.0
_MOST_SOURCES = 1024


class LogShare:
    """The lines of one kind, of a server or of the process.

    Args:
        what: The kind, for the last line of a source, such as "errors of handlers".
    """

    def __init__(self, what: str) -> None:
        self._what = what
        # When the period of a source began, and the lines since; the oldest first.
        self._periods: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def may_log(self, peer: Address | None) -> bool:
        """Whether to log a line; warns when the source has caused too many.

        Args:
            peer: Address of the peer that causes it.
        """
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
            words = "further %s for %s are not logged for %.0f s"
            _log.warning(words, self._what, source, began + _PERIOD_S - now)
        return count < _MOST


#: Of all connections and streams of the process: peers that break the rules, and peers that say
#: that this side has.
VIOLATIONS = LogShare("broken rules")
#: Of all listeners: clients that may not connect.
DENIED = LogShare("refused clients")
