"""Run seeds: `python -m tests.simulation.run [--first N] [--count N] [--system NAME]`.

Each seed runs twice, and the second run must be the first one again.  What fails is printed, and
written to a file below build/simulation that `--replay` runs again and `--shrink` makes smaller.

A run fails if what a call was told is not true, a call does not end within its bound of virtual
time, the library logs an error or a warning where nothing may fail, objects are left, or an event
was lost that no fault has taken.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import faulthandler
import gc
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.simulation.world import Case, World

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FAILURES = ROOT / "build" / "simulation"
#: Seconds of the virtual clock in which every system has to end, and of the true one for one run:
#: an endless loop ends the process.
BOUND_S, REAL_S = 1000.0, 60
#: Set in the process that simulates: the preloaded clock is there.  A file with the case that runs.
_INSIDE = "AIORDMA_SIMULATION"
PASSED, FAILED = 0, 1


@dataclass
class Outcome:
    """Of one run."""

    digest: str
    steps: int
    faults: str
    error: str = ""
    drawn: dict[str, int] = dataclasses.field(default_factory=dict)


class _Errors(logging.Handler):
    """Keeps what the library and asyncio report, and what nobody could raise."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        #: Those that no fault excuses.
        self.grave: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one."""
        text = self.format(record)
        # CPython 3.11 asks a canceled task of a stream for its exception.
        if "StreamReaderProtocol" in text and text.endswith("CancelledError"):
            return
        # asyncio reports what somebody has forgotten: an exception, a task.
        # A queue that cannot be polled or armed is told to the loop, and ends its connections.
        failed = "EIO" in text and "dispatching a completion" in text
        kept = self.grave if record.name == "asyncio" and not failed else self.lines
        kept.append(text)

    def _unraisable(self, args: sys.UnraisableHookArgs) -> None:
        self.grave.append(f"unraisable: {args.exc_value!r} in {args.object!r}: {args.err_msg}")

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep what is reported in the block."""
        logging.getLogger().addHandler(self)
        hook, sys.unraisablehook = sys.unraisablehook, self._unraisable
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                yield
        finally:
            sys.unraisablehook = hook
            logging.getLogger().removeHandler(self)


def _lost_events() -> int:
    from aiordma.verbs import CompletionChannel

    return CompletionChannel.all_lost_events


def run_once(case: Case) -> Outcome:
    """Run a system in a world of its own."""
    from tests.simulation import faults
    from tests.simulation.loop import run
    from tests.simulation.systems import SYSTEMS

    world = World(case)
    errors = _Errors()
    told, failure, lost = "", None, _lost_events()

    async def bounded() -> None:
        nonlocal failure
        async with asyncio.timeout(BOUND_S) as scope:
            try:
                await SYSTEMS[case.system](world)
            finally:
                if scope.expired():
                    failure = f"the system has not ended after {BOUND_S} s"
                world.end()

    with errors.kept():
        try:
            with world:
                told = faults.choose(world)
                run(world, bounded())
                gc.collect()
        except KeyboardInterrupt:
            raise
        except BaseException as exc:
            failure = failure or _failure(world, exc)
        gc.collect()
    failure = failure or _complaints(world, errors, _lost_events() - lost)
    return Outcome(world.digest, world.steps, told, failure, world.drawn)


def _failure(world: World, exc: BaseException) -> str:
    from tests.simulation.common import is_broken

    # A server may not come up, where a call may fail.
    if world.may_break and is_broken(world, exc):
        return ""
    return "".join(traceback.format_exception(exc))


def _complaints(world: World, errors: _Errors, lost_events: int) -> str:
    """What was wrong with a run whose calls were told nothing wrong."""
    if world.wrong:
        return "wrong: " + "; ".join([*world.wrong, *errors.lines])
    if left := world.left():
        return f"left: {left}"
    if errors.grave:
        return "reported: " + "\n".join(errors.grave)
    lines = [line for line in errors.lines if not any(text in line for text in world.may_log)]
    if lines and not (world.may_break or world.may_lose_events):
        return "logged: " + "\n".join(lines)
    if world.misuses():
        return "a queue was polled or armed while another thread destroyed it"
    if world.overruns() and not (world.may_delay or world.may_overrun):
        return "a message has found no receive: somebody had a credit too many"
    if lost_events and not world.may_lose_events:
        return f"{lost_events} completions that no event had told of"
    return ""


def simulate(cases: Iterable[Case], *, twice: bool, stop: bool, shrunk: bool = False) -> int:
    """Run cases; the exit status."""
    began, steps, failed, kinds = time.perf_counter(), 0, 0, Counter[str]()
    current = Path(os.environ[_INSIDE])
    faulthandler.enable()
    faulthandler.register(signal.SIGALRM, chain=True)  # and the signal ends the process
    gc.disable()  # it runs when the seed says so, and not by the number of objects
    current.write_text(json.dumps(dataclasses.asdict(Case("echo", 0))))
    run_once(Case("echo", 0))  # what is made once in a process is no part of a run
    gc.freeze()
    for case in cases:
        current.write_text(json.dumps(dataclasses.asdict(case)))
        signal.setitimer(signal.ITIMER_REAL, REAL_S)
        first = run_once(case)
        steps += first.steps
        kinds[case.system] += 1
        error = first.error
        if twice and not error:
            second = run_once(case)
            if (first.digest, first.steps) != (second.digest, second.steps):
                error = f"the second run was another one: {second.steps} steps, not {first.steps}"
        if error:
            failed += 1
            report(case, f"({first.faults}): {error}", first.drawn, write=not shrunk)
            gc.collect()
            if stop:
                break
    signal.setitimer(signal.ITIMER_REAL, 0)
    current.unlink(missing_ok=True)
    seconds = time.perf_counter() - began
    told = ", ".join(f"{count} {name}" for name, count in sorted(kinds.items()))
    how = "twice each" if twice else "once each"
    print(f"{kinds.total()} seeds, {how} ({told}): {steps} steps, {failed} failed, {seconds:.0f} s")
    return FAILED if failed else PASSED


def report(case: Case, error: str, drawn: dict[str, int], *, write: bool = True) -> None:
    """Tell of a failure, and write the file that replays it."""
    print(f"FAILED {case.system}, seed {case.seed} {error}")
    if write:
        FAILURES.mkdir(parents=True, exist_ok=True)
        file = FAILURES / f"{case.system}-{case.seed}.json"
        file.write_text(json.dumps(dataclasses.asdict(case) | {"drawn": drawn}, indent=1) + "\n")
        print(f"  again: python -m tests.simulation.run --replay {file.relative_to(ROOT)}")
    else:
        print(f"drawn {json.dumps(drawn)}")
    sys.stdout.flush()


def read(file: Path) -> tuple[Case, dict[str, int]]:
    """A case out of the file of a failure, and the largest choices that were made in it."""
    values = json.loads(file.read_text())
    drawn = values.pop("drawn", {})
    return Case(**values), drawn


def enter(arguments: list[str], *, quiet: bool = False) -> tuple[int, str, Case | None]:
    """Compile the clock, and run this program again with it, over the fabric.

    Returns:
        The exit status, the output, if it is not shown, and the case that has ended the process.
    """
    from aiordma_fabric import environment

    with tempfile.TemporaryDirectory() as folder:
        clock, current = Path(folder, "clock.so"), Path(folder, "case")
        compiler = os.environ.get("CC", "gcc")
        options = ("-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror")
        subprocess.run((compiler, *options, HERE / "clock.c", "-o", clock), check=True)
        variables = os.environ | environment(folder, devices=2)
        # One process, and no run of several.
        del variables["AIORDMA_FABRIC"]
        variables |= {"LD_PRELOAD": str(clock), "PYTHONHASHSEED": "0", _INSIDE: str(current)}
        words = (sys.executable, "-m", "tests.simulation.run", *arguments)
        done = subprocess.run(
            words,
            env=variables,
            cwd=ROOT,
            check=False,
            text=True,
            stdout=subprocess.PIPE if quiet else None,
            stderr=subprocess.STDOUT if quiet else None,
        )
        case = read(current)[0] if current.exists() else None
        return done.returncode, done.stdout or "", case


def run_all(arguments: list[str], first: int, count: int) -> int:
    """Run all seeds, although some end the process: in an endless loop, or by a crash."""
    result, end = PASSED, first + count
    while first < end:
        words = [*arguments, f"--first={first}", f"--count={end - first}"]
        status, _, case = enter(words)
        if case is None:
            return status or result
        result = FAILED
        report(case, f"(it has ended the process with status {status})", {})
        if "--stop" in arguments:
            return result
        first = case.seed + 1
    return result


def main() -> int:
    """Run what the command line says; the exit status."""
    parser = argparse.ArgumentParser(description="Simulate systems on the fabric.")
    parser.add_argument("--first", type=int, default=1, metavar="N", help="the first seed [1]")
    parser.add_argument("--count", type=int, default=2000, metavar="N", help="how many [2000]")
    parser.add_argument("--system", metavar="NAME", help="this one only")
    parser.add_argument("--once", action="store_true", help="run no seed a second time")
    parser.add_argument("--stop", action="store_true", help="end at the first failure")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="run a failure again")
    parser.add_argument("--shrink", type=Path, metavar="FILE", help="make a failure smaller")
    options = parser.parse_args()
    flags = [word for word in ("once", "stop") if getattr(options, word)]
    arguments = [f"--{word}" for word in flags]
    if options.shrink:
        from tests.simulation.shrink import shrink

        return shrink(options.shrink)
    if _INSIDE not in os.environ:
        if options.replay:
            return enter([f"--replay={options.replay.resolve()}", *arguments])[0]
        if options.system:
            arguments.append(f"--system={options.system}")
        return run_all(arguments, options.first, options.count)
    if options.replay:
        case, _ = read(options.replay)
        return simulate([case], twice=not options.once, stop=True, shrunk=True)
    from tests.simulation.systems import SYSTEMS

    names = [options.system] if options.system else list(SYSTEMS)
    seeds = range(options.first, options.first + options.count)
    cases = (Case(names[seed % len(names)], seed) for seed in seeds)
    return simulate(cases, twice=not options.once, stop=options.stop)


if __name__ == "__main__":
    sys.exit(main())
