"""A command that has the runner's own terminal, as a job in the foreground of a shell has it.

The command is a process group of its own, so that a time limit reaches all of it. A terminal obeys
one group at a time: the command's is put in front, and Ctrl-C, Ctrl-Z and the window's size reach
it without the runner. The runner's own part in job control remains: a command that stops is a
runner that stops.
"""

from __future__ import annotations

import contextlib
import os
import signal
import termios
from collections.abc import Iterator

#: A child has stopped or ended; the runner was stopped and goes on.
SIGNALS = (signal.SIGCHLD, signal.SIGCONT)


class Job:
    """The terminal at standard input, lent to a command."""

    def __init__(self) -> None:
        """Note how the terminal is; nothing is changed yet."""
        self._modes = termios.tcgetattr(0)
        self._lent = True  # by the child, before its program

    @staticmethod
    def come_to_front() -> None:
        """Put the calling process's group in front: to be called in the child before its program.

        There, so that the program cannot read before it may.
        """
        with _no_stop():
            os.tcsetpgrp(0, os.getpgrp())

    def handle(self, number: int, child: int) -> None:
        """Do the runner's part when one of `SIGNALS` has come.

        Args:
            number: the signal.
            child: process and group of the command.
        """
        if number == signal.SIGCHLD:
            try:
                stopped = os.waitid(os.P_PID, child, os.WSTOPPED | os.WNOHANG)
            except ChildProcessError:
                return
            if stopped is None:
                return
            self.end()
            # With the whole job that a shell knows. Where there is no shell to wake it the kernel
            # stops nothing, and the command goes on at once.
            os.killpg(os.getpgrp(), signal.SIGTSTP)
        with contextlib.suppress(OSError), _no_stop():
            # A shell that lets the job go on in the background has the terminal itself.
            if os.tcgetpgrp(0) == os.getpgrp():
                os.tcsetpgrp(0, child)
                self._lent = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGCONT)

    def end(self) -> None:
        """Take the terminal back, with the modes that it had; may be called again."""
        if not self._lent:
            return
        self._lent = False
        with contextlib.suppress(OSError, termios.error), _no_stop():
            os.tcsetpgrp(0, os.getpgrp())
            termios.tcsetattr(0, termios.TCSANOW, self._modes)


@contextlib.contextmanager
def _no_stop() -> Iterator[None]:
    """Not be stopped for touching the terminal from the background."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTTOU,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
