"""Run the tools that prepare an engine: with a log, progress, a time limit, and an end."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from .errors import InfrastructureError, Interrupted
from .signals import SignalPipe

LAUNCH = Path(__file__).with_name("launch.py")

_QUERY_SECONDS = 120.0
_TICK_SECONDS = 0.5
_QUIET_TICK_SECONDS = 15.0


def say(text: str) -> None:
    """Write a line for the user to standard error."""
    sys.stderr.write(f"softroce: {text}\n")
    sys.stderr.flush()


def find(program: str) -> str | None:
    """Return the path of a program, or None; a user's PATH may lack the folders of root's."""
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def query(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a short command and return its result; a program that is missing counts as failed.

    Raises:
        InfrastructureError: it took longer than two minutes.
    """
    try:
        return subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_QUERY_SECONDS,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
    except FileNotFoundError as error:
        return subprocess.CompletedProcess(argv, 127, "", str(error))
    except subprocess.TimeoutExpired:
        raise InfrastructureError(f"{argv[0]} gave no answer within {_QUERY_SECONDS:g} s") from None


class Progress:
    """One line about the step under way: updated in place on a terminal, now and then elsewhere."""

    def __init__(self, title: str) -> None:
        """Start the clock of a step called `title`."""
        self._title = title
        self._start = time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._next = self._start + (0.0 if self._terminal else _QUIET_TICK_SECONDS)

    def tick(self, detail: str) -> None:
        """Show `detail` if it is time to."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + (_TICK_SECONDS if self._terminal else _QUIET_TICK_SECONDS)
        text = f"softroce: {self._title}: {detail}{now - self._start:.0f} s"
        sys.stderr.write(f"\r\x1b[K{text}" if self._terminal else f"{text}\n")
        sys.stderr.flush()

    def clear(self) -> None:
        """Take the line away from a terminal."""
        if self._terminal:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start


def run(
    argv: Sequence[str],
    *,
    title: str,
    log: Path,
    limit: float,
    verbose: bool = False,
    directory: Path | None = None,
    environment: Mapping[str, str] | None = None,
    counted_prefix: bytes = b"",
    counted_name: str = "",
) -> None:
    """Run a tool to its end, appending everything it says to `log`.

    Args:
        argv: the tool with its arguments.
        title: its task, for the user.
        log: a file.
        limit: in seconds.
        verbose: show its output as well.
        directory: to run in.
        environment: added to that of this process.
        counted_prefix: lines that start with it are counted, and the count is the progress.
        counted_name: name of the counted things.

    Raises:
        InfrastructureError: it failed or ran out of time; the message names the log.
        Interrupted: an ending signal came; the tool was killed.
    """
    with log.open("ab") as file, SignalPipe() as signals:
        file.write(f"\n$ {' '.join(argv)}\n".encode())
        file.flush()
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(LAUNCH), str(os.getpid()), *argv],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=directory,
            env={**os.environ, "LC_ALL": "C", **(environment or {})},
        )
        progress = Progress(title)
        count = _Count(counted_prefix)

        def detail() -> str:
            return f"{count.number} {counted_name}, " if counted_name else ""

        try:
            output = process.stdout
            assert output is not None
            _follow(output, file, count, signals, limit, verbose, lambda: progress.tick(detail()))
            status = process.wait(timeout=30)
        except (TimeoutError, subprocess.TimeoutExpired):
            raise InfrastructureError(
                f"{title}: took longer than {limit:g} s and was stopped; the log is {log}"
            ) from None
        finally:
            progress.clear()
            kill(process)
    if status != 0:
        tail = log.read_bytes()[-3000:].decode(errors="replace").strip().splitlines()[-15:]
        said = "\n".join(f"  | {line}" for line in tail)
        raise InfrastructureError(
            f"{title}: {argv[0]} ended with status {status}; the full log is {log}\n{said}"
        )
    if counted_name:
        say(f"{title}: {count.number} {counted_name}, done in {progress.seconds:.0f} s")


class _Count:
    """Counts the lines with a prefix in a stream of pieces."""

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._rest = b""
        self.number = 0

    def add(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._prefix:
            self.number += sum(line.startswith(self._prefix) for line in lines)


def _follow(
    output: IO[bytes],
    log: IO[bytes],
    count: _Count,
    signals: SignalPipe,
    limit: float,
    verbose: bool,
    tick: Callable[[], None],
) -> None:
    """Copy `output` to its end.

    Raises:
        TimeoutError: it did not end within `limit` seconds.
        Interrupted: a signal came first.
    """
    deadline = time.monotonic() + limit
    poll = select.poll()
    poll.register(output, select.POLLIN)
    poll.register(signals, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poll.poll(_TICK_SECONDS * 1000)}
        for number in signals.take():
            raise Interrupted(number)
        if output.fileno() in ready:
            data = os.read(output.fileno(), 65536)
            if not data:
                return
            log.write(data)
            log.flush()
            count.add(data)
            if verbose:
                sys.stderr.buffer.write(data)
                sys.stderr.flush()
        if not verbose:
            tick()
        if time.monotonic() > deadline:
            raise TimeoutError


def kill(process: subprocess.Popen[bytes]) -> None:
    """End `launch.py` with all that it has started, and collect it."""
    # launch.py kills the program's process group, waits for the program, and ends.
    process.terminate()
    process.send_signal(signal.SIGCONT)  # a signal may have stopped it
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
