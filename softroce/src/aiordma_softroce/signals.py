"""Signals to the runner, as something that `poll` can wait for."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Self

#: The signals that ask a program to end.  Each is passed on to the command first.
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class SignalPipe:
    """A context in which ending signals are collected instead of acted upon.

    Outside the main thread it collects nothing: the interpreter delivers signals to the main
    thread alone.
    """

    def __init__(self, *others: signal.Signals) -> None:
        """Make the pipe.

        Args:
            others: signals that are collected, too.
        """
        self._numbers = (*_ENDING, *others)
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._former: dict[int, object] = {}

    def fileno(self) -> int:
        """Return the descriptor that is readable when a signal has come."""
        return self._read

    def take(self) -> list[int]:
        """Return the signals since the last call, in order; does not block."""
        try:
            return list(os.read(self._read, 4096))
        except BlockingIOError:
            return []

    def _note(self, number: int, _frame: FrameType | None) -> None:
        # A pipe that is full of earlier signals needs no further one.
        try:
            os.write(self._write, bytes((number,)))
        except BlockingIOError:
            return

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in self._numbers:
                # nohup(1) and background jobs of a shell ignore some of them on purpose.
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._former[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        os.close(self._read)
        os.close(self._write)
