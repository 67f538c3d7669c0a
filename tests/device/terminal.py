"""A command in a terminal of its own: the keys go in, the screen comes out."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Iterator, Sequence

__all__ = ["CTRL_C", "Terminal", "plain", "terminal"]

CTRL_C = b"\x03"
LIMIT_S = 60
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def plain(screen: str) -> str:
    """The text of a screen without escape sequences, its lines ended as in files."""
    return _ESCAPES.sub("", screen).replace("\r\n", "\n")


class Terminal:
    """A command and its terminal, which is the command's controlling terminal.

    Attributes:
        screen: All that the command has printed so far.
    """

    def __init__(self, words: Sequence[str], **env: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 140, 0, 0))
        self.screen = ""
        try:
            # setsid: keys become signals of the terminal's session alone.
            self.process = subprocess.Popen(
                ["setsid", "--ctty", *words],
                stdin=theirs, stdout=theirs, stderr=theirs,
                env={**os.environ, "TERM": "xterm", **env},
            )  # fmt: skip
        finally:
            os.close(theirs)

    def press(self, keys: bytes) -> None:
        """Press keys."""
        os.write(self._ours, keys)

    def until(self, text: str, count: int = 1) -> None:
        """Wait until the screen has shown a text so many times."""
        deadline = time.monotonic() + LIMIT_S
        while plain(self.screen).count(text) < count:
            assert self._more(deadline), f"{text!r} is not on the screen: {self.screen!r}"

    def end(self) -> int:
        """Wait for the command's end; its exit status."""
        deadline = time.monotonic() + LIMIT_S
        while self._more(deadline):
            pass
        return self.process.wait(LIMIT_S)

    def _more(self, deadline: float) -> bool:
        """Read; False at the end."""
        ready, _, _ = select.select([self._ours], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"nothing more comes: {self.screen!r}"
        try:
            data = os.read(self._ours, 4096)
        except OSError:  # EIO: no process has the other end any more
            return False
        self.screen += data.decode()
        return bool(data)

    def close(self) -> None:
        """End the command, whatever it does."""
        self.process.kill()
        self.process.wait(LIMIT_S)
        os.close(self._ours)


@contextlib.contextmanager
def terminal(words: Sequence[str], **env: str) -> Iterator[Terminal]:
    """A command in a terminal, for the length of a block."""
    made = Terminal(words, **env)
    try:
        yield made
    finally:
        made.close()
