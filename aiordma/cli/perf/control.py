"""The conversation beside the measurement: JSON in messages of an ordinary connection.

The client says which test is wanted and when, the server answers; one question at a time.  While a
measurement runs nothing is said.
"""

from __future__ import annotations

import contextlib
import errno
import json
import resource
from collections.abc import Iterator
from typing import Any

from aiordma.cli.foreign import parsed, shown
from aiordma.cli.perf.report import Usage
from aiordma.endpoint.config import ConnectionConfig
from aiordma.endpoint.connection import Connection
from aiordma.errors import ConnectionEndedError, RdmaTimeoutError
from aiordma.link.limits import ListenerLimits
from aiordma.loop.timers import timeout

__all__ = ["CONFIG", "LIMITS", "LIMIT_S", "Control", "PerfError", "foreign", "processor_time"]

#: Seconds for steps whose limit no plan says.  Generous: the clock of an emulated machine jumps.
LIMIT_S = 300.0
#: Of all connections here: they are silent while others are measured, or watched by limits.
CONFIG = ConnectionConfig(keepalive_s=LIMIT_S / 2, idle_timeout_s=LIMIT_S)
#: Of all listeners here.
LIMITS = ListenerLimits(handshake_timeout_s=LIMIT_S)

_NO_PERF = "the other side is no aiordma perf"
_MOST_WORDS = 1000


class PerfError(Exception):
    """The test could not be run, or broke; the text is for people."""


def processor_time() -> Usage:
    """The processor time of this process until now (`getrusage(2)`)."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return Usage(usage.ru_utime, usage.ru_stime)


@contextlib.contextmanager
def foreign(words: Any) -> Iterator[None]:
    """For a block that reads the other side's words: raises PerfError if they are wrong."""
    try:
        yield
    except (ValueError, TypeError, KeyError, IndexError) as exc:
        raise PerfError(f"{_NO_PERF}: it says {shown(words)} ({exc!r:.80})") from exc


class Control:
    """One side of the conversation.

    Args:
        conn: The connection.
        limit_s: Seconds for one answer.
    """

    def __init__(self, conn: Connection, limit_s: float) -> None:
        self.conn = conn
        self.limit_s = limit_s

    async def say(self, **words: Any) -> None:
        """Send one object."""
        await self.conn.send(json.dumps(words).encode())

    async def hear(self, *keys: str, limit_s: float | None = None) -> dict[str, Any]:
        """The next object, which has all of `keys`.

        Args:
            keys: Keys of the object; if it has an error instead, the error is raised.
            limit_s: Seconds instead of those of this conversation.

        Raises:
            PerfError: The other side has failed, or speaks of something else.
            TimeoutError: Nothing came.
        """
        seconds = self.limit_s if limit_s is None else limit_s
        try:
            async with timeout(seconds):
                with await self.conn.recv() as message:
                    text = bytes(message)
        except ConnectionEndedError:
            msg = "the other side has ended the test"
            raise PerfError(msg) from None
        except TimeoutError as exc:
            msg = f"the other side of the test has said nothing for {seconds:g} s"
            raise RdmaTimeoutError(errno.ETIMEDOUT, msg) from exc
        try:
            words = parsed(text)
        except ValueError:
            words = None
        if isinstance(words, dict) and isinstance(error := words.get("error"), str) and error:
            raise PerfError(error[:_MOST_WORDS])
        if not isinstance(words, dict) or not all(key in words for key in keys):
            raise PerfError(f"{_NO_PERF}: it says {text[:80]!r}")
        return words

    async def ask(self, *keys: str, limit_s: float | None = None, **words: Any) -> dict[str, Any]:
        """Send a message, and return the answer."""
        await self.say(**words)
        return await self.hear(*keys, limit_s=limit_s)
