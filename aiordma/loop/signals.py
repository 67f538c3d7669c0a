"""The signals that ask a program to end, SIGINT (Ctrl-C) and SIGTERM, for the servers of a loop.

Theory of operation
    A loop has one handler for a signal.  Servers that heed signals share it, so that a signal
    reaches all of them, and the first one to end does not take it from the others.

    The loop calls the handler when it runs, and a program may keep it from running.  So Python
    calls another one at once, in whatever code the main thread runs: it does nothing if the loop
    is about to run, and otherwise what Python does without a loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from aiordma.loop import registry

__all__ = ["heeding"]

_ENDING = (signal.SIGINT, signal.SIGTERM)
#: Seconds that a signal waits for the loop until the next one does not.  A launcher may pass on a
#: Ctrl-C that the terminal has sent to both, and timeout(1) sends each SIGTERM twice.
_PATIENCE_S = 0.5


class _Signals:
    """The handlers of one loop, and what they call."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.heeders: list[Callable[[], bool]] = []
        self._loop = loop
        self._before: dict[signal.Signals, Any] = {}
        # The first signal that the loop has not got yet, and since when.
        self._pending: tuple[signal.Signals, float] | None = None
        self._left: signal.Signals | None = None  # a signal that ends no task of the program
        for number in _ENDING:
            before = signal.getsignal(number)
            loop.add_signal_handler(number, self._on_signal, number)
            own: Any = signal.getsignal(number)
            signal.signal(number, functools.partial(self._at_once, own))
            signal.siginterrupt(number, False)
            self._before[number] = before

    def _at_once(self, own: Callable[..., object], number: int, frame: object) -> None:
        """Python's handler: called in the middle of whatever the main thread runs.

        `own` is that of the loop, which makes a note at most.
        """
        own(number, frame)
        now = time.monotonic()
        if self._pending is None:
            self._pending = signal.Signals(number), now
        elif now - self._pending[1] >= _PATIENCE_S:
            self._pending = None
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            self._restore(signal.Signals(number))
            signal.raise_signal(number)

    def _on_signal(self, number: signal.Signals) -> None:
        self._pending = None
        ends = [heed() for heed in dict.fromkeys(self.heeders)]  # each once
        if not any(ends):
            self._left = number

    def _restore(self, number: signal.Signals) -> None:
        before = self._before.pop(number)
        self._loop.remove_signal_handler(number)
        if before is not None:  # it was set by Python
            signal.signal(number, before)

    def close(self) -> None:
        """Restore the handlers that were there before, and have them get what is left for them."""
        for number in list(self._before):
            self._restore(number)
        if self._pending is not None:  # it came while the last one ended
            self._left, _ = self._pending
        if self._left is not None:
            self._loop.call_soon(signal.raise_signal, self._left)


@contextlib.contextmanager
def heeding(loop: asyncio.AbstractEventLoop, heed: Callable[[], bool]) -> Iterator[None]:
    """Have `heed` called at SIGINT and SIGTERM during the block, if this is the main thread.

    It returns whether a task of the program is about to end because of the signal; if not, it has
    this block end soon.  If no task does, the signal does what it would do without the block, once
    all blocks have ended.

    Handlers of these signals that the loop has already are replaced.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals, release = registry.acquire("signals", functools.partial(_Signals, loop), loop)
    signals.heeders.append(heed)
    try:
        yield
    finally:
        signals.heeders.remove(heed)
        release()
