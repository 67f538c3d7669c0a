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

Connections whose peers are the same event loop, as the hellos of the peers say, form a `_Group`
(docs/adr/keepalive-groups.md).  The wheel looks at the group in place of its connections:

- A connection joins at the first look that finds a sign of life of its own.
- A sign of life on any connection of the group counts for all of them.
- Every second look, the group asks the next of its connections in line, a 64th of all.
- The group ends if nothing was heard in two looks, if a connection that was asked has not answered
  at the next look, or if a connection fails.  Then each of its connections is asked itself, and is
  given up as any other.  Those that answer form the next group.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import itertools
import math
import os
from collections.abc import Callable, Hashable
from typing import Any, Protocol, cast

from aiordma.errors import PeerSilentError
from aiordma.loop import registry
from aiordma.loop.timers import Timer, call_later, now

__all__ = ["Keepalive", "Wheel", "loop_id", "wheel_of"]

#: Ticks of an interval.
_TICKS = 8
#: Looks that one turn of the loop takes.
_AT_ONCE = 64
#: Questions of a group until each of its connections had its turn.
_TURNS = 64


class Peer(Protocol):
    """A connection or a stream, as its keepalive sees it."""

    def _was_alive(self) -> bool:
        """Whether the peer has given a sign of life since the last call."""

    def _on_interval(self, *, silent: bool) -> None:
        """An interval is over, `silent` if nothing of the peer arrived in it: ask the peer."""

    def _give_up(self, cause: BaseException) -> None:
        """The peer does not act any more."""


class GroupedPeer(Peer, Protocol):
    """A connection that may be one of a group."""

    def _show_life_to(self, group: bytearray | None) -> None:
        """Have signs of life of the peer set the first byte of `group`, too; None: of none."""


class _Due(Protocol):
    """An entry of a wheel."""

    def _look(self, tick: int) -> None:
        """The tick has come."""


def loop_id(loop: asyncio.AbstractEventLoop) -> bytes:
    """The random number by which hellos name this loop, 8 bytes."""
    return registry.lasting("loop id", functools.partial(os.urandom, 8), loop)


class Wheel:
    """The looks that are due, of all connections and streams of a loop with the same interval.

    Args:
        loop: The loop.
        interval: Seconds.

    Attributes:
        step_s: Seconds between two ticks; tick n is at n times as many seconds of `now`.
        groups: The groups that take connections, by the keys of these.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, interval: float) -> None:
        self._loop = loop
        self.step_s = interval / _TICKS
        self.groups: dict[Hashable, _Group] = {}
        self._due: dict[int, dict[_Due, None]] = {}  # by tick
        self._timer: Timer | None = None
        self._tick = 0  # of the timer

    def tick(self) -> int:
        """The last tick that has come."""
        return int(now() / self.step_s)

    def begin(self, entry: _Due) -> int:
        """Look for the first time, an interval from now; returns the tick."""
        tick = math.ceil(now() / self.step_s) + _TICKS
        if (due := self._due.get(tick)) is not None and self._timer is not None:
            due[entry] = None  # the timer is at this tick, or before it
        else:
            self.add(entry, tick)
        return tick

    def add(self, entry: _Due, tick: int) -> None:
        """Look at this tick."""
        self.add_all({entry: None}, tick)

    def add_all(self, entries: dict[Any, None], tick: int) -> None:
        """Look at all of them at this tick."""
        self._due.setdefault(tick, {}).update(entries)
        if self._timer is None or tick < self._tick:
            self._arm()

    def discard(self, entry: _Due, tick: int) -> None:
        """Do not look at this tick.  In any thread."""
        if (due := self._due.get(tick)) is not None:
            due.pop(entry, None)

    def _arm(self) -> None:
        self.close()
        self._due = {tick: due for tick, due in self._due.items() if due}
        if self._due:
            self._tick = min(self._due)
            delay = self._tick * self.step_s - now()
            self._timer = call_later(self._loop, delay, self._turn)

    def _turn(self) -> None:
        due = self._due[self._tick]
        tick = max(self._tick, self.tick())
        try:
            for _ in range(_AT_ONCE):
                try:
                    entry = due.popitem()[0]
                except KeyError:
                    break
                entry._look(tick)
        finally:
            self._arm()

    def close(self) -> None:
        """Look no more: the last connection has gone.  In any thread."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()


def wheel_of(loop: asyncio.AbstractEventLoop, interval: float) -> tuple[Wheel, Callable[[], None]]:
    """Return the wheel of a loop for an interval of so many seconds, and its release."""
    key = "keepalive", interval
    return registry.acquire(key, functools.partial(Wheel, loop, interval), loop)


class _Group:
    """Connections whose peers are the same event loop.

    Args:
        wheel: Theirs.
        key: In the wheel's table.
        late: Whether the peer asks first.
        tick: Of the sign of life that the first of them has found.

    Attributes:
        sign: The first byte is set by every sign of life, of any of the connections.
        since: The tick of the last look that found a sign of life.
        ended: The tick at which the group ended; None before.
    """

    __slots__ = (
        "_asked", "_key", "_late", "_line", "_silent", "_tick", "_wheel", "ended", "sign", "since",
    )  # fmt: skip

    def __init__(self, wheel: Wheel, key: Hashable, tick: int, *, late: bool) -> None:
        self._wheel = wheel
        self._key = key
        self._late = late
        self._line: dict[Keepalive, None] = {}  # the next to be asked is the first
        self._asked: list[Keepalive] | None = None  # at the last look, if that was a turn
        self._silent = 0  # looks without a sign of life
        self.sign = bytearray(1)
        self.since = tick
        self.ended: int | None = None
        wheel.groups[key] = self
        # A peer on the same machine has the same ticks, and mostly the same looks: its questions
        # come between two looks of this side, and not now before a look and now behind it.
        self._next(tick + late * _TICKS // 2)

    def _next(self, tick: int) -> None:
        self._tick = tick + _TICKS
        self._wheel.add(self, self._tick)

    def add(self, keepalive: Keepalive, tick: int) -> None:
        """Take a connection, which has found a sign of life at this tick."""
        self._line[keepalive] = None
        self._silent, self.since = 0, tick

    def discard(self, keepalive: Keepalive) -> None:
        """A connection has ended.  In any thread."""
        self._line.pop(keepalive, None)
        if self.ended is not None:
            self._wheel.discard(keepalive, self.ended)

    def _look(self, tick: int) -> None:
        if not self._line:
            self._leave()
            return
        self._silent += 1
        if self.sign[0]:
            self.sign[0] = 0
            self._silent, self.since = 0, tick
        asked, self._asked = self._asked, None
        if self._silent > 1 or not all(keepalive.answered() for keepalive in asked or ()):
            self.end(tick)
            return
        self._next(tick)
        if asked is None:
            self._ask()

    def _ask(self) -> None:
        """Have the next in line ask.

        If the peer asks, only those ask that it has not asked since their last turn.
        """
        self._asked = []
        for keepalive in list(itertools.islice(self._line, -(-len(self._line) // _TURNS))):
            if self._line.pop(keepalive, keepalive) is None:  # unless it has just ended
                self._line[keepalive] = None
                if not (self._late and keepalive.answered()):
                    self._asked.append(keepalive)
                    keepalive.ask(self.since)

    def end(self, tick: int) -> None:
        """Have each of the connections ask for itself from this tick on."""
        if self.sign[0]:
            self.since = tick + 1  # not before that sign
        self._leave()
        self._wheel.discard(self, self._tick)
        self.ended = tick
        self._wheel.add_all(self._line, tick)

    def _leave(self) -> None:
        if self._wheel.groups.get(self._key) is self:
            del self._wheel.groups[self._key]


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
        peer_loop: The event loop of the peer, by its address and its number: connections with the
            same are asked in turns.  None: it is not known.
    """

    __slots__ = (
        "_group", "_interval", "_key", "_late", "_limit", "_loop", "_peer", "_release", "_setting",
        "_silent", "_since", "_tick", "_timer", "_wheel",
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
        peer_loop: Hashable = None,
    ) -> None:
        self._loop = loop
        self._interval = interval
        self._limit = limit
        self._setting = setting
        # There have to be two looks before the limit.
        patient = bool(interval and limit and limit >= 3 * interval)
        self._late = late and patient
        self._key = (peer_loop, limit, late) if patient and peer_loop is not None else None
        self._group: _Group | None = None
        self._silent = 0  # looks without a sign of life
        self._since = self._tick = 0  # of the last look that found one; of the next look
        self._peer: Peer | None = None
        self._timer: Timer | None = None
        self._release: Callable[[], None] | None = None

    def start(self, peer: Peer) -> None:
        """The stream is there."""
        if (interval := self._interval) is None:
            return
        self._wheel, self._release = wheel_of(self._loop, interval)
        self._peer = peer
        self._tick = self._wheel.begin(self)
        self._since = self._tick - _TICKS

    def take_over(self, peer: Peer, wheel: Wheel, first: int, tick: int) -> None:
        """Go on for a connection that has stood in the wheel itself, until its first look.

        Args:
            peer: The connection.
            wheel: Its wheel, which the caller releases.
            first: The tick for which it stood there.
            tick: The tick that has come.
        """
        self._wheel, self._peer = wheel, peer
        self._tick, self._since = first, first - _TICKS
        self._look(tick)

    def _look(self, tick: int) -> None:
        peer = self._peer
        if peer is None:
            return
        if self._group is not None:
            self._leave(self._group)
        elif not peer._was_alive():
            self._silent += 1
        else:
            self._silent, self._since = 0, tick
            if self._key is not None:
                self._join(tick)
                return
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

    def _join(self, tick: int) -> None:
        """Leave the next questions to the group."""
        group = self._wheel.groups.get(self._key)
        if group is None:
            group = _Group(self._wheel, self._key, tick, late=self._late)
        self._group = group
        group.add(self, tick)
        cast("GroupedPeer", self._peer)._show_life_to(group.sign)

    def _leave(self, group: _Group) -> None:
        """Ask at this look: the group has ended."""
        self._group = None
        peer = cast("GroupedPeer", self._peer)
        peer._show_life_to(None)
        # Alive some time ago, perhaps by the answer to its own question, which the group has not
        # looked at yet; the group knows when at the latest.
        alive = peer._was_alive()
        if alive or not self._silent:
            self._since = group.since
        self._silent = 1 + self._late

    def ask(self, since: int) -> None:
        """For the group: ask the peer, which has given a sign of life at the tick `since`."""
        self._silent, self._since = 1, since
        if (peer := self._peer) is not None:
            peer._was_alive()
            peer._on_interval(silent=True)

    def answered(self) -> bool:
        """For the group: whether a sign of life has come since the last call, or the last `ask`.

        True also of a connection that has ended.
        """
        peer = self._peer
        if peer is not None and not peer._was_alive():
            return False
        self._silent = 0
        return True

    def failed(self) -> None:
        """The connection has broken: the others of its group ask now whether the peer is there."""
        if (group := self._group) is not None and group.ended is None:
            group.end(self._wheel.tick())

    def _silence(self, seconds: float) -> PeerSilentError:
        hint = f"{PeerSilentError.hint} {self._setting} is the limit"
        text = f"nothing heard from the peer for {seconds:.0f} s ({hint})"
        error = PeerSilentError(errno.ETIMEDOUT, text)
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
                give_up(PeerSilentError(errno.ETIMEDOUT, text))
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
            if self._group is not None:
                self._group.discard(self)
            else:
                self._wheel.discard(self, self._tick)
            if self._release is not None:
                self._release()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
