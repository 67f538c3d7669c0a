"""Pages with commands: every one is run as it is printed there, and says what it says there."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

# Processes of their own, whatever the tests' loop: once on each device is enough.
pytestmark = [pytest.mark.device, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
PAGES = ("programs.md", "perf.md", "switch.md", "examples.md")
LIMIT_S = 60
ADDRESS_THERE = "10.80.0.1"
DEVICE_THERE = "rxe0"


@dataclass
class Step:
    """One command and the lines that it has to print."""

    command: str
    lines: list[str] = field(default_factory=list)


def conversations() -> Iterator[list[Step]]:
    """The console blocks of the pages."""
    text = "".join((ROOT / "docs" / page).read_text() for page in PAGES)
    for block in re.findall(r"^```console\n(.*?)^```$", text, re.M | re.S):
        steps: list[Step] = []
        for line in block.splitlines():
            if line.startswith("$ "):
                steps.append(Step(line.removeprefix("$ ")))
            else:
                steps[-1].lines.append(line)
        yield steps


def matches(said: str, printed: str) -> bool:
    """`...` on the page stands for anything."""
    pattern = ".*".join(re.escape(part) for part in printed.split("..."))
    return re.fullmatch(pattern, said) is not None


class Shell:
    """A folder with the examples, in which commands are run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "examples").symlink_to(ROOT / "examples")
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self._env = {**os.environ, "PATH": path, "PYTHONWARNINGS": "error"}
        self._jobs: list[subprocess.Popen[str]] = []

    def run(self, step: Step) -> None:
        if step.command.endswith(" &"):
            self._start(step)
            return
        if step.command == "wait":
            for job in self._jobs:
                _, err = job.communicate(timeout=LIMIT_S)
                assert (job.returncode, err) == (0, ""), job.args
            self._jobs.clear()
            return
        done = subprocess.run(
            ["bash", "-c", step.command],
            cwd=self._folder,
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
            text=True,
            timeout=LIMIT_S,
        )
        self._compare(done.stdout.splitlines(), step)

    def _start(self, step: Step) -> None:
        job = subprocess.Popen(
            # exec: the signal at the end is for the program and not for the shell.
            ["bash", "-c", f"exec {step.command.removesuffix(' &')}"],
            cwd=self._folder,
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._jobs.append(job)
        assert job.stdout is not None
        said = []
        for _ in step.lines:
            ready, _, _ = select.select([job.stdout], [], [], LIMIT_S)
            assert ready, f"{step.command} says nothing"
            said.append(job.stdout.readline().rstrip("\n"))
        self._compare(said, step)

    @staticmethod
    def _compare(said: list[str], step: Step) -> None:
        assert len(said) == len(step.lines), (step.command, said)
        for line, printed in zip(said, step.lines, strict=True):
            assert matches(line, printed), (step.command, line, printed)

    def end(self) -> None:
        """Ctrl-C ends the servers, and none complains."""
        for job in self._jobs:
            job.send_signal(signal.SIGINT)
        for job in self._jobs:
            _, err = job.communicate(timeout=LIMIT_S)
            assert (job.returncode, err) in ((0, ""), (130, "")), job.args

    def kill(self) -> None:
        for job in self._jobs:
            job.kill()
            job.communicate(timeout=LIMIT_S)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    yield shell
    shell.kill()


@pytest.mark.parametrize(
    "steps", list(conversations()), ids=lambda steps: steps[0].command.split()[1].rpartition("/")[2]
)
def test_the_pages_tell_what_happens(
    steps: list[Step], shell: Shell, address: str, is_siw: bool
) -> None:
    device = "siw0" if is_siw else "rxe0"
    for step in steps:
        command = step.command.replace(ADDRESS_THERE, address)
        lines = [
            line.replace(ADDRESS_THERE, address).replace(DEVICE_THERE, device)
            for line in step.lines
        ]
        shell.run(Step(command, lines))
    shell.end()


def test_each_program_is_on_a_page() -> None:
    commands = " ".join(step.command for steps in conversations() for step in steps)
    for name in (
        "stream_echo", "tls_echo", "aiohttp_hello", "httpx_get", "switched", "kv",
        "parameter_server", "copy_file", "chat",
    ):  # fmt: skip
        assert f"python examples/{name}.py" in commands
    for name in ("cp", "perf", "serve"):
        assert f"aiordma {name}" in commands
