"""Shell: runs the commands of a page in a folder, and compares what they print."""

from __future__ import annotations

import difflib
import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

from tests.pages import ROOT, Step, without_runner

LIMIT_S = 60
#: A handler that ends a lease, or closes a connection of its own, may take its time on a busy
#: machine.
_WAITS = re.compile(rb"the server stops, and waits up to [^\n]*\n")
_KILL = re.compile(r"kill (?:-(\w+) )?%(\d)")


def matches(said: str, printed: str) -> bool:
    """`...` on the page stands for anything."""
    pattern = ".*".join(re.escape(part) for part in printed.split("..."))
    return re.fullmatch(pattern, said) is not None


class Shell:
    """A folder with the examples, in which commands are run.

    Args:
        folder: The folder, empty.
        replaced: Words of the page, and those that stand for them here.
    """

    def __init__(self, folder: Path, replaced: dict[str, str]) -> None:
        self.folder = folder
        (folder / "examples").symlink_to(ROOT / "examples")
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        # At its end, a cluster of Dask logs errors where the machine is busy, such as a heartbeat
        # that is under way; and it clears the temporary folders of other guests.
        dask = {"DASK_LOGGING__DISTRIBUTED": "critical", "DASK_TEMPORARY_DIRECTORY": str(folder)}
        self._env = {**os.environ, **dask, "PATH": path, "PYTHONWARNINGS": "error"}
        self._replaced = replaced
        self._jobs: list[subprocess.Popen[bytes]] = []
        self._killed: list[subprocess.Popen[bytes]] = []  # of these jobs

    def here(self, text: str) -> str:
        """The text with the words of this device."""
        for there, here in self._replaced.items():
            text = text.replace(there, here)
        return text

    def run(self, step: Step, *, any_output: bool = False) -> None:
        """Run a command of the page; a command behind the runner is run without it: it is here.

        Args:
            step: The command, and its output.
            any_output: Whether it has to succeed, whatever it prints.
        """
        command = without_runner(self.here(step.command))
        lines = [self.here(line) for line in step.lines]
        if command.endswith(" &"):
            self._start(command.removesuffix(" &"), lines)
        elif found := _KILL.fullmatch(command):
            job = self._jobs[int(found[2]) - 1]
            job.send_signal(signal.Signals[f"SIG{found[1] or 'TERM'}"])
            if found[1] == "KILL":
                self._killed.append(job)
        elif command == "wait":
            self._wait(lines)
        else:
            self._run(command, None if any_output else lines)

    def _run(self, command: str, lines: list[str] | None) -> None:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
            text=True,
            timeout=LIMIT_S,
        )
        if lines is None:
            assert done.returncode == 0, (command, done.stdout)
        else:
            self._compare(command, done.stdout.splitlines(), lines)

    def _start(self, command: str, lines: list[str]) -> None:
        job = subprocess.Popen(
            # exec: the signal at the end is for the program and not for the shell.
            ["bash", "-c", f"exec {command}"],
            cwd=self.folder,
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,  # select() knows of no bytes in a buffer
        )
        self._jobs.append(job)
        assert job.stdout is not None
        said: list[str] = []
        for _ in lines:
            ready, _, _ = select.select([job.stdout], [], [], LIMIT_S)
            assert ready, f"{command} says nothing behind {said}"
            said.append(job.stdout.readline().decode().rstrip("\n"))
            if not said[-1] and job.poll() is not None:
                assert job.stderr is not None
                raise AssertionError(f"{command} has ended: {job.stderr.read().decode()}")
        self._compare(command, said, lines)

    def _wait(self, lines: list[str]) -> None:
        """Wait for the jobs, and compare the rest of their output if the page shows it."""
        said: list[str] = []
        for job in self._jobs:
            out, err = job.communicate(timeout=LIMIT_S)
            assert (job.returncode, _WAITS.sub(b"", err)) == (0, b""), (job.args, err.decode())
            said += out.decode().splitlines()
        self._jobs.clear()
        if lines:
            self._compare("wait", said, lines)

    @staticmethod
    def _compare(command: str, said: list[str], lines: list[str]) -> None:
        pairs = zip(said, lines, strict=False)
        if len(said) != len(lines) or not all(matches(line, printed) for line, printed in pairs):
            difference = "\n".join(
                difflib.unified_diff(lines, said, "the page", "the command", "", "")
            )
            raise AssertionError(f"{command} prints another text, where ... is any:\n{difference}")

    def end(self) -> None:
        """Ctrl-C ends the servers, and none complains."""
        for job in self._jobs:
            job.send_signal(signal.SIGINT)
        for job in self._jobs:
            _, err = job.communicate(timeout=LIMIT_S)
            err = _WAITS.sub(b"", err)
            # An interpreter whose program has just ended dies of the signal, without a word.
            allowed = (-signal.SIGKILL,) if job in self._killed else (0, 130, -signal.SIGINT)
            assert job.returncode in allowed, (job.args, job.returncode, err.decode())
            assert not err, (job.args, err.decode())
        self._jobs.clear()

    def kill(self) -> None:
        """End what is left after a failure."""
        for job in self._jobs:
            job.kill()
            job.communicate(timeout=LIMIT_S)
