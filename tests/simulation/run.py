"""Run seeds: `python -m tests.simulation.run [--first N] [--count N] [--system NAME]`.

Each seed runs twice, and the second run must be the first one again.  What fails is printed with
the command that repeats it.  A run fails if an assertion of its system does, a call does not end
within a bound of virtual time, the library logs an error or a warning, or objects are left.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
#: Seconds of the virtual clock in which every system has to end.
BOUND_S = 1000.0
#: Set in the process that simulates: the preloaded clock is there.
_INSIDE = "AIORDMA_SIMULATION"


@dataclass
class Outcome:
    """Of one run."""

    digest: str
    steps: int
    faults: str
    error: str = ""


class _Errors(logging.Handler):
    """Keeps what the library and asyncio report."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one."""
        self.lines.append(self.format(record))


def run_once(name: str, seed: int) -> Outcome:
    """Run a system in a world of its own."""
    from tests.simulation import faults
    from tests.simulation.loop import run
    from tests.simulation.systems import SYSTEMS, is_broken
    from tests.simulation.world import World

    world = World(seed)
    errors = _Errors()
    error = told = ""

    late = False

    async def bounded() -> None:
        nonlocal late
        async with asyncio.timeout(BOUND_S) as scope:
            try:
                await SYSTEMS[name](world)
            finally:
                late = scope.expired()
                world.end()

    logging.getLogger().addHandler(errors)
    try:
        with world:
            told = faults.choose(world)
            run(world, bounded())
            gc.collect()
        if left := world.left():
            error = f"left: {left}"
        elif errors.lines and not world.may_break:
            error = "logged: " + "\n".join(errors.lines)
    except BaseException as exc:
        if isinstance(exc, KeyboardInterrupt):
            raise
        # A server may not come up, where a call may fail.
        if late or not (world.may_break and is_broken(exc)):
            error = "".join(traceback.format_exception(exc))
    finally:
        logging.getLogger().removeHandler(errors)
    return Outcome(world.digest, world.steps, told, error)


def simulate(names: list[str], seeds: range) -> int:
    """Run seeds, each with a system; the exit status."""
    began, steps, failed, kinds = time.perf_counter(), 0, 0, Counter[str]()
    gc.disable()  # it runs when the seed says so, and not by the number of objects
    run_once(names[0], 0)  # what is made once in a process is no part of a run
    for seed in seeds:
        name = names[seed % len(names)]
        first = run_once(name, seed)
        second = run_once(name, seed)
        steps += first.steps
        kinds[name] += 1
        error = first.error
        if not error and (first.digest, first.steps) != (second.digest, second.steps):
            error = f"the second run was another one: {second.steps} steps, not {first.steps}"
        if error:
            failed += 1
            print(f"FAILED {name}, seed {seed} ({first.faults}): {error}")
            words = f"--first {seed} --count 1 --system {name}"
            print(f"  again: python -m tests.simulation.run {words}")
            gc.collect()
    seconds = time.perf_counter() - began
    told = ", ".join(f"{count} {name}" for name, count in sorted(kinds.items()))
    what = f"{len(seeds)} seeds, twice each ({told}): {steps} steps"
    print(f"{what}, {failed} failed, {seconds:.0f} s")
    return 1 if failed else 0


def enter() -> int:
    """Compile the clock, and run this program again with it, over the fabric."""
    from aiordma_fabric import environment

    with tempfile.TemporaryDirectory() as folder:
        clock = Path(folder, "clock.so")
        compiler = os.environ.get("CC", "gcc")
        options = ("-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror")
        subprocess.run((compiler, *options, HERE / "clock.c", "-o", clock), check=True)
        variables = os.environ | environment(folder)
        # One process, and no run of several.
        del variables["AIORDMA_FABRIC"]
        variables |= {"LD_PRELOAD": str(clock), "PYTHONHASHSEED": "0", _INSIDE: "1"}
        words = (sys.executable, "-m", "tests.simulation.run", *sys.argv[1:])
        return subprocess.run(words, env=variables, cwd=ROOT, check=False).returncode


def main() -> int:
    """Run what the command line says; the exit status."""
    parser = argparse.ArgumentParser(description="Simulate systems on the fabric.")
    parser.add_argument("--first", type=int, default=1, metavar="N", help="the first seed [1]")
    parser.add_argument("--count", type=int, default=2000, metavar="N", help="how many [2000]")
    parser.add_argument("--system", metavar="NAME", help="this one only")
    options = parser.parse_args()
    if _INSIDE not in os.environ:
        return enter()
    from tests.simulation.systems import SYSTEMS

    names = [options.system] if options.system else list(SYSTEMS)
    return simulate(names, range(options.first, options.first + options.count))


if __name__ == "__main__":
    sys.exit(main())
