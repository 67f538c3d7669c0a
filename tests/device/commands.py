"""Commands as processes: run to their end, or running beside a test."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["COMMAND", "LIMIT_S", "Done", "Running", "aiordma", "aiordma_beside", "running"]

COMMAND = (sys.executable, "-W", "error", "-m", "aiordma")
LIMIT_S = 60


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    status: int
    out: str
    err: str


def aiordma(*words: str) -> Done:
    """Run a command to its end, with pipes."""
    done = subprocess.run(
        [*COMMAND, *words],
        capture_output=True, check=False, stdin=subprocess.DEVNULL, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    return Done(done.returncode, done.stdout, done.stderr)


async def aiordma_beside(*words: str) -> Done:
    """The same, while this process serves."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND, *words,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(LIMIT_S):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return Done(process.returncode, out.decode(), err.decode())


class Running:
    """A command that goes on."""

    def __init__(self, *words: str) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, *words],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
        )  # fmt: skip
        self._read = b""

    def line(self) -> str:
        """The next line."""
        assert self.process.stdout is not None
        while b"\n" not in self._read:
            ready, _, _ = select.select([self.process.stdout], [], [], LIMIT_S)
            assert ready, f"{self.process.args!r} says nothing"
            data = os.read(self.process.stdout.fileno(), 4096)
            assert data, self.process.communicate(timeout=LIMIT_S)
            self._read += data
        line, _, self._read = self._read.partition(b"\n")
        return line.decode()

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def end(self, number: signal.Signals = signal.SIGINT) -> Done:
        """End it by a signal; the rest of its output."""
        self.send(number)
        return self.rest()

    def rest(self) -> Done:
        """Wait for its end; the rest of its output."""
        out, err = self.process.communicate(timeout=LIMIT_S)
        return Done(self.process.returncode, (self._read + out).decode(), err.decode())


@contextlib.contextmanager
def running(*words: str) -> Iterator[Running]:
    """A command for the length of a block."""
    made = Running(*words)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.communicate(timeout=LIMIT_S)
