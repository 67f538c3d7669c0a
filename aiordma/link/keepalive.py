"""The keepalive: regular checks that detect a silent peer of a connection or stream.

An adapter sends nothing on an idle connection, and it acknowledges messages even if the program on
its host has stopped.  So a peer that has been silent is probed, and the connection is given up if
the silence lasts too long.  The protocol decides how to probe, and what counts as a sign of life:

- A connection of messages sends a PING, which the peer's library answers; one is outstanding at a
  time.  Messages, DONE frames and the answering PONG are signs of life.  A CREDIT frame is not, nor
  is the peer's PING while this side's own is unanswered: the peer could go on sending those forever
  although nothing of this side reaches it.  If the host is dead, that is detected earlier, because
  not even the adapter acknowledges the PING.
- A PING shows both sides that the other is alive.  So the accepting side waits for one more check
  before it sends its own; by then the connecting side has usually sent one.
- A raw connection cannot probe.  If there is a limit, its peer is given up when no message has
  arrived for that long.
- A stream probes the peer's adapter with an empty RDMA WRITE, which the adapter acknowledges.  To
  show that its program is alive, each side repeats its credit limit four times within the time
  limit.

Waking a loop costs more than checking a connection.  So all connections of a loop with the same
interval share a timer wheel with eight slots.  A connection keeps the slot in which it began, which
spreads the checks over the interval.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Protocol

from aiordma.error_words import CASE_HINTS
from aiordma.errors import ConnectionLostError, silent_error
from aiordma.loop import registry
from aiordma.loop.timers import Timer, call_later, now

__all__ = ["Keepalive", "Wheel", "wheel_of"]

#: How many ticks of the wheel an interval has.
_TICKS = 8
#: How many connections are checked in one iteration of the loop.
_AT_ONCE = 64


class Peer(Protocol):
    """What the keepalive needs to know of a connection or stream."""

    def _was_alive(self) -> bool:
        """Whether there was a sign of life since the last call."""

    def _on_interval(self, *, silent: bool) -> None:
        """Called after each interval; if the peer was `silent`, this is the time to probe it."""

    def _give_up(self, cause: BaseException) -> None:
        """End the connection, because the peer has been silent for too long."""


class Wheel:
    """The checks that are due, for all connections and streams of a loop with the same interval.

    Args:
        loop: The loop.
        interval: Seconds between two checks of a connection.

    Attributes:
        step_s: Seconds between two ticks.  Tick n is due at `n * step_s`, in seconds of `now()`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, interval: float) -> None:
        self._loop = loop
        self.step_s: float = interval / _TICKS
        self._due: dict[int, dict[Keepalive, None]] = {}  # by tick
        self._timer: Timer | None = None
        self._timer_tick = 0

    def add_first(self, keepalive: Keepalive) -> int:
        """Schedule the first check, an interval from now, and return its tick."""
        tick = math.ceil(now() / self.step_s) + _TICKS
        self.add(keepalive, tick)
        return tick

    def add(self, keepalive: Keepalive, tick: int) -> None:
        """Schedule a check for a tick."""
        self._due.setdefault(tick, {})[keepalive] = None
        if self._timer is None or tick < self._timer_tick:
            self._arm()

    def discard(self, keepalive: Keepalive, tick: int) -> None:
        """Cancel the check at a tick.  May be called in any thread."""
        if (due := self._due.get(tick)) is not None:
            due.pop(keepalive, None)

    def _arm(self) -> None:
        self.close()
        self._due = {tick: due for tick, due in self._due.items() if due}
        if self._due:
            self._timer_tick = min(self._due)
            delay = self._timer_tick * self.step_s - now()
            self._timer = call_later(self._loop, delay, self._turn)

    def _turn(self) -> None:
        due = self._due[self._timer_tick]
        tick = max(self._timer_tick, int(now() / self.step_s))
        try:
            for _ in range(_AT_ONCE):
                try:
                    keepalive = due.popitem()[0]
                except KeyError:
                    break
                keepalive._check(tick)
        finally:
            self._arm()

    def close(self) -> None:
        """Stop the timer, because the last connection is gone.  May be called in any thread."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()


def wheel_of(
    interval: float, loop: asyncio.AbstractEventLoop | None = None
) -> tuple[Wheel, Callable[[], None]]:
    """Return the wheel of `loop`, or of the running loop, for an interval, and its release."""
    loop = loop or asyncio.get_running_loop()
    return registry.acquire(("keepalive", interval), lambda: Wheel(loop, interval), loop)


class Keepalive:
    """The keepalive of one connection or stream.

    It refers to the connection between `start` and `stop`.

    Args:
        loop: The loop of the connection.
        interval: Seconds between two checks; None for no keepalive.
        limit: Seconds of silence after which the peer is given up, but only if it was probed
            before: after a loop has been blocked for long, the peer still gets a chance to answer.
            None for no limit.
        setting: The name of the setting for the limit, for the text of the error.
        late: Whether to probe one check later, because the peer is expected to do so first.
    """

    __slots__ = (
        "_interval", "_late", "_limit", "_loop", "_peer", "_release", "_setting", "_silent",
        "_since", "_tick", "_timer", "_wheel",
    )  # fmt: skip

    _wheel: Wheel

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
        # A late probe has to leave time for an answer before the limit.
        self._late = late and bool(interval and limit and limit >= 3 * interval)
        self._silent = 0  # checks in a row without a sign of life
        self._since = 0  # the tick of the last check that found one
        self._tick = 0  # the tick of the next check
        self._peer: Peer | None = None
        self._timer: Timer | None = None
        self._release: Callable[[], None] | None = None

    def start(self, peer: Peer, wheel: Wheel | None = None) -> None:
        """Begin to check `peer`, which is open now.

        Args:
            peer: The connection or stream.
            wheel: The wheel of the interval, if the caller holds it; None: it is acquired here.
        """
        if self._interval is None:
            return
        if wheel is None:
            wheel, self._release = wheel_of(self._interval, self._loop)
        self._wheel = wheel
        self._peer = peer
        self._tick = self._wheel.add_first(self)
        self._since = self._tick - _TICKS

    def _check(self, tick: int) -> None:
        peer = self._peer
        if peer is None:
            return
        if peer._was_alive():
            self._silent, self._since = 0, tick
        else:
            self._silent += 1
        seconds = (tick - self._since) * self._wheel.step_s
        asked = self._silent > 1 + self._late
        # A hundredth of a tick less, because multiples of `step_s` are rounded.
        if asked and self._limit is not None and seconds > self._limit - self._wheel.step_s / 100:
            self.stop()
            peer._give_up(self._silence_error(seconds))
            return
        self._tick = tick + _TICKS
        self._wheel.add(self, self._tick)
        peer._on_interval(silent=self._silent > self._late)

    def _silence_error(self, seconds: float) -> ConnectionLostError:
        hint = f"{CASE_HINTS['silent']} {self._setting} is the limit"
        error = silent_error(f"nothing heard from the peer for {seconds:.0f} s ({hint})")
        error.hint = hint
        return error

    def expect_progress(
        self, progress: Callable[[], int], seconds: float, give_up: Callable[[BaseException], None]
    ) -> None:
        """While the connection is closing, give the peer up if there is no progress.

        Args:
            progress: Returns a number that grows with what is sent and what arrives.
            seconds: How long there may be no progress.
            give_up: Called with the error.
        """
        before = progress()

        def check() -> None:
            if progress() == before:
                text = f"closing: nothing has moved for {seconds} s"
                give_up(silent_error(text))
            else:
                self.expect_progress(progress, seconds, give_up)

        self._call_later(seconds, check)

    def _call_later(self, seconds: float, function: Callable[[], None]) -> None:
        self.stop()
        self._timer = call_later(self._loop, seconds, function)

    def stop(self) -> None:
        """Stop, because the connection ends.  Idempotent.  May be called in any thread."""
        if self._peer is not None:
            self._peer = None
            self._wheel.discard(self, self._tick)
            if self._release is not None:
                self._release()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
