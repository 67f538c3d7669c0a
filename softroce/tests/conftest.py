"""What the tests of the runner share: the command line as a subprocess."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
#: Seconds; above the slowest boot by far, and below the limit of a test.
LIMIT = 100.0


@dataclass
class Runner:
    """Starts ``python -m aiordma_softroce``."""

    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __call__(
        self, *arguments: str | bytes, **options: Any
    ) -> subprocess.CompletedProcess[bytes]:
        """Run to the end; the output is collected."""
        process = self.start(*arguments, **options)
        # An emulated machine may share this one with a kernel build.
        limit = 4 * LIMIT if "qemu" in arguments else LIMIT
        out, err = process.communicate(timeout=limit)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def start(
        self,
        *arguments: str | bytes,
        environment: dict[str, str] | None = None,
        prefix: tuple[str, ...] = (),
        python: str = sys.executable,
        **options: Any,
    ) -> subprocess.Popen[bytes]:
        """Start and return; whatever is left is killed when the test ends."""
        process = subprocess.Popen(
            [*prefix, python, "-B", "-m", "aiordma_softroce", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={
                **os.environ,
                "PYTHONPATH": str(REPOSITORY / "softroce/src"),
                **(environment or {}),
            },
            **options,
        )
        self.started.append(process)
        return process

    def finish(self) -> None:
        """Kill what is still running, and collect it."""
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.wait(timeout=LIMIT)
            for stream in (process.stdout, process.stderr):
                assert stream is not None
                stream.close()


@pytest.fixture(scope="session", autouse=True)
def signals() -> Iterator[None]:
    """Signals that were ignored at the start are not, as long as the tests run.

    Under nohup SIGHUP is ignored, and SIGINT where a script has started the tests with `&`.
    Children inherit that: the runner leaves such a signal alone, and no shell's trap can undo it.
    """
    hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGHUP, hangup)
    signal.signal(signal.SIGINT, interrupt)


@pytest.fixture
def softroce() -> Iterator[Runner]:
    """Return something that runs the command line."""
    runner = Runner()
    yield runner
    runner.finish()


def eventually(condition: Callable[[], bool]) -> bool:
    """Return whether `condition` comes true in time; it is asked again and again."""
    deadline = time.monotonic() + 30.0
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def session_of(process: subprocess.Popen[bytes]) -> int:
    """Return the session of the guest that the runner `process` has started.

    Its only child is the guest's keeper (`launch.py`), the leader of that session.
    """
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 1, children
    return int(children[0])


def members(session: int) -> list[str]:
    """Return the processes of a session that have not ended."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = status.read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        # The name, in parentheses, may contain anything; the fields after it do not.
        state, _, _, its_session, *_ = text.rpartition(")")[2].split()
        if int(its_session) == session and state not in "ZX":
            found.append(text)
    return found


def guest_of(session: int) -> int:
    """Return the process that is the guest: the keeper's only child, which leads a group."""
    children = Path(f"/proc/{session}/task/{session}/children").read_text().split()
    assert len(children) == 1, children
    return int(children[0])
