"""Run the stages of ``make test`` and end with one table that hides nothing.

Usage: ``tools/run_tests.py [--list] [STAGE...] [-- PYTEST OPTION...]``. Without a name every stage
runs, three at a time. Each has a limit in real time; a failed one does not stop the next. Output
and JUnit files are kept in build/test. The exit status is 0 only if every stage passed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO

from checks import ROOT, Counts, read_counts, read_failures
from stages import REPORTS, STAGES, Stage
from systems import ABSENT, MARKS

#: Between the request to end and the kill of a stage that is over its limit.
GRACE_S = 15.0
#: How many stages run at a time.
LANES = 3
#: Exit statuses of pytest that the counts tell better.
PYTEST_FAILED, PYTEST_NO_TESTS = "exit status 1", "exit status 5"
_TAIL_LINES = 60
#: Failed tests that the end of a run names; the rest are in the logs.
_NAMED = 12
_running: set[subprocess.Popen[bytes]] = set()


@dataclass(frozen=True, slots=True)
class Result:
    """How a stage ended.

    Attributes:
        stage: the stage.
        counts: of its tests; a stage without tests of its own counts as one.
        seconds: of real time.
        problem: why it failed, or an empty text.
        absent: why it could not run here, which is no failure, or an empty text.
        note: what it ran with, in the words of its command.
    """

    stage: Stage
    counts: Counts
    seconds: float
    problem: str = ""
    absent: str = ""
    note: str = ""


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and everything it started, softly and then by force."""
    for number, wait_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)
            if number == signal.SIGKILL:
                return


def copy_output(source: IO[bytes], log: IO[bytes], tail: deque[bytes], *, show: bool) -> None:
    """Copy lines to the log and the tail, and to the standard output if ``show``."""
    for line in source:
        log.write(line)
        log.flush()
        tail.append(line)
        if show:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()


def run_command(stage: Stage, options: Sequence[str], *, show: bool) -> str:
    """Run the command of a stage and return what went wrong, or an empty text."""
    # Stages run side by side, and guests see the machine's files: where two of pytest tidy up one
    # folder, each stumbles over what the other removes.
    with tempfile.TemporaryDirectory(prefix="aiordma-", ignore_cleanup_errors=True) as scratch:
        return run_with(stage, options, {"PYTEST_DEBUG_TEMPROOT": scratch}, show=show)


def run_with(
    stage: Stage, options: Sequence[str], variables: Mapping[str, str], *, show: bool
) -> str:
    """Run it with these environment variables."""
    command = [*stage.command, *(options if stage.pytest else ())]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **variables, **stage.env}
    # Whatever the user's habit: a guest, and each program that it starts, is slow to compile.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    tail: deque[bytes] = deque(maxlen=_TAIL_LINES)
    with (ROOT / stage.log).open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        _running.add(process)
        assert process.stdout is not None
        copier = threading.Thread(
            target=copy_output, args=(process.stdout, log, tail), kwargs={"show": show}, daemon=True
        )
        copier.start()
        problem = ""
        try:
            status = process.wait(stage.limit_s)
            if status:
                problem = f"exit status {status}"
        except subprocess.TimeoutExpired:
            problem = f"still running after {stage.limit_s:.0f} s, killed"
        finally:
            # Nothing of a stage outlives it, even where the command itself has ended: a process
            # left behind would hold the pipe, a port or a device.
            end_group(process)
            _running.discard(process)
        copier.join(GRACE_S)
        if copier.is_alive():
            problem = problem or "a process that it started left its group and is still running"
        if problem and not show:
            sys.stdout.buffer.write(b"".join(tail))
            if tail and not tail[-1].endswith(b"\n"):
                sys.stdout.buffer.write(b"\n")  # it was killed in the middle of a line
            sys.stdout.flush()
    return problem


def read_note(stage: Stage) -> str:
    """Return what a stage says of its system at the beginning of its log, or an empty text."""
    with (ROOT / stage.log).open(errors="replace") as log:
        for line in log:
            for mark in MARKS:
                if line.startswith(mark):
                    return line.removeprefix(mark).strip()
    return ""


def judge(stage: Stage, problem: str) -> tuple[Counts, str]:
    """Return the counts of a stage that ran, and what is wrong with it, if anything."""
    if not stage.report:
        return (Counts(failed=1), problem) if problem else (Counts(passed=1), "")
    counts = read_counts(ROOT / stage.junit)
    if counts is None:
        return Counts(failed=1), problem or "it wrote no report"
    if not problem and stage.must_run and counts.skipped:
        problem = f"{counts.skipped} skipped: nothing may be skipped here"
    if counts.ran == 0 and problem in {"", PYTEST_NO_TESTS}:
        problem = "no test ran"
    if counts.failed and problem in {"", PYTEST_FAILED}:
        problem = f"{counts.failed} failed"
    if problem and not counts.failed:
        # A stage that fails without a failed test is a failure all the same.
        counts += Counts(failed=1)
    return counts, problem


def run_stage(stage: Stage, options: Sequence[str], *, show: bool, broken: str = "") -> Result:
    """Run one stage to its end or its limit."""
    started = time.monotonic()
    (ROOT / stage.junit).unlink(missing_ok=True)
    if broken:
        problem = f"not run: stage {broken} failed"
    elif not (ROOT / stage.needs).exists():
        problem = f"not run: there is no {stage.needs}"
    else:
        print(f"\n=== {stage.name}: {stage.about}", flush=True)
        if show:
            print(f"    {shlex.join([*stage.command])}", flush=True)
        problem = run_command(stage, options, show=show)
        seconds = time.monotonic() - started
        note = read_note(stage)
        if problem == f"exit status {ABSENT}":
            print(f"=== {stage.name} absent: {note}", flush=True)
            return Result(stage, Counts(), seconds, absent=note or problem)
        counts, problem = judge(stage, problem)
        verdict = f"FAILED: {problem}" if problem else "passed"
        print(f"=== {stage.name} {verdict} ({seconds:.1f} s)", flush=True)
        return Result(stage, counts, seconds, problem, note=note)
    print(f"\n=== {stage.name} FAILED: {problem}", flush=True)
    return Result(stage, Counts(failed=1), time.monotonic() - started, problem)


def run_all(stages: Sequence[Stage], options: Sequence[str]) -> list[Result]:
    """Run the stages in their order, three at a time.

    A guest uses one core, and waits for a third of its time: CI's machine has two cores.

    A stage that comes after another waits for it; it stands behind it in the list, so that what
    it waits for has been started.
    """
    futures: dict[str, Future[Result]] = {}

    def run(stage: Stage) -> Result:
        needed = futures.get(stage.after)
        broken = stage.after if needed is not None and needed.result().problem else ""
        # Shown as it comes where there is time to wonder: the kernel takes minutes.
        show = stage.name == "kernel" or len(stages) == 1
        return run_stage(stage, options, show=show, broken=broken)

    with ThreadPoolExecutor(LANES) as pool:
        for stage in stages:
            futures[stage.name] = pool.submit(run, stage)
        return [future.result() for future in futures.values()]


def print_table(results: Sequence[Result], left_out: Sequence[Stage], seconds: float) -> Counts:
    """Print the summary and return the sum; its last line is the sum in plain words."""
    heads = ("passed", "failed", "skipped", "xfailed", "seconds")
    print(f"\n{'stage':<22}{'result':<8}" + "".join(f"{head:>9}" for head in heads))
    total = Counts()
    for result in results:
        if result.absent:
            print(f"{result.stage.name:<22}{'absent':<8}  {result.absent}")
            continue
        counts, total = result.counts, total + result.counts
        numbers = (counts.passed, counts.failed, counts.skipped, counts.xfailed)
        line = f"{result.stage.name:<22}{'FAIL' if result.problem else 'ok':<8}"
        line += "".join(f"{number:>9}" for number in numbers) + f"{result.seconds:>9.1f}"
        print("  ".join(filter(None, (line, result.problem, result.note))))
    for stage in left_out:
        print(f"{stage.name:<22}{'absent':<8}  there is no {stage.optional}")
    print(f"{seconds:.0f} s in all; logs and JUnit files: {REPORTS}/")
    if total.xfailed:
        print(f"{total.xfailed} failed as expected (xfail)")
    # The names stand at the end: a viewer of a long log shows its last lines first.
    failures = [
        f"FAILED {result.stage.name}: {line}"
        for result in results
        if result.problem
        for line in read_failures(ROOT / result.stage.junit) or [result.problem]
    ]
    for line in failures[:_NAMED]:
        print(line)
    if len(failures) > _NAMED:
        print(f"... and {len(failures) - _NAMED} more: see the logs")
    print(f"{total.passed} passed, {total.failed} failed, {total.skipped} skipped", flush=True)
    return total


def choose(names: Sequence[str]) -> list[Stage]:
    """Return the stages of these names in their usual order; all without a name."""
    known = {stage.name for stage in STAGES}
    unknown = [name for name in names if name not in known]
    if unknown:
        sys.exit(f"no such stage: {', '.join(unknown)}. See: tools/run_tests.py --list")
    return [stage for stage in STAGES if not names or stage.name in names]


def interrupt(_number: int, _frame: object) -> None:
    """End every stage, and the run."""
    for process in list(_running):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
    os.write(1, b"\ninterrupted: the results are not complete\n")
    os._exit(130)


def main() -> int:
    """Run what the command line asks for and return the exit status."""
    parser = argparse.ArgumentParser(description="Run the stages of make test.")
    parser.add_argument("--list", action="store_true", help="name the stages and end")
    parser.add_argument("stages", nargs="*", metavar="STAGE", help="only these")
    arguments = sys.argv[1:]
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    namespace = parser.parse_args(arguments[:cut])
    chosen = choose(namespace.stages)
    if namespace.list:
        for stage in chosen:
            print(f"{stage.name:<22}{stage.about}")
        return 0
    left_out = [stage for stage in chosen if not (ROOT / stage.optional).exists()]
    if not namespace.stages:
        shutil.rmtree(ROOT / REPORTS, ignore_errors=True)
    (ROOT / REPORTS).mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, interrupt)
    started = time.monotonic()
    results = run_all([s for s in chosen if s not in left_out], arguments[cut + 1 :])
    print_table(results, left_out, time.monotonic() - started)
    return 1 if any(result.problem for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
