"""The keeper between the runner and what it starts: status, descriptors, and whose death is whose.

It needs no guest: any program will do.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from aiordma_softroce.tools import LAUNCH, kill

from .conftest import eventually, members

#: Makes processes of its own, as a kernel does that is a program.
_FAMILY = "sleep 1000 & sleep 1000 & echo started; wait"
#: A parent that starts the keeper, says its process id, and does nothing else. It says that on a
#: stream of its own: the family writes to the other as soon as it runs, maybe before the parent.
_PARENT = (
    "import os, subprocess, sys, time;"
    "print(subprocess.Popen([*sys.argv[1:3], str(os.getpid()), *sys.argv[3:]]).pid,"
    "file=sys.stderr, flush=True);"
    "time.sleep(1000)"
)


class Kept(subprocess.Popen[bytes]):
    """A program started by the keeper, whose parent is this process."""

    def __init__(self, *argv: str) -> None:
        super().__init__(
            [sys.executable, str(LAUNCH), str(os.getpid()), *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def go_on(self) -> None:
        """Let the program's `read line` end."""
        assert self.stdin is not None
        self.stdin.close()

    def line(self) -> bytes:
        assert self.stdout is not None
        return self.stdout.readline()


@pytest.fixture
def kept() -> Iterator[type[Kept]]:
    """Return what starts a program; nothing of it is left afterwards."""
    started: list[Kept] = []

    class Noted(Kept):
        def __init__(self, *argv: str) -> None:
            super().__init__(*argv)
            started.append(self)

    yield Noted
    for process in started:
        kill(process)
        process.go_on()
    assert eventually(lambda: not any(members(process.pid) for process in started))


@pytest.mark.parametrize(
    ("script", "status"),
    [("exit 0", 0), ("exit 7", 7), ("kill -TERM $$", 143), ("kill -KILL $$", 137)],
)
def test_the_status_is_the_programs(kept: type[Kept], script: str, status: int) -> None:
    assert kept("sh", "-c", script).wait(timeout=30) == status


def test_a_program_that_is_not_there(kept: type[Kept]) -> None:
    process = kept("no-such-program")
    out, _ = process.communicate(timeout=30)
    assert (process.returncode, out) == (127, b"no-such-program: No such file or directory\n")


def test_output_ends_with_the_program(kept: type[Kept]) -> None:
    """The keeper, which is still there, does not hold it open."""
    process = kept("sh", "-c", "echo started; exec >/dev/null 2>&1; sleep 1000")
    assert process.line() == b"started\n"
    assert process.line() == b""
    assert process.poll() is None


def test_what_the_program_leaves_ends_with_it(kept: type[Kept]) -> None:
    process = kept("sh", "-c", "sleep 1000 & sleep 1000 & exit 3")
    assert process.wait(timeout=30) == 3
    assert eventually(lambda: not members(process.pid))


def test_a_stopped_program_has_not_ended(kept: type[Kept]) -> None:
    process = kept("sh", "-c", "echo started; kill -STOP $$; echo went on; exit 5")
    assert process.line() == b"started\n"
    # The keeper, which is told of the stop, and the program.
    stopped = [int(text.split()[0]) for text in members(process.pid)]
    assert eventually(lambda: any(") T " in text for text in members(process.pid)))
    stopped.remove(process.pid)
    os.kill(stopped[0], signal.SIGCONT)
    assert process.line() == b"went on\n"
    assert process.wait(timeout=30) == 5


def test_the_status_of_a_program_that_has_left_its_group(kept: type[Kept]) -> None:
    moves = "import os; os.setpgid(0, os.getsid(0)); os._exit(7)"
    assert kept(sys.executable, "-c", moves).wait(timeout=30) == 7


def test_a_parent_that_ignores_its_children(kept: type[Kept]) -> None:
    """That is inherited, and then nobody is told of the end of a child."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        process = kept("sh", "-c", "read line; exit 3")
    finally:
        signal.signal(signal.SIGCHLD, before)
    process.go_on()
    assert process.wait(timeout=30) == 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM])
def test_each_ending_signal_ends_the_family(kept: type[Kept], number: signal.Signals) -> None:
    process = kept("sh", "-c", _FAMILY)
    assert process.line() == b"started\n"
    process.send_signal(number)
    assert process.wait(timeout=30) == 128 + signal.SIGKILL
    assert eventually(lambda: not members(process.pid))


def test_other_signals_are_nothing_to_the_keeper(kept: type[Kept]) -> None:
    process = kept("sh", "-c", "echo started; read line; exit 4")
    assert process.line() == b"started\n"
    for number in (signal.SIGUSR1, signal.SIGALRM, signal.SIGPIPE, signal.SIGTSTP):
        process.send_signal(number)
    assert process.poll() is None
    process.go_on()
    assert process.wait(timeout=30) == 4


def test_the_programs_own_mask_is_that_of_the_parent(kept: type[Kept]) -> None:
    process = kept("grep", "SigBlk", "/proc/self/status")
    out, _ = process.communicate(timeout=30)
    assert int(out.split()[1], 16) == 0


def test_asked_to_end_although_it_is_stopped(kept: type[Kept]) -> None:
    process = kept("sh", "-c", f"trap '' TERM INT; {_FAMILY}")
    assert process.line() == b"started\n"
    process.send_signal(signal.SIGSTOP)
    kill(process)
    assert process.returncode == 128 + signal.SIGKILL
    assert eventually(lambda: not members(process.pid))


def test_the_keepers_own_death(kept: type[Kept]) -> None:
    process = kept("sh", "-c", "echo started; exec sleep 1000")
    assert process.line() == b"started\n"
    process.kill()
    process.wait(timeout=30)
    assert eventually(lambda: not members(process.pid))


def test_the_parents_death() -> None:
    """All of the family ends, and not only the process that the keeper started."""
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, sys.executable, str(LAUNCH), "sh", "-c", _FAMILY],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert parent.stdout is not None
    assert parent.stderr is not None
    session = int(parent.stderr.readline())
    assert parent.stdout.readline() == b"started\n"
    assert len(members(session)) == 4
    parent.kill()
    parent.wait(timeout=30)
    assert eventually(lambda: not members(session))
    parent.stdout.close()
    parent.stderr.close()


def test_a_parent_that_has_died_before() -> None:
    nobody = subprocess.run(["sh", "-c", "echo $$"], capture_output=True, check=True)
    done = subprocess.run(
        [sys.executable, str(LAUNCH), nobody.stdout.strip(), "echo", "ran"],
        capture_output=True,
        check=False,
        timeout=30,
    )
    assert (done.returncode, done.stdout) == (1, b"")
