"""Runs jobs in a guest whose clock counts instructions, and keeps what they printed.

Every step's output goes to a file as soon as it is there, so that a bench that was ended can be
looked at, and reported again without running it.  A step that does not end within `STALL_S` of
real time has failed; the rest goes on in a new guest.

A job that is not counted runs over the fabric, by the clock of this machine, and is left out if
others use it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiordma_softroce.qemu import MORE, prepare
from tests.bench.guest import MARK
from tests.bench.jobs import ONE_SIDED, Job
from tests.bench.parse import PARSERS

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ONE_SIDED.parent
STALL_S = 300.0
#: A busy host can make a guest's set-up too slow for its own limits; its clock jumps meanwhile.
BOOTS = 3
#: The machine is idle if no more than this part of its processors is used, for so many seconds.
IDLE_PART, IDLE_S = 0.1, 2.0
#: Where the fabric has its device, for what is not counted.
LOOPBACK = "127.0.0.1"
_LIBRARY = ("-shared", "-fPIC", "-fvisibility=hidden")
#: What is made of each file in C, and with what beside the flags that all have.
_PROGRAMS: Mapping[str, Sequence[str]] = {
    "one_sided": ("one_sided", "-lrdmacm", "-libverbs"),
    "connecting": ("connecting", "-lrdmacm", "-libverbs"),
    "instructions": ("instructions.so", *_LIBRARY),
    "accesses": ("accesses.so", *_LIBRARY),
    "marks": ("marks.so", "-shared", "-fPIC"),
    "floors": (
        *("floors.so", *_LIBRARY, f"-I{sysconfig.get_path('include')}", "-lrdmacm", "-libverbs"),
    ),
}


@dataclass
class Measured:
    """What a run has found.

    Attributes:
        results: All rounds of each figure, by job and name.
        failures: What went wrong, a line each.
        versions: What the instructions depend on.
    """

    results: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)

    def merge(self, other: Measured) -> None:
        """Take over what another run has found."""
        self.results |= other.results
        self.failures += other.failures
        self.versions = self.versions or other.versions

    def add(self, job: Job, line: dict[str, Any]) -> None:
        """Parse what one step has printed."""
        if line["error"]:
            said = [line[role][-300:] for role in ("client", "server") if line.get(role)]
            self.failures.append(": ".join((job.name, line["error"], *said)))
            return
        try:
            figures = PARSERS[job.parse](line["client"])
        except (ValueError, KeyError, TypeError) as error:
            self.failures.append(f"{job.name}: {error!r}")
            return
        for name, values in figures.items():
            self.results.setdefault((job.name, name), []).extend(values)


def steps(jobs: list[Job], rounds: int | None = None) -> list[dict[str, Any]]:
    """All rounds of all jobs, in turn: what disturbs one round disturbs all jobs alike."""
    most = max(job.rounds for job in jobs)
    return [
        job.plan() | {"number": number}
        for number in range(most)
        for job in jobs
        if number < (job.rounds if rounds is None else min(rounds, job.rounds))
    ]


def compile_programs(names: Iterable[str] = ("one_sided", "connecting", "floors")) -> None:
    """Make programs in C that belong to the bench.

    Raises:
        subprocess.CalledProcessError: The compiler refuses; it has said why.
    """
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in names:
        source = Path(__file__).with_name(f"{name}.c")
        result, *more = _PROGRAMS[name]
        flags = ("-O2", "-std=gnu11", "-Wall", "-Wextra", "-Werror")
        subprocess.run(("gcc", *flags, "-o", FOLDER / result, source, *more), check=True)


def guest_lines(
    plan: Path,
    stall_s: float,
    program: str = "guest",
    qemu: str = "",
    device: str = "rxe",
    *,
    counted: bool = True,
) -> Iterator[dict[str, Any]]:
    """Boot a guest, or make a fabric, run the plan there, and yield what it tells.

    Args:
        plan: What the guest is to do.
        stall_s: How long it may say nothing.
        program: What does it: a module of this package.
        qemu: More words for QEMU.
        device: The software adapter of the guest.
        counted: Whether it is a guest, whose clock counts instructions.
    """
    if counted:
        there = ["aiordma_softroce", "--engine", "qemu", "--counted", "--device", device]
        there += ["--timeout", "7200"]
    else:
        there = ["aiordma_fabric", f"--addresses={LOOPBACK}"]
    inside = (sys.executable, "-m", f"tests.bench.{program}", str(plan))
    command = (sys.executable, "-m", *there, "--", *inside)
    environment = {**os.environ, MORE: f"{os.environ.get(MORE, '')} {qemu}"}
    if not counted:
        environment["AIORDMA_SOFTROCE_ADDR"] = LOOPBACK
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        rest = b""
        try:
            while select.select([process.stdout], [], [], stall_s)[0]:
                chunk = os.read(process.stdout.fileno(), 1 << 16)
                if not chunk:
                    return
                *lines, rest = (rest + chunk).split(b"\n")
                for text in lines:
                    line = text.decode(errors="replace").rstrip("\r")
                    if line.startswith(MARK):
                        yield json.loads(line.removeprefix(MARK))
                    else:
                        print(line, flush=True)
        finally:
            process.send_signal(signal.SIGTERM)


def run(
    jobs: list[Job],
    measured: Measured,
    raw: Path,
    *,
    rounds: int | None = None,
    stall_s: float = STALL_S,
) -> None:
    """Run all jobs, those of each device and clock in guests of their own; `raw` gets every line.

    Raises:
        subprocess.CalledProcessError: A program in C cannot be made.
    """
    compile_programs()
    for device, counted in dict.fromkeys((job.device, job.counted) for job in jobs):
        there = [job for job in jobs if (job.device, job.counted) == (device, counted)]
        if counted:
            prepare(device)
        elif (used := used_part()) > IDLE_PART:
            names = ", ".join(job.name for job in there)
            print(f"not measured, as {used:.0%} of this machine is in use: {names}", flush=True)
            continue
        _run_on(device, counted, there, steps(there, rounds), measured, raw, stall_s)


def used_part(seconds: float = IDLE_S) -> float:
    """The part of this machine's processors that is in use, for so many seconds."""
    begun, ended = (_ticks(pause) for pause in (0.0, seconds))
    every, idle = (now - before for now, before in zip(ended, begun, strict=True))
    return 1 - idle / every if every else 0.0


def _ticks(pause: float) -> tuple[int, int]:
    """After a pause, the time of all processors since the boot, and that in which they idled."""
    time.sleep(pause)
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    return sum(ticks), ticks[3] + ticks[4]


def _run_on(
    device: str,
    counted: bool,
    jobs: list[Job],
    left: list[dict[str, Any]],
    measured: Measured,
    raw: Path,
    stall_s: float,
) -> None:
    by_name = {job.name: job for job in jobs}
    plan = raw.with_suffix(".plan.json")
    began = time.monotonic()
    boots = 0

    def fail(step: dict[str, Any], error: str) -> None:
        line = {"name": step["name"], "number": step["number"], "error": error}
        measured.add(by_name[step["name"]], line)
        with raw.open("a") as kept:
            kept.write(json.dumps(line) + "\n")

    while left:
        boots += 1
        plan.write_text(json.dumps(left))
        with raw.open("a", buffering=1) as kept:  # each line at once
            for line in guest_lines(plan, stall_s, device=device, counted=counted):
                if "versions" in line:
                    boots = 0
                    if not counted:  # they are those of what is counted
                        continue
                    measured.versions = line["versions"]
                kept.write(json.dumps(line) + "\n")
                if "versions" in line:
                    continue
                left.pop(0)
                measured.add(by_name[line["name"]], line)
                text = f"{time.monotonic() - began:6.0f} s  {line['name']} {line['error']}"
                print(text.rstrip(), flush=True)
        if boots == BOOTS:
            fail(left[0], "the guest does not start")
            return
        if left and not boots:
            fail(left.pop(0), "did not end, or ended the guest")


def read(raw: Path, jobs: list[Job]) -> Measured:
    """The same out of the lines that an earlier run has kept."""
    measured = Measured()
    by_name = {job.name: job for job in jobs}
    for text in raw.read_text().splitlines():
        line = json.loads(text)
        if "versions" in line:
            measured.versions = line["versions"]
        elif line["name"] in by_name:
            measured.add(by_name[line["name"]], line)
    return measured
