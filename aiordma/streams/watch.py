"""Watch: the timer of a stream, which notices silence and a close that does not get on.

The adapter does nothing at all on an idle connection, so that a host that is gone shows only when
something is sent: after `keepalive_s` without a message its adapter is asked to acknowledge one
without bytes.  A program that has stopped still has an adapter that answers.  It is given up after
`idle_timeout_s` without a word of it, and so that no idle stream is, each side says a word four
times in that time that changes nothing.
"""

from __future__ import annotations

import errno
from collections.abc import Callable

from aiordma.errors import ConnectTimeoutError
from aiordma.loop.empty import nobody
from aiordma.loop.timers import Timer, call_later, now
from aiordma.streams.stream_config import StreamConfig
from aiordma.streams.stream_port import StreamPort

__all__ = ["Watch"]


class Watch:
    """The timer of one stream.

    Args:
        port: Asks the peer's adapter.
        config: Times.
        progress: Counts what has been sent and arrived.
        give_up: Ends the stream.
        show_life: Says a word that changes nothing.
    """

    __slots__ = (
        "_closing", "_config", "_give_up", "_port", "_progress", "_seen", "_show_life", "_shown",
        "_since", "_timer",
    )  # fmt: skip

    def __init__(
        self,
        port: StreamPort,
        config: StreamConfig,
        progress: Callable[[], int],
        give_up: Callable[[BaseException], None],
        show_life: Callable[[], None],
    ) -> None:
        self._progress = progress
        self._give_up = give_up
        self._show_life = show_life
        self._port = port
        self._config = config
        self._timer: Timer | None = None
        self._since = self._shown = now()
        self._seen = -1
        self._closing = False

    def start(self) -> None:
        """The connection is there."""
        self._since = self._shown = now()
        self._arm()

    def closing(self) -> None:
        """From now on something has to move every `close_timeout_s`."""
        self._closing = True
        self._seen = self._progress()
        self._since = now()
        self._arm()

    def stop(self) -> None:
        """End of the connection."""
        self._disarm()
        self._progress = self._give_up = self._show_life = nobody

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        interval = self._config.close_timeout_s if self._closing else self._port.plan.silence
        self._disarm()
        if interval is not None:
            self._timer = call_later(self._port.loop, interval, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if self._closing:
            progress = self._progress()
            if progress == self._seen:
                text = f"closing: nothing has moved for {self._config.close_timeout_s} s"
                self._give_up(ConnectTimeoutError(errno.ETIMEDOUT, text))
                return
            self._seen = progress
        elif self._port.state.heard:
            self._port.state.heard = False
            self._since = now()
        else:
            silence = now() - self._since
            limit = self._config.idle_timeout_s
            if limit is not None and silence >= limit:
                text = f"nothing heard from the peer for {silence:.0f} s"
                self._give_up(ConnectTimeoutError(errno.ETIMEDOUT, text))
                return
            if self._config.keepalive_s is not None:
                self._port.probe()
        if not self._closing:
            self._sign()
        self._arm()

    def _sign(self) -> None:
        limit = self._config.idle_timeout_s
        if limit is not None and now() - self._shown >= limit / 4:
            self._shown = now()
            self._show_life()
