"""LineWriter: lines for an output that may block, such as a pipe that nobody reads."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TextIO

from aiordma.cli.output import printable

__all__ = ["LineWriter", "event_line"]

_MOST_LINES = 1000


def event_line(event: str, words: str, *, as_json: bool, **facts: object) -> str:
    """A line about an event: the event and words, or a JSON object with the facts."""
    return printable(json.dumps({"event": event, **facts}) if as_json else f"{event} {words}")


class LineWriter:
    """Writes lines in a thread, so that the caller never waits for the output.

    Up to 1,000 lines wait for the output; a further line is lost, and counted.  When the output
    takes lines again, a line behind those that waited says how many were lost.  An output that is
    closed, or broken, takes nothing any more.

    It bypasses the buffer of `stream`, which a daemon thread must not use when the interpreter
    ends.

    Args:
        stream: Where to; its descriptor is used from the first line on.  None, as `sys.stdout` is
            in a process that was started without it: nowhere.
        tell: Makes a line of the number of lines that were lost.
    """

    def __init__(self, stream: TextIO | None, tell: Callable[[int], str]) -> None:
        self._stream = stream
        self._tell = tell
        self._changed = threading.Condition()
        self._lines: deque[str] = deque()
        self._lost = 0
        self._busy = False  # the thread has lines that it writes
        self._thread: threading.Thread | None = None

    def put(self, line: str) -> None:
        """Have the thread write `line` and a newline; never waits.  Only one thread may call."""
        if self._stream is None:
            return
        if self._thread is None:
            descriptor, encoding = self._stream.fileno(), self._stream.encoding
            # A daemon: an output that takes no lines does not keep the process from ending.
            self._thread = threading.Thread(
                target=self._write, args=(descriptor, encoding), name="aiordma-lines", daemon=True
            )
            self._thread.start()
        with self._changed:
            if len(self._lines) < _MOST_LINES:
                self._lines.append(line)
            else:
                self._lost += 1
            self._changed.notify_all()

    def __len__(self) -> int:
        """Lines that were not written yet."""
        return len(self._lines)

    def close(self, within_s: float = 1.0) -> None:
        """Wait until the output has taken everything, `within_s` seconds at most."""
        until = time.monotonic() + within_s
        with self._changed:
            while (self._busy or self._lines) and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)

    def _write(self, descriptor: int, encoding: str) -> None:
        broken = False
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                while not self._lines:
                    self._changed.wait()
                self._busy = True
                lines = [*self._lines]
                self._lines.clear()
                if self._lost:
                    lines.append(self._tell(self._lost))
                    self._lost = 0
            data = "".join(f"{line}\n" for line in lines).encode(encoding, "backslashreplace")
            while data and not broken:
                try:
                    data = data[os.write(descriptor, data) :]
                except OSError:
                    broken = True
