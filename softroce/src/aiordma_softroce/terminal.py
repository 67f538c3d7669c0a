"""The terminal of the runner: raw while the command of a guest has it, and as it was afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
import termios
import time
import tty
from typing import Any

#: The signals that concern a terminal: its size, a stop by job control, and the end of the stop.
SIGNALS = (signal.SIGWINCH, signal.SIGTSTP, signal.SIGCONT)

#: Ctrl-], three times within a second, ends the run: as for machines of systemd-nspawn.
_ESCAPE = b"\x1d"
_ESCAPE_COUNT = 3
_ESCAPE_SECONDS = 1.0

#: Plain text, a visible cursor, ordinary keys, no pasting in brackets, no mouse, the first screen.
#: A program that was killed has undone none of it, and each does nothing where it is not needed.
_UNDO = b"\x1b[0m\x1b[?25h\x1b[?1l\x1b[?2004l\x1b[?1000;1002;1003;1006l\x1b[?47l\r\n"

_NO_SIZE = (24, 80)


def wanted() -> bool:
    """Return whether a run is interactive if no option says otherwise.

    Standard input and standard output are terminals, and this process is in the foreground: a job
    in the background would be stopped as soon as it touched the terminal.
    """
    if not (os.isatty(0) and os.isatty(1)):
        return False
    with contextlib.suppress(OSError):  # not the controlling terminal: there are no jobs
        return os.tcgetpgrp(0) == os.getpgrp()
    return True


class Terminal:
    """The terminal at standard input, or at least at standard output, for the time of a run."""

    def __init__(self, *, keyboard: bool) -> None:
        """Look at the terminal; nothing is changed yet.

        Args:
            keyboard: the command reads it. Otherwise keys mean what they mean to the runner.
        """
        self._keyboard = keyboard
        self._saved: list[Any] | None = None
        self.is_raw: bool = False

    def description(self) -> dict[str, Any]:
        """Return what the guest makes its terminal from: size and, if there are any, modes."""
        modes: list[Any] | None = None
        if self._keyboard:
            with contextlib.suppress(termios.error):
                modes = termios.tcgetattr(0)
                modes[6] = [value if isinstance(value, int) else value[0] for value in modes[6]]
        return {"size": self.size(), "modes": modes}

    def size(self) -> tuple[int, int]:
        """Return lines and columns; 24 and 80 without a terminal."""
        for descriptor in (0, 1, 2):
            with contextlib.suppress(OSError, termios.error):
                lines, columns = termios.tcgetwinsize(descriptor)
                if lines and columns:
                    return lines, columns
        return _NO_SIZE

    def take(self) -> None:
        """Make the terminal raw: each key goes to the guest, whose terminal gives it its meaning.

        A process in the background is stopped by that, until it is in the foreground.
        """
        if not self._keyboard:
            return
        with contextlib.suppress(termios.error):  # it has been hung up
            if self._saved is None:
                self._saved = termios.tcgetattr(0)
            # Keys that were typed during the boot are kept.
            tty.setraw(0, termios.TCSANOW)
            self.is_raw = True

    def give_back(self, *, undo: bool = False) -> None:
        """Put the terminal's modes back; may be called at any time, and again.

        Args:
            undo: the command did not end by itself; undo what it may have set on the screen.
        """
        if not self.is_raw or self._saved is None:
            return
        self.is_raw = False
        with contextlib.suppress(OSError):
            if os.tcgetpgrp(0) != os.getpgrp():
                return  # another job has the terminal
        with contextlib.suppress(termios.error):
            termios.tcsetattr(0, termios.TCSANOW, self._saved)
        if undo and os.isatty(1) and os.environ.get("TERM", "dumb") != "dumb":
            with contextlib.suppress(OSError):
                os.write(1, _UNDO)

    def handle(self, number: int) -> None:
        """Do what one of `SIGNALS` asks for; the size may be another one afterwards."""
        was_raw = self.is_raw
        if number == signal.SIGTSTP:
            self.give_back()
            os.kill(os.getpid(), signal.SIGSTOP)
        if was_raw and number != signal.SIGWINCH:
            self.take()  # a shell has had the terminal meanwhile


class Escape:
    """Notices three Ctrl-] within a second: the way out of a guest that answers no key."""

    def __init__(self) -> None:
        self._times: list[float] = []

    def add(self, data: bytes) -> bool:
        """Note keys; return whether they are the third."""
        now = time.monotonic()
        for key in data:
            if key != _ESCAPE[0]:
                self._times.clear()
                continue
            self._times = [t for t in self._times if now - t < _ESCAPE_SECONDS] + [now]
            if len(self._times) >= _ESCAPE_COUNT:
                return True
        return False
