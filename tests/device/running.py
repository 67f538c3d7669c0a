"""Programs of examples/ as processes of their own, each wait with a limit."""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Self

ROOT = Path(__file__).parents[2]
LIMIT_S = 60


class Program:
    """A Python program; killed at the end of a `with` block.

    Args:
        words: Its command line, without the interpreter; a file of examples/ by its name.
        cwd: The folder that it runs in.
    """

    def __init__(self, *words: str, cwd: Path = ROOT) -> None:
        if words[0].endswith(".py"):
            words = (str(ROOT / "examples" / words[0]), *words[1:])
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
        )
        self._lines = queue.Queue[str]()
        self._errors = list[str]()
        self._readers = [threading.Thread(target=read) for read in (self._out, self._err)]
        for reader in self._readers:
            reader.start()

    def _out(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _err(self) -> None:
        assert self.process.stderr is not None
        self._errors += self.process.stderr

    def say(self, line: str) -> None:
        """Write a line to its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def line(self) -> str:
        """The next line of its output, without the end; "" at the end of all."""
        return self._lines.get(timeout=LIMIT_S).rstrip("\n")

    def until(self, words: str) -> str:
        """The next line that has these words in it."""
        while words not in (line := self.line()):
            assert line, (f"never said {words!r}", self._errors)
        return line

    def end(self, how: signal.Signals | None = None) -> tuple[int, str]:
        """Send a signal, or close its standard input; the status, and the text of its errors."""
        assert self.process.stdin is not None
        if how is not None:
            self.process.send_signal(how)
        else:
            self.process.stdin.close()
        status = self.process.wait(LIMIT_S)
        self._close()
        return status, "".join(self._errors)

    def _close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        for reader in self._readers:
            reader.join(LIMIT_S)
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.stderr.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.process.kill()
        self.process.wait(LIMIT_S)
        self._close()
