"""Keepalive: the timer of a connection or a stream, which notices silence.

The adapter does nothing at all on an idle connection, and acknowledges messages of a program that
has stopped.  So a silent peer is asked, and is given up when it stays silent for too long.  The
protocol decides how the peer is asked, and which messages are signs of life:

- A connection of messages asks the program, by a PING, one at a time.  Messages, DONE and a PONG
  that was asked for are signs of life.  CREDIT is none, nor is a PING while this side's own is not
  answered: a peer could send them for ever, although nothing gets through to it.  A dead host shows
  earlier, because the PING itself is not acknowledged.
- A raw connection cannot ask: its peer is given up when no message has come for too long, if there
  is a limit.
- A stream asks the peer's adapter, which acknowledges a message without bytes; and so that no idle
  stream is given up, each side says a word four times in the limit that changes nothing.
"""

from __future__ import annotations

import asyncio
import errno
import functools
from collections.abc import Callable
from typing import Protocol

from aiordma.errors import ConnectTimeoutError
from aiordma.loop.timers import Timer, call_later, now

__all__ = ["Keepalive"]


class Peer(Protocol):
    """A connection or a stream, as its timer sees it."""

    def _was_alive(self) -> bool:
        """Whether the peer has given a sign of life since the last call."""

    def _on_interval(self, *, silent: bool) -> None:
        """An interval is over, `silent` if nothing of the peer arrived in it: ask the peer."""

    def _give_up(self, cause: BaseException) -> None:
        """The peer does not act any more."""


class Keepalive:
    """The timer of one connection.

    It refers to the connection while it runs, and not after `stop`.

    Args:
        loop: The connection's.
        interval: Seconds between two looks; None for never.
        limit: Seconds of silence after which the peer is given up, if the interval before was
            silent, too: a loop that stood still has not looked.  None for never.
        setting: The name of the limit, for the text of the error.
    """

    __slots__ = ("_interval", "_limit", "_loop", "_setting", "_silent", "_since", "_timer")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        interval: float | None,
        limit: float | None,
        setting: str,
    ) -> None:
        self._loop = loop
        self._interval = interval
        self._limit = limit
        self._setting = setting
        self._silent = False
        self._since = 0.0
        self._timer: Timer | None = None

    def start(self, peer: Peer) -> None:
        """The connection is there."""
        self._since = now()
        self._arm(peer)

    def _arm(self, peer: Peer) -> None:
        if self._interval is not None:
            self._set(self._interval, functools.partial(self._look, peer))

    def _look(self, peer: Peer) -> None:
        silent = not peer._was_alive()
        if not silent:
            self._since = now()
        elif self._silent and self._limit is not None and now() - self._since >= self._limit:
            peer._give_up(self._silence(now() - self._since))
            return
        self._silent = silent
        peer._on_interval(silent=silent)
        self._arm(peer)

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
        """End of the connection.  Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
