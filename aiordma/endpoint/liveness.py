"""Liveness: notices a peer that has gone silent.

The adapter acknowledges messages of a program that has stopped, and does nothing at all on an idle
connection; so the question goes to the program.  After `keepalive_s` without a sign of life a
PING is sent, one at a time; a peer that stays silent for `idle_timeout_s` is given up.  A dead host
shows earlier, because the PING itself is not acknowledged.

A peer of a raw connection knows no question.  It is given up when no message of it has come for
`raw_idle_timeout_s`, if that is set.

Messages, DONE and a PONG that was asked for are signs of life.  CREDIT is none, nor is a PING while
this side's own is not answered: a peer could send them for ever, although nothing gets through to
it.
"""

from __future__ import annotations

import errno
from collections.abc import Callable

from aiordma.endpoint.config import ConnectionConfig
from aiordma.endpoint.link import Link
from aiordma.endpoint.receiver import Receiver
from aiordma.errors import ConnectTimeoutError
from aiordma.loop.timers import Timer, call_later, now

__all__ = ["Liveness"]


def _silent(seconds: float, kind: str) -> ConnectTimeoutError:
    hint = (
        "is its event loop blocked, as by time.sleep() or a debugger, has its host stopped, or is "
        f"the wire cut? {kind}idle_timeout_s of this side's ConnectionConfig is the limit"
    )
    text = f"nothing heard from the peer for {seconds:.0f} s ({hint})"
    error = ConnectTimeoutError(errno.ETIMEDOUT, text)
    error.hint = hint
    return error


class Liveness:
    """The timer of one connection.

    Args:
        link: What fails when the peer is silent.
        receiver: Tells whether anything was heard.
        config: Times.
        ping: Sends a PING.
    """

    __slots__ = (
        "_interval", "_limit", "_link", "_ping", "_pinged", "_raw", "_receiver", "_silent_since",
        "_timer",
    )  # fmt: skip

    def __init__(
        self, link: Link, receiver: Receiver, config: ConnectionConfig, ping: Callable[[], None]
    ) -> None:
        self._link = link
        self._receiver = receiver
        self._ping = ping
        self._raw = config.raw
        self._pinged = config.raw  # never asked
        self._silent_since = now()
        self._timer: Timer | None = None
        limit = config.raw_idle_timeout_s if config.raw else config.idle_timeout_s
        if limit is not None:
            self._limit = limit
            # However short the patience, the peer is asked before it is given up.
            self._interval = limit / 4 if config.raw else min(config.keepalive_s, limit / 2)
            self._arm()

    def _arm(self) -> None:
        self._timer = call_later(self._link.loop, self._interval, self._tick)

    def _tick(self) -> None:
        if self._link.closed or self._link.failure is not None:
            return
        at = now()
        if self._receiver.heard:
            self._receiver.heard = False
            self._silent_since = at
        elif not self._pinged:
            self._pinged = True
            self._ping()
        elif at - self._silent_since >= self._limit:
            self._link.fail(_silent(at - self._silent_since, "raw_" if self._raw else ""))
            return
        self._arm()

    @property
    def asking(self) -> bool:
        """Whether a PING is not answered."""
        return self._pinged

    def ponged(self) -> None:
        """The PING was answered."""
        self._pinged = False

    def stop(self) -> None:
        """End of the connection."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
