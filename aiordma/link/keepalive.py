"""Keepalive: looks of a loop at its connections and streams, which notice silence.

The adapter does nothing at all on an idle connection, and acknowledges messages of a program that
has stopped.  So a silent peer is asked, and is given up when it stays silent for too long.  The
protocol decides how the peer is asked, and which messages are signs of life:

- A connection of messages asks the program, by a PING, one at a time.  Messages, DONE and a PONG
  that was asked for are signs of life.  CREDIT is none, nor is a PING while this side's own is not
  answered: a peer could send them for ever, although nothing gets through to it.  A dead host shows
  earlier, because the PING itself is not acknowledged.
- A PING is a sign of life for the side that answers, too.  So the accepting side looks once more
  before it asks: mostly the connecting side has asked by then, for both.
- A raw connection cannot ask: its peer is given up when no message has come for too long, if there
  is a limit.
- A stream asks the peer's adapter, which acknowledges a message without bytes; and so that no idle
  stream is given up, each side says a word four times in the limit that changes nothing.

To wake a loop costs more than all that is done for a connection then.  So the connections of a loop
share a wheel: an interval has eight ticks, at which the loop looks at all connections that are due,
and the questions are spread over the ticks, as the connections began.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import math
from collections.abc import Callable
from typing import Protocol

from aiordma.errors import ConnectTimeoutError
from aiordma.loop import registry
from aiordma.loop.timers import Timer, call_later, now

__all__ = ["Keepalive"]

#: Ticks of an interval.
_TICKS = 8
#: Looks that one turn of the loop takes.
_AT_ONCE = 64


class Peer(Protocol):
    """A connection or a stream, as its keepalive sees it."""

    def _was_alive(self) -> bool:
        """Whether the peer has given a sign of life since the last call."""

    def _on_interval(self, *, silent: bool) -> None:
        """An interval is over, `silent` if nothing of the peer arrived in it: ask the peer."""

    def _give_up(self, cause: BaseException) -> None:
        """The peer does not act any more."""


class _Wheel:
    """The looks that are due, of all connections and streams of a loop with the same interval.

    Args:
        loop: The loop.
        interval: Seconds.

    Attributes:
        step_s: Seconds between two ticks; tick n is at n times as many seconds of `now`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, interval: float) -> None:
        self._loop = loop
        self.step_s = interval / _TICKS
        self._due: dict[int, dict[Keepalive, None]] = {}  # by tick
        self._timer: Timer | None = None
        self._tick = 0  # of the timer

    def add(self, keepalive: Keepalive, tick: int) -> None:
        """Look at this tick."""
        self._due.setdefault(tick, {})[keepalive] = None
        if self._timer is None or tick < self._tick:
            self._arm()

    def discard(self, keepalive: Keepalive, tick: int) -> None:
        """Do not look at this tick.  In any thread."""
        if (due := self._due.get(tick)) is not None:
            due.pop(keepalive, None)

    def _arm(self) -> None:
        self.close()
        self._due = {tick: due for tick, due in self._due.items() if due}
        if self._due:
            self._tick = min(self._due)
            delay = self._tick * self.step_s - now()
            self._timer = call_later(self._loop, delay, self._turn)

    def _turn(self) -> None:
        due = self._due[self._tick]
        tick = max(self._tick, int(now() / self.step_s))
        try:
            for _ in range(_AT_ONCE):
                try:
                    keepalive = due.popitem()[0]
                except KeyError:
                    break
                keepalive._look(tick)
        finally:
            self._arm()

    def close(self) -> None:
        """Look no more: the last connection has gone.  In any thread."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()


class Keepalive:
    """The looks of one connection or stream.

    It refers to the connection while it runs, and not after `stop`.

    Args:
        loop: The connection's.
        interval: Seconds between two looks; None for never.
        limit: Seconds of silence after which the peer is given up, if it was asked at a look
            before: a loop that stood still has not looked.  None for never.
        setting: The name of the limit, for the text of the error.
        late: Whether a silent peer is asked a look later, because it asks first itself.
    """

    __slots__ = (
        "_interval", "_late", "_limit", "_loop", "_peer", "_release", "_setting", "_silent",
        "_since", "_tick", "_timer", "_wheel",
    )  # fmt: skip

    _wheel: _Wheel
    _release: Callable[[], None]

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        interval: float | None,
        limit: float | None,
        setting: str,
        *,
        late: bool = False,
    ) -> None:
        self._loop = loop
        self._interval = interval
        self._limit = limit
        self._setting = setting
        # There has to be a look between the question and the limit.
        self._late = bool(late and interval and limit and limit >= 3 * interval)
        self._silent = 0  # looks without a sign of life
        self._since = self._tick = 0  # of the last look that found one; of the next look
        self._peer: Peer | None = None
        self._timer: Timer | None = None

    def start(self, peer: Peer) -> None:
        """The connection is there."""
        if (interval := self._interval) is None:
            return
        self._wheel, self._release = registry.acquire(
            ("keepalive", interval), functools.partial(_Wheel, self._loop, interval), self._loop
        )
        self._peer = peer
        self._since = math.ceil(now() / self._wheel.step_s)
        self._tick = self._since + _TICKS
        self._wheel.add(self, self._tick)

    def _look(self, tick: int) -> None:
        peer = self._peer
        if peer is None:
            return
        self._silent += 1
        if peer._was_alive():
            self._silent, self._since = 0, tick
        seconds = (tick - self._since) * self._wheel.step_s
        asked = self._silent > 1 + self._late
        # A part of a tick less: ticks are multiples of a number that binary fractions round.
        if asked and self._limit is not None and seconds > self._limit - self._wheel.step_s / 100:
            self.stop()
            peer._give_up(self._silence(seconds))
            return
        self._tick = tick + _TICKS
        self._wheel.add(self, self._tick)
        peer._on_interval(silent=self._silent > self._late)

    def _silence(self, seconds: float) -> ConnectTimeoutError:
        hint = (
            "is its event loop blocked, as by time.sleep() or a debugger, has its host stopped, or "
            f"is the wire cut? {self._setting} is the limit"
        )
        text = f"nothing heard from the peer for {seconds:.0f} s ({hint})"
        error = ConnectTimeoutError(errno.ETIMEDOUT, text)
        error.hint = hint
        return error

    def expect_progress(
        self, progress: Callable[[], int], seconds: float, give_up: Callable[[BaseException], None]
    ) -> None:
        """Give the peer up if no byte or message moves for `seconds` while the connection closes.

        Args:
            progress: Counts the bytes or messages that were sent and that arrived.
            seconds: Without progress before the peer is given up.
            give_up: Called with the error.
        """
        before = progress()

        def look() -> None:
            if progress() == before:
                text = f"closing: nothing has moved for {seconds} s"
                give_up(ConnectTimeoutError(errno.ETIMEDOUT, text))
            else:
                self.expect_progress(progress, seconds, give_up)

        self._set(seconds, look)

    def _set(self, seconds: float, function: Callable[[], None]) -> None:
        self.stop()
        self._timer = call_later(self._loop, seconds, function)

    def stop(self) -> None:
        """End of the connection.  Idempotent.  In any thread."""
        if self._peer is not None:
            self._peer = None
            self._wheel.discard(self, self._tick)
            self._release()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
