"""A terminal with a program in it, as a person has it."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import termios
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LIMIT_S = 60.0


class Screen:
    """The master's end of a terminal whose session leader is a program.

    Attributes:
        pid: the program.
        seen: the bytes that it has written.
        before: the modes of the terminal before the program began.
    """

    def __init__(self, pid: int, master: int, limit_s: float) -> None:
        self._limit_s = limit_s
        self.pid = pid
        self.master = master
        self.seen = b""
        self.before = self.modes()
        self._at = 0
        self._status: int | None = None

    def type(self, keys: str) -> None:
        """Press keys; Enter is a carriage return."""
        os.write(self.master, keys.encode())

    def until(self, pattern: str) -> re.Match[bytes]:
        """Wait until the output has this, behind the match of the last wait."""
        deadline = time.monotonic() + self._limit_s
        while (match := re.compile(pattern.encode()).search(self.seen, self._at)) is None:
            left = deadline - time.monotonic()
            assert left > 0, (pattern, self.seen[-2000:])
            assert self._read(left), (pattern, self.seen[-2000:])
        self._at = match.end()
        return match

    def _read(self, seconds: float) -> bool:
        ready, _, _ = select.select([self.master], [], [], seconds)
        if not ready:
            return False
        try:
            data = os.read(self.master, 65536)
        except OSError:  # no process has it open any longer
            return False
        self.seen += data
        return bool(data)

    def end(self) -> int:
        """Wait for the program; return its exit status, as a shell has it."""
        deadline = time.monotonic() + self._limit_s
        while self._status is None:
            assert time.monotonic() < deadline, self.seen[-2000:]
            self._read(0.01)
            process, status = os.waitpid(self.pid, os.WNOHANG)
            if process:
                code = os.waitstatus_to_exitcode(status)
                self._status = code if code >= 0 else 128 - code
        while self._read(0.0):
            pass
        return self._status

    def stopped(self) -> bool:
        """Whether the program is stopped, as by Ctrl-Z."""
        with open(f"/proc/{self.pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "T"

    def modes(self) -> list[Any]:
        """The modes of the terminal."""
        return termios.tcgetattr(self.master)

    def resize(self, lines: int, columns: int) -> None:
        """Change the window."""
        termios.tcsetwinsize(self.master, (lines, columns))

    def close(self) -> None:
        """Kill the program if it runs, and close the terminal."""
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.master)


@contextmanager
def screen(
    argv: list[str],
    environment: Mapping[str, str],
    *,
    limit_s: float = LIMIT_S,
    directory: Path | None = None,
) -> Iterator[Screen]:
    """Run a program in a terminal of its own, of 33 lines and 77 columns."""
    looked, looks = os.pipe()
    pid, master = pty.fork()
    if pid == 0:
        try:
            os.close(looks)
            os.read(looked, 1)  # until the parent has seen the terminal as it was
            for number in (signal.SIGINT, signal.SIGQUIT):
                signal.signal(number, signal.SIG_DFL)  # the background jobs of a shell ignore both
            termios.tcsetwinsize(0, (33, 77))
            os.chdir(directory or ".")
            os.execvpe(argv[0], argv, environment)
        finally:
            os._exit(127)
    os.close(looked)
    found = Screen(pid, master, limit_s)
    os.close(looks)
    try:
        yield found
    finally:
        found.close()
