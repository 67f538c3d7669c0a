"""The signals that ask a program to end, SIGINT (Ctrl-C) and SIGTERM, for the servers of a loop.

A loop has one handler for a signal.  Servers that heed signals share it, so that a signal reaches
all of them, and the first one to end does not take it from the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from aiordma.loop import registry

__all__ = ["heeding"]

_ENDING = (signal.SIGINT, signal.SIGTERM)


class _Signals:
    """The handlers of one loop, and what they call."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.heeders: list[Callable[[], bool]] = []
        self._loop = loop
        self._before: dict[signal.Signals, Any] = {}
        for number in _ENDING:
            before = signal.getsignal(number)
            loop.add_signal_handler(number, self._on_signal, number)
            self._before[number] = before

    def _on_signal(self, number: signal.Signals) -> None:
        ends = [heed() for heed in dict.fromkeys(self.heeders)]  # each once
        if not any(ends):
            self._restore(number)
            signal.raise_signal(number)

    def _restore(self, number: signal.Signals) -> None:
        before = self._before.pop(number)
        self._loop.remove_signal_handler(number)
        if before is not None:  # it was set by Python
            signal.signal(number, before)

    def close(self) -> None:
        """Restore the handlers that were there before."""
        for number in list(self._before):
            self._restore(number)


@contextlib.contextmanager
def heeding(loop: asyncio.AbstractEventLoop, heed: Callable[[], bool]) -> Iterator[None]:
    """Have `heed` called at SIGINT and SIGTERM during the block, if this is the main thread.

    Handlers of these signals that the loop has already are replaced.  If every `heed` returns
    False, because it has nothing to end, the signal does what it would do without the block.
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
